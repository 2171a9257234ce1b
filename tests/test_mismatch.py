"""The agreement of engine and trainer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batches import doubles, make_batch
from whet.algos.mismatch import mismatch, perplexities
from whet.batch import Loss, Outputs
from whet.track.metrics import merge
from whet.training.sums import Sums


def test_mismatch_by_hand() -> None:
    # Trainer - engine: 0.5, -0.25, 0.
    m = mismatch(torch.tensor([-0.5, -2.25, -3.0]), torch.tensor([-1.0, -2.0, -3.0]))
    assert m["mismatch_mean_nats"].tolist() == m["mismatch_max_nats"].tolist() == [0.5, 0.25, 0.0]
    assert m["mismatch_k1_nats"].tolist() == [-0.5, 0.25, 0.0]
    assert m["mismatch_k3_nats"].tolist() == pytest.approx([math.exp(0.5) - 1.5, math.exp(-0.25) - 0.75, 0.0])
    assert m["mismatch_frac"].tolist() == [1.0, 1.0, 0.0]
    assert m["mismatch_engine_nll_nats"].tolist() == [1.0, 2.0, 3.0]
    assert m["mismatch_trainer_nll_nats"].tolist() == [0.5, 2.25, 3.0]


def test_one_ulp_is_seen() -> None:
    engine = torch.tensor([-1.25, -0.5])
    m = mismatch(torch.nextafter(engine, torch.tensor([0.0, -0.5])), engine)
    assert m["mismatch_frac"].tolist() == [1.0, 0.0]
    assert m["mismatch_max_nats"][0] > 0


def test_a_nan_is_not_hidden() -> None:
    m = mismatch(torch.tensor([float("nan")]), torch.tensor([-1.0]))
    engine = ("mismatch_frac", "mismatch_engine_nll_nats")
    assert all(bool(x.isnan()) for name, x in m.items() if name not in engine)
    assert m["mismatch_frac"].tolist() == [1.0]
    assert math.isnan(
        perplexities({name: float(x.mean()) for name, x in m.items()})["mismatch_perplexity_ratio"]
    )


@pytest.mark.parametrize("at", range(3))
def test_a_nan_is_the_largest_of_an_update(at: int) -> None:
    """Wherever it is: in the first micro-batch, in a later one, or on another rank."""
    parts = [[0.5], [0.25], [2.0]]
    parts[at].append(math.nan)
    own, other = Sums(), Sums()
    for sums, part in zip((own, own, other), parts):
        batch = replace(make_batch([["p" + "a" * len(part)]], [0.0]), logp_sample_N=None)
        loss_N = torch.zeros(batch.tokens)
        stats = {"ratio_max": loss_N.masked_scatter(batch.mask_N, torch.tensor(part))}
        sums.add(replace(batch, weight_N=batch.mask_N / len(part)), Outputs(), Loss(loss_N, stats))
    own.join(other)
    assert math.isnan(own.means()["ratio_max"])


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", ["train/ratio_max", "train/ratio_min"])
def test_a_nan_is_the_extreme_of_a_step(name: str, at: int) -> None:
    """Of the optimizer steps of a step."""
    parts = [{name: 0.5}, {name: 2.0}]
    assert merge(parts)[name] == (2.0 if name.endswith("max") else 0.5)
    parts[at][name] = math.nan
    assert math.isnan(merge(parts)[name])


def means(trainer: list[float], engine: list[float]) -> dict[str, float]:
    return {name: float(x.mean()) for name, x in mismatch(doubles(trainer), doubles(engine)).items()}


def test_perplexity_by_hand() -> None:
    # Tokens of probability 1/2 and 1/8: perplexity 4 = (2 * 8)^(1/2); for the trainer 1/4 and 1/16: 8.
    p = perplexities(means([math.log(1 / 4), math.log(1 / 16)], [math.log(1 / 2), math.log(1 / 8)]))
    assert p["mismatch_engine_perplexity"] == pytest.approx(4, rel=1e-12)
    assert p["mismatch_trainer_perplexity"] == pytest.approx(8, rel=1e-12)
    assert p["mismatch_perplexity_ratio"] == pytest.approx(2, rel=1e-12)


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=20))
def test_perplexity_against_products_of_probabilities(pairs: list[tuple[float, float]]) -> None:
    trainer, engine = [list(x) for x in zip(*pairs, strict=True)]
    p = perplexities(means(trainer, engine))
    n = len(pairs)
    assert p["mismatch_trainer_perplexity"] == pytest.approx(math.exp(-math.fsum(trainer) / n), rel=1e-9)
    assert p["mismatch_engine_perplexity"] == pytest.approx(math.exp(-math.fsum(engine) / n), rel=1e-9)
    ratio = p["mismatch_trainer_perplexity"] / p["mismatch_engine_perplexity"]
    assert p["mismatch_perplexity_ratio"] == pytest.approx(ratio, rel=1e-9)


def test_agreement_is_exactly_1_and_nothing_sampled_is_nothing() -> None:
    assert perplexities(means([-0.1, -0.7], [-0.1, -0.7]))["mismatch_perplexity_ratio"] == 1.0
    assert perplexities({"loss": 1.0}) == {}
    assert perplexities(means([-1e4], [-1.0]))["mismatch_trainer_perplexity"] == math.inf
