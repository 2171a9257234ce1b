"""verl's low-rank adapters: rank 0 trains the whole model."""

from __future__ import annotations

from whet.dialects.row import Values
from whet.dialects.typed import number, whole
from whet.dialects.verl.rules import MODEL, NOTHING, Native, texts
from whet.types import Json


def policy_lora(v: Values) -> Native:
    return _lora(v, MODEL, native="model.lora")


def critic_lora(v: Values) -> Native:
    return _lora(v, "critic.model", native="critic.lora")


def sft_lora(v: Values) -> Native:
    return _lora(v, "model", native="model.lora")


def _lora(v: Values, model: str, *, native: str) -> Native:
    rank = whole(v, f"{model}.lora_rank", least=0)
    if rank == 0:
        return NOTHING
    given = v[f"{model}.target_modules"]
    out: dict[str, Json] = {
        f"{native}.rank": rank,
        f"{native}.alpha": number(v, f"{model}.lora_alpha"),
        f"{native}.targets": given if isinstance(given, str) else texts(v, f"{model}.target_modules"),
    }
    return out
