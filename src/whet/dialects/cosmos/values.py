"""Reading a Cosmos-RL file's values: what is no number where one is due is refused by the name of its key."""

from __future__ import annotations

import re
from collections.abc import Mapping

from whet.dialects.row import Values
from whet.types import ConfigError, Json

POLICY = "train.train_policy."
MESH = "policy.parallelism."


def is_sft(values: Values) -> bool:
    """Whether these are the values of an SFT job: its table has columns of conversations."""
    return POLICY + "conversation_column_name" in values


def whole(values: Values, key: str, *, least: int | None = None, null: int | None = None) -> int:
    """A whole number, at least `least`; `null` stands for a null, if null may be given."""
    value = null if values[key] is None else values[key]
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{key}={value!r}: expected a whole number{bound}.")
    return value


def number(values: Values, key: str) -> int | float:
    """A number; a whole one stays one, since Cosmos tells 1 and 1.0 apart."""
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}={value!r}: expected a number.")
    return value


def text(values: Values, key: str) -> str:
    """A text, empty for null."""
    value = values[key]
    if not isinstance(value, str | None):
        raise ConfigError(f"{key}={value!r}: expected text.")
    return value or ""


def texts(values: Values, key: str) -> list[str]:
    """A text or a list of texts, without empty ones."""
    value = values[key]
    several = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | None) for one in several):
        raise ConfigError(f"{key}={value!r}: expected text or a list of texts.")
    return [one for one in several if one]


def at_revision(values: Values, name: str, key: str, *, kind: str = "") -> str:
    """A revision is of ORG/NAME on the hub; a folder of this machine has none. kind: 'datasets/' or nothing."""
    wanted = text(values, key)
    if wanted in ("", "main"):
        return name
    if name.startswith("hf://") and "@" not in name:
        return f"{name}@{wanted}"
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ConfigError(
            f"{key}={wanted!r}: {name!r} is no ORG/NAME of the hub and has no revisions; leave it out."
        )
    return f"hf://{kind}{name}@{wanted}"


def weights(values: Values, key: str) -> dict[str, float]:
    """A name, a list of names (weight 1 each) or names with weights, as names with weights."""
    given: Json = values[key]
    if not isinstance(given, Mapping):
        return dict.fromkeys(texts(values, key), 1.0)
    if any(isinstance(weight, bool) or not isinstance(weight, int | float) for weight in given.values()):
        raise ConfigError(f"{key}={dict(given)!r}: expected a number for every name.")
    return {str(name): float(weight) for name, weight in given.items()}
