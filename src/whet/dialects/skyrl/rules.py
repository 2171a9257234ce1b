"""SkyRL's own rules: what its `validate_cfg` and `validate_batch_sizes` refuse, in its words.

Letters as there: B prompts of a step, k rollouts of a prompt, P GPUs of a model, dp = P / sequence parallel size.
Nothing here depends on this machine: the rules are about the file, and `here` fits its layout to what there is.
"""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.layout import APART, PARALLEL, Layout, groups, resharded
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.typed import choose, flag, number, whole
from whet.types import ConfigError, Json

NOTHING: Mapping[str, Json] = {}
"""What a check gives: no native key."""


# ---------------------------------------------------------------- who is there


def has_critic(v: Values) -> bool:
    """Whether a critic learns: only gae reads one."""
    return v["trainer.algorithm.advantage_estimator"] == "gae"


def has_reference(v: Values) -> bool:
    """Whether a KL to the reference is taken at all."""
    return flag(v, "trainer.algorithm.use_kl_loss") or flag(v, "trainer.algorithm.use_kl_in_reward")


def compares(v: Values) -> bool:
    """Whether that KL counts for anything: with a coefficient of 0 no reference is there."""
    return has_reference(v) and number(v, "trainer.algorithm.kl_loss_coef") > 0


def evaluates(v: Values) -> bool:
    """Whether the file evaluates: an interval above 0 and something to evaluate on."""
    return whole(v, "trainer.eval_interval", least=None) > 0 and bool(v["data.val_data"])


# ---------------------------------------------------------------- sizes


def gpus(v: Values, role: str) -> int:
    """P of policy, critic or ref."""
    at = f"trainer.placement.{role}_num"
    return whole(v, f"{at}_nodes") * whole(v, f"{at}_gpus_per_node")


def data_parallel(v: Values, role: str) -> int:
    """dp = P / sequence_parallel_size, which must divide P."""
    P, key = gpus(v, role), f"trainer.{role}.sequence_parallel_size"
    size = whole(v, key)
    if P % size:
        raise ConfigError(
            f"{key}={size} must divide the {P} GPUs of the {role} (trainer.placement.{role}_num_*)"
        )
    return P // size


def sequence_ranks(v: Values) -> int:
    """Ulysses, in one size for the policy and the models beside it."""
    there = ["policy", *(["critic"] if has_critic(v) else []), *(["ref"] if has_reference(v) else [])]
    keys = {role: f"trainer.{role}.sequence_parallel_size" for role in there}
    mine = whole(v, keys["policy"])
    for key in keys.values():
        if whole(v, key) != mine:
            raise NotSupportedYet(
                f"{key}={v[key]} beside {keys['policy']}={mine} is coming, not built yet: one size for all models"
            )
    return mine


def check_batches(v: Values) -> Mapping[str, Json]:
    """Rules 1 to 3 of SkyRL's batch sizes, with its divisions rounded down.

    Where they round, SkyRL's optimizer steps are smaller and more than its document says; here they are as it says.
    """
    for role in ("policy", "critic") if has_critic(v) else ("policy",):
        _check_mini_batch(v, role)
    return NOTHING


def _check_mini_batch(v: Values, role: str) -> None:
    """B >= mini, mini | B, m = mini k / dp >= 1, micro | m, m | B k / dp."""
    B, k = whole(v, "trainer.train_batch_size"), whole(v, "generator.n_samples_per_prompt")
    key, dp = f"trainer.{role}_mini_batch_size", data_parallel(v, role)
    mini, micro = whole(v, key), whole(v, "trainer.micro_train_batch_size_per_gpu")
    if mini > B:
        raise ConfigError(f"trainer.train_batch_size={B} must be at least {key}={mini}")
    if B % mini:
        raise ConfigError(f"{key}={mini} must divide trainer.train_batch_size={B}")
    own, batch = mini * k // dp, B * k // dp
    rank = f"{key}={mini} * generator.n_samples_per_prompt={k} / {dp} ranks of the {role}"
    if own == 0:
        raise ConfigError(f"{rank} leaves a rank no rollout (trainer.placement.{role}_num_*)")
    if own % micro:
        raise ConfigError(
            f"trainer.micro_train_batch_size_per_gpu={micro} must divide the mini batch of a rank, {own} = {rank}"
        )
    if batch % own:
        raise ConfigError(f"a rank's mini batch, {own} = {rank}, must divide its batch of {batch} rollouts")


FSDP = "trainer.policy.fsdp_config"


def layout(v: Values) -> Mapping[str, Json]:
    """The policy's layout serves all models; the engines take turns with them, or have GPUs of their own."""
    check_placement(v)
    dp, cp = data_parallel(v, "policy"), sequence_ranks(v)
    copies, shards = groups(whole(v, f"{FSDP}.fsdp_size", least=None), dp, key=f"{FSDP}.fsdp_size")
    engines, nodes = (
        whole(v, "generator.num_inference_engines"),
        whole(v, "trainer.placement.policy_num_nodes"),
    )
    return Layout(dp_replicate=copies, dp_shard=shards, cp=cp, engines=engines, nodes=nodes).natives()


def sharding(v: Values) -> Mapping[str, Json]:
    """How FSDP gathers what it has cut."""
    return {f"{PARALLEL}.reshard_after_forward": resharded(v, f"{FSDP}.reshard_after_forward")}


def offload(v: Values) -> Mapping[str, Json]:
    """cpu_offload: weights and moments, always. offload_after_step: moments, where engines share the GPUs."""
    names, shared = list[str](), flag(v, "trainer.placement.colocate_all")
    wanted = {
        role: flag(v, f"trainer.{role}.fsdp_config.cpu_offload")
        or (shared and flag(v, f"trainer.{role}.optimizer_config.offload_after_step"))
        for role in ("policy", "critic")
    }
    if has_critic(v) and wanted["critic"] != wanted["policy"]:
        raise NotSupportedYet(
            f"trainer.critic.optimizer_config.offload_after_step (or trainer.critic.fsdp_config.cpu_offload): "
            f"{wanted['critic']} beside the policy's {wanted['policy']} is coming, not built yet: the optimizers of "
            "both rest in one place"
        )
    names += ["optimizer"] if wanted["policy"] else []
    if has_critic(v) and flag(v, "trainer.critic.fsdp_config.cpu_offload"):
        names.append("critic")
    if compares(v) and flag(v, "trainer.ref.fsdp_config.cpu_offload"):
        names.append("reference")
    return {"train.offload": [*names, *(["policy"] if flag(v, f"{FSDP}.cpu_offload") else [])]}


def strategy(v: Values) -> Mapping[str, Json]:
    """FSDP in both of torch's ways; here FSDP2 where tensors are cut."""
    known = {"fsdp2": True, "fsdp": True, "deepspeed": None, "megatron": None}
    choose(v, "trainer.strategy", known)
    return NOTHING


def recorded(v: Values) -> Mapping[str, Json]:
    """Snapshots of CUDA's allocator."""
    wanted = flag(v, "trainer.policy.record_memory")
    return {"profile.tools": ["memory"], "profile.steps": [1, 2, 3]} if wanted else NOTHING


def ulysses(v: Values) -> Mapping[str, Json]:
    """The one backend that SkyRL has."""
    choose(v, "trainer.sequence_parallel_backend", {"ulysses": True})
    return NOTHING


def check_reward_placement(v: Values) -> Mapping[str, Json]:
    """Where a reward model would live, which there never is."""
    flag(v, "trainer.placement.colocate_critic_reward")
    for size in ("nodes", "gpus_per_node"):
        whole(v, f"trainer.placement.reward_num_{size}")
    return NOTHING


def apart(v: Values) -> Mapping[str, Json]:
    """Models with GPUs of their own: without colocate_all the critic always, the reference unless
    colocate_policy_ref."""
    check_placement(v)
    if flag(v, "trainer.placement.colocate_all"):
        return NOTHING
    alone = compares(v) and not flag(v, "trainer.placement.colocate_policy_ref")
    names = [*(["critic"] if has_critic(v) else []), *(["reference"] if alone else [])]
    return {APART: names} if names else NOTHING


def check_placement(v: Values) -> Mapping[str, Json]:
    """Who shares GPUs with whom must fit, as SkyRL asserts."""
    P, engines = gpus(v, "policy"), whole(v, "generator.num_inference_engines")
    parallel = whole(v, "generator.inference_engine_tensor_parallel_size")
    others = [("ref", has_reference(v)), ("critic", has_critic(v))]
    if flag(v, "trainer.placement.colocate_all") and flag(v, "generator.run_engines_locally"):
        if engines * parallel != P:
            raise ConfigError(
                f"trainer.placement.colocate_all: the policy's {P} GPUs (policy_num_nodes * policy_num_gpus_per_node) "
                f"must equal generator.num_inference_engines={engines} * "
                f"generator.inference_engine_tensor_parallel_size={parallel} = {engines * parallel}"
            )
        for role, there in others:
            if there and gpus(v, role) != P:
                raise ConfigError(
                    f"trainer.placement.colocate_all: the {role} has {gpus(v, role)} GPUs ({role}_num_nodes * "
                    f"{role}_num_gpus_per_node), the policy {P}; they must be equal"
                )
    elif flag(v, "trainer.placement.colocate_policy_ref") and has_reference(v):
        for size in ("nodes", "gpus_per_node"):
            mine, other = (whole(v, f"trainer.placement.{role}_num_{size}") for role in ("policy", "ref"))
            if mine != other:
                raise ConfigError(
                    f"trainer.placement.colocate_policy_ref: policy_num_{size}={mine} must equal ref_num_{size}={other}"
                )
    return NOTHING


def check_input_length(v: Values) -> Mapping[str, Json]:
    """With one turn the input is the prompt, with several it grows from there."""
    longest, prompt = whole(v, "generator.max_input_length"), whole(v, "trainer.max_prompt_length")
    if whole(v, "generator.max_turns") > 1:
        if longest < prompt:
            raise ConfigError(
                f"generator.max_input_length={longest} must be at least trainer.max_prompt_length={prompt}"
            )
    elif longest != prompt:
        raise ConfigError(
            f"generator.max_input_length={longest} must equal trainer.max_prompt_length={prompt} when "
            "generator.max_turns=1"
        )
    return NOTHING


def check_eval_batch(v: Values) -> Mapping[str, Json]:
    """A number of prompts."""
    whole(v, "trainer.eval_batch_size")
    return NOTHING


def check_engine_mode(v: Values) -> Mapping[str, Json]:
    """A blocking engine gets all prompts of a step in one call."""
    if not flag(v, "generator.async_engine") and not flag(v, "generator.batched"):
        raise ConfigError("generator.async_engine=false needs generator.batched=true")
    return NOTHING


def check_engine_memory(v: Values) -> Mapping[str, Json]:
    """Limits that must be possible; the embedded engine sizes itself by max_num_seqs and the longest sequence."""
    whole(v, "generator.max_num_batched_tokens")
    share = number(v, "generator.gpu_memory_utilization")
    if not 0 < share <= 1:
        raise ConfigError(f"generator.gpu_memory_utilization={share}: expected a share above 0 and at most 1")
    return NOTHING


def check_update_group(v: Values) -> Mapping[str, Json]:
    """Values that SkyRL knows; there is no update group, since the engine reads the trainer's own weights."""
    choose(v, "generator.weight_sync_backend", {"nccl": "", "gloo": ""})
    if not isinstance(v["generator.override_existing_update_group"], bool):  # which SkyRL takes for disable
        choose(v, "generator.override_existing_update_group", {"auto": "", "enable": "", "disable": ""})
    return NOTHING


def check_environments(v: Values) -> Mapping[str, Json]:
    """A number of workers; what belongs to an environment is read where that environment is chosen."""
    whole(v, "environment.max_env_workers", least=0)
    return NOTHING


def unread(v: Values) -> Mapping[str, Json]:
    """Of a model that is never there."""
    return NOTHING


def check_deepspeed(v: Values) -> Mapping[str, Json]:
    """Nothing reads DeepSpeed's settings as long as trainer.strategy=deepspeed is refused."""
    return NOTHING
