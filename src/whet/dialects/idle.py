"""Keys of a foreign file that nothing reads in this run: they are left out, and the report says so.

Such a file often has the settings of a critic or an evaluation that its run does not use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from whet.config.checks import unused
from whet.config.keys import Path
from whet.config.recipes import is_optional
from whet.config.schema import Config
from whet.config.trackers import LISTS
from whet.config.tree import get, merge, origin, path_of
from whet.dialects.tables import Dialect, dialect
from whet.dialects.translate import ReportLine, Translation, declares
from whet.tables import is_installed
from whet.types import Json


def idle(config: Config, stages: Sequence[Config], made: Translation) -> dict[Path, str]:
    """The translated native keys that no stage reads, and why. A file for `whet eval` has no stages."""
    if config.eval.offline:
        return {}
    given = config.model_dump(mode="json", exclude_unset=True)
    return {path: why for path, why in unused(given, stages) if _has(made, path)}


def _has(made: Translation, path: Path) -> bool:
    """Whether the translation wrote a key, or something in it."""
    return bool(origin(made.origins, path)) or any(at[: len(path)] == path for at in made.origins)


def without(tree: Json, paths: Mapping[Path, str], at: Path = ()) -> Json:
    """The tree without the values at these paths, and without sections and lists that this leaves empty, unless an
    empty one still says something. at: where it stands."""
    if isinstance(tree, list):
        return [without(value, paths, (*at, n)) for n, value in enumerate(tree) if (*at, n) not in paths]
    if not isinstance(tree, dict):
        return tree
    rest = {key: without(value, paths, (*at, key)) for key, value in tree.items() if (*at, key) not in paths}
    return {
        key: value
        for key, value in rest.items()
        if value not in ({}, []) or tree[key] == value or is_optional((*at, key))
    }


def noted(made: Translation, paths: Mapping[Path, str]) -> Translation:
    """The report without the native keys that were left out."""
    of = dialect(made.dialect, made.version)
    return replace(made, lines=tuple(_noted(line, paths, of) for line in made.lines))


def _noted(line: ReportLine, paths: Mapping[Path, str], of: Dialect) -> ReportLine:
    """A line without the native keys that were left out; where the key is given, it says which of those that the key
    stands for: what its function adds to them was not asked for."""
    out = {native: why for native in line.native if (why := _why(path_of(native, ()), paths))}
    if not out:
        return line
    row = of.row(re.sub(r"\[\d+\]", "[]", line.key))
    asked = {native: why for native, why in out.items() if row is None or declares(row, native)}
    said = "; ".join(f"{native} {why.removesuffix('; leave it out')}" for native, why in asked.items())
    note = "; ".join(text for text in (line.note, said if line.given else "") if text)
    return replace(line, native=tuple(n for n in line.native if n not in out), note=note)


def at_hand(made: Translation) -> Translation:
    """Without the trackers that a document's default names and that are not installed here; the report says so.

    A file that asks for one by itself is refused by the plan.
    """
    at = ("track", "trackers")
    wanted = get(made.tree, at)
    missing = [name for name in wanted or () if name in LISTS and not is_installed(name)]
    if not missing or not made.origins.get(at, "").startswith("default of "):
        return made
    kept = [name for name in wanted if name not in missing]
    said = f"{', '.join(missing)} is not installed here, so nothing is sent to it"
    lines = (replace(x, note=said) if "track.trackers" in x.native and not x.given else x for x in made.lines)
    return replace(made, tree=merge(made.tree, {"track": {"trackers": kept}}), lines=tuple(lines))


def _why(native: Path, paths: Mapping[Path, str]) -> str:
    return next((why for path, why in paths.items() if path[: len(native)] == native), "")
