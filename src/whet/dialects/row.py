"""One row of a system's table: what a foreign key means here, as its TSV says it.

A key that a file leaves out has the default of its row, so a file with two keys means here what it means there. The
columns, tab-separated, one line a key (and span of versions):

    file      the kind of file that has the key (`ppo`, `sft`); empty where the system has one kind
    key       dotted, as the system spells it; `[]` any entry of a list, `<name>` any name, a last `*` any keys below
    since     the first version that has it so; empty: the first that whet reads
    until     the first version that has it no more, or otherwise; empty: it is there still. The same as `since`: a
              line for the versions before, which have not the key but behave as if it had this default
    type      what a value must be (`kinds.py`); empty: the kind of its default
    default   JSON; of an alias: what the system's own document has under this name, which says nothing beside the
              other name
    harmless  JSON: of `derived`, `coming` and `refused`, values beside the default that change nothing here
    status    see `Status`; `alias` and `base` are lines that are no rows
    native    the native keys that it feeds, split by `;`; of an alias the present key
    function  of `translated` and `derived`: `module.function` in the system's package, called once for all its rows;
              its rules stand in rules.tsv (`rules.py`)
    when      a condition in the words of `rules.py`: the row counts only then, and rests else; in words for people it
              stands in conditions.tsv
    area      of `coming`: the feature that is not there
    reason    for people: how it is translated, why it cannot matter, what to write instead
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

from whet import tables
from whet.types import ConfigError, Json

Status = Literal["mapped", "translated", "derived", "coming", "refused"]
"""mapped: the same meaning under another name. translated: a function computes native keys from it and others. derived:
it follows from other keys here, and a value of its type that says otherwise is refused.
coming: its feature is not built. refused: never done here."""

WRITES: tuple[Status, ...] = ("mapped", "translated")
"""Statuses of keys that native keys come from."""

READ: tuple[Status, ...] = (*WRITES, "derived")
"""Statuses of keys whose values mean something here, and so must be of their kind."""

ALIAS = "alias"
"""The status of a line that is no row: another name of a key."""

BASE = "base"
"""The status of a line that is no row: the default that a key has in another document for this kind of file, which
stands in `file`."""

Values = Mapping[str, Json]
"""All values of a foreign file by dotted key, defaults filled in."""

Native = Mapping[str, Json]
"""Values by dotted native key (`data.train.0.path`)."""

NOTHING: Native = {}
"""What a function gives that only checks."""


class VersionRange(NamedTuple):
    """Versions: `since` inclusive, `until` exclusive, '' without an end."""

    since: str
    until: str


class Reference(str):
    """A text of a translation that the config resolves, as ${oc.env:NAME}; any other text stands for itself."""


class NotSupportedYet(ConfigError):
    """A value that asks for an engine or a feature that is not built yet."""

    def __init__(self, said: str, *, area: str = "", key: str = "", value: Json = None) -> None:
        """area: the feature by its name in the table, under which it is told together with other keys that ask for it;
        then with the key and its value."""
        super().__init__(said)
        self.area, self.key, self.value = area, key, value


class AnotherModel(ConfigError):
    """A file for models that are no language models. Nothing else in it is judged, and no rehearsal can try it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one foreign key means. The fields are the columns."""

    key: str
    status: Status
    default: Json
    file: str = ""
    since: str = ""
    until: str = ""
    type: str = ""
    harmless: tuple[Json, ...] = ()
    native: tuple[str, ...] = ()
    function: str = ""
    when: str = ""
    area: str = ""
    reason: str = ""

    @property
    def what(self) -> str:
        """What happens with the key, for people: the reason, or the feature that is not there."""
        return ": ".join(filter(None, (self.area, self.reason)))


@functools.cache
def lines(system: str) -> tuple[dict[str, str], ...]:
    """The lines of a system's table as they stand."""
    return tables.lines(__package__, f"{system}.tsv")


@functools.cache
def unbuilt(system: str) -> dict[str, tuple[str, ...]]:
    """By key: its documented values that are refused though the key is read, each with the reason. For people; the
    functions refuse them."""
    found: dict[str, tuple[str, ...]] = {}
    for line in tables.lines(__package__, "unbuilt.tsv"):
        if line["system"] == system:
            said = f"{line['value']}: {line['reason']}"
            found[line["key"]] = (*found.get(line["key"], ()), said)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where whet knowingly computes or does something else than a system. The fields are columns of differs.tsv."""

    file: str
    key: str
    since: str
    until: str
    values: str
    """JSON: for these values alone; with a `!` before: for all others; empty: for any."""
    when: str
    """As of a row."""
    reason: str

    def of_value(self, value: Json) -> bool:
        """Whether this value is one of those that differ."""
        if not self.values:
            return True
        listed: list[Json] = json.loads(self.values.removeprefix("!"))
        alike = any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in listed)
        return alike is not self.values.startswith("!")


@functools.cache
def differences(system: str) -> tuple[Difference, ...]:
    """The known differences to a system, in the order of the file."""
    names = [each.name for each in fields(Difference)]
    return tuple(
        Difference(**{name: line[name] for name in names})
        for line in tables.lines(__package__, "differs.tsv")
        if line["system"] == system
    )


@functools.cache
def rows(system: str) -> tuple[Row, ...]:
    """The rows of a system's table, in its order."""
    return tuple(row(line) for line in lines(system) if line["status"] not in (ALIAS, BASE))


class BaseDefault(NamedTuple):
    """A default of another document, in a span of versions."""

    file: str
    key: str
    since: str
    until: str
    default: Json


@functools.cache
def base_defaults(system: str) -> tuple[BaseDefault, ...]:
    """The defaults of other documents than the tables', in the order of the file."""
    return tuple(
        BaseDefault(line["file"], line["key"], line["since"], line["until"], json.loads(line["default"]))
        for line in lines(system)
        if line["status"] == BASE
    )


def row(line: Mapping[str, str]) -> Row:
    """One line as a row."""
    status = line["status"]
    if status not in get_args(Status):
        raise ValueError(f"{line['key']}: status {status}, expected one of {', '.join(get_args(Status))}")
    read = {
        "default": json.loads(line["default"] or "null"),
        "harmless": tuple(json.loads(line["harmless"] or "[]")),
        "native": tuple(filter(None, line["native"].split(";"))),
    }
    return Row(**{column.name: read.get(column.name, line[column.name]) for column in fields(Row)})


def aliases(system: str, files: Collection[str]) -> dict[str, tuple[str, str]]:
    """Other names of the keys in kinds of file: the newer or deprecated name -> (the present one, a note). Those
    without a `file` are of all kinds."""
    return {
        line["key"]: (line["native"], line["reason"])
        for line in lines(system)
        if line["status"] == ALIAS and line["file"] in ("", *files)
    }


def alias_defaults(system: str) -> dict[str, Json]:
    """By other name: what the system's own document has under it, where that is not null."""
    return {
        line["key"]: json.loads(line["default"])
        for line in lines(system)
        if line["status"] == ALIAS and line["default"]
    }


def spans(system: str, files: Collection[str]) -> dict[str, list[VersionRange]]:
    """The versions that have each key or other name in kinds of file."""
    found: dict[str, list[VersionRange]] = {}
    for line in lines(system):
        if line["file"] in ("", *files):
            found.setdefault(line["key"], []).append(VersionRange(line["since"], line["until"]))
    return found
