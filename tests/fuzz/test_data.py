"""Malformed corpora and damaged preparations: used whole, or refused in one line, with everything left as it was."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagebwd.errors import UserError
from sagebwd.tokenizer import load_prepared
from sagebwd.tokenizer.prepared import FILES, MANIFEST, digest_of, file_facts
from sagebwd.training.data import train_batches
from sagebwd.training.recipe import Data, Recipe, Train
from tests.fuzz.harness import PICKLE, as_json, check_refused, contents, damaged, examples, nothing_executes, sagebwd
from tests.fuzz.harness import values as any_values
from tests.small_corpus import small_documents

LINES = [json.dumps({"text": text}).encode() for text in small_documents(6)]
WHOLE = b"\n".join(LINES) + b"\n"
RECIPE = """
data: {corpus: files, files: [FILE], vocab_size: 300, context: 32, validation_fraction: 0.2}
arms: {fpa: {attention.kind: fpa}}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_corpus(place: Path, name: str, content: bytes) -> None:
    shutil.rmtree(place / "data", ignore_errors=True)
    (place / "recipe.yaml").write_text(RECIPE.replace("FILE", name))
    (place / name.split(",")[0]).write_bytes(content)
    before = contents(place)
    answer = sagebwd("prepare", "recipe.yaml")
    if answer.code:
        check_refused(answer)
        after = contents(place)
        assert after.pop("data", None) is None  # the empty folder may be there
        assert after == before
    else:
        assert {path.name for path in folder_of(place).iterdir()} == {*FILES, MANIFEST}


@examples(120)
@given(damaged(WHOLE))
def test_damaged_jsonl(place: Path, content: bytes) -> None:
    check_corpus(place, "corpus.jsonl", content)


@examples(60)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(LINES),
            any_values.map(lambda value: as_json({"text": value}).encode()),
            any_values.map(lambda value: as_json(value).encode()),
            st.binary(max_size=20),
            st.sampled_from(
                [
                    b'{"text": "a", "text": "b"}',
                    b'{"text": "\\ud800"}',
                    b"{" * 5000,
                    b"[" * 200000,
                    b'{"text": ' + b"1" * 5000 + b"}",
                    b"\xef\xbb\xbf{}",
                    b'{"Text": "a"}',
                    b"",
                    b"NaN",
                    b'{"text": "' + "\u2585\x00\u2028".encode() + b'"}',
                ]
            ),
        ),
        max_size=12,
    )
)
def test_any_lines(place: Path, lines: list[bytes]) -> None:
    check_corpus(place, "corpus.jsonl", b"\n".join(lines))


@examples(60)
@given(damaged(gzip.compress(WHOLE, mtime=0)))
def test_damaged_gzip(place: Path, content: bytes) -> None:
    check_corpus(place, "corpus.jsonl.gz", content)


@examples(30)
@given(damaged("\n".join(small_documents(3)).encode()))
def test_damaged_text(place: Path, content: bytes) -> None:
    (place / "zz.txt").write_text("\n\n".join(small_documents(3)))  # one document alone is refused as too few
    check_corpus(place, "corpus.txt, zz.txt", content)


# What has been prepared


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prepared")
    (place / "corpus.jsonl").write_bytes(WHOLE)
    (place / "recipe.yaml").write_text(RECIPE.replace("FILE", "corpus.jsonl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert sagebwd("prepare", "recipe.yaml").code == 0
    return place


def folder_of(place: Path) -> Path:
    (folder,) = (place / "data").iterdir()
    return folder


@examples(200)
@given(st.data(), st.sampled_from([*FILES, MANIFEST]))
def test_a_damaged_preparation(prepared: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject, name: str) -> None:
    monkeypatch.chdir(prepared)
    path = folder_of(prepared) / name
    whole = path.read_bytes()
    try:
        path.write_bytes(data.draw(damaged(whole)))
        before = contents(prepared)
        answer = sagebwd("prepare", "recipe.yaml")
        if name != MANIFEST or answer.code:  # another number in the manifest may be as good to this command
            check_refused(answer)
        assert contents(prepared) == before
    finally:
        path.write_bytes(whole)


@examples(60)
@given(st.data(), st.sampled_from(["train.idx", "train.bin"]))
def test_token_files_that_the_manifest_vouches_for(
    prepared: Path, tmp_path: Path, data: st.DataObject, name: str
) -> None:
    """As another program's faulty output, or a deliberate one, would be: Megatron must not read beyond the file."""
    folder = tmp_path / "made"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folder_of(prepared), folder)
    (folder / name).write_bytes(data.draw(damaged((folder / name).read_bytes())))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = file_facts(folder)
    manifest["prepared"]["digest"] = digest_of(manifest["files"])
    (folder / MANIFEST).write_text(json.dumps(manifest))
    use(folder)


@examples(60)
@given(st.data())
def test_a_damaged_index(prepared: Path, tmp_path: Path, data: st.DataObject) -> None:
    """The order of samples, which training derives: no run may go by another order than its seed's."""
    folder = tmp_path / "made"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folder_of(prepared), folder)
    want = use(folder)
    path = data.draw(st.sampled_from(sorted(path for path in (folder / "indices").rglob("*") if path.is_file())))
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    found = use(folder)
    assert found is None or found == want


def use(folder: Path) -> list | None:
    """The tokens of the first training steps; None if they are refused, in one line."""
    recipe = Recipe(
        name="r",
        data=Data(corpus="files", files=("x",), vocab_size=300, context=32),
        train=Train(tokens_per_step=256, total_tokens=1024, micro_batch=8),
    )
    with nothing_executes():
        try:
            return [
                batch["tokens"].tolist() for batch in train_batches(recipe, load_prepared(folder), dp_rank=0, dp_size=1)
            ]
        except UserError as error:
            said = str(error)
    assert said.isprintable()
    return None


def test_a_pickle_in_place_of_any_file(prepared: Path, tmp_path: Path) -> None:
    use(shutil.copytree(folder_of(prepared), tmp_path / "made"))
    for path in sorted(path for path in (tmp_path / "made").rglob("*") if path.is_file()):
        whole = path.read_bytes()
        path.write_bytes(PICKLE)
        assert use(tmp_path / "made") is None, path
        path.write_bytes(whole)
