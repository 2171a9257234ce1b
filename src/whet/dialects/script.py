"""A launch script of verl, SkyRL, cosmos-rl or Trinity-RFT -> the trainer it starts, with all its words.

The script is read, never run. Understood (`shell/`): comments, quotes, here-documents; assignments, arrays (by
number and by key), export, declare, local; all of `${...}` but `${x@Q}` and `${!prefix*}`; `$((...))`, `{a,b}`,
`~`, IFS; `[ ]`, `[[ ]]` but `=~` and extended patterns; if, case, for, while, until, functions, getopts, shift,
set, read of a here-string, eval and `bash -c` of a known text; pipes, redirections, subshells, `&`. `set -e` ends
nothing here.

A variable without a value is an error if it arrives in the launch. So is what only running would tell, as the
output of a program; a few have a stand-in (date, nproc, hostname ...), which is noted. Where such a thing decides,
both ways are looked at: what differs between them is not known from there on. A way that ends the script is not
taken, and files are taken not to be there; both are noted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from whet.dialects.launch import Found, System, system_of, unwrapped
from whet.dialects.shell.builtins import Left, Return
from whet.dialects.shell.expand import Exit
from whet.dialects.shell.grammar import parse
from whet.dialects.shell.run import run, substitute
from whet.dialects.shell.state import (
    Event,
    Field,
    Note,
    Start,
    State,
    Unknown,
    Variable,
    Written,
    holds_marks,
)
from whet.types import ConfigError

MOST_BYTES = 2**20
_MOST_NAMED = 8
_MOST_PROBLEMS = 20
_NOTHING: Mapping[str, str] = MappingProxyType({})
_FILE = re.compile(r"\S+\.(toml|yaml|yml|json)")


@dataclass(frozen=True, slots=True)
class Argument:
    """A word of the launch."""

    text: str
    line: int
    """Where it was written; 0: given to the script as an argument."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The command that starts the trainer."""

    system: System
    """'' where neither its module nor its overrides tell."""
    module: str
    """verl.trainer.main_ppo, `trinity run`, `cosmos-rl`; a path where it is in no known package."""
    config_name: str | None
    config_path: str | None
    config_file: str | None
    """--config x.toml"""
    overrides: tuple[Argument, ...]
    """The trainer's own words, as they are after expansion."""
    others: tuple[Argument, ...]
    """The words for launchers and wrappers (uv run, torchrun, srun), one by one; all words of cosmos-rl and trinity."""
    line: int
    environment: Mapping[str, str]
    """Variables that the script exports or gives to the command."""
    notes: tuple[tuple[int, str], ...]
    """(line, what was skipped or taken for granted)"""


def read_script(
    text: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = _NOTHING,
    *,
    name: str = "",
    exists: Callable[[str], bool] = lambda path: False,
) -> Launch:
    """The last command of a script that starts a trainer. ConfigError with lines where it cannot be told.

    `name` is the script's own path ($0); `exists` answers `[ -f path ]`, where no file is taken to be there otherwise.
    Nothing else is looked up: HOME, USER and PWD, too, are what `environment` says."""
    text = _checked(text, arguments)
    state = _state(arguments, environment, name, exists)
    ended = None
    try:
        run(parse(text), state)
    except Exit as e:
        ended = e
    except (Return, Left):
        pass
    except RecursionError:
        raise ConfigError("line 1: the script nests too deep to be read") from None
    return _launch(state, environment, ended)


def _checked(text: str, arguments: Sequence[str]) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise ConfigError(
            f"line 1: the script has more than {MOST_BYTES // 2**20} MiB; a launch script is short"
        )
    for n, line in enumerate(text.split("\n"), 1):
        if "\0" in line or holds_marks(line):
            raise ConfigError(f"line {n}: holds a character that no script has; is it a text file?")
    if any("\0" in argument or holds_marks(argument) for argument in arguments):
        raise ConfigError("an argument holds a character that no argument has (U+0000, or from U+100000 on)")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _state(
    arguments: Sequence[str], environment: Mapping[str, str], name: str, exists: Callable[[str], bool]
) -> State:
    given = {k: Variable(v, exported=True) for k, v in environment.items() if not holds_marks(v)}
    state = State(name, given, [Field(a, 0) for a in arguments], "", exists, substitute)
    cwd = environment.get("PWD", "")
    state.cwd = cwd or state.granted(".", 1, "the folder that the script is started in")
    state.name = name or state.granted("script.sh", 1, "$0, the path of the script")
    return state


# ---------------------------------------------------------------- which start


@dataclass(frozen=True, slots=True)
class _Candidate:
    start: Start
    found: Found
    system: System
    by_module: bool
    at: int
    """Among the events."""


def _launch(state: State, environment: Mapping[str, str], ended: Exit | None) -> Launch:
    found = list(_candidates(state))
    known = [c for c in found if c.system] or found
    if not known:
        raise ConfigError(_nothing(state, ended))
    last = known[-1]
    notes = _notes(state.events[: last.at], last, known[:-1], state)
    return _Builder(last, state, environment, notes).launch()


def _candidates(state: State) -> list[_Candidate]:
    out = []
    for at, event in enumerate(state.events):
        if not isinstance(event, Start):
            continue
        shown = [state.unknowns.shown(field.text) for field in event.fields]
        found = unwrapped(shown)
        if isinstance(found, Found) and (of := system_of(found.module, shown[found.args :])):
            out.append(_Candidate(event, found, of[0], of[1], at))
    return out


def _nothing(state: State, ended: Exit | None) -> str:
    seen = [event for event in state.events if isinstance(event, Start)]
    said = [
        f"`{' '.join(state.unknowns.named(f.text) for f in start.fields)[:80]}` in line {start.line}"
        for start in seen[:_MOST_NAMED]
    ]
    others = [event for event in state.events if isinstance(event, Note) and event.text.endswith("not read")]
    said += [f"{event.text} (line {event.line})" for event in others[:_MOST_NAMED]]
    problem = f"line {ended.line}: {ended.why}. " if ended else ""
    return (
        f"{problem}the script starts no trainer of verl, SkyRL, cosmos-rl or Trinity-RFT that is known here; "
        f"found {', '.join(said) if said else 'no command that starts Python'}. "
        "Give the script that holds the launch itself, with the arguments and NAME=value it needs."
    )


def _notes(
    events: Sequence[Event], last: _Candidate, earlier: Sequence[_Candidate], state: State
) -> list[tuple[int, str]]:
    notes = [(event.line, event.text) for event in events if isinstance(event, Note)]
    others = [other.start for other in (*earlier, last)]
    for event in events:
        if isinstance(event, Start) and event not in others:
            said = " ".join(map(state.unknowns.named, event.texts))
            notes.append((event.line, f"`{said[:100]}` is not run"))
    for other in earlier:
        notes.append((other.start.line, f"starts {other.found.module}, too; the last launch counts"))
    if not last.by_module:
        why = "by its overrides" if last.system else "of no known system"
        notes.append((last.start.line, f"{last.found.module} is taken for a trainer {why}"))
    for event in events:
        if isinstance(event, Written):
            path = state.unknowns.shown(event.path)
            if any(path in state.unknowns.shown(field.text) for field in last.start.fields):
                notes.append(
                    (event.line, f"the script writes {path}, which the launch reads: it is not written")
                )
    return notes


# ---------------------------------------------------------------- the launch, word by word


class _Builder:
    def __init__(
        self,
        candidate: _Candidate,
        state: State,
        environment: Mapping[str, str],
        notes: list[tuple[int, str]],
    ) -> None:
        self.candidate, self.state, self.given = candidate, state, environment
        self.notes = notes
        self.problems: list[str] = []

    def launch(self) -> Launch:
        start, found = self.candidate.start, self.candidate.found
        if start.doubt:
            self.problems.append(
                f"line {start.line}: which trainer is started is not known: {start.doubt}; keep one of them"
            )
        words = [self.word(field) for field in start.fields]
        others = [words[n] for n in found.others if n < len(words)]
        named, rest = _config(words[found.args :], self.candidate.system)
        own = self.candidate.system in ("cosmos", "trinity")
        environment = self.environment()
        if self.problems:
            raise ConfigError("\n".join(dict.fromkeys(self.problems[:_MOST_PROBLEMS])))
        return Launch(
            self.candidate.system,
            found.module,
            named.get("name"),
            named.get("path"),
            named.get("file"),
            () if own else tuple(rest),
            tuple(others + rest if own else others),
            start.line,
            MappingProxyType(environment),
            tuple(sorted(set(self.notes))),
        )

    def word(self, field: Field) -> Argument:
        state = self.state
        for unknown in state.unknowns.of(field.text):
            if unknown.kind == "granted":
                shown = unknown.shown or "nothing"
                self.notes.append((unknown.line, f"{unknown.why}: taken to be `{shown}`"))
            else:
                self.problems.append(self._problem(field, unknown))
        return Argument(state.unknowns.shown(field.text), field.line)

    def _problem(self, field: Field, unknown: Unknown) -> str:
        said = self.state.unknowns.named(field.text)[:160]
        if unknown.kind == "refused":
            return (
                f"line {field.line}: `{said}` is not known: line {unknown.line}: {unknown.why}. "
                "Write its value into the script, or give it as a variable that the script reads"
            )
        sourced = self.state.sourced
        where = f" (line {sourced[0]} reads a file that may set it)" if sourced else ""
        how = (
            f"give the script its argument {unknown.name}"
            if unknown.name.isdigit()
            else f"give it as {unknown.name}=value before the script or as an argument"
        )
        return f"line {field.line}: `{said}` needs ${unknown.name}, which is not set{where}; {how}"

    def environment(self) -> dict[str, str]:
        start, unknowns = self.candidate.start, self.state.unknowns
        made = {k: v for k, v in start.environment.items() if self.given.get(k) != v}
        made |= self.candidate.found.environment
        return {k: unknowns.shown(v) for k, v in made.items() if _tells(unknowns.of(v))}


def _tells(unknown: Sequence[Unknown]) -> bool:
    return all(u.kind == "granted" for u in unknown)


def _config(words: Sequence[Argument], system: System) -> tuple[dict[str, str], list[Argument]]:
    """(config's name, path and file; the other words)"""
    flags = {
        "--config-name": "name",
        "-cn": "name",
        "--config-path": "path",
        "-cp": "path",
        "--config": "file",
    }
    if system == "trinity":
        flags["-c"] = "file"
    named: dict[str, str] = {}
    rest: list[Argument] = []
    at = 0
    while at < len(words):
        flag, equals, value = words[at].text.partition("=")
        at += 1
        if flag not in flags or (not equals and at == len(words)):
            rest.append(words[at - 1])
            continue
        if not equals:
            value = words[at].text
            at += 1
        named[flags[flag]] = value
    return named, rest
