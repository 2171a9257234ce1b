"""What the page asks for: a table of questions and the functions that answer them; no server is needed to ask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whet.api import resolve_run_dir
from whet.config.forms import schema
from whet.config.keys import Path as KeyPath
from whet.config.load import SUFFIXES, load
from whet.config.parse import parse
from whet.inputs import MOST_CONFIG_BYTES, read_text
from whet.studio.check import checked, explained
from whet.studio.edit import Edited, remove_key, rename_key, set_key
from whet.studio.jobs import COMMANDS, FoundRun, Jobs
from whet.studio.opened import OWN, Opened, WorkingFolder, digest
from whet.types import ConfigError, WhetError
from whet.view.answers import encoded

EMPTY = "name: run\n"
"""The text of a studio without a file."""
MOST_EDITS = 1000
"""Of one request."""


class BadRequest(Exception):
    """The question itself is wrong: no page of the studio asks so."""


@dataclass
class Studio:
    """What the studio knows beside the text, which is the page's."""

    folder: WorkingFolder
    jobs: Jobs
    opened: Opened = field(default_factory=lambda: Opened(EMPTY, "run.yaml"))

    @classmethod
    def of(cls, file: Path | None, jobs: Jobs, *, root: Path | None = None) -> Studio:
        """A studio in a folder, with a file of any system open. A name that no file has yet is where it will be saved.
        ConfigError for a file that cannot be read."""
        folder = WorkingFolder(root or Path.cwd(), file)
        if file is None:
            made = cls(folder, jobs)
        elif not file.exists() and file.suffix in OWN:
            made = cls(folder, jobs, Opened(EMPTY, folder.name(file)))
        else:
            made = cls(folder, jobs, folder.open(str(file), script=True))
        made.find_run(folder.root / made.opened.path)
        return made

    def find_run(self, file: Path) -> None:
        """Show the run of a config file that goes on, if there is one: a killed studio leaves its run."""
        if file.suffix not in OWN or not file.is_file():
            return
        with suppress(WhetError):  # the page says what is wrong with the file
            self.jobs.find(str(file), self.run_dir(str(file)))

    def run_dir(self, file: str) -> Path:
        return self.folder.root / resolve_run_dir(load(file)).config.run_dir


@dataclass(frozen=True)
class Question:
    """The fields of a request."""

    fields: Mapping[str, Any]

    def text(self, name: str, default: str | None = None) -> str:
        value = self.fields.get(name, default)
        if not isinstance(value, str):
            raise BadRequest(f"{name}: expected text")
        try:
            value.encode()
        except UnicodeEncodeError as e:
            raise BadRequest(f"{name}: contains half of a surrogate pair, which is not valid text") from e
        return value

    def number(self, name: str) -> int:
        value = self.fields.get(name, 0)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise BadRequest(f"{name}: expected a whole number from 0 on")
        return value

    def switch(self, name: str) -> bool:
        value = self.fields.get(name, True)
        if not isinstance(value, bool):
            raise BadRequest(f"{name}: expected true or false")
        return value

    def path(self, name: str) -> KeyPath:
        value = self.fields.get(name)
        if not isinstance(value, list) or not 0 < len(value) <= 50:
            raise BadRequest(f"{name}: expected a list of names and numbers")
        if not all(isinstance(part, str) or (type(part) is int and part >= 0) for part in value):
            raise BadRequest(f"{name}: expected a list of names and numbers")
        return tuple(value)


# ---------------------------------------------------------------- what is asked


def start(studio: Studio, _: Question) -> Any:
    """What the page begins with."""
    return {
        "opened": asdict(studio.opened),
        "root": str(studio.folder.root),
        "endings": list(SUFFIXES),
        "commands": list(COMMANDS),
    }


@functools.cache
def drawn_from() -> bytes:
    """The schema, as `whet schema` prints it, gzipped."""
    return encoded(schema())


def check(studio: Studio, q: Question) -> Any:
    """See `checked`."""
    return checked(_config(q), q.text("name"))


def edit(studio: Studio, q: Question) -> Any:
    """The text after `edits`, one after the other, and what the checker says of it. Each has a path and one of: `yaml`,
    the value as it would be written; `value`, as JSON; `rename`; none of them: the key is taken out."""
    text, edits, rewritten = _config(q), q.fields.get("edits"), ""
    if (
        not isinstance(edits, list)
        or len(edits) > MOST_EDITS
        or not all(isinstance(one, dict) for one in edits)
    ):
        raise BadRequest(f"edits: expected a list of at most {MOST_EDITS}")
    for one in map(Question, edits):
        made = _edited(text, one)
        text, rewritten = made.text, made.rewritten or rewritten
    return {"text": text, "rewritten": rewritten, "check": checked(text, q.text("name"))}


def _edited(text: str, one: Question) -> Edited:
    path = one.path("path")
    if "yaml" in one.fields:
        written = one.text("yaml")
        found = parse(written)
        wrong = found.problems or written.lstrip().startswith("#")
        return set_key(text, path, written if wrong else found.tree if written.strip() else None, written)
    if "value" in one.fields:
        return set_key(text, path, one.fields["value"])
    if "rename" in one.fields:
        return rename_key(text, path, one.text("rename"))
    return remove_key(text, path)


def explain(studio: Studio, q: Question) -> Any:
    """See `explained`."""
    return explained(q.text("key"))


def open_file(studio: Studio, q: Question) -> Any:
    """A file of the folder; of another system, translated."""
    return asdict(studio.folder.open(q.text("path"), q.text("dialect", "") or None, here=q.switch("here")))


def import_text(studio: Studio, q: Question) -> Any:
    """An uploaded text; of another system, translated."""
    return asdict(
        studio.folder.imported(
            q.text("name"), q.text("text"), q.text("dialect", "") or None, here=q.switch("here")
        )
    )


def save(studio: Studio, q: Question) -> Any:
    """Write the text to a file. IsThere where that would overwrite a file the page does not name by its digest."""
    return asdict(studio.folder.save(q.text("path"), _config(q), q.text("known")))


def run(studio: Studio, q: Question) -> Any:
    """Start a command on a file that has been saved."""
    path = studio.folder.find(q.text("path"))
    if not path.is_file() or digest(read_text(path, ConfigError, most=MOST_CONFIG_BYTES)) != q.text("known"):
        raise ConfigError(f"{q.text('path')} has unsaved changes on the page; save it first")
    studio.find_run(path)
    studio.jobs.start(q.text("command"), str(path))
    return studio.jobs.state(0)


def job(studio: Studio, q: Question) -> Any:
    """The run and its log, from a byte on."""
    return studio.jobs.state(q.number("from"))


def stop(studio: Studio, _: Question) -> Any:
    """Ask the run to end."""
    studio.jobs.stop()
    return studio.jobs.state(0)


def _config(q: Question) -> str:
    text = q.text("text")
    if len(text.encode()) > MOST_CONFIG_BYTES:
        raise ConfigError(f"the text has more than {MOST_CONFIG_BYTES >> 20} MiB; a config is smaller")
    return text


Answer = Callable[[Studio, Question], Any]
ASKED: dict[str, Answer] = {"start": start, "explain": explain, "job": job}
"""By GET; nothing changes."""
TOLD: dict[str, Answer] = {
    "check": check,
    "edit": edit,
    "open": open_file,
    "import": import_text,
    "save": save,
    "run": run,
    "stop": stop,
}
"""By POST, with the page's token."""


def run_folder(studio: Studio) -> Path:
    """The run directory of the run that was started last. ConfigError before there is one."""
    current = studio.jobs.current
    if current is None:
        raise ConfigError("no run was started")
    path = current.run_dir if isinstance(current, FoundRun) else studio.run_dir(current.file)
    if not path.is_dir():
        raise ConfigError(f"{path}: the run has written nothing yet")
    return path
