"""A Llama-style Megatron GPT from a recipe, the same for both attentions, without Transformer Engine or Apex."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from sagebwd.megatron.fusion import fused_cross_entropy, fused_rope
from sagebwd.megatron.spec import block_spec
from sagebwd.megatron.stages import pass_over
from sagebwd.training.recipe import Recipe
from sagebwd.training.size import padded_vocab_size


class PaddedVocabGPT(GPTModel):
    """GPTModel whose padded vocabulary entries are never predicted, and so never change the loss.

    fused: RoPE and, without tensor parallelism, the cross-entropy are compiled (see `fusion`). first_layer: the number,
    from 0, of this pipeline stage's first layer.
    """

    def __init__(
        self, *, true_vocab_size: int, vocab_size: int, fused: bool, first_layer: int, **megatron: Any
    ) -> None:
        super().__init__(vocab_size=vocab_size, **megatron)
        self.fused, self.first_layer = fused, first_layer
        local = vocab_size // self.config.tensor_model_parallel_size
        self.valid_logits = min(max(true_vocab_size - self.pg_collection.tp.rank() * local, 0), local)

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Megatron's own: see `build_model`."""
        with fused_rope() if self.fused else contextlib.nullcontext():
            return super().forward(*args, **options)

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> tuple:
        """Megatron's own, but with packed documents RoPE's angles are each token's by its position_ids.

        Megatron gives a table up to max_seqlen, which attention deals out: with kernels for every document (0.19), and
        by place in the pack instead of in the document if the table happens to have as many rows as there are tokens.
        [tokens, 1, 1, dim] is dealt out already, which is how 0.16 and 0.19 take it.
        """
        embedded, rotary, *rest = super()._preprocess(input_ids, position_ids, *args, **options)
        if options.get("packed_seq_params") is not None:
            rotary = rotary[position_ids.flatten()]
        return embedded, rotary, *rest

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross-entropy [batch, tokens] in FP32 of logits [tokens, batch, padded vocabulary / TP]."""
        logits = self.mask_padding(logits)
        if self.fused and self.config.tensor_model_parallel_size == 1:
            return fused_cross_entropy(logits, labels.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()
        return super().compute_language_model_loss(labels, logits)

    def mask_padding(self, logits: Tensor) -> Tensor:
        """-inf in place of the padding's logits, in place.

        Autograd need not see it: the loss's gradient for a logit of -inf is its probability, 0, so that nothing flows
        back from the padding either way, and a recorded fill would cost a copy of the largest tensor of the step.
        """
        with torch.no_grad():
            logits[..., self.valid_logits :].fill_(-math.inf)
        return logits


def transformer_config(recipe: Recipe, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of a recipe's model, weights in `dtype` (torch.float32 or torch.bfloat16)."""
    model = recipe.model
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=model.init_std,  # the projections back into the residual stream: divided by sqrt(2 layers)
        tensor_model_parallel_size=recipe.parallel.tensor,
        sequence_parallel=recipe.parallel.sequence,
        pipeline_model_parallel_size=recipe.parallel.pipeline,
        context_parallel_size=recipe.parallel.context,
        deallocate_pipeline_outputs=True,  # what was sent on is kept for its place in the graph alone
        batch_p2p_sync=False,  # the host would wait for the device at each send, for the sake of an old torch
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Megatron then sums the loss and divides the gradients by the tokens of the global batch: the mean over tokens
        # whatever the data-parallel size
        calculate_per_token_loss=True,
        # Draws the whole weight on every rank and slices it: TP sizes start from the same weights, CPU and GPU too
        use_cpu_initialization=True,
        deterministic_mode=recipe.train.deterministic,  # an embedding whose backward sums in one order
        bias_activation_fusion=recipe.train.fusion == "on",  # SwiGLU in one kernel each way: torch.compile
        # Each of these needs Apex or Transformer Engine, or has nothing to fuse here: no bias, no dropout, no mask
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def build_model(recipe: Recipe, vocab_size: int, dtype: torch.dtype) -> PaddedVocabGPT:
    """The recipe's model on the CPU, this rank's part of it: its share of each matrix, its pipeline stage's layers.

    vocab_size: the tokenizer's, before padding. Its weights depend on torch's CPU generator alone: seed it first.
    forward(tokens, position_ids, attention_mask=None, labels=labels), each [batch, context] int64, returns the loss of
    every token, [batch, context] FP32; of a stage before the last, the hidden states [context, batch, hidden]. With
    packed_seq_params (see `documents`) each is [1, batch * context], and position_ids restart with each document;
    without, they are not read. Element-wise operations are fused where train.fusion is "on"; "auto" has to be resolved
    before (training.train).
    """
    fused, model = recipe.train.fusion == "on", recipe.model
    stage, stages = parallel_state.get_pipeline_model_parallel_rank(), recipe.parallel.pipeline
    config, padded = transformer_config(recipe, dtype), padded_vocab_size(vocab_size, recipe.parallel.tensor)
    layers = model.layers // stages
    spec = block_spec(model, recipe.attention, layers=layers, fused=fused)
    if stage:
        pass_over(config, spec, stage * layers, padded, recipe.data.context)
    return PaddedVocabGPT(
        true_vocab_size=vocab_size,
        vocab_size=padded,
        config=config,
        fused=fused,
        first_layer=stage * layers,
        transformer_layer_spec=spec,
        max_sequence_length=recipe.data.context,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_base,
    )
