"""Overrides on the command line in the style of the foreign systems: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import zip_longest

from whet.config.faults import place_of_override, shown
from whet.config.keys import Path
from whet.config.parse import parse_override
from whet.config.tree import get, leaves
from whet.dialects.kinds import same
from whet.dialects.row import WRITES
from whet.dialects.tables import Dialect
from whet.types import Json

_OVERRIDE = re.compile(
    r"(?P<sign>\+\+|\+|~|)(?P<key>\w[^\s=+~@]*)(?P<equals>\s*=\s*)?(?P<value>.*)", re.DOTALL
)
_FLOW = re.compile(
    r"""(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<sign>[][{}])"""
    r"""|(?<=[{,])(?P<space>\s*)(?P<key>(?:[\w.*/+$%@?|-]|\\.)+):(?=\S)|.""",
    re.DOTALL,
)
"""What lists and dicts of Hydra's grammar are made of. A key of a dict needs no space behind its colon, and a backslash
stands before what is no sign of it. In quoted text and in lists is none."""

_ANY: Json = object()
"""The value of `~key`, which says none."""


@dataclass
class Tree:
    """A foreign file with the overrides put over it."""

    tree: dict[str, Json] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    absent: list[tuple[str, str, Json]] = field(default_factory=list)
    """(key, where, the value said or `_ANY`) of `~key` that is not in the tree: only the system's own document may have
    it."""

    def override(self, text: str, source: str = "") -> None:
        """Apply one override. `a=` is the empty text, `~a` takes the key out (its default counts again), `~a=1` only if
        that is its value.

        source: where it is written, if not on the command line."""
        source = source or place_of_override(text)
        said = _OVERRIDE.fullmatch(text.strip())
        if said is None or (said["sign"] != "~" and not said["equals"]):
            self.problems.append((source, "expected key.path=value, +key.path=value or ~key.path"))
            return
        path, value = self._path(said["key"]), said["value"]
        parsed = parse_override(_as_yaml(value) if value[:1] in "{[" else value, hydra=True)
        if parsed.problems:
            self.problems += [(source, problem) for _, problem in parsed.problems]
            return
        read = parsed.tree if value else ""
        if said["sign"] == "~":
            self._drop(path, read if said["equals"] else _ANY, source)
        else:
            self._put(path, read, source)

    def left_out(self, of: Dialect) -> list[tuple[str, str]]:
        """What is wrong with `absent`: of the system's own document may go what nothing here reads."""
        problems = []
        for key, source, value in self.absent:
            row = of.row(key)
            if row is not None and (wrong := _not_that(key, row.default, value)):
                problems.append((source, wrong))
            elif row is None:
                problems.append((source, f"there is no {key} in the file to remove"))
            elif row.status in WRITES:
                said = f"{key} cannot be left out of {of.system}'s own document; give the value that it is to have"
                problems.append((source, said))
        return problems

    def _drop(self, path: Path, said: Json, source: str) -> None:
        """Take a key out, if it has the value said."""
        around, key = get(self.tree, path[:-1]), ".".join(map(str, path))
        if not isinstance(around, dict) or path[-1] not in around:
            self.absent.append((key, source, said))
        elif wrong := _not_that(key, around[path[-1]], said):
            self.problems.append((source, wrong))
        else:
            del around[path[-1]]

    def _path(self, key: str) -> Path:
        """Numbers are indexes where a list stands."""
        path: Path = ()
        around: Json = self.tree
        for part in key.split("."):
            step = int(part) if isinstance(around, list) and part.isdecimal() else part
            path = (*path, step)
            around = get(around, (step,))
        return path

    def _put(self, path: Path, value: Json, source: str) -> None:
        """A dict is put over one that stands there key by key, as in Hydra; all else takes the place of what stands
        there."""
        if isinstance(value, dict) and isinstance(get(self.tree, path), dict):
            for key, inner in value.items():
                self._put((*path, key), inner, source)
            return
        around: Json = self.tree
        for n, part in enumerate(path[:-1]):
            inner = get(around, (part,))
            if not isinstance(inner, dict | list) and not _set(around, part, inner := {}):
                self.problems.append((source, f"there is no entry {part} in {'.'.join(map(str, path[:n]))}"))
                return
            around = inner
        if not _set(around, path[-1], value):
            self.problems.append((source, f"there is no entry {path[-1]} in {'.'.join(map(str, path[:-1]))}"))
            return
        self.origins = {at: place for at, place in self.origins.items() if at[: len(path)] != path}
        self.origins |= dict.fromkeys([path, *(at for at, _ in leaves(value, path))], source)
        for n in range(1, len(path)):
            self.origins.setdefault(path[:n], source)


def _as_yaml(value: str) -> str:
    """A list or a dict of Hydra's grammar as YAML: {a:1} is {a: 1} there, and [a:1] a list of one text in both."""
    out, around = list[str](), list[str]()
    for found in _FLOW.finditer(value):
        sign = found["sign"] or ""
        if sign in "]}":
            around = around[: len(around) - len(sign)]
        elif sign:
            around.append(sign)
        is_key = found["key"] is not None and around[-1:] == ["{"]
        out.append(f"{found['space']}{_key(found['key'])}: " if is_key else found[0])
    return "".join(out)


def _key(written: str) -> str:
    plain = re.sub(r"\\(.)", r"\1", written)
    return plain if re.fullmatch(r"[\w.]+", plain) else json.dumps(plain)


def overridden(
    tree: Mapping[str, Json],
    origins: Mapping[Path, str],
    overrides: Sequence[str],
    places: Sequence[str] = (),
) -> Tree:
    """A copy of the file's values with the overrides put over them. places: where each is written."""
    copy = Tree(tree=deepcopy(dict(tree)), origins=dict(origins))
    for text, place in zip_longest(overrides, places, fillvalue=""):
        copy.override(text, place)
    return copy


def _set(around: Json, part: str | int, value: Json) -> bool:
    """Put a value into a dict, or in place of an entry of a list; False where that cannot be."""
    in_list = isinstance(around, list) and isinstance(part, int) and part < len(around)
    if in_list or (isinstance(around, dict) and isinstance(part, str)):
        around[part] = value
        return True
    return False


def _not_that(key: str, value: Json, said: Json) -> str:
    """Why `~key=said` does not take a key out, as in Hydra; or ''."""
    if said is _ANY or same(value, said):
        return ""
    return f"{key} is {shown(value)}, not {shown(said)}; give that, or ~{key} alone, which removes any value"
