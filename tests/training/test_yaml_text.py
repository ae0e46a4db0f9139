"""YAML as people read it, plain data only, and nothing that executes."""

import pytest

from sagebwd.errors import UserError
from sagebwd.training import yaml_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("6E4", 60000.0),
        ("2_000_000", 2_000_000),
        ("010", 10),
        (".5", 0.5),
        ("-3", -3),
        ("no", "no"),
        ("True", True),
        ("~", None),
        ("'4'", "4"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("[a.txt, b.txt]", ["a.txt", "b.txt"]),
    ],
)
def test_values(text: str, value: object) -> None:
    found = yaml_text.parse(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' stands there twice"),
        ("a: !!python/object/apply:os.system ['touch /tmp/x']", "line 1: could not determine a constructor"),
        ("a: &x {b: 1}\nc: *x", "line 2: \\*x repeats what stands elsewhere"),
        ("a: [1", "line 1"),
        ("5: x", "must be text"),
        ("a: 1\n---\nb: 2", "another document"),
    ],
)
def test_refused_with_the_place(text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint.replace("[", r"\[")) as error:
        yaml_text.parse(text)
    assert "\n" not in str(error.value)


def test_dump_quotes_what_would_be_read_as_something_else() -> None:
    tree = {"a": "1e-3", "b": "010", "c": "true", "d": "", "e": 1e-8, "f": 2e6, "g": ["no", "~"], "h": None, "i": "2_0"}
    assert yaml_text.parse(yaml_text.dump(tree)) == tree
