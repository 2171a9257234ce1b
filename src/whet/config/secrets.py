"""What must not be written down: values that belong to names like API_KEY."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from whet.config.schema import Config
from whet.types import Json

MASK = "***"
"""Stands where a secret was, in config.yaml and in everything else that is made of a config."""

_SECRET = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether an environment variable, or an argument, of this name looks like it holds a secret."""
    return _SECRET.search(name) is not None


_PASSWORD = re.compile(r"(://[^/@:]*:)(?P<user>[^@]*)(?=@)|((?:^|[?&])password=)(?P<query>[^&]*)")


def masked_url(url: str) -> str:
    """The same with its password struck out, be it before the host or a parameter."""
    return _PASSWORD.sub(lambda m: f"{m[1] or m[3]}{MASK}", url)


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """The same with the values of secrets struck out."""
    return {name: MASK if is_secret(name) else value for name, value in env.items()}


def secrets_of(cfg: Config) -> list[str]:
    """The secret values that a config holds."""
    passwords = [m["user"] or m["query"] for m in _PASSWORD.finditer(cfg.buffer.url)]
    return [value for name, value in cfg.guard.env.items() if is_secret(name)] + [p for p in passwords if p]


def dump(cfg: Config, *, exclude: Any = None, exclude_unset: bool = False) -> dict[str, Json]:
    """A config as plain values that may be written down. A changed secret changes nothing in it."""
    tree = cfg.model_dump(mode="json", exclude=exclude, exclude_unset=exclude_unset)
    guard = tree.get("guard", {})
    if "env" in guard:
        guard["env"] = masked(guard["env"])
    if url := tree.get("buffer", {}).get("url"):
        tree["buffer"]["url"] = masked_url(url)
    return tree
