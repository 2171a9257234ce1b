"""One row of a dialect's table: what a foreign key means here.

A dialect is a tuple of rows, one for each key of its documents, spelled as there. A key that a file leaves out has
the default of its document, so a file with two keys means here what it means there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from whet.types import ConfigError, Json

Status = Literal["mapped", "translated", "derived", "engine", "coming", "inert", "refused"]

Values = Mapping[str, Json]
"""All values of a foreign file by dotted key, defaults filled in."""

Translate = Callable[[Values], Mapping[str, Json]]
"""The foreign values to native ones, by dotted native key (`data.train.0.path`). Raises ConfigError in the
foreign system's own words, `Unbuilt` for what that system has and whet has not yet."""


class Unbuilt(ConfigError):
    """A value that asks for an engine or a feature that is not built yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What one foreign key means."""

    name: str
    """Dotted, as its document spells it; a last part `*` stands for any keys below (open dicts)."""
    status: Status
    default: Json
    """The document's default; what a file that leaves the key out means."""
    native: tuple[str, ...] = ()
    """Native keys it feeds."""
    reason: str = ""
    """For people: how it is translated, why it cannot matter, what is missing, what to write instead."""
    translate: Translate | None = None
    """For `translated`: one function may serve several keys; it is called once."""
    harmless: tuple[Json, ...] = ()
    """For `coming`, `inert`, `refused`: values beside the default that change nothing here and are accepted."""


def mapped(name: str, native: str, *, default: Json, reason: str = "") -> Key:
    """The same meaning under another name: the value goes over as it is."""
    return Key(name=name, status="mapped", native=(native,), default=default, reason=reason)


def translated(name: str, translate: Translate, *native: str, default: Json, reason: str) -> Key:
    """A function computes the native keys from this value and others."""
    return Key(
        name=name, status="translated", native=native, default=default, reason=reason, translate=translate
    )


def derived(name: str, check: Translate, *, default: Json, reason: str) -> Key:
    """Follows from other keys here; `check` raises ConfigError if the value says otherwise, and returns {}."""
    return Key(name=name, status="derived", default=default, reason=reason, translate=check)


def engine(name: str, owner: str, *, default: Json, reason: str) -> Key:
    """For vLLM, SGLang, DeepSpeed or Megatron; accepted at its default until that engine is there."""
    return Key(name=name, status="engine", native=(owner,), default=default, reason=reason)


def coming(name: str, feature: str, *, default: Json, harmless: tuple[Json, ...] = ()) -> Key:
    """Its feature is not built yet: any value that would switch it on is refused by name."""
    return Key(name=name, status="coming", default=default, reason=feature, harmless=harmless)


def inert(name: str, reason: str, *, default: Json, harmless: tuple[Json, ...] = ()) -> Key:
    """Cannot matter here, for the reason given; a value that would matter is refused."""
    return Key(name=name, status="inert", default=default, reason=reason, harmless=harmless)


def refused(name: str, reason: str, *, default: Json, harmless: tuple[Json, ...] = ()) -> Key:
    """Never done here: the reason, and what to write instead. The default passes."""
    return Key(name=name, status="refused", default=default, reason=reason, harmless=harmless)
