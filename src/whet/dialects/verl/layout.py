"""verl's devices: how FSDP, Ulysses and Megatron spread the models, and how many inference engines there are."""

from __future__ import annotations

from whet.dialects.layout import (
    PARALLEL,
    Layout,
    groups,
    resharded,
)
from whet.dialects.row import Values
from whet.dialects.typed import flag, whole
from whet.dialects.verl.rules import (
    ACTOR,
    ROLLOUT,
    Native,
    check_parallel,
    is_megatron,
    ranks,
    world,
)

FSDP = f"{ACTOR}.fsdp_config"


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
