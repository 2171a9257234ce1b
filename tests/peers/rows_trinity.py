"""Trinity-RFT: its advantages, policy losses with their aggregation, KL and losses on demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from peers import ours
from peers.table import Row
from peers.vocabulary import discriminant, logits, tokens
from whet.prove.cases import Case
from whet.prove.numbers import Numbers
from whet.prove.trinity import EPS, FLOAT32, arguments, by_group, in_trainer, loss, pair_loss
from whet.types import Json

LOSS = "trinity.algorithm.policy_loss_fn"
ADV = "trinity.algorithm.advantage_fn"
NEAR = ("one turn", "several turns", "a group of one")

# ---------------------------------------------------------------- advantages


def estimator(
    name: str,
    path: str,
    covers: str,
    *,
    kind: str,
    call: Any = by_group,
    args: Mapping[str, Json] | None = None,
    keys: Mapping[str, Json] | None = None,
    **rest: Any,
) -> Row:
    given = {"algorithm.advantage_fn_args": dict(args)} if args else {}
    shown = "".join(f", {key}={value}" for key, value in (args or {}).items())
    return Row(
        peer="trinity",
        what=f"advantage_fn={name}{shown}",
        theirs=f"{ADV}.{path}",
        call=call,
        ours=ours.advantage,
        keys={"algorithm.algorithm_type": kind, "algorithm.advantage_fn": name, **given, **(keys or {})},
        covers=(f"advantage {covers}",),
        **rest,
    )


def entropy_clipped(made: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """Of an advantage that takes tokens off the response mask, whose advantage counts as 0 then. The policy's
    distribution at each token is that of `vocabulary.logits`."""
    logp_NV = logits(case)[0].double().log_softmax(-1)
    p_NV = logp_NV.exp()
    entropy_N = -(p_NV * logp_NV).sum(-1)
    logp = case.padded(logp_NV.gather(1, tokens(case)[:, None])[:, 0])
    batch = {
        "token_level_rewards": case.reward,
        "response_mask": case.mask,
        "rollout_log_probs": logp,
        "old_log_probs": logp,
        "entropys": case.padded(entropy_N),
        "necs": case.padded((p_NV.square() * (entropy_N[:, None] + logp_NV)).sum(-1)),
    }
    exps = SimpleNamespace(batch=batch, non_tensor_batch={"uid": case.index})
    made(**arguments(made, keys, "advantage_fn"))(exps)
    return {"advantage": exps.batch["advantages"] * exps.batch["response_mask"]}


def our_entropy_clip(row: Row, case: Case) -> Numbers:
    """The same of whet, which has the same distributions."""
    centred = row.keys["algorithm.advantage_fn"] == "clipv"
    batch = replace(case.batch, discriminant_N=discriminant(case, centred=centred))
    return ours.advantage(row, replace(case, batch=batch))


ADVANTAGES = (
    estimator("grpo", "grpo_advantage:GRPOGroupedAdvantage", "grpo", kind="grpo", tolerance=FLOAT32),
    estimator(
        "grpo",
        "grpo_advantage:GRPOGroupedAdvantage",
        "grpo",
        kind="grpo",
        args={"std_cal_level": "batch"},
        tolerance=FLOAT32,
    ),
    estimator(
        "grpo",
        "grpo_advantage:GRPOGroupedAdvantage",
        "grpo",
        kind="grpo",
        args={"rank_penalty": 0.25},
        tolerance=FLOAT32,
        kinds=("one turn",),
        differs="Trinity takes mean and std of the penalised rewards but the unpenalised reward "
        "(docs/algorithms.md, `grpo`)",
    ),
    estimator(
        "rec",
        "rec_advantage:RECGroupedAdvantage",
        "rec",
        kind="rec",
        args={"std_normalize": True},
        tolerance=FLOAT32,
        kinds=("one turn", "several turns"),
    ),
    estimator(
        "rec",
        "rec_advantage:RECGroupedAdvantage",
        "rec",
        kind="rec",
        tolerance=FLOAT32,
        kinds=("one turn", "several turns"),
    ),
    estimator("opmd", "opmd_advantage:OPMDGroupAdvantage", "opmd", kind="opmd", tolerance=FLOAT32),
    estimator(
        "opmd",
        "opmd_advantage:OPMDGroupAdvantage",
        "opmd",
        kind="opmd",
        args={"opmd_baseline": "logavgexp", "tau": 0.5},
        keys={"algorithm.policy_loss_fn_args": {"tau": 0.5}},
        tolerance=FLOAT32,
    ),
    estimator(
        "asymre",
        "asymre_advantage:ASYMREGroupAdvantage",
        "asymre",
        kind="asymre",
        tolerance=FLOAT32,
        kinds=("one turn", "several turns"),
    ),
    estimator(
        "asymre",
        "asymre_advantage:ASYMREGroupAdvantage",
        "asymre",
        kind="asymre",
        tolerance=FLOAT32,
        kinds=("a group of one",),
        differs="the shift also applies in a group of one here (docs/algorithms.md, `asymre`)",
    ),
    estimator(
        "step_wise_grpo",
        "multi_step_grpo_advantage:StepWiseGRPOAdvantageFn",
        "step_wise_grpo",
        kind="multi_step_grpo",
        tolerance=FLOAT32,
    ),
    estimator(
        "reinforce",
        "reinforce_advantage:REINFORCEGroupAdvantage",
        "reinforce",
        kind="topr",
        kinds=("one turn", "several turns", "a group of one"),
        tolerance=FLOAT32,
    ),
    estimator(
        "rloo",
        "rloo_advantage:RLOOAdvantageFn",
        "rloo",
        kind="rloo",
        call=in_trainer,
        kinds=("one turn", "several turns", "a group of one"),
        tolerance=FLOAT32,
    ),
    estimator(
        "reinforceplusplus",
        "reinforce_plus_plus_advantage:REINFORCEPLUSPLUSAdvantageFn",
        "reinforce_plus_plus",
        kind="reinforceplusplus",
        call=in_trainer,
        args={"gamma": 0.9},
        kinds=("one turn", "a group of one"),
    ),
    estimator(
        "reinforceplusplus",
        "reinforce_plus_plus_advantage:REINFORCEPLUSPLUSAdvantageFn",
        "reinforce_plus_plus",
        kind="reinforceplusplus",
        call=in_trainer,
        args={"gamma": 0.9},
        kinds=("several turns",),
        differs="Trinity lets an environment's tokens discount the return (docs/algorithms.md, `reinforce_plus_plus`)",
    ),
    estimator(
        "ppo",
        "ppo_advantage:PPOAdvantageFn",
        "gae",
        kind="ppo",
        call=in_trainer,
        args={"gamma": 0.97, "lam": 0.9},
        kinds=("one turn", "a group of one", "far apart"),
    ),
    estimator(
        "ppo",
        "ppo_advantage:PPOAdvantageFn",
        "gae",
        kind="ppo",
        call=in_trainer,
        args={"gamma": 0.97, "lam": 0.9},
        kinds=("several turns",),
        differs="Trinity lets an environment's tokens discount and carry values, as older verl "
        "(docs/algorithms.md, `gae`)",
    ),
    *(
        Row(
            peer="trinity",
            what=f"advantage_fn={name}" + "".join(f", {key}={value}" for key, value in args.items()),
            theirs=f"{ADV}.{path}",
            call=entropy_clipped,
            ours=our_entropy_clip,
            keys={
                "algorithm.algorithm_type": "grpo",
                "algorithm.advantage_fn": name,
                "algorithm.advantage_fn_args": args,
            },
            covers=("advantage grpo",),
            tolerance=FLOAT32,
        )
        for name, path, args in (
            ("clipb", "clipb_advantage:ClipBAdvantageFn", {"mu": 0.5}),
            ("clipv", "clipv_advantage:ClipVAdvantageFn", {"mu": 0.5, "max_frac": 1.0}),
            ("clipv", "clipv_advantage:ClipVAdvantageFn", {"mu": 0.5, "max_frac": 0.05}),
        )
    ),
    Row(
        peer="trinity",
        what="advantage_fn=remax",
        theirs=f"{ADV}.remax_advantage:REMAXAdvantageFn",
        call=in_trainer,
        ours=ours.advantage,
        native={"name": "remax"},
        covers=("advantage remax",),
    ),
    Row(
        peer="trinity",
        what="advantage_fn=on_policy_distill, kl_coef=0.5",
        theirs=f"{ADV}.on_policy_distill_advantage:OnPolicyDistillAdvantage",
        call=in_trainer,
        ours=ours.advantage,
        keys={"algorithm.advantage_fn_args": {"kl_coef": 0.5}},
        native={"name": "distill", "distill_coef": 0.5},
        covers=("advantage distill",),
    ),
    Row(
        peer="trinity",
        what="advantage_fn=jsd, kl_coef=0.5, lambda_coef=0.3",
        theirs=f"{ADV}.jsd_advantage:JSDAdvantage",
        call=in_trainer,
        ours=ours.advantage,
        keys={"algorithm.advantage_fn_args": {"kl_coef": 0.5, "lambda_coef": 0.3}},
        native={"name": "distill", "distill_coef": 0.5, "distill_estimator": "jsd", "distill_mixture": 0.3},
        covers=("advantage distill",),
    ),
)

# ---------------------------------------------------------------- losses


def policy(
    name: str,
    path: str,
    covers: tuple[str, ...],
    args: Mapping[str, Json] | None = None,
    keys: Mapping[str, Json] | None = None,
    **rest: Any,
) -> Row:
    shown = "".join(f", {key}={value}" for key, value in (args or {}).items())
    return Row(
        peer="trinity",
        what=rest.pop("what", f"policy_loss_fn={name}{shown}"),
        theirs=f"{LOSS}.{path}",
        call=loss,
        ours=ours.loss,
        keys={
            "algorithm.policy_loss_fn": name,
            **({"algorithm.policy_loss_fn_args": dict(args)} if args else {}),
            **(keys or {}),
        },
        covers=covers,
        **{"tolerance": EPS, **rest},
    )


PPO = "ppo_policy_loss:PPOPolicyLossFn"
REC = "rec_policy_loss:RECPolicyLossFn"

LOSSES = (
    policy("ppo", PPO, ("loss ppo",), {"clip_range_low": 0.2, "clip_range_high": 0.28}),
    policy("ppo", PPO, ("loss ppo",), {"enable_sequence_masking": True, "delta_sequence_masking": 0.02}),
    policy("ppo", PPO, ("loss ppo",), {"fallback_to_policy_gradient": True}),
    policy(
        "gspo",
        "gspo_policy_loss:GSPOLossFn",
        ("loss gspo",),
        {"clip_range_low": 0.05, "clip_range_high": 0.1},
    ),
    policy(
        "cispo",
        "cispo_policy_loss:CISPOPolicyLossFn",
        ("loss cispo",),
        {"clip_range_low": 0.4, "clip_range_high": 0.28},
        kinds=NEAR,
    ),
    policy(
        "cispo",
        "cispo_policy_loss:CISPOPolicyLossFn",
        ("loss cispo",),
        {
            "clip_range_low": 0.4,
            "clip_range_high": 0.28,
            "enable_mask_clip": True,
            "mask_clip_range_low": 0.4,
            "mask_clip_range_high": 0.28,
        },
        kinds=NEAR,
    ),
    policy(
        "sapo",
        "sapo_policy_loss:SAPOPolicyLossFn",
        ("loss sapo",),
        kinds=NEAR,
    ),
    policy("sppo", "sppo_loss_fn:sPPOPolicyLossFn", ("loss softmax_ppo",), {"epsilon": 0.3}, kinds=NEAR),
    policy("topr", "topr_policy_loss:TOPRPolicyLossFn", ("loss topr",), kinds=NEAR),
    policy("opmd", "opmd_policy_loss:OPMDPolicyLossFn", ("loss opmd",), {"tau": 0.5}),
    policy(
        "importance_sampling",
        "importance_sampling_policy_loss:ImportanceSamplingLossFn",
        ("loss importance_sampling",),
    ),
    *(
        policy("rec", REC, ("loss rec",), args, kinds=NEAR)
        for args in (
            {"clip_mode": "none", "weight": "importance_sampling"},
            {"clip_mode": "one-side"},
            {"clip_mode": "two-side", "weight": "advantage", "temp": 0.7},
            {"clip_mode": "ring", "epsilon_low_prime": 0.4, "epsilon_high_prime": 0.5},
            {"clip_mode": "one-side", "regularizer": "k2", "regularizer_coef": 0.1},
            {"clip_mode": "one-side", "regularizer": "forward-kl", "regularizer_coef": 0.1},
            {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"},
        )
    ),
)

AGGREGATIONS = tuple(
    policy(
        "ppo",
        PPO,
        (f"aggregation {native}",),
        {"loss_agg_mode": name},
        what=f"loss_agg_mode={name}",
    )
    for name, native in (
        ("token-mean", "token-mean"),
        ("seq-mean-token-sum", "seq-mean-token-sum"),
        ("seq-mean-token-mean", "seq-mean-token-mean"),
    )
)

KL = tuple(
    policy(
        "ppo",
        PPO,
        (f"kl {name}",),
        keys={"algorithm.kl_loss_fn": name, "algorithm.kl_loss_fn_args": {"kl_coef": 0.3}},
        what=f"kl_loss_fn={name}",
        kinds=NEAR if name in ("k3", "corrected_k3") else (*NEAR, "far apart"),
    )
    for name in ("k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3")
)


def demonstration(
    name: str, path: str, native: Mapping[str, Json], args: Mapping[str, Json] | None = None
) -> Row:
    return Row(
        peer="trinity",
        what=f"policy_loss_fn={name}" + "".join(f", {key}={value}" for key, value in (args or {}).items()),
        theirs=f"{LOSS}.{path}",
        call=loss,
        ours=ours.loss,
        keys={"algorithm.policy_loss_fn_args": dict(args)} if args else {},
        native={"name": name, **native},
        covers=(f"loss {name}",),
        kinds=("one turn", "several turns"),
        tolerance=EPS,
    )


def pairs(kind: str, **rest: Any) -> Row:
    return Row(
        peer="trinity",
        what=f"policy_loss_fn=dpo, beta=0.3, label_smoothing=0.1, {kind}",
        theirs=f"{LOSS}.dpo_loss:DPOLossFn",
        call=pair_loss,
        ours=ours.loss,
        keys={"algorithm.policy_loss_fn_args": {"beta": 0.3, "label_smoothing": 0.1}},
        native={"name": "dpo", "beta": 0.3, "label_smoothing": 0.1},
        covers=("loss dpo",),
        kinds=(kind,),
        **rest,
    )


GIVEN = (
    demonstration("sft", "sft_loss:SFTLossFn", {}),
    demonstration("sft_is", "chord_policy_loss:SFTISLossFn", {}),
    demonstration("sft_phi", "chord_policy_loss:SFTPhiLossFn", {}),
    demonstration("sft_phi", "chord_policy_loss:SFTPhiLossFn", {"phi_cutoff": 0.5}, {"cutoff_prob": 0.5}),
    pairs("one pair"),
    pairs(
        "pairs",
        differs="Trinity sums the log-ratios over a micro-batch instead of over each pair (docs/algorithms.md, `dpo`)",
    ),
)

ROWS = (*ADVANTAGES, *LOSSES, *AGGREGATIONS, *KL, *GIVEN)
