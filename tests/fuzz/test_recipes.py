"""Malformed recipes and overrides: --print-config resolves them or refuses them in one line, and starts nothing."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sagebwd.training.recipe_file import KEYS, SECTIONS
from tests.fuzz.harness import as_json, check_refused, contents, damaged, examples, sagebwd, values

SMALL = (Path(__file__).parents[2] / "recipes" / "small.yaml").read_bytes().replace(b"extends: base.yaml\n", b"")

keys = st.one_of(
    st.sampled_from(KEYS),
    st.sampled_from([key for key in SECTIONS if key]),
    st.sampled_from(
        ["extends", "arms", "arms.fpa", "name", "model.layer", "data.files.0", "", ".", "model.", ".model"]
    ),
    st.text(max_size=8),
)
arms = st.dictionaries(
    st.one_of(st.sampled_from(["fpa", "sagebwd", "report", "A", ".."]), st.text(max_size=5)),
    st.dictionaries(keys, values, max_size=2) | values,
    max_size=2,
)
trees = st.dictionaries(keys, values | st.dictionaries(keys, values, max_size=2), max_size=4)
# YAML's own ways to more than plain data, to more than was written, and to no end.
SPECIAL = [
    "!!python/object/apply:os.system ['false']",
    "!!python/name:os.system",
    "!!binary aGk=",
    "!!set {a, b}",
    "!include x",
    "&a [*a]",
    "&a {b: *a}",
    "*nothing",
    "[&a [x, x], &b [*a, *a], &c [*b, *b]]",
    "!!timestamp 2001-12-14",
    "? [a]\n: b",
    "{<<: {model.layers: 2}}",
    "|\n  text",
    "'unclosed",
    "[" * 2000,
    "{a: " * 2000,
    "- " * 2000,
    "0x10",
    "010",
    "1_",
    "...",
    "%YAML 1.2",
    "1" * 5000,
    "[&a [x, x], " + ", ".join(f"&{b} [*{a}, *{a}]" for a, b in pairwise("abcdefghijk")) + "]",
    "--- a\n--- b",
    "\ufeff",
    "\x00",
    "\t",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(place: Path, recipe: bytes, *arguments: str) -> None:
    """Print what `recipe` resolves to, or say in one line why it cannot be; either way, nothing is written."""
    (place / "recipe.yaml").write_bytes(recipe)
    before = contents(place)
    answer = sagebwd("recipe", "recipe.yaml", "--print-config", *arguments)
    if answer.code:
        check_refused(answer)
    else:
        assert answer.out.startswith("# arm ")
        assert answer.errors == ""
    assert contents(place) == before


@examples(250)
@given(damaged(SMALL))
def test_damaged_text(place: Path, recipe: bytes) -> None:
    check(place, recipe)


@examples(200)
@given(trees, arms)
def test_any_keys_and_values(place: Path, tree: dict, some_arms: dict) -> None:
    check(place, yaml.safe_dump(tree | {"arms": some_arms}, allow_unicode=True).encode("utf-8", "surrogatepass"))


@examples(150)
@given(st.sampled_from(KEYS), st.sampled_from(SPECIAL) | values.map(as_json), st.booleans())
def test_one_value_of_a_whole_recipe(place: Path, key: str, value: str, in_an_arm: bool) -> None:
    said = f"{key}: {value}\n".encode("utf-8", "surrogatepass")
    check(place, SMALL + (b"  one-more:\n    " if in_an_arm else b"") + said)


@examples(100)
@given(keys | st.just("arms.fpa"), st.sampled_from(SPECIAL) | values.map(as_json) | st.text(max_size=20))
def test_overrides(place: Path, key: str, value: str) -> None:
    check(place, SMALL, f"{key}={value}")
