"""What of a run lies in tensors, by name: to host memory in one go, and back, also at another tensor-parallel size.

    weight/<parameter>       FP32: the master weight where the model's is bf16
    exp_avg/<parameter> ...  AdamW's moments
    rng/...                  random states

Each tensor-parallel rank has its shard under the same names. Data-parallel ranks hold the same, so one of them writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter

from sagebwd.training.checkpoint import Manifest, file_name
from sagebwd.training.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class State:
    """What changes from step to step."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Megatron's names, without those of its wrappers."""
        for name, parameter in self.model.named_parameters():
            yield name.removeprefix("module.").removeprefix("module."), parameter

    def inner(self) -> Iterator[torch.optim.Optimizer]:
        """The torch optimizers inside Megatron's."""
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            yield optimizer.optimizer


class Snapshot:
    """Host memory for one rank's tensors, taken once and used again: pinned for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {}
        self.arrived = torch.cuda.Event() if device.type == "cuda" else None

    def take(self, state: State) -> None:
        """Copy. On a GPU it is queued, before any later change of the tensors, and the host goes on: see `wait`."""
        cuda = self.device.type == "cuda"
        found = dict(_tensors(state, self.device))
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


def updates(state: State) -> int:
    """How many steps the optimizer has made; a skipped one is none."""
    for optimizer in state.inner():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # torch counts in the parameter's state, Apex and Transformer Engine in the group
                step = optimizer.state.get(parameter, {}).get("step", group.get("step"))
                if step is not None:
                    return int(step)
    return 0


def restore(manifest: Manifest, state: State, here: World) -> None:
    """Put a checkpoint that is whole into model, optimizer, schedule and random states."""
    with _opened(manifest) as files:
        moments: dict[Parameter, dict[str, Tensor]] = {}
        with torch.no_grad():
            for name, parameter in state.parameters():
                main = getattr(parameter, "main_param", parameter)
                weight = _mine(files, f"weight/{name}", parameter, here)
                main.copy_(weight)
                if main is not parameter:
                    parameter.copy_(main)
                if manifest.position.adam_step:
                    moments[main] = {kind: _mine(files, f"{kind}/{name}", parameter, here) for kind in MOMENTS}
        for optimizer in state.inner():
            _load_moments(optimizer, moments, manifest.position.adam_step)
        state.schedule.num_steps = 0
        state.schedule.step(manifest.position.step)
        _restore_random_states(files, manifest.tensor, here)


def restore_weights(manifest: Manifest, model: torch.nn.Module, here: World) -> None:
    """Put a whole checkpoint's weights alone into a freshly built model, or one in Megatron's Float16Module."""
    with _opened(manifest) as files, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_mine(files, f"weight/{name.removeprefix('module.')}", parameter, here))


@contextmanager
def _opened(manifest: Manifest) -> Iterator[list]:
    """The file of each tensor-parallel rank that wrote the checkpoint."""
    with ExitStack() as stack:
        paths = [manifest.folder / file_name(rank) for rank in range(manifest.tensor)]
        yield [stack.enter_context(safe_open(path, framework="pt")) for path in paths]


def _tensors(state: State, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    moments = {parameter: found for optimizer in state.inner() for parameter, found in optimizer.state.items()}
    for name, parameter in state.parameters():
        main = getattr(parameter, "main_param", parameter)
        yield f"weight/{name}", main.detach()
        if main in moments:
            for kind in MOMENTS:
                yield f"{kind}/{name}", moments[main][kind]
    yield "rng/cpu", torch.get_rng_state()
    for name, tensor in get_cuda_rng_tracker().get_states().items():
        yield f"rng/tracker/{name}", tensor
    if device.type == "cuda":
        yield "rng/cuda", torch.cuda.get_rng_state(device)


def _mine(files: list, name: str, parameter: Parameter, here: World) -> Tensor:
    """This rank's shard, on the parameter's device; cut from the whole where the tensor-parallel size is another."""
    if not getattr(parameter, "tensor_model_parallel", False):
        shard = files[0].get_tensor(name)
    elif len(files) == here.tensor_size:
        shard = files[here.tensor_rank].get_tensor(name)
    else:
        layout = (parameter.partition_dim, parameter.partition_stride)
        whole = merge([file.get_tensor(name) for file in files], *layout)
        shard = cut(whole, here.tensor_rank, here.tensor_size, *layout)
    return shard.to(parameter.device)


def merge(shards: list[Tensor], dim: int, stride: int) -> Tensor:
    """The whole parameter of its tensor-parallel shards. stride: parts that each are sharded (2: SwiGLU's gate, up)."""
    parts = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([part[index] for index in range(stride) for part in parts], dim)


def cut(whole: Tensor, rank: int, size: int, dim: int, stride: int) -> Tensor:
    """The shard of one of `size` ranks; the inverse of `merge`."""
    return torch.cat(whole.chunk(stride * size, dim)[rank::size], dim)


def _load_moments(optimizer: torch.optim.Optimizer, moments: dict[Parameter, dict[str, Tensor]], step: int) -> None:
    content = optimizer.state_dict()
    content["state"] = {}
    if step:
        in_state = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            # A step tensor of its own for each: AdamW counts it up in place.
            own = {"step": torch.tensor(float(step), dtype=torch.float32)} if in_state else {}
            content["state"][index] = own | moments[parameter]
        if not in_state:
            for group in content["param_groups"]:
                group["step"] = step
    optimizer.load_state_dict(content)


def _restore_random_states(files: list, tensor: int, here: World) -> None:
    """They are a tensor-parallel rank's own. At another size those stay with which the run was seeded: nothing is drawn
    after the weights (dropout is 0)."""
    if tensor != here.tensor_size:
        return
    file = files[here.tensor_rank]
    names = set(file.keys())
    torch.set_rng_state(file.get_tensor("rng/cpu"))
    if ("rng/cuda" in names) != (here.device.type == "cuda"):  # written on the other kind of device
        return
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: file.get_tensor(f"rng/tracker/{name}") for name in tracker.get_states()})
    if here.device.type == "cuda":
        torch.cuda.set_rng_state(file.get_tensor("rng/cuda"), here.device)
