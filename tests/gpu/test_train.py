"""Both arms through the training program on a GPU: bf16, NCCL, the kernels that count, and a resume."""

import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch

from sagebwd.errors import RunError
from sagebwd.tokenizer import Prepared, prepare
from sagebwd.training import checkpoint, health, run_folder, status, train, world
from sagebwd.training.recipe import Data, Health, Recipe
from tests.training.runs import Logged, changed, logged, tiny_recipe

# torch asks for it once, when cuBLAS is first used: by then train.deterministic of a later test is too late
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytest_plugins = ("tests.small_corpus",)
pytestmark = pytest.mark.gpu
STEPS = 20


@pytest.fixture(scope="module")
def prepared(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small_data, tmp_path_factory.mktemp("data"))


def recipe(data: Data, kind: str) -> Recipe:
    tiny = tiny_recipe(data, kind, steps=STEPS, tokens_per_step=4096, micro_batch=32)
    return tiny.model_copy(update={"model": tiny.model.model_copy(update={"hidden": 256, "ffn": 512})})


def fused(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"fusion": "auto"})})


def run(folder: Path, recipe: Recipe, prepared: Prepared) -> Logged:
    train.run(recipe, recipe.attention.kind, folder, prepared)
    return logged(folder)


def test_joining_leaves_the_gpu_to_the_model() -> None:
    """Megatron makes twenty-odd process groups: no memory is spent on those that a run does not use."""
    torch.zeros(1, device="cuda")  # CUDA's own share
    free = torch.cuda.mem_get_info()[0]
    with world.join(1, seed=0) as here:
        torch.distributed.all_reduce(torch.zeros(1, device=here.device))
        torch.cuda.synchronize()
        taken = (free - torch.cuda.mem_get_info()[0]) / 2**30
    print(f"joining takes {taken:.2f} GiB")
    assert taken < 1.5


@pytest.mark.parametrize("pack", [False, True])
def test_both_arms_learn_alike(small_data: Data, prepared: Prepared, tmp_path: Path, pack: bool) -> None:
    data = small_data.model_copy(update={"pack": pack})
    fpa = run(tmp_path / "fpa", fused(recipe(data, "fpa")), prepared)
    sagebwd = run(tmp_path / "sagebwd", fused(recipe(data, "sagebwd")), prepared)
    losses = fpa.values("train/loss")
    assert losses[-1] < losses[0] - 0.3
    assert sagebwd.values("train/loss") == pytest.approx(losses, abs=0.05)
    metas = {arm: run_folder.meta(tmp_path / arm) for arm in ("fpa", "sagebwd")}
    assert metas["fpa"]["backend"].startswith("varlen_attn " if pack else "SDPA ")
    assert metas["sagebwd"]["backend"] == "triton"
    assert all((meta["precision"], meta["fusion"]) == ("bf16", "on") for meta in metas.values())
    assert fpa.values("perf/memory_gib")[-1] > 0


def test_a_resumed_run_goes_on_where_it_was(small_data: Data, prepared: Prepared, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    before = run(whole, recipe(small_data, "sagebwd"), prepared).values("train/loss")
    shutil.copytree(whole / "checkpoints", resumed / "checkpoints")
    (resumed / "checkpoints" / "latest").write_text(f"step_{STEPS // 2:08d}")
    after = run(resumed, recipe(small_data, "sagebwd"), prepared).scalars["train/loss"]
    assert [step for step, _ in after] == list(range(STEPS // 2 + 1, STEPS + 1))
    assert [loss for _, loss in after] == pytest.approx(before[STEPS // 2 :], abs=0.01)


@pytest.mark.parametrize(
    "engine", [{"engine": "megatron"}, {"engine": "deepspeed", "zero": 2}], ids=lambda e: e["engine"]
)
@pytest.mark.parametrize("kind", ["fpa", "sagebwd"])
def test_with_the_deterministic_switch_a_resumed_run_is_the_same_bitwise(
    small_data: Data, prepared: Prepared, tmp_path: Path, kind: str, engine: dict[str, str | int]
) -> None:
    """And its checkpoints, which are copied and written while it trains on."""
    base = changed(recipe(small_data, kind), {"parallel": engine})
    exact = changed(base, {"train": {"deterministic": True}, "checkpoint": {"every_steps": 5}})
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    before = run(whole, exact, prepared).scalars
    shutil.copytree(whole / "checkpoints", resumed / "checkpoints")
    (resumed / "checkpoints" / "latest").write_text("step_00000015")
    after = run(resumed, exact, prepared).scalars
    assert after["train/loss"] == before["train/loss"][15:]
    assert after["train/grad_norm"] == before["train/grad_norm"][15:]
    ends = [checkpoint.read(folder / "checkpoints" / checkpoint.name(STEPS)).files for folder in (whole, resumed)]
    assert ends[0] == ends[1]


def test_a_stopped_run_saves_and_goes_on(
    small_data: Data, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = changed(recipe(small_data, "sagebwd"), {"train": {"deterministic": True}})
    before = run(tmp_path / "whole", exact, prepared).scalars["train/loss"]
    judge, folder = health.judge, tmp_path / "stopped"

    def stop(settings: Health, position: checkpoint.Position, *step: float) -> str:
        if position.step == 7:
            os.kill(os.getpid(), signal.SIGUSR1)
        return judge(settings, position, *step)

    monkeypatch.setattr(health, "judge", stop)
    assert train.run(exact, "sagebwd", folder, prepared) == "preempted"
    assert status.exit_code(folder) == status.RESUMABLE
    monkeypatch.undo()
    assert run(folder, exact, prepared).scalars["train/loss"] == before


def test_out_of_memory_says_what_to_change(small_data: Data, prepared: Prepared, tmp_path: Path) -> None:
    torch.cuda.set_per_process_memory_fraction(0.004)  # 560 MiB of an H200; other tests may be on it too
    large = changed(
        recipe(small_data, "fpa"), {"train": {"micro_batch": 4096, "tokens_per_step": 2**17, "total_tokens": 2**18}}
    )
    try:
        with pytest.raises(RunError, match=r"out of GPU memory .* lower train\.micro_batch"):
            train.run(large, "fpa", tmp_path, prepared)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert status.read(tmp_path).state == "failed"


def test_a_step_waits_for_the_gpu_once(small_data: Data, prepared: Prepared, tmp_path: Path) -> None:
    """For the gradient norm, in Megatron: no line of the step itself, nor of what follows it, waits."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(tmp_path, changed(recipe(small_data, "sagebwd"), {"checkpoint": {"every_steps": 5}}), prepared)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    synchronous = {(Path(w.filename).name, w.lineno) for w in caught if "synchroniz" in str(w.message)}
    assert any(name == "clip_grads.py" for name, _ in synchronous)  # so the others would have been seen
    hot = (train._Arm._step, train._Arm._after, train._Arm._save)
    lines = {
        n
        for f in hot
        for n in range(f.__code__.co_firstlineno, max(line for *_, line in f.__code__.co_lines() if line))
    }
    assert not {(name, line) for name, line in synchronous if name == "train.py" and line in lines}
    assert not {(name, line) for name, line in synchronous if name in ("losses.py", "megatron.py")}  # the engine's
