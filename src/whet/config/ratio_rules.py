"""Settings that act only on the ratio of a loss: they have no effect where the ratio is always 1.

The policy before the step is the policy of the first optimizer step. With one optimizer step per batch the ratio to it
is 1 at every token, for rollouts of any version: no bound is reached, every weight is 1.
"""

from __future__ import annotations

from whet.config.conditions import Condition, read_when, under
from whet.config.functions import LOSSES

MOVES: Condition = {
    "any": [
        {"key": "train.minibatches", "above": 1},
        {"key": "train.update_epochs", "above": 1},
        # the ratio is to the policy that sampled
        {"key": "algorithm.old_logprobs", "is": "sampled"},
        {"condition": "loss", "in": [name for name, row in LOSSES.items() if row.anchor == "sampled"]},
        # training computes differently from the forward before: dropout, or micro-batches or kernels that round
        # differently
        {"key": "model.lora.dropout", "above": 0},
        {"key": "train.forward_micro_batch_tokens", "given": True},
        {"key": "train.forward_micro_batch_rollouts", "given": True},
        {"key": "train.compile"},
        {"condition": "own_function"},
    ]
}
"""The loss may see a ratio other than 1."""

WHY = (
    "a batch has one optimizer step (train.minibatches=1, train.update_epochs=1), so the ratio of the policy to the "
    "policy before the step is 1 at every token"
)


RATIO = (
    read_when(
        under(
            "algorithm.loss",
            "clip_low",
            "clip_high",
            "dual_clip",
            "fallback_to_policy_gradient",
            "cispo_mask",
            "mask_low",
            "mask_high",
            "vespo_k_pos",
            "vespo_lambda_pos",
            "vespo_k_neg",
            "vespo_lambda_neg",
            "dro_beta",
            "ratio_epsilon",
            "topr_threshold",
            "ppo_kl_coef",
            "rec_clip_mode",
            "rec_ring_low",
            "rec_ring_high",
        ),
        MOVES,
        WHY,
    ),
    # the engine's log-probs may differ from the trainer's
    read_when(
        ("algorithm.loss.sequence_mask_delta",),
        {"any": [MOVES, {"condition": "loss.sequence_mask_anchor", "is": "sampled"}]},
        WHY,
    ),
    # a cap below 1 always has an effect
    read_when(
        ("algorithm.loss.aipo_rho",),
        {"any": [MOVES, {"not": {"condition": "loss.aipo_rho", "above": 1.0}}]},
        WHY,
    ),
)
