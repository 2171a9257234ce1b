"""Layers of multi-token prediction as verl has them (its section model.mtp, which Trinity-RFT has too), as native
keys; and how a server drafts with such layers."""

from __future__ import annotations

from whet.config.faults import shown
from whet.dialects.row import NOTHING, Native, Values
from whet.types import ConfigError, Json

KEY = "model.mtp"


def learns(v: Values, at: str) -> bool:
    """Whether the layers learn, in a file whose policy Megatron-LM trains; no other engine reads the section."""
    return bool(v.get(f"{at}.enable") and v[f"{at}.enable_train"] and v[f"{at}.mtp_loss_scaling_factor"])


def learned(v: Values, at: str) -> Native:
    """What the layers learn, as verl 0.9.0 with Megatron-LM: cross entropy of the tokens in the response mask, averaged
    over layers. Layers that do not learn stay as they are in the model's folder, and in exports."""
    key = f"{at}.mtp_loss_scaling_factor"
    if v[key] < 0:
        raise ConfigError(f"{key}={shown(v[key])}: a weight below 0 would teach the layers to be wrong")
    if not learns(v, at):
        return NOTHING
    return {
        f"{KEY}.name": "cross_entropy",
        f"{KEY}.coef": v[key],
        f"{KEY}.detach": "model" if v[f"{at}.detach_encoder"] else "nothing",
    }


def drafting(v: Values, at: str, engine: str, given: Json = None) -> dict[str, Json]:
    """Options of a server that drafts replies with the layers; none where the file asks for none. given: the file's own
    speculative_config of vLLM, which counts."""
    if not (v.get(f"{at}.enable") and v.get(f"{at}.enable_rollout")):
        return {}
    if engine == "vllm":
        return drafting_of_vllm(v[f"{at}.method"], v[f"{at}.num_speculative_tokens"], given)
    names = ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")
    return {f"speculative-{name.replace('_', '-')}": v[f"{at}.speculative_{name}"] for name in names}


def drafting_of_vllm(method: str, tokens: int, given: Json = None) -> dict[str, Json]:
    """vLLM's option."""
    own = given if isinstance(given, dict) else {}
    told = {name: value for name, value in own.items() if value is not None}
    return {"speculative-config": {"method": method, "num_speculative_tokens": tokens, **told}}
