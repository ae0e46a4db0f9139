"""From a micro-batch to its losses: the same model call and the same sums for every engine."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.attention.zigzag import Zigzag
from sagebwd.megatron.documents import packed_documents
from sagebwd.training.engine import Batch


def token_losses(
    model: torch.nn.Module, batch: Batch, device: torch.device, *, pack: bool, zigzag: Zigzag | None = None
) -> tuple[Tensor, Tensor]:
    """Every token's loss and its mask: [sequences, context], or [1, tokens] where documents are packed.

    model: Megatron's, in whatever wrappers. batch: on the CPU. zigzag: with context parallelism this rank's place;
    [sequences, context / size], of its tokens alone.
    """
    if zigzag:
        batch = {name: zigzag.cut(value, 1) for name, value in batch.items()}
    packed = None
    if pack:
        packed = packed_documents(batch["position_ids"], device)
        batch = {name: value.view(1, -1) for name, value in batch.items()}
    batch = _to(device, batch)
    tokens, positions, labels = batch["tokens"], batch["position_ids"], batch["labels"]
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=packed)
    return losses, batch["loss_mask"]


def sums(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a micro-batch's losses [batch, tokens]: their sum, for the gradient; the tokens counted; both, for the log.

    What Megatron's schedules want of a loss function (calculate_per_token_loss).
    """
    total, tokens = (losses * mask).sum(), mask.sum()
    return total, tokens.to(torch.int), torch.stack((total.detach().double(), tokens.double()))


def _to(device: torch.device, batch: Batch) -> Batch:
    if device.type == "cpu":
        return batch
    return {name: value.pin_memory().to(device, non_blocking=True) for name, value in batch.items()}
