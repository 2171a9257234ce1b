"""Batches dealt to ranks and cut into micro-batches: every rollout once, budgets held, work made equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batches import micro_batches
from whet.batch import Batch, pack
from whet.training.balance import Dealt, balanced, deal, together
from whet.training.micro_batches import MicroBatchLimits
from whet.training.work import BatchFlops, batch_flops
from whet.types import Group, Rollout, Task


def batch_of(groups: Sequence[tuple[int, Sequence[int]]]) -> Batch:
    """Groups of (tokens of the prompt, tokens of each reply); every rollout has its own tokens and some weight."""

    def rollout(task: Task, index: int, prompt: int, reply: int) -> Rollout:
        none, n = [0.0] * (prompt + reply), prompt + reply
        return Rollout.one_strand(
            task=task, index=index, token_ids=[task.uid] * prompt + [100 * task.uid + index] * reply,
            mask=[0] * prompt + [1] * reply, logprobs=none, sample_logprobs=none, versions=[0] * n,
            finish_reason="stop", text="", reward=0.0,
        )  # fmt: skip

    made = []
    for uid, (prompt, replies) in enumerate(groups):
        task = Task(uid=uid, source="s", prompt="", answer="")
        made.append(Group(task, tuple(rollout(task, i, prompt, n) for i, n in enumerate(replies))))
    batch = pack(made)
    return replace(batch, weight_N=torch.ones(batch.tokens))


GROUPS = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=5)),
    min_size=1,
    max_size=8,
)
LIMITS = st.one_of(
    st.builds(
        MicroBatchLimits, max_tokens=st.integers(1, 150), shared=st.booleans(), whole_groups=st.booleans()
    ),
    st.builds(
        MicroBatchLimits, max_rollouts=st.integers(1, 6), shared=st.booleans(), whole_groups=st.booleans()
    ),
)
WORK = BatchFlops(layers=2.0, output=1.0, attention=0.1)


def size(batch: Batch, limits: MicroBatchLimits) -> int:
    """What the budget counts."""
    if limits.max_rollouts:
        return batch.rollouts
    again = batch.group_R[1:] == batch.group_R[:-1]
    return batch.tokens - (int(batch.prompt_S[1:][again].sum()) if limits.shared else 0)


def worst(micros: Sequence[Batch], limits: MicroBatchLimits) -> float:
    assert limits.work is not None
    return max(batch_flops(limits.work, micro, shared=limits.shared) for micro in micros)


def ordered(batch: Batch, limits: MicroBatchLimits) -> list[Batch]:
    """Cut by the budget alone, one after the other."""
    return list(
        micro_batches(
            batch,
            max_tokens=limits.max_tokens,
            max_rollouts=limits.max_rollouts,
            shared=limits.shared,
            whole_groups=limits.whole_groups,
        )
    )


# ---------------------------------------------------------------- differencing


def test_differencing_by_hand() -> None:
    # 8-7=1, 6-5=1, 4-1=3, 3-1=2: Karmarkar and Karp's own example ends two apart
    parts = balanced([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_each_item_in_one_part_and_no_part_far_off(costs: list[int], parts: int) -> None:
    found = balanced(costs, parts)
    assert len(found) == parts
    assert sorted(i for part in found for i in part) == list(range(len(costs)))
    sums = [sum(costs[i] for i in part) for part in found]
    assert max(sums) - min(sums) <= max(costs, default=0)
    assert sums == sorted(sums, reverse=True)
    assert sum(not part for part in found) == max(0, parts - len(costs))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(2, 3))
def test_differencing_is_near_the_best_there_is(costs: list[int], parts: int) -> None:
    """Its worst case is 4/3 - 1/(3 parts) of the best (Michiels, Korst, Aarts, van Leeuwen 2003)."""

    def largest(places: Sequence[int]) -> int:
        return max(sum(c for c, p in zip(costs, places) if p == part) for part in range(parts))

    best = min(largest(places) for places in product(range(parts), repeat=len(costs)))
    found = max(sum(costs[i] for i in part) for part in balanced(costs, parts))
    assert 3 * parts * found <= (4 * parts - 1) * best


# ---------------------------------------------------------------- dealt out


@given(GROUPS, st.integers(1, 4), LIMITS, st.booleans())
def test_every_rollout_once_within_the_budget_in_equal_numbers(
    groups: list[tuple[int, list[int]]], parts: int, limits: MicroBatchLimits, by_work: bool
) -> None:
    batch, limits = batch_of(groups), replace(limits, work=WORK if by_work else None)
    dealt = deal(batch, parts, limits)
    assert len({len(d.micros) for d in dealt}) == 1
    assert sorted(r for d in dealt for rows in d.rows for r in rows.tolist()) == list(range(batch.rollouts))
    for d in dealt:
        assert len(d.rows) == d.real
        assert all((m.weight_N == 0).all() for m in d.micros[d.real :])  # type: ignore[union-attr]
        for micro, rows in zip(d.micros, d.rows):
            assert micro.token_ids_N.tolist() == batch.token_ids_N[torch.isin(batch.rollout_N, rows)].tolist()
            alone = int(micro.group_R[-1]) == 0 if limits.whole_groups else micro.rollouts == 1
            assert alone or size(micro, limits) <= (limits.max_rollouts or limits.max_tokens or 0)
    if limits.whole_groups:
        seen = [g for d in dealt for rows in d.rows for g in set(batch.group_R[rows].tolist())]
        assert len(seen) == len(set(seen))
    again = deal(batch, parts, limits)
    assert [r.tolist() for d in again for r in d.rows] == [r.tolist() for d in dealt for r in d.rows]


@given(GROUPS, LIMITS)
def test_no_more_micro_batches_than_in_order_and_no_costlier_ones(
    groups: list[tuple[int, list[int]]], limits: MicroBatchLimits
) -> None:
    batch, limits = batch_of(groups), replace(limits, work=WORK)
    (dealt,), plain = deal(batch, 1, limits), ordered(batch, limits)
    assert dealt.real == len(dealt.micros) <= len(plain)
    if dealt.real == len(plain):
        assert worst(dealt.micros, limits) <= worst(plain, limits) * (1 + 1e-12)
    costs = [batch_flops(WORK, micro, shared=limits.shared) for micro in dealt.micros]
    assert costs == pytest.approx(sorted(costs, reverse=True))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(21, 40))
def test_the_number_is_near_the_least_there_is(lengths: list[int], budget: int) -> None:
    """Best fit needs at most 11/9 of the least and one more (Johnson 1974); with so few it is the least itself, or
    one more."""
    batch = batch_of([(1, [n]) for n in lengths])
    (dealt,) = deal(batch, 1, MicroBatchLimits(max_tokens=budget))

    def fits(places: Sequence[int]) -> bool:
        sums = [0] * len(places)
        for place, n in zip(places, lengths):
            sums[place] += n + 1
        return all(held <= budget for held in sums)

    count = range(1, len(lengths) + 1)
    least = next(k for k in count if any(map(fits, product(range(k), repeat=len(lengths)))))
    assert least <= dealt.real <= least + 1


def rows(dealt: Sequence[Dealt]) -> list[list[list[int]]]:
    return [[r.tolist() for r in d.rows] for d in dealt]


def test_micro_batches_by_hand() -> None:
    batch = batch_of([(1, [n - 1]) for n in (5, 9, 4, 9, 3)])
    assert [m.tokens for m in ordered(batch, MicroBatchLimits(max_tokens=12))] == [5, 9, 4, 12]
    assert [m.tokens for m in deal(batch, 1, MicroBatchLimits(max_tokens=12))[0].micros] == [12, 9, 9]
    # and no larger ones than they must be
    assert [m.tokens for m in ordered(batch, MicroBatchLimits(max_tokens=25))] == [18, 12]
    assert [m.tokens for m in deal(batch, 1, MicroBatchLimits(max_tokens=25))[0].micros] == [16, 14]
    assert rows(deal(batch, 1, MicroBatchLimits(max_rollouts=3))) == [[[1, 2, 4], [0, 3]]]


def test_groups_stay_together_where_it_costs_no_micro_batch() -> None:
    batch = batch_of([(10, [2, 2]), (10, [2, 2]), (10, [2, 2])])  # 14 tokens each
    assert rows(deal(batch, 1, MicroBatchLimits(max_tokens=30, shared=True))) == [[[0, 1, 2, 3], [4, 5]]]
    # unshared a rollout has 12, and two fit
    assert [len(r) for r in rows(deal(batch, 1, MicroBatchLimits(max_tokens=30)))[0]] == [2, 2, 2]
    # whole, 28 tokens each would go alone; in pieces there are fewer micro-batches
    long = batch_of([(4, [8, 8, 8]), (4, [8, 8, 8]), (4, [8, 8, 8])])
    assert len(rows(deal(long, 1, MicroBatchLimits(max_tokens=50, shared=True)))[0]) == 2


def test_few_long_groups_are_torn_between_ranks_if_that_ends_sooner() -> None:
    batch = batch_of([(2, [20, 20, 20, 20]), (2, [20, 20, 20, 20]), (2, [20, 20, 20, 20])])
    limits = MicroBatchLimits(max_tokens=1000, shared=True)
    assert [d.micros[0].rollouts for d in deal(batch, 2, limits)] == [6, 6]
    whole = deal(batch, 2, replace(limits, whole_groups=True))
    assert sorted(d.micros[0].rollouts for d in whole) == [4, 8]


def test_attention_makes_long_rollouts_dearer() -> None:
    batch = batch_of([(1, [n]) for n in (59, 19, 19, 19)])
    assert rows(deal(batch, 2, MicroBatchLimits(max_tokens=200))) == [[[0]], [[1, 2, 3]]]
    quadratic = MicroBatchLimits(max_tokens=200, work=BatchFlops(layers=0.0, output=0.0, attention=1.0))
    assert rows(deal(batch_of([(1, [n]) for n in (59, 39, 39, 9)]), 2, quadratic)) == [[[0]], [[1, 2, 3]]]
    assert rows(deal(batch_of([(1, [n]) for n in (59, 39, 39, 9)]), 2, MicroBatchLimits())) == [
        [[1, 2]],
        [[0, 3]],
    ]


@given(GROUPS, st.integers(1, 3), LIMITS)
def test_what_was_said_goes_back_to_its_place(
    groups: list[tuple[int, list[int]]], parts: int, limits: MicroBatchLimits
) -> None:
    batch = batch_of(groups)
    batch = replace(batch, logp_sample_N=torch.arange(batch.tokens).float())
    dealt = deal(batch, parts, limits)
    said = [[micro.logp_sample_N for micro in d.micros[: d.real]] for d in dealt]
    assert torch.equal(together(batch, dealt, said), batch.logp_sample_N)
