"""The agreement of engine and trainer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batches import doubles
from whet.algos.mismatch import mismatch, perplexities


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
