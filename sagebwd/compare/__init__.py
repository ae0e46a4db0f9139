"""Compares the arms of a recipe: what was read, the numbers, a picture, a report."""

from __future__ import annotations

import json
from pathlib import Path

from sagebwd.compare import plot, report, runs, statistics

REPORT = "report"


def compare(folder: Path) -> Path:
    """Compare the runs in `folder`: print the table and write report.md, curves.png and summary.json into the folder
    report/ beside the arms, which is returned.

    Raises UserError: no runs there, or runs that did not see the same samples.
    """
    found = runs.load(folder)
    experiment = runs.experiment(folder)
    reference, problem = statistics.reference(found)
    results = [statistics.evaluate(run, reference) for run in found]
    notes = [note for note in (problem, report.unigram_line(found, results)) if note]

    target = folder / REPORT
    target.mkdir(exist_ok=True)
    title, subtitle = report.title(results, reference), report.subtitle(found[0].recipe.name, found)
    plot.draw(target / report.PICTURE, found, results, reference, title, subtitle)
    text = report.markdown(experiment, found, results, reference, notes)
    (target / "report.md").write_text(text, encoding="utf-8")
    facts = report.summary(experiment, found, results, notes)
    (target / "summary.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    print(f"\n{report.aligned(report.table(results))}\n")
    for note in notes:
        print(note)
    print(f"Report: {target / 'report.md'}   Picture: {target / report.PICTURE}", flush=True)
    return target
