"""Cosmos-RL's low-rank adapters, and which parameters learn."""

from __future__ import annotations

import re

from whet.config.faults import shown
from whet.dialects.cosmos.values import number, texts, whole
from whet.dialects.row import NotSupportedYet, Values
from whet.types import ConfigError, Json

LORA = "policy.lora."
DEFAULTS: dict[str, Json] = {
    "r": 8,
    "lora_alpha": 8.0,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "use_rslora": False,
    "modules_to_save": [],
    "alpha_pattern": {},
    "r_pattern": {},
    "init_lora_weights": True,
}
"""The document's, where the section stands; a null of target_modules leaves the choice to the backend."""

INITS = {name: name for name in ("gaussian", "orthogonal", "olora", "pissa")}


def adapters(values: Values) -> dict[str, Json]:
    """The section, filled in; nothing where there is none."""
    given = {name: values[LORA + name] for name in DEFAULTS}
    if values["policy.lora"] is None and all(value is None for value in given.values()):
        return {}
    full = {LORA + name: DEFAULTS[name] if value is None else value for name, value in given.items()}
    targets = texts(full, LORA + "target_modules")
    if not targets or (isinstance(full[LORA + "target_modules"], str) and targets != ["all-linear"]):
        given_targets = full[LORA + "target_modules"]
        raise ConfigError(
            f"{LORA}target_modules={given_targets!r}: expected a list of names, or 'all-linear'."
        )
    return {
        "model.lora.rank": whole(full, LORA + "r", least=1),
        "model.lora.alpha": number(full, LORA + "lora_alpha"),
        "model.lora.dropout": number(full, LORA + "lora_dropout"),
        "model.lora.targets": "all-linear" if "all-linear" in targets else targets,
        "model.lora.rslora": full[LORA + "use_rslora"],
        "model.lora.modules_to_save": texts(full, LORA + "modules_to_save"),
        "model.lora.alpha_pattern": full[LORA + "alpha_pattern"],
        "model.lora.rank_pattern": full[LORA + "r_pattern"],
        **_init(full[LORA + "init_lora_weights"]),
    }


def _init(value: Json) -> dict[str, Json]:
    """peft's names; pissa_niter_N is the fast pissa, of N rounds."""
    key = f"{LORA}init_lora_weights"
    if isinstance(value, bool):
        return {"model.lora.init": "default" if value else "random"}
    if isinstance(value, str) and (rounds := re.fullmatch(r"pissa_niter_([1-9]\d*)", value)):
        return {"model.lora.init": "pissa", "model.lora.pissa_iterations": int(rounds[1])}
    if value in ("eva", "loftq"):
        raise NotSupportedYet(
            f"{key}={value} is coming, not built yet; today: true, false, {', '.join(INITS)}"
        )
    if not isinstance(value, str) or value not in INITS:
        raise ConfigError(
            f"{key}: got {shown(value)}, expected true, false, {', '.join(INITS)} or pissa_niter_N"
        )
    return {"model.lora.init": INITS[value]}


def trainable(values: Values) -> dict[str, Json]:
    """Exact names of parameters or modules; the longer one, which says more, first."""
    given = values["policy.trainable_map"]
    if not given:
        return {}
    if not isinstance(given, dict) or not all(isinstance(on, bool) for on in given.values()):
        raise ConfigError(f"policy.trainable_map: got {shown(given)}, expected true or false by name")
    names = sorted(given, key=len, reverse=True)
    return {"train.trainable": {rf"^{re.escape(name)}(\.|$)": given[name] for name in names}}
