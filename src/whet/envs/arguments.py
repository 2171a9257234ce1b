"""Arguments of whet's own environments (`rollout.env.arguments`), as sections like those of a config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from whet.config.environments import AT
from whet.config.faults import argument_problems
from whet.config.sections.base import Section
from whet.types import ConfigError, Json

S = TypeVar("S", bound=Section)


def section(kind: type[S], given: Mapping[str, Json]) -> S:
    """The arguments as a section. ConfigError for keys that it does not have, and for values that it cannot have."""
    try:
        return kind.model_validate_json(json.dumps(given))
    except ValidationError:
        wrong = argument_problems(AT, kind, dict(given))
        raise ConfigError("; ".join(f"{key}: {said}" for key, said in wrong)) from None
