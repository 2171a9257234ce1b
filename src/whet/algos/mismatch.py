"""Do engine and trainer agree on the log-probs of what was sampled?"""

from __future__ import annotations

import torch

from whet.algos.segments import need
from whet.batch import Batch
from whet.types import Metrics


def mismatch(batch: Batch) -> Metrics:
    """The trainer's log-probs (`logp_old_N`) against the engine's (`logp_sample_N`), over all sampled tokens.

    d = trainer - engine. k1 and k3 estimate KL(engine || trainer); perplexity_gap is trainer - engine.
    A log-prob that is no number makes every mean one that is none.
    """
    trainer_M = need(batch.logp_old_N, "batch.logp_old_N")[batch.mask_N]
    engine_M = batch.logp_sample_N[batch.mask_N]
    tokens = len(trainer_M)
    if tokens == 0:
        return {"mismatch/tokens": 0.0}
    d_M = trainer_M.double() - engine_M.double()
    gap = torch.exp(-trainer_M.double().mean()) - torch.exp(-engine_M.double().mean())
    return {
        "mismatch/tokens": float(tokens),
        "mismatch/max_nats": float(d_M.abs().max()),
        "mismatch/mean_nats": float(d_M.abs().mean()),
        "mismatch/k1_nats": float(-d_M.mean()),
        "mismatch/k3_nats": float((torch.expm1(d_M) - d_M).mean()),
        "mismatch/exact_share": float((trainer_M == engine_M).double().mean()),
        "mismatch/perplexity_gap": float(gap),
    }
