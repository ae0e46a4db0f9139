"""The training program: what it logs, what its optimizer does, and how it stops."""

import json
import math
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch.utils._python_dispatch import TorchDispatchMode

from sagebwd.megatron.model import build_model
from sagebwd.tokenizer import Prepared, prepare
from sagebwd.training import gradients, metrics, run_folder, size, train, world
from sagebwd.training.budget import Plan
from sagebwd.training.engine import megatron
from sagebwd.training.optimizer import build_optimizer, build_schedule
from sagebwd.training.recipe import Data, Optimizer, Recipe
from tests.training.runs import Logged, logged, on_cpu, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
pytestmark = on_cpu
STEPS, TOKENS = 8, 512
COST = metrics.Cost(flops_per_token=1e6, peak_flops=1e12, bytes_per_token=4.0)
TAGS = {
    "train/loss", "validation/loss", "train/learning_rate", "train/grad_norm", "train/consumed_tokens",
    "perf/tokens_per_second", "perf/step_time", "perf/memory_gib", "perf/model_tflops", "perf/data_fraction",
    "validation/bits_per_byte",
}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small_data, tmp_path_factory.mktemp("data"))


def recipe(data: Data, *, micro_batch: int = 4, **optimizer: float) -> Recipe:
    tiny = tiny_recipe(data, "fpa", steps=STEPS, tokens_per_step=TOKENS, micro_batch=micro_batch)
    return tiny.model_copy(update={"optimizer": tiny.optimizer.model_copy(update=optimizer)})


def run(folder: Path, recipe: Recipe, prepared: Prepared) -> Logged:
    train.run(recipe, "fpa", folder, prepared)
    return logged(folder)


def test_what_is_logged(small_data: Data, prepared: Prepared, tmp_path: Path) -> None:
    points = run(tmp_path, recipe(small_data), prepared).scalars
    assert set(points) == TAGS
    steps = list(range(1, STEPS + 1))
    assert all([step for step, _ in points[tag]] == steps for tag in TAGS if not tag.startswith("validation/"))
    assert [step for step, _ in points["validation/loss"]] == [0, 3, 6, 8]
    assert points["train/consumed_tokens"][-1] == (STEPS, STEPS * TOKENS)
    for (_, seconds), (_, speed) in zip(points["perf/step_time"], points["perf/tokens_per_second"], strict=True):
        assert seconds * speed == pytest.approx(TOKENS, rel=1e-4)
    flops = size.flops_per_token(recipe(small_data), 512)
    for (_, tflops), (_, speed) in zip(points["perf/model_tflops"], points["perf/tokens_per_second"], strict=True):
        assert tflops * 1e12 == pytest.approx(speed * flops, rel=1e-4)
    assert all(0 < fraction < 1 for _, fraction in points["perf/data_fraction"])
    for (_, bits), (_, nats) in zip(points["validation/bits_per_byte"], points["validation/loss"], strict=True):
        assert bits * math.log(2) * prepared.bytes_per_token == pytest.approx(nats, rel=1e-5)
    meta = run_folder.meta(tmp_path)
    assert meta["status"] == "done"
    assert (meta["fusion"], meta["peak_flops"]) == ("off", None)  # on a CPU
    assert meta["start_loss"] == pytest.approx(points["validation/loss"][0][1])
    assert meta["data_digest"] == prepared.digest
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["steps"] == STEPS


def test_the_schedule_warms_up_and_follows_a_cosine(small_data: Data, prepared: Prepared, tmp_path: Path) -> None:
    rates = run(tmp_path, recipe(small_data), prepared).values("train/learning_rate")
    warm_up = 4
    expected = [1e-3 * step / warm_up for step in range(1, warm_up + 1)] + [
        1e-4 + 9e-4 * (1 + math.cos(math.pi * step / (STEPS - warm_up))) / 2 for step in range(1, STEPS - warm_up + 1)
    ]
    assert rates == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("pack", [False, True])
def test_the_micro_batch_changes_nothing(small_data: Data, prepared: Prepared, tmp_path: Path, pack: bool) -> None:
    data = small_data.model_copy(update={"pack": pack})
    small = run(tmp_path / "small", recipe(data, micro_batch=2), prepared)
    large = run(tmp_path / "large", recipe(data, micro_batch=16), prepared)
    for tag in ("train/loss", "train/grad_norm", "validation/loss"):
        assert small.values(tag) == pytest.approx(large.values(tag), abs=2e-5)


def test_gradients_are_clipped_by_their_norm(small_data: Data, prepared: Prepared, tmp_path: Path) -> None:
    """AdamW does not feel the size of its gradients but for epsilon: a large one shows it."""
    never = run(tmp_path / "never", recipe(small_data, clip=0.0, eps=1.0), prepared)
    loose = run(tmp_path / "loose", recipe(small_data, clip=100.0, eps=1.0), prepared)
    tight = run(tmp_path / "tight", recipe(small_data, clip=1e-3, eps=1.0), prepared)
    assert never.values("train/loss") == loose.values("train/loss")
    assert never.values("train/grad_norm")[0] == tight.values("train/grad_norm")[0] > 0.01  # logged before clipping
    assert tight.values("train/loss")[-1] > never.values("train/loss")[-1]


def test_one_dimensional_parameters_have_no_weight_decay(small_data: Data) -> None:
    tiny = recipe(small_data)
    with world.join(tensor=1, seed=0):
        model = build_model(tiny, 512, torch.float32)
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        settings = Optimizer(weight_decay=0.1)
        optimizer = build_optimizer(settings, ddp, torch.float32)
        build_schedule(
            settings, optimizer, Plan(steps=10, sequences_per_step=1, accumulation=1, warmup_steps=0, tokens=10)
        )
        decays = {p.dim(): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {1: 0.0, 2: 0.1}


def test_a_run_that_diverges_stops_and_says_so(
    small_data: Data, prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hot = recipe(small_data, lr=1e38)
    points = run(tmp_path, hot, prepared).scalars
    losses, norms = points["train/loss"], points["train/grad_norm"]
    assert len(losses) == len(norms) < STEPS
    finite = [math.isfinite(a + b) for (_, a), (_, b) in zip(losses, norms, strict=True)]
    assert finite == [True] * (len(losses) - 1) + [False]
    meta = run_folder.meta(tmp_path)
    assert meta["status"] == "diverged"
    assert meta["step"] == losses[-1][0]
    assert "DIVERGED at step" in capsys.readouterr().out
    train.run(hot, "fpa", tmp_path, prepared)  # and is not run again
    assert "diverged already" in capsys.readouterr().out
    assert not (tmp_path / "checkpoints").exists()


def test_bf16_keeps_fp32_master_weights_and_gradients(small_data: Data) -> None:
    with world.join(tensor=1, seed=0):
        tiny = recipe(small_data)
        model = build_model(tiny, 512, torch.bfloat16)
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        optimizer = build_optimizer(tiny.optimizer, ddp, torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {p.dtype for g in optimizer.param_groups for p in g["params"]} == {torch.float32}
        assert {p.main_grad.dtype for p in model.parameters()} == {torch.float32}


def test_points_of_a_resumed_run_do_not_overlap(tmp_path: Path) -> None:
    plan = Plan(steps=6, sequences_per_step=1, accumulation=1, warmup_steps=0, tokens=6)

    def write(folder: Path, start: int, value: float) -> Path:
        with metrics.Recorder(folder, plan, start_step=start, device=torch.device("cpu"), cost=COST) as recorder:
            for step in range(start + 1, 7):
                recorder.train(metrics.StepResult(step, value, 1e-3, 1.0, 0.1))
        return folder

    first, second = write(tmp_path / "run", 0, 1.0), write(tmp_path / "second", 3, 2.0)
    # event files are read in the order of their names, which begin with the second they were begun in
    (events,) = second.glob(run_folder.EVENTS)
    shutil.move(events, first / events.name.replace("tfevents.", "tfevents.9", 1))
    assert logged(first).scalars["train/loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]


def test_mfu_is_logged_where_the_peak_is_known(tmp_path: Path) -> None:
    plan = Plan(steps=1, sequences_per_step=1, accumulation=1, warmup_steps=0, tokens=2000)
    with metrics.Recorder(tmp_path, plan, start_step=0, device=torch.device("cpu"), cost=COST) as recorder:
        recorder.train(metrics.StepResult(1, 3.0, 1e-3, 1.0, seconds=0.01, loading=0.001))
    points = logged(tmp_path).scalars
    assert points["perf/mfu"] == [(1, pytest.approx(2000 / 0.01 * 1e6 / 1e12))]
    assert points["perf/data_fraction"] == [(1, pytest.approx(0.1))]


def test_gradients_are_finished_as_by_megatron(
    small_data: Data, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = run(tmp_path / "ours", recipe(small_data), prepared)
    monkeypatch.setattr(gradients, "finalize", finalize_model_grads)
    theirs = run(tmp_path / "theirs", recipe(small_data), prepared)
    for tag in ("train/loss", "train/grad_norm", "validation/loss"):
        assert ours.values(tag) == theirs.values(tag)


class _Reads(TorchDispatchMode):
    """Counts values that the host reads from a tensor, each of which would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_the_host_reads_nothing_from_the_device_in_forward_and_backward(
    small_data: Data, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, chosen = _Reads(), megatron.get_forward_backward_func

    def counted() -> Any:
        original = chosen()

        def call(**arguments: Any) -> Any:
            with reads:
                return original(**arguments)

        return call

    monkeypatch.setattr(megatron, "get_forward_backward_func", counted)
    run(tmp_path, recipe(small_data), prepared)
    assert reads.count == 0
    with reads:
        assert torch.ones(1) > 0
    assert reads.count == 1  # so it is counted at all


def test_a_rank_sets_what_nccl_reads_whoever_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # what a person has set stays
    with world.process_group(torch.device("cpu"), timedelta(minutes=1)):
        assert os.environ["NCCL_NVLS_ENABLE"] == "0"
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_meta_is_replaced_whole(tmp_path: Path) -> None:
    metrics.write_meta(tmp_path, {"status": "running"})
    metrics.write_meta(tmp_path, {"status": "done"})
    assert [path.name for path in tmp_path.iterdir()] == ["meta.json"]
    assert json.loads((tmp_path / "meta.json").read_text()) == {"status": "done"}
