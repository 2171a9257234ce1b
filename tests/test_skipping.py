"""Which rollouts have no part in a gradient: each loss's declaration is what its numbers say, and what is skipped is
counted as if it were there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import logp_now, make_batch, pair_batch, ragged
from test_losses import with_adv
from test_losses_oracle import CASES
from whet.algos.aggregate import AGGREGATIONS, weights
from whet.algos.losses import LOSSES
from whet.algos.recipes import Algorithm, build
from whet.algos.skipping import shares, skip, skipping, without_effect
from whet.batch import Batch, LossFn, Outputs, among_skipped, computed, select
from whet.config import schema
from whet.config.functions import ADVANTAGES
from whet.config.functions import LOSSES as ROWS
from whet.config.recipes import resolve
from whet.types import ConfigError

GIVEN: list[tuple[str, dict[str, Any]]] = [
    ("gkd", ROWS["gkd"].settings().model_dump()),
    ("sft", {}),
    ("sft_is", {}),
    ("sft_phi", {"phi_cutoff": 0.9}),
    ("dpo", {"beta": 0.1, "label_smoothing": 0.0}),
    ("online_dpo", {"beta": 0.1, "label_smoothing": 0.0}),
    ("simpo", {"beta": 2.0, "target_margin": 0.5}),
    ("cpo", {"beta": 0.1, "label_smoothing": 0.0, "nll_weight": 1.0}),
    ("orpo", {"odds_weight": 0.5}),
    ("kto", {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}),
    ("clip_cov", {"clip_low": 0.2, "clip_high": 0.2, "clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0}),
    ("kl_cov", {"kl_cov_ratio": 0.3, "ppo_kl_coef": 1.0}),
    ("m2po", {"m2_threshold": 0.02}),
]  # fmt: skip
ALL = [(name, keys) for name, keys, _ in CASES] + GIVEN


def gradient(loss: LossFn, batch: Batch, logp: Tensor, at: Tensor | None = None) -> Tensor:
    """[N] gradient of sum(loss * weight) by all log-probs; `batch` has those `at` some places of them."""
    mine = logp if at is None else logp[at]
    total = (loss(batch, Outputs(logp_N=mine, entropy_N=mine.exp())).loss_N * batch.weight_N).sum()
    return torch.autograd.grad(total, logp)[0] if total.requires_grad else torch.zeros_like(logp)


def out_of_it(loss: LossFn, batch: Batch, logp: Tensor, without_R: Tensor) -> bool:
    """Whether those rollouts have a gradient of exactly 0, and the others' is the same without them."""
    whole = gradient(loss, batch, logp)
    gone_N = without_R[batch.rollout_N]
    at = torch.nonzero(~gone_N).flatten()
    if bool((whole[gone_N] != 0).any()):
        return False
    left = gradient(loss, select(batch, torch.nonzero(~without_R).flatten()), logp, at)
    return bool(torch.allclose(left, whole, rtol=1e-12, atol=1e-15))


def found(name: str, keys: dict[str, Any], seed: int) -> str:
    """What the loss's numbers say that it skips."""

    def loss(batch: Batch, out: Outputs) -> Any:
        return LOSSES[name](batch, out, **keys)

    batch = pair_batch(4, seed=seed) if ROWS[name].pairs else ragged(seed, groups=5)
    batch = with_adv(batch, seed=seed)
    batch = replace(batch, kl_zero_R=torch.full_like(batch.reward_R, 0.1))
    mode = "pair-mean" if ROWS[name].pairs else "token-mean"
    whole_N, logp = weights(batch, mode, norm_tokens=8), logp_now(batch, seed=seed, scale=0.5)
    without_R = torch.arange(batch.rollouts) % 3 == 1
    gone_N = without_R[batch.rollout_N]
    weightless = replace(batch, weight_N=torch.where(gone_N, 0.0, whole_N))
    if ROWS[name].pairs:
        weightless = replace(batch, weight_N=whole_N)
        without_R = batch.sum_R(whole_N) == 0
    if not out_of_it(loss, weightless, logp, without_R):
        return "nothing"
    flat = replace(batch, weight_N=whole_N, adv_N=torch.where(gone_N, 0.0, batch.adv_N))  # type: ignore[arg-type]
    return "no advantage" if out_of_it(loss, flat, logp, without_R) else "no weight"


@pytest.mark.parametrize(("name", "keys"), ALL, ids=lambda x: x if isinstance(x, str) else "")
def test_a_loss_skips_what_it_declares_and_nothing_else(name: str, keys: dict[str, Any]) -> None:
    row, ranks = ROWS[name], ("nothing", "no weight", "no advantage")
    wanted = row.skips if all(keys[key] == value for key, value in row.skips_if.items()) else "no weight"
    least = min((found(name, keys, seed) for seed in range(4)), key=ranks.index)
    assert least == wanted


def test_every_loss_of_the_table_is_asked() -> None:
    assert {name for name, _ in ALL} == LOSSES.keys() == ROWS.keys()


# ---------------------------------------------------------------- what a stage may skip


@pytest.mark.parametrize(
    ("algorithm", "skips", "before", "why"),
    [
        ({"name": "grpo"}, "no advantage", True, ""),
        ({"name": "dapo"}, "no advantage", True, ""),
        ({"name": "grpo", "whiten": True}, "no advantage", True, ""),
        ({"name": "mix"}, "no advantage", True, ""),
        ({"name": "grpo", "kl": {"coef": 0.1}}, "no weight", True, "algorithm.kl.coef is on"),
        ({"name": "grpo", "entropy_coef": 0.1}, "no weight", True, "algorithm.entropy_coef is on"),
        (
            {"name": "grpo", "entropy_control": {"target": 0.5}},
            "no weight",
            True,
            "algorithm.entropy_control is on",
        ),
        ({"name": "grpo", "positive_nll_coef": 0.1}, "no weight", True, "algorithm.positive_nll_coef is on"),
        ({"name": "grpo", "loss": "cross_entropy"}, "no weight", True, "cross_entropy trains on them"),
        (
            {"name": "rec", "loss": {"rec_regularizer": "k2", "rec_regularizer_coef": 0.1}},
            "no weight",
            True,
            "algorithm.loss.rec_regularizer is on",
        ),
        ({"name": "clip_cov"}, "no weight", True, "clip_cov trains on them, or compares others with them"),
        ({"name": "kl_cov"}, "no weight", True, "kl_cov trains on them, or compares others with them"),
        ({"name": "grpo", "loss": "mine:loss"}, "nothing", False, "mine:loss may read it"),
        ({"name": "grpo", "advantage": "mine:adv"}, "no advantage", False, "mine:adv reads them, or may"),
        ({"name": "ppo"}, "no advantage", False, "the advantage gae reads them"),
        ({"name": "optimal_token_baseline"}, "no advantage", False, "optimal_token_baseline reads them"),
        ({"name": "distill"}, "no advantage", False, "the advantage distill reads them"),
        (
            {"name": "grpo", "reward_kl": {"coef": 0.1}},
            "no advantage",
            False,
            "algorithm.reward_kl subtracts",
        ),
        (
            {"name": "grpo", "correction": {"weight": {"name": "token", "high": 2.0}}},
            "no advantage",
            False,
            "algorithm.correction compares them",
        ),
        ({"name": "sft"}, "nothing", False, ""),
        ({"name": "dpo"}, "nothing", False, ""),
        ({"name": "kto"}, "nothing", False, ""),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_what_reads_a_rollout_is_named(algorithm: dict[str, Any], skips: str, before: bool, why: str) -> None:
    said = skipping(resolve(schema.AlgorithmConfig.model_validate(algorithm)), schema.TrainConfig())
    assert (said.skips, said.before_models) == (skips, before)
    assert why in said.why
    assert bool(said.why) == bool(why)


def test_the_key_and_the_router_turn_it_off() -> None:
    grpo = resolve(schema.AlgorithmConfig(name="grpo"))
    assert skipping(grpo, schema.TrainConfig(skip_zero_weight=False)).skips == "nothing"
    router = skipping(grpo, schema.TrainConfig(router_aux_loss_coef=0.1))
    assert router.skips == "nothing"
    assert "train.router_aux_loss_coef" in router.why


# ---------------------------------------------------------------- the same gradient

FROM_REWARDS = [
    name
    for name, row in ADVANTAGES.items()
    if not row.needs & {"critic", "collision", "old", "reference"} and row.judged
]
UNIFORM = make_batch(
    [["pppaaa", "pppaoaa", "pppa"], ["paa", "paaaa"], ["ppa", "ppaa", "ppaaaa"], ["pa", "paa"]],
    [0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.5, 0.0],
)


def made(loss: str, advantage: str, aggregation: str) -> Algorithm | None:
    given = {"name": "gdpo", "parts": ["r"]} if advantage == "gdpo" else advantage
    keys = {"name": "grpo", "loss": loss, "advantage": given, "loss_agg_mode": aggregation}
    try:
        return build(schema.AlgorithmConfig.model_validate(keys), critic=schema.CriticConfig(), max_tokens=8)
    except ConfigError:
        return None


@pytest.mark.parametrize("loss", [name for name, row in ROWS.items() if row.skips == "no advantage"])
def test_the_gradient_is_that_of_all_rollouts(loss: str) -> None:
    """With each advantage that reads rewards alone, over uniform groups and others; old log-probs of what is left."""
    logp, skipped = logp_now(UNIFORM, scale=0.3), set()
    for number, advantage in enumerate(FROM_REWARDS):
        aggregation = [a for a in AGGREGATIONS if a != "pair-mean"][number % (len(AGGREGATIONS) - 1)]
        algorithm = made(loss, advantage, aggregation)
        assert algorithm is not None
        given = replace(
            UNIFORM, baseline_R=UNIFORM.reward_R.clamp(min=0.5), part_RC=UNIFORM.reward_R[:, None]
        )
        batch = algorithm.advantage(given, 0.0)
        batch = replace(batch, weight_N=algorithm.weights(batch, 1))
        without_R = without_effect(batch, batch.weight_N, skips="no advantage")  # type: ignore[arg-type]
        marked = skip(batch, without_R, [torch.arange(batch.rollouts)])
        assert marked.skipped_R is not None
        at = torch.nonzero(~marked.skipped_R[batch.rollout_N]).flatten()
        assert batch.logp_old_N is not None
        old_N = among_skipped(marked, batch.logp_old_N[at])
        assert bool(old_N.isnan().any()) == bool(without_R.any())
        left = gradient(algorithm.loss, computed(replace(marked, logp_old_N=old_N)), logp, at)
        torch.testing.assert_close(left, gradient(algorithm.loss, batch, logp), rtol=1e-12, atol=1e-15)
        if without_R.any():
            skipped.add(advantage)
    assert {"grpo", "rloo", "opo", "gpg", "opmd", "maxrl", "grpo_passk", "remax"} <= skipped
    assert "asymre" not in skipped, "its baseline is shifted"


@pytest.mark.parametrize("seed", range(4))
def test_what_counts_no_time_is_skipped_also_with_a_kl(seed: int) -> None:
    """A masked rollout weighs 0: with KL and entropy, too, the gradient is the same without it."""
    algorithm = build(
        schema.AlgorithmConfig.model_validate({"name": "grpo", "kl": {"coef": 0.1}, "entropy_coef": 0.01}),
        critic=schema.CriticConfig(),
        max_tokens=8,
    )
    batch = ragged(seed, groups=5)
    counts_R = (torch.arange(batch.rollouts) % 3 > 0).to(batch.reward_R)
    batch = algorithm.advantage(replace(batch, count_R=counts_R), 0.0)
    batch = replace(batch, weight_N=algorithm.weights(batch, 1))
    without_R = without_effect(batch, batch.weight_N, skips="no weight")  # type: ignore[arg-type]
    assert torch.equal(without_R, (counts_R == 0) | (batch.sum_R(batch.mask_N.long()) == 0))
    assert out_of_it(algorithm.loss, batch, logp_now(batch), without_R)


def test_demonstrations_of_a_mix_are_never_without_advantage() -> None:
    batch = make_batch([["paa", "pa"], ["paa"], ["pa", "paa"]], [1, 1, 0, 0, 1])
    expert_R = torch.tensor([False, False, True, False, False])
    batch = replace(batch, expert_R=expert_R, adv_N=torch.zeros(batch.tokens).double())
    without_R = without_effect(batch, weights(batch, "token-mean", norm_tokens=8), skips="no advantage")
    assert without_R.tolist() == [True, True, False, True, True]


def test_rejected_rollouts_are_skipped() -> None:
    batch = with_adv(make_batch([["paa", "pa"]]))
    batch = replace(batch, correction_N=torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5]))
    without_R = without_effect(batch, batch.mask_N.double(), skips="no advantage")
    assert without_R.tolist() == [True, False]


@pytest.mark.parametrize("loss", [name for name, row in ROWS.items() if row.skips == "no advantage"])
def test_a_rejected_token_may_push_the_others_of_its_rollout(loss: str) -> None:
    """The only advantage of the first rollout stands at a token that is rejected, and still counts in denominators."""
    algorithm = made(loss, "grpo", "token-mean")
    assert algorithm is not None
    batch = make_batch([["paaa", "paa", "paa"]])
    first_N = torch.arange(batch.tokens) == 1
    adv_N = torch.where(batch.rollout_N == 0, 0.0, 1.0).double() + first_N
    batch = replace(batch, adv_N=adv_N * batch.mask_N, correction_N=torch.where(first_N, 0.0, 1.0).double())
    batch = replace(batch, weight_N=weights(batch, "token-mean", norm_tokens=8))
    without_R = without_effect(batch, batch.weight_N, skips="no advantage")  # type: ignore[arg-type]
    assert out_of_it(algorithm.loss, batch, logp_now(batch, scale=0.1), without_R)


# ---------------------------------------------------------------- marks


def test_each_minibatch_keeps_one_rollout_of_the_policys_own() -> None:
    batch = make_batch([["p", "paa", "pa"], ["paa"], ["pa"]])
    batch = replace(
        batch, version_N=torch.where(batch.rollout_N == 3, -1, batch.version_N)
    )  # a demonstration
    parts = [torch.tensor([0, 1, 2]), torch.tensor([3, 4])]
    everything = torch.ones(5, dtype=torch.bool)
    marked = skip(batch, everything, parts)
    assert marked.skipped_R.tolist() == [True, False, True, True, False], "the first that sampled something"  # type: ignore[union-attr]
    others = skip(batch, torch.tensor([True, True, False, False, True]), parts)
    assert others.skipped_R.tolist() == [True, True, False, False, False]  # type: ignore[union-attr]
    assert everything.all(), "what was given stays"


def test_shares_by_hand() -> None:
    batch = make_batch([["paa", "pa"], ["paaa"]])
    assert shares(batch) == {}
    said = shares(replace(batch, skipped_R=torch.tensor([True, False, False])))
    assert said == {"train/skipped_rollouts_frac": 1 / 3, "train/skipped_tokens_frac": 2 / 6}


def test_what_was_not_said_is_no_number() -> None:
    batch = replace(make_batch([["paa", "pa"], ["paa"]]), skipped_R=torch.tensor([True, False, True]))
    said = among_skipped(batch, torch.tensor([0.0, -1.0]))
    nan = float("nan")
    assert str(said.tolist()) == str([0.0, nan, nan, 0.0, -1.0, 0.0, nan, nan])
