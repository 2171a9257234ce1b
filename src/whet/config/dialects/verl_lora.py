"""verl's low-rank adapters: rank 0 trains the whole model."""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.dialects.key import Key, Translate, Values, translated
from whet.config.dialects.typed import number, whole
from whet.config.dialects.verl_rules import MODEL, NOTHING, Native, texts
from whet.types import Json

ADAPTED = "Read where lora_rank is above 0, as there."


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


def lora_keys(model: str, translate: Translate, native: str) -> tuple[Key, ...]:
    """The three keys of one model."""
    reasons: Mapping[str, tuple[Json, str, str]] = {
        "lora_rank": (0, "rank", "0: the whole model learns."),
        "lora_alpha": (16, "alpha", ADAPTED),
        "target_modules": (
            "all-linear",
            "targets",
            f"all-linear, names, or one regular expression. {ADAPTED}",
        ),
    }
    return tuple(
        translated(f"{model}.{key}", translate, f"{native}.{to}", default=default, reason=reason)
        for key, (default, to, reason) in reasons.items()
    )
