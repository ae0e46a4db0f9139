"""Text tables for a terminal."""

from __future__ import annotations


def aligned(rows: list[tuple[str, ...]]) -> str:
    """The rows for a terminal: columns padded, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        padded = [text.ljust(width) if i in (0, last) else text.rjust(width) for i, (text, width) in cells]
        lines.append("   ".join(padded).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
