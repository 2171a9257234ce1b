"""A config under construction: plain values from several places, the origin of each, and the problems so far."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import isfinite

from pydantic import ValidationError

from whet.config.chosen import chosen, setting_problems
from whet.config.faults import faults, named, place_of_override, shown
from whet.config.interpolate import interpolate
from whet.config.keys import TABLES, Path, did_you_mean, dotted, is_open, lookup, suggest
from whet.config.parse import parse_override
from whet.config.schema import Config
from whet.config.shorthand import expanded
from whet.config.tree import get, leaves, merge, origin, path_of, stage_names, stage_tree, without
from whet.dialects.tables import of_another
from whet.types import Json

_PLACE = re.compile(r"path|run_dir|resume|chat_template|tokenizer")
"""Keys whose text is a path on this machine."""
_FREE = ("arguments", "engine_arguments", "options")
"""Keys below which names mean what other code says."""
_HOME = re.compile(r"~[^/\s]*(?=/)")


@dataclass
class Draft:
    """The values, filled in the order of precedence, then resolved, then validated."""

    tree: dict[str, Json] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(place, text)"""
    broken: set[Path] = field(default_factory=set)
    """Paths whose problem is already reported."""

    def put(self, path: Path, value: Json, source: str) -> None:
        """Merge a value in at a path; a list index in it must exist."""
        value = expanded(value, _in_base(path))
        self.tree = _replaced(self.tree, path, value, ())
        if not isinstance(value, dict):
            self.origins = {at: s for at, s in self.origins.items() if at[: len(path)] != path}
        for at, _ in leaves(value, path):
            self.origins[at] = source
            for n in range(len(path) or 1, len(at)):
                self.origins.setdefault(at[:n], source)

    def expand(self) -> None:
        """Put the long forms in the place of short ones."""
        self.tree = expanded(self.tree)

    def override(self, text: str) -> None:
        """Apply `key.path=value`; the value is YAML, an empty value is null, and ~ drops the key."""
        key, equals, value = (part.strip() for part in text.partition("="))
        source = place_of_override(text)
        if not equals or not key or key[0] in "+~-":
            self.problems.append((source, _no_override(key)))
            return
        parsed = parse_override(value)
        path = path_of(key, stage_names(self.tree))
        wrong = [said for _, said in parsed.problems] or [w for w in (self._closed(path),) if w]
        if wrong:
            self.problems += [(source, said) for said in wrong]
        elif value == "~":
            self._drop(path, source)
        else:
            self.put(path, parsed.tree if value else None, source)

    def _drop(self, path: Path, source: str) -> None:
        """Take a key out, as if it had never been given."""
        around = get(self.tree, path[:-1])
        there = path[-1] in around if isinstance(around, dict) else isinstance(around, list)
        if not there:
            said = (
                f"{dotted(path)}=~ drops a key that is given, and this one is not; null sets a key to nothing"
            )
            self.problems.append((source, said))
            return
        self.tree = without(self.tree, {path})
        left = {at: s for at, s in self.origins.items() if at[: len(path)] != path}
        self.origins = {_moved_up(at, path): s for at, s in left.items()}

    def _closed(self, path: Path) -> str:
        """Why no value can be set at this path, or ''."""
        if len(path) > 1 and path[0] == "stages" and not isinstance(path[1], int):
            return f"no stage {path[1]!r}; stages: {', '.join(stage_names(self.tree)) or 'none'}"
        unknown = _unknown(path)
        if unknown:
            return f"unknown key{of_another(dotted(path), suggest(unknown)) or did_you_mean(unknown)}"
        for n in range(1, len(path)):
            around, part = get(self.tree, path[:n]), path[n]
            if isinstance(around, list) and not (isinstance(part, int) and part < len(around)):
                return f"{dotted(path[:n])} has {len(around)} entries, counted from 0: no entry {part}"
            if isinstance(part, int) and not isinstance(around, list):
                return f"{dotted(path[:n])} has no entries: there is no {part}"
            is_table = _in_base(path[:n]) in TABLES and isinstance(around, str)
            if around is not None and not is_table and not isinstance(around, dict | list):
                return f"{dotted(path[:n])} is {shown(around)}, not a section"
        return ""

    def interpolate(self) -> None:
        """Resolve `${...}`; references to defaults of the schema are allowed."""
        written = self.tree
        self.tree, wrong = interpolate(written, Config().model_dump(mode="json"))
        for path, said in wrong.items():
            self.broken.add(path)
            self._tell(path, f"{named(path, written)}: {shown(get(written, path))}: {said}")

    def find_places(self) -> None:
        """Refuse empty paths, paths that no system call accepts, and paths without permission: a later test for
        existence expects only yes or no."""
        for path, value in leaves(self.tree):
            name = next((part for part in reversed(path) if isinstance(part, str)), "")
            if isinstance(value, str) and _PLACE.fullmatch(name) and "{" not in value and "://" not in value:
                if not value:  # pathlib takes it for the working directory
                    if not any(part in _FREE for part in path):
                        said = (
                            'the path is empty; give one (the working directory is "."), or leave the key out'
                        )
                        self._tell(path, f"{named(path, self.tree)}: {said}")
                    continue
                try:
                    os.stat(os.path.expanduser(value))
                except (OSError, ValueError) as e:
                    if isinstance(e, FileNotFoundError | NotADirectoryError):
                        continue
                    why = e.strerror if isinstance(e, OSError) else str(e)
                    self._tell(
                        path,
                        f"{named(path, self.tree)}: {shown(value)} cannot be accessed: {why}; give another path",
                    )

    def find_homes(self) -> None:
        """Refuse paths below a home folder that is unknown here: it could not be opened later."""
        for path, value in leaves(self.tree):
            home = _HOME.match(value) if isinstance(value, str) and "sampling" not in path else None
            if home and os.path.expanduser(home[0]) == home[0]:
                why = (
                    "HOME is not set, and the system has no home folder for this user"
                    if home[0] == "~"
                    else "no such user"
                )
                self._tell(path, f"{named(path, self.tree)}: {shown(value)}: {why}; give the full path")

    def find_infinite(self) -> None:
        """Refuse infinity and NaN where a key takes anything: written down as JSON, they would become null."""
        for path, value in leaves(self.tree):
            if isinstance(value, float) and not isfinite(value) and lookup(path) is None:
                said = "a config is also kept as JSON, which has finite numbers alone; give one, or a text"
                self._tell(path, f"{named(path, self.tree)}: got {shown(value)}: {said}")

    def validate(self) -> Config | None:
        """The Config; or None, and the problems of the base config and of the stages are recorded."""
        config, seen = None, set[tuple[Path, str]]()
        try:
            config = Config.model_validate_json(json.dumps(self.tree))
        except ValidationError as e:
            seen = self._note(self.tree, e, (), seen)
        stages = self.tree.get("stages")
        for n, stage in enumerate(stages if isinstance(stages, list) else ()):
            if not isinstance(stage, dict):
                continue
            merged = stage_tree(self.tree, stage)
            try:
                Config.model_validate_json(json.dumps(merged))
            except ValidationError as e:
                self._note(merged, e, ("stages", n), seen)
        if self.problems:
            self._note_settings(stages if isinstance(stages, list) else ())
        return config

    def _note_settings(self, stages: Sequence[Json]) -> None:
        """Add what is wrong with the settings of functions that are named. Where sections are right, the checks of the
        whole config say it; here that all is told at once."""
        places = [(self.tree, ()), *((stage, ("stages", n)) for n, stage in enumerate(stages))]
        for (tree, above), (path, table) in product(places, TABLES.items()):
            value = get(tree, path) if isinstance(tree, dict) else None
            name = value.get("name") if isinstance(value, dict) else value
            if isinstance(name, str) and name:
                for key, text in setting_problems(dotted(path), chosen(value, table, name), table):
                    at = (*above, *path_of(key, ()))
                    self._tell(at, f"{named(at, self.tree)}: {text}")

    def _note(
        self, tree: Mapping[str, Json], error: ValidationError, above: Path, seen: set[tuple[Path, str]]
    ) -> set[tuple[Path, str]]:
        """Add the problems that are not in `seen`; return all problems."""
        found = faults(tree, error)
        for fault in found:
            at = (*above, *fault.path)
            told = (fault.path, fault.text) in seen or any(
                at[: len(b)] == b or fault.path == b for b in self.broken
            )
            if not told:
                self._tell(at, f"{named(at, self.tree)}: {fault.text}")
        return {(fault.path, fault.text) for fault in found}

    def _tell(self, path: Path, text: str) -> None:
        self.problems.append((origin(self.origins, path), text))


def _unknown(path: Path) -> Path:
    """The path up to the first name that is not in the schema; () if all names are.

    Which settings a table has depends on its function: `chosen.setting_problems` judges them."""
    for n in range(1, len(path) + 1):
        if _in_base(path[: n - 1]) in TABLES:
            return ()
        key = lookup(path[:n])
        if key is None:
            return path[:n]
        if is_open(key.annotation):
            return ()
    return ()


def _replaced(tree: Json, path: Path, value: Json, at: Path) -> Json:
    """A copy of the tree with a value merged in at a path; missing sections are made. at: where the tree stands."""
    if not path:
        return merge(tree, value, _in_base(at))
    if isinstance(tree, list):
        return [_replaced(v, path[1:], value, (*at, n)) if n == path[0] else v for n, v in enumerate(tree)]
    if _in_base(at) in TABLES and (isinstance(tree, str) or path == ("name",)):
        return merge(tree, {path[0]: value}, _in_base(at))
    inner = tree if isinstance(tree, dict) else {}
    return {**inner, path[0]: _replaced(inner.get(path[0]), path[1:], value, (*at, path[0]))}


def _no_override(key: str) -> str:
    """What is expected in place of an argument that is no `key.path=value`."""
    expected = "expected key.path=value, without +, ~ or --"
    name = key.lstrip("+~-")
    if name and lookup(path_of(name, ())):
        return f"{expected}: {name}=VALUE"
    if name and key.startswith("--"):
        hint = did_you_mean(path_of(name, ()))
        return f"no such option (--help lists them); for a setting, {expected}{hint}"
    return expected


def _moved_up(at: Path, gone: Path) -> Path:
    """A path by its new numbers, where an entry of a list is gone."""
    *above, last = gone
    index = at[len(above)] if len(at) > len(above) and at[: len(above)] == tuple(above) else None
    if not isinstance(last, int) or not isinstance(index, int) or index < last:
        return at
    return (*above, index - 1, *at[len(gone) :])


def _in_base(at: Path) -> Path:
    """A path in a stage as it is in the base config."""
    return at[2:] if at[:1] == ("stages",) else at
