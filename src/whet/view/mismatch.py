"""How far the log-probs of trainer and sampler are apart, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whet.track.written import read_table
from whet.types import Json
from whet.view.rollouts import flat
from whet.view.source import Ask, finite

EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Nats; a larger difference is counted in the last class."""
WORST = 40
"""Tokens of a stage that are listed."""


@dataclass(frozen=True)
class Apart:
    """Differences |trainer - sampler| of the sampled tokens of one file, in nats."""

    mean: float | None
    p99: float | None
    largest: float | None
    counts: list[int]
    unknown: int
    """Sampled tokens of which one of the two log-probs is not known."""
    worst: list[tuple[int, int, int, float]]
    """(row, place, token, trainer - sampler)"""


def apart(path: Path) -> Apart:
    """The differences in one file."""
    table = read_table(path, ("token_ids", "mask", "logprobs", "sample_logprobs")).combine_chunks()
    mask, ends = flat(table["mask"])
    trainer, _ = flat(table["logprobs"])
    sampler, _ = flat(table["sample_logprobs"])
    tokens, _ = flat(table["token_ids"])
    if not len(mask) == len(trainer) == len(sampler) == len(tokens):
        return Apart(None, None, None, [0] * (len(EDGES) - 1), 0, [])
    difference = trainer.astype(np.float64) - sampler
    taken = np.flatnonzero(mask != 0)
    known = taken[np.isfinite(difference[taken])]
    size = np.abs(difference[known])
    if not len(size):
        return Apart(None, None, None, [0] * (len(EDGES) - 1), len(taken), [])
    classes = np.clip(np.searchsorted(EDGES, size, side="right") - 1, 0, len(EDGES) - 2)
    worst = []
    for at in known[_largest(size)].tolist():
        row = int(np.searchsorted(ends, at, side="right")) - 1
        worst.append((row, int(at - ends[row]), int(tokens[at]), float(difference[at])))
    return Apart(
        mean=float(size.mean()),
        p99=float(np.quantile(size, 0.99)),
        largest=float(size.max()),
        counts=np.bincount(classes, minlength=len(EDGES) - 1).tolist(),
        unknown=len(taken) - len(known),
        worst=worst,
    )


def _largest(size: np.ndarray) -> np.ndarray:
    """Places of the largest ones above 0; of equal ones the first."""
    least = np.partition(size, -WORST)[-WORST] if len(size) > WORST else 0.0
    places = np.flatnonzero((size >= least) & (size > 0))
    return places[np.argsort(-size[places], kind="stable")][:WORST]


def mismatch(ask: Ask) -> Json:
    """Per step mean, 99th percentile, maximum and histogram of the differences; the tokens that differ most."""
    run, stage = ask.run, ask.stage
    files = [(step, path) for _, step, path in run.files(stage=stage)]
    found = [(step, run.kept(apart, path)) for step, path in files]
    worst = sorted(
        ((step, *one) for step, some in found for one in some.worst), key=lambda x: (-abs(x[4]), x[0])
    )[:WORST]
    tokenizer = run.tokenizer
    texts = [
        tokenizer.decode([token], skip_special_tokens=False) if tokenizer and token >= 0 else str(token)
        for _, _, _, token, _ in worst
    ]
    note = "nats: the trainer's log-prob minus the sampler's, of sampled tokens"
    if unknown := sum(some.unknown for _, some in found):
        note += f"; {unknown} tokens have no log-prob of one of the two"
    if found and not worst and any(sum(some.counts) for _, some in found):
        note += "; all are equal to the bit"
    return {
        "stage": stage,
        "steps": [step for step, _ in found],
        "mean": [finite(some.mean) for _, some in found],
        "p99": [finite(some.p99) for _, some in found],
        "max": [finite(some.largest) for _, some in found],
        "edges": list(EDGES),
        "counts": [some.counts for _, some in found],
        "worst": [
            [step, row, place, text, difference]
            for (step, row, place, _, difference), text in zip(worst, texts)
        ],
        "note": note,
    }
