"""Ends a rank that makes no progress, and says which rank holds the others up.

A thread of each rank tells torch.distributed's store how far it has come; when its own rank has stood still for too
long, it looks up the others. The one that hangs is a step behind, or, if its process is stopped, has fallen silent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import distributed

from sagebwd.training.world import World

EXIT = 1


class Watchdog(AbstractContextManager):
    """Every rank's. `beat` costs an assignment."""

    def __init__(self, here: World, minutes: float, fail: Callable[[str], None]) -> None:
        """fail: gets the cause, in a sentence, before the process ends."""
        self.here, self.seconds, self.fail = here, 60 * minutes, fail
        self.beats, self.doing = 0, "starting"
        self.since: float | None = None  # until the first beat nothing is due: indices of large data take their time
        self.every = min(max(self.seconds / 20, 0.05), 10.0)
        # a clone: a request of this thread's must not wait behind one of the main thread's
        self.store = distributed.distributed_c10d._get_default_store().clone() if here.size > 1 else None
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if self.store is not None:
            self.threads.append(threading.Thread(target=self._tell, name="watchdog's word", daemon=True))
        for thread in self.threads:
            thread.start()

    def __exit__(self, *error: Any) -> None:
        self.over.set()
        self.threads[0].join()

    def beat(self, doing: str) -> None:
        """The rank has made progress and now does this."""
        self.beats, self.doing, self.since = self.beats + 1, doing, time.monotonic()

    def _watch(self) -> None:
        while not self.over.wait(self.every):
            if self.since is not None and time.monotonic() - self.since > self.seconds:
                cause = f"no progress for {self.seconds / 60:g} minutes (health.hang_minutes) in {self.doing}"
                cause += self._whose_fault()
                self.fail(cause)
                print(f"error: rank {self.here.rank}: {cause}", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=sys.stderr)
                os._exit(EXIT)

    def _tell(self) -> None:
        """A thread of its own: the store may be the one that hangs."""
        with contextlib.suppress(RuntimeError):  # the store's host is gone: training will notice
            while True:  # at once: a rank that stops in its first moments is to be named too
                said = {"beats": self.beats, "doing": self.doing, "time": time.time()}
                said |= {"host": socket.gethostname(), "pid": os.getpid()}
                self.store.set(f"watchdog/{self.here.rank}", json.dumps(said))
                if self.over.wait(self.every):
                    return

    def _whose_fault(self) -> str:
        """In words; "" for a single rank."""
        if self.store is None:
            return ""
        answer: list[str] = []
        asking = threading.Thread(target=lambda: answer.append(self._behind()), daemon=True)
        asking.start()
        asking.join(10)
        return answer[0] if answer else ": the rank that holds torch.distributed's store (rank 0) does not answer"

    def _behind(self) -> str:
        """The ranks that hold the others up."""
        told = {}
        for rank in range(self.here.size):
            key = f"watchdog/{rank}"
            if self.store.check([key]):
                told[rank] = json.loads(self.store.get(key))
        silent = [rank for rank, said in told.items() if time.time() - said["time"] > 3 * self.every + 2]
        furthest = max(said["beats"] for said in told.values())
        behind = [rank for rank, said in told.items() if said["beats"] < furthest]
        for ranks, what in ((silent, "does not answer"), (behind, "is behind the others")):
            if ranks:
                who = ", ".join(f"rank {r} (process {told[r]['pid']} on {told[r]['host']})" for r in ranks)
                return f": {who} {what}"
        return ": all ranks wait, so a collective or the network between them is stuck"
