"""The end of a step's backward: gradients summed over the ranks and divided by the tokens of the global batch."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor, distributed


def finalize(model: list[torch.nn.Module], num_tokens: Tensor, **options: Any) -> None:
    """Megatron's finalize_model_grads, but nobody waits for the device: 0.16 asks it whether num_tokens is 0.

    num_tokens: those of this rank's micro-batches, a tensor on the device; never 0, since every label counts, but
    before the last stage of a pipeline, which has to tell.
    """
    finalize_model_grads(model, None, **options)
    stages = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() > 1:
        distributed.broadcast(num_tokens, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=stages)
    distributed.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    for part in model:
        part.scale_gradients(1.0 / num_tokens)
