"""Several child processes at a time, each with its own log and its own share of the machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sagebwd.errors import UserError

SECONDS_BETWEEN_LOOKS = 0.2
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Job:
    """A command whose output is appended to `log`."""

    name: str
    command: list[str]
    log: Path


def run(
    jobs: Iterable[Job],
    shares: list[Mapping[str, str]],
    began: Callable[[Job, Mapping[str, str]], None],
    ended: Callable[[Job, int, bool], None],
    stop: Callable[[subprocess.Popen, Job], None],
) -> None:
    """Run every job, as many at a time as there are shares, in order; a job that fails stops no other.

    shares: environment variables that give a job its part of the machine, added to this process's own. began, ended:
    called when a job starts with a share, and when it ends with its exit code and whether it was asked to. When this
    process gets SIGTERM or SIGUSR1, stop(child, job) asks each, no other starts, and it returns when they have ended in
    their own time: they may have a checkpoint to write. When it is interrupted, they are terminated and waited for.
    """
    waiting, free = list(reversed(list(jobs))), list(shares)
    running: dict[subprocess.Popen, tuple[Job, Mapping[str, str]]] = {}
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True

    with _on_signals(ask):
        told: set[subprocess.Popen] = set()
        try:
            while running or (waiting and not asked):
                while waiting and free and not asked:
                    job, share = waiting.pop(), free.pop(0)
                    running[_start(job, share)] = (job, share)
                    began(job, share)
                for child in [child for child in running if asked and child not in told]:
                    told.add(child)
                    stop(child, running[child][0])
                time.sleep(SECONDS_BETWEEN_LOOKS)
                for child in [child for child in running if child.poll() is not None]:
                    job, share = running.pop(child)
                    free.append(share)
                    ended(job, child.returncode, child in told)
        finally:
            for child in running:
                child.terminate()
            for child in running:
                child.wait()


def gpu_shares(shares: int, each: int, gpus: int) -> list[dict[str, str]]:
    """Environments for `shares` jobs of `each` ranks: a part of the cores each, and GPUs of their own if there are any.

    gpus: how many are visible, 0 for none. Jobs of one rank may share them, as many on each: a small model's kernels
    are shorter than their launches, and leave a GPU idle. UserError: too few of them, or no equal share.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // (shares * each)))
    if not gpus:
        return [{"OMP_NUM_THREADS": threads} for _ in range(shares)]
    if shares * each > gpus and (each > 1 or shares % gpus):
        some = f"{gpus // each or 1} or less" + (f", or to a multiple of {gpus}, which shares the GPUs" * (each == 1))
        raise UserError(
            f"--at-once {shares} arms of {each} rank(s) need {shares * each} GPUs, but {gpus} are visible: "
            f"set --at-once to {some}"
        )
    visible = os.environ.get(VISIBLE)
    names = visible.split(",") if visible else [str(index) for index in range(gpus)]
    return [
        {"OMP_NUM_THREADS": threads, VISIBLE: ",".join(names[at % gpus : at % gpus + each])}
        for at in range(0, shares * each, each)
    ]


@contextlib.contextmanager
def _on_signals(ask: Callable[..., None]) -> Iterator[None]:
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(job: Job, share: Mapping[str, str]) -> subprocess.Popen:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | share
        return subprocess.Popen(job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
