"""verl: its advantages, policy losses, aggregations, KL, rollout correction, critic and schedules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from peers import ours
from peers.ours import TOTAL, schedule
from peers.table import FULL, Row
from whet.prove import schedules
from whet.prove.cases import Case
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs
from whet.prove.verl import ACTOR, CORE, EPS, FLOAT32, advantage, gdpo, loss, value_loss
from whet.types import Json

IS = "algorithm.rollout_correction.rollout_is"
RS = "algorithm.rollout_correction.rollout_rs"
CORRECTION = "algorithm.rollout_correction."

DOCUMENTED = "docs/algorithms.md"


# ---------------------------------------------------------------- advantages


def estimator(
    name: str,
    function: str,
    covers: str,
    keys: Mapping[str, Json] | None = None,
    call: Any = advantage,
    **rest: Any,
) -> Row:
    return Row(
        peer="verl",
        what=f"adv_estimator={name}"
        + "".join(f", {key.rpartition('.')[2]}={value}" for key, value in (keys or {}).items()),
        theirs=f"{CORE}:{function}",
        call=call,
        ours=ours.advantage,
        keys={"algorithm.adv_estimator": name, **(keys or {})},
        covers=(f"advantage {covers}",),
        **rest,
    )


NEAR = ("one turn", "several turns", "a group of one")

EMPTY = f"an empty reply counts in no group here, in verl as a score of its group ({DOCUMENTED}, Notation)"

ADVANTAGES = (
    estimator("grpo", "compute_grpo_outcome_advantage", "grpo", tolerance=FLOAT32),
    estimator("grpo", "compute_grpo_outcome_advantage", "grpo", kinds=("an empty reply",), differs=EMPTY),
    estimator(
        "grpo",
        "compute_grpo_outcome_advantage",
        "grpo",
        {"algorithm.norm_adv_by_std_in_grpo": False},
    ),
    estimator("grpo_vectorized", "compute_grpo_vectorized_outcome_advantage", "grpo", tolerance=FLOAT32),
    estimator(
        "grpo_passk",
        "compute_grpo_passk_outcome_advantage",
        "grpo_passk",
        kinds=("one turn", "several turns", "far apart"),
    ),
    estimator(
        "gdpo",
        "compute_gdpo_outcome_advantage",
        "gdpo",
        {"algorithm.gdpo_reward_keys": ["format", "right"], "algorithm.gdpo_reward_weights": [1.0, 0.5]},
        call=gdpo,
        tolerance=FLOAT32,
    ),
    estimator("rloo", "compute_rloo_outcome_advantage", "rloo"),
    estimator(
        "rloo_vectorized",
        "compute_rloo_vectorized_outcome_advantage",
        "rloo",
        kinds=("one turn", "several turns", "far apart"),
    ),
    estimator("opo", "compute_opo_outcome_advantage", "opo"),
    estimator("gpg", "compute_gpg_outcome_advantage", "gpg", tolerance=FLOAT32),
    estimator("remax", "compute_remax_outcome_advantage", "remax"),
    estimator(
        "reinforce_plus_plus",
        "compute_reinforce_plus_plus_outcome_advantage",
        "reinforce_plus_plus",
        {"algorithm.gamma": 0.9},
        kinds=("one turn", "several turns", "a group of one", "far apart", "an empty reply"),
    ),
    estimator(
        "reinforce_plus_plus_baseline",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        "reinforce_plus_plus_baseline",
    ),
    estimator(
        "gae",
        "compute_gae_advantage_return",
        "gae",
        {"algorithm.gamma": 0.97, "algorithm.lam": 0.9},
        kinds=("one turn", "several turns", "a group of one", "far apart", "an empty reply"),
    ),
    estimator(
        "optimal_token_baseline",
        "compute_optimal_token_baseline_advantage",
        "optimal_token_baseline",
        tolerance=1e-6,
        kinds=("one turn", "a group of one", "far apart"),
    ),
    estimator(
        "optimal_token_baseline",
        "compute_optimal_token_baseline_advantage",
        "optimal_token_baseline",
        tolerance=1e-6,
        kinds=("several turns",),
        differs="verl takes the baseline of the longest reply from other positions, too "
        f"({DOCUMENTED}, `optimal_token_baseline`)",
    ),
    estimator(
        "tir_optimal_token_baseline",
        "compute_multi_turn_optimal_token_baseline_advantage",
        "tir_optimal_token_baseline",
        tolerance=1e-6,
    ),
)


# ---------------------------------------------------------------- losses


def policy(
    mode: str,
    function: str,
    covers: tuple[str, ...],
    keys: Mapping[str, Json] | None = None,
    **rest: Any,
) -> Row:
    told = {ACTOR + name: value for name, value in (keys or {}).items() if not name.startswith("algorithm.")}
    whole = {name: value for name, value in (keys or {}).items() if name.startswith("algorithm.")}
    shown = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in (keys or {}).items())
    return Row(
        peer="verl",
        what=rest.pop("what", f"loss_mode={mode}" + (f", {shown}" if shown else "")),
        theirs=f"{CORE}:{function}",
        call=loss,
        ours=ours.loss,
        keys={f"{ACTOR}policy_loss.loss_mode": mode, **told, **whole},
        covers=covers,
        **rest,
    )


TOKEN_MEAN = ("one turn", "several turns", "a group of one", "an empty reply", "far apart")
NOT_EMPTY = ("one turn", "several turns", "a group of one", "far apart")
GRADIENT = ("grad",)
EMPTY_COUNTS = (
    "a reply without a token counts in no denominator here; verl's global batch size has it "
    f"({DOCUMENTED}, Notation)"
)
VANILLA = "compute_policy_loss_vanilla"


def aggregation(mode: str, covers: str, keys: Mapping[str, Json] | None = None, **rest: Any) -> Row:
    return policy(
        "vanilla",
        VANILLA,
        ("loss ppo", f"aggregation {covers}"),
        {"loss_agg_mode": mode, **(keys or {})},
        what=rest.pop("what", f"loss_agg_mode={mode}"),
        **rest,
    )


LOSSES = (
    policy(
        "vanilla", VANILLA, ("loss ppo",), {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, kinds=TOKEN_MEAN
    ),
    policy("vanilla", VANILLA, ("loss ppo",), {"clip_ratio_c": 1.5}, kinds=TOKEN_MEAN),
    policy(
        "gspo",
        "compute_policy_loss_gspo",
        ("loss gspo",),
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "loss_agg_mode": "seq-mean-token-mean"},
        tolerance=EPS,
    ),
    policy(
        "gspo",
        "compute_policy_loss_gspo",
        ("loss gspo",),
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "loss_agg_mode": "token-mean"},
    ),
    policy(
        "sapo", "compute_policy_loss_sapo", ("loss sapo",), {"tau_pos": 1.0, "tau_neg": 1.5}, tolerance=EPS
    ),
    policy("gpg", "compute_policy_loss_gpg", ("loss gpg", "loss reinforce")),
    policy("dro", "compute_policy_loss_dro", ("loss dro",), {"policy_loss.dro_beta": 0.3}),
    policy(
        "clip_cov",
        "compute_policy_loss_clip_cov",
        ("loss clip_cov",),
        {"policy_loss.clip_cov_lb": 50.0, "policy_loss.clip_cov_ub": 60.0},
        what="loss_mode=clip_cov where no token is in range",
        kinds=("one turn", "several turns"),
    ),
    policy(
        "clip_cov",
        "compute_policy_loss_clip_cov",
        ("loss clip_cov",),
        {
            "policy_loss.clip_cov_lb": -50.0,
            "policy_loss.clip_cov_ub": 50.0,
            "policy_loss.clip_cov_ratio": 1.0,
        },
        what="loss_mode=clip_cov where every token is in range",
        kinds=("one turn", "several turns"),
    ),
    policy(
        "kl_cov",
        "compute_policy_loss_kl_cov",
        ("loss kl_cov",),
        {"policy_loss.kl_cov_ratio": 0.2},
        kinds=("one turn", "several turns"),
    ),
    policy(
        "geo_mean",
        "compute_policy_loss_geo_mean",
        ("loss geo_mean",),
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
        tolerance=1e-7,
    ),
    policy(
        "cispo", "compute_policy_loss_cispo", ("loss cispo",), {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}
    ),
    policy(
        "dppo_tv",
        "compute_policy_loss_dppo_tv",
        ("loss dppo",),
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.12, "clip_ratio_c": 20.0},
        only=GRADIENT,
    ),
    policy(
        "dppo_kl",
        "compute_policy_loss_dppo_kl",
        ("loss dppo",),
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.04, "clip_ratio_c": 20.0},
        only=GRADIENT,
    ),
    policy(
        "bypass_mode",
        "compute_policy_loss_bypass_mode",
        ("loss ppo",),
        {"algorithm.rollout_correction.bypass_mode": True},
        what="bypass_mode, loss_type=ppo_clip",
    ),
    *(
        policy(
            "bypass_mode",
            "compute_policy_loss_bypass_mode",
            (f"loss {'reinforce_is' if kind == 'reinforce' else 'ppo'}",),
            {
                "loss_agg_mode": mode,
                f"{CORRECTION}bypass_mode": True,
                f"{CORRECTION}loss_type": kind,
                f"{CORRECTION}rollout_rs": "token_k1,seq_max_k2",
                f"{CORRECTION}rollout_rs_threshold": "0.7_1.5,0.4",
            },
            what=f"bypass_mode, loss_type={kind}, rollout_rs=token_k1,seq_max_k2, loss_agg_mode={mode}",
            kinds=TOKEN_MEAN if mode == "token-mean" else NOT_EMPTY,
            tolerance=1e-7,
        )
        for kind in ("ppo_clip", "reinforce")
        for mode in ("token-mean", "seq-mean-token-mean")
    ),
    *(
        policy(
            "bypass_mode",
            "compute_policy_loss_bypass_mode",
            ("loss reinforce_is",),
            {
                "loss_agg_mode": "token-mean",
                f"{CORRECTION}bypass_mode": True,
                f"{CORRECTION}loss_type": "reinforce",
                f"{CORRECTION}rollout_is": over,
                f"{CORRECTION}rollout_is_batch_normalize": True,
            },
            what=f"bypass_mode, loss_type=reinforce, rollout_is={over}, rollout_is_batch_normalize",
            kinds=NOT_EMPTY,
            tolerance=1e-7,
        )
        for over in ("token", "sequence")
    ),
)

AGGREGATIONS = (
    aggregation("token-mean", "token-mean", kinds=TOKEN_MEAN),
    aggregation("token-sum", "token-sum", kinds=TOKEN_MEAN),
    aggregation("seq-mean-token-sum", "seq-mean-token-sum"),
    aggregation("seq-mean-token-mean", "seq-mean-token-mean", tolerance=1e-7),
    aggregation(
        "seq-mean-token-mean", "seq-mean-token-mean", kinds=("an empty reply",), differs=EMPTY_COUNTS
    ),
    aggregation("seq-mean-token-sum-norm", "seq-mean-token-sum-norm", {"loss_scale_factor": 24}),
)

KL = tuple(
    policy(
        "vanilla",
        VANILLA,
        (f"kl {native}",),
        {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": name},
        what=f"kl_loss_type={name}",
    )
    for name, native in (
        ("k1", "k1"),
        ("k2", "k2"),
        ("mse", "k2"),
        ("abs", "abs"),
        ("k3", "low_var_kl"),
        ("low_var_kl", "low_var_kl"),
        ("k1+", "k1+"),
        ("k2+", "k2+"),
        ("abs+", "abs+"),
        ("k3+", "low_var_kl+"),
        ("low_var_kl+", "low_var_kl+"),
    )
)


def corrected(what: str, keys: Mapping[str, Json], covers: tuple[str, ...], **rest: Any) -> Row:
    return policy("vanilla", VANILLA, covers, keys, what=what, **rest)


CORRECTIONS = (
    *(
        corrected(
            f"rollout_is={level}, threshold {bound}" + (", batch_normalize" if normalize else ""),
            {IS: level, f"{IS}_threshold": bound, f"{IS}_batch_normalize": normalize},
            (f"correction weight: {level}",),
            tolerance=EPS,
            kinds=FULL if bound == 1.2 else NEAR,
        )
        for level in ("token", "sequence")
        for bound in (1.2, "0.8_1.25")
        for normalize in (False, True)
    ),
    *(
        corrected(
            f"rollout_rs={mode}, threshold {bound}",
            {RS: mode, f"{RS}_threshold": bound},
            ("correction reject",),
            kinds=NEAR,
        )
        for mode, bound in (
            ("token_k1", "0.7_1.5"),
            ("token_k1", "1.3"),
            ("token_k2", "0.1"),
            ("token_k3", "0.1"),
            ("seq_sum_k1", "0.5_1.8"),
            ("seq_sum_k2", "0.3"),
            ("seq_sum_k3", "0.3"),
            ("seq_mean_k1", "0.9_1.05"),
            ("seq_mean_k2", "0.05"),
            ("seq_mean_k3", "0.05"),
            ("seq_max_k2", "0.3"),
            ("seq_max_k3", "0.3"),
            ("token_k1,seq_mean_k3", "0.6_1.6,0.06"),
        )
    ),
    corrected(
        "rollout_is=token, threshold 0.8_1.25, rollout_rs=token_k2, threshold 0.1",
        {IS: "token", f"{IS}_threshold": "0.8_1.25", RS: "token_k2", f"{RS}_threshold": "0.1"},
        ("correction reject",),
        kinds=NEAR,
        differs="both kinds of tokens are left out of the averages here, in verl those of rollout_rs alone "
        f"({DOCUMENTED}, Off-policy correction)",
    ),
)


# ---------------------------------------------------------------- the critic, the KL's controller, schedules


def controller(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """The KL of the batch as `apply_kl_penalty` of ray_trainer.py takes it, then one update."""
    at = "algorithm.kl_ctrl."
    made = function(keys[f"{at}kl_coef"], keys[f"{at}target_kl"], keys[f"{at}horizon"])
    mean = theirs("verl", "verl.utils.torch_functional:masked_mean")
    penalty = theirs("verl", f"{CORE}:kl_penalty")
    old, ref = case.padded(case.batch.logp_old_N), case.padded(case.batch.logp_ref_N)
    kl = penalty(old, ref, str(keys["algorithm.kl_penalty"])) * case.mask
    made.update(float(mean(kl, case.mask, axis=-1).mean()), case.batch.rollouts)
    return {"coef": torch.tensor(float(made.value), dtype=torch.float64)}


def by_verl(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """Of `get_*_schedule_with_warmup`, which take what they name of the optimizer's section."""
    mine = {key.rpartition(".")[2]: value for key, value in keys.items()}
    offered = {
        "num_warmup_steps": mine.get("lr_warmup_steps"),
        "num_training_steps": TOTAL,
        "min_lr_ratio": mine.get("min_lr_ratio"),
    }
    taken = inspect.signature(function).parameters
    optimizer = schedules.dummy()
    made = function(optimizer, **{name: value for name, value in offered.items() if name in taken})
    return {"factor": schedules.of_scheduler(made, optimizer, TOTAL)}


OTHERS = (
    *(
        Row(
            peer="verl",
            what=f"value loss, loss_agg_mode={mode}",
            theirs=f"{CORE}:compute_value_loss",
            call=value_loss,
            ours=ours.value_loss,
            keys={
                "algorithm.adv_estimator": "gae",
                "critic.cliprange_value": 0.3,
                "critic.loss_agg_mode": mode,
            },
            covers=("critic",),
            tolerance=1e-7,
        )
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    ),
    Row(
        peer="verl",
        what="kl_ctrl.type=adaptive",
        theirs=f"{CORE}:AdaptiveKLController",
        call=controller,
        ours=ours.adaptive_kl,
        keys={
            "algorithm.adv_estimator": "reinforce_plus_plus",
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_penalty": "kl",
            "algorithm.kl_ctrl.type": "adaptive",
            "algorithm.kl_ctrl.kl_coef": 0.1,
            "algorithm.kl_ctrl.target_kl": 0.05,
            "algorithm.kl_ctrl.horizon": 100,
        },
        covers=("adaptive KL",),
        tolerance=1e-7,
    ),
    *(
        Row(
            peer="verl",
            what=f"learning rate, {what}",
            theirs=f"verl.utils.torch_functional:{function}",
            call=by_verl,
            ours=schedule,
            keys={f"{ACTOR}optim.{name}": value for name, value in keys.items()},
            covers=("schedule",),
            kinds=("one turn",),
            tolerance=1e-12,
        )
        for what, function, keys in (
            (
                "constant after 5 steps",
                "get_constant_schedule_with_warmup",
                {"lr_scheduler_type": "constant", "warmup_style": None, "lr_warmup_steps": 5},
            ),
            (
                "cosine after 5 steps, floor 0.1",
                "get_cosine_schedule_with_warmup",
                {
                    "lr_scheduler_type": "cosine",
                    "warmup_style": None,
                    "lr_warmup_steps": 5,
                    "min_lr_ratio": 0.1,
                },
            ),
        )
    ),
)

ROWS = (*ADVANTAGES, *LOSSES, *AGGREGATIONS, *KL, *CORRECTIONS, *OTHERS)
