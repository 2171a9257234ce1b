"""SkyRL's keys of policy, critic, reference and algorithm."""

from __future__ import annotations

from whet.config.dialects.key import Key, derived, inert, mapped, translated
from whet.config.dialects.layout import FITTED, like
from whet.config.dialects.skyrl_learn import advantages, critic, kl, policy_loss, policy_optimizer
from whet.config.dialects.skyrl_rules import (
    FSDP,
    check_deepspeed,
    has_critic,
    has_reference,
    layout,
    offload,
    recorded,
    strategy,
)
from whet.config.dialects.skyrl_rules import sharding as shards
from whet.types import Json

RESTS = (
    "cpu_offload: weights and moments; offload_after_step: moments, with colocate_all, as there. Policy and critic do "
    "it alike. Left out where there is no GPU."
)
ALIKE = "As the policy's, where there is such a model: one way for all."
NO_REWARD_MODEL = (
    "SkyRL's reward workers raise NotImplementedError; here: native key rewards.NAME.model.path."
)
ONLY_CRITIC = "Read where a critic learns (advantage_estimator=gae), as there."
DEEPSPEED = "DeepSpeed; read there only with trainer.strategy=deepspeed, which is coming."
TRAIN = "trainer.policy.optimizer_config"
ADAM = [0.9, 0.999]


def rests(name: str, *, default: bool) -> Key:
    """What lies in the host's memory while it is not needed."""
    return translated(name, offload, "train.offload", default=default, reason=RESTS)


def sharding(role: str, *, rested: bool) -> tuple[Key, ...]:
    """FSDP of a model beside the policy."""
    at = f"trainer.{role}.fsdp_config"
    there = has_critic if role == "critic" else has_reference
    return (
        rests(f"{at}.cpu_offload", default=rested),
        *(
            derived(
                f"{at}.{name}",
                like(f"{at}.{name}", f"{FSDP}.{name}", there=there),
                default=default,
                reason=ALIKE,
            )
            for name, default in (("reshard_after_forward", True), ("fsdp_size", -1))
        ),
    )


def deepspeed(name: str, default: Json) -> Key:
    """Whatever it says, nothing reads it: the strategy that would is refused."""
    return Key(
        name=name,
        status="engine",
        default=default,
        native=("deepspeed",),
        reason=DEEPSPEED,
        translate=check_deepspeed,
    )


def sequence_parallel(role: str) -> Key:
    return translated(
        f"trainer.{role}.sequence_parallel_size",
        layout,
        "train.parallel.cp",
        default=1,
        reason="Ranks that share the tokens of a micro-batch (Ulysses); the same for all models that there are. Must "
        f"divide the attention heads. {FITTED}",
    )


POLICY: tuple[Key, ...] = (
    derived(
        "trainer.strategy",
        strategy,
        default="fsdp2",
        reason="Where tensors are cut, by FSDP2; fsdp is the same but for its means. deepspeed is coming.",
    ),
    mapped("trainer.policy.model.path", "model.path", default="Qwen/Qwen2.5-1.5B-Instruct"),
    deepspeed("trainer.policy.deepspeed_config", "${deepspeed_config.train}"),
    mapped(TRAIN, "train.optimizer", default={}),
    mapped(f"{TRAIN}.lr", "train.optimizer.lr", default=1e-6),
    mapped(f"{TRAIN}.adam_betas", "train.optimizer.betas", default=ADAM),
    mapped(
        f"{TRAIN}.weight_decay",
        "train.optimizer.weight_decay",
        default=1e-2,
        reason="Decoupled, as in AdamW, and of all parameters (train.optimizer.decay_all).",
    ),
    translated(
        f"{TRAIN}.max_grad_norm",
        policy_optimizer,
        "train.optimizer.grad_clip",
        "train.optimizer.decay_all",
        default=1.0,
        reason="Clipped where it is larger; 0 and below: no clipping.",
    ),
    rests(f"{TRAIN}.offload_after_step", default=True),
    mapped("trainer.policy.fsdp_config", "train.parallel", default={}, reason="A section."),
    rests(f"{FSDP}.cpu_offload", default=False),
    translated(
        f"{FSDP}.reshard_after_forward",
        shards,
        "train.parallel.reshard_after_forward",
        default=True,
        reason="Read where FSDP cuts tensors, which is on several devices. A group's size is coming.",
    ),
    translated(
        f"{FSDP}.fsdp_size",
        layout,
        "train.parallel.dp_shard",
        "train.parallel.dp_replicate",
        default=-1,
        reason=f"Devices that share one copy; -1: all. {FITTED}",
    ),
    sequence_parallel("policy"),
    inert(
        "trainer.policy.use_torch_compile",
        "It makes SkyRL's entropy faster; whet's comes out of its own log-prob pass.",
        default=False,
        harmless=(True,),
    ),
    translated(
        "trainer.policy.record_memory",
        recorded,
        "profile.tools",
        "profile.steps",
        default=False,
        reason="Snapshots of CUDA's allocator with its history, of the first three steps (SkyRL: of every step). Left "
        "out where there is no GPU.",
    ),
)

CRITIC: tuple[Key, ...] = (
    translated(
        "trainer.critic.model.path",
        critic,
        "critic.path",
        "critic.aggregation",
        default=None,
        reason=f"{ONLY_CRITIC} gae needs it. The value loss is a mean over sequences, as there.",
    ),
    deepspeed("trainer.critic.deepspeed_config", "${deepspeed_config.train}"),
    *(
        translated(
            f"trainer.critic.optimizer_config.{name}",
            critic,
            *(f"critic.optimizer.{key}" for key in native),
            default=default,
            reason=ONLY_CRITIC,
        )
        for name, native, default in (
            ("lr", ("lr",), 5e-6),
            ("adam_betas", ("betas",), ADAM),
            ("weight_decay", ("weight_decay", "decay_all"), 1e-2),
            ("max_grad_norm", ("grad_clip",), 1.0),
        )
    ),
    rests("trainer.critic.optimizer_config.offload_after_step", default=True),
    *sharding("critic", rested=False),
    sequence_parallel("critic"),
)

REFERENCE: tuple[Key, ...] = (
    deepspeed("trainer.ref.deepspeed_config", "${deepspeed_config.eval}"),
    *sharding("ref", rested=True),
    sequence_parallel("ref"),
    *(
        deepspeed(f"deepspeed_config.{use}.{name}", default)
        for use in ("train", "eval")
        for name, default in (
            ("zero_optimization.stage", 3),
            ("zero_optimization.zero_hpz_partition_size", 1),
            ("gradient_clipping", 1.0),
        )
    ),
)

ALGORITHM: tuple[Key, ...] = (
    translated(
        "trainer.algorithm.advantage_estimator",
        advantages,
        "algorithm.name",
        default="grpo",
        reason="grpo: the recipe grpo; gae: ppo, advantages whitened over the batch. Of newer versions rloo (a reply "
        "alone in its group learns nothing), reinforce++ and maxrl, too.",
    ),
    *(
        translated(
            f"trainer.algorithm.{name}",
            kl,
            "algorithm.kl.estimator",
            "algorithm.reward_kl.estimator",
            default=default,
            reason="k3 first, then the absolute value, else k1; the same in loss and reward.",
        )
        for name, default in (("use_kl_estimator_k3", True), ("use_abs_kl", False))
    ),
    *(
        translated(
            f"trainer.algorithm.{name}",
            kl,
            "algorithm.kl.coef",
            "algorithm.reward_kl.coef",
            default=default,
            reason="One of the two at most; with neither no reference is loaded.",
        )
        for name, default in (("use_kl_in_reward", False), ("use_kl_loss", True))
    ),
    translated(
        "trainer.algorithm.kl_loss_coef",
        kl,
        "algorithm.kl.coef",
        "algorithm.reward_kl.coef",
        default=0.001,
        reason="Of the loss or of the reward, whichever is on; 0 is off.",
    ),
    translated(
        "trainer.algorithm.advantage_batch_normalize",
        advantages,
        "algorithm.whiten",
        "algorithm.whiten_ddof",
        default=False,
        reason="Over the sampled tokens of the batch (SkyRL's mean counts padding, too), the variance with n.",
    ),
    translated(
        "trainer.algorithm.value_head_prefix",
        critic,
        "critic.head",
        default="value_head",
        reason=f"{ONLY_CRITIC} Weights without such a head get a new one, as there.",
    ),
    translated(
        "trainer.algorithm.ppo_loss_type",
        policy_loss,
        "algorithm.loss",
        "algorithm.dual_clip",
        "algorithm.gspo_form",
        default="regular",
        reason="regular or dual_clip, and the losses of newer versions; gspo is its form by tokens. The log-ratio is "
        "bounded to +-20.",
    ),
    translated(
        "trainer.algorithm.lambd",
        advantages,
        "algorithm.lam",
        default=1.0,
        reason="Read by gae alone, as there.",
    ),
    translated(
        "trainer.algorithm.gamma",
        advantages,
        "algorithm.gamma",
        default=1.0,
        reason="Read by gae and reinforce++, as there.",
    ),
    *(
        translated(
            f"trainer.algorithm.eps_clip_{end}",
            policy_loss,
            f"algorithm.clip_{end}",
            default=0.2,
            reason="A width, not a bound. Read where ppo_loss_type has one, as there; 0 becomes 1e-12.",
        )
        for end in ("low", "high")
    ),
    translated(
        "trainer.algorithm.clip_ratio_c",
        policy_loss,
        "algorithm.dual_clip",
        default=3.0,
        reason="Read with ppo_loss_type=dual_clip alone, as there.",
    ),
    translated(
        "trainer.algorithm.value_clip",
        critic,
        "critic.clip_value",
        default=0.2,
        reason=f"{ONLY_CRITIC} null: plain squared error.",
    ),
    translated(
        "trainer.algorithm.normalize_reward",
        critic,
        "critic.normalize_decay",
        default=True,
        reason=f"{ONLY_CRITIC} As the document says: the critic predicts returns in units of their running mean and "
        "deviation, which fade by 0.99 a step. (SkyRL's code leaves them at 0 and 1, which is false here.)",
    ),
)
