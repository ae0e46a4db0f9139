"""The forecast against what was measured and against the tensors themselves; and that a dry run touches nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sagebwd.errors import UserError
from sagebwd.forecast import GIB, H200, forecast, layer_activations
from sagebwd.megatron import fusion
from sagebwd.megatron.model import build_model
from sagebwd.training import world
from sagebwd.training.recipe import Recipe
from sagebwd.training.recipe_file import load_experiment
from tests.training.runs import on_cpu

ROOT = Path(__file__).parents[1]
# perf/memory_gib at the end of recipes/results/llama-125m-h200 (before operations were fused)
MEASURED_GIB = {"fpa": 17.99, "sagebwd": 17.44, "sagebwd-paper": 17.44}


@pytest.mark.parametrize("arm", MEASURED_GIB)
def test_it_is_near_what_an_h200_measured(arm: str) -> None:
    found = json.loads((ROOT / "recipes/results/llama-125m-h200/summary.json").read_text())["arms"][arm]["result"]
    recipe = load_experiment(ROOT / "recipes/llama-125m.yaml", ["train.fusion=off"]).arms[arm]
    told = forecast(recipe, H200, 1)
    assert told.tokens_per_second == pytest.approx(found["tokens_per_second"], rel=0.25)
    assert told.memory.total / GIB == pytest.approx(MEASURED_GIB[arm], rel=0.05)


@on_cpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("kind", "quant", "qk_norm"),
    [("fpa", {}, True), ("sagebwd", {}, True), ("sagebwd", {}, False), ("sagebwd", {"products": "scores"}, True)],
)
def test_activations_are_the_tensors_that_a_layer_saves(
    monkeypatch: pytest.MonkeyPatch, kind: str, quant: dict, qk_norm: bool, kv_heads: int
) -> None:
    from megatron.core.fusions import fused_bias_swiglu as swiglu

    monkeypatch.setattr(fusion, "BACKEND", "aot_eager_decomp_partition")
    monkeypatch.setattr(swiglu, "swiglu", swiglu.swiglu._torchdynamo_orig_callable)
    fusion.compiled.cache_clear()
    context, batch = 64, 8

    def saved(layers: int) -> tuple[int, Recipe]:
        recipe = Recipe(
            name="r",
            model={"layers": layers, "hidden": 128, "ffn": 384, "heads": 4, "kv_heads": kv_heads, "qk_norm": qk_norm},
            attention={"kind": kind, "quant": quant},
            data={"context": context, "vocab_size": 256},
            train={"precision": "bf16", "fusion": "on"},
        )
        model = build_model(recipe, 256, torch.bfloat16)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x
            return x

        tokens = torch.zeros(batch, context, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(tokens, torch.arange(context).expand(batch, -1), None, labels=tokens)
        sizes = {where: x.untyped_storage().nbytes() for where, x in kept.items() if where not in parameters}
        return sum(sizes.values()), recipe

    with world.join(tensor=1, seed=0):
        (one, recipe), (two, _) = saved(1), saved(2)
    fusion.compiled.cache_clear()
    assert (two - one) / (context * batch) == pytest.approx(layer_activations(recipe), rel=0.03)


@pytest.mark.parametrize(
    "results", ["h200-325m-speed", "h200-325m-speed-16k", "h200-325m-speed-again", "h200-325m-speed-16k-again"]
)
def test_it_is_near_the_fused_325m_model_on_an_h200(results: str) -> None:
    arms = json.loads((ROOT / "recipes/results" / results / "summary.json").read_text())["arms"]
    assert {"fpa", "sagebwd-scores"} <= arms.keys()
    for arm in arms.values():
        found, told = arm["result"], forecast(Recipe(**arm["config"]), H200, 1)
        assert found["tokens_per_second"] / told.tokens_per_second == pytest.approx(1, abs=0.25)  # steps' times
        assert told.memory.total / GIB == pytest.approx(found["memory_gib"], rel=0.05)


def test_more_of_anything_takes_more() -> None:
    base = load_experiment(ROOT / "recipes/llama-125m.yaml").arms["fpa"]

    def of(**sections: dict) -> Recipe:
        changed = {name: getattr(base, name).model_copy(update=keys) for name, keys in sections.items()}
        return base.model_copy(update=changed)

    one = forecast(base, H200, 1)
    assert forecast(of(model={"layers": 24}), H200, 1).step_seconds > 1.5 * one.step_seconds
    assert forecast(of(train={"micro_batch": 32}), H200, 1).memory.activations == 2 * one.memory.activations
    assert forecast(of(train={"fusion": "off"}), H200, 1).step_seconds > one.step_seconds
    two = forecast(of(parallel={"tensor": 2}), H200, 2)
    assert two.memory.weights == one.memory.weights / 2
    assert two.memory.activations < one.memory.activations
    staged = forecast(of(parallel={"pipeline": 2}), H200, 2)
    assert one.memory.weights / 2 < staged.memory.weights < one.memory.weights
    assert 0 < staged.parts["waiting for other stages"] < staged.step_seconds / 2
    shared = forecast(of(parallel={"distributed_optimizer": True}), H200, 2)
    assert shared.memory.optimizer == one.memory.optimizer / 2
    long = {"data": {"context": 8192}, "train": {"micro_batch": 4}}
    whole, halved = forecast(of(**long), H200, 1), forecast(of(**long, parallel={"context": 2}), H200, 2)
    assert halved.memory.activations == whole.memory.activations / 2
    assert whole.step_seconds / 2 < halved.step_seconds < whole.step_seconds
    assert halved.parts["attention's operands over ranks"] > 0
    zero = forecast(of(parallel={"engine": "deepspeed", "zero": 2}), H200, 2).memory
    assert (zero.weights, zero.gradients) == (one.memory.weights, one.memory.gradients / 2)
    assert zero.optimizer == one.memory.optimizer / 2
    offloaded = forecast(of(parallel={"engine": "deepspeed", "zero": 3, "offload": "cpu"}), H200, 2).memory
    assert (offloaded.weights, offloaded.optimizer) == (one.memory.weights / 2, 0)
    spread = forecast(of(train={"micro_batch": 4}), H200, 8)
    assert one.tokens_per_second < spread.tokens_per_second < 8 * one.tokens_per_second
    with pytest.raises(UserError, match="no multiple of"):
        forecast(base, H200, 7)


def dry_run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sagebwd.cli", "recipe", str(ROOT / "recipes/llama-125m.yaml"), "--dry-run"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=cwd, check=False)


def test_a_dry_run_prints_and_touches_nothing(tmp_path: Path) -> None:
    answer = dry_run("--gpu", "h200", "--nproc", "2", "--at-once", "3", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    for fact in ("97.5M parameters", "GFLOPs a token", "tensor 1 x data 2", "sagebwd-paper", "on 6 GPU(s)", "weights"):
        assert fact in answer.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpu", "h300"], "no figures for the GPU 'h300'"),
        (["--gpu", "h200", "--nproc", "3"], "no multiple of"),
        (["--gpu", "h200", "parallel.engine=deepspeed", "parallel.zero=0"], "set parallel.zero to 1"),
        pytest.param([], "no NVIDIA GPU is visible here: name the one to forecast for", marks=on_cpu),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], complaint: str) -> None:
    answer = dry_run(*arguments)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert complaint in answer.stderr
