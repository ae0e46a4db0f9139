"""YAML as the recipes use it: plain data only, YAML 1.2's numbers and booleans, no key twice."""

from __future__ import annotations

import re
from typing import Any

import yaml

from sagebwd.errors import UserError


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, narrowed.

    PyYAML follows YAML 1.1, where 1e-3 is text, 010 is eight and `no` is false; YAML 1.2's core schema reads them as
    people do. Its two additions kept: underscores in numbers (2_000_000), and nothing else.
    """

    yaml_constructors: dict = {}  # noqa: RUF012  (filled below; the class attribute is PyYAML's own registry)
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):  # a few lines of them could stand for more than the memory holds
            event = self.peek_event()
            line = event.start_mark.line + 1
            raise UserError(f"line {line}: *{event.anchor} repeats what stands elsewhere: write it out")
        return super().compose_node(parent, index)

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        try:
            return int(node.value)
        except ValueError:  # Python's own limit
            line = node.start_mark.line + 1
            raise UserError(f"line {line}: a number of {len(node.value)} digits is too long") from None

    def construct_document_mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise UserError(f"line {line}: the key {key!r} must be text")
            if key in mapping:
                raise UserError(f"line {line}: the key {key!r} stands there twice: remove one")
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_document_mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", lambda loader, node: loader.construct_sequence(node, deep=True))
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_yaml_str)
_Loader.add_constructor("tag:yaml.org,2002:null", lambda loader, node: None)
_Loader.add_constructor("tag:yaml.org,2002:bool", lambda loader, node: node.value.lower() == "true")
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole_number)
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))
_Loader.add_constructor(None, _Loader.construct_undefined)

_DIGITS = "[0-9]+(?:_[0-9]+)*"
for _tag, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", rf"[-+]?{_DIGITS}", list("-+0123456789")),
    ("float", rf"[-+]?(?:\.{_DIGITS}|{_DIGITS}(?:\.(?:{_DIGITS})?)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^{_pattern}$"), _first)


class _Dumper(yaml.SafeDumper):
    """Quotes a text wherever `_Loader` would take it for something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        """What stands there twice is written twice: `parse` reads no aliases."""
        return True


def parse(text: str) -> Any:
    """The one YAML document in `text`, as dicts, lists, text, numbers, booleans and None.

    Raises UserError: not YAML, a tag that names anything but plain data, an alias, a key twice, a key that is no text.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise UserError(f"{where}{error.problem or error.context}: this is not YAML that a recipe may hold") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"this is not YAML that a recipe may hold ({' '.join(str(error).split())})") from None


def dump(tree: dict[str, Any]) -> str:
    """YAML text that `parse` reads back to the same tree, keys in the tree's order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
