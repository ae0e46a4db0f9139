"""torchrun above a rank: when it is killed, nobody would end its ranks, and they would hold GPUs and folder unseen.

So the kernel sends them SIGTERM then, upon which they save and stop.
"""

from __future__ import annotations

import ctypes
import os
import signal

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_parent: int | None = None


def watch() -> None:
    """At the start of a process that torchrun may have started; nothing happens to another one, which may outlive its
    shell."""
    global _parent
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _parent = os.getppid()
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def gone() -> bool:
    """Whether it has died since `watch`: the signal may have come before anybody listened."""
    return _parent is not None and os.getppid() != _parent
