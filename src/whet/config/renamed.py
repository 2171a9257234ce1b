"""Keys and values of whet 0.1 by their present names, for one release: `dialects/whet-0.tsv`.

A line has an old key, its present name, and old values by their present ones (JSON). Only the last part of a key
changes; the parts before it are present names. `[]` stands for any entry of a list, `<name>` for any name.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence

from whet.config.functions import ADVANTAGES, LOSSES, AdvantageEntry, LossEntry
from whet.config.recipe_table import RECIPES
from whet.config.settings import ImportanceWeight
from whet.tables import lines
from whet.types import Json

Path = tuple[str | int, ...]

PARTS: Mapping[str, Mapping[str, AdvantageEntry | LossEntry]] = {"loss": LOSSES, "advantage": ADVANTAGES}
HOMES = {
    name: [
        part
        for part, rows in PARTS.items()
        if any(name in row.settings.model_fields for row in rows.values())
    ]
    for rows in PARTS.values()
    for row in rows.values()
    for name in row.settings.model_fields
}
"""By setting: the parts of an algorithm whose functions read it."""

BOUNDS = ImportanceWeight.model_fields
"""Settings of an importance weight."""

RELEASE = "names of whet 0.1, which this release reads for the last time"

_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")


@functools.cache
def table() -> Mapping[tuple[str, ...], tuple[str, Mapping[str, str]]]:
    """By the parts of an old key: its present last part, and old values -> present ones."""
    return {
        tuple(line["key"].replace("[]", ".[]").split(".")): (
            line["native"].rpartition(".")[2],
            json.loads(line["values"] or "{}"),
        )
        for line in lines("whet.dialects", "whet-0.tsv")
    }


def renamed(tree: Json, at: Path = ()) -> tuple[Json, tuple[str, ...]]:
    """(the value at a path of a config, by present names; what was renamed: `train.passes is train.update_epochs`).

    Where a section has a key under both names, both stay: the old one is then refused as an unknown key. References
    (`${train.passes}`) are renamed, too.
    """
    notes: list[str] = []
    return _renamed(tree, at, notes), tuple(notes)


def present(path: Sequence[str | int]) -> Path:
    """A path by present names."""
    out: Path = ()
    for part in path:
        name = _name(out, part)
        if _pattern(out) == ("algorithm",) and len(HOMES.get(str(name), ())) == 1:
            out = (*out, HOMES[str(name)][0])
        if _pattern(out) == ("algorithm", "correction") and name in BOUNDS:
            out = (*out, "weight")
        out = (*out, name)
    return out


def _renamed(value: Json, at: Path, notes: list[str]) -> Json:
    if isinstance(value, list):
        return [_renamed(v, (*at, n), notes) for n, v in enumerate(value)]
    if isinstance(value, dict):
        out = {
            name: _renamed(inner, (*at, name), notes)
            for key, inner in value.items()
            for name in (_name_beside(at, key, value, notes),)
        }
        match _pattern(at):
            case ("algorithm",):
                return _settings_moved(out, at, notes)
            case ("algorithm", "correction"):
                return _bounds_moved(out, at, notes)
        return out
    if not isinstance(value, str):
        return value
    _, values = table().get(_pattern(at), ("", {}))
    if value in values:
        notes.append(f"{_dotted(at)}={value} is {_dotted(at)}={values[value]}")
        return values[value]
    return _REFERENCE.sub(lambda m: "${" + _dotted(present(m[1].split("."))) + "}", value)


def _settings_moved(algorithm: dict[str, Json], at: Path, notes: list[str]) -> Json:
    """Settings of advantages and losses, which were keys of `algorithm`, in the tables of the functions that read them;
    one that none of them reads goes where another function would read it, and is refused there."""
    out = dict(algorithm)
    recipe = RECIPES.get(str(out.get("name", "grpo")), RECIPES["grpo"])
    for name in [name for name in out if name in HOMES]:
        value = out.pop(name)
        reads = [
            part for part in HOMES[name] if name in _fields(part, out.get(part) or getattr(recipe, part))
        ]
        for part in reads or HOMES[name][:1]:
            given = out.get(part)
            section = {"name": given} if isinstance(given, str) else dict(given or {})
            out[part] = {**section, name: value}
            notes.append(f"{_dotted((*at, name))} is {_dotted((*at, part, name))}")
    return out


def _bounds_moved(correction: dict[str, Json], at: Path, notes: list[str]) -> Json:
    """Bounds of the importance weight, which were keys of `correction`, in the table of the weight. Without a weight
    their defaults say nothing; other values stay, and are refused as unknown keys, as is one under both names."""
    given = correction.get("weight")
    table = given if isinstance(given, dict) else {}
    old = {name: correction[name] for name in BOUNDS if name in correction and name not in table}
    if given is None:
        silent = [name for name, value in old.items() if value == BOUNDS[name].default]
        return {name: value for name, value in correction.items() if name not in silent}
    notes += [f"{_dotted((*at, name))} is {_dotted((*at, 'weight', name))}" for name in old]
    weight = {"name": given} if isinstance(given, str) else given
    rest = {name: value for name, value in correction.items() if name not in old}
    return rest | ({"weight": {**weight, **old}} if old else {})


def _fields(part: str, given: Json) -> Collection[str]:
    """The settings of the function that stands for a part."""
    name = given.get("name") if isinstance(given, dict) else given
    row = PARTS[part].get(str(name))
    return row.settings.model_fields if row is not None else ()


def _name_beside(above: Path, key: str, section: Json, notes: list[str]) -> str:
    """The present name of a key, or its own where the section has the present one as well."""
    name = str(_name(above, key))
    if name == key or name in section:
        return key
    notes.append(f"{_dotted((*above, key))} is {_dotted((*above, name))}")
    return name


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _name(above: Path, part: str | int) -> str | int:
    """The present name of a key in a section."""
    found = table().get(_pattern((*above, part)))
    return found[0] if found else part


def _pattern(path: Path) -> tuple[str, ...]:
    """A path as the table writes it. What stands in a stage has the path it has in the base config."""
    if path[:1] == ("stages",):
        path = path[2:]
    out: tuple[str, ...] = ()
    for n, part in enumerate(path):
        if isinstance(part, int) or part.isdecimal():
            out = (*out, "[]")
        else:
            out = (*out, "<name>" if n == 1 and path[0] == "rewards" else part)
    return out
