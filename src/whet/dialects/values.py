"""What a foreign file says: the value of every key of its dialect, as that system reads it, and where it was given."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from whet.config.faults import shown
from whet.config.interpolate import interpolate
from whet.config.keys import Path, dotted
from whet.config.tree import get, leaves, merge, origin, with_values
from whet.dialects.kinds import same, understood
from whet.dialects.match import GivenValue, meant, read
from whet.dialects.row import READ, WRITES, Row
from whet.dialects.tables import OPEN, Dialect, joined, parts
from whet.dialects.versions import GIVEN, VERSION
from whet.types import Json


@dataclass(frozen=True)
class Missing:
    """A value that asks for what is not built yet."""

    place: str
    text: str
    area: str = ""
    """The feature, by its name in the table."""
    key: str = ""
    """What asks for it, and with which value."""
    value: str = ""
    reason: str = ""
    """Beside the feature, as the table has it."""


@dataclass
class Reading:
    """A foreign file, key by key."""

    of: Dialect
    defaults: dict[str, Json] = field(default_factory=dict)
    """The document's, references resolved with the file's values in view."""
    values: dict[str, Json] = field(default_factory=dict)
    """What is given, else the default."""
    given: dict[str, list[GivenValue]] = field(default_factory=dict)
    """By the name of the row; more than one for entries of a list."""
    places: dict[Path, str] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(place, text)"""
    unbuilt: list[Missing] = field(default_factory=list)
    broken: bool = False
    """Nothing more can be said: a reference failed, so values are missing, or the file is for other models."""

    def place(self, name: str) -> str:
        """Where a key was given; '' if it was not."""
        found = self.given.get(name)
        return self.places.get(found[0].at, "") if found else ""


def reading(tree: dict[str, Json], of: Dialect, *, origins: Mapping[Path, str]) -> Reading:
    """Read a file. Unknown keys, references that fail and values that cannot be meant are problems."""
    out = Reading(of=of)
    tree = _without_gaps(tree, of)
    full, wrong = interpolate(
        _rebased(_filled(_default_tree(of), _under_present_names(tree, of)), of.inner), {}
    )
    written = {path for path, _ in leaves(tree)}
    for path, said in wrong.items():
        row = out.of.row(dotted(path))
        if path in written:
            out.broken = True
            out.problems.append((origin(origins, path), f"{dotted(path)}: {said}"))
        elif row and row.status in READ:
            out.problems.append(("", f"{dotted(path)}: its default, {shown(row.default)}: {said}"))
    out.defaults = _defaults(out.of, full, tree)
    present: dict[Path, Json] = {}
    first: dict[Path, GivenValue] = {}
    found = list(read(_taken(tree, full), out.of))
    told = {one.path for one in found if one.value is not None}
    for one in found:
        out.places[one.at] = origin(origins, one.at)
        before = first.get(one.path)
        rank = 0 if before is None or one.is_section else _rank(out, one, before)
        problem = _misplaced(one, out.of) or ("" if rank else _twice(one, present))
        if problem:
            out.problems.append((out.places[one.at], problem))
        elif rank > 0 or (rank == 0 and present.get(one.path) is None):
            first[one.path] = one
            says_nothing = one.value is None and one.path in told and not _overrides(out, one.at)
            present[one.path] = None if says_nothing else _understood(out, one)
            if one.row is not None:
                given = [other for other in out.given.get(one.row.key, ()) if other.path != one.path]
                out.given[one.row.key] = [*given, one]
    above = {path[:n] for path in present for n in range(1, len(path))}
    _fill(out, nested({path: value for path, value in present.items() if path not in above}))
    return out


def _without_gaps(tree: dict[str, Json], of: Dialect) -> dict[str, Json]:
    """`???` of a key that nothing here reads is its default: only who reads it must be given it."""
    gaps = {
        one.at: one.row.default
        for one in read(tree, of)
        if one.value == "???" and one.row is not None and one.row.status not in WRITES
    }
    filled: dict[str, Json] = with_values(tree, gaps)
    return filled


def _under_present_names(tree: dict[str, Json], of: Dialect) -> dict[str, Json]:
    """The tree with the values of renamed keys also under their present names, where references look for them."""
    renamed = [one for one in read(tree, of) if one.alias and not one.is_section]
    for one in renamed:
        if all(isinstance(part, str) for part in one.path) and not _has(tree, one.path):
            tree = merge(tree, nested({one.path: one.value}))
    return tree


def _rank(out: Reading, one: GivenValue, before: GivenValue) -> int:
    """Which of two values of one key, under two of its names, counts: 1 this one, -1 the one before, 0 neither is over
    the other. The command line wins; else what the system's own document has under a name says nothing."""
    rank = _overrides(out, one.at) - _overrides(out, before.at)
    if rank or one.value is None or before.value is None:
        return rank
    return int(_is_documents(out, before)) - int(_is_documents(out, one))


def _is_documents(out: Reading, one: GivenValue) -> bool:
    """Whether a value under another name is that of the system's own document."""
    if one.alias not in out.of.alias_defaults:
        return False
    default = out.of.alias_defaults[one.alias]
    below = one.at[len(parts(one.alias)) :]
    return same(one.value, get(default, below) if below else default)


def _overrides(out: Reading, at: Path) -> int:
    """1 for a value of the command line, which wins over the file's, be it under another name."""
    return int(out.places[at].startswith("override "))


def _misplaced(one: GivenValue, of: Dialect) -> str:
    """What is wrong with a key that no row knows, or with a section that is none; or ''."""
    if not one.is_section:
        return "" if one.row else f"{joined(one.cut)}: unknown key{meant(one.cut, of)}"
    many = "[]" in of.below[one.cut]
    is_left_out = one.value is None and one.cut[-1] != "[]"  # null is no entry of a list
    if is_left_out or isinstance(one.value, list if many else dict):
        return ""
    wanted = "a list of sections" if many else f"a section (keys: {', '.join(of.below[one.cut])})"
    return f"{joined(one.cut)}: got {shown(one.value)}, expected {wanted}"


def _twice(one: GivenValue, present: Mapping[Path, Json]) -> str:
    """What is wrong with a key that the file has under two names, or ''; null under one of them says nothing."""
    told = present.get(one.path)
    if told is None or one.value is None or one.is_section or same(told, one.value):
        return ""
    said = f"{dotted(one.path)}: given twice, as {shown(present[one.path])} and {shown(one.value)}"
    return f"{said}; {one.note or 'keep one'}"


def _understood(out: Reading, one: GivenValue) -> Json:
    """The value as that system reads it. What cannot be meant is a problem, and the default stands in for it."""
    if one.is_section and isinstance(one.value, dict | list):
        return type(one.value)()  # what is in it is read by itself, and only what can be meant is there
    if one.row is None or one.is_section:
        return one.value
    default = out.defaults.get(one.row.key)
    value, problem = understood(one.value, one.row, default=default, nulls=out.of.nulls)
    if problem:
        out.problems.append((out.places[one.at], f"{dotted(one.path)}: {problem}"))
        return default
    return value


@functools.cache
def _plain(of: Dialect) -> dict[Path, Json]:
    """The defaults of the keys of one value: of no section, no entry of a list, no open name."""
    cuts = {parts(row.key): row.default for row in of.rows}
    return {c: v for c, v in cuts.items() if c not in of.below and not OPEN & set(c)}


@functools.cache
def _default_tree(of: Dialect) -> dict[str, Json]:
    return nested(_plain(of))


@functools.cache
def _referring(of: Dialect) -> tuple[Row, ...]:
    """The rows whose default refers to other keys."""
    return tuple(
        row for row in of.rows if any("${" in v for _, v in leaves(row.default) if isinstance(v, str))
    )


def _defaults(of: Dialect, full: Json, tree: Json) -> dict[str, Json]:
    """Every row's default, references resolved with the file's values in view. Those of plain keys that the file leaves
    out are resolved in `full` already, unless the file has something else in their section's place."""
    out = {row.key: row.default for row in of.rows}
    again: dict[str, Json] = {}
    for row in _referring(of):
        cut = parts(row.key)
        if cut in _plain(of) and not _has(tree, cut) and _has(full, cut):
            out[row.key] = get(full, cut)
        else:
            again[row.key] = row.default
    texts = _rebased(nested({parts(name): text for name, text in again.items()}), of.inner)
    resolved, _ = interpolate({"_": texts}, full)
    return out | {name: get(resolved, ("_", *parts(name))) for name in again}


def _has(tree: Json, cut: Path) -> bool:
    """Whether a file gives a key, be it null."""
    above = get(tree, cut[:-1]) if len(cut) > 1 else tree
    return isinstance(above, dict) and cut[-1] in above


def _fill(out: Reading, present: Json) -> None:
    """The value of every row: what is given, else the document's default."""
    if out.of.version:
        out.values |= {VERSION: out.of.version, GIVEN: list(out.given)}
    for row in out.of.rows:
        cut = parts(row.key)
        if cut[-1] == "*":
            inside, known = get(present, cut[:-1]), out.of.below[cut[:-1]]
            inside = inside if isinstance(inside, dict) else {}  # no section: told by _misplaced
            out.values[row.key] = {k: v for k, v in inside.items() if k not in known} or row.default
        elif not {"[]", "<name>"} & set(cut):
            given = row.key in out.given
            out.values[row.key] = get(present, cut) if given else out.defaults[row.key]
    for row in _referring(out.of):
        if row.type and row.key in out.values:
            out.values[row.key] = _read_or_own(out, row)


def _read_or_own(out: Reading, row: Row) -> Json:
    """The value that a default refers to, if it can be meant here; else what stands in for it where it was given."""
    value, problem = understood(out.values[row.key], row, default=out.defaults[row.key], nulls=out.of.nulls)
    named = str(row.default).removeprefix("${").removesuffix("}")
    return out.values.get(named) if problem else value


def _filled(defaults: Json, tree: Json) -> Json:
    """The file over the defaults; a section that is null or empty keeps its defaults."""
    if isinstance(defaults, dict) and defaults and (tree is None or isinstance(tree, dict)):
        tree = tree or {}
        own = {k: v for k, v in tree.items() if k not in defaults}
        return {**{k: _filled(v, tree[k]) if k in tree else v for k, v in defaults.items()}, **own}
    return tree


def _taken(tree: Json, full: Json) -> Json:
    """What the file has, references resolved."""
    if isinstance(tree, dict) and isinstance(full, dict):
        return {k: _taken(v, full.get(k)) for k, v in tree.items()}
    if isinstance(tree, list) and isinstance(full, list):
        return [_taken(v, w) for v, w in zip(tree, full)]
    return full if tree is not None else None


def _rebased(tree: Json, inner: str) -> Json:
    """References inside a section that was a file of its own, made to start at the top."""
    section = get(tree, parts(inner)) if inner else None
    names = [name for name in section if name not in tree] if isinstance(section, dict) else []
    if not names:
        return tree
    start = re.compile(rf"\$\{{(?=(?:{'|'.join(map(re.escape, names))})\b)")

    def moved(value: Json) -> Json:
        if isinstance(value, dict):
            return {k: moved(v) for k, v in value.items()}
        if isinstance(value, list):
            return [moved(v) for v in value]
        return start.sub(f"${{{inner}.", value) if isinstance(value, str) else value

    return merge(tree, nested({parts(inner): moved(section)}))


def nested(flat: Mapping[Path, Json]) -> dict[str, Json]:
    """Values by path as one tree; numbers in a path make lists, in their order."""
    out: dict[str | int, Json] = {}
    for path, value in flat.items():
        around = out
        for part in path[:-1]:
            inner = around.get(part)
            around[part] = dict(inner) if isinstance(inner, dict) else {}
            around = around[part]
        around[path[-1]] = merge(around.get(path[-1]), value)
    listed: dict[str, Json] = _listed(out)
    return listed


def _listed(value: Json) -> Json:
    if not isinstance(value, dict):
        return value
    inner = {k: _listed(v) for k, v in value.items()}
    return [inner[k] for k in sorted(inner)] if inner and all(isinstance(k, int) for k in inner) else inner
