"""Rewards of a stage: how they are distributed, step by step, and what earns them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from whet.track.written import read_table
from whet.types import Json
from whet.view.rollouts import summaries
from whet.view.source import Ask, Shown, finite, tried

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
class Spread:
    """How numbers are distributed; those that are not finite do not count."""

    quantiles: list[float] | None = None
    mean: float | None = None
    count: int = 0

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        some = values[np.isfinite(values)]
        if not len(some):
            return NOTHING
        return cls(np.quantile(some, QUANTILES).tolist(), float(some.mean()), len(some))


NOTHING = Spread()


@dataclass(frozen=True)
class FileRewards:
    """Rewards of one file. What a page needs of each step is made once: a run that goes on is asked again and again."""

    parts: dict[str, np.ndarray]
    """A number for each rollout, NaN where there is none; the total first."""
    spread: dict[str, Spread]
    """Of each part."""
    sources: dict[str, Spread]
    """Of the total, by source."""
    best: list[int]
    """Rows with the highest totals, in ascending order."""
    worst: list[int]


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
    sources = np.array([str(source) for source in table["source"].to_pylist()], dtype=object)
    scored = np.flatnonzero(np.isfinite(total))
    order = scored[np.argsort(total[scored], kind="stable")].tolist()
    return FileRewards(
        parts,
        {name: Spread.of(values) for name, values in parts.items()},
        {name: Spread.of(total[sources == name]) for name in dict.fromkeys(sources.tolist())},
        best=order[-EXTREMES:],
        worst=order[:EXTREMES],
    )


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
    run, stage, problems = ask.run, ask.stage, list[str]()
    made = {
        (step, path): tried(problems, partial(run.kept, file_rewards, path), None)
        for _, step, path in run.files(stage=stage)
    }
    files = [place for place, one in made.items() if one is not None]
    found = [one for one in made.values() if one is not None]
    names = list(dict.fromkeys(name for one in found for name in one.parts))
    sources = sorted({source for one in found for source in one.sources})
    return {
        "stage": stage,
        "steps": [step for step, _ in files],
        "parts": {name: _columns([one.spread.get(name, NOTHING) for one in found]) for name in names},
        "sources": {name: _columns([one.sources.get(name, NOTHING) for one in found]) for name in sources},
        "correlation": _correlation(names, found),
        "extremes": _extremes(run, files),
        "ngrams": _ngrams(files),
        "problems": problems,
    }


def _columns(steps: Sequence[Spread]) -> Json:
    """Of each step; null where it has no number."""
    return {name: [getattr(one, name) for one in steps] for name in ("quantiles", "mean", "count")}


def _correlation(names: Sequence[str], found: Sequence[FileRewards]) -> Json:
    """Pearson's, over the rollouts that have both; null where one of them does not vary."""
    sizes = [len(one.parts[TOTAL]) for one in found]
    absent = {size: np.full(size, np.nan) for size in sizes}
    columns = [
        np.concatenate([one.parts.get(name, absent[n]) for one, n in zip(found, sizes)] or [np.zeros(0)])
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
        one = run.kept(file_rewards, path)
        total = one.parts[TOTAL]
        best += [(float(total[row]), step, row) for row in one.best]
        worst += [(-float(total[row]), step, row) for row in one.worst]
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
    # of equal rewards the mean may round to another number
    means = {uid: np.clip(np.mean(group), min(group), max(group)) for uid, group in sums.items()}
    above, below = [], []
    for uid, reward, text in zip(uids, rewards, texts):
        if reward > means.get(uid, np.nan):
            above.append(text or "")
        elif reward < means.get(uid, np.nan):
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
