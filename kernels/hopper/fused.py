"""Launches the fused backward on Hopper GPUs. Nothing calls it yet but tests: see NOTES-backward.md."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagebwd.kernels import tuning
from sagebwd.kernels.hopper.backward import BLOCK, _columns, _given, _rows
from sagebwd.kernels.hopper.backward_fused import hopper_backward_fused
from sagebwd.kernels.hopper.dq_sums import round_dq
from sagebwd.kernels.quantise import Quantised


class Form(NamedTuple):
    """What a version of the kernel does otherwise; the ones that are to be measured are in NOTES-backward.md."""

    stages: int  # query tiles in shared memory
    # How a warpgroup's products follow each other. "one": a product is added before the next begins (D = 128: what fits
    # in the registers). "dq": but dQ's first begins under dK's last. "two": the next is under way while one is added.
    # "ahead" (D = 64): so are S and dP of the next tile.
    chain: str
    early_dv: bool = True  # dV's product begins before dS is rounded
    rotate: bool = False  # programs of a head begin at different query tiles; not with a causal mask
    add_dq: bool = True  # False, to see what the additions cost: dQ is wrong


FORMS = {64: Form(5, "ahead"), 128: Form(2, "one", early_dv=False)}


def query_numbers(q: Quantised, do_quantised: Quantised, statistics: Tensor) -> Tensor:
    """[B H M' / 64 * 256] fp32: of each 64 queries lse2, delta, and 64 times the scales of Q and of dO."""
    lse2, delta = statistics.unflatten(1, (-1, BLOCK)).unbind(-1)
    scales = (x.scale[..., None].expand_as(lse2) for x in (q, do_quantised))
    return torch.stack((lse2, delta, *scales), 2).flatten()


def pair_order(rows: Tensor) -> Tensor:
    """[B K, N', D] int8 to [B K, D, N'], with token 8b + g of each 16 at 2g + b: as `backward_fused` stores dS."""
    return rows.mT.unflatten(-1, (-1, 2, 8)).transpose(-1, -2).flatten(-3).contiguous()


def backward(
    q: Quantised, k: Quantised, do_quantised: Quantised, statistics: Tensor, do: Tensor, v: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, *, causal: bool, softmax_scale: float,
    form: Form | None = None, k_pairs: Tensor | None = None, numbers: Tensor | None = None,
) -> None:  # fmt: skip
    """`hopper.backward.backward` by one kernel; dk and dv must be such as TMA can write.

    Not deterministic: dQ's terms are added to memory in the order in which programs come.
    k_pairs, numbers: of `pair_order(k.rows)` and `query_numbers`, where the caller has them.
    """
    b, h, m, dim = do.shape
    kv_heads, n = v.shape[1:3]
    m_pad, n_pad = q.rows.shape[1], k.rows.shape[1]
    form = form or FORMS[dim]
    k_pairs = pair_order(k.rows) if k_pairs is None else k_pairs
    numbers = query_numbers(q, do_quantised, statistics) if numbers is None else numbers
    sums = torch.zeros(b * h, m_pad // BLOCK, BLOCK * dim, dtype=torch.float32, device=do.device)
    key_tiles = triton.cdiv(n, 2 * BLOCK)
    hopper_backward_fused[(b * kv_heads * key_tiles,)](
        _rows(k.rows), _columns(k_pairs), _given(v), _rows(q.rows), _columns(q.columns), _given(do),
        _columns(do_quantised.columns), _vectors(numbers), _given(dk), _given(dv), k.scale, sums,
        h, h // kv_heads, m, n, m_pad, n_pad, softmax_scale, softmax_scale * tuning.LOG2E, key_tiles,
        CAUSAL=causal, D=dim, STAGES=form.stages, CHAIN=form.chain, EARLY_DV=form.early_dv, ADD_DQ=form.add_dq,
        ROTATE=form.rotate and not causal, num_warps=4,
    )  # fmt: skip
    tiles = m_pad // BLOCK
    round_dq[(b * h * tiles,)](sums, dq, *dq.stride(), h, m, tiles, softmax_scale, D=dim, num_warps=4)


def _vectors(x: Tensor) -> TensorDescriptor:
    return TensorDescriptor(x, [x.numel()], [1], [4 * BLOCK], gl.NVMMASharedLayout(0, 32, rank=1))
