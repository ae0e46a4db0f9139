"""The cases of context-parallel attention: for the program on several ranks, and the test that reads its results."""

from typing import NamedTuple

from sagebwd.attention import QuantConfig


class Case(NamedTuple):
    config: QuantConfig | None  # None: full-precision attention
    ranks: tuple[int, ...] = (2, 4)
    tokens: int = 1024
    dtype: str = "float32"
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    interpreter: bool = False
    kernel: str = "CPU"  # of full precision; on a GPU a name of torch's SDPBackend


_SHORT = {"ranks": (2,), "tokens": 512, "batch": 1, "heads": 2, "kv_heads": 1, "interpreter": True}
CASES = {
    "full precision": Case(None),
    "full precision, bf16": Case(None, dtype="bfloat16", heads=2),
    "row, stale": Case(QuantConfig()),
    "tile, matched": Case(QuantConfig(granularity="tile", delta="matched"), ranks=(2,)),
    "blocks of 32 x 128, K not smoothed": Case(QuantConfig(block_q=32, block_k=128, smooth_k=False), ranks=(2,)),
    "bf16": Case(QuantConfig(delta="matched"), ranks=(2,), dtype="bfloat16"),
    "kernels, row, stale": Case(QuantConfig(), **_SHORT | {"batch": 2}),
    "kernels, tile, matched, blocks of 128 x 32": Case(
        QuantConfig(block_q=128, block_k=32, granularity="tile", delta="matched"), **_SHORT
    ),
    "kernels, four ranks": Case(QuantConfig(block_q=128, block_k=128), **_SHORT | {"ranks": (4,), "tokens": 1024}),
}

# Of 8192 tokens and one scale a row, Hopper's kernels on a Hopper GPU; all others the portable ones.
_GPU = {"ranks": (2,), "dtype": "bfloat16", "heads": 8, "kv_heads": 4}
GPU_CASES = {
    "row, stale, D=64, short": Case(QuantConfig(), tokens=1024, dim=64, **_GPU),
    "row, stale, D=64, long": Case(QuantConfig(), tokens=8192, dim=64, **_GPU),
    "row, stale, D=128, short": Case(QuantConfig(), tokens=1024, dim=128, **_GPU),
    "row, stale, D=128, long": Case(QuantConfig(), tokens=8192, dim=128, **_GPU),
    "row, matched, D=128, long": Case(QuantConfig(delta="matched"), tokens=8192, dim=128, **_GPU),
    "tile, matched, blocks of 128 x 64, D=64": Case(
        QuantConfig(granularity="tile", delta="matched", block_q=128), tokens=2048, dim=64, **_GPU
    ),
} | {
    f"full precision, {kernel}, D={dim}": Case(None, tokens=4096, dim=dim, kernel=kernel, **_GPU)
    for kernel in ("CUDNN_ATTENTION", "FLASH_ATTENTION")
    for dim in (64, 128)
}
