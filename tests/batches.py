"""Small ragged batches for tests, in float64 so that laws can be checked to the last digits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from whet.batch import Batch, LossFn, Outputs, select
from whet.prove.pictures import make_batch

Tokens = list[list[float]]


def ragged(seed: int, *, groups: int = 4, dtype: torch.dtype = torch.float64) -> Batch:
    """A random batch: groups of 1 to 5 rollouts of one or more turns; some rollouts sampled nothing, some have their
    turns in several strands."""
    rng = np.random.default_rng(seed)

    def picture() -> str:
        text = "p" * int(rng.integers(1, 5))
        if rng.random() < 0.1:
            return text
        for turn in range(int(rng.integers(1, 4))):
            if turn and rng.random() < 0.3:
                text += "|" + "p" * int(rng.integers(1, 9))
            text += "a" * int(rng.integers(1, 9)) + "o" * int(rng.integers(0, 4))
        return text

    pictures = [[picture() for _ in range(int(rng.integers(1, 6)))] for _ in range(groups)]
    pictures[0] = ["ppaaoa", "pa", "paaaa"]
    return make_batch(pictures, seed=seed, dtype=dtype)


def pair_batch(pairs: int, *, seed: int = 0) -> Batch:
    """Pairs of a chosen and a rejected reply; which of the two stands first is random."""
    rng = np.random.default_rng(seed)
    pictures = [["pp" + "a" * int(rng.integers(1, 6)) for _ in range(2)] for _ in range(pairs)]
    rewards = [x for flip in rng.random(pairs) < 0.5 for x in ((1.0, 0.0) if flip else (0.0, 1.0))]
    return make_batch(pictures, rewards, seed=seed)


def concat(parts: Sequence[Batch], *, group_R: Tensor | None = None) -> Batch:
    """One batch of all rollouts of several, with the fields that all have; groups are numbered on, unless given."""
    values = {
        f.name: torch.cat([getattr(p, f.name) for p in parts])
        for f in fields(Batch)
        if all(getattr(p, f.name) is not None for p in parts)
    }
    for name, count in (("segment_N", "segments"), ("rollout_N", "rollouts"), ("rollout_S", "rollouts")):
        first = np.cumsum([0, *(getattr(p, count) for p in parts)]).tolist()
        values[name] = torch.cat([getattr(p, name) + n for p, n in zip(parts, first, strict=False)])
    first = np.cumsum([0, *(int(p.group_R[-1]) + 1 for p in parts)]).tolist()
    joined_R = torch.cat([p.group_R + n for p, n in zip(parts, first, strict=False)])
    return Batch(**values | {"group_R": joined_R if group_R is None else group_R})


def reordered(batch: Batch, rows: Sequence[int]) -> Batch:
    """These rollouts of a batch in this order, some of them several times; groups are numbered anew."""
    group_R = torch.unique_consecutive(batch.group_R[torch.tensor(rows)], return_inverse=True)[1]
    return concat([select(batch, torch.tensor([r])) for r in rows], group_R=group_R)


def doubles(x: list[float]) -> Tensor:
    """float64, with every digit of the Python number."""
    return torch.tensor(x, dtype=torch.float64)


def by_rollout(batch: Batch, x_N: Tensor) -> Tokens:
    """[N] as one list a rollout of the numbers at its sampled tokens, for loops that are easy to believe."""
    lists: Tokens = [[] for _ in range(batch.rollouts)]
    for row, mask, x in zip(batch.rollout_N.tolist(), batch.mask_N.tolist(), x_N.tolist(), strict=True):
        if mask:
            lists[row].append(x)
    return lists


def logp_now(batch: Batch, *, seed: int = 1, scale: float = 0.2) -> Tensor:
    """[N] log-probs with gradient, near the old ones; a parameter to differentiate by."""
    noise = torch.tensor(np.random.default_rng(seed).normal(size=batch.tokens), dtype=batch.reward_R.dtype)
    assert batch.logp_old_N is not None
    return (batch.logp_old_N + scale * noise * batch.mask_N).requires_grad_()


def micro_batches(
    batch: Batch, *, max_tokens: int | None, max_rollouts: int | None, shared: bool, whole_groups: bool
) -> Iterator[Batch]:
    """A batch cut in order: at most so many tokens (a group's prompt counted once if `shared`) or rollouts.

    With `whole_groups` a group is never cut. What is longer than the limit by itself makes a micro-batch of its own.
    """
    length_R = torch.bincount(batch.rollout_N, minlength=batch.rollouts)
    columns = (length_R, batch.prompt_S[batch.first_R], batch.group_R)
    length, prompt, group = (x.tolist() for x in columns)
    limit = max_rollouts or max_tokens or batch.tokens

    def cost(rows: list[int]) -> int:
        if max_rollouts:
            return len(rows)
        saved = sum(prompt[b] for a, b in pairwise(rows) if shared and group[a] == group[b])
        return sum(length[r] for r in rows) - saved

    rows: list[int] = []
    used = 0
    for _, unit in groupby(range(batch.rollouts), key=lambda row: group[row] if whole_groups else row):
        unit_rows = list(unit)
        more = cost(rows[-1:] + unit_rows) - cost(rows[-1:])
        if rows and used + more > limit:
            yield select(batch, torch.tensor(rows))
            rows, used, more = [], 0, cost(unit_rows)
        rows += unit_rows
        used += more
    yield batch if len(rows) == batch.rollouts else select(batch, torch.tensor(rows))


def stat_by_rollouts(loss: LossFn, batch: Batch, logp_N: Tensor, name: str) -> Tensor:
    """[N] a statistic of a loss that is given the rollouts one by one."""
    parts = list(micro_batches(batch, max_tokens=None, max_rollouts=1, shared=False, whole_groups=False))
    pieces = logp_N.split([part.tokens for part in parts])
    return torch.cat([loss(part, Outputs(logp_N=piece)).stats[name] for part, piece in zip(parts, pieces)])
