"""Engine deepspeed on two GPUs, NCCL and bf16: the losses of engine megatron, and resumed bitwise."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from sagebwd.tokenizer import prepare
from sagebwd.training import checkpoint, run_folder
from sagebwd.training.recipe import Data, Recipe
from tests.distributed import deepspeed_program
from tests.distributed.launch import torchrun
from tests.training.runs import changed, journal, logged, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
STEPS = 20
STAGES = {"zero1": {"zero": 1}, "zero2": {"zero": 2}, "zero3": {"zero": 3}, "offload": {"zero": 2, "offload": "cpu"}}
COMPILED = "extensions"  # where DeepSpeed's C++ and CUDA operators would be built
TIMEOUT = 240  # seconds
NOISE = 5e-3  # nats between runs in bf16 that sum in another order


def recipe(data: Data, parallel: dict[str, Any]) -> Recipe:
    base = tiny_recipe(data, "sagebwd", steps=STEPS, tokens_per_step=16_384, micro_batch=64)
    return changed(
        base,
        {
            "model": {"hidden": 256, "ffn": 768},
            "train": {"precision": "bf16", "deterministic": True},
            "evaluation": {"every_steps": STEPS},
            "parallel": parallel,
        },
    )


@pytest.fixture(scope="module")
def runs(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepspeed")
    prepared = prepare(small_data, root / "data")
    deepspeed = {name: {"engine": "deepspeed", **keys} for name, keys in STAGES.items()}
    jobs = [{"name": name, "recipe": recipe(small_data, keys)} for name, keys in {"megatron": {}, **deepspeed}.items()]
    jobs += [
        {"name": f"{name}_resumed", "recipe": recipe(small_data, keys), "from": name, "at": STEPS // 2}
        for name, keys in deepspeed.items()
    ]
    jobs = [job | {"recipe": job["recipe"].model_dump(mode="json")} for job in jobs]
    (root / "jobs.json").write_text(json.dumps(jobs))
    arguments = [str(root / "jobs.json"), str(prepared.folder), str(root)]
    extensions = {"TORCH_EXTENSIONS_DIR": str(root / COMPILED)}
    answer = torchrun([deepspeed_program.__file__, *arguments], ranks=2, timeout=TIMEOUT, **extensions)
    assert answer.returncode == 0, f"{answer.stdout[-5000:]}\n{answer.stderr[-10000:]}"
    return root


@pytest.mark.parametrize("name", STAGES)
def test_losses_are_those_of_megatron(runs: Path, name: str) -> None:
    mine, other = logged(runs / name), logged(runs / "megatron")
    print(name, max(abs(a - b) for a, b in zip(mine.values("train/loss"), other.values("train/loss"), strict=True)))
    assert mine.values("train/loss") == pytest.approx(other.values("train/loss"), abs=NOISE)
    # The norm of one step can be off by some percent, as one GPU's is from itself in another micro-batch: bf16's noise.
    norms = zip(mine.values("train/grad_norm"), other.values("train/grad_norm"), strict=True)
    apart = [abs(a / b - 1) for a, b in norms]
    assert statistics.median(apart) < 0.01
    assert max(apart) < 0.1
    assert run_folder.meta(runs / name)["backend"] == run_folder.meta(runs / "megatron")["backend"]


@pytest.mark.parametrize("name", STAGES)
def test_a_resumed_run_is_the_unbroken_one_bitwise(runs: Path, name: str) -> None:
    assert journal(runs / f"{name}_resumed") == [line for line in journal(runs / name) if line["step"] > STEPS // 2]
    ours, theirs = (runs / each / "checkpoints" / checkpoint.name(STEPS) for each in (f"{name}_resumed", name))
    assert checkpoint.read(ours).files == checkpoint.read(theirs).files


def test_nothing_is_compiled_at_the_start(runs: Path) -> None:
    """DeepSpeed's own Adam, on a GPU or for offload, would take minutes and a compiler."""
    assert not (runs / COMPILED).exists()
