"""Kernels launched again get what Triton's own launch would give them, and a form is taken for another by nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("launch_program.py")


@pytest.fixture(scope="module")
def found() -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.parametrize("case", ["portable", "another scale", "not aligned", "hopper", "one too many"])
def test_what_is_launched_is_what_triton_launches(found: dict, case: str) -> None:
    one = found[case]
    assert len(one["by_triton"]) > 8
    assert one["first"] == one["by_triton"]
    assert one["second"] == one["by_triton"]


def test_a_form_is_remembered_by_what_triton_looks_at(found: dict) -> None:
    assert found["portable"]["new"] == len(found["portable"]["first"]) - 1  # Q and K are transposed by one
    assert found["again"]["new"] == 0
    assert found["another scale"]["new"] == 3  # forward, dK with dV, and dQ
    assert found["not aligned"]["new"] >= 3  # V's quantisation, and what reads V in the backward


def test_a_hook_on_triton_s_launches_is_called(found: dict) -> None:
    assert not any(any(launch) for launch in found["without hooks"])
    assert all(all(launch) for launch in found["with a hook"])


def test_what_is_remembered_is_bounded(found: dict) -> None:
    assert 0 < found["left"] <= len(found["one too many"]["first"])
