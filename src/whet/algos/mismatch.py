"""Do engine and trainer agree on the log-probs of what was sampled?"""

from __future__ import annotations

import torch
from torch import Tensor


def mismatch(trainer_M: Tensor, engine_M: Tensor) -> dict[str, Tensor]:
    """[M] numbers of each sampled token; their means (of `max`, the largest) over a step are its metrics.

    d = trainer - engine. k1 and k3 estimate KL(engine || trainer), share is 1 where the bits differ. A log-prob that
    is no number shows in every one.
    """
    d_M = trainer_M.detach().double() - engine_M.double()
    return {
        "mismatch_mean_nats": d_M.abs(),
        "mismatch_max_nats": d_M.abs(),
        "mismatch_k1_nats": -d_M,
        "mismatch_k3_nats": torch.expm1(d_M) - d_M,
        "mismatch_share": (trainer_M != engine_M).double(),
    }
