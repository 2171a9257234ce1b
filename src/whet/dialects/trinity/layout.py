"""Trinity-RFT's devices: the trainer's GPUs are those that the explorer's engines leave over."""

from __future__ import annotations

import re
from collections.abc import Mapping

from whet.dialects.layout import (
    PARALLEL,
    RANKS,
    Layout,
    groups,
    resharded,
)
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.data import trainers
from whet.dialects.trinity.presets import preset
from whet.dialects.trinity.trainer import sequence_ranks
from whet.dialects.trinity.values import ACTOR, CRITIC, count, given, known_as, whole
from whet.dialects.typed import flag
from whet.types import ConfigError, Json

FSDP = f"{ACTOR}.fsdp_config"


def layout(values: Values) -> Mapping[str, Json]:
    """The actor's layout serves all models."""
    left, cp = max(trainers(values), 0), sequence_ranks(values)
    if left % cp:
        raise ConfigError(
            f"trainer.ulysses_sequence_parallel_size: {cp} must divide the {left} GPUs of the trainer "
            "(cluster.node_num * cluster.gpu_per_node, less those of the engines)."
        )
    size = whole(values, f"{FSDP}.fsdp_size", least=-1)
    copies, shards = groups(-1 if size is None else size, left // cp or 1, key=f"{FSDP}.fsdp_size")
    return Layout(dp_replicate=copies, dp_shard=shards, cp=cp).natives()


def sharding(values: Values) -> Mapping[str, Json]:
    """How FSDP gathers what it has cut. Without forward_prefetch nothing is gathered ahead."""
    return {
        f"{PARALLEL}.wrap_min_parameters": count(values, f"{FSDP}.wrap_policy.min_num_params", least=0),
        f"{PARALLEL}.reshard_after_forward": resharded(values, f"{FSDP}.reshard_after_forward"),
        f"{PARALLEL}.prefetch": int(flag(values, f"{FSDP}.forward_prefetch")),
    }


def machines(values: Values) -> Mapping[str, Json]:
    """Several machines: the ranks live in a Ray cluster."""
    return {RANKS: True} if (whole(values, "cluster.node_num") or 1) > 1 else {}


def address(values: Values) -> Mapping[str, Json]:
    """A running Ray cluster; auto: one that is started where it is needed."""
    found = given(values["cluster.ray_address"])
    if found in (None, "auto", "local"):
        return {}
    if not isinstance(found, str) or not re.fullmatch(r"(ray://)?[^/\s]+:\d+", found):
        raise ConfigError(f"cluster.ray_address: got {found!r}, expected auto or host:port.")
    if found.startswith("ray://"):
        raise NotSupportedYet(
            f"cluster.ray_address: {found}: Ray's client is coming, not built yet; here: host:port of the head."
        )
    return {"cluster.address": found}


def strategy(values: Values) -> Mapping[str, Json]:
    """FSDP in both of torch's ways; here FSDP2 where tensors are cut."""
    for key in ("trainer.trainer_strategy", f"{ACTOR}.strategy", f"{CRITIC}.strategy"):
        name = given(values[key])
        if name is not None:
            known_as(str(name), dict.fromkeys(("fsdp", "fsdp2")), key=key, coming=("megatron",))
    return {}


def _has_critic(values: Values) -> bool:
    return preset(values).recipe == "ppo"
