"""Configs as plain values: merge them, walk them, find a place in them, put a stage over the base."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from whet.config.keys import KEPT, TABLES, Path, dotted, lookup
from whet.config.schema import AlgorithmConfig, StageConfig
from whet.types import Json

STAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""What a stage may be called: files are named by it."""
STAGE_SECTIONS = tuple(name for name in StageConfig.model_fields if name != "name")


def merge(base: Json, over: Json, at: Path = ()) -> Json:
    """Dicts merged key by key, all else replaced; neither is changed. at: their path in a config.

    A table of settings is put over one of the same name; another name inherits nothing, unless its key is in `KEPT`."""
    if at in TABLES and isinstance(over, dict):
        base = {"name": base} if isinstance(base, str) else base
        if (
            at not in KEPT
            and isinstance(base, dict)
            and over.get("name", base.get("name")) != base.get("name")
        ):
            return over
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{k: merge(base[k], v, (*at, k)) if k in base else v for k, v in over.items()}}


def leaves(tree: Json, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is not a filled dict or list, with its path."""
    if not tree or not isinstance(tree, dict | list):
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from leaves(value, (*path, key))


def differing(one: Json, other: Json) -> tuple[str, ...]:
    """The keys whose values differ between two trees, dotted and sorted."""
    first, second = dict(leaves(one)), dict(leaves(other))
    paths = {path for path in (*first, *second) if first.get(path, ...) != second.get(path, ...)}
    return tuple(sorted(dotted(path) for path in paths))


def get(tree: Json, path: Path) -> Json:
    """The value at a path; None where there is none."""
    for part in path:
        if isinstance(part, int):
            tree = tree[part] if isinstance(tree, list) and part < len(tree) else None
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def with_values(tree: Json, values: Mapping[Path, Json], path: Path = ()) -> Any:
    """The tree with other values at some paths."""
    if path in values:
        return values[path]
    if isinstance(tree, dict):
        return {k: with_values(v, values, (*path, k)) for k, v in tree.items()}
    if isinstance(tree, list):
        return [with_values(v, values, (*path, n)) for n, v in enumerate(tree)]
    return tree


def without(tree: Json, paths: Collection[Path], at: Path = ()) -> Any:
    """The tree without the values at some paths. at: where it stands."""
    if isinstance(tree, dict):
        return {k: without(v, paths, (*at, k)) for k, v in tree.items() if (*at, k) not in paths}
    if isinstance(tree, list):
        return [without(v, paths, (*at, n)) for n, v in enumerate(tree) if (*at, n) not in paths]
    return tree


def stage_tree(base: Mapping[str, Json], stage: Mapping[str, Json]) -> dict[str, Json]:
    """One stage's whole config. A stage with another recipe does not inherit the other algorithm keys."""
    out = {k: v for k, v in base.items() if k != "stages"}
    default = AlgorithmConfig.model_fields["name"].default
    inherited = get(out, ("algorithm", "name")) or default
    if (get(dict(stage), ("algorithm", "name")) or inherited) != inherited:
        out.pop("algorithm", None)
    return merge(out, {k: v for k, v in stage.items() if k in STAGE_SECTIONS})


def stage_names(tree: Mapping[str, Json]) -> list[str]:
    """Names of the stages; '' where one has none."""
    stages = tree.get("stages")
    return [str(get(s, ("name",)) or "") for s in stages] if isinstance(stages, list) else []


def path_of(key: str, stages: Sequence[str]) -> Path:
    """`data.eval.0.limit`, `data.eval[0].limit` or `stages.sft.train.steps` as a path, indexes as numbers."""
    path: Path = ()
    for part in re.sub(r"\[(\d+)\]", r".\1", key).split("."):
        if path == ("stages",) and part in stages:
            path = (*path, list(stages).index(part))
        elif path and _is_list(path) and part.isdecimal():
            path = (*path, int(part))
        else:
            path = (*path, part)
    return path


@lru_cache(maxsize=4096)
def _is_list(path: Path) -> bool:
    key = lookup(path)
    return key is not None and "a list" in key.words


def origin(origins: Mapping[Path, str], path: Path) -> str:
    """Where a value, or the nearest section around it, was given; '' if nowhere. A stage may have it from the base."""
    in_stage = len(path) > 2 and path[0] == "stages" and path[2] in STAGE_SECTIONS
    if not in_stage:
        return origins.get(path[: _given(origins, path)], "")
    own, base = _given(origins, path, 3), _given(origins, path[2:]) + 2
    lists = [n for n in range(3, len(path)) if isinstance(path[n], int)]
    inherited = base > 2 and own < min([base, *lists])  # entries of a list of the stage are its own
    return origins[path[2:base]] if inherited else origins.get(path[: own or 2], "")


def _given(origins: Mapping[Path, str], path: Path, least: int = 1) -> int:
    """Length of the longest beginning of the path, of at least this length, that has a place; 0: none."""
    return next((n for n in range(len(path), least - 1, -1) if path[:n] in origins), 0)
