"""The comparison in words: a table for the terminal, report.md for the reader, summary.json for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from sagebwd.compare.plot import count
from sagebwd.compare.runs import Run
from sagebwd.compare.statistics import RISE, Result
from sagebwd.training import recipe_file
from sagebwd.training.health import WINDOW

HEADER = (
    "arm", "final", "bits/byte", "best", "fall", "gap", "paired gap, last half", "tokens/s", "MFU", "GiB", "spikes",
    "diverged",
)  # fmt: skip
PICTURE = "curves.png"
LEGEND = f"""\
Losses are in nats per token. *final*, *best*: validation loss at the end, and the lowest; *fall*: from before the
first step to the end. *gap*: validation loss minus the reference's at the last step that both validated. *paired
gap*: training loss minus the reference's at the same step, so on the same samples; mean ± standard deviation over
the steps of the last half. That is the spread from step to step, not from seed to seed: this is one seed.
*bits/byte*: the final loss over the validation text's bytes a token: it does not depend on the tokenizer.
*tokens/s*, *MFU* (model FLOPs over the GPU's dense 16-bit peak): median, the first tenth of the steps left out. *GiB*:
peak memory of the first rank, allocated on its GPU or resident on a CPU.
*spikes*: how often the training loss jumps `health.spike_nats` above the median of the {WINDOW} steps before.
*diverged*: a loss that is not finite, or a validation loss that rises {RISE:g} nat above its best.
"""


def table(results: list[Result]) -> list[tuple[str, ...]]:
    """The comparison's rows, HEADER first, as text."""
    return [HEADER, *(_row(result) for result in results)]


def title(results: list[Result], reference: Run | None) -> str:
    """The finding in one line."""
    if reference is None or all(result.gap is None for result in results):
        return f"Validation loss: {', '.join(f'{result.name} {result.final:.3f}' for result in results)}"
    when = "so far" if any(_unfinished(result) for result in results) else "at the end"
    ends = []
    for result in results:
        if result.diverged:
            ends.append(f"{result.name} diverged")
        elif result.gap is not None:
            ends.append(f"{result.name} {result.gap:+.3f}")
    return f"Gap to full precision {when}, in nats: {', '.join(ends)}"


def subtitle(experiment: str, runs: list[Run], *, sweep: bool = False) -> str:
    """What was run, in one line; of a sweep what its runs share."""
    run = runs[0]
    train, parameters = run.recipe.train, run.meta.get("parameters", {})
    parts = [
        f"recipe {experiment}",
        f"{count(parameters['total'])} parameters" if "total" in parameters else "",
        f"context {run.recipe.data.context:,}",
        f"{count(train.total_tokens)} tokens a run" if sweep else f"{train.tokens_per_step:,} tokens a step",
        "" if sweep or run.recipe.model.qk_norm else "no QK-norm",
        run.meta.get("precision", ""),
        _seeds(runs) if sweep else f"seed {run.recipe.seed}",
        run.meta.get("device", ""),
    ]
    return " · ".join(filter(None, parts))


def _seeds(runs: list[Run]) -> str:
    """How many seeds an arm has at a point of the grid: "3 seeds", "1 to 4 seeds"."""
    found = Counter((run.variant, run.cell.tokens_per_step, run.cell.qk_norm) for run in runs)
    fewest, most = min(found.values()), max(found.values())
    return (f"{fewest} to {most}" if fewest < most else str(most)) + f" seed{'s' * (most > 1)}"


def unigram_line(runs: list[Run], results: list[Result]) -> str | None:
    """The corpus's unigram entropy, and which arms end below it."""
    entropy = next((run.meta["unigram_entropy"] for run in runs if "unigram_entropy" in run.meta), None)
    if entropy is None:
        return None
    below = [result.name for result in results if result.final < entropy]
    above = [result.name for result in results if not result.final < entropy]
    verdict = "every arm ends below it"
    if above:
        verdict = f"below it: {', '.join(below) or 'none'}; not: {', '.join(above)}"
    return f"Unigram entropy of the validation text: {entropy:.3f} nats per token; {verdict}."


def markdown(
    experiment: dict[str, Any], runs: list[Run], results: list[Result], reference: Run | None, notes: list[str]
) -> str:
    """report.md: the finding, the picture, the table, how it was made, and the recipe in full."""
    name = runs[0].recipe.name
    rows = table(results)
    lines = [f"# Recipe {name}", "", f"**{title(results, reference)}**", ""]
    lines += [f"![Loss curves and gaps of the recipe {name}]({PICTURE})", ""]
    lines += [f"| {' | '.join(rows[0])} |", f"|---|{'---:|' * (len(HEADER) - 2)}---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows[1:]]
    lines += ["", *(f"{note}\n" for note in notes)]
    lines += [
        LEGEND,
        "## How it was made",
        "",
        *setup(experiment, runs),
        "",
        "## The recipe",
        "",
        *recipe(runs),
    ]
    return "\n".join(lines) + "\n"


def summary(experiment: dict[str, Any], runs: list[Run], results: list[Result], notes: list[str]) -> dict[str, Any]:
    """summary.json: every number of the table unrounded, and each run's own account. NaN and Inf are null."""
    arms = {}
    for run, result in zip(runs, results, strict=True):
        numbers = asdict(result) | {"fall": result.fall}
        arms[run.name] = {"result": numbers, "meta": run.meta, "config": recipe_file.resolved(run.recipe)}
    return _finite({"experiment": experiment, "notes": notes, "arms": arms})


def _row(result: Result) -> tuple[str, ...]:
    paired, speed = result.paired, result.tokens_per_second
    return (
        f"{result.name} (step {result.steps}, unfinished)" if _unfinished(result) else result.name,
        f"{result.final:.4f}",
        "" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}",
        f"{result.best:.4f}",
        f"{result.fall:.3f}",
        "" if result.gap is None else f"{result.gap:+.4f}",
        "" if paired is None else f"{paired.mean:+.4f} ± {paired.spread:.4f}",
        "" if speed is None else f"{speed:,.0f}",
        "" if result.mfu is None else f"{result.mfu:.1%}",
        "" if result.memory_gib is None else f"{result.memory_gib:.1f}",
        str(result.spikes),
        result.diverged or "no",
    )


def _unfinished(result: Result) -> bool:
    return result.status != "done" and not result.diverged


def setup(experiment: dict[str, Any], runs: list[Run], leave_out: Collection[str] = ()) -> list[str]:
    """A table of facts; one that is the same for every run stands once, another once an arm. leave_out: facts that
    stand elsewhere."""
    facts: dict[str, list[str]] = {}
    for run in runs:
        meta = run.meta
        versions = ", ".join(f"{name} {number}" for name, number in meta.get("versions", {}).items())
        parameters = meta.get("parameters", {})
        said = {
            "machine": meta.get("machine"),
            "device": meta.get("device"),
            "ranks": f"{meta['world_size']} ({meta['layout']})" if {"world_size", "layout"} <= meta.keys() else None,
            "attention ran on": meta.get("backend"),
            "precision": meta.get("precision"),
            "parameters": ", ".join(f"{number:,} {kind.replace('_', '-')}" for kind, number in parameters.items())
            or None,
            "steps": str(meta["steps"]) if "steps" in meta else None,
            "wall time": f"{meta['wall_seconds']:,.0f} s" if "wall_seconds" in meta else None,
            "seed": str(run.recipe.seed),
            "data": f"{run.recipe.data.corpus}, digest {meta['data_digest'][:16]}" if "data_digest" in meta else None,
            "versions": versions or None,
            "commit": meta.get("commit"),
            "changed on the way": _changed(meta),
        }
        for fact, text in said.items():
            facts.setdefault(fact, []).append(text or "not known")
    lines = ["| | |", "|---|---|"]
    for fact, key in (("command", "command"), ("recipe", "recipe")):
        if key in experiment:
            lines.append(f"| {fact} | `{experiment[key]}` |")
    for fact, texts in facts.items():
        if fact == "changed on the way" and set(texts) == {"nothing"}:
            continue
        same = len(set(texts)) == 1
        arms = dict.fromkeys((run.variant, text) for run, text in zip(runs, texts, strict=True))
        each = texts[0] if same else "; ".join(f"{arm}: {text}" for arm, text in arms)
        if fact not in leave_out:
            lines.append(f"| {fact} | {each} |")
    return lines


def _changed(meta: dict[str, Any]) -> str:
    """What a run was resumed with that its beginning did not have, and samples that it left out after a spike."""
    told = [f"{c['key']} from {c['from']} to {c['to']} after step {c['step']}" for c in meta.get("changes", [])]
    told += [
        f"rewound from step {r['from']} to {r['to']}, leaving out {r['samples_left_out']} samples"
        for r in meta.get("rewinds", [])
    ]
    return "; ".join(told) or "nothing"


def recipe(runs: list[Run]) -> list[str]:
    """One arm in full, and what the others change: the one with the most keys, so that no key is left untold."""
    full = max(runs, key=lambda run: run.recipe.attention.kind == "sagebwd")
    lines = [f"`{full.name}`:", "", "```yaml", recipe_file.dump(full.recipe).rstrip(), "```", ""]
    for run in runs:
        changed = recipe_file.differences(full.recipe, run.recipe)
        told = ", ".join(f"`{key}: {_shown(here)}`" for key, (_, here) in changed.items() if here is not None)
        if run is not full:
            lines.append(f"- `{run.name}` differs by {told or 'nothing'}.")
    return lines


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
