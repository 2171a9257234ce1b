"""When a stage ends before its last step: its evaluations have stopped improving (`train.early_stopping`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from whet.config.schema import Config, EarlyStoppingConfig
from whet.types import Json


def values_of(lines: Iterable[Json], metric: str, *, stage: str, until: int) -> list[float]:
    """The values of a metric in the evaluations of a stage, up to a step, from the lines of metrics.jsonl."""
    return [
        line[metric] for line in lines if line["stage"] == stage and line["step"] <= until and metric in line
    ]


def should_stop(values: Sequence[float], cfg: EarlyStoppingConfig) -> bool:
    """Whether the last `patience` evaluations were all no better than the best before them by more than `threshold`.

    As EarlyStoppingCallback of transformers 5: an evaluation improves if it is better than the best so far by more than
    the threshold; the best moves with every better value. A value that is not finite improves nothing.
    """
    sign = -1.0 if cfg.goal == "min" else 1.0
    best, waited = -math.inf, 0
    for value in values:
        score = sign * value if math.isfinite(value) else -math.inf
        waited = 0 if score > best + cfg.threshold else waited + 1
        best = max(best, score)
    return waited >= cfg.patience


def early_stopping_of(cfg: Config) -> Json:
    """The settings, as checkpoints and explorers in other processes compare them; None without any."""
    early = cfg.train.early_stopping
    return None if early is None else early.model_dump(mode="json")
