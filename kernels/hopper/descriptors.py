"""TMA descriptors of the tensors that Hopper's kernels load, and how their tiles lie in shared memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_GLUON = {torch.int8: gl.int8, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def descriptor(
    x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], *, plain: bool = False
) -> TensorDescriptor:
    """x, taken to have `shape` and `strides` [elements], in tiles of `block`. plain: a tile lies in shared memory row
    after row, not as matrix units read it."""
    return _of(x, _checked(x.dtype, shape, strides, block, plain))


def whole_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows (at most 128 elements of each) of a workspace [heads, rows, width], as matrix units read
    them."""
    *_, width = x.shape
    return descriptor(x, (x.numel() // width, width), (width, 1), (rows, min(width, 128)))


def tokens(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` tokens of x [B, H, L, D] as it came, zeros past the last one. Any strides that are not
    `unreadable`."""
    return _of(x, _tokens(x.dtype, x.shape, x.stride(), rows))


def vector(x: Tensor, length: int) -> TensorDescriptor:
    """Tiles of `length` elements of a contiguous x."""
    return descriptor(x, (x.numel(),), (1,), (length,), plain=True)


def plain_rows(x: Tensor, width: int, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows of a contiguous x taken as [-1, width], one after the other in shared memory too."""
    return descriptor(x, (x.numel() // width, width), (width, 1), (rows, width), plain=True)


def tma_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """`strides`; where a dimension has one element its stride does not matter, and is made one that TMA takes."""
    *outer, inner = strides
    return *(s if size > 1 else shape[-1] for s, size in zip(outer, shape, strict=False)), inner


def unreadable(x: Tensor) -> bool:
    """Whether TMA cannot read x: its rows have to begin at multiples of 16 bytes, and their elements to be adjacent."""
    return x.data_ptr() % 16 != 0 or _unreadable(x.shape, x.stride(), x.dtype)


@lru_cache(1024)
def _unreadable(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    *outer, inner = tma_strides(shape, strides)
    return inner != 1 or any(s == 0 or s * dtype.itemsize % 16 for s in outer)


def _of(x: Tensor, form: dict[str, Any]) -> TensorDescriptor:
    """What differs between calls is the address, and Gluon takes longer to check the rest than to launch a kernel."""
    made = object.__new__(TensorDescriptor)
    made.__dict__ = form | {"base": x}
    return made


@lru_cache(1024)
def _tokens(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> dict[str, Any]:
    return _checked(dtype, tuple(shape), tma_strides(shape, strides), (1, 1, rows, shape[-1]), False)


@lru_cache(1024)
def _checked(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], plain: bool
) -> dict[str, Any]:
    """A descriptor's attributes but for the tensor; `kind`: what a kernel was compiled for, see `launch`."""
    address = torch.empty(0, dtype=dtype)
    made = TensorDescriptor(address, list(shape), list(strides), list(block), _layout(block, dtype, plain))
    return vars(made) | {"kind": (dtype, plain, *block)}  # its layout follows from them


def _layout(block: tuple[int, ...], dtype: torch.dtype, plain: bool) -> gl.NVMMASharedLayout:
    if plain:
        return gl.NVMMASharedLayout(0, 8 * dtype.itemsize, rank=len(block))
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON[dtype])
