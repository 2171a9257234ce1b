"""The words of a command -> what it starts: the wrappers and launchers before the trainer, and the trainer's system.

`programs.tsv` says which programs are known, and what their options are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from whet.tables import lines

System = Literal["verl", "skyrl", "cosmos", "trinity", ""]

_PYTHON = re.compile(r"python[\d.]*")
_PAIR = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL | re.ASCII)
_OVERRIDE = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w.@/-]*=|~[A-Za-z_][\w.@/-]*\Z")
_ROOTS = ("verl", "recipe", "skyrl", "skyrl_train", "cosmos_rl", "trinity", "examples", "integrations")
_MODULE = ("-m", "--module")


@dataclass(frozen=True, slots=True)
class _Program:
    """A line of programs.tsv that is about a program."""

    kind: str
    valued: frozenset[str]
    flags: frozenset[str]
    operands: int

    def has_value(self, option: str) -> bool:
        """Whether the next word is the value of an option."""
        return "=" not in option and (option not in self.flags if self.flags else option in self.valued)


_TABLE = lines(__package__, "programs.tsv")
_PROGRAMS = {
    line["name"]: _Program(
        line["kind"],
        frozenset(line["valued"].split()),
        frozenset(line["flags"].split()),
        int(line["operands"] or 0),
    )
    for line in _TABLE
    if not line["pattern"] and line["kind"] != "choice"
}


def _patterns(kind: str) -> tuple[tuple[System, re.Pattern[str]], ...]:
    return tuple((line["name"], re.compile(line["pattern"])) for line in _TABLE if line["kind"] == kind)  # type: ignore[misc]


_MODULES, _KEYS = _patterns("trainer"), _patterns("keys")
_NO_TRAINERS = tuple(name for name, program in _PROGRAMS.items() if program.kind == "none")


def words(kind: str) -> dict[str, tuple[str, ...]]:
    """What the lines of a kind say, by their names."""
    return {line["name"]: tuple(line["pattern"].split()) for line in _TABLE if line["kind"] == kind}


_PACKAGES, _BASES = words("package"), words("base")


@dataclass(frozen=True, slots=True)
class Inside:
    """The word at `at` is a text of commands: `bash -c`."""

    at: int


@dataclass(frozen=True, slots=True)
class LaunchedProgram:
    """A program and, where it starts one, a Python module or a trainer of its own."""

    name: int
    """Which word the program is."""
    starts: bool = False
    module: str = ""
    args: int = 0
    """Where the trainer's own words begin."""
    others: tuple[int, ...] = ()
    """The words for launchers and wrappers."""
    environment: Mapping[str, str] = field(default_factory=dict)


def unwrapped(words: Sequence[str]) -> LaunchedProgram | Inside:
    """What a command starts, behind its wrappers."""
    return _Reader(words).read()


def system_of(module: str, args: Sequence[str]) -> tuple[System, bool] | None:
    """(the system, whether its module says so rather than its overrides); None for what is no trainer."""
    if module.startswith(_NO_TRAINERS):
        return None
    by_keys = next((system for system, keys in _KEYS for arg in args if keys.match(arg)), None)
    for system, modules in _MODULES:
        if modules.fullmatch(module):
            # programs below examples/ are of whichever system their overrides are of
            own = by_keys if module.startswith(("examples.", "integrations.", "recipe.")) else None
            return own or system, True
    if by_keys:
        return by_keys, False
    if len(args) > 1 and all(_OVERRIDE.match(arg) or arg.startswith("--config-") for arg in args):
        return "", False
    return None


def is_own(module: str, system: System) -> bool:
    """Whether a module that starts a trainer is part of its system. Examples and programs of yours may add keys."""
    return system == "" or module.startswith(_PACKAGES[system])


def base_of(module: str) -> list[str]:
    """The overrides that say what the config file of a program's own has over its system's."""
    return list(_BASES.get(module.removeprefix("verl."), ()))


def _program(word: str) -> _Program | None:
    """The program that a word names, if it is known."""
    name = word.rpartition("/")[2]
    return _PROGRAMS.get("python" if _PYTHON.fullmatch(name) else name)


class _Reader:
    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.at = words, 0
        self.others: list[int] = []
        self.environment: dict[str, str] = {}

    @property
    def here(self) -> str:
        return self.words[self.at] if self.at < len(self.words) else ""

    def read(self) -> LaunchedProgram | Inside:
        while self.at < len(self.words):
            begun, program = self.at, _program(self.here)
            if program is None:
                return LaunchedProgram(begun)
            if program.kind in ("shell", "own", "python", "launcher", "module"):
                return self.last(program)
            named = self.unwrap(program)
            if self.at == begun:
                return LaunchedProgram(begun)
            if named or self.here.endswith(".py"):
                return self.module(begun, self.here)
        return LaunchedProgram(0)

    def last(self, program: _Program) -> LaunchedProgram | Inside:
        """What a program starts that starts no other one known here."""
        begun, name, said = self.at, self.here.rpartition("/")[2], ""
        self.at += 1
        if program.kind == "shell":
            return self.shell(begun, program)
        if name == "trinity":
            return self.module(begun, f"trinity {self.here}", self.at + 1)
        if program.kind == "own":
            return self.module(begun, name, self.at)
        if program.kind in ("launcher", "module"):
            self.at += name == "accelerate" and self.here == "launch"
            while option := self.options(program, _MODULE):
                said = option  # -m says what kind of word follows the options
        else:
            said = self.options(program, ("-m", "-c"))
            if said == "-c" or self.here == "-":  # the program is a text
                return LaunchedProgram(begun)
        launcher = _PROGRAMS.get(self.here) if said in _MODULE else None
        if launcher and launcher.kind in ("launcher", "module"):
            return self.last(launcher)
        return self.module(begun, self.here) if self.here else LaunchedProgram(begun)

    def unwrap(self, program: _Program) -> bool:
        """Go over a wrapper and its options; stays where it is none. Returns whether the word at hand is a module."""
        name, rest = self.here.rpartition("/")[2], list(self.words[self.at + 1 :])
        if program.kind == "wrapper":
            self.at += 1
            self.options(program)
            while name in ("env", "sudo") and (pair := _PAIR.fullmatch(self.here)):
                self.environment[pair[1]] = pair[2]
                self.at += 1
            self.others += range(self.at, self.at + program.operands)
            self.at += program.operands
        elif program.kind == "uv" and "run" in rest[:5]:
            self.at += rest.index("run") + 2
            return self.options(program, _MODULE) in _MODULE
        elif program.kind == "runner" and rest[:1] == ["run"]:
            self.at += 2
            self.options(program)
        elif name == "ray" and rest[:1] == ["job"]:
            self.search("--" if "--" in rest else "")
        elif program.kind == "searched" and not (
            name in ("docker", "podman") and {"run", "exec"}.isdisjoint(self.words)
        ):
            self.search("")
        return False

    def options(self, program: _Program, last: Collection[str] = ()) -> str:
        """Go over a program's options, up to `--` or one of `last`. Returns what they end with; '' for neither."""
        while self.here[:1] == "-" and len(self.here) > 1:
            word = self.here
            self.at += 1
            if word == "--" or word in last:
                return word
            self.others.append(self.at - 1)
            if program.has_value(word):
                self.others.append(self.at)
                self.at += 1
        return ""

    def search(self, mark: str) -> None:
        """Go on to the first known program, behind `mark` where there is one."""
        begun = self.at
        if mark:
            self.at = list(self.words).index(mark, self.at)
        self.at += 1
        while self.at < len(self.words) and not self.is_program():
            self.at += 1
        self.others += [n for n in range(begun + 1, self.at) if n < len(self.words) and self.words[n] != "--"]

    def is_program(self) -> bool:
        program = _program(self.here)
        return program is not None and program.kind not in ("searched", "module", "none")

    def shell(self, begun: int, program: _Program) -> LaunchedProgram | Inside:
        while self.here[:1] in ("-", "+") and self.here:
            word = self.here
            self.at += 1
            if word[:2] != "--" and "c" in word[1:] and self.at < len(self.words):
                return Inside(self.at)
            self.at += word in program.valued
        return LaunchedProgram(begun)

    def module(self, begun: int, name: str, args: int | None = None) -> LaunchedProgram:
        """What is started, and where its own words begin: behind the word at hand where nothing else is said."""
        at = self.at + 1 if args is None else args
        return LaunchedProgram(begun, True, _dotted(name), at, tuple(self.others), dict(self.environment))


def _dotted(name: str) -> str:
    """A module by its dotted name, also where a path below a known root was given."""
    if not name.endswith(".py"):
        return name
    parts = name.removesuffix(".py").split("/")
    roots = [n for n, part in enumerate(parts[:-1]) if part in _ROOTS]
    return ".".join(parts[roots[0] if parts[roots[0]] != "examples" else roots[-1] :]) if roots else name
