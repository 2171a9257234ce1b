"""`${...}` in a config: references of OmegaConf and `${oc.env:VAR,default}`, errors by their path."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from whet.config.keys import Path
from whet.config.tree import get, leaves, merge, with_values
from whet.types import Json

MOST_REFERENCES = 1_000
"""Maximum number of references in one config: reading one takes a millisecond."""
MOST_FOLLOWED = 3_000
"""Maximum number of values resolved through references."""
_TOO_MANY = f"refers to nested references: more than {MOST_FOLLOWED} values in total; use fewer"


def interpolate(tree: dict[str, Json], defaults: dict[str, Json]) -> tuple[dict[str, Json], dict[Path, str]]:
    """The tree with every `${...}` replaced, and errors by path (the value there is then None).

    References to `defaults` are allowed, but `defaults` do not enter the result. '???' marks a required value.
    """
    wrong: dict[Path, str] = {}
    referring = [path for path, text in _texts(tree).items() if "${" in text]
    if len(referring) > MOST_REFERENCES:
        said = f"is the first of {len(referring)} references; at most {MOST_REFERENCES} are allowed"
        return tree, {referring[0]: said}
    readable = _direct(tree, merge(defaults, tree)) if referring else tree
    left_over = _texts(readable)
    for path, text in left_over.items():
        if "${" in text and (said := _unreadable(text)):
            wrong[path] = said  # one such text would make the whole config unreadable to OmegaConf
    readable = with_values(readable, dict.fromkeys(wrong)) if wrong else readable
    wanted = [path for path in left_over if path not in wrong]
    wanted.sort(key=lambda path: left_over[path] == "???")
    if not wanted:
        return readable, wrong
    left = _Left(MOST_FOLLOWED)
    read = _reached(merge(defaults, readable), wanted)
    node = _counting(OmegaConf.create(read), left)
    out = with_values(readable, {path: _resolved(node, path, wrong) for path in wanted})
    if left.values < 0:
        wrong = {next(path for path, said in wrong.items() if "TooManyReferences" in said): _TOO_MANY}
    return out, wrong


def _texts(tree: Json) -> dict[Path, str]:
    """The texts that refer to something, and the values that must be given."""
    return {path: v for path, v in leaves(tree) if isinstance(v, str) and ("${" in v or v == "???")}


_KEY = r"([A-Za-z_][\w.\[\]]*)"
_PLAIN = re.compile(rf"\$\{{(?:oc\.env:[^${{}}]*|{_KEY}|oc\.select:{_KEY}(?:,[^${{}}]*)?)\}}")
"""A variable of the environment, or a key of the config as an absolute path, perhaps with a default."""


_PATH = r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)"
_DIRECT = re.compile(rf"\$\{{(?:{_PATH}|oc\.select:{_PATH},null)\}}")
"""A reference to a key of the config, which may be absent where null stands for it."""
_LONGEST_CHAIN = 8
_SHORT = 32
"""Maximum number of values in a section that is copied here, and of references in a text."""
_OPEN = object()
"""What only OmegaConf can say."""


def _direct(value: Json, whole: Mapping[str, Json]) -> Any:
    """The tree with references to plain values, direct or chained, and texts of such references replaced. The result
    is that of OmegaConf, a hundred times as fast, and most references in files of other systems are of this kind."""
    if isinstance(value, dict):
        return {k: _direct(v, whole) for k, v in value.items()}
    if isinstance(value, list):
        return [_direct(v, whole) for v in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    found = _followed(value, whole)
    return value if found is _OPEN else found


def _followed(text: str, whole: Mapping[str, Json]) -> Any:
    """What a text with references stands for."""
    found: Any = text
    for _ in range(_LONGEST_CHAIN):
        place = _DIRECT.fullmatch(found)
        if place is None:
            return _filled_in(found, whole)
        found = _pointed_at(place, whole)
        if not isinstance(found, str) or "${" not in found:
            return found if _is_plain(found) else _OPEN
    return _OPEN


def _filled_in(text: str, whole: Mapping[str, Json]) -> Any:
    """A text among whose words are references to short plain texts."""
    places = list(_DIRECT.finditer(text))
    found = [_pointed_at(place, whole) for place in places[:_SHORT]]
    short = all(isinstance(one, str) and len(one) < 1000 and _is_plain(one) for one in found)
    if not short or len(found) < len(places) or not _is_plain(_DIRECT.sub("", text)):
        return _OPEN
    values = iter(found)
    return _DIRECT.sub(lambda _: next(values), text)


def _pointed_at(place: re.Match[str], whole: Mapping[str, Json]) -> Any:
    """The value of a key; None for one that is absent and may be."""
    found: Any = whole
    for part in (place[1] or place[2]).split("."):
        if not isinstance(found, dict) or part not in found:
            return None if place[2] and (found is None or isinstance(found, dict)) else _OPEN
        found = found[part]
    return copy.deepcopy(found) if isinstance(found, dict | list) and _is_plain(found) else found


def _is_plain(value: Any) -> bool:
    """Whether a value stands for itself; a section too, if it is small."""
    if isinstance(value, dict | list):
        inside = list(islice(leaves(value), _SHORT + 1))
        return len(inside) <= _SHORT and all(
            _is_plain(v) for _, v in inside if not isinstance(v, dict | list)
        )
    return value is not _OPEN and not (
        isinstance(value, str) and (value == "???" or "$" in value or "\\" in value)
    )


def _reached(tree: dict[str, Json], paths: Sequence[Path]) -> dict[str, Json]:
    """The values at these paths and all values that they refer to, because OmegaConf takes long to read a whole config.
    The whole tree, where only OmegaConf can find the references."""
    read: dict[Path, Json] = {}
    todo = list(paths)
    while todo:
        path = _to_a_list(tree, todo.pop())
        if path in read:
            continue
        read[path] = get(tree, path)
        for _, text in leaves(read[path]):
            if isinstance(text, str) and "${" in text:
                if "${" in _PLAIN.sub("", text):
                    return tree
                said = ("".join(keys) for keys in _PLAIN.findall(text))
                todo += [at for key in said if key and (at := _place(tree, key)) is not None]
    out: dict[str, Json] = {}
    for path, value in read.items():
        inner = value
        for part in reversed(path):
            inner = {part: inner}
        out = merge(out, inner)
    return out


def _to_a_list(tree: Json, path: Path) -> Path:
    """The path up to the first list on it, because indices are valid only in the whole list."""
    for n in range(len(path)):
        if isinstance(get(tree, path[:n]) if n else tree, list):
            return path[:n]
    return path


def _place(tree: Json, said: str) -> Path | None:
    """The path of an absolute reference, as far as it exists; None: nothing exists."""
    path: Path = ()
    for part in re.split(r"[.\[\]]+", said.rstrip("]")):
        here = get(tree, path) if path else tree
        if not isinstance(here, dict) or part not in here:
            break
        path = (*path, part)
    return path or None


@dataclass
class _Left:
    """Number of values that may still be resolved: nested references can expand a few lines to any size."""

    values: int

    def take(self, node: Any) -> None:
        self.values -= _size(node)
        if self.values < 0:
            raise TooManyReferences(_TOO_MANY)


class TooManyReferences(OmegaConfBaseException):
    """The limit on resolved values is exceeded."""


def _counting(node: Any, left: _Left) -> Any:
    """The same config with a count of resolved references. OmegaConf creates its nodes itself and has no hook for a
    count, so their class is changed after creation."""
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
    """Number of values in a node; a long text counts as several."""
    inside = (
        node._content
        if isinstance(node, DictConfig | ListConfig)
        else getattr(node, "_value", lambda: None)()
    )
    if isinstance(inside, dict | list):
        return 1 + sum(map(_size, inside.values() if isinstance(inside, dict) else inside))
    return 1 + (len(inside) // 100 if isinstance(inside, str) else 0)


@lru_cache(maxsize=1024)
def _unreadable(text: str) -> str:
    """Why OmegaConf cannot parse a text, or ''."""
    try:
        OmegaConf.create({"value": text})
    except RecursionError:
        return "its references are nested too deeply"
    except GrammarParseError as e:
        return f"{_first_line(e)}; write \\${{ for a literal ${{"
    return ""


def _resolved(node: Any, path: Path, wrong: dict[Path, str]) -> Any:
    """The value of OmegaConf at a path."""
    for n, part in enumerate(path, 1):
        node = _get(node, part, path[:n], wrong)
    if not isinstance(node, DictConfig | ListConfig):
        return node
    try:
        return OmegaConf.to_container(node, resolve=True)
    except RecursionError:
        wrong[path] = "its references are nested too deeply"
        return None
    except OmegaConfBaseException as e:
        wrong[path] = _first_line(e)
        return None


def _get(node: Any, key: str | int, path: Path, wrong: dict[Path, str]) -> Any:
    try:
        return node[key]
    except RecursionError:
        wrong[path] = "its references are nested too deeply"
        return None
    except OmegaConfBaseException as e:
        wrong[path] = "must be given" if "MissingMandatory" in type(e).__name__ else _first_line(e)
        return None


def _first_line(error: Exception) -> str:
    if unset := re.search(r"Environment variable '(.+)' not found", str(error)):
        return f"the environment has no variable {unset[1]}; set it, or give a default: ${{oc.env:{unset[1]},default}}"
    return str(error).splitlines()[0].rstrip(".")
