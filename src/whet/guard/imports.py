"""User code that is imported for its side effects: it registers models, tokenizers and the like."""

from __future__ import annotations

from collections.abc import Iterable

from whet.tables import is_foreign, load_place, raised_at
from whet.types import ConfigError


def import_all(specs: Iterable[str]) -> None:
    """Import each 'package.module' or 'path/to/file.py', once. ConfigError names the line that failed."""
    for spec in specs:
        try:
            load_place(spec)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"imports: {spec!r}: {_told(error)}") from error


def _told(error: Exception | SystemExit) -> str:
    """'ValueError: text (/place/file.py, line 3)': the line of the user's that ran, or that cannot be read."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    told, at = f"{type(error).__name__}: {error}", raised_at(error)
    return f"{told} ({at[0]}, line {at[1]})" if at and is_foreign(at[0]) else told
