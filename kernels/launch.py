"""Launches a kernel as `kernel[grid](...)` does, at a fraction of what that costs the host.

Triton binds and specialises each of some thirty arguments at every launch. Here what it compiled is found again by all
that it can have looked at: dtypes and alignment of the tensors, and every number as it is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver

MOST = 4096  # forms that are remembered, of all kernels; then from the start

_compiled: dict[tuple, tuple[Any, tuple]] = {}


def launch(kernel: Any, programs: int, tensors: tuple, numbers: tuple, **constants: Any) -> None:
    """kernel[(programs,)](*tensors, *numbers, **constants), on the current device and stream.

    tensors: the kernel's first parameters, each a tensor, None or a TMA descriptor. numbers: those that follow them.
    constants: all its tl.constexpr parameters, which come last, by name; and Triton's options.
    """
    if not _on_gpu(tensors[0]):  # the interpreter, or compilation alone
        kernel[(programs,)](*tensors, *numbers, **constants)
        return
    active = driver.active
    device = active.get_current_device()
    key = (id(kernel), device, numbers, tuple([_kind(x) for x in tensors]), *constants, *constants.values())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[(programs,)](*tensors, *numbers, **constants)
        if len(_compiled) >= MOST:
            _compiled.clear()
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        _compiled[key] = compiled, tuple(constants[name] for name in names)
        return
    compiled, last = found
    if _hooks(knobs.runtime.launch_enter_hook) or _hooks(knobs.runtime.launch_exit_hook):  # a profiler of Triton's
        compiled[(programs, 1, 1)](*tensors, *numbers, *last)
        return
    # What compiled[grid] does, without what it prepares for hooks.
    stream = active.get_current_stream(device)
    compiled.run(
        programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *tensors, *numbers, *last
    )  # fmt: skip


def _hooks(chain: Any) -> bool:
    return chain is not None and bool(getattr(chain, "calls", True))


def _on_gpu(x: Any) -> bool:
    return (x if isinstance(x, Tensor) else x.base).is_cuda


def _kind(x: Any) -> Any:
    if x is None:
        return None
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return x.kind
