"""Steps by hand; master weights; state that comes back. The schedules themselves: test_schedules.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from whet.config.schema import OptimizerConfig, ScheduleConfig
from whet.models.optim import OptimizerConfig as Opt
from whet.types import CheckpointError


def _named(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    gen = torch.Generator().manual_seed(0)
    return [
        ("w", nn.Parameter(torch.randn(3, 2, generator=gen).to(dtype))),
        ("b", nn.Parameter(torch.randn(3, generator=gen).to(dtype))),
    ]


def _step(optimizer: Opt, scale: float = 1.0) -> float:
    for p in optimizer.parameters.values():
        p.grad = torch.full_like(p, scale)
    norm = optimizer.clip()
    optimizer.step()
    return norm


def test_first_step_by_hand() -> None:
    """AdamW's first step moves every weight by lr against the gradient's sign, after decaying matrices by lr*wd."""
    named = _named(torch.float32)
    w, b = (p.detach().clone() for _, p in named)
    _step(Opt(named, OptimizerConfig(lr=0.01, weight_decay=0.5, max_grad_norm=None), total_steps=10))
    assert torch.allclose(named[0][1], w * (1 - 0.01 * 0.5) - 0.01, atol=1e-6)
    assert torch.allclose(named[1][1], b - 0.01, atol=1e-6)


def test_decay_of_all_parameters() -> None:
    named = _named(torch.float32)
    w, b = (p.detach().clone() for _, p in named)
    cfg = OptimizerConfig(lr=0.01, weight_decay=0.5, decay_all=True, max_grad_norm=None)
    _step(Opt(named, cfg, total_steps=10))
    assert torch.allclose(named[0][1], w * (1 - 0.01 * 0.5) - 0.01, atol=1e-6)
    assert torch.allclose(named[1][1], b * (1 - 0.01 * 0.5) - 0.01, atol=1e-6)


def test_every_step_has_the_decay_and_the_rate_of_its_place() -> None:
    """Two optimizer steps a training step. Without a gradient AdamW only decays: p becomes p * (1 - lr * wd)."""
    p = nn.Parameter(torch.ones(2, 2))
    schedule = ScheduleConfig(type="linear", unit="train_step", weight_decay_end=0.0)
    cfg = OptimizerConfig(lr=0.1, weight_decay=0.4, schedule=schedule)
    optimizer = Opt([("w", p)], cfg, total_steps=8, updates_per_step=2)
    want, seen = 1.0, []
    for step in range(8):
        at = step // 2
        lr, decay = 0.1 * (1 - at / 4), 0.4 * (1 - at / 4)
        seen.append((optimizer.lr, optimizer.weight_decay))
        assert seen[-1] == (pytest.approx(lr), pytest.approx(decay))
        _step(optimizer, 0.0)
        want *= 1 - lr * decay
        assert torch.allclose(p, torch.full((2, 2), want), atol=1e-6)
    assert len(set(seen)) == 4


def test_a_skipped_step_moves_the_schedule() -> None:
    optimizer = Opt(
        _named(torch.float32), OptimizerConfig(lr=1.0, schedule=ScheduleConfig(type="linear")), total_steps=4
    )
    optimizer.skip()
    assert optimizer.lr == 0.75


def test_without_a_limit_the_norm_is_measured_only() -> None:
    optimizer = Opt(_named(torch.float32), OptimizerConfig(max_grad_norm=None), total_steps=1)
    for p in optimizer.parameters.values():
        p.grad = torch.full_like(p, 2.0)
    assert optimizer.clip() == pytest.approx(6.0)
    assert all(bool((p.grad == 2.0).all()) for p in optimizer.parameters.values())


def test_clip_returns_the_norm_before() -> None:
    optimizer = Opt(_named(torch.float32), OptimizerConfig(max_grad_norm=1.0), total_steps=1)
    for p in optimizer.parameters.values():
        p.grad = torch.full_like(p, 2.0)
    assert optimizer.clip() == pytest.approx(6.0)  # nine entries of 2
    total = math.sqrt(sum(float((p.grad**2).sum()) for p in optimizer.parameters.values()))
    assert total == pytest.approx(1.0, abs=1e-5)


def test_bfloat16_moves_by_its_master() -> None:
    """A step of 1e-5 is far below bfloat16's resolution at 1; two hundred of them must show."""
    p = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = Opt([("w", p)], OptimizerConfig(lr=1e-4, max_grad_norm=None), total_steps=1000)
    for _ in range(200):
        _step(optimizer)
    assert torch.allclose(p.float(), torch.full((4, 4), 0.98), atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    schedule = ScheduleConfig(type="cosine", unit="train_step", weight_decay_end=0.5)
    cfg = OptimizerConfig(lr=0.01, weight_decay=0.1, decay_all=True, schedule=schedule)
    one, two = _named(dtype), _named(dtype)
    a, b = (Opt(named, cfg, total_steps=9, updates_per_step=2) for named in (one, two))
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
    assert (a.lr, a.weight_decay) == (b.lr, b.weight_decay)
    assert 0.1 < a.weight_decay < 0.5


def test_state_of_another_model_is_refused() -> None:
    a = Opt(_named(torch.float32), OptimizerConfig(), total_steps=1)
    _step(a)
    state = a.state() | {"exp_avg.w": torch.zeros(5, 5)}
    with pytest.raises(CheckpointError, match=r"exp_avg\.w.*\(3, 2\).*\(5, 5\)"):
        Opt(_named(torch.float32), OptimizerConfig(), total_steps=1).restore(state, 1)
