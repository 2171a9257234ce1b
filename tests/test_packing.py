"""The layout of a batch: every sampled token's predictor sees exactly the tokens before it, and nothing is
computed twice or for nobody."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.batch import Batch
from whet.models.dropout import token_names
from whet.models.packing import PackedLayout, layout
from whet.types import DataError

Row = tuple[list[int], list[int]]  # tokens, mask


def batch_of(groups: Sequence[Sequence[Row]]) -> Batch:
    rows = [(g, *row) for g, group in enumerate(groups) for row in group]
    length_R = torch.tensor([len(tokens) for _, tokens, _ in rows])
    row_N = torch.arange(len(rows)).repeat_interleave(length_R)
    token_ids_N = torch.tensor([t for _, tokens, _ in rows for t in tokens])
    mask_N = torch.tensor([m for _, _, mask in rows for m in mask]).bool()
    return Batch(
        token_ids_N=token_ids_N,
        mask_N=mask_N,
        segment_N=row_N,
        rollout_N=row_N,
        version_N=torch.zeros_like(token_ids_N),
        logp_sample_N=torch.zeros(len(token_ids_N)),
        length_S=length_R,
        rollout_S=torch.arange(len(rows)),
        prompt_S=torch.tensor([mask.index(1) if 1 in mask else len(mask) for _, _, mask in rows]),
        group_R=torch.tensor([g for g, _, _ in rows]),
        reward_R=torch.zeros(len(rows)),
        stopped_R=torch.zeros(len(rows), dtype=torch.bool),
    )


def seen_by(plan: PackedLayout, u: int) -> list[tuple[int, int]]:
    """(token, position) of every key that computed token u sees, in the order of its sequence; naive."""
    s = plan.segments
    for start, length, prefix_start, prefix_len in zip(
        s.q_start_S.tolist(), s.q_len_S.tolist(), s.prefix_start_S.tolist(), s.prefix_len_S.tolist()
    ):
        if start <= u < start + length:
            keys = [*range(prefix_start, prefix_start + prefix_len), *range(start, u + 1)]
            return [(int(plan.token_ids_U[k]), int(plan.position_U[k])) for k in keys]
    raise AssertionError(f"token {u} is in no segment")


def check(groups: Sequence[Sequence[Row]], plan: PackedLayout) -> None:
    """Predictors are right for every token up to the last sampled one of its rollout, -1 for all others."""
    n = 0
    for group in groups:
        for tokens, mask in group:
            last = max((i for i, m in enumerate(mask) if m), default=0)
            for position in range(len(tokens)):
                u = int(plan.predictor_N[n])
                if 1 <= position <= last:
                    assert seen_by(plan, u) == [(tokens[i], i) for i in range(position)]
                else:
                    assert u == -1
                n += 1


def naive_count(groups: Sequence[Sequence[Row]], *, share: bool) -> int:
    """How many tokens must be computed, by walking the rollouts one by one."""
    count = 0
    for group in groups:
        prompts: list[list[int]] = []
        for tokens, mask in group:
            if 1 in mask:
                prompt, need = mask.index(1), max(i for i, m in enumerate(mask) if m)
                count += need - (prompt if share and tokens[:prompt] in prompts else 0)
                prompts.append(tokens[:prompt])
    return count


PROMPT = [5, 6, 7]
HAND: list[list[Row]] = [
    [
        (PROMPT + [10, 11, 12], [0, 0, 0, 1, 1, 1]),
        (PROMPT + [20], [0, 0, 0, 1]),
        (PROMPT + [30, 31, 32, 33], [0, 0, 0, 1, 0, 0, 1]),
    ],
    [([8, 40, 41], [0, 1, 1])],
]


def test_hand_made_batch_shared() -> None:
    plan = layout(batch_of(HAND), share_prompts=True)
    # prompt once; responses without their last token (the one-token response adds nothing); the lone rollout
    assert plan.token_ids_U.tolist() == [5, 6, 7, 10, 11, 30, 31, 32, 8, 40]
    assert plan.position_U.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0, 1]
    s = plan.segments
    assert s.q_start_S.tolist() == [0, 3, 5, 8]
    assert s.q_len_S.tolist() == [3, 2, 3, 2]
    assert s.prefix_start_S.tolist() == [0, 0, 0, 0]
    assert s.prefix_len_S.tolist() == [0, 3, 3, 0]
    assert plan.predictor_N.tolist() == [
        *[-1, 0, 1, 2, 3, 4],
        *[-1, 0, 1, 2],
        *[-1, 0, 1, 2, 5, 6, 7],
        *[-1, 8, 9],
    ]


def test_hand_made_batch_unshared() -> None:
    plan = layout(batch_of(HAND), share_prompts=False)
    assert plan.token_ids_U.tolist() == [5, 6, 7, 10, 11, 5, 6, 7, 5, 6, 7, 30, 31, 32, 8, 40]
    assert plan.segments.q_len_S.tolist() == [5, 3, 6, 2]
    assert plan.segments.prefix_len_S.tolist() == [0, 0, 0, 0]
    check(HAND, plan)


def test_equal_prompts_of_different_groups_are_not_shared() -> None:
    row: Row = ([5, 6, 7], [0, 0, 1])
    plan = layout(batch_of([[row], [row]]), share_prompts=True)
    assert plan.token_ids_U.tolist() == [5, 6, 5, 6]


def test_one_different_prompt_token_stops_sharing() -> None:
    group: list[Row] = [
        ([5, 6, 9, 9], [0, 0, 1, 1]),
        ([5, 4, 9, 9], [0, 0, 1, 1]),
        ([5, 4, 8, 8], [0, 0, 1, 1]),
    ]
    plan = layout(batch_of([group]), share_prompts=True)
    assert plan.token_ids_U.tolist() == [5, 6, 9, 5, 4, 9, 8]
    check([group], plan)


def test_prompts_of_different_length_are_not_shared() -> None:
    group: list[Row] = [([5, 6, 9], [0, 0, 1]), ([5, 6, 9], [0, 1, 1]), ([5, 6, 9], [0, 0, 1])]
    plan = layout(batch_of([group]), share_prompts=True)
    assert plan.token_ids_U.tolist() == [5, 6, 5, 6]  # the third has the first one's
    check([group], plan)


def test_rollout_without_sampled_tokens_is_not_computed() -> None:
    group: list[Row] = [([5, 6, 9], [0, 0, 1]), ([5, 6], [0, 0]), ([5, 6, 8, 8], [0, 0, 1, 1])]
    plan = layout(batch_of([group]), share_prompts=True)
    assert plan.token_ids_U.tolist() == [5, 6, 8]
    check([group], plan)


def test_trailing_tokens_of_the_environment_are_not_computed() -> None:
    group: list[Row] = [([5, 9, 7, 7, 7], [0, 1, 0, 0, 0])]
    plan = layout(batch_of([group]), share_prompts=True)
    assert plan.token_ids_U.tolist() == [5]
    assert plan.predictor_N.tolist() == [-1, 0, -1, -1, -1]


def test_sampled_first_token_is_refused() -> None:
    with pytest.raises(DataError, match="nothing precedes it"):
        layout(batch_of([[([5, 6], [1, 1])]]), share_prompts=True)


def _row(prompt: list[int]) -> st.SearchStrategy[Row]:
    reply = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=5)
    return reply.map(
        lambda pairs: (prompt + [t for t, _ in pairs], [0] * len(prompt) + [m for _, m in pairs])
    )


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=3)
GROUP = st.one_of(
    PROMPTS.flatmap(lambda p: st.lists(_row(p), min_size=1, max_size=4)),
    st.lists(PROMPTS.flatmap(_row), min_size=1, max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(groups=st.lists(GROUP, min_size=1, max_size=3), share=st.booleans())
def test_any_batch(groups: list[list[Row]], share: bool) -> None:
    plan = layout(batch_of(groups), share_prompts=share)
    check(groups, plan)
    assert len(plan.token_ids_U) == naive_count(groups, share=share)
    assert torch.equal(plan.segments.position_N, plan.position_U)


def test_every_computed_token_has_a_name_by_its_history() -> None:
    """The last token of a segment, too, which predicts none: layers of multi-token prediction learn from what the
    policy says after it."""
    groups = [[([5, 6, 7, 8], [0, 0, 1, 1]), ([5, 6, 9], [0, 0, 1])], [([7, 8, 5], [0, 1, 0])]]
    longer = [[(tokens + [1], mask + [0]) for tokens, mask in group] for group in groups]
    for share in (True, False):
        named: list[dict[tuple[tuple[int, int], ...], int]] = []
        for rows in (groups, longer):
            batch = batch_of(rows)
            plan = layout(batch, share_prompts=share, whole=True)
            named.append(
                {tuple(seen_by(plan, u)): name for u, name in enumerate(token_names(batch, plan).tolist())}
            )
        short, long = named
        assert len(set(long.values())) == len(long)
        assert short == {history: long[history] for history in short}
