"""Settings of what a key names (advantages, losses, families of new models ...): the lines of `settings.tsv`, a section
for each name.

`algorithm.loss: {name: gspo, clip_low: 3e-4}` gives the function `gspo` of `whet.algos.losses` its `clip_low`. Readable
without torch; a test holds every section to the signature of its function. A function of the user's has no section: its
settings are those of its own signature. The columns:

    part       of `functions.tsv`: the last part of the key
    functions  those of the part that have the setting, each with this default
    name       as in the signature
    type       bool, text, or int or number with bounds (number >0 <=1); one_of:a,b; list of TYPE; TYPE or TYPE, or null
    default    JSON
    meaning    its documentation
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model

from whet.config.sections.base import Section
from whet.tables import lines

_LINES = lines("whet.config", "settings.tsv")
_PLAIN: dict[str, Any] = {"bool": bool, "text": str, "int": int, "number": float, "null": None}
_BOUNDS = {">=": "ge", ">": "gt", "<=": "le", "<": "lt"}


class Settings(Section):
    """What is common to the sections made here. Their documentation is in the table: no source is searched for it."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def section(part: str, function: str) -> type[Section]:
    """The settings of a function."""
    return create_model(function, __base__=Settings, **dict(_fields(part, function)))


def line_of(part: str, function: str, name: str) -> int:
    """The line of `settings.tsv` with a setting, from 1; the first is that of the columns."""
    wanted = (part, name)
    return next(
        number
        for number, line in enumerate(_LINES, 2)
        if (line["part"], line["name"]) == wanted and function in line["functions"].split()
    )


def _fields(part: str, function: str) -> Iterator[tuple[str, Any]]:
    for line in _LINES:
        if line["part"] == part and function in line["functions"].split():
            value = json.loads(line["default"])
            default = tuple(value) if isinstance(value, list) else value
            yield line["name"], (_annotation(line["type"]), Field(default, description=line["meaning"]))


def _annotation(said: str) -> Any:
    """The type that a line of the table says."""
    first, either, other = said.partition(" or ")
    if either:
        return _annotation(first) | _annotation(other)
    if said.startswith("list of "):
        return tuple[_annotation(said.removeprefix("list of ")), ...]  # type: ignore[misc]
    if said.startswith("one_of:"):
        names = said.removeprefix("one_of:").split(",")
        return Literal[tuple(int(name) if name.isdigit() else name for name in names)]
    plain, *limits = said.split()
    kind = _PLAIN[plain]
    bounds = {_BOUNDS[limit.rstrip("0123456789.")]: kind(limit.lstrip("<>=")) for limit in limits}
    return Annotated[kind, Field(**bounds)] if bounds else kind
