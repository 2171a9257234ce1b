"""Divergences over the whole vocabulary and over likely tokens: value, gradient, cuts, and a run."""

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
from whet.algos.distillation import Divergence, TopK, gkd, over_tokens
from whet.batch import Batch, Loss, Outputs
from whet.config.functions import LOSSES as ROWS
from whet.config.schema import KlConfig, OptimizerConfig, RewardKlConfig
from whet.models import kernels
from whet.models.divergence import divergence
from whet.models.logprobs import OutputHead, Temperature
from whet.training.engine import FullKl
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import WhetError

A, D, V = 7, 5, 11


def head(seed: int, *, bias: bool = True, scale: float = 1.0, softcap: float | None = None) -> OutputHead:
    torch.manual_seed(seed)
    return OutputHead(nn.Linear(D, V, bias=bias), scale=scale, softcap=softcap)


def plain(x_AD: Tensor, h: OutputHead, temperature: Temperature) -> Tensor:
    """[A, V] log-probs in float64, by the formula in the docstring of Head."""
    temperature = temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature
    bias = 0 if h.linear.bias is None else h.linear.bias.double()
    z = h.scale * (x_AD.double() @ h.linear.weight.double().t() + bias)
    if h.softcap is not None:
        z = h.softcap * torch.tanh(z / h.softcap)
    return (z / temperature).log_softmax(-1)


@pytest.mark.parametrize("chunk", [1, 3, 256])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap", "temperature"),
    [
        (True, 1.0, None, 1.0),
        (False, 0.5, None, 0.7),
        (True, 1.5, 2.0, 1.3),
        (True, 1.5, 2.0, torch.linspace(0.5, 2.0, A)),
    ],
)
def test_value_and_gradient_against_the_whole_vocabulary(
    chunk: int, bias: bool, scale: float, softcap: float | None, temperature: Temperature
) -> None:
    policy, reference = (head(seed, bias=bias, scale=scale, softcap=softcap) for seed in (0, 1))
    torch.manual_seed(2)
    x_AD, ref_AD = torch.randn(A, D, requires_grad=True), torch.randn(A, D)
    weight_A = torch.randn(A)
    wanted = [x_AD, policy.linear.weight] + ([policy.linear.bias] if bias else [])
    found = divergence(
        x_AD, ref_AD, heads=(policy, reference), of=Divergence(), temperature=temperature, chunk=chunk
    )
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
    assert divergence(one, one, heads=(p, q), of=Divergence()).item() == pytest.approx(0.1308120, abs=1e-6)
    assert divergence(one, one, heads=(q, q), of=Divergence()).item() == 0.0


def test_the_mean_over_sampled_tokens_of_k1_is_it() -> None:
    policy, reference = head(0), head(1)
    torch.manual_seed(3)
    x_AD, ref_AD = torch.randn(1, D), torch.randn(1, D)
    logp, logq = plain(x_AD, policy, 1.0)[0], plain(ref_AD, reference, 1.0)[0]
    k1 = sum(p * (a - b) for p, a, b in zip(*(x.tolist() for x in (logp.exp(), logp, logq)), strict=True))
    assert divergence(x_AD, ref_AD, heads=(policy, reference), of=Divergence()).item() == pytest.approx(
        k1, rel=1e-5
    )


def test_two_vocabularies_cannot_be_compared() -> None:
    other = OutputHead(nn.Linear(D, V + 1))
    with pytest.raises(WhetError, match="has 11 tokens, but the reference's 12"):
        divergence(torch.ones(1, D), torch.ones(1, D), heads=(head(0), other), of=Divergence())


# ---------------------------------------------------------------- over a teacher's likeliest tokens


def forward(k: int, floor: float | None = None, most: float | None = None) -> Divergence:
    return _of(divergence="forward_topk", top_k=k, min_logprob=floor, max_divergence=most)


def _of(**given: object) -> Divergence:
    """The divergence of gkd's settings."""
    settings = ROWS["gkd"].settings.model_validate(given).model_dump()
    del settings["distill_coef"]
    return over_tokens(**settings)


def test_the_forward_divergence_by_hand() -> None:
    # p = (1/2, 1/4, 1/4), q = (0.6, 0.3, 0.1); over its two likeliest: 0.6 log 1.2 + 0.3 log 1.2 = 0.9 * 0.1823216.
    p, q = OutputHead(nn.Linear(1, 3, bias=False)), OutputHead(nn.Linear(1, 3, bias=False))
    with torch.no_grad():
        p.linear.weight.copy_(torch.tensor([[0.5], [0.25], [0.25]]).log())
        q.linear.weight.copy_(torch.tensor([[0.6], [0.3], [0.1]]).log())
    one = torch.ones(1, 1)

    def of(k: int, floor: float | None = None, most: float | None = None) -> float:
        return divergence(one, one, heads=(p, q), of=forward(k, floor, most)).item()

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
    found = divergence(
        x_AD,
        teacher_AD,
        heads=(policy, teacher),
        of=forward(4, floor),
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
    found = divergence(x_AD, x_AD, heads=(policy, wide), of=forward(2))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- generalized Jensen-Shannon


def three() -> tuple[OutputHead, OutputHead]:
    """p = (1/2, 1/4, 1/4) and q = (0.6, 0.1, 0.3), at a hidden state of 1."""
    p, q = OutputHead(nn.Linear(1, 3, bias=False)), OutputHead(nn.Linear(1, 3, bias=False))
    with torch.no_grad():
        p.linear.weight.copy_(torch.tensor([[0.5], [0.25], [0.25]]).log())
        q.linear.weight.copy_(torch.tensor([[0.6], [0.1], [0.3]]).log())
    return p, q


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # m = (0.55, 0.175, 0.275): 1/2 (0.6 log 1.0909 + 0.1 log 0.5714 + 0.3 log 1.0909)
        # + 1/2 (0.5 log 0.9091 + 0.25 log 1.4286 + 0.25 log 0.9091)
        (
            {"jsd_beta": 0.5},
            0.5 * (0.9 * 0.0870114 - 0.1 * 0.5596158) + 0.5 * (0.25 * 0.3566749 - 0.75 * 0.0953102),
        ),
        # KL(q, p) = 0.9 log 1.2 + 0.1 log 0.4; KL(p, q) = 0.75 log(1 / 1.2) + 0.25 log 2.5
        ({"jsd_beta": 0.0}, 0.9 * 0.1823216 - 0.1 * 0.9162907),
        ({"jsd_beta": 1.0}, -0.75 * 0.1823216 + 0.25 * 0.9162907),
        # the teacher's two likeliest, 0 and 2: p = (1/2, 1/4), q = (0.6, 0.3)
        ({"jsd_beta": 0.0, "top_k": 2, "top_k_of": "teacher", "top_k_rest": "drop"}, 0.9 * 0.1823216),
        # renormalized both are (2/3, 1/3)
        ({"jsd_beta": 0.0, "top_k": 2, "top_k_of": "teacher", "top_k_rest": "renormalize"}, 0.0),
        # with a tail of 1/4 and 0.1 it is the whole
        ({"jsd_beta": 1.0, "top_k": 2, "top_k_of": "teacher", "top_k_rest": "tail"}, -0.1367412 + 0.2290727),
        # the likeliest of both is 0: p = (1/2, 1/2), q = (0.6, 0.4): 0.6 log 1.2 + 0.4 log 0.8
        ({"jsd_beta": 0.0, "top_k": 1}, 0.6 * 0.1823216 - 0.4 * 0.2231436),
        ({"jsd_beta": 1.0, "top_k": 2, "max_divergence": 0.05}, 0.05),
    ],
)
def test_jensen_shannon_by_hand(given: dict[str, object], expected: float) -> None:
    name = "jsd_topk" if "top_k" in given else "jsd"
    one = torch.ones(1, 1)
    found = divergence(one, one, heads=three(), of=_of(divergence=name, **given)).item()
    assert found == pytest.approx(expected, abs=2e-7)


def naive(logp: Tensor, logq: Tensor, of: Divergence) -> Tensor:
    """[A] float64, by the definition, with autograd."""
    rows = []
    for lp, lq in zip(logp, logq, strict=True):
        p, q = lp.exp(), lq.exp()
        if of.top is not None:
            own, theirs = (set(x.topk(of.top.k).indices.tolist()) for x in (lp, lq))
            chosen = sorted({"teacher": theirs, "policy": own, "both": own | theirs}[of.top.of])
            p, q = p[chosen], q[chosen]
            if of.top.rest == "tail":
                p, q = (torch.cat((x, 1 - x.sum(0, keepdim=True))) for x in (p, q))
            if of.top.rest == "renormalize":
                p, q = p / p.sum(), q / q.sum()
        b, m = of.beta, of.beta * q + (1 - of.beta) * p
        if b == 0:
            rows.append((q * (q / p).log()).sum())
        elif b == 1:
            rows.append((p * (p / q).log()).sum())
        else:
            rows.append((b * q * (q / m).log() + (1 - b) * p * (p / m).log()).sum())
    return torch.stack(rows)


SUPPORTS = [
    None,
    *(TopK(3, of, rest) for of in ("teacher", "policy", "both") for rest in ("tail", "renormalize", "drop")),
]


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("top", SUPPORTS)
@pytest.mark.parametrize(("chunk", "temperature", "softcap"), [(3, 1.0, None), (256, 0.7, 2.0)])
def test_value_and_gradient_against_the_definition(
    beta: float, top: TopK | None, chunk: int, temperature: float, softcap: float | None
) -> None:
    policy, teacher = (head(seed, softcap=softcap) for seed in (0, 1))
    torch.manual_seed(2)
    x_AD, teacher_AD, weight_A = torch.randn(A, D, requires_grad=True), torch.randn(A, D), torch.randn(A)
    wanted = [x_AD, policy.linear.weight, policy.linear.bias]
    of = Divergence(beta, top)
    found = divergence(x_AD, teacher_AD, heads=(policy, teacher), of=of, temperature=temperature, chunk=chunk)
    expected = naive(plain(x_AD, policy, temperature), plain(teacher_AD, teacher, temperature), of)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    mine = torch.autograd.grad((found * weight_A).sum(), wanted)
    true = torch.autograd.grad((expected * weight_A).sum(), wanted)
    for a, b in zip(mine, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top", [top for top in SUPPORTS if top is None or top.rest != "drop"])
def test_equal_policies_have_no_divergence_and_no_gradient(beta: float, top: TopK | None) -> None:
    policy = head(0)
    x_AD = torch.randn(A, D, requires_grad=True)
    found = divergence(x_AD, x_AD.detach(), heads=(policy, policy), of=Divergence(beta, top))
    assert (found == 0).all()
    for gradient in torch.autograd.grad(found.sum(), [x_AD, policy.linear.weight]):
        assert (gradient == 0).all(), "an optimizer that divides by the gradient's size would follow rounding"


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top", [None, TopK(2, "both", "tail")])
def test_opposite_certainties_are_finite(beta: float, top: TopK | None) -> None:
    p, q = OutputHead(nn.Linear(1, 3, bias=False)), OutputHead(nn.Linear(1, 3, bias=False))
    with torch.no_grad():
        p.linear.weight.copy_(torch.tensor([[300.0], [0.0], [0.0]]))
        q.linear.weight.copy_(torch.tensor([[0.0], [300.0], [0.0]]))
    one = torch.ones(1, 1, requires_grad=True)
    found = divergence(one, one.detach(), heads=(p, q), of=Divergence(beta, top))
    (gradient,) = torch.autograd.grad(found.sum(), p.linear.weight)
    # the generalized divergence of two that share nothing is the entropy of beta
    entropy = {0.0: 300.0, 0.3: 0.6108643, 1.0: 300.0}[beta]
    assert found.item() == pytest.approx(entropy, rel=1e-5)
    assert gradient.isfinite().all()


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

    def of(divergence: str, most: float | None, coef: float = 1.0) -> Tensor:
        given = ROWS["gkd"].settings.model_validate(
            {"divergence": divergence, "max_divergence": most, "distill_coef": coef}
        )
        return gkd(batch, Outputs(logp_N=logp_N), **given.model_dump()).loss_N

    # d = 2 and -1/4: d^2 / 2, and e^-d - 1 + d.
    assert of("k2", None).tolist() == pytest.approx([0, 2.0, 0.03125])
    assert of("k3", None).tolist() == pytest.approx([0, 1.1353353, 0.0340254])
    bounded = of("k2", 1.5)
    assert bounded.tolist() == pytest.approx([0, 1.5, 0.03125])
    (gradient,) = torch.autograd.grad(bounded.sum(), logp_N)
    assert gradient.tolist() == pytest.approx([0, 0, -0.25])
    assert of("k2", 1.5, 2.0).tolist() == pytest.approx([0, 3.0, 0.0625])
    for name in ("full", "forward_topk", "jsd", "jsd_topk"):
        assert (of(name, 1.0) == 0).all(), "the engine adds it"
