"""Further ways of a GPU (see `accelerator`): each kind of model, of training and of sampling computes what it does on a
CPU, leaves nothing on the host, and makes the host wait where that is written down."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import grid
from accelerator import CUDA, accelerator, moved, near
from swept import except_for
from test_accelerator import SAMPLING, UPDATE, native
from test_native import ask, run
from test_train_contract import ADAM
from test_train_torch import CUT, pg_loss, weighted
from tiny import VOCAB, tiny_model
from whet.config.schema import OptimizerConfig, PrecisionConfig
from whet.models import kernels, mtp, torch_ops
from whet.models.load import value_head
from whet.models.mesh import Dims
from whet.models.mtp import MtpLoss
from whet.models.optim import Optimizer
from whet.models.sharded import Alone
from whet.training.engine import FullKl
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import Sampling

FOREACH = ADAM.model_copy(update={"implementation": "foreach"})
"""A fused step asks for a device that torch has one for."""


@dataclass(frozen=True)
class Way:
    family: str = "qwen3"
    dtype: torch.dtype = torch.float32
    cut: MicroBatchPolicy = CUT
    optimizer: OptimizerConfig = FOREACH
    lora: float | None = None
    critic: bool = False
    reference: bool = False
    waits: frozenset[str] = frozenset()
    """Where else the host waits."""


@dataclass(frozen=True)
class Models:
    policy: Any
    head: Any
    reference: Any

    def moved(self) -> Models:
        return Models(*(None if x is None else moved(x) for x in (self.policy, self.head, self.reference)))


def models(way: Way) -> Models:
    policy = grid.model_of(
        grid.Layout(Dims(), family=way.family), grid.Way(way.cut, lora=way.lora, dtype=way.dtype)
    )
    if way.cut.mtp is not None:
        mtp.attach(policy, 2, seed=0)
    far = tiny_model(way.family, seed=9).to(way.dtype).requires_grad_(False)  # type: ignore[arg-type]
    head = value_head(32, 0).to(way.dtype) if way.critic else None
    return Models(policy, head, far if way.reference else None)


def told(way: Way, given: Models) -> list[Any]:
    """Answers, and metrics of two updates."""
    ops, batch = kernels.load("torch"), weighted()
    how: dict[str, Any] = {"optimizer": way.optimizer, "total_steps": 4, "value_head": given.head}
    engine = TorchEngine(given.policy, ops, cut=way.cut, **how)
    if given.reference is not None:
        engine.full_kl = FullKl(0.3, TorchEngine(given.reference, ops, cut=way.cut))
    wants = ("values",) if way.critic else ("logprobs", "entropy")
    if way.cut.replays:
        own_NLE = engine.forward(batch, "routed")
        batch = replace(batch, routed_NLE=(own_NLE + 1) % given.policy.config.num_experts)
    out: list[Any] = [near(engine.forward(batch, want)) for want in wants]  # type: ignore[arg-type]
    loss: Any = pg_loss
    if way.critic:
        batch, loss = replace(batch, return_N=batch.adv_N, value_N=out[0]), grid.clipped_values
    return [*out, *(engine.update(batch, loss) for _ in range(2))]


HALF = torch.bfloat16
EXPERTS = frozenset({"models/fused_forward.py:_mixture"})
"""It counts the tokens of each expert, once in each layer."""
TERMS = frozenset(f"models/router.py:{place}" for place in ("uses", "begin", "metrics"))
"""Once a micro-batch, and once an update."""
AHEAD = frozenset(f"training/mtp.py:{place}" for place in ("_weighed", "metrics"))
"""Which tokens a layer predicts, once in each layer and micro-batch; the term, once an update."""
WAYS = {
    "bfloat16": Way(dtype=HALF),
    "bfloat16, gradients summed in float32": Way(
        dtype=HALF, cut=replace(CUT, precision=PrecisionConfig(reduce="float32"))
    ),
    "mixture": Way("qwen3_moe", waits=EXPERTS),
    "mixture, with its terms of the loss": Way(
        "qwen3_moe", cut=replace(CUT, router_aux=0.1, router_z=0.01), waits=EXPERTS | TERMS
    ),
    "mixture, with the experts of its rollouts": Way(
        "qwen3_moe", cut=replace(CUT, replays=True), waits=EXPERTS
    ),
    "layers of multi-token prediction": Way(
        cut=replace(CUT, mtp=MtpLoss(0.3, "nothing", distill=False)), waits=AHEAD
    ),
    "layers of multi-token prediction, distilled": Way(
        cut=replace(CUT, mtp=MtpLoss(0.3, "model", distill=True)), waits=AHEAD
    ),
    "sliding window": Way("mistral"),
    "sliding window, bfloat16": Way("mistral", HALF),
    "adapters": Way(lora=0.3),
    "checkpointed": Way(cut=replace(CUT, checkpoint=True)),
    "8-bit moments": Way(optimizer=ADAM.model_copy(update={"state_dtype": "int8"})),
    "muon": Way(optimizer=OptimizerConfig(name="muon", lr=0.02, implementation="foreach")),
    "offload": Way(dtype=HALF, cut=replace(CUT, offload=("activations",))),
    "critic": Way(critic=True),
    "critic, bfloat16": Way(critic=True, dtype=HALF),
    "divergence from a reference": Way(reference=True),
}
WITHIN = ("bfloat16", "mixture", "sliding window, bfloat16", "critic, bfloat16")
"""Others have each of these and more, or its two parts."""


@pytest.mark.skipif(CUDA, reason="the backward pass of tensors of CUDA asks the driver")
@pytest.mark.parametrize("name", except_for(lambda name: name not in WITHIN, WAYS))
def test_learning_is_that_of_a_cpu(name: str) -> None:
    way = WAYS[name]
    wanted, there = told(way, models(way)), models(way)
    with accelerator() as device:
        found = told(way, there.moved())
    loose = way.dtype == HALF
    for mine, theirs in zip(found, wanted, strict=True):
        if isinstance(theirs, dict):
            assert mine == pytest.approx(theirs, rel=0.1 if loose else 1e-3, abs=0.05 if loose else 1e-5)
        else:
            assert torch.allclose(mine, theirs, atol=0.05 if loose else 1e-4)
    assert device.waits.keys() <= UPDATE | way.waits, device.lines


def test_what_computes_stays_where_it_is_when_parts_rest_on_the_host() -> None:
    """FSDP2 and DeepSpeed may leave parameters elsewhere: batches go to where the model came from."""

    def place(model: PreTrainedModel, **_: object) -> None:
        for part in model.modules():
            for name, p in part._parameters.items():
                part._parameters[name] = p if p is None else nn.Parameter(p.to("meta"))

    across = Alone()
    across.place = place  # type: ignore[method-assign, assignment]
    engine = TorchEngine(tiny_model(), kernels.load("torch"), cut=CUT, across=across)
    assert {p.device.type for p in engine.module.parameters()} == {"meta"}
    assert engine.device == engine.home == torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "capability", "fits"),
    [
        (64, (9, 0), True),
        (256, (8, 0), True),
        (512, (9, 0), False),
        (20, (9, 0), False),
        (64, (7, 5), False),
    ],
)
def test_flash_attention_is_asked_for_what_it_computes(
    monkeypatch: pytest.MonkeyPatch, size: int, capability: tuple[int, int], fits: bool
) -> None:
    monkeypatch.setattr(torch_ops, "has_flash", torch_ops.has_flash.__wrapped__)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu: capability)
    q: Any = SimpleNamespace(is_cuda=True, dtype=HALF, shape=(3, 4, size), device=torch.device("cuda", 0))
    how = torch_ops.Weighing(scale=1.0, window=None, softcap=None, sinks=None)
    assert torch_ops.fits_varlen(q, how) is fits


# ---------------------------------------------------------------- what a step of the optimizer asks


@pytest.mark.parametrize(
    "optimizer",
    [
        FOREACH,
        ADAM.model_copy(update={"state_dtype": "int8"}),
        pytest.param(ADAM, marks=pytest.mark.skipif(not CUDA, reason="torch has no fused step for `meta`")),
    ],
    ids=["foreach", "8-bit", "fused"],
)
def test_a_step_after_a_resume_does_not_wait(optimizer: OptimizerConfig) -> None:
    """How many updates there were, the host knows: it asks the device for no parameter's count."""
    model = tiny_model()
    with accelerator() as device:
        made = Optimizer(moved(model).named_parameters(), optimizer, total_steps=4)
        for _ in range(2):
            for p in made.parameters.values():
                p.grad = torch.ones_like(p)
            before = device.waits.copy()
            made.step()
            assert device.waits == before, device.lines
            made.restore({n: near(x) for n, x in made.state().items()}, made.step_count)
        assert {float(near(x)) for n, x in made.state().items() if n.startswith("steps.")} == {2.0}


# ---------------------------------------------------------------- sampling


@dataclass(frozen=True)
class Sampled:
    family: str = "qwen3"
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    waits: frozenset[str] = frozenset()


SAMPLED = {
    "mixture": Sampled("qwen3_moe", waits=EXPERTS),
    "mixture, bfloat16": Sampled("qwen3_moe", HALF, waits=EXPERTS),
    "sliding window": Sampled("mistral"),
    "sliding window, bfloat16": Sampled("mistral", HALF),
    "int8": Sampled(options={"quantization": "int8"}),
    "histories in parts": Sampled(options={"prefill_tokens": 16}),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_is_that_of_a_cpu(name: str) -> None:
    """Histories of several pages and lengths, two rows each."""
    way, ops = SAMPLED[name], kernels.load("torch")
    history = [2 + n * 7 % (VOCAB - 2) for n in range(40)]
    jobs = [(history[: 3 + 9 * (n // 2)], Sampling(key=n, max_tokens=6)) for n in range(8)]
    made = [tiny_model(way.family).to(way.dtype) for _ in "12"]  # type: ignore[arg-type]
    wanted = run(ask(native(made[0], ops, recorder=None, **way.options), jobs))
    with accelerator() as device:
        said = run(ask(native(moved(made[1]), ops, **way.options), jobs))
    if way.dtype == torch.float32:
        assert [x.token_ids for x in said] == [x.token_ids for x in wanted]
        for mine, theirs in zip(said, wanted):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert device.waits.keys() <= SAMPLING | way.waits, device.lines
