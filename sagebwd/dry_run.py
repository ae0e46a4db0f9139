"""`sagebwd recipe FILE --dry-run`: what an experiment would take, printed; nothing is read, written or started."""

from __future__ import annotations

from sagebwd import device, gpus
from sagebwd.errors import UserError
from sagebwd.forecast import GIB, H200, Forecast, forecast
from sagebwd.table import aligned
from sagebwd.training import budget, deepspeed_config
from sagebwd.training.recipe_file import Experiment

HEADER = (
    "arm", "runs", "steps", "tokens/step", "micro-batches", "GiB a GPU", "step, s", "tokens/s", "MFU", "time",
)  # fmt: skip


def run(experiment: Experiment, *, gpu: str | None, nproc: int, at_once: int) -> None:
    """Print the forecast of every arm on `nproc` GPUs each. gpu: its name; None: the one here.

    UserError: no GPU is named and none is here, one without figures, a layout or budget that cannot be.
    """
    name, spec = gpus.find(gpu or _present())
    for recipe in experiment.arms.values():
        deepspeed_config.check(recipe, gpu=True)
    found = {arm: forecast(recipe, spec, nproc) for arm, recipe in experiment.arms.items()}
    first_arm = next(iter(found))
    _sizes(experiment, found[first_arm], nproc)
    print(f"\n{aligned([HEADER, *_rows(experiment, found)])}\n")
    shown: set[tuple] = set()
    for arm, each in found.items():
        recipe = experiment.arms[arm]
        kind = (
            recipe.attention.kind,
            recipe.attention.quant.smooth_q,
            recipe.attention.quant.products,
            recipe.train.micro_batch,
            each.plan.accumulation,
        )
        if kind not in shown:
            shown.add(kind)
            print(_details(arm, each))
    seconds = sum(each.seconds for each in found.values())
    wall = seconds / min(at_once, len(found))
    print(f"\nIn all {seconds * nproc / 3600:,.2f} GPU-hours of {name}: {_time(wall)}" + _how(nproc, at_once))
    for arm, each in found.items():
        if each.memory.total > 0.92 * spec.memory * 1e9:  # as sold, less CUDA's own and fragments
            print(f"note: {arm} may not fit {spec.memory} GB: lower train.micro_batch")
            break
    print(_trust(spec, name))


def _present() -> str:
    here = device.probe()
    if not here.gpus:
        raise UserError("no NVIDIA GPU is visible here: name the one to forecast for, such as --gpu h200")
    return here.name


def _sizes(experiment: Experiment, each: Forecast, nproc: int) -> None:
    arm, recipe = next(iter(experiment.arms.items()))
    m, counts = recipe.model, each.parameters
    print(
        f"recipe {experiment.name}: {len(experiment.arms)} arm(s), {recipe.train.total_tokens:,} tokens each, context "
        f"{recipe.data.context:,}, vocabulary {recipe.data.vocab_size:,}"
    )
    print(
        f"model: {counts['total'] / 1e6:.1f}M parameters, {counts['non_embedding'] / 1e6:.1f}M without embeddings: "
        f"{m.layers} layers x {m.hidden}, {m.heads} heads of {m.dim} ({m.num_kv_heads} of keys), feed-forward {m.ffn}"
    )
    print(
        f"work: {each.flops_per_token / 1e9:.3f} GFLOPs a token, "
        f"{each.flops_per_token * recipe.train.tokens_per_step / 1e12:,.0f} TFLOPs a step of {arm}"
    )
    print(
        f"layout: {nproc} GPU(s) an arm, {budget.layout(recipe, nproc)}, "
        f"{recipe.train.micro_batch} sequences a micro-batch and GPU"
    )


def _rows(experiment: Experiment, found: dict[str, Forecast]) -> list[tuple[str, ...]]:
    """A row an arm; those of a sweep that differ by their seed alone share the first one's."""
    same: dict[tuple, list[str]] = {}
    for arm, each in found.items():
        variant = experiment.variants.get(arm, arm)
        same.setdefault((variant, experiment.arms[arm].model.qk_norm, each.plan), []).append(arm)
    return [_row(arms[0], len(arms), found[arms[0]]) for arms in same.values()]


def _row(arm: str, runs: int, each: Forecast) -> tuple[str, ...]:
    plan = each.plan
    return (
        arm,
        str(runs),
        f"{plan.steps:,}",
        f"{plan.tokens // plan.steps:,}",
        str(plan.accumulation),
        f"{each.memory.total / GIB:.1f}",
        f"{each.step_seconds:.3f}",
        f"{each.tokens_per_second:,.0f}",
        f"{each.mfu:.1%}",
        _time(each.seconds),
    )


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _details(arm: str, each: Forecast) -> str:
    memory = {
        "weights": each.memory.weights,
        "gradients": each.memory.gradients,
        "optimizer": each.memory.optimizer,
        "activations": each.memory.activations,
        "for a moment": each.memory.widest,
    }
    parts = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in each.parts.items())
    host = " (less than the host takes to launch it, which decides)" if each.host_bound else ""
    return (
        f"{arm}: memory, GiB: {', '.join(f'{part} {size / GIB:.2f}' for part, size in memory.items())}\n"
        f"{' ' * len(arm)}  a step, ms: {parts}{host}"
    )


def _how(nproc: int, at_once: int) -> str:
    many = f" with {at_once} arms at once" if at_once > 1 else ""
    return f"{many} on {nproc * at_once} GPU(s)"


def _trust(spec: gpus.Spec, name: str) -> str:
    text = "Memory is torch's peak of allocated bytes; CUDA itself and the allocator's reserve come on top."
    if spec == H200:
        return text
    return f"{text} Rates were measured on an H200 and scaled by data sheets: for {name} the times are a guess."
