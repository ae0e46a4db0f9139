"""Recipe files: YAML with a base, arms, a sweep and command-line overrides -> one complete, validated Recipe an arm.

What a later source says wins: schema defaults < `extends` < the file < the sweep's cell < the arm's keys < the command
line. A key that the sweep varies can be set by neither of the last two.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from sagebwd.errors import UserError
from sagebwd.training import sweep, yaml_text
from sagebwd.training.recipe import NAME, Recipe
from sagebwd.training.sweep import Sweep

# What every arm of an experiment shares, so that all see the same samples in the same order, as the comparison needs.
SHARED = ("name", "seed", "data", "train.tokens_per_step", "train.total_tokens", "evaluation.tokens")


@dataclass(frozen=True)
class Experiment:
    """A recipe file, resolved: one complete recipe an arm, in the file's order; a sweep's, cell by cell.

    variants: every arm of the sweep -> which of the file's arms it is (see `sweep`); empty without one. margin: the
    sweep's.
    """

    name: str
    path: Path
    arms: Mapping[str, Recipe]
    variants: Mapping[str, str] = field(default_factory=dict)
    margin: float = Sweep().margin

    def select(self, names: list[str]) -> Experiment:
        """The same experiment with these arms only; * and ? stand for any text, any letter. UserError: no such arm."""
        chosen: set[str] = set()
        for name in names:
            found = [name] if name in self.arms else fnmatch.filter(self.arms, name)
            if not found:
                raise UserError(f"{self.path} has no arm {name!r}: {_suggest(name, list(self.arms))}")
            chosen.update(found)
        arms = {arm: recipe for arm, recipe in self.arms.items() if arm in chosen}
        return replace(self, arms=MappingProxyType(arms))

    def at(self, index: int) -> str:
        """The name of arm number `index`, from 0. UserError: there are not as many."""
        if index >= len(self.arms):
            raise UserError(f"--arm-index is {index}, but {self.path} has {len(self.arms)} arms: count from 0")
        return list(self.arms)[index]


@dataclass
class _Source:
    """What one file says, its base's keys underneath: dotted key -> (value, where it was said)."""

    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    arms: dict[str, dict[str, tuple[Any, str]]] = field(default_factory=dict)


def load_experiment(path: Path | str, overrides: list[str] | tuple[str, ...] = ()) -> Experiment:
    """Read the recipe file at `path`; each override is "dotted.key=value", the value as YAML would write it.

    Raises UserError: no such file, not YAML, an unknown key (with the nearest valid name), a value that the schema
    refuses, an arm whose keys would be ignored, arms that would not see the same samples.
    """
    path = Path(path)
    source = _read(path, ())
    if not source.arms:
        raise UserError(f"{path} has no arms: add `arms: {{fpa: {{attention.kind: fpa}}, sagebwd: {{}}}}`")
    command = _overrides(overrides)
    # Identity is the file's own, never its base's: two recipes on one base must not share a run folder.
    name = {"name": (path.stem, f"the name of the file {path}")}
    grid = _validate({key: said for key, said in (source.keys | command).items() if _is_sweep(key)}, Sweep, "sweep.")
    keys, command = ({k: said for k, said in some.items() if not _is_sweep(k)} for some in (source.keys, command))
    arms: dict[str, Recipe] = {}
    variants: dict[str, str] = {}
    for cell in sweep.cells(grid) or [None]:
        here = _arms(path, grid, cell, name | keys, source.arms, command)
        _refuse_different_samples(path, here)
        arms |= here
        variants |= dict(zip(here, source.arms, strict=True)) if cell else {}
    if command and not any(arm.attention.kind == "sagebwd" for arm in arms.values()):
        _refuse_quant("every arm", command)
    name = next(iter(arms.values())).name
    return Experiment(name, path, MappingProxyType(arms), MappingProxyType(variants), grid.margin)


def merged(path: Path) -> str:
    """The recipe file at `path` as one file of the same meaning, without `extends`. Raises UserError as above."""
    source = _read(path, ())
    keys = {key: value for key, (value, _) in source.keys.items()}
    arms = {arm: {key: value for key, (value, _) in said.items()} for arm, said in source.arms.items()}
    return yaml_text.dump(keys | {"arms": arms})


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data in the schema's order; `attention.quant` only where the arm's attention reads it."""
    tree = recipe.model_dump(mode="json")
    if recipe.attention.kind == "fpa":
        del tree["attention"]["quant"]
    return tree


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML: what an arm's config.yaml holds and `load_config` reads back to an equal recipe."""
    return yaml_text.dump(resolved(recipe))


def load_config(path: Path) -> Recipe:
    """Read a config.yaml that `dump` wrote. Raises UserError: not there, or not a resolved recipe."""
    tree = _mapping(path)
    return _validate({key: (value, str(path)) for key, value in _flatten(tree, str(path))})


def differences(left: Recipe, right: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (left's value, right's value) of every key that can change a run and differs."""
    a, b = (dict(_leaves(resolved(recipe))) for recipe in (left, right))
    return {key: (a.get(key), b.get(key)) for key in a | b if a.get(key) != b.get(key) and key != "description"}


def _read(path: Path, below: tuple[Path, ...]) -> _Source:
    if path.resolve() in below:
        raise UserError(f"{below[-1]} extends {path}, which extends it again: break the circle")
    tree = _mapping(path)
    base, arms = tree.pop("extends", None), tree.pop("arms", None) or {}
    source = _Source()
    if base is not None:
        if not isinstance(base, str):
            raise UserError(f"{path}: extends is {_shown(base)}: it must be the path of one file, relative to this one")
        source = _read(path.parent / base, (*below, path.resolve()))
        source.keys = {key: said for key, said in source.keys.items() if key not in ("name", "description")}
    source.keys |= {key: (value, str(path)) for key, value in _flatten(tree, str(path))}
    if not isinstance(arms, dict):
        raise UserError(f"{path}: arms is {_shown(arms)}: it must be a mapping of an arm's name to its keys")
    for arm, delta in arms.items():
        where = f"arm {arm} of {path}"
        if not re.fullmatch(NAME, arm) or arm == "report":
            raise UserError(f"{path}: {_shown(arm)} cannot name an arm: use a-z, 0-9, '.', '_', '-', and not 'report'")
        if delta is not None and not isinstance(delta, dict):
            raise UserError(f"{where} is {_shown(delta)}: it must be a mapping of dotted keys to values, {{}} for none")
        said = {key: (value, where) for key, value in _flatten(delta or {}, where)}
        source.arms[arm] = source.arms.get(arm, {}) | said
    return source


def _mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(str(file) for file in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        remedy = _suggest(str(path), near) if near else "give the path of a recipe file, such as recipes/small.yaml"
        raise UserError(f"no recipe file {path}: {remedy}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the recipe file {path}: {error}") from None
    try:
        tree = yaml_text.parse(text)
    except UserError as error:
        raise UserError(f"{path}, {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} is no recipe: it must be a mapping of keys to values")
    return tree


def _overrides(overrides: list[str] | tuple[str, ...]) -> dict[str, tuple[Any, str]]:
    said = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"the override {_shown(text)} must be key=value, such as model.layers=8")
        try:
            tree = {key: yaml_text.parse(value)}
        except UserError as error:
            raise UserError(f"the override {_shown(text)}: {error}") from None
        said |= {key: (value, "the command line") for key, value in _flatten(tree, "the command line")}
    return said


def _arms(
    path: Path, grid: Sweep, cell: sweep.Cell | None, keys: dict, deltas: dict[str, dict], command: dict
) -> dict[str, Recipe]:
    """The file's arms in one cell of its sweep, or without one, by name."""
    if cell is None:
        return {arm: sweep.complete(grid, _arm(arm, keys, delta, command)) for arm, delta in deltas.items()}
    for said in (*deltas.values(), command):
        for key, (_, where) in said.items():
            sweep.refuse_override(grid, key, where)
    keys = keys | {key: (value, f"the sweep of {path}") for key, value in cell.keys.items()}
    return {cell.arm(arm): sweep.complete(grid, _arm(arm, keys, delta, command)) for arm, delta in deltas.items()}


def _arm(arm: str, keys: dict, delta: dict, command: dict) -> Recipe:
    recipe = _validate(keys | delta | command)
    if recipe.attention.kind == "sagebwd":
        return recipe
    _refuse_quant(f"arm {arm}", delta)
    # Keys meant for the other arms: full precision does not read them, so they must not make its run another one.
    return _validate({key: said for key, said in (keys | delta | command).items() if not _is_quant(key)})


def _is_quant(key: str) -> bool:
    return key.startswith("attention.quant.")


def _is_sweep(key: str) -> bool:
    return key.startswith("sweep.")


def _refuse_quant(who: str, said: dict[str, tuple[Any, str]]) -> None:
    for key in filter(_is_quant, said):
        raise UserError(
            f"{key} in {said[key][1]} would be ignored, since {who} has attention.kind fpa: "
            "remove it, or set attention.kind to sagebwd"
        )


def _refuse_different_samples(path: Path, arms: dict[str, Recipe]) -> None:
    first, *others = arms
    for other in others:
        for key, (left, right) in differences(arms[first], arms[other]).items():
            if any(key == shared or key.startswith(f"{shared}.") for shared in SHARED):
                raise UserError(
                    f"{path}: the arms {first} and {other} differ in {key} ({_shown(left)} and {_shown(right)}), so "
                    "they could not be compared on the same samples: set it for all arms, or sweep it"
                )


# The schema's names


class _File(Recipe):
    """What a recipe file may hold, besides `extends` and `arms`."""

    sweep: Sweep = Sweep()


def _sections() -> dict[str, type[BaseModel]]:
    """Dotted name -> class of every section; "" is the file itself."""

    def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
        yield prefix, model
        for name, info in model.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                yield from walk(info.annotation, f"{prefix}.{name}".lstrip("."))

    return dict(walk(_File, ""))


SECTIONS = _sections()
KEYS = tuple(
    key
    for prefix, model in SECTIONS.items()
    for name in model.model_fields
    if (key := f"{prefix}.{name}".lstrip(".")) not in SECTIONS
)


def _flatten(tree: dict[str, Any], where: str, prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and values of a mapping whose keys may be dotted and nested. Raises UserError: unknown, or twice."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}.{name}".lstrip(".")
        if key in SECTIONS:
            if value is not None and not isinstance(value, dict):
                held = ", ".join(SECTIONS[key].model_fields)
                raise UserError(f"{key} in {where} is {_shown(value)}, but it is a section with the keys {held}")
            pairs = _flatten(value or {}, where, key)
        elif key in KEYS:
            pairs = [(key, value)]
        else:
            raise UserError(f"unknown key {_shown(key)} in {where}: {_nearest(key)}")
        for leaf, said in pairs:
            if leaf in found:
                raise UserError(f"{leaf} stands twice in {where}: remove one")
            found[leaf] = said
    return list(found.items())


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}.{name}".lstrip(".")
        if key in SECTIONS:
            yield from _leaves(value, key)
        else:
            yield key, value


def _nearest(key: str) -> str:
    """The remedy for an unknown key: the right name in the wrong section before the nearest spelling."""
    last = key.rpartition(".")[2]
    moved = [name for name in KEYS if name.rpartition(".")[2] == last]
    if moved:
        return f"did you mean {moved[0]!r}?"
    section = key
    while section not in SECTIONS:
        section = section.rpartition(".")[0]
    known = [*KEYS, *filter(None, SECTIONS), "extends", "arms"]
    return _suggest(key, known, list(SECTIONS[section].model_fields))


def _suggest(name: str, known: list[str], otherwise: list[str] | None = None) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(otherwise or known)}"


def _shown(value: Any) -> str:
    """A value as an error may show it: on one line of its own length, whatever a file held."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:60]}... ({len(text)} characters)"


# Values


def _validate(said: dict[str, tuple[Any, str]], model: type[BaseModel] = Recipe, prefix: str = "") -> Any:
    """An instance of `model`, of which the keys of `said` tell the leaves, each under `prefix`."""
    tree: dict[str, Any] = {}
    for key, (value, _) in said.items():
        *sections, last = key.removeprefix(prefix).split(".")
        level = tree
        for section in sections:
            level = level.setdefault(section, {})
        level[last] = _whole(value)
    try:
        # Strict, so that "4" or true is no number; through JSON, where a list may stand for a tuple.
        return model.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise UserError(_sentence(error, said, prefix)) from None


def _whole(value: Any) -> Any:
    """2e6 is a whole number to people; the schema's integers want an int, and its floats take one."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sentence(error: ValidationError, said: dict[str, tuple[Any, str]], prefix: str) -> str:
    first = error.errors(include_url=False)[0]
    loc = [part for part in first["loc"] if isinstance(part, str)]
    key = (prefix + ".".join(loc)).rstrip(".")
    # pydantic appends the member's name to the location of a union's failure: cut back to a key that exists.
    while key and key not in KEYS and key not in SECTIONS:
        key = key.rpartition(".")[0]
    reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    if key in said:
        return f"{key} is {_shown(said[key][0])} in {said[key][1]}: {reason}"
    sources = dict.fromkeys(where for name, (_, where) in said.items() if name.startswith(key))
    return f"{key or 'the recipe'} in {' and '.join(sources) or 'the schema'}: {reason}"
