"""Arguments of whet's own environments (`rollout.env.arguments`), as sections like those of a config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from whet.config.environments import AT
from whet.config.faults import shown
from whet.config.keys import Path, dotted, words
from whet.config.sections.base import Section
from whet.config.tree import get
from whet.tables import near
from whet.types import ConfigError, Json

S = TypeVar("S", bound=Section)


def section(kind: type[S], given: Mapping[str, Json]) -> S:
    """The arguments as a section. ConfigError for keys that it does not have, and for values that it cannot have."""
    try:
        return kind.model_validate_json(json.dumps(given))
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        told = dict.fromkeys(_told(kind, dict(given), fault) for fault in faults)
        raise ConfigError("; ".join(told)) from None


def _told(kind: type[Section], given: Json, fault: ErrorDetails) -> str:
    """What is wrong, and what is expected there."""
    *above, last = fault["loc"]
    if fault["type"] == "extra_forbidden":
        known = _section(_types(kind, above)[-1]).model_fields
        return f"{_at(above)}: {last!r} is not known{near(str(last), known)}; it has: {', '.join(known)}"
    known_types = _types(kind, fault["loc"])
    path = fault["loc"][: len(known_types) - 1]
    value = " is missing" if fault["type"] == "missing" else f"={shown(get(given, path))}"
    return f"{_at(path)}{value}; expected {words(known_types[-1])}"


def _at(path: Path | list[str | int]) -> str:
    return f"{AT}.{dotted(path)}" if path else AT


def _types(kind: type[Section], path: Path | list[str | int]) -> list[Any]:
    """The types of the values along a path, as far as it goes by keys and places; pydantic's goes into unions, too."""
    found: list[Any] = [kind]
    for part in path:
        if isinstance(part, int):
            found.append(get_args(found[-1])[0])
        elif get_origin(found[-1]) is dict:
            found.append(get_args(found[-1])[1])
        elif (inner := next(_sections(found[-1]), None)) is not None:
            found.append(get_type_hints(inner, include_extras=True)[part])
        else:
            break
    return found


def _section(hint: Any) -> type[Section]:
    return next(_sections(hint))


def _sections(hint: Any) -> Iterator[type[Section]]:
    """The section that a type is, or may be beside null."""
    for one in (hint, *get_args(hint)):
        if isinstance(one, type) and issubclass(one, Section):
            yield one
