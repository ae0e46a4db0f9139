"""The error of SageBwd's rules against FP64, as a table: what docs/numerics.md holds.

    python -m sagebwd.attention.error_table [--captured FILE]

On the inputs of the paper's Table 1 (Gaussian; Q and K of standard deviation sigma, V and dO of 1), with a common
offset on the keys, as trained keys have, and on tensors of a trained model that `sagebwd probe --save FILE` captured.
The Gaussian inputs' length, dim and number of heads are ours, since the paper states none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from sagebwd.attention import captured
from sagebwd.attention.config import QuantConfig
from sagebwd.attention.errors import OUTPUTS, Error, Tally, mean, measure
from sagebwd.errors import UserError

HEADS, TOKENS, DIM = 16, 512, 64
SIGMAS = (1, 3, 5, 8, 10)
OFFSET = 4  # sigmas

RULES = {
    "tile, stale (the paper's text)": QuantConfig(granularity="tile"),
    "tile, matched": QuantConfig(granularity="tile", delta="matched"),
    "tile, stale, project": QuantConfig(granularity="tile", project=True),
    "row, stale": QuantConfig(granularity="row"),
    "row, matched": QuantConfig(granularity="row", delta="matched"),
    "row, stale, project": QuantConfig(granularity="row", project=True),
    "row, stale, blocks of 32": QuantConfig(granularity="row", block_q=32, block_k=32),
    "row, stale, blocks of 128 x 64": QuantConfig(granularity="row", block_q=128, block_k=64),
    "row, stale, blocks of 128": QuantConfig(granularity="row", block_q=128, block_k=128),
    "tile, stale, blocks of 128": QuantConfig(granularity="tile", block_q=128, block_k=128),
    "row, stale, K not smoothed": QuantConfig(granularity="row", smooth_k=False),
    "row, matched, K not smoothed": QuantConfig(granularity="row", delta="matched", smooth_k=False),
    "row, stale, K and Q smoothed": QuantConfig(granularity="row", smooth_q=True),
    "scores (only Q K^T in INT8)": QuantConfig(products="scores"),
}
"""What the table compares. Blocks of 64 and K-smoothing unless said otherwise; block_q x block_k."""


def gaussian(
    configs: Mapping[str, QuantConfig], sigma: float, key_offset: float = 0.0, seed: int = 0
) -> dict[str, dict[str, Error]]:
    """Errors by rule and tensor. key_offset: standard deviation, in sigmas, of a vector that a head's keys share."""
    random = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, HEADS, TOKENS, DIM, generator=random) for _ in range(4))
    k = k + key_offset * torch.randn(1, HEADS, 1, DIM, generator=random)
    tallies = {config: Tally() for config in configs.values()}
    measure(q * sigma, k * sigma, v, do, softmax_scale=DIM**-0.5, tallies=tallies)
    return {name: tallies[config].errors() for name, config in configs.items()}


def of_captured(
    configs: Mapping[str, QuantConfig], path: Path, device: torch.device
) -> tuple[str, dict[str, dict[str, Error]]]:
    """What was captured, in words, and errors by rule and tensor: means over the layers."""
    found = captured.Reader(path)
    layers = []
    for layer in range(found.layers):
        tallies = {config: Tally() for config in configs.values()}
        for q, k, v, do in found.documents(layer, device):
            measure(q, k, v, do, softmax_scale=found.softmax_scale, tallies=tallies)
        layers.append({name: tallies[config].errors() for name, config in configs.items()})
    errors = {name: {tensor: mean([layer[name][tensor] for layer in layers]) for tensor in OUTPUTS} for name in configs}
    return found.description, errors


def table(sections: Iterator[tuple[str, dict[str, dict[str, Error]]]]) -> Iterator[str]:
    """Lines of Markdown: a row for each rule of each section."""
    yield f"| inputs | rule | {' | '.join(OUTPUTS)} |"
    yield f"|---|---|{'---|' * len(OUTPUTS)}"
    for inputs, errors in sections:
        for rule, of_rule in errors.items():
            cells = [f"{of_rule[name].rel_l2:.4f} / {of_rule[name].cos_sim:.5f}" for name in OUTPUTS]
            yield f"| {inputs} | {rule} | {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--captured", type=Path, metavar="FILE", help="tensors that `sagebwd probe --save FILE` wrote")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        sections = []
        if arguments.captured:
            description, errors = of_captured(RULES, arguments.captured, device)
            sections.append(("captured", errors))
            print(f"captured: {description}; means over the layers.")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"sigma: causal, {TOKENS} tokens, {HEADS} heads of {DIM}. Rel-L2 / CosSim; blocks of 64, K smoothed.\n")
    sections += [(f"sigma {sigma}", gaussian(RULES, sigma)) for sigma in SIGMAS]
    sections.append((f"sigma 1, key offset {OFFSET}", gaussian(RULES, 1, OFFSET)))
    print("\n".join(table(iter(sections))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
