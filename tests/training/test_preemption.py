"""Signals that ask a rank to stop."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, torch
from sagebwd.kernels.compile_only import compile_only
from sagebwd.kernels.mean import key_mean
from sagebwd.training import world
from sagebwd.training.preemption import SIGNALS, Preemption

for number in SIGNALS:
    with world.join(1, 0) as here:
        preemption = Preemption(here)
        with preemption.listening():
            with compile_only(90) as compiled:
                key_mean(torch.zeros(1, 1, 128, 64), None)
            assert compiled
            assert not preemption.heard()  # a step's end
            os.kill(os.getpid(), number)
            assert preemption.heard(), number
        assert signal.getsignal(number) is signal.SIG_DFL
"""


def test_they_are_heard_after_a_kernel_was_compiled(tmp_path: Path) -> None:
    """The compiler's LLVM takes them when a process compiles for the first time."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    answer = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
