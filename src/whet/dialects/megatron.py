"""Megatron-LM's own settings, which verl and SkyRL hand on: terms of the loss for routers of mixtures of experts."""

from __future__ import annotations

from whet.config.faults import shown
from whet.dialects.row import Native, NotSupportedYet, Values
from whet.dialects.typed import number
from whet.types import ConfigError, Json

BY_LAYER = ("aux_loss", "global_aux_loss")
"""Load balancing over all tokens of a micro-batch, and over those of the batch so far."""
KINDS = (*BY_LAYER, "seq_aux_loss", "sinkhorn", "none")


def router_terms(v: Values, at: str, *, unsaid: str = "none") -> Native:
    """The load-balancing loss and the z-loss, from the section `at`. unsaid: the kind where the section names none.

    Megatron-LM adds each layer's terms over the tokens of a micro-batch and takes the mean over micro-batches and
    ranks; here they are taken over the tokens of the whole minibatch.
    """
    aux, z = (_coefficient(v, f"{at}.{name}") for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"))
    out: dict[str, Json] = {"train.router_z_loss_coef": z} if z else {}
    key = f"{at}.moe_router_load_balancing_type"
    kind = v.get(key) or unsaid
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
