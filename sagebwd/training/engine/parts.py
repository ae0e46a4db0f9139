"""Where in ZeRO's flat buffers a parameter's FP32 master weight lies: the part of it that this rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from sagebwd.training.stored import shape


@dataclass(frozen=True)
class Part:
    """buffer[at : at + numel] is the parameter, flattened, from its element `start` on.

    buffer: what the torch optimizer inside updates, and so the key of its state, whose tensors are laid out alike.
    """

    buffer: Tensor
    at: int
    numel: int
    start: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view of this part in the buffer, or in a tensor of the optimizer's state for it."""
        return tensor.view(-1).narrow(0, self.at, self.numel)

    def cut(self, whole: Tensor) -> Tensor:
        """The same part of the whole parameter."""
        return whole.reshape(-1).narrow(0, self.start, self.numel)


def part(parameter: Parameter, optimizer: Any) -> Part | None:
    """None: this rank holds nothing of it.

    optimizer: DeepSpeed's. What is read is what its own checkpoint code reads: grad_position and
    fp32_partitioned_groups_flat of ZeRO-3, and of the other stages the mapping that link_hp_params leaves.
    """
    if hasattr(parameter, "ds_tensor"):
        group, at, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = parameter.ds_tensor.ds_numel * optimizer._get_param_partition_rank(parameter)
        numel = min(numel, math.prod(shape(parameter)) - start)  # the last one is padded
        return Part(optimizer.fp32_partitioned_groups_flat[group], at, numel, start) if numel > 0 else None
    if not hasattr(parameter, "_hp_mapping"):
        return Part(parameter, 0, parameter.numel(), 0)
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    (buffer,) = optimizer.param_groups[mapping.param_group_index]["params"]
    high, low = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Part(buffer, high.start, high.numel, low.start)
