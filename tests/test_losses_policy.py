"""Policy losses: numbers worked by hand, what they pick, terms with a mean of their own, and the engine's cuts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import doubles, logp_now, make_batch, ragged, stat_by_rollouts
from sections import algorithm
from test_train_torch import random_groups
from tiny import tiny_model
from unread import check_algorithm
from whet.algos.aggregate import weights
from whet.algos.clipped import bernoulli_kl
from whet.algos.covariance import clip_cov_over, largest, luck_N
from whet.algos.losses import LOSSES, regularized
from whet.algos.recipes import Algorithm, build
from whet.algos.terms import Totals
from whet.batch import Batch, Loss, Outputs, pack, select
from whet.config import schema
from whet.config.recipes import resolve
from whet.models import kernels
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import ConfigError

LOW, HIGH = 0.2, 0.28
CLIP: dict[str, Any] = {"clip_low": LOW, "clip_high": HIGH}
PPO: dict[str, Any] = CLIP | {"dual_clip": None}


def tokens(adv: list[float], log_ratio: list[float], logp: float = -1.0) -> tuple[Batch, Tensor]:
    """One rollout with these advantages and log-ratios, every log-prob now `logp`; the prompt is one token."""
    n = len(adv)
    batch = make_batch([["p" + "a" * n]])
    now = doubles([0.0] + [logp] * n)
    old = now - doubles([0.0, *log_ratio])
    return replace(batch, adv_N=doubles([0.0, *adv]), logp_old_N=old), now.requires_grad_()


def run(
    name: str, batch: Batch, logp: Tensor, **keys: Any
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Loss and its gradient at the sampled tokens, and the stats."""
    loss = LOSSES[name](batch, Outputs(logp_N=logp), **keys)
    grad = torch.autograd.grad(loss.loss_N.sum(), logp)[0] if loss.loss_N.requires_grad else 0 * logp
    return loss.loss_N[batch.mask_N].tolist(), grad[batch.mask_N].tolist(), loss.stats


# ---------------------------------------------------------------- by hand


def test_ppo_masks_negative_tokens_of_rollouts_that_moved_far() -> None:
    # mean of log old/now = (0.3 + 0.1) / 2 = 0.2 nats a token.
    batch, logp = tokens([-1.0, 2.0], [-0.3, -0.1])
    r = [math.exp(-0.3), math.exp(-0.1)]
    near, _, stats = run("ppo", batch, logp, **PPO, sequence_mask_delta=0.21)
    assert near == pytest.approx([0.8, -2 * r[1]])  # r = 0.74 is clipped at 0.8
    assert stats["sequence_mask_frac"].tolist() == [0, 0, 0]
    far, grad, stats = run("ppo", batch, logp, **PPO, sequence_mask_delta=0.19)
    assert far == pytest.approx([0.0, -2 * r[1]])
    assert grad == pytest.approx([0.0, -2 * r[1]])
    assert stats["sequence_mask_frac"].tolist() == [0, 1, 0]


def test_ppo_falls_back_to_the_policy_gradient() -> None:
    batch, logp = tokens([-1.0, 2.0], [-3.0, 1.0])
    loss, grad, stats = run("ppo", batch, logp, **PPO, fallback_to_policy_gradient=True)
    assert loss == [1.0, -2.0]  # r = 1
    assert grad == [1.0, -2.0]  # that of -A log pi
    assert stats["clip_frac"].sum() == 0
    assert stats["ratio"][1:].tolist() == pytest.approx([math.exp(-3), math.e])  # what is measured stays


@pytest.mark.parametrize(("form", "share"), [("sequence", 0.5), ("token", 1.0)])
def test_gspo_by_hand(form: str, share: float) -> None:
    # Log-ratios 0.2 and 0.4: the rollout's ratio is e^0.3 = 1.35. A > 0: clipped at 1.28, no gradient. A < 0: free.
    batch, logp = tokens([1.0, 1.0], [0.2, 0.4])
    assert run("gspo", batch, logp, **CLIP, gspo_form=form)[:2] == ([-1.28] * 2, [0.0] * 2)
    batch, logp = tokens([-1.0, -3.0], [0.2, 0.4])
    s = math.exp(0.3)
    loss, grad, stats = run("gspo", batch, logp, **CLIP, gspo_form=form)
    assert loss == pytest.approx([s, 3 * s])
    # through the mean each token gets half of both losses' gradient; as tokens, each its own
    assert grad == pytest.approx([4 * s * share] * 2 if form == "sequence" else [s, 3 * s])
    assert stats["sequence_ratio"][1:].tolist() == pytest.approx([s, s])


def test_both_forms_of_gspo_agree_where_a_rollout_has_one_advantage() -> None:
    batch = ragged(3)
    batch = replace(batch, adv_N=batch.reward_R[batch.rollout_N] * batch.mask_N)
    weight = weights(batch, "seq-mean-token-mean", norm_tokens=8)
    logp = logp_now(batch, scale=0.3)

    def gradient(form: str) -> Tensor:
        loss = LOSSES["gspo"](batch, Outputs(logp_N=logp), clip_low=0.1, clip_high=0.1, gspo_form=form)
        return torch.autograd.grad((loss.loss_N * weight).sum(), logp)[0]

    assert gradient("token").abs().sum() > 0
    torch.testing.assert_close(gradient("token"), gradient("sequence"), rtol=1e-12, atol=1e-15)


def test_gspos_mean_log_ratio_is_bounded_from_above() -> None:
    batch, logp = tokens([-1.0, -1.0], [30.0, 10.0])
    loss, grad, _ = run("gspo", batch, logp, **CLIP, gspo_form="sequence")
    assert loss == pytest.approx([math.exp(10)] * 2)  # the mean is 20
    assert grad == [0.0, 0.0]


def test_geo_mean_by_hand() -> None:
    # A > 0: d = 0.1 and min(0.5, 0.2) = 0.2, so R = e^0.15. The other rollout, A < 0: max(-0.5, -0.2), R = e^-0.2.
    batch = make_batch([["paa", "pa"]])
    now = doubles([0, -1.0, -1.0, 0, -1.0]).requires_grad_()
    old = now.detach() - doubles([0, 0.1, 0.5, 0, -0.5])
    batch = replace(batch, adv_N=doubles([0, 2.0, 2.0, 0, -3.0]), logp_old_N=old)
    loss = LOSSES["geo_mean"](batch, Outputs(logp_N=now), clip_low=0.2, clip_high=0.2)
    first, second = -2 * math.exp(0.15), 3 * math.exp(-0.2)
    assert loss.loss_N.tolist() == pytest.approx([0, first, first, 0, second])
    weight = weights(batch, "seq-mean-token-mean", norm_tokens=8)
    total = (loss.loss_N * weight).sum()
    assert total.item() == pytest.approx((first + second) / 2)  # the mean over rollouts
    grad = torch.autograd.grad(total, now)[0]
    assert grad.tolist() == pytest.approx([0, first / 4, 0, 0, 0])  # d' of two tokens is at its bound
    assert loss.stats["clip_frac"].tolist() == [0, 0, 1, 0, 1]


def test_a_token_without_advantage_moves_no_geometric_mean() -> None:
    # A = 2 and 0: mean A = 1, and the second token's log-ratio of 0.4 does not count: R = e^(0.1 / 2).
    batch, logp = tokens([2.0, 0.0], [0.1, 0.4])
    loss, grad, _ = run("geo_mean", batch, logp, clip_low=0.5, clip_high=0.5)
    r = math.exp(0.05)
    assert (loss, grad) == (pytest.approx([-r, -r]), pytest.approx([-r, 0]))


def test_cispo_by_hand() -> None:
    # r = 2, 0.5, 1; with low 0.2 and high 0.28 the weights are 1.28, 0.8, 1. log pi = -1.
    for mask, weight in ((False, [1.28, 0.8, 1.0]), (True, [0.0, 0.8, 1.0])):
        batch, logp = tokens([2.0, 3.0, -1.0], [math.log(2), math.log(0.5), 0.0])
        loss, grad, stats = run("cispo", batch, logp, **CLIP, cispo_mask=mask)
        assert loss == pytest.approx([2 * weight[0], 3 * weight[1], -weight[2]])
        assert grad == pytest.approx([-2 * weight[0], -3 * weight[1], weight[2]])
        assert stats["clip_frac"].tolist() == [0, 1, 1, 0]
    assert stats["masked_frac"].tolist() == [0, 1, 0, 0]  # below the bound only A < 0 is masked
    batch, logp = tokens([-1.0], [math.log(0.5)])
    assert run("cispo", batch, logp, **CLIP, cispo_mask=True)[0] == [0.0]


def test_the_mask_of_cispo_may_have_bounds_of_its_own_by_hand() -> None:
    # r = 2, 1.1, 0.5: the weights are 1.28, 1.1, 0.8; the mask's bounds are 0.95 and 1.05.
    batch, logp = tokens([2.0, 3.0, -1.0], [math.log(2), math.log(1.1), math.log(0.5)])
    loss, _, stats = run("cispo", batch, logp, **CLIP, cispo_mask=True, mask_low=0.05, mask_high=0.05)
    assert loss == [0.0, 0.0, 0.0]
    assert stats["masked_frac"].tolist() == [0, 1, 1, 1]
    loss, _, stats = run("cispo", batch, logp, **CLIP, cispo_mask=True, mask_low=0.6, mask_high=0.5)
    assert loss == pytest.approx([0.0, 3.3, -0.8])


def test_a_sequence_mask_may_look_at_the_engine_by_hand() -> None:
    # mean of log old/now = 0.2; of log engine/now = (0.5 + 0.1) / 2 = 0.3 nats a token.
    batch, logp = tokens([-1.0, 2.0], [-0.3, -0.1])
    batch = replace(batch, logp_sample_N=logp.detach() + doubles([0, 0.5, 0.1]))
    for anchor, least in (("old", 0.2), ("sampled", 0.3)):
        for delta, masked in ((least - 0.01, True), (least + 0.01, False)):
            keys = {"sequence_mask_delta": delta, "sequence_mask_anchor": anchor}
            loss, _, _ = run("ppo", batch, logp, **PPO, **keys)
            assert (loss[0] == 0) == masked
            assert loss[1] == pytest.approx(-2 * math.exp(-0.1)), "the ratio is to the policy before the step"


def test_vespo_by_hand() -> None:
    # The product of the ratios is 2: phi = 2^2 e^(3 - 6) where A >= 0, 2^3 e^(2 - 4) where it is not. log pi = -1.
    batch, logp = tokens([1.0, -2.0], [math.log(4), -math.log(2)])
    keys = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    loss, grad, stats = run("vespo", batch, logp, **keys)
    up, down = 4 * math.exp(-3), 8 * math.exp(-2)
    assert loss == pytest.approx([up, -2 * down])
    assert grad == pytest.approx([-up, 2 * down])
    assert stats["sequence_ratio"].tolist()[1:] == pytest.approx([2, 2])
    batch, logp = tokens([1.0, -2.0], [0.0, 0.0])
    assert run("vespo", batch, logp, **keys)[1] == pytest.approx([-1.0, 2.0]), "REINFORCE at w = 1"
    huge = dict.fromkeys(keys, 1e300)
    assert run("vespo", batch, logp, **huge)[1] == pytest.approx([-1.0, 2.0]), "beyond float32"


def test_dro_by_hand() -> None:
    # -A log pi = 2 with log r = 0.5: 2 + 0.4 / 2 * 0.25; gradient -2 + 0.4 * 0.5.
    batch, logp = tokens([2.0], [0.5])
    loss, grad, _ = run("dro", batch, logp, dro_beta=0.4)
    assert (loss, grad) == (pytest.approx([2.05]), pytest.approx([-1.8]))


@pytest.mark.parametrize(
    ("over", "high", "outside", "weight"),
    [
        ("token", 3.0, "truncate", [2.0, 3.0]),  # 2 and 4
        ("token", 3.0, "mask", [2.0, 0.0]),
        ("sequence", 3.0, "truncate", [3.0, 3.0]),  # 8
        ("sequence", 1e9, "truncate", [8.0, 8.0]),
        ("geometric", 1e9, "truncate", [8**0.5, 8**0.5]),
        ("none", 3.0, "truncate", [1.0, 1.0]),
    ],
)
def test_reinforce_with_weights_of_the_policy_that_learns_by_hand(
    over: str, high: float, outside: str, weight: list[float]
) -> None:
    batch, logp = tokens([1.0, -2.0], [9.0, 9.0])  # the policy before the step is not read
    batch = replace(batch, logp_sample_N=logp.detach() - doubles([0, math.log(2), math.log(4)]))
    keys = {"weight_over": over, "weight_low": None, "weight_high": high, "weight_outside": outside}
    loss, grad, _ = run("reinforce_is", batch, logp, **keys)
    assert loss == pytest.approx([weight[0], -2 * weight[1]])
    assert grad == pytest.approx([-weight[0], 2 * weight[1]])


@pytest.mark.parametrize(
    ("over", "weight"),
    [("token", [2 / 2.5, 3 / 2.5]), ("sequence", [3 / 3, 3 / 3]), ("none", [1.0, 1.0])],
)
def test_weights_of_reinforce_over_their_mean_by_hand(over: str, weight: list[float]) -> None:
    batch, logp = tokens([1.0, -2.0], [9.0, 9.0])
    batch = replace(batch, logp_sample_N=logp.detach() - doubles([0, math.log(2), math.log(4)]))
    keys = {"weight_over": over, "weight_low": None, "weight_high": 3.0, "weight_outside": "truncate"}
    loss, grad, _ = run("reinforce_is", batch, logp, **keys, weight_normalize=True)
    assert loss == pytest.approx([weight[0], -2 * weight[1]])
    assert grad == pytest.approx([-weight[0], 2 * weight[1]])


def test_an_exponential_weight_at_a_low_temperature_is_bounded() -> None:
    """REC's weight=advantage: e^(1 / 0.01) is no number of float32."""
    keys = resolve(
        schema.AlgorithmConfig(name="rec", loss={"rec_weight": "advantage", "rec_temperature": 0.01})
    )
    batch, logp = tokens([1.0, -1.0], [0.0, 0.0])
    batch, logp = replace(batch, adv_N=batch.adv_N.float()), logp.detach().float().requires_grad_()
    loss, grad, _ = run("rec", batch, logp, **keys.settings["loss"].settings)
    assert loss == pytest.approx([math.exp(20), -math.exp(-100)], rel=1e-5, abs=1e-30)
    assert all(map(math.isfinite, grad))


def test_a_ratio_far_above_1_keeps_the_weight_20_of_its_gradient_in_dppo() -> None:
    keys = resolve(schema.AlgorithmConfig(name="dppo")).settings["loss"].settings
    batch, logp = tokens([-1.0], [0.0])
    batch = replace(batch, logp_sample_N=logp.detach() - doubles([0, math.log(50)]))
    loss, grad, _ = run("dppo", batch, logp, **keys)
    assert (loss, grad) == (pytest.approx([20.0]), pytest.approx([20.0]))
    assert run("dppo", batch, logp, **{**keys, "dppo_max_ratio": 1e9})[0] == pytest.approx([50.0])


def test_an_impossible_token_leaves_losses_of_the_ratio_finite_and_those_of_log_pi_infinite() -> None:
    batch, _ = tokens([1.0], [0.0])
    logp = doubles([0.0, -math.inf])
    assert run("ppo", batch, logp, **PPO)[0][0] == pytest.approx(0.0, abs=1e-8)
    assert math.isinf(run("reinforce", batch, logp)[0][0])


@pytest.mark.parametrize(("loss", "picked"), [("clip_cov", 0), ("kl_cov", 1)])
def test_an_impossible_token_leaves_the_covariances_finite(loss: str, picked: int) -> None:
    keys = resolve(schema.AlgorithmConfig(name=loss)).settings["loss"].settings
    batch, logp = tokens([1.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    impossible = logp.detach().index_fill(0, torch.tensor([3]), -math.inf).requires_grad_()
    out, grad, stats = run(loss, batch, impossible, **keys)
    assert all(map(math.isfinite, out + grad))
    assert int(stats["cov_picked_frac"].sum()) == picked


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov", "m2po"])
def test_log_probs_that_are_no_numbers_are_those_of_the_loss(loss: str) -> None:
    """Such an update is skipped; what looks at the whole minibatch before must let it come to that."""
    keys = resolve(schema.AlgorithmConfig(name=loss)).settings["loss"].settings
    batch, logp = tokens([1.0, -1.0], [0.0, 0.0])
    assert any(map(math.isnan, run(loss, batch, logp.detach() * math.nan, **keys)[0]))


def test_luspo_is_gspo_times_the_length_by_hand() -> None:
    # Two rollouts of 2 and 1 tokens, ratio 1: a sum over tokens, a mean over rollouts.
    made = build(schema.AlgorithmConfig(name="luspo"), critic=schema.CriticConfig(), max_tokens=8)
    batch = make_batch([["paa", "pa"]], [1.0, 0.0])
    assert made.weights(batch, 1).tolist() == [0, 0.5, 0.5, 0, 0.5]


@pytest.mark.parametrize(("adv", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
def test_sapo_at_ratio_1_by_hand(adv: float, tau: float) -> None:
    # sigmoid(0) = 1/2: the gate is 2 / tau, its derivative by r is 1.
    batch, logp = tokens([adv], [0.0])
    keys = {"tau_pos": 1.0, "tau_neg": 1.05}
    loss, grad, _ = run("sapo", batch, logp, **keys, sapo_detach=False)
    assert (loss, grad) == (pytest.approx([-adv * 2 / tau]), pytest.approx([-adv]))
    loss, grad, stats = run("sapo", batch, logp, **keys, sapo_detach=True)
    assert (loss, grad) == (pytest.approx([adv * 2 / tau]), pytest.approx([-adv * 2 / tau]))
    assert stats["gate"][1].item() == pytest.approx(2 / tau)


def test_aipo_importance_sampling_and_softmax_ppo_by_hand() -> None:
    # r = 3 with A = 2, r = 3 with A = -2, r = 1.2 with A = 2
    batch, logp = tokens([2.0, -2.0, 2.0], [math.log(3), math.log(3), math.log(1.2)])
    loss, grad, stats = run("aipo", batch, logp, aipo_rho=2.0)
    assert (loss, grad) == (pytest.approx([-4, 4, -2.4]), pytest.approx([0, 0, -2.4]))
    assert stats["clip_frac"].tolist() == [0, 1, 1, 0]
    loss, grad, _ = run("importance_sampling", batch, logp)
    assert loss == grad == pytest.approx([-6, 6, -2.4])
    loss, grad, stats = run("softmax_ppo", batch, logp, ratio_epsilon=0.3)
    assert (loss, grad) == (pytest.approx([0, 0, -2 * math.log(1.2)]), pytest.approx([0, 0, -2]))
    assert stats["clip_frac"].tolist() == [0, 1, 1, 0]


def test_rollout_is_looks_at_the_engines_log_probs() -> None:
    # pi / engine = 1.2, 1.28, 0.8 (the bounds themselves are outside); log pi = -1
    batch, logp = tokens([2.0, 2.0, -1.0], [9.0, 9.0, 9.0])
    batch = replace(batch, logp_sample_N=doubles([0, *(-1 - math.log(w) for w in (1.2, 1.2801, 0.7999))]))
    loss, grad, stats = run("rollout_is", batch, logp, **CLIP)
    assert (loss, grad) == (pytest.approx([2.4, 0, 0]), pytest.approx([-2.4, 0, 0]))
    assert stats["masked_frac"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("adv", "now", "before", "kind", "far"),
    [
        (1.0, 0.3, 0.1, "binary_tv", True),  # rose by 0.2 > 0.15
        (-1.0, 0.3, 0.1, "binary_tv", False),  # rose, and is to fall: it leads back
        (-1.0, 0.1, 0.3, "binary_tv", True),
        (1.0, 0.1, 0.3, "binary_tv", False),
        (1.0, 0.24, 0.1, "binary_tv", False),  # 0.14; the ratio of 2.4 does not matter
        (1.0, 0.3, 0.1, "binary_kl", False),  # KL(0.1 || 0.3) = 0.1163 < 0.15
        (1.0, 0.4, 0.1, "binary_kl", True),  # KL(0.1 || 0.4) = 0.2263
        (-1.0, 0.1, 0.4, "binary_kl", True),  # KL(0.4 || 0.1) = 0.3112
    ],
)
def test_dppo_by_hand(adv: float, now: float, before: float, kind: str, far: bool) -> None:
    batch, logp = tokens([adv], [9.0], logp=math.log(now))
    batch = replace(batch, logp_sample_N=doubles([0, math.log(before)]))
    keys = {"dppo_divergence": kind, "dppo_delta_low": 0.15, "dppo_delta_high": 0.15}
    loss, grad, _ = run("dppo", batch, logp, **keys)
    assert loss == grad == pytest.approx([0.0 if far else -adv * now / before])


@pytest.mark.parametrize(("kind", "limits"), [("tv", (0.15, 0.2)), ("kl", (0.05, 0.07))])
def test_dppo_of_verl_has_the_truncated_ratio_as_the_weight_of_the_gradient(
    kind: str, limits: tuple[float, float]
) -> None:
    """verl 0.7.1 to main: -A min(pi / old, c) log pi without gradient through the weight, 0 outside of the mask."""
    low, high = limits
    for adv, now, old in itertools.product((1.0, -2.0), (0.02, 0.2, 0.5, 0.9), (0.01, 0.1, 0.45, 0.8)):
        batch, logp = tokens([adv], [9.0], logp=math.log(now))
        batch = replace(batch, logp_old_N=doubles([0, math.log(old)]), logp_sample_N=doubles([0, -9.0]))
        keys = {"dppo_divergence": f"binary_{kind}", "dppo_delta_low": low, "dppo_delta_high": high}
        loss, grad, _ = run("dppo", batch, logp, **keys, dppo_anchor="old", dppo_max_ratio=3.0)
        far = abs(now - old)
        if kind == "kl":
            far = old * math.log(old / now) + (1 - old) * math.log((1 - old) / (1 - now))
        gone = (adv > 0 and now > old and far > high) or (adv < 0 and now < old and far > low)
        wanted = 0.0 if gone else -adv * min(now / old, 3.0)
        assert grad == pytest.approx([wanted], rel=1e-9)
        assert loss == pytest.approx([wanted], rel=1e-9)


def test_the_bernoulli_kl_by_hand() -> None:
    p, q = (
        doubles([math.log(0.1), math.log(0.4), 0.0, math.log(0.5)]),
        doubles([math.log(0.3), math.log(0.1), 0.0, 0.0]),
    )
    # 0.1 ln(1/3) + 0.9 ln(9/7); 0.4 ln 4 + 0.6 ln(2/3); 0; infinite, bounded
    assert bernoulli_kl(p, q).tolist() == pytest.approx([0.11632, 0.31124, 0, 20], abs=1e-5)


def test_plain_losses_by_hand() -> None:
    # log pi = -1; r = 2 and 0.5
    batch, logp = tokens([-2.0, -2.0], [math.log(2), math.log(0.5)])
    assert run("topr", batch, logp, topr_threshold=0.0)[:2] == (
        pytest.approx([-2, -1]),
        pytest.approx([2, 1]),
    )
    assert run("topr", batch, logp, topr_threshold=-2.0)[0] == pytest.approx(
        [-2, -1]
    )  # at the threshold, too
    assert run("topr", batch, logp, topr_threshold=-3.0)[0] == pytest.approx([-2, -2])
    assert run("opmd", batch, logp, tau=1.0)[:2] == ([-1.0, -1.0], [1.0, 1.0])
    assert run("gpg", batch, logp)[:2] == ([-2.0, -2.0], [2.0, 2.0])
    assert run("cross_entropy", batch, logp)[:2] == ([1.0, 1.0], [-1.0, -1.0])


@pytest.mark.parametrize(
    ("mode", "inside"),
    [
        #                     r:  1.1  1.5  3.5  0.3  1.5  3.5  0.3
        #                     A:   +    +    +    +    -    -    -
        ("none", [1, 1, 1, 1, 1, 1, 1]),
        ("two-side", [1, 0, 0, 0, 0, 0, 0]),
        ("one-side", [1, 0, 0, 1, 1, 1, 0]),
        ("ring", [1, 0, 0, 1, 0, 1, 0]),  # beyond 0.4 and 3 from the side that leads back
    ],
)
def test_recs_ranges_by_hand(mode: str, inside: list[int]) -> None:
    ratios, signs = [1.1, 1.5, 3.5, 0.3, 1.5, 3.5, 0.3], [1.0] * 4 + [-1.0] * 3
    batch, logp = tokens(signs, [math.log(r) for r in ratios])
    keys = {"rec_ring_low": 0.6, "rec_ring_high": 2.0, "rec_weight": "none", "rec_temperature": 1.0}
    more = {"rec_regularizer": "none", "rec_regularizer_coef": 0.0}
    loss, _, _ = run("rec", batch, logp, **CLIP, rec_clip_mode=mode, **keys, **more)
    assert loss == [a * i for a, i in zip(signs, inside, strict=True)]  # -A log pi with log pi = -1


def test_rec_lets_no_advantage_pass_from_either_side() -> None:
    batch, logp = tokens([0.0, 0.0], [math.log(3.5), math.log(0.3)])
    said = {
        "rec_weight": "none",
        "rec_temperature": 1.0,
        "rec_regularizer": "none",
        "rec_regularizer_coef": 0.0,
    }
    for mode in ("one-side", "ring"):
        keys = CLIP | said | {"rec_clip_mode": mode, "rec_ring_low": 0.6, "rec_ring_high": 2.0}
        assert run("rec", batch, logp, **keys)[2]["clip_frac"].tolist() == [0, 0, 0]


# ---------------------------------------------------------------- what a covariance picks


def test_kl_cov_by_hand() -> None:
    # mean A = 0, mean log pi = -2.5: cov = 3 * 2, 0 * 0.5, -1 * -0.5, -2 * -2 = 6, 0, 0.5, 4; half: 1st and 4th.
    batch, _ = tokens([3.0, 0.0, -1.0, -2.0], [0.0] * 4)
    logp = doubles([0, -0.5, -2.0, -3.0, -4.5]).requires_grad_()
    batch = replace(batch, logp_old_N=logp.detach() - doubles([0, 0.1, 0.1, 0.1, -0.2]))
    loss, grad, stats = run("kl_cov", batch, logp, kl_cov_ratio=0.5, ppo_kl_coef=2.0)
    up, down = math.exp(0.1), math.exp(-0.2)
    assert loss == pytest.approx([-3 * up + 0.2, 0, up, 2 * down + 0.4])
    assert grad == pytest.approx([-3 * up + 2, 0, up, 2 * down - 2])
    assert stats["cov_picked_frac"].tolist() == [0, 1, 0, 0, 1]


def test_among_equal_covariances_luck_decides() -> None:
    batch = ragged(1)
    batch = replace(batch, adv_N=batch.mask_N.double())  # all advantages are equal: every covariance is 0
    logp = logp_now(batch).detach()
    for count in (1, 5):
        assert largest(batch, logp, count=count).of(batch, logp).sum() == count


def test_rounding_between_two_passes_moves_no_token() -> None:
    batch = replace(
        ragged(2), adv_N=torch.randn(ragged(2).tokens, generator=torch.Generator().manual_seed(0))
    )
    logp = logp_now(batch).detach()
    picks = largest(batch, logp, count=7)
    again = logp * (1 + 1e-9 * torch.randn(batch.tokens, generator=torch.Generator().manual_seed(1)))
    assert picks.of(batch, logp).sum() == 7
    assert torch.equal(picks.of(batch, logp), picks.of(batch, again))


@pytest.mark.parametrize("seed", range(4))
def test_clip_cov_leaves_out_so_many_of_those_it_may(seed: int) -> None:
    batch = ragged(seed, groups=6)
    noise = torch.randn(batch.tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    batch = replace(batch, adv_N=noise * batch.mask_N)
    logp = logp_now(batch, scale=0.2)
    keys = CLIP | {"clip_cov_lb": 0.1, "clip_cov_ub": 2.0}
    base = LOSSES["ppo"](batch, Outputs(logp_N=logp), **PPO)
    loss = LOSSES["clip_cov"](batch, Outputs(logp_N=logp), **keys, clip_cov_ratio=0.1)
    picked = loss.stats["cov_picked_frac"] == 1
    assert picked.sum() == int(0.1 * int(batch.mask_N.sum())) > 1
    assert (loss.loss_N[picked] == 0).all()
    assert torch.equal(loss.loss_N[~picked], base.loss_N[~picked])
    n = batch.mask_N.sum()
    assert batch.adv_N is not None
    cov = (batch.adv_N - batch.adv_N.sum() / n) * (logp.detach() - logp.detach().sum() / n)
    may = (cov > 0.1) & (cov < 2.0) & (base.stats["clip_frac"] == 0) & batch.mask_N
    assert (may[picked]).all()
    assert may.sum() > picked.sum()  # there was a choice
    everyone = LOSSES["clip_cov"](batch, Outputs(logp_N=logp), **keys, clip_cov_ratio=1.0)
    assert torch.equal(everyone.stats["cov_picked_frac"] == 1, may)
    nobody = LOSSES["clip_cov"](
        batch, Outputs(logp_N=logp), **(keys | {"clip_cov_lb": 1.99}), clip_cov_ratio=1e-6
    )
    assert nobody.stats["cov_picked_frac"].sum() <= 1


def test_luck_is_uniform_and_belongs_to_the_token() -> None:
    batch = ragged(5, groups=200)
    luck = luck_N(batch)
    assert 0.48 < float(luck.mean()) < 0.52
    assert len(torch.unique(luck)) > 0.99 * batch.tokens
    part = select(batch, torch.tensor([3, 40, 41]))
    assert torch.equal(luck_N(part), luck[torch.isin(batch.rollout_N, torch.tensor([3, 40, 41]))])


def test_the_choice_does_not_depend_on_where_the_minibatch_is_cut() -> None:
    batch = replace(
        ragged(4), adv_N=torch.ones(ragged(4).tokens).double() * ragged(4).reward_R[ragged(4).rollout_N]
    )
    logp = logp_now(batch).detach()
    keys = CLIP | {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0}
    loss = clip_cov_over(batch, lambda: logp, **keys)
    whole = loss(batch, Outputs(logp_N=logp)).stats["cov_picked_frac"]
    assert torch.equal(stat_by_rollouts(loss, batch, logp, "cov_picked_frac"), whole)
    assert whole.sum() > 1


# ---------------------------------------------------------------- terms with a mean of their own


def silent(batch: Batch, out: Outputs) -> Loss:
    return Loss(torch.zeros_like(batch.adv_N if batch.adv_N is not None else batch.logp_sample_N))


@pytest.mark.parametrize("times", [1.0, 1 / 8])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_positive_nll_is_a_mean_over_the_tokens_of_good_rollouts(mode: str, times: float) -> None:
    """times: how often each rollout counts; less than once where its copies share an epoch's minibatches."""
    # Rewards 1, 0, 0.5: tokens of the first and third. Their -log pi: 1, 3, 2; the mean is 2, times 0.1.
    batch = make_batch([["paa", "paaa", "pa"]], [1.0, 0.0, 0.5])
    batch = replace(batch, count_R=torch.full((3,), times))
    batch = replace(batch, weight_N=weights(batch, mode, norm_tokens=8))
    logp = doubles([0, -1, -3, 0, -7, -7, -7, 0, -2]).requires_grad_()
    keys: dict[str, Any] = {"kl_coef": 0.0, "estimator": "k3", "entropy_coef": 0.0}
    loss = regularized(silent, **keys, positive_nll_coef=0.1)(batch, Outputs(logp_N=logp)).loss_N
    assert batch.weight_N is not None
    total = (loss * batch.weight_N).sum()
    assert total.item() == pytest.approx(0.2)
    grad = torch.autograd.grad(total, logp)[0].tolist()
    assert grad == pytest.approx([0, -0.1 / 3, -0.1 / 3, 0, 0, 0, 0, 0, -0.1 / 3])


def test_without_a_good_rollout_there_is_no_positive_nll() -> None:
    batch = make_batch([["paa", "pa"]], [0.0, -1.0])
    batch = replace(batch, weight_N=weights(batch, "token-mean", norm_tokens=8))
    keys: dict[str, Any] = {"kl_coef": 0.0, "estimator": "k3", "entropy_coef": 0.0}
    loss = regularized(silent, **keys, positive_nll_coef=0.1)(batch, Outputs(logp_N=batch.logp_sample_N))
    assert loss.loss_N.tolist() == [0] * 5


def test_entropy_may_have_the_mean_over_tokens_as_its_own() -> None:
    batch = make_batch([["paaa", "pa"]])
    entropy = doubles([0, 1.0, 2.0, 3.0, 0, 6.0])
    batch = replace(batch, weight_N=weights(batch, "seq-mean-token-mean", norm_tokens=8))
    out = Outputs(logp_N=batch.logp_sample_N, entropy_N=entropy)
    keys: dict[str, Any] = {"kl_coef": 0.0, "estimator": "k3", "entropy_coef": 0.5}
    assert batch.weight_N is not None
    as_loss = (regularized(silent, **keys)(batch, out).loss_N * batch.weight_N).sum()
    assert as_loss.item() == pytest.approx(-0.5 * (2 + 6) / 2)
    own = (regularized(silent, **keys, entropy_own_mean=True)(batch, out).loss_N * batch.weight_N).sum()
    assert own.item() == pytest.approx(-0.5 * 12 / 4)


def test_demonstrations_have_no_entropy_bonus_and_are_no_good_rollouts() -> None:
    batch = make_batch([["paa", "pa"]], [1.0, 1.0])
    batch = replace(batch, expert_R=torch.tensor([True, False]))
    batch = replace(batch, weight_N=weights(batch, "token-mean", norm_tokens=8))
    assert Totals.of(batch) == Totals(own=1.0, positive=1.0, sampled=3.0)
    out = Outputs(logp_N=doubles([0, -1, -1, 0, -2]), entropy_N=torch.ones(5).double())
    keys: dict[str, Any] = {"kl_coef": 0.0, "estimator": "k3", "entropy_coef": 0.5, "entropy_own_mean": True}
    loss = regularized(silent, **keys, positive_nll_coef=1.0)(batch, out).loss_N
    assert loss.tolist() == pytest.approx([0, 0, 0, 0, (2 - 0.5) * 3])  # weight 1/3, mean over one token


def test_a_rollout_that_counts_twice_counts_twice_in_a_terms_mean() -> None:
    keys: dict[str, Any] = {"kl_coef": 0.0, "estimator": "k3", "entropy_coef": 0.3, "entropy_own_mean": True}
    loss = regularized(silent, **keys, positive_nll_coef=0.7)

    def total(batch: Batch) -> float:
        batch = replace(batch, weight_N=weights(batch, "seq-mean-token-mean", norm_tokens=8))
        out = Outputs(
            logp_N=-(batch.token_ids_N.double() * batch.mask_N), entropy_N=batch.token_ids_N.double()
        )
        assert batch.weight_N is not None
        return float((loss(batch, out).loss_N * batch.weight_N).sum())

    batch = make_batch([["paa", "pa", "paaa"]], [1.0, 1.0, 0.0])
    counted = replace(batch, count_R=doubles([2.0, 0.0, 1.0]))
    copies = make_batch([["paa", "paa", "paaa"]], [1.0, 1.0, 0.0])
    ids = batch.token_ids_N
    copies = replace(copies, token_ids_N=torch.cat([ids[:3], ids[:3], ids[5:]]))
    assert total(counted) == pytest.approx(total(copies), rel=1e-12)


# ---------------------------------------------------------------- whole algorithms, through the engine


def made(name: str, **keys: Any) -> Algorithm:
    return build(
        schema.AlgorithmConfig.model_validate(algorithm(name, **keys)),
        critic=schema.CriticConfig(),
        max_tokens=20,
    )


def gradients(
    algorithm: Algorithm, batch: Batch, cut: MicroBatchPolicy
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What the optimizer would be given, and the metrics of the update."""
    engine = TorchEngine(
        tiny_model(), kernels.load("auto"), cut=cut, optimizer=schema.OptimizerConfig(lr=0.0), total_steps=1
    )
    assert engine.optimizer is not None
    seen: dict[str, Tensor] = {}
    clip = engine.optimizer.clip

    def look() -> float:
        seen.update({n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None})
        return clip()

    engine.optimizer.clip = look  # type: ignore[method-assign]
    batch = replace(batch, logp_old_N=engine.forward(batch, "logprobs") + 0.1 * torch.sin(batch.token_ids_N))
    return seen, engine.update(batch, algorithm.loss_of(batch, engine.forward, 0.0))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gspo", {"clip_low": 0.02, "clip_high": 0.02}),
        ("kl_cov", {"kl_cov_ratio": 0.2}),
        ("clip_cov", {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0}),
        ("m2po", {"m2_threshold": 0.01}),
        ("grpo", {"positive_nll_coef": 0.3, "entropy_coef": 0.2, "entropy_agg_mode": "token-mean"}),
    ],
)
def test_the_engines_cuts_change_no_gradient(name: str, keys: dict[str, Any]) -> None:
    algorithm = made(name, **keys)
    batch = pack(random_groups(seed=3))
    batch = algorithm.advantage(replace(batch, logp_old_N=batch.logp_sample_N), 0.0)
    batch = replace(
        batch,
        weight_N=weights(batch, resolve(schema.AlgorithmConfig(name=name)).loss_agg_mode, norm_tokens=8),
    )
    grad = algorithm.entropy.is_on
    whole, metrics = gradients(algorithm, batch, MicroBatchPolicy(max_tokens=10_000, entropy_grad=grad))
    assert sum(float(g.abs().sum()) for g in whole.values()) > 0
    if name.endswith("_cov"):
        assert metrics["cov_picked_frac"] == pytest.approx(
            int(0.2 * int(batch.mask_N.sum())) / int(batch.mask_N.sum())
        )
    for cut in (
        MicroBatchPolicy(max_tokens=30, entropy_grad=grad),
        MicroBatchPolicy(max_tokens=None, max_rollouts=1, entropy_grad=grad),
    ):
        parts, again = gradients(algorithm, batch, cut)
        for key, value in whole.items():
            torch.testing.assert_close(parts[key], value, rtol=0, atol=1e-6)
        assert again["loss"] == pytest.approx(metrics["loss"], abs=1e-6)


def test_who_needs_log_probs_before_the_step() -> None:
    needs = {
        name
        for name in ("gspo", "cispo", "dppo", "opmd", "topr", "rec", "kl_cov")
        if made(name).needs_old(False)
    }
    assert needs == {
        "gspo",
        "cispo",
        "topr",
        "rec",
        "kl_cov",
    }  # dppo has the engine's, opmd compares with nothing


@pytest.mark.parametrize(
    ("name", "keys", "why"),
    [
        ("rec", {"rec_ring_low": 0.7}, "rec_clip_mode is not ring"),
        ("rec", {"rec_temperature": 2.0}, "rec_weight is not advantage"),
        ("rec", {"rec_regularizer_coef": 0.1}, "rec_regularizer is none"),
        ("rec", {"rec_clip_mode": "none", "clip_low": 0.1}, "rec_clip_mode is none"),
        ("grpo", {"fallback_to_policy_gradient": True, "clip_high": 0.1}, "fallback_to_policy_gradient"),
        ("grpo", {"entropy_agg_mode": "token-mean"}, "entropy_coef is 0"),
        ("sft", {"positive_nll_coef": 0.1}, "the replies are in the data .demonstrations"),
        ("grpo", {"aipo_rho": 3.0}, "aipo_rho: has no effect"),
        ("gspo", {"dual_clip": 3.0}, "dual_clip: has no effect"),
    ],
)
def test_keys_without_an_effect_are_refused(name: str, keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_algorithm(name, **keys)
