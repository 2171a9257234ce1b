"""What each algorithm name means: a table of plain values, readable without torch.

`recipes.tsv` has a line for each. `recipes.resolve` puts the user's keys over a recipe's. Formulas and sources stand in
docs/algorithms.md. The column `more` has further fields of `Recipe`, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from whet.config.functions import Kind
from whet.tables import lines


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An algorithm's parts by name, and its source. KL and entropy are no part: both are off by default."""

    kind: Kind
    advantage: str
    loss: str
    loss_agg_mode: str
    settings: Mapping[str, object] = field(default_factory=dict)
    """Keys of `algorithm` where this recipe departs from the defaults of its functions."""
    whiten: bool = False
    dynamic_sampling: bool = False
    expert_loss: str | None = None
    """Loss of the demonstrations among the own rollouts (algorithm.mix). None: there are none."""
    reprompts: bool = False
    """The reference scores rollouts after other prompts (algorithm.reprompt)."""
    source: str
    note: str


def _table() -> dict[str, Recipe]:
    found = {}
    for line in lines("whet.config", "recipes.tsv"):
        name, more = line.pop("name"), json.loads(line.pop("more") or "{}")
        given = more.pop("settings", {})
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        found[name] = Recipe(**line, settings=settings, **more)  # type: ignore[arg-type]
    return found


RECIPES: dict[str, Recipe] = _table()
