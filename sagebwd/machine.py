"""Facts about the machine at hand, for reports: versions, commit, driver, GPUs."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("sagebwd", "torch", "triton", "numpy", "megatron-core", "deepspeed")
COMMIT = "COMMIT"  # in a snapshot of the package: the commit it was taken at


class Gpu(NamedTuple):
    index: int
    name: str
    capability: int  # 10 x major + minor
    memory: int  # bytes
    shared: int  # bytes of shared memory that one block may use


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Python's version and each package's; None: not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the working tree that this code lies in or was taken from, "-dirty" if changed since; or None."""
    here = Path(__file__).parent
    if (here / COMMIT).is_file():
        return (here / COMMIT).read_text(encoding="utf-8").strip() or None
    command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    return _answer(command)


def driver() -> str | None:
    """The NVIDIA driver's version; None where there is none."""
    answer = _answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.splitlines()[0] if answer else None


def gpus() -> list[Gpu]:
    """The GPUs that torch sees."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        shared = facts.shared_memory_per_block_optin
        found.append(Gpu(index, facts.name, 10 * facts.major + facts.minor, facts.total_memory, shared))
    return found


def _answer(command: list[str]) -> str | None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no such program here
        return None
    return (answer.stdout.strip() or None) if answer.returncode == 0 else None
