"""Keys of a foreign file that nothing reads in this run: they are left out, and the report says so.

Such a file often has the settings of a critic or an evaluation that its run does not use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from whet.config.checks import unused
from whet.config.dialects.translate import Line, Translation
from whet.config.keys import Path
from whet.config.schema import Config
from whet.config.tree import origin, path_of
from whet.types import Json


def idle(config: Config, stages: Sequence[Config], made: Translation) -> dict[Path, str]:
    """The translated native keys that no stage reads, and why."""
    given = config.model_dump(mode="json", exclude_unset=True)
    return {path: why for path, why in unused(given, stages) if origin(made.origins, path)}


def without(tree: Json, paths: Mapping[Path, str]) -> Json:
    """The tree without the values at these paths, and without sections that this leaves empty."""
    if isinstance(tree, list):
        return [without(value, _inside(paths, n)) for n, value in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    rest = {key: without(value, _inside(paths, key)) for key, value in tree.items() if (key,) not in paths}
    return {key: value for key, value in rest.items() if value != {} or tree[key] == {}}


def noted(line: Line, paths: Mapping[Path, str]) -> Line:
    """A line that says which of its native keys were left out."""
    out = {native: why for native in line.native if (why := _why(path_of(native, ()), paths))}
    if not out:
        return line
    said = "; ".join(f"{native} {why.removesuffix('; leave it out')}" for native, why in out.items())
    note = f"{line.note}; {said}" if line.note else said
    return replace(line, native=tuple(n for n in line.native if n not in out), note=note)


def _inside(paths: Mapping[Path, str], key: str | int) -> dict[Path, str]:
    return {path[1:]: why for path, why in paths.items() if path[0] == key and len(path) > 1}


def _why(native: Path, paths: Mapping[Path, str]) -> str:
    return next((why for path, why in paths.items() if path[: len(native)] == native), "")
