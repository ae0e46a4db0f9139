"""log.jsonl: one JSON object a logged step, beside the event files, for programs that read no TensorBoard."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

JOURNAL = "log.jsonl"


class Journal:
    """Appends lines. Numbers that are not finite are the strings "nan", "inf" and "-inf": JSON has none."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        """last_step: the last that stays; what an earlier process wrote after it is cut off."""
        path = folder / JOURNAL
        if path.exists():
            with path.open("r+b") as file:
                file.truncate(_end(file, last_step))
        self.file = path.open("a", encoding="utf-8", buffering=1)  # a line at once, for whoever watches

    def close(self) -> None:
        self.file.close()

    def write(self, step: int, **facts: Any) -> None:
        facts |= {"time": round(time.time(), 3)}  # seconds since 1970
        said = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in facts.items()}
        self.file.write(json.dumps({"step": step, **said}) + "\n")


def _end(file: Any, step: int) -> int:
    """Where the first line of a later step, or the first that is not whole, begins."""
    end = 0
    for line in file:
        try:
            if json.loads(line)["step"] > step or not line.endswith(b"\n"):
                break
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        end += len(line)
    return end
