"""Documents that share a micro-batch without seeing each other: Megatron's "thd", all tokens in one row."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import pad


def packed_documents(position_ids: Tensor, device: torch.device) -> PackedSeqParams:
    """Where the documents of a micro-batch lie once its sequences are laid end to end, for a model on `device`.

    position_ids: [sequences, context] int64 on the CPU: 0 where a document, or the part of one that a sequence holds,
    begins. cu_seqlens are [documents + 1] int32 and stay on the CPU, in pinned memory for a GPU: Megatron's RoPE reads
    them in every layer, which on a GPU would wait for it each time. max_seqlen is the context: no document is longer.
    """
    starts = (position_ids.flatten() == 0).nonzero().flatten()
    cu_seqlens = pad(starts, (0, 1), value=position_ids.numel()).int()
    if device.type == "cuda":
        cu_seqlens = cu_seqlens.pin_memory()
    longest = position_ids.shape[1]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
