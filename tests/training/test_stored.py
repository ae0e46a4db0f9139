"""Tensor-parallel shards of a parameter: the whole from them, and others from the whole."""

import itertools

import pytest
import torch

from sagebwd.training.stored import cut, merge


@pytest.mark.parametrize(("dim", "stride"), itertools.product((0, 1), (1, 2)))
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1)])
def test_shards_of_one_size_make_those_of_another(dim: int, stride: int, before: int, after: int) -> None:
    whole = torch.arange(16 * 24).view(16, 24)
    shards = [cut(whole, rank, before, dim, stride) for rank in range(before)]
    assert torch.equal(merge(shards, dim, stride), whole)
    again = [cut(merge(shards, dim, stride), rank, after, dim, stride) for rank in range(after)]
    assert torch.equal(merge(again, dim, stride), whole)


def test_both_halves_of_swiglu_are_sharded() -> None:
    """Each rank has its part of the gate, then its part of up, as Megatron's linear_fc1 wants it."""
    gate, up = torch.zeros(4, 3), torch.ones(4, 3)
    mine = cut(torch.cat((gate, up)), 1, 2, 0, 2)
    assert torch.equal(mine, torch.cat((gate[2:], up[2:])))
