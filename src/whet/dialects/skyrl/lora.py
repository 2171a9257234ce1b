"""SkyRL's low-rank adapters, of newer versions: rank 0 trains the whole model."""

from __future__ import annotations

from whet.config.faults import shown
from whet.dialects.row import Values
from whet.dialects.skyrl.learn import Native
from whet.dialects.typed import choose, number, whole
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
