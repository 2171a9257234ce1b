"""Rules over several keys that need a computation, each with overrides that break it: lines `computed` of `rules.tsv`.

The text of the error is not written down a second time: `error` breaks the rule and takes what the check says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from whet.config.checks import hard_problems
from whet.config.load import load
from whet.tables import lines
from whet.types import Json

BASE: Mapping[str, Json] = {
    "model": {"scratch": {}},
    "tokenizer": {"build": "chars"},
    "data": {"train": [{"path": "train.jsonl"}]},
    "rewards": {"answer": {"function": "exact"}},
    "train": {"steps": 100},
}
"""A config that works; what breaks a rule is put over it."""


@dataclass(frozen=True)
class Constraint:
    """One rule over several keys."""

    keys: tuple[str, ...]
    """All that the rule looks at. The error stands at the first, at a section around it, or at an argument in it."""
    broken: tuple[str, ...]
    """Overrides of BASE that break the rule."""


def error(rule: Constraint) -> str:
    """What is said of a config that breaks a rule."""
    cfg = load(None, rule.broken, BASE).config
    at = f"{rule.keys[0].replace('.*', '.0')}."
    plain = ((re.sub(r"\[(\d+)\]", r".\1", f"{key}."), text) for key, text in hard_problems(cfg))
    return next(text for key, text in plain if at.startswith(key) or key.startswith(at))


CONSTRAINTS = tuple(
    Constraint(tuple(line["keys"].split()), tuple(json.loads(line["when"])))
    for line in lines("whet.config", "rules.tsv")
    if line["rule"] == "computed"
)
