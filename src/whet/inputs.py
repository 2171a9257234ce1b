"""Reading of external input within named limits: regular files of bounded size, JSON of bounded depth.

A FIFO could block forever, a device has no end, and input that nests too deeply breaks recursive code. All of these are
refused here, before they are read, with an error that names the file.
"""

from __future__ import annotations

import json
import re
import stat
from collections import Counter
from pathlib import Path

from whet.types import Json, WhetError

MIB = 2**20
MOST_CONFIG_BYTES = 4 * MIB
"""Of a config file, of a chat template."""
MOST_JSON_BYTES = 512 * MIB
"""Of a JSON file that is read whole: config.json, tokenizer.json, the head of a safetensors file."""
MOST_RECORD_BYTES = 2048 * MIB
"""Of a record of a run that is shown: metrics.jsonl, timings.jsonl, timeline.json."""
MOST_ROW_BYTES = 64 * MIB
"""Of one line of a .jsonl file."""
MOST_DEPTH = 50
"""Lists and mappings inside one another, in JSON and in YAML."""

_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a FIFO (a named pipe)",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
_FAR = re.compile(rb"[0-9][eE]\+?[0-9]{3}")


def check_regular(path: Path, error: type[WhetError], *, most: int | None = None) -> None:
    """Raise `error` unless `path` is a regular file, of at most so many bytes."""
    try:
        found = path.stat()
    except (OSError, ValueError) as e:
        raise error(f"{path}: cannot be read: {_why(e)}") from e
    for test, kind in _KINDS.items():
        if test(found.st_mode):
            raise error(f"{path} is {kind}; expected a file")
    if most is not None and found.st_size > most:
        raise error(f"{path} has more than {most / MIB:g} MiB; is it the right file?")


def read_bytes(path: Path, error: type[WhetError], *, most: int) -> bytes:
    """The bytes of a file. Raises `error` if it is irregular, unreadable, or larger than `most` bytes."""
    check_regular(path, error, most=most)
    try:
        found = bytearray()  # in pieces: one read of `most` bytes would take the memory for them first
        with path.open("rb") as file:
            while len(found) <= most and (piece := file.read(MIB)):
                found += piece
    except OSError as e:
        raise error(f"{path}: cannot be read: {_why(e)}") from e
    if len(found) > most:
        raise error(f"{path} has more than {most / MIB:g} MiB; is it the right file?")
    return bytes(found)


def read_end(path: Path, most: int) -> tuple[str, bool]:
    """The end of a text that may be long, of at most so many bytes, and whether there is more before it."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most))
        return file.read(most).decode("utf-8", "replace"), size > most


def read_text(path: Path, error: type[WhetError], *, most: int) -> str:
    """The text of a UTF-8 file, without the byte order mark that some editors write first."""
    found = read_bytes(path, error, most=most)
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = found.count(b"\n", 0, e.start) + 1
        raise error(f"{path}:{line}: not UTF-8 text ({e.reason}); save it as UTF-8") from e


def read_json(path: Path, error: type[WhetError]) -> Json:
    """The value in a JSON file of a model or a run."""
    return parse_json(read_bytes(path, error, most=MOST_JSON_BYTES), str(path), error, constants=True)


def read_json_object(path: Path, error: type[WhetError]) -> dict[str, Json]:
    """The object in a JSON file."""
    found = read_json(path, error)
    if not isinstance(found, dict):
        raise error(f"{path}: expected a JSON object")
    return found


def parse_json(text: bytes, where: str, error: type[WhetError], *, constants: bool = False) -> Json:
    """JSON of at most MOST_DEPTH levels, each key once in its object. Raises `error` that names `where`.

    constants: accept NaN and Infinity, which are not JSON but occur in the files of some models."""
    try:
        value = _DECODERS[constants].decode(text.decode(json.detect_encoding(text)).rstrip())
    except json.JSONDecodeError as e:
        line = f"line {e.lineno}, " if b"\n" in text.strip() else ""
        raise error(f"{where}: not JSON: {e.msg.removesuffix(' at')} at {line}column {e.colno}") from e
    except RecursionError as e:
        raise error(f"{where}: {too_deep()}") from e
    except UnicodeDecodeError as e:
        raise error(f"{where}: not {e.encoding.upper()} text: {e}; save it as UTF-8") from e
    except ValueError as e:
        raise error(f"{where}: not JSON: {e}") from e
    if text.count(b"[") + text.count(b"{") > MOST_DEPTH and depth(value) > MOST_DEPTH:
        raise error(f"{where}: {too_deep()}")
    if _FAR.search(text) and _has_infinity(value) and b"Infinity" not in text:
        raise error(f"{where}: a number is too large for 64-bit floating point")
    return value


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """An object; a duplicate key is an error, because neither value may be chosen."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the key {twice[:100]!r} is given twice in one object; keep one")
    return found


def _no_number(name: str) -> Json:
    raise ValueError(f"{name} is not a JSON value; write null, or leave it out")


_DECODERS = {
    False: json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_number),
    True: json.JSONDecoder(object_pairs_hook=_object),
}


def too_deep() -> str:
    return f"lists and mappings nest more than {MOST_DEPTH} levels deep"


def depth(value: Json) -> int:
    """Lists and mappings inside one another; counted without recursion."""
    levels, here = 0, [value]
    while inside := [v for v in here if isinstance(v, list | dict)]:
        levels += 1
        here = [w for v in inside for w in (v.values() if isinstance(v, dict) else v)]
    return levels


def _has_infinity(value: Json) -> bool:
    """For values that are known not to nest too deeply."""
    if isinstance(value, list | dict):
        return any(map(_has_infinity, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value in (float("inf"), float("-inf"))


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
