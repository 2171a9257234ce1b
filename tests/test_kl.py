"""KL estimators, the controller of the KL's weight, and the agreement of engine and trainer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from batches import by_rollout, doubles, ragged
from whet.algos.kl import ESTIMATORS, adapt, k1, k2, k3, mean_kl, reference_kl
from whet.algos.mismatch import mismatch
from whet.types import WhetError


def test_estimators_by_hand() -> None:
    d = doubles([-0.5, 0.0, 2.0])
    assert ESTIMATORS["k1"](d).tolist() == [-0.5, 0, 2]
    assert ESTIMATORS["abs"](d).tolist() == [0.5, 0, 2]
    assert ESTIMATORS["k2"](d).tolist() == [0.125, 0, 2]
    # exp(-d) - 1 + d
    assert ESTIMATORS["k3"](d).tolist() == pytest.approx(
        [math.exp(0.5) - 1.5, 0, math.exp(-2) + 1], rel=1e-13
    )


def test_k3_is_bounded() -> None:
    # d = -5: e^5 - 6 = 142 -> 10; d = 50: exp(-20) - 1 + 20 -> 10. Finite in float32 at any distance.
    assert k3(torch.tensor([-5.0, 50.0, -1e4, 1e4])).tolist() == [10, 10, 10, 10]


def test_k3_keeps_its_digits_near_zero() -> None:
    # d^2 / 2 to first order; exp(-d) - 1 + d computed as written would be 0 or noise in float32.
    d = torch.tensor([1e-2])
    assert k3(d).item() == pytest.approx(math.expm1(-1e-2) + 1e-2, rel=1e-3)


def test_expectations_over_a_distribution() -> None:
    # Over p, E[k1] = E[k3] = KL(p || q); the gradient of E[k2] by logits, with p held, is that of the KL.
    logits = doubles([0.3, -0.2, 0.1]).requires_grad_()
    log_q = doubles([0.1, 0.4, -0.3]).log_softmax(0)
    log_p = logits.log_softmax(0)
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum()
    assert (p * k1(log_p - log_q)).sum().item() == pytest.approx(kl.item(), rel=1e-12)
    assert (p * k3(log_p - log_q)).sum().item() == pytest.approx(kl.item(), rel=1e-12)
    (true,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((p.detach() * k2(log_p - log_q)).sum(), logits, retain_graph=True)
    (of_k1,) = torch.autograd.grad((p.detach() * k1(log_p - log_q)).sum(), logits)
    torch.testing.assert_close(of_k2, true, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(of_k1, torch.zeros(3).double(), rtol=0, atol=1e-14)  # useless as a loss


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_reference_kl_is_zero_where_not_sampled_and_where_equal(estimator: str) -> None:
    batch = ragged(1)
    assert batch.logp_old_N is not None
    kl_N = reference_kl(batch, batch.logp_old_N, estimator)
    assert (kl_N[~batch.mask_N] == 0).all()
    assert (kl_N[batch.mask_N] != 0).any()
    same = replace(batch, logp_ref_N=batch.logp_old_N)
    assert (reference_kl(same, batch.logp_old_N, estimator) == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_mean_kl_against_a_loop(seed: int) -> None:
    batch = ragged(seed)
    assert batch.logp_old_N is not None
    rows = [x for x in by_rollout(batch, reference_kl(batch, batch.logp_old_N, "k3")) if x]
    expected = sum(sum(x) / len(x) for x in rows) / len(rows)
    assert mean_kl(batch, "k3") == pytest.approx(expected, rel=1e-12)


def test_a_missing_reference_is_named() -> None:
    with pytest.raises(WhetError, match="logp_ref_N"):
        mean_kl(replace(ragged(0), logp_ref_N=None), "k1")


@pytest.mark.parametrize(
    ("kl_now", "expected"),
    [
        (0.1, 0.5),  # on target: unchanged
        (0.11, 0.5 * (1 + 0.1 * 20 / 100)),  # 10% above
        (9.0, 0.5 * (1 + 0.2 * 20 / 100)),  # bounded at 20%
        (0.0, 0.5 * (1 - 0.2 * 20 / 100)),
    ],
)
def test_adaptive_controller_by_hand(kl_now: float, expected: float) -> None:
    assert adapt(0.5, kl_now, target=0.1, horizon=100, rollouts=20) == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------- mismatch


def test_mismatch_by_hand() -> None:
    # Trainer - engine: 0.5, -0.25, 0.
    m = mismatch(torch.tensor([-0.5, -2.25, -3.0]), torch.tensor([-1.0, -2.0, -3.0]))
    assert m["mismatch_mean_nats"].tolist() == m["mismatch_max_nats"].tolist() == [0.5, 0.25, 0.0]
    assert m["mismatch_k1_nats"].tolist() == [-0.5, 0.25, 0.0]
    assert m["mismatch_k3_nats"].tolist() == pytest.approx([math.exp(0.5) - 1.5, math.exp(-0.25) - 0.75, 0.0])
    assert m["mismatch_share"].tolist() == [1.0, 1.0, 0.0]


def test_one_ulp_is_seen() -> None:
    engine = torch.tensor([-1.25, -0.5])
    m = mismatch(torch.nextafter(engine, torch.tensor([0.0, -0.5])), engine)
    assert m["mismatch_share"].tolist() == [1.0, 0.0]
    assert m["mismatch_max_nats"][0] > 0


def test_a_nan_is_not_hidden() -> None:
    m = mismatch(torch.tensor([float("nan")]), torch.tensor([-1.0]))
    assert all(bool(x.isnan()) for name, x in m.items() if name != "mismatch_share")
    assert m["mismatch_share"].tolist() == [1.0]
