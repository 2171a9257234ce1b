"""One config key, explained: what `whet explain KEY` prints."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whet.config import keys, recipes, schema
from whet.config.chosen import chosen, setting_problems
from whet.config.conditions import Condition, in_words, subjects
from whet.config.engines import NOT_BUILT
from whet.config.facts import NAMED
from whet.config.faults import mismatch, shown
from whet.config.forms import OPEN_NAMES
from whet.config.keys import Key, did_you_mean, dotted, lookup, suggest
from whet.config.parse import parse_override
from whet.config.rules import visible_when
from whet.config.settings import line_of
from whet.config.shorthand import short_for
from whet.config.tree import STAGE_SECTIONS, path_of
from whet.dialects.tables import of_another
from whet.tables import unknown
from whet.types import ConfigError, Json


@dataclass(frozen=True)
class Explanation:
    """The explanation of a key. `rich` can print it."""

    key: str
    meaning: str
    type: str
    default: str
    where: str
    """Whether stages may differ in it."""
    read_when: str
    """The condition under which something reads it."""
    facts: tuple[tuple[str, str], ...]
    """The names in that condition that are no keys, with their meaning."""
    source: str
    """File and line of its definition."""
    rows: tuple[tuple[str, str, str, str], ...] = ()
    """The keys of a section: (key, type, default, meaning)."""
    value: tuple[tuple[str, str], ...] = ()
    """For `key=value`: the meaning of the value."""

    def __rich__(self) -> RenderableType:
        facts = Table.grid(padding=(0, 2))
        for label in ("type", "default", "where", "read_when", "source"):
            facts.add_row(label.replace("_", " "), Text(getattr(self, label)))
            for name, said in self.facts if label == "read_when" else ():
                facts.add_row("", Text(f"{name}: {said}"))
        parts: list[RenderableType] = [Text(self.key, style="bold"), Text(self.meaning), Text(""), facts]
        if self.rows:
            table = Table("key", "type", "default", "meaning")
            for row in self.rows:
                table.add_row(*map(Text, row))
            parts += [Text(""), table]
        if self.value:
            table = Table.grid(padding=(0, 2))
            for name, said in self.value:
                table.add_row(name, Text(said))
            parts += [Text(""), table]
        return Group(*parts)


def explain(key: str) -> Explanation:
    """A key, a section, or `key=value`. Raises ConfigError with the nearest known keys."""
    name, equals, value = key.strip().partition("=")
    found = _find(name)
    if equals and (short := short_for(found.path)):
        found = _find(dotted((*found.path, short)))
    rows = tuple(
        (k.path[-1], "section" if k.section else k.words, default_of(k), first_sentence(k))
        for k in keys.keys().values()
        if found.section and k.path[:-1] == keys.inside(found) and k.path[-1] != "*"
    )
    varies = found.path[0] in STAGE_SECTIONS
    condition = visible_when(found.path)
    return Explanation(
        key=dotted(found.path),
        meaning=found.description.replace("\n", " "),
        type=found.words if not found.section else found.words.partition(" (keys")[0],
        default=default_of(found),
        where="the whole run, or single stages" if varies else "the whole run",
        read_when=in_words(condition) if condition else "always",
        facts=tuple(_facts_of(condition or {})),
        source=_source(found),
        rows=rows,
        value=_value(found, value) if equals else _by_function(found.path),
    )


def _by_function(path: keys.Path) -> tuple[tuple[str, str], ...]:
    """Of a key that names a function: what it may be, with its meaning, settings and defaults. Of a setting: its
    default and meaning in each function that has it."""
    if path in keys.TABLES:
        return tuple((name, _meaning(path, name, has)) for name, has in keys.settings_of(path))
    if path[:-1] in keys.TABLES and path[-1] != "name":
        return tuple(
            (name, f"{default_of(key)}  {' '.join(key.description.split())}")
            for name, has in keys.settings_of(path[:-1])
            for key in has
            if key.path[-1] == path[-1]
        )
    return ()


def default_of(key: Key) -> str:
    """A default as it would be written; 'required' where there is none."""
    if key.required:
        return "" if key.path[-1] == "*" else "required"
    default = key.default
    if isinstance(default, schema.Section):
        return ""
    return json.dumps(list(default) if isinstance(default, tuple) else default)


def _facts_of(condition: Condition) -> Iterator[tuple[str, str]]:
    """The named conditions in a condition, with their meaning."""
    for name in dict.fromkeys(name for kind, name in subjects(condition) if kind == "condition"):
        if name in NAMED:  # others are settings of a function
            yield name, NAMED[name][0]


def _meaning(path: keys.Path, name: str, has: tuple[Key, ...]) -> str:
    """What a function does, and its settings with their defaults."""
    given = ", ".join(f"{key.path[-1]}={default_of(key)}" for key in has)
    return f"{keys.TABLES[path][name].about} {f'({given})' if given else ''}".strip()


def first_sentence(key: Key) -> str:
    """The first sentence of a key's meaning."""
    head, stop, _ = key.description.replace("\n", " ").partition(". ")
    return head + "." if stop else head


def _find(name: str) -> Key:
    """The key of a name, with or without the index or name of an entry of a list or table."""
    path = path_of(name.replace("[]", ".*").replace("<name>", "*"), ())
    found = lookup(_with_entries(path))
    if found is None:
        wrong = next(path[:n] for n in range(1, len(path) + 1) if lookup(_with_entries(path[:n])) is None)
        raise ConfigError(f"'{name}' is not a key{of_another(name, suggest(wrong)) or did_you_mean(wrong)}")
    return found


def _with_entries(path: keys.Path) -> keys.Path:
    """`data.train.path` is meant as `data.train[].path`, `rewards.weight` as `rewards.<name>.weight`."""
    full: keys.Path = ()
    for part in path:
        if part in keys.children((*full, "*")):
            full = (*full, "*")
        full = (*full, part)
    return full


def _source(key: Key) -> str:
    """'whet/config/sections/train.py:12', the line on which a key is defined."""
    if key.path[:-1] in keys.TABLES and key.path[-1] != "name":
        number = line_of(key.path[-2], key.owner.__name__, key.path[-1])
        return f"whet/config/settings.tsv:{number}"
    names = (key.path[-1], *key.path[-2:-1])
    for owner in key.owner.__mro__:  # a section may inherit its keys from another
        if not owner.__module__.startswith("whet."):
            continue
        file = Path(sys.modules[owner.__module__].__file__ or "")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for line in next(
            c.body for c in tree.body if isinstance(c, ast.ClassDef) and c.name == owner.__name__
        ):
            if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) in names:
                return f"{'/'.join(owner.__module__.split('.'))}.py:{line.lineno}"
    raise LookupError(key.path)


def _value(key: Key, value: str) -> tuple[tuple[str, str], ...]:
    """The meaning of a value of a key; ConfigError if the key cannot have it."""
    name = dotted(key.path)
    if name == "algorithm.name":
        if value not in recipes.RECIPES:
            raise ConfigError(f"{name}: {recipes.no_recipe(value)}")
        recipe = recipes.RECIPES[value]
        facts = {k: v for k, v in asdict(recipe).items() if k not in ("settings", "source", "note")}
        facts |= recipe.settings
        facts |= {"source": recipe.source, "note": recipe.note}
        return tuple((k, v if isinstance(v, str) else shown(v)) for k, v in facts.items())
    if key.section:
        raise ConfigError(f"{name} is a section and has no value; `whet explain {name}` lists its keys")
    parsed = parse_override(value)
    given = parsed.tree if value else None
    for _, wrong in parsed.problems:
        raise ConfigError(f"{name}={value}: {wrong}")
    try:
        TypeAdapter(key.annotation).validate_json(json.dumps(given), strict=True)
    except ValidationError as e:
        raise ConfigError(f"{name}={value}: {mismatch(given, key.path)}") from e
    known = _of_table(key.path, given) if key.path in keys.TABLES else _of_names(key, given)
    return known or (("value", f"{value} is allowed"),)


def _of_table(path: keys.Path, given: Json) -> tuple[tuple[str, str], ...]:
    """The settings of a function that a key names; none of one of the user's, or where a table gives no name."""
    table = keys.TABLES[path]
    made = chosen(given, table, own="")
    if not made.name:
        return ()
    for at, wrong in setting_problems(dotted(path), made, table):
        raise ConfigError(f"{at}: {wrong}")
    if made.is_own:
        return ()
    has = dict(keys.settings_of(path))[made.name]
    told = ((k.path[-1], f"{default_of(k)}  {' '.join(k.description.split())}") for k in has)
    return tuple(told) or (("settings", "none"),)


def _of_names(key: Key, given: Json) -> tuple[tuple[str, str], ...]:
    """What each name is that an open key is given. checkpoint.resume takes any path beside its names."""
    known = OPEN_NAMES.get(".".join(key.path), {})
    names = [given] if isinstance(given, str) else given or ()
    for each in names if known and key.path != ("checkpoint", "resume") else ():
        if wrong := NOT_BUILT.get(each) or unknown(known, each):
            raise ConfigError(f"{dotted(key.path)}: {wrong}")
    return tuple((each, known[each]) for each in names if each in known) if known else ()
