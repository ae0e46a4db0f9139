"""What a run survives: `python -m tests.survival` hits training processes with every fault, under both engines, and
writes the table.

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
from tests.survival.arena import ENGINES, EVERY, STEPS, Arena
from tests.survival.counts import Counts, Tally

FEW = 50  # SIGKILLs in the test suite
MISSES = 20  # rounds in a row in which every run was over before the fault: then something else is wrong
WORD_SECONDS = 60  # between two lines, where there is no terminal for a bar


@dataclass(frozen=True)
class Fault:
    name: str
    engine: str
    tries: int
    once: faults.Round

    @property
    def label(self) -> str:
        return self.name if self.engine == "megatron" else f"{self.name}, engine {self.engine}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.survival", description=__doc__)
    for engine in ENGINES:
        what = f"SIGKILLs under engine {engine}, half of them inside a save; 0: no fault at all [{FEW}]"
        parser.add_argument(f"--{engine}", type=int, default=FEW, metavar="N", help=what)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name holds this, or one of several (a,b)")
    parser.add_argument("--table", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--counts", type=Path, help="keep here what was counted, and go on from what is there")
    arguments = parser.parse_args()
    # It warns of each restart that purges points, by design.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    tqdm.monitor_interval = 0  # its thread would not survive a fork
    kills = {engine: getattr(arguments, engine) for engine in ENGINES}
    owner = {"commit": machine.commit(), "kills": kills, "seed": arguments.seed}
    counts = Counts(arguments.counts, owner)
    if counts.tries:
        print(f"going on after {counts.tries} tries, from {arguments.counts}", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="survival-") as root:
            for engine, number in kills.items():
                if number:
                    hit(Path(root) / engine, engine, counts, number, arguments.seed, arguments.only)
    except KeyboardInterrupt:
        print(
            f"interrupted after {counts.tries} tries"
            + (f", kept in {arguments.counts}: the same command goes on" if arguments.counts else ""),
            file=sys.stderr,
        )
        return 130
    if arguments.table:
        arguments.table.write_text(_markdown(counts, kills), encoding="utf-8")
    counts.forget()
    return int(any(tally.wrong for tally in counts.tallies.values()))


def hit(root: Path, engine: str, counts: Counts, kills: int, seed: int, only: str = "") -> None:
    """Every fault whose name holds `only`, one after the other, each until it has its tries."""
    arena = Arena(root, engine)
    wanted = [f for f in every_fault(engine, kills, root) if any(part in f.name for part in only.split(","))]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    bar = tqdm(total=sum(fault.tries for fault in wanted), unit="try", disable=not sys.stderr.isatty())
    try:
        with bar:
            arena.truth()
            for fault in wanted:
                _until_tried(fault, arena, counts, seed, bar)
                found = counts.of(fault.label)
                tqdm.write(f"| {fault.label} | {_cells(found)} | {len(found.wrong)} |   ({counts.seconds:.0f} s)")
                sys.stdout.flush()
    finally:
        arena.end()


def every_fault(engine: str, kills: int, root: Path) -> list[Fault]:
    """With tries in proportion to `kills`."""
    few = max(2, kills // 25)
    found = [
        ("SIGKILL at a random moment", kills // 2, faults.killed(faults.at_a_random_moment)),
        ("SIGKILL inside a save", kills - kills // 2, faults.killed(faults.inside_a_save)),
        ("SIGTERM at a random moment", 4 * few, faults.preempted),
        ("SIGUSR1 in a validation", few, faults.preempted_in_validation),
        ("SIGTERM to one rank of two", few, faults.one_rank_preempted),
        ("SIGKILL of one rank of two", few, faults.one_rank_killed),
        ("one rank of two hangs (SIGSTOP)", few, faults.one_rank_hangs),
        (
            f"the newest checkpoint damaged: {len(faults.DAMAGES)} ways, each file",
            len(faults.DAMAGES) * len(faults.files(engine)) * max(1, kills // 100),
            faults.damaged,
        ),
        ("a second run on the folder", few, faults.two_on_one_folder),
    ]
    full, often = "disk full while it trains", few
    with faults.small_disk(root / "a disk to try") as disk:
        if disk is None:
            full, often = f"{full} (not tried: this process may not mount a file system)", 0
    found.append((full, often, faults.disk_full))
    return [Fault(name, engine, tries, once) for name, tries, once in found]


def _until_tried(fault: Fault, arena: Arena, counts: Counts, seed: int, bar: tqdm) -> None:
    tally, said, missed = counts.of(fault.label), time.monotonic(), 0
    bar.set_description(fault.label)
    bar.update(tally.tries)
    while tally.tries < fault.tries:
        began, before, wrong = time.monotonic(), tally.tries, len(tally.wrong)
        fault.once(arena, tally, random.Random(f"{seed} {fault.label} {before} {missed}"))
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
            print(f"{fault.label}: {tally.tries} of {fault.tries}, {len(tally.wrong)} wrong", flush=True)


def _cells(tally: Tally) -> str:
    lost = f"{sum(tally.lost) / tally.tries:.1f}, {max(tally.lost)} at most" if tally.tries else ""
    return f"{tally.tries} | {lost}"


def _markdown(counts: Counts, kills: dict[str, int]) -> str:
    rows = []
    for name in dict.fromkeys(tally.fault.partition(", engine ")[0] for tally in counts.tallies.values()):
        of_each = [counts.of(Fault(name, engine, 0, faults.damaged).label) for engine in ENGINES]
        rows.append(f"| {name} | {' | '.join(map(_cells, of_each))} | {sum(len(each.wrong) for each in of_each)} |")
    versions = machine.versions()
    return f"""# What a run survives

| fault | tries | steps lost | tries, DeepSpeed | steps lost | wrong results |
|---|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

Each try ends with the same command again, until the run is done, and a comparison with a run that nothing happened to:
every line of log.jsonl, every point of the event files (none twice, none missing), and the last checkpoint's
weights, moments and random states, byte for byte. *Steps lost*: done again, mean and most, at a checkpoint every
{EVERY} steps of {STEPS}; a hung rank and a full disk also have to be named as the cause. On a full disk a run
trains on without checkpoints for as long as it can log, and those steps are done again. *DeepSpeed*: parallel.engine
deepspeed with ZeRO-{ENGINES["deepspeed"]["zero"]}; the other tries are engine megatron's.

Written by `make survive` ({" and ".join(map(str, kills.values()))} SIGKILLs, {counts.seconds:.0f} s) at commit
{machine.commit()}, {time.strftime("%Y-%m-%d")}, on {os.cpu_count()} cores of an {_processor()}
with gloo, torch {versions["torch"]}, Megatron-core {versions["megatron-core"]}, DeepSpeed {versions["deepspeed"]}.
"""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
