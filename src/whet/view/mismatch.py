"""How far the log-probs of trainer and engine are apart.

metrics.jsonl has mean and maximum of each step. Single tokens are in the batches of a run that records them
(track.batches_interval): log-probs of the trainer before the step, and of the engine when it sampled, both of the
distribution that is trained. (The two log-probs of a rollout file are both the engine's: of that distribution, and of
the one sampled from, after filters.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from whet.data.timed import decoded
from whet.types import DataError, Json
from whet.view.batches import batch_files, read_batch
from whet.view.rollouts import flat, summaries
from whet.view.source import Ask, Shown, finite, tried

EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Nats; a larger difference is counted in the last class."""
WORST = 40
"""Tokens of a stage that are listed."""
MEAN, MAX = "train/mismatch_mean_nats", "train/mismatch_max_nats"


@dataclass(frozen=True)
class Apart:
    """Differences |trainer - engine| of the sampled tokens of one batch, in nats."""

    p99: float | None
    counts: list[int]
    unknown: int
    """Sampled tokens of which one of the two log-probs is not known: no model computes those of skipped rollouts."""
    worst: list[tuple[tuple[int, int], int, int, float]]
    """((uid, index), place in the rollout, token, trainer - engine)"""


def apart(path: Path) -> Apart | None:
    """The differences in one file of `batches`; None if it does not have both log-probs."""
    table = read_batch(path).combine_chunks()
    if not {"logp_old_N", "logp_sample_N"} <= set(table.column_names):
        return None
    mask, ends = flat(table["mask_N"])
    trainer, engine, tokens = (flat(table[n])[0] for n in ("logp_old_N", "logp_sample_N", "token_ids_N"))
    if not len(mask) == len(trainer) == len(engine) == len(tokens):
        raise DataError(f"{path}: its lists of tokens differ in length; is it damaged?")
    difference = trainer.astype(np.float64) - engine
    taken = np.flatnonzero(mask != 0)
    known = taken[np.isfinite(difference[taken])]
    size = np.abs(difference[known])
    classes = np.clip(np.searchsorted(EDGES, size, side="right") - 1, 0, len(EDGES) - 2)
    worst = []
    for at in known[_largest(size)].tolist():
        row = int(np.searchsorted(ends, at, side="right")) - 1
        who = table["uid"][row].as_py(), table["index"][row].as_py()
        worst.append((who, int(at - ends[row]), int(tokens[at]), float(difference[at])))
    return Apart(
        p99=float(np.quantile(size, 0.99)) if len(size) else None,
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
    """Mean and maximum of each step; 99th percentile, histogram and the tokens that differ most of those whose batches
    are recorded."""
    run, stage, problems = ask.run, ask.stage, list[str]()
    lines = {
        line["step"]: line for line in run.lines("metrics.jsonl") if line["stage"] == stage and MEAN in line
    }
    found: dict[int, Apart] = {}
    for step, path in batch_files(run, stage).items():
        if (one := tried(problems, partial(run.kept, apart, path), None)) is not None:
            found[step] = one
    steps = sorted(lines.keys() | found.keys())
    none = [0] * (len(EDGES) - 1)
    return {
        "stage": stage,
        "steps": steps,
        "mean": [finite(lines.get(step, {}).get(MEAN)) for step in steps],
        "p99": [found[step].p99 if step in found else None for step in steps],
        "max": [finite(lines.get(step, {}).get(MAX)) for step in steps],
        "edges": list(EDGES),
        "counts": [found[step].counts if step in found else none for step in steps] if found else [],
        "worst": _worst(run, stage, found, problems) if found else None,
        "note": _note(steps, found),
        "problems": list(dict.fromkeys(problems)),
    }


def _worst(run: Shown, stage: str, found: dict[int, Apart], problems: list[str]) -> list[Json]:
    """[step, row in the rollout file or null, place, text, trainer - engine]"""
    some = [(step, *one) for step, apart in found.items() for one in apart.worst]
    some.sort(key=lambda one: (-abs(one[4]), one[0]))
    files = {step: path for _, step, path in run.files(stage=stage)}
    tokenizer, out = run.tokenizer, []
    for step, who, place, token, difference in some[:WORST]:
        text = (
            decoded(tokenizer, [token], skip_special_tokens=False) if tokenizer and token >= 0 else str(token)
        )
        row = tried(problems, partial(_row, run, files[step], who), None) if step in files else None
        out.append([step, row, place, text, difference])
    return out


def _row(run: Shown, path: Path, who: tuple[int, int]) -> int | None:
    table = run.kept(summaries, path)
    pairs = zip(table["uid"].to_pylist(), table["index"].to_pylist())
    return next((row for row, pair in enumerate(pairs) if pair == who), None)


def _note(steps: list[int], found: dict[int, Apart]) -> str:
    if not steps:
        return (
            "No step compares log-probs: its tokens were not sampled, or the engine has not returned theirs."
        )
    note = "In nats: the log-prob of the trainer before the step minus that of the engine, of sampled tokens"
    if not found:
        return f"{note}. Single tokens are recorded with track.batches_interval; this stage has none"
    if len(found) < len(steps):
        note += (
            f". Percentile, histogram and tokens: of {len(found)} recorded batches (track.batches_interval)"
        )
    if unknown := sum(one.unknown for one in found.values()):
        note += f". {unknown} tokens were not computed: they have no effect on the gradient"
    return note
