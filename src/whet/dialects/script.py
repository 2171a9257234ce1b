"""A launch script of verl, SkyRL, cosmos-rl or Trinity-RFT -> the trainer it starts, with all its words.

The script is run by bash, in a sandbox in which it changes nothing (`shell.py`): no program runs but those that make
text of text, and those that would run are noted. Every other command is taken to succeed and to print nothing. Where
such a thing, or a variable that is not set, arrives in the launch, that is an error: a second run with other answers
tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from whet.dialects.launch import LaunchedProgram, System, system_of, unwrapped
from whet.dialects.shell import Noted, Ran, Script
from whet.inputs import read_text
from whet.types import ConfigError

MOST_BYTES = 2**20
_MOST_NAMED = 8
_MOST_WORDS = 2000
"""Of the command that starts a trainer; each is looked for in the script."""
_NOTHING: Mapping[str, str] = MappingProxyType({})
_OTHER = "1\n"
"""What programs that are not run print in the second run; a number, since it may be counted with."""
_FIRST_MARK = 91_610_000
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)(:?[-=+?])?")
_SET = r"\b{0}(\+?=|\[)|\b(for|read|local|declare|select|getopts)\b[^\n;]*\b{0}\b|-[nz] *\"?\$\{{?{0}\b"
_STOPPED = {
    "time": "it was stopped after some seconds: does it wait for something? ",
    "processes": "it was stopped because it started too many processes. ",
    "memory": "it was stopped because its processes took too much memory. ",
}
_SAID = re.compile(r": line (?P<line>\d+): (?P<text>(?:(?P<name>\w+): )?.*)")
_TESTED = re.compile(r"\b(if|elif|while|until)\b|\|\||&&|\$\?")
"""A line that asks for the status of a command."""
_QUIET = re.compile(
    r"mkdir|sleep|pip3?|wait|ray|export|wget|curl|git|pkill|killall|kill|rm|mv|cp|touch|chmod|tee|find|clear|nvidia-smi"
)
"""Programs of which it need not be told that they are not run."""
_GIVEN_KEYS = re.compile(r"wandb|hf|huggingface-cli")
"""Programs with secrets among their words: those are shown nowhere."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A word of the launch."""

    text: str
    line: int
    """Where it is written; 0: given to the script as an argument."""


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
    file: str
    """'' for the script given; else the one, which it runs, that holds the line."""
    folder: str
    """Where the command would run."""
    environment: Mapping[str, str]
    """Variables that the script exports or gives to the command."""
    written: Mapping[str, str]
    """Files that the script writes: path -> text."""
    notes: tuple[tuple[int, str], ...]
    """(line, what was skipped or taken for granted)"""


@dataclass(frozen=True, slots=True)
class _Candidate:
    noted: Noted
    found: LaunchedProgram
    system: System
    by_module: bool

    @property
    def own_words(self) -> tuple[str, ...]:
        return self.noted.words[self.found.args :]


def read_script(
    script: Path | str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = _NOTHING,
    *,
    folder: Path | str = ".",
    trust: bool = False,
) -> Launch:
    """The last command of a script (a file, or its text) that starts a trainer. ConfigError where it cannot be told.

    `folder` is where it is started. `trust`: its shell has no sandbox, for systems that have none.
    """
    folder = Path(folder).resolve()
    text = script if isinstance(script, str) else read_text(folder / script, ConfigError, most=MOST_BYTES)
    if len(text) > MOST_BYTES or any("\0" in one for one in (text, *arguments)):
        raise ConfigError("a launch script is a text of at most 1 MiB, without NUL characters")
    plain = text.removeprefix("\ufeff").replace("\r\n", "\n")
    asked = Script(
        path="" if isinstance(script, str) or plain != text else str(script),
        text=plain,
        arguments=tuple(arguments),
        environment=environment,
        folder=str(folder),
        trust=trust,
    )
    ran = asked.run()
    started = _all(asked, ran)
    candidates = _candidates(started)
    if not candidates:
        raise ConfigError(_nothing(ran, started, plain))
    last = ([one for one in candidates if one.system] or candidates)[-1]
    if len(last.own_words) > _MOST_WORDS:
        raise ConfigError(
            f"line {last.noted.line}: the command has {len(last.own_words)} arguments; expected {_MOST_WORDS} at most"
        )
    inner = Path(folder, last.noted.file)
    lines = _Lines(
        inner.read_text(encoding="utf-8", errors="replace") if inner.is_file() else plain,
        last.noted,
        arguments,
    )
    notes = _notes(ran, started, candidates, last)
    notes += _check(asked, plain, last, started, lines)
    notes += _branches(asked, plain, last, started)
    return _launch(last, ran, lines, notes)


def _all(asked: Script, ran: Ran) -> list[Noted]:
    """What was started, what a launcher's `bash -c TEXT` starts among it."""
    out: list[Noted] = []
    for one in ran.noted:
        found = unwrapped(one.words) if one.kind == "start" else None
        if found is None or isinstance(found, LaunchedProgram):
            out.append(one)
            continue
        given = dict(asked.environment) | dict(one.environment)
        inner = replace(
            asked, path="", text=one.words[found.at], arguments=one.words[found.at + 2 :], environment=given
        ).run()
        for each in inner.noted:
            out.append(
                replace(
                    each, line=one.line, file=one.file, environment={**one.environment, **each.environment}
                )
            )
    return out


def _candidates(started: Sequence[Noted]) -> list[_Candidate]:
    out = []
    for one in started:
        found = unwrapped(one.words) if one.kind == "start" else None
        if (
            isinstance(found, LaunchedProgram)
            and found.starts
            and (of := system_of(found.module, one.words[found.args :]))
        ):
            out.append(_Candidate(one, found, of[0], of[1]))
    return out


# ---------------------------------------------------------------- what is told


def _nothing(ran: Ran, started: Sequence[Noted], text: str) -> str:
    said = [
        f"`{' '.join(one.words)[:80]}` in line {one.line}"
        for one in started
        if one.kind == "start" and not _is(one, _GIVEN_KEYS)
    ]
    problem = ""
    if ran.ended:
        problem = _STOPPED[ran.ended]
    elif told := [found for found in map(_SAID.search, ran.error.splitlines()) if found]:
        name = told[-1]["name"]
        needed = name and (told[-1]["text"].endswith("unbound variable") or f"{{{name}:?" in text)
        how = f"; give it before the command: {name}=value whet ..." if needed else ""
        problem = f"line {told[-1]['line']}: {told[-1]['text']}{how}. "
    elif ran.status:
        lines = ran.printed.strip().splitlines()[-3:]
        problem = f"it ended with status {ran.status}{': ' if lines else ''}{' '.join(lines)[:300]}. "
    return (
        f"{problem}The script starts no trainer of verl, SkyRL, cosmos-rl or Trinity-RFT that whet knows; found "
        f"{', '.join(said[:_MOST_NAMED]) if said else 'no command that starts a program'}. Give the script that holds "
        "the launch itself, with the arguments and NAME=value that it needs"
    )


def _is(one: Noted, programs: re.Pattern[str]) -> bool:
    return programs.fullmatch(one.words[0].rpartition("/")[2]) is not None


def _notes(
    ran: Ran, started: Sequence[Noted], candidates: Sequence[_Candidate], last: _Candidate
) -> list[tuple[int, str]]:
    notes = []
    launches = [one.noted for one in candidates]
    for one in started:
        said = " ".join(one.words)[:100]
        if one.kind == "cd":
            notes.append(
                (one.line, f"`cd {said}`: there is no such folder here; the script goes on where it is")
            )
        elif one.kind == "probe":
            notes.append((one.line, f"`{said}` is assumed to fail"))
        elif one.kind == "source":
            notes.append((one.line, f"`{said}` cannot be read: what it sets is not known"))
        elif one not in launches and not (_is(one, _QUIET) or _is(one, _GIVEN_KEYS)):
            notes.append((one.line, f"`{said}` is not run"))
    for other in candidates:
        if other is not last:
            notes.append((other.noted.line, f"starts {other.found.module}, too; the last launch counts"))
    if not last.by_module:
        why = "by its overrides" if last.system else "of no known system"
        notes.append((last.noted.line, f"{last.found.module} is assumed to be a trainer {why}"))
    if ran.ended:
        notes.append((last.noted.line, "the script did not end by itself and was stopped after this"))
    return notes


# ---------------------------------------------------------------- what arrives in the launch


def _check(
    asked: Script, text: str, last: _Candidate, started: Sequence[Noted], lines: _Lines
) -> list[tuple[int, str]]:
    """Run it again with other answers: words that change with them are not known. Returns notes."""
    marks = {name: str(_FIRST_MARK + n) for n, name in enumerate(_unset(text, asked.environment))}
    piped = [one for one in started if one.piped and one.kind == "start" and one is not last.noted]
    if not marks and not piped:
        return []
    other = replace(asked, environment={**asked.environment, **marks})
    again = [one for one in _candidates(_all(other, other.run(output=_OTHER))) if one.found.module]
    again = [one for one in again if one.system] or again
    if not again or again[-1].found.module != last.found.module:
        return [
            (last.noted.line, "it starts something else if the programs that are not run print other output")
        ]
    words = list(again[-1].own_words)
    notes, dropped = [], set(marks.values()) - set(last.own_words)
    for name, mark in marks.items():
        if mark in words:
            notes.append((last.noted.line, f"${name} is not set: the word is left out"))
    words = [word for word in words if word not in dropped]
    problems = [
        _problem(mine, theirs, marks, piped, lines)
        for mine, theirs in zip(last.own_words, words)
        if mine != theirs
    ]
    if len(words) != len(last.own_words) and not problems:
        problems = [f"line {last.noted.line}: how many words it has depends on {_suspects(marks, piped)}"]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return notes


def _branches(asked: Script, text: str, last: _Candidate, started: Sequence[Noted]) -> list[tuple[int, str]]:
    """Run it again with commands that fail where a script asks for their status. A note if it starts something else."""
    lines = [*text.split("\n"), ""]
    tried = {
        one.line: one for one in started if one.kind == "start" and one is not last.noted and not one.file
    }
    tried = {
        line: one
        for line, one in tried.items()
        if 0 < line < len(lines) and (_TESTED.search(lines[line - 1]) or "$?" in lines[line])
    }
    again = _candidates(_all(asked, asked.run(fails=tried.keys()))) if tried else []
    again = [one for one in again if one.system] or again
    if not again or again[-1].noted.words == last.noted.words:
        return []
    said = [f"`{_shown(one)}` (line {line})" for line, one in tried.items()]
    return [(last.noted.line, f"it would be another command if {' or '.join(said)} failed: taken to succeed")]


def _shown(one: Noted) -> str:
    return one.words[0] if _is(one, _GIVEN_KEYS) else " ".join(one.words)[:60]


def _problem(mine: str, theirs: str, marks: Mapping[str, str], piped: Sequence[Noted], lines: _Lines) -> str:
    shown, needed = theirs, [name for name, mark in marks.items() if mark in theirs]
    for name in needed:
        shown = shown.replace(marks[name], f"${{{name}}}")
    at = lines.of(mine)
    if needed:
        return (
            f"line {at}: `{shown[:160]}` needs ${needed[0]}, which is not set; "
            f"give it before the command: {needed[0]}=value whet ..."
        )
    return (
        f"line {at}: `{mine[:160]}` is not known: it depends on {_suspects(marks, piped)}. "
        "Write its value into the script, or give it as a variable that the script reads"
    )


def _suspects(marks: Mapping[str, str], piped: Sequence[Noted]) -> str:
    said = [
        f"the output of `{' '.join(one.words)[:60]}` (line {one.line}), which is not run" for one in piped
    ]
    said += [f"${name}, which is not set" for name in marks]
    return " or ".join(said[:_MOST_NAMED])


def _unset(text: str, environment: Mapping[str, str]) -> list[str]:
    """Variables that a script takes as they come: it neither sets them, nor has a default, nor tests for them."""
    code = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))
    uses: dict[str, list[str]] = {}
    for name, operator in _VARIABLE.findall(code):
        uses.setdefault(name, []).append(operator)
    return [
        name
        for name, operators in uses.items()
        if name not in environment
        and not any(operators)
        and not name.startswith("BASH")
        and name not in _OWN
        and not re.search(_SET.format(name), code)
    ]


_TEXT_OWN = """
PWD OLDPWD UID EUID PPID RANDOM SECONDS LINENO HOSTNAME HOSTTYPE OSTYPE MACHTYPE IFS OPTARG OPTIND SHLVL PATH FUNCNAME
EPOCHSECONDS EPOCHREALTIME PIPESTATUS REPLY SHELL TERM GROUPS DIRSTACK OPTERR PS4
"""
_OWN = set(_TEXT_OWN.split())
"""Variables that bash itself sets."""


class _Lines:
    """Where the words of a launch are written: as far as the text of the script tells."""

    def __init__(self, text: str, launch: Noted, given: Sequence[str]) -> None:
        self.lines, self.start, self.given = text.split("\n"), launch.line, given
        self.end = launch.line
        while self.end < len(self.lines) and self.lines[self.end - 1].endswith("\\"):
            self.end += 1

    def of(self, word: str) -> int:
        """The last line up to the launch's end that has the word's key, or the word; else the launch's."""
        if word in self.given:
            return 0
        key, equals, _ = word.partition("=")
        after = "=" if equals else r"(?![\w.=])"
        asked = re.compile(rf"(?<![\w.]){re.escape(key)}{after}") if key else None
        for n in range(self.end, 0, -1):
            line = self.lines[n - 1] if n <= len(self.lines) else ""
            if asked and asked.search(line) and not line.lstrip().startswith("#"):
                return n
        return self.start


def _launch(last: _Candidate, ran: Ran, lines: _Lines, notes: Sequence[tuple[int, str]]) -> Launch:
    words = [Argument(word, lines.of(word)) for word in last.own_words]
    others = [
        Argument(last.noted.words[n], last.noted.line) for n in last.found.others if n < len(last.noted.words)
    ]
    named, rest = _config(words, last.system)
    own = last.system in ("cosmos", "trinity")
    return Launch(
        last.system,
        last.found.module,
        named.get("name"),
        named.get("path"),
        named.get("file"),
        () if own else tuple(rest),
        tuple(others + rest if own else others),
        last.noted.line,
        last.noted.file,
        last.noted.folder,
        MappingProxyType({**last.noted.environment, **last.found.environment}),
        MappingProxyType(dict(ran.written)),
        tuple(sorted(set(notes))),
    )


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
