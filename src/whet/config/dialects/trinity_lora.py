"""Trinity-RFT's low-rank adapters: a list of one, or null for the whole model."""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.dialects.key import Key, Unbuilt, Values, derived, engine, translated
from whet.config.dialects.trinity_values import entries, given
from whet.config.faults import shown
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
            raise Unbuilt(
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


_NAMED = "a name in the engine; one adapter here needs none"

LORA: tuple[Key, ...] = (
    translated(
        LIST, lora, "model.lora", default=None, reason="null: the whole model learns; at most one entry"
    ),
    *(
        translated(f"{LIST}[].{name}", lora, f"model.lora.{native}", default=DEFAULTS[name], reason=reason)
        for name, native, reason in (
            ("path", "path", "a folder as peft writes it; null: new adapters"),
            ("lora_rank", "rank", "must be that of path, where it is given"),
            ("lora_alpha", "alpha", "the scale is lora_alpha / lora_rank"),
            ("target_modules", "targets", "all-linear, names, or one regular expression"),
        )
    ),
    derived(f"{LIST}[].name", lora, default=None, reason=_NAMED),
    derived(f"{LIST}[].base_model_name", lora, default=None, reason=_NAMED),
    derived(
        f"{LIST}[].lora_dtype", lora, default="auto", reason="adapters are float32, whatever the model is"
    ),
)

ENGINE: tuple[Key, ...] = (
    engine(
        "model.fully_sharded_loras", "vllm", default=False, reason="how vLLM spreads adapters over devices"
    ),
    engine("model.max_cpu_loras", "vllm", default=None, reason="adapters that vLLM keeps in CPU memory"),
)
