"""Conditions on a config: plain data, which checks, forms, the JSON schema and the documentation read, and their words.

    {"key": "algorithm.kl.coef", "above": 0}          a value of the config
    {"condition": "needs_critic"}                     something that follows from it, by name
    {"condition": "loss.rec_weight", "is": "none"}    a setting of its advantage or loss, given or not; else null
    {"all": [...]}, {"any": [...]}, {"not": ...}      of other conditions

A value passes a test: "is", "in" (one of), "above", "at_least", "multiple_of", "given" (not null, not empty), "holds"
(a list with one of these in it), "longer" (a list of more entries than this). Without a test it must be true. It may be
compared with another key's value: {"key": "a", "above": {"key": "b"}}.

`in_words` writes a condition as words, `parsed` reads it from them: `rollout.engine is hf and not needs_critic`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from whet.config.schema import Config, Section
from whet.types import Json

Condition = Mapping[str, Any]


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
    "given": lambda value, wanted: (value not in (None, "", (), [], {})) == wanted,
    "holds": lambda value, wanted: bool(set(_entries(value)) & set(wanted)),
    "longer": lambda value, limit: len(_entries(value)) > limit,
}


def _entries(value: Any) -> Any:
    """Of a list or text; of a wrong value, which its own check names, none."""
    return value if isinstance(value, list | tuple | dict | str) else ()


def met(condition: Condition, cfg: Config, named: Mapping[str, Json]) -> bool:
    """Whether a condition holds in one stage's config; named: the value of each named condition."""
    return holds(condition, lambda kind, name: value_at(cfg, name) if kind == "key" else named.get(name))


def holds(
    condition: Condition,
    value_of: Callable[[str, str], Any],
    wanted: Callable[[Any], Any] = lambda said: said,
) -> bool:
    """Whether a condition holds. value_of: ("key" or "condition", its name) -> its value. wanted: what a test compares
    with, from what the condition says."""
    if "all" in condition:
        return all(holds(part, value_of, wanted) for part in condition["all"])
    if "any" in condition:
        return any(holds(part, value_of, wanted) for part in condition["any"])
    if "not" in condition:
        return not holds(condition["not"], value_of, wanted)
    kind = "key" if "key" in condition else "condition"
    value = value_of(kind, condition[kind])
    test = next((name for name in TESTS if name in condition), None)
    if test is None:
        return bool(value)
    with_ = condition[test]
    return TESTS[test](value, value_of("key", with_["key"]) if isinstance(with_, Mapping) else wanted(with_))


def value_at(cfg: Section, key: str) -> Any:
    """The value of a dotted key; None below a section that is not there, and for a setting that a table lacks."""
    value: Any = cfg
    for name in key.split("."):
        if isinstance(value, Section):
            value = getattr(value, name)
        else:  # a name, or a table of settings
            value = value.get(name) if isinstance(value, Mapping) else None
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


WORDS = (
    ("given", "is given", "is not given"),
    ("in", "is one of", "is not one of"),
    ("multiple_of", "is a multiple of", "is not a multiple of"),
    ("is", "is", "is not"),
    ("at_least", ">=", "<"),
    ("above", ">", "<="),
    ("holds", "contains", ""),
    ("longer", "has more entries than", ""),
)
"""Each test: its words, and those of its opposite if it has any."""


def in_words(condition: Condition) -> str:
    """`rollout.engine is hf and not needs_critic`."""
    if "not" in condition:
        if denied := _tested(condition["not"], 2):
            return denied
        said = in_words(condition["not"])
        return f"not ({said})" if " " in said else f"not {said}"
    for several, joint in (("all", " and "), ("any", " or ")):
        if several in condition:
            parts = [
                f"({in_words(c)})" if c.keys() & {"all", "any"} else in_words(c) for c in condition[several]
            ]
            return joint.join(parts) or "never"
    return _tested(condition, 1) or str(condition.get("key") or condition["condition"])


def _tested(condition: Condition, column: int) -> str:
    """A value's test (column 1) or its opposite (column 2) in words; '' where there are none."""
    for row in WORDS:
        if row[0] in condition and row[column]:
            wanted = condition[row[0]]
            if row[0] == "given":
                words, value = row[column if wanted else 3 - column], ""
            else:
                words, value = row[column], f" {_value(wanted)}"
            return f"{condition.get('key') or condition['condition']} {words}{value}"
    return ""


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value["key"])
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def parsed(
    words: str,
    defined: Mapping[str, Condition] | None = None,
    lists: Mapping[str, Sequence[str]] | None = None,
) -> Condition:
    """The condition that is written as words. defined: conditions with names of their own; lists: names that stand for
    several values after `is one of` and `contains`. Raises ValueError."""
    tokens = re.findall(r"[()]|[^\s()]+", words)
    found = _joined(tokens, defined or {}, lists or {})
    if tokens:
        raise ValueError(f"{words!r}: expected and, or, or the end at {' '.join(tokens)!r}")
    return found


def _joined(
    tokens: list[str],
    defined: Mapping[str, Condition],
    lists: Mapping[str, Sequence[str]],
    joints: tuple[tuple[str, str], ...] = (("or", "any"), ("and", "all")),
) -> Condition:
    """The first condition of the tokens, which are used up: `and` binds more closely than `or`."""
    if not joints:
        return _one(tokens, defined, lists)
    (word, several), *closer = joints
    parts = [_joined(tokens, defined, lists, tuple(closer))]
    while tokens[:1] == [word]:
        del tokens[0]
        parts.append(_joined(tokens, defined, lists, tuple(closer)))
    return parts[0] if len(parts) == 1 else {several: parts}


def _one(
    tokens: list[str], defined: Mapping[str, Condition], lists: Mapping[str, Sequence[str]]
) -> Condition:
    name = tokens.pop(0) if tokens else ""
    if name == "not":
        return no(_one(tokens, defined, lists))
    if name == "(":
        inner = _joined(tokens, defined, lists)
        if tokens[:1] != [")"]:
            raise ValueError(f"expected ) before {' '.join(tokens)!r}")
        del tokens[0]
        return inner
    if name == "never":
        return {"any": []}
    if name in defined:
        return defined[name]
    if not re.fullmatch(r"[a-z][\w.*]*", name) or name in ("and", "or"):
        raise ValueError(f"{name!r}: expected the name of a key or a fact")
    said = list(takewhile(lambda token: token not in ("and", "or", ")"), tokens))
    del tokens[: len(said)]
    subject = {"key" if name.split(".")[0] in Config.model_fields else "condition": name}
    return _with_test(subject, " ".join(said), lists)


def _with_test(subject: Condition, said: str, lists: Mapping[str, Sequence[str]]) -> Condition:
    if not said:
        return subject
    for test, *both in WORDS:
        for words in sorted(filter(None, both), key=len, reverse=True):
            if not f"{said} ".startswith(f"{words} "):
                continue
            found = {**subject, test: _read(test, said[len(words) :].strip(), lists)}
            denied = words == both[1]
            return {**subject, test: not denied} if test == "given" else {"not": found} if denied else found
    raise ValueError(
        f"{next(iter(subject.values()))} {said}: expected one of the tests {[row[1] for row in WORDS]}"
    )


def _read(test: str, said: str, lists: Mapping[str, Sequence[str]]) -> Any:
    """The value that a test compares with."""
    if test in ("in", "holds"):
        return [value for name in said.split(", ") for value in lists.get(name, [_scalar(name)])]
    value = _scalar(said)
    return {"key": value} if test in ("above", "at_least") and isinstance(value, str) else value


def _scalar(said: str) -> Json:
    try:
        value: Json = json.loads(said)
    except ValueError:
        return said
    return value
