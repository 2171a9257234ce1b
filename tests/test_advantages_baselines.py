"""Advantages that are one number a rollout: numbers worked by hand, a naive float64 oracle of each, laws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, pstdev, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batches import by_rollout, doubles, make_batch, ragged, reordered
from whet.algos.advantages import token_rewards, whiten
from whet.algos.baselines import (
    asymre,
    best,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opmd,
    opo,
    rec,
    reinforce_plus_plus_baseline,
    rloo,
    win_rate,
)
from whet.batch import Batch, pack, select, with_parts
from whet.types import Group, Rollout, Task, WhetError

EPS = 1e-6
FEW = settings(max_examples=20, deadline=None)

Run = Callable[[Batch, Tensor], Tensor]
Oracle = Callable[[list[float], list[int]], list[float]]
"""Of one group: its scores and tokens -> its advantages."""


def per_rollout(batch: Batch, adv_N: Tensor) -> list[float | None]:
    """The one number that all sampled tokens of a rollout share; None where nothing was sampled."""
    lists = by_rollout(batch, adv_N)
    assert all(len(set(x)) <= 1 for x in lists)
    assert (adv_N[~batch.mask_N] == 0).all()
    return [x[0] if x else None for x in lists]


def coarse(seed: int) -> Batch:
    """A ragged batch whose rewards are few, so that groups have equal ones, uniform groups and ties at the top."""
    batch = ragged(seed, groups=5)
    return replace(batch, reward_R=(batch.reward_R * 1.5).round().clamp(-1, 1))


def std(values: list[float], ddof: int) -> float:
    return stdev(values) if ddof else pstdev(values)


# ---------------------------------------------------------------- every one against a loop


def _grpo(normalize: bool, ddof: int = 1, floor: float = 0.0) -> Oracle:
    def group(s: list[float], n: list[int]) -> list[float]:
        centre, scale = (fmean(s), std(s, ddof)) if len(s) > 1 else (0.0, 1.0)
        return [(x - centre) / (max(scale, floor) + EPS if normalize else 1.0) for x in s]

    return group


def _passk(normalize: bool) -> Oracle:
    def group(s: list[float], n: list[int]) -> list[float]:
        if len(s) < 2:
            return [0.0]
        first, second = sorted(s, reverse=True)[:2]
        lead = (first - second) / (stdev(s) + EPS if normalize else 1.0)
        return [lead if i == s.index(first) else 0.0 for i in range(len(s))]

    return group


def _rloo(raw: bool) -> Oracle:
    def group(s: list[float], n: list[int]) -> list[float]:
        if len(s) == 1:
            return s if raw else [0.0]
        return [x - fmean([*s[:i], *s[i + 1 :]]) for i, x in enumerate(s)]

    return group


def _opo(s: list[float], n: list[int]) -> list[float]:
    base = sum(a * b for a, b in zip(s, n)) / sum(n) if len(s) > 1 else 0.0
    return [x - base for x in s]


def _opmd(tau: float) -> Oracle:
    def group(s: list[float], n: list[int]) -> list[float]:
        value = tau * math.log(fmean(math.exp(x / tau) for x in s)) if len(s) > 1 else 0.0
        return [x - value for x in s]

    return group


def _asymre(shift: float) -> Oracle:
    return lambda s, n: [x - ((fmean(s) if len(s) > 1 else 0.0) + shift) for x in s]


def _maxrl(s: list[float], n: list[int]) -> list[float]:
    return [(x - fmean(s)) / (fmean(s) + EPS) for x in s] if len(s) > 1 else s


def _best(s: list[float], n: list[int]) -> list[float]:
    return [(x == max(s)) / s.count(max(s)) for x in s]


def _grpo_with(**keys: object) -> Run:
    keys = {"normalize_std": True, "std_epsilon": EPS, **keys}
    return lambda b, r: grpo(b, reward_N=r, **keys)[0]  # type: ignore[arg-type]


CASES: dict[str, tuple[Run, Oracle]] = {
    "grpo": (_grpo_with(), _grpo(True)),
    "grpo without std": (_grpo_with(normalize_std=False), _grpo(False)),
    "grpo ddof 0": (_grpo_with(std_ddof=0), _grpo(True, ddof=0)),
    "grpo floor": (_grpo_with(std_floor=1e-3), _grpo(True, floor=1e-3)),
    "grpo high floor": (_grpo_with(std_floor=0.7), _grpo(True, floor=0.7)),
    "passk": (
        lambda b, r: grpo_passk(b, reward_N=r, normalize_std=True, std_epsilon=EPS)[0],
        _passk(True),
    ),
    "passk without std": (
        lambda b, r: grpo_passk(b, reward_N=r, normalize_std=False, std_epsilon=EPS)[0],
        _passk(False),
    ),
    "rloo": (lambda b, r: rloo(b, reward_N=r)[0], _rloo(raw=False)),
    "rloo raw": (lambda b, r: rloo(b, reward_N=r, single_rollout="raw")[0], _rloo(raw=True)),
    "rec": (lambda b, r: rec(b, reward_N=r, normalize_std=False, std_epsilon=EPS)[0], _grpo(False)),
    "rec std": (lambda b, r: rec(b, reward_N=r, normalize_std=True, std_epsilon=EPS)[0], _grpo(True, ddof=0)),
    "opo": (lambda b, r: opo(b, reward_N=r)[0], _opo),
    "opmd mean": (lambda b, r: opmd(b, reward_N=r, opmd_baseline="mean", tau=0.3)[0], _grpo(False)),
    "opmd": (lambda b, r: opmd(b, reward_N=r, opmd_baseline="logavgexp", tau=0.3)[0], _opmd(0.3)),
    "asymre": (lambda b, r: asymre(b, reward_N=r, baseline_shift=-0.1)[0], _asymre(-0.1)),
    "maxrl": (lambda b, r: maxrl(b, reward_N=r, std_epsilon=EPS)[0], _maxrl),
    "best": (lambda b, r: best(b, reward_N=r)[0], _best),
}


def by_loops(batch: Batch, reward_N: Tensor, oracle: Oracle) -> list[float | None]:
    """Group by group; rollouts without a sampled token are in none."""
    tokens = by_rollout(batch, reward_N)
    out: list[float | None] = [None] * batch.rollouts
    for group in set(batch.group_R.tolist()):
        rows = [r for r, g in enumerate(batch.group_R.tolist()) if g == group and tokens[r]]
        if rows:
            found = oracle([math.fsum(tokens[r]) for r in rows], [len(tokens[r]) for r in rows])
            for r, x in zip(rows, found, strict=True):
                out[r] = x
    return out


@pytest.mark.parametrize("name", list(CASES))
@given(seed=st.integers(0, 10_000), few=st.booleans())
@FEW
def test_against_a_loop(name: str, seed: int, few: bool) -> None:
    batch = coarse(seed) if few else ragged(seed)
    run, oracle = CASES[name]
    reward_N = token_rewards(batch, kl_coef=0.0 if few else 0.1, estimator="k3")
    got, expected = per_rollout(batch, run(batch, reward_N)), by_loops(batch, reward_N, oracle)
    for x, y in zip(got, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            # where a uniform group's float64 mean misses by a bit, 1 / epsilon makes it 1e-10 of the scores
            assert x == pytest.approx(y, rel=1e-9, abs=1e-9)


# ---------------------------------------------------------------- numbers by hand


def test_grpo_variants_by_hand() -> None:
    # Group 0: 1, 3: mean 2, std sqrt(2) or (ddof 0) 1. Group 1: 5 alone. All of them: mean 3, std 2 or sqrt(8/3).
    batch = make_batch([["pa", "paa"], ["pa"]], [1, 3, 5])
    r = token_rewards(batch)
    root = math.sqrt(2) + EPS
    assert per_rollout(batch, _grpo_with()(batch, r)) == pytest.approx([-1 / root, 1 / root, 5 / (1 + EPS)])
    ddof0 = per_rollout(batch, _grpo_with(std_ddof=0)(batch, r))
    assert ddof0 == pytest.approx([-1 / (1 + EPS), 1 / (1 + EPS), 5 / (1 + EPS)], rel=1e-12)
    whole = per_rollout(batch, _grpo_with(std_scope="batch")(batch, r))
    assert whole == pytest.approx([-1 / (2 + EPS), 1 / (2 + EPS), 5 / (2 + EPS)], rel=1e-12)
    both = per_rollout(batch, _grpo_with(std_scope="batch", std_ddof=0)(batch, r))
    below = math.sqrt(8 / 3) + EPS
    assert both == pytest.approx([-1 / below, 1 / below, 5 / below], rel=1e-12)
    # The floor is under the standard deviation, the epsilon comes on top: here 3 + EPS, for the lone rollout too.
    floored = per_rollout(batch, _grpo_with(std_floor=3.0)(batch, r))
    assert floored == pytest.approx([-1 / (3 + EPS), 1 / (3 + EPS), 5 / (3 + EPS)], rel=1e-12)


def test_the_batch_s_deviation_of_a_single_rollout_is_1() -> None:
    batch = make_batch([["pa"]], [5.0])
    adv_N = _grpo_with(std_scope="batch")(batch, token_rewards(batch))
    assert per_rollout(batch, adv_N) == pytest.approx([5 / (1 + EPS)], rel=1e-12)


def test_rank_penalty_by_hand() -> None:
    # Mean log-probs -1 (over two tokens), -2, -0.5: ranks 1, 0, 2 of 3. Penalty 0.3: factors 0.9, 1, 0.8.
    # Rewards 1, 1, 0: 0.9, 1, 0; mean 1.9 / 3.
    batch = make_batch([["paa", "pa", "pa"]], [1, 1, 0])
    batch = replace(batch, logp_sample_N=doubles([0, -0.5, -1.5, 0, -2.0, 0, -0.5]))
    adv_N = _grpo_with(normalize_std=False, rank_penalty=0.3)(batch, token_rewards(batch))
    mean = 1.9 / 3
    assert per_rollout(batch, adv_N) == pytest.approx([0.9 - mean, 1 - mean, -mean], rel=1e-12)


def test_equally_likely_replies_share_a_rank_and_the_lone_one_keeps_its_reward() -> None:
    batch = make_batch([["pa", "pa", "pa"], ["pa"]], [1, 1, 0, 1])
    batch = replace(batch, logp_sample_N=doubles([0, -1, 0, -1, 0, -2, 0, -1]))
    adv_N = _grpo_with(normalize_std=False, rank_penalty=0.6)(batch, token_rewards(batch))
    # Ranks 1, 1, 0: factors 0.8, 0.8, 1; rewards 0.8, 0.8, 0.
    mean = 1.6 / 3
    assert per_rollout(batch, adv_N) == pytest.approx([0.8 - mean, 0.8 - mean, -mean, 1.0], rel=1e-12)


def test_passk_by_hand() -> None:
    # 1, 4, 2: the best leads by 2; std of the three sqrt(7/3). Two that share the first place: nothing.
    batch = make_batch([["pa", "paa", "pa"], ["pa", "pa"], ["pa"]], [1, 4, 2, 7, 7, 3])
    r = token_rewards(batch)
    adv_N, _ = grpo_passk(batch, reward_N=r, normalize_std=False, std_epsilon=EPS)
    assert per_rollout(batch, adv_N) == [0, 2, 0, 0, 0, 0]
    adv_N, _ = grpo_passk(batch, reward_N=r, normalize_std=True, std_epsilon=EPS)
    assert per_rollout(batch, adv_N)[1] == pytest.approx(2 / (math.sqrt(7 / 3) + EPS), rel=1e-12)


def test_opo_by_hand() -> None:
    # Lengths 3 and 1, rewards 1 and 5: baseline (3 + 5) / 4 = 2.
    batch = make_batch([["paoaa", "pa"], ["pa"]], [1, 5, 4])
    assert per_rollout(batch, opo(batch, reward_N=token_rewards(batch))[0]) == [-1, 3, 4]


def test_gpg_by_hand() -> None:
    # As verl: five rollouts, two of them with a reward: alpha = 5 / 2. Means 0.5 and 0.
    batch = make_batch([["pa", "pa"], ["pa", "paa", "p", "pa"]], [1, 0, 0, 0, 9, 2])
    adv_N, _ = gpg(batch, reward_N=token_rewards(batch), gpg_alpha="nonzero")
    third = 2.5 * 2 / 3
    expected = [1.25, -1.25, -third, -third, None, 2 * third]
    assert per_rollout(batch, adv_N) == [x if x is None else pytest.approx(x, rel=1e-12) for x in expected]


def test_gpg_by_groups_by_hand() -> None:
    # The paper's: of seven rollouts three are in groups that are all right or all wrong: alpha = 7 / 4.
    batch = make_batch([["pa", "pa"], ["pa", "pa", "pa"], ["pa", "pa"]], [1, 0, 1, 1, 1, 0, 1])
    adv_N, _ = gpg(batch, reward_N=token_rewards(batch))
    x = 7 / 4 / 2
    assert per_rollout(batch, adv_N) == pytest.approx([x, -x, 0, 0, 0, -x, x], rel=1e-12)


def test_gpg_without_any_reward() -> None:
    batch = make_batch([["pa", "pa"]], [0, 0])
    assert (gpg(batch, reward_N=token_rewards(batch))[0] == 0).all()


def test_opmd_by_hand() -> None:
    # tau 2: value 2 log((e^0 + e^1) / 2) of rewards 0 and 2.
    batch = make_batch([["pa", "pa"], ["pa"]], [0, 2, 3])
    adv_N, _ = opmd(batch, reward_N=token_rewards(batch), opmd_baseline="logavgexp", tau=2.0)
    value = 2 * math.log((1 + math.e) / 2)
    assert per_rollout(batch, adv_N) == pytest.approx([-value, 2 - value, 3], rel=1e-12)


def test_opmd_at_a_low_temperature_is_the_best_and_stays_finite() -> None:
    batch = make_batch([["pa", "pa"]], [1000.0, -1000.0])
    adv_N, _ = opmd(batch, reward_N=token_rewards(batch), opmd_baseline="logavgexp", tau=1e-3)
    assert per_rollout(batch, adv_N) == pytest.approx([1e-3 * math.log(2), -2000 + 1e-3 * math.log(2)])


def test_asymre_maxrl_and_best_by_hand() -> None:
    batch = make_batch([["pa", "paa", "pa", "pa"]], [1, 0, 1, 0])
    r = token_rewards(batch)
    got = per_rollout(batch, asymre(batch, reward_N=r, baseline_shift=-0.1)[0])
    assert got == pytest.approx([0.6, -0.4, 0.6, -0.4])
    got = per_rollout(batch, maxrl(batch, reward_N=r, std_epsilon=EPS)[0])
    assert got == pytest.approx([0.5 / (0.5 + EPS), -0.5 / (0.5 + EPS)] * 2)
    assert per_rollout(batch, best(batch, reward_N=r)[0]) == [0.5, 0, 0.5, 0]


def test_gdpo_normalises_each_part_then_whitens_the_sum() -> None:
    # Groups of two: a part of 1 and 0 gives +-s, s = 0.5 / (sqrt(0.5) + eps); equal parts give 0; alone: the part.
    batch = make_batch([["pa", "pa"], ["pa", "pa"], ["pa"]])
    part_RC = torch.tensor([[1.0, 0.0], [0.0, 0.0], [5.0, 0.0], [5.0, 10.0], [2.0, 1.0]])
    batch = replace(batch, part_RC=part_RC.double())
    s = 0.5 / (0.5**0.5 + EPS)
    u = 5 / (50**0.5 + EPS)
    one = 1 / (1 + EPS)
    for weights, total in (
        (None, [s, -s, -u, u, 3 * one]),
        ([1.0, 0.5], [s, -s, -u / 2, u / 2, 2.5 * one]),
    ):
        adv_N, _ = gdpo(batch, parts=["a", "b"], part_weights=weights, normalize_std=True, std_epsilon=EPS)
        centre, scale = fmean(total), (std(total, 1) ** 2 + 1e-8) ** 0.5
        assert per_rollout(batch, adv_N) == pytest.approx([(x - centre) / scale for x in total], rel=1e-9)


def test_a_part_that_no_reward_gave_is_named() -> None:
    task = Task(uid=0, source="s", prompt="p")
    rollout = Rollout.one_strand(
        task=task,
        index=0,
        token_ids=[1, 2],
        mask=[0, 1],
        logprobs=[0.0, -1.0],
        sample_logprobs=[0.0, -1.0],
        versions=[-1, 0],
        finish_reason="stop",
        reward=1.0,
        reward_parts={"score": 1.0, "score/right": 2.0},
    )
    groups = [Group(task, (rollout,))]
    assert with_parts(pack(groups), groups, ["score/right"]).part_RC.tolist() == [[2.0]]
    with pytest.raises(WhetError, match=r"no reward returned a part 'right'; there are: score, score/right"):
        with_parts(pack(groups), groups, ["right"])


def test_rec_leaves_out_what_resampling_dropped() -> None:
    # 4 is dropped: the others' mean is 1 and their std (n below) 1.
    batch = replace(
        make_batch([["pa", "pa", "pa"]], [0, 2, 4]), count_R=torch.tensor([1.0, 1.0, 0.0]).double()
    )
    adv_N, _ = rec(batch, reward_N=token_rewards(batch), normalize_std=True, std_epsilon=EPS)
    assert per_rollout(batch, adv_N) == pytest.approx([-1 / (1 + EPS), 1 / (1 + EPS), 0], rel=1e-12)


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # Centred: 1 (two tokens), -1 (one), 3 alone (one). Tokens 1, 1, -1, 3: mean 1, variance (0 + 0 + 4 + 4) / 3.
    batch = make_batch([["paa", "pa"], ["pa"]], [2, 0, 3])
    adv_N, _ = reinforce_plus_plus_baseline(batch, reward_N=token_rewards(batch))
    scale = math.sqrt(8 / 3 + 1e-8)
    assert per_rollout(batch, adv_N) == pytest.approx([0, -2 / scale, 2 / scale], abs=1e-12)


@given(seed=st.integers(0, 10_000))
@FEW
def test_reinforce_plus_plus_baseline_against_a_loop(seed: int) -> None:
    batch = ragged(seed)
    reward_N = token_rewards(batch)
    centred = by_loops(batch, reward_N, _grpo(False))
    lengths = [len(x) for x in by_rollout(batch, reward_N)]
    flat = [x for x, n in zip(centred, lengths) if x is not None for _ in range(n)]
    scale = math.sqrt(sum((x - fmean(flat)) ** 2 for x in flat) / (len(flat) - 1) + 1e-8)
    got = per_rollout(batch, reinforce_plus_plus_baseline(batch, reward_N=reward_N)[0])
    for x, y in zip(got, centred, strict=True):
        if x is not None and y is not None:
            assert x == pytest.approx((y - fmean(flat)) / scale, rel=1e-9, abs=1e-9)


# ---------------------------------------------------------------- laws

SHIFT = ["grpo", "grpo without std", "grpo ddof 0", "passk", "rloo", "rec", "opo", "opmd", "best"]
"""A constant added to all rewards changes nothing (in groups of two and more)."""
TINY = 1e-15
SCALE: dict[str, Run] = {
    "grpo": _grpo_with(std_epsilon=TINY),
    "grpo ddof 0": _grpo_with(std_epsilon=TINY, std_ddof=0),
    "grpo batch": _grpo_with(std_epsilon=TINY, std_scope="batch"),
    "passk": lambda b, r: grpo_passk(b, reward_N=r, normalize_std=True, std_epsilon=TINY)[0],
    "rec": lambda b, r: rec(b, reward_N=r, normalize_std=True, std_epsilon=TINY)[0],
    "best": CASES["best"][0],
    "maxrl": lambda b, r: maxrl(b, reward_N=r, std_epsilon=TINY)[0],
}
"""Nor does a factor."""
LINEAR = ["grpo without std", "passk without std", "rloo", "rec", "opo"]
"""A factor is a factor of the advantages."""


def compared(seed: int) -> Batch:
    """A ragged batch without groups of one, and without rollouts that sampled nothing."""
    batch = ragged(seed, groups=6)
    sampled = [bool(x) for x in by_rollout(batch, batch.reward_R[batch.rollout_N])]
    batch = select(batch, torch.tensor([r for r, s in enumerate(sampled) if s]))
    sizes = torch.bincount(batch.group_R)[batch.group_R]
    return select(batch, (sizes > 1).nonzero().flatten())


@pytest.mark.parametrize("name", SHIFT)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_a_constant_changes_nothing(name: str, seed: int) -> None:
    batch = compared(seed)
    run, _ = CASES[name]
    other = replace(batch, reward_R=batch.reward_R + 11)
    torch.testing.assert_close(
        run(other, token_rewards(other)), run(batch, token_rewards(batch)), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("name", list(SCALE))
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_a_factor_changes_nothing_either(name: str, seed: int) -> None:
    batch = compared(seed)
    other = replace(batch, reward_R=batch.reward_R * 3)
    got, was = (SCALE[name](b, token_rewards(b)) for b in (other, batch))
    torch.testing.assert_close(got, was, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LINEAR)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_a_factor_is_one_of_the_advantages(name: str, seed: int) -> None:
    batch = compared(seed)
    run, _ = CASES[name]
    other = replace(batch, reward_R=batch.reward_R * 3)
    torch.testing.assert_close(
        run(other, token_rewards(other)), 3 * run(batch, token_rewards(batch)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", [*CASES, "rpp baseline"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_order_inside_a_group_and_of_groups_does_not_matter(name: str, seed: int) -> None:
    batch = ragged(seed)
    run = CASES[name][0] if name in CASES else lambda b, r: reinforce_plus_plus_baseline(b, reward_N=r)[0]
    order = sorted(range(batch.rollouts), key=lambda r: (-int(batch.group_R[r]), -r))
    turned = reordered(batch, order)
    was, now = (by_rollout(b, run(b, token_rewards(b))) for b in (batch, turned))
    for place, row in enumerate(order):
        assert now[place] == pytest.approx(was[row], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["grpo", "grpo without std", "rec std", "opo", "grpo high floor", "rloo"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e8])
def test_a_uniform_group_gets_exactly_zero(name: str, reward: float) -> None:
    batch = make_batch([["pa", "paaa", "poaa"] * 2 + ["pa"]], [reward] * 7, dtype=torch.float32)
    adv_N = CASES[name][0](batch, token_rewards(batch))
    assert adv_N.dtype == torch.float32
    assert (adv_N == 0).all()


@pytest.mark.parametrize("name", list(CASES))
def test_nothing_sampled_at_all(name: str) -> None:
    batch = make_batch([["pp", "p"]], [1.0, 0.0])
    assert CASES[name][0](batch, token_rewards(batch)).tolist() == [0, 0, 0]


# ---------------------------------------------------------------- whitening


def test_whiten_with_n_below() -> None:
    # 1, 3, 5: mean 3, variance 8 / 3.
    got = whiten(doubles([1.0, 3.0, 99, 5.0]), torch.tensor([True, True, False, True]), ddof=0)
    assert got.tolist() == pytest.approx([-2 / math.sqrt(8 / 3), 0, 0, 2 / math.sqrt(8 / 3)], rel=1e-14)


def test_whiten_with_n_below_bounds_the_variance() -> None:
    # Variance 1e-10 is below 1e-8, so the deviation counts as 1e-4.
    got = whiten(doubles([0.0, 2e-5]), torch.tensor([True, True]), ddof=0)
    assert got.tolist() == pytest.approx([-0.1, 0.1], rel=1e-9)
    assert whiten(doubles([5.0]), torch.tensor([True]), ddof=0).tolist() == [0]


# ---------------------------------------------------------------- over the whole batch, against loops


def groups_of(batch: Batch) -> list[list[int]]:
    """The rollouts of each group that sampled something."""
    out: dict[int, list[int]] = {}
    for row in range(batch.rollouts):
        if bool((batch.mask_N & (batch.rollout_N == row)).any()):
            out.setdefault(int(batch.group_R[row]), []).append(row)
    return list(out.values())


def check_against(batch: Batch, adv_N: Tensor, wanted: dict[int, float]) -> None:
    for row, got in enumerate(per_rollout(batch, adv_N.double())):
        if row in wanted:
            assert got == pytest.approx(wanted[row], rel=1e-9, abs=1e-9)


@given(seed=st.integers(0, 10_000), by_groups=st.booleans())
@FEW
def test_gpg_against_a_loop(seed: int, by_groups: bool) -> None:
    batch = coarse(seed)
    batch = replace(batch, reward_R=batch.reward_R.double())
    groups = groups_of(batch)
    score = {row: float(batch.reward_R[row]) for rows in groups for row in rows}
    mixed = [rows for rows in groups if len(rows) == 1 or len({score[row] for row in rows}) > 1]
    counted = sum(map(len, mixed)) if by_groups else sum(x != 0 for x in score.values())
    alpha = len(score) / max(1, counted)
    wanted = {}
    for rows in groups:
        mean = fmean(score[row] for row in rows) if len(rows) > 1 else 0.0
        wanted |= {row: alpha * (score[row] - mean) for row in rows}
    alpha_of = "mixed_groups" if by_groups else "nonzero"
    check_against(batch, gpg(batch, reward_N=token_rewards(batch), gpg_alpha=alpha_of)[0], wanted)


@given(seed=st.integers(0, 10_000))
@FEW
def test_the_deviation_of_the_batch_against_a_loop(seed: int) -> None:
    batch = coarse(seed)
    batch = replace(batch, reward_R=batch.reward_R.double())
    groups = groups_of(batch)
    score = {row: float(batch.reward_R[row]) for rows in groups for row in rows}
    scale = stdev(score.values()) if len(score) > 1 else 1.0
    wanted = {}
    for rows in groups:
        mean = fmean(score[row] for row in rows) if len(rows) > 1 else 0.0
        wanted |= {row: (score[row] - mean) / (scale + EPS) for row in rows}
    adv_N, _ = grpo(
        batch, reward_N=token_rewards(batch), normalize_std=True, std_epsilon=EPS, std_scope="batch"
    )
    check_against(batch, adv_N, wanted)


@given(seed=st.integers(0, 10_000), penalty=st.sampled_from([0.1, 0.5, 1.0]))
@FEW
def test_the_rank_penalty_against_a_loop(seed: int, penalty: float) -> None:
    batch = coarse(seed)
    batch = replace(batch, reward_R=batch.reward_R.double())
    wanted = {}
    for rows in groups_of(batch):
        likely = {
            r: fmean(batch.logp_sample_N[batch.mask_N & (batch.rollout_N == r)].double().tolist())
            for r in rows
        }
        lowered = {}
        for row in rows:
            rank = sum(likely[other] < likely[row] for other in rows)
            part = 1 - penalty * rank / len(rows) if len(rows) > 1 else 1.0
            lowered[row] = float(batch.reward_R[row]) * part
        mean, scale = (fmean(lowered.values()), stdev(lowered.values())) if len(rows) > 1 else (0.0, 1.0)
        wanted |= {row: (lowered[row] - mean) / (scale + EPS) for row in rows}
    adv_N, _ = grpo(
        batch, reward_N=token_rewards(batch), normalize_std=True, std_epsilon=EPS, rank_penalty=penalty
    )
    check_against(batch, adv_N, wanted)


@pytest.mark.parametrize("parts", [(0.1, 0.2, 0.0), (0.3, 0.0, 0.0), (0.7, -0.5, 0.1), (0.05, 0.05, 0.15)])
def test_how_a_reward_is_spread_over_turns_makes_no_rollout_better(parts: tuple[float, float, float]) -> None:
    """The rewards of a group's rollouts are equal; what the environment gave for their turns is not."""
    batch = make_batch([["paoaoa", "paoaoa", "paoaoa"]], [0.3] * 3)
    batch = replace(batch, reward_R=batch.reward_R.float())
    turn_reward_N = torch.zeros(batch.tokens)
    turn_reward_N[batch.mask_N] = torch.tensor([*parts, 0.1, 0.1, 0.1, 0.0, 0.0, 0.3])
    batch = replace(batch, turn_reward_N=turn_reward_N)
    reward_N = token_rewards(batch)
    torch.testing.assert_close(batch.sum_R(reward_N), batch.reward_R)
    assert not grpo(batch, reward_N=reward_N, normalize_std=True, std_epsilon=EPS)[0].any()
    assert not grpo_passk(batch, reward_N=reward_N, normalize_std=True, std_epsilon=EPS)[0].any()
    assert not win_rate(batch, reward_N=reward_N)[0].any()
    assert per_rollout(batch, best(batch, reward_N=reward_N)[0]) == pytest.approx([1 / 3] * 3)
