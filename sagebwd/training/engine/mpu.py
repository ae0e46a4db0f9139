"""Megatron's process groups under the names by which DeepSpeed asks for them."""

from __future__ import annotations

from megatron.core import parallel_state
from torch import distributed


class ModelParallelUnit:
    """DeepSpeed's "model parallel" is Megatron's tensor parallel: there are no other model-parallel ranks here."""

    def get_model_parallel_rank(self) -> int:
        return parallel_state.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        return parallel_state.get_tensor_model_parallel_world_size()

    def get_model_parallel_group(self) -> distributed.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return parallel_state.get_data_parallel_rank()

    def get_data_parallel_world_size(self) -> int:
        return parallel_state.get_data_parallel_world_size()

    def get_data_parallel_group(self) -> distributed.ProcessGroup:
        return parallel_state.get_data_parallel_group()

    def get_data_parallel_group_ranks(self) -> list[int]:
        return distributed.get_process_group_ranks(self.get_data_parallel_group())
