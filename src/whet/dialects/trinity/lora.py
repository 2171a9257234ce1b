"""Trinity-RFT's low-rank adapters: a list of one, or null for the whole model."""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.faults import shown
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.values import entries, given
from whet.types import ConfigError, Json

LIST = "model.lora_configs"
DEFAULTS: dict[str, Json] = {
    "name": None,
    "path": None,
    "base_model_name": None,
    "lora_rank": 32,
    "lora_alpha": 32,
    "lora_dtype": "auto",
    "target_modules": "all-linear",
}


def lora(values: Values) -> Mapping[str, Json]:
    """The one adapter that is trained. Its names are the engine's business there, and one engine has one here."""
    if len(values[LIST] or []) > 1:
        raise ConfigError(f"{LIST}: got {len(values[LIST])} entries, expected at most one, as in Trinity")
    for entry in [] if not values[LIST] else entries(values, LIST) or [{}]:
        own = {
            key: entry[key] if given(entry.get(key)) is not None else default
            for key, default in DEFAULTS.items()
        }
        if own["lora_dtype"] not in ("auto", "float32"):
            raise NotSupportedYet(
                f"{LIST}[].lora_dtype={shown(own['lora_dtype'])}: adapters of another dtype are coming, not built yet; "
                "today: auto, float32"
            )
        targets = [own["target_modules"]] if isinstance(own["target_modules"], str) else own["target_modules"]
        return {
            "model.lora.rank": own["lora_rank"],
            "model.lora.alpha": own["lora_alpha"],
            "model.lora.targets": "all-linear" if targets == ["all-linear"] else own["target_modules"],
            "model.lora.path": own["path"],
        }
    return {}
