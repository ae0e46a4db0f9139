"""Megatron-core where CUDA is absent: the same program on a CPU with gloo.

Megatron-core names CUDA in about thirty places of its training path: `device="cuda"` in its schedules and optimizer,
`torch.cuda.current_device()` in RoPE and its buffers, comparisons with "torch.cuda.FloatTensor", CUDA's random states.
Inside `cpu_compat.active()` those mean the CPU. Nothing else in this repository may rely on it, and nothing here runs
where CUDA is present.

Recomputing inside backward() loses the mode (a TorchFunctionMode is off inside its own handler); this repository does
not recompute activations on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Device arguments that say CUDA become the CPU, and Tensor.type() answers as a CUDA tensor would."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # type(dtype) converts; type() only names
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.device:  # only names one
            return func(*args, **kwargs)
        if any(map(_is_cuda, args)):
            args = tuple(CPU if _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):  # RoPE's, with context parallelism: memory that no device reads is not pinned
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class _NoStream:
    """CUDA's current stream, where there is none: work on a CPU is done when the call returns."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.default_generator.set_state(state)


@contextlib.contextmanager
def active() -> Iterator[None]:
    """Let Megatron-core run on the CPU; where CUDA is available, do nothing.

    CUDA's random states become states of the one CPU generator. Only `torch.cuda.manual_seed` is patched, not
    `manual_seed_all`: torch.manual_seed calls the latter, and would call itself without end.
    """
    if torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "current_device", lambda: CPU),
            (torch.cuda, "current_stream", lambda device=None: _NoStream()),
            (torch.cuda, "synchronize", lambda device=None: None),
            (torch.cuda, "manual_seed", torch.default_generator.manual_seed),
            (torch.cuda, "get_rng_state", _get_state),
            (megatron_random, "_get_cuda_rng_state", _get_state),
            (megatron_random, "_set_cuda_rng_state", _set_state),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_CudaMeansCpu())
        yield
