"""M2PO: which tokens are left out, by hand; its formula and its gradient stand in test_losses_oracle.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from batches import doubles, ragged, stat_by_rollouts
from test_losses_policy import run, tokens
from whet.algos.correction import log_ratio
from whet.algos.second_moment import Cut, largest, m2po_over
from whet.batch import Batch, Outputs, select
from whet.config import schema
from whet.config.recipes import resolve


def moved(adv: list[float], log_ratio: list[float]) -> tuple[Batch, Tensor]:
    """One rollout whose tokens have these log-ratios to the engine; the policy before the step is not read."""
    batch, logp = tokens(adv, [9.0] * len(adv))
    return replace(batch, logp_sample_N=logp.detach() - doubles([0.0, *log_ratio])), logp


@pytest.mark.parametrize(
    ("most", "stay"),
    [
        (0.05, [1, 1, 1]),  # the squares are 0.01, 0.04 and 0.09, their mean is 0.0467
        (0.04, [1, 1, 0]),  # 0.025
        (0.02, [1, 0, 0]),  # 0.01
        (0.001, [0, 0, 0]),  # none is small enough
    ],
)
def test_the_largest_go_until_the_mean_is_small_enough(most: float, stay: list[int]) -> None:
    batch, logp = moved([1.0, 1.0, 2.0], [0.1, 0.2, 0.3])
    loss, grad, stats = run("m2po", batch, logp, m2_threshold=most)
    wanted = [-a * math.exp(d) * s for a, d, s in zip([1.0, 1.0, 2.0], [0.1, 0.2, 0.3], stay)]
    assert loss == pytest.approx(wanted)
    assert grad == pytest.approx(wanted), "the derivative of -A r by log pi is -A r"
    assert stats["masked_frac"].tolist() == [0, *(1 - s for s in stay)]


def test_the_mean_may_be_the_threshold_itself() -> None:
    batch, logp = moved([1.0, 1.0], [0.5, 0.25])
    assert run("m2po", batch, logp, m2_threshold=(0.25 + 0.0625) / 2)[0] == pytest.approx(
        [-math.exp(0.5), -math.exp(0.25)]
    )


def test_only_tokens_that_move_on_are_looked_at() -> None:
    """A token that goes back to where it was sampled stays, however far it is; so does one without an advantage."""
    batch, logp = moved([-1.0, 1.0, 1.0, -1.0, 0.0], [3.0, -3.0, 1.0, -1.0, 3.0])
    _, _, stats = run("m2po", batch, logp, m2_threshold=0.1)
    assert stats["masked_frac"].tolist() == [0, 0, 0, 1, 1, 0]


def equals() -> tuple[Batch, Tensor]:
    """Rollouts in which every token has moved by the same."""
    batch = ragged(3, groups=6)
    adv_N = torch.ones(batch.tokens).double() * batch.mask_N
    logp = batch.logp_sample_N + 0.5 * batch.mask_N
    return replace(batch, adv_N=adv_N), logp.double()


def test_among_equal_ones_so_many_go_as_have_to() -> None:
    """One token that has not moved far bears some of the others: luck chooses them."""
    batch, logp = equals()
    first = int(batch.mask_N.nonzero()[0])
    logp[first] = batch.logp_sample_N[first] + 0.1
    # (0.01 + n 0.25) / (n + 1) <= 0.2 for n = 3
    cut = largest(batch, logp, most=0.2).of(batch, logp)
    stays = batch.mask_N & ~cut
    assert int(stays.sum()) == 4
    assert stays[first]
    assert batch.mask_N.sum() > 10


def test_nothing_goes_where_the_mean_is_small() -> None:
    batch, logp = equals()
    assert not largest(batch, logp, most=0.25).of(batch, logp).any()
    assert largest(batch, logp, most=0.2).of(batch, logp).equal(batch.mask_N)


@pytest.mark.parametrize("most", [0.2245, 0.5])
def test_rounding_between_two_passes_moves_no_token(most: float) -> None:
    """The threshold is among those that have moved by 0.5, or among those that have moved by 1.5."""
    batch, logp = equals()
    noise = torch.rand(batch.tokens, generator=torch.Generator().manual_seed(0)).double()
    logp = torch.where(noise < 0.5, logp, logp + 1.0)
    first = int(batch.mask_N.nonzero()[0])
    logp[first] = batch.logp_sample_N[first] + 0.1
    cut = largest(batch, logp, most=most)
    assert 0 <= cut.luck < 1, "luck decides among equal ones"
    assert 1 < int(cut.of(batch, logp).sum()) < int(batch.mask_N.sum())
    for shift in (-1e-9, 1e-9):
        assert cut.of(batch, logp + shift).equal(cut.of(batch, logp))


def test_the_choice_does_not_depend_on_where_the_minibatch_is_cut() -> None:
    batch, logp = equals()
    first = int(batch.mask_N.nonzero()[0])
    logp[first] = batch.logp_sample_N[first] + 0.1
    loss = m2po_over(batch, lambda: logp, m2_threshold=0.2)
    whole = loss(batch, Outputs(logp_N=logp)).stats["masked_frac"]
    assert torch.equal(stat_by_rollouts(loss, batch, logp, "masked_frac"), whole)
    assert 0 < whole.sum() < batch.mask_N.sum()


def test_a_minibatch_without_a_token_of_the_trust_region() -> None:
    batch, logp = equals()
    back = replace(batch, adv_N=-batch.adv_N)  # type: ignore[operator]
    assert largest(back, logp, most=0.0) == Cut(low=math.inf, high=math.inf, luck=1.0)
    none = select(replace(batch, mask_N=torch.zeros_like(batch.mask_N)), torch.tensor([0]))
    assert not largest(none, logp[: none.tokens], most=0.0).of(none, logp[: none.tokens]).any()


def test_its_ratio_is_to_the_engine_so_that_nothing_is_computed_before_the_step() -> None:
    made = resolve(schema.AlgorithmConfig(name="m2po"))
    assert (made.advantage, made.loss, made.loss_agg_mode, made.anchor) == (
        "grpo",
        "m2po",
        "token-mean",
        "sampled",
    )
    assert made.settings["loss"].settings == {"m2_threshold": 0.04}
    batch, _ = moved([1.0], [0.7])
    assert log_ratio(batch).abs().sum() > 0, "the policy before the step is another one in these tests"
