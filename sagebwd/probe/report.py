"""What a probe found, in words and figures: probe.md for the reader, probe.csv for programs."""

from __future__ import annotations

import csv
import shlex
import sys
from pathlib import Path

from sagebwd import machine
from sagebwd.attention import QuantConfig
from sagebwd.attention.error_table import RULES
from sagebwd.attention.errors import OUTPUTS, TENSORS, Error, mean
from sagebwd.probe.findings import Findings

TEXT, TABLE, PICTURE = "probe.md", "probe.csv", "probe.png"
PAPER = next(name for name, config in RULES.items() if config == QuantConfig(granularity="tile"))
DEFAULT = next(name for name, config in RULES.items() if config == QuantConfig())
OWN = "this arm's"  # the numerics that the model was trained with, where RULES does not hold them
USED = {"delta": "delta", "P rounded": "P", "dP": "dP", "dS rounded": "dS"}
"""The tensors that the backward's products are made of, as they enter them: what dS is compared with."""


def write(folder: Path, findings: Findings) -> None:
    with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("layer", "rule", "tensor", "rel_l2", "cos_sim", "rms"))
        for layer, rules in enumerate(findings.errors):
            for rule, errors in rules.items():
                for tensor, error in errors.items():
                    table.writerow((layer, rule, tensor, *(f"{number:.6g}" for number in error)))
    (folder / TEXT).write_text(markdown(findings), encoding="utf-8")


def summary(findings: Findings) -> str:
    """Whether dS is the worst of what the backward's products are made of, for the paper's rule and for the default."""
    return "\n".join(worst(findings, rule) for rule in (PAPER, DEFAULT))


def worst(findings: Findings, rule: str) -> str:
    worst_of = [max(USED, key=lambda name: layer[rule][name].rel_l2) for layer in findings.errors]
    figures = ", ".join(f"{said} {_mean(findings, rule, name).rel_l2:.4f}" for name, said in USED.items())
    others = [f"layer {layer}: {USED[name]}" for layer, name in enumerate(worst_of) if USED[name] != "dS"]
    count = len(worst_of) - len(others)
    verdict = f"dS has the largest error of delta, P, dP and dS in {count} of {len(worst_of)} layers"
    exceptions = f"; not in {', '.join(others)}" if others else ""
    return f"{rule}: {verdict} (mean Rel-L2: {figures}){exceptions}."


def title(findings: Findings) -> str:
    return f"{findings.recipe.name}/{findings.arm}, step {findings.step}"


def markdown(findings: Findings) -> str:
    lines = [f"# Error of every attention tensor: {title(findings)}", ""]
    lines += [f"- {line}" for line in summary(findings).splitlines()]
    lines += ["", f"![Error by layer, tensor and rule]({PICTURE})", ""]
    for rule in (PAPER, DEFAULT):
        lines += [f"## By layer: {rule}", "", "Rel-L2 / CosSim.", "", *_by_layer(findings, rule), ""]
    lines += [
        "## By rule",
        "",
        "Rel-L2 / CosSim, means over the layers; in brackets the largest Rel-L2 of a layer.",
        "",
    ]
    lines += [*_by_rule(findings), "", "## Size", "", "Root mean square of the truth.", "", *_sizes(findings), ""]
    lines += ["## How it was made", "", *_setup(findings)]
    return "\n".join(lines) + "\n"


def _by_layer(findings: Findings, rule: str) -> list[str]:
    rows = [
        (str(layer), *(_cell(errors[rule][tensor]) for tensor in TENSORS))
        for layer, errors in enumerate(findings.errors)
    ]
    rows.append(("mean", *(_cell(_mean(findings, rule, tensor)) for tensor in TENSORS)))
    return _table(("layer", *TENSORS), rows)


def _by_rule(findings: Findings) -> list[str]:
    tensors = ("delta", "dS rounded", *OUTPUTS)
    rows = []
    for rule in findings.errors[0]:
        largest = {tensor: max(layer[rule][tensor].rel_l2 for layer in findings.errors) for tensor in tensors}
        rows.append((rule, *(f"{_cell(_mean(findings, rule, name))} ({largest[name]:.3f})" for name in tensors)))
    return _table(("rule", *tensors), rows)


def _sizes(findings: Findings) -> list[str]:
    tensors = [tensor for tensor in TENSORS if not tensor.endswith("rounded")]
    rows = [
        (str(layer), *(f"{errors[PAPER][tensor].rms:.1e}" for tensor in tensors))
        for layer, errors in enumerate(findings.errors)
    ]
    return _table(("layer", *tensors), rows)


def _setup(findings: Findings) -> list[str]:
    recipe = findings.recipe
    attention = "full precision" if recipe.attention.kind == "fpa" else recipe.attention.quant.config().summary()
    rows = [
        ("command", f"`{shlex.join(['sagebwd', *sys.argv[1:]])}`"),
        ("model", f"recipe {recipe.name}, arm {findings.arm}, step {findings.step}, seed {recipe.seed}"),
        ("trained with", f"{attention}; {recipe.train.precision}; QK-norm {'on' if recipe.model.qk_norm else 'off'}"),
        ("seen", f"{findings.tokens:,} validation tokens in {findings.documents} sequence(s) or packed document(s)"),
        ("loss", "mean over a sequence's tokens"),
        ("SageBwd", "`sagebwd/attention/reference.py` in FP32 on the captured q, k, v and dO; O in their dtype"),
        ("truth", "causal attention in FP64 on the same tensors"),
        ("worked out on", findings.device),
        ("versions", ", ".join(f"{name} {number}" for name, number in machine.versions().items())),
        ("commit", machine.commit() or "not known"),
    ]
    return _table(("", ""), rows)


def _mean(findings: Findings, rule: str, tensor: str) -> Error:
    return mean([layer[rule][tensor] for layer in findings.errors])


def _cell(error: Error) -> str:
    return f"{error.rel_l2:.4f} / {error.cos_sim:.5f}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]
