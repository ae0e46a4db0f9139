"""The backward on Hopper GPUs: dK and dV with a key tile a program, dQ with a query tile a program. No atomics.

What is taken here is the common case; `backward_refusal` says what is left to the portable kernels, and why.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagebwd.attention.config import QuantConfig
from sagebwd.kernels import tuning
from sagebwd.kernels.hopper.backward_kv import hopper_backward_kv
from sagebwd.kernels.hopper.backward_q import hopper_backward_q
from sagebwd.kernels.hopper.descriptors import descriptor, tokens, unreadable, vector, whole_rows
from sagebwd.kernels.launch import launch
from sagebwd.kernels.quantise import Quantised

BLOCK = 64  # rows of a warpgroup, tokens of a stage, and the one quantisation block that the kernels know
DIMS = (64, 128)


class Launch(NamedTuple):
    groups: int  # warpgroups of 64 rows
    stages: int  # tiles of 64 tokens in shared memory
    registers: int  # a thread of these warpgroups


# H200, ms at N = 8192, 16,384 tokens, all keys: D = 64: dK and dV 4.91, dQ 2.92 (two groups: 3.28). D = 128: dK 2.58,
# dV 1.67, dQ 2.36; both sums of dK and dV at once spill (4.41), and so do three groups of dK (4.49) and of dQ (3.30).
KEY_LAUNCHES = {
    64: ((Launch(2, 6, 240), True, True),),  # launch, for dK, for dV
    128: ((Launch(2, 4, 240), True, False), (Launch(3, 4, 160), False, True)),
}
QUERY_LAUNCHES = {64: Launch(3, 6, 160), 128: Launch(2, 4, 240)}


def backward_refusal(
    capability: int, dim: int, config: QuantConfig, *, window: bool, packed: bool, tensors: tuple[Tensor, ...] = ()
) -> str | None:
    """Why the portable kernels serve such a backward instead of these; None: these do.

    capability: 10 x major + minor. tensors: dO and V as they come, [batch, heads, tokens, dim] of any strides; without
    them the answer is for ones that TMA can read.
    """
    if capability != 90:
        return f"they are for compute capability 9.0, and this is {capability / 10:.1f}"
    if dim not in DIMS:
        return f"they know head dims {' and '.join(map(str, DIMS))}"
    if packed or window:
        return "they know no packed documents" if packed else "they know no window"
    for name, known in (("block_q", BLOCK), ("block_k", BLOCK), ("granularity", "row"), ("smooth_q", False)):
        if getattr(config, name) != known:
            return f"they know {name}={known!r}, not {getattr(config, name)!r}"
    if config.project:
        return "they know no projection"
    if config.products != "all":
        return "they compute dV, dK and dQ in INT8"
    for name, x in zip(("dO", "V"), tensors, strict=False):
        if unreadable(x):
            return f"TMA reads rows that begin at multiples of 16 bytes, and {name} has strides {x.stride()}"
    return None


def backward(
    q: Quantised, k: Quantised, do_quantised: Quantised, statistics: Tensor, do: Tensor, v: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, *, causal: bool, softmax_scale: float,
) -> None:  # fmt: skip
    """Writes dq [B, H, M, D], dk and dv [B, K, N, D] (any strides) of a call that `backward_refusal` lets pass.

    q and k hold rows and columns, do_quantised holds columns. statistics [B H, M', 2] fp32 of rows: lse2 and delta.
    """
    lse2, delta = (x.contiguous() for x in statistics.unbind(-1))
    options = {"causal": causal, "softmax_scale": softmax_scale}
    key_side(q, k, do_quantised, lse2, delta, do, v, dk, dv, **options)
    query_side(q, k, lse2, delta, do, v, dq, **options)


def key_side(
    q: Quantised, k: Quantised, do_quantised: Quantised, lse2: Tensor, delta: Tensor, do: Tensor, v: Tensor,
    dk: Tensor, dv: Tensor, *, causal: bool, softmax_scale: float, shift: int | None = None,
) -> None:  # fmt: skip
    """Writes dk and dv. Arguments as `backward` takes; shift: with a causal mask query i sees the keys up to i + shift,
    so that the keys may be some out of the midst of a sequence; None: the last query sees every key."""
    b, h, m, dim = do.shape
    kv_heads, n = v.shape[1:3]
    numbers = (h, h // kv_heads, m, n, shift, q.rows.shape[1], k.rows.shape[1])
    scales = (softmax_scale, softmax_scale * tuning.LOG2E)
    descriptors = (
        whole_rows(k.rows, BLOCK), tokens(v, BLOCK), whole_rows(q.rows, BLOCK), _columns(q.columns),
        tokens(do, BLOCK), _columns(do_quantised.columns), vector(lse2, BLOCK), vector(delta, BLOCK),
    )  # fmt: skip
    tensors = (*descriptors, q.scale, do_quantised.scale, k.scale, dk, dv)
    for pinned, for_dk, for_dv in KEY_LAUNCHES[dim]:
        key_tiles = triton.cdiv(n, pinned.groups * BLOCK)
        launch(
            hopper_backward_kv, b * kv_heads * key_tiles, tensors,
            (*dk.stride(), *dv.stride(), *numbers, *scales, key_tiles),
            CAUSAL=causal, D=dim, DK=for_dk, DV=for_dv, num_warps=4, **_constants(pinned),
        )  # fmt: skip


def query_side(
    q: Quantised, k: Quantised, lse2: Tensor, delta: Tensor, do: Tensor, v: Tensor, dq: Tensor,
    *, causal: bool, softmax_scale: float,
) -> None:  # fmt: skip
    """Writes dq. Arguments as `backward` takes; k may hold more tokens than v, whose first are those of v."""
    b, h, m, dim = do.shape
    kv_heads, n = v.shape[1:3]
    pinned = QUERY_LAUNCHES[dim]
    row_tiles = triton.cdiv(m, pinned.groups * BLOCK)
    launch(
        hopper_backward_q, b * h * row_tiles,
        (
            whole_rows(q.rows, BLOCK), tokens(do, BLOCK), whole_rows(k.rows, BLOCK), _columns(k.columns),
            tokens(v, BLOCK), q.scale, k.scale, lse2, delta, dq,
        ),
        (
            *dq.stride(), h, h // kv_heads, m, n, q.rows.shape[1], k.rows.shape[1], softmax_scale,
            softmax_scale * tuning.LOG2E, row_tiles,
        ),
        CAUSAL=causal, D=dim, num_warps=4, **_constants(pinned),
    )  # fmt: skip


def _constants(pinned: Launch) -> dict[str, int]:
    return {"GROUPS": pinned.groups, "STAGES": pinned.stages, "REGISTERS": pinned.registers}


def _columns(x: Tensor) -> TensorDescriptor:
    bh, dp, length = x.shape
    return descriptor(x, (bh * dp, length), (length, 1), (dp, BLOCK))
