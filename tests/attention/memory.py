"""What autograd keeps between forward and backward."""

from collections.abc import Callable

import torch
from torch import Tensor


def saved_bytes(call: Callable[[], Tensor]) -> int:
    """Bytes of the tensors that `call` saves for its backward, each counted once."""
    kept: dict[tuple, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.device, x.data_ptr(), x.shape, x.dtype] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    return sum(kept.values())
