"""TMA descriptors of the tensors that Hopper's kernels load, and how their tiles lie in shared memory."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_GLUON = {torch.int8: gl.int8, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def descriptor(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> TensorDescriptor:
    """x, taken to have `shape` and `strides` [elements], in tiles of `block`: what differs between calls is the
    address, and Gluon takes longer to check the rest than to launch a kernel."""
    made = object.__new__(TensorDescriptor)
    vars(made).update(vars(_checked(x.dtype, shape, strides, block)), base=x)
    return made


def whole_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows (at most 128 elements of each) of a workspace [heads, rows, width], as matrix units read
    them."""
    *_, width = x.shape
    return descriptor(x, (x.numel() // width, width), (width, 1), (rows, min(width, 128)))


def tokens(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` tokens of x [B, H, L, D] as it came, zeros past the last one. Any strides that are not
    `unreadable`."""
    return descriptor(x, tuple(x.shape), tma_strides(x), (1, 1, rows, x.shape[-1]))


def vector(x: Tensor, length: int) -> TensorDescriptor:
    """Tiles of `length` elements of a contiguous x."""
    return descriptor(x, (x.numel(),), (1,), (length,))


def plain_rows(x: Tensor, width: int, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows of a contiguous x taken as [-1, width], one after the other in shared memory too."""
    return descriptor(x, (x.numel() // width, width), (width, 1), (rows, width))


def tma_strides(x: Tensor) -> tuple[int, ...]:
    """x's strides; where a dimension has one element its stride does not matter, and is made one that TMA takes."""
    *outer, inner = x.stride()
    return *(s if size > 1 else x.shape[-1] for s, size in zip(outer, x.shape, strict=False)), inner


def unreadable(x: Tensor) -> bool:
    """Whether TMA cannot read x: its rows have to begin at multiples of 16 bytes, and their elements to be adjacent."""
    *outer, inner = tma_strides(x)
    return inner != 1 or x.data_ptr() % 16 != 0 or any(s == 0 or s * x.element_size() % 16 for s in outer)


@lru_cache(1024)
def _checked(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> TensorDescriptor:
    address = torch.empty(0, dtype=dtype)
    return TensorDescriptor(address, list(shape), list(strides), list(block), _layout(block, dtype))


def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    if dtype == torch.float32:
        return gl.NVMMASharedLayout(0, 32, rank=len(block))
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON[dtype])
