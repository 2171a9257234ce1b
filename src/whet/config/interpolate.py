"""`${...}` in a config: OmegaConf's references and `${oc.env:VAR,default}`, failures by their place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from whet.config.keys import Path
from whet.config.tree import leaves, merge
from whet.types import Json

MOST_REFERENCES = 1_000
"""In one config: reading one takes a millisecond."""
MOST_FOLLOWED = 3_000
"""Values taken through references."""
_TOO_MANY = f"stands for references that stand for references again: more than {MOST_FOLLOWED} values in all"


def interpolate(tree: dict[str, Json], defaults: dict[str, Json]) -> tuple[dict[str, Json], dict[Path, str]]:
    """The tree with every `${...}` replaced, and what went wrong by path (the value there is then None).

    `defaults` can be referred to but do not enter the result. '???' marks a value that must be given.
    """
    wrong: dict[Path, str] = {}
    referring = [path for path, v in leaves(tree) if isinstance(v, str) and "${" in v]
    if len(referring) > MOST_REFERENCES:
        return tree, {
            referring[0]: f"the first of {len(referring)} references; at most {MOST_REFERENCES} are read"
        }
    if not any(isinstance(v, str) and ("${" in v or v == "???") for _, v in leaves(tree)):
        return tree, wrong
    readable = _readable(tree, (), wrong)
    left = _Left(MOST_FOLLOWED)
    read = _reached(merge(defaults, readable), {path[0] for path in referring} | _missing(readable))
    some = {k: v for k, v in readable.items() if k in read}
    out = readable | _resolved(some, _counting(OmegaConf.create(read), left), (), wrong)
    if left.values < 0:
        wrong = {next(path for path, said in wrong.items() if "TooManyReferences" in said): _TOO_MANY}
    return out, wrong


_PLAIN = re.compile(r"\$\{(?:oc\.env:[^${}]*|([A-Za-z_]\w*)[\w.\[\]]*)\}")
"""A variable of the environment, or a place in the config, given from its root."""


def _missing(tree: dict[str, Json]) -> set[str | int]:
    return {path[0] for path, v in leaves(tree) if v == "???"}


def _reached(tree: dict[str, Json], names: set[Any]) -> dict[str, Json]:
    """The sections that are named and all that their references lead to: OmegaConf takes long to read a whole config.
    The whole tree, where it would take OmegaConf to tell."""
    read: dict[str, Json] = {}
    while names:
        name = names.pop()
        if name in read or name not in tree:
            continue
        read[name] = tree[name]
        for _, text in leaves({name: tree[name]}):
            if isinstance(text, str) and "${" in text:
                if "${" in _PLAIN.sub("", text):
                    return tree
                names |= set(_PLAIN.findall(text)) - {""}
    return read


@dataclass
class _Left:
    """How much more may be taken through references: those that stand for references again blow a few lines up to
    whatever size."""

    values: int

    def take(self, node: Any) -> None:
        self.values -= _size(node)
        if self.values < 0:
            raise TooManyReferences(_TOO_MANY)


class TooManyReferences(OmegaConfBaseException):
    """Nothing more is resolved."""


def _counting(node: Any, left: _Left) -> Any:
    """The same config, whose every following of a reference is counted. OmegaConf makes its nodes itself and has no
    place for a count, so their class is changed once they are made."""
    if isinstance(node, DictConfig | ListConfig):
        object.__setattr__(
            node, "__class__", _CountingDict if isinstance(node, DictConfig) else _CountingList
        )
        node.__dict__["_left"] = left
        inside = node._content
        if not isinstance(inside, dict | list):  # null or a reference
            return node
        for child in inside.values() if isinstance(inside, dict) else inside:
            _counting(child, left)
    return node


class _CountingDict(DictConfig):
    def _select_impl(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._select_impl(*args, **kwargs)
        self.__dict__["_left"].take(found[-1])
        return found


class _CountingList(ListConfig):
    def _select_impl(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._select_impl(*args, **kwargs)
        self.__dict__["_left"].take(found[-1])
        return found


def _size(node: Any) -> int:
    """Values in a node; a long text counts for several."""
    inside = (
        node._content
        if isinstance(node, DictConfig | ListConfig)
        else getattr(node, "_value", lambda: None)()
    )
    if isinstance(inside, dict | list):
        return 1 + sum(map(_size, inside.values() if isinstance(inside, dict) else inside))
    return 1 + (len(inside) // 100 if isinstance(inside, str) else 0)


def _readable(value: Json, path: Path, wrong: dict[Path, str]) -> Any:
    """The tree without texts that OmegaConf cannot parse: one of them would spoil the reading of all."""
    if isinstance(value, dict):
        return {k: _readable(v, (*path, k), wrong) for k, v in value.items()}
    if isinstance(value, list):
        return [_readable(v, (*path, n), wrong) for n, v in enumerate(value)]
    if isinstance(value, str) and "${" in value:
        try:
            OmegaConf.create({"value": value})
        except RecursionError:
            wrong[path] = "its references nest too deep"
            return None
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
    except RecursionError:
        wrong[path] = "its references nest too deep"
        return None
    except OmegaConfBaseException as e:
        wrong[path] = _first_line(e)
        return None


def _get(node: Any, key: str | int, path: Path, wrong: dict[Path, str]) -> Any:
    try:
        return node[key]
    except RecursionError:
        wrong[path] = "its references nest too deep"
        return None
    except OmegaConfBaseException as e:
        wrong[path] = "must be given" if "MissingMandatory" in type(e).__name__ else _first_line(e)
        return None


def _first_line(error: Exception) -> str:
    if unset := re.search(r"Environment variable '(.+)' not found", str(error)):
        return f"the environment has no {unset[1]}; set it, or give a default: ${{oc.env:{unset[1]},default}}"
    return str(error).splitlines()[0].rstrip(".")
