"""The environment variables that a rank sets itself, whoever starts it, each with its reason.

launch/environment.sh holds the others: what must be there before Python is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

EVERY_RANK = {
    # No reduction inside the NVLink switch: it sums in another order than rings and trees do, so that losses would
    # depend on the machine, and it needs a multicast service that containers and virtual machines often lack (NCCL then
    # fails at start).
    "NCCL_NVLS_ENABLE": "0",
    # A collective that fails or outlasts its time-out ends its process, and so the run, instead of waiting for ever.
    # The time-out, NCCL's as gloo's, is the recipe's: a minute more than health.hang_minutes, so that the run's own
    # watchdog is first, which knows the rank that the others wait for.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
}

SHARED_LAYERS = {  # tensor and context parallelism
    # one hardware queue: a collective issued before a product that hides it then also starts before it
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}

DETERMINISTIC = {
    # cuBLAS with several streams picks workspaces, and so sums, by chance; it reads this when it is first used
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL would choose the algorithm of an all-reduce, and so its order of summation, by what it measures
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}


def provide(variables: Mapping[str, str]) -> None:
    """Before CUDA and NCCL are first used. What is set already stays as it is."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
