"""A shell script -> the commands that it would start, by the real bash in a sandbox (`guard/enclosed.py`).

There are only programs that make text of text. Any other command is not found, and bash hands it to a function
(`prelude.sh`) that notes it with its words, its line and its environment, and succeeds. The sandbox is a process of
its own: this one stays as it is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from whet.environment import module_command
from whet.secrets import is_secret
from whet.types import ConfigError

_TEXT_TOOLS = """
awk basename cat comm cut date dirname expr false fold grep egrep fgrep head hostname id join ls nl nproc od paste
printf readlink realpath rev sed seq sort stat tac tail tee test tr true uname uniq wc whoami xxd
"""
_TOOLS = _TEXT_TOOLS.split()
_ENDS_AFTER_SLEEPS = 200
_MOST_RUNS = 6
_LOST = re.compile(
    r"line \d+: (?:exec: )?(?P<name>[^\s:]+): "
    r"(?:No such file or directory|Permission denied|not found|cannot execute.*)"
)
"""What bash says of a program, or a file to be sourced, that it did not reach."""
_NAME = re.compile(r"[\w./+@%-]+")

_EXEC = 'exec() { if (( $# )); then "$@"; exit; fi; }\n'
_SOURCE = '%s() { case $1 in %s) __whet_note source "$@" || : ;; *) builtin source "$@" ;; esac; }\n'


@dataclass(frozen=True, slots=True)
class Noted:
    """A command that bash came to."""

    kind: str
    """start; probe for a device that is taken not to be there; cd and source of what is not there."""
    words: tuple[str, ...]
    line: int
    top: int
    """The line of the script given that led there."""
    file: str
    """'' for the script given."""
    folder: str
    piped: bool
    """Another program, or the script itself, reads what it prints."""
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a script came to."""

    noted: tuple[Noted, ...]
    error: str
    """What bash and the tools said."""
    printed: str
    """What the script itself said."""
    status: int
    ended: str
    """Why it was stopped: 'time', 'processes' or 'memory'; '' if it ended by itself."""
    written: Mapping[str, str]
    """Files that it wrote: path -> text."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script with all that it is given."""

    path: str
    """'' where `text` is the script."""
    text: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str]
    folder: str
    trust: bool = False

    def run(self, *, output: str = "", fails: Collection[int] = ()) -> Ran:
        """Every command that is not run prints `output`, if that is read, and succeeds, but in the lines of `fails`."""
        lost: set[str] = set()
        replaced = False
        for _ in range(_MOST_RUNS):
            ran = _run(self, output, fails, lost, replaced)
            said = [_LOST.search(line) for line in ran.error.splitlines()]
            new = {one["name"] for one in said if one} - lost
            if not new:
                break
            lost |= new
            replaced = replaced or (ran.status in (126, 127) and said[-1] is not None)
        return ran


def _run(script: Script, output: str, fails: Collection[int], lost: set[str], replaced: bool) -> Ran:
    """One run. lost: what an earlier one did not reach. replaced: one ended where bash would have become another
    program."""
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError(
            "launch scripts need bash, which this machine does not have; install it, or give the keys in a file"
        )
    with tempfile.TemporaryDirectory(prefix="whet-script-") as private:
        at = Path(private)
        notes = at / "notes"
        notes.mkdir()
        programs = _tools(at / "tools", bash)
        (at / "prelude").write_text(
            _prelude(notes, output, fails, lost, script.environment) + _EXEC * replaced, encoding="utf-8"
        )
        path = script.path
        if not path:
            path = str(at / "script.sh")
            Path(path).write_text(script.text, encoding="utf-8", errors="surrogateescape")
        request = {
            "words": [bash, path, *script.arguments],
            "environment": _environment(script)
            | {"PATH": str(at / "tools"), "BASH_ENV": str(at / "prelude")},
            "folder": str(notes),
            "programs": programs,
            "confined": not script.trust,
        }
        outcome = run_enclosed(request, script.folder)
        files = sorted(notes.iterdir(), key=lambda one: one.name)  # they are named by the time
        noted = [note_of(one.read_bytes(), script.environment, path) for one in files]
    found = [one for one in noted if one]
    if not any(one.file for one in found):
        found.sort(key=lambda one: one.top)  # of two in the background either may come first
    error = outcome["error"].replace(path, script.path or "the script")
    return Ran(
        tuple(found), error, outcome["printed"], outcome["status"], outcome["ended"], outcome["written"]
    )


def run_enclosed(request: Mapping[str, object], folder: str) -> dict[str, Any]:
    """What came of a script that `guard.enclosed` has run. ConfigError where it could not."""
    done = subprocess.run(
        module_command("whet.guard.enclosed"),
        input=json.dumps(request),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(
            f"the script could not be read: {done.stderr.strip()[-1000:] or 'its process was killed'}"
        )
    outcome: dict[str, Any] = json.loads(done.stdout)
    if why := outcome["refused"]:
        raise ConfigError(
            f"launch scripts run in a sandbox, and this machine has none: {why}. --trust-script runs the script "
            "without a sandbox: programs that it starts are recorded and not run, but the script itself may write "
            "files, so use it for your own scripts only"
        )
    return outcome


def _tools(at: Path, bash: str) -> list[str]:
    """A folder with the tools; what may be executed: these, bash, the dynamic loader."""
    at.mkdir()
    (at / "bash").symlink_to(bash)
    programs = {os.path.realpath(bash)}
    for name in _TOOLS:
        if found := shutil.which(name):
            (at / name).symlink_to(found)
            programs.add(os.path.realpath(found))
    for loaders in ("lib/ld-*.so*", "lib/*/ld-*.so*", "lib64/ld-*.so*"):
        programs |= {os.path.realpath(loader) for loader in Path("/").glob(loaders)}
    return sorted(programs)


def _environment(script: Script) -> dict[str, str]:
    """Without what would have bash speak another language."""
    left = {k: v for k, v in script.environment.items() if k not in ("LC_ALL", "LANGUAGE", "BASH_ENV", "ENV")}
    return left | {"LC_MESSAGES": "C"}


def _prelude(
    notes: Path, output: str, fails: Collection[int], lost: set[str], environment: Mapping[str, str]
) -> str:
    """What bash reads first. Secrets of the environment are in no note: a killed run leaves its notes behind."""
    text = files(__package__).joinpath("prelude.sh").read_text(encoding="utf-8")
    text = text.replace("PRELUDE", shlex.quote(str(notes.parent / "prelude")))
    text = text.replace("NOTES", shlex.quote(str(notes))).replace("OUTPUT", shlex.quote(output))
    text = text.replace("FAILS", "|".join(map(str, sorted(fails))) or "''")
    text = text.replace("SLEEPS", str(_ENDS_AFTER_SLEEPS))
    hidden = [name for name in environment if is_secret(name) and name.isidentifier()]
    text = text.replace("SECRETS", "|".join(hidden) or "''")
    names = sorted(name for name in lost if _NAME.fullmatch(name))
    for name in {*names, *(name.rpartition("/")[2] for name in names)}:
        if "/" in name:
            text += f'function {name} {{ __whet_other {name} "$@"; }}\n'
        elif name not in _TOOLS:
            text += f'function {name} {{ command_not_found_handle {name} "$@"; }}\n'
    if lost:
        quoted = "|".join(map(shlex.quote, sorted(lost)))
        text += _SOURCE % ("source", quoted) + _SOURCE % (".", quoted)
    return text


def note_of(data: bytes, given: Mapping[str, str], script: str) -> Noted | None:
    """What bash has noted of a command; None for a note that it did not write to its end."""
    parts = os.fsdecode(data).split("\0")
    if len(parts) < 7 or parts[-1]:
        return None
    kind, top, line, file, folder, piped, count = parts[:7]
    end = 7 + int(count)
    pairs = dict(pair.partition("=")[::2] for pair in parts[end:-1])
    own = {"PATH", "BASH_ENV", "SHLVL", "PWD", "OLDPWD", "_", "LC_MESSAGES"}
    made = {k: v for k, v in pairs.items() if k not in own and given.get(k) != v}
    return Noted(
        kind,
        tuple(parts[7:end]),
        int(line or 0),
        int(top or 0),
        "" if file == script else file,
        folder,
        piped == "1",
        made,
    )
