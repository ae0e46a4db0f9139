"""The layer spec: Megatron-core's own layer with our norm and one of the two attentions in it."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from sagebwd.megatron.core_attention import SageBwdCoreAttention, SDPACoreAttention
from sagebwd.megatron.fusion import FusedRMSNorm
from sagebwd.megatron.norm import RMSNorm
from sagebwd.training import recipe


def block_spec(
    model: recipe.Model, attention: recipe.Attention, *, layers: int, fused: bool
) -> TransformerBlockSubmodules:
    """The transformer block of a recipe: the same for every arm but for the core attention.

    layers: of this pipeline stage. fused: compiled norms.
    """
    norm = FusedRMSNorm if fused else RMSNorm
    if attention.kind == "sagebwd":
        core = ModuleSpec(module=SageBwdCoreAttention, params={"quant": attention.quant.config()})
    else:
        core = ModuleSpec(module=SDPACoreAttention)
    layer = get_gpt_layer_local_spec(qk_layernorm=model.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = norm
    layer.submodules.pre_mlp_layernorm = norm
    inner = layer.submodules.self_attention.submodules
    inner.core_attention = core
    if model.qk_norm:
        inner.q_layernorm = norm
        inner.k_layernorm = norm
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
