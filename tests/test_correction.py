"""Off-policy correction: by hand, against loops, and its laws."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sections
from batches import by_rollout, concat, doubles, logp_now, make_batch, micro_batches, ragged, reordered
from unread import check_algorithm
from whet.algos.correction import below_second_moment, kept, log_ratio
from whet.algos.losses import regularized, reinforce
from whet.algos.recipes import build
from whet.batch import Batch, LossFn, Outputs, select, split, tokens_of
from whet.config import schema
from whet.config.recipes import resolve
from whet.types import ConfigError, Metrics, WhetError

LOG2, LOG3 = math.log(2), math.log(3)


def section(**keys: Any) -> schema.CorrectionConfig:
    return schema.CorrectionConfig.model_validate_json(json.dumps(sections.correction(**keys)))


def corrected(batch: Batch, version: int = 0, **keys: Any) -> tuple[Batch, Metrics]:
    cfg = schema.AlgorithmConfig(correction=section(**keys))
    return build(cfg, critic=schema.CriticConfig(), max_tokens=8).correct(batch, version)


def drifted(pictures: list[list[str]], log_ratio: list[float]) -> Batch:
    """A batch whose trainer gives each sampled token this many nats more than the engine did."""
    batch = make_batch(pictures)
    d_N = torch.zeros(batch.tokens).double()
    d_N[batch.mask_N] = doubles(log_ratio)
    return replace(batch, logp_old_N=batch.logp_sample_N + d_N)


def weights_of(batch: Batch, version: int = 0, **keys: Any) -> list[list[float]]:
    batch, _ = corrected(batch, version, **keys)
    assert batch.correction_N is not None
    assert (batch.correction_N[~batch.mask_N] == 1).all()
    return by_rollout(batch, batch.correction_N)


# ---------------------------------------------------------------- by hand


TWO = [["paa", "poaoa"]]
"""Two rollouts of two sampled tokens."""


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # Token ratios 2, 1/2 and 3, 3.
        ({"weight": "token"}, [[2, 0.5], [3, 3]]),
        ({"weight": "token", "high": 2.5}, [[2, 0.5], [2.5, 2.5]]),  # TIS
        ({"weight": "token", "low": 1.0}, [[2, 1], [3, 3]]),
        ({"weight": "token", "high": 2.5, "outside": "mask"}, [[2, 0.5], [0, 0]]),  # AReaL's cap
        ({"weight": "token", "low": 0.8, "high": 2.5, "outside": "mask"}, [[2, 0], [0, 0]]),  # IcePop
        ({"weight": "sequence"}, [[1, 1], [9, 9]]),
        ({"weight": "sequence", "high": 5.0}, [[1, 1], [5, 5]]),
        ({"weight": "geometric"}, [[1, 1], [3, 3]]),
        ({"weight": "token", "normalize": True}, [[2 / 2.125, 0.5 / 2.125], [3 / 2.125, 3 / 2.125]]),
        ({"weight": "sequence", "normalize": True}, [[0.2, 0.2], [1.8, 1.8]]),  # mean of 1 and 9
        ({"reject": [{"high": 2.5}]}, [[1, 1], [0, 0]]),
        ({"reject": [{"low": 0.8}]}, [[1, 0], [1, 1]]),
        ({"reject": [{"over": "sum", "low": 0.5, "high": 2.0}]}, [[1, 1], [0, 0]]),  # products 1 and 9
        ({"reject": [{"over": "mean", "low": 0.99, "high": 1.01}]}, [[1, 1], [0, 0]]),  # means 1 and 3
        ({"reject": [{"over": "max", "low": 0.6}]}, [[0, 0], [1, 1]]),  # one outlier rejects its rollout
        ({"reject": [{"statistic": "k2", "high": 0.5}]}, [[1, 1], [0, 0]]),  # 0.24, 0.24; 0.60
        ({"reject": [{"statistic": "k3", "high": 0.25}]}, [[0, 1], [0, 0]]),  # 0.31, 0.19; 0.90
        ({"reject": [{"statistic": "k3", "over": "mean", "high": 0.26}]}, [[1, 1], [0, 0]]),  # 0.25; 0.90
        ({"reject": [{"statistic": "k3", "over": "sum", "high": 0.26}]}, [[0, 0], [0, 0]]),  # 0.50; 1.80
        ({"weight": "token", "reject": [{"over": "max", "high": 2.5}]}, [[2, 0.5], [0, 0]]),
    ],
)
def test_weights_by_hand(keys: dict[str, Any], expected: list[list[float]]) -> None:
    batch = drifted(TWO, [LOG2, -LOG2, LOG3, LOG3])
    assert weights_of(batch, **keys) == [pytest.approx(row, rel=1e-12) for row in expected]


def test_bounds_are_inside() -> None:
    batch = replace(
        drifted(TWO, [0.0] * 4), logp_sample_N=torch.zeros(8).double(), logp_old_N=torch.zeros(8).double()
    )
    for over in ("token", "sum", "mean", "max"):
        assert weights_of(batch, reject=[{"over": over, "low": 1.0, "high": 1.0}]) == [[1, 1], [1, 1]]
    assert weights_of(batch, weight="token", low=1.0, high=1.0, outside="mask") == [[1, 1], [1, 1]]


def test_old_tokens_count_less() -> None:
    batch = drifted([["paa"]], [0.0, LOG2])
    batch = replace(batch, version_N=torch.tensor([-1, 3, 5]))
    assert weights_of(batch, version=5, staleness_decay=0.5) == [pytest.approx([0.25, 1])]
    assert weights_of(batch, version=5, staleness_decay=0.5, weight="token") == [pytest.approx([0.25, 2])]
    # normalised first: weights 1 and 2 become 2/3 and 4/3
    found = weights_of(batch, version=5, staleness_decay=0.5, weight="token", normalize=True)
    assert found == [pytest.approx([1 / 6, 4 / 3])]


def test_demonstrations_are_left_alone() -> None:
    batch = drifted(TWO, [LOG2, -LOG2, LOG3, LOG3])
    batch = replace(batch, version_N=torch.where(batch.rollout_N == 1, -1, batch.version_N))
    keys = {
        "weight": "token",
        "high": 1.5,
        "normalize": True,
        "staleness_decay": 0.5,
        "reject": [{"high": 2.5}],
    }
    # The mean is over tokens that a policy sampled: (1.5 + 0.5) / 2.
    assert weights_of(batch, **keys) == [pytest.approx([1.5, 0.5]), [1, 1]]


def test_off_is_off() -> None:
    batch = drifted(TWO, [LOG2, -LOG2, LOG3, LOG3])
    same, stats = corrected(batch, 7)
    assert same is batch
    assert stats == {}


def test_old_logprobs_must_be_there() -> None:
    with pytest.raises(WhetError, match="logp_old_N"):
        corrected(replace(ragged(0), logp_old_N=None), weight="token")


def test_numbers_by_hand() -> None:
    batch = replace(drifted(TWO, [LOG2, -LOG2, LOG3, LOG3]), version_N=torch.full((8,), 2))
    _, stats = corrected(batch, 3, weight="token", high=2.5, reject=[{"low": 0.8}])
    # Weights 2, 0, 2.5, 2.5: mean 7/4, squares 4 + 6.25 + 6.25.
    assert stats == pytest.approx(
        {
            "correction/weight_mean": 1.75,
            "correction/weight_max": 2.5,
            "correction/rejected_frac": 0.25,
            "correction/outside_frac": 0.5,
            "correction/ess_frac": 49 / (4 * 16.5),
            "correction/staleness_mean": 1.0,
        }
    )


def test_equal_weights_are_fully_effective_and_none_not_at_all() -> None:
    batch = drifted(TWO, [0.0] * 4)
    assert corrected(batch, weight="token")[1]["correction/ess_frac"] == 1.0
    assert corrected(batch, reject=[{"low": 5.0}])[1]["correction/ess_frac"] == 0.0
    assert corrected(batch, weight="token", low=1e300)[1]["correction/ess_frac"] == 1.0


# ---------------------------------------------------------------- against loops


WEIGHTS = [
    {"weight": w, "low": low, "high": high, "outside": outside, "normalize": normalize}
    for w, low, high, outside, normalize in product(
        ["token", "sequence", "geometric"], [None, 0.7], [None, 1.4], ["truncate", "mask"], [False, True]
    )
]
REJECTS = [
    {"statistic": s, "over": over, "low": low, "high": high}
    for s, over, (low, high) in product(
        ["ratio", "k2", "k3"], ["token", "sum", "mean", "max"], [(None, 1.2), (0.8, None), (0.8, 1.2)]
    )
]


def naive(rows: list[list[float]], keys: dict[str, Any]) -> list[list[float]]:
    """The same by loops over rollouts and tokens; rows: log-ratios."""

    def clip(d: float) -> float:
        return min(max(d, -20.0), 20.0)

    def inside(x: float, low: float | None, high: float | None) -> bool:
        return (low is None or x >= low) and (high is None or x <= high)

    rows = [[clip(d) for d in row] for row in rows]
    out = []
    for row in rows:
        if keys.get("weight") == "sequence":
            w = [math.exp(clip(math.fsum(row)))] * len(row)
        elif keys.get("weight") == "geometric":
            w = [math.exp(math.fsum(row) / len(row)) for _ in row]
        else:
            w = [math.exp(d) if keys.get("weight") else 1.0 for d in row]
        low, high = keys.get("low"), keys.get("high")
        if keys.get("outside") == "mask":
            w = [x if inside(x, low, high) else 0.0 for x in w]
        else:
            w = [max(x, low) if low else x for x in w]
            w = [min(x, high) if high else x for x in w]
        out.append(w)
    if keys.get("normalize"):
        if keys["weight"] == "token":
            mean = math.fsum(x for w in out for x in w) / sum(map(len, out))
        else:
            firsts = [w[0] for w in out if w]
            mean = math.fsum(firsts) / len(firsts)
        out = [[x / max(mean, 1e-8) for x in w] for w in out]
    for test in keys.get("reject", []):
        for row, w in zip(rows, out, strict=True):
            kinds = {
                "ratio": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d,
            }  # fmt: skip
            values = [kinds[test["statistic"]](d) for d in row]
            low, high = test["low"], test["high"]
            if test["statistic"] == "ratio":
                low, high = low and math.log(low), high and math.log(high)
            if test["over"] == "token":
                good = [inside(x, low, high) for x in values]
            elif test["over"] == "max":
                good = [all(inside(x, low, high) for x in values)] * len(row)
            else:
                total = math.fsum(values) / (len(row) if test["over"] == "mean" and row else 1)
                good = [inside(total, low, high)] * len(row)
            w[:] = [x if g else 0.0 for x, g in zip(w, good, strict=True)]
    return out


def random_drift(seed: int, *, far: float = 0.0) -> Batch:
    """Ragged, with rollouts that sampled nothing; `far`: share of tokens that engine or trainer calls impossible."""
    batch = ragged(seed)
    rng = np.random.default_rng(seed)
    d = torch.tensor(rng.normal(scale=0.4, size=batch.tokens))
    d[torch.tensor(rng.random(batch.tokens) < far)] = math.inf * (1 if seed % 2 else -1)
    return replace(batch, logp_old_N=torch.where(batch.mask_N, batch.logp_sample_N + d, 0.0))


def check(batch: Batch, keys: dict[str, Any]) -> None:
    assert batch.logp_old_N is not None
    rows = by_rollout(batch, batch.logp_old_N - batch.logp_sample_N)
    found = weights_of(batch, **keys)
    for got, expected in zip(found, naive(rows, keys), strict=True):
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-12), keys


@pytest.mark.parametrize("far", [0.0, 0.1])
@given(st.integers(0, 10_000), st.sampled_from(WEIGHTS))
def test_weights_against_a_loop(far: float, seed: int, keys: dict[str, Any]) -> None:
    check(random_drift(seed, far=far), keys)


@pytest.mark.parametrize("far", [0.0, 0.1])
@given(
    st.integers(0, 10_000),
    st.lists(st.sampled_from(REJECTS), min_size=1, max_size=3),
    st.sampled_from([{}, *WEIGHTS]),
)
def test_rejection_against_a_loop(
    far: float, seed: int, tests: list[dict[str, Any]], keys: dict[str, Any]
) -> None:
    check(random_drift(seed, far=far), {**keys, "reject": tests})


def test_the_second_moment_by_hand() -> None:
    # (log w)^2: 0.49, 0.36, 1.21, 1; the mean of all 0.765, without the largest 0.6167, then 0.425, then 0.36
    batch = drifted(TWO, [0.7, -0.6, 1.1, -1.0])
    for most, expected in (
        (0.8, [[1, 1], [1, 1]]),
        (0.7, [[1, 1], [0, 1]]),
        (0.5, [[1, 1], [0, 0]]),
        (0.4, [[0, 1], [0, 0]]),
        (0.1, [[0, 1], [0, 0]]),  # one is left
    ):
        assert weights_of(batch, second_moment=most) == expected
    assert weights_of(batch, second_moment=0.5, reject=[{"low": 1.0}]) == [[1, 0], [0, 0]]
    gap = drifted(TWO, [math.nan, 0.1, 0.1, 0.1])
    assert weights_of(gap, second_moment=0.5) == [[0, 1], [1, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_the_second_moment_against_a_loop(seed: int) -> None:
    batch = random_drift(seed, far=seed % 2 == 0)
    log = (batch.logp_old_N - batch.logp_sample_N).clamp(-20, 20)[batch.mask_N].tolist()
    for most in (1e-6, 0.01, 0.1, 1.0, 500.0):
        left = sorted((x * x for x in log), reverse=True)
        while len(left) > 1 and sum(left) / len(left) >= most:
            left.pop(0)
        kept = below_second_moment(batch, log_ratio(batch), most)
        found = log_ratio(batch)[kept & batch.mask_N].square()
        assert sorted(found.tolist(), reverse=True) == pytest.approx(left, rel=1e-9, abs=1e-18)
        assert kept[~batch.mask_N].all()


def test_a_log_prob_that_is_no_number_is_rejected_by_every_test() -> None:
    for over in ("token", "max", "sum", "mean"):
        batch = drifted(TWO, [math.nan, 0.0, 0.0, 0.0])
        found = weights_of(batch, reject=[{"over": over, "high": 2.0}])
        assert found == [[0, 1] if over == "token" else [0, 0], [1, 1]]


# ---------------------------------------------------------------- laws


EVERYTHING: dict[str, Any] = {
    "weight": "token", "high": 1.5, "normalize": True, "staleness_decay": 0.9,
    "reject": [{"over": "mean", "low": 0.8, "high": 1.3}, {"statistic": "k2", "high": 0.3}],
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_groups_does_not_matter(seed: int) -> None:
    batch = random_drift(seed)
    whole, stats = corrected(batch, 2, **EVERYTHING)
    parts = split(batch, 4)[::-1]
    turned = [select(batch, torch.nonzero(batch.group_R == g).flatten()) for g in reversed(range(4))]
    assert len(parts) == len(turned) == 4
    other, other_stats = corrected(concat(turned), 2, **EVERYTHING)
    assert other_stats == pytest.approx(stats, rel=1e-12)
    back = [
        by_rollout(p, p.correction_N)
        for p in (select(other, rows) for rows in split(other, 4)[::-1])
        if p.correction_N is not None
    ]
    assert whole.correction_N is not None
    flat = [row for rows in back for row in rows]
    assert flat == [pytest.approx(row, rel=1e-12) for row in by_rollout(whole, whole.correction_N)]


def gradient(batch: Batch, parts: list[Batch], logp: Tensor, *, kl_coef: float = 0.1) -> Tensor:
    loss = regularized(reinforce, kl_coef=kl_coef, estimator="k2", entropy_coef=0.0)
    total, seen = torch.zeros(batch.tokens).double(), 0
    for part in parts:
        at = slice(seen, seen + part.tokens)
        x = logp[at].detach().requires_grad_()
        assert part.weight_N is not None
        out = (loss(part, Outputs(logp_N=x)).loss_N * part.weight_N).sum()
        total[at] += torch.autograd.grad(out, x)[0]
        seen += part.tokens
    return total


@pytest.mark.parametrize("denominator", ["kept", "all"])
@pytest.mark.parametrize("seed", range(3))
def test_no_cut_changes_the_gradient(seed: int, denominator: str) -> None:
    cfg = schema.AlgorithmConfig(
        name="grpo",
        loss="reinforce",
        kl=schema.KlConfig(coef=0.1, estimator="k2"),
        correction=section(**EVERYTHING, denominator=denominator),
    )
    algorithm = build(cfg, critic=schema.CriticConfig(), max_tokens=8)
    batch, _ = algorithm.correct(random_drift(seed), 0)
    batch = algorithm.advantage(batch, 0.0)
    batch = replace(batch, weight_N=algorithm.weights(batch, 0))
    logp = logp_now(batch)
    whole = gradient(batch, [batch], logp)
    for limit in (1, 3):
        parts = list(
            micro_batches(batch, max_tokens=None, max_rollouts=limit, shared=False, whole_groups=False)
        )
        torch.testing.assert_close(gradient(batch, parts, logp), whole, rtol=1e-12, atol=1e-15)


def test_only_the_policy_term_is_weighted() -> None:
    batch = drifted([["pa"]], [LOG2])
    batch, _ = corrected(replace(batch, adv_N=doubles([0, 1])), weight="token")
    batch = replace(batch, logp_ref_N=doubles([0, -3.0]))
    loss = regularized(reinforce, kl_coef=0.5, estimator="k1", entropy_coef=2.0)
    out = Outputs(logp_N=doubles([0, -1.0]), entropy_N=doubles([0, 0.25]))
    # 2 * 1 (weight times -A log pi) + 0.5 * 2 (KL) - 2 * 0.25 (entropy)
    assert loss(batch, out).loss_N.tolist() == pytest.approx([0, 2.5])


def test_what_rejection_does_to_the_denominators() -> None:
    def weights(denominator: str) -> list[list[float]]:
        cfg = schema.AlgorithmConfig(
            loss_agg_mode="seq-mean-token-mean",
            correction=section(reject=[{"high": 2.5}], denominator=denominator),
        )
        algorithm = build(cfg, critic=schema.CriticConfig(), max_tokens=8)
        batch, _ = algorithm.correct(drifted([["paa", "poaoa"]], [LOG2, LOG3, LOG3, LOG3]), 0)
        assert batch.correction_N is not None
        assert by_rollout(batch, batch.correction_N) == [[1, 0], [0, 0]]
        return by_rollout(batch, algorithm.weights(batch, 0))

    # kept: one token of one rollout is left; all: two rollouts of two tokens, whatever they weigh.
    assert weights("kept") == [[1, 0], [0, 0]]
    assert weights("all") == [[0.25, 0.25], [0.25, 0.25]]


def test_rejection_does_not_touch_rewards_and_advantages() -> None:
    cfg = schema.AlgorithmConfig(correction=section(reject=[{"over": "max", "high": 2.5}]))
    plain = build(schema.AlgorithmConfig(), critic=schema.CriticConfig(), max_tokens=8)
    algorithm = build(cfg, critic=schema.CriticConfig(), max_tokens=8)
    batch = drifted([["paa", "poaoa"]], [LOG2, LOG3, LOG3, LOG3])
    with_it = algorithm.advantage(algorithm.correct(batch, 0)[0], 0.0).adv_N
    without = plain.advantage(batch, 0.0).adv_N
    assert with_it is not None
    assert without is not None
    assert torch.equal(with_it, without)


def test_kept_without_a_correction_is_the_batch() -> None:
    batch = ragged(0)
    assert kept(batch) is batch


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("name", "correction", "why"),
    [
        ("sft", {"weight": "token"}, "the replies are in the data"),
        (
            "grpo",
            {"weight": {"high": 2.0}},
            "correction.weight.name: must be given: token, sequence, geometric",
        ),
        ("grpo", {"weight": {"name": "tokens"}}, "'tokens' is not known; did you mean 'token'"),
        ("grpo", {"weight": {"name": "token", "hgh": 2.0}}, "unknown setting; did you mean 'high'"),
        (
            "grpo",
            {"weight": "token", "outside": "mask"},
            "neither low nor high of algorithm.correction.weight is given",
        ),
        ("grpo", {"weight": "token", "denominator": "all"}, "nothing is masked or rejected"),
        ("grpo", {"weight": "token", "low": 3.0, "high": 2.0}, r"weight\.low: 3.0 is above high=2.0"),
        ("grpo", {"reject": [{"over": "sum"}]}, r"correction\.reject\[0\]: has no bound"),
        (
            "grpo",
            {"reject": [{"high": 2.0}, {"low": 3.0, "high": 2.0}]},
            r"correction\.reject\[1\]\.low: 3.0 is above",
        ),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_refused(
    name: str, correction: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        check_algorithm(name, correction=sections.correction(**correction))


def test_the_engines_own_logprobs_cannot_correct_themselves() -> None:
    with pytest.raises(ConfigError, match=r"every ratio of algorithm\.correction would be 1"):
        resolve(schema.AlgorithmConfig(old_logprobs="sampled", correction=section(weight="token")))
    resolve(schema.AlgorithmConfig(old_logprobs="sampled", correction=section(staleness_decay=0.9)))


@pytest.mark.parametrize("exact", [True, False])
def test_a_correction_asks_for_the_trainers_logprobs(exact: bool) -> None:
    def needs(**keys: Any) -> bool:
        cfg = schema.AlgorithmConfig(name="reinforce", correction=section(**keys))
        return build(cfg, critic=schema.CriticConfig(), max_tokens=8).needs_old(exact)

    assert needs(weight="token")
    assert needs(reject=[{"high": 2.0}])
    assert needs(second_moment=0.04)
    assert not needs(), "reinforce has no ratio"


# ---------------------------------------------------------------- tests of the policy that learns


def rejected_by(batch: Batch, tests: list[dict[str, Any]], mode: str, **more: Any) -> tuple[LossFn, Batch]:
    """The loss, whose policy term is -A log pi, and the batch with its weights."""
    cfg = schema.AlgorithmConfig(
        loss="reinforce",
        loss_agg_mode=mode,
        norm_tokens=7,
        old_logprobs="sampled",
        correction=section(reject=tests, reject_policy="current"),
        **more,
    )
    algorithm = build(cfg, critic=schema.CriticConfig(), max_tokens=8)
    assert algorithm.correct(batch, 0) == (batch, {}), "nothing is done before the step"
    return algorithm.loss, replace(batch, weight_N=algorithm.weights(batch, 0))


def descent(loss: LossFn, batch: Batch, logp: Tensor) -> Tensor:
    """[N] minus the gradient of the whole loss by the log-probs."""
    assert batch.weight_N is not None
    x = logp.detach().requires_grad_()
    return -torch.autograd.grad((loss(batch, Outputs(logp_N=x)).loss_N * batch.weight_N).sum(), x)[0]


def learning(d: list[float]) -> tuple[Batch, Tensor]:
    """Two rollouts of two tokens with A = 1, 2, 3, 4, and log-probs that are so much above the engine's."""
    batch = drifted(TWO, d)
    adv_N = torch.zeros(batch.tokens).double()
    adv_N[batch.mask_N] = doubles([1, 2, 3, 4])
    assert batch.logp_old_N is not None
    return replace(batch, adv_N=adv_N, logp_old_N=None), batch.logp_old_N


@pytest.mark.parametrize(
    ("mode", "tests", "expected"),
    [
        # ratios 2, 1/2 and 3, 1: the gradient of each token by its log-prob is -A times its weight
        ("token-mean", [{"high": 2.5}], [1 / 4, 2 / 4, 0, 4 / 4]),
        ("seq-mean-token-sum", [{"high": 2.5}], [1 / 2, 2 / 2, 0, 4 / 2]),
        ("seq-mean-token-mean", [{"high": 2.5}], [1 / 4, 2 / 4, 0, 4 / 2]),  # one token of the second is left
        ("seq-mean-token-sum-norm", [{"high": 2.5}], [1 / 14, 2 / 14, 0, 4 / 14]),
        ("token-mean", [{"over": "sum", "low": 0.9, "high": 1.1}], [1 / 4, 2 / 4, 0, 0]),
        ("seq-mean-token-mean", [{"over": "max", "low": 0.9}], [0, 0, 3 / 4, 4 / 4]),
        ("seq-mean-token-mean", [{"high": 2.5}, {"low": 0.9}], [1 / 2, 0, 0, 4 / 2]),
    ],
)
def test_what_the_policy_that_learns_rejects_by_hand(
    mode: str, tests: list[dict[str, Any]], expected: list[float]
) -> None:
    batch, logp = learning([LOG2, -LOG2, LOG3, 0.0])
    loss, batch = rejected_by(batch, tests, mode)
    assert descent(loss, batch, logp)[batch.mask_N].tolist() == pytest.approx(expected)
    stats = loss(batch, Outputs(logp_N=logp)).stats
    assert stats["rejected_frac"][batch.mask_N].tolist() == [x == 0 for x in expected]


VERL_TESTS = [test for test in REJECTS if (test["statistic"], test["over"]) != ("ratio", "max")]


@pytest.mark.parametrize("far", [0.0, 0.1])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@given(st.integers(0, 10_000), st.lists(st.sampled_from(VERL_TESTS), min_size=1, max_size=2))
def test_rejection_by_the_policy_that_learns_against_a_loop(
    far: float, mode: str, seed: int, tests: list[dict[str, Any]]
) -> None:
    """verl 0.8.0 with the counts of its model engines: batch_num_tokens and global_batch_size are those before the
    rejection, and a rollout's mean is over what is left of it."""
    batch = random_drift(seed, far=far)
    logp = batch.logp_old_N
    assert logp is not None
    adv_N = torch.tensor(np.random.default_rng(seed).normal(size=batch.tokens)) * batch.mask_N
    batch = replace(batch, logp_old_N=None, adv_N=adv_N)
    rows = by_rollout(batch, logp - batch.logp_sample_N)
    keep = naive(rows, {"reject": tests})
    tokens, rollouts = sum(map(len, rows)), sum(bool(row) for row in rows)
    expected = []
    for row, adv in zip(keep, by_rollout(batch, adv_N), strict=True):
        over = {"token-mean": tokens, "seq-mean-token-sum": rollouts}.get(mode, rollouts * max(sum(row), 1))
        expected.append([k * a / over for k, a in zip(row, adv, strict=True)])
    loss, weighed = rejected_by(batch, tests, mode)
    found = descent(loss, weighed, logp.clamp(-1e6, 1e6))
    for got, wanted in zip(by_rollout(batch, found), expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12)


LEARNERS_TESTS = [{"over": "mean", "low": 0.9, "high": 1.15}, {"statistic": "k2", "high": 0.05}]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("seed", range(3))
def test_neither_cut_nor_order_changes_what_the_policy_that_learns_rejects(seed: int, mode: str) -> None:
    batch = replace(random_drift(seed), adv_N=ragged(seed).logp_ref_N)
    logp = logp_now(replace(batch, logp_old_N=batch.logp_sample_N)).detach()
    loss, batch = rejected_by(
        batch, LEARNERS_TESTS, mode, kl=schema.KlConfig(coef=0.1, estimator="k2"), entropy_coef=0.0
    )

    def gradient(parts: list[Tensor]) -> Tensor:
        total = torch.zeros_like(logp)
        for rows in parts:
            at = tokens_of(batch, rows)
            total[at] += descent(loss, select(batch, rows), logp[at])
        return total

    everyone = torch.arange(batch.rollouts)
    whole = gradient([everyone])
    stats = loss(batch, Outputs(logp_N=logp)).stats["rejected_frac"]
    assert 0 < stats.sum() < batch.mask_N.sum()
    torch.testing.assert_close(gradient(list(everyone.split(1))), whole, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(gradient(list(everyone.split(3))), whole, rtol=1e-12, atol=1e-15)
    turned = reordered(batch, everyone.flip(0).tolist())
    backwards = torch.cat([tokens_of(batch, r) for r in everyone.flip(0).split(1)])
    torch.testing.assert_close(
        descent(loss, turned, logp[backwards]), whole[backwards], rtol=1e-12, atol=1e-15
    )


def test_demonstrations_are_not_tested() -> None:
    batch, logp = learning([LOG2, -LOG2, LOG3, 0.0])
    batch = replace(batch, version_N=torch.where(batch.rollout_N == 1, -1, batch.version_N))
    loss, batch = rejected_by(batch, [{"high": 1.5}], "token-mean")
    stats = loss(batch, Outputs(logp_N=logp)).stats
    assert stats["rejected_frac"][batch.mask_N].tolist() == [1, 0, 0, 0]


def test_the_policy_that_learns_may_be_tested_with_the_log_probs_of_the_engine() -> None:
    test = {"over": "max", "high": 2.0}
    resolve(
        schema.AlgorithmConfig(
            old_logprobs="sampled", correction=section(reject=[test], reject_policy="current")
        )
    )
    with pytest.raises(ConfigError, match="every ratio"):
        resolve(schema.AlgorithmConfig(old_logprobs="sampled", correction=section(reject=[test])))
