"""verl's devices: how FSDP, Ulysses and Megatron spread the models, and how many inference engines there are."""

from __future__ import annotations

from whet.config.dialects.key import Key, Values, derived, translated
from whet.config.dialects.layout import (
    FITTED,
    PARALLEL,
    Layout,
    decoder_layers,
    groups,
    like,
    native,
    resharded,
)
from whet.config.dialects.typed import flag, whole
from whet.config.dialects.verl_rules import (
    ACTOR,
    CRITIC,
    REF,
    ROLLOUT,
    Native,
    check_parallel,
    has_critic,
    has_reference,
    is_megatron,
    ranks,
    world,
)
from whet.types import Json

FSDP = f"{ACTOR}.fsdp_config"
_ALIKE = "As the actor's: one way for all models."
_CUT = "Read where FSDP cuts tensors, which is on several devices."


def layout(v: Values) -> Native:
    """The actor's layout serves all models. Its W devices hold W / tp engines, which take turns with training."""
    check_parallel(v)
    dp, tp = ranks(v, ACTOR), whole(v, f"{ROLLOUT}.tensor_model_parallel_size")
    engines, nodes = max(world(v) // tp, 1), whole(v, "trainer.nnodes")
    if is_megatron(v):
        at = f"{ACTOR}.megatron"
        sizes = {
            dim: whole(v, f"{at}.{kind}_parallel_size")
            for dim, kind in (("tp", "tensor_model"), ("pp", "pipeline_model"), ("cp", "context"))
        }
        ep = whole(v, f"{at}.expert_model_parallel_size")
        return Layout(dp_shard=dp, ep=ep, engines=engines, nodes=nodes, **sizes).natives()
    copies, shards = groups(whole(v, f"{FSDP}.fsdp_size", least=None), dp, key=f"{FSDP}.fsdp_size")
    cp = whole(v, f"{ACTOR}.ulysses_sequence_parallel_size")
    return Layout(dp_replicate=copies, dp_shard=shards, cp=cp, engines=engines, nodes=nodes).natives()


def sharding(v: Values) -> Native:
    """How FSDP gathers what it has cut. Without forward_prefetch nothing is gathered ahead."""
    if is_megatron(v):
        return {}
    return {
        f"{PARALLEL}.wrap_min_parameters": whole(v, f"{FSDP}.wrap_policy.min_num_params", least=0),
        f"{PARALLEL}.reshard_after_forward": resharded(v, f"{FSDP}.reshard_after_forward"),
        f"{PARALLEL}.prefetch": int(flag(v, f"{FSDP}.forward_prefetch")),
    }


def sized(name: str, *dims: str, default: Json, reason: str = "") -> Key:
    """A size of the actor's layout."""
    return translated(name, layout, *map(native, dims), default=default, reason=f"{reason} {FITTED}".strip())


_NATIVES = {
    "wrap_policy.min_num_params": ("wrap_min_parameters", 0),
    "reshard_after_forward": ("reshard_after_forward", True),
    "forward_prefetch": ("prefetch", False),
}

WRAPPED = derived(
    f"{FSDP}.wrap_policy.transformer_layer_cls_to_wrap",
    decoder_layers(f"{FSDP}.wrap_policy.transformer_layer_cls_to_wrap"),
    default=None,
    reason="Every decoder layer is wrapped by itself; names of other classes are coming.",
)


def fsdp(name: str) -> Key:
    """A key of the actor's FSDP."""
    native, default = _NATIVES[name]
    reason = _CUT if name != "wrap_policy.min_num_params" else f"Of decoder layers; smaller ones wait. {_CUT}"
    return translated(f"{FSDP}.{name}", sharding, f"{PARALLEL}.{native}", default=default, reason=reason)


def fsdp_like(at: str, *names: str) -> tuple[Key, ...]:
    """The same keys of a model beside the actor."""
    there = has_critic if at.startswith(CRITIC) else has_reference
    classes = f"{at}.wrap_policy.transformer_layer_cls_to_wrap"
    return (
        derived(classes, decoder_layers(classes), default=None, reason=WRAPPED.reason),
        *(
            derived(
                f"{at}.{name}",
                like(f"{at}.{name}", f"{FSDP}.{name}", there=there),
                default=_NATIVES[name][1],
                reason=_ALIKE,
            )
            for name in ("wrap_policy.min_num_params", *names)
        ),
    )


OF_REF = f"{REF}.fsdp_config"
OF_CRITIC = f"{CRITIC}.model.fsdp_config"
