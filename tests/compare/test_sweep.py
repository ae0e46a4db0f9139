"""A sweep's comparison on real event files: pairs by cell, means over seeds, verdicts, what is written."""

import csv
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from scipy import stats

from sagebwd.compare import compare, plot, report, runs
from sagebwd.errors import UserError
from sagebwd.training import run_folder
from sagebwd.training.recipe import Recipe
from tests.compare.event_files import FPA, META, SAGE, losses, write_run

SIZES, SEEDS = (1024, 4096), (1, 2, 3)
OF_SEED = {1: 0.1, 2: -0.2, 3: 0.3}  # what a seed adds to every arm's loss: it cancels within a pair
GAPS = {
    "near": {1024: (0.002, 0.004, 0.003), 4096: (0.02, 0.05, -0.01)},
    "far": {1024: (0.2, 0.21, 0.19), 4096: (0.3, 0.32, 0.31)},
}


def recipe(kind: dict, size: int, seed: int, qk_norm: bool = True) -> Recipe:
    train = {"tokens_per_step": size, "total_tokens": 8 * size}
    return Recipe(name="s", seed=seed, attention=kind, train=train, model={"qk_norm": qk_norm})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    variants = {}
    for size in SIZES:
        for number, seed in enumerate(SEEDS):
            for arm in ("fpa", *GAPS):
                name = f"{size}-s{seed}-{arm}"
                variants[name] = arm
                shift = OF_SEED[seed] + (GAPS[arm][size][number] if arm in GAPS else 0.0)
                write_run(tmp_path / name, recipe(SAGE if arm in GAPS else FPA, size, seed), losses(shift))
    facts = {"arms": list(variants), "variants": variants, "margin": 0.01}
    (tmp_path / run_folder.EXPERIMENT).write_text(json.dumps(facts))
    return tmp_path


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def point(folder: Path, arm: str, size: int) -> dict[str, str]:
    (found,) = [
        row
        for row in rows(folder / "report" / "gaps.csv")
        if (row["arm"], row["tokens_per_step"]) == (arm, str(size)) and row["qk_norm"] == "True"
    ]
    return found


def test_gaps_are_paired_by_seed_and_size(folder: Path) -> None:
    compare(folder)
    for arm, sizes in GAPS.items():
        for size, gaps in sizes.items():
            found = point(folder, arm, size)
            low, high = stats.t.interval(0.95, 2, sum(gaps) / 3, stats.sem(gaps))
            numbers = [float(found[key]) for key in ("gap_mean", "gap_low", "gap_high")]
            assert numbers == pytest.approx([sum(gaps) / 3, low, high], abs=1e-6)  # events are FP32
    spread = stats.tstd([OF_SEED[seed] for seed in SEEDS])
    assert float(point(folder, "fpa", 1024)["loss_spread"]) == pytest.approx(spread, abs=1e-6)
    words = {(arm, size): point(folder, arm, size)["verdict"] for arm in GAPS for size in SIZES}
    assert words == {
        ("near", 1024): "matches", ("near", 4096): "undecided", ("far", 1024): "worse", ("far", 4096): "worse",
    }  # fmt: skip
    assert int(point(folder, "near", 4096)["seeds_to_decide"]) > 3
    assert point(folder, "fpa", 1024)["verdict"] == ""


def test_the_report_says_and_shows_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = compare(folder)
    text = (target / "report.md").read_text()
    assert "**near matches at 1k, undecided at 4k; far worse at 1k and 4k** (margin 0.01 nats)" in text
    assert (
        "| 1,024 | yes | near | 3 | 4.0697 ± 0.2511 | 2.9356 | +0.0030 | +0.0005 to +0.0055 | matches | 0 | 0 |" in text
    )
    assert "- near at 4,096 tokens a step: undecided (95% interval" in text
    assert "- 4,096 tokens a step: learning rate 0.001, 8 steps\n- seeds 1, 2, 3; with QK-norm" in text
    assert "![Loss curves at 4096, seed 1](curves-4096.png)" in text
    assert "near at 1,024 tokens a step: matches" in capsys.readouterr().out
    for picture, height in (("gaps.png", 720), ("curves-1024.png", 1050), ("curves-4096.png", 1050)):
        data = (target / picture).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", data[16:24]) == (1500, height)
    assert len(rows(target / "runs.csv")) == len(SIZES) * len(SEEDS) * 3
    assert (target / "tensorboard" / "1024-s1-near").is_dir()


def test_one_verdict_for_all_is_said_once(folder: Path) -> None:
    for name in [path.name for path in folder.iterdir() if "-s1-" not in path.name and path.is_dir()]:
        shutil.rmtree(folder / name)
    text = (compare(folder) / "report.md").read_text()
    assert "**every arm undecided wherever it was run** (margin 0.01 nats)" in text


def test_the_picture_says_where_seeds_are_fewer(folder: Path) -> None:
    assert " · 3 seeds" in report.subtitle("s", runs.load(folder), sweep=True)
    shutil.rmtree(folder / "4096-s3-near")
    assert " · 2 to 3 seeds" in report.subtitle("s", runs.load(folder), sweep=True)


def test_a_diverged_seed_is_worse_and_in_no_mean(folder: Path) -> None:
    broken = losses(0.0)
    broken["train/loss"][7] = float("nan")
    diverged = META | {"status": "diverged"}
    write_run(folder / "1024-s2-near", recipe(SAGE, 1024, 2), broken, diverged, purge_step=0)
    compare(folder)
    found = point(folder, "near", 1024)
    assert (found["verdict"], found["diverged"], found["pairs"]) == ("worse", "1", "2")
    assert "1 of 3 seeds diverged, of full precision none" in (folder / "report" / "report.md").read_text()

    write_run(folder / "1024-s2-fpa", recipe(FPA, 1024, 2), broken, diverged, purge_step=0)
    compare(folder)
    assert point(folder, "near", 1024)["verdict"] == "undecided"
    assert point(folder, "far", 1024)["pairs"] == "2"


def test_a_sweep_in_progress_claims_nothing(folder: Path) -> None:
    write_run(folder / "1024-s3-near", recipe(SAGE, 1024, 3), {}, META | {"status": "running"})
    compare(folder)
    found = point(folder, "near", 1024)
    assert (found["verdict"], found["unfinished"], found["seeds_to_decide"]) == ("undecided", "1", "3")


def test_with_and_without_qk_norm_are_points_of_their_own(folder: Path) -> None:
    facts = json.loads((folder / run_folder.EXPERIMENT).read_text())
    for arm, shift in (("fpa", 0.0), ("far", 1.5)):
        facts["variants"][f"1024-noqk-s1-{arm}"] = arm
        kind = FPA if arm == "fpa" else SAGE
        write_run(folder / f"1024-noqk-s1-{arm}", recipe(kind, 1024, 1, qk_norm=False), losses(shift))
    (folder / run_folder.EXPERIMENT).write_text(json.dumps(facts))
    target = compare(folder)
    (found,) = [row for row in rows(target / "gaps.csv") if row["qk_norm"] == "False" and row["arm"] == "far"]
    assert (float(found["gap_mean"]), found["verdict"], found["gap_low"]) == (1.5, "undecided", "")
    text = (target / "report.md").read_text()
    assert "far worse at 1k with QK-norm and 4k with QK-norm, undecided at 1k without QK-norm" in text
    assert (target / "curves-1024-noqk.png").exists()


def test_a_cell_without_full_precision_says_why_it_has_no_gap(folder: Path) -> None:
    for path in folder.glob("4096-*-fpa/config.yaml"):
        path.unlink()
    compare(folder)
    assert point(folder, "near", 4096)["verdict"] == "undecided"
    text = (folder / "report" / "report.md").read_text()
    assert "4,096 tokens a step, seed 1: No arm has full-precision attention" in text


def test_runs_on_another_corpus_are_not_compared(folder: Path) -> None:
    write_run(folder / "1024-s1-near", recipe(SAGE, 1024, 1), {}, META | {"data_digest": "e" * 64})
    with pytest.raises(UserError, match=r"1024-s1-near cannot be compared, since the prepared data's digest differs"):
        compare(folder)


def test_an_arm_keeps_its_colour_where_another_is_missing(folder: Path) -> None:
    for path in folder.glob("1024-*-near/config.yaml"):
        path.unlink()
    target = compare(folder)
    near, far = plot.COLOURS[:2]
    shown = {name: [drawn(target / f"curves-{name}.png", colour) for colour in (near, far)] for name in SIZES}
    assert shown == {1024: [False, True], 4096: [True, True]}


def test_a_run_that_the_recipe_does_not_name_is_an_arm_of_its_own(folder: Path) -> None:
    write_run(folder / "1024-s1-tried", recipe(SAGE, 1024, 1), losses(0.5))
    compare(folder)
    assert float(point(folder, "1024-s1-tried", 1024)["gap_mean"]) == pytest.approx(0.4, abs=1e-6)


def drawn(picture: Path, colour: str) -> bool:
    pixels = np.round(imread(picture)[..., :3] * 255)
    return bool((pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(-1).any())
