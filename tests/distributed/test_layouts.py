"""The same training on other layouts of ranks, through torchrun with gloo."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sagebwd.tokenizer import Prepared, prepare
from sagebwd.training import run_folder
from sagebwd.training.recipe import Data
from tests.training.runs import ARMS, logged, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
STEPS = 20
LAYOUTS = {"tp2": (2, 2), "dp2": (2, 1), "tp2_dp2": (4, 2)}  # ranks, tensor-parallel size
PACKED = "sagebwd-packed"  # an arm of packed documents, in the layouts tp1 and tp2
PROGRAM = Path(__file__).with_name("program.py")

Run = Callable[[str, int, int], Path]


@pytest.fixture(scope="module")
def prepared(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small_data, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(small_data: Data, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train the arms on `ranks` ranks with the TP size `tensor`; runs of one layout happen once."""
    root = tmp_path_factory.mktemp("layouts")

    def start(name: str, ranks: int, tensor: int, arms: tuple[str, ...] | None = None) -> Path:
        recipes, runs = root / f"recipes_{name}", root / name
        if recipes.exists():
            return runs
        recipes.mkdir()
        for arm in arms or (*ARMS, *([PACKED] if name in ("tp1", "tp2") else [])):
            kind, _, pack = arm.partition("-")
            data = small_data.model_copy(update={"pack": bool(pack)})
            # What differs in the last bit can round to another integer of 8: noise of some 1e-6 in SageBwd's loss over
            # so many tokens, and more over fewer. It does not grow from step to step.
            recipe = tiny_recipe(data, kind, steps=STEPS, tokens_per_step=4096, micro_batch=32, tensor=tensor)
            (recipes / f"{arm}.json").write_text(recipe.model_dump_json())
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        answer = subprocess.run(
            [*command, str(PROGRAM), str(recipes), str(prepared.folder), str(runs)],
            # on CPUs, also where there is a GPU: FP32, and more ranks than one machine has GPUs
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
        return runs

    return start


@pytest.mark.parametrize(("arm", "layout"), [*itertools.product(ARMS, LAYOUTS), (PACKED, "tp2")])
def test_losses_do_not_depend_on_the_layout(run: Run, arm: str, layout: str) -> None:
    one, other = logged(run("tp1", 1, 1) / arm), logged(run(layout, *LAYOUTS[layout]) / arm)
    assert [step for step, _ in other.scalars["train/loss"]] == list(range(1, STEPS + 1))
    ours, theirs = other.values("train/loss"), one.values("train/loss")
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] == pytest.approx(theirs[-1], abs=1e-5)
    assert other.values("validation/loss")[-1] == pytest.approx(one.values("validation/loss")[-1], abs=1e-5)
    assert other.values("train/grad_norm")[-1] == pytest.approx(one.values("train/grad_norm")[-1], rel=1e-4)
    assert theirs[-1] < theirs[0] - 0.3


@pytest.mark.parametrize("arm", ARMS)
def test_attention_is_the_same_bitwise_with_the_heads_sharded(run: Run, arm: str) -> None:
    whole = torch.load(run("tp1", 1, 1) / arm / "attention.pt", weights_only=True)
    sharded = torch.load(run("tp2", 2, 2) / arm / "attention.pt", weights_only=True)
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), sharded, whole, strict=True):
        assert torch.equal(ours, theirs), name


def test_a_run_goes_on_with_another_number_of_data_parallel_ranks(run: Run) -> None:
    one = run("tp1", 1, 1) / "fpa"
    there = one.parent.parent / "other_dp" / "fpa"
    shutil.copytree(one / "checkpoints", there / "checkpoints")
    (there / "checkpoints" / "latest").write_text(f"step_{STEPS // 2:08d}")
    points = logged(run("other_dp", 2, 1, ("fpa",)) / "fpa").scalars["train/loss"]
    assert [step for step, _ in points] == list(range(STEPS // 2 + 1, STEPS + 1))
    assert points[-1][1] == pytest.approx(logged(one).values("train/loss")[-1], abs=1e-5)


@pytest.mark.parametrize(("before", "ranks", "tensor"), [("tp1", 2, 2), ("tp2", 2, 1)])
@pytest.mark.parametrize("arm", ARMS)
def test_a_run_goes_on_with_another_tensor_parallel_size(
    run: Run, arm: str, before: str, ranks: int, tensor: int
) -> None:
    """Weights and moments are cut anew, SwiGLU's halves each for itself; and meta.json says that the layout changed."""
    whole = run(before, *LAYOUTS.get(before, (1, 1))) / arm
    name = f"{before}_to_tp{tensor}_{arm}"
    there = whole.parent.parent / name / arm
    shutil.copytree(whole / "checkpoints", there / "checkpoints")
    (there / "checkpoints" / "latest").write_text(f"step_{STEPS // 2:08d}")
    points = logged(run(name, ranks, tensor, (arm,)) / arm).scalars["train/loss"]
    assert [step for step, _ in points] == list(range(STEPS // 2 + 1, STEPS + 1))
    losses = [loss for _, loss in points]
    assert losses[0] == pytest.approx(logged(whole).values("train/loss")[STEPS // 2], abs=2e-6)
    assert losses == pytest.approx(logged(whole).values("train/loss")[STEPS // 2 :], abs=1e-5)
    (change,) = run_folder.meta(there)["changes"]
    assert (change["key"], change["to"]) == ("parallel.tensor", tensor)
