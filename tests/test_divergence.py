"""The KL over the whole vocabulary: value, gradient, cuts, and a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from batches import make_batch
from test_learning import learn
from test_train_torch import weighted
from tiny import tiny_model
from whet.algos.distillation import TopK, gkd
from whet.batch import Batch, Loss, Outputs
from whet.config.schema import KlConfig, OptimizerConfig, RewardKlConfig
from whet.models import kernels
from whet.models.divergence import forward_kl, full_kl
from whet.models.logprobs import OutputHead
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import FullKl, TorchEngine
from whet.types import WhetError

A, D, V = 7, 5, 11


def head(seed: int, *, bias: bool = True, scale: float = 1.0, softcap: float | None = None) -> OutputHead:
    torch.manual_seed(seed)
    return OutputHead(nn.Linear(D, V, bias=bias), scale=scale, softcap=softcap)


def plain(x_AD: Tensor, h: OutputHead, temperature: float) -> Tensor:
    """[A, V] log-probs in float64, by the formula in the docstring of Head."""
    bias = 0 if h.linear.bias is None else h.linear.bias.double()
    z = h.scale * (x_AD.double() @ h.linear.weight.double().t() + bias)
    if h.softcap is not None:
        z = h.softcap * torch.tanh(z / h.softcap)
    return (z / temperature).log_softmax(-1)


@pytest.mark.parametrize("chunk", [1, 3, 256])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap", "temperature"),
    [(True, 1.0, None, 1.0), (False, 0.5, None, 0.7), (True, 1.5, 2.0, 1.3)],
)
def test_value_and_gradient_against_the_whole_vocabulary(
    chunk: int, bias: bool, scale: float, softcap: float | None, temperature: float
) -> None:
    policy, reference = (head(seed, bias=bias, scale=scale, softcap=softcap) for seed in (0, 1))
    torch.manual_seed(2)
    x_AD, ref_AD = torch.randn(A, D, requires_grad=True), torch.randn(A, D)
    weight_A = torch.randn(A)
    wanted = [x_AD, policy.linear.weight] + ([policy.linear.bias] if bias else [])
    found = full_kl(x_AD, ref_AD, heads=(policy, reference), temperature=temperature, chunk=chunk)
    logp, logq = plain(x_AD, policy, temperature), plain(ref_AD, reference, temperature)
    expected = (logp.exp() * (logp - logq)).sum(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    mine = torch.autograd.grad((found * weight_A).sum(), wanted)
    true = torch.autograd.grad((expected * weight_A).sum(), wanted)
    for a, b in zip(mine, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_by_hand() -> None:
    # p = (3/4, 1/4), q = (1/2, 1/2): 3/4 log(3/2) + 1/4 log(1/2) = log 2 - H(p).
    p, q = OutputHead(nn.Linear(1, 2, bias=False)), OutputHead(nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        p.linear.weight.copy_(torch.tensor([[0.75], [0.25]]).log())
        q.linear.weight.zero_()
    one = torch.ones(1, 1)
    assert full_kl(one, one, heads=(p, q)).item() == pytest.approx(0.1308120, abs=1e-6)
    assert full_kl(one, one, heads=(q, q)).item() == 0.0


def test_the_mean_over_sampled_tokens_of_k1_is_it() -> None:
    policy, reference = head(0), head(1)
    torch.manual_seed(3)
    x_AD, ref_AD = torch.randn(1, D), torch.randn(1, D)
    logp, logq = plain(x_AD, policy, 1.0)[0], plain(ref_AD, reference, 1.0)[0]
    k1 = sum(p * (a - b) for p, a, b in zip(*(x.tolist() for x in (logp.exp(), logp, logq)), strict=True))
    assert full_kl(x_AD, ref_AD, heads=(policy, reference)).item() == pytest.approx(k1, rel=1e-5)


def test_two_vocabularies_cannot_be_compared() -> None:
    other = OutputHead(nn.Linear(D, V + 1))
    with pytest.raises(WhetError, match="has 11 tokens, but the reference's 12"):
        full_kl(torch.ones(1, D), torch.ones(1, D), heads=(head(0), other))


# ---------------------------------------------------------------- over a teacher's likeliest tokens


def test_the_forward_divergence_by_hand() -> None:
    # p = (1/2, 1/4, 1/4), q = (0.6, 0.3, 0.1); over its two likeliest: 0.6 log 1.2 + 0.3 log 1.2 = 0.9 * 0.1823216.
    p, q = OutputHead(nn.Linear(1, 3, bias=False)), OutputHead(nn.Linear(1, 3, bias=False))
    with torch.no_grad():
        p.linear.weight.copy_(torch.tensor([[0.5], [0.25], [0.25]]).log())
        q.linear.weight.copy_(torch.tensor([[0.6], [0.3], [0.1]]).log())
    one = torch.ones(1, 1)

    def of(k: int, floor: float | None = None, most: float | None = None) -> float:
        return forward_kl(one, one, heads=(p, q), top=TopK(k, floor, most)).item()

    assert of(2) == pytest.approx(0.1640894, abs=1e-6)
    assert of(3) == pytest.approx(0.1640894 - 0.1 * 0.9162907, abs=1e-6)
    assert of(2, most=0.1) == pytest.approx(0.1)
    # With log-probs from -1 up: p = (e^-0.6931, e^-1), q = (0.6, e^-1): 0.6 log 1.2, and nothing for the second.
    assert of(2, floor=-1.0) == pytest.approx(0.1093930, abs=1e-6)


@pytest.mark.parametrize("chunk", [3, 256])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap", "temperature", "floor"),
    [(True, 1.0, None, 1.0, None), (False, 0.5, None, 0.7, -2.4), (True, 1.5, 2.0, 1.3, -2.6)],
)
def test_the_forward_divergence_and_its_gradient_against_log_softmax(
    chunk: int, bias: bool, scale: float, softcap: float | None, temperature: float, floor: float | None
) -> None:
    policy, teacher = (head(seed, bias=bias, scale=scale, softcap=softcap) for seed in (0, 1))
    torch.manual_seed(2)
    x_AD, teacher_AD, weight_A = torch.randn(A, D, requires_grad=True), torch.randn(A, D), torch.randn(A)
    wanted = [x_AD, policy.linear.weight] + ([policy.linear.bias] if bias else [])
    found = forward_kl(
        x_AD,
        teacher_AD,
        heads=(policy, teacher),
        top=TopK(4, floor),
        temperature=temperature,
        chunk=chunk,
    )
    logq, at = plain(teacher_AD, teacher, temperature).topk(4)
    logp = plain(x_AD, policy, temperature).gather(1, at)
    if floor is not None:
        assert (logp < floor).any()
        logp, logq = logp.clamp(min=floor), logq.clamp(min=floor)
    expected = (logq.exp() * (logq - logp)).sum(-1).clamp(min=0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    mine = torch.autograd.grad((found * weight_A).sum(), wanted)
    true = torch.autograd.grad((expected * weight_A).sum(), wanted)
    for a, b in zip(mine, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_teacher_with_more_rows_is_read_up_to_the_policys() -> None:
    torch.manual_seed(0)
    wide = OutputHead(nn.Linear(D, V + 3))
    with torch.no_grad():
        wide.linear.bias[V:] += 9.0  # likely, but the policy has no such tokens
    x_AD = torch.randn(2, D)
    policy = head(0)
    logq, at = plain(x_AD, wide, 1.0)[:, :V].topk(2)
    expected = (logq.exp() * (logq - plain(x_AD, policy, 1.0).gather(1, at))).sum(-1).clamp(min=0)
    found = forward_kl(x_AD, x_AD, heads=(policy, wide), top=TopK(2))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- in the engine


def nothing(batch: Batch, out: Outputs) -> Loss:
    assert out.logp_N is not None
    return Loss(0 * out.logp_N)


def update(cut: MicroBatchPolicy, batch: Batch) -> dict[str, float]:
    ops = kernels.load("auto")
    engine = TorchEngine(tiny_model(seed=0), ops, cut=cut, optimizer=OptimizerConfig(lr=1e-2), total_steps=4)
    engine.full_kl = FullKl(2.0, TorchEngine(tiny_model(seed=1), ops, cut=cut))
    return engine.update(batch, nothing)


def test_no_cut_changes_it() -> None:
    batch = weighted()
    whole = update(MicroBatchPolicy(), batch)
    assert whole["loss"] == pytest.approx(2 * whole["kl_loss_nats"], rel=1e-5)
    assert whole["kl_loss_nats"] > 0.01
    for cut in (
        MicroBatchPolicy(max_tokens=None, max_rollouts=1),
        MicroBatchPolicy(max_tokens=None, max_rollouts=5),
        MicroBatchPolicy(share_prompts=False),
    ):
        assert update(cut, batch) == pytest.approx(whole, rel=1e-4)


def test_demonstrations_have_no_kl() -> None:
    batch = weighted()
    assert (
        update(MicroBatchPolicy(), replace(batch, expert_R=torch.ones(batch.rollouts, dtype=torch.bool)))[
            "loss"
        ]
        == 0
    )


def test_it_holds_the_policy_back(tmp_path: Path) -> None:
    train = {"steps": 15, "tasks_per_step": 8, "optimizer": {"lr": 3e-3}}
    kl = {"coef": 100.0, "estimator": "full"}
    held = learn(tmp_path / "held", {"name": "grpo", "kl": kl}, train=train)
    free = learn(tmp_path / "free", {"name": "grpo"}, train=train)
    assert held[0]["train/kl_loss_nats"] == 0.0, "the reference is the policy at first"
    assert held[-1]["train/kl_loss_nats"] > 0
    assert free[-1]["reward/mean"] > held[-1]["reward/mean"] + 0.1


def test_it_has_no_place_in_the_reward() -> None:
    assert KlConfig(estimator="full").estimator == "full"
    with pytest.raises(ValueError, match="estimator"):
        RewardKlConfig.model_validate({"estimator": "full"})


# ---------------------------------------------------------------- as a loss


def test_the_loss_of_a_token_is_its_estimator_bounded_from_above() -> None:
    batch = make_batch([["paa"]], [0.0])
    logp_N = torch.tensor([0.0, -1.0, -0.5], requires_grad=True)
    batch = replace(batch, logp_ref_N=torch.tensor([0.0, -3.0, -0.25]))

    def of(divergence: str, most: float | None) -> Tensor:
        out = Outputs(logp_N=logp_N)
        return gkd(batch, out, divergence=divergence, top_k=1, min_logprob=None, max_divergence=most).loss_N

    # d = 2 and -1/4: d^2 / 2, and e^-d - 1 + d.
    assert of("k2", None).tolist() == pytest.approx([0, 2.0, 0.03125])
    assert of("k3", None).tolist() == pytest.approx([0, 1.1353353, 0.0340254])
    bounded = of("k2", 1.5)
    assert bounded.tolist() == pytest.approx([0, 1.5, 0.03125])
    (gradient,) = torch.autograd.grad(bounded.sum(), logp_N)
    assert gradient.tolist() == pytest.approx([0, 0, -0.25])
    assert (of("full", 1.0) == 0).all()
    assert (of("forward_topk", 1.0) == 0).all()
