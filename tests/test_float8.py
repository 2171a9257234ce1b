"""Matrix products in float8, against the same products of numbers rounded by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from test_train_torch import CUT, pg_loss, weighted
from tiny import tiny_model
from whet.config.schema import OptimizerConfig
from whet.config.sections.precision import PrecisionConfig
from whet.models import float8, kernels, router
from whet.models.float8 import GRADIENTS, NUMBERS, products, quantised
from whet.models.lora import learned
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import ConfigError

BIG = OptimizerConfig(name="sgd", lr=1024.0, max_grad_norm=None)


def rounded(x: torch.Tensor, kind: torch.dtype, scaling: Any, *, dim: int) -> torch.Tensor:
    """x in float64, after its way through float8; one scale for all numbers along `dim`, or for all of x."""
    largest = x.abs().amax(dim, keepdim=True) if scaling == "rowwise" else x.abs().max()
    scale = (largest / torch.finfo(kind).max).float()
    return (x / scale).to(kind).double() * scale.double()


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_products_are_those_of_rounded_numbers(scaling: Any) -> None:
    """21 tokens: they are filled up to 32, and the zeros change nothing."""
    gen = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(shape, generator=gen) for shape in ((21, 32), (48, 32), (21, 48)))
    x[3] *= 100.0
    x.requires_grad_(), weight.requires_grad_()
    with products(scaling):
        y = F.linear(x, weight)
    y.backward(dy)
    assert y.dtype == torch.float32

    def numbers(t: torch.Tensor, dim: int) -> torch.Tensor:
        return rounded(t.detach(), NUMBERS, scaling, dim=dim)

    def gradient(dim: int) -> torch.Tensor:
        return rounded(dy, GRADIENTS, scaling, dim=dim)

    assert x.grad is not None
    assert weight.grad is not None
    for found, expected in (
        (y, numbers(x, 1) @ numbers(weight, 1).T),
        (x.grad, gradient(1) @ numbers(weight, 0)),
        (weight.grad, gradient(0).T @ numbers(x, 0)),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)  # products are bfloat16
        assert not torch.equal(found.double(), expected.to(torch.float32).double())


def test_one_scale_a_row_keeps_small_rows() -> None:
    x = torch.tensor([[448.0, 1.0], [1e-4, 2e-4]])
    for scaling, kept in (("rowwise", True), ("tensorwise", False)):
        numbers, scale = quantised(x, NUMBERS, scaling)  # type: ignore[arg-type]
        assert bool((numbers.float() * scale)[1].any()) == kept
    assert quantised(torch.zeros(2, 2), NUMBERS, "rowwise")[0].float().abs().sum() == 0


def test_what_stays_as_it_is() -> None:
    x, gate = torch.randn(16, 32), torch.nn.Linear(32, 16, bias=False)
    other = torch.nn.Linear(32, 16)
    with products("rowwise", [gate]):
        assert torch.equal(gate(x), x @ gate.weight.T)
        exact = x @ other.weight.T + other.bias
        assert not torch.equal(other(x), exact)
        torch.testing.assert_close(other(x), exact, atol=0.3, rtol=0.1)
        assert torch.equal(F.linear(x, other.weight[:7]), x @ other.weight[:7].T)
    assert torch.equal(F.linear(x, gate.weight), x @ gate.weight.T)


def moved(cut: MicroBatchPolicy, family: str, *, hooked: bool = False) -> dict[str, torch.Tensor]:
    """Gradients, by a large step."""
    model = tiny_model(family)
    if hooked:
        router.hook(model)
    before = {n: p.detach().clone() for n, p in learned(model)}
    engine = TorchEngine(model, kernels.load("auto"), cut=cut, optimizer=BIG, total_steps=1)
    engine.update(weighted(), pg_loss)
    return {n: (before[n] - p.detach()) / BIG.lr for n, p in learned(model)}


def test_training_is_near_and_knows_no_checkpointing() -> None:
    for family, hooked in (("qwen3", False), ("qwen3_moe", False), ("qwen3_moe", True)):
        plain = moved(CUT, family, hooked=hooked)
        for scaling in ("rowwise", "tensorwise"):
            cut = replace(CUT, precision=PrecisionConfig(float8=scaling))  # type: ignore[arg-type]
            found = moved(cut, family, hooked=hooked)
            again = moved(replace(cut, checkpoint=True), family, hooked=hooked)
            assert all(torch.equal(found[n], again[n]) for n in found)
            a, b = (torch.cat([g.flatten() for g in x.values()]) for x in (found, plain))
            assert 0.95 < float(torch.cosine_similarity(a, b, dim=0)) < 0.99999


def test_a_device_without_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*args: object, **how: object) -> torch.Tensor:
        raise RuntimeError(
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9"
        )

    monkeypatch.setattr(torch, "_scaled_mm", lacks)
    with pytest.raises(
        ConfigError, match=r"train\.precision\.float8: this CPU has no products in float8 .* leave it out"
    ):
        float8.check(torch.device("cpu"))
    with pytest.raises(ConfigError, match="no products in float8"):
        moved(replace(CUT, precision=PrecisionConfig(float8="rowwise")), "qwen3")
