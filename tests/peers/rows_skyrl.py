"""SkyRL: its advantages, policy losses with their reductions, off-policy correction, KL and critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peers import ours
from peers.table import Row
from whet.prove import skyrl
from whet.prove.cases import Case
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs
from whet.prove.skyrl import FLOAT32, PPO, A
from whet.types import Json

WITHOUT_FAR = ("one turn", "several turns", "a group of one")


def section(keys: Mapping[str, Json]) -> Any:
    """SkyRL's config of the algorithm, with these of its keys; without a KL unless they ask for it."""
    made = theirs("skyrl", "skyrl.train.config:AlgorithmConfig")()
    made.use_kl_loss = False
    for key, value in keys.items():
        if not key.startswith(A):
            continue
        *path, name = key.removeprefix(A).split(".")
        at = made
        for part in path:
            at = getattr(at, part)
        assert hasattr(at, name), f"SkyRL has no {key}"
        setattr(at, name, value)
    return made


def advantage(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    return skyrl.advantage(function, case, section(keys))


def loss(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    return skyrl.loss(function, case, section(keys))


def value_loss(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    return skyrl.value_loss(function, case, section(keys))


CRITIC: Mapping[str, Json] = {
    f"{A}advantage_estimator": "gae",
    "trainer.critic.model.path": "MODEL",
    "trainer.critic_mini_batch_size": 4,
    "trainer.placement.critic_num_gpus_per_node": 2,
}
"""What a file with a critic says beside the estimator."""


def estimator(
    name: str,
    function: str,
    covers: str,
    keys: Mapping[str, Json] | None = None,
    beside: Mapping[str, Json] | None = None,
    **rest: Any,
) -> Row:
    """beside: keys that are not of the algorithm's section."""
    return Row(
        peer="skyrl",
        what=f"advantage_estimator={name}"
        + "".join(
            f", {key.rpartition('.')[2]}={value}" for key, value in {**(keys or {}), **(beside or {})}.items()
        ),
        theirs=f"{PPO}:{function}",
        call=advantage,
        ours=ours.advantage,
        keys={
            **(CRITIC if name == "gae" else {f"{A}advantage_estimator": name}),
            **{A + key: value for key, value in (keys or {}).items()},
            **(beside or {}),
        },
        covers=(f"advantage {covers}",),
        **rest,
    )


ADVANTAGES = (
    estimator("grpo", "compute_grpo_outcome_advantage", "grpo", tolerance=FLOAT32),
    estimator(
        "grpo", "compute_grpo_outcome_advantage", "grpo", {"grpo_norm_by_std": False}, tolerance=FLOAT32
    ),
    estimator("rloo", "compute_rloo_outcome_advantage", "rloo"),
    estimator("maxrl", "compute_maxrl_advantage", "maxrl", tolerance=FLOAT32),
    estimator(
        "reinforce++",
        "compute_reinforce_plus_plus_outcome_advantage",
        "reinforce_plus_plus",
        {"gamma": 0.9},
        kinds=("one turn", "a group of one", "far apart"),
    ),
    estimator(
        "reinforce++",
        "compute_reinforce_plus_plus_outcome_advantage",
        "reinforce_plus_plus",
        {"gamma": 0.9},
        {"generator.max_turns": 4},
        kinds=("several turns",),
    ),
    estimator(
        "gae",
        "compute_gae_advantage_return",
        "gae",
        {"gamma": 0.97, "lambd": 0.9},
        kinds=("one turn", "a group of one", "far apart"),
    ),
    estimator(
        "gae",
        "compute_gae_advantage_return",
        "gae",
        {"gamma": 0.97, "lambd": 0.9},
        kinds=("several turns",),
        differs="SkyRL lets an environment's tokens discount and carry values (docs/algorithms.md, `gae`)",
    ),
)


def policy(
    kind: str, function: str, covers: tuple[str, ...], keys: Mapping[str, Json] | None = None, **rest: Any
) -> Row:
    shown = "".join(f", {key.rpartition('.')[2]}={value}" for key, value in (keys or {}).items())
    return Row(
        peer="skyrl",
        what=rest.pop("what", f"policy_loss_type={kind}{shown}"),
        theirs=f"{PPO}:{function}",
        call=loss,
        ours=ours.loss,
        keys={
            f"{A}policy_loss_type": kind,
            f"{A}loss_reduction": "token_mean",
            **{A + key: value for key, value in (keys or {}).items()},
        },
        covers=covers,
        **{"tolerance": FLOAT32, **rest},
    )


REGULAR = "ppo_policy_loss"

LOSSES = (
    policy("regular", REGULAR, ("loss ppo",), {"eps_clip_low": 0.2, "eps_clip_high": 0.28}),
    policy("dual_clip", REGULAR, ("loss ppo",), {"clip_ratio_c": 1.5}),
    policy(
        "gspo",
        "gspo_policy_loss",
        ("loss gspo",),
        {"eps_clip_low": 0.05, "eps_clip_high": 0.1, "loss_reduction": "sequence_mean"},
    ),
    policy("sapo", "sapo_policy_loss", ("loss sapo",), {"loss_reduction": "sequence_mean"}),
    policy(
        "cispo",
        "compute_policy_loss_cispo",
        ("loss cispo",),
        {"cispo.cispo_eps_clip_low": 0.3, "cispo.cispo_eps_clip_high": 0.5},
    ),
    policy(
        "rollout_is",
        "rollout_is_policy_loss",
        ("loss rollout_is",),
        {"eps_clip_low": 0.4, "eps_clip_high": 0.6},
    ),
    policy("dppo", "dppo_policy_loss", ("loss dppo",), {"dppo.dppo_type": "binary_tv"}),
    policy(
        "dppo",
        "dppo_policy_loss",
        ("loss dppo",),
        {"dppo.dppo_type": "binary_kl", "dppo.delta_low": 0.05, "dppo.delta_high": 0.05},
    ),
    policy(
        "clip_cov",
        "compute_policy_loss_clip_cov",
        ("loss clip_cov",),
        {"clip_cov.clip_ratio": 1.0, "clip_cov.clip_cov_lb": 50.0, "clip_cov.clip_cov_ub": 60.0},
        what="policy_loss_type=clip_cov where no token is in range",
        kinds=WITHOUT_FAR,
    ),
    policy(
        "kl_cov",
        "compute_policy_loss_kl_cov",
        ("loss kl_cov",),
        {"kl_cov.kl_cov_frac": 0.2, "kl_cov.ppo_kl_coef": 1.0},
        kinds=WITHOUT_FAR,
        differs="SkyRL's penalty is a sum over the chosen tokens; here the aggregation weighs it "
        "(docs/algorithms.md, `kl_cov`)",
    ),
    Row(
        peer="skyrl",
        what="cross_entropy, whose loss is a sum",
        theirs=f"{PPO}:cross_entropy_loss",
        call=loss,
        ours=ours.loss,
        keys={},
        native={"name": "grpo", "loss": "cross_entropy", "loss_agg_mode": "token-sum"},
        covers=("loss cross_entropy",),
    ),
    Row(
        peer="skyrl",
        what="importance_sampling, whose loss is a sum",
        theirs=f"{PPO}:importance_sampling_loss",
        call=loss,
        ours=ours.loss,
        keys={f"{A}loss_reduction": "token_mean"},
        native={"name": "importance_sampling", "loss_agg_mode": "token-mean"},
        covers=("loss importance_sampling",),
        kinds=WITHOUT_FAR,
    ),
)

REDUCTIONS = tuple(
    policy(
        "regular",
        REGULAR,
        (f"aggregation {native}",),
        {"loss_reduction": name, **more},
        what=f"loss_reduction={name}",
        kinds=("one turn", "several turns", "a group of one", "far apart"),
    )
    for name, native, more in (
        ("token_mean", "token-mean", {}),
        ("sequence_mean", "seq-mean-token-mean", {}),
        ("seq_mean_token_sum_norm", "seq-mean-token-sum-norm", {"max_seq_len": 24}),
        ("prompt_mean", "prompt-mean", {}),
    )
)

CORRECTIONS = tuple(
    policy(
        "regular",
        REGULAR,
        (covers,),
        {f"off_policy_correction.{key}": value for key, value in keys.items()},
        what=", ".join(f"{key}={value}" for key, value in keys.items()),
    )
    for covers, keys in (
        ("correction weight: token", {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2}),
        ("correction weight: sequence", {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.5}),
        (
            "correction reject",
            {"sequence_mask_metric": "geometric", "geo_mask_low": 0.93, "geo_mask_high": 1.06},
        ),
        (
            "correction reject",
            {"sequence_mask_metric": "product", "product_mask_low": 0.5, "product_mask_high": 2.0},
        ),
        (
            "correction reject",
            {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 1.6},
        ),
        ("correction reject", {"token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.4}),
    )
)

KL = (
    *(
        policy(
            "regular",
            REGULAR,
            (f"kl {name}",),
            {
                "use_kl_loss": True,
                "kl_loss_coef": 0.3,
                "kl_estimator_type": name,
                "loss_reduction": "sequence_mean",
            },
            what=f"kl_estimator_type={name}",
        )
        for name in ("k1", "k2", "abs", "k3")
    ),
    policy(
        "regular",
        REGULAR,
        ("kl k2",),
        {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_estimator_type": "k2"},
        what="kl_estimator_type=k2, loss_reduction=token_mean",
        differs="the KL is weighed as the loss here, SkyRL takes its mean over sequences with every loss_reduction "
        "(docs/algorithms.md, Aggregation)",
    ),
)


OTHERS = (
    Row(
        peer="skyrl",
        what="critic, value_clip=0.3",
        theirs=f"{PPO}:ppo_critic_loss",
        call=value_loss,
        ours=ours.value_loss,
        keys={**CRITIC, f"{A}value_clip": 0.3},
        covers=("critic",),
    ),
)

ROWS = (*ADVANTAGES, *LOSSES, *REDUCTIONS, *CORRECTIONS, *KL, *OTHERS)
