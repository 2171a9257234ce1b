"""The kinds of optimizer against plain float64 arithmetic; groups of parameters; state that comes back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tiny import tiny_model
from whet.config.schema import OptimizerConfig, OptimizerGroupConfig, PrecisionConfig, ScheduleConfig
from whet.models import kernels
from whet.models.muon import COEFFICIENTS, STEPS, Muon, direction
from whet.models.optim import Optimizer as Opt
from whet.models.sharded import Alone, Wholes
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import CheckpointError, ConfigError

SHAPES = {"wide": (3, 5), "tall": (6, 2), "experts": (2, 4, 3), "bias": (5,)}
HIDDEN = {"wide", "tall", "experts"}


def named(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    gen = torch.Generator().manual_seed(0)
    return [(n, nn.Parameter(torch.randn(s, generator=gen).to(dtype))) for n, s in SHAPES.items()]


def gradients(step: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(100 + step)
    return {n: torch.randn(s, generator=gen) for n, s in SHAPES.items()}


def make(cfg: OptimizerConfig, dtype: torch.dtype = torch.float32) -> tuple[Opt, dict[str, nn.Parameter]]:
    pairs = named(dtype)
    return Opt(pairs, cfg, total_steps=10, hidden=HIDDEN), dict(pairs)


def walk(optimizer: Opt, steps: range) -> None:
    for step in steps:
        for name, g in gradients(step).items():
            p = optimizer.parameters[name]
            p.grad = g.to(p.dtype)
        optimizer.step()


def orthogonal(x: np.ndarray) -> np.ndarray:
    """Newton-Schulz by its definition, in float64: X <- a X + b (X X^T) X + c (X X^T)^2 X on the wide side."""
    a, b, c = COEFFICIENTS
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / (np.linalg.norm(wide) + 1e-7)
    for _ in range(STEPS):
        s = wide @ wide.T
        wide = a * wide + b * s @ wide + c * s @ s @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def oracle(kind: str, *, lr: float, wd: float, momentum: float, steps: int) -> dict[str, np.ndarray]:
    """Weights after some steps, by the published formulas, in float64. Biases do not decay."""
    out = {}
    for name, p in named():
        w, m, v = p.detach().double().numpy().copy(), 0.0, 0.0
        decay = wd if w.ndim > 1 else 0.0
        for t in range(1, steps + 1):
            g = gradients(t - 1)[name].double().numpy()
            if kind == "muon" and name in HIDDEN:
                m = momentum * m + (1 - momentum) * g
                look = momentum * m + (1 - momentum) * g
                flat = look.reshape(-1, *w.shape[-2:])
                u = np.stack([orthogonal(x) for x in flat]).reshape(w.shape)
                w = w * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(w.shape[-2:])) * u
                continue
            if kind in ("adam", "sgd"):
                g = g + decay * w
            if kind == "sgd":
                m = g if t == 1 else momentum * m + g
                w = w - lr * m
                continue
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            w = w * (1 - lr * decay) - lr * step if kind != "adam" else w - lr * step
        out[name] = w
    return out


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "muon"])
def test_steps_are_the_published_ones(kind: Any, momentum: float) -> None:
    cfg = OptimizerConfig(name=kind, lr=0.05, weight_decay=0.3, momentum=momentum, max_grad_norm=None)
    optimizer, weights = make(cfg)
    walk(optimizer, range(4))
    for name, want in oracle(kind, lr=0.05, wd=0.3, momentum=momentum, steps=4).items():
        torch.testing.assert_close(weights[name].detach().double(), torch.tensor(want), atol=2e-5, rtol=1e-5)


def test_defaults_of_momentum() -> None:
    for kind, default in (("sgd", 0.0), ("muon", 0.95)):
        a, mine = make(OptimizerConfig(name=kind, lr=0.1))  # type: ignore[arg-type]
        b, given = make(OptimizerConfig(name=kind, lr=0.1, momentum=default))  # type: ignore[arg-type]
        walk(a, range(3))
        walk(b, range(3))
        assert all(torch.equal(mine[n], given[n]) for n in mine)


def test_orthogonalised_by_hand() -> None:
    """A diagonal matrix stays one: each entry goes through the quintic x -> a x + b x^3 + c x^5 five times."""
    a, b, c = COEFFICIENTS
    want = []
    for x in (3 / 5, 4 / 5):
        for _ in range(STEPS):
            x = a * x + b * x**3 + c * x**5
        want.append(x)
    got = direction(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    torch.testing.assert_close(got, torch.diag(torch.tensor(want)), atol=1e-5, rtol=1e-5)
    assert all(0.6 < x < 1.3 for x in want)


def test_orthogonalised_singular_values() -> None:
    gen = torch.Generator().manual_seed(0)
    for shape in ((16, 40), (40, 16), (3, 16, 16)):
        values = torch.linalg.svdvals(direction(torch.randn(shape, generator=gen)))
        assert float(values.min()) > 0.3
        assert float(values.max()) < 1.3


def test_muon_is_that_of_torch_up_to_its_bfloat16() -> None:
    mine, theirs = (nn.Parameter(named()[0][1].detach().clone()) for _ in range(2))
    wholes = Wholes(Alone(), {mine: "wide"})
    ours = Muon([{"params": [mine], "lr": 0.1, "weight_decay": 0.2}], momentum=0.95, wholes=wholes)
    torchs = torch.optim.Muon(
        [theirs], lr=0.1, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        mine.grad = theirs.grad = gradients(step)["wide"]
        ours.step()
        torchs.step()
    torch.testing.assert_close(mine, theirs, atol=5e-3, rtol=0)


def test_muon_takes_the_matrices_inside() -> None:
    engine = TorchEngine(
        tiny_model("qwen3_moe"),
        kernels.load("auto"),
        cut=MicroBatchPolicy(),
        optimizer=OptimizerConfig(name="muon", lr=0.1),
    )
    assert engine.optimizer is not None
    taken = {n for n, p in engine.optimizer.masters.items() if isinstance(engine.optimizer.owner[p], Muon)}
    inside = {n for n, p in engine.module.named_parameters() if ".layers." in n and p.ndim > 1}
    assert taken == inside
    assert "model.layers.0.mlp.experts.down_proj" in taken
    assert "model.embed_tokens.weight" in engine.optimizer.parameters


def test_groups_have_their_own_terms() -> None:
    """Without a gradient only decay moves a weight: w becomes w (1 - lr factor decay), scheduled or not."""
    groups = {
        "^wide$": OptimizerGroupConfig(lr_factor=0.5),
        "bias|wide": OptimizerGroupConfig(lr_factor=0.1, weight_decay=0.7),
        "tall": OptimizerGroupConfig(lr_factor=0.0),
    }
    schedule = ScheduleConfig(weight_decay_end=0.0)
    optimizer, weights = make(
        OptimizerConfig(lr=0.1, weight_decay=0.4, param_groups=groups, schedule=schedule)
    )
    before = {n: p.detach().clone() for n, p in weights.items()}
    kept = dict.fromkeys(SHAPES, 1.0)
    for step in range(2):
        for p in optimizer.parameters.values():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        scheduled = 0.4 * (1 - step / 10)
        kept["wide"] *= 1 - 0.1 * 0.5 * scheduled  # the first that fits
        kept["experts"] *= 1 - 0.1 * scheduled
        kept["bias"] *= 1 - 0.1 * 0.1 * 0.7  # its own, though of one dimension
    for name, factor in kept.items():
        torch.testing.assert_close(weights[name].detach(), before[name] * factor)


def test_a_group_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.param_groups: 'attention'"):
        make(OptimizerConfig(param_groups={"attention": OptimizerGroupConfig()}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "muon"])
def test_state_comes_back_to_the_bit(kind: Any, dtype: torch.dtype) -> None:
    cfg = OptimizerConfig(
        name=kind, lr=0.01, weight_decay=0.1, momentum=0.9, schedule=ScheduleConfig(type="cosine")
    )
    a, one = make(cfg, dtype)
    b, two = make(cfg, dtype)
    walk(a, range(3))
    with torch.no_grad():
        for name, p in one.items():
            two[name].copy_(p)
    saved = {k: v.clone() for k, v in a.state().items()}
    b.restore(saved, a.step_count)
    walk(a, range(3, 5))
    walk(b, range(3, 5))
    assert all(torch.equal(one[n], two[n]) for n in one)
    b.restore(saved, 3)
    b.forget()
    walk(b, range(3, 5))
    assert not all(torch.equal(one[n], two[n]) for n in one), "moments that were forgotten must be missed"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("way", ["fused", "foreach", "for-loop"])
def test_sgd_of_half_precision_without_masters_moves_every_number_once(way: Any, momentum: float) -> None:
    """Sizes that fill vectors and that do not: torch's own fused step is wrong from 16 numbers on."""
    cfg = OptimizerConfig(name="sgd", lr=0.25, momentum=momentum, implementation=way, max_grad_norm=None)
    for dtype in (torch.bfloat16, torch.float16):
        for size in (1, 15, 16, 33, 70, 257):
            p = nn.Parameter(torch.zeros(size, dtype=dtype))
            optimizer = Opt([("w", p)], cfg, total_steps=2, precision=PrecisionConfig(master_weights=False))
            for _ in range(2):
                p.grad = torch.ones_like(p)
                optimizer.step()
            assert torch.equal(
                p.float(), torch.full((size,), float(torch.tensor(-0.5 - 0.25 * momentum, dtype=dtype)))
            )


@pytest.mark.parametrize("way", ["fused", "foreach"])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_what_was_frozen_before_a_resume_begins_beside_what_was_not(kind: Any, way: Any) -> None:
    cfg = OptimizerConfig(
        name=kind, lr=0.01, momentum=None if kind == "adamw" else 0.9, implementation=way, max_grad_norm=None
    )
    weights = dict(named())
    weights["tall"].requires_grad_(False)
    frozen = Opt(weights.items(), cfg, total_steps=10, hidden=HIDDEN)
    for name, p in frozen.parameters.items():
        p.grad = gradients(0)[name]
    frozen.step()
    after, resumed = make(cfg)
    with torch.no_grad():
        for name, p in resumed.items():
            p.copy_(weights[name])
    after.restore(frozen.state(), 1)
    alone, fresh = make(cfg)  # its first step is that of `tall`
    for optimizer in (after, alone):
        walk(optimizer, range(1, 3))
    torch.testing.assert_close(resumed["tall"], fresh["tall"], rtol=0, atol=0)
    assert not torch.equal(resumed["wide"], fresh["wide"])


def test_half_a_state_is_refused() -> None:
    a, _ = make(OptimizerConfig())
    walk(a, range(1))
    state = a.state()
    del state["exp_avg_sq.tall"]
    with pytest.raises(CheckpointError, match=r"exp_avg_sq\.tall.*nothing"):
        make(OptimizerConfig())[0].restore(state, 1)
