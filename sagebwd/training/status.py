"""status.json: how a run stands, for launch scripts and for `sagebwd status`; replaced whole, so never half-written."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from sagebwd.errors import UserError
from sagebwd.training import lock

STATUS = "status.json"
EVERY_SECONDS = 5.0  # between two writings while it runs
FINISHED, FAILED, RUNNING, HUNG, RESUMABLE = 0, 1, 3, 4, 75  # exit codes of `sagebwd status`; 75 is EX_TEMPFAIL


@dataclass(frozen=True)
class Status:
    """state: running (or killed: then nobody holds the folder's lock), preempted, finished or failed.

    step, of: optimizer steps. tokens: trained on. rate: tokens a second. checkpoint: the newest whole one's step.
    spikes, skipped: steps. cause: of the end, in a sentence. hung: it failed by standing still, as by a network or a
    GPU that no longer answers, so that another try may well pass. time: of this word, and started: of the process,
    seconds since 1970. pid, host: of rank 0, which hands on SIGTERM or SIGUSR1 to all.
    """

    state: Literal["running", "preempted", "finished", "failed"]
    step: int
    of: int
    tokens: int
    rate: float | None = None
    checkpoint: int | None = None
    spikes: int = 0
    skipped: int = 0
    cause: str | None = None
    hung: bool = False
    time: float = 0.0
    started: float = 0.0
    pid: int = 0
    host: str = ""


class Reporter:
    """Keeps a run's status.json. Rank 0's; another rank only tells of its own failure."""

    def __init__(self, folder: Path, steps: int) -> None:
        """Whoever holds the folder's lock: it runs again, and has come as far as an earlier process said."""
        self.folder, self.written = folder, 0.0
        try:
            before = read(folder)
        except UserError:
            before = Status("running", 0, steps, 0)
        me = {"started": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
        self.status = replace(before, state="running", of=steps, cause=None, hung=False, **me)
        self.tell()

    def tell(self, *, now: bool = True, **changed: Any) -> None:
        """Change fields, and write unless `now` is false and the last writing is not EVERY_SECONDS ago."""
        self.status = replace(self.status, **changed)
        if (now or time.monotonic() - self.written > EVERY_SECONDS) and not self._another_rank_failed():
            self.written = time.monotonic()
            _write(self.folder, replace(self.status, time=time.time()))

    def _another_rank_failed(self) -> bool:
        try:
            found = read(self.folder)
        except UserError:
            return False
        return found.state == "failed" and found.started == self.status.started


def fail(folder: Path, cause: str, *, hung: bool = False) -> None:
    """Called on any rank: the run has failed. The first cause stands; what it brings down with it does not count.

    A status.json that is not there or not running is left alone: then the failure is not this run's to tell.
    """
    try:
        found = read(folder)
    except UserError:
        return
    if found.state == "running":
        with contextlib.suppress(OSError):  # the cause may be that nothing can be written
            _write(folder, replace(found, state="failed", cause=cause, hung=hung, time=time.time()))


def settle(folder: Path, state: Literal["finished", "failed"]) -> None:
    """Of a run whose meta.json says that it is over: a process killed just then may not have said so here."""
    try:
        found = read(folder)
    except UserError:
        return
    if found.state == "running":
        _write(folder, replace(found, state=state, time=time.time()))


def read(folder: Path) -> Status:
    """Raises UserError: no status.json there, or not one that a run wrote."""
    path = folder / STATUS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in fields(Status)}
        status = Status(**{key: value for key, value in found.items() if key in known})
        if status.state not in ("running", "preempted", "finished", "failed"):
            raise ValueError(f"its state is {status.state!r}")
        if not all(isinstance(number, int) for number in (status.step, status.of, status.tokens)):
            raise ValueError("step, of and tokens must be whole numbers")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"no {STATUS} in {folder}: give the folder of an arm that has begun, such as runs/small/fpa"
        ) from None
    except (OSError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): run the recipe again, which writes it anew") from None
    return status


def exit_code(folder: Path) -> int:
    """FINISHED, RESUMABLE (preempted, or its process is gone), RUNNING, HUNG (it failed that way) or FAILED."""
    status = read(folder)
    if status.state == "running":
        return RUNNING if lock.is_held(folder) else RESUMABLE
    failed = HUNG if status.hung is True else FAILED
    return {"finished": FINISHED, "failed": failed, "preempted": RESUMABLE}[status.state]


def show(folder: Path) -> int:
    """Print how the run in `folder` stands. Returns `exit_code`."""
    status, code = read(folder), exit_code(folder)
    interrupted = status.state == "running" and code == RESUMABLE
    state = "interrupted (its process is gone)" if interrupted else status.state
    done = 100 * status.step / status.of if status.of else 100.0
    lines = [
        f"{folder}: {state}",
        f"progress    step {status.step:,} of {status.of:,} ({done:.1f} %), {status.tokens:,} tokens",
    ]
    if status.rate:
        left = (status.of - status.step) * status.tokens / max(status.step, 1) / status.rate
        lines.append(
            f"rate        {status.rate:,.0f} tokens/s"
            + (f", {_duration(left)} left" if status.step < status.of else "")
        )
    lines.append(f"checkpoint  {'none yet' if status.checkpoint is None else f'step {status.checkpoint:,}'}")
    lines.append(f"health      {status.spikes} spike(s), {status.skipped} step(s) skipped")
    if status.cause:
        lines.append(f"cause       {status.cause}")
    lines.append(
        f"last word   {_duration(max(time.time() - status.time, 0))} ago, process {status.pid} on {status.host}"
    )
    if code in (RESUMABLE, HUNG):
        lines.append("the same command goes on from the last checkpoint")
    print("\n".join(lines), flush=True)
    return code


def _write(folder: Path, status: Status) -> None:
    beside = folder / f".{STATUS}.{os.getpid()}"
    beside.write_text(json.dumps(asdict(status), indent=2) + "\n", encoding="utf-8")
    beside.replace(folder / STATUS)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    told = [f"{number} {unit}" for number, unit in parts if number][:2]
    return " ".join(told) or "0 s"
