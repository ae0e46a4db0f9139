"""Which device training will use, asked in another process: the asker keeps no CUDA context and imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from sagebwd.errors import UserError


@dataclass(frozen=True)
class Device:
    """name: the GPU's, or "CPU". gpus: how many are visible. backend: what computes SageBwd there."""

    name: str
    gpus: int
    backend: str

    def describe(self, ranks: int) -> str:
        """One line for a person, such as "NVIDIA H200, Triton kernels"."""
        return f"{f'{ranks} x ' if ranks > 1 else ''}{self.name}, {self.backend}"

    def check(self, ranks: int) -> None:
        """UserError: more ranks than GPUs. On CPU any number goes."""
        if self.gpus and ranks > self.gpus:
            raise UserError(f"--nproc is {ranks}, but {self.gpus} GPU(s) are visible: lower it")


def probe() -> Device:
    """Ask a fresh interpreter, in the environment that the arms will get."""
    answer = subprocess.run([sys.executable, "-m", "sagebwd.device"], stdout=subprocess.PIPE, text=True, check=False)
    if answer.returncode:
        raise UserError("torch does not start (its message is above): run `make setup`")
    return Device(**json.loads(answer.stdout.splitlines()[-1]))


def _here() -> Device:
    import torch

    if not torch.cuda.is_available():
        return Device("CPU", 0, "PyTorch reference")
    return Device(torch.cuda.get_device_name(0), torch.cuda.device_count(), "Triton kernels")


if __name__ == "__main__":
    print(json.dumps(asdict(_here())))
