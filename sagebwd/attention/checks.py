"""What the operator takes, and which backend computes it. A refusal is a ValueError that says what to change."""

from __future__ import annotations

import os
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from sagebwd.attention.config import QuantConfig

MAX_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [B, H, M, D], k and v [B, K, N, D]. Reads no data, so that it serves tracing as well."""
    if k.shape[:-1] == v.shape[:-1] and k.shape[-1] != v.shape[-1]:
        raise ValueError(
            f"k and v differ in head dim ({_shapes(q, k, v)}): pad the narrower with zeros (v, and cut the output; or "
            "q and k, and pass the softmax_scale of their true dim)"
        )
    if k.shape != v.shape:
        raise ValueError(f"k and v differ in shape ({_shapes(q, k, v)}): they must be alike")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k differ in batch or dim ({_shapes(q, k, v)}): they must be alike")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads do not divide into {k.shape[1]} key/value heads ({_shapes(q, k, v)}): "
            "give each key/value head the same number of query heads"
        )
    if q.shape[-1] % 8 or not 0 < q.shape[-1] <= MAX_DIM:
        raise ValueError(
            f"head dim {q.shape[-1]} is not supported: use a multiple of 8 up to {MAX_DIM} (pad with zeros and pass "
            "the softmax_scale of the true dim)"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}: move them to one device")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: cast them to one dtype")
    if q.dtype not in DTYPES:
        raise ValueError(f"dtype {q.dtype} is not supported: cast q, k and v to bfloat16 or float16")
    if q.dtype == torch.float32 and q.device.type == "cuda":
        raise ValueError("float32 is not supported on a GPU (dP is a 16-bit product): cast to bfloat16 or float16")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} as [batch, heads, tokens, dim]"


def check_documents(name: str, cu_seqlens: Tensor, tokens: int, device: torch.device) -> None:
    """The form of cu_seqlens_q or cu_seqlens_k, for `tokens` packed tokens on `device`. Reads no data."""
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"{name} is {cu_seqlens.dtype}: cast it to int32")
    if cu_seqlens.device != device:
        raise ValueError(f"{name} is on {cu_seqlens.device}, q, k and v on {device}: move it there")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{name} has shape {tuple(cu_seqlens.shape)}: it is [documents + 1], where each document begins and, last, "
            f"the number of tokens ({tokens})"
        )
    if not cu_seqlens.is_contiguous():
        raise ValueError(f"{name} has stride {cu_seqlens.stride()}: call contiguous() on it")


def check_document_lengths(name: str, cu_seqlens: Tensor, tokens: int, max_seqlen: int) -> None:
    """The contents, for a CPU tensor: on a GPU, reading them would wait for it."""
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    if ends[0] != 0 or min(lengths) < 0 or ends[-1] > tokens:
        raise ValueError(f"{name} is {ends}: let it rise from 0 to the number of tokens, {tokens}")
    if max(lengths) > max_seqlen:
        raise ValueError(
            f"a document of {name} has {max(lengths)} tokens: raise max_seqlen{name[-2:]}, now {max_seqlen}"
        )


def backend_for(x: Tensor) -> str:
    """ "triton" on CUDA; on a CPU "reference", or "triton-interpreter" where TRITON_INTERPRET=1 asks for it."""
    kind = x.device.type
    if kind == "cuda" or kind == "meta":  # meta tensors have shapes only, and those are a GPU's
        return "triton"
    if kind != "cpu":
        raise ValueError(f"device {x.device} is not supported: move q, k and v to a CUDA GPU or to the CPU")
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "reference"
    if x.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter multiplies bfloat16 wrongly: use float16 or float32 there")
    return "triton-interpreter"


@cache
def check_gpu(index: int, dim: int, config: QuantConfig) -> None:
    """The GPU at hand has the INT8 matrix instructions that the kernels are written for, and the memory on its chip."""
    capability = torch.cuda.get_device_capability(index)
    if capability < (8, 0):
        raise ValueError(
            f"GPU {torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}: "
            "the kernels need 8.0 or newer; use torch.nn.functional.scaled_dot_product_attention there"
        )
    from sagebwd.kernels import tuning  # brings Triton along, which a CPU run does not need

    refusal = tuning.refusal(10 * capability[0] + capability[1], dim, config)
    if refusal:
        raise ValueError(refusal)
