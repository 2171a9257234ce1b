"""Weights in 8 bits: their products against numbers rounded by hand, and engines that sample with them."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import whet
from asking import reply
from test_learning import SETUP, share_of_a
from test_native import Spy as Steps
from test_native import ask, at_step, engine, group, prompts, run, trained_logprobs
from test_native_graphs import Again
from test_plan import BASE, made, refused
from tiny import FEW, SPARSE, tiny_model
from whet.config.derived import content_of, quantised_size
from whet.config.load import load
from whet.config.memory_estimate import places
from whet.config.schema import LoraConfig, ModelConfig
from whet.config.sections.rollout import Quantization
from whet.config.sizes import new_shape
from whet.models import quantised as eight
from whet.models.lora import adapted, attach, merged, refresh
from whet.models.quantised import NUMBERS, SIDE, Quantised, held
from whet.rollout.engine import WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.rollout.native.graphs import NoHostReads
from whet.rollout.weights import copy_weights
from whet.sync.exchange import Publisher, Receiver
from whet.sync.files import Files
from whet.sync.replicas import Inbox
from whet.types import ConfigError, Sampling, WhetError

KINDS: tuple[Quantization, ...] = ("float8", "int8")


def missing(kind: Quantization) -> str:
    """Why this CPU has no such products."""
    try:
        eight.check_products(torch.device("cpu"), NUMBERS[kind], key="here")
    except ConfigError as error:
        return str(error)
    return ""


MISSING = {kind: missing(kind) for kind in reversed(KINDS)}
"""int8 first: with ONEDNN_MAX_CPU_ISA=AVX2 on a CPU that has more, a product in int8 takes those in float8 away."""
NEEDS = {kind: pytest.mark.skipif(bool(why), reason=why) for kind, why in MISSING.items()}
BOTH = [pytest.param(kind, marks=NEEDS[kind]) for kind in KINDS]
JOBS = [
    job for n, prompt in enumerate(prompts([3, 17, 17, 30])) for job in group(prompt, 3, max_tokens=12 + n)
]


def shifted(module: Any, by: float = 0.05) -> Any:
    """Another model of the same shape."""
    other = tiny_model(module.config.model_type, seed=7)
    with torch.no_grad():
        for p in other.parameters():
            p += by
    return other


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


# ---------------------------------------------------------------- products


def errors(x: torch.Tensor, kind: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """(x in float64 after its way through 8 bits, the most that each number may have moved)."""
    largest = x.abs().amax(1, keepdim=True).double()
    if kind == "int8":
        step = largest / 127
        return (x.double() / step).round() * step, step.expand_as(x) / 2
    scale = (largest / 448).float()
    moved = torch.maximum(
        x.abs().double() * 2.0**-4, scale.double() * 2.0**-10
    )  # 3 bits after the point; below 2^-6 even
    return (x / scale).to(NUMBERS[kind]).double() * scale.double(), moved


@pytest.mark.parametrize("kind", BOTH)
def test_products_are_those_of_rounded_numbers(kind: Quantization) -> None:
    """21 tokens: they are filled up, and the zeros change nothing. A bias is added after the scales."""
    gen = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=gen) for shape in ((21, 64), (48, 64), (48,)))
    x[3] *= 100.0
    weight[5] *= 1e-3
    y = F.linear(x, Quantised.like(weight, kind), bias)  # type: ignore[arg-type]
    (x8, dx), (w8, dw) = errors(x, kind), errors(weight, kind)
    own = 2.0**-7 if kind == "float8" else 1e-5  # bfloat16 products; float32
    torch.testing.assert_close(y.double() - bias, x8 @ w8.T, rtol=own, atol=1e-4)
    bound = dx @ weight.abs().double().T + x.abs().double() @ dw.T + dx @ dw.T
    exact = x.double() @ weight.double().T
    assert ((x8 @ w8.T - exact).abs() <= bound * (1 + 1e-6)).all()
    assert not torch.equal((y.double() - bias).float(), exact.float())


@pytest.mark.parametrize("kind", BOTH)
def test_a_row_does_not_depend_on_its_batch(kind: Quantization) -> None:
    gen = torch.Generator().manual_seed(1)
    x, matrix = torch.randn(40, 48, generator=gen), Quantised.like(torch.randn(32, 48, generator=gen), kind)
    whole = matrix.times(x)
    assert all(
        torch.equal(matrix.times(x[at : at + n]), whole[at : at + n]) for at in (0, 7, 23) for n in (1, 5, 17)
    )
    assert torch.equal(matrix.times(x.view(2, 20, 48)), whole.view(2, 20, 32))
    assert matrix.times(x[:0]).shape == (0, 32)


@pytest.mark.parametrize("kind", BOTH)
def test_what_is_not_finite_stays_so_and_zeros_stay_zeros(kind: Quantization) -> None:
    x = torch.ones(3, 16)
    x[0, 2], x[1, 2], x[2] = float("nan"), float("inf"), 0.0
    y = Quantised.like(torch.eye(16), kind).times(x)
    assert not y[:2].isfinite().any()
    assert not y[2].any()
    assert not Quantised.like(torch.zeros(16, 16), kind).times(torch.ones(1, 16)).any()


def dequantised(matrix: Quantised) -> torch.Tensor:
    """As the parameter that it stands for."""
    wide = matrix.numbers.float() * matrix.scale
    return wide.transpose(-1, -2) if matrix.turned else wide


def test_nothing_but_a_product_takes_them() -> None:
    matrix = Quantised.like(torch.eye(16), "int8")
    with pytest.raises(TypeError):
        torch.add(torch.ones(16, 16), matrix)  # type: ignore[call-overload]


# ---------------------------------------------------------------- engines


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("family", FEW)
def test_sampled_log_probs_are_those_of_the_quantised_model(family: str, kind: Quantization) -> None:
    """To the bit those of the engine's own module, and near those of a model that has the same weights, dequantised,
    and activations that are not rounded."""
    module = tiny_model(family)
    before = weights(module)
    e = engine(module, quantization=kind)
    plain = tiny_model(family)
    eight_bits = {name: dequantised(matrix) for name, matrix in held(e.module).items()}
    copy_weights(plain, (before | eight_bits).items())
    done = run(ask(e, JOBS))
    gaps = []
    for (prompt, _), c in zip(JOBS, done):
        sampled = torch.tensor(c.logprobs)
        assert torch.equal(sampled, trained_logprobs(e.module, prompt, c.token_ids, 1.0))
        gaps.append((sampled - trained_logprobs(plain, prompt, c.token_ids, 1.0)).abs())
    gap = torch.cat(gaps)
    assert 0 < float(gap.mean()) < {"float8": 0.1, "int8": 0.03}[kind] * (3 if family == "qwen3_moe" else 1)
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters()), (
        "the trainer's weights have moved"
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@NEEDS["float8"]
def test_what_is_in_8_bits_and_what_stays(family: str) -> None:
    module = tiny_model(family)
    e = engine(module, quantization="float8")
    own, theirs = dict(e.module.named_parameters()), dict(module.named_parameters())
    assert own.keys() | held(e.module).keys() == theirs.keys()
    assert not own.keys() & held(e.module).keys()
    assert all(own[n] is theirs[n] for n in own), "what is not quantised is held twice"
    stays = ("embed", "norm", "lm_head", "mlp.gate.")
    assert all(any(part in n for part in stays) for n in own)
    assert not any(any(part in n for part in stays) for n in held(e.module))
    sizes = {n: (q.numbers.nbytes, q.scale.nbytes) for n, q in held(e.module).items()}
    assert all(sizes[n] == (theirs[n].numel(), 4 * theirs[n][..., 0].numel()) for n in sizes)


@pytest.mark.parametrize("kind", BOTH)
def test_a_sync_changes_what_is_sampled(kind: Quantization) -> None:
    """As a module that learns in place, as another module, and tensor by tensor: always as an engine that began so."""
    module = tiny_model()
    other = shifted(module)
    expected = [c.logprobs for c in run(ask(engine(other, quantization=kind), JOBS))]

    async def synced(e: NativeEngine, update: WeightUpdate) -> list[list[float]]:
        await e.update_weights(update)
        done = await ask(e, JOBS)
        assert {v for c in done for v in c.versions} == {1}
        return [c.logprobs for c in done]

    stale = engine(module, quantization=kind)
    assert [c.logprobs for c in run(ask(stale, JOBS))] != expected
    assert run(synced(stale, WeightUpdate(version=1, module=other))) == expected
    named = list(other.named_parameters())
    assert (
        run(synced(engine(tiny_model(), quantization=kind), WeightUpdate(version=1, tensors=iter(named))))
        == expected
    )
    mine = engine(module, quantization=kind)
    copy_weights(module, iter(named))
    assert run(synced(mine, WeightUpdate(version=1, module=module))) == expected


@pytest.mark.parametrize("whole", [True, False])
@NEEDS["int8"]
def test_versions_that_travel_are_proved_as_they_were_sent(tmp_path: Path, whole: bool) -> None:
    """What is sent is what is trained; the receipt is of that, and what has not changed stays as it is in 8 bits."""
    policy, e = tiny_model(seed=3), engine(tiny_model(), quantization="int8")
    files = Files(tmp_path)
    publisher = Publisher(files, receipts=files.receipts, whole=whole)
    receiver = Receiver(files, name="one", confirm=files.confirm)
    for version in (1, 2):
        with torch.no_grad():
            policy.model.layers[0].mlp.up_proj.weight += 0.1
        sent = publisher.send(version, policy.named_parameters())
        assert run(receiver.load(e, version)).proof == sent.digest
        assert sum(entry.sent for entry in sent.entries) == (
            len(sent.entries) if whole or version == 1 else 1
        )
        publisher.look()
        expected = run(ask(engine(policy, quantization="int8"), JOBS))
        assert [c.logprobs for c in run(ask(e, JOBS))] == [c.logprobs for c in expected]


@NEEDS["int8"]
def test_a_part_of_the_weights_is_no_version() -> None:
    e = engine(tiny_model(), quantization="int8")
    named = [(n, p) for n, p in tiny_model(seed=3).named_parameters() if "v_proj" not in n]
    with pytest.raises(WhetError, match=r"2 of \d+ parameters were not received: .*v_proj"):
        run(e.update_weights(WeightUpdate(version=1, tensors=iter(named))))
    with pytest.raises(WhetError, match="incomplete"):
        run(reply(e, [3], Sampling()))
    with pytest.raises(
        WhetError, match=r"is \(61, 64\), but the engine was built for \(61, 32\); create a new engine"
    ):
        run(engine(quantization="int8").update_weights(WeightUpdate(version=1, module=wider())))


def wider() -> Any:
    """A model of other sizes."""
    other = tiny_model()
    other.model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(61, 64))
    return other


@NEEDS["int8"]
def test_interrupted_and_continued_is_uninterrupted() -> None:
    module = tiny_model()
    expected = run(ask(engine(module, quantization="int8"), JOBS))

    async def interrupted(e: NativeEngine) -> list[Any]:
        spy = Steps(e)
        work = asyncio.create_task(ask(e, JOBS))
        await at_step(spy, 5)
        await e.pause(finish=False)
        await e.place("cpu")
        await e.place("gpu")
        await e.update_weights(WeightUpdate(version=1, module=module))
        return await work

    done = run(interrupted(engine(module, quantization="int8")))
    assert [c.logprobs for c in done] == [c.logprobs for c in expected]


@NEEDS["int8"]
@NEEDS["float8"]
def test_steps_can_be_captured() -> None:
    """Nothing makes the host wait for the device; at fixed shapes weights that change in place are seen."""
    module = tiny_model()
    for kind in KINDS:
        with NoHostReads():
            Quantised.like(torch.ones(16, 16), kind).times(torch.ones(3, 16))
        e = engine(module, quantization=kind, recorder=(recorder := Again()))
        plain = engine(module, quantization=kind)
        for version, source in enumerate((module, shifted(module))):
            run(e.update_weights(WeightUpdate(version=version, module=source)))
            run(plain.update_weights(WeightUpdate(version=version, module=source)))
            assert run(ask(e, JOBS)) == run(ask(plain, JOBS))
        assert recorder.captures > 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@NEEDS["int8"]
def test_adapters_have_their_effect(family: str) -> None:
    module = tiny_model(family)
    experts = ("gate_up_proj", "down_proj") if family == "qwen3_moe" else ()
    attach(module, LoraConfig(rank=2, targets=("all-linear", *experts)), seed=0)
    e = engine(module, quantization="int8")
    run(ask(e, JOBS))
    with torch.no_grad():
        for layer in adapted(module).values():
            layer.lora_B.normal_(std=0.3)
    refresh(module)
    run(e.update_weights(WeightUpdate(version=1, module=module)))
    expected = run(ask(engine(merged(module), quantization="int8"), JOBS))
    assert [c.logprobs for c in run(ask(e, JOBS))] == [c.logprobs for c in expected]


# ---------------------------------------------------------------- refusals


def test_a_device_without_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*args: object, **how: object) -> torch.Tensor:
        raise RuntimeError("not on this device")

    for kind, function in (("float8", "_scaled_mm"), ("int8", "_int_mm")):
        with monkeypatch.context() as patch:
            patch.setattr(torch, function, lacks)
            said = rf"rollout\.quantization: this CPU has no products in {kind} .*compute capability"
            with pytest.raises(ConfigError, match=said):
                engine(quantization=kind)


def test_a_cpu_whose_sums_are_cut_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of oneDNN on a CPU without VNNI: pairs of products are added in 16 bits."""

    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The left factor as an unsigned number, and what that adds taken off again."""
        pairs = ((a.int() + 128)[:, :, None] * b.int()[None]).unflatten(1, (-1, 2)).sum(2)
        return (pairs.clamp(-(2**15), 2**15 - 1).sum(1) - 128 * b.int().sum(0)).int()

    monkeypatch.setattr(torch, "_int_mm", saturating)
    with pytest.raises(ConfigError, match=r"no products in int8 \(their sums are cut off at 16 bits\)"):
        engine(quantization="int8")


@NEEDS["int8"]
def test_matrices_that_do_not_fit_are_told(caplog: pytest.LogCaptureFixture) -> None:
    module = tiny_model()
    narrow = torch.nn.Linear(32, 24, bias=False)
    module.model.layers[0].mlp.gate_proj = narrow
    module.model.layers[0].mlp.up_proj = torch.nn.Linear(32, 24, bias=False)
    module.model.layers[0].mlp.down_proj = torch.nn.Linear(24, 32, bias=False)
    with caplog.at_level(logging.WARNING):
        e = engine(module, quantization="int8")
    assert "3 matrices are not quantised, e.g. model.layers.0.mlp.gate_proj.weight" in caplog.text
    assert dict(e.module.named_parameters())["model.layers.0.mlp.gate_proj.weight"] is narrow.weight
    run(ask(e, JOBS[:2]))
    for layer in module.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(part, name, torch.nn.Linear(SIDE + 1, SIDE + 1))
    with pytest.raises(ConfigError, match="has no linear layer whose sides are multiples of 16"):
        eight.quantise(module, "int8", experts=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("machine.logprob_parity=on", "machine.logprob_parity=on requires equal ones"),
        ("rollout.engine=hf", "rollout.engine=hf samples with the original weights"),
        (
            "rollout.replicas=1; model.lora={rank: 2}; sync.content=adapters",
            "engines keep no original weights",
        ),
        ("stages=[{name: a, rollout: {quantization: int8}}]", "one engine serves the whole run"),
    ],
)
def test_what_does_not_go_with_it_is_refused(given: str, said: str) -> None:
    assert said in refused("rollout.quantization=float8", *given.split("; "))


def test_adapters_travel_merged() -> None:
    given = load(None, ("model.lora={rank: 2}", "rollout.replicas=1"), BASE).config
    assert content_of(given) == "adapters"
    eight_bits = given.rollout.model_copy(update={"quantization": "int8"})
    assert content_of(given.model_copy(update={"rollout": eight_bits})) == "full"


@NEEDS["int8"]
def test_a_replica_that_has_only_8_bits_gives_none_away() -> None:
    inbox = Inbox(engine(quantization="int8").module, name="one", adapters=False, put=lambda x: x)
    inbox.receiver.held = object()  # type: ignore[assignment]
    with pytest.raises(WhetError, match="one has its weights only quantised"):
        inbox.give()


@NEEDS["int8"]
def test_graphs_go_when_quantised_weights_have_moved() -> None:
    """A graph reads addresses; weights that were away and came back have others."""
    recorder = Again()
    e = engine(tiny_model(), quantization="int8", max_num_seqs=1, recorder=recorder)
    jobs = group(prompts([5])[0], 1, max_tokens=4, ignore_eos=True)
    run(ask(e, jobs))
    run(ask(e, jobs))
    assert recorder.captures == 1
    weights = next(iter(held(e.module).values()))
    kept, weights.numbers = weights.numbers, weights.numbers.clone()  # as `place` does on a GPU
    run(ask(e, jobs))
    assert recorder.captures == 2
    assert kept.data_ptr() != weights.numbers.data_ptr()


# ---------------------------------------------------------------- mxfp4


def in_mxfp4(row: list[float]) -> list[float]:
    """32 numbers by the definition, in float64: the smallest power of two by which the largest is at most 6, and the
    nearest of e2m1's values, away from 0 in the middle."""
    largest = max(map(abs, row))
    if largest == 0:
        return [0.0] * len(row)
    power = 2.0 ** math.ceil(math.log2(largest / 6))
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    nearest = (
        max(v for v in values if abs(abs(x) / power - v) == min(abs(abs(x) / power - u) for u in values))
        for x in row
    )
    return [math.copysign(v * power, x) for v, x in zip(nearest, row)]


def test_mxfp4_by_its_definition() -> None:
    """Also where the largest is exactly 6 times a power of two, and for numbers in the middle of two."""
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 8, 64, generator=gen) * torch.logspace(-3, 3, 8)[:, None]
    weight[0, 0] = 0
    weight[1, 2, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0])
    weight[1, 2, 9:] = 0.1
    weight = weight.bfloat16().float()
    four = Quantised.like(weight, "mxfp4")
    expected = [in_mxfp4(block) for block in weight.double().view(-1, 32).tolist()]
    assert four.whole(torch.float32).view(-1, 32).tolist() == expected  # type: ignore[attr-defined]
    assert four.shape == weight.shape
    assert (four.numbers.nbytes, four.scale.nbytes) == (weight.numel() // 2, weight.numel() // 32)


@pytest.mark.parametrize("family", SPARSE)
def test_experts_in_mxfp4_sample_as_a_model_of_the_rounded_weights(family: str) -> None:
    """To the bit, before and after a sync: activations are not rounded. A stack whose inputs are no multiple of 32
    stays, and so does all that is no expert's. gpt-oss has its stacks by inputs."""

    def rounded(module: Any) -> Any:
        plain = tiny_model(family)
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(module.get_parameter(name))
                if name.endswith("gate_up_proj"):
                    by_outputs = p.mT if family == "gpt_oss" else p
                    by_outputs.copy_(Quantised.like(by_outputs, "mxfp4").whole(torch.float32))  # type: ignore[attr-defined]
        return plain

    module = tiny_model(family)
    e = engine(module, quantization="mxfp4")
    assert {name.rpartition(".")[2] for name in held(e.module)} == {"gate_up_proj"}
    said = [c.logprobs for c in run(ask(e, JOBS))]
    assert said == [c.logprobs for c in run(ask(engine(rounded(module)), JOBS))]
    assert said != [c.logprobs for c in run(ask(engine(module), JOBS))]
    other = tiny_model(family, seed=7)

    async def synced(update: WeightUpdate) -> list[Any]:
        await e.update_weights(update)
        return [c.logprobs for c in await ask(e, JOBS)]

    expected = [c.logprobs for c in run(ask(engine(rounded(other)), JOBS))]
    assert run(synced(WeightUpdate(version=1, module=other))) == expected
    run(synced(WeightUpdate(version=2, module=module)))
    assert run(synced(WeightUpdate(version=3, tensors=iter(list(other.named_parameters()))))) == expected


@pytest.mark.parametrize("kind", ["int8", "float8", "mxfp4"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_makes_its_output_none(kind: Quantization, bad: float) -> None:
    """A policy that has diverged must fail, not sample from zeros."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    weight[2, 3] = bad
    y = Quantised.like(weight, kind).times(torch.ones(3, 64))
    assert not y[:, 2].isfinite().any()
    assert y[:, [0, 1, *range(3, 32)]].isfinite().all()


def test_mxfp4_needs_experts() -> None:
    with pytest.raises(ConfigError, match="has no experts with inputs by 32"):
        engine(tiny_model("qwen3"), quantization="mxfp4")


# ---------------------------------------------------------------- plans and runs


def test_memory_by_hand() -> None:
    """Hidden 32, ffn 96, 2 layers: 2 * (4 * 32 * 32 + 3 * 96 * 32) numbers, and 2 * (4 * 32 + 2 * 96 + 32) scales."""
    eight_bits, numbers = 26624 + 4 * 704, 26624
    own = {p.name: p.phases for p in places(made("rollout.quantization=int8"))}["this process"]
    assert all(phase.parts["quantised weights"] == eight_bits for phase in own)
    whole = {p.name: p.phases for p in places(made("rollout.replicas=2"))}["each replica"][0].parts["policy"]
    start, sampling = {
        p.name: p.phases for p in places(made("rollout.replicas=2", "rollout.quantization=int8"))
    }["each replica"]
    assert (start.parts["policy"], sampling.parts["policy"]) == (whole, whole - 4 * numbers)
    assert start.parts["quantised weights"] == sampling.parts["quantised weights"] == eight_bits


def test_memory_of_mxfp4_by_hand() -> None:
    """Half a byte a number of the experts, and a byte for 32; stacks of other inputs stay."""
    mixture = {
        "name": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_experts": 4,
        "num_hidden_layers": 1,
    }
    shape = new_shape(ModelConfig(scratch=mixture), vocab_size=50)
    up, down = 4 * 2 * 96 * 64, 4 * 64 * 96
    assert quantised_size(shape.tensors, "mxfp4") == (up + down, (up + down) // 2 + (up + down) // 32)
    narrow = new_shape(ModelConfig(scratch=mixture | {"intermediate_size": 48}), vocab_size=50)
    assert quantised_size(narrow.tensors, "mxfp4")[0] == up // 2


@NEEDS["float8"]
def test_a_run_learns(tmp_path: Path) -> None:
    """The engine's log-probs differ from the trainer's, so old ones are computed anew: in one pass every ratio is 1,
    and a clip of nothing never bites."""
    result = whet.train(
        rewards=share_of_a,
        run_dir=str(tmp_path / "run"),
        **SETUP,
        data={"max_prompt_tokens": 8, "train": [{"path": str(Path(__file__).parent / "data/words.jsonl")}]},
        rollout={
            "group_size": 4,
            "sampling": {"max_tokens": 5, "ignore_eos": True},
            "quantization": "float8",
        },
        train={
            "steps": 16,
            "tasks_per_step": 8,
            "optimizer": {"lr": 1e-2},
            "forward_micro_batch_tokens": 4096,
        },
        algorithm={
            "loss": {"clip_low": 1e-4, "clip_high": 1e-4},
            "correction": {"weight": {"name": "token", "high": 2.0}},
        },
    )
    rewards = [m["reward/mean"] for m in result.metrics]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.8
    first = result.metrics[0]
    assert 1e-4 < first["train/mismatch_mean_nats"] < 0.1
    assert first["train/mismatch_frac"] > 0.9
    assert first["train/clip_frac"] == 0.0
