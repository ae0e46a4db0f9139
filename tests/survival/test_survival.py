"""Fifty SIGKILLs, and every other fault a few times: no result is ever wrong. `make survive` does more of each."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.survival import __main__ as program
from tests.training.runs import on_cpu

ROOT = Path(__file__).parents[2]


@on_cpu
@pytest.mark.parametrize(
    "faults", ["SIGKILL at", "SIGKILL inside", "SIGTERM,SIGUSR1", "of one rank,hangs", "damaged,second"]
)
def test_no_result_is_wrong(faults: str) -> None:
    """In a process of its own: it forks, and must not have threads by then."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.survival", "--kills", str(program.FEW), "--only", faults]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("\n") > 0


@on_cpu
def test_a_full_disk() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.survival", "--only", "disk full"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "not tried" in answer.stdout:
        pytest.skip("this process may not mount a small file system (it needs to be root)")
    assert answer.returncode == 0, answer.stdout + answer.stderr
