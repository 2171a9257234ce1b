"""Messages for wrong values: the given value, the expected type, and the remedy."""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from whet.config.keys import Path, did_you_mean, distance, dotted, lookup, within, words
from whet.config.scalars import scalar
from whet.config.sections.base import Section
from whet.config.tree import get, stage_names
from whet.secrets import redact
from whet.tables import near
from whet.types import ConfigError, DataError, Json, WhetError

MOST_TOLD = 100
"""Maximum number of problems of one config that are listed: suggestions for many keys take long."""


class Refused(ConfigError):
    """All problems of one config."""

    def __init__(self, problems: Iterable[tuple[str, str]], what: str) -> None:
        """problems: (place, text) of each; what: the config, in words."""
        self.problems = tuple(sorted(problems, key=lambda p: _line(p[0])))
        super().__init__(listing(self.problems, what))


@dataclass(frozen=True)
class Fault:
    """One problem of one key."""

    path: Path
    text: str


def faults(tree: Json, error: ValidationError) -> list[Fault]:
    """The problems that pydantic found in these plain values, one fault per key, in the order of the schema."""
    found: dict[Path, Fault] = {}
    details = error.errors(include_url=False, include_context=False)
    for detail in details[:MOST_TOLD]:
        fault = _fault(tree, detail)
        found.setdefault(fault.path, fault)
    if len(details) > MOST_TOLD:
        path = details[MOST_TOLD]["loc"]
        found.setdefault(path, Fault(path, f"and {len(details) - MOST_TOLD} more problems after this one"))
    return list(found.values())


def _fault(tree: Json, detail: ErrorDetails) -> Fault:
    loc, kind = detail["loc"], detail["type"]
    if kind == "extra_forbidden":
        return Fault(loc, f"unknown key{did_you_mean(loc)}")
    if kind == "missing" and lookup(loc):
        return Fault(loc, f"must be given: {_expected(loc)}")
    path = max((loc[:n] for n in range(len(loc) + 1) if lookup(loc[:n])), key=len, default=loc)
    return Fault(path, mismatch(get(tree, path), path))


def argument_problems(at: str, section: type[Section], given: Json) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of arguments that a section describes. at: the key that they stand at."""
    try:
        section.model_validate_json(json.dumps(given))
    except ValidationError as error:
        found: dict[Path, str] = {}
        for detail in error.errors(include_url=False, include_context=False):
            path, text = _argument_fault(section, given, detail)
            found.setdefault(path, text)
        yield from ((f"{at}.{dotted(path)}" if path else at, text) for path, text in found.items())


def _argument_fault(section: type[Section], given: Json, detail: ErrorDetails) -> tuple[Path, str]:
    loc = detail["loc"]
    if detail["type"] == "extra_forbidden":
        around = within(section, loc[:-1])
        known = (around.section if around and around.section else section).model_fields
        return loc, f"unknown key{near(str(loc[-1]), known)}; expected {', '.join(known)}"
    depth = next((n for n in range(len(loc), 0, -1) if within(section, loc[:n])), 0)
    key = within(section, loc[:depth])
    wanted = words(key.annotation if key else section)
    if detail["type"] == "missing":
        return loc, f"must be given: {wanted}"
    return loc[:depth], f"got {shown(get(given, loc[:depth]))}, expected {wanted}"


def mismatch(value: Json, path: Path) -> str:
    """The message for a wrong value: 'got "8", expected a whole number >= 1 (rollouts of one task); write 8'."""
    return f"got {shown(value)}, expected {_expected(path)}{_hint(value, path)}"


def _expected(path: Path) -> str:
    key = lookup(path)
    assert key is not None
    first = key.description.replace("\n", " ").partition(". ")[0].rstrip(".")
    start = first[:1] if first[1:2].isupper() else first[:1].lower()  # CPU stays CPU
    return f"{key.words} ({start}{first[1:]})" if first else key.words


def _hint(value: Json, path: Path) -> str:
    """The remedy, where there is one."""
    key = lookup(path)
    assert key is not None
    wanted = set(_parts(key.annotation))
    choices = [c for w in wanted if get_origin(w) is Literal for c in get_args(w) if isinstance(c, str)]
    if value is None:
        return "; leave the key out for the default" if not key.required else ""
    if isinstance(value, str):
        return _text_hint(value, wanted, choices)
    if isinstance(value, bool) and choices:
        return "; put the text in quotes" if {"on", "off"} & set(choices) else ""
    if isinstance(value, float) and int in wanted and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, int | float) and str in wanted:
        return f'; write "{shown(value)}"'
    if not isinstance(value, list | dict) and tuple in wanted:
        return f"; write a list: [{shown(value)}]"
    return ""


def _text_hint(value: str, wanted: set[Any], choices: list[str]) -> str:
    try:
        number = scalar(value.strip().replace("_", "").replace(",", ""))
    except ValueError:  # a number that no key accepts
        return ""
    if isinstance(number, int | float) and not isinstance(number, bool) and wanted & {int, float}:
        bare = int(number) if int in wanted and float(number).is_integer() else number
        return f"; the value is text: write {bare} without quotes (from the environment: ${{oc.decode:...}})"
    if bool in wanted or choices == ["on", "off"]:
        word = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(value.lower(), value.lower())
        return f"; write {word} without quotes" if word in ("true", "false") else ""
    nearest = min(((distance(value.lower(), c.lower()), c) for c in choices), default=(3, ""))
    if nearest[0] <= 2:
        return f"; did you mean '{nearest[1]}'?"
    return f"; write a list: [{shown(value)}]" if tuple in wanted and str not in wanted else ""


def _parts(annotation: Any) -> list[Any]:
    """The plain types that a value may have: int, float, bool, str, tuple, dict, Literals, sections."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _parts(arguments[0])
    if origin in (Union, types.UnionType):
        return [part for a in arguments for part in _parts(a)]
    if origin in (tuple, dict):
        return [origin]
    return [annotation]


# ---------------------------------------------------------------- showing


_MOST_SHOWN, _BEFORE = 60, 20
_MOST_OVERRIDE = 200


def shown(value: Json) -> str:
    """A value in the form of a config file, truncated where it is long."""
    return _excerpt(_whole(value), 0)


def shown_change(old: Json, new: Json) -> str:
    """Both values, from a little before their first difference where they are long."""
    texts = _whole(old), _whole(new)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts)))
    begin = max(0, common - _BEFORE)
    return " -> ".join(_excerpt(text, begin) for text in texts)


def _whole(value: Json) -> str:
    return redact(
        json.dumps(value, ensure_ascii=False)
    )  # before truncation: a part of a secret is not recognised


def _excerpt(text: str, begin: int) -> str:
    if len(text) <= _MOST_SHOWN:
        return text
    before, rest = ("..." if begin else ""), text[begin:]
    room = _MOST_SHOWN - len(before)
    return before + (rest if len(rest) <= room else rest[: room - 3] + "...")


def place_of_override(text: str) -> str:
    """Where an override gives its value: the override itself, truncated where it is long."""
    text = redact(text)
    return f"override {text if len(text) <= _MOST_OVERRIDE else text[: _MOST_OVERRIDE - 3] + '...'}"


def named(path: Path, tree: Json) -> str:
    """The key in readable form: `data.train[0].path`, `stages[1] ('rl').train.steps`."""
    if len(path) > 1 and path[0] == "stages" and isinstance(path[1], int) and isinstance(tree, dict):
        label = _stage(stage_names(tree), path[1])
        return label + ("." + dotted(path[2:]) if len(path) > 2 else "")
    return dotted(path)


def _stage(names: Sequence[str], number: int) -> str:
    """A stage in readable form: `stages[1] ('rl')`; without a name `stages[1]`."""
    return f"stages[{number}]" + (f" ('{names[number]}')" if names[number] else "")


def by_stage(names: Sequence[str], found: Sequence[Sequence[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    """(key, text with the key in it): what all stages have in common once, the rest by stage.

    names: of the stages. found: (key, what is wrong with it) in each of them."""
    for n, problems in enumerate(found):
        for problem in problems:
            key, text = problem
            if all(problem in others for others in found):
                if n == 0:
                    yield key, f"{key}: {text}"
            else:
                yield f"stages[{n}].{key}", f"{_stage(names, n)}.{key}: {text}"


@contextmanager
def of_stage(names: Sequence[str], number: int) -> Iterator[None]:
    """A ConfigError or DataError from within begins with the stage, `stages[1] ('rl'): ...`, where it is one of several
    and the message does not name it already. names: of all stages."""
    try:
        yield
    except (ConfigError, DataError) as error:
        told, name = str(error), names[number]
        named_already = (f"stages[{number}]", f"stages.{name}.", f"stage {name!r}")
        if len(names) > 1 and not any(form in told for form in named_already):
            error.args = (f"{_stage(names, number)}: {told}",)
        raise


_TOLD = (ConfigError, DataError)


class EachStage:
    """For stages that are looked at one after the other, each in `with stage(n)`: an error of Config or Data that all
    of them have is raised once, without a stage; another one as `of_stage` has it. names: of all stages."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.failed: list[tuple[int, ConfigError | DataError]] = []
        """The stages that have failed so far, all with the same error."""

    def __enter__(self) -> EachStage:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.failed or (
            kind is not None and (issubclass(kind, _TOLD) or not issubclass(kind, WhetError))
        ):
            return
        # where a later stage has ended otherwise, the first error is told
        self._raise(in_common=kind is None and len(self.failed) == len(self.names))

    @contextmanager
    def __call__(self, number: int) -> Iterator[None]:
        """What is done for one stage."""
        before = len(self.failed)
        try:
            yield
        except _TOLD as error:
            self.failed.append((number, error))
        if before and (len(self.failed) == before or str(self.failed[-1][1]) != str(self.failed[0][1])):
            self._raise(in_common=False)

    def _raise(self, *, in_common: bool) -> None:
        number, error = self.failed[0]
        if in_common:
            raise error
        with of_stage(self.names, number):
            raise error


def listing(problems: Iterable[tuple[str, str]], what: str) -> str:
    """One message with all problems, (place, text) each, in the order of the lines of the file."""
    ordered = sorted(problems, key=lambda p: _line(p[0]))
    count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
    return "\n".join(
        [f"{count} in {what}:", *(f"  {place}: {text}" if place else f"  {text}" for place, text in ordered)]
    )


def _line(place: str) -> float:
    number = place.rpartition(":")[2]
    return int(number) if number.isdecimal() and not place.startswith("override ") else float("inf")
