"""Damaged run folders: training goes on to the same end or refuses in one line; so do `status` and `compare`."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagebwd.training import run_folder
from tests.fuzz.harness import check_refused, contents, damaged, examples, sagebwd, values
from tests.small_corpus import small_documents

RECIPE = """
model: {layers: 1, hidden: 16, heads: 2, ffn: 32}
data: {corpus: files, files: [corpus.jsonl], vocab_size: 300, context: 16, validation_fraction: 0.2}
train: {tokens_per_step: 64, total_tokens: 384, micro_batch: 4}
evaluation: {every_steps: 3, tokens: 64}
checkpoint: {every_steps: 2, keep_last: 3}
arms: {fpa: {attention.kind: fpa}}
"""
TRAIN = ("train", "recipe.yaml", "--arm", "fpa")
ARM = Path("runs", "recipe", "fpa")
LAST = "step_00000006"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps with checkpoints after 2, 4 and 6, in `whole`; the same run before its last two steps, in `begun`."""
    place = tmp_path_factory.mktemp("runs")
    (place / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in small_documents(6)))
    (place / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        answer = sagebwd(*TRAIN)
        assert answer.code == 0, answer
    (place / "runs").rename(place / "whole")
    begun = place / "begun" / "recipe" / "fpa"
    shutil.copytree(place / "whole" / "recipe" / "fpa" / "checkpoints", begun / "checkpoints")
    shutil.rmtree(begun / "checkpoints" / LAST)
    (begun / "checkpoints" / "latest").unlink()
    return place


@pytest.fixture
def fresh(place: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a copy of `whole` or `begun` in the place of the runs."""
    monkeypatch.chdir(place)

    def copy(name: str) -> Path:
        shutil.rmtree(place / "runs", ignore_errors=True)
        shutil.copytree(place / name, place / "runs")
        return place / ARM

    return copy


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def tensors(place: Path, step: str) -> dict[str, bytes]:
    """The bytes of a checkpoint's tensors: the weights and the optimizer's state, random states included."""
    return {path.name: path.read_bytes() for path in (place / "checkpoints" / step).glob("*.safetensors")}


def damage(draw: st.DataObject, folder: Path) -> str:
    """One file made into something else; its name."""
    name = draw.draw(st.sampled_from(files(folder)))
    path = folder / name
    path.write_bytes(draw.draw(damaged(path.read_bytes())))
    return name


def test_what_the_others_start_from(fresh, place: Path) -> None:
    folder = fresh("begun")
    answer = sagebwd(*TRAIN)
    assert "going on after step 4" in answer.out, answer
    assert tensors(folder, LAST) == tensors(place / "whole" / "recipe" / "fpa", LAST) != {}


@examples(40)
@given(st.data())
def test_a_damaged_checkpoint(fresh, place: Path, data: st.DataObject) -> None:
    folder = fresh("begun")
    damage(data, folder)
    answer = sagebwd(*TRAIN)
    if answer.code:
        check_refused(answer)
    else:
        assert tensors(folder, LAST) == tensors(place / "whole" / "recipe" / "fpa", LAST)


@examples(60)
@given(st.data())
def test_a_finished_run(fresh, place: Path, data: st.DataObject) -> None:
    """Whatever happened to one of its files, no command runs it again, changes a checkpoint or breaks off."""
    folder = fresh("whole")
    name = damage(data, folder)
    before = contents(folder / "checkpoints")
    stands = sagebwd("status", ARM)
    if stands.code == 2:
        check_refused(stands)
    again = sagebwd(*TRAIN)
    if again.code:
        check_refused(again)
    elif name != run_folder.META:  # which alone says that it is finished
        assert contents(folder / "checkpoints") == before, again


@examples(30)
@given(st.data(), st.sampled_from([run_folder.CONFIG, run_folder.META, "experiment.json", "events"]))
def test_compare(fresh, data: st.DataObject, name: str) -> None:
    folder = fresh("whole")
    path = folder.parent / name if name == "experiment.json" else folder / name
    if name == "events":
        (path,) = folder.glob(run_folder.EVENTS)
    whole = path.read_bytes() if path.exists() else b'{"arms": ["fpa"], "command": "x", "recipe": "recipe.yaml"}'
    path.write_bytes(data.draw(damaged(whole)))
    before = contents(folder)
    answer = sagebwd("compare", folder.parent)
    if answer.code:
        check_refused(answer)
    assert contents(folder) == before


@examples(40)
@given(st.sampled_from([run_folder.META, "status.json", "../experiment.json"]), values)
def test_any_json(fresh, name: str, value: object) -> None:
    folder = fresh("whole")
    (folder / name).write_text(json.dumps(value))
    for command in (("status", ARM), TRAIN, ("compare", folder.parent)):
        answer = sagebwd(*command)
        if answer.code == 2:
            check_refused(answer)
        else:
            assert answer.code in (0, 1, 75), answer


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
@pytest.mark.parametrize("name", [run_folder.META, "status.json", "checkpoints/step_00000004/manifest.json"])
def test_nested_beyond_python_s_depth(fresh, name: str, nested: str) -> None:
    folder = fresh("begun" if name.startswith("checkpoints") else "whole")
    (folder / name).write_text(nested)
    for command in (("status", ARM), TRAIN):
        answer = sagebwd(*command)
        if answer.code == 2:
            check_refused(answer)
        else:
            assert answer.code in (0, 1, 75), answer
