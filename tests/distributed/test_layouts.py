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
from sagebwd.training.recipe import Data, Recipe
from tests.distributed.layouts import ALONE, LAYOUTS, Layout
from tests.training.runs import ARMS, changed, logged, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
STEPS = 20
PACKED = "sagebwd-packed"  # an arm of packed documents
PACKS = (ALONE, "tp2", "tp2-sp")  # the layouts that train it
PROGRAM = Path(__file__).with_name("program.py")
# (checkpoint of this layout, goes on with that one): shards are cut anew
RESUMED = [(ALONE, "dp2"), (ALONE, "tp2"), ("tp2", "dp2")]


def name_of(before: str, after: str) -> str:
    return f"{before}_to_{after}"


@pytest.fixture(scope="module")
def prepared(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small_data, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def start(
    small_data: Data, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, tuple[Layout, tuple[str, ...]]]], None]:
    """Train the arms of layouts that have as many ranks, in one launch, into `root`/name/arm."""
    number = itertools.count()

    def recipe(layout: Layout, arm: str) -> Recipe:
        kind, _, pack = arm.partition("-")
        data = small_data.model_copy(update={"pack": bool(pack)})
        # What differs in the last bit can round to another integer of 8: noise of some 1e-6 in SageBwd's loss over so
        # many tokens, and more over fewer. It does not grow from step to step.
        base = tiny_recipe(data, kind, steps=STEPS, tokens_per_step=4096, micro_batch=32)
        return changed(base, {"parallel": layout.parallel, "train": layout.train})

    def launch(runs: Path, wanted: dict[str, tuple[Layout, tuple[str, ...]]]) -> None:
        (ranks,) = {layout.ranks for layout, _ in wanted.values()}
        recipes = tmp_path_factory.mktemp(f"recipes{next(number)}")
        for name, (layout, arms) in wanted.items():
            (recipes / name).mkdir()
            for arm in arms:
                (recipes / name / f"{arm}.json").write_text(recipe(layout, arm).model_dump_json())
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

    return launch


@pytest.fixture(scope="module")
def runs(start: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout's runs, each in the folder of its name."""
    root = tmp_path_factory.mktemp("layouts")
    for ranks in sorted({layout.ranks for layout in LAYOUTS.values()}):
        names = [name for name, layout in LAYOUTS.items() if layout.ranks == ranks]
        arms = {name: (*ARMS, PACKED) if name in PACKS else ARMS for name in names}
        start(root, {name: (LAYOUTS[name], arms[name]) for name in names})
    return root


@pytest.fixture(scope="module")
def resumed(start: Callable[..., None], runs: Path) -> Path:
    """RESUMED: the second half of the run again, from the first layout's checkpoint."""
    root = runs.parent / f"{runs.name}-resumed"
    for before, after in RESUMED:
        for arm in ARMS:
            there = root / name_of(before, after) / arm
            shutil.copytree(runs / before / arm / "checkpoints", there / "checkpoints")
            (there / "checkpoints" / "latest").write_text(f"step_{STEPS // 2:08d}")
    for ranks in sorted({LAYOUTS[after].ranks for _, after in RESUMED}):
        of_them = [pair for pair in RESUMED if LAYOUTS[pair[1]].ranks == ranks]
        start(root, {name_of(*pair): (LAYOUTS[pair[1]], ARMS) for pair in of_them})
    return root


@pytest.mark.parametrize(
    ("arm", "layout"),
    [
        (arm, layout)
        for arm in (*ARMS, PACKED)
        for layout in LAYOUTS
        if layout != ALONE and (arm in ARMS or layout in PACKS)
    ],
)
def test_losses_do_not_depend_on_the_layout(runs: Path, arm: str, layout: str) -> None:
    one, other = logged(runs / ALONE / arm), logged(runs / layout / arm)
    assert [step for step, _ in other.scalars["train/loss"]] == list(range(1, STEPS + 1))
    ours, theirs = other.values("train/loss"), one.values("train/loss")
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] == pytest.approx(theirs[-1], abs=1e-5)
    assert other.values("validation/loss")[-1] == pytest.approx(one.values("validation/loss")[-1], abs=1e-5)
    assert other.values("train/grad_norm")[-1] == pytest.approx(one.values("train/grad_norm")[-1], rel=1e-4)
    assert theirs[-1] < theirs[0] - 0.3


@pytest.mark.parametrize("arm", ARMS)
def test_attention_is_the_same_bitwise_with_the_heads_sharded(runs: Path, arm: str) -> None:
    whole = torch.load(runs / ALONE / arm / "attention.pt", weights_only=True)
    sharded = torch.load(runs / "tp2" / arm / "attention.pt", weights_only=True)
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), sharded, whole, strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(("before", "after"), RESUMED)
@pytest.mark.parametrize("arm", ARMS)
def test_a_run_goes_on_with_another_layout(runs: Path, resumed: Path, arm: str, before: str, after: str) -> None:
    """Weights and moments are cut anew, SwiGLU's halves each for itself; and meta.json says that the layout changed."""
    there = resumed / name_of(before, after) / arm
    points = logged(there).scalars["train/loss"]
    assert [step for step, _ in points] == list(range(STEPS // 2 + 1, STEPS + 1))
    losses, whole = [loss for _, loss in points], logged(runs / before / arm).values("train/loss")[STEPS // 2 :]
    assert losses[0] == pytest.approx(whole[0], abs=2e-6)
    assert losses == pytest.approx(whole, abs=1e-5)
    keys = {f"parallel.{key}" for key in LAYOUTS[before].parallel | LAYOUTS[after].parallel}
    assert {change["key"] for change in run_folder.meta(there).get("changes", [])} == keys
