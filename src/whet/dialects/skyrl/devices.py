"""Which models there are, and on which devices: SkyRL's rules of placement, and the layout as native keys.

Letters as there: P GPUs of a model, dp = ranks with data of their own. Nothing here depends on this machine: the rules
are about the file, and `here` fits its layout to what there is.
"""

from __future__ import annotations

import math

from whet.dialects import versions
from whet.dialects.layout import APART, FileLayout, groups
from whet.dialects.megatron import SIZES
from whet.dialects.row import NOTHING, Native, Values
from whet.dialects.served import SLEEP
from whet.types import ConfigError, Json

A, PLACE, POLICY = "trainer.algorithm", "trainer.placement", "trainer.policy"
FSDP = f"{POLICY}.fsdp_config"
PROFILER = f"{POLICY}.torch_profiler_config"


def since(v: Values, version: str) -> bool:
    """Whether a file is read as this release of SkyRL or a newer one."""
    return versions.since(v, "skyrl", version)


# ---------------------------------------------------------------- what is there


def has_critic(v: Values) -> bool:
    """Whether a critic learns: only gae reads one."""
    return v[f"{A}.advantage_estimator"] == "gae"


def has_reference(v: Values) -> bool:
    """Whether SkyRL starts a reference."""
    return bool(v[f"{A}.use_kl_loss"] or v[f"{A}.use_kl_in_reward"])


def distills(v: Values) -> bool:
    """Whether the policy learns from a teacher in place of rewards, as SkyRL's example of on-policy distillation."""
    return v[f"{A}.advantage_estimator"] == "no_op"


def compares(v: Values) -> bool:
    """Whether a KL to the reference counts for anything."""
    return bool(has_reference(v) and (v[f"{A}.kl_loss_coef"] > 0 or distills(v)))


def is_megatron(v: Values) -> bool:
    return v["trainer.strategy"] == "megatron"


def is_deepspeed(v: Values) -> bool:
    return v["trainer.strategy"] == "deepspeed"


ZERO = "deepspeed_config.train.zero_optimization"


def is_zero(v: Values) -> bool:
    """Whether DeepSpeed itself trains here. Without stages, or with ranks that share a sequence, whet's ranks do: the
    numbers are the same."""
    whole = v[f"{POLICY}.sequence_parallel_size"] == 1 and v[f"{ZERO}.stage"] != 0
    return is_deepspeed(v) and whole and data_parallel(v, "policy") > 1


def deepspeed(v: Values) -> Native:
    """ZeRO with the file's settings; those that are "auto" are DeepSpeed's own."""
    config: Json = {**(v[f"{ZERO}.*"] or {})}
    own = [key for key in v if key.startswith(f"{ZERO}.") and not key.endswith("*")]
    for key in (key for key in own if v[key] not in ("auto", None)):
        *tables, name = key.removeprefix(f"{ZERO}.").split(".")
        at = config
        for table in tables:
            at = at.setdefault(table, {})
        at[name] = v[key]
    return {"train.engine": "deepspeed", "train.engine_arguments": {"zero_optimization": config}}


FULLY_ASYNC = "trainer.fully_async"


def is_simulated(v: Values) -> bool:
    """Whether training steps wait and learn nothing."""
    return bool(v[f"{FULLY_ASYNC}.enabled"] and v[f"{FULLY_ASYNC}.simulate_training"])


def simulated(v: Values) -> Native:
    """Steps and weight syncs of given lengths."""
    lengths = {"step_s": "simulate_training_step_seconds", "sync_s": "simulate_weight_sync_seconds"}
    given = {name: float(v[f"{FULLY_ASYNC}.{key}"]) for name, key in lengths.items()}
    return {"train.engine": "simulated", "train.engine_arguments": given}


def is_fsdp(v: Values) -> bool:
    return v["trainer.strategy"] in ("fsdp", "fsdp2")


def asks_servers(v: Values) -> bool:
    """Whether replies come from inference servers that somebody else has started."""
    return not v["generator.run_engines_locally"]


def is_served(v: Values) -> bool:
    """Whether the run samples with servers: those, or one with options that only the engine itself knows."""
    return asks_servers(v) or bool(v["generator.engine_init_kwargs.*"])


# ---------------------------------------------------------------- sizes


def gpus(v: Values, role: str) -> int:
    """P of policy, critic or ref."""
    P: int = v[f"{PLACE}.{role}_num_nodes"] * v[f"{PLACE}.{role}_num_gpus_per_node"]
    return P


def data_parallel(v: Values, role: str) -> int:
    """dp = P / the ranks that share a sequence or the weights, which must divide P."""
    P, keys = gpus(v, role), [f"trainer.{role}.sequence_parallel_size"]
    if is_megatron(v) and role == "policy":
        keys = [f"{POLICY}.megatron_config.{kind}_parallel_size" for kind in SIZES.values()]
    size = math.prod(v[key] for key in keys)
    if P % size:
        told = " * ".join(f"{key}={v[key]}" for key in keys)
        raise ConfigError(f"{told} must divide the {P} GPUs of the {role} ({PLACE}.{role}_num_*)")
    return P // size


def layout(v: Values) -> Native:
    """The policy's layout serves all models; the engines take turns with them, or have GPUs of their own."""
    check_placement(v)
    dp = data_parallel(v, "policy")
    engines = v["generator.num_inference_engines"] * v["generator.inference_engine_data_parallel_size"]
    engines = 1 if is_served(v) else engines
    nodes = v[f"{PLACE}.policy_num_nodes"]
    if is_simulated(v):  # no model is trained
        return FileLayout(dp_shard=1, engines=engines, nodes=nodes).natives()
    if is_megatron(v):
        at = f"{POLICY}.megatron_config"
        sizes = {dim: v[f"{at}.{kind}_parallel_size"] for dim, kind in SIZES.items()}
        ep = v[f"{at}.expert_model_parallel_size"]
        made = FileLayout(dp_shard=dp, ep=ep, engines=engines, nodes=nodes, **sizes)
        return (made.flat() if v.get("trainer.mtp.enabled") else made).natives()
    if is_zero(v):
        return FileLayout(dp_shard=dp, engines=engines, nodes=nodes).natives()
    copies, shards = groups(v[f"{FSDP}.fsdp_size"], dp, key=f"{FSDP}.fsdp_size")
    cp = v[f"{POLICY}.sequence_parallel_size"]
    return FileLayout(dp_replicate=copies, dp_shard=shards, cp=cp, engines=engines, nodes=nodes).natives()


def check_placement(v: Values) -> None:
    """Who shares GPUs with whom must fit, as SkyRL asserts."""
    P, engines = gpus(v, "policy"), v["generator.num_inference_engines"]
    kinds = ("tensor", "pipeline", "data")
    each = math.prod(v[f"generator.inference_engine_{kind}_parallel_size"] for kind in kinds)
    others = [("ref", has_reference(v)), ("critic", has_critic(v))]
    if v[f"{PLACE}.colocate_all"] and v["generator.run_engines_locally"]:
        if engines * each != P:
            raise ConfigError(
                f"trainer.placement.colocate_all: the policy's {P} GPUs (policy_num_nodes * policy_num_gpus_per_node) "
                f"must equal generator.num_inference_engines={engines} * the {each} GPUs of each "
                "(generator.inference_engine_tensor_parallel_size and the others like it)"
            )
        for role, there in others:
            if there and gpus(v, role) != P:
                raise ConfigError(
                    f"trainer.placement.colocate_all: the {role} has {gpus(v, role)} GPUs ({role}_num_nodes * "
                    f"{role}_num_gpus_per_node), the policy {P}; they must be equal"
                )
    elif v[f"{PLACE}.colocate_policy_ref"] and has_reference(v):
        for size in ("nodes", "gpus_per_node"):
            mine, other = (v[f"{PLACE}.{role}_num_{size}"] for role in ("policy", "ref"))
            if mine != other:
                raise ConfigError(
                    f"trainer.placement.colocate_policy_ref: policy_num_{size}={mine} must equal ref_num_{size}={other}"
                )


def apart(v: Values) -> Native:
    """Models with GPUs of their own: without colocate_all the critic always, the reference unless
    colocate_policy_ref. With it the engines sleep while models learn."""
    check_placement(v)
    if v[f"{PLACE}.colocate_all"]:
        return {SLEEP: True} if v["generator.run_engines_locally"] else NOTHING
    alone = compares(v) and not v[f"{PLACE}.colocate_policy_ref"]
    names = [*(["critic"] if has_critic(v) else []), *(["reference"] if alone else [])]
    return {APART: names} if names else NOTHING


# ---------------------------------------------------------------- memory


# ---------------------------------------------------------------- looking inside


OPTIONS = ("record_shapes", "with_stack", "profile_memory")
"""Of torch's profiler."""


def profile(v: Values) -> Native:
    """Snapshots of CUDA's allocator, of the first steps; torch's profiler by its own schedule, once if without end."""
    out: dict[str, Json] = {}
    tools, steps = list[str](), list[int]()
    if v[f"{PROFILER}.enable"]:
        tools, steps = ["torch"], _recorded(v)
        out = {
            "profile.warmup": v[f"{PROFILER}.warmup"],
            "profile.ranks": v[f"{PROFILER}.ranks"],
            "profile.torch": [name for name in OPTIONS if v[f"{PROFILER}.{name}"]],
            "dirs.profile": v[f"{PROFILER}.save_path"],
        }
    if v[f"{POLICY}.record_memory"]:
        tools, steps = [*tools, "memory"], sorted({*steps, 1, 2, 3})
    return out | {"profile.tools": tools, "profile.steps": steps} if tools else NOTHING


def _recorded(v: Values) -> list[int]:
    """The steps, from 1, that torch.profiler.schedule records."""
    first, wait, warmup, active, repeat = (
        v[f"{PROFILER}.{name}"] for name in ("skip_first", "wait", "warmup", "active", "repeat")
    )
    cycle = wait + warmup + active
    starts = [first + n * cycle + wait + warmup for n in range(min(max(repeat, 1), MOST_CYCLES))]
    return [start + n + 1 for start in starts for n in range(min(active, MOST_CYCLES))]


MOST_CYCLES = 1000
"""Windows, and steps of one, that are written down; traces of more fill a disk."""


# ---------------------------------------------------------------- weights on their way to the engines


def is_half(v: Values) -> bool:
    """Whether the trainer computes in float16."""
    return is_fsdp(v) and v[f"{FSDP}.mixed_precision.param_dtype"] in ("fp16", "float16")
