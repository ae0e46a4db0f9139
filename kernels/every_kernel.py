"""Run every kernel once, forward and backward, on small odd shapes: `make sanitize` has compute-sanitizer watch it.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m sagebwd.kernels.every_kernel

Values are checked elsewhere (tests/gpu); this program has one purpose: every load and store of every configuration.
"""

from __future__ import annotations

import argparse
import itertools
from typing import NamedTuple

import torch

from sagebwd.attention import QuantConfig, context_triton, triton_backend
from sagebwd.attention.zigzag import Zigzag
from sagebwd.kernels import hopper
from sagebwd.kernels.hopper.scores_rows import MOST_KEYS
from sagebwd.kernels.packing import Packed


class Case(NamedTuple):
    dim: int
    causal: bool
    config: QuantConfig
    window: int | None = None
    packed: bool = False
    m: int = 200
    n: int = 300


RULES = {
    "row": QuantConfig(),
    "tile, matched": QuantConfig(granularity="tile", delta="matched"),
    "blocks of 128": QuantConfig(block_q=128, block_k=128),
    "blocks of 32": QuantConfig(block_q=32, block_k=32, delta="matched"),
    "smooth_q": QuantConfig(smooth_q=True),
    "project": QuantConfig(project=True),
    "project, tile": QuantConfig(project=True, granularity="tile", smooth_k=False),
    "scores": QuantConfig(products="scores"),
}


def cases() -> list[Case]:
    rules = [
        Case(dim, causal, config) for dim, causal, config in itertools.product((64, 128), (True, False), RULES.values())
    ]
    masks = [Case(64, True, RULES[name], window=70) for name in ("row", "smooth_q", "scores")]
    documents = [
        Case(64, True, config, window, packed=True)
        for config, window in itertools.product(
            (RULES["row"], RULES["smooth_q"], RULES["project"], RULES["scores"]), (None, 70)
        )
    ]
    dims = [Case(dim, True, RULES[name]) for dim, name in itertools.product((32, 72, 256), ("row", "scores"))]
    lengths = [
        Case(dim, True, RULES[name], m=m, n=n)
        for dim, name, (m, n) in itertools.product((64, 128), ("row", "scores"), ((1, 1), (257, 65), (512, 512)))
    ]
    lengths += [Case(dim, True, RULES["scores"], m=65, n=MOST_KEYS + 1) for dim in (64, 128)]  # FP32 sums of dQ
    return [*rules, *masks, *documents, *dims, *lengths]


def run(case: Case) -> None:
    def new(heads: int, tokens: int) -> torch.Tensor:
        """Strided as Megatron's [tokens, batch, heads, dim] is."""
        x = torch.randn(tokens, 1, heads, case.dim, device="cuda", dtype=torch.bfloat16)
        return x.permute(1, 2, 0, 3)

    q, k, v, do = new(4, case.m), new(2, case.n), new(2, case.n), new(4, case.m)
    args: dict = {"causal": case.causal, "softmax_scale": case.dim**-0.5, "config": case.config}
    args["window"] = case.window
    if case.packed:
        cu_q, cu_k = (
            torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in ([0, 1, 1, 130, 200], [0, 5, 9, 9, 300])
        )
        args["packed"] = Packed(cu_q, cu_k, 129, 291)
    _, saved = triton_backend.forward(q, k, v, **args)
    triton_backend.backward(do, saved, **args)
    torch.cuda.synchronize()


def run_context(dim: int, config: QuantConfig) -> None:
    shapes = [(1, heads, 512, dim) for heads in (4, 2, 2, 4)]
    launch_context(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes), config)
    torch.cuda.synchronize()


def launch_context(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, config: QuantConfig) -> None:
    """What the second of two context-parallel ranks launches, with nobody to gather from. q, k, v, do [B, H, N, D]: the
    tokens of both."""
    zigzag, tokens = Zigzag(1, 2), q.shape[2]
    options = (zigzag, q.shape[3] ** -0.5, config)
    queries, keys, values = context_triton.round_operands(q, k, v, context_triton.key_sums(k), tokens, config)
    q_mine, k_mine, v_mine, do_mine = (zigzag.cut(x, 2) for x in (q, k, v, do))
    queries_mine, keys_mine = (tuple(zigzag.cut(x, 1) for x in pair) for pair in (queries, keys))
    o, lse2 = context_triton.attend(queries_mine, keys, values, q_mine, k_mine, *options)
    found = context_triton.statistics(do_mine, o, lse2, queries_mine, keys, v, *options)
    context_triton.query_gradient(do_mine, o, queries_mine, keys, v, found, *options)
    everything = tuple(torch.cat([x, x], 1) for x in found)
    context_triton.key_gradients(do, v_mine, queries, keys_mine, everything, *options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "OF"), help="every OF-th, from I on")
    first, step = parser.parse_args().part
    torch.manual_seed(0)
    part = cases()[first::step]
    # The portable kernels, then those for Hopper wherever they can
    paths = ("0", "1") if torch.cuda.get_device_capability() == (9, 0) else ("0",)
    spread = list(itertools.product((64, 128), ("row", "tile, matched"))) if first == 0 else []
    for choice in paths:
        with hopper.switched(choice):
            for case in part:
                run(case)
            for dim, rule in spread:
                run_context(dim, RULES[rule])
    print(f"{len(part)} configurations ran on {torch.cuda.get_device_name()}", flush=True)


if __name__ == "__main__":
    main()
