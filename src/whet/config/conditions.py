"""Conditions on a config as plain data, so that a check and a form read the same one.

    {"key": "algorithm.kl.coef", "above": 0}          a value of the config
    {"condition": "needs_critic"}                     something that follows from it, by name
    {"condition": "loss.rec_weight", "is": "none"}    a setting of its advantage or loss, given or not; else null
    {"all": [...]}, {"any": [...]}, {"not": ...}      of other conditions

A value passes a test: "is", "in" (one of), "above", "given" (not null, not empty), "holds" (a list with one of these
in it), "longer" (a list of more entries than this). Without a test it must be true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from whet.config.schema import Config
from whet.types import Json

Condition = Mapping[str, Any]

NEVER: Condition = {"any": []}
ONLINE: Condition = {"condition": "kind", "is": "online"}
STALE: Condition = {
    "any": [
        {"key": "rollout.max_staleness", "above": 0},
        {"key": "rollout.sync_interval", "above": 1},
        {"key": "rollout.schedule", "is": "async"},
        {"key": "buffer.replay.share", "above": 0},
        {"key": "buffer.replay.queue", "is": True},
    ]
}
"""Rollouts may be of older weights than those that are trained."""


@dataclass(frozen=True)
class Rule:
    """Keys that something reads only under a condition."""

    keys: tuple[str, ...]
    read_when: Condition
    why: str
    """Why nothing reads them otherwise."""
    default_passes: bool = False
    """Their defaults, and false, may stand there though nothing reads them."""


def under(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "is": lambda value, wanted: value == wanted,
    "in": lambda value, wanted: value in wanted,
    "above": lambda value, limit: value is not None and value > limit,
    "given": lambda value, wanted: (value not in (None, "", (), {})) == wanted,
    "holds": lambda value, wanted: bool(set(value or ()) & set(wanted)),
    "longer": lambda value, limit: len(value or ()) > limit,
}


def met(condition: Condition, cfg: Config, named: Mapping[str, Json]) -> bool:
    """Whether a condition holds in one stage's config; named: the value of each named condition."""
    if "all" in condition:
        return all(met(part, cfg, named) for part in condition["all"])
    if "any" in condition:
        return any(met(part, cfg, named) for part in condition["any"])
    if "not" in condition:
        return not met(condition["not"], cfg, named)
    value = value_at(cfg, condition["key"]) if "key" in condition else named.get(condition["condition"])
    test = next((name for name in TESTS if name in condition), None)
    return TESTS[test](value, condition[test]) if test else bool(value)


def value_at(cfg: Config, key: str) -> Any:
    """The value of a dotted key; None below a section that is not there."""
    value: Any = cfg
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    return value


def subjects(condition: Condition) -> Iterator[tuple[str, str]]:
    """Everything that a condition looks at: ("key", its name) or ("condition", its name)."""
    for part in (*condition.get("all", ()), *condition.get("any", ())):
        yield from subjects(part)
    if "not" in condition:
        yield from subjects(condition["not"])
    yield from ((kind, condition[kind]) for kind in ("key", "condition") if kind in condition)
