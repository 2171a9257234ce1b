"""The difference of engine and trainer in the log-probs of sampled tokens. Shape letter: M sampled tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whet.types import Metrics


def mismatch(trainer_M: Tensor, engine_M: Tensor) -> dict[str, Tensor]:
    """[M] numbers of each sampled token; their means (of `max`, the largest) over a step are its metrics.

    d = trainer - engine. k1 and k3 estimate KL(engine || trainer), share is 1 where the bits differ. A log-prob
    of NaN shows in every one.
    """
    trainer_M, engine_M = trainer_M.detach(), engine_M.detach()
    d_M = trainer_M.double() - engine_M.double()
    return {
        "mismatch_mean_nats": d_M.abs(),
        "mismatch_max_nats": d_M.abs(),
        "mismatch_k1_nats": -d_M,
        "mismatch_k3_nats": torch.expm1(d_M) - d_M,
        "mismatch_frac": (trainer_M != engine_M).double(),
        "mismatch_engine_nll_nats": -engine_M.double(),
        "mismatch_trainer_nll_nats": -trainer_M.double(),
    }


def perplexities(means: Metrics) -> Metrics:
    """exp of the mean -log p a token, by engine and by trainer, and the trainer's over the engine's: exactly 1 where
    they agree. Of the means of `mismatch`; infinite beyond e^700."""
    if "mismatch_engine_nll_nats" not in means:
        return {}
    engine, trainer = (means[f"mismatch_{who}_nll_nats"] for who in ("engine", "trainer"))
    return {
        "mismatch_engine_perplexity": _exp(engine),
        "mismatch_trainer_perplexity": _exp(trainer),
        "mismatch_perplexity_ratio": _exp(means["mismatch_k1_nats"]),
    }


def _exp(x: float) -> float:
    return math.exp(x) if not x > 700 else math.inf
