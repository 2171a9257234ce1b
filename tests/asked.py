"""A module of a foreign system's package, its functions asked as the tables ask them: with their rules before them.
The native keys that they give must exist."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from whet.config.conditions import parsed, subjects
from whet.config.keys import TABLES, Path, lookup
from whet.config.tree import path_of
from whet.dialects.row import Native, Values, rows
from whet.dialects.rules import Function, function
from whet.dialects.versions import VERSIONS
from whet.types import Json


def asked(module: ModuleType) -> Any:
    """The names of a module; the functions that the system's table names have their rules."""
    system, name = module.__name__.split(".")[-2:]
    named = {row.function for row in rows(system) if row.function.startswith(f"{name}.")}
    return SimpleNamespace(
        **{**vars(module), **{each.partition(".")[2]: _checked(function(system, each)) for each in named}}
    )


def _checked(asked_for: Function) -> Function:
    @functools.wraps(asked_for)
    def told(values: Values) -> Native:
        native = asked_for(values)
        assert strange_natives(native) == [], "no native keys"
        return native

    return told


def strange_natives(native: Mapping[str, Json]) -> list[str]:
    """Those of native keys that do not exist. The settings of a function by its dotted path are those of its
    signature."""
    strange = [key for key in native if lookup(path_of(key, ())) is None and not is_free(path_of(key, ()))]
    return [key for key in strange if ":" not in str(native.get(_table(key)))]


def _table(key: str) -> str:
    """The key of `TABLES` that a setting stands in."""
    above = key.rpartition(".")[0]
    return above if path_of(above, ()) in TABLES else ""


def is_free(path: Path) -> bool:
    """Whether it stands in a section of any keys."""
    found = next((found for n in range(len(path) - 1, 0, -1) if (found := lookup(path[:n]))), None)
    return found is not None and found.section is None and "any keys" in found.words


def strange_names(system: str, words: str) -> list[str]:
    """The names in a condition that are no key of the system, no function of its package and no release."""
    return strange(system, (name for _, name in subjects(parsed(words))) if words else ())


def strange(system: str, names: Iterable[str]) -> list[str]:
    known = {row.key for row in rows(system)} | {f"since_{at.replace('-', '_')}" for at in VERSIONS[system]}
    return [name for name in names if name not in known and not is_function(system, name)]


def is_function(system: str, name: str) -> bool:
    try:
        return callable(function(system, name))
    except ValueError:
        return False
