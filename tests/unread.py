"""An algorithm's keys as a plan looks at them: what cannot work together, and what nothing reads."""

from __future__ import annotations

import json
from typing import Any

import sections
from whet.config.checks import unused
from whet.config.keys import dotted
from whet.config.recipes import resolve
from whet.config.schema import Config
from whet.types import ConfigError


def check_algorithm(name: str, **keys: Any) -> None:
    """Raise ConfigError as a plan would for `algorithm: {name: ..., keys...}`; several optimizer steps a batch."""
    tree = {"algorithm": sections.algorithm(name, **keys), "train": {"update_epochs": 2}}
    cfg = Config.model_validate_json(json.dumps(tree))
    resolve(cfg.algorithm)
    if said := [f"{dotted(path)}: {why}" for path, why in unused({"algorithm": tree["algorithm"]}, [cfg])]:
        raise ConfigError("; ".join(said))
