"""What a command says of a config before it works with it, on stderr; and the files of -o."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from whet.types import ConfigError

if TYPE_CHECKING:
    from whet.config.load import Loaded


def say(loaded: Loaded) -> None:
    """Print the translation of a foreign file's keys to stderr."""
    from whet.dialects.report import summary

    if loaded.translation:
        typer.echo(summary(loaded.translation), err=True)
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)


def say_columns(loaded: Loaded) -> None:
    """Note which columns a run would use where none are named, of data that is on this machine."""
    from whet.data.recognise import with_columns

    for text in with_columns(loaded, plan=True)[1]:
        typer.echo(f"note: {text}", err=True)


def say_missing(loaded: Loaded) -> None:
    """Note what this machine lacks for the run; the run may be for another machine."""
    from whet.config.plan import missing

    for text in missing(loaded):
        typer.echo(f"note: {text}", err=True)


def write(path: Path, text: str) -> None:
    """Write the file of -o, and the folders that it is to be in."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}; give another file") from e
