"""What becomes of a scored group: which rollouts stay, what is masked, what is booked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.algos.groups import mask_shared_prefixes, refine, rejection, uninformative, with_baseline
from whet.batch import pack, with_parts
from whet.buffer.buffer import Buffer
from whet.config.recipes import resolve
from whet.config.schema import AlgorithmConfig
from whet.config.sections.algorithm import GroupsConfig
from whet.guard.ledger import Ledger
from whet.types import FinishReason, Group, Rollout, Task, Turn, WhetError

TASK = Task(uid=3, source="test", prompt="", token_ids=(50, 51))


def rollout(
    index: int, reply: Sequence[int] = (1, 2), reward: float | None = 0.0, reason: FinishReason = "stop",
    parts: dict[str, float] | None = None,
) -> Rollout:  # fmt: skip
    n = len(reply)
    return Rollout.one_strand(
        task=TASK,
        index=index,
        token_ids=[50, 51, *reply],
        mask=[0, 0, *[1] * n],
        logprobs=[0.0, 0.0, *[-0.5] * n],
        sample_logprobs=[0.0, 0.0, *[-0.25] * n],
        versions=[-1, -1, *[7] * n],
        finish_reason=reason,
        reward=reward,
        reward_parts=parts or {},
    )


def on_strand(r: Rollout, **changed: Any) -> Rollout:
    return replace(r, strands=(replace(r.strand, **changed),))


def group(*rollouts: Rollout) -> Group:
    return Group(TASK, rollouts)


def rewarded(*rewards: float) -> Group:
    return group(*(rollout(i, reward=r) for i, r in enumerate(rewards)))


def kept(found: tuple[Group, dict[str, int]]) -> list[int]:
    return [r.index for r in found[0].rollouts]


# ---------------------------------------------------------------- rollouts


def test_by_default_nothing_happens() -> None:
    given = group(rollout(0, reward=1.0, reason="length"), rollout(1))
    assert refine(given, GroupsConfig()) == (given, {})


def test_unfinished_rollouts() -> None:
    given = group(rollout(0, reward=1.0, reason="length"), rollout(1, reward=1.0), rollout(2, reason="abort"))
    zeroed, dropped = refine(given, GroupsConfig(truncated="zero"))
    assert [r.reward for r in zeroed.rollouts] == [0.0, 1.0, 0.0]
    assert [r.strand.mask.tolist() for r in zeroed.rollouts] == [
        r.strand.mask.tolist() for r in given.rollouts
    ]
    assert dropped == {}
    found = refine(given, GroupsConfig(truncated="drop"))
    assert (kept(found), found[1]) == ([1], {"unfinished": 2})
    # The mask is one of the loss alone: the rollout stays, with its reward.
    assert refine(given, GroupsConfig(truncated="mask")) == (given, {})


def test_a_floor_for_rewards_is_itself_allowed() -> None:
    found = refine(rewarded(0.5, 0.49, 2.0), GroupsConfig(min_reward=0.5))
    assert (kept(found), found[1]) == ([0, 2], {"low_reward": 1})
    assert kept(refine(rewarded(0.0, 0.1), GroupsConfig(min_reward=1.0))) == []


@pytest.mark.parametrize(
    ("best", "worst", "expected"),
    [
        (1, None, [2]),
        (2, None, [0, 2]),  # of the equal ones the earlier
        (None, 1, [1]),
        (None, 2, [1, 4]),
        (1, 1, [1, 2]),
        (9, None, [0, 1, 2, 3, 4]),
        (3, 4, [0, 1, 2, 3, 4]),
    ],
)
def test_best_and_worst(best: int | None, worst: int | None, expected: list[int]) -> None:
    found = refine(rewarded(1.0, -1.0, 5.0, 1.0, 0.0), GroupsConfig(keep_best=best, keep_worst=worst))
    assert kept(found) == expected
    assert found[1] == ({"rank": 5 - len(expected)} if len(expected) < 5 else {})


def test_rules_follow_one_another() -> None:
    given = group(
        rollout(0, reward=9.0, reason="length"), rollout(1, reward=2.0), rollout(2, reward=1.0),
        rollout(3, reward=-1.0),
    )  # fmt: skip
    found = refine(given, GroupsConfig(truncated="drop", min_reward=0.0, keep_best=1))
    assert (kept(found), found[1]) == ([1], {"unfinished": 1, "low_reward": 1, "rank": 1})
    # The zeroed reward is what the others are compared with.
    assert kept(refine(given, GroupsConfig(truncated="zero", keep_best=1))) == [1]


# ---------------------------------------------------------------- groups

judge = partial(uninformative, drop_uniform=True, weights={"a": 1.0, "b": 2.0})


def test_uniform_groups() -> None:
    assert judge(rewarded(1.0, 1.0)) == "uniform"
    assert judge(rewarded(1.0, 0.0)) is None
    assert uninformative(rewarded(1.0, 1.0), drop_uniform=False, weights={}) is None
    assert judge(rewarded(0.1 + 0.2, 0.3)) == "uniform"  # OpenRLHF#1270
    assert judge(rewarded(0.1 + 0.2 - 0.3, 0.0)) == "uniform"
    assert judge(rewarded(0.1 + 0.2, 0.3), min_std=0.0) == "flat"
    assert judge(rewarded(1e-9, 0.0)) is None


def test_uniform_by_named_rewards() -> None:
    given = group(
        rollout(0, reward=1.0, parts={"a": 1.0, "b": 0.5, "c": 0.0}),
        rollout(1, reward=2.0, parts={"a": 1.0, "b": 1.0, "c": 9.0}),
    )
    assert judge(given, by=("a",)) == "uniform"
    assert judge(given, by=("b",)) is None
    assert judge(given, by=("a", "b")) is None
    # By weight: 1 + 2 * 0.5 = 2 and 0 + 2 * 1 = 2.
    even = group(
        *(replace(r, reward_parts={**r.reward_parts, "a": 1.0 - i}) for i, r in enumerate(given.rollouts))
    )
    assert judge(even, by=("a", "b")) == "uniform"
    partly = group(rollout(0, reward=1.0, parts={"a": 1.0}), rollout(1, reward=2.0, parts={"c": 1.0}))
    with pytest.raises(
        WhetError, match=r"uniform.by: reward 'a' gave no value for a reply to a row of 'test'"
    ):
        judge(partly, by=("a",))


def test_groups_of_right_or_of_wrong_replies_alone() -> None:
    """Numbers on one side of the bound are alike, whatever they are; the bound itself is not above it."""
    assert judge(rewarded(0.1, 1.0), above=0.0) == "uniform"
    assert judge(rewarded(-1.0, 0.0), above=0.0) == "uniform"
    assert judge(rewarded(0.0, 0.1), above=0.0) is None
    assert judge(rewarded(0.1, 1.0), above=0.1) is None
    assert judge(rewarded(1.0), above=0.0) == "uniform"


def test_a_part_of_a_reward_tells_right_replies() -> None:
    """Both are right, one with a penalty that makes its reward negative. b has weight 2: 2 * 0.5 is not above 1."""
    given = group(
        rollout(0, reward=-0.5, parts={"a": -0.5, "a/right": 1.0, "b": 0.5}),
        rollout(1, reward=1.0, parts={"a": 1.0, "a/right": 1.0, "b": 1.0}),
    )
    assert judge(given, above=0.0) is None
    assert judge(given, by=("a/right",), above=0.0) == "uniform"
    assert judge(given, by=("b",), above=1.0) is None
    assert judge(given, by=("b",), above=0.9) == "uniform"


def test_the_deviation_must_be_larger() -> None:
    # 0 and 2: sqrt(2) with n - 1, 1 with n.
    given = rewarded(0.0, 2.0)
    assert judge(given, min_std=1.0) is None
    assert judge(given, min_std=1.0, ddof=0) == "flat"
    assert judge(given, min_std=0.999, ddof=0) is None
    assert judge(rewarded(0.1, 0.1, 0.1), min_std=0.0) == "flat"
    assert judge(rewarded(5.0), min_std=0.0) == "flat"


def test_a_stage_rejects_by_these_rules() -> None:
    dapo = resolve(
        AlgorithmConfig.model_validate({"name": "dapo", "groups": {"uniform": {"by": ["a"], "min_std": 0.5}}})
    )
    reject = partial(rejection, algorithm=dapo, weights={"a": 1.0}, alone=False)
    far = group(rollout(0, reward=0.0, parts={"a": 1.0}), rollout(1, reward=9.0, parts={"a": 1.0}))
    assert reject(far) == "uniform"
    assert reject(rewarded(0.0, 0.1)) == "flat"
    assert reject(rewarded(1.0)) == "alone"
    raw = resolve(AlgorithmConfig(name="rloo", advantage={"single_rollout": "raw"}))
    bare = partial(rejection, weights={}, alone=False)
    assert bare(rewarded(1.0), algorithm=raw) is None
    assert bare(rewarded(1.0), algorithm=resolve(AlgorithmConfig(name="rloo"))) == "alone"
    neighbours = {"name": "online_dpo", "dynamic_sampling": False, "loss": {"pairs_of": "neighbours"}}
    spin = resolve(AlgorithmConfig.model_validate(neighbours))
    assert [bare(rewarded(*[1.0] * n), algorithm=spin) for n in (2, 3, 4)] == [None, "alone", None]
    assert rejection(rewarded(1.0), algorithm=spin, weights={}, alone=True) is None


# ---------------------------------------------------------------- shared beginnings


def masks(given: Group, min_tokens: int) -> list[list[int]]:
    return [r.strand.mask[2:].tolist() for r in mask_shared_prefixes(given, min_tokens).rollouts]


def test_a_shared_beginning_is_masked_where_rewards_differ() -> None:
    given = group(
        rollout(0, [1, 2, 3, 4], 1.0), rollout(1, [1, 2, 3, 9, 9], 0.0), rollout(2, [5, 2, 3, 4], 0.0)
    )
    assert masks(given, 3) == [[0, 0, 0, 1], [0, 0, 0, 1, 1], [1, 1, 1, 1]]
    assert masks(given, 4) == [[1] * 4, [1] * 5, [1] * 4]
    same = group(*(replace(r, reward=1.0) for r in given.rollouts))
    assert masks(same, 3) == [[1] * 4, [1] * 5, [1] * 4]


def test_only_the_longest_beginning_counts() -> None:
    # 0 and 1 share four tokens, 2 shares two with both: there two of them go on together.
    given = group(
        rollout(0, [1, 2, 3, 4, 5], 1.0), rollout(1, [1, 2, 3, 4, 6], 0.0), rollout(2, [1, 2, 7, 7, 7], 0.0)
    )
    assert masks(given, 2) == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 1], [1] * 5]


def test_a_reply_that_is_nothing_but_the_beginning_is_left_alone() -> None:
    given = group(rollout(0, [1, 2], 1.0), rollout(1, [1, 2, 3], 0.0), rollout(2, [1, 2], 0.0))
    # 0 and 2 are the same two tokens, and so is the beginning of 1.
    assert masks(given, 1) == [[1, 1], [0, 0, 1], [1, 1]]


def test_what_is_masked_was_not_sampled() -> None:
    given = group(rollout(0, [1, 2, 3], 1.0), rollout(1, [1, 4, 5], 0.0))
    first = mask_shared_prefixes(given, 1).rollouts[0]
    assert first.strand.token_ids.tolist() == [50, 51, 1, 2, 3]
    assert first.strand.logprobs.tolist() == [0, 0, 0, -0.5, -0.5]
    assert first.strand.sample_logprobs.tolist() == [0, 0, 0, -0.25, -0.25]
    assert first.strand.versions.tolist() == [-1, -1, -1, 7, 7]
    assert pack([mask_shared_prefixes(given, 1)]).prompt_S.tolist() == [3, 3]


def test_the_environments_tokens_belong_to_the_beginning() -> None:
    def turns(index: int, last: int, reward: float) -> Rollout:
        return on_strand(rollout(index, [1, 8, 2, last], reward), mask=[0, 0, 1, 0, 1, 1])

    given = group(turns(0, 3, 1.0), turns(1, 4, 0.0))
    assert masks(given, 3) == [[0, 0, 0, 1]] * 2


@given(
    replies=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6),
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=6, max_size=6),
    least=st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
def test_shared_beginnings_against_a_tree(replies: list[list[int]], rewards: list[float], least: int) -> None:
    visits: dict[tuple[int, ...], set[int]] = {}
    for i, reply in enumerate(replies):
        for depth in range(1, len(reply) + 1):
            visits.setdefault(tuple(reply[:depth]), set()).add(i)
    expected = [[1] * len(reply) for reply in replies]
    for node, members in visits.items():
        deeper = [v for other, v in visits.items() if other[:-1] == node]
        longest = len(members) >= 2 and all(len(v) < 2 for v in deeper)
        if longest and len(node) >= least and len({rewards[i] for i in members}) > 1:
            for i in members:
                if len(node) < len(replies[i]):
                    expected[i][: len(node)] = [0] * len(node)
    given = group(*(rollout(i, reply, rewards[i]) for i, reply in enumerate(replies)))
    assert masks(given, least) == expected


def test_a_truncated_rollout_without_reward_has_none_in_its_turns() -> None:
    turns = (Turn(2, 3, "stop", 0.25), Turn(3, 4, "length", 0.5))
    given = group(on_strand(rollout(0, reward=0.75, reason="length"), turns=turns), rollout(1, reward=1.0))
    found, _ = refine(given, GroupsConfig(truncated="zero"))
    zeroed = found.rollouts[0]
    assert (zeroed.reward, [turn.reward for turn in zeroed.turns]) == (0.0, [None, None])


def test_a_zeroed_rollout_has_no_part_of_a_reward_either() -> None:
    """Else gdpo, which compares parts, would reward the reply that ran into its limit."""
    parts = {"right": 1.0, "form": 1.0}
    long = replace(rollout(0, reward=2.0, reason="length"), reward_parts=parts)
    done = replace(rollout(1, reward=0.0), reward_parts=dict.fromkeys(parts, 0.0))
    found, _ = refine(group(long, done), GroupsConfig(truncated="zero"))
    batch = with_parts(pack([found]), [found], ["right", "form"])
    assert batch.reward_R.tolist() == [0, 0]
    assert batch.part_RC is not None
    assert batch.part_RC.tolist() == [[0, 0], [0, 0]]
    assert uninformative(found, drop_uniform=True, weights={"right": 1.0}, by=["right"]) == "uniform"


# ---------------------------------------------------------------- greedy baselines


def test_every_rollout_gets_the_greedy_reward() -> None:
    found = with_baseline(rewarded(1.0, 0.0), rollout(0, reward=0.25), GroupsConfig())
    assert [r.baseline for r in found.rollouts] == [0.25, 0.25]
    assert pack([found]).baseline_R.tolist() == [0.25, 0.25]
    assert pack([rewarded(1.0)]).baseline_R is None


@pytest.mark.parametrize(("truncated", "baseline"), [("zero", 0.0), ("keep", 0.25)])
def test_a_truncated_greedy_reply_counts_as_a_sampled_one(
    truncated: Literal["zero", "keep"], baseline: float
) -> None:
    long = rollout(0, reward=0.25, reason="length")
    found = with_baseline(rewarded(1.0, 0.0), long, GroupsConfig(truncated=truncated))
    assert [r.baseline for r in found.rollouts] == [baseline, baseline]


def test_without_the_greedy_reply_nothing_can_be_compared() -> None:
    mine = group(rollout(0, reward=1.0), replace(rollout(1, reward=None), error="timeout"))
    found = with_baseline(
        mine, replace(rollout(0, reward=None), error="reward answer: crashed"), GroupsConfig()
    )
    assert [(r.reward, r.error) for r in found.rollouts] == [
        (None, "greedy reply: reward answer: crashed"),
        (None, "timeout"),
    ]
    ledger = Ledger()
    buffer = Buffer(groups_per_step=1, group_size=2, max_staleness=0, reject=lambda g: None, ledger=ledger)
    asyncio.run(fill(buffer, [found]))
    counts = ledger.end_step()
    assert counts["ledger/failed/greedy_reply_rollouts"] == counts["ledger/failed/timeout_rollouts"] == 1


# ---------------------------------------------------------------- in the buffer


async def fill(buffer: Buffer, groups: list[Group]) -> list[Group]:
    await buffer.room(at_most=len(groups))
    await buffer.put(groups, asked=len(groups))
    buffer.check()
    return await buffer.take(7) if buffer.ready else []


def open_buffer(groups: int, size: int, **keys: Any) -> Buffer:
    return Buffer(groups_per_step=groups, group_size=size, max_staleness=0, ledger=Ledger(), **keys)


def test_what_left_its_group_is_booked_with_its_reason() -> None:
    cfg = GroupsConfig(min_reward=0.0, keep_best=1)
    buffer = open_buffer(2, 3, refine=partial(refine, cfg=cfg), reject=lambda g: None)
    found = asyncio.run(fill(buffer, [rewarded(-1.0, 2.0, 1.0), rewarded(3.0, 0.5, 0.0)]))
    assert [[r.index for r in g.rollouts] for g in found] == [[1], [0]]
    counts = buffer.ledger.end_step()
    assert counts["ledger/rejected/low_reward_rollouts"] == 1
    assert counts["ledger/rejected/rank_rollouts"] == 3
    assert counts["ledger/pending_rollouts"] == 2


def test_a_group_that_nothing_is_left_of_gives_its_room_back() -> None:
    buffer = open_buffer(
        1, 2, refine=partial(refine, cfg=GroupsConfig(min_reward=1.0)), reject=lambda g: None
    )
    assert asyncio.run(fill(buffer, [rewarded(0.0, 0.0)])) == []
    assert buffer.held == 0
    assert buffer.ledger.pending == 0


def test_copies_fill_a_step_that_is_short_of_groups() -> None:
    reject = partial(uninformative, drop_uniform=True, weights={})
    buffer = open_buffer(3, 2, reject=reject, copies=True)
    found = asyncio.run(fill(buffer, [rewarded(1.0, 0.0), rewarded(1.0, 1.0), rewarded(0.0, 0.0)]))
    assert len(found) == 1
    assert not buffer.dropped


def of_task(uid: int, right: bool) -> Group:
    """Of rewards that differ, or are all 0."""
    task = replace(TASK, uid=uid)
    return Group(task, tuple(replace(rollout(i, reward=float(right and i)), task=task) for i in range(2)))


def two_steps_ahead() -> Buffer:
    """Copies, and room for two steps of four groups."""
    reject = partial(uninformative, drop_uniform=True, weights={})
    return Buffer(
        groups_per_step=4, group_size=2, max_staleness=1, ledger=Ledger(), reject=reject, copies=True
    )


@pytest.mark.parametrize("resumed", [False, True])
def test_copies_stand_in_the_step_whose_groups_were_dropped(resumed: bool) -> None:
    """Where the groups of the step after it wait, too."""

    async def steps() -> list[list[int]]:
        buffer = two_steps_ahead()
        for first, right in ((0, (1, 0, 1, 0)), (4, (1, 1, 1, 1))):
            await buffer.room(at_most=4)
            await buffer.put([of_task(first + i, bool(x)) for i, x in enumerate(right)], asked=4)
        assert (buffer.there, buffer.ready) == (8, True)
        if resumed:
            state, buffer = buffer.state(), two_steps_ahead()
            buffer.restore(state)
        return [[g.task.uid for g in await buffer.take(7)] for _ in range(2)]

    assert asyncio.run(steps()) == [[0, 2], [4, 5, 6, 7]]


def test_copies_of_nothing_fill_nothing() -> None:
    """Neither now nor later: the next group is not copied in place of all that were dropped before it."""

    async def one_by_one() -> list[int]:
        buffer = two_steps_ahead()
        found = []
        for uid, right in enumerate([0] * 9 + [1, 0, 1, 0, 1]):
            await buffer.room(at_most=1)
            await buffer.put([of_task(uid, bool(right))], asked=1)
            found.append(buffer.there)
        assert len(await buffer.take(7)) == 2
        return found

    assert asyncio.run(one_by_one()) == [0] * 9 + [1, 2, 3, 4, 5]


def test_a_checkpoint_whose_dropped_groups_are_of_no_step_is_read() -> None:
    """As former releases wrote it."""
    buffer = two_steps_ahead()
    buffer.restore(buffer.state() | {"dropped": 2})
    assert buffer.there == 0


def test_without_copies_dropped_groups_are_asked_for_again() -> None:
    buffer = open_buffer(2, 2, reject=partial(uninformative, drop_uniform=True, weights={}))
    assert asyncio.run(fill(buffer, [rewarded(1.0, 0.0), rewarded(1.0, 1.0)])) == []
    assert (buffer.held, buffer.there) == (1, 1)
