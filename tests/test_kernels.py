"""The kernels and their PyTorch twins against float64 formulas, by hand where numbers are small."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from whet.models import build, kernels, triton_ops
from whet.models.kernels import Ops
from whet.models.segments import Segments
from whet.models.torch_ops import Act, Weighing
from whet.types import ConfigError, WhetError


@pytest.fixture(params=["torch", "compiled", "triton"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ops:
    """triton: the kernels of GPUs in Triton's interpreter, which `test_triton` asks for."""
    if request.param == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("test_triton runs these")
        monkeypatch.setattr(
            triton_ops, "fits", lambda *given: all(t.dtype in triton_ops.DTYPES for t in given)
        )
        functions = {name: getattr(triton_ops, name) for name in kernels.FUNCTIONS}
        return Ops(name="torch", reason="interpreted", **functions)
    try:
        return kernels.load(request.param)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(
    fast: Callable[..., Tensor], exact: Callable[..., Tensor], *inputs: Tensor, tolerance: float = 2e-6
) -> None:
    """fast(fp32) against exact(float64): the value and the gradient of every input, relative to the
    largest."""
    low = [x.float().requires_grad_() for x in inputs]
    high = [x.float().double().requires_grad_() for x in inputs]
    out, want = fast(*low), exact(*high)
    weight = normal(*want.shape, seed=9)
    got = torch.autograd.grad((out * weight.float()).sum(), low)
    need = torch.autograd.grad((want * weight).sum(), high)
    for a, b in zip((out, *got), (want, *need)):
        assert a.dtype == torch.float32
        assert float((a.detach().double() - b.detach()).abs().max()) <= tolerance * float(
            b.detach().abs().max()
        )


def norm64(x: Tensor, w: Tensor, eps: float, offset: float) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * (offset + w)


@pytest.mark.parametrize("width", [7, 16, 40, 128])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(ops: Ops, width: int, offset: float) -> None:
    check(
        lambda x, w: ops.rms_norm(x, w, 1e-5, offset=offset),
        lambda x, w: norm64(x, w, 1e-5, offset),
        normal(3, 67, width),
        normal(width, seed=1),
    )


def test_rms_norm_by_hand(ops: Ops) -> None:
    out = ops.rms_norm(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.tensor([1.0, 2.0, 3.0, 4.0]), 0.0)
    assert out.tolist() == [[pytest.approx(1.2), pytest.approx(3.2), 0.0, 0.0]]  # rms is 2.5


@pytest.mark.parametrize("use", ["both", "norm", "sum"])
def test_add_rms_norm(ops: Ops, use: str) -> None:
    def pick(pair: tuple[Tensor, Tensor]) -> Tensor:
        return {"both": torch.cat(pair), "norm": pair[0], "sum": pair[1]}[use]

    def exact(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return pick((norm64(x + r, w, 1e-5, 0.0), x + r)) + 0 * w.sum()

    x, r, w = normal(70, 24), normal(70, 24, seed=1), normal(24, seed=2)
    check(lambda *a: pick(ops.add_rms_norm(*a, 1e-5)) + 0 * a[2].sum(), exact, x, r, w)


def rope64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]


@pytest.mark.parametrize("size", [16, 24, 64])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_rope(ops: Ops, size: int, normed: bool) -> None:
    cos, sin = (normal(69, size, seed=s).float().double() for s in (3, 4))
    turn = (cos.float(), sin.float())
    x, w = normal(69, 5, size), normal(size, seed=1)
    if normed:
        check(
            lambda x, w: ops.norm_rope(x, w, 1e-5, *turn, offset=1.0),
            lambda x, w: rope64(norm64(x, w, 1e-5, 1.0), cos, sin),
            *(x, w),
        )
    else:
        check(lambda x: ops.norm_rope(x, None, 1e-5, *turn), lambda x: rope64(x, cos, sin), x)


def test_norm_rope_reads_views(ops: Ops) -> None:
    """Heads inside a fused projection, and transformers' head-major layout, need no copy to be right."""
    fused, cos, sin, w = (
        normal(9, 7 * 16).float(),
        normal(9, 16).float(),
        normal(9, 16, seed=5).float(),
        torch.ones(16),
    )
    view = fused.view(9, 7, 16)[:, 2:5]
    want = ops.norm_rope(view.contiguous(), w, 1e-6, cos, sin)
    head_major = view.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(ops.norm_rope(view, w, 1e-6, cos, sin), want)
    assert torch.equal(ops.norm_rope(head_major, w, 1e-6, cos, sin), want)


def test_norm_rope_refuses_other_angles() -> None:
    ops = kernels.load("auto")
    if ops.name == "compiled":
        with pytest.raises(ValueError, match="cos and sin"):
            ops.norm_rope(torch.zeros(4, 2, 16), None, 0.0, torch.zeros(3, 16), torch.zeros(3, 16))


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [5, 48])
def test_glu(ops: Ops, act: str, width: int) -> None:
    def exact(both: Tensor) -> Tensor:
        g, u = both.chunk(2, -1)
        if act == "silu":
            return g / (1 + torch.exp(-g)) * u
        return 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u

    check(lambda both: ops.glu(*both.chunk(2, -1), act=act), exact, 3 * normal(33, 2 * width))  # type: ignore[arg-type]


def test_glu_far_out(ops: Ops) -> None:
    gate = torch.tensor([[-1e4, -90.0, 90.0, 1e4]])
    for act in ("silu", "gelu_tanh"):
        out = ops.glu(gate, torch.ones(1, 4), act=act)  # type: ignore[arg-type]
        assert torch.allclose(out, torch.tensor([[0.0, 0.0, 90.0, 1e4]]), atol=1e-30)


def test_logprobs_by_hand(ops: Ops) -> None:
    """softmax(0, log 3) = (1/4, 3/4): entropy 2 log 2 - 3/4 log 3."""
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)], [5.0, -torch.inf]])
    logp, entropy = ops.logprobs(logits, torch.tensor([0, 1, 0]))
    h = 2 * math.log(2) - 0.75 * math.log(3)
    assert logp.tolist() == pytest.approx([math.log(0.25), math.log(0.75), 0.0], abs=1e-7)
    assert entropy.tolist() == pytest.approx([h, h, 0.0], abs=1e-7)


@pytest.mark.parametrize("vocabulary", [2, 31, 1003])
def test_logprobs_and_backward(ops: Ops, vocabulary: int) -> None:
    z = (4 * normal(37, vocabulary)).float()
    target = torch.arange(37) % vocabulary
    dlogp, dentropy = normal(37, seed=1), normal(37, seed=2)
    exact = z.double().requires_grad_()
    logp_NV = torch.log_softmax(exact, -1)
    want = logp_NV.gather(1, target[:, None]).squeeze(1), -(logp_NV.exp() * logp_NV).sum(-1)
    logp, entropy = ops.logprobs(z, target)
    assert torch.allclose(logp.double(), want[0], rtol=3e-7, atol=1e-6)
    assert torch.allclose(entropy.double(), want[1], rtol=1e-6, atol=1e-6)
    for use in (dentropy, None):
        loss = (want[0] * dlogp).sum() + (0 if use is None else (want[1] * use).sum())
        (grad,) = torch.autograd.grad(loss, exact, retain_graph=True)
        got = z.clone()
        ops.logprobs_backward(got, target, logp, entropy, dlogp.float(), None if use is None else use.float())
        assert torch.allclose(got.double(), grad, atol=3e-6)


def test_backward_with_forbidden_tokens(ops: Ops) -> None:
    z = torch.tensor([[0.0, -torch.inf, 1.0]])
    target = torch.tensor([2])
    logp, entropy = ops.logprobs(z, target)
    ops.logprobs_backward(z, target, logp, entropy, torch.ones(1), torch.ones(1))
    assert torch.isfinite(z).all()
    assert z[0, 1] == 0


def test_targets_outside_the_vocabulary_are_refused(ops: Ops) -> None:
    """On a GPU nothing outside is read, and the log-prob is NaN: the host does not wait for the device to ask."""
    for bad in (3, -1):
        if ops.reason == "interpreted":
            assert ops.logprobs(torch.zeros(1, 3), torch.tensor([bad]))[0].isnan()
            continue
        with pytest.raises((ValueError, RuntimeError)):
            ops.logprobs(torch.zeros(1, 3), torch.tensor([bad]))


def test_what_c_would_read_past_its_end_is_refused() -> None:
    ops = kernels.load("auto")
    if ops.name != "compiled":
        pytest.skip("torch looks at the shapes itself")
    x, one = torch.zeros(2, 16), torch.ones(16)
    with pytest.raises(ValueError, match=r"targets must be torch.int64, got torch.int32"):
        ops.logprobs(x, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"rms_norm: x \(2, 16\), .* weight \(15,\) do not fit"):
        ops.rms_norm(x, one[:15], 1e-6)
    for residual in (x[:1], torch.zeros(2, 15)):
        with pytest.raises(ValueError, match=r"rms_norm: .* do not fit"):
            ops.add_rms_norm(x, residual, one, eps=1e-6)
    with pytest.raises(ValueError, match=r"rms_norm: .* weight \(8,\) do not fit"):
        ops.norm_rope(x[:, None], one[:8], 1e-6, cos_ND=x, sin_ND=x)
    segments, how = (
        Segments.of_lengths(torch.tensor([2])),
        Weighing(scale=1.0, window=None, softcap=None, sinks=None),
    )
    for heads, size in ((1, 32), (3, 16)):
        kv = torch.zeros(2, heads, size)
        with pytest.raises(
            ValueError, match=r"attend_packed: .* heads of one size, and a multiple of k's heads"
        ):
            ops.attend_packed(torch.zeros(2, 4, 16), kv, kv, segments, **how)


def test_sample_by_hand(ops: Ops) -> None:
    """Weights 1, 0, 3, 4 of 8: eight evenly spaced uniforms draw them 1, 0, 3 and 4 times."""
    logits = torch.tensor([[0.0, -torch.inf, math.log(3.0), math.log(4.0)]]).repeat(8, 1)
    uniform = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    token, logp = ops.sample(logits, uniform)
    assert token.tolist() == [0, 2, 2, 2, 3, 3, 3, 3]
    assert logp.exp().tolist() == pytest.approx([1 / 8] + [3 / 8] * 3 + [1 / 2] * 4)


@pytest.mark.parametrize("vocabulary", [1, 16, 17, 256, 300, 5000])
def test_a_token_without_mass_is_never_drawn(ops: Ops, vocabulary: int) -> None:
    """Both ends of the uniform, mass only in the middle, and the largest double below 1."""
    ends = torch.tensor([0.0, 5e-324, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    for alive in {0, vocabulary // 2, vocabulary - 1}:
        logits = torch.full((4, vocabulary), -torch.inf)
        logits[:, alive] = 3.0
        token, logp = ops.sample(logits, ends)
        assert token.tolist() == [alive] * 4
        assert logp.tolist() == [0.0] * 4


def test_sample_follows_the_distribution(ops: Ops) -> None:
    """Stratified uniforms: every count is within one of n p, over blocks that end inside and on 256."""
    for vocabulary in (256, 700):
        logits = (2 * normal(1, vocabulary)).float()
        n = 4000
        uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        token, _ = ops.sample(logits.expand(n, -1).contiguous(), uniform)
        assert bool((token.diff() >= 0).all())
        count = torch.bincount(token, minlength=vocabulary)
        assert float((count - n * torch.softmax(logits[0].double(), -1)).abs().max()) < 1.001


@pytest.mark.parametrize("vocabulary", [3, 128, 1003, 40000])
def test_sampled_logprob_is_the_trainers(ops: Ops, vocabulary: int, threads: int) -> None:
    """Bit for bit, whatever rows stand beside: in one batch, row by row, and by both functions."""
    z = (3 * normal(9, vocabulary)).float()
    uniform = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    token, logp = ops.sample(z, uniform)
    assert torch.equal(ops.logprobs(z, token)[0], logp)
    for b in range(9):
        one = ops.sample(z[b : b + 1], uniform[b : b + 1])
        assert one[0][0] == token[b]
        assert one[1][0] == logp[b]
        assert ops.logprobs(z[b : b + 1], token[b : b + 1])[0][0] == logp[b]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sample_refuses_logits_that_are_no_distribution(ops: Ops, bad: float) -> None:
    z = torch.zeros(3, 20)
    z[1, 4] = bad
    if ops.reason == "interpreted":  # the runner asks for it together with what has ended
        token_B, logp_B = ops.sample(z, torch.full((3,), 0.5, dtype=torch.float64))
        assert logp_B.isfinite().tolist() == [True, False, True]
        assert ((token_B >= 0) & (token_B < 20)).all()
        assert not ops.sample(torch.full((1, 20), -torch.inf), torch.zeros(1))[1].isfinite()
        return
    with pytest.raises(WhetError, match="1 row"):
        ops.sample(z, torch.full((3,), 0.5, dtype=torch.float64))
    with pytest.raises(WhetError, match="3 row"):
        ops.sample(torch.full((3, 20), -torch.inf), torch.full((3,), 0.5, dtype=torch.float64))


def test_rows_do_not_know_each_other(ops: Ops, threads: int) -> None:
    """Every elementwise function: a row alone, in a batch, and in a permuted batch has the same bits.

    The twins promise it for rows of whole vectors only: torch computes the tail of a tensor with another exp.
    """
    width = 40 if ops.name == "compiled" else 64
    x, w, cos, sin = (normal(*shape).float() for shape in ((50, width), (width,), (50, 8), (50, 8)))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(3))

    def functions(rows: Tensor) -> list[Tensor]:
        a = x[rows]
        normed, total = ops.add_rms_norm(a, a.flip(1), w, 1e-6)
        turned = ops.norm_rope(a.view(-1, width // 8, 8), w[:8], 1e-6, cos[rows], sin[rows])
        return [
            ops.rms_norm(a, w, 1e-6),
            normed,
            total,
            turned,
            ops.glu(a, a, act="silu"),
            ops.glu(a, a, act="gelu_tanh"),
        ]

    whole = functions(torch.arange(50))
    for part in (order, order[:1], order[:3], torch.arange(17, 50)):
        for all_rows, some in zip(whole, functions(part)):
            assert torch.equal(all_rows[part], some)


def test_weight_gradients_do_not_know_the_threads(ops: Ops) -> None:
    def gradient(threads: int) -> Tensor:
        torch.set_num_threads(threads)
        w = torch.ones(40, requires_grad=True)
        ops.rms_norm(normal(500, 40).float(), w, 1e-6).square().sum().backward()
        assert w.grad is not None
        return w.grad

    before = torch.get_num_threads()
    try:
        if ops.name == "compiled":
            assert torch.equal(gradient(1), gradient(2))
    finally:
        torch.set_num_threads(before)


def test_float64_goes_to_the_twin() -> None:
    assert kernels.load("auto").rms_norm(normal(4, 16), normal(16), 0.0).dtype == torch.float64


SEGMENTS = Segments(*(torch.tensor(n) for n in ([0, 9, 14], [9, 5, 8], [0, 0, 0], [0, 9, 9])))
IN_HALF: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "rms_norm": (lambda ops, x, w: ops.rms_norm(x, w[0], 1e-5, offset=1.0), (5, 40)),
    "add_rms_norm": (lambda ops, x, w: ops.add_rms_norm(x, x * 0.5, w[0], eps=1e-5)[0], (5, 40)),
    "rope": (lambda ops, x, _: ops.norm_rope(x, None, 0.0, cos_ND=ANGLE.cos(), sin_ND=ANGLE.sin()), (22, 3, 16)),
    "norm_rope": (
        lambda ops, x, w: ops.norm_rope(x, w[0, 0], 1e-5, cos_ND=ANGLE.cos(), sin_ND=ANGLE.sin()),
        (22, 3, 16),
    ),
    "silu": (lambda ops, x, y: ops.glu(x, y, act="silu"), (5, 39)),
    "gelu": (lambda ops, x, y: ops.glu(x, y, act="gelu_tanh"), (5, 39)),
    "attention": (
        lambda ops, x, y: ops.attend_packed(x, y, y * 0.5, SEGMENTS, scale=0.25, window=None, softcap=None, sinks=None),
        (22, 2, 16),
    ),
}  # fmt: skip
ANGLE = torch.arange(22.0)[:, None] * torch.arange(1.0, 17.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", IN_HALF)
def test_half_precision_is_computed_in_float32_and_rounded(ops: Ops, name: str, dtype: torch.dtype) -> None:
    """What a value is rounded to is at most the last bit away from float64's, also in gradients; twins round a normed
    head once more."""
    run, shape = IN_HALF[name]
    x, y = normal(*shape).to(dtype), normal(*shape, seed=1).to(dtype)
    outs = []
    for cast in (dtype, torch.float64):
        leaves = [t.to(cast).requires_grad_() for t in (x, y)]
        out = run(ops, *leaves)
        dy = normal(*out.shape, seed=2).to(dtype).to(cast)
        outs.append(
            [out, *(g for g in torch.autograd.grad(out, leaves, dy, allow_unused=True) if g is not None)]
        )
    eps = torch.finfo(dtype).eps
    for found, wanted in zip(*outs):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=2 * eps, atol=4 * eps)


@pytest.mark.parametrize("width", [1, 39, 64])
@pytest.mark.parametrize("act", get_args(Act))
def test_glu_of_bfloat16_has_the_bits_of_float32_rounded(act: Act, width: int) -> None:
    """Also of numbers that are tied between two, too large, or none; and where another dtype comes back."""
    ops = kernels.load("auto")
    if ops.name != "compiled":
        pytest.skip("no compiler")
    both = (3 * normal(33, 2 * width)).bfloat16()
    both[0, 0], both[1, 0], both[2, -1] = torch.inf, torch.nan, 3e38
    dout = normal(33, width, seed=2).bfloat16()
    outs = []
    for dtype, back in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)):
        leaf = both.to(dtype).requires_grad_()
        out = ops.glu(*leaf.chunk(2, -1), act=act)
        outs.append([out, *torch.autograd.grad(out, leaf, dout.to(back))])
    for half, whole in zip(*outs):
        assert torch.equal(half.nan_to_num(7.0), whole.bfloat16().nan_to_num(7.0))


@pytest.fixture
def fresh_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, fresh_build: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    ops = kernels.table.__wrapped__("auto")
    assert ops.name == "torch"
    assert "no-such-compiler" in ops.reason
    with pytest.raises(ConfigError, match="no-such-compiler"):
        kernels.table.__wrapped__("compiled")


def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, fresh_build: Path) -> None:
    script = fresh_build / "cc-broken"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho "out of cheese" >&2\nexit 1\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(ConfigError, match="out of cheese"):
        kernels.table.__wrapped__("compiled")
    assert list((fresh_build / "whet").iterdir()) == []  # nothing half built stays behind


def test_built_once_and_found_again(fresh_build: Path) -> None:
    try:
        _, how = build.library()
    except build.BuildError as error:
        pytest.skip(str(error))
    (built,) = (fresh_build / "whet").iterdir()
    assert str(built) in how
    stamp = built.stat().st_mtime_ns
    build.library.cache_clear()
    build.library()
    assert built.stat().st_mtime_ns == stamp
