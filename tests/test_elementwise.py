"""Activations: torch's numbers, and the same bits wherever a number stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from test_forward import OTHERS, foreign, shaken
from whet.models import build, elementwise, kernels
from whet.models.elementwise import Kind, activation, tanh_
from whet.models.forward import decoder
from whet.models.logprob_parity import self_test
from whet.models.products import Everywhere, linear

KINDS: tuple[Kind, ...] = ("silu", "gelu", "gelu_tanh", "tanh", "sigmoid", "erf")
X = torch.cat(
    (torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 6, torch.tensor([0.0, -200.0, 200.0]))
)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if build.if_built() is None:
        pytest.skip("no compiler")


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_gradients_are_those_of_float64(kind: Kind) -> None:
    for dtype, atol in ((torch.float32, 2e-6), (torch.bfloat16, 0.05)):
        low = X.to(dtype).requires_grad_()
        high = low.detach().double().requires_grad_()
        ours, theirs = activation(low, kind), elementwise.TORCH[kind](high)
        assert ours.dtype == dtype
        weight = torch.linspace(-1, 1, len(X))
        (mine,) = torch.autograd.grad(ours, low, weight.to(dtype))
        (other,) = torch.autograd.grad(theirs, high, weight.to(dtype).double())
        for a, b in ((ours, theirs), (mine, other)):
            torch.testing.assert_close(a.detach().double(), b.detach(), atol=atol, rtol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_has_the_same_bits_wherever_it_stands(kind: Kind) -> None:
    before = torch.get_num_threads()
    try:
        whole = activation(X.repeat(9), kind)
        assert torch.equal(whole.view(9, -1)[0].expand(9, -1), whole.view(9, -1))
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for begin, size in ((0, 1), (1, 7), (3, 33), (17, 4099)):
                assert torch.equal(activation(X[begin : begin + size], kind), whole[begin : begin + size])
        assert torch.equal(activation(X[:5000].view(50, 100).t(), kind), whole[:5000].view(50, 100).t())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(tanh_(X.clone()), activation(X, "tanh"))
    assert activation(X[:0], kind).shape == (0,)


def test_modules_of_others_compute_with_them() -> None:
    with Everywhere():
        pairs = {
            "silu": (F.silu(X), torch.nn.SiLU()(X)),
            "gelu": (F.gelu(X), torch.nn.GELU()(X)),
            "gelu_tanh": (F.gelu(X, approximate="tanh"), torch.nn.GELU(approximate="tanh")(X)),
            "tanh": (torch.tanh(X), X.tanh()),
            "sigmoid": (torch.sigmoid(X), X.sigmoid()),
            "erf": (torch.erf(X), X.erf()),
        }
    for kind, found in pairs.items():
        assert all(torch.equal(y, activation(X, kind)) for y in found), kind  # type: ignore[arg-type]
    x = X.clone()
    with Everywhere():
        assert F.silu(x, inplace=True) is x


def test_products_of_others_are_rows_that_agree() -> None:
    """Layers with weights by inputs, as GPT-2's, too, and their gradients."""
    x, weight, bias = X[:4800].view(32, 150), X[:3000].view(150, 20) / 9, X[:20].clone()
    leaves = [t.clone().requires_grad_() for t in (bias, x, weight)]
    with Everywhere():
        whole, alone = torch.addmm(*leaves), torch.addmm(bias, x[5:6], weight)
    assert torch.equal(whole, linear(x, weight.t(), bias))
    assert torch.equal(whole[5:6], alone)
    found = torch.autograd.grad(whole.square().sum(), leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    for a, b in zip(found, torch.autograd.grad(torch.addmm(*exact).square().sum(), exact), strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-2, rtol=1e-5)


MORE: dict[str, dict[str, Any]] = {
    "gpt_neox": {},  # GELU by erf
    "mixtral": {},  # products of experts
    "granitemoe": {},
    "glm4_moe": {},
}


@pytest.mark.parametrize("kind", [*OTHERS, *MORE])
def test_decoders_of_transformers_are_exact_at_any_width_on_any_threads(kind: str) -> None:
    """Widths that no vector divides, and two threads: sampled log-probs equal the trainer's, bit for bit."""
    before, ops = torch.get_num_threads(), kernels.load("auto")
    torch.set_num_threads(2)
    try:
        report = self_test(
            decoder(shaken(foreign(kind, **{**(OTHERS | MORE)[kind], "vocab_size": 101})), ops),
            ops,
            vocab_size=101,
            seed=1,
        )
    finally:
        torch.set_num_threads(before)
    assert report.tokens > 300
    assert report.exact, report
