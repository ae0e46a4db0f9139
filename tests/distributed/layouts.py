"""The layouts that must train alike: a line each, on the engine and with the sizes of a recipe's `parallel` section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FPA, SAGEBWD, PACKED = "fpa", "sagebwd", "sagebwd-packed"  # PACKED: documents that do not see each other
BF16 = "fpa-bf16"  # FP32 master weights, which the optimizer shards in another way than FP32 weights


@dataclass(frozen=True)
class Layout:
    """ranks: processes, one a GPU where there are any. parallel, train, data: keys of the recipe. tested: the arms that
    it trains in the test suite; the parity suite trains the first two in every layout. like: what it is compared with.
    """

    ranks: int
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    tested: tuple[str, ...] = (FPA,)
    data: dict[str, Any] = field(default_factory=dict)
    like: str = "tp1"


ALONE = "tp1"  # what all others are compared with, but for
LONG = "tp1-long"  # those of sequences long enough to be cut into chunks of whole quantisation blocks, and
ODD = "tp1-odd"  # those of three micro-batches a step
_LONG = {"tokens_per_step": 8192, "total_tokens": 20 * 8192, "micro_batch": 8}
_ODD = {"tokens_per_step": 9 * 512, "total_tokens": 20 * 9 * 512, "micro_batch": 3}
LONG_KEYS: dict[str, Any] = {"train": _LONG, "data": {"context": 512}, "like": LONG}
ODD_KEYS: dict[str, Any] = {"train": _ODD, "data": {"context": 512}, "like": ODD}
BOTH = (FPA, SAGEBWD)
LAYOUTS = {
    ALONE: Layout(1, tested=(FPA, SAGEBWD, PACKED, BF16)),
    "tp2": Layout(2, {"tensor": 2}, tested=(FPA, SAGEBWD, PACKED)),
    "tp2-sp": Layout(2, {"tensor": 2, "sequence": True}, tested=(FPA, PACKED)),
    "dp2": Layout(2, tested=(FPA, SAGEBWD)),
    "dp2-late": Layout(2, {"overlap_grad_reduce": False}),
    "dp2-distopt": Layout(2, {"distributed_optimizer": True}, tested=(FPA, SAGEBWD, BF16)),
    "pp2": Layout(2, {"pipeline": 2}, tested=(FPA, PACKED)),
    "pp2-of-1": Layout(2, {"pipeline": 2}, {"micro_batch": 128}),  # micro-batches a step
    "pp2-of-16": Layout(2, {"pipeline": 2}, {"micro_batch": 8}, tested=(SAGEBWD,)),
    ODD: Layout(1, **ODD_KEYS),
    "pp2-odd": Layout(2, {"pipeline": 2}, **ODD_KEYS),
    "dp2-zero1": Layout(2, {"engine": "deepspeed", "zero": 1}, tested=()),
    "dp2-zero2": Layout(2, {"engine": "deepspeed", "zero": 2}, tested=()),
    "dp2-zero3": Layout(2, {"engine": "deepspeed", "zero": 3}, tested=()),
    "tp2-zero1": Layout(2, {"tensor": 2, "engine": "deepspeed", "zero": 1}, tested=()),
    "tp2-dp2": Layout(4, {"tensor": 2}, tested=(FPA, SAGEBWD)),
    "tp2-pp2-sp": Layout(4, {"tensor": 2, "pipeline": 2, "sequence": True}, tested=(FPA, SAGEBWD)),
    "pp2-dp2-distopt": Layout(4, {"pipeline": 2, "distributed_optimizer": True}, tested=(FPA, BF16)),
    LONG: Layout(1, tested=BOTH, **LONG_KEYS),
    "cp2": Layout(2, {"context": 2}, tested=BOTH, **LONG_KEYS),
    "tp2-cp2-sp": Layout(4, {"tensor": 2, "context": 2, "sequence": True}, tested=(SAGEBWD,), **LONG_KEYS),
    "cp2-pp2": Layout(4, {"context": 2, "pipeline": 2}, tested=(), **LONG_KEYS),
    "cp2-dp2-distopt": Layout(4, {"context": 2, "distributed_optimizer": True}, tested=(FPA,), **LONG_KEYS),
}
# One rank again, and what differs is the rounding alone: how far apart may two runs in bf16 be?
CONTROLS = {
    "tp1-micro": Layout(1, train={"micro_batch": 16}),  # other sums in FP32
    "tp1-fused": Layout(1, train={"fusion": "on"}),  # one rounding to bf16 where others round after every operation
    "tp1-long-micro": Layout(1, **LONG_KEYS | {"train": _LONG | {"micro_batch": 4}}),
    "tp1-long-fused": Layout(1, **LONG_KEYS | {"train": _LONG | {"fusion": "on"}}),
    "tp1-odd-fused": Layout(1, **ODD_KEYS | {"train": _ODD | {"fusion": "on"}}),
}
