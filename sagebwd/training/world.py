"""The processes of a run: torch.distributed, Megatron's parallel state and the device, on CPU and GPU alike."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import distributed

from sagebwd.errors import UserError
from sagebwd.megatron import cpu_compat
from sagebwd.training import environment


@dataclass(frozen=True)
class World:
    """This process's place: rank = ((stage * data_size + data_rank) * context_size + context_rank) * tensor_size +
    tensor_rank, Megatron's order, so that those who talk most are neighbours. Ranks of one data_rank see the same
    samples."""

    rank: int
    size: int
    tensor_rank: int
    tensor_size: int
    context_rank: int
    context_size: int
    data_rank: int
    data_size: int
    stage: int  # of the pipeline, from the embedding to the loss
    stages: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes logs, events and the manifest."""
        return self.rank == 0

    @property
    def replica(self) -> int:
        """This process's place among those that hold the same weights, and sum their gradients."""
        return self.data_rank * self.context_size + self.context_rank

    @property
    def last_stage(self) -> bool:
        """Whether this process computes losses."""
        return self.stage == self.stages - 1

    def agreed(self, ask: Callable[[], Any]) -> Any:
        """What `ask` answers on the first rank, on every rank. Of a UserError the first rank alone tells: the others
        end with its exit code."""
        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer[0] = ask()
            except UserError as error:
                answer[1] = error
        if self.size > 1:
            distributed.broadcast_object_list(answer, device=self.device)
        if answer[1] is not None:
            if self.first:
                raise answer[1]
            raise SystemExit(2)
        return answer[0]


def size() -> int:
    """Ranks of this run: torchrun's, or one. Known before anything is initialised."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def join(
    tensor: int, seed: int, timeout_minutes: float = 10, *, context: int = 1, pipeline: int = 1
) -> Iterator[World]:
    """Join the run's processes (torchrun's, or a world of one without it) and leave them all at the end.

    NCCL and the GPU of LOCAL_RANK where CUDA is available, gloo and the CPU elsewhere. Every random state is seeded:
    the same seed on every rank for what is replicated (weights), another for each TP rank's model-parallel stream.
    tensor, context, pipeline: sizes whose product divides the number of ranks (budget.data_parallel_size has refused
    anything else). timeout_minutes: after which a collective that does not end fails.
    """
    if tensor > 1 or context > 1:
        environment.provide(environment.SHARED_LAYERS)
    device = own_device()
    with cpu_compat.active(), process_group(device, timedelta(minutes=timeout_minutes)):
        before = _groups()
        try:
            # gloo groups beside NCCL's serve optimizers and checkpoints that are not used here
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=pipeline,
                context_parallel_size=context,
                create_gloo_process_groups=False,
            )
            made = [group for group in _groups() if group not in before]
            if distributed.get_rank():
                logging.getLogger("sagebwd").setLevel(logging.WARNING)  # every rank would say the same
            torch.manual_seed(seed)
            model_parallel_cuda_manual_seed(seed)
            torch.manual_seed(seed)  # on a CPU the line above moves the one generator there is
            yield World(
                rank=distributed.get_rank(),
                size=distributed.get_world_size(),
                tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
                tensor_size=tensor,
                context_rank=parallel_state.get_context_parallel_rank(),
                context_size=context,
                data_rank=parallel_state.get_data_parallel_rank(),
                data_size=parallel_state.get_data_parallel_world_size(),
                stage=parallel_state.get_pipeline_model_parallel_rank(),
                stages=pipeline,
                device=device,
            )
        finally:
            parallel_state.destroy_model_parallel()
        # Megatron only forgets them. On a GPU each that was used holds memory (an H200: most of a gigabyte) while the
        # default group lives, which may be the caller's. After an error there is nobody to meet: the process ends.
        for group in made:
            distributed.destroy_process_group(group)


def _groups() -> list[distributed.ProcessGroup]:
    """Those that this process is in, in the order in which they were made, which is the same on every rank."""
    return list(distributed.distributed_c10d._world.pg_map)


def own_device() -> torch.device:
    """The GPU of LOCAL_RANK, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextlib.contextmanager
def process_group(device: torch.device, timeout: timedelta) -> Iterator[None]:
    """torch.distributed's default group, unless the caller has made one: torchrun's store serves one only.

    A GPU becomes the current one: a barrier or an object that is sent goes through that.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if distributed.is_initialized():
        yield
        return
    environment.provide(environment.EVERY_RANK)
    # Without device_id: with it torch connects NCCL in each of the twenty-odd groups that Megatron makes, used or not.
    # On H200s each start then took seconds more (two tiny runs 21 s instead of 7), and ten processes 131 GiB of a GPU.
    options: dict[str, Any] = {"backend": "nccl" if device.type == "cuda" else "gloo", "timeout": timeout}
    if "RANK" not in os.environ:
        options |= {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group(**options)
    try:
        yield
    finally:
        distributed.destroy_process_group()
