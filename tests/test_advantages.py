"""Advantages: numbers worked by hand, loops that are easy to believe, and laws."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean, stdev

import pytest
import torch
from torch import Tensor

from batches import by_rollout, doubles, make_batch, ragged
from whet.algos.advantages import gae, grpo, none, reinforce, rloo, token_rewards, whiten
from whet.algos.segments import discounted
from whet.batch import Batch, select
from whet.types import WhetError

SEEDS = range(6)


def per_rollout(batch: Batch, adv_N: Tensor) -> list[float | None]:
    """The one number that all sampled tokens of a rollout share; None where nothing was sampled."""
    lists = by_rollout(batch, adv_N)
    assert all(len(set(x)) <= 1 for x in lists)
    return [x[0] if x else None for x in lists]


def members(batch: Batch) -> dict[int, list[int]]:
    """Rollouts with sampled tokens, by group."""
    lengths = [len(x) for x in by_rollout(batch, batch.reward_R[batch.rollout_N])]
    found: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_R.tolist()):
        if lengths[row]:
            found.setdefault(group, []).append(row)
    return found


# ---------------------------------------------------------------- token rewards


def test_reward_stands_at_the_last_sampled_token() -> None:
    batch = make_batch([["paaoao", "p"]], [3.0, 5.0])
    assert token_rewards(batch).tolist() == [0, 0, 0, 0, 3.0, 0, 0]


def test_kl_comes_off_every_sampled_token() -> None:
    # d = old - ref = 0.5, 1.0; k1 = d; coef 0.1; reward 2 at the last: -0.05 and 2 - 0.1 = 1.9
    batch = make_batch([["paa"]], [2.0])
    batch = replace(batch, logp_old_N=torch.tensor([0, -1.0, -1.0]), logp_ref_N=doubles([0, -1.5, -2.0]))
    assert token_rewards(batch, kl_coef=0.1, estimator="k1").tolist() == pytest.approx([0, -0.05, 1.9])


def test_kl_in_reward_uses_the_engines_logprobs_when_none_were_recomputed() -> None:
    batch = replace(make_batch([["paa"]], [0.0]), logp_old_N=None)
    assert batch.logp_ref_N is not None
    expected = -0.5 * (batch.logp_sample_N - batch.logp_ref_N)
    torch.testing.assert_close(token_rewards(batch, kl_coef=0.5, estimator="k1"), expected)


# ---------------------------------------------------------------- grpo


def test_grpo_by_hand() -> None:
    # Group 0: rewards 1, 0, 2: mean 1, std sqrt((0 + 1 + 1) / 2) = 1. Group 1: 3, 5: mean 4, std sqrt(2).
    batch = make_batch([["paa", "pa", "paoa"], ["pa", "paa"]], [1, 0, 2, 3, 5])
    reward_N = token_rewards(batch)
    adv_N, return_N = grpo(batch, reward_N=reward_N, normalize_std=True, std_epsilon=1e-6)
    expected = [0, -1 / (1 + 1e-6), 1 / (1 + 1e-6), -1 / (math.sqrt(2) + 1e-6), 1 / (math.sqrt(2) + 1e-6)]
    assert per_rollout(batch, adv_N) == pytest.approx(expected, rel=1e-12)
    assert return_N is None
    assert (adv_N[~batch.mask_N] == 0).all()
    plain_N, _ = grpo(batch, reward_N=reward_N, normalize_std=False, std_epsilon=1e-6)
    assert per_rollout(batch, plain_N) == pytest.approx([0, -1, 1, -1, 1])


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_against_a_loop(seed: int, normalize_std: bool) -> None:
    batch = ragged(seed)
    reward_N = token_rewards(batch, kl_coef=0.1, estimator="k3")
    score = [sum(x) for x in by_rollout(batch, reward_N)]
    expected: list[float | None] = [None] * batch.rollouts
    for rows in members(batch).values():
        scores = [score[r] for r in rows]
        centre, scale = (mean(scores), stdev(scores)) if len(rows) > 1 else (0.0, 1.0)
        for r in rows:
            expected[r] = (score[r] - centre) / (scale + 1e-6 if normalize_std else 1.0)
    adv_N, _ = grpo(batch, reward_N=reward_N, normalize_std=normalize_std, std_epsilon=1e-6)
    got = per_rollout(batch, adv_N)
    assert [x is None for x in got] == [x is None for x in expected]
    assert [x for x in got if x is not None] == pytest.approx(
        [x for x in expected if x is not None], rel=1e-10
    )


def test_grpo_group_of_one_keeps_its_reward() -> None:
    batch = make_batch([["pa"]], [0.7])
    adv_N, _ = grpo(batch, reward_N=token_rewards(batch), normalize_std=True, std_epsilon=1e-6)
    assert adv_N[1].item() == pytest.approx(0.7 / (1 + 1e-6), rel=1e-12)


def test_a_rollout_that_sampled_nothing_is_not_in_its_groups_mean() -> None:
    batch = make_batch([["pa", "p", "pa"]], [1.0, 100.0, 0.0])
    adv_N, _ = grpo(batch, reward_N=token_rewards(batch), normalize_std=False, std_epsilon=1e-6)
    assert per_rollout(batch, adv_N) == [0.5, None, -0.5]


@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, 1e8])
def test_a_uniform_group_gets_exactly_zero(reward: float) -> None:
    batch = make_batch([["pa"] * 7], [reward] * 7, dtype=torch.float32)
    adv_N, _ = grpo(batch, reward_N=token_rewards(batch), normalize_std=True, std_epsilon=1e-6)
    assert adv_N.dtype == torch.float32
    assert (adv_N == 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_does_not_feel_shift_and_scale_of_rewards(seed: int) -> None:
    batch = ragged(seed)
    keep = [r for rows in members(batch).values() if len(rows) > 1 for r in rows]
    batch = select(batch, torch.tensor(keep))

    def advantage(b: Batch) -> Tensor:
        return grpo(b, reward_N=token_rewards(b), normalize_std=True, std_epsilon=1e-15)[0]

    other = replace(batch, reward_R=3.5 * batch.reward_R + 11)
    torch.testing.assert_close(advantage(other), advantage(batch), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- rloo


def test_rloo_by_hand() -> None:
    # 1 - (0 + 2) / 2 = 0; 0 - (1 + 2) / 2 = -1.5; 2 - (1 + 0) / 2 = 1.5; alone: 0
    batch = make_batch([["paa", "pa", "paoa"], ["pa"]], [1, 0, 2, 9])
    adv_N, _ = rloo(batch, reward_N=token_rewards(batch))
    assert per_rollout(batch, adv_N) == pytest.approx([0, -1.5, 1.5, 0])


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_against_a_loop_and_shift(seed: int) -> None:
    batch = ragged(seed)
    score = batch.reward_R.tolist()
    adv_N, _ = rloo(batch, reward_N=token_rewards(batch))
    got = per_rollout(batch, adv_N)
    for rows in members(batch).values():
        for r in rows:
            others = [score[o] for o in rows if o != r]
            assert got[r] == pytest.approx(score[r] - mean(others) if others else 0.0, abs=1e-12)
    shifted = replace(batch, reward_R=batch.reward_R + 5)
    torch.testing.assert_close(rloo(shifted, reward_N=token_rewards(shifted))[0], adv_N, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- gae


def test_gae_by_hand() -> None:
    # gamma = lam = 0.5; V = 1, 2 at the two sampled tokens, 100 at the environment's between; reward 4.
    # delta_2 = 4 + 0.5 * 0 - 2 = 2, delta_1 = 0.5 * 2 - 1 = 0; A_2 = 2, A_1 = 0 + 0.25 * 2 = 0.5; R = A + V
    batch = make_batch([["paoa"]], [4.0])
    batch = replace(batch, value_N=doubles([100, 1.0, 100, 2.0]))
    adv_N, return_N = gae(batch, reward_N=token_rewards(batch), gamma=0.5, lam=0.5)
    assert adv_N.tolist() == [0, 0.5, 0, 2.0]
    assert return_N is not None
    assert return_N.tolist() == [0, 1.5, 0, 4.0]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0), (1.0, 0.3)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_against_a_loop(seed: int, gamma: float, lam: float) -> None:
    batch = ragged(seed)
    reward_N = token_rewards(batch, kl_coef=0.2, estimator="k1")
    adv_N, return_N = gae(batch, reward_N=reward_N, gamma=gamma, lam=lam)
    assert batch.value_N is not None
    assert return_N is not None
    got, returns = by_rollout(batch, adv_N), by_rollout(batch, return_N)
    for row, (rewards, values) in enumerate(
        zip(by_rollout(batch, reward_N), by_rollout(batch, batch.value_N))
    ):
        carry, following = 0.0, 0.0
        for t in reversed(range(len(rewards))):
            carry = rewards[t] + gamma * following - values[t] + gamma * lam * carry
            following = values[t]
            assert got[row][t] == pytest.approx(carry, rel=1e-11, abs=1e-12)
            assert returns[row][t] == pytest.approx(carry + values[t], rel=1e-11, abs=1e-12)
    assert (adv_N[~batch.mask_N] == 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_with_lam_and_gamma_1_is_return_less_value(seed: int) -> None:
    batch = ragged(seed)
    adv_N, return_N = gae(batch, reward_N=token_rewards(batch), gamma=1.0, lam=1.0)
    assert batch.value_N is not None
    assert return_N is not None
    reward_N = torch.where(batch.mask_N, batch.reward_R[batch.rollout_N], 0.0)
    torch.testing.assert_close(return_N, reward_N, rtol=0, atol=1e-12)
    torch.testing.assert_close(adv_N, reward_N - batch.value_N, rtol=0, atol=1e-12)


def test_gae_with_environment_tokens_equals_gae_with_them_cut_out() -> None:
    long = make_batch([["paaoooaoa", "paoo"]], [1.0, -2.0])
    short = make_batch([["paaaa", "pa"]], [1.0, -2.0])
    assert long.value_N is not None
    value = torch.zeros(short.tokens).double()
    value[short.mask_N] = long.value_N[long.mask_N]
    short = replace(short, value_N=value)
    a, _ = gae(long, reward_N=token_rewards(long), gamma=0.9, lam=0.8)
    b, _ = gae(short, reward_N=token_rewards(short), gamma=0.9, lam=0.8)
    assert torch.equal(a[long.mask_N], b[short.mask_N])


def test_gae_does_not_leak_between_rollouts() -> None:
    batch = ragged(3)
    reward_N = token_rewards(batch)
    whole, _ = gae(batch, reward_N=reward_N, gamma=0.97, lam=0.9)
    for row in range(batch.rollouts):
        alone = select(batch, torch.tensor([row]))
        adv_N, _ = gae(alone, reward_N=token_rewards(alone), gamma=0.97, lam=0.9)
        torch.testing.assert_close(adv_N, whole[batch.rollout_N == row], rtol=0, atol=1e-13)


def test_discounted_stays_finite_and_exact_over_long_rows() -> None:
    # A constant reward of 1: y_t = (1 - f^(T-t)) / (1 - f). Cumulative sums over f^t would overflow here.
    length, factor = 20_000, 0.9
    y = discounted(torch.ones(length).double(), torch.zeros(length, dtype=torch.long), factor)
    left = torch.arange(length, 0, -1).double()
    torch.testing.assert_close(y, (1 - factor**left) / (1 - factor), rtol=1e-13, atol=0)


def test_gae_says_that_values_are_missing() -> None:
    batch = replace(make_batch([["pa"]]), value_N=None)
    with pytest.raises(WhetError, match="value_N"):
        gae(batch, reward_N=token_rewards(batch), gamma=1.0, lam=1.0)


# ---------------------------------------------------------------- reinforce, none, whitening, laws of all


def test_reinforce_by_hand() -> None:
    # gamma 0.5, three sampled tokens, reward 8 at the last: 2, 4, 8; no discount at the environment's token.
    batch = make_batch([["paaoa", "pa"]], [8.0, 3.0])
    adv_N, _ = reinforce(batch, reward_N=token_rewards(batch), gamma=0.5)
    assert adv_N.tolist() == [0, 2, 4, 0, 8, 0, 3]


def test_none_is_the_token_rewards() -> None:
    batch = make_batch([["paa"]], [8.0])
    reward_N = token_rewards(batch, kl_coef=0.1, estimator="k1")
    assert torch.equal(none(batch, reward_N=reward_N)[0], reward_N)


def test_whiten_by_hand() -> None:
    # Sampled: 1, 3, 5: mean 3, variance (4 + 0 + 4) / 2 = 4. What stands elsewhere (99) counts for nothing.
    x = doubles([99, 1.0, 3.0, 99, 5.0])
    mask = torch.tensor([False, True, True, False, True])
    got = whiten(x, mask)
    assert got.tolist() == pytest.approx(
        [0, -2 / math.sqrt(4 + 1e-8), 0, 0, 2 / math.sqrt(4 + 1e-8)], rel=1e-14
    )


def test_whiten_of_one_token_and_of_none() -> None:
    assert whiten(torch.tensor([7.0, 2.0]), torch.tensor([True, False])).tolist() == [0, 0]
    assert whiten(torch.tensor([0.0]), torch.tensor([False])).tolist() == [0]


@pytest.mark.parametrize("seed", SEEDS)
def test_whitened_has_mean_0_and_variance_1(seed: int) -> None:
    batch = ragged(seed)
    assert batch.value_N is not None
    x = whiten(3 * batch.value_N + 7, batch.mask_N)[batch.mask_N]
    assert float(x.mean()) == pytest.approx(0, abs=1e-12)
    assert float(x.var()) == pytest.approx(1, rel=1e-6)


ALL = {
    "grpo": lambda b, r: grpo(b, reward_N=r, normalize_std=True, std_epsilon=1e-6),
    "rloo": lambda b, r: rloo(b, reward_N=r),
    "gae": lambda b, r: gae(b, reward_N=r, gamma=0.9, lam=0.8),
    "reinforce": lambda b, r: reinforce(b, reward_N=r, gamma=0.9),
    "none": lambda b, r: none(b, reward_N=r),
}


@pytest.mark.parametrize("name", list(ALL))
def test_permuting_groups_permutes_advantages(name: str) -> None:
    pictures = [["paa", "paoa"], ["pa"], ["ppaa", "pa", "poa"]]
    rewards = [[1.0, 2.0], [3.0], [0.5, -1.0, 4.0]]
    order = [2, 0, 1]

    def run(which: list[int]) -> dict[int, list[list[float]]]:
        batch = make_batch([pictures[g] for g in which], [x for g in which for x in rewards[g]])
        batch = replace(batch, value_N=batch.reward_R[batch.rollout_N] * batch.position_N * batch.mask_N)
        adv_N, _ = ALL[name](batch, token_rewards(batch))
        lists, groups = by_rollout(batch, adv_N), batch.group_R.tolist()
        return {g: [x for x, at in zip(lists, groups) if at == i] for i, g in enumerate(which)}

    assert run(order) == run([0, 1, 2])


@pytest.mark.parametrize("name", list(ALL))
def test_nothing_sampled_at_all(name: str) -> None:
    batch = make_batch([["pp", "p"]], [1.0, 0.0])
    adv_N, _ = ALL[name](batch, token_rewards(batch))
    assert adv_N.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", list(ALL))
def test_float32_stays_float32_and_near_float64(name: str) -> None:
    exact, single = ragged(1), ragged(1, dtype=torch.float32)
    a, _ = ALL[name](exact, token_rewards(exact))
    b, _ = ALL[name](single, token_rewards(single))
    assert b.dtype == torch.float32
    torch.testing.assert_close(b.double(), a, rtol=1e-4, atol=1e-5)
