"""What happens to training processes, many times over; each try ends with a bitwise comparison to an unbroken run."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sagebwd.training import checkpoint, lock, status
from sagebwd.training.preemption import Preemption
from tests.survival.arena import EVERY, STEPS, Arena, Child, Tally, last_step, went_on_after
from tests.training.runs import changed

Hit = Callable[[Path, random.Random], Child]
SIGNALS_OF_A_SAVE = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def killed(arena: Arena, tally: Tally, tries: int, hit: Hit, generator: random.Random) -> Tally:
    """Runs that are hit again and again until they are done. hit: starts training, and returns it dead or done."""
    while tally.tries < tries:
        folder = arena.folder()
        before: int | None = None
        while True:
            child = hit(folder, generator)
            code = child.wait()
            start = went_on_after(child)
            if before is not None and start is not None:
                tally.lost.append(before - start)  # of the hit before this process
                before = None
            if code == 0:
                break
            if code != -signal.SIGKILL:
                tally.wrong.append(f"{folder}: exit code {code}: {child.said()[-500:]}")
                return tally
            tally.wrong += arena.prefix_differences(folder)
            before = max(last_step(folder), before or 0)
        tally.wrong += arena.differences(folder)
        shutil.rmtree(folder)
    return tally


def at_a_random_moment(arena: Arena) -> Hit:
    """SIGKILL at a moment between the fork and three quarters of an unbroken run."""

    def hit(folder: Path, generator: random.Random) -> Child:
        began, whole = time.monotonic(), last_step(folder) == 0
        (child,) = arena.start(folder)
        until = began + generator.uniform(0, 0.75 * arena.seconds)
        while time.monotonic() < until and not child.ended():
            time.sleep(0.005)
        if whole and child.ended():  # the machine has become faster
            arena.seconds = time.monotonic() - began
        child.kill()
        return child

    return hit


def inside_a_save(arena: Arena) -> Hit:
    """SIGKILL before a system call of a save: between data and manifest, rename and latest, while it removes."""

    def hit(folder: Path, generator: random.Random) -> Child:
        at = generator.randint(1, 40)

        def hook() -> None:
            left = [at]
            root = str(folder / checkpoint.FOLDER)

            def audit(event: str, args: tuple) -> None:
                if event in SIGNALS_OF_A_SAVE and any(root in str(arg) for arg in args):
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(audit)

        (child,) = arena.start(folder, hook=hook)
        return child

    return hit


def preempted(arena: Arena, tally: Tally, tries: int, number: int, generator: random.Random) -> Tally:
    """The signal at a random moment; then the same again, until it is done."""
    while tally.tries < tries:
        folder = arena.folder()
        while True:
            (child,) = arena.start(folder)
            _wait_for_step(folder, child, 0)
            time.sleep(generator.uniform(0, 0.5 * arena.seconds))
            child.kill(number)
            tally.wrong += _stopped_well(folder, [child])
            if status.read(folder).state == "finished":
                break
            tally.lost.append(last_step(folder) - status.read(folder).checkpoint)
        tally.wrong += arena.differences(folder)
        shutil.rmtree(folder)
    return tally


def preempted_in_validation(arena: Arena, tally: Tally, tries: int) -> Tally:
    """The signal in a batch of a validation, before the first step and later; at most eight tries."""
    for poll in range(2, 2 + 3 * tries, 3):  # of 28: seven validations of four batches
        folder = arena.folder()

        def hook(poll: int = poll) -> None:
            original, left = Preemption.poll, [poll]

            def polled(self: Preemption) -> bool:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGUSR1)
                return original(self)

            Preemption.poll = polled

        (child,) = arena.start(folder, hook=hook)
        tally.wrong += _stopped_well(folder, [child])
        if status.read(folder).state != "preempted":
            tally.wrong.append(f"{folder}: it was not stopped in validation {poll}")
        tally.lost.append(last_step(folder) - (status.read(folder).checkpoint or 0))
        tally.wrong += _goes_on(arena, folder)
    return tally


def one_rank_preempted(arena: Arena, tally: Tally, tries: int, generator: random.Random) -> Tally:
    """SIGTERM to the second of two ranks alone."""
    for _ in range(tries):
        folder = arena.folder()
        children = arena.start(folder, ranks=2)
        _wait_for_step(folder, children[0], generator.randint(2, 20))
        children[1].kill(signal.SIGTERM)
        tally.wrong += _stopped_well(folder, children)
        tally.lost.append(last_step(folder) - (status.read(folder).checkpoint or 0))
        tally.wrong += _goes_on(arena, folder, ranks=2)
    return tally


def one_rank_killed(arena: Arena, tally: Tally, tries: int, generator: random.Random) -> Tally:
    """SIGKILL to one of two ranks: the other ends by itself, with a sentence."""
    for attempt in range(tries):
        folder = arena.folder()
        children = arena.start(folder, ranks=2)
        _wait_for_step(folder, children[0], generator.randint(2, 20))
        children[attempt % 2].kill()
        codes = [child.wait() for child in children]
        if sorted(codes) != [-signal.SIGKILL, 1] or "lost the connection" not in children[1 - attempt % 2].said():
            tally.wrong.append(f"{folder}: {codes}: {children[1 - attempt % 2].said()[-500:]}")
        if status.exit_code(folder) != status.RESUMABLE:
            tally.wrong.append(f"{folder}: {status.read(folder)}")
        before = last_step(folder)
        again = arena.start(folder, ranks=2)
        codes = [child.wait() for child in again]
        tally.lost.append(before - (went_on_after(again[0]) or 0))
        tally.wrong += [f"{folder}: {codes}"] if any(codes) else arena.differences(folder, 2)
    return tally


def one_rank_hangs(arena: Arena, tally: Tally, tries: int) -> Tally:
    """SIGSTOP to one of two ranks: the other ends itself, and names it."""
    recipe = changed(arena.recipe, {"health": {"hang_minutes": 0.2}})
    for attempt in range(tries):
        folder = arena.folder()
        children = arena.start(folder, ranks=2, recipe=recipe)
        _wait_for_step(folder, children[0], 5)
        stopped, other = children[attempt % 2], children[1 - attempt % 2]
        stopped.kill(signal.SIGSTOP)
        code, found = other.wait(), status.read(folder)
        stopped.kill()
        stopped.wait()
        sentence = f"no progress for 0.2 minutes (health.hang_minutes) in step {last_step(folder) + 1}"
        # Without torchrun, which keeps the store, it is with rank 0 and cannot be asked.
        blamed = f"rank 1 (process {stopped.pid} on " if attempt % 2 else "(rank 0) does not answer"
        if code != 1 or found.state != "failed" or blamed not in str(found.cause) or sentence not in str(found.cause):
            tally.wrong.append(f"{folder}: exit code {code}, {found}: {other.said()[-1000:]}")
        before = last_step(folder)
        again = arena.start(folder, ranks=2)
        codes = [child.wait() for child in again]
        tally.lost.append(before - (went_on_after(again[0]) or 0))
        tally.wrong += [f"{folder}: {codes}"] if any(codes) else arena.differences(folder, 2)
    return tally


def damaged(arena: Arena, tally: Tally, generator: random.Random) -> Tally:
    """Every kind of damage to every file of the newest checkpoint of a run that was killed at the end."""
    for name in ("tp_00.safetensors", checkpoint.MANIFEST, checkpoint.LATEST):
        for damage in ("truncate", "flip a bit", "zero", "delete", "append"):
            folder = arena.folder()
            shutil.copytree(arena.truth(), folder)
            for file in ("meta.json", status.STATUS):
                (folder / file).unlink()
            root = folder / checkpoint.FOLDER
            file = root / name if name == checkpoint.LATEST else root / checkpoint.name(STEPS) / name
            _damage(file, damage, generator)
            (child,) = arena.start(folder)
            code = child.wait()
            if code or ("WARNING: the checkpoint" not in child.said() and "WARNING: /" not in child.said()):
                tally.wrong.append(f"{damage} {name}: exit code {code}: {child.said()[-500:]}")
            tally.lost.append(STEPS - (went_on_after(child) or 0))
            tally.wrong += arena.differences(folder)
            shutil.rmtree(folder)
    return tally


def disk_full(arena: Arena, tally: Tally, tries: int, disk: Path, generator: random.Random) -> Tally:
    """A file system that fills up while it trains; then there is room again."""
    for _ in range(tries):
        folder = disk / "run"
        (child,) = arena.start(folder)
        _wait_for_step(folder, child, 2 * EVERY)
        time.sleep(generator.uniform(0, 0.2 * arena.seconds))
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        code = child.wait()
        said = child.said()
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
        shutil.rmtree(folder)
    return tally


def two_on_one_folder(arena: Arena, tally: Tally, tries: int) -> Tally:
    """A second run on the folder of one that is under way."""
    for _ in range(tries):
        folder = arena.folder()
        (first,) = arena.start(folder)
        _wait_for_step(folder, first, 0)
        (second,) = arena.start(folder)
        code = second.wait()
        if code == 0 or f"another process trains in {folder} (process {first.pid} on" not in second.said():
            tally.wrong.append(f"{folder}: exit code {code}: {second.said()[-500:]}")
        tally.wrong += [f"{folder}: {first.said()[-500:]}"] if first.wait() else arena.differences(folder)
        tally.lost.append(0)
    return tally


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
        subprocess.run(["umount", str(folder)], check=True)


def _stopped_well(folder: Path, children: list[Child]) -> list[str]:
    """Every process ended with 0, and the run is preempted (or was done by then), with nobody in its folder.

    A process dies of the signal before it has begun to train, and after it is done: then there was nothing to save.
    """
    codes = [child.wait() for child in children]
    state = status.read(folder).state
    idle = all("step" not in child.said() or ": done, " in child.said() for child in children)
    well = not any(codes) or (idle and set(codes) <= {0, -signal.SIGTERM, -signal.SIGUSR1})
    if not well or state not in ("preempted", "finished") or lock.is_held(folder):
        return [f"{folder}: {codes}, {state}: {children[0].said()[-500:]}"]
    return []


def _goes_on(arena: Arena, folder: Path, ranks: int = 1) -> list[str]:
    again = arena.start(folder, ranks)
    codes = [child.wait() for child in again]
    return [f"{folder}: {codes}: {again[0].said()[-500:]}"] if any(codes) else arena.differences(folder, ranks)


def _damage(file: Path, damage: str, generator: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
        return
    if damage == "truncate":
        del content[generator.randrange(len(content)) :]
    elif damage == "flip a bit":
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    elif damage == "zero":
        # somewhere that is not zero already
        at = generator.choice([index for index in range(0, len(content), 16) if any(content[index : index + 16])])
        content[at : at + 16] = bytes(len(content[at : at + 16]))
    else:
        content += b"\x01"
    file.write_bytes(content)


def _wait_for_step(folder: Path, child: Child, step: int, seconds: float = 600) -> None:
    """Until a later step than this is logged, or the process has ended."""
    until = time.monotonic() + seconds
    while last_step(folder) <= step and not child.ended():
        if time.monotonic() > until:
            raise TimeoutError(f"{folder} did not get to step {step}: {child.said()}")
        time.sleep(0.01)
