"""Uniform registers that a kernel reads on a path on which nothing has written them: a mistake of the compiler.

ptxas 12.8 makes such code where two loops multiply the same operand in shared memory: it computes the descriptors of
`wgmma` before the first loop alone, within what is skipped if that loop does not turn.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import triton


class _Instruction(NamedTuple):
    reads: frozenset[int]
    writes: frozenset[int]
    targets: tuple[str, ...]
    goes_on: bool
    moves: bool  # does nothing but copy


def read_unwritten(cubin: Path) -> list[str]:
    """Names of the registers, in order; `cubin` holds one kernel for sm_90."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    code, labels = _parse(text)
    return [f"UR{number}" for number in sorted(_live_at_entry(code, labels))]


def _parse(text: str) -> tuple[list[_Instruction], dict[str, int]]:
    code, labels = [], {}
    for part in re.findall(r"^\.L\w+:|/\*[0-9a-f]{4,}\*/[^;]+;", text, re.MULTILINE):
        if part.startswith(".L"):
            labels[part[:-1]] = len(code)
        else:
            code.append(_instruction(part.split("*/", 1)[1].strip()))
    return code, labels


def _instruction(text: str) -> _Instruction:
    guard, text = re.match(r"(@!?U?P\w+ +)?(.*)", text, re.DOTALL).groups()
    name, _, operands = text.partition(" ")
    numbers = [int(number) for number in re.findall(r"\bUR(\d+)\b", operands)]
    writes = set()
    makes_uniform = name.startswith(("U", "R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")) and not name.startswith("UTMA")
    if makes_uniform and re.match(r"\s*(UP\w+, *|P\w+, *)?UR\d+\b", operands):
        first = numbers.pop(0)
        writes = {first, first + 1} if ".64" in name or ".WIDE" in name else {first}
    reads = set(numbers)
    if ".64" in name and name.startswith("U"):
        reads |= {number + 1 for number in numbers}
    for number in re.findall(r"gdesc\[UR(\d+)\]", operands):
        first, a_in_registers = int(number), re.search(r", R\d+(\.reuse)?, gdesc", operands)
        reads = reads - {first} | set(range(first + 2 if a_in_registers else first, first + 4))
    jumps = name.startswith(("BRA", "BRX"))
    conditional = guard is not None or bool(re.match(r"\s*!?U?P\d", operands)) or ".DIV" in name
    ends = name.startswith(("EXIT", "BRX", "RET")) or (name.startswith("BRA") and not conditional)
    targets = tuple(re.findall(r"\.L\w+", operands)) if jumps else ()
    # What is written under a condition is read under the same one: taken as written.
    return _Instruction(frozenset(reads), frozenset(writes), targets, conditional or not ends, name == "UMOV")


def _live_at_entry(code: list[_Instruction], labels: dict[str, int]) -> frozenset[int]:
    live: list[frozenset[int]] = [frozenset()] * (len(code) + 1)
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(code))):
            one = code[i]
            after = set(live[i + 1]) if one.goes_on else set()
            for target in one.targets:
                after |= live[labels[target]]
            wanted = not one.moves or one.writes & after  # half a pair may be copied that is never used
            now = (one.reads if wanted else frozenset()) | (after - one.writes)
            if now != live[i]:
                live[i], changed = frozenset(now), True
    return live[0]
