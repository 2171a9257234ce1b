"""Log-probs and entropies against a naive float64 oracle: values, gradients, chunks, caps, temperatures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from whet.models import kernels, logprobs
from whet.models.logprobs import OutputHead, Temperature, logits, token_logprobs

OPS = kernels.load("torch")
ROWS, HIDDEN, VOCAB = 37, 12, 29


def head_of(*, bias: bool = False, scale: float = 1.0, softcap: float | None = None) -> OutputHead:
    torch.manual_seed(0)
    return OutputHead(nn.Linear(HIDDEN, VOCAB, bias=bias), scale=scale, softcap=softcap)


def rows(seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(ROWS, HIDDEN, generator=g), torch.randint(0, VOCAB, (ROWS,), generator=g)


def oracle(
    head: OutputHead, hidden_AD: Tensor, targets_A: Tensor, temperature: Temperature
) -> tuple[Tensor, Tensor]:
    """In float64, by the definition, through ordinary autograd."""
    temperature = temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature
    weight = head.linear.weight.double()
    z = hidden_AD.double() @ weight.T * head.scale
    if head.linear.bias is not None:
        z = z + head.linear.bias.double() * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    p = torch.exp(z / temperature) / torch.exp(z / temperature).sum(-1, keepdim=True)
    return torch.log(p[torch.arange(len(p)), targets_A]), -(p * torch.log(p)).sum(-1)


HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"scale": 0.3},
    "capped": {"softcap": 2.0, "scale": 1.5, "bias": True},
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    "temperature", [1.0, 0.7, torch.linspace(0.5, 2.0, ROWS)], ids=["1", "0.7", "of rows"]
)
@pytest.mark.parametrize("keep", [1 << 24, 0], ids=["kept", "chunks"])
def test_values_and_gradients(
    kind: str, temperature: Temperature, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "KEEP", keep)
    head = head_of(**HEADS[kind])  # type: ignore[arg-type]
    hidden_AD, targets_A = rows()
    hidden_AD.requires_grad_()
    inputs = [hidden_AD, *head.linear.parameters()]
    up_A, up2_A = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(5))

    logp_A, entropy_A = token_logprobs(
        hidden_AD, targets_A, head=head, ops=OPS, temperature=temperature, entropy_grad=True, chunk=8
    )
    got = torch.autograd.grad((logp_A * up_A + entropy_A * up2_A).sum(), inputs)
    true_logp_A, true_entropy_A = oracle(head, hidden_AD, targets_A, temperature)
    expected = torch.autograd.grad((true_logp_A * up_A + true_entropy_A * up2_A).sum(), inputs)
    torch.testing.assert_close(logp_A.double(), true_logp_A, atol=5e-6, rtol=0)
    torch.testing.assert_close(entropy_A.double(), true_entropy_A, atol=5e-6, rtol=0)
    for mine, theirs in zip(got, expected):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)


def test_hand_worked_two_tokens() -> None:
    head = OutputHead(nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[0.0], [math.log(3.0)]]))
    # p = (1/4, 3/4): log-prob of token 1 is log 3/4, entropy 1/4 log 4 + 3/4 log 4/3
    logp_A, entropy_A = token_logprobs(torch.ones(1, 1), torch.tensor([1]), head=head, ops=OPS)
    assert logp_A.item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert entropy_A.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), abs=1e-6)


def test_entropy_has_no_gradient_unless_asked_for() -> None:
    head = head_of()
    hidden_AD, targets_A = rows()
    hidden_AD.requires_grad_()
    logp_A, entropy_A = token_logprobs(hidden_AD, targets_A, head=head, ops=OPS)
    assert logp_A.requires_grad
    assert not entropy_A.requires_grad


def test_large_vocabularies_never_hold_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "KEEP", 0)
    widest = 0

    def spy(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal widest
        widest = max(widest, len(logits_NV))
        return OPS.logprobs(logits_NV, targets_N)

    hidden_AD, targets_A = rows()
    logp_A, _ = token_logprobs(
        hidden_AD.requires_grad_(), targets_A, head=head_of(), ops=replace(OPS, logprobs=spy), chunk=8
    )
    assert widest == 8
    assert all(t is None or t.numel() < ROWS * VOCAB for t in logp_A.grad_fn.saved_tensors)  # type: ignore[union-attr]


@pytest.mark.parametrize("keep", [1 << 24, 0], ids=["kept", "chunks"])
def test_second_backward_fails_instead_of_reading_overwritten_logits(
    keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "KEEP", keep)
    hidden_AD, targets_A = rows()
    hidden_AD.requires_grad_()
    logp_A, _ = token_logprobs(hidden_AD, targets_A, head=head_of(), ops=OPS, chunk=8)
    logp_A.sum().backward(retain_graph=True)
    first = hidden_AD.grad.clone()  # type: ignore[union-attr]
    if keep:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            logp_A.sum().backward()
    else:
        logp_A.sum().backward()
        torch.testing.assert_close(hidden_AD.grad, 2 * first)


def test_frozen_head_gets_no_gradient() -> None:
    head = head_of()
    head.linear.requires_grad_(False)
    hidden_AD, targets_A = rows()
    token_logprobs(hidden_AD.requires_grad_(), targets_A, head=head, ops=OPS)[0].sum().backward()
    assert head.linear.weight.grad is None
    assert hidden_AD.grad is not None


def test_no_rows() -> None:
    head = head_of()
    hidden_AD = torch.empty(0, HIDDEN, requires_grad=True)
    logp_A, entropy_A = token_logprobs(hidden_AD, torch.empty(0, dtype=torch.int64), head=head, ops=OPS)
    (logp_A.sum()).backward()
    assert logp_A.shape == entropy_A.shape == (0,)
    assert torch.equal(head.linear.weight.grad, torch.zeros(VOCAB, HIDDEN))  # type: ignore[arg-type]


def test_head_follows_replaced_parameters() -> None:
    head = head_of()
    hidden_AD, _ = rows()
    before = logits(head, hidden_AD, 1.0)
    head.linear.weight = nn.Parameter(2 * head.linear.weight.detach())
    torch.testing.assert_close(logits(head, hidden_AD, 1.0), 2 * before)


@pytest.mark.parametrize("kind", HEADS)
def test_temperature_of_each_row_equals_one_for_all_bitwise(kind: str) -> None:
    head = head_of(**HEADS[kind])  # type: ignore[arg-type]
    hidden_AD, _ = rows()
    assert torch.equal(logits(head, hidden_AD, 0.7), logits(head, hidden_AD, torch.full((ROWS,), 0.7)))
    assert torch.equal(logits(head, hidden_AD, 1.0), logits(head, hidden_AD, torch.ones(ROWS)))


def test_half_precision_head_gives_float32_logprobs_and_half_gradients() -> None:
    head = head_of()
    hidden_AD, targets_A = rows()
    head.linear.bfloat16()
    hidden_AD = hidden_AD.bfloat16().requires_grad_()
    logp_A, _ = token_logprobs(hidden_AD, targets_A, head=head, ops=OPS)
    logp_A.sum().backward()
    true_A, _ = oracle(head, hidden_AD, targets_A, 1.0)
    expected = torch.autograd.grad(true_A.sum(), head.linear.weight)[0]
    assert logp_A.dtype == torch.float32
    assert head.linear.weight.grad.dtype == torch.bfloat16  # type: ignore[union-attr]
    torch.testing.assert_close(logp_A.double(), true_A, atol=0.05, rtol=0)
    torch.testing.assert_close(head.linear.weight.grad, expected, atol=0.3, rtol=0.05)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_must_be_above_zero(temperature: float) -> None:
    hidden_AD, targets_A = rows()
    with pytest.raises(ValueError, match="temperature must be above 0"):
        token_logprobs(hidden_AD, targets_A, head=head_of(), ops=OPS, temperature=temperature)
