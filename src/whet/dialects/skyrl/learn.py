"""SkyRL's values of the algorithm as native ones: advantages, groups, KL, losses, off-policy correction.

Each function takes all values of a file and gives the native keys of one matter.
"""

from __future__ import annotations

from functools import partial

from whet.dialects.row import NOTHING, Native, Values
from whet.dialects.skyrl.devices import A, compares, since
from whet.dialects.skyrl.optimizers import own_overrides
from whet.dialects.typed import choices, choose, settings
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- advantages


def is_known(v: Values) -> bool:
    """Whether the estimator is one of SkyRL's, and none of yours."""
    return v[f"{A}.advantage_estimator"] in choices("skyrl", "estimator")


def refills(v: Values) -> int:
    """How often more groups are asked for: so many batches in all; -1 is without end."""
    most = int(v[f"{A}.dynamic_sampling.max_sample_batches"])
    return most - 1 if most > 0 else 10**6


def fills_up(v: Values) -> bool:
    """Whether an asynchronous run drops uniform groups and takes others until a step is full."""
    return bool(
        v["trainer.fully_async.enabled"]
        and v["trainer.fully_async.sample_full_batch"]
        and v[f"{A}.zero_variance_filter"]
    )


def filter_counts(v: Values) -> bool:
    """Whether groups of equal rewards that stay without a loss change a number: their advantages are 0, so only where
    they count in a mean over tokens, or where KL and entropy would learn from them."""
    no_advantage = v[f"{A}.advantage_estimator"] in ("grpo", "rloo", "maxrl")
    alone = not compares(v) and not v[f"{A}.use_entropy_loss"] and not v[f"{A}.advantage_batch_normalize"]
    by_sequence = aggregation(v) != "token-mean"
    return not (fills_up(v) or (no_advantage and alone and by_sequence))


# ---------------------------------------------------------------- KL and entropy


def estimator(v: Values) -> str:
    """By the two switches, while there were any, else by kl_estimator_type; the document's version has no such key,
    so a file that gives it means it. Where there is that key, k3 is bounded."""
    named: str | None = v[f"{A}.kl_estimator_type"]
    by_switches = named is None or since(v, "train-0.1")
    if by_switches and v[f"{A}.use_kl_estimator_k3"]:
        return "low_var_kl" if since(v, "train-0.1") else "k3"
    if by_switches and v[f"{A}.use_abs_kl"]:
        return "abs"
    return "low_var_kl" if named == "k3" else named or "k1"


reference = partial(own_overrides, role="ref", native="reference")


# ---------------------------------------------------------------- policy loss

SMALLEST = 1e-12
"""For a clip width of 0, which no native width can be: 1 less this is 1 in float32."""


def sums(v: Values) -> bool:
    """The loss is a sum over tokens, whatever the reduction says; cross_entropy is, without KL and entropy."""
    kind = v[f"{A}.ppo_loss_type"]
    until_scaled = since(v, "train-0.4") and not since(v, "0.2")  # then advantages have the reduction
    return kind == "cross_entropy" or (kind == "importance_sampling" and until_scaled)


def policy_loss(v: Values) -> Native:
    """The loss and what it reads. regular has no bound for negative advantages, dual_clip has clip_ratio_c."""
    kind = v[f"{A}.ppo_loss_type"]
    loss = choices("skyrl", "loss").get(kind, kind)  # else a function of yours
    reads = settings("skyrl", "loss", kind)
    out: dict[str, Json] = {"algorithm.loss": loss}
    out |= {f"algorithm.loss.{ours}": v[f"{A}.{theirs}"] for ours, theirs in reads.items()}
    for width in ("algorithm.loss.clip_low", "algorithm.loss.clip_high"):
        if out.get(width) == 0:
            out[width] = SMALLEST
    return out


def aggregation(v: Values) -> str:
    """The native name of a reduction, as the version has it."""
    kind, alone = v[f"{A}.loss_reduction"], v["trainer.micro_train_batch_size_per_gpu"] == 1
    by_cut = kind == "token_mean_legacy" or (kind == "token_mean" and not since(v, "0.2"))
    return (
        "seq-mean-token-mean"
        if alone and by_cut and since(v, "train-0.1")
        else choose(v, f"{A}.loss_reduction", choices("skyrl", "reduction"))
    )


def longest(v: Values) -> int:
    """max_seq_len: overwritten from train-0.1 to train-0.4, to be given from 0.2 on."""
    key = f"{A}.max_seq_len"
    given: int | None = v[key]
    if given is None and since(v, "0.2"):
        raise ConfigError(
            f"{key} must be given for {A}.loss_reduction=seq_mean_token_sum_norm: a number of tokens"
        )
    both: int = input_length(v) + v["generator.sampling_params.max_generate_length"]
    overwritten = since(v, "train-0.1") and not since(v, "0.1")
    return both if given is None or overwritten else given


def input_length(v: Values) -> int:
    """The longest input of a turn; null is the prompt's limit, and so is a reference to a wrong one."""
    own, prompt = v["generator.max_input_length"], v["trainer.max_prompt_length"]
    return own if isinstance(own, int) else int(prompt)


# ---------------------------------------------------------------- off-policy correction

OFF = f"{A}.off_policy_correction"


def correction(v: Values) -> Native:
    """Weights by old over sampled, truncated from above; rollouts and tokens left out. Averages count them all, but
    before 0.2 not what was left out."""
    weight, mask = dict(_weight(v)), _sequence_mask(v)
    reads_bounds = since(v, "0.1") or not since(v, "train-0.4") or bool(weight or mask)
    outliers = _bounds(v, "outlier_token", "max") if reads_bounds else []
    reject = [*mask, *outliers, *_bounds(v, "token_mask", "token")]
    if not weight and not reject:
        return NOTHING
    if (loss := v[f"{A}.ppo_loss_type"]) in _uncorrected(v):
        raise ConfigError(
            f"{A}.policy_loss_type={loss} reads no off-policy correction in SkyRL: leave {A}.use_tis and {OFF} out, or "
            "take another loss"
        )
    kept = since(v, "train-0.4") and not since(v, "0.2")
    out = weight | ({"algorithm.correction.reject": reject} if reject else {})
    return out | {"algorithm.correction.denominator": "kept" if kept and reject else "all"}


def _uncorrected(v: Values) -> tuple[str, ...]:
    """Losses that no correction touches: before train-0.4 all but those of PPO."""
    if v[f"{A}.use_tis"] and not since(v, "train-0.4"):
        return tuple(kind for kind in choices("skyrl", "loss") if kind not in ("regular", "dual_clip"))
    return "clip_cov", "kl_cov", "cross_entropy", "importance_sampling"


def _weight(v: Values) -> Native:
    """By tis_ratio_type, or use_tis."""
    at, kind = "algorithm.correction.weight", v[f"{OFF}.tis_ratio_type"]
    if v[f"{A}.use_tis"]:
        return {at: "token", f"{at}.high": v[f"{A}.tis_imp_ratio_cap"]}
    return {} if kind is None else {at: kind, f"{at}.high": v[f"{OFF}.{kind}_tis_ratio_clip_high"]}


MASKS = {"geometric": ("geo", "mean"), "product": ("product", "sum")}
"""sequence_mask_metric -> (the name in its bounds, the native statistic over a rollout)."""


def _sequence_mask(v: Values) -> list[Json]:
    """The rollout's geometric mean or product of ratios must lie within bounds."""
    if v[f"{OFF}.sequence_mask_metric"] is None:
        return []
    short, over = MASKS[v[f"{OFF}.sequence_mask_metric"]]
    return [{"over": over, "low": v[f"{OFF}.{short}_mask_low"], "high": v[f"{OFF}.{short}_mask_high"]}]


def _bounds(v: Values, name: str, over: str) -> list[Json]:
    """Thresholds on single tokens' ratios: of the token alone, or for all of its rollout."""
    ends = {end: v[f"{OFF}.{name}_is_threshold_{end}"] for end in ("low", "high")}
    given = {end: value for end, value in ends.items() if value is not None}
    return [{"over": over, **given}] if given else []
