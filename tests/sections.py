"""The section `algorithm` from flat keywords: settings stand in the tables of the functions that have them."""

from __future__ import annotations

from typing import Any

from whet.config.functions import ADVANTAGES, LOSSES
from whet.config.recipes import RECIPES
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
