"""A run's tensors to host memory in one go, and back (see `stored` for their names)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from sagebwd.training.checkpoint import Manifest
from sagebwd.training.engine import Engine
from sagebwd.training.stored import opened
from sagebwd.training.world import World


class Snapshot:
    """Host memory for one rank's tensors, taken once and used again: pinned for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {}
        self.arrived = torch.cuda.Event() if device.type == "cuda" else None

    def take(self, engine: Engine) -> None:
        """Copy. On a GPU it is queued, before any later change of the tensors, and the host goes on: see `wait`."""
        cuda = self.device.type == "cuda"
        found = dict(engine.tensors()) | dict(_random_states(self.device))
        for name, tensor in found.items():
            if name not in self.tensors:
                self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=cuda)
            self.tensors[name].copy_(tensor, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record()

    def wait(self) -> None:
        """Until the copies have arrived. Any thread may."""
        if self.arrived is not None:
            self.arrived.synchronize()


def restore(manifest: Manifest, engine: Engine, here: World) -> None:
    """Put a checkpoint that is whole into weights, optimizer, schedule and random states."""
    with opened(manifest, here) as stored:
        engine.load(stored, manifest.position.adam_step)
        engine.schedule.num_steps = 0
        engine.schedule.step(manifest.position.step)
        _restore_random_states(stored.random_states(), here.device)


def _random_states(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    yield "rng/cpu", torch.get_rng_state()
    for name, tensor in get_cuda_rng_tracker().get_states().items():
        yield f"rng/tracker/{name}", tensor
    if device.type == "cuda":
        yield "rng/cuda", torch.cuda.get_rng_state(device)


def _restore_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Where there are none, those stay with which the run was seeded: nothing is drawn after the weights (dropout is
    0)."""
    if not states:
        return
    torch.set_rng_state(states["cpu"])
    if ("cuda" in states) != (device.type == "cuda"):  # written on the other kind of device
        return
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: states[f"tracker/{name}"] for name in tracker.get_states()})
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
