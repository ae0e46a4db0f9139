"""Tokens a second of one GPU, of two data-parallel and of two tensor-parallel ones, and an estimate for more.

    python -m tests.distributed.scaling [RECIPE] [--arms fpa,sagebwd] [--steps 12] [--data DIR] [--out DIR]

The recipe's own training program, NCCL, its global batch on every layout. The first steps are not counted.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from sagebwd import machine
from sagebwd.errors import UserError
from sagebwd.side_by_side import VISIBLE, gpu_shares
from sagebwd.tokenizer import prepare
from sagebwd.training.recipe import Recipe
from sagebwd.training.recipe_file import load_experiment
from sagebwd.training.size import parameter_counts
from tests.distributed.launch import ROOT, launch
from tests.distributed.layouts import ALONE, LAYOUTS
from tests.distributed.parity import RESULTS
from tests.distributed.parity_report import machine_name
from tests.distributed.scaling_estimate import GPUS_A_NODE, NODE, Measured
from tests.training.runs import changed

MEASURED = (ALONE, "dp2", "dp2-distopt", "tp2", "tp2-sp")
WARM_UP = 4  # steps
MORE = ((8, 262_144), (8, 2_097_152), (64, 2_097_152))  # GPUs, tokens a step
REPORT, CSV = "scaling.md", "scaling.csv"


@dataclass(frozen=True)
class Speed:
    """Of a layout and arm: the median of its steps."""

    layout: str
    arm: str
    seconds: float
    tokens_per_second: float
    memory_gib: float


def main() -> int:
    parser = argparse.ArgumentParser(description=sys.modules[__name__].__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", type=Path, default=ROOT / "recipes" / "h200-325m-speed.yaml")
    parser.add_argument("--arms", default="fpa,sagebwd", help="[fpa,sagebwd]")
    parser.add_argument("--layouts", default=",".join(MEASURED), help=f"[{','.join(MEASURED)}]")
    parser.add_argument("--steps", type=int, default=12, help=f"the first {WARM_UP} of them are not counted [12]")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="where prepared data lies [data]")
    parser.add_argument("--out", type=Path, help=f"the report's folder [{RESULTS.name}/MACHINE]")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus < 2:
        parser.error(f"it takes two GPUs, and torch sees {gpus}")
    if arguments.steps <= WARM_UP + 1:
        parser.error(f"--steps is {arguments.steps}: give {WARM_UP + 2} or more")
    out = arguments.out or RESULTS / machine_name(gpus)
    begin = time.monotonic()
    try:
        experiment = load_experiment(arguments.recipe).select(arguments.arms.split(","))
    except UserError as error:
        parser.error(str(error))
    arms = {arm: _short(recipe, arguments.steps) for arm, recipe in experiment.arms.items()}
    prepared = prepare(next(iter(arms.values())).data, arguments.data)
    names = arguments.layouts.split(",")
    with tempfile.TemporaryDirectory(prefix="scaling-", dir=_roomy(arms, len(names))) as scratch:
        runs, link = Path(scratch) / "runs", Path(scratch) / "link.json"
        for ranks in (1, 2):
            wanted = {
                Path(name, arm): changed(recipe, {"parallel": LAYOUTS[name].parallel})
                for name in names
                if LAYOUTS[name].ranks == ranks
                for arm, recipe in arms.items()
            }
            (share,) = gpu_shares(1, ranks, gpus)
            answer = launch(prepared, runs, wanted, ranks=ranks, gpus=share[VISIBLE], link=link if ranks == 2 else None)
            if answer.returncode:
                print(f"{answer.stdout[-3000:]}\n{answer.stderr[-6000:]}", file=sys.stderr)
                return 1
        speeds = [speed(runs / name / arm, name, arm) for arm in arms for name in names]
        found = json.loads(link.read_text())
    (one_arm, *_) = arms.values()
    _write(out, experiment.name, one_arm, speeds, found, gpus, time.monotonic() - begin)
    print(f"{(out / REPORT).read_text()}\nin {out}")
    return 0


def _roomy(arms: dict[str, Recipe], layouts: int) -> Path | None:
    """Where runs lie: a run's last checkpoint is gigabytes that nobody will read, so in memory if there is room for all
    of them (containers often have next to none there). None: where temporary files go."""
    memory = Path("/dev/shm")
    needed = layouts * sum(13 * parameter_counts(recipe, recipe.data.vocab_size)["total"] for recipe in arms.values())
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > needed else None


def _short(recipe: Recipe, steps: int) -> Recipe:
    train = recipe.train
    budget = steps * train.tokens_per_step
    return changed(
        recipe,
        {
            "train": {"total_tokens": budget},
            "optimizer": {"warmup_tokens": train.tokens_per_step},
            "evaluation": {"every_steps": steps, "tokens": 2 * train.micro_batch * recipe.data.context},
            "checkpoint": {"every_steps": None},
        },
    )


def speed(folder: Path, layout: str, arm: str) -> Speed:
    steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [line for line in steps if "perf/step_time" in line][WARM_UP:]
    return Speed(
        layout,
        arm,
        statistics.median(line["perf/step_time"] for line in steps),
        statistics.median(line["perf/tokens_per_second"] for line in steps),
        max(line["perf/memory_gib"] for line in steps),
    )


def _write(
    out: Path, name: str, recipe: Recipe, speeds: list[Speed], link: dict[str, float], gpus: int, seconds: float
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    one = {each.arm: each for each in speeds if each.layout == ALONE}
    with (out / CSV).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("arm", "layout", "step_seconds", "tokens_per_second", "ratio", "memory_gib"))
        for each in speeds:
            ratio = each.tokens_per_second / one[each.arm].tokens_per_second
            table.writerow((each.arm, each.layout, each.seconds, each.tokens_per_second, ratio, each.memory_gib))
    counts = parameter_counts(recipe, recipe.data.vocab_size)
    versions = ", ".join(f"{package} {number}" for package, number in machine.versions().items() if number)
    lines = [
        f"# Scaling of {name}",
        "",
        f"- machine: {gpus} x {torch.cuda.get_device_name(0)}, NCCL",
        f"- command: `{shlex.join(['python', '-m', 'tests.distributed.scaling', *sys.argv[1:]])}`, {seconds:.0f} s",
        f"- commit: {machine.commit() or 'unknown'}; {versions}",
        f"- model: {counts['total'] / 1e6:.1f}M parameters, context {recipe.data.context:,}, "
        f"{recipe.train.tokens_per_step:,} tokens a step on every layout, {recipe.train.micro_batch} sequences a "
        "micro-batch",
        f"- link: an all-reduce of {link['bytes'] / 1e9:.2f} GB over two GPUs in {link['seconds'] * 1e3:.2f} ms: "
        f"{link['bandwidth'] / 1e9:.0f} GB/s (2 (n - 1) / n bytes a byte)",
        "",
        "| arm | layout | step, s | tokens/s | of one GPU's | GiB a GPU |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for each in speeds:
        ratio = each.tokens_per_second / one[each.arm].tokens_per_second
        lines.append(
            f"| {each.arm} | {each.layout} | {each.seconds:.4f} | {each.tokens_per_second:,.0f} | {ratio:.3f} "
            f"| {each.memory_gib:.1f} |"
        )
    lines += _estimates(recipe, speeds, link, counts["total"])
    (out / REPORT).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _estimates(recipe: Recipe, speeds: list[Speed], link: dict[str, float], parameters: int) -> list[str]:
    lines = [
        "",
        "## More GPUs: an estimate, not a measurement",
        "",
        "Data-parallel, by the formula of [scaling_estimate.py](../../scaling_estimate.py), from the figures above: "
        "C / n is the work that n GPUs divide, F what each does whatever their number, E what is seen of the "
        f"sum of gradients. Beyond a node of {GPUS_A_NODE}, {NODE / 1e9:.0f} GB/s between nodes are assumed.",
        "",
        "| arm | GPUs | tokens a step | C / n, s | F, s | E, s | step, s | tokens/s | of one GPU's |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    found = {(each.arm, each.layout): each.seconds for each in speeds}
    for arm in dict.fromkeys(each.arm for each in speeds):
        if (arm, "dp2") not in found:
            continue
        measured = Measured(
            tokens=recipe.train.tokens_per_step,
            micro_tokens=recipe.train.micro_batch * recipe.data.context,
            one=found[arm, ALONE],
            two=found[arm, "dp2"],
            gradients=4.0 * parameters,
            bandwidth=link["bandwidth"],
        )
        for gpus, tokens in MORE:
            seconds = measured.seconds(gpus, tokens)
            parts = " | ".join(f"{part:.3f}" for part in measured.parts(gpus, tokens))
            lines.append(
                f"| {arm} | {gpus} | {tokens:,} | {parts} | {seconds:.3f} | {tokens / seconds:,.0f} "
                f"| {measured.speedup(gpus, tokens):.2f} |"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
