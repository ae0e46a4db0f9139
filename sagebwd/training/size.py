"""How large a model is and how much a training step computes. Plain arithmetic on a recipe; imports no torch."""

from __future__ import annotations

import math

from sagebwd.errors import UserError
from sagebwd.training.recipe import Recipe

VOCAB_MULTIPLE = 128


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """The tokenizer's vocabulary rounded up to a multiple of 128, whatever the tensor-parallel size.

    So TP sizes start from the same weights and read each other's shapes; a TP size that does not divide it is refused.
    """
    padded = math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % tensor:
        raise UserError(
            f"parallel.tensor {tensor} does not divide the padded vocabulary of {padded}: "
            f"choose a size that divides {VOCAB_MULTIPLE}"
        )
    return padded


def parameter_counts(recipe: Recipe, vocab_size: int) -> dict[str, int]:
    """Parameters of the whole model, whatever the TP size: in all, and without the (padded) embeddings."""
    m = recipe.model
    layer = matrix_parameters(recipe) // m.layers + 2 * m.hidden
    inner = m.layers * (layer + (2 * m.dim if m.qk_norm else 0)) + m.hidden
    embedding = padded_vocab_size(vocab_size, 1) * m.hidden * (1 if m.tied_embeddings else 2)
    return {"total": inner + embedding, "non_embedding": inner}


def matrix_parameters(recipe: Recipe) -> int:
    """Parameters of the layers' matrices: QKV, output projection, and the three of SwiGLU."""
    m = recipe.model
    return m.layers * (m.hidden * m.dim * (2 * m.heads + 2 * m.num_kv_heads) + 3 * m.hidden * m.ffn)


def flops_per_token(recipe: Recipe, vocab_size: int) -> float:
    """Model FLOPs of forward and backward a token of training, a multiply and an add counted as two:

        6 (matrix parameters + output head) + 6 layers heads head_dim context

    Every matrix is used once forward and twice backward; so is attention, whose two products of 2 heads head_dim
    context FLOPs each are halved for the causal mask. What is recomputed (attention's scores in its backward) is not
    counted, nor are the embedding's look-up and the norms. Packed documents are counted as if they were one.
    """
    m = recipe.model
    head = padded_vocab_size(vocab_size, 1) * m.hidden
    return 6.0 * (matrix_parameters(recipe) + head) + 6.0 * m.layers * m.heads * m.dim * recipe.data.context
