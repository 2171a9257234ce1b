"""Half precision, moments of 8 bits, offload and compilation, against loops written by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test_timeline import TINY
from test_train_torch import assert_near, gradients, pg_loss, weighted
from tiny import tiny_model
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import OptimizerConfig, PrecisionConfig
from whet.models import build, kernels, narrow_adam, precision
from whet.models.narrow_adam import packed, unpacked
from whet.models.offload import kept_on_host
from whet.models.optim import Optimizer as Opt
from whet.models.precision import LARGEST, LossScale
from whet.models.sharded import DataParallel
from whet.training import torch as engines
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import ConfigError

# ---------------------------------------------------------------- float16


def test_the_scale_halves_and_doubles() -> None:
    scale = LossScale(1024.0, every=3)
    seen = []
    for finite in (True, True, False, True, True, True, True, False, False):
        scale.after(finite)
        seen.append((scale.scale, scale.held))
    assert seen == [
        (1024, 1), (1024, 2), (512, 0), (512, 1), (512, 2), (1024, 0), (1024, 1), (512, 0), (256, 0),
    ]  # fmt: skip
    ended = LossScale(LARGEST, every=1)
    ended.after(True)
    assert ended.scale == LARGEST


def test_float16_is_the_loop_written_by_hand() -> None:
    """Scaled loss, gradients divided in float32, clipped, AdamW on a float32 copy. The first scale is too large."""
    gen = torch.Generator().manual_seed(0)
    start, inputs = torch.randn(6, 5, generator=gen).half(), torch.randn(8, 5, generator=gen).half()

    def loss(w: Tensor) -> Tensor:
        return (inputs @ w.t()).float().square().mean()

    p = nn.Parameter(start.clone())
    cfg = OptimizerConfig(lr=0.01, weight_decay=0.1, max_grad_norm=0.1)
    optimizer = Opt([("w", p)], cfg, total_steps=9, precision=PrecisionConfig(loss_scale=2.0**24))
    assert optimizer.loss_scale is not None
    optimizer.loss_scale.every = 2

    master, scale, held = nn.Parameter(start.float()), 2.0**24, 0
    plain = torch.optim.AdamW([master], lr=0.01, weight_decay=0.1, fused=True)
    skipped = 0
    for _ in range(30):
        leaf = master.detach().half().requires_grad_()
        (loss(leaf) * scale).backward()
        assert leaf.grad is not None
        grad = leaf.grad.float() / scale
        norm = float(grad.norm())
        optimizer.zero_grad()
        optimizer.backward(loss(p))
        mine = optimizer.clip()
        finite = norm < float("inf")
        assert (mine == pytest.approx(norm, rel=1e-6)) if finite else not mine < float("inf")
        if finite:
            master.grad = grad * min(1.0, 0.1 / (norm + 1e-6))
            plain.step()
            optimizer.step()
            held += 1
            scale, held = (min(scale * 2, LARGEST), 0) if held == 2 else (scale, held)
        else:
            optimizer.skip()
            scale, held, skipped = scale / 2, 0, skipped + 1
        optimizer.loss_scale.after(finite)
        assert (optimizer.loss_scale.scale, optimizer.loss_scale.held) == (scale, held)
        torch.testing.assert_close(optimizer.masters["w"], master, rtol=1e-6, atol=1e-8)
    assert 3 < skipped < 27
    assert torch.equal(p, optimizer.masters["w"].half())


def test_small_gradients_need_the_scale() -> None:
    def norm(scale: float) -> float:
        p = nn.Parameter(torch.ones(4, dtype=torch.float16))
        optimizer = Opt(
            [("w", p)], OptimizerConfig(), total_steps=1, precision=PrecisionConfig(loss_scale=scale)
        )
        optimizer.backward((p * 1.0).float().sum() * 1e-8)
        return optimizer.clip()

    assert norm(1.0) == 0.0
    assert norm(65536.0) == pytest.approx(2e-8, rel=1e-3)


def in_float16(scale: float) -> TorchEngine:
    precision = PrecisionConfig(loss_scale=scale)
    engine = TorchEngine(
        tiny_model().half(), kernels.load("auto"), cut=MicroBatchPolicy(precision=precision),
        optimizer=OptimizerConfig(lr=0.01),
        total_steps=9,
    )  # fmt: skip
    assert engine.optimizer is not None
    assert engine.optimizer.loss_scale is not None
    engine.optimizer.loss_scale.every = 2
    return engine


def test_a_float16_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole, part, batch = in_float16(2.0**20), in_float16(2.0**20), weighted()
    for engine in (whole, part):
        seen = [engine.update(batch, pg_loss) for _ in range(3)]
    assert seen[0]["loss_scale"] == 2.0**20
    part.save(tmp_path)
    again = in_float16(1.0)
    again.load(tmp_path)
    for _ in range(3):
        assert again.update(batch, pg_loss) == whole.update(batch, pg_loss)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole.weights(), again.weights()))


def test_overflow_skips_steps_and_is_counted() -> None:
    engine = in_float16(2.0**38)
    before = {n: p.clone() for n, p in engine.weights()}
    seen = engine.update(weighted(), pg_loss)
    assert (seen["skipped_steps"], seen["loss_scale"]) == (1.0, 2.0**38)
    assert "grad_norm" not in seen
    assert all(torch.equal(p, before[n]) for n, p in engine.weights())
    assert engine.update(weighted(), pg_loss)["loss_scale"] == 2.0**37


# ---------------------------------------------------------------- dtypes


def test_sums_in_float32_keep_what_bfloat16_loses() -> None:
    """1 + 256 * 2^-9 is 1.5; in bfloat16 each addition to 1 is lost."""

    def summed(precision: PrecisionConfig) -> float:
        p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        optimizer = Opt([("w", p)], OptimizerConfig(max_grad_norm=None), total_steps=1, precision=precision)
        for slope in [1.0] + [2.0**-9] * 256:
            optimizer.backward((p * slope).sum())
        return optimizer.clip()

    assert summed(PrecisionConfig()) == 1.0
    assert summed(PrecisionConfig(reduce="float32")) == 1.5


def test_without_masters_small_steps_are_lost() -> None:
    def moved(precision: PrecisionConfig) -> tuple[float, torch.dtype]:
        p = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        optimizer = Opt(
            [("w", p)], OptimizerConfig(lr=1e-4, max_grad_norm=None), total_steps=99, precision=precision
        )
        for _ in range(99):
            p.grad = torch.ones_like(p)
            optimizer.clip()
            optimizer.step()
        return float(p.detach()[0, 0]), optimizer.state()["exp_avg.w"].dtype

    assert moved(PrecisionConfig(master_weights=False)) == (1.0, torch.bfloat16)
    assert moved(PrecisionConfig()) == (pytest.approx(0.99, abs=4e-3), torch.float32)


@pytest.mark.parametrize("family", ["qwen3", "gemma", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compute_dtype_keeps_gradients_float32_and_near(family: str, dtype: Any) -> None:
    plain, _ = gradients(MicroBatchPolicy(), weighted(), family)
    half, metrics = gradients(MicroBatchPolicy(precision=PrecisionConfig(compute=dtype)), weighted(), family)
    assert ("loss_scale" in metrics) == (dtype == "float16")
    assert all(g.dtype == torch.float32 for g in half.values())
    half = {n: g / metrics.get("loss_scale", 1.0) for n, g in half.items()}
    total, off = (torch.cat([x.flatten() for x in g]).norm() for g in (
        list(plain.values()), [half[n] - plain[n] for n in plain]))  # fmt: skip
    assert 1e-5 < off / total < (0.05 if family != "qwen3_moe" else 0.3)


def test_compute_dtype_is_autocast_around_the_layers() -> None:
    """The same numbers as the model's own forward under autocast, with the output layer in float32."""
    engine = TorchEngine(
        tiny_model(),
        kernels.load("torch"),
        cut=MicroBatchPolicy(precision=PrecisionConfig(compute="bfloat16")),
    )
    batch = weighted()
    mine_N = engine.forward(batch, "logprobs")
    model, at = tiny_model(), 0
    for length in batch.length_S.tolist():
        ids = batch.token_ids_N[at : at + length]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(ids[None]).last_hidden_state[0].float()
        logp = (hidden @ model.lm_head.weight.t()).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        mask = batch.mask_N[at + 1 : at + length]
        torch.testing.assert_close(mine_N[at + 1 : at + length][mask], logp[mask], atol=0.03, rtol=0)
        at += length


# ---------------------------------------------------------------- optimizers


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_implementations_are_equal_up_to_rounding(kind: Any) -> None:
    def trained(how: Any) -> dict[str, Tensor]:
        cfg = OptimizerConfig(name=kind, lr=0.01, weight_decay=0.1, implementation=how)
        engine = TorchEngine(
            tiny_model(), kernels.load("auto"), cut=MicroBatchPolicy(), optimizer=cfg, total_steps=4
        )
        for _ in range(4):
            engine.update(weighted(), pg_loss)
        return {n: p.clone() for n, p in engine.weights()}

    fused = trained("fused")
    for how in ("foreach", "for-loop"):
        for name, p in trained(how).items():
            torch.testing.assert_close(p, fused[name], rtol=1e-5, atol=1e-6)


def test_rounding_is_right_in_the_mean() -> None:
    gen = torch.Generator().manual_seed(0)
    for name in (narrow_adam.MEAN, narrow_adam.SQUARE):
        x = torch.randn(20, 33, generator=gen)
        x = x.square() if name == narrow_adam.SQUARE else x
        drawn = torch.stack(
            [unpacked(packed(name, x, torch.Generator().manual_seed(n)), name) for n in range(400)]
        )
        largest = x.abs().max()
        assert float((drawn[0] - x).abs().max() / largest) < 0.02
        assert float((drawn.mean(0) - x).abs().max() / largest) < 0.002


def test_a_second_moment_is_never_rounded_to_nothing() -> None:
    x = torch.tensor([[1.0, 1e-12, 0.0] + [0.5] * 253])
    again = unpacked(packed(narrow_adam.SQUARE, x, torch.Generator()), narrow_adam.SQUARE)
    assert float(again[0, 1]) > 0.0
    assert float(again[0, 2]) == 0.0


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_8_bits_track_adam_in_training(kind: Any) -> None:
    """200 steps of least squares by gradients with noise: the same losses on the way, and state a quarter the size."""

    def trained(state: Any) -> tuple[list[float], Opt]:
        gen = torch.Generator().manual_seed(0)
        inputs, wanted = torch.randn(64, 48, generator=gen), torch.randn(64, 24, generator=gen)
        one, two = (nn.Parameter(torch.randn(s, generator=gen) * 0.1) for s in ((64, 48), (24, 64)))
        cfg = OptimizerConfig(name=kind, lr=3e-3, weight_decay=0.01, state_dtype=state, max_grad_norm=None)
        optimizer = Opt([("one", one), ("two", two)], cfg, total_steps=200)
        losses = []
        for _ in range(200):
            rows = torch.randint(64, (16,), generator=gen)
            optimizer.zero_grad()
            optimizer.backward((torch.tanh(inputs[rows] @ one.t()) @ two.t() - wanted[rows]).square().mean())
            optimizer.clip()
            optimizer.step()
            with torch.no_grad():
                losses.append(float((torch.tanh(inputs @ one.t()) @ two.t() - wanted).square().mean()))
        return losses, optimizer

    (wide, full), (narrow, small) = trained("float32"), trained("int8")
    assert wide[-1] < 0.3 * wide[0]
    for at in (10, 50, 100, 199):
        assert narrow[at] == pytest.approx(wide[at], rel=0.05)
    sizes = [sum(t.nbytes for n, t in o.state().items() if "exp_avg" in n) for o in (full, small)]
    assert sizes[0] / sizes[1] > 3.9


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_8_bits_without_masters_are_those_of_the_same_numbers_in_float32(kind: Any) -> None:
    def stepped(dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, nn.Parameter]]:
        gen = torch.Generator().manual_seed(0)
        drawn = (
            (n, torch.randn(s, generator=gen).bfloat16().to(dtype)) for n, s in (("w", (7, 300)), ("b", (7,)))
        )
        named = {n: nn.Parameter(x) for n, x in drawn}
        cfg = OptimizerConfig(name=kind, lr=0.01, weight_decay=0.1, state_dtype="int8", max_grad_norm=None)
        precision = PrecisionConfig(master_weights=False)
        optimizer = Opt(named.items(), cfg, total_steps=9, precision=precision)
        for p in named.values():
            p.grad = torch.randn(p.shape, generator=gen).bfloat16().to(dtype)
        optimizer.clip()
        optimizer.step()
        return optimizer.state(), named

    (narrow, halves), (wide, wholes) = stepped(torch.bfloat16), stepped(torch.float32)
    assert set(narrow) == set(wide)
    assert all(narrow[n].dtype == wide[n].dtype and torch.equal(narrow[n], wide[n]) for n in wide)
    for name, p in halves.items():
        assert p.dtype == torch.bfloat16
        torch.testing.assert_close(p.float(), wholes[name], rtol=2**-7, atol=1e-4)


def drawn_step(optimizer: Opt, step: int) -> dict[str, torch.Tensor]:
    """A step by drawn gradients, which are returned."""
    gen = torch.Generator().manual_seed(step)
    for p in optimizer.parameters.values():
        p.grad = torch.randn(p.shape, generator=gen)
    given = {name: p.grad.clone() for name, p in optimizer.parameters.items()}
    optimizer.clip()
    optimizer.step()
    return given


def narrow(state: Any, **more: Any) -> tuple[Opt, dict[str, nn.Parameter]]:
    gen = torch.Generator().manual_seed(0)
    named = {n: nn.Parameter(torch.randn(s, generator=gen)) for n, s in (("w", (7, 300)), ("b", (7,)))}
    cfg = OptimizerConfig(lr=0.01, state_dtype=state, **more)
    return Opt(named.items(), cfg, total_steps=99), named


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_moments_in_bfloat16_are_those_of_a_naive_adam_that_rounds_them(kind: Any) -> None:
    """In float64 from what is stored; the moments are rounded to bfloat16 after each step, and not before they move the
    weights. Float32 may fall on the other side of a middle between two bfloat16: seldom, and by one of them."""
    optimizer, named = narrow("bfloat16", name=kind, weight_decay=0.1, decay_all=True, max_grad_norm=None)
    weight = {name: p.detach().double() for name, p in named.items()}
    zeros = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
    mean, square, moved = dict(zeros), dict(zeros), 0.0
    for step in range(1, 31):
        grads = drawn_step(optimizer, step)
        state = optimizer.state()
        for name, w in weight.items():
            g = grads[name].double() + (0.1 * w if kind == "adam" else 0.0)
            m, v = 0.9 * mean[name] + 0.1 * g, 0.999 * square[name] + 0.001 * g * g
            decayed = w if kind == "adam" else w * (1 - 0.01 * 0.1)
            weight[name] = decayed - 0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            stored = (state[f"{key}.{name}"] for key in (narrow_adam.MEAN, narrow_adam.SQUARE))
            for found, wanted, kept in zip(stored, (m, v), (mean, square)):
                assert found.dtype == torch.bfloat16
                rounded = wanted.float().bfloat16()
                assert (found != rounded).float().mean() < 0.01
                torch.testing.assert_close(found.double(), rounded.double(), rtol=2**-7, atol=1e-12)
                kept[name] = found.double()
            torch.testing.assert_close(named[name].detach().double(), weight[name], rtol=1e-5, atol=1e-6)
            moved += float((decayed - weight[name]).abs().mean())
    assert moved > 0.1


def test_a_second_moment_in_bfloat16_stays_where_a_step_changes_it_by_too_little() -> None:
    """1 * 0.999 + 0.001 * 1.5 is 1.0005, and the next bfloat16 after 1 is 1.0078; float32 has it."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        optimizer, named = narrow(dtype, max_grad_norm=None)
        drawn_step(optimizer, 0)
        optimizer.restore({n: torch.ones_like(t) for n, t in optimizer.state().items()}, 1)
        for p in named.values():
            p.grad = torch.full_like(p, 1.5**0.5)
        optimizer.step()
        found[dtype] = {float(x) for x in optimizer.state()["exp_avg_sq.w"].flatten()}
    assert found["bfloat16"] == {1.0}
    assert min(found["float32"]) == pytest.approx(1.0005)


@pytest.mark.parametrize(
    ("state", "kept", "of_one_dimension"),
    [
        ("bfloat16", {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}, torch.bfloat16),
        (
            "int8",
            {
                "exp_avg": torch.uint8,
                "exp_avg_scale": torch.float32,
                "exp_avg_sq": torch.uint8,
                "exp_avg_sq_scale": torch.float32,
            },
            torch.float32,
        ),
    ],
)
def test_narrow_moments_come_back_to_the_bit(
    state: str, kept: dict[str, torch.dtype], of_one_dimension: torch.dtype
) -> None:
    def walk(optimizer: Opt, steps: range) -> None:
        for step in steps:
            drawn_step(optimizer, step)

    (a, one), (b, two) = narrow(state), narrow(state)
    walk(a, range(3))
    saved = {n: t.clone() for n, t in a.state().items()}
    of_matrix = {n.removesuffix(".w"): t.dtype for n, t in saved.items() if n.endswith(".w")}
    assert of_matrix == {"steps": torch.float32, **kept}
    assert saved["exp_avg.b"].dtype == of_one_dimension
    with torch.no_grad():
        for name, p in one.items():
            two[name].copy_(p)
    b.restore(saved, 3)
    walk(a, range(3, 6))
    walk(b, range(3, 6))
    assert all(torch.equal(one[n], two[n]) for n in one)
    after = b.state()
    assert all(torch.equal(x, after[n]) for n, x in a.state().items())


# ---------------------------------------------------------------- offload


def test_kept_tensors_are_copies_on_the_host() -> None:
    a = torch.randn(50, 50, requires_grad=True)
    b = a * 2
    with kept_on_host(nn.Module(), smallest=0):
        c = (b * b).sum()
    b.detach().zero_()
    c.backward()
    torch.testing.assert_close(a.grad, 8 * a)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_gradients_are_equal_with_activations_on_the_host(
    family: str, checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "kept_on_host", partial(kept_on_host, smallest=0))
    plain, _ = gradients(MicroBatchPolicy(checkpoint=checkpoint), weighted(), family)
    away, _ = gradients(MicroBatchPolicy(checkpoint=checkpoint, offload=("activations",)), weighted(), family)
    assert all(torch.equal(plain[n], away[n]) for n in plain)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_the_whole_state_moves_and_steps_are_equal(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(offload: tuple[str, ...]) -> TorchEngine:
        engine = TorchEngine(
            tiny_model().bfloat16(), kernels.load("auto"), cut=MicroBatchPolicy(offload=offload),
            optimizer=OptimizerConfig(name=kind, lr=0.01, momentum=None if kind == "adamw" else 0.9), total_steps=4,
        )  # fmt: skip
        for _ in range(2):
            engine.update(weighted(), pg_loss)
        return engine

    here, away = trained(()), trained(("optimizer",))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(here.weights(), away.weights()))
    assert away.optimizer is not None
    moved: set[int] = set()

    def to(self: Tensor, device: torch.device) -> Tensor:
        moved.add(self.data_ptr())
        return self

    monkeypatch.setattr(Tensor, "to", to)
    state = {t.data_ptr() for t in away.optimizer.state().values() if t.ndim}  # no counts
    away.optimizer.place(torch.device("cpu"))
    assert moved == state


def test_weights_that_rest_are_fetched_for_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(TorchEngine, "place", lambda self, device: told.append(device))
    engine = TorchEngine(tiny_model(), kernels.load("auto"), cut=MicroBatchPolicy(), rests=True)
    assert told == ["cpu"]
    engine.forward(weighted(), "logprobs")
    assert told == ["cpu", "gpu", "cpu"]


# ---------------------------------------------------------------- compilation


@pytest.mark.parametrize(
    ("known", "checkpoint", "layers"),
    [
        (True, True, 1),  # the compiler takes ten seconds for the first layer and for the second
        pytest.param(True, True, 2, marks=pytest.mark.sweep),
        pytest.param(True, False, 2, marks=pytest.mark.sweep),
        pytest.param(False, False, 2, marks=pytest.mark.sweep),
    ],
)
def test_compiled_layers_give_equal_gradients(
    known: bool, checkpoint: bool, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and differentiated by torch's compiler, without the C++ that it would write (the sweep runs a
    training with that: test_dead_native.py)."""
    monkeypatch.setattr("test_train_torch.tiny_model", partial(tiny_model, layers=layers))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    if not known:
        monkeypatch.setattr("whet.models.fused_forward.known_family", lambda model, config: None)
    plain, _ = gradients(MicroBatchPolicy(checkpoint=checkpoint), weighted())
    compiled, _ = gradients(MicroBatchPolicy(checkpoint=checkpoint, compile=True), weighted())
    assert_near(compiled, plain, 2e-6)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.offload=[optimizer]"], "train.offload: frees memory of a GPU, but this stage trains on the CPU"),
        (
            ["train.offload=[critic]", "machine.device=cuda"],
            "critic: this stage has no critic (algorithm.name=grpo)",
        ),
        (
            ["train.offload=[reference]", "machine.device=cuda", "algorithm.kl={coef: 0.1, estimator: full}"],
            "reads the reference in every micro-batch",
        ),
        (
            ["train.offload=[policy]", "machine.device=cuda"],
            "policy: in one process rollouts are sampled from the same weights",
        ),
        (["train.precision.float8=rowwise", "model.lora.rank=2"], "it is not faster for adapters"),
        (["train.precision.float8=rowwise", "train.compile=true"], "torch.compile does not support it"),
        (["train.precision.float8=tensorwise", "machine.logprob_parity=on"], "logprob_parity=on requires equal ones"),
        (["train.router_aux_loss_coef=0.1"], "this model has none"),
        (["train.router_z_loss_coef=0.1"], "this model has none"),
        (["train.precision.compute=bfloat16", "model.dtype=bfloat16"], "the parameters are bfloat16"),
        (["train.precision.compute=bfloat16", "model.lora.rank=2"], "adapters compute in the dtype"),
        (["train.precision.compute=bfloat16", "machine.logprob_parity=on"], "logprob_parity=on requires equal ones"),
        (["train.compile=true", "machine.logprob_parity=on"], "machine.logprob_parity=on requires equal ones"),
        (["train.precision.reduce=float32"], "has no effect: parameters are float32"),
        (["train.precision.master_weights=false"], "has no effect: parameters are float32"),
        (
            ["train.precision.master_weights=false", "model.dtype=bfloat16", "model.lora.rank=2"],
            "adapters are always float32",
        ),
        (
            ["train.precision.master_weights=false", "train.precision.reduce=float32", "model.dtype=bfloat16"],
            "master_weights=false keeps none",
        ),
        (["train.precision.master_weights=false", "model.dtype=float16"], "needs float32 master weights"),
        (["train.precision.loss_scale=2.0", "model.dtype=bfloat16"], "nothing is float16"),
        (["train.optimizer.name=sgd", "train.optimizer.state_dtype=int8"], "name=sgd does not read it"),
        (
            ["train.optimizer.state_dtype=int8", "train.optimizer.implementation=for-loop"],
            "state_dtype=int8 has a separate implementation",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_or_changes_nothing_is_refused(overrides: list[str], said: str) -> None:
    base = {**TINY, "rewards": {"r": {"function": "exact"}}, "algorithm": {"name": "grpo"}}
    with pytest.raises(ConfigError) as caught:
        plans(load(None, overrides, base))
    assert said in str(caught.value)


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    base = {**TINY, "rewards": {"r": {"function": "exact"}}, "train": {**TINY["train"], "compile": True}}
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler.*no-such-compiler"):
        plans(load(None, (), base))
    monkeypatch.setenv("CXX", "cc")
    assert plans(load(None, (), base))[0].train.compile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000])
def test_squares_are_summed_in_sixteen_lanes(count: int, dtype: torch.dtype) -> None:
    """By hand: number i goes to lane i % 16; the upper half of the lanes is added to the lower one, and so on."""
    if build.if_built() is None:
        pytest.skip("no compiler")
    g = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    lanes = [0.0] * 16
    for i, x in enumerate(g.tolist()):
        lanes[i % 16] += x * x
    for half in (8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    assert precision.sum_of_squares([g]).item() == lanes[0]
    for odd in (torch.inf, torch.nan):
        assert not torch.isfinite(precision.total_norm([g, torch.tensor([odd]).to(dtype)]))


def test_the_norm_sums_large_tensors_some_rows_at_a_time(monkeypatch):
    """Where C does not compute: here since they are float64."""
    torch.manual_seed(0)
    sizes = (torch.randn(7, 5), torch.randn(40), torch.randn(3, 2, 4).transpose(0, 2), torch.tensor(2.0))
    grads = [g.double() for g in sizes]
    exact = sum(float((g.double() ** 2).sum()) for g in grads) ** 0.5
    seen: list[int] = []
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(
        torch.linalg, "vector_norm", lambda x, **how: seen.append(x.numel()) or norm(x, **how)
    )
    assert float(precision.total_norm(grads)) == pytest.approx(exact, rel=1e-15)
    assert seen == [35, 40, 24, 1]
    seen.clear()
    monkeypatch.setattr(precision, "NORMED", 10)
    assert float(precision.total_norm(grads)) == pytest.approx(exact, rel=1e-15)
    assert max(seen) == 10
    assert sum(seen) == 35 + 40 + 24 + 1


def test_one_rank_adds_the_norm_up_in_the_order_of_one_process():
    """Or the last bit of grad_norm says where a model was trained."""
    alone = SimpleNamespace(add=lambda x: x)
    one_rank: Any = SimpleNamespace(
        mesh=SimpleNamespace(device_type="cpu"),
        parallel=SimpleNamespace(counts=lambda name: True, experts=(), tp=alone, pp=alone),
        sharded={},
        shards=1,
    )
    torch.manual_seed(0)
    for _ in range(50):
        grads = {str(n): torch.randn(5, n + 1) for n in range(40)}
        assert torch.equal(DataParallel.norm(one_rank, grads), precision.total_norm(grads.values()))
