"""A checkpoint's model at work on validation sequences, and what goes through its attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from sagebwd.attention.captured import Document
from sagebwd.errors import UserError
from sagebwd.megatron.core_attention import SageBwdCoreAttention, SDPACoreAttention
from sagebwd.megatron.documents import packed_documents
from sagebwd.megatron.model import build_model
from sagebwd.tokenizer import Prepared
from sagebwd.training import metrics, stored, world
from sagebwd.training.checkpoint import Manifest
from sagebwd.training.data import validation_batches
from sagebwd.training.recipe import Parallel
from sagebwd.training.train import resolve_dtype


@dataclass(frozen=True)
class TrainedModel:
    """A model with its weights, and the micro-batches of one sequence each that it is to see. pack: data.pack."""

    module: torch.nn.Module
    pack: bool
    batches: list[dict[str, Tensor]]
    device: torch.device
    device_name: str

    @property
    def sequences(self) -> int:
        return len(self.batches)

    def captured(self) -> Iterator[list[list[Document]]]:
        """Of one sequence after another: each layer's documents, on the CPU in the model's dtype.

        The loss is the mean over the sequence's tokens. Where documents are not packed a sequence is one.
        """
        attentions = [m for m in self.module.modules() if isinstance(m, SageBwdCoreAttention | SDPACoreAttention)]
        layers = [_Layer(attention) for attention in sorted(attentions, key=lambda attention: attention.layer_number)]
        for batch in self.batches:
            self.module.zero_grad()
            self._loss(batch).backward()
            yield [layer.documents() for layer in layers]

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        packed = None
        if self.pack:
            packed = packed_documents(batch["position_ids"], self.device)
        batch = {name: value.to(self.device) for name, value in batch.items()}
        losses = self.module(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed
        )
        return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


@contextlib.contextmanager
def trained_model(manifest: Manifest, prepared: Prepared, sequences: int) -> Iterator[TrainedModel]:
    """The model of a whole checkpoint, on the GPU if there is one, else on the CPU, in the precision that it was
    trained in; all of it here, whatever the layout was.

    Raises UserError: fewer sequences to be had, a precision that cannot be.
    """
    recipe = manifest.run.recipe
    if recipe.train.precision == "fp32" and torch.cuda.is_available():
        raise UserError(
            f"{manifest.folder} was trained in fp32, which the attention kernels of a GPU do not take: set "
            "CUDA_VISIBLE_DEVICES= (empty) to probe it on the CPU"
        )
    available = max(prepared.validation_tokens - 1, 0) // recipe.data.context
    if sequences > available:
        raise UserError(f"--sequences is {sequences}, but the validation split holds {available}: lower it")
    alone = recipe.model_copy(
        update={
            "parallel": Parallel(),
            "train": recipe.train.model_copy(update={"micro_batch": 1}),
            "evaluation": recipe.evaluation.model_copy(update={"tokens": sequences * recipe.data.context}),
        }
    )
    with world.join(tensor=1, seed=recipe.seed) as here:
        module = build_model(alone, prepared.vocab_size, resolve_dtype(recipe))
        if recipe.train.precision == "bf16":
            module = Float16Module(module.config, module)
        stored.restore_weights(manifest, module, here)
        module.to(here.device)
        batches = validation_batches(alone, prepared, dp_rank=0, dp_size=1)
        yield TrainedModel(module, recipe.data.pack, batches, here.device, metrics.environment(here.device)["device"])


class _Layer:
    """Keeps what one layer's core attention takes and what comes back to it: q, k, v and dO of the last sequence."""

    def __init__(self, attention: torch.nn.Module) -> None:
        self._inputs: tuple[Tensor, ...] = ()
        self._do: Tensor | None = None
        self._packed: PackedSeqParams | None = None
        attention.register_forward_hook(self._forward, with_kwargs=True)

    def _forward(
        self, attention: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor
    ) -> None:
        self._inputs = tuple(x.detach() for x in inputs[:3])
        self._packed = options.get("packed_seq_params")
        output.register_hook(self._backward)

    def _backward(self, gradient: Tensor) -> None:
        self._do = gradient

    def documents(self) -> list[Document]:
        query, key, value = self._inputs
        do = self._do.reshape(query.shape)
        if self._packed is None:  # [tokens, 1, heads, dim]
            return [tuple(x.permute(1, 2, 0, 3).cpu() for x in (query, key, value, do))]
        ends = self._packed.cu_seqlens_q.tolist()  # of [tokens, heads, dim]
        return [
            tuple(x[start:end].transpose(0, 1)[None].cpu() for x in (query, key, value, do))
            for start, end in pairwise(ends)
            if end > start
        ]
