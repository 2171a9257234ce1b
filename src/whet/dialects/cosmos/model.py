"""Cosmos-RL: the model, its dtypes, low-rank adapters, and which parameters learn."""

from __future__ import annotations

import re

from whet.config.faults import shown
from whet.dialects.cosmos.values import at_revision, texts
from whet.dialects.row import NotSupportedYet, Values
from whet.types import ConfigError, Json

LORA = "policy.lora."
ADAPTERS: dict[str, tuple[str, Json]] = {
    "r": ("rank", 8),
    "lora_alpha": ("alpha", 8.0),
    "lora_dropout": ("dropout", 0.0),
    "target_modules": ("targets", "all-linear"),
    "use_rslora": ("rslora", False),
    "modules_to_save": ("modules_to_save", []),
    "alpha_pattern": ("alpha_pattern", {}),
    "r_pattern": ("rank_pattern", {}),
    "init_lora_weights": ("init", True),
}
"""Native names, and the document's defaults where the section stands; a null of target_modules leaves the choice to the
backend."""

INITS = ("gaussian", "orthogonal", "olora", "pissa")


def model(values: Values) -> dict[str, Json]:
    """A local folder, or a revision on the hub."""
    return {"model.path": at_revision(values, values["policy.model_name_or_path"], "policy.model_revision")}


# ---------------------------------------------------------------- dtypes and memory


# ---------------------------------------------------------------- adapters and what learns


def adapters(values: Values) -> dict[str, Json]:
    """The section, filled in; nothing where there is none."""
    given = {name: values[LORA + name] for name in ADAPTERS}
    if values["policy.lora"] is None and all(value is None for value in given.values()):
        return {}
    out = {
        native: default if given[name] is None else given[name]
        for name, (native, default) in ADAPTERS.items()
    }
    targets = out["targets"]
    if not targets or (isinstance(targets, str) and targets != "all-linear"):
        raise ConfigError(f"{LORA}target_modules={targets!r}: expected a list of names, or 'all-linear'.")
    if "all-linear" in targets:
        out["targets"] = "all-linear"
    return {f"model.lora.{native}": value for native, value in (out | _init(out["init"])).items()}


def _init(value: Json) -> dict[str, Json]:
    """peft's names; pissa_niter_N is the fast pissa, of N rounds."""
    key = f"{LORA}init_lora_weights"
    if isinstance(value, bool):
        return {"init": "default" if value else "random"}
    if isinstance(value, str) and re.fullmatch(r"pissa_niter_[1-9][0-9]*", value):
        return {"init": value}
    if value in ("eva", "loftq"):
        raise NotSupportedYet(
            f"{key}={value} is coming, not built yet; today: true, false, {', '.join(INITS)}"
        )
    if value not in INITS:
        raise ConfigError(
            f"{key}: got {shown(value)}, expected true, false, {', '.join(INITS)} or pissa_niter_N"
        )
    return {"init": value}


def trainable(values: Values) -> dict[str, Json]:
    """The first rule that fits a parameter counts: what is frozen by a pattern, then exact names of parameters or
    modules, the longer one first, then what learns by a pattern, and beside such patterns nothing else."""
    given = values["policy.trainable_map"] or {}
    if not isinstance(given, dict) or not all(isinstance(on, bool) for on in given.values()):
        raise ConfigError(f"policy.trainable_map: got {shown(given)}, expected true or false by name")
    frozen, learning = (texts(values, f"policy.{name}_pattern") for name in ("freeze", "trainable"))
    if frozen and learning:
        raise ConfigError("policy.freeze_pattern and policy.trainable_pattern: give one of them.")
    names = sorted(given, key=len, reverse=True)
    rules = dict.fromkeys(frozen, False)
    rules |= {rf"^{re.escape(name)}(\.|$)": given[name] for name in names}
    rules |= dict.fromkeys(learning, True) | ({".*": False} if learning else {})
    return {"train.trainable": rules} if rules else {}
