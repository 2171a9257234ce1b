"""Rules over keys, and the conditions they stand under: plain data, so that checks, forms, the JSON schema and the
documentation read the same ones.

    {"key": "algorithm.kl.coef", "above": 0}          a value of the config
    {"condition": "needs_critic"}                     something that follows from it, by name
    {"condition": "loss.rec_weight", "is": "none"}    a setting of its advantage or loss, given or not; else null
    {"all": [...]}, {"any": [...]}, {"not": ...}      of other conditions

A value passes a test: "is", "in" (one of), "above", "at_least", "multiple_of", "given" (not null, not empty), "holds"
(a list with one of these in it), "longer" (a list of more entries than this). Without a test it must be true. It may be
compared with another key's value: {"key": "a", "above": {"key": "b"}}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
    """What is said of keys where a condition holds."""

    keys: tuple[str, ...]
    """`*` stands for any entry of a list or any name. A section stands for all keys in it."""
    when: Condition
    message: str
    """Values may stand in it: {cfg.data.order}, {kind} and other named conditions (`facts.NAMED`)."""
    level: Literal["unused", "refused"]
    """unused: nothing reads the keys; a key that is set is refused, and a form hides all of them. refused: these values
    do not go together; the error stands at the key, and a form shows it there."""
    default_passes: bool = False
    """unused: their defaults, and false, may stand there though nothing reads them."""


def read_when(
    keys: tuple[str, ...], condition: Condition, otherwise: str, *, default_passes: bool = False
) -> Rule:
    """Keys that something reads only under a condition. otherwise: why nothing reads them where it does not hold."""
    return Rule(keys, {"not": condition}, otherwise, "unused", default_passes)


def refuse(key: str, when: Condition, message: str) -> Rule:
    """Values that do not go together. key: where the error stands; the condition looks at the others."""
    return Rule((key,), when, message, "refused")


def under(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


def both(*conditions: Condition) -> Condition:
    """All of them hold."""
    return {"all": list(conditions)}


def either(*conditions: Condition) -> Condition:
    """One of them holds."""
    return {"any": list(conditions)}


def no(condition: Condition) -> Condition:
    """It does not hold."""
    inner: Condition = condition.get("not", {"not": condition})
    return inner


TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "is": lambda value, wanted: value == wanted,
    "in": lambda value, wanted: value in wanted,
    "above": lambda value, limit: value is not None and limit is not None and value > limit,
    "at_least": lambda value, limit: value is not None and limit is not None and value >= limit,
    "multiple_of": lambda value, of: value % of == 0,
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
    if test is None:
        return bool(value)
    with_ = condition[test]
    return TESTS[test](value, value_at(cfg, with_["key"]) if isinstance(with_, Mapping) else with_)


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
    yield from (
        ("key", with_["key"]) for with_ in condition.values() if isinstance(with_, Mapping) and "key" in with_
    )


def in_words(condition: Condition) -> str:
    """`rollout.engine is hf and not needs_critic`."""
    if "not" in condition:
        return _denied(condition["not"])
    for several, joint in (("all", " and "), ("any", " or ")):
        if several in condition:
            parts = [
                f"({in_words(c)})" if c.keys() & {"all", "any"} else in_words(c) for c in condition[several]
            ]
            return joint.join(parts) or "never"
    name = condition.get("key") or condition["condition"]
    test = next((test for test in TESTS if test in condition), None)
    if test is None:
        return str(name)
    return (
        f"{name} {_WORDS[test]} {_value(condition[test])}"
        if test != "given"
        else _given(name, condition[test])
    )


_WORDS = {
    "is": "is",
    "in": "is one of",
    "above": ">",
    "at_least": ">=",
    "multiple_of": "is a multiple of",
    "holds": "contains",
    "longer": "has more entries than",
}


def _denied(condition: Condition) -> str:
    name = condition.get("key") or condition.get("condition")
    for test, words in (
        ("is", "is not"),
        ("above", "<="),
        ("at_least", "<"),
        ("multiple_of", "is no multiple of"),
    ):
        if test in condition:
            return f"{name} {words} {_value(condition[test])}"
    if "given" in condition:
        return _given(str(name), not condition["given"])
    said = in_words(condition)
    return f"not ({said})" if " " in said else f"not {said}"


def _given(name: str, given: bool) -> str:
    return f"{name} is {'' if given else 'not '}given"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value["key"])
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
