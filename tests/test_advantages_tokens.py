"""Advantages with a number for every token or turn: numbers worked by hand, naive float64 oracles, laws."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import by_rollout, doubles, make_batch, ragged
from whet.algos.advantages import (
    ADVANTAGES,
    distill,
    gae,
    optimal_token_baseline,
    reinforce,
    reinforce_plus_plus,
    remax,
    reward,
    tir_optimal_token_baseline,
    token_rewards,
    whiten,
)
from whet.algos.segments import group_max, strictly_below, turn_of_M
from whet.algos.turns import gigpo, step_wise_grpo, turn_level_gae
from whet.batch import Batch, select
from whet.types import WhetError

EPS = 1e-6
FEW = settings(max_examples=40, deadline=None)


def with_collisions(batch: Batch, seed: int = 5) -> Batch:
    noise = torch.rand(batch.tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return replace(batch, collision_N=noise * batch.mask_N)


def turns_of(batch: Batch) -> list[list[list[int]]]:
    """For each rollout the positions in N of each of its turns."""
    out: list[list[list[int]]] = [[] for _ in range(batch.rollouts)]
    before = (-1, -1)
    for n, (row, mask) in enumerate(zip(batch.rollout_N.tolist(), batch.mask_N.tolist(), strict=True)):
        if mask:
            if before != (row, n - 1):
                out[row].append([])
            out[row][-1].append(n)
            before = (row, n)
    return out


def groups_of(batch: Batch) -> dict[int, list[int]]:
    """Rollouts that sampled something, by group."""
    found: dict[int, list[int]] = defaultdict(list)
    for row, turns in enumerate(turns_of(batch)):
        if turns:
            found[int(batch.group_R[row])].append(row)
    return found


# ---------------------------------------------------------------- reinforce++ and remax


def test_reinforce_plus_plus_by_hand() -> None:
    # gamma 0.5, reward 8 at the end of the second turn: 4, 8 there, nothing in the first turn (0, 0).
    batch = make_batch([["paaoaa"]], [8.0])
    adv_N, _ = reinforce_plus_plus(batch, reward_N=token_rewards(batch), gamma=0.5, reset_at_turns=True)
    # Mean 3, variance (9 + 9 + 1 + 25) / 3 = 44 / 3.
    scale = math.sqrt(44 / 3 + 1e-8)
    expected = [0, -3 / scale, -3 / scale, 0, 1 / scale, 5 / scale]
    assert adv_N.tolist() == pytest.approx(expected, rel=1e-12)


def test_reinforce_plus_plus_of_two_turns_by_hand() -> None:
    # As verl 0.9.1: the return crosses the environment's token. Rewards 1 and 0: returns 1 1 and 0 0, mean 1/2,
    # deviation sqrt(4 * 0.25 / 3).
    batch = make_batch([["paoa", "paoa"]], [1.0, 0.0])
    adv_N, _ = reinforce_plus_plus(batch, reward_N=token_rewards(batch), gamma=1.0)
    x = 0.5 / math.sqrt(1 / 3 + 1e-8)
    assert adv_N.tolist() == pytest.approx([0, x, 0, x, 0, -x, 0, -x], rel=1e-12)
    assert x == pytest.approx(0.87, abs=5e-3)
    # A gap of the environment's discounts nothing: 0.5 before the last token, however long it is.
    apart = [make_batch([[text]], [1.0]) for text in ("paoa", "paooooa")]
    first = [reinforce_plus_plus(b, reward_N=token_rewards(b), gamma=0.5)[0][1].item() for b in apart]
    assert first[0] == first[1]


@given(
    seed=st.integers(0, 10_000), gamma=st.sampled_from([0.0, 0.5, 0.97, 1.0]), reset_at_turns=st.booleans()
)
@FEW
def test_reinforce_plus_plus_against_a_loop(seed: int, gamma: float, reset_at_turns: bool) -> None:
    batch = ragged(seed)
    reward_N = token_rewards(batch, kl_coef=0.1, estimator="k1")
    returns = torch.zeros(batch.tokens).double()
    for row in range(batch.rollouts):
        carry = 0.0
        for n in reversed((batch.rollout_N == row).nonzero().flatten().tolist()):
            if batch.mask_N[n]:
                carry = returns[n] = float(reward_N[n]) + gamma * carry
            elif reset_at_turns:
                carry = 0.0
    sampled = returns[batch.mask_N].tolist()
    scale = math.sqrt(stdev(sampled) ** 2 + 1e-8)
    got, _ = reinforce_plus_plus(batch, reward_N=reward_N, gamma=gamma, reset_at_turns=reset_at_turns)
    expected = torch.where(batch.mask_N, (returns - fmean(sampled)) / scale, 0.0)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_in_one_turn_it_is_the_whitened_return() -> None:
    batch = make_batch([["paaa", "paa"], ["pa"]])
    r = token_rewards(batch)
    a, _ = reinforce_plus_plus(batch, reward_N=r, gamma=0.9)
    b, _ = reinforce(batch, reward_N=r, gamma=0.9)
    assert torch.equal(a, whiten(b, batch.mask_N))


def test_remax_by_hand() -> None:
    # Greedy replies got 1 and -2. Token rewards -0.5 and 3 in the first rollout: returns 2.5 and 3.
    batch = make_batch([["paoa"], ["paa"]], [3.0, 1.0])
    batch = replace(batch, baseline_R=doubles([1.0, -2.0]))
    r = token_rewards(batch)
    r[1] = -0.5
    adv_N, return_N = remax(batch, reward_N=r)
    assert adv_N.tolist() == [0, 1.5, 0, 2, 0, 3, 3]
    assert return_N is None


@given(seed=st.integers(0, 10_000))
@FEW
def test_remax_against_a_loop(seed: int) -> None:
    batch = ragged(seed)
    batch = replace(batch, baseline_R=batch.reward_R.flip(0))
    reward_N = token_rewards(batch, kl_coef=0.2, estimator="k3")
    got = by_rollout(batch, remax(batch, reward_N=reward_N)[0])
    for row, r in enumerate(by_rollout(batch, reward_N)):
        expected = [math.fsum(r[t:]) - float(batch.reward_R.flip(0)[row]) for t in range(len(r))]
        assert got[row] == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_remax_with_its_own_rewards_as_baselines_is_zero() -> None:
    batch = ragged(4)
    batch = replace(batch, baseline_R=batch.reward_R)
    torch.testing.assert_close(
        remax(batch, reward_N=token_rewards(batch))[0], torch.zeros(batch.tokens).double()
    )


# ---------------------------------------------------------------- distill, reward


def test_distill_by_hand() -> None:
    batch = make_batch([["paoa"]], [9.0])
    batch = replace(
        batch, logp_old_N=doubles([7, -1.0, 7, -2.0]), logp_ref_N=doubles([5, -0.25, 5, -math.inf])
    )
    adv_N, _ = distill(batch, reward_N=token_rewards(batch), distill_coef=2.0)
    assert adv_N.tolist() == [0, 1.5, 0, -math.inf]


def test_distill_by_a_mixture_by_hand() -> None:
    """Policy 1/2, teacher 1/4: m = 3/8 at b = 1/2, and 0.4 at b = 0.4."""
    batch = make_batch([["pa"]], [9.0])
    batch = replace(batch, logp_old_N=doubles([0, math.log(0.5)]), logp_ref_N=doubles([0, math.log(0.25)]))
    for b, mixed in ((0.5, 0.375), (0.4, 0.4)):
        adv_N, _ = distill(
            batch, reward_N=token_rewards(batch), distill_coef=2.0, distill_estimator="jsd", distill_mixture=b
        )
        divergence = b * math.log(0.25 / mixed) + (1 - b) * math.log(0.5 / mixed)
        assert adv_N.tolist() == pytest.approx([0, -2 * divergence])


def test_distill_by_another_estimator_is_minus_its_value() -> None:
    batch = make_batch([["pa"]], [0.0])
    d = replace(batch, logp_old_N=torch.tensor([0.0, -1.0]), logp_ref_N=torch.tensor([0.0, -3.0]))
    for estimator, value in (("k1", 2.0), ("k2", 2.0), ("abs", 2.0), ("low_var_kl", 2.0 - 1 + 0.1353353)):
        adv_N, _ = distill(d, reward_N=token_rewards(batch), distill_coef=0.5, distill_estimator=estimator)
        assert adv_N.tolist() == pytest.approx([0.0, -0.5 * value])


def test_distill_with_later_tokens_by_hand() -> None:
    """Gaps 1, (a given token), 2, 4: the last 4, before it 2 + 0.5 * 4 = 4, the first 1 + 0.5 * 4 = 3."""
    batch = make_batch([["paoaa"], ["pa"]], [9.0, 0.0])
    old, teacher = doubles([0, -3, 7, -3, -5, 0, -1]), doubles([0, -2, 9, -1, -1, 0, -0.5])
    batch = replace(batch, logp_old_N=old, logp_ref_N=teacher)
    adv_N, _ = distill(batch, reward_N=token_rewards(batch), distill_coef=2.0, distill_discount=0.5)
    assert adv_N.tolist() == pytest.approx([0, 6, 0, 8, 8, 0, 1])


def test_distill_of_the_teacher_itself_is_nothing_and_rewards_do_not_matter() -> None:
    batch = ragged(2)
    same = replace(batch, logp_ref_N=batch.logp_old_N)
    assert (distill(same, reward_N=token_rewards(same), distill_coef=1.0)[0] == 0).all()
    other = replace(batch, reward_R=batch.reward_R + 3)
    a, _ = distill(batch, reward_N=token_rewards(batch), distill_coef=1.0)
    assert torch.equal(a, distill(other, reward_N=token_rewards(other), distill_coef=1.0)[0])


def test_reward_is_the_score_at_every_token() -> None:
    batch = make_batch([["paoa", "p"]], [3.0, 4.0])
    assert reward(batch, reward_N=token_rewards(batch))[0].tolist() == [0, 3, 0, 3, 0]


# ---------------------------------------------------------------- optimal token baseline


def otb_by_loops(batch: Batch, reward_N: torch.Tensor, *, tir: bool, tail: bool) -> torch.Tensor:
    assert batch.logp_old_N is not None
    assert batch.collision_N is not None
    out = torch.zeros(batch.tokens).double()
    strands = list(zip(batch.rollout_S.tolist(), batch.prompt_S.tolist(), strict=True))
    prompt = [next(p for r, p in strands if r == row) for row in range(batch.rollouts)]
    start = [batch.start_S.tolist()[s] for s in batch.segment_N.tolist()]  # of each token's strand
    cells: dict[tuple[int, int], list[tuple[int, float, float]]] = defaultdict(list)
    for row, turns in enumerate(turns_of(batch)):
        places = [n for turn in turns for n in turn]
        total = 0.0
        for k, n in enumerate(places):
            p = math.exp(float(batch.logp_old_N[n]))
            w = 1 - 2 * p + float(batch.collision_N[n])
            if batch.correction_N is not None:
                w *= float(batch.correction_N[n]) ** 2
            total += w
            later = math.fsum(float(reward_N[m]) for m in places[k:])
            t = k if tir else n - start[n] - prompt[row]
            cells[int(batch.group_R[row]), t].append((n, later, total))
    sizes = {g: len(rows) for g, rows in groups_of(batch).items()}
    for (g, _), cell in cells.items():
        base = sum(r * w for _, r, w in cell) / (sum(w for _, _, w in cell) + 1e-8)
        for n, r, _ in cell:
            out[n] = r if sizes[g] == 1 or (tail and len(cell) == 1) else r - base
    return out


@pytest.mark.parametrize("tir", [False, True])
@given(seed=st.integers(0, 10_000), corrected=st.booleans(), tail=st.booleans())
@FEW
def test_optimal_token_baseline_against_a_loop(tir: bool, seed: int, corrected: bool, tail: bool) -> None:
    batch = with_collisions(ragged(seed), seed)
    if corrected:
        batch = replace(batch, correction_N=1 + 0.5 * batch.position_N.double().cos())
    reward_N = token_rewards(batch, kl_coef=0.1, estimator="k1")
    function = tir_optimal_token_baseline if tir else optimal_token_baseline
    got, _ = function(batch, reward_N=reward_N, handle_zero_tail=tail)
    expected = otb_by_loops(batch, reward_N, tir=tir, tail=tail)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def test_optimal_token_baseline_by_hand() -> None:
    # p = 1/2 everywhere; sums of p^2 1/4 and 3/4 in the two rollouts: w = 1/4 and 3/4. Rewards 4 and 0.
    # t = 0: (4 * 1/4 + 0 * 3/4) / 1 = 1. t = 1, only the first: W = 1/2, B = 4 * (1/2) / (1/2) = 4.
    batch = make_batch([["paa", "pa"]], [4.0, 0.0])
    half = math.log(0.5)
    batch = replace(
        batch,
        logp_old_N=doubles([0, half, half, 0, half]),
        collision_N=doubles([0, 0.25, 0.25, 0, 0.75]),
    )
    r = token_rewards(batch)
    for function in (optimal_token_baseline, tir_optimal_token_baseline):
        # Where no other reaches there is no baseline.
        got = function(batch, reward_N=r)[0].tolist()
        assert got == pytest.approx([0, 3, 4, 0, -1], abs=1e-6)
        got = function(batch, reward_N=r, handle_zero_tail=False)[0].tolist()
        assert got == pytest.approx([0, 3, 0, 0, -1], abs=1e-6)


def test_with_equal_costs_it_is_the_mean_of_the_group() -> None:
    batch = make_batch([["paa", "paa", "paa"]], [1.0, 2.0, 6.0])
    batch = replace(batch, logp_old_N=torch.zeros(9).double() - 1, collision_N=torch.ones(9).double())
    got, _ = optimal_token_baseline(batch, reward_N=token_rewards(batch))
    assert by_rollout(batch, got) == [pytest.approx([x, x], abs=1e-6) for x in (-2, -1, 3)]


def test_a_certain_token_costs_nothing_and_divides_by_nothing() -> None:
    batch = make_batch([["pa", "pa"]], [1.0, 2.0])
    batch = replace(batch, logp_old_N=torch.zeros(4).double(), collision_N=torch.ones(4).double())
    assert optimal_token_baseline(batch, reward_N=token_rewards(batch))[0].tolist() == [0, 1, 0, 2]


def test_an_impossible_token_stays_finite() -> None:
    batch = with_collisions(make_batch([["pa", "pa"]], [1.0, 2.0]))
    batch = replace(batch, logp_old_N=doubles([0, -math.inf, 0, -1]))
    assert torch.isfinite(optimal_token_baseline(batch, reward_N=token_rewards(batch))[0]).all()


@pytest.mark.parametrize("function", [optimal_token_baseline, tir_optimal_token_baseline])
def test_collisions_must_be_there(function: object) -> None:
    batch = ragged(0)
    with pytest.raises(WhetError, match="collision_N"):
        function(batch, reward_N=token_rewards(batch))  # type: ignore[operator]


# ---------------------------------------------------------------- turns


def test_step_wise_grpo_by_hand() -> None:
    # Rewards 1 and 3: -1 and 1 over sqrt(2); the first has two turns, the second one.
    batch = make_batch([["paoaa", "pa"], ["paoaoa"]], [1.0, 3.0, 2.0])
    r = token_rewards(batch)
    unit, lone = 1 / (math.sqrt(2) + EPS), 2 / (1 + EPS)
    adv_N, _ = step_wise_grpo(batch, reward_N=r, std_epsilon=EPS, divide_by_turns=False)
    assert by_rollout(batch, adv_N) == [pytest.approx(x) for x in ([-unit] * 3, [unit], [lone] * 3)]
    adv_N, _ = step_wise_grpo(batch, reward_N=r, std_epsilon=EPS, divide_by_turns=True)
    assert by_rollout(batch, adv_N) == [pytest.approx(x) for x in ([-unit / 2] * 3, [unit], [lone / 3] * 3)]


def test_turn_level_gae_by_hand() -> None:
    # gamma = lam = 0.5. Turns of two and one token; values 1 and 2 before them (100 elsewhere); rewards 1 and 3.
    # delta_2 = 3 + 0 - 2 = 1; delta_1 = 1 + 0.5 * 2 - 1 = 1; A_2 = 1, A_1 = 1 + 0.25 * 1 = 1.25; R = A + V.
    batch = make_batch([["paaoao"]], [4.0])
    at = [0.0, 0.5, 0.5, 0.0, 3.0, 0.0]
    batch = replace(batch, value_N=torch.tensor([100, 1, 100, 100, 2, 100]).double())
    adv_N, return_N = turn_level_gae(batch, reward_N=torch.tensor(at).double(), gamma=0.5, lam=0.5)
    assert adv_N.tolist() == [0, 1.25, 1.25, 0, 1, 0]
    assert return_N is not None
    assert return_N.tolist() == [0, 2.25, 2.25, 0, 3, 0]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.9, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("seed", range(4))
def test_turn_level_gae_against_a_loop(seed: int, gamma: float, lam: float) -> None:
    batch = ragged(seed)
    reward_N = token_rewards(batch, kl_coef=0.2)
    adv_N, return_N = turn_level_gae(batch, reward_N=reward_N, gamma=gamma, lam=lam)
    assert batch.value_N is not None
    assert return_N is not None
    mask, segment = batch.mask_N.tolist(), batch.segment_N.tolist()
    for row in range(batch.rollouts):
        turns: list[list[int]] = []
        for n in (batch.rollout_N == row).nonzero().flatten().tolist():
            if not mask[n]:
                continue
            if turns and turns[-1][-1] == n - 1 and segment[n - 1] == segment[n]:
                turns[-1].append(n)
            else:
                turns.append([n])
        advantage, following = 0.0, 0.0
        for turn in reversed(turns):
            value = float(batch.value_N[turn[0]])
            delta = sum(float(reward_N[n]) for n in turn) + gamma * following - value
            advantage, following = delta + gamma * lam * advantage, value
            for n in turn:
                assert float(adv_N[n]) == pytest.approx(advantage, rel=1e-11, abs=1e-12)
                assert float(return_N[n]) == pytest.approx(advantage + value, rel=1e-11, abs=1e-12)
    assert (adv_N[~batch.mask_N] == 0).all()


def test_turns_of_one_token_have_the_gae_of_tokens() -> None:
    batch = make_batch([["paoaoa", "poa"]], [1.0, -2.0])
    given = {"reward_N": token_rewards(batch), "gamma": 0.9, "lam": 0.8}
    for one, other in zip(turn_level_gae(batch, **given), gae(batch, **given)):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def gigpo_batch() -> Batch:
    """Two rollouts of one task, two turns each, and one of another task: prompt 1 1, then what is answered.

    Second turns: the first two rollouts answer `7`; the third too, but to another task.
    """
    batch = make_batch([["ppaoa", "ppaaoa"], ["ppaoa"]], [4.0, 2.0, 9.0])
    ids = batch.token_ids_N.clone()
    ids[~batch.mask_N] = torch.tensor([1, 1, 7, 1, 1, 7, 1, 1, 7])
    return replace(batch, token_ids_N=ids)


def test_gigpo_by_hand() -> None:
    # Episodes: 4 and 2: +-1. Turn returns with gamma 1/2: first turns 2 and 1 (same prompt): +-1/2;
    # second turns 4 and 2, both after `7`: +-1. The third rollout is alone in both.
    batch = gigpo_batch()
    adv_N, _ = gigpo(
        batch, reward_N=token_rewards(batch), normalize_std=False, std_epsilon=EPS, gamma=0.5, turn_weight=2.0
    )
    assert by_rollout(batch, adv_N) == [
        pytest.approx([1 + 2 * 0.5, 1 + 2 * 1.0]),
        pytest.approx([-1 - 2 * 0.5, -1 - 2 * 0.5, -1 - 2 * 1.0]),
        pytest.approx([9.0, 9.0]),
    ]


def test_gigpo_divides_both_by_their_deviation() -> None:
    batch = gigpo_batch()
    adv_N, _ = gigpo(
        batch, reward_N=token_rewards(batch), normalize_std=True, std_epsilon=EPS, gamma=0.5, turn_weight=1.0
    )
    episode = 1 / (math.sqrt(2) + EPS)
    first, second = 0.5 / (math.sqrt(0.5) + EPS), 1 / (math.sqrt(2) + EPS)
    assert by_rollout(batch, adv_N)[0] == pytest.approx([episode + first, episode + second], rel=1e-10)


def test_gigpo_another_answer_is_another_state() -> None:
    batch = gigpo_batch()
    ids = batch.token_ids_N.clone()
    ids[3] = 8
    adv_N, _ = gigpo(
        replace(batch, token_ids_N=ids), reward_N=token_rewards(batch), normalize_std=False, std_epsilon=EPS,
        gamma=0.5, turn_weight=2.0,
    )  # fmt: skip
    assert by_rollout(batch, adv_N)[0] == pytest.approx([2.0, 1.0])
    assert by_rollout(batch, adv_N)[1] == pytest.approx([-2.0, -2.0, -1.0])


@given(
    seed=st.integers(0, 10_000),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    normalize=st.booleans(),
    weight=st.sampled_from([0.0, 1.0, 0.3]),
)
@FEW
def test_gigpo_against_a_loop(seed: int, gamma: float, normalize: bool, weight: float) -> None:
    batch = ragged(seed)
    batch = replace(batch, token_ids_N=batch.token_ids_N % 2)  # so that states come up again
    reward_N = token_rewards(batch, kl_coef=0.1, estimator="k1")
    out = torch.zeros(batch.tokens).double()
    states: dict[tuple[int, tuple[int, ...]], list[tuple[list[int], float]]] = defaultdict(list)
    ids, start = batch.token_ids_N.tolist(), batch.start_S.tolist()
    begin = [start[s] for s in batch.segment_N.tolist()]  # of each token's strand
    for row, turns in enumerate(turns_of(batch)):
        own = [math.fsum(float(reward_N[n]) for n in turn) for turn in turns]
        for k, turn in enumerate(turns):
            end = begin[turn[0]]
            if k:  # the turn before is the history, where the strand begins with it
                history = ids[begin[turns[k - 1][0]] : turns[k - 1][-1] + 1]
                goes_on = ids[end : end + len(history)] == history and end + len(history) <= turn[0]
                end += len(history) if goes_on else 0
            later = sum(gamma ** (j - k) * own[j] for j in range(k, len(turns)))
            states[int(batch.group_R[row]), tuple(ids[end : turn[0]])].append((turn, later))
    for members in states.values():
        values = [x for _, x in members]
        if len(values) > 1:
            scale = stdev(values) + EPS if normalize else 1.0
            for turn, x in members:
                out[turn] += weight * (x - fmean(values)) / scale
    for rows in groups_of(batch).values():
        score = [math.fsum(by_rollout(batch, reward_N)[r]) for r in rows]
        centre, scale = (fmean(score), stdev(score)) if len(rows) > 1 else (0.0, 1.0)
        for r, s in zip(rows, score, strict=True):
            for turn in turns_of(batch)[r]:
                out[turn] += (s - centre) / (scale + EPS if normalize else 1.0)
    got, _ = gigpo(
        batch, reward_N=reward_N, normalize_std=normalize, std_epsilon=EPS, gamma=gamma, turn_weight=weight
    )
    torch.testing.assert_close(got, out, rtol=1e-7, atol=1e-7)


def test_step_wise_grpo_divides_by_the_deviation_of_the_batch_where_it_is_asked_to() -> None:
    batch = make_batch([["pa", "paa"], ["pa", "pa"]], [1.0, 3.0, 5.0, 5.0])
    given = {"reward_N": token_rewards(batch), "std_epsilon": EPS, "divide_by_turns": False}
    adv_N, _ = step_wise_grpo(batch, **given, std_scope="batch")
    std = math.sqrt(11 / 3)  # 1, 3, 5, 5 around 3.5: (6.25 + 0.25 + 2.25 + 2.25) / 3
    got = [float(adv_N[i]) for i in (1, 3, 6, 8)]
    assert got == pytest.approx([-1 / (std + EPS), 1 / (std + EPS), 0, 0])


# ---------------------------------------------------------------- laws of all that look at tokens

ALL = {
    "reinforce_plus_plus": {"gamma": 0.9},
    "remax": {},
    "distill": {"distill_coef": 0.7, "distill_estimator": "low_var_kl"},
    "reward": {},
    "optimal_token_baseline": {},
    "tir_optimal_token_baseline": {},
    "step_wise_grpo": {"std_epsilon": EPS, "divide_by_turns": True},
    "gigpo": {"normalize_std": True, "std_epsilon": EPS, "gamma": 0.9, "turn_weight": 1.0},
    "turn_level_gae": {"gamma": 0.9, "lam": 0.8},
}


def run(name: str, batch: Batch) -> torch.Tensor:
    adv_N, _ = ADVANTAGES[name](batch, reward_N=token_rewards(batch), **ALL[name])
    return adv_N


def full(batch: Batch) -> Batch:
    return with_collisions(replace(batch, baseline_R=batch.reward_R.flip(0)))


@pytest.mark.parametrize("name", [n for n in ALL if n != "reinforce_plus_plus"])
@pytest.mark.parametrize("seed", range(4))
def test_no_group_feels_another(name: str, seed: int) -> None:
    batch = full(ragged(seed))
    whole = run(name, batch)
    for group in range(int(batch.group_R[-1]) + 1):
        rows = (batch.group_R == group).nonzero().flatten()
        alone = run(name, select(batch, rows))
        torch.testing.assert_close(alone, whole[torch.isin(batch.rollout_N, rows)], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", list(ALL))
def test_nothing_sampled_at_all(name: str) -> None:
    batch = full(make_batch([["pp", "p"]], [1.0, 0.0]))
    assert run(name, batch).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", list(ALL))
def test_float32_stays_float32_and_near_float64(name: str) -> None:
    exact, single = full(ragged(1)), full(ragged(1, dtype=torch.float32))
    a, b = run(name, exact), run(name, single)
    assert b.dtype == torch.float32
    torch.testing.assert_close(b.double(), a, rtol=1e-3, atol=1e-4)
    assert (b[~single.mask_N] == 0).all()


def test_gae_of_a_rollout_is_the_same_in_a_batch_of_nothing_else() -> None:
    batch = ragged(7)
    whole, _ = gae(batch, reward_N=token_rewards(batch), gamma=0.99, lam=0.9)
    first = select(batch, torch.tensor([0]))
    alone, _ = gae(first, reward_N=token_rewards(first), gamma=0.99, lam=0.9)
    torch.testing.assert_close(alone, whole[batch.rollout_N == 0], rtol=0, atol=1e-13)


# ---------------------------------------------------------------- segments


def test_turns_are_runs_of_sampled_tokens() -> None:
    batch = make_batch([["paaoa", "pa"], ["p", "pao", "pa"]])
    assert turn_of_M(batch).tolist() == [0, 0, 1, 2, 3, 4]


@given(seed=st.integers(0, 10_000))
@FEW
def test_group_max_and_ranks_against_loops(seed: int) -> None:
    batch = ragged(seed)
    x = (batch.reward_R * 2).round()
    pairs = list(zip(batch.group_R.tolist(), x.tolist(), strict=True))
    assert group_max(x, batch.group_R).tolist() == [max(v for g, v in pairs if g == h) for h, _ in pairs]
    below = [sum(v < own for g, v in pairs if g == h) for h, own in pairs]
    assert strictly_below(x, batch.group_R).tolist() == below
