"""SkyRL's low-rank adapters, of newer versions: rank 0 trains the whole model."""

from __future__ import annotations

from whet.config.dialects.key import Key, Translate, Values, coming, derived, translated
from whet.config.dialects.skyrl_learn import Native
from whet.config.dialects.typed import choose, number, whole
from whet.config.faults import shown
from whet.types import ConfigError, Json

OLDER = "trainer.target_modules"
ALL = "all-linear"


def policy_lora(v: Values) -> Native:
    return _lora(v, "policy", "model.lora")


def critic_lora(v: Values) -> Native:
    return _lora(v, "critic", "critic.lora")


def _lora(v: Values, role: str, native: str) -> Native:
    at = f"trainer.{role}.model.lora"
    rank = whole(v, f"{at}.rank", least=0)
    if rank == 0:
        return {}
    return {
        f"{native}.rank": rank,
        f"{native}.alpha": number(v, f"{at}.alpha"),
        f"{native}.dropout": number(v, f"{at}.dropout"),
        f"{native}.targets": _targets(v, role, at),
        f"{native}.init": choose(
            v,
            f"{at}.init_method",
            {"kaiming": "default", "gaussian": "gaussian", "xavier": None, "zero": None},
        ),
    }


def sync_path(v: Values) -> Native:
    """A folder; nothing is written there."""
    key = "trainer.policy.model.lora.lora_sync_path"
    if not isinstance(v[key], str):
        raise ConfigError(f"{key}: got {shown(v[key])}, expected a path")
    return {}


def _targets(v: Values, role: str, at: str) -> Json:
    """all-linear, names, or a regular expression; the older key is the policy's."""
    key = f"{at}.target_modules"
    own, older = v[key], v[OLDER] if role == "policy" else ALL
    if own != ALL and older not in (ALL, own):
        raise ConfigError(f"{OLDER}={shown(older)} is the older name of {key}={shown(own)}; keep one")
    given = older if own == ALL else own
    if not (isinstance(given, str) or (isinstance(given, list) and all(isinstance(x, str) for x in given))):
        raise ConfigError(f"{key}: got {shown(given)}, expected a text or a list of texts")
    return given


def _rows(role: str, translate: Translate, native: str) -> tuple[Key, ...]:
    at, read = f"trainer.{role}.model.lora", "Of newer versions; read where rank is above 0."
    return (
        translated(
            f"{at}.rank",
            translate,
            f"{native}.rank",
            default=0,
            reason="Of newer versions. 0: the whole model learns.",
        ),
        translated(f"{at}.alpha", translate, f"{native}.alpha", default=16, reason=read),
        translated(f"{at}.dropout", translate, f"{native}.dropout", default=0, reason=read),
        translated(f"{at}.target_modules", translate, f"{native}.targets", default=ALL, reason=read),
        translated(
            f"{at}.init_method",
            translate,
            f"{native}.init",
            default="kaiming",
            reason=f"kaiming or gaussian; xavier and zero are coming. {read}",
        ),
        coming(f"{at}.exclude_modules", "layers without adapters by name", default=None),
    )


LORA: tuple[Key, ...] = (
    translated(
        OLDER,
        policy_lora,
        "model.lora.targets",
        default=ALL,
        reason="The older name of trainer.policy.model.lora.target_modules; read where its rank is above 0.",
    ),
    *_rows("policy", policy_lora, "model.lora"),
    *_rows("critic", critic_lora, "critic.lora"),
    derived(
        "trainer.policy.model.lora.lora_sync_path",
        sync_path,
        default="/tmp/skyrl_lora_sync",
        reason="Adapters on their way to the engine; one process hands them over in memory.",
    ),
)
