"""Checkpoints: an exact resume, damage that is seen, and refusals that name what is wrong and the way out."""

import contextlib
import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sagebwd.errors import UserError
from sagebwd.tokenizer import Prepared, prepare
from sagebwd.training import checkpoint, run_folder, train
from sagebwd.training.recipe import Data, Recipe
from tests.training.runs import changed, journal, logged, on_cpu, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
pytestmark = on_cpu
STEPS, HALF = 8, 4
LAST, BEFORE = checkpoint.name(STEPS), checkpoint.name(HALF)


@pytest.fixture(scope="module")
def prepared(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small_data, tmp_path_factory.mktemp("data"))


def eight_steps(data: Data, kind: str = "sagebwd", precision: str = "fp32") -> Recipe:
    recipe = tiny_recipe(data, kind, steps=STEPS, tokens_per_step=256, micro_batch=4)
    return changed(recipe, {"train": {"precision": precision}})


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


def unfinished(whole: Path, folder: Path) -> Path:
    """A copy of a run that has its last checkpoint, and was killed before it could say that it is done."""
    shutil.copytree(whole, folder)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"status": "running"}))
    return folder


def as_if_killed_after_step_eight(whole: Path, folder: Path) -> Path:
    """A copy that logged all its steps, but whose last whole checkpoint is that of step 4."""
    unfinished(whole, folder)
    shutil.rmtree(folder / "checkpoints" / LAST)
    (folder / "checkpoints" / "latest").write_text(BEFORE)
    return folder


def identity(recipe: Recipe, prepared: Prepared) -> checkpoint.Run:
    return checkpoint.Run(recipe, prepared.digest, prepared.vocab_size)


def newest(folder: Path) -> checkpoint.Manifest:
    return checkpoint.read(folder / "checkpoints" / LAST)


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
    assert journal(resumed) == journal(whole)
    assert newest(resumed).files == newest(whole).files  # weights, moments and random states, byte for byte
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


def test_a_finished_run_is_not_run_again(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(unbroken(), folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert train.run(eight_steps(small_data), "sagebwd", folder, prepared) == "done"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_run_killed_before_it_said_done(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path
) -> None:
    folder = unfinished(unbroken(), tmp_path / "run")
    train.run(eight_steps(small_data), "sagebwd", folder, prepared)
    assert run_folder.meta(folder)["status"] == "done"
    assert logged(folder).scalars["train/loss"] == logged(unbroken()).scalars["train/loss"]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"every_steps": 1}, [7, 8]),
        ({"every_steps": 1, "keep_last": 3, "keep_every": 3}, [3, 6, 7, 8]),
        ({"every_steps": 2, "keep_last": 1, "keep_every": 3}, [4, 6, 8]),  # the first at or after 3, and 6
        ({"every_steps": None, "every_minutes": 1e-9, "keep_last": 100}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"every_steps": None}, [8]),
    ],
)
def test_which_are_kept(small_data: Data, prepared: Prepared, tmp_path: Path, settings: dict, kept: list[int]) -> None:
    recipe = changed(eight_steps(small_data, "fpa"), {"checkpoint": settings})
    left = tmp_path / "checkpoints" / "step_00000002.partial"  # of a run that died while it wrote
    left.mkdir(parents=True)
    (left / "tp_00.safetensors").write_text("half")
    train.run(recipe, "fpa", tmp_path, prepared)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"latest", *map(checkpoint.name, kept)}


# What belongs to another run

CHANGES = {
    "model.layers": {"model": {"layers": 3}},
    "data.vocab_size": {"data": {"vocab_size": 600}},
    "data.pack": {"data": {"pack": True}},
    "attention.kind": {"attention": {"kind": "fpa"}},
    "attention.quant.granularity": {"attention": {"quant": {"granularity": "tile"}}},
    "attention.quant.products": {"attention": {"quant": {"products": "scores"}}},
    "train.tokens_per_step": {"train": {"tokens_per_step": 512}},
    "train.precision": {"train": {"precision": "bf16"}},
    "seed": {"seed": 4},
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_checkpoint_of_another_run_is_refused(
    unbroken: Callable, small_data: Data, prepared: Prepared, key: str
) -> None:
    recipe = changed(eight_steps(small_data), CHANGES[key])
    with pytest.raises(UserError) as refusal:
        checkpoint.accept(newest(unbroken()), identity(recipe, prepared))
    sentence = str(refusal.value)
    assert f"{key} = " in sentence
    assert "\n" not in sentence
    assert "move " in sentence
    assert ("accept_changed" in sentence) == (key not in ("model.layers", "data.vocab_size"))


@pytest.mark.parametrize("key", ["model.layers", "data.vocab_size"])
def test_another_model_is_refused_whatever_the_recipe_accepts(
    unbroken: Callable, small_data: Data, prepared: Prepared, key: str
) -> None:
    recipe = changed(eight_steps(small_data), CHANGES[key] | {"checkpoint": {"accept_changed": (key, "model", "data")}})
    with pytest.raises(UserError, match=key):
        checkpoint.accept(newest(unbroken()), identity(recipe, prepared))


def test_a_checkpoint_of_other_data_is_refused(unbroken: Callable, small_data: Data, prepared: Prepared) -> None:
    recipe = eight_steps(small_data)
    with pytest.raises(UserError, match="tokenizer = 512, but this run has 640"):
        checkpoint.accept(newest(unbroken()), checkpoint.Run(recipe, prepared.digest, 640))
    with pytest.raises(UserError, match=r"data\.digest"):
        checkpoint.accept(newest(unbroken()), checkpoint.Run(recipe, "0" * 64, prepared.vocab_size))


def test_what_cannot_change_a_result_may_change(unbroken: Callable, small_data: Data, prepared: Prepared) -> None:
    recipe = changed(
        eight_steps(small_data),
        {
            "description": "new",
            "checkpoint": {"every_steps": 3},
            "health": {"rewind": True},
            "evaluation": {"every_steps": 4},
        },
    )
    assert checkpoint.accept(newest(unbroken()), identity(recipe, prepared)) == []


def test_a_change_that_is_accepted_is_made_and_logged(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path
) -> None:
    folder = as_if_killed_after_step_eight(unbroken(), tmp_path / "run")
    run_folder.write_config(folder, eight_steps(small_data))
    recipe = changed(
        eight_steps(small_data),
        {
            "attention": {"quant": {"granularity": "tile"}},
            "train": {"tokens_per_step": 512},
            "checkpoint": {"accept_changed": ("attention.quant", "train.tokens_per_step")},
        },
    )
    train.run(recipe, "sagebwd", folder, prepared)
    points = logged(folder).scalars
    # 4 steps of 256 tokens are behind it, and 1,024 of the budget's 2,048 are left: two steps of 512
    assert points["train/consumed_tokens"] == [(1, 256), (2, 512), (3, 768), (4, 1024), (5, 1536), (6, 2048)]
    assert points["train/loss"][:HALF] == logged(unbroken()).scalars["train/loss"][:HALF]
    told = {
        change["key"]: (change["step"], change["from"], change["to"]) for change in run_folder.meta(folder)["changes"]
    }
    assert told == {
        "attention.quant.granularity": (4, "row", "tile"),
        "train.tokens_per_step": (4, 256, 512),
    }
    run_folder.check(folder, recipe)  # config.yaml is the new recipe
    with pytest.raises(UserError, match="attention"):
        run_folder.check(folder, eight_steps(small_data))


# What is not as it was written


def damages(length: int) -> dict[str, Callable[[bytearray], bytes]]:
    def flip(at: int, bit: int) -> Callable[[bytearray], bytes]:
        def change(content: bytearray) -> bytes:
            content[at] ^= 1 << bit
            return bytes(content)

        return change

    return {
        "empty": lambda content: b"",
        "cut short": lambda content: bytes(content[: length // 2]),
        "one byte short": lambda content: bytes(content[:-1]),
        "zeros": lambda content: (
            bytes(content[: length // 3]) + bytes(length // 3) + bytes(content[2 * (length // 3) :])
        ),
        "more": lambda content: bytes(content) + b"x",
        "a bit at the beginning": flip(0, 0),
        "a bit in the middle": flip(length // 2, 3),
        "a bit at the end": flip(length - 2, 6),
    }


DAMAGES = [*damages(100), "gone"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [f"{LAST}/tp_00.safetensors", f"{LAST}/manifest.json", "latest"])
def test_damage_is_seen_and_the_one_before_serves(unbroken: Callable, tmp_path: Path, name: str, damage: str) -> None:
    root = tmp_path / "run" / "checkpoints"
    shutil.copytree(unbroken() / "checkpoints", root)
    file = root / name
    if damage == "gone":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        file.write_bytes(damages(len(content))[damage](content))
    said: list[str] = []
    found = checkpoint.newest_whole(tmp_path / "run", said.append)
    if name == "latest":  # a pointer that is wrong costs nothing: both checkpoints are whole
        assert found.folder.name == LAST
        assert "latest is " in said[0]
    else:
        assert found.folder.name == BEFORE
        assert f"{LAST} is damaged: " in said[-1] or "latest is damaged" in said[0]
    assert all(line.startswith("WARNING: ") and "\n" not in line for line in said)


def test_every_byte_of_a_manifest_counts(unbroken: Callable, tmp_path: Path) -> None:
    """Whatever bit flips, it is seen, or it was between the words and nothing that is read has changed."""
    folder = tmp_path / LAST
    shutil.copytree(unbroken() / "checkpoints" / LAST, folder)
    path = folder / "manifest.json"
    whole, content = checkpoint.read(folder), path.read_bytes()
    for at in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with contextlib.suppress(checkpoint.Damaged):
            assert checkpoint.read(folder) == whole, at


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unfinished(unbroken(), tmp_path / "run")
    file = folder / "checkpoints" / LAST / "tp_00.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    train.run(eight_steps(small_data), "sagebwd", folder, prepared)
    said = capsys.readouterr().out
    assert f"{LAST} is damaged: tp_00.safetensors holds other bytes than were written" in said
    assert "going on after step 4" in said
    assert journal(folder) == journal(unbroken())
    assert newest(folder).files == newest(unbroken()).files


def test_without_a_whole_one_nothing_starts_again_by_itself(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path
) -> None:
    folder = unfinished(unbroken(), tmp_path / "run")
    for file in folder.glob("checkpoints/*/tp_00.safetensors"):
        file.write_bytes(b"")
    before = {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")}
    with pytest.raises(UserError, match=r"no checkpoint in \S+ is whole \(2 damaged\): move \S+ away to start again"):
        train.run(eight_steps(small_data), "sagebwd", folder, prepared)
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")}


def test_a_person_may_go_back(unbroken: Callable, tmp_path: Path) -> None:
    shutil.copytree(unbroken() / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "latest").write_text(BEFORE)
    assert checkpoint.newest_whole(tmp_path, pytest.fail).position.step == HALF


def test_a_checkpoint_of_an_older_format_is_refused(unbroken: Callable, tmp_path: Path) -> None:
    shutil.copytree(unbroken() / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / LAST / "manifest.json").write_text('{"format": 1, "step": 8}')
    (tmp_path / "checkpoints" / "latest").write_text(LAST)
    with pytest.raises(UserError, match="has format 1, this version reads 2: move "):
        checkpoint.newest_whole(tmp_path, pytest.fail)


class Evil:
    def __reduce__(self) -> tuple:
        return (Path("ran").touch, ())


def test_loading_runs_no_code(
    unbroken: Callable, small_data: Data, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that would run something when unpickled is data that does not fit, even with the right checksums; and
    nothing in a checkpoint is a pickle."""
    monkeypatch.chdir(tmp_path)
    folder = as_if_killed_after_step_eight(unbroken(), tmp_path / "run")
    there = folder / "checkpoints" / BEFORE
    for file in there.iterdir():
        with pytest.raises(Exception):  # noqa: B017, PT011 (whatever the unpickler says)
            pickle.Unpickler(io.BytesIO(file.read_bytes())).load()
    (there / "tp_00.safetensors").write_bytes(pickle.dumps(Evil()))
    manifest = json.loads((there / "manifest.json").read_text())
    del manifest["checksum"]
    manifest["files"]["tp_00.safetensors"] = checkpoint.seal(there / "tp_00.safetensors")
    manifest["checksum"] = checkpoint._digest(manifest)
    (there / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Exception, match=r"(?i)header"):
        train.run(eight_steps(small_data), "sagebwd", folder, prepared)
    assert not (tmp_path / "ran").exists()
