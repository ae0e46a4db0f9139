"""SIGTERM and SIGUSR1: whichever rank gets one, all ranks stop together at the same step boundary."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch
from torch import distributed

from sagebwd.training import launcher
from sagebwd.training.world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """The ranks' agreement on what `heard` says is the caller's in training, where it travels with the loss; and
    `poll`'s in validation."""

    def __init__(self, here: World) -> None:
        self.requested = False
        self.listens = False
        self.device = here.device
        cuda = here.device.type == "cuda"
        self.host = torch.zeros(2, dtype=torch.int32, pin_memory=cuda)  # what this rank says; what all said
        self.arrived = torch.cuda.Event() if cuda else None
        self.asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Notes the signals instead of dying of them. Only a main thread may; in another nothing is changed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.listens = True
        self.heard()
        if launcher.gone():
            self.requested = True
        try:
            yield
        finally:
            self.listens = False
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def heard(self) -> bool:
        """Whether this rank was asked to stop; called once a step.

        It takes the signals anew: LLVM does when a process compiles its first Triton kernel, and drops SIGUSR1.
        """
        if self.listens:
            for number in SIGNALS:
                signal.signal(number, self._note)
        return self.requested

    def begin(self) -> None:
        """Before the first `poll` of a row."""
        self.asked = False

    def poll(self) -> bool:
        """Whether any rank was asked to stop by the time of the last `poll`; all ranks call it, and get one answer.

        One call late, so that nobody waits for the device, which has work queued.
        """
        answer = False
        if self.asked:
            if self.arrived is not None:
                self.arrived.synchronize()
            answer = bool(self.host[1])
        self.host[0] = self.heard()
        said = self.host[:1].to(self.device, non_blocking=True)
        distributed.all_reduce(said, op=distributed.ReduceOp.MAX)
        self.host[1:].copy_(said, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record()
        self.asked = True
        return answer
