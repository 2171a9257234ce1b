"""Schedules by hand; master weights; state that comes back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from whet.config.schema import Optimizer, Schedule
from whet.models.optim import AdamW, factor
from whet.types import CheckpointError


def test_linear_by_hand() -> None:
    schedule = Schedule(kind="linear", warmup_steps=2, min_factor=0.1)
    # warm-up 1/3, 2/3; then from 1 to 0.1 over the 8 steps that are left: 1 - 0.9 * k/8
    wanted = [1 / 3, 2 / 3, *(1 - 0.9 * k / 8 for k in range(8)), 0.1]
    assert [factor(schedule, s, 10) for s in range(11)] == pytest.approx(wanted)


def test_cosine_by_hand() -> None:
    schedule = Schedule(kind="cosine", warmup_fraction=0.25)
    got = [factor(schedule, s, 8) for s in range(9)]
    assert got == pytest.approx([1 / 3, 2 / 3, *(0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(7))])


def test_wsd_is_flat_then_falls() -> None:
    schedule = Schedule(kind="wsd", warmup_steps=1, decay_fraction=0.4, min_factor=0.2)
    got = [factor(schedule, s, 10) for s in range(10)]
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])


def test_constant() -> None:
    assert [factor(Schedule(), s, 5) for s in (0, 4, 100)] == [1.0, 1.0, 1.0]


def _named(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    gen = torch.Generator().manual_seed(0)
    return [
        ("w", nn.Parameter(torch.randn(3, 2, generator=gen).to(dtype))),
        ("b", nn.Parameter(torch.randn(3, generator=gen).to(dtype))),
    ]


def _step(optimizer: AdamW, scale: float = 1.0) -> float:
    for p in optimizer.parameters.values():
        p.grad = torch.full_like(p, scale)
    norm = optimizer.clip()
    optimizer.step()
    return norm


def test_first_step_by_hand() -> None:
    """AdamW's first step moves every weight by lr against the gradient's sign, after decaying matrices by lr*wd."""
    named = _named(torch.float32)
    w, b = (p.detach().clone() for _, p in named)
    _step(AdamW(named, Optimizer(lr=0.01, weight_decay=0.5, grad_clip=None), total_steps=10))
    assert torch.allclose(named[0][1], w * (1 - 0.01 * 0.5) - 0.01, atol=1e-6)
    assert torch.allclose(named[1][1], b - 0.01, atol=1e-6)


def test_clip_returns_the_norm_before() -> None:
    optimizer = AdamW(_named(torch.float32), Optimizer(grad_clip=1.0), total_steps=1)
    for p in optimizer.parameters.values():
        p.grad = torch.full_like(p, 2.0)
    assert optimizer.clip() == pytest.approx(6.0)  # nine entries of 2
    total = math.sqrt(sum(float((p.grad**2).sum()) for p in optimizer.parameters.values()))
    assert total == pytest.approx(1.0, abs=1e-5)


def test_bfloat16_moves_by_its_master() -> None:
    """A step of 1e-5 is far below bfloat16's resolution at 1; two hundred of them must show."""
    p = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = AdamW([("w", p)], Optimizer(lr=1e-4, grad_clip=None), total_steps=1000)
    for _ in range(200):
        _step(optimizer)
    assert torch.allclose(p.float(), torch.full((4, 4), 0.98), atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    cfg = Optimizer(lr=0.01, schedule=Schedule(kind="linear"))
    one, two = _named(dtype), _named(dtype)
    a, b = AdamW(one, cfg, total_steps=9), AdamW(two, cfg, total_steps=9)
    for scale in (1.0, -2.0, 0.5):
        _step(a, scale)
    with torch.no_grad():
        for (_, p), (_, q) in zip(one, two):
            q.copy_(p)
    b.restore({k: v.clone() for k, v in a.state().items()}, a.step_count)
    for scale in (0.1, -0.7):
        _step(a, scale)
        _step(b, scale)
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(one, two))
    assert a.lr == b.lr


def test_state_of_another_model_is_refused() -> None:
    a = AdamW(_named(torch.float32), Optimizer(), total_steps=1)
    _step(a)
    state = a.state() | {"exp_avg.w": torch.zeros(5, 5)}
    with pytest.raises(CheckpointError, match=r"exp_avg\.w.*\(3, 2\).*\(5, 5\)"):
        AdamW(_named(torch.float32), Optimizer(), total_steps=1).restore(state, 1)
