"""What happens to training processes; each try ends with a bitwise comparison to an unbroken run.

A fault is a function that makes one round of tries and adds them to a tally. It waits for a state that the run itself
has written down (a step in its log), never for a time: how fast the machine is decides how long a round takes, and not
what comes of it. A run that was over before the fault could reach it is no try.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sagebwd.errors import UserError
from sagebwd.training import checkpoint, lock, run_folder, status
from sagebwd.training.preemption import Preemption
from tests.survival.arena import EVERY, STEPS, TENSORS, Arena, Child, last_step, reached, went_on_after
from tests.survival.counts import Tally
from tests.training.runs import changed

Round = Callable[[Arena, Tally, random.Random], None]
Hit = Callable[[Arena, Path, random.Random], Child]
CALLS_OF_A_SAVE = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
DAMAGES = ("truncate", "empty", "flip a bit", "zero", "delete", "append")
TWO = 2  # ranks of a run whose checkpoints are damaged: under DeepSpeed each writes a file
JITTER = 0.03  # seconds: a step or two, so that a fault meets any part of one


def killed(hit: Hit) -> Round:
    """One run, hit again and again until it is done. hit: starts training, and returns it dead, dying or done."""

    def once(arena: Arena, tally: Tally, generator: random.Random) -> None:
        folder = arena.folder()
        before: int | None = None
        while True:
            child = hit(arena, folder, generator)
            code = child.wait()
            start = went_on_after(child)
            if before is not None and start is not None:
                tally.lost.append(before - start)  # of the hit before this process
                before = None
            if code == 0:
                break
            if code != -signal.SIGKILL:
                tally.wrong.append(f"{folder}: exit code {code}: {child.said()[-500:]}")
                return
            tally.wrong += arena.prefix_differences(folder)
            before = max(last_step(folder), before or 0)
        tally.wrong += arena.differences(folder)
        shutil.rmtree(folder)

    return once


def at_a_random_moment(arena: Arena, folder: Path, generator: random.Random) -> Child:
    """SIGKILL while it starts, or in any part of one of its next steps."""
    (child,) = arena.start(folder)
    _any_moment(folder, child, generator)
    child.kill()
    return child


def inside_a_save(arena: Arena, folder: Path, generator: random.Random) -> Child:
    """SIGKILL before a system call of a save: between data and manifest, rename and latest, while it removes."""
    at = generator.randint(1, 40)

    def hook() -> None:
        left = [at]
        root = str(folder / checkpoint.FOLDER)

        def audit(event: str, args: tuple) -> None:
            if event in CALLS_OF_A_SAVE and any(root in str(arg) for arg in args):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)

    (child,) = arena.start(folder, hook=hook)
    return child


def preempted(arena: Arena, tally: Tally, generator: random.Random) -> None:
    """One run, asked to stop again and again until it is done."""
    folder = arena.folder()
    while True:
        (child,) = arena.start(folder)
        _any_moment(folder, child, generator)
        child.kill(signal.SIGTERM)
        tally.wrong += (found := _stopped_well(folder, [child]))
        if found:
            return
        if (state := _state(folder)) == "finished":
            break
        if state == "preempted":  # and not before it had begun
            tally.lost.append(last_step(folder) - (status.read(folder).checkpoint or 0))
    tally.wrong += arena.differences(folder)
    shutil.rmtree(folder)


def preempted_in_validation(arena: Arena, tally: Tally, generator: random.Random) -> None:
    """The signal in a batch of a validation, before the first step and later: each of seven, a batch at random."""
    poll = 4 * (tally.tries % 7) + generator.randint(1, 3)  # of 28; in the last of four it comes too late for this one
    folder = arena.folder()

    def hook() -> None:
        original, left = Preemption.poll, [poll]

        def polled(self: Preemption) -> bool:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGUSR1)
            return original(self)

        Preemption.poll = polled

    (child,) = arena.start(folder, hook=hook)
    tally.wrong += _stopped_well(folder, [child])
    if _state(folder) != "preempted":
        tally.wrong.append(f"{folder}: it was not stopped in validation, at batch {poll}: {child.said()[-500:]}")
    tally.lost.append(last_step(folder) - (status.read(folder).checkpoint or 0))
    tally.wrong += _goes_on(arena, folder)


def one_rank_preempted(arena: Arena, tally: Tally, generator: random.Random) -> None:
    """SIGTERM to the second of two ranks alone."""
    folder = arena.folder()
    children = arena.start(folder, ranks=2)
    reached(folder, children[0], generator.randint(2, 20))
    children[1].kill(signal.SIGTERM)
    tally.wrong += _stopped_well(folder, children)
    if _state(folder) == "finished":
        return
    tally.lost.append(last_step(folder) - (status.read(folder).checkpoint or 0))
    tally.wrong += _goes_on(arena, folder, ranks=2)


def one_rank_killed(arena: Arena, tally: Tally, generator: random.Random) -> None:
    """SIGKILL to one of two ranks: the other ends by itself, with a sentence."""
    folder, which = arena.folder(), tally.tries % 2
    children = arena.start(folder, ranks=2)
    reached(folder, children[0], generator.randint(2, 20))
    children[which].kill()
    codes = [child.wait() for child in children]
    if run_folder.finished(folder):
        return
    if sorted(codes) != [-signal.SIGKILL, 1] or "lost the connection" not in children[1 - which].said():
        tally.wrong.append(f"{folder}: {codes}: {children[1 - which].said()[-500:]}")
    if status.exit_code(folder) != status.RESUMABLE:
        tally.wrong.append(f"{folder}: {status.read(folder)}")
    _lost_and_gone_on(arena, tally, folder)


def one_rank_hangs(arena: Arena, tally: Tally, generator: random.Random) -> None:
    """SIGSTOP to the first of two ranks, and in another run to the second: the other ends itself, and names it."""
    recipe = changed(arena.recipe, {"health": {"hang_minutes": 0.2}})
    runs = []
    for which in range(2):
        folder = arena.folder()
        children = arena.start(folder, ranks=2, recipe=recipe)
        reached(folder, children[0], generator.randint(5, 20))
        children[which].kill(signal.SIGSTOP)
        runs.append((folder, children, which))
    for folder, children, which in runs:
        stopped, other = children[which], children[1 - which]
        code, found = other.wait(), status.read(folder)
        stopped.kill()
        stopped.wait()
        if run_folder.finished(folder):
            continue
        # Without torchrun, which keeps the store, it is with rank 0 and cannot be asked.
        blamed = f"rank 1 (process {stopped.pid} on " if which else "(rank 0) does not answer"
        sentence = r"no progress for 0\.2 minutes \(health\.hang_minutes\) in (step|validation|the checkpoint)"
        cause = str(found.cause)
        if code != 1 or found.state != "failed" or blamed not in cause or not re.search(sentence, cause):
            tally.wrong.append(f"{folder}: exit code {code}, {found}: {other.said()[-1000:]}")
        _lost_and_gone_on(arena, tally, folder)


def damaged(arena: Arena, tally: Tally, generator: random.Random) -> None:
    """One kind of damage after the other to one file after the other, of the newest checkpoint of a run that was killed
    at its end."""
    cases = [(damage, name) for name in files(arena.engine) for damage in DAMAGES]
    damage, name = cases[tally.tries % len(cases)]
    folder = arena.folder()
    shutil.copytree(arena.truth(TWO), folder)
    for file in ("meta.json", status.STATUS):
        (folder / file).unlink()
    root = folder / checkpoint.FOLDER
    _damage(root / name if name == checkpoint.LATEST else root / checkpoint.name(STEPS) / name, damage, generator)
    children = arena.start(folder, TWO)
    codes, said = [child.wait() for child in children], children[0].said()
    if any(codes) or ("WARNING: the checkpoint" not in said and "WARNING: /" not in said):
        tally.wrong.append(f"{damage} {name}: exit codes {codes}: {said[-500:]}")
    tally.lost.append(STEPS - (went_on_after(children[0]) or 0))
    tally.wrong += arena.differences(folder, TWO)
    shutil.rmtree(folder)


def files(engine: str) -> tuple[str, ...]:
    """Of a checkpoint of two ranks, and what names it."""
    return (*TENSORS[engine], checkpoint.MANIFEST, checkpoint.LATEST)


def two_on_one_folder(arena: Arena, tally: Tally, generator: random.Random) -> None:
    """A second run on the folder of one that is under way: that one stands still until the second has ended."""
    folder = arena.folder()
    (first,) = arena.start(folder)
    reached(folder, first, generator.randint(1, 20))
    if not first.stopped():
        return
    (second,) = arena.start(folder)
    code = second.wait()
    first.kill(signal.SIGCONT)
    if code == 0 or f"another process trains in {folder} (process {first.pid} on" not in second.said():
        tally.wrong.append(f"{folder}: exit code {code}: {second.said()[-500:]}")
    tally.wrong += [f"{folder}: {first.said()[-500:]}"] if first.wait() else arena.differences(folder)
    tally.lost.append(0)


def disk_full(arena: Arena, tally: Tally, generator: random.Random) -> None:
    """A file system that fills up while it trains (which stands still meanwhile); then there is room again."""
    with small_disk(arena.folder()) as disk:
        assert disk is not None
        folder = disk / "run"
        (child,) = arena.start(folder)
        reached(folder, child, generator.randint(2 * EVERY, STEPS // 2))
        time.sleep(generator.uniform(0, JITTER))
        if not child.stopped() or last_step(folder) > STEPS - 2 * EVERY:  # too late for a save to fail
            child.kill(signal.SIGCONT)
            child.wait()
            return
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        child.kill(signal.SIGCONT)
        code, said = child.wait(), child.said()
        whole = checkpoint.newest_whole(folder, lambda line: None)
        # It stopped with the cause, or went on without the saves that failed until there was nothing left to save.
        if code == 0 or "No space left on device" not in said or "Traceback" in said or whole is None:
            tally.wrong.append(f"{folder}: exit code {code}, {whole and whole.position.step}: {said[-500:]}")
        before = last_step(folder)
        (disk / "filler").unlink()
        (again,) = arena.start(folder)
        code = again.wait()
        tally.lost.append(before - (went_on_after(again) or 0))
        tally.wrong += [f"{folder}: {code}: {again.said()[-500:]}"] if code else arena.differences(folder)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 4) -> Iterator[Path | None]:
    """A file system of its own, in memory; None where this process may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        # Where an error leaves somebody in it, it goes when they have gone.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _any_moment(folder: Path, child: Child, generator: random.Random) -> None:
    """Wait until it starts, one time in five, or else until some part of one of the next steps that it makes."""
    before = last_step(folder)
    if generator.random() < 0.2:
        until = time.monotonic() + generator.uniform(0, 1)
        while time.monotonic() < until and last_step(folder) <= before and not child.ended():
            time.sleep(0.005)
        return
    if reached(folder, child, before + generator.randint(1, 8)):
        time.sleep(generator.uniform(0, JITTER))


def _state(folder: Path) -> str | None:
    """What status.json says; None before there is one."""
    with contextlib.suppress(UserError):
        return status.read(folder).state
    return None


def _stopped_well(folder: Path, children: list[Child]) -> list[str]:
    """Every process ended with 0, and the run is preempted (or was done by then), with nobody in its folder.

    A process dies of the signal before it has begun to train, and after it is done: then there was nothing to save.
    """
    codes = [child.wait() for child in children]
    state = _state(folder)
    if lock.is_held(folder):
        return [f"{folder}: its lock is held"]
    idle = all("step" not in child.said() or ": done, " in child.said() for child in children)
    if idle and set(codes) <= {0, -signal.SIGTERM, -signal.SIGUSR1}:
        return []
    if any(codes) or state not in ("preempted", "finished"):
        return [f"{folder}: {codes}, {state}: {children[0].said()[-500:]}"]
    return []


def _goes_on(arena: Arena, folder: Path, ranks: int = 1) -> list[str]:
    again = arena.start(folder, ranks)
    codes = [child.wait() for child in again]
    return [f"{folder}: {codes}: {again[0].said()[-500:]}"] if any(codes) else arena.differences(folder, ranks)


def _lost_and_gone_on(arena: Arena, tally: Tally, folder: Path) -> None:
    """The same again, of a run of two ranks."""
    before = last_step(folder)
    again = arena.start(folder, ranks=2)
    codes = [child.wait() for child in again]
    tally.lost.append(before - (went_on_after(again[0]) or 0))
    tally.wrong += [f"{folder}: {codes}: {again[0].said()[-500:]}"] if any(codes) else arena.differences(folder, 2)


def _damage(file: Path, damage: str, generator: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
        return
    if damage == "truncate":
        del content[generator.randrange(1, len(content)) :]
    elif damage == "empty":
        content.clear()
    elif damage == "flip a bit":
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    elif damage == "zero":
        # somewhere that is not zero already
        at = generator.choice([index for index in range(0, len(content), 16) if any(content[index : index + 16])])
        content[at : at + 16] = bytes(len(content[at : at + 16]))
    else:
        content += b"\x01"
    file.write_bytes(content)
