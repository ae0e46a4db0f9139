"""The layouts that must train alike: a line each, on the engine and with the sizes of a recipe's `parallel` section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FPA, SAGEBWD, PACKED = "fpa", "sagebwd", "sagebwd-packed"  # PACKED: documents that do not see each other


@dataclass(frozen=True)
class Layout:
    """ranks: processes, one a GPU where there are any. parallel, train: keys of the recipe. tested: the arms that it
    trains in the test suite; the parity suite trains the first two in every layout."""

    ranks: int
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    tested: tuple[str, ...] = (FPA,)


ALONE = "tp1"  # what all others are compared with
LAYOUTS = {
    ALONE: Layout(1, tested=(FPA, SAGEBWD, PACKED)),
    "tp2": Layout(2, {"tensor": 2}, tested=(FPA, SAGEBWD, PACKED)),
    "tp2-sp": Layout(2, {"tensor": 2, "sequence": True}, tested=(FPA, PACKED)),
    "dp2": Layout(2, tested=(FPA, SAGEBWD)),
    "dp2-late": Layout(2, {"overlap_grad_reduce": False}),
    "dp2-distopt": Layout(2, {"distributed_optimizer": True}, tested=(FPA, SAGEBWD)),
    "pp2": Layout(2, {"pipeline": 2}, tested=(FPA, PACKED)),
    "pp2-of-1": Layout(2, {"pipeline": 2}, {"micro_batch": 128}),  # micro-batches a step
    "pp2-of-16": Layout(2, {"pipeline": 2}, {"micro_batch": 8}, tested=(SAGEBWD,)),
    "tp2-dp2": Layout(4, {"tensor": 2}, tested=(FPA, SAGEBWD)),
    "tp2-pp2-sp": Layout(4, {"tensor": 2, "pipeline": 2, "sequence": True}, tested=(FPA, SAGEBWD)),
    "pp2-dp2-distopt": Layout(4, {"pipeline": 2, "distributed_optimizer": True}),
}
# One rank again, and what differs is the rounding alone: how far apart may two runs in bf16 be?
CONTROLS = {
    "tp1-micro": Layout(1, train={"micro_batch": 16}),  # other sums in FP32
    "tp1-fused": Layout(1, train={"fusion": "on"}),  # one rounding to bf16 where others round after every operation
}
