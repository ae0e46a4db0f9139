"""Launch parameters follow the GPU's shared memory, and what cannot fit is refused with a remedy that works."""

import itertools
import re

import pytest
import torch

from sagebwd.attention import QuantConfig
from sagebwd.attention.config import BLOCKS
from sagebwd.kernels import tuning
from sagebwd.kernels.common import padded_dim
from sagebwd.kernels.compile_check import ARCHITECTURES
from sagebwd.kernels.hopper import scores

DIMS = (32, 64, 72, 80, 96, 112, 128, 192, 256)
RULES = ({}, {"smooth_q": True}, {"products": "scores"})
GRID = list(itertools.product(ARCHITECTURES, DIMS, BLOCKS, BLOCKS, RULES))


def launches(arch, dim, config, monkeypatch):
    monkeypatch.setattr(tuning, "capability", lambda device: arch)
    args = (torch.device("cpu"), padded_dim(dim), config)
    if config.products == "scores":
        return [part(*args) for part in (tuning.scores_forward, tuning.scores_backward_kv, tuning.scores_backward_q)]
    by_key = [part.launch for part in tuning.backward_kv(*args)]
    return [tuning.forward(*args), *by_key, tuning.backward_q(*args)]


def test_dk_and_dv_are_each_computed_once(monkeypatch):
    for dim in DIMS:
        parts = tuning.backward_kv(torch.device("cpu"), padded_dim(dim), QuantConfig())
        assert sum(part.dk for part in parts) == sum(part.dv for part in parts) == 1


def test_every_call_is_launched_within_the_limits_or_refused(monkeypatch):
    for arch, dim, q, k, rule in GRID:
        config = QuantConfig(block_q=q, block_k=k, **rule)
        if tuning.refusal(arch, dim, config) is None:
            assert all(1 <= launch.stages <= 3 for launch in launches(arch, dim, config, monkeypatch))


def test_the_remedy_of_a_refusal_is_accepted():
    refused = 0
    for arch, dim, q, k, rule in GRID:
        reason = tuning.refusal(arch, dim, QuantConfig(block_q=q, block_k=k, **rule))
        if reason is None:
            continue
        refused += 1
        if match := re.search(r"set both to (\d+)$", reason):
            block = int(match[1])
            assert tuning.refusal(arch, dim, QuantConfig(block_q=block, block_k=block, **rule)) is None
        else:
            assert re.search(r"QuantConfig\.block_[qk] is 16: on a GPU set it to 32 or more$", reason)
    assert refused


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dim", DIMS)
def test_the_default_runs_everywhere(arch, dim):
    for rule in RULES:
        assert tuning.refusal(arch, dim, QuantConfig(**rule)) is None


@pytest.mark.parametrize("dim", scores.DIMS)
def test_hopper_s_scores_backward_has_all_registers_and_no_more(dim):
    """A warpgroup that asks for more than the others gave back would wait for ever."""
    tune = tuning.hopper_scores_backward(dim)
    at_first = 65536 // (3 * 128) // 8 * 8  # of a thread; all are multiples of 8
    assert tune.first + tune.second + tune.third == 3 * at_first
    assert tune.first % 8 == tune.second % 8 == tune.third % 8 == 0
    assert tune.stages in (2, 4)


def test_a_big_tile_gets_a_shorter_pipeline_on_a_small_gpu(monkeypatch):
    config = QuantConfig(block_q=128, block_k=128)
    big, small = ([launch.stages for launch in launches(arch, 128, config, monkeypatch)] for arch in (90, 120))
    assert all(b >= s for b, s in zip(big, small, strict=True))
    assert min(big) == 2
    assert min(small) == 1
    assert "need" in tuning.refusal(120, 256, config)


def test_an_unknown_gpu_is_taken_to_have_the_least_memory():
    config = QuantConfig(block_q=128, block_k=128)
    assert tuning.refusal(121, 256, config) == tuning.refusal(120, 256, config).replace("12.0", "12.1")
