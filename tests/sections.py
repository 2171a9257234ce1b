"""The section `algorithm` from flat keywords or from dotted keys: settings stand in the tables of their functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from whet.config.draft import Draft
from whet.config.functions import ADVANTAGES, LOSSES, WEIGHTS
from whet.config.recipes import RECIPES
from whet.config.schema import AlgorithmConfig
from whet.types import Json


def algorithm(name: str = "grpo", **keys: Any) -> dict[str, Json]:
    """`algorithm("dapo", clip_high=0.4)`; a setting that no chosen function has goes where another one has it."""
    recipe, out = RECIPES.get(name, RECIPES["grpo"]), {"name": name, **keys}
    for part, table in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        chosen = keys.get(part) or getattr(recipe, part)
        mine = table[chosen].settings.model_fields if chosen in table else {}
        others = {name for row in table.values() for name in row.settings.model_fields}
        foreign = keys.keys() & others
        taken = {k: keys[k] for k in keys if k in mine} or {k: keys[k] for k in keys if k in foreign}
        if taken:
            out[part] = taken | ({"name": keys[part]} if part in keys else {})
            out = {k: v for k, v in out.items() if k not in taken}
    return out


def correction(**keys: Any) -> dict[str, Json]:
    """`correction(weight="token", high=2.0)`: the settings of the weight in its table."""
    mine = {key: keys[key] for key in keys if key in WEIGHTS["token"].settings.model_fields}
    rest = {key: value for key, value in keys.items() if key not in mine}
    return rest | ({"weight": {"name": keys["weight"], **mine}} if mine else {})


def section(told: Mapping[str, Json]) -> AlgorithmConfig:
    """`section({"algorithm.loss": "ppo", "algorithm.loss.clip_low": 0.1})`, as overrides would make it."""
    draft = Draft()
    for key, value in told.items():
        draft.put(tuple(key.split(".")), value, "here")
    return AlgorithmConfig.model_validate_json(json.dumps(draft.tree["algorithm"]))
