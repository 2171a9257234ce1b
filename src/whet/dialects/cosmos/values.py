"""What several functions read: the kind of file, its version, and values that can be written in several ways."""

from __future__ import annotations

import re
from collections.abc import Mapping

from whet.dialects import versions
from whet.dialects.row import Values
from whet.types import ConfigError

POLICY = "train.train_policy."
MESH = "policy.parallelism."


def is_sft(values: Values) -> bool:
    """Whether these are the values of an SFT job: its table has a system prompt."""
    return POLICY + "system_prompt" in values


def since(values: Values, version: str) -> bool:
    """Whether the file is read as this release or a newer one."""
    return versions.since(values, "cosmos", version)


def texts(values: Values, key: str) -> list[str]:
    """A text or a list of texts, without empty ones."""
    value = values[key]
    return [one for one in (value if isinstance(value, list) else [value]) if one]


def weights(values: Values, key: str) -> dict[str, float]:
    """A name, a list of names (weight 1 each) or names with weights, as names with weights."""
    given = values[key]
    if not isinstance(given, Mapping):
        names = given if isinstance(given, list) else [given]
        if not all(isinstance(name, str | None) for name in names):
            raise ConfigError(f"{key}={given!r}: expected a name, a list of names, or names with weights.")
        return dict.fromkeys(filter(None, names), 1.0)
    if any(isinstance(weight, bool) or not isinstance(weight, int | float) for weight in given.values()):
        raise ConfigError(f"{key}={dict(given)!r}: expected a number for every name.")
    return {str(name): float(weight) for name, weight in given.items()}


def at_revision(values: Values, name: str, key: str, *, kind: str = "") -> str:
    """A revision is of ORG/NAME on the hub; a folder of this machine has none. kind: 'datasets/' or nothing."""
    wanted = values[key] or "main"
    if wanted == "main":
        return name
    if name.startswith("hf://") and "@" not in name:
        return f"{name}@{wanted}"
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ConfigError(
            f"{key}={wanted!r}: {name!r} is not a hub id (ORG/NAME), so it has no revisions; leave it out."
        )
    return f"hf://{kind}{name}@{wanted}"
