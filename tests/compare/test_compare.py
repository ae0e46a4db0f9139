"""The comparison on real event files: its numbers, its verdicts, its files, and what it refuses."""

import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from sagebwd.compare import compare, runs, statistics
from sagebwd.errors import UserError
from sagebwd.table import aligned
from tests.compare.event_files import FPA, META, SAGE, losses, recipe, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three arms: full precision, one 0.25 above it, one 0.5 below it."""
    write_run(tmp_path / "fpa", recipe(FPA), losses(0.0))
    write_run(tmp_path / "above", recipe(SAGE), losses(0.25))
    write_run(tmp_path / "below", recipe(SAGE), losses(-0.5))
    return tmp_path


def evaluate(folder: Path) -> dict[str, statistics.Result]:
    found = runs.load(folder)
    reference, _ = statistics.reference(found)
    return {run.name: statistics.evaluate(run, reference) for run in found}


def test_numbers(folder: Path) -> None:
    results = evaluate(folder)
    fpa, above, below = results["fpa"], results["above"], results["below"]
    assert (fpa.start, fpa.final, fpa.best, fpa.fall) == (8, 4, 4, 4)
    assert (fpa.gap, fpa.paired) == (None, None)
    assert (above.gap, below.gap, above.gap_step) == (0.25, -0.5, 8)
    assert above.paired == statistics.Paired(mean=0.25, spread=0.0, first_step=5, last_step=8)
    assert above.tokens_per_second == 1000  # the slow first steps left out
    assert {result.diverged for result in results.values()} == {None}


def test_paired_gap_is_over_the_same_steps_of_the_last_half(tmp_path: Path) -> None:
    noise = {step: 0.1 * (-1) ** step for step in range(1, 11)}
    write_run(tmp_path / "fpa", recipe(FPA), losses(0.0, steps=12))
    mine = losses(0.5, steps=10)
    mine["train/loss"] = {step: value + noise[step] for step, value in mine["train/loss"].items()}
    mine["train/loss"] |= {1: 100.0, 5: 100.0}  # outside the last half: of no account
    write_run(tmp_path / "sage", recipe(SAGE), mine)
    paired = evaluate(tmp_path)["sage"].paired
    assert (paired.first_step, paired.last_step) == (6, 10)
    values = [0.5 + noise[step] for step in range(6, 11)]
    assert paired.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert paired.spread == pytest.approx(np.std(values, ddof=1), abs=1e-6)
    assert evaluate(tmp_path)["sage"].gap_step == 10


def test_a_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    write_run(tmp_path / "fpa", recipe(FPA), {"train/loss": {1: 7, 2: 6, 3: 99}, "validation/loss": {0: 8, 2: 6}})
    resumed = {"train/loss": {3: 5, 4: 4}, "validation/loss": {4: 4}}
    write_run(tmp_path / "fpa", recipe(FPA), resumed, purge_step=3)
    series = runs.load(tmp_path)[0].series
    assert series["train/loss"].steps.tolist() == [1, 2, 3, 4]
    assert series["train/loss"].values.tolist() == [7, 6, 5, 4]
    assert series["validation/loss"].steps.tolist() == [0, 2, 4]


def test_an_event_file_that_was_cut_off_is_read_up_to_there(folder: Path) -> None:
    (file,) = (folder / "above").glob("events.*")
    file.write_bytes(file.read_bytes()[:-5])
    assert evaluate(folder)["above"].final == 4.25


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_divergence(folder: Path, bad: float) -> None:
    broken = losses(0.25)
    broken["train/loss"][7] = bad
    write_run(folder / "broken", recipe(SAGE), broken)
    result = evaluate(folder)["broken"]
    assert result.diverged == f"train/loss is {bad} at step 7"
    assert result.paired is None


def test_a_validation_loss_that_rises_is_divergence(folder: Path) -> None:
    risen = losses(0.0)
    risen["validation/loss"] |= {4: 5.0, 6: 5.99, 8: 4.0}
    write_run(folder / "risen", recipe(SAGE), risen)
    assert evaluate(folder)["risen"].diverged is None
    risen["validation/loss"][6] = 6.5
    write_run(folder / "risen", recipe(SAGE), risen, purge_step=0)
    assert evaluate(folder)["risen"].diverged == "validation/loss is 1.50 above its best at step 6"


def test_the_report_says_and_shows_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"command": "sagebwd recipe recipes/r.yaml", "recipe": "recipes/r.yaml", "arms": ["fpa", "below", "above"]}
    (folder / "experiment.json").write_text(json.dumps(facts))
    target = compare(folder)

    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith(("fpa", "above", "below"))]
    assert [row[:2] for row in rows] == [["fpa", "4.0000"], ["below", "3.5000"], ["above", "4.2500"]]
    assert "+0.2500" in rows[2]
    assert "Unigram entropy of the validation text: 6.000 nats per token; every arm ends below it." in printed

    text = (target / "report.md").read_text()
    assert "**Gap to full precision at the end, in nats: below -0.500, above +0.250**" in text
    assert (
        "| above | 4.2500 | 3.0657 | 4.2500 | 3.750 | +0.2500 | +0.2500 ± 0.0000 | 1,000 | 25.0% | 2.5 | 0 | no |"
        in text
    )
    for fact in (
        "`sagebwd recipe recipes/r.yaml`",
        "| seed | 1234 |",
        "| device | CPU |",
        "- `fpa` differs by",
        "kind: fpa",
    ):
        assert fact in text
    assert "](curves.png)" in text

    picture = (target / "curves.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24]) == (1500, 1050)

    summary = json.loads((target / "summary.json").read_text())
    assert summary["arms"]["above"]["result"]["gap"] == 0.25
    assert summary["arms"]["fpa"]["meta"]["data_digest"] == META["data_digest"]


def test_a_diverged_arm_is_reported_and_drawn(folder: Path) -> None:
    broken = losses(0.25)
    broken["train/loss"] |= {5: 300.0, 6: math.nan}
    broken["validation/loss"] = {0: 8.0, 2: 7.2, 4: math.inf}
    write_run(folder / "broken", recipe(SAGE), broken, META | {"status": "diverged"})
    target = compare(folder)
    text = (target / "report.md").read_text()
    assert "broken diverged" in text
    assert "train/loss is nan at step 6" in text
    assert "not: broken" in text
    summary = (target / "summary.json").read_text()
    assert json.loads(summary)["arms"]["broken"]["result"]["final"] is None
    assert "NaN" not in summary


def test_an_unfinished_run_is_compared_as_far_as_it_goes(folder: Path) -> None:
    write_run(folder / "young", recipe(SAGE), {"validation/loss": {0: 8.0}}, {})
    write_run(folder / "half", recipe(SAGE), losses(0.25, steps=4), META | {"status": "running"})
    text = (compare(folder) / "report.md").read_text()
    assert "| half (step 4, unfinished) | 6.2500 |" in text
    assert "| young (step 0, unfinished) | 8.0000 |" in text
    assert "so far" in text


@pytest.mark.parametrize(
    ("kinds", "complaint"),
    [
        ({"a": SAGE, "b": SAGE}, "No arm has full"),
        ({"a": FPA, "b": FPA}, "Several arms have full.*a, b"),
    ],
)
def test_without_one_reference_there_are_no_gaps_and_it_says_why(tmp_path: Path, kinds: dict, complaint: str) -> None:
    for name, kind in kinds.items():
        write_run(tmp_path / name, recipe(kind), losses(0.0))
    found = runs.load(tmp_path)
    reference, problem = statistics.reference(found)
    assert reference is None
    assert re.match(complaint, problem)
    text = (compare(tmp_path) / "report.md").read_text()
    assert problem in text
    assert "**Validation loss: a 4.000, b 4.000**" in text


@pytest.mark.parametrize(
    ("other", "meta", "complaint"),
    [
        (recipe(SAGE, seed=7), META, "seed differs"),
        (recipe(SAGE, tokens_per_step=4096), META, "train.tokens_per_step differs"),
        (recipe(SAGE, data={"context": 128}), META, "data.context differs"),
        (recipe(SAGE), META | {"data_digest": "e" * 64}, "the prepared data's digest differs"),
    ],
)
def test_runs_on_other_samples_are_not_compared(folder: Path, other: object, meta: dict, complaint: str) -> None:
    write_run(folder / "other", other, losses(0.0), meta)
    with pytest.raises(UserError, match=f"other cannot be compared, since {complaint}"):
        compare(folder)


def test_what_changed_on_the_way_is_told(folder: Path) -> None:
    assert "changed on the way" not in (compare(folder) / "report.md").read_text()
    change = {"step": 4, "key": "optimizer.lr", "from": 0.1, "to": 0.2}
    rewind = {"from": 7, "to": 5, "samples_left_out": 16}
    meta = json.loads((folder / "above" / "meta.json").read_text())
    (folder / "above" / "meta.json").write_text(json.dumps(meta | {"changes": [change], "rewinds": [rewind]}))
    assert (
        "| changed on the way | above: optimizer.lr from 0.1 to 0.2 after step 4; "
        "rewound from step 7 to 5, leaving out 16 samples; below: nothing; fpa: nothing |"
    ) in (compare(folder) / "report.md").read_text()


def test_folders_without_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*nowhere"):
        compare(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no run with a validation loss"):
        compare(tmp_path)
    write_run(tmp_path / "fpa", recipe(FPA), losses(0.0))
    (tmp_path / "fpa" / "meta.json").write_text("{")
    with pytest.raises(UserError, match=r"meta.json cannot be read"):
        compare(tmp_path)


def test_smooth_is_the_mean_at_the_middle_step() -> None:
    series = statistics.Series(np.arange(1, 8), np.array([1, 2, 6, 1, 2, math.nan, 3]))
    found = statistics.smooth(series, 3)
    assert found.steps.tolist() == [2, 3, 4, 5, 6]
    np.testing.assert_allclose(found.values, [3, 3, 3, math.nan, math.nan])
    assert len(statistics.smooth(series, 9).steps) == 0


def test_bits_per_byte_and_mfu_are_none_where_a_run_did_not_tell(tmp_path: Path) -> None:
    old = {key: value for key, value in META.items() if key != "bytes_per_token"}
    scalars = {tag: points for tag, points in losses(0.0).items() if tag != "perf/mfu"}
    write_run(tmp_path / "fpa", recipe(FPA), scalars, old)
    (result,) = evaluate(tmp_path).values()
    assert (result.bits_per_byte, result.mfu) == (None, None)
    assert statistics.bits_per_byte(4 * math.log(2), 2.0) == 2.0


def test_spikes_are_counted_once_each() -> None:
    values = np.full(100, 3.0)
    values[[40, 41, 60, 99]] += 0.6  # two neighbours are one
    values[80] += 0.4
    assert statistics.spikes(runs.Series(np.arange(1, 101), values), 0.5) == 3
    assert statistics.spikes(runs.Series(np.arange(1, 101), values), 0.7) == 0
    assert statistics.spikes(runs.Series(np.arange(1, 101), np.linspace(9, 3, 100)), 0.5) == 0
    assert statistics.spikes(runs.Series(np.arange(1, 11), values[35:45]), 0.5) == 0


def test_tensorboard_gets_the_gap_and_a_layout_that_overlays_the_arms(folder: Path) -> None:
    compare(folder)
    target = compare(folder) / "tensorboard"  # made anew: no point stands twice
    gaps = runs.read_events(target / "above")
    assert gaps["gap/validation_loss"].steps.tolist() == [0, 2, 4, 6, 8]
    assert gaps["gap/validation_loss"].values.tolist() == [0, 0.25, 0.25, 0.25, 0.25]
    assert {path.name for path in target.iterdir() if path.is_dir()} == {"above", "below"}
    assert len(list((target / "above").iterdir())) == 1
    events = EventAccumulator(str(target), size_guidance={"tensors": 0}).Reload()
    (text,) = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val
    layout = layout_pb2.Layout.FromString(text)
    tags = {tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag}
    assert {"validation/loss", "gap/validation_loss", "perf/mfu"} <= tags


def test_labels_that_would_overlap_are_moved_apart_by_the_least() -> None:
    from sagebwd.compare.plot import _spread

    assert _spread([0, 100, 104, 200], 10) == [0, 97, 107, 200]
    assert _spread([50, 50, 50], 10) == [40, 50, 60]
    assert _spread([0, 9, 18], 10) == [-1, 9, 19]


def test_the_table_is_aligned() -> None:
    assert aligned([("arm", "loss", "x"), ("long-name", "1.5", "no")]).splitlines() == [
        "arm         loss   x",
        "---------------------",
        "long-name    1.5   no",
    ]
