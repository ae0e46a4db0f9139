"""What a run survives: `python -m tests.survival` hits training processes with every fault, and writes the table.

Exit code 1 if a single result was wrong. `make survive` writes docs/survival.md.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sagebwd import machine
from tests.survival import faults
from tests.survival.arena import EVERY, STEPS, Arena, Tally

FEW = 50  # SIGKILLs in the test suite


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.survival", description=__doc__)
    parser.add_argument("--kills", type=int, default=FEW, help="SIGKILLs, half of them inside a save [50]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name holds this, or one of several (a,b)")
    parser.add_argument("--table", type=Path, help="write the table to this Markdown file")
    arguments = parser.parse_args()
    # It warns of each restart that purges points, by design.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    began, tallies = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="survival-") as root:
        for tally in hit(Path(root), arguments.kills, arguments.seed, arguments.only):
            print(f"{_row(tally)}   ({time.monotonic() - began:.0f} s)", flush=True)
            for wrong in tally.wrong:
                print(f"  WRONG: {wrong}", flush=True)
            tallies.append(tally)
    if arguments.table:
        arguments.table.write_text(_markdown(tallies, arguments.kills, time.monotonic() - began), encoding="utf-8")
    return int(any(tally.wrong for tally in tallies))


def hit(root: Path, kills: int, seed: int, only: str = "") -> Iterator[Tally]:
    """Every fault whose name holds `only`, one after the other; tries in proportion to `kills`."""
    generator, few = random.Random(seed), max(2, kills // 25)
    arena = Arena(root)
    arena.truth()

    def tally(fault: str) -> Tally | None:
        return Tally(fault) if any(part in fault for part in only.split(",")) else None

    if found := tally("SIGKILL at a random moment"):
        yield faults.killed(arena, found, kills // 2, faults.at_a_random_moment(arena), generator)
    if found := tally("SIGKILL inside a save"):
        yield faults.killed(arena, found, kills - kills // 2, faults.inside_a_save(arena), generator)
    if found := tally("SIGTERM at a random moment"):
        yield faults.preempted(arena, found, 2 * few, faults.signal.SIGTERM, generator)
    if found := tally("SIGUSR1 in a validation"):
        yield faults.preempted_in_validation(arena, found, min(few, 8))
    if found := tally("SIGTERM to one rank of two"):
        yield faults.one_rank_preempted(arena, found, few, generator)
    if found := tally("SIGKILL of one rank of two"):
        yield faults.one_rank_killed(arena, found, few, generator)
    if found := tally("one rank of two hangs (SIGSTOP)"):
        yield faults.one_rank_hangs(arena, found, 2)
    if found := tally("the newest checkpoint damaged: 5 ways, each file"):
        yield faults.damaged(arena, found, generator)
    if found := tally("a second run on the folder"):
        yield faults.two_on_one_folder(arena, found, few)
    if found := tally("disk full while it trains"):
        with faults.small_disk(root / "disk") as disk:
            if disk is None:
                found.fault += " (not tried: this process may not mount a file system)"
                yield found
            else:
                yield faults.disk_full(arena, found, few, disk, generator)


def _row(tally: Tally) -> str:
    lost = f"{sum(tally.lost) / tally.tries:.1f}, {max(tally.lost)} at most" if tally.tries else ""
    return f"| {tally.fault} | {tally.tries} | {lost} | {len(tally.wrong)} |"


def _markdown(tallies: list[Tally], kills: int, seconds: float) -> str:
    rows = "\n".join(map(_row, tallies))
    return f"""# What a run survives

| fault | tries | steps lost | wrong results |
|---|---:|---:|---:|
{rows}

Each try ends with the same command again, until the run is done, and a comparison with a run that nothing happened to:
every line of log.jsonl, every point of the event files (none twice, none missing), and the last checkpoint's
weights, moments and random states, byte for byte. *Steps lost*: done again, mean and most, at a checkpoint every
{EVERY} steps of {STEPS}; a hung rank and a full disk also have to be named as the cause.

Written by `make survive` ({kills} SIGKILLs, {seconds:.0f} s) at commit {machine.commit()} on a CPU with gloo, torch
{machine.versions()["torch"]}, Megatron-core {machine.versions()["megatron-core"]}.
"""


if __name__ == "__main__":
    sys.exit(main())
