"""Attention over the tokens of two GPUs is attention on one: SageBwd's bitwise, full precision to bf16's rounding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.context_cases import GPU_CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    file = tmp_path_factory.mktemp("context") / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    answer = subprocess.run(
        [*command, "-m", "tests.distributed.context_program", str(file)],
        env={name: value for name, value in os.environ.items() if name != "SAGEBWD_HOPPER"},  # as users have it
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", GPU_CASES)
def test_two_gpus_compute_what_one_does(found: dict, name: str) -> None:
    tensors = found[f"{name}, 2 ranks"]
    if GPU_CASES[name].config:
        assert {key: result["difference"] for key, result in tensors.items() if not result["equal"]} == {}
    else:
        assert {key: result["difference"] for key, result in tensors.items() if result["difference"] > 0.01} == {}
