"""The tensors of a checkpoint, by name, for a reader of any layout.

    weight/<parameter>       FP32: the master weight where the model's is bf16
    exp_avg/<parameter> ...  AdamW's moments
    rng/...                  random states

Each tensor-parallel rank has its shard under the same names, in a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter

from sagebwd.training.checkpoint import Manifest
from sagebwd.training.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")


def file_name(tensor_rank: int) -> str:
    return f"tp_{tensor_rank:02d}.safetensors"


class Stored:
    """A whole checkpoint, open for reading by one rank."""

    def __init__(self, files: list, here: World) -> None:
        """files: of each tensor-parallel rank that wrote, opened by safetensors."""
        self.files, self.here = files, here

    def mine(self, kind: str, name: str, parameter: Parameter) -> Tensor:
        """This tensor-parallel rank's shard, on the parameter's device, whatever the size that wrote it.

        kind: weight, or one of MOMENTS.
        """
        key = f"{kind}/{name}"
        if not getattr(parameter, "tensor_model_parallel", False):
            shard = self.files[0].get_tensor(key)
        elif len(self.files) == self.here.tensor_size:
            shard = self.files[self.here.tensor_rank].get_tensor(key)
        else:
            layout = (parameter.partition_dim, parameter.partition_stride)
            whole = merge([file.get_tensor(key) for file in self.files], *layout)
            shard = cut(whole, self.here.tensor_rank, self.here.tensor_size, *layout)
        return shard.to(parameter.device)

    def random_states(self) -> dict[str, Tensor]:
        """By name without the prefix; none at another tensor-parallel size, since they are a rank's own."""
        if len(self.files) != self.here.tensor_size:
            return {}
        file = self.files[self.here.tensor_rank]
        return {key.removeprefix("rng/"): file.get_tensor(key) for key in file.keys() if key.startswith("rng/")}  # noqa: SIM118


@contextmanager
def opened(manifest: Manifest, here: World) -> Iterator[Stored]:
    """A checkpoint that is whole (checkpoint.verify)."""
    with ExitStack() as stack:
        paths = [manifest.folder / file_name(rank) for rank in range(manifest.tensor)]
        yield Stored([stack.enter_context(safe_open(path, framework="pt")) for path in paths], here)


def restore_weights(manifest: Manifest, model: torch.nn.Module, here: World) -> None:
    """Put a whole checkpoint's weights alone into a freshly built model, or one in Megatron's Float16Module."""
    with opened(manifest, here) as stored, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored.mine("weight", name.removeprefix("module."), parameter))


def merge(shards: list[Tensor], dim: int, stride: int) -> Tensor:
    """The whole parameter of its tensor-parallel shards. stride: parts that each are sharded (2: SwiGLU's gate, up)."""
    parts = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([part[index] for index in range(stride) for part in parts], dim)


def cut(whole: Tensor, rank: int, size: int, dim: int, stride: int) -> Tensor:
    """The shard of one of `size` ranks; the inverse of `merge`."""
    return torch.cat(whole.chunk(stride * size, dim)[rank::size], dim)
