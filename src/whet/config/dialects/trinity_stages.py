"""Trinity-RFT's `stages`: each is a file of its own, the global one with the stage's keys put over it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from whet.config.dialects.key import Key, Translate, Values
from whet.config.dialects.tables import dialect
from whet.config.dialects.translate import translate
from whet.config.faults import shown
from whet.config.tree import STAGE_SECTIONS, get, leaves, merge
from whet.types import ConfigError, Json


def stages(values: Values) -> Mapping[str, Json]:
    """Every stage's own native sections. A key that a stage leaves out is the global one's, as the document says;
    Trinity's code replaces whole sections."""
    out: dict[str, Json] = {}
    base: dict[str, Json] | None = None
    for n, stage in enumerate(values["stages"] or []):
        name = stage.get("stage_name")
        if not name:
            raise ConfigError(f"stages[{n}].stage_name: must be given.")
        own = {key: value for key, value in stage.items() if key != "stage_name" and value is not None}
        native = _native(merge(whole_file(values), own), f"stages[{n}]")
        shared = {key: value for key, value in native.items() if key not in STAGE_SECTIONS}
        base = base or shared
        for path, value in leaves(shared):
            if get(base, path) != value:
                raise ConfigError(
                    f"stages[{n}]: it asks for {'.'.join(map(str, path))}={shown(value)}, which is one for all."
                )
        out[f"stages.{n}.name"] = name
        out |= {f"stages.{n}.{key}": value for key, value in native.items() if key in STAGE_SECTIONS}
    return out


def whole_file(values: Values) -> dict[str, Json]:
    """The global file again, as a tree of all that is not its default."""
    out: dict[str, Json] = {}
    for row in dialect("trinity").rows:
        if row.name in values and values[row.name] != row.default and not row.name.startswith("stages"):
            *above, last = row.name.split(".")
            inner: Json = {} if last == "*" else {last: values[row.name]}
            inner = values[row.name] if last == "*" else inner
            for part in reversed(above):
                inner = {part: inner}
            out = merge(out, inner)
    return out


def _native(file: dict[str, Json], what: str) -> dict[str, Json]:
    done = translate(file, dialect("trinity"), origins={})
    if done.problems:
        raise ConfigError("; ".join(f"{what}: {text}" for _, text in done.problems))
    return done.tree


@functools.cache
def without_stages(function: Translate) -> Translate:
    """The function for a file without stages: with them, each stage says its own."""

    @functools.wraps(function)
    def told(values: Values) -> Mapping[str, Json]:
        return {} if values["stages"] else function(values)

    return told


def one_run(rows: Iterable[Key]) -> tuple[Key, ...]:
    """The rows with every function that a stage answers for itself left out where there are stages."""
    rows = tuple(rows)
    fed: dict[Translate, set[str]] = {}
    for row in rows:
        if row.translate is not None:
            fed.setdefault(row.translate, set()).update(native.split(".")[0] for native in row.native)
    of_stages = {f for f, sections in fed.items() if sections <= set(STAGE_SECTIONS)}
    return tuple(
        replace(row, translate=without_stages(row.translate))
        if row.translate in of_stages and row.translate
        else row
        for row in rows
    )
