"""SkyRL's integration of ArcticRL (0.3 to main), by `trainer.override_entrypoint=integrations.arctic_rl.entrypoint`.

Its server trains with DeepSpeed: AdamW over all parameters, at a rate that is constant after a warm-up, one optimizer
step a training step over the whole batch. The loss is verl's of GRPO, a mean over tokens; the log-probs before the step
are computed by the same weights, so every ratio is 1 and no clip acts. What the server does not read of SkyRL's keys is
refused (rules.tsv).
"""

from __future__ import annotations

import math

from whet.dialects.row import Values

AT = "trainer.arctic_rl"


def trains(v: Values) -> bool:
    """Whether ArcticRL's server trains."""
    return str(v.get("trainer.override_entrypoint") or "").endswith("arctic_rl.entrypoint")


HORIZON = 1000
"""Steps that the server's schedule is told: SkyRL's trainer has no number of steps, and this stands in for it."""


def warmup_steps(v: Values) -> int:
    """Of DeepSpeed's WarmupLR, in a line from 0 in at least 2 steps (rl/deepspeed_worker.py of Arctic-Platform)."""
    steps = v[f"{AT}.lr_warmup_ratio"] * HORIZON
    return max(2, math.floor(steps)) if steps else 0
