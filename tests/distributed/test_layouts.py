"""The same training on other layouts of ranks, through torchrun with gloo."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sagebwd.probe.model import trained_model
from sagebwd.tokenizer import Prepared, prepare
from sagebwd.training import checkpoint, run_folder
from sagebwd.training.recipe import Data, Recipe
from tests.distributed.launch import STEPS, launch, recipe
from tests.distributed.layouts import ALONE, BF16, FPA, LAYOUTS, LONG, SAGEBWD
from tests.training.runs import logged

pytest_plugins = ("tests.small_corpus",)
# Checkpoints of one layout with which another goes on; the same one does so bitwise
RESUMED = [
    (ALONE, "dp2", (FPA,)),
    (ALONE, "tp2", (FPA, SAGEBWD)),
    ("tp2", "dp2", (SAGEBWD,)),
    ("dp2-distopt", "dp2-distopt", (FPA, SAGEBWD, BF16)),
    ("dp2-distopt", "tp2", (FPA,)),
    ("tp2-sp", "dp2-distopt", (FPA,)),
    ("pp2", "pp2", (FPA,)),
    ("pp2-dp2-distopt", "pp2", (FPA,)),
    ("tp2-pp2-sp", "tp2", (FPA,)),
    ("pp2-dp2-distopt", "pp2-dp2-distopt", (FPA, BF16)),
    ("pp2", "tp2-pp2-sp", (FPA,)),
    ("cp2", LONG, (SAGEBWD,)),
    ("cp2-dp2-distopt", "cp2", (FPA,)),
]


def name_of(before: str, after: str) -> str:
    return f"{before}-to-{after}"


def launched(prepared: Prepared, data: Data, runs: Path, wanted: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    """Folder -> (layout, arms): as many launches as there are numbers of ranks."""
    recipes: dict[int, dict[Path, Recipe]] = {}
    for folder, (layout, arms) in wanted.items():
        of_rank = recipes.setdefault(LAYOUTS[layout].ranks, {})
        of_rank |= {Path(folder, arm): recipe(data, LAYOUTS[layout], arm) for arm in arms}
    for ranks, together in recipes.items():
        answer = launch(prepared, runs, together, ranks=ranks)
        assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"


@pytest.fixture(scope="module")
def prepared(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small_data, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def runs(small_data: Data, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout's runs, each in the folder of its name."""
    root = tmp_path_factory.mktemp("layouts")
    launched(prepared, small_data, root, {name: (name, layout.tested) for name, layout in LAYOUTS.items()})
    return root


@pytest.fixture(scope="module")
def resumed(small_data: Data, prepared: Prepared, runs: Path) -> Path:
    """RESUMED: the second half of the run again, from the first layout's checkpoint."""
    root = runs.parent / f"{runs.name}-resumed"
    for before, after, arms in RESUMED:
        for arm in arms:
            there = root / name_of(before, after) / arm
            shutil.copytree(runs / before / arm / "checkpoints", there / "checkpoints")
            (there / "checkpoints" / "latest").write_text(f"step_{STEPS // 2:08d}")
    launched(prepared, small_data, root, {name_of(*pair): (pair[1], arms) for *pair, arms in RESUMED})
    return root


@pytest.mark.parametrize(
    ("layout", "arm"),
    [(name, arm) for name, layout in LAYOUTS.items() if name != layout.like for arm in layout.tested],
)
def test_losses_do_not_depend_on_the_layout(runs: Path, layout: str, arm: str) -> None:
    one, other = logged(runs / LAYOUTS[layout].like / arm), logged(runs / layout / arm)
    assert [step for step, _ in other.scalars["train/loss"]] == list(range(1, STEPS + 1))
    ours, theirs = other.values("train/loss"), one.values("train/loss")
    coarse = 30 if arm == BF16 else 1  # a layout that is wrong is further off than rounding to bf16
    assert ours[0] == pytest.approx(theirs[0], abs=coarse * 1e-6)
    assert ours == pytest.approx(theirs, abs=coarse * 1e-4)
    assert ours[-1] == pytest.approx(theirs[-1], abs=coarse * 1e-5)
    assert other.values("validation/loss")[-1] == pytest.approx(one.values("validation/loss")[-1], abs=coarse * 1e-5)
    assert other.values("train/grad_norm")[-1] == pytest.approx(one.values("train/grad_norm")[-1], rel=coarse * 1e-4)
    assert theirs[-1] < theirs[0] - 0.3


@pytest.mark.parametrize("arm", [FPA, SAGEBWD])
def test_attention_is_the_same_bitwise_with_the_heads_sharded(runs: Path, arm: str) -> None:
    whole = torch.load(runs / ALONE / arm / "attention.pt", weights_only=True)
    sharded = torch.load(runs / "tp2" / arm / "attention.pt", weights_only=True)
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), sharded, whole, strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("before", "after", "arm"), [(before, after, arm) for before, after, arms in RESUMED for arm in arms]
)
def test_a_run_goes_on_with_another_layout(runs: Path, resumed: Path, arm: str, before: str, after: str) -> None:
    """Weights and moments are cut anew, SwiGLU's halves each for itself; and meta.json says that the layout changed.

    At the same layout the losses are the unbroken run's bitwise. With the distributed optimizer that fails if Megatron
    loads it: from a fresh process (it asserts), at another size (it misses the step), or with one tensor for every
    parameter's step, which AdamW then counts up once a parameter.
    """
    there = resumed / name_of(before, after) / arm
    points = logged(there).scalars["train/loss"]
    assert [step for step, _ in points] == list(range(STEPS // 2 + 1, STEPS + 1))
    losses, whole = [loss for _, loss in points], logged(runs / before / arm).values("train/loss")[STEPS // 2 :]
    assert losses[0] == pytest.approx(whole[0], abs=2e-6)
    assert losses == (whole if before == after else pytest.approx(whole, abs=1e-5))
    (ours, theirs) = (LAYOUTS[name].parallel for name in (before, after))
    changed = {f"parallel.{key}" for key in ours | theirs if ours.get(key) != theirs.get(key)}
    changes = run_folder.meta(there).get("changes", [])
    assert {change["key"] for change in changes if change["key"].startswith("parallel")} == changed


def test_ranks_that_share_the_optimizer_each_write_their_part(runs: Path) -> None:
    def elements(layout: str) -> list[int]:
        (folder,) = (runs / layout / FPA / "checkpoints").glob(f"step_{STEPS:08d}")
        found = []
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.startswith("exp_avg/")]  # noqa: SIM118
                found.append(sum(file.get_tensor(name).numel() for name in names))
        return found

    (whole,) = elements("dp2")
    first, second = elements("dp2-distopt")
    assert first + second == whole
    assert first == pytest.approx(whole / 2, rel=0.01)
    four = elements("pp2-dp2-distopt")  # the tied embedding is written by the first stage alone
    assert (len(four), sum(four)) == (4, whole)


def test_a_step_that_is_sick_in_a_later_stage_is_found_there(runs: Path) -> None:
    """Its number in the whole model, though the stage counts its layers from 0; and not where the NaN came to next."""
    found = json.loads((runs / "sick" / run_folder.SICK).read_text())
    assert found["first"] == "the output of decoder.layers.1.mlp.linear_fc2 (RowParallelLinear)"
    assert (found["rank"], found["micro_batch"]) == (1, 1)


def test_a_probe_reads_any_layout(
    runs: Path, prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Without the ranks that wrote it."""
    there = runs / "pp2-dp2-distopt" / FPA
    manifest = checkpoint.newest_whole(there, pytest.fail)
    one = checkpoint.newest_whole(runs / ALONE / FPA, pytest.fail)
    losses = []
    for each in (manifest, one):
        with trained_model(each, prepared, 2) as model:
            losses.append([model._loss(batch).item() for batch in model.batches])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
