"""What the parity suite found: a row a layout and arm, judged; report.md and results.csv."""

from __future__ import annotations

import csv
import os
import platform
import shlex
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from sagebwd import machine
from tests.distributed.launch import STEPS
from tests.distributed.layouts import ALONE, CONTROLS, LAYOUTS, LONG, ODD, Layout
from tests.training.runs import Logged

REPORT, CSV = "report.md", "results.csv"
FP32_LOSS, FP32_NORM = 1e-5, 1e-4  # at the last step: nats; a share of the gradient's norm
NOISES = 3  # in bf16: as many times the distance of a control
LEAST_LOSS, LEAST_NORM = 2e-4, 2e-3  # in bf16 no bar is below: a control that happens to agree is no measure
REFERENCES = {
    ALONE: "",
    LONG: " for context parallelism, whose sequences are longer",
    ODD: " for an odd number of micro-batches",
}
PARTS = ("output", "dQ", "dK", "dV")


@dataclass(frozen=True)
class Distance:
    """Of a run from the one on one rank. Nats a token; norms are the gradient's, as a share of it.

    loss, norm: at the last step. loss_max, norm_max: at the worst step. validation: at the end.
    """

    loss: float
    loss_max: float
    norm: float
    norm_max: float
    validation: float


@dataclass(frozen=True)
class Row:
    """passed: of a control, that it ran. why: of a run that failed."""

    layout: str
    keys: str
    ranks: int
    arm: str
    last_loss: float | None
    distance: Distance | None
    bar_loss: float | None
    bar_norm: float | None
    passed: bool
    why: str = ""


def judge(
    found: dict[tuple[str, str], Logged],
    layouts: dict[str, Layout],
    arms: tuple[str, ...],
    failures: dict[tuple[str, str], str],
    *,
    gpu: bool,
) -> list[Row]:
    """found: (layout, arm) -> what the run logged; failures: why it did not end.

    In FP32 the last step counts, in bf16 the worst one against the worst of the controls.
    """
    rows = []
    for arm in arms:
        distances = {
            name: distance(found[layout.like, arm], found[name, arm])
            for name, layout in layouts.items()
            if (layout.like, arm) in found and (name, arm) in found
        }
        for name, layout in layouts.items():
            loss, norm = _limits([distances[each] for each in _controls(layout.like) if each in distances], gpu=gpu)
            row = Row(name, _keys(layout), layout.ranks, arm, None, None, loss, norm, False)
            if name in distances:
                far = distances[name]
                losses, norms = ((far.loss_max,), far.norm_max) if gpu else ((far.loss, far.validation), far.norm)
                close = all(each <= loss for each in losses) and norms <= norm
                last = found[name, arm].values("train/loss")[-1]
                rows.append(replace(row, last_loss=last, distance=far, passed=close or name in CONTROLS))
            else:
                rows.append(replace(row, why=failures.get((name, arm), f"{layout.like} failed")))
    return rows


def _controls(like: str) -> list[str]:
    return [name for name, layout in CONTROLS.items() if layout.like == like]


def _limits(noise: list[Distance], *, gpu: bool) -> tuple[float, float]:
    """Of a loss and of a gradient's norm."""
    if not gpu:
        return FP32_LOSS, FP32_NORM
    loss = max([LEAST_LOSS, *(NOISES * each.loss_max for each in noise)])
    return loss, max([LEAST_NORM, *(NOISES * each.norm_max for each in noise)])


def _keys(layout: Layout) -> str:
    """What its recipe has that the one it is compared with has not."""

    def of(each: Layout) -> dict[str, Any]:
        sections = {"parallel": each.parallel, "train": each.train, "data": each.data}
        return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}

    reference = LAYOUTS[layout.like]
    like = {} if reference is layout else of(reference)
    told = {key: value for key, value in of(layout).items() if like.get(key) != value and key != "train.total_tokens"}
    return ", ".join(f"{key}={str(value).lower()}" for key, value in told.items()) or "-"


def distance(one: Logged, other: Logged) -> Distance:
    losses = [abs(a - b) for a, b in zip(*(run.values("train/loss") for run in (one, other)), strict=True)]
    norms = [abs(a - b) / a for a, b in zip(*(run.values("train/grad_norm") for run in (one, other)), strict=True)]
    ours, theirs = (run.values("validation/loss")[-1] for run in (one, other))
    return Distance(losses[-1], max(losses), norms[-1], max(norms), abs(ours - theirs))


def same_attention(runs: Path, arms: tuple[str, ...]) -> dict[str, bool]:
    """Whether attention with its heads on two ranks has the bits it has on one: of each arm and tensor."""
    found = {}
    for arm in arms:
        files = [runs / layout / arm / "attention.pt" for layout in (ALONE, "tp2")]
        if all(file.exists() for file in files):
            pairs = zip(PARTS, *(torch.load(file, weights_only=True) for file in files), strict=True)
            found |= {f"{arm} {part}": torch.equal(a, b) for part, a, b in pairs}
    return found


def machine_name(gpus: int) -> str:
    """The folder of a machine's results."""
    return f"{torch.cuda.get_device_name(0).lower().replace(' ', '-')}-x{gpus}" if gpus else "cpu"


def write(
    out: Path, rows: list[Row], attention: dict[str, bool], left_out: list[str], *, gpus: int, seconds: float
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / CSV).open("w", newline="", encoding="utf-8") as file:
        columns = [field.name for field in fields(Row) if field.name != "distance"]
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*columns, *(field.name for field in fields(Distance))])
        for row in rows:
            values = asdict(row)
            told = values.pop("distance") or dict.fromkeys(field.name for field in fields(Distance))
            table.writerow([*values.values(), *told.values()])
    (out / REPORT).write_text("\n".join(_lines(rows, attention, left_out, gpus, seconds)) + "\n", encoding="utf-8")


def _lines(rows: list[Row], attention: dict[str, bool], left_out: list[str], gpus: int, seconds: float) -> list[str]:
    judged = [row for row in rows if row.layout not in REFERENCES and row.layout not in CONTROLS]
    there = {row.layout for row in rows}
    references = ", ".join(f"`{name}`{why}" for name, why in REFERENCES.items() if name in there)
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions().items() if number)
    where = (
        f"{gpus} x {torch.cuda.get_device_name(0)}, NCCL, bf16"
        if gpus
        else f"{platform.machine()}, {os.cpu_count()} cores, gloo, FP32"
    )
    lines = [
        "# Parity of layouts",
        "",
        f"**{sum(row.passed for row in judged)} of {len(judged)} runs pass.** {STEPS} steps each, the same data and "
        f"initial weights; every distance is from one rank: {references}.",
        "",
        f"- machine: {where}",
        f"- command: `{shlex.join(['python', '-m', 'tests.distributed.parity', *sys.argv[1:]])}`, {seconds:.0f} s",
        f"- commit: {machine.commit() or 'unknown'}; {versions}",
        f"- bars: {_bars(rows, gpus)}",
    ]
    if left_out:
        lines.append(f"- not run, for want of GPUs: {', '.join(left_out)}")
    if attention:
        differ = [name for name, same in attention.items() if not same]
        said = f"**differ: {', '.join(differ)}**" if differ else "the same bits, forward and backward, in both arms"
        lines.append(f"- attention alone, `tp2` against `{ALONE}`: {said}")
    for arm in dict.fromkeys(row.arm for row in rows):
        lines += [
            "",
            f"## {arm}",
            "",
            "| layout | recipe | ranks | loss at the end | loss: at the end | worst step | validation "
            "| gradient norm: at the end | worst step | |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
        ]
        lines += [_cells(row) for row in rows if row.arm == arm]
    return lines


def _bars(rows: list[Row], gpus: int) -> str:
    if not gpus:
        return f"at the last step, loss and validation within {FP32_LOSS:g} nats, gradient norm within {FP32_NORM:g}"
    bars = {
        (row.arm, LAYOUTS[row.layout].like): f"{row.bar_loss:.1e} nats and {row.bar_norm:.1e}"
        for row in rows
        if row.layout in LAYOUTS
    }
    return (
        f"at the worst step, {NOISES} times the noise of bf16, or {LEAST_LOSS:g} nats and {LEAST_NORM:g} of the norm "
        "if that is more. The noise is what one GPU differs by from itself where only rounding changes (the controls). "
        + "; ".join(f"{arm} against `{like}`: {bar}" for (arm, like), bar in bars.items())
    )


def _cells(row: Row) -> str:
    known = dict.fromkeys(REFERENCES, "reference") | dict.fromkeys(CONTROLS, "control")
    verdict = known.get(row.layout, "pass") if row.passed else "**FAIL**"
    if row.distance is None:
        return f"| {row.layout} | {row.keys} | {row.ranks} | | | | | | | **FAIL**: {row.why} |"
    d = row.distance
    figures = (d.loss, d.loss_max, d.validation, d.norm, d.norm_max)
    shown = " | ".join(f"{figure:.1e}" for figure in figures)
    return f"| {row.layout} | {row.keys} | {row.ranks} | {row.last_loss:.6f} | {shown} | {verdict} |"
