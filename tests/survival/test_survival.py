"""Fifty SIGKILLs, and every other fault a few times: no result is ever wrong. `make survive` does more of each."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.survival.__main__ import FEW

ROOT = Path(__file__).parents[2]
MINUTES = 15  # a part takes one, or several on a busy machine; what hangs ends at last


def survive(faults: str, megatron: int = FEW, deepspeed: int = 0) -> dict[str, int]:
    """Fault -> tries. In a process of its own, which forks and so must not have threads; on a CPU."""
    kills = ["--megatron", str(megatron), "--deepspeed", str(deepspeed)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.survival", *kills, "--only", faults]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **options)
    try:
        said, _ = process.communicate(timeout=MINUTES * 60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with all that it has forked
        said, _ = process.communicate()
        pytest.fail(f"not over after {MINUTES} minutes: {said}")
    assert process.returncode == 0, said
    return {fault: int(tries) for fault, tries in re.findall(r"^\| (.+?) \| (\d+) \|", said, re.MULTILINE)}


@pytest.mark.parametrize("where", ["at a random moment", "inside a save"])
def test_killed(where: str) -> None:
    assert survive(f"SIGKILL {where}")[f"SIGKILL {where}"] >= FEW // 2


def test_engine_deepspeed_is_killed_stopped_and_damaged() -> None:
    tries = survive("SIGKILL,SIGTERM to one,damaged", megatron=0, deepspeed=FEW // 4)
    assert len(tries) == 5
    assert all("engine deepspeed" in fault for fault in tries)


def test_asked_to_stop() -> None:
    assert len(survive("SIGTERM,SIGUSR1")) == 3


def test_one_rank_of_two() -> None:
    assert len(survive("SIGKILL of one rank,hangs")) == 2


def test_damaged_or_used_twice() -> None:
    assert len(survive("damaged,second")) == 2


def test_a_full_disk() -> None:
    ((fault, tries),) = survive("disk full").items()
    if "not tried" in fault:
        pytest.skip("this process may not mount a small file system (it needs to be root)")
    assert tries > 0
