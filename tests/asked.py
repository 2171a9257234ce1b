"""A module of a foreign system's package, its functions asked as the tables ask them: with their rules before them."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

from whet.config.conditions import parsed, subjects
from whet.dialects.row import rows
from whet.dialects.rules import function
from whet.dialects.versions import VERSIONS


def asked(module: ModuleType) -> Any:
    """The names of a module; the functions that the system's table names have their rules."""
    system, name = module.__name__.split(".")[-2:]
    named = {row.function for row in rows(system) if row.function.startswith(f"{name}.")}
    return SimpleNamespace(
        **{**vars(module), **{each.partition(".")[2]: function(system, each) for each in named}}
    )


def strange_names(system: str, words: str) -> list[str]:
    """The names in a condition that are no key of the system, no function of its package and no release."""
    return strange(system, (name for _, name in subjects(parsed(words))) if words else ())


def strange(system: str, names: Iterable[str]) -> list[str]:
    known = {row.key for row in rows(system)} | {f"since_{at.replace('-', '_')}" for at in VERSIONS[system]}
    return [name for name in names if name not in known and not _is_function(system, name)]


def _is_function(system: str, name: str) -> bool:
    try:
        return callable(function(system, name))
    except ValueError:
        return False
