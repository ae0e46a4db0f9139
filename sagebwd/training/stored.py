"""The tensors of a checkpoint, by name, for a reader of any layout.

    weight/<parameter>       FP32: the master weight where the model's is bf16
    exp_avg/<parameter> ...  AdamW's moments
    rng/...                  random states

Parameters have the names of a model that no pipeline cuts. Each tensor-parallel rank has its shard under the same
names, in a file of its own, and each pipeline stage its layers. Where the data-parallel ranks share out a shard among
them, each has a file, with a part of the shard, flattened, under <name>@<its first element>.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter

from sagebwd.megatron.stages import whole_name
from sagebwd.training.checkpoint import Manifest
from sagebwd.training.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")
FILE = re.compile(r"tp_(\d+)(?:_pp_(\d+))?(?:_dp_(\d+))?\.safetensors")


def file_name(tensor_rank: int, data_rank: int | None = None, stage: int | None = None) -> str:
    """data_rank: of a rank that holds only its part of the shard. stage: where a pipeline cuts the model."""
    stages = "" if stage is None else f"_pp_{stage:02d}"
    part = "" if data_rank is None else f"_dp_{data_rank:04d}"
    return f"tp_{tensor_rank:02d}{stages}{part}.safetensors"


def part_name(name: str, start: int) -> str:
    return f"{name}@{start}"


def shape(parameter: Parameter) -> torch.Size:
    """Of the whole parameter, also where ZeRO-3 has taken it apart."""
    return getattr(parameter, "ds_shape", parameter.shape)


class Stored:
    """A whole checkpoint, open for reading by one rank."""

    def __init__(self, files: dict[str, Any], here: World) -> None:
        """files: by name, opened by safetensors."""
        self.here = here
        of_rank = {name: tuple(int(number or 0) for number in FILE.fullmatch(name).groups()) for name in sorted(files)}
        self.tensor_size, self.stages = (1 + max(rank[at] for rank in of_rank.values()) for at in (0, 1))
        self.random: dict[tuple[int, int], Any] = {}  # (tensor-parallel rank, stage) -> the first file
        # tensor-parallel rank -> name -> where it is: (first element, file, key)
        self.places: list[dict[str, list[tuple[int, Any, str]]]] = [defaultdict(list) for _ in range(self.tensor_size)]
        for file_name, (rank, stage, _) in of_rank.items():
            file = files[file_name]
            self.random.setdefault((rank, stage), file)
            for key in file.keys():  # noqa: SIM118
                name, _, start = key.partition("@")
                self.places[rank][name].append((int(start or 0), file, key))

    def mine(self, kind: str, name: str, parameter: Parameter) -> Tensor:
        """This tensor-parallel rank's shard, on the parameter's device, whatever the layout that wrote it.

        kind: weight, or one of MOMENTS. name: in the whole model (see `stages`).
        """
        key, like = f"{kind}/{name}", shape(parameter)
        if not getattr(parameter, "tensor_model_parallel", False):
            shard = self._shard(0, key, like)
        elif self.tensor_size == self.here.tensor_size:
            shard = self._shard(self.here.tensor_rank, key, like)
        else:
            dim, stride = parameter.partition_dim, parameter.partition_stride
            like = [-1 if index == dim else length for index, length in enumerate(like)]
            whole = merge([self._shard(rank, key, like) for rank in range(self.tensor_size)], dim, stride)
            shard = cut(whole, self.here.tensor_rank, self.here.tensor_size, dim, stride)
        return shard.to(parameter.device)

    def random_states(self) -> dict[str, Tensor]:
        """By name without the prefix; none with other tensor-parallel ranks or stages, since they are a rank's own."""
        if (self.tensor_size, self.stages) != (self.here.tensor_size, self.here.stages):
            return {}
        file = self.random[self.here.tensor_rank, self.here.stage]
        return {key.removeprefix("rng/"): file.get_tensor(key) for key in file.keys() if key.startswith("rng/")}  # noqa: SIM118

    def _shard(self, rank: int, name: str, like: list[int] | torch.Size) -> Tensor:
        places = sorted(self.places[rank][name], key=lambda place: place[0])
        parts = [file.get_tensor(key) for _, file, key in places]
        return parts[0] if places[0][2] == name else torch.cat(parts).view(like)


@contextmanager
def opened(manifest: Manifest, here: World) -> Iterator[Stored]:
    """A checkpoint that is whole (checkpoint.verify)."""
    with ExitStack() as stack:
        names = [name for name in manifest.files if FILE.fullmatch(name)]
        files = {name: stack.enter_context(safe_open(manifest.folder / name, framework="pt")) for name in names}
        yield Stored(files, here)


def restore_weights(manifest: Manifest, model: torch.nn.Module, here: World) -> None:
    """Put a whole checkpoint's weights alone into a freshly built model, or one in Megatron's Float16Module."""
    inner = getattr(model, "module", model)
    with opened(manifest, here) as stored, torch.no_grad():
        for name, parameter in inner.named_parameters():
            parameter.copy_(stored.mine("weight", whole_name(inner, name), parameter))


def merge(shards: list[Tensor], dim: int, stride: int) -> Tensor:
    """The whole parameter of its tensor-parallel shards. stride: parts that each are sharded (2: SwiGLU's gate, up)."""
    parts = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([part[index] for index in range(stride) for part in parts], dim)


def cut(whole: Tensor, rank: int, size: int, dim: int, stride: int) -> Tensor:
    """The shard of one of `size` ranks; the inverse of `merge`."""
    return torch.cat(whole.chunk(stride * size, dim)[rank::size], dim)
