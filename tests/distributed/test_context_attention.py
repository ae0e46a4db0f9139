"""Attention with its tokens on two or four ranks is attention on one: SageBwd's bitwise, full precision to rounding."""

import json

import pytest
import torch

from sagebwd.attention import QuantConfig
from sagebwd.attention.context import sage_attention_context
from sagebwd.attention.zigzag import Zigzag
from tests.distributed.context_cases import CASES
from tests.distributed.launch import torchrun

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the program found on four ranks with gloo, by case, ranks and tensor."""
    file = tmp_path_factory.mktemp("context") / "found.json"
    answer = torchrun(["-m", "tests.distributed.context_program", str(file)], ranks=4, timeout=240, **ENVIRONMENT)
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, ranks) for name, case in CASES.items() if case.config for ranks in case.ranks]
)
def test_sagebwd_is_bitwise_that_of_one_rank(found: dict, name: str, ranks: int) -> None:
    """O, dQ, dK and dV of all ranks together; and K^ and V^ with their scales, as they travel, in INT8."""
    tensors = found[f"{name}, {ranks} ranks"]
    assert {name for name, result in tensors.items() if not result["equal"]} == set()
    assert tensors["k_hat"]["dtype"] == tensors["v_hat"]["dtype"] == "torch.int8"


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, ranks) for name, case in CASES.items() if not case.config for ranks in case.ranks]
)
def test_full_precision_is_that_of_one_rank_to_rounding(found: dict, name: str, ranks: int) -> None:
    limit = 8e-3 if CASES[name].dtype == "bfloat16" else 1e-6
    assert {n: r["difference"] for n, r in found[f"{name}, {ranks} ranks"].items() if r["difference"] > limit} == {}


def test_every_rank_has_as_many_pairs_of_query_and_key() -> None:
    positions = torch.arange(64)
    pairs = {int((Zigzag(rank, 4).cut(positions, 0) + 1).sum()) for rank in range(4)}
    assert len(pairs) == 1
    held = torch.cat([Zigzag(rank, 4).cut(positions, 0) for rank in range(4)])
    assert torch.equal(held.sort().values, positions)


@pytest.mark.parametrize(
    ("tokens", "config", "names"),
    [
        (192, QuantConfig(), "make the context a multiple of 512, such as 512"),
        (640, QuantConfig(), "multiple of 512, such as 1024 or 1536"),
        (256, QuantConfig(smooth_q=True), "smooth_q=True is not supported with context parallelism: set it to False"),
        (256, QuantConfig(products="scores"), "products='scores' is not supported .*: set it to 'all'"),
        (256, QuantConfig(project=True), "project=True"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_remedy(tokens: int, config: QuantConfig, names: str) -> None:
    q = torch.randn(tokens, 1, 2, 16)
    with pytest.raises(ValueError, match=names):
        sage_attention_context(q, q, q, zigzag=Zigzag(0, 2), config=config)
