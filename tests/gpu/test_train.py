"""Both arms through the training program on a GPU: bf16, NCCL, the kernels that count, and a resume."""

import shutil
from pathlib import Path

import pytest

from sagebwd.tokenizer import Prepared, prepare
from sagebwd.training import run_folder, train
from sagebwd.training.recipe import Data, Recipe
from tests.training.runs import Logged, logged, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
pytestmark = pytest.mark.gpu
STEPS = 20


@pytest.fixture(scope="module")
def prepared(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small_data, tmp_path_factory.mktemp("data"))


def recipe(data: Data, kind: str) -> Recipe:
    tiny = tiny_recipe(data, kind, steps=STEPS, tokens_per_step=4096, micro_batch=32)
    return tiny.model_copy(update={"model": tiny.model.model_copy(update={"hidden": 256, "ffn": 512})})


def run(folder: Path, recipe: Recipe, prepared: Prepared) -> Logged:
    train.run(recipe, recipe.attention.kind, folder, prepared)
    return logged(folder)


@pytest.mark.parametrize("pack", [False, True])
def test_both_arms_learn_alike(small_data: Data, prepared: Prepared, tmp_path: Path, pack: bool) -> None:
    data = small_data.model_copy(update={"pack": pack})
    fpa = run(tmp_path / "fpa", recipe(data, "fpa"), prepared)
    sagebwd = run(tmp_path / "sagebwd", recipe(data, "sagebwd"), prepared)
    losses = fpa.values("train/loss")
    assert losses[-1] < losses[0] - 0.3
    assert sagebwd.values("train/loss") == pytest.approx(losses, abs=0.05)
    metas = {arm: run_folder.meta(tmp_path / arm) for arm in ("fpa", "sagebwd")}
    assert metas["fpa"]["backend"].startswith("varlen_attn " if pack else "SDPA ")
    assert metas["sagebwd"]["backend"] == "triton"
    assert all(meta["precision"] == "bf16" for meta in metas.values())
    assert fpa.values("perf/memory_gib")[-1] > 0


def test_a_resumed_run_goes_on_where_it_was(small_data: Data, prepared: Prepared, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    before = run(whole, recipe(small_data, "sagebwd"), prepared).values("train/loss")
    shutil.copytree(whole / "checkpoints", resumed / "checkpoints")
    (resumed / "checkpoints" / "latest").write_text(f"step_{STEPS // 2:08d}")
    after = run(resumed, recipe(small_data, "sagebwd"), prepared).scalars["train/loss"]
    assert [step for step, _ in after] == list(range(STEPS // 2 + 1, STEPS + 1))
    assert [loss for _, loss in after] == pytest.approx(before[STEPS // 2 :], abs=0.01)
