"""What a run survives: `python -m tests.survival` hits training processes with every fault, and writes the table.

Exit code 1 if a single result was wrong. `make survive` writes docs/survival.md. Interrupted, it keeps what it has
counted, and the same command goes on.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from sagebwd import machine
from tests.survival import faults
from tests.survival.arena import EVERY, STEPS, Arena
from tests.survival.counts import Counts, Tally

FEW = 50  # SIGKILLs in the test suite
MISSES = 20  # rounds in a row in which every run was over before the fault: then something else is wrong
WORD_SECONDS = 60  # between two lines, where there is no terminal for a bar


@dataclass(frozen=True)
class Fault:
    name: str
    tries: int
    once: faults.Round


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.survival", description=__doc__)
    parser.add_argument("--kills", type=int, default=FEW, help="SIGKILLs, half of them inside a save [50]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name holds this, or one of several (a,b)")
    parser.add_argument("--table", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--counts", type=Path, help="keep here what was counted, and go on from what is there")
    arguments = parser.parse_args()
    # It warns of each restart that purges points, by design.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    tqdm.monitor_interval = 0  # its thread would not survive a fork
    owner = {"commit": machine.commit(), "kills": arguments.kills, "seed": arguments.seed}
    counts = Counts(arguments.counts, owner)
    if counts.tries:
        print(f"going on after {counts.tries} tries, from {arguments.counts}", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="survival-") as root:
            hit(Path(root), counts, arguments.kills, arguments.seed, arguments.only)
    except KeyboardInterrupt:
        print(
            f"interrupted after {counts.tries} tries"
            + (f", kept in {arguments.counts}: the same command goes on" if arguments.counts else ""),
            file=sys.stderr,
        )
        return 130
    tallies = list(counts.tallies.values())
    if arguments.table:
        arguments.table.write_text(_markdown(tallies, arguments.kills, counts.seconds), encoding="utf-8")
    counts.forget()
    return int(any(tally.wrong for tally in tallies))


def hit(root: Path, counts: Counts, kills: int, seed: int, only: str = "") -> None:
    """Every fault whose name holds `only`, one after the other, each until it has its tries."""
    wanted = [fault for fault in every_fault(kills, root) if any(part in fault.name for part in only.split(","))]
    arena = Arena(root)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    bar = tqdm(total=sum(fault.tries for fault in wanted), unit="try", disable=not sys.stderr.isatty())
    try:
        with bar:
            arena.truth()
            for fault in wanted:
                _until_tried(fault, arena, counts, seed, bar)
                tqdm.write(f"{_row(counts.of(fault.name))}   ({counts.seconds:.0f} s)", file=sys.stdout)
                sys.stdout.flush()
    finally:
        arena.end()


def every_fault(kills: int, root: Path) -> list[Fault]:
    """With tries in proportion to `kills`."""
    few = max(2, kills // 25)
    found = [
        Fault("SIGKILL at a random moment", kills // 2, faults.killed(faults.at_a_random_moment)),
        Fault("SIGKILL inside a save", kills - kills // 2, faults.killed(faults.inside_a_save)),
        Fault("SIGTERM at a random moment", 4 * few, faults.preempted),
        Fault("SIGUSR1 in a validation", few, faults.preempted_in_validation),
        Fault("SIGTERM to one rank of two", few, faults.one_rank_preempted),
        Fault("SIGKILL of one rank of two", few, faults.one_rank_killed),
        Fault("one rank of two hangs (SIGSTOP)", few, faults.one_rank_hangs),
        Fault(
            f"the newest checkpoint damaged: {len(faults.DAMAGES)} ways, each file",
            len(faults.DAMAGES) * len(faults.FILES) * max(1, kills // 100),
            faults.damaged,
        ),
        Fault("a second run on the folder", few, faults.two_on_one_folder),
    ]
    full, tries = "disk full while it trains", few
    with faults.small_disk(root / "a disk to try") as disk:
        if disk is None:
            full, tries = f"{full} (not tried: this process may not mount a file system)", 0
    return [*found, Fault(full, tries, faults.disk_full)]


def _until_tried(fault: Fault, arena: Arena, counts: Counts, seed: int, bar: tqdm) -> None:
    tally, said, missed = counts.of(fault.name), time.monotonic(), 0
    bar.set_description(fault.name)
    bar.update(tally.tries)
    while tally.tries < fault.tries:
        began, before, wrong = time.monotonic(), tally.tries, len(tally.wrong)
        fault.once(arena, tally, random.Random(f"{seed} {fault.name} {before} {missed}"))
        counts.seconds += time.monotonic() - began
        counts.keep()
        bar.update(tally.tries - before)
        for text in tally.wrong[wrong:]:
            tqdm.write(f"  WRONG: {text}", file=sys.stdout)
        missed = 0 if tally.tries > before or len(tally.wrong) > wrong else missed + 1
        if missed == MISSES:
            tally.wrong.append(f"in {MISSES} rounds no run was hit")
        if len(tally.wrong) > 3 or missed == MISSES:
            return
        if bar.disable and time.monotonic() - said > WORD_SECONDS:
            said = time.monotonic()
            print(f"{fault.name}: {tally.tries} of {fault.tries}, {len(tally.wrong)} wrong", flush=True)


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

Written by `make survive` ({kills} SIGKILLs, {seconds:.0f} s) at commit {machine.commit()},
{time.strftime("%Y-%m-%d")}, on {os.cpu_count()} cores of an {_processor()} with gloo,
torch {machine.versions()["torch"]}, Megatron-core {machine.versions()["megatron-core"]}.
"""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
