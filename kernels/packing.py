"""Packed documents: where each lies in the tensors and in the workspaces, worked out on the device, without waiting.

A workspace gives each document whole slots of ROW_PADDING rows, so that every block and tile starts at a document's
start. How many slots there are is known from shapes alone, as a bound: those past the last document belong to none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# Rows of every workspace are padded to a multiple of this: the largest quantisation block and the largest kernel tile.
ROW_PADDING = 128


class Packed(NamedTuple):
    """Documents i that lie one after another: tokens [cu_seqlens[i], cu_seqlens[i + 1]) of a tensor [1, H, tokens, D].

    A document may have more keys than queries or fewer, or none of either. Tokens past the last document are in none:
    their results are zeros.
    """

    cu_seqlens_q: Tensor  # [documents + 1] int32, from 0, never falling
    cu_seqlens_k: Tensor  # [documents + 1] int32
    max_seqlen_q: int
    max_seqlen_k: int


class Tables(NamedTuple):
    """One row for each slot of a workspace: first token, tokens and first row of the slot's document, then the same for
    that document's other side (its keys where the slot is of queries). A slot of no document has one of no tokens.
    """

    q: Tensor  # [slots of queries, 6] int32
    k: Tensor  # [slots of keys, 6] int32


def tables(packed: Packed, tokens_q: int, tokens_k: int) -> Tables:
    """The tables of `packed`, by a few operations on the device. No result of theirs is waited for.

    Whatever cu_seqlens holds, no table points outside the tokens or the slots.
    """
    cu = torch.stack((packed.cu_seqlens_q.clamp(0, tokens_q), packed.cu_seqlens_k.clamp(0, tokens_k)))
    cu = cu.int().cummax(1).values
    tokens = cu.diff()  # [2, documents]
    slots = (tokens + (ROW_PADDING - 1)) // ROW_PADDING
    ends = slots.cumsum(1, dtype=torch.int32)
    own = torch.stack((cu[:, :-1], tokens, (ends - slots) * ROW_PADDING), -1)
    rows = pad(torch.cat((own, own.flip(0)), -1), (0, 0, 0, 1))  # the last row: a document of no tokens
    return Tables(_spread(rows[0], ends[0], tokens_q), _spread(rows[1], ends[1], tokens_k))


def _spread(rows: Tensor, ends: Tensor, tokens: int) -> Tensor:
    """A row for each slot, from one for each document; `ends` counts the slots up to a document's end."""
    documents = ends.shape[0]
    slot = torch.arange((tokens + documents * (ROW_PADDING - 1)) // ROW_PADDING, dtype=torch.int32, device=ends.device)
    document = torch.searchsorted(ends, slot, right=True)
    table = rows[document]
    table[:, 2] = torch.where(document < documents, table[:, 2], slot * ROW_PADDING)
    return table
