"""The critic: its loss, how it is averaged, the running scale of its returns."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batches import by_rollout, doubles, make_batch, ragged
from whet.algos.critic import Scale, value_loss
from whet.algos.recipes import build
from whet.batch import Outputs
from whet.config import schema


@pytest.mark.parametrize(
    ("value", "clip", "expected", "clipped"),
    [
        (1.0, None, 2.0, None),  # R = 3: (1 - 3)^2 / 2
        (1.0, 0.5, 3.125, 1),  # V = 0: clipped to 0.5, (0.5 - 3)^2 / 2
        (0.2, 0.5, 3.92, 0),  # not clipped: (0.2 - 3)^2 / 2
        (-2.0, 0.5, 12.5, 0),  # clipped to -0.5 would be smaller; the larger error counts: (-2 - 3)^2 / 2
    ],
)
def test_value_loss_by_hand(value: float, clip: float | None, expected: float, clipped: int | None) -> None:
    batch = replace(make_batch([["pa"]]), value_N=torch.zeros(2).double(), return_N=doubles([7, 3.0]))
    loss = value_loss(batch, Outputs(value_N=doubles([9.0, value])), clip=clip)
    assert loss.loss_N.tolist() == pytest.approx([0, expected])
    if clipped is None:
        assert "value_clip_frac" not in loss.stats
    else:
        assert loss.stats["value_clip_frac"][1].item() == clipped


@given(st.integers(0, 10_000), st.sampled_from([None, 0.2, 0.5]))
def test_value_loss_against_a_loop(seed: int, clip: float | None) -> None:
    batch = ragged(seed)
    noise = torch.Generator().manual_seed(seed)
    now, returns = (torch.randn(batch.tokens, generator=noise).double() for _ in range(2))
    assert batch.value_N is not None
    found = by_rollout(
        batch, value_loss(replace(batch, return_N=returns), Outputs(value_N=now), clip=clip).loss_N
    )
    rows = zip(*(by_rollout(batch, x) for x in (now, returns, batch.value_N)), strict=True)
    for got, (vs, rs, olds) in zip(found, rows, strict=True):
        expected = []
        for v, r, old in zip(vs, rs, olds, strict=True):
            held = v if clip is None else min(max(v, old - clip), old + clip)
            expected.append(max((v - r) ** 2, (held - r) ** 2) / 2)
        assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 1 / 4), ("seq-mean-token-mean", 1 / 6), ("seq-mean-token-sum", 1 / 2)],
)
def test_the_critics_aggregation_is_its_own(mode: str, expected: float) -> None:
    critic = schema.CriticConfig.model_validate({"loss_agg_mode": mode})
    algorithm = build(schema.AlgorithmConfig(name="ppo"), critic=critic, max_tokens=20)
    batch = make_batch([["pa", "paaa"]])
    assert algorithm.value_weights(batch)[-1].item() == pytest.approx(expected)
    assert algorithm.weights(batch, 0)[-1].item() == pytest.approx(1 / 4), "the policy's is the recipe's"


# ---------------------------------------------------------------- the scale


def test_a_new_scale_changes_no_bit() -> None:
    x_N, mask_N = torch.randn(50), torch.arange(50) % 3 > 0
    batch = replace(ragged(0, dtype=torch.float32))
    batch = replace(batch, return_N=torch.randn(batch.tokens))
    same = Scale().normalized(batch)
    assert batch.value_N is not None
    assert same.value_N is not None
    assert torch.equal(Scale().restored(x_N, mask_N)[mask_N], x_N[mask_N])
    assert torch.equal(same.value_N, batch.value_N)
    assert (Scale().mean, Scale().std) == (0.0, 1.0)


def test_the_scale_by_hand() -> None:
    mask = torch.tensor([True, True, False])
    first = Scale().seen(doubles([1, 3, 99]), mask, decay=0.5)
    assert (first.mean, first.std) == (2.0, 1.0)
    # Means 2 and 10, squares 5 and 116 (of 6 and 14), weights 1/2 and 1: mean 22/3, square 237/3.
    second = first.seen(doubles([6, 14, 99]), mask, decay=0.5)
    assert second.mean == pytest.approx(22 / 3, rel=1e-15)
    assert second.std == pytest.approx(math.sqrt(237 / 3 - (22 / 3) ** 2), rel=1e-12)


@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=5), min_size=1, max_size=6), st.floats(0, 0.99)
)
def test_the_scale_against_the_weighted_sums(steps: list[list[float]], decay: float) -> None:
    scale = Scale()
    for step in steps:
        scale = scale.seen(doubles(step), torch.ones(len(step), dtype=torch.bool), decay=decay)
    share = [decay ** (len(steps) - 1 - n) for n in range(len(steps))]
    mean = math.fsum(w * math.fsum(s) / len(s) for w, s in zip(share, steps, strict=True)) / math.fsum(share)
    square = math.fsum(w * math.fsum(x * x for x in s) / len(s) for w, s in zip(share, steps, strict=True))
    assert scale.mean == pytest.approx(mean, rel=1e-9, abs=1e-12)
    variance = square / math.fsum(share) - mean**2
    if variance > 1e-6:
        assert scale.std == pytest.approx(math.sqrt(variance), rel=1e-6)


def test_there_and_back() -> None:
    batch = ragged(1)
    batch = replace(batch, return_N=torch.randn(batch.tokens).double() * batch.mask_N)
    scale = Scale(first=6.0, second=30.0, weight=2.0)  # mean 3, std sqrt(6)
    seen = scale.normalized(batch)
    assert seen.value_N is not None
    assert batch.value_N is not None
    torch.testing.assert_close(
        scale.restored(seen.value_N, batch.mask_N), batch.value_N, rtol=1e-12, atol=1e-12
    )
    assert (scale.restored(seen.value_N, batch.mask_N)[~batch.mask_N] == 0).all()


def test_what_cannot_be_scaled_leaves_the_scale() -> None:
    scale = Scale(first=6.0, second=30.0, weight=2.0)
    mask = torch.tensor([True, True])
    assert scale.seen(doubles([math.nan, 1]), mask, decay=0.9) is scale
    assert scale.seen(doubles([1, 2]), ~mask, decay=0.9) is scale
    alike = Scale().seen(doubles([0.1, 0.1]), mask, decay=0.9)
    assert alike.std == 1.0, "rewards that never vary are not blown up"


def test_a_checkpoint_gives_the_scale_back_to_the_bit() -> None:
    scale = Scale().seen(doubles([0.1, 1 / 3]), torch.tensor([True, True]), decay=0.9)
    assert Scale(**json.loads(json.dumps(asdict(scale)))) == scale
