"""What TensorBoard gets from the comparison: each arm's gap as a scalar, and a layout that overlays the arms."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from sagebwd.compare.runs import TRAIN, VALIDATION, Run
from sagebwd.compare.statistics import difference, smooth

EVENTS = "tensorboard"  # the folder in the report's, with one of each arm in it
GAP, TRAIN_GAP = "gap/validation_loss", "gap/train_loss"
LAYOUT = {  # of the Custom Scalars tab: every chart holds all arms
    "Loss": {
        "validation loss, nats per token": ["Multiline", [VALIDATION]],
        "training loss, nats per token": ["Multiline", [TRAIN]],
        "validation, bits per byte": ["Multiline", ["validation/bits_per_byte"]],
    },
    "Gap to full precision": {
        "validation loss minus full precision's": ["Multiline", [GAP]],
        "training loss minus full precision's, on the same samples (running mean)": ["Multiline", [TRAIN_GAP]],
    },
    "Stability and speed": {
        "gradient norm": ["Multiline", ["train/grad_norm"]],
        "tokens per second": ["Multiline", ["perf/tokens_per_second"]],
        "MFU": ["Multiline", ["perf/mfu"]],
    },
}


def write(report: Path, runs: list[Run], against: dict[str, Run]) -> None:
    """Event files under `report`/tensorboard, made anew. against: run -> full precision's run that it is paired with;
    runs that are not in it get no gap."""
    target = report / EVENTS
    shutil.rmtree(target, ignore_errors=True)
    with SummaryWriter(str(target)) as writer:
        writer.add_custom_scalars(LAYOUT)
    for run in runs:
        reference = against.get(run.name)
        if reference is None or reference is run:
            continue
        train = difference(run.get(TRAIN), reference.get(TRAIN))
        window = max(1, len(train.steps) // 20) | 1
        series = {GAP: difference(run.get(VALIDATION), reference.get(VALIDATION)), TRAIN_GAP: smooth(train, window)}
        with SummaryWriter(str(target / run.name)) as writer:
            for tag, points in series.items():
                for step, value in zip(points.steps, points.values, strict=True):
                    if np.isfinite(value):
                        writer.add_scalar(tag, float(value), int(step))
