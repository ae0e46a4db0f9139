"""The error of SageBwd's rules against FP64, as a table: what docs/numerics.md holds.

    python -m sagebwd.attention.error_table

On the inputs of the paper's Table 1 (Gaussian; Q and K of standard deviation sigma, V and dO of 1), and with a common
offset on the keys, as trained keys have. Length, dim and mask are ours, since the paper states none.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.attention import reference
from sagebwd.attention.config import QuantConfig

HEADS, TOKENS, DIM = 16, 512, 64
NAMES = ("O", "dQ", "dK", "dV")


class Error(NamedTuple):
    rel_l2: float  # ||x' - x|| / ||x||
    cos_sim: float  # cosine of the flattened tensors


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """(O, dQ, dK, dV) of causal attention in FP64; all [batch, heads, tokens, dim], as many keys as queries."""
    q, k, v, do = (x.double() for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    p = (q @ k.mT * scale).masked_fill(hidden, -math.inf).softmax(-1)
    o = p @ v
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
    return o, ds @ k * scale, ds.mT @ q * scale, p.mT @ do


def errors(config: QuantConfig, sigma: float, key_offset: float = 0.0, seed: int = 0) -> tuple[Error, ...]:
    """Errors of O, dQ, dK and dV. key_offset: standard deviation, in sigmas, of a vector that a head's keys share."""
    random = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, HEADS, TOKENS, DIM, generator=random) for _ in range(4))
    k = k + key_offset * torch.randn(1, HEADS, 1, DIM, generator=random)
    q, k = q * sigma, k * sigma
    args = {"causal": True, "softmax_scale": DIM**-0.5, "config": config}
    o, saved = reference.forward(q, k, v, **args)
    ours = (o, *reference.backward(do, v, o, saved, n=TOKENS, **args))
    return tuple(_error(x.double(), true) for x, true in zip(ours, exact(q, k, v, do), strict=True))


def _error(x: Tensor, true: Tensor) -> Error:
    cosine = torch.nn.functional.cosine_similarity(x.flatten(), true.flatten(), dim=0)
    return Error(((x - true).norm() / true.norm()).item(), cosine.item())


def row(first: str, config: QuantConfig, sigma: float, key_offset: float = 0.0) -> str:
    cells = [f"{e.rel_l2:.4f} / {e.cos_sim:.5f}" for e in errors(config, sigma, key_offset)]
    return f"| {first} | {' | '.join(cells)} |"


def main() -> None:
    head = f"| {' | '.join(NAMES)} |\n|{'---|' * (2 + len(NAMES))}"
    print(f"Rel-L2 / CosSim. Causal, {TOKENS} tokens, {HEADS} heads of {DIM}, blocks of 64, K-smoothing on.\n")
    print(f"| sigma | P and dS, delta {head}")
    for sigma, granularity, delta in itertools.product((1, 3, 5, 8, 10), ("tile", "row"), ("stale", "matched")):
        config = QuantConfig(granularity=granularity, delta=delta)
        print(row(f"{sigma} | {granularity}, {delta}", config, sigma))
    print("\nThe other switches, at sigma = 1, row, stale unless said otherwise.\n")
    print(f"| key offset | switch {head}")
    switches = {
        "K-smoothing (default)": QuantConfig(),
        "none": QuantConfig(smooth_k=False),
        "K- and Q-smoothing": QuantConfig(smooth_q=True),
        "K-smoothing, project": QuantConfig(project=True),
        "none, project": QuantConfig(smooth_k=False, project=True),
        "blocks of 128": QuantConfig(block_q=128, block_k=128),
    }
    for offset, (name, config) in itertools.product((0, 4), switches.items()):
        print(row(f"{offset} sigma | {name}", config, 1, offset))


if __name__ == "__main__":
    main()
