"""A few of the malformed inputs through processes of their own, where libraries in C++ could write lines too."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.harness import PICKLE, contents
from tests.fuzz.test_data import RECIPE, WHOLE


def sagebwd(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sagebwd.cli", *arguments]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prepared")
    (place / "corpus.jsonl").write_bytes(WHOLE)
    (place / "recipe.yaml").write_text(RECIPE.replace("FILE", "corpus.jsonl"))
    assert sagebwd(place, "prepare", "recipe.yaml").returncode == 0
    return place


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("recipe.yaml", b"model: !!python/object/apply:os.system ['touch touched']\n"),
        ("recipe.yaml", b"{" * 100_000),
        ("corpus.jsonl", PICKLE),
        ("data/*/tokenizer.model", PICKLE),
        ("data/*/tokenizer.model", WHOLE),
        ("data/*/train.idx", b"MMIDIDX\x00\x00" + bytes(200)),
        ("data/*/manifest.json", b"[" * 100_000),
    ],
)
def test_one_line_and_nothing_changed(prepared: Path, tmp_path: Path, name: str, content: bytes) -> None:
    place = shutil.copytree(prepared, tmp_path / "copy")
    (path,) = place.glob(name)
    path.write_bytes(content)
    before = contents(place)
    answer = sagebwd(place, "prepare", "recipe.yaml")
    assert answer.returncode == 2
    assert re.fullmatch(r"error: [^\n]+\n", answer.stderr), answer.stderr
    assert contents(place) == before
