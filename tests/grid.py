"""The grid of layouts: an engine on ranks against the same engine in one process. What `benchmarks/layouts.py` measures
and a part of which `test_ranks_grid.py` runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from test_train_torch import CUT, pg_loss, weighted
from tiny import tiny_model
from whet.algos.critic import value_loss
from whet.batch import Batch, Loss, Outputs
from whet.config.deepspeed import engine_config
from whet.config.schema import OptimizerConfig, PrecisionConfig, TrainConfig
from whet.config.sections.model import LoraConfig
from whet.models import kernels
from whet.models.load import value_head
from whet.models.lora import attach, learned, refresh
from whet.models.mesh import Dims
from whet.models.sharded import Sharding
from whet.training.engine import FullKl
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.ranks import RankGroup, Ranks
from whet.training.torch import TorchEngine
from whet.types import Json


@dataclass(frozen=True)
class Layout:
    """Ranks, and the model that they share: experts need some, chunks need layers."""

    dims: Dims
    chunks: int = 1
    family: str = "qwen3"
    layers: int = 2
    sharding: Sharding = field(default_factory=Sharding)
    zero: Json | None = None
    """Of a deepspeed_config: DeepSpeed shards, and not FSDP2."""


MOE = "qwen3_moe"
LAYOUTS: dict[str, Layout] = {
    "dp_shard 2": Layout(Dims(dp_shard=2)),
    "dp_replicate 2": Layout(Dims(dp_replicate=2)),
    "tp 2": Layout(Dims(tp=2)),
    "cp 2": Layout(Dims(cp=2)),
    "pp 2": Layout(Dims(pp=2)),
    "pp 2 interleaved": Layout(Dims(pp=2), chunks=2, layers=5),
    "ep 2": Layout(Dims(dp_shard=2, ep=2), family=MOE),
    "dp_shard 4": Layout(Dims(dp_shard=4)),
    "dp_replicate 2 x dp_shard 2": Layout(Dims(dp_replicate=2, dp_shard=2)),
    "dp_shard 2 x tp 2": Layout(Dims(dp_shard=2, tp=2)),
    "dp_shard 2 x cp 2": Layout(Dims(dp_shard=2, cp=2)),
    "dp_shard 2 x pp 2": Layout(Dims(dp_shard=2, pp=2)),
    "dp_replicate 2 x pp 2 interleaved": Layout(Dims(dp_replicate=2, pp=2), chunks=2, layers=4),
    "tp 2 x cp 2": Layout(Dims(tp=2, cp=2)),
    "tp 2 x pp 2": Layout(Dims(tp=2, pp=2)),
    "cp 2 x pp 2": Layout(Dims(cp=2, pp=2)),
    "dp_shard 4 x ep 2": Layout(Dims(dp_shard=4, ep=2), family=MOE),
    "dp_replicate 2 x ep 2": Layout(Dims(dp_replicate=2, dp_shard=2, ep=2), family=MOE),
    "tp 2 x ep 2": Layout(Dims(tp=2, dp_shard=2, ep=2), family=MOE),
    "cp 2 x ep 2": Layout(Dims(cp=2, dp_shard=2, ep=2), family=MOE),
    "pp 2 x ep 2": Layout(Dims(pp=2, dp_shard=2, ep=2), family=MOE),
}


@dataclass(frozen=True)
class Way:
    """How a batch is cut and what learns."""

    cut: MicroBatchPolicy = CUT
    lora: float | None = None
    """Dropout of the adapters, if there are any."""
    experts: Literal["each", "shared"] | None = None
    """Their adapters, too."""
    dtype: torch.dtype = torch.float32
    """Of the parameters."""


WAYS: dict[str, Way] = {
    "by tokens": Way(replace(CUT, max_tokens=30, share_prompts=False)),
    "by rollouts": Way(replace(CUT, max_rollouts=2, share_prompts=False)),
    "shared prompts": Way(replace(CUT, max_tokens=30)),
    "LoRA": Way(replace(CUT, max_tokens=30), lora=0.3),
    "checkpointing": Way(replace(CUT, max_tokens=30, checkpoint=True)),
    "offload": Way(replace(CUT, max_tokens=30, offload=("optimizer", "activations"))),
}
EACH = Way(replace(CUT, max_tokens=30), lora=0.0, experts="each")
SHARED = Way(replace(CUT, max_tokens=30, checkpoint=True), lora=0.0, experts="shared")
"""With adapters of experts, which families of dense layers cannot have."""
EVERYTHING = ("v_proj", "o_proj", "gate_up_proj", "down_proj")
BIG = OptimizerConfig(name="sgd", lr=1024.0, max_grad_norm=None)
"""Its one step shows the gradient: what the parameters moved by."""
SGD = OptimizerConfig(name="sgd", lr=0.02, momentum=0.9, max_grad_norm=0.5)
ADAM = OptimizerConfig(lr=1e-3, eps=1e-3)
STEPS = 3

Compared = Callable[[Ranks, Layout, Way, "Note"], None]


class Note(Protocol):
    def __call__(self, what: str, error: float, name: str = "") -> None: ...


def started(world: int, *, timeout_s: float = 120.0) -> Ranks:
    """The processes for all layouts of so many ranks."""
    return Ranks(Dims(dp_replicate=world), timeout_s=timeout_s)


def model_of(layout: Layout, way: Way, *, seed: int = 0) -> PreTrainedModel:
    """seed: of all weights, or of the adapters where there are any."""
    model = tiny_model(layout.family, layers=layout.layers, seed=0 if way.lora is not None else seed)
    model.to(way.dtype)  # type: ignore[arg-type]
    if way.lora is not None:
        experts = {} if way.experts is None else {"experts": way.experts, "targets": EVERYTHING}
        attach(model, LoraConfig(rank=4, dropout=way.lora, **experts), seed=1)
        gen = torch.Generator().manual_seed(5 + seed)
        with torch.no_grad():
            for name, p in learned(model):
                if "lora_B" in name:
                    p.copy_(torch.randn(p.shape, generator=gen) * 0.1)
        refresh(model)
    return model


def pair(
    ranks: Ranks, layout: Layout, way: Way, *, model: PreTrainedModel, role: str = "policy", **arguments: Any
) -> tuple[TorchEngine, RankGroup]:
    """The same engine in this process and on the ranks."""
    head = arguments.pop("value_head", None)
    heads: list[dict[str, Any]] = [
        {"value_head": copy.deepcopy(head)} if head is not None else {} for _ in "12"
    ]
    one = TorchEngine(copy.deepcopy(model), kernels.load("auto"), cut=way.cut, **heads[0], **arguments)
    return one, group(ranks, layout, way, model=model, role=role, **heads[1], **arguments)


def group(
    ranks: Ranks, layout: Layout, way: Way, *, model: PreTrainedModel, role: str = "policy", **arguments: Any
) -> RankGroup:
    how: dict[str, Any] = {"dims": layout.dims, "chunks": layout.chunks, "sharding": layout.sharding}
    if layout.zero is not None:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        how["deepspeed"] = by_deepspeed(layout.zero, arguments.get("optimizer"), dtype, way.cut.precision)
    return RankGroup(ranks, role, model, cut=way.cut, **how, **arguments)


def by_deepspeed(
    zero: Json,
    optimizer: OptimizerConfig | None,
    dtype: str = "float32",
    precision: PrecisionConfig | None = None,
) -> Json:
    """What `placement` has DeepSpeed start with."""
    how = {"precision": precision or PrecisionConfig()}
    train = TrainConfig(engine_arguments={"zero_optimization": zero}, **how)
    return engine_config(train, optimizer, dtype)


def learning(**arguments: Any) -> dict[str, Any]:
    return {"optimizer": SGD, "total_steps": 4, "seed": 3, **arguments}


def error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, in units of the norm expected."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


def note_tensors(note: Note, what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        note(what, error(found[name], x), name)


def note_metrics(note: Note, found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        # what is 0 but for rounding (a log-prob against the same log-prob) has no relative error
        note("metrics", abs(found[name] - x) / max(abs(x), 1e-3), name)


def moved(engine: Any, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of the step that BIG has just taken."""
    return {n: (before[n] - p.detach()) / BIG.lr for n, p in learned(engine.module)}


def clipped_values(batch: Batch, out: Outputs) -> Loss:
    return value_loss(batch, out, clip=0.5)


def own_rounding(layout: Layout, way: Way) -> float:
    """How far the gradient of one process in float32 is from that in float64: no layout can be expected to be nearer to
    it than that, unless it adds up in the same order."""
    made = [model_of(layout, way), model_of(layout, way).double()]
    made[1].config._experts_implementation = "eager"  # transformers' grouped product has no float64
    found = []
    for model, kernel in zip(made, ("auto", "torch")):
        engine = TorchEngine(model, kernels.load(kernel), cut=way.cut, **learning(optimizer=BIG))
        found.append(_gradients(engine))
    return max(error(found[0][name], x) for name, x in found[1].items())


def _gradients(engine: TorchEngine) -> dict[str, Tensor]:
    """Taken where the optimizer would follow them."""
    optimizer, seen = engine.optimizer, {}
    assert optimizer is not None

    def step() -> None:
        at_parameters = {n: p.grad for n, p in optimizer.parameters.items() if p.grad is not None}
        seen.update({n: g.clone() for n, g in (at_parameters | optimizer.wide).items()})

    optimizer.step = step  # type: ignore[method-assign]
    engine.update(weighted(), pg_loss)
    return seen


def policy(ranks: Ranks, layout: Layout, way: Way, note: Note) -> None:
    """Log-probs, gradients, metrics, and the weights after three steps."""
    one, many = pair(ranks, layout, way, model=model_of(layout, way), **learning(optimizer=BIG))
    before = {n: p.detach().clone() for n, p in learned(one.module)}
    note_metrics(note, many.update(weighted(), pg_loss), one.update(weighted(), pg_loss))
    note_tensors(note, "gradients", moved(many, before), moved(one, before))
    one, many = pair(ranks, layout, way, model=model_of(layout, way), **learning())
    for want in ("logprobs", "collision", "discriminant", "centred_discriminant"):
        found, expected = many.forward(weighted(), want), one.forward(weighted(), want)  # type: ignore[arg-type]
        note("log-probs", error(found, expected))
    for seed in range(STEPS):
        note_metrics(note, many.update(weighted(seed), pg_loss), one.update(weighted(seed), pg_loss))
    note_tensors(note, "weights", dict(many.weights()), dict(one.weights()))


def critic(ranks: Ranks, layout: Layout, way: Way, note: Note) -> None:
    head = value_head(32, 0)
    arguments = learning(value_head=head, whole=True)
    one, many = pair(ranks, layout, way, model=model_of(layout, way), role="critic", **arguments)
    for seed in range(STEPS):
        batch = weighted(seed)
        batch = replace(batch, return_N=batch.adv_N, value_N=one.forward(batch, "values"))
        note("log-probs", error(many.forward(batch, "values"), batch.value_N))  # type: ignore[arg-type]
        note_metrics(note, many.update(batch, clipped_values), one.update(batch, clipped_values))
    note("weights", error(many.forward(batch, "values"), one.forward(batch, "values")))


def reference(ranks: Ranks, layout: Layout, way: Way, note: Note) -> None:
    """Its log-probs, the divergence from it over the whole vocabulary, and a policy copied into it."""
    one, many = pair(ranks, layout, way, model=model_of(layout, way), **learning())
    far = model_of(layout, way, seed=9).requires_grad_(False)
    far_one, far_many = pair(ranks, layout, way, model=far, role="reference")
    note(
        "log-probs", error(far_many.forward(weighted(), "logprobs"), far_one.forward(weighted(), "logprobs"))
    )
    one.full_kl, many.full_kl = FullKl(0.3, far_one), FullKl(0.3, far_many)  # type: ignore[arg-type]
    for seed in range(STEPS):
        note_metrics(note, many.update(weighted(seed), pg_loss), one.update(weighted(seed), pg_loss))
    note_tensors(note, "weights", dict(many.weights()), dict(one.weights()))
    far_many.copy_from(many)
    said = far_many.forward(weighted(), "logprobs"), many.forward(weighted(), "logprobs")
    torch.testing.assert_close(*said, rtol=0, atol=0)
    far_one.copy_from(one)
    note_metrics(note, many.update(weighted(), pg_loss), one.update(weighted(), pg_loss))
    far_one.copy_from(one, 0.25)
    far_many.copy_from(many, 0.25)
    found, expected = (far.forward(weighted(), "logprobs") for far in (far_many, far_one))
    note("log-probs", error(found, expected))


def resumed(ranks: Ranks, layout: Layout, way: Way, note: Note, *, folder: Path) -> None:
    """Saved on the layout and read by one process is the same file to the byte; what one process saved goes on here."""
    arguments = learning(optimizer=ADAM)
    one, many = pair(ranks, layout, way, model=model_of(layout, way), **arguments)
    many.update(weighted(), pg_loss)
    many.save(folder / "many")
    many.capture()(folder / "captured")
    one.load(folder / "many")
    note_tensors(note, "read back", dict(one.weights()), dict(many.weights()))
    one.save(folder / "one")
    for file in ("model.safetensors", "optimizer.safetensors"):
        written = (folder / "many" / file).read_bytes()
        assert written == (folder / "one" / file).read_bytes() == (folder / "captured" / file).read_bytes(), (
            file
        )
    fresh = group(ranks, layout, way, model=model_of(layout, way), **arguments)
    fresh.load(folder / "one")
    for seed in (1, 2):
        expected = one.update(weighted(seed), pg_loss)
        note_metrics(note, fresh.update(weighted(seed), pg_loss), expected)
    note_tensors(note, "weights", dict(fresh.weights()), dict(one.weights()))


def handed_on(ranks: Ranks, layouts: Sequence[Layout], way: Way, note: Note, *, folder: Path) -> None:
    """A step on each layout in turn, from the checkpoint of the one before, against one process that takes them all."""
    arguments = learning(optimizer=ADAM)
    one = TorchEngine(model_of(layouts[0], way), kernels.load("auto"), cut=way.cut, **arguments)
    for at, layout in enumerate(layouts):
        many = group(ranks, layout, way, model=model_of(layout, way), **arguments)
        if at:
            many.load(folder / str(at - 1))
        note_metrics(note, many.update(weighted(at), pg_loss), one.update(weighted(at), pg_loss))
        many.save(folder / str(at))
    note_tensors(note, "weights", dict(many.weights()), dict(one.weights()))


def worst() -> tuple[dict[str, tuple[float, str]], Note]:
    """The largest error of each kind with the name of what has it, and how to note one."""
    errors: dict[str, tuple[float, str]] = {}

    def note(what: str, error: float, name: str = "") -> None:
        errors[what] = max(errors.get(what, (0.0, "")), (error, name))

    return errors, note


def layouts_of(world: int) -> Iterator[tuple[str, Layout]]:
    yield from ((name, layout) for name, layout in LAYOUTS.items() if layout.dims.world == world)
