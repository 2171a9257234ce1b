"""Selects the trainable parameters by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from transformers import PreTrainedModel

from whet.models.lora import learned
from whet.types import ConfigError


def choose(model: PreTrainedModel, rules: Mapping[str, bool]) -> None:
    """Set what requires gradients: by the first pattern found in a parameter's name, and all others do.

    Weights under adapters never do. Errors: ConfigError for a pattern that occurs in no name, or if nothing is left.
    """
    named = dict(learned(model))
    for pattern in rules:
        if not any(re.search(pattern, name) for name in named):
            raise ConfigError(
                f"train.trainable: {pattern!r} occurs in no name of a parameter; examples of names: "
                f"{', '.join(list(named)[:4])} ..."
            )
    for name, p in named.items():
        p.requires_grad_(next((learns for at, learns in rules.items() if re.search(at, name)), True))
    if not any(p.requires_grad for p in named.values()):
        raise ConfigError(
            f"train.trainable: {dict(rules)} leaves no parameter trainable; set a pattern to true"
        )
