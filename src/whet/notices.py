"""What a command says of a config before it works with it, on stderr; and the files of -o."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from whet.guard.foreign import plain
from whet.outputs import check_place, replacing
from whet.types import ConfigError

if TYPE_CHECKING:
    from whet.config.derived import Plan
    from whet.config.load import Loaded


def say(loaded: Loaded) -> None:
    """Print the translation of a foreign file's keys to stderr."""
    from whet.dialects.report import summary

    if loaded.translation:
        typer.echo(plain(summary(loaded.translation)), err=True)
    for note in loaded.notes:
        _note(note)


def say_columns(loaded: Loaded) -> None:
    """Note which columns a run would use where none are named, of data that is on this machine."""
    from whet.data.recognise import with_columns

    for text in with_columns(loaded, plan=True)[1]:
        _note(text)


def say_rows(plans: Sequence[Plan]) -> None:
    """Note how many rows each stage trains on, of data that is on this machine, and which data is not."""
    from whet.data.counted import absent, told

    for text in (*told(plans), *absent(plans)):
        _note(text)


def say_code(loaded: Loaded) -> None:
    """Note which files of the user's code are not on this machine."""
    from whet.config.code import absent

    for text in absent(loaded.stages):
        _note(text)


def say_missing(loaded: Loaded) -> None:
    """Note what this machine lacks for the run; the run may be for another machine."""
    from whet.config.plan import missing

    for text in missing(loaded):
        _note(text)


def _note(text: str) -> None:
    """It may quote a file that is someone else's."""
    typer.echo(f"note: {plain(text)}", err=True)


def check_output(path: Path | None, *others: Path | None) -> None:
    """ConfigError where the file of -o cannot be written, or is one of the others that the command reads or writes: a
    command that takes long says so before its work. Its folder is made."""
    if path is None or path == Path("-"):
        return
    if any(other and other.resolve() == path.resolve() for other in others):
        raise ConfigError(
            f"cannot write {path}: the same command reads or writes this file; give another file"
        )
    with _naming(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.is_file() or not path.exists():  # no device, and no pipe
            check_place(path)


def write(path: Path, text: str) -> None:
    """Write the file of -o, and its folders. A file that is there stays until the new one is whole. `-`: standard
    output."""
    if path == Path("-"):
        typer.echo(text, nl=False)
        return
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device, a pipe
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()  # of a link, the file that it leads to
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
            if path.exists():
                shutil.copymode(path, part)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}; give another file") from e
