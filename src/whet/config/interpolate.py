"""`${...}` in a config: OmegaConf's references and `${oc.env:VAR,default}`, failures by their place."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from whet.config.keys import Path
from whet.config.tree import leaves, merge
from whet.types import Json


def interpolate(tree: dict[str, Json], defaults: dict[str, Json]) -> tuple[dict[str, Json], dict[Path, str]]:
    """The tree with every `${...}` replaced, and what went wrong by path (the value there is then None).

    `defaults` can be referred to but do not enter the result. '???' marks a value that must be given.
    """
    wrong: dict[Path, str] = {}
    if not any(isinstance(v, str) and ("${" in v or v == "???") for _, v in leaves(tree)):
        return tree, wrong
    readable = _readable(tree, (), wrong)
    return _resolved(readable, OmegaConf.create(merge(defaults, readable)), (), wrong), wrong


def _readable(value: Json, path: Path, wrong: dict[Path, str]) -> Any:
    """The tree without texts that OmegaConf cannot parse: one of them would spoil the reading of all."""
    if isinstance(value, dict):
        return {k: _readable(v, (*path, k), wrong) for k, v in value.items()}
    if isinstance(value, list):
        return [_readable(v, (*path, n), wrong) for n, v in enumerate(value)]
    if isinstance(value, str) and "${" in value:
        try:
            OmegaConf.create({"value": value})
        except GrammarParseError as e:
            wrong[path] = f"{_first_line(e)}; write \\${{ where the text itself has ${{"
            return None
    return value


def _resolved(written: Json, node: Any, path: Path, wrong: dict[Path, str]) -> Any:
    """What was written, with OmegaConf's values in the places of its texts."""
    if isinstance(written, dict):
        return {
            k: _resolved(v, _get(node, k, (*path, k), wrong), (*path, k), wrong) for k, v in written.items()
        }
    if isinstance(written, list):
        return [
            _resolved(v, _get(node, n, (*path, n), wrong), (*path, n), wrong) for n, v in enumerate(written)
        ]
    if not isinstance(node, DictConfig | ListConfig):
        return node
    try:
        return OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as e:
        wrong[path] = _first_line(e)
        return None


def _get(node: Any, key: str | int, path: Path, wrong: dict[Path, str]) -> Any:
    try:
        return node[key]
    except OmegaConfBaseException as e:
        wrong[path] = "must be given" if "MissingMandatory" in type(e).__name__ else _first_line(e)
        return None


def _first_line(error: Exception) -> str:
    if unset := re.search(r"Environment variable '(.+)' not found", str(error)):
        return f"the environment has no {unset[1]}; set it, or give a default: ${{oc.env:{unset[1]},default}}"
    return str(error).splitlines()[0].rstrip(".")
