"""QuantConfig: every choice that can change a result of SageBwd, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

Granularity = Literal["tile", "row"]
DeltaRule = Literal["stale", "matched"]
Products = Literal["all", "scores"]
BLOCKS = (16, 32, 64, 128)
CONTEXT_CHUNK = 128  # with context parallelism a rank's chunks are whole multiples of so many tokens: of every block
NOT_WITH_CONTEXT = {"smooth_q": True, "project": True, "products": "scores"}  # what context parallelism does not take
NOT_WITH_SCORES = ("granularity", "delta", "smooth_q", "project")  # must be at their defaults with products="scores"


@dataclass(frozen=True)
class QuantConfig:
    """The numerics of SageBwd. It belongs in the recipe and in the checkpoint; kernel tuning never touches it.

    block_q: query rows that share one scale of Q and of dO, and the height of a tile of P and dS.
    block_k: key rows that share one scale of K and of V, and the width of a tile of P and dS.
    granularity: scales of P and dS as left operands of the backward's products. "tile": one a tile (the paper's text).
        "row": one for each output row of the product within a tile (a key's row of P^T and dS^T for dV and dK, a
        query's row of dS for dQ): a scale that factors out of the sum, so it costs no extra product.
    delta: "stale": delta = rowsum(dO * O). "matched": delta = sum_j P_ij dP_ij in FP32, from the same P and dP that the
        backward uses (Delta-Matching, arXiv 2609.37852), so that rows of dS sum to zero.
    smooth_k: subtract from K its mean over all tokens, per batch entry and head. Softmax does not see it.
    smooth_q: subtract from each query tile its mean, and add the mean's product with K back to S in high precision.
    project: subtract from the rounded dS the multiple of the rounded P that makes each query's row sum to zero, in dQ
        and in dK (GProj, arXiv 2609.34272; `reference.backward` derives the INT8 form). Slow: for study.
    products: which products are INT8. "all": six of the seven (the paper). "scores": only S = Q K^T, in forward and
        backward. P V, dP, dV, dK and dQ take 16-bit operands: P and dS rounded to the inputs' dtype, Q, V and dO as
        they came, K smoothed and rounded to its dtype. FP32 inputs are not rounded there.
    """

    block_q: int = 64
    block_k: int = 64
    granularity: Granularity = "row"
    delta: DeltaRule = "stale"
    smooth_k: bool = True
    smooth_q: bool = False
    project: bool = False
    products: Products = "all"

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            if type(getattr(self, name)) is not int or getattr(self, name) not in BLOCKS:
                raise ValueError(f"QuantConfig.{name} is {getattr(self, name)!r}: choose one of {BLOCKS}")
        for name, kind in (("granularity", Granularity), ("delta", DeltaRule), ("products", Products)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"QuantConfig.{name} is {getattr(self, name)!r}: choose one of {get_args(kind)}")
        for name in ("smooth_k", "smooth_q", "project"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"QuantConfig.{name} is {getattr(self, name)!r}: choose true or false")
        for name in NOT_WITH_SCORES if self.products == "scores" else ():
            default = getattr(type(self), name)
            if getattr(self, name) != default:
                raise ValueError(
                    f"QuantConfig.{name} is {getattr(self, name)!r}, which has no meaning with products='scores', "
                    f"where only Q K^T is INT8: leave it at {default!r}, or set products to 'all'"
                )

    def summary(self) -> str:
        """One line for logs: every field with its value."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
