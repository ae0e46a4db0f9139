"""Sick steps change nothing and are named; spikes are counted, and gone back from if the recipe says so."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sagebwd.tokenizer import Prepared, prepare
from sagebwd.training import checkpoint, health, recipe, run_folder, status, train
from sagebwd.training.checkpoint import Position
from sagebwd.training.engine import losses, megatron
from sagebwd.training.recipe import Data, Recipe
from tests.training.runs import changed, journal, logged, on_cpu, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
pytestmark = on_cpu
STEPS, IN_STEP, MICRO = 8, 8, 4  # sequences of a step, of a micro-batch: two of these a step


@pytest.fixture(scope="module")
def prepared(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small_data, tmp_path_factory.mktemp("data"))


def tiny(data: Data, steps: int = STEPS, **sections: dict) -> Recipe:
    return changed(tiny_recipe(data, "sagebwd", steps=steps, tokens_per_step=256, micro_batch=MICRO), sections)


def change_losses(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Of training micro-batches, by number from 0: the summed loss that the backward pass starts from."""
    original, number = losses.sums, [0]

    def sums(mask: torch.Tensor, of_each: torch.Tensor) -> tuple:
        if of_each.requires_grad:
            of_each = change(number[0], of_each)
            number[0] += 1
        return original(mask, of_each)

    monkeypatch.setattr(losses, "sums", sums)


@pytest.mark.parametrize("sick", [math.nan, math.inf])
def test_a_sick_step_changes_nothing(
    small_data: Data, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sick: float
) -> None:
    last = 2 * (STEPS - 1)
    change_losses(monkeypatch, lambda number, losses: losses * (sick if number == last else 1))
    settings = {"checkpoint": {"every_steps": 1}, "evaluation": {"every_steps": 100}}
    assert train.run(tiny(small_data, **settings), "sagebwd", tmp_path, prepared) == "done"
    before, after = (checkpoint.read(tmp_path / "checkpoints" / checkpoint.name(step)) for step in (7, 8))
    assert after.files == before.files  # weights, moments and random states, byte for byte
    assert (before.position.adam_step, after.position.adam_step) == (7, 7)
    assert (after.position.skipped, after.position.samples) == (1, STEPS * IN_STEP)
    assert status.read(tmp_path).skipped == run_folder.meta(tmp_path)["skipped_steps"] == 1
    assert [step for step, _ in logged(tmp_path).scalars["train/loss"]] == list(range(1, STEPS))
    lines = [line for line in journal(tmp_path) if "train/loss" in line]
    assert [line.get("skipped", False) for line in lines] == [False] * 7 + [True]
    assert lines[-1]["train/loss"] == str(sick)


def test_the_run_goes_on_after_sick_steps_as_if_they_were_not_there(
    small_data: Data, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not enough of them in a row to stop, and none of a checkpoint while it is not known how it ends."""
    change_losses(monkeypatch, lambda number, losses: losses * (math.nan if number // 2 in (2, 3, 5, 6) else 1))
    settings = {"checkpoint": {"every_steps": 4, "keep_last": 9}, "health": {"bad_steps": 3}}
    assert train.run(tiny(small_data, **settings), "sagebwd", tmp_path, prepared) == "done"
    assert [math.isfinite(loss) for _, loss in logged(tmp_path).scalars["train/loss"]] == [True] * 4
    assert run_folder.meta(tmp_path)["skipped_steps"] == 4
    saved = {path.name for path in (tmp_path / "checkpoints").glob("step_*")}
    assert saved == {checkpoint.name(5), checkpoint.name(8)}  # that of step 4, after two sick ones, waited


@pytest.mark.parametrize("backward", [False, True])
def test_a_run_that_stays_sick_stops_and_names_where_it_begins(
    small_data: Data, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backward: bool
) -> None:
    build = megatron.build_model

    def built(*arguments: object) -> torch.nn.Module:
        model, calls = build(*arguments), [0]

        def sicken(module: torch.nn.Module, inputs: tuple, output: tuple) -> tuple | None:
            if not torch.is_grad_enabled():
                return None
            calls[0] += 1
            if calls[0] <= 2 * 3 or calls[0] % 2:  # from the fourth step on, in the second of two micro-batches
                return None
            if backward:
                output[0].register_hook(lambda gradient: gradient * math.nan)
                return None
            return output[0] * math.nan, output[1]

        model.decoder.layers[1].mlp.linear_fc2.register_forward_hook(sicken)
        return model

    monkeypatch.setattr(megatron, "build_model", built)
    sick = tiny(small_data, health={"bad_steps": 3}, checkpoint={"every_steps": 2})
    assert train.run(sick, "sagebwd", tmp_path, prepared) == "diverged"
    found = json.loads((tmp_path / run_folder.SICK).read_text())
    assert found["first"] == (
        "the gradient of the output of decoder.layers.1.mlp.linear_fc2 (RowParallelLinear)"
        if backward
        else "the output of decoder.layers.1.mlp.linear_fc2 (RowParallelLinear)"
    )
    assert (found["step"], found["rank"], found["micro_batch"]) == (6, 0, 1)
    assert found["samples"] == list(range(5 * IN_STEP + MICRO, 6 * IN_STEP))
    assert found["samples_of_the_step"] == [5 * IN_STEP, 6 * IN_STEP - 1]
    told = status.read(tmp_path)
    assert (told.state, told.skipped, told.checkpoint) == ("failed", 3, 2)
    assert "linear_fc2" in told.cause
    assert status.exit_code(tmp_path) == status.FAILED
    assert checkpoint.newest_whole(tmp_path, pytest.fail).position.step == 2


def spike(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    change_losses(monkeypatch, lambda number, losses: losses + (5.0 if number // 2 + 1 in steps else 0.0))


def test_a_spike_is_counted_and_said(
    small_data: Data,
    prepared: Prepared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spike(monkeypatch, 12, 13)  # one that lasts two steps
    train.run(tiny(small_data, 16), "sagebwd", tmp_path, prepared)
    assert status.read(tmp_path).spikes == run_folder.meta(tmp_path)["spikes"] == 1
    assert "SPIKE at step 12" in capsys.readouterr().out
    assert run_folder.meta(tmp_path)["rewinds"] == []


def test_a_spike_is_gone_back_from_where_the_recipe_says_so(
    small_data: Data, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spike(
        monkeypatch, 9, 15
    )  # training's steps, as they come: the first before any checkpoint, so nothing to go back to
    recipe = tiny(small_data, 20, checkpoint={"every_steps": 10, "keep_last": 9}, health={"rewind": True})
    whole = tmp_path / "whole"
    assert train.run(recipe, "sagebwd", whole, prepared) == "done"
    told = {"from": 15, "to": 10, "samples_left_out": 5 * IN_STEP}
    assert run_folder.meta(whole)["rewinds"] == [told]
    assert run_folder.meta(whole)["spikes"] == 2
    points = logged(whole).scalars["train/loss"]
    assert [step for step, _ in points] == list(range(1, 21))
    assert max(loss for step, loss in points if step > 10) < 7
    end = checkpoint.read(whole / "checkpoints" / checkpoint.name(20)).position
    assert (end.samples, end.tokens) == (25 * IN_STEP, 20 * 256)
    assert [line["step"] for line in journal(whole) if "train/loss" in line] == list(range(1, 21))

    # The samples left out stay out when it is resumed.
    monkeypatch.undo()
    resumed = tmp_path / "resumed"
    recipe = changed(recipe, {"checkpoint": {"every_steps": 5}})
    spike(monkeypatch, 9, 15)
    train.run(recipe, "sagebwd", resumed, prepared)
    monkeypatch.undo()
    for name in ("meta.json", f"checkpoints/{checkpoint.name(20)}", "checkpoints/latest"):
        path = resumed / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = logged(resumed).scalars["train/loss"]
    train.run(recipe, "sagebwd", resumed, prepared)
    assert logged(resumed).scalars["train/loss"] == before
    assert checkpoint.read(resumed / "checkpoints" / checkpoint.name(20)).position.samples == end.samples


def test_what_a_spike_is_measured_against() -> None:
    settings, position = recipe.Health(spike_nats=1.0), Position()
    assert [health.judge(settings, position, 9.0, 1.0) for _ in range(7)] == ["well"] * 7
    assert health.judge(settings, position, 99.0, 1.0) == "well"  # too little is known yet
    assert health.judge(settings, position, 9.9, 1.0) == "well"
    assert health.judge(settings, position, 10.1, 1.0) == "spike"
    assert health.judge(settings, position, 10.2, 1.0) == "well"  # the same one
    assert health.judge(settings, position, math.nan, 1.0) == "skipped"
    assert health.judge(settings, position, 9.0, 1.0) == "well"
    assert health.judge(settings, position, 10.1, 1.0) == "spike"
    assert (position.spikes, position.skipped, position.bad_in_row) == (2, 1, 0)
    assert len(position.recent) <= health.WINDOW
