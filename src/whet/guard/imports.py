"""User code that is imported for its side effects: it registers models, tokenizers and the like."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterable
from pathlib import Path

from whet.tables import load_place
from whet.types import ConfigError


def import_all(specs: Iterable[str]) -> None:
    """Import each 'package.module' or 'path/to/file.py', once. ConfigError names the line that failed."""
    for spec in specs:
        try:
            load_place(spec)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"imports: {spec!r}: {_told(error)}") from error


def _told(error: Exception | SystemExit) -> str:
    """'ValueError: text (/place/file.py, line 3)': the innermost line that ran, or that cannot be read."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    told = f"{type(error).__name__}: {error}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _ours(f.filename)]
    return f"{told} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else told


def _ours(filename: str) -> bool:
    """The machinery of importing, and this package."""
    here = Path(__file__).parents[1]
    return (
        filename.startswith("<frozen ")
        or filename == importlib.__file__
        or Path(filename).is_relative_to(here)
    )
