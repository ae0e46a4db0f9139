"""Attention over the tokens of two GPUs is attention on one: SageBwd's bitwise, full precision to bf16's rounding."""

import json

import pytest
import torch

from sagebwd.kernels.hopper import SWITCH
from tests.distributed.context_cases import GPU_CASES
from tests.distributed.launch import torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    file = tmp_path_factory.mktemp("context") / "found.json"
    program = ["-m", "tests.distributed.context_program", str(file)]
    answer = torchrun(program, ranks=2, timeout=600, without=(SWITCH,))  # as users have it
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", GPU_CASES)
def test_two_gpus_compute_what_one_does(found: dict, name: str) -> None:
    tensors = found[f"{name}, 2 ranks"]
    if GPU_CASES[name].config:
        assert {key: result["difference"] for key, result in tensors.items() if not result["equal"]} == {}
    else:
        assert {key: result["difference"] for key, result in tensors.items() if result["difference"] > 0.01} == {}
