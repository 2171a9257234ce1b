"""A batch dealt out to data-parallel ranks: whole groups or rollouts, about the same number of tokens each.

Ranks that exchange tensors in the middle of a pass must make the same number of passes, so all get the same number of
micro-batches; one that has too few cuts its largest, and where nothing is left to cut computes one that counts for
nothing (`Dealt.real`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from whet.batch import Batch, micro_batches, select


@dataclass(frozen=True)
class Dealt:
    """One rank's part of a batch, cut into micro-batches."""

    micros: tuple[Batch, ...]
    rows: tuple[Tensor, ...]
    """Numbers of the rollouts of each micro-batch in the whole batch, ascending."""
    real: int
    """So many of them count; those after are there to keep step with the others."""


def deal(
    batch: Batch,
    parts: int,
    *,
    max_tokens: int | None,
    max_rollouts: int | None,
    shared: bool,
    whole_groups: bool,
) -> list[Dealt]:
    """The parts of all ranks. Groups stay together where their prompt is shared, if there are enough of them.

    max_tokens, max_rollouts, shared, whole_groups: as in `micro_batches`, by which every part is cut.
    """
    units = _units(batch, parts, shared=shared, whole_groups=whole_groups)
    cuts: list[list[Tensor]] = []
    for members in balanced([_tokens(batch, rows, shared=shared) for rows in units], parts):
        rows = torch.cat([units[m] for m in members]).sort().values if members else torch.empty(0).long()
        micros = [] if not len(rows) else _cut(
            batch, rows, max_tokens=max_tokens, max_rollouts=max_rollouts, shared=shared, whole_groups=whole_groups
        )  # fmt: skip
        cuts.append(micros)
    even = level(batch, cuts, whole_groups=whole_groups)
    most = max(len(c) for c in even)
    return [_dealt(batch, c, most) for c in even]


def balanced(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Numbers of the items of each part, ascending; sums of costs as equal as Karmarkar and Karp's differencing makes
    them (1982): the two partial solutions that differ most are joined, largest with smallest, until one is left."""
    order = count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for item, cost in enumerate(costs):
        sums: list[tuple[int, list[int]]] = [(0, []) for _ in range(parts - 1)]
        heap.append((-cost, next(order), [*sums, (cost, [item])]))
    if not heap:
        return [[] for _ in range(parts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        joined = sorted(((x + y, m + n) for (x, m), (y, n) in zip(a, reversed(b))), key=lambda part: part[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], next(order), joined))
    return [sorted(members) for _, members in sorted(heap[0][2], key=lambda part: -part[0])]


def level(batch: Batch, cuts: list[list[Tensor]], *, whole_groups: bool) -> list[list[Tensor]]:
    """The same number of micro-batches for all, by cutting the largest in two where one has fewer; what cannot be cut
    any more stays short."""
    most = max(len(c) for c in cuts)
    out = []
    for rows in cuts:
        rows = list(rows)
        while 0 < len(rows) < most:
            at = max(
                range(len(rows)),
                key=lambda i: int(batch.length_R[rows[i]].sum()) * _splits(batch, rows[i], whole_groups),
            )
            if not _splits(batch, rows[at], whole_groups):
                break
            rows[at : at + 1] = _halves(batch, rows[at], whole_groups)
        out.append(rows)
    return out


def _units(batch: Batch, parts: int, *, shared: bool, whole_groups: bool) -> list[Tensor]:
    """What is never torn apart: groups, or rollouts where these would not do for all ranks."""
    groups = int(batch.group_R[-1]) + 1
    if whole_groups or (shared and groups >= parts):
        return [torch.nonzero(batch.group_R == g).flatten() for g in range(groups)]
    return [torch.tensor([r]) for r in range(batch.rollouts)]


def _tokens(batch: Batch, rows: Tensor, *, shared: bool) -> int:
    """Tokens to compute of rollouts of one group."""
    saved = int(batch.prompt_R[rows[1:]].sum()) if shared else 0
    return int(batch.length_R[rows].sum()) - saved


def _cut(batch: Batch, rows: Tensor, **how: object) -> list[Tensor]:
    """The micro-batches of a part, as numbers of rollouts."""
    numbered = replace(select(batch, rows), reward_R=rows.double())
    return [m.reward_R.long() for m in micro_batches(numbered, **how)]  # type: ignore[arg-type]


def _splits(batch: Batch, rows: Tensor, whole_groups: bool) -> bool:
    names = batch.group_R[rows] if whole_groups else rows
    return len(names.unique()) > 1


def _halves(batch: Batch, rows: Tensor, whole_groups: bool) -> list[Tensor]:
    names = batch.group_R[rows] if whole_groups else rows
    middle = names.unique()[len(names.unique()) // 2]
    return [rows[names < middle], rows[names >= middle]]


def _dealt(batch: Batch, rows: list[Tensor], most: int) -> Dealt:
    """Filled up to `most` with a rollout that has no weight."""
    micros = [select(batch, r) for r in rows]
    return Dealt((*micros, *[_idle(batch)] * (most - len(rows))), tuple(rows), len(rows))


def _idle(batch: Batch) -> Batch:
    group = torch.nonzero(batch.group_R == batch.group_R[0]).flatten()
    one = select(batch, group)
    never_R = torch.zeros(one.rollouts)
    return (
        one
        if one.weight_N is None
        else replace(one, weight_N=torch.zeros_like(one.weight_N), count_R=never_R)
    )
