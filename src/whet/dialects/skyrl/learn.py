"""SkyRL's values of algorithm, optimizers and critic as native ones.

Each function takes all values of a file and gives the native keys of one matter.
"""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.faults import shown
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.skyrl.rules import has_critic, has_reference
from whet.dialects.typed import choose, flag, number, whole
from whet.types import ConfigError, Json

Native = Mapping[str, Json]

AT = "trainer.algorithm"

# ---------------------------------------------------------------- advantages

ESTIMATORS = {"grpo": "grpo", "gae": "ppo", "rloo": "rloo", "reinforce++": "reinforce_pp", "maxrl": "maxrl"}
"""Recipes. All but grpo and gae are of newer versions."""

DECAY = 0.99
"""How fast the statistics of normalize_reward fade; SkyRL's document names no rate."""


def advantages(v: Values) -> Native:
    """The recipe of an estimator, and the settings that this estimator reads."""
    has_critic(v)
    name = choose(v, f"{AT}.advantage_estimator", {k: k for k in ESTIMATORS})
    out: dict[str, Json] = {"algorithm.name": ESTIMATORS[name]}
    if name == "grpo" and not flag(v, f"{AT}.grpo_norm_by_std"):
        out["algorithm.normalize_std"] = False
    if name in ("gae", "reinforce++"):
        out["algorithm.gamma"] = v[f"{AT}.gamma"]
    if name == "gae":
        out["algorithm.lam"] = v[f"{AT}.lambd"]
    if flag(v, f"{AT}.advantage_batch_normalize"):
        out |= {"algorithm.whiten": True, "algorithm.whiten_ddof": 0}
        if name == "reinforce++":  # which is whitened by itself; twice is once, and the second time counts
            out["algorithm.name"] = "reinforce"
    return out


def groups(v: Values) -> Native:
    """What becomes of replies that were cut, and of groups without a difference."""
    out: dict[str, Json] = {}
    zero = flag(v, "generator.zero_reward_on_non_stop")
    if flag(v, "generator.apply_overlong_filtering"):
        if zero:
            raise NotSupportedYet(
                "generator.apply_overlong_filtering and generator.zero_reward_on_non_stop together are not built yet "
                "(coming): set one false"
            )
        out["algorithm.groups.unfinished"] = "mask"
    elif zero:
        out["algorithm.groups.unfinished"] = "zero"
    return out | dict(_dynamic_sampling(v))


def _dynamic_sampling(v: Values) -> Native:
    """filter: uniform groups are dropped and more are asked for, so many batches in all; -1 is without end."""
    at = f"{AT}.dynamic_sampling"
    if v[f"{at}.type"] is None:
        return {}
    choose(v, f"{at}.type", {"filter": True, "replace": None})
    most = whole(v, f"{at}.max_sample_batches", least=-1)
    if most == 0:
        raise ConfigError(f"{at}.max_sample_batches must not be 0: -1 samples on, N at most N batches")
    return {"algorithm.drop_uniform_groups": True, "algorithm.max_refills": most - 1 if most > 0 else 10**6}


# ---------------------------------------------------------------- KL and entropy


def kl(v: Values) -> Native:
    """In the loss or in the reward, never both; k3 is never negative, so its absolute value is itself."""
    in_loss, in_reward = (flag(v, f"{AT}.use_kl_{place}") for place in ("loss", "in_reward"))
    coef = number(v, f"{AT}.kl_loss_coef")
    if in_loss and in_reward:
        raise ConfigError(f"{AT}.use_kl_in_reward and {AT}.use_kl_loss exclude each other: set one false")
    if coef < 0:
        raise ConfigError(f"{AT}.kl_loss_coef={coef}: expected a number >= 0")
    if coef == 0 or not (in_loss or in_reward):
        return {}
    section = "kl" if in_loss else "reward_kl"
    out = {f"algorithm.{section}.coef": coef, f"algorithm.{section}.estimator": _estimator(v)}
    adaptive = choose(v, f"{AT}.kl_ctrl.type", {"fixed": False, "adaptive": True})
    if in_reward and adaptive:
        out["algorithm.reward_kl.target"] = number(v, f"{AT}.kl_ctrl.kl_target")
        out["algorithm.reward_kl.horizon"] = whole(v, f"{AT}.kl_ctrl.horizon")
    return out


def _estimator(v: Values) -> str:
    """kl_estimator_type of newer versions, if it is given; else by the two switches."""
    if v[f"{AT}.kl_estimator_type"] is not None:
        return choose(v, f"{AT}.kl_estimator_type", {k: k for k in ("k1", "k2", "k3", "abs")})
    if flag(v, f"{AT}.use_kl_estimator_k3"):
        return "k3"
    return "abs" if flag(v, f"{AT}.use_abs_kl") else "k1"


def reference(v: Values) -> Native:
    """Where the reference starts, and whether it becomes the policy at the end of every epoch."""
    if not has_reference(v):
        return {}
    own = {"path": v["trainer.ref.model.path"], "overrides": v["trainer.ref.model_config_kwargs"]}
    out = {f"reference.{key}": value for key, value in own.items() if value is not None}
    return out | ({"reference.reset_every_epochs": 1} if flag(v, "trainer.update_ref_every_epoch") else {})


def entropy(v: Values) -> Native:
    """A bonus, a mean over tokens however the policy's losses are averaged."""
    coef = number(v, f"{AT}.entropy_loss_coef")
    if not flag(v, f"{AT}.use_entropy_loss") or coef == 0:
        return {}
    return {"algorithm.entropy_coef": coef, "algorithm.entropy_aggregation": "token-mean"}


# ---------------------------------------------------------------- policy loss

CLIP = {"clip_low": "eps_clip_low", "clip_high": "eps_clip_high"}

LOSSES: dict[str, tuple[str, dict[str, str]]] = {
    "regular": ("ppo", CLIP),
    "dual_clip": ("ppo", {**CLIP, "dual_clip": "clip_ratio_c"}),
    "gspo": ("gspo", CLIP),
    "cispo": ("cispo", {"clip_low": "cispo.cispo_eps_clip_low", "clip_high": "cispo.cispo_eps_clip_high"}),
    "sapo": ("sapo", {"tau_pos": "sapo.tau_pos", "tau_neg": "sapo.tau_neg"}),
    "clip_cov": (
        "clip_cov",
        {
            **CLIP,
            "clip_cov_ratio": "clip_cov.clip_ratio",
            "clip_cov_lb": "clip_cov.clip_cov_lb",
            "clip_cov_ub": "clip_cov.clip_cov_ub",
        },
    ),
    "kl_cov": ("kl_cov", {"kl_cov_ratio": "kl_cov.kl_cov_frac", "ppo_kl_coef": "kl_cov.ppo_kl_coef"}),
    "dppo": ("dppo", {"dppo_delta_low": "dppo.delta_low", "dppo_delta_high": "dppo.delta_high"}),
    "importance_sampling": ("importance_sampling", {}),
    "cross_entropy": ("cross_entropy", {}),
    "rollout_is": ("rollout_is", CLIP),
}
"""policy_loss_type -> (native loss, native key -> SkyRL's key of what it reads)."""

SMALLEST = 1e-12
"""For a clip width of 0, which no native width can be: 1 less this is 1 in float32."""


def policy_loss(v: Values) -> Native:
    """The loss and what it reads. regular has no bound for negative advantages, dual_clip has clip_ratio_c."""
    kind = choose(v, f"{AT}.ppo_loss_type", {k: k for k in LOSSES})
    loss, reads = LOSSES[kind]
    out: dict[str, Json] = {"algorithm.loss": loss}
    out |= {f"algorithm.{ours}": number(v, f"{AT}.{theirs}") for ours, theirs in reads.items()}
    for width in ("algorithm.clip_low", "algorithm.clip_high"):
        if out.get(width) == 0:
            out[width] = SMALLEST
    if kind == "gspo":
        out["algorithm.gspo_form"] = "token"
    if kind == "dppo":
        known = {name: name for name in ("binary_tv", "binary_kl")}
        out["algorithm.dppo_divergence"] = choose(v, f"{AT}.dppo.dppo_type", known)
    if kind == "cispo" and choose(v, f"{AT}.cispo.cispo_anchor", {"old": False, "rollout": True}):
        out["algorithm.old_logprobs"] = "sampled"
    return out


REDUCTIONS = {
    "sequence_mean": "seq-mean-token-mean",
    "token_mean": "token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "prompt_mean": "prompt-mean",
}


def reduction(v: Values) -> Native:
    """How token losses become one number."""
    if v[f"{AT}.loss_reduction"] == "token_mean_legacy":
        raise ConfigError(
            f"{AT}.loss_reduction=token_mean_legacy depends on how the batch is cut into micro-batches; here a cut "
            "never changes a gradient: write token_mean, which is the same without a cut"
        )
    mode = choose(v, f"{AT}.loss_reduction", REDUCTIONS)
    out: dict[str, Json] = {"algorithm.aggregation": mode}
    if mode == "seq-mean-token-sum-norm":
        both = whole(v, "generator.max_input_length") + whole(
            v, "generator.sampling_params.max_generate_length"
        )
        out["algorithm.norm_tokens"] = v[f"{AT}.max_seq_len"] or both
    return out


# ---------------------------------------------------------------- off-policy correction

OFF = f"{AT}.off_policy_correction"


def correction(v: Values) -> Native:
    """Weights by old over sampled, truncated from above; rollouts and tokens left out. Averages count them all."""
    out = dict(_weight(v))
    reject = [*_sequence_mask(v), *_bounds(v, "outlier_token", "max"), *_bounds(v, "token_mask", "token")]
    if reject:
        out["algorithm.correction.reject"] = reject
    return out | {"algorithm.correction.denominator": "all"} if out else {}


def _weight(v: Values) -> Native:
    """tis_ratio_type, or use_tis of older versions, which is the token's with a cap of its own."""
    at = "algorithm.correction"
    if flag(v, f"{AT}.use_tis"):
        if v[f"{OFF}.tis_ratio_type"] is not None:
            raise ConfigError(f"{AT}.use_tis and {OFF}.tis_ratio_type say the same: leave {AT}.use_tis out")
        cap = number(v, f"{AT}.tis_imp_ratio_cap")
        if cap <= 0:
            raise ConfigError(f"{AT}.use_tis needs {AT}.tis_imp_ratio_cap > 0, got {shown(cap)}")
        return {f"{at}.weight": "token", f"{at}.high": cap}
    if v[f"{OFF}.tis_ratio_type"] is None:
        return {}
    kind = choose(v, f"{OFF}.tis_ratio_type", {"token": "token", "sequence": "sequence"})
    return {f"{at}.weight": kind, f"{at}.high": number(v, f"{OFF}.{kind}_tis_ratio_clip_high")}


def _sequence_mask(v: Values) -> list[Json]:
    """The rollout's geometric mean or product of ratios must lie within bounds."""
    if v[f"{OFF}.sequence_mask_metric"] is None:
        return []
    short, over = choose(
        v, f"{OFF}.sequence_mask_metric", {"geometric": ("geo", "mean"), "product": ("product", "sum")}
    )
    low, high = (number(v, f"{OFF}.{short}_mask_{end}") for end in ("low", "high"))
    return [{"over": over, "low": low, "high": high}]


def _bounds(v: Values, name: str, over: str) -> list[Json]:
    """Thresholds on single tokens' ratios: of the token alone, or for all of its rollout."""
    ends = {end: v[f"{OFF}.{name}_is_threshold_{end}"] for end in ("low", "high")}
    given = {end: value for end, value in ends.items() if value is not None}
    return [{"over": over, **given}] if given else []


# ---------------------------------------------------------------- optimizers

POLYNOMIAL_END = 1e-7
"""Learning rate at which transformers' polynomial schedule ends; its power is 1."""

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",  # of one cycle, transformers' default
    "polynomial": "linear",
    "inverse_sqrt": "inverse_sqrt",
    **dict.fromkeys(("cosine_with_min_lr", "warmup_stable_decay", "reduce_lr_on_plateau")),
}


def policy_optimizer(v: Values) -> Native:
    """Clipping, decay and schedule of the policy, and what the trainer divides logits by."""
    out = dict(_optimizer(v, "policy", "train.optimizer"))
    if v[f"{AT}.temperature"] is not None:
        out["train.temperature"] = number(v, f"{AT}.temperature")
    return out


def critic(v: Values) -> Native:
    """The whole critic, where one learns (gae)."""
    if not has_critic(v):
        return {}
    if not v["trainer.critic.model.path"]:
        raise ConfigError(
            f"trainer.critic.model.path must be given for {AT}.advantage_estimator=gae: "
            "the folder that the value model starts from (usually trainer.policy.model.path)"
        )
    given = "trainer.critic.optimizer_config"
    out = {
        "critic.path": v["trainer.critic.model.path"],
        "critic.head": v[f"{AT}.value_head_prefix"],
        "critic.clip_value": v[f"{AT}.value_clip"],
        "critic.aggregation": "seq-mean-token-mean",
        "critic.normalize_decay": DECAY if flag(v, f"{AT}.normalize_reward") else None,
        "critic.optimizer.lr": v[f"{given}.lr"],
        "critic.optimizer.betas": v[f"{given}.adam_betas"],
        "critic.optimizer.weight_decay": v[f"{given}.weight_decay"],
        **_optimizer(v, "critic", "critic.optimizer"),
    }
    if v["trainer.critic.model_config_kwargs"] is not None:
        out["critic.overrides"] = v["trainer.critic.model_config_kwargs"]
    return out


def _optimizer(v: Values, role: str, optimizer: str) -> Native:
    """A norm of 0 or less is no clipping; decay is of all parameters, as torch does by itself."""
    given = f"trainer.{role}.optimizer_config"
    norm = number(v, f"{given}.max_grad_norm")
    out: dict[str, Json] = {f"{optimizer}.grad_clip": norm if norm > 0 else None}
    if number(v, f"{given}.weight_decay") > 0:
        out[f"{optimizer}.decay_all"] = True
    return out | {f"{optimizer}.schedule.{key}": value for key, value in _schedule(v, given).items()}


def _schedule(v: Values, given: str) -> Native:
    """transformers' schedules, in optimizer steps; the first step of a warm-up moves nothing, as there."""
    own = v[f"{given}.num_warmup_steps"]
    warmup = whole(v, "trainer.num_warmup_steps" if own is None else f"{given}.num_warmup_steps", least=0)
    name = v[f"{given}.scheduler"]
    out: dict[str, Json] = {"kind": choose(v, f"{given}.scheduler", SCHEDULES), "warmup_steps": warmup}
    if name == "constant":
        out["warmup_steps"] = 0
    elif warmup:
        out["warmup_ends"] = "start"
    if name == "polynomial":
        lr = number(v, f"{given}.lr")
        if lr <= POLYNOMIAL_END:
            raise ConfigError(
                f"{given}.scheduler=polynomial ends at {POLYNOMIAL_END}, so {given}.lr must be above it"
            )
        out["min_factor"] = POLYNOMIAL_END / lr
    if name == "inverse_sqrt" and not warmup:
        raise NotSupportedYet(
            f"{given}.scheduler=inverse_sqrt without {given}.num_warmup_steps is not built yet (coming)"
        )
    return out
