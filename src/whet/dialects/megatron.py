"""Settings of Megatron-LM and Megatron-Bridge that foreign files hand on: terms of the loss for routers of mixtures of
experts; which layers have adapters; layers of multi-token prediction as verl has them (its section model.mtp, which
Trinity-RFT has too), and how a server drafts with such layers."""

from __future__ import annotations

from whet.config.faults import shown
from whet.dialects.row import NOTHING, Native, NotSupportedYet, Values
from whet.dialects.typed import choose, number
from whet.types import ConfigError, Json

SIZES = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context"}
"""What stands before `_parallel_size` in Megatron-LM's names, by dimension."""

BY_LAYER = ("aux_loss", "global_aux_loss")
"""Load balancing over all tokens of a micro-batch, and over those of the batch so far."""
KINDS = (*BY_LAYER, "seq_aux_loss", "sinkhorn", "none")


def router_terms(v: Values, at: str) -> Native:
    """The load-balancing loss and the z-loss, from the section `at`.

    Megatron-LM adds each layer's terms over the tokens of a micro-batch and takes the mean over micro-batches and
    ranks; here they are taken over the tokens of the whole minibatch.
    """
    aux, z = (_coefficient(v, f"{at}.{name}") for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"))
    out: dict[str, Json] = {"train.router_z_loss_coef": z} if z else {}
    key = f"{at}.moe_router_load_balancing_type"
    kind = v.get(key) or "none"
    if kind not in KINDS:
        raise ConfigError(f"{key}: got {shown(kind)}, expected one of {', '.join(KINDS)}")
    if kind == "sinkhorn":
        raise NotSupportedYet(f"{key}=sinkhorn: routers with Sinkhorn's algorithm are coming, not built yet")
    if aux and kind == "seq_aux_loss":
        raise NotSupportedYet(
            f"{key}=seq_aux_loss: load balancing within each sequence is coming, not built yet; today: aux_loss, over "
            "all tokens"
        )
    if aux and kind in BY_LAYER:
        out |= {"train.router_aux_loss_coef": aux, "train.router_aux_loss_scope": "layer"}
    return out


def _coefficient(v: Values, key: str) -> float:
    """0 where it is null, or of no version's."""
    return 0.0 if v.get(key) is None else number(v, key)


LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron-LM's names of a block's linear layers, and the layers that they are here."""
CANONICAL = {
    **{f"linear_{one}": (f"{one}_proj",) for one in "qkv"},
    "linear_proj": ("o_proj",),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
"""The same with an adapter for each matrix of a fused layer (CanonicalLoRA)."""


INITS = {"kaiming": "default", "xavier": "xavier", "normal": None}


def begins(v: Values, key: str) -> str:
    """How A begins; B begins at 0."""
    if v[key] == "zero":
        raise ConfigError(f"{key}=zero: A and B are 0, so their gradients are always 0; use kaiming")
    return choose(v, key, INITS)


def adapted_layers(
    given: Json,
    key: str,
    *,
    native: str,
    fused: bool,
    each: bool = False,
    mixture: str = "",
    dropout: Json = 0.0,
) -> Native:
    """Layers of the native section, from a list of Megatron-LM's names; all-linear is all of them. fused: LoRA, else
    CanonicalLoRA. each: every expert has adapters of its own, where Megatron-Bridge gives a layer's experts one.
    mixture: the setting that says that the model is a mixture of experts, if one does."""
    known = LAYERS if fused else CANONICAL
    names = list(known) if given in ("all-linear", None) else given
    if not isinstance(names, list) or not names or not all(name in known for name in names):
        raise ConfigError(
            f"{key}: got {shown(given)}, expected all-linear, or a list of Megatron-LM's names: {', '.join(known)}"
        )
    feed_forward = any(name.startswith("linear_fc") for name in names)
    if mixture and feed_forward and dropout:
        raise NotSupportedYet(
            f"{key}={shown(given)} with {mixture}: dropout of experts' adapters is coming, not built yet"
        )
    if mixture and any(name.startswith("linear_fc1_") for name in names):
        raise NotSupportedYet(
            f"{key}={shown(given)} with {mixture}: experts whose gate and up have adapters of their own "
            "(canonical_lora) are coming, not built yet; today: lora, where both have one A"
        )
    layers: list[Json] = [layer for name in names for layer in known[name]]
    out: dict[str, Json] = {f"{native}.targets": layers}
    if fused and any(len(known[name]) > 1 for name in names):
        out[f"{native}.fused"] = True
    if feed_forward and (mixture or each):
        out[f"{native}.experts"] = "each" if each else "shared"
    return out


# ---------------------------------------------------------------- multi-token prediction

MTP = "model.mtp"


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
        f"{MTP}.name": "cross_entropy",
        f"{MTP}.coef": v[key],
        f"{MTP}.detach": "model" if v[f"{at}.detach_encoder"] else "nothing",
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
