"""The table of rules over a foreign file's values: when a function is asked at all, which values it refuses, and what
it gives where that needs no computation.

`rules.tsv` has a line for each rule; `#` begins a comment. The columns:

    system    whose values
    function  `module.function` of the system's package, which the rule stands before; one that has only rules need not
              be there
    rule      read: the lines and the function behind it are asked only when the condition holds, else their keys rest.
              refused: never together. coming: not built yet. others: a file for models that are no language models.
              set: a native key has a value then. add: its list has this entry more. instead: another function, with
              its own rules, is asked in place of what is behind the line
    when      the condition, in the words of `whet.config.conditions`: `trainer.resume_mode is from_path and ...`. Its
              names are keys of the file, functions of the package (`roles.has_critic`), or `since_0.8.0` for a file
              that is read as that release or a newer one. A value may be compared with another key's. Empty: always
    native    of set and add: the native key
    text      of these: its value or entry, {key} for that of a key, {key:as CHOICE} for what choices.tsv says of it,
              else JSON or a word. Of what is refused: what is said, in the system's own words. Values may stand in
              both: {key}, {key!r}, or {key:shown} as YAML. Of instead: the other function

A function's rules are asked in the order of their lines; the first that does not let it pass ends the matter. What is
set, and what the function of the package gives, if there is one, are its native keys.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from whet.config.conditions import holds, parsed
from whet.config.faults import shown
from whet.dialects.row import AnotherModel, Native, NotSupportedYet, Values
from whet.dialects.typed import choices, choose
from whet.dialects.versions import VERSIONS, since
from whet.tables import lines
from whet.types import ConfigError, Json

Function = Callable[[Values], Native]
"""The foreign values to native ones, by dotted native key. Raises ConfigError in the foreign system's own words,
`NotSupportedYet` for what that system has and whet has not yet."""

ERRORS: Mapping[str, type[ConfigError]] = {
    "refused": ConfigError,
    "coming": NotSupportedYet,
    "others": AnotherModel,
}
VALUE = re.compile(r"\{([^{}:!]+)(!r|:shown)?(?::as ([^{}]+))?\}")
_AS: Mapping[str, Callable[[Json], str]] = {"!r": repr, ":shown": shown}


@functools.cache
def function(system: str, name: str) -> Function:
    """`module.function` of a system's package, with its rules before it."""
    rules, found = rules_of(system).get(name, ()), _named(system, name)
    if found is None and not rules:
        raise ValueError(f"{system}: there is no function {name}, and no rule of it")

    def ruled(values: Values) -> Native:
        out: dict[str, Json] = {}
        for line in rules:
            holds = condition(system, line["when"])(values)
            if line["rule"] == "read" and not holds:
                return out
            if line["rule"] == "set" and holds:
                out[line["native"]] = _given(system, line["text"], values)
            elif line["rule"] == "add" and holds:
                out[line["native"]] = [*out.get(line["native"], ()), _given(system, line["text"], values)]
            elif line["rule"] == "instead" and holds:
                return {**out, **function(system, line["text"])(values)}
            elif line["rule"] in ERRORS and holds:
                raise ERRORS[line["rule"]](_filled(system, line["text"], values))
        return {**out, **found(values)} if found else out

    return ruled if rules else found or ruled


@functools.cache
def condition(system: str, words: str) -> Callable[[Values], bool]:
    """Whether what the words say of a file's values is so."""
    told = parsed(words) if words else {"all": ()}
    return lambda values: holds(
        told,
        lambda _, name: _value(system, name, values),
        lambda said: _wanted(system, said, values),
    )


@functools.cache
def rules_of(system: str) -> dict[str, list[dict[str, str]]]:
    """The lines of rules.tsv, by the function that they stand before."""
    found: dict[str, list[dict[str, str]]] = {}
    for line in lines(__package__, "rules.tsv"):
        if line["system"] == system:
            found.setdefault(line["function"], []).append(line)
    return found


@functools.cache
def _named(system: str, name: str) -> Callable[[Values], Any] | None:
    """A function of the package; None for what is none: a key of the file."""
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(f"{__package__}.{system}.{module}"), attribute, None)
    except ModuleNotFoundError:
        return None
    return found if callable(found) else None


def _value(system: str, name: str, values: Values) -> Json:
    """What a name stands for: the value of a key, or of a fact. A key of other versions alone is null."""
    if name in values:
        return values[name]
    if name.startswith("since_"):
        wanted = name.removeprefix("since_")
        return since(values, system, next(at for at in VERSIONS[system] if at.replace("-", "_") == wanted))
    fact = _named(system, name)
    return fact(values) if fact else None


def _wanted(system: str, said: Any, values: Values) -> Any:
    """What a value is compared with: another key's or a fact's, where it is the dotted name of one."""
    is_name = isinstance(said, str) and "." in said and (said in values or _named(system, said) is not None)
    return _value(system, said, values) if is_name else said


def _filled(system: str, text: str, values: Values, write: Callable[[Json], str] = str) -> str:
    """A text with the values that stand in it, written by `write` where it does not say how."""
    return VALUE.sub(
        lambda found: (_AS[found[2]] if found[2] else write)(_value(system, found[1], values)), text
    )


def _given(system: str, text: str, values: Values) -> Json:
    """The value that a text stands for."""
    if found := VALUE.fullmatch(text):
        value = _value(system, found[1], values)
        return choose({found[1]: value}, found[1], choices(system, found[3])) if found[3] else value
    if text.startswith(("[", '{"')):
        return json.loads(_filled(system, text, values, json.dumps))
    plain = _filled(system, text, values)
    try:
        return json.loads(plain)
    except ValueError:
        return plain
