"""Rewards of a stage: how they are distributed, step by step, and what earns them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from whet.track.written import read_table
from whet.types import Json
from whet.view.rollouts import summaries
from whet.view.source import Ask, Shown, finite

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
TOTAL = "reward"
"""What the sum of a rollout's parts is called beside its parts."""
MOST_PARTS = 60
EXTREMES = 10
NGRAMS = (3, 4, 5)
NGRAM_ROLLOUTS = 2000
"""The newest ones that have a reply in another place of their group are compared;"""
NGRAM_WORDS = 1000
"""of each so many words."""
MOST_NGRAMS = 20


@dataclass(frozen=True)
class FileRewards:
    """Rewards of one file, a number for each rollout; NaN where there is none."""

    parts: dict[str, np.ndarray]
    """The total first."""
    sources: list[str]


def file_rewards(path: Path) -> FileRewards:
    """Rewards and their parts of one file."""
    table = read_table(path, ("reward", "reward_parts", "source")).combine_chunks()
    total = pc.cast(table["reward"], pa.float64()).to_numpy(zero_copy_only=False)
    maps = table["reward_parts"].combine_chunks()
    lengths = np.diff(maps.offsets.to_numpy())  # of a null it is 0
    row = np.repeat(np.arange(len(maps)), lengths)
    names, values = _entries(maps)
    parts = {TOTAL: total}
    for name in sorted(set(names.tolist()))[:MOST_PARTS]:
        own = names == name
        column = np.full(len(total), np.nan)
        column[row[own]] = values[own]
        parts[str(name) if name != TOTAL else f"part {name}"] = column
    return FileRewards(parts, [str(source) for source in table["source"].to_pylist()])


def _entries(maps: pa.MapArray) -> tuple[np.ndarray, np.ndarray]:
    """Names and values of all entries of all rows."""
    begin = maps.offsets[0].as_py() if len(maps) else 0
    end = maps.offsets[len(maps)].as_py() if len(maps) else 0
    names = maps.keys.slice(begin, end - begin)
    values = maps.items.slice(begin, end - begin)
    return (
        np.array(pc.fill_null(names, "").to_pylist(), dtype=object),
        values.to_numpy(zero_copy_only=False).astype(float),
    )


def rewards(ask: Ask) -> Json:
    """Quantiles per step of the total, of each part and source; correlation; extremes; what winners repeat."""
    run, stage = ask.run, ask.stage
    files = [(step, path) for _, step, path in run.files(stage=stage)]
    found = [run.kept(file_rewards, path) for _, path in files]
    names = list(dict.fromkeys(name for one in found for name in one.parts))
    sources = sorted({source for one in found for source in one.sources})
    by_source = [_by_source(one) for one in found]
    return {
        "stage": stage,
        "steps": [step for step, _ in files],
        "parts": {name: _spread([one.parts.get(name) for one in found]) for name in names},
        "sources": {name: _spread([one.get(name) for one in by_source]) for name in sources},
        "correlation": _correlation(names, found),
        "extremes": _extremes(run, files),
        "ngrams": _ngrams(files),
    }


def _by_source(one: FileRewards) -> dict[str, np.ndarray]:
    sources = np.array(one.sources, dtype=object)
    return {name: one.parts[TOTAL][sources == name] for name in dict.fromkeys(one.sources)}


def _spread(steps: Sequence[np.ndarray | None]) -> Json:
    """Of each step; null where it has no number."""
    quantiles, means, counts = [], [], []
    for values in steps:
        some = np.zeros(0) if values is None else values[np.isfinite(values)]
        quantiles.append(np.quantile(some, QUANTILES).tolist() if len(some) else None)
        means.append(float(some.mean()) if len(some) else None)
        counts.append(len(some))
    return {"quantiles": quantiles, "mean": means, "count": counts}


def _correlation(names: Sequence[str], found: Sequence[FileRewards]) -> Json:
    """Pearson's, over the rollouts that have both; null where one of them does not vary."""
    absent = {len(one.sources): np.full(len(one.sources), np.nan) for one in found}
    columns = [
        np.concatenate([one.parts.get(name, absent[len(one.sources)]) for one in found] or [np.zeros(0)])
        for name in names
    ]
    return {"names": list(names), "values": [[_pearson(a, b) for b in columns] for a in columns]}


def _pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    both = np.isfinite(a) & np.isfinite(b)
    x, y = a[both], b[both]
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return None
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return finite(float((x * y).sum()) / scale) if scale > 0 else None


def _extremes(run: Shown, files: Sequence[tuple[int, Path]]) -> Json:
    """The rollouts with the highest and the lowest reward; of equal ones the newest."""
    best: list[tuple[float, int, int]] = []
    worst: list[tuple[float, int, int]] = []
    for step, path in files:
        rewards = run.kept(file_rewards, path).parts[TOTAL]
        rows = np.flatnonzero(np.isfinite(rewards))
        order = rows[np.argsort(rewards[rows], kind="stable")]
        best += [(float(rewards[row]), step, int(row)) for row in order[-EXTREMES:]]
        worst += [(-float(rewards[row]), step, int(row)) for row in order[:EXTREMES]]
    paths = dict(files)

    def told(some: list[tuple[float, int, int]], sign: float) -> list[Json]:
        chosen = sorted(some, key=lambda x: (-x[0], -x[1], x[2]))[:EXTREMES]
        texts = {step: run.kept(summaries, paths[step])["text"] for _, step, _ in chosen}
        return [[step, row, sign * reward, texts[step][row].as_py()] for reward, step, row in chosen]

    return {"best": told(best, 1.0), "worst": told(worst, -1.0)}


# ---------------------------------------------------------------- what winners repeat


def _ngrams(files: Sequence[tuple[int, Path]]) -> Json:
    winners: list[str] = []
    losers: list[str] = []
    steps: list[int] = []
    for step, path in reversed(files):
        if len(winners) + len(losers) >= NGRAM_ROLLOUTS:
            break
        above, below = _sides(path)
        winners, losers, steps = winners + above, losers + below, [*steps, step]
    counted = [_counts(texts) for texts in (winners, losers)]
    of = (
        f"rollouts above ({len(winners)}) and below ({len(losers)}) the mean reward of their group, steps "
        f"{min(steps, default=0)} to {max(steps, default=0)}; how many of them have the words"
    )
    return {
        "winners": _most(counted[0], counted[1], len(winners), len(losers)),
        "losers": [[t, w, n] for t, n, w in _most(counted[1], counted[0], len(losers), len(winners))],
        "of": of,
    }


def _sides(path: Path) -> tuple[list[str], list[str]]:
    """Replies above and below the mean reward of their group."""
    table = read_table(path, ("uid", "reward", "text"))
    rewards = table["reward"].to_numpy()
    sums: dict[int, list[float]] = {}
    uids, texts = table["uid"].to_pylist(), table["text"].to_pylist()
    for uid, reward in zip(uids, rewards):
        if np.isfinite(reward):
            sums.setdefault(uid, []).append(reward)
    above, below = [], []
    for uid, reward, text in zip(uids, rewards, texts):
        mean = float(np.mean(sums[uid])) if np.isfinite(reward) else reward
        if reward > mean:
            above.append(text or "")
        elif reward < mean:
            below.append(text or "")
    return above, below


def _counts(texts: Sequence[str]) -> Counter[tuple[str, ...]]:
    """In how many texts each n-gram of words occurs."""
    counted: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        words = text[: 40 * NGRAM_WORDS].split()[:NGRAM_WORDS]
        counted.update({tuple(words[at : at + n]) for n in NGRAMS for at in range(len(words) - n + 1)})
    return counted


def _most(
    own: Mapping[tuple[str, ...], int], other: Mapping[tuple[str, ...], int], size: int, other_size: int
) -> list[list[Json]]:
    """[words, in own, in other] with the largest difference of shares; of what is a part of a longer one as frequent,
    the longer."""
    chosen: list[tuple[str, tuple[int, int]]] = []
    ahead = {
        words: n / size - other.get(words, 0) / max(other_size, 1)
        for words, n in own.items()
        if n > 1 and n / size > other.get(words, 0) / max(other_size, 1)
    }
    for words in sorted(ahead, key=lambda w: (-ahead[w], -len(w), w)):
        text, numbers = " ".join(words), (own[words], other.get(words, 0))
        if not any(text in longer and numbers == counts for longer, counts in chosen):
            chosen.append((text[:400], numbers))
        if len(chosen) == MOST_NGRAMS:
            break
    return [[text, *numbers] for text, numbers in chosen]
