"""Compile the kernels for a GPU that is not there, and read what the compiler made of them.

Inside `compile_only(target)` every Triton launch compiles its kernel for the target and runs nothing, so that the very
code that launches the kernels says what is compiled. Triton's bundled cuobjdump then tells registers, spills and
shared memory.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from sagebwd.kernels import tuning
from sagebwd.kernels.uniform import read_unwritten


class Compiled(NamedTuple):
    name: str
    constants: dict[str, object]
    warps: int
    stages: int
    registers: int  # a thread
    spilled: int  # bytes a thread, in local memory
    shared: int  # bytes a block
    tensor: int  # columns of tensor memory, on the GPUs that have it
    added_waits: int  # waits for asynchronous products that ptxas added, where it lets none overlap anything
    unwritten: list[str]  # uniform registers that are read where none has been written (`uniform`), with such products
    asm: dict[str, object]


class _StandIn:
    """The parts of a Triton driver that compilation asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        """A kernel keeps what it compiled by device: one of its own for each target."""
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def compile_only(capability: int) -> Iterator[list[Compiled]]:
    """Compiles each launch for sm_`capability`; yields the list that fills with what was compiled, without repeats."""
    compiled: list[Compiled] = []
    seen: set[int] = set()
    run = JITFunction.run

    def warm_up(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            keep.append(kernel)
            meta = kernel.metadata
            registers, spilled, *of_products = _resources(kernel.asm["cubin"], kernel.asm["ptx"])
            constants = {n: v for n, v in kwargs.items() if n.isupper()}
            launch = (meta.num_warps, meta.num_stages)
            needs = (registers, spilled, meta.shared, getattr(meta, "tmem_size", None) or 0)
            compiled.append(Compiled(meta.name, constants, *launch, *needs, *of_products, kernel.asm))
        return kernel

    keep: list[object] = []  # so that ids stay unique
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(_StandIn(capability))
    JITFunction.run = warm_up
    of_device, tuning.capability = tuning.capability, lambda device: capability
    try:
        yield compiled
    finally:
        tuning.capability = of_device
        JITFunction.run = run
        driver._active = before


def _resources(cubin: bytes, ptx: str) -> tuple[int, int, int, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = _cuobjdump("-res-usage", file)
        code = _cuobjdump("-sass", file) if "wgmma" in ptx else ""
        unwritten = read_unwritten(file) if "wgmma" in ptx else []
    registers = int(re.search(r"REG:(\d+)", text).group(1))
    # STACK counts what the kernel keeps in local memory: with no arrays of its own, that is spilled registers.
    spilled = int(re.search(r"STACK:(\d+)", text).group(1))
    return registers, spilled, code.count("WARPGROUP.DEPBAR") - ptx.count("wgmma.wait_group"), unwritten


def _cuobjdump(option: str, file: Path) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), option, str(file)], capture_output=True, text=True, check=True).stdout
