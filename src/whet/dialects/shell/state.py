"""What is known at a place of a script: variables, functions, arguments; and what is not known, with the reason.

A value that cannot be known without running something stands in text as one private character, whose meaning `Unknowns`
keeps. So it goes through every assignment and quotation like any other text, and is asked about only where it arrives.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal as Says

from whet.dialects.shell.nodes import Command, Substitution
from whet.types import ConfigError

MOST_STEPS = 10_000
MOST_TEXT = 4 * 2**20
_FIRST = 0x100000
_MARK = re.compile("[\U00100000-\U0010ffff]")

Kind = Says["unset", "granted", "refused"]
"""unset: of a variable without a value; granted: a stand-in will do, and is told; refused: a launch cannot have it."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A piece of text that is not known."""

    kind: Kind
    shown: str
    """What stands for it."""
    line: int
    why: str
    name: str = ""
    """The variable, where it is unset."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """The status of a command that was not run."""

    line: int
    what: str
    guess: bool | None = None
    """What it is taken for: success, failure, neither."""


Status = int | Doubt


@dataclass(frozen=True, slots=True)
class Field:
    """One word after expansion, and the line it was written in. 0: given by the caller."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Variable:
    value: str | Mapping[int | str, Field]
    exported: bool = False
    whole: bool = False
    """declare -i"""
    keyed: bool = False
    """declare -A"""

    @property
    def text(self) -> str | None:
        """The value as `$name` gives it: of an array, its element 0."""
        if isinstance(self.value, str):
            return self.value
        first = self.value.get(0, self.value.get("0"))
        return first.text if first else None


@dataclass(frozen=True, slots=True)
class Note:
    """What was skipped or taken for granted."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Start:
    """A command that may be the trainer."""

    fields: tuple[Field, ...]
    line: int
    environment: Mapping[str, str]
    doubt: str = ""
    """Why another one may be started in its place."""

    @property
    def texts(self) -> list[str]:
        return [field.text for field in self.fields]


@dataclass(frozen=True, slots=True)
class Written:
    """A file that the script would write."""

    path: str
    line: int


Event = Note | Start | Written


class Unknowns:
    """The meanings of the private characters of one reading."""

    def __init__(self) -> None:
        self.known: list[Unknown] = []
        self.marks: dict[Unknown, str] = {}

    def mark(self, unknown: Unknown) -> str:
        """The character that stands for it; the same for the same."""
        if unknown not in self.marks:
            self.marks[unknown] = chr(_FIRST + len(self.known))
            self.known.append(unknown)
        return self.marks[unknown]

    def of(self, text: str) -> list[Unknown]:
        return [self.known[ord(c) - _FIRST] for c in _MARK.findall(text)]

    def shown(self, text: str) -> str:
        """With stand-ins for what is not known."""
        return _MARK.sub(lambda m: self.known[ord(m[0]) - _FIRST].shown, text) if self.any(text) else text

    def named(self, text: str) -> str:
        """For people: `${NAME}` for what is unset, `[?]` for what is not known."""

        def name(found: re.Match[str]) -> str:
            unknown = self.known[ord(found[0]) - _FIRST]
            return f"${{{unknown.name}}}" if unknown.name else unknown.shown or "[?]"

        return _MARK.sub(name, text)

    def any(self, text: str) -> bool:
        return not text.isascii() and _MARK.search(text) is not None

    def firm(self, text: str) -> bool:
        """Whether a test of the text can be answered: an unset variable is empty to it."""
        return not self.any(text) or all(u.kind == "unset" for u in self.of(text))

    def derived(self, result: str, sources: Iterable[str]) -> str:
        """A result that was computed of the shown texts of `sources`: as unknown as the least known of them."""
        found = [u for text in sources for u in self.of(text)]
        if not found:
            return result
        order = ("refused", "unset", "granted")
        worst = min(found, key=lambda u: order.index(u.kind))
        return self.mark(Unknown(worst.kind, result, worst.line, worst.why, worst.name))


def holds_marks(text: str) -> bool:
    """Whether text from outside has characters that are used here."""
    return _MARK.search(text) is not None


@dataclass
class Budget:
    """What one reading may take in all."""

    steps: int = 0
    text: int = 0

    def step(self, line: int) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise ConfigError(
                f"line {line}: the script takes more than {MOST_STEPS} steps; is a loop endless?"
            )

    def grow(self, length: int, line: int) -> None:
        self.text += length
        if self.text > MOST_TEXT:
            raise ConfigError(f"line {line}: the script makes more than {MOST_TEXT // 2**20} MiB of text")


@dataclass
class State:
    """A place in the script."""

    name: str
    """$0"""
    variables: dict[str, Variable]
    positional: list[Field]
    cwd: str
    exists: Callable[[str], bool]
    substitute: Callable[[State, Substitution], str]
    """Runs nothing: gives the output of commands whose output is known."""
    unknowns: Unknowns = field(default_factory=Unknowns)
    budget: Budget = field(default_factory=Budget)
    functions: dict[str, Command] = field(default_factory=dict)
    frames: list[dict[str, Variable | None]] = field(default_factory=list)
    """What `local` hid, for each function that is being run."""
    options: frozenset[str] = frozenset()
    status: Status = 0
    inner: Status | None = None
    """The status of the last substitution in the command at hand."""
    output: list[str] | None = None
    """Standard output, where it is kept."""
    given: str | None = None
    """Standard input, where it is known."""
    events: list[Event] = field(default_factory=list)
    dropped: list[tuple[str, int]] = field(default_factory=list)
    """(variable, line) of words that were nothing but an unset variable, of the command at hand."""
    sourced: list[int] = field(default_factory=list)
    """Lines that read other files, which are not read here."""
    said: str = ""
    """The last thing that was printed."""
    returns: Doubt | None = None
    """Why the function at hand may have returned before."""
    depth: int = 0

    def fork(self) -> State:
        """A copy for commands that change nothing here, or may not be run. Its events are its own."""
        other = copy.copy(self)
        other.variables, other.functions = dict(self.variables), dict(self.functions)
        other.positional, other.frames = list(self.positional), [dict(frame) for frame in self.frames]
        other.output = None if self.output is None else list(self.output)
        other.events, other.sourced = [], list(self.sourced)
        return other

    def adopt(self, other: State) -> None:
        """Become a fork."""
        events = self.events + other.events
        self.__dict__.update(other.__dict__)
        self.events = events

    def note(self, line: int, text: str) -> None:
        self.events.append(Note(line, text))

    # ---------------------------------------------------------------- not known

    def unset(self, name: str, line: int) -> str:
        return self.unknowns.mark(Unknown("unset", "", line, f"${name} is not set", name))

    def granted(self, shown: str, line: int, what: str) -> str:
        return self.unknowns.mark(Unknown("granted", shown, line, what))

    def refused(self, line: int, why: str) -> str:
        return self.unknowns.mark(Unknown("refused", "", line, why))

    # ---------------------------------------------------------------- variables

    def get(self, name: str) -> str | None:
        """The text of a variable; None where it is unset."""
        found = self.variables.get(name)
        return found.text if found else None

    def shown(self, name: str) -> str:
        """The text of a variable as a test sees it."""
        return self.unknowns.shown(self.get(name) or "")

    def set(self, name: str, value: str | Mapping[int | str, Field], *, export: bool | None = None) -> None:
        old = self.variables.get(name)
        exported = export if export is not None else bool(old and old.exported) or "allexport" in self.options
        if isinstance(value, str) and old and not isinstance(old.value, str):
            value = {**old.value, 0: Field(value, 0)}
        if old is None:
            self.variables[name] = Variable(value, exported)
        else:
            self.variables[name] = replace(old, value=value, exported=exported)

    def hide(self, name: str) -> None:
        """`local`: what it was comes back when the function returns."""
        if self.frames and name not in self.frames[-1]:
            self.frames[-1][name] = self.variables.pop(name, None)

    def environment(self) -> dict[str, str]:
        """What a program that is started now sees."""
        found = ((name, v.text) for name, v in self.variables.items() if v.exported)
        return {name: text for name, text in found if text is not None}

    # ---------------------------------------------------------------- two ways at once

    def differs(self, other: State) -> bool:
        """Whether another way of getting here has left anything else."""
        mine = (self.variables, self.positional, self.cwd, self.output, self.functions, self.options)
        return mine != (
            other.variables,
            other.positional,
            other.cwd,
            other.output,
            other.functions,
            other.options,
        )

    def join(self, other: State, doubt: Doubt) -> None:
        """Either this or the other is the case: what differs is known no more."""
        why = f"it depends on `{doubt.what}` in line {doubt.line}, which is not run"
        mark = self.refused(doubt.line, why)
        for name in self.variables.keys() | other.variables.keys():
            mine, its = self.variables.get(name), other.variables.get(name)
            if mine != its:
                some = mine or its
                array = some is not None and not isinstance(some.value, str)
                exported = bool(mine and mine.exported) or bool(its and its.exported)
                self.variables[name] = Variable({0: Field(mark, doubt.line)} if array else mark, exported)
        if self.positional != other.positional:
            self.positional = [Field(mark, doubt.line)]
        if self.output != other.output:
            self.output = [mark]
        if self.cwd != other.cwd:
            self.cwd = self.unknowns.derived(".", [mark])
        self.functions |= other.functions
        self.sourced = sorted({*self.sourced, *other.sourced})
