"""Checkpoints: an exact resume, and refusals that name what is wrong and the way out."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sagebwd.errors import UserError
from sagebwd.tokenizer import Prepared, prepare
from sagebwd.training import checkpoint, run_folder, train
from sagebwd.training.recipe import Data, Recipe
from tests.training.runs import logged, on_cpu, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
pytestmark = on_cpu
STEPS, HALF = 8, 4


@pytest.fixture(scope="module")
def prepared(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small_data, tmp_path_factory.mktemp("data"))


def eight_steps(data: Data, kind: str = "sagebwd", precision: str = "fp32") -> Recipe:
    recipe = tiny_recipe(data, kind, steps=STEPS, tokens_per_step=256, micro_batch=4)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})


@pytest.fixture(scope="module")
def unbroken(
    small_data: Data, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """The folder of a finished run of an arm. Do not write into it."""
    folders: dict[tuple[str, str], Path] = {}

    def run(kind: str = "sagebwd", precision: str = "fp32") -> Path:
        if (kind, precision) not in folders:
            folders[kind, precision] = tmp_path_factory.mktemp("runs") / kind
            train.run(eight_steps(small_data, kind, precision), kind, folders[kind, precision], prepared)
        return folders[kind, precision]

    return run


def as_if_killed_after_step_eight(whole: Path, folder: Path) -> Path:
    """A copy that logged all its steps, but whose last whole checkpoint is that of step 4."""
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / f"step_{STEPS:08d}")
    (folder / "checkpoints" / "latest").write_text(f"step_{HALF:08d}")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"status": "running"}))
    return folder


def identity(recipe: Recipe, prepared: Prepared) -> checkpoint.Run:
    return checkpoint.Run(recipe, prepared.digest, prepared.vocab_size)


@pytest.mark.parametrize(("kind", "precision"), [("fpa", "fp32"), ("sagebwd", "fp32"), ("sagebwd", "bf16")])
def test_a_resumed_run_equals_the_unbroken_one_bitwise(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path, kind: str, precision: str
) -> None:
    whole = unbroken(kind, precision)
    resumed = as_if_killed_after_step_eight(whole, tmp_path / "run")
    train.run(eight_steps(small_data, kind, precision), kind, resumed, prepared)
    before, after = logged(whole).scalars, logged(resumed).scalars
    for tag in ("train/loss", "validation/loss", "train/grad_norm", "train/learning_rate", "train/consumed_tokens"):
        assert after[tag] == before[tag], tag
    assert [step for step, _ in after["train/loss"]] == list(range(1, STEPS + 1))
    assert [step for step, _ in after["validation/loss"]] == [0, 3, 6, 8]
    assert run_folder.meta(resumed)["status"] == "done"
    assert run_folder.meta(resumed)["start_loss"] == run_folder.meta(whole)["start_loss"]


def test_the_second_half_is_computed_anew(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path
) -> None:
    """Not merely left standing from the first time: without the old events, there is the second half alone."""
    whole = unbroken()
    resumed = as_if_killed_after_step_eight(whole, tmp_path / "run")
    for events in resumed.glob(run_folder.EVENTS):
        events.unlink()
    train.run(eight_steps(small_data), "sagebwd", resumed, prepared)
    assert logged(resumed).scalars["train/loss"] == logged(whole).scalars["train/loss"][HALF:]


def test_a_killed_process_resumes(unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path) -> None:
    recipes, runs = tmp_path / "recipes", tmp_path / "runs"
    recipes.mkdir()
    (recipes / "sagebwd.json").write_text(eight_steps(small_data).model_dump_json())
    program = Path(__file__).parents[1] / "distributed" / "program.py"
    process = subprocess.Popen(
        [sys.executable, str(program), str(recipes), str(prepared.folder), str(runs)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    latest = runs / "sagebwd" / "checkpoints" / "latest"
    until = time.monotonic() + 60
    while not latest.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert latest.exists()
    time.sleep(1)  # event files are named, and so read, by the second they were begun in
    train.run(eight_steps(small_data), "sagebwd", runs / "sagebwd", prepared)
    ours, theirs = logged(runs / "sagebwd").scalars, logged(unbroken()).scalars
    assert ours["train/loss"] == theirs["train/loss"]
    assert ours["validation/loss"] == theirs["validation/loss"]


def test_a_finished_run_is_not_run_again(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(unbroken(), folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    train.run(eight_steps(small_data), "sagebwd", folder, prepared)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_run_killed_before_it_said_done(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(unbroken(), folder)
    meta = run_folder.meta(folder)
    (folder / "meta.json").write_text(json.dumps(meta | {"status": "running"}))
    train.run(eight_steps(small_data), "sagebwd", folder, prepared)
    assert run_folder.meta(folder)["status"] == "done"
    assert logged(folder).scalars["train/loss"] == logged(unbroken()).scalars["train/loss"]


def test_the_newest_two_are_kept(small_data: Data, prepared: Prepared, tmp_path: Path) -> None:
    recipe = eight_steps(small_data, "fpa")
    recipe = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"every_steps": 2})})
    (tmp_path / "checkpoints" / "step_00000002.partial").mkdir(parents=True)  # of a run that died while it wrote
    train.run(recipe, "fpa", tmp_path, prepared)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000006", "step_00000008"]


CHANGES = {
    "model.layers": {"model": {"layers": 3}},
    "data.vocab_size": {"data": {"vocab_size": 600}},
    "data.pack": {"data": {"pack": True}},
    "attention.kind": {"attention": {"kind": "fpa"}},
    "attention.quant.granularity": {"attention": {"quant": {"granularity": "tile"}}},
    "train.tokens_per_step": {"train": {"tokens_per_step": 512}},
    "train.precision": {"train": {"precision": "bf16"}},
    "parallel.tensor": {"parallel": {"tensor": 2}},
    "seed": {"seed": 4},
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_checkpoint_of_another_run_is_refused(
    unbroken: Callable, small_data: Data, prepared: Prepared, key: str
) -> None:
    def changed(tree: dict, change: dict) -> dict:
        return tree | {k: changed(tree[k], v) if isinstance(v, dict) else v for k, v in change.items()}

    recipe = Recipe.model_validate(changed(eight_steps(small_data).model_dump(), CHANGES[key]))
    with pytest.raises(UserError) as refusal:
        checkpoint.latest(unbroken(), identity(recipe, prepared))
    sentence = str(refusal.value)
    assert f"{key} = " in sentence
    assert "\n" not in sentence
    assert "move " in sentence


def test_a_checkpoint_of_other_data_is_refused(unbroken: Callable, small_data: Data, prepared: Prepared) -> None:
    recipe = eight_steps(small_data)
    with pytest.raises(UserError, match="tokenizer's vocabulary = 512, but this run has 640"):
        checkpoint.latest(unbroken(), checkpoint.Run(recipe, prepared.digest, 640))
    with pytest.raises(UserError, match="the prepared data"):
        checkpoint.latest(unbroken(), checkpoint.Run(recipe, "0" * 64, prepared.vocab_size))


@pytest.mark.parametrize("damage", ["cut short", "changed", "missing"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_serves(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(unbroken(), folder)
    (folder / "meta.json").unlink()
    file = folder / "checkpoints" / f"step_{STEPS:08d}" / "tp_00.pt"
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "changed":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[:-100])
    with pytest.raises(UserError, match=rf"tp_00.pt is .* write step_{HALF:08d} into \S+latest"):
        train.run(eight_steps(small_data), "sagebwd", folder, prepared)
    (folder / "checkpoints" / "latest").write_text(f"step_{HALF:08d}\n")
    train.run(eight_steps(small_data), "sagebwd", folder, prepared)
    assert logged(folder).scalars["train/loss"] == logged(unbroken()).scalars["train/loss"]


def test_a_damaged_manifest_is_refused(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(unbroken(), folder)
    (folder / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json").write_text('{"format": 1, ')
    with pytest.raises(UserError, match=r"manifest.json cannot be read"):
        checkpoint.latest(folder, identity(eight_steps(small_data), prepared))


def test_loading_runs_no_code(unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path) -> None:
    """A file that would run something when unpickled is refused, even with the right checksum."""

    class Evil:
        def __reduce__(self) -> tuple:
            return (Path(tmp_path / "ran").touch, ())

    folder = as_if_killed_after_step_eight(unbroken(), tmp_path / "run")
    there = folder / "checkpoints" / f"step_{HALF:08d}"
    torch.save({"model": Evil()}, there / "tp_00.pt")
    manifest = json.loads((there / "manifest.json").read_text())
    manifest["files"]["tp_00.pt"] = checkpoint._seal(there / "tp_00.pt")
    (there / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        train.run(eight_steps(small_data), "sagebwd", folder, prepared)
    assert not (tmp_path / "ran").exists()
