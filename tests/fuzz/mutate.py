"""Damaged copies of good files: bytes flipped, cut and spliced; values exchanged in JSON and YAML."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from random import Random
from typing import Any

EXTREME: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**12), 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", " ", "banana", "-1", "1e999", "\u0000", "\ud800", "é" * 50, "x" * 5000, "${seed}", "${", "../../x", "null",
    [], {}, [[]], [None], {"a": {}}, {"": 1}, [1, "a", None], [{}] * 20,
)  # fmt: skip
DEEP = (b"- ", b"[", b"{a: ", b"? ", b'{"a": ')
SPLICES = (
    b"{",
    b"}",
    b"[",
    b"]",
    b"[" * 200,
    b"{" * 50,
    b"- " * 3000,
    b":",
    b"\n",
    b"\t",
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"&a",
    b"*a",
    b"<<: ",
    b"!!python/object ",
    b"${",
    b"${a.b}",
    b"}}",
    b"{{",
    b"{%",
    b"%}",
    b"9" * 5000,
    b"1e999",
    b"-1",
    b"\\ud800",
    b'"',
    b"'",
    b"#",
    b"|",
    b"---\n",
    b"null",
    b"~",
    b"? ",
    b"\x85",
    b"a" * 3000,
)


def damaged(random: Random, data: bytes) -> bytes:
    """One to three changes of the bytes."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(_BYTES)(random, out)
    return bytes(out)


def _flip(random: Random, out: bytearray) -> None:
    if out:
        out[random.randrange(len(out))] ^= 1 << random.randrange(8)


def _cut(random: Random, out: bytearray) -> None:
    del out[random.randrange(len(out) + 1) :]


def _drop(random: Random, out: bytearray) -> None:
    at = random.randrange(len(out) + 1)
    del out[at : at + random.choice((1, 2, 5, 40))]


def _splice(random: Random, out: bytearray) -> None:
    at = random.randrange(len(out) + 1)
    out[at:at] = random.choice(SPLICES)


def _deepen(random: Random, out: bytearray) -> None:
    """What opens a level, many times, at the beginning of a line."""
    lines = bytes(out).splitlines(keepends=True)
    line = random.randrange(len(lines) + 1)
    out[:] = b"".join([*lines[:line], random.choice(DEEP) * random.choice((60, 3000, 50_000)), *lines[line:]])


def _repeat(random: Random, out: bytearray) -> None:
    at = random.randrange(len(out) + 1)
    out[at:at] = out[at : at + random.choice((1, 10, 100))] * random.choice((1, 2, 30))


def _swap_words(random: Random, out: bytearray) -> None:
    words = bytes(out).split(b" ")
    a, b = random.randrange(len(words)), random.randrange(len(words))
    words[a], words[b] = words[b], words[a]
    out[:] = b" ".join(words)


_BYTES: Sequence[Callable[[Random, bytearray], None]] = (
    _flip,
    _flip,
    _cut,
    _drop,
    _splice,
    _splice,
    _repeat,
    _swap_words,
    _deepen,
)


def changed(random: Random, tree: Any) -> Any:
    """One to three changes of the values: exchanged, deleted, nested, copied elsewhere."""
    with _room():
        tree = deepcopy(tree)
        for _ in range(random.choice((1, 1, 2, 3))):
            places = list(containers(tree))
            if places:
                _change(random, *random.choice(places), tree)
        return tree


@contextmanager
def _room() -> Iterator[None]:
    """For what nests 400 levels deep, three times over."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def containers(tree: Any) -> Any:
    """(container, key) of every value inside."""
    waiting = [tree]
    while waiting:
        here = waiting.pop()
        if isinstance(here, dict | list):
            for key, value in list(here.items()) if isinstance(here, dict) else list(enumerate(here)):
                yield here, key
                waiting.append(value)


def _change(random: Random, holder: Any, key: Any, tree: Any) -> None:
    how = random.randrange(8)
    if how == 0:
        del holder[key]
    elif how == 1:
        holder[key] = _nested(holder[key], random.choice((1, 3, 90, 110, 400)))
    elif how == 2:
        other, at = random.choice(list(containers(tree)))
        holder[key] = deepcopy(other[at])
    elif how == 3 and isinstance(holder, dict):
        holder[str(key) + random.choice(("s", "_", " ", ".x"))] = holder.pop(key)
    elif how == 4 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = random.choice((-holder[key], holder[key] * 10**9, holder[key] + 0.5, str(holder[key])))
    else:
        holder[key] = deepcopy(random.choice(EXTREME))


def _nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def as_json(tree: Any) -> bytes:
    """JSON, which is YAML, too; half of a surrogate pair stays an escape."""
    with _room():
        return json.dumps(tree).encode()
