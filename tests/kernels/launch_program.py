"""What test_launch.py starts: forward and backward under a driver that compiles for sm_90 and, instead of launching,
writes down what it is given. Prints one JSON object.

A process of its own: it may not run Triton's interpreter, and the driver stands in for the whole process.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["SAGEBWD_HOPPER"] = "0"

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sagebwd.attention import QuantConfig, triton_backend
from sagebwd.kernels import hopper, launch

launched: list[list[Any]] = []
hooked: list[list[bool]] = []  # of each launch: what hooks are told, and the hooks
OPTIONS = {"causal": True, "softmax_scale": 0.125, "config": QuantConfig()}


class Utils:
    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 1, 2, 32, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}


class Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
        told, enter, leave, *arguments = rest
        hooked.append([x is not None for x in (told, enter, leave)])
        assert (y, z, stream) == (1, 1, 7)
        launched.append([self.name, x, *map(described, arguments)])


class StandIn:
    utils, launcher_cls = Utils(), Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def described(x: Any) -> Any:
    if isinstance(x, Tensor):
        return [str(x.dtype), list(x.shape), list(x.stride()), x.data_ptr() % 16]
    if hasattr(x, "block_shape"):
        return [str(x.base.dtype), list(x.shape), list(x.strides), list(x.block_shape), str(x.layout)]
    return x


def call(q: Tensor, k: Tensor, v: Tensor, **changed: Any) -> list[list[Any]]:
    """What one forward and backward launch."""
    launched.clear()
    options = OPTIONS | changed
    o, saved = triton_backend.forward(q, k, v, **options)
    triton_backend.backward(torch.empty_like(o), saved, **options)
    return list(launched)


def both(*tensors: Tensor, **changed: Any) -> dict[str, Any]:
    """Launched by Triton itself; launched twice by `launch`; how many forms it remembered meanwhile."""
    launch._on_gpu = lambda _: False
    by_triton = call(*tensors, **changed)
    launch._on_gpu = lambda _: True
    before = len(launch._compiled)
    first, second = call(*tensors, **changed), call(*tensors, **changed)
    return {"by_triton": by_triton, "first": first, "second": second, "new": len(launch._compiled) - before}


def main() -> None:
    driver.set_active(StandIn())
    triton_backend.backend_for = lambda _: "triton"
    q, k, v = (torch.zeros(1, heads, 128, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    found = {"portable": both(q, k, v)}
    found["again"] = both(q, k, v)
    found["another scale"] = both(q, k, v, softmax_scale=0.25)
    found["not aligned"] = both(q, k, torch.zeros(1, 2, 128, 68, dtype=torch.bfloat16)[..., 4:])
    with hopper.switched("1"):
        found["hopper"] = both(q, k, v)
    hooked.clear()
    call(q, k, v)
    found["without hooks"] = list(hooked)
    knobs.runtime.launch_exit_hook.add(print)
    hooked.clear()
    call(q, k, v)
    found["with a hook"] = list(hooked)
    knobs.runtime.launch_exit_hook.remove(print)
    launch.MOST = len(launch._compiled)
    found["one too many"] = both(q, k, v, softmax_scale=0.5)
    found["left"] = len(launch._compiled)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
