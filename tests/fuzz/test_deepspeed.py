"""Malformed configurations of DeepSpeed: refused in one line before anything starts, or such as DeepSpeed takes."""

import json
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.harness import check_refused, contents, damaged, examples, sagebwd, values

HERE = Path(__file__).parents[2]
ZERO2 = (HERE / "launch/deepspeed/zero2.json").read_bytes()
KEYS = ("stage", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "offload_optimizer", "x\x1b[31m\n")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    return tmp_path


def check(place: Path, content: bytes) -> None:
    (place / "zero2.json").write_bytes(content)
    before = contents(place)
    chosen = ("parallel.engine=deepspeed", "parallel.zero=2")
    answer = sagebwd("recipe", HERE / "recipes/small.yaml", "--print-config", *chosen)
    if answer.code:
        check_refused(answer)
    assert contents(place) == before


@examples(60)
@given(damaged(ZERO2))
def test_damaged_bytes(place: Path, content: bytes) -> None:
    check(place, content)


@examples(60)
@given(st.sampled_from(KEYS) | st.text(max_size=8), values)
def test_any_keys_and_values(place: Path, key: str, value: object) -> None:
    said = json.loads(ZERO2)
    check(place, json.dumps(said | {key: value}).encode())
    said["zero_optimization"][key] = value
    check(place, json.dumps(said).encode())
