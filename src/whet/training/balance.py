"""A batch partitioned over data-parallel ranks and split into micro-batches of about equal work.

Ranks that exchange tensors during a forward or backward pass must run the same number of passes, so all ranks get as
many micro-batches as the rank that needs most: the fewest that the budget allows. The costliest micro-batches come
first, so that those that run at the same time on several ranks are of similar cost. Groups that share a prompt stay
together while that needs no further micro-batch. A batch that fits into one micro-batch is not changed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, pairwise

import torch
from torch import Tensor

from whet.batch import Batch, select, tokens_of
from whet.training.micro_batches import MicroBatchLimits
from whet.training.work import rollout_flops

Rows = list[int]
"""Numbers of rollouts, ascending."""


@dataclass(frozen=True)
class Dealt:
    """One rank's part of a batch, cut into micro-batches."""

    micros: tuple[Batch, ...]
    rows: tuple[Tensor, ...]
    """Numbers of the rollouts of each micro-batch in the whole batch, ascending."""
    real: int
    """So many of them count; those after are there to keep step with the others."""

    @property
    def of_reference(self) -> Dealt:
        """What the reference computes of each micro-batch."""
        return replace(self, micros=tuple(micro.of_reference for micro in self.micros))


def deal(batch: Batch, parts: int, limits: MicroBatchLimits) -> list[Dealt]:
    """The parts of all ranks."""
    cutter = _Cutter.of(batch, limits)
    ranks = cutter.spread(parts)
    cuts = [cutter.fewest(rows) for rows in ranks]
    most = max(map(len, cuts))
    cuts = [c if len(c) == most else cutter.more(rows, most, fewest=c) for rows, c in zip(ranks, cuts)]
    return [cutter.dealt(cut, most) for cut in cuts]


def together(batch: Batch, dealt: Iterable[Dealt], said: Iterable[Sequence[Tensor]]) -> Tensor:
    """[N] what was said of each token, in the batch's order. said: for each part, of each micro-batch that counts."""
    rows = torch.cat([r for part in dealt for r in part.rows])
    at_N = tokens_of(batch, rows.to(batch.length_S.device))
    x_N = torch.cat([x for part in said for x in part]).to(at_N.device)
    return torch.empty_like(x_N).index_copy_(0, at_N, x_N)


def balanced(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Numbers of the items of each part, ascending; sums of costs as equal as Karmarkar and Karp's differencing makes
    them (1982): the two partial solutions that differ most are joined, largest with smallest, until one is left.

    costs: above 0. The parts come costliest first; with fewer items than parts the last are empty."""
    order = count()
    # parts that are still empty are left out
    heap = [(-cost, next(order), [(cost, [item])]) for item, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        shared = max(0, len(a) + len(b) - parts)
        both = [(x + y, m + n) for (x, m), (y, n) in zip(a[:shared], reversed(b[:shared]))]
        joined = sorted([*both, *a[shared:], *b[shared:]], key=lambda part: part[0])
        least = joined[0][0] if len(joined) == parts else 0
        heapq.heappush(heap, (least - joined[-1][0], next(order), joined))
    found = [sorted(members) for _, members in reversed(heap[0][2])] if heap else []
    return found + [[] for _ in range(parts - len(found))]


# ---------------------------------------------------------------- inside


@dataclass(frozen=True)
class _Measure:
    """A number for any set of rollouts."""

    own: list[float]
    prompt: list[float]
    """Of the prompt of each rollout's first segment, counted once for neighbours of one group if `shared`."""
    group: list[int]
    shared: bool

    def of(self, rows: Rows) -> float:
        again = (b for a, b in pairwise(rows) if self.shared and self.group[a] == self.group[b])
        return sum(self.own[r] + self.prompt[r] for r in rows) - sum(self.prompt[r] for r in again)


@dataclass(frozen=True)
class _Cutter:
    batch: Batch
    limits: MicroBatchLimits
    size: _Measure
    """What the budget bounds: tokens to compute, or rollouts."""
    budget: float
    cost: _Measure
    """What is to be equal: arithmetic, or tokens where the model's is not known."""

    @staticmethod
    def of(batch: Batch, limits: MicroBatchLimits) -> _Cutter:
        group = batch.group_R.tolist()

        def measure(prompt_R: Tensor, own_R: Tensor) -> _Measure:
            return _Measure(own_R.tolist(), prompt_R.tolist(), group, limits.shared)

        wide = batch.of_reference  # in a micro-batch the reference may compute more tokens than the policy
        prompt_R = wide.prompt_S[wide.first_R]
        length_R = torch.bincount(wide.rollout_N, minlength=wide.rollouts)
        tokens = measure(prompt_R, length_R - prompt_R)
        rollouts = measure(torch.zeros(batch.rollouts), torch.ones(batch.rollouts))
        cost = tokens if limits.work is None else measure(*rollout_flops(limits.work, batch))
        if limits.max_rollouts:
            return _Cutter(batch, limits, rollouts, limits.max_rollouts, cost)
        return _Cutter(batch, limits, tokens, limits.max_tokens or math.inf, cost)

    # -- between ranks

    def spread(self, parts: int) -> list[Rows]:
        """The rollouts of each rank: whole groups, or rollouts where that ends sooner."""
        rows = list(range(self.batch.rollouts))
        if parts == 1:
            return [rows]
        kinds = [self.groups(rows)]
        if not self.limits.whole_groups:
            kinds.append([[r] for r in rows])
        return min((self.differenced(units, parts) for units in kinds), key=self.worst)

    # -- micro-batches of one rank

    def fewest(self, rows: Rows) -> list[Rows]:
        """The fewest micro-batches that were found; of such cuts the one whose costliest costs least."""
        if not rows or self.fits(rows):
            return [rows] if rows else []
        ordered = self.in_order(rows)
        lowest = math.ceil(sum(min(self.size.of(g), self.budget) for g in self.groups(rows)) / self.budget)
        cuts = [ordered, *self.few(self.pieces(rows), most=len(ordered), lowest=lowest)]
        if self.limits.shared and min(map(len, cuts)) > lowest:
            torn = [piece for part in ordered for piece in self.groups(part)]
            cuts += self.few(torn, most=len(ordered), lowest=lowest)
        return min(cuts, key=lambda cut: (len(cut), self.worst(cut)))

    def few(self, units: list[Rows], *, most: int, lowest: int) -> list[list[Rows]]:
        """Cuts into at most `most` micro-batches that tear no unit; those of the smallest number that was found."""
        number = min(most, len(self.filled(units, len(units), tight=True)))
        found = self.attempts(units, number)
        while number > lowest and (fewer := self.attempts(units, number - 1)):
            found, number = fewer, number - 1
        return found

    def more(self, rows: Rows, number: int, *, fewest: list[Rows]) -> list[Rows]:
        """So many micro-batches, more than `fewest`; the nearest where it cannot be so many."""
        kinds = [self.pieces(rows)]
        if not self.limits.whole_groups:
            kinds.append([[r] for r in rows])
        cuts = [fewest, *(cut for units in kinds for cut in self.attempts(units, min(number, len(units))))]
        return min(cuts, key=lambda cut: (-len(cut), self.worst(cut)))

    def attempts(self, units: list[Rows], number: int) -> list[list[Rows]]:
        """Cuts into `number` micro-batches within the budget; none where none was found."""
        tried = (
            self.differenced(units, number),
            self.filled(units, number, tight=False),
            self.filled(units, number, tight=True),
        )
        return [cut for cut in tried if len(cut) == number and all(self.fits(part) for part in cut)]

    def differenced(self, units: list[Rows], parts: int) -> list[Rows]:
        found = balanced([self.cost.of(unit) for unit in units], parts)
        return [sorted(r for u in members for r in units[u]) for members in found]

    def filled(self, units: list[Rows], most: int, *, tight: bool) -> list[Rows]:
        """Unit after unit, costliest first, into the cheapest part that has room. tight: largest first, into the
        fullest, for few parts. Nothing if `most` parts do not do."""
        parts: list[tuple[float, float, Rows]] = []
        measured = [(self.cost.of(u), self.size.of(u), u) for u in units]
        for cost, size, unit in sorted(measured, key=lambda m: -m[1] if tight else -m[0]):
            room = [n for n, (_, used, _) in enumerate(parts) if used + size <= self.budget]
            if len(parts) < most and not (tight and room):
                parts.append((cost, size, unit))
            elif not room:
                return []
            else:
                at = max(room, key=lambda n: parts[n][1] if tight else -parts[n][0])
                held = parts[at]
                parts[at] = (held[0] + cost, held[1] + size, held[2] + unit)
        return [sorted(rows) for _, _, rows in parts]

    def in_order(self, rows: Rows) -> list[Rows]:
        """One filled after the other."""
        out: list[Rows] = []
        used = 0.0
        for unit in self.groups(rows) if self.limits.whole_groups else [[r] for r in rows]:
            last = out[-1][-1:] if out else []
            more = self.size.of(last + unit) - self.size.of(last)
            if out and used + more <= self.budget:
                out[-1] += unit
                used += more
            else:
                out.append(list(unit))
                used = self.size.of(unit)
        return out

    # -- sets of rollouts

    def groups(self, rows: Rows) -> list[Rows]:
        return [list(unit) for _, unit in groupby(rows, key=self.size.group.__getitem__)]

    def pieces(self, rows: Rows) -> list[Rows]:
        """What is better not torn: a group that belongs together or shares a prompt, or as many of its rollouts as
        fit; else a rollout."""
        if self.limits.whole_groups:
            return self.groups(rows)
        if not self.limits.shared:
            return [[r] for r in rows]
        return [piece for group in self.groups(rows) for piece in self.in_order(group)]

    def fits(self, rows: Rows) -> bool:
        """Within the budget, or nothing that can be cut."""
        alone = len(self.groups(rows)) == 1 if self.limits.whole_groups else len(rows) == 1
        return alone or self.size.of(rows) <= self.budget

    def worst(self, cut: list[Rows]) -> float:
        return max(map(self.cost.of, cut), default=0.0)

    def dealt(self, cut: list[Rows], most: int) -> Dealt:
        """Costliest first, and filled up to `most` with what has no weight."""
        rows = [torch.tensor(part) for part in sorted(cut, key=self.cost.of, reverse=True)]
        micros = [select(self.batch, r) for r in rows]
        idle = [self.idle()] * (most - len(cut)) if len(cut) < most else []
        return Dealt((*micros, *idle), tuple(rows), len(rows))

    def idle(self) -> Batch:
        """The cheapest rollout or group, which counts for nothing."""
        rows = list(range(self.batch.rollouts))
        units = self.groups(rows) if self.limits.whole_groups else [[r] for r in rows]
        one = select(self.batch, torch.tensor(min(units, key=self.cost.of)))
        if one.weight_N is None:
            return one
        return replace(one, weight_N=torch.zeros_like(one.weight_N), count_R=torch.zeros(one.rollouts))
