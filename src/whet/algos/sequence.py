"""Policy losses whose ratio belongs to a whole rollout.

Per token, unreduced. Shape letters: N tokens, R rollouts.
"""

from __future__ import annotations

import math

import torch

from whet.algos.clipped import clipped_surrogate
from whet.algos.ratios import BOUND, drift, log_ratio, mean_R, sampled
from whet.algos.segments import last_sampled_R, need
from whet.batch import Batch, Loss, Outputs

GSPO_BOUND = 10.0
"""Of the mean log-ratio from above, as in verl and Cosmos-RL."""

LEAST_LOG_WEIGHT = math.log(1e-8)
"""Of a rollout's log-ratio in VESPO."""

FAR = 1e4
"""Bound of one token's log-ratio inside GSPO's mean: it keeps infinities out and changes no ratio that occurs."""


def gspo(
    batch: Batch, out: Outputs, *, clip_low: float | None, clip_high: float | None, gspo_form: str
) -> Loss:
    """PPO's clip on the rollout's ratio r = exp(mean of its log-ratios), at every token (arXiv:2507.18071).

    gspo_form: with `sequence` the gradient goes through the mean; with `token` (GSPO-token, section 4.3) a token's
    ratio has the value of the rollout's and the gradient of its own log pi. Where all tokens of a rollout share one
    advantage and count the same, both give the same gradient.
    """
    log_N = log_ratio(batch, out, bound=FAR)
    if gspo_form == "token":
        log_N = log_N - log_N.detach() + mean_R(batch, log_N.detach())[batch.rollout_N]
    else:
        log_N = mean_R(batch, log_N)[batch.rollout_N]
    ratio_N = log_N.clamp(max=GSPO_BOUND).exp()
    adv_N = need(batch.adv_N, "batch.adv_N")
    loss_N, stats = clipped_surrogate(ratio_N, adv_N, clip_low=clip_low, clip_high=clip_high)
    stats |= {"sequence_ratio": ratio_N.detach(), "sequence_ratio_max": ratio_N.detach()}
    return Loss(sampled(batch, loss_N), stats | drift(batch, out))


def vespo(
    batch: Batch,
    out: Outputs,
    *,
    vespo_k_pos: float,
    vespo_lambda_pos: float,
    vespo_k_neg: float,
    vespo_lambda_neg: float,
) -> Loss:
    """-sg(phi) A log pi, phi = w^k exp(lambda (1 - w)), w the product of the rollout's ratios.

    VESPO, arXiv:2602.10693: a soft gate on whole rollouts, 1 at w = 1, which falls to 0 on both sides of k / lambda.
    k and lambda are those of the sign of A; 1e-8 <= w <= e^20, as in TRL 1.16.
    """
    adv_N = need(batch.adv_N, "batch.adv_N")
    log_R = batch.sum_R(log_ratio(batch, out).detach()).clamp(LEAST_LOG_WEIGHT, BOUND)
    log_N = log_R[batch.rollout_N]
    number = adv_N.new_tensor  # not the number itself, which torch refuses where it is beyond float32
    k_N = torch.where(adv_N >= 0, number(vespo_k_pos), number(vespo_k_neg))
    lambda_N = torch.where(adv_N >= 0, number(vespo_lambda_pos), number(vespo_lambda_neg))
    gate_N = (k_N * log_N + lambda_N * (1 - log_N.exp())).exp()
    loss_N = -gate_N * adv_N * need(out.logp_N, "outputs.logp_N")
    return Loss(sampled(batch, loss_N), {"gate": gate_N, "sequence_ratio": log_N.exp()} | drift(batch, out))


def geo_mean(batch: Batch, out: Outputs, *, clip_low: float, clip_high: float) -> Loss:
    """-mean(A) exp(mean of d'), one number a rollout, at each of its tokens (GMPO, arXiv:2507.20673).

    d' is the log-ratio d, clipped in log space from the side that PPO clips: min(d, clip(d, -low, high)) where
    A > 0, max where A < 0, 0 where A = 0. With seq-mean-token-mean the sum is the mean over rollouts.
    """
    adv_N, log_N = need(batch.adv_N, "batch.adv_N"), log_ratio(batch, out)
    clipped_N = log_N.clamp(-clip_low, clip_high)
    bound_N = torch.where(adv_N > 0, torch.minimum(log_N, clipped_N), torch.maximum(log_N, clipped_N))
    ratio_R = mean_R(batch, torch.where(adv_N == 0, 0.0, bound_N)).exp()
    loss_N = -(mean_R(batch, adv_N) * ratio_R)[batch.rollout_N]
    stats = {"clip_frac": (bound_N != log_N).to(loss_N.dtype)}
    return Loss(sampled(batch, loss_N), stats | drift(batch, out))


def self_play(batch: Batch, out: Outputs, *, eta: float) -> Loss:
    """(D - eta A)^2, D the sum of a rollout's log-ratios and A the mean of its advantages, at its last sampled token.

    Self-Play Preference Optimization, arXiv:2405.00675 section 4: a regression of the log-ratio on how much better a
    reply is than the policy before the step. verl's recipe `sppo` (0.4.0 to 0.6.1), whose log-ratios have no bound.
    """
    log_N = log_ratio(batch, out)
    gap_R = batch.sum_R(log_N) - eta * mean_R(batch, need(batch.adv_N, "batch.adv_N"))
    last_R = last_sampled_R(batch)
    has_R = last_R >= 0
    loss_N = torch.zeros_like(log_N).index_put((last_R[has_R],), gap_R[has_R].square())
    return Loss(loss_N, {"gap": sampled(batch, gap_R.detach()[batch.rollout_N])} | drift(batch, out))
