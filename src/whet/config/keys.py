"""The schema as a flat list of keys: look one up, describe its type, suggest a key for an unknown one.

A path is a tuple of names; `*` stands for a list index or a name that the user chose
(`data.train.*.path`, `rewards.*.weight`). A key in a stage has the same path as in the base config.

What is known of a key beside its type and meaning is a line of `keys.tsv`. The columns:

    key     a dotted key, `*` for any entry or name; what is said of a section is said of all keys in it
    resume  what a change of it means for a run that resumes: its class in `resuming`
    unit    of its value, where the end of its name does not say it (`hints.SUFFIXES`)
    level   beginner: the beginner's form shows it
    names   what other frameworks call it
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from whet.config.functions import (
    ADVANTAGES,
    ARCHITECTURES,
    ENTROPY_CLIPS,
    ENTROPY_CONTROLS,
    LOSSES,
    MTP_LOSSES,
    MU_SCHEDULES,
    ORDERS,
    OVERSAMPLINGS,
    PRIORITIES,
    RESAMPLINGS,
    UNIFORM,
    WEIGHTS,
    Function,
)
from whet.config.schema import Config, Section
from whet.tables import lines

Path = tuple[str | int, ...]

ASIDES = ("stages", "critic", "reference", "eval")
"""Sections that repeat keys of other sections; suggestions list them last."""

_ROWS = lines("whet.config", "keys.tsv")


def column(name: str) -> dict[str, str]:
    """A column of keys.tsv by key, where it says something."""
    return {row["key"]: row[name] for row in _ROWS if row[name]}


FOREIGN = {name: key for key, names in column("names").items() for name in names.split(", ")}
"""Names of keys in other frameworks."""


NEVER = {"trust_remote_code": "code in the folder of a model is never run; leave it out"}
"""Keys that other frameworks have and whet does not, and why."""


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    path: tuple[str, ...]
    owner: type[Section]
    """The section that contains it."""
    annotation: Any
    """Its type, constraints included."""
    description: str
    default: Any = None
    required: bool = False
    section: type[Section] | None = None
    """The section class of the key, or of each of its entries."""

    @property
    def words(self) -> str:
        return words(self.annotation)


# ---------------------------------------------------------------- looking up


@functools.cache
def keys() -> dict[tuple[str, ...], Key]:
    """Every key of a config by its path, in the schema's order."""
    return {key.path: key for key in _walk(Config, ())}


def _walk(section: type[Section], above: tuple[str, ...]) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path = (*above, name)
        annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        required = field.is_required()
        inner, many = _inner(field.annotation)
        default = None if required else field.get_default(call_default_factory=True, validated_data={})
        yield Key(path, section, annotation, field.description or "", default, required, inner)
        if inner and many:
            yield Key((*path, "*"), section, inner, (inner.__doc__ or "").strip(), None, True, inner)
        if inner:
            yield from _walk(inner, (*path, "*") if many else path)


def _inner(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section inside a type, and whether the type holds several."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    for argument in get_args(annotation):
        inner, many = _inner(argument)
        if inner:
            return inner, many or get_origin(annotation) in (tuple, dict)
    return None, False


TABLES: dict[Path, Mapping[str, Function]] = {
    ("model", "scratch"): ARCHITECTURES,
    ("model", "mtp"): MTP_LOSSES,
    ("algorithm", "advantage"): ADVANTAGES,
    ("algorithm", "loss"): LOSSES,
    ("algorithm", "correction", "weight"): WEIGHTS,
    ("algorithm", "resample"): RESAMPLINGS,
    ("algorithm", "entropy_control"): ENTROPY_CONTROLS,
    ("algorithm", "entropy_clip"): ENTROPY_CLIPS,
    ("algorithm", "mix", "mu_schedule"): MU_SCHEDULES,
    ("algorithm", "groups", "uniform"): UNIFORM,
    ("algorithm", "oversample"): OVERSAMPLINGS,
    ("buffer", "replay", "priority"): PRIORITIES,
    ("data", "order"): ORDERS,
    ("algorithm", "mix", "loss"): {name: row for name, row in LOSSES.items() if row.kind == "demonstrations"},
}
"""Keys that hold a name or a table of settings, and the functions that have them."""
KEPT: tuple[Path, ...] = (("model", "scratch"),)
"""Those of them where another name keeps the settings of the one before: sizes are sizes in every family of models."""


@functools.cache
def settings() -> dict[tuple[str, ...], Key]:
    """Settings of `TABLES` by their path, `name` among them. Several functions may have one of a name: the
    first one's stands here."""
    found: dict[tuple[str, ...], Key] = {}
    for above, table in TABLES.items():
        path = tuple(map(str, above))
        found[*path, "name"] = replace(keys()[path], path=(*path, "name"), annotation=str)
        for row in table.values():
            for name in row.settings.model_fields:
                found.setdefault((*path, name), replace(setting(row.settings, name), path=(*path, name)))
    return found


def settings_of(path: Path) -> Iterator[tuple[str, tuple[Key, ...]]]:
    """(name, its settings) of every function that a key of `TABLES` may name."""
    for name, row in TABLES[path].items():
        yield name, tuple(setting(row.settings, each) for each in row.settings.model_fields)


def setting(section: type[Section], name: str) -> Key:
    """A setting of a function as a key."""
    return next(key for key in _walk(section, ()) if key.path == (name,))


def within(section: type[Section], path: Iterable[str | int]) -> Key | None:
    """The key at a path of a section that stands by itself. What is no name of its own is an index, or the user's."""
    known = {key.path: key for key in _walk(section, ())}
    found: tuple[str, ...] = ()
    for part in map(str, path):
        found = (*found, part if (*found, part) in known else "*")
    return known.get(found)


def lookup(path: Iterable[str | int]) -> Key | None:
    """The key at a path of a config; None if there is none. `stages.1.train.steps` is `train.steps`."""
    parts = tuple(str(p) for p in path)
    if len(parts) > 2 and parts[0] == "stages" and parts[2] != "name":
        return lookup(parts[2:]) if ("stages", "*", parts[2]) in keys() else None
    found: tuple[str, ...] = ()
    for part in parts:
        if (*found, part) in keys():
            found = (*found, part)
        elif found in keys() and part in entries(keys()[found]) and parts[-1] is part:
            return replace(keys()[found], path=parts, annotation=str, default=None)
        elif found in keys() and _is_typed(keys()[found]) and parts[-1] is part:
            return replace(
                keys()[found], path=parts, annotation=get_args(keys()[found].annotation)[1], default=None
            )
        elif (*found, "*") in keys() and (part.isdecimal() or not is_list(keys()[found])):
            found = (*found, "*")
        else:
            return settings().get(parts) if found in TABLES else None
    return keys().get(found)


def entries(key: Key) -> tuple[str, ...]:
    """The names that a table of texts may have, where they are fixed."""
    names = get_args(key.annotation)[:1] if get_origin(key.annotation) is dict else ()
    return get_args(names[0]) if names and get_origin(names[0]) is Literal else ()


def is_open(annotation: Any) -> bool:
    """Whether a type, or one of several, is a table of values by any names."""
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return get_origin(arguments[0]) is not Literal and _inner(annotation)[0] is None
    return get_origin(annotation) in (Annotated, Union, types.UnionType) and any(map(is_open, arguments))


def _is_typed(key: Key) -> bool:
    """Whether a key holds such a table alone, whose values are all of one type."""
    is_table = get_origin(key.annotation) is dict and is_open(key.annotation)
    return is_table and get_args(key.annotation)[1] is not Any


def is_list(key: Key) -> bool:
    """Whether a key holds a list of sections (and not sections by name)."""
    return get_origin(key.annotation) is tuple and key.section is not None


def inside(key: Key) -> tuple[str, ...]:
    """The path under which a section's keys lie."""
    return (*key.path, "*") if (*key.path, "*") in keys() else key.path


def children(path: Iterable[str | int]) -> list[str]:
    """Names of the keys of the section at a path (of the whole config for the empty path)."""
    path = tuple(path)
    section: type[Section] | None = Config
    if path:
        key = lookup(path)
        if key and (names := entries(key)):
            return list(names)
        section = key.section if key else None
    return list(section.model_fields) if section else []


def dotted(path: Sequence[str | int]) -> str:
    """`data.train[0].path`; a star is shown as `[]` in a list and as `<name>` for names of the user."""
    out = ""
    for n, part in enumerate(path):
        if part == "*":
            out += ".<name>" if path[n - 1] == "rewards" else "[]"
        elif isinstance(part, int):
            out += f"[{part}]"
        else:
            out += f".{part}" if out else part
    return out


# ---------------------------------------------------------------- description of types


def words(annotation: Any) -> str:
    """A type in words: 'a whole number >= 1 or null'."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return words(arguments[0]) + _bounds(arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(words(a) for a in arguments)
    if origin is Literal:
        names = [f"'{a}'" if isinstance(a, str) else str(a).lower() for a in arguments]
        return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
        return f"a list{count} (each: {words(arguments[0])})"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"a section (keys: {', '.join(annotation.model_fields)})"
    if origin is dict:
        inner = _inner(annotation)[0]
        if get_origin(arguments[0]) is Literal:
            return f"a table (keys: {', '.join(get_args(arguments[0]))})"
        one = inner or arguments[1]
        return "a section of any keys" if one is Any else f"names, each with {words(one)}"
    return _PLAIN[annotation]


_PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Any: "anything",
}

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _bounds(metadata: Iterable[Any]) -> str:
    limits: dict[str, Any] = {}
    likes: list[str] = []
    for item in metadata:
        likes += [f" such as '{each}'" for each in getattr(item, "examples", None) or ()]
        for limit in item.metadata if isinstance(item, FieldInfo) else [item]:
            limits |= {name: getattr(limit, name) for name in _SIGNS if hasattr(limit, name)}
    shown = [f"{_SIGNS[name]} {'2^63' if value == 2**63 else f'{value:g}'}" for name, value in limits.items()]
    return "".join(likes) + "".join(f" {s}" if n == 0 else f" and {s}" for n, s in enumerate(shown))


# ---------------------------------------------------------------- suggestions


def suggest(path: Iterable[str | int]) -> list[str]:
    """Suggestions for an unknown key, at most two, best first; empty if no name is near.

    First the same section, then names of other frameworks, then the same or a similar name anywhere.
    """
    path = tuple(path)
    name, above = str(path[-1]), path[:-1]
    if above[-1:] == ("algorithm",) and (read := _read_by(name)):
        return [dotted((*above, part, name)) for part in read]
    siblings = children(above)
    near = _closest(name, siblings)
    if near:
        return [dotted((*above, n)) for n in near]
    name = name.lower()
    if name in FOREIGN:
        return [FOREIGN[name]]
    ends: dict[str, list[tuple[str, ...]]] = {}
    for key in keys():
        if key[0] != "stages" and key[-1] != "*":
            ends.setdefault(key[-1], []).append(key)
    hit = [name] if name in ends else _closest(name, ends)
    if not hit:
        beside = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
        if beside:
            return [dotted((*above, beside[0]))]
        hit = difflib.get_close_matches(name, ends, n=1, cutoff=0.75)
    found = [key for h in hit for key in ends[h]]
    return [dotted(key) for key in sorted(found, key=lambda k: (k[0] in ASIDES, len(k)))][:2]


def _read_by(setting: str) -> list[str]:
    """The parts of an algorithm whose functions have this setting."""
    return [part for part in ("loss", "advantage") if ("algorithm", part, setting) in settings()]


def did_you_mean(path: Iterable[str | int]) -> str:
    """'; did you mean ...?' or the keys that are known there."""
    path = tuple(path)
    name = str(path[-1])
    if name in NEVER:
        return f": {NEVER[name]}"
    if "." in name and lookup((*path[:-1], *name.split("."))):
        return "; a key in a file cannot contain dots: nest the sections instead"
    if len(path) == 3 and path[0] == "stages" and (name,) in keys():
        return f"; {name} cannot differ between stages: move it to the top level"
    hits = suggest(path)
    if hits:
        return f"; did you mean {' or '.join(hits)}?"
    here = children(path[:-1])
    return f"; known here: {', '.join(here)}" if here else ""


def _closest(name: str, known: Iterable[str]) -> list[str]:
    """The known names with the smallest edit distance, if it is at most 1, or 2 from four letters on."""
    ranked = sorted((distance(name, k), n, k) for n, k in enumerate(known))
    return [
        k for d, _, k in ranked if d == ranked[0][0] and d <= (2 if min(len(k), len(name) + 1) >= 4 else 1)
    ][:2]


@functools.lru_cache(maxsize=1 << 16)  # parts repeat from key to key
def distance(a: str, b: str) -> int:
    """Edit distance: insert, delete, replace, or swap two adjacent letters (optimal string alignment)."""
    if abs(len(a) - len(b)) > 2:
        return abs(len(a) - len(b))
    before, last = list[int](), list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]
