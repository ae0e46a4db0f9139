"""Pipeline stages: what a stage's parameters are called in the whole model, and which weights they begin with."""

from __future__ import annotations

import re

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)\b")


def whole_name(model: torch.nn.Module, name: str) -> str:
    """Of a parameter or module of `model`, a PaddedVocabGPT: its name where no pipeline cuts the model.

    The last stage's copy of a tied embedding has the embedding's.
    """
    if name == HEAD and model.share_embeddings_and_output_weights:
        return EMBEDDING
    return _LAYER.sub(lambda found: f"{found[1]}{int(found[2]) + model.first_layer}", name)


def pass_over(
    config: TransformerConfig, spec: TransformerBlockSubmodules, layers: int, vocab_size: int, context: int
) -> None:
    """Draw, and throw away, the weights of the stages before this one, so that a stage's are what a model in one piece
    would have: each is drawn in turn from the CPU's one generator. A layer at a time is in memory.

    layers: how many come before. vocab_size: padded.
    """
    LanguageModelEmbedding(config, vocab_size, context, position_embedding_type="rope")
    for _ in range(layers):
        build_module(spec.layer_specs[0], config=config, layer_number=1)
