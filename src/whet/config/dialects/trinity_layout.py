"""Trinity-RFT's devices: the trainer's GPUs are those that the explorer's engines leave over."""

from __future__ import annotations

import re
from collections.abc import Mapping

from whet.config.dialects.key import Key, Translate, Unbuilt, Values, derived, translated
from whet.config.dialects.layout import (
    FITTED,
    PARALLEL,
    RANKS,
    Layout,
    decoder_layers,
    groups,
    like,
    native,
    resharded,
)
from whet.config.dialects.trinity_data import trainers
from whet.config.dialects.trinity_presets import preset
from whet.config.dialects.trinity_trainer import has_reference, sequence_ranks
from whet.config.dialects.trinity_values import ACTOR, CRITIC, REF, count, given, known_as, whole
from whet.config.dialects.typed import flag, number
from whet.types import ConfigError, Json

FSDP = f"{ACTOR}.fsdp_config"
GPUS = "the trainer has those that the explorer's engines leave; they must divide train_batch_size. Null: one trains."
_ALIKE = "as the actor's, where there is such a model: one way for all"
_CUT = "read where FSDP cuts tensors, which is on several devices"


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
        raise Unbuilt(
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


def patience(key: str) -> Key:
    """How a store is asked again when another process holds it."""

    def check(values: Values) -> Mapping[str, Json]:
        if number(values, key) < 0:
            raise ConfigError(f"{key}: got {values[key]}, expected a number >= 0.")
        return {}

    default = 3 if key.endswith("times") else 1
    reason = "a store that another process holds is waited for, up to 60 s; then its holder is named"
    return derived(key, check, default=default, reason=reason)


def sized(name: str, *dims: str, default: Json, reason: str) -> Key:
    """A size of the actor's layout."""
    return translated(name, layout, *map(native, dims), default=default, reason=f"{reason} {FITTED}")


_NATIVES: dict[str, tuple[str, Json]] = {
    "wrap_policy.min_num_params": ("wrap_min_parameters", 0),
    "reshard_after_forward": ("reshard_after_forward", True),
    "forward_prefetch": ("prefetch", False),
}


def fsdp(owner: str, *names: str) -> tuple[Key, ...]:
    """Keys of the FSDP section of one model; without names all those of the document."""
    at = f"{owner}.fsdp_config"
    if names:
        return tuple(_gathered(at, name) for name in names)
    classes = f"{at}.wrap_policy.transformer_layer_cls_to_wrap"
    every = "every decoder layer is wrapped by itself; names of other classes are coming"
    return (
        derived(classes, decoder_layers(classes), default=None, reason=every),
        _gathered(at, "wrap_policy.min_num_params"),
        sized(f"{at}.fsdp_size", "dp_shard", "dp_replicate", default=-1, reason="GPUs of one copy; -1: all.")
        if at == FSDP
        else derived(f"{at}.fsdp_size", _as_actor(at, "fsdp_size"), default=-1, reason=_ALIKE),
        _gathered(at, "forward_prefetch"),
    )


def _gathered(at: str, name: str) -> Key:
    key, default = _NATIVES[name]
    if at == FSDP:
        return translated(f"{at}.{name}", sharding, f"{PARALLEL}.{key}", default=default, reason=_CUT)
    return derived(f"{at}.{name}", _as_actor(at, name), default=default, reason=_ALIKE)


def _as_actor(at: str, name: str) -> Translate:
    there = has_reference if at.startswith(REF) else _has_critic
    return like(f"{at}.{name}", f"{FSDP}.{name}", there=there)


def _has_critic(values: Values) -> bool:
    return preset(values).recipe == "ppo"
