"""`whet convert`: a config in native keys as YAML, each line with where it came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from whet.config.keys import Path
from whet.config.load import Loaded
from whet.config.parse import parse
from whet.config.tree import origin
from whet.types import Json

_PLAIN = re.compile(r"[A-Za-z_./~$\\(][\w ./~$\\{}()@+=-]*")
"""Text that may go without quotes, if it then reads as itself."""


def native_yaml(loaded: Loaded) -> str:
    """The native file. Reading it gives an equal config; of a native file it is the same file, but for comments."""
    made = f", a {loaded.translation.dialect} file" if loaded.translation else ""
    head = f"# Written by `whet convert` from {loaded.file}{made}.\n"
    lines = list(_section(dict(loaded.written), (), loaded.origins))
    width = min(max((len(text) for text, _ in lines), default=0), 60)
    return head + "".join(
        f"{text.ljust(width)}  # {place}\n" if place else f"{text}\n" for text, place in lines
    )


def _section(tree: Mapping[str, Json], path: Path, origins: Mapping[Path, str]) -> Iterator[tuple[str, str]]:
    """(line of YAML, where it came from) of a mapping's keys."""
    indent = "  " * len([part for part in path if isinstance(part, str)])
    for key, value in tree.items():
        at = (*path, key)
        head = f"{indent}{scalar(key)}:"
        if isinstance(value, dict) and value:
            yield head, ""
            yield from _section(value, at, origins)
        elif isinstance(value, list) and any(isinstance(entry, dict) and entry for entry in value):
            yield head, ""
            for n, entry in enumerate(value):
                yield from _entry(entry, (*at, n), origins)
        else:
            yield f"{head} {scalar(value)}", _place(at, origins)


def _entry(value: Json, path: Path, origins: Mapping[Path, str]) -> Iterator[tuple[str, str]]:
    """The lines of one entry of a list, the first of them with its dash."""
    indent = "  " * len([part for part in path if isinstance(part, str)])
    if not isinstance(value, dict) or not value:
        yield f"{indent[2:]}- {scalar(value)}", _place(path, origins)
        return
    for n, (text, place) in enumerate(_section(value, path, origins)):
        yield f"{indent[2:]}- {text.removeprefix(indent)}" if n == 0 else text, place


def _place(path: Path, origins: Mapping[Path, str]) -> str:
    """Where a value was given, on one line."""
    return " ".join(origin(origins, path).split())


def scalar(value: Json) -> str:
    """A value on one line, as YAML reads it back; text without quotes where that is safe."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and parse(value).tree == value:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    """What YAML would take for the end of a line, or refuse."""
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
