"""A decode step in one call of C has the bits of one that is made operation by operation, and refuses what it cannot
compute."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asking import reply
from tiny import FAMILIES, SPARSE, VOCAB, tiny_model
from whet import environment
from whet.config.sizes import Shape, config_sizes
from whet.models import kernels
from whet.models.activations import Activations
from whet.models.compiled_step import Cells, CompiledStep
from whet.models.forward import decoder
from whet.models.logprob_parity import self_test
from whet.rollout.native.engine import NativeEngine
from whet.rollout.native.runner import LENGTH, Runner
from whet.rollout.native.scheduler import Generation
from whet.types import Completion, ConfigError, Sampling, WhetError

environment.prepare(threads=None, exact=True)

try:
    OPS = kernels.load("compiled")
except ConfigError:
    pytest.skip("without a compiler there is no such step", allow_module_level=True)

PLAIN = [kind for kind in FAMILIES if kind not in SPARSE and kind != "gemma"]
Job = tuple[list[int], Sampling]


def jobs(seed: int = 0, **options: Any) -> list[Job]:
    """Replies of 1 to 40 tokens to groups of prompts of 3 to 40 tokens, at two temperatures."""
    draw = random.Random(seed)
    asked: list[Job] = []
    for n in range(5):
        prompt = [draw.randrange(2, VOCAB) for _ in range(draw.randrange(3, 41))]
        for i in range(3):
            how: dict[str, Any] = {"max_tokens": draw.randrange(1, 41), "temperature": (1.0, 0.7)[i % 2]}
            asked.append((prompt, Sampling(key=10 * n + i, **{**how, **options})))
    return asked


def engine_of(model: PreTrainedModel, *, rows: int = 0, **options: Any) -> NativeEngine:
    kept = None
    if rows:
        shape = Shape(**config_sizes(model.config.to_dict()))
        kept = Activations(shape.layer_outputs, layers=shape.layers, rows=rows)
    return NativeEngine(model, OPS, end_token_ids=[1], max_context=100, kept=kept, **options)


class Counted:
    """How many steps were made in one call, and how many otherwise."""

    def __init__(self) -> None:
        self.whole = self.single = 0


def sampled(engine: NativeEngine, asked: list[Job]) -> tuple[list[Completion], Counted]:
    counted, whole, step = Counted(), CompiledStep.__call__, Runner.step

    def in_one_call(compiled: CompiledStep, *args: Any, **options: Any) -> list[int] | None:
        done = whole(compiled, *args, **options)
        counted.whole += done is not None
        return done

    def count(runner: Runner) -> list[Generation]:
        before = counted.whole
        done = step(runner)
        counted.single += counted.whole == before
        return done

    async def all_of_them() -> list[Completion]:
        work = asyncio.gather(*(reply(engine, p, s) for p, s in asked))
        return list(await asyncio.wait_for(work, 60))

    with patch.object(CompiledStep, "__call__", in_one_call), patch.object(Runner, "step", count):
        if engine.runner.kept is None:
            return asyncio.run(all_of_them()), counted
        with engine.keeping():
            return asyncio.run(all_of_them()), counted


def one_by_one(engine: NativeEngine, asked: list[Job]) -> list[Completion]:
    """The same without the step in one call."""
    with patch.object(CompiledStep, "__call__", lambda *_, **__: None):
        done, counted = sampled(engine, asked)
    assert not counted.whole
    return done


def same(a: list[Completion], b: list[Completion]) -> bool:
    return [(x.token_ids, x.logprobs, x.sample_logprobs, x.finish_reason) for x in a] == [
        (x.token_ids, x.logprobs, x.sample_logprobs, x.finish_reason) for x in b
    ]


@pytest.mark.parametrize("kind", PLAIN)
def test_the_same_bits_are_sampled(kind: str) -> None:
    asked = jobs()
    whole, counted = sampled(engine_of(tiny_model(kind)), asked)
    assert counted.whole > 20
    assert not counted.single
    assert same(whole, one_by_one(engine_of(tiny_model(kind)), asked))


@pytest.mark.parametrize("kind", [*SPARSE, "gemma"])
def test_a_model_that_has_more_is_computed_by_single_operations(kind: str) -> None:
    _, counted = sampled(engine_of(tiny_model(kind)), jobs())
    assert counted.single > 20
    assert not counted.whole


def decode(tokens: Any) -> str:
    return "".join(chr(97 + t % 26) for t in tokens)


def test_rows_with_stop_strings() -> None:
    asked = jobs(1, stop=("a", "bc"))
    whole, counted = sampled(engine_of(tiny_model(), decode=decode, max_num_seqs=8), asked)
    assert counted.whole
    assert not counted.single
    assert {x.finish_reason for x in whole} == {"stop", "length"}
    assert same(whole, one_by_one(engine_of(tiny_model(), decode=decode, max_num_seqs=8), asked))


def test_rows_with_filters_are_sampled_by_single_operations() -> None:
    _, counted = sampled(engine_of(tiny_model()), jobs(2, top_k=5))
    assert counted.single
    assert not counted.whole


@pytest.mark.parametrize("rows", [4096, 150])
def test_the_same_activations_are_kept(rows: int) -> None:
    """Where there is room."""
    asked, engines = jobs(3), [engine_of(tiny_model(), rows=rows) for _ in range(2)]
    whole, counted = sampled(engines[0], asked)
    assert counted.whole
    assert same(whole, one_by_one(engines[1], asked))
    memories = [engine.runner.kept for engine in engines]
    assert memories[0] is not None
    assert memories[1] is not None
    a, b = (memory.kept for memory in memories if memory is not None)
    assert a.known.keys() == b.known.keys()
    assert bool(a.known)
    for key, at in a.known.items():
        assert at.tolist() == b.known[key].tolist()
    used = a.next - a.first
    assert used == b.next - b.first
    assert all(torch.equal(x[:, :used], y[:, :used]) for x, y in zip(a.kinds, b.kinds))
    assert (memories[0].number == memories[1].number).all()


def test_room_for_activations_that_is_given_back_is_free() -> None:
    engine = engine_of(tiny_model(), rows=4096)
    sampled(engine, jobs(3))
    assert engine.kept is not None
    rooms = [weakref.ref(kind) for kind in engine.kept.kinds]
    engine.kept.resize(0)
    assert [room() for room in rooms] == [None] * len(rooms)


def test_threads_change_no_bit() -> None:
    asked = jobs(4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two, _ = sampled(engine_of(tiny_model()), asked)
    finally:
        torch.set_num_threads(before)
    assert same(two, sampled(engine_of(tiny_model()), asked)[0])


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach() * 1.5


def one_other_parameter(model: Any) -> None:
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 1.5)


def other_precision(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach().double()


@pytest.mark.parametrize("change", [in_place, other_memory, one_other_parameter])
def test_changed_weights_are_seen(change: Callable[[Any], None]) -> None:
    asked, model, other = jobs(5), tiny_model(), tiny_model()
    engine = engine_of(model)
    before, _ = sampled(engine, asked)
    change(model)
    change(other)
    engine.runner.clear()
    engine.scheduler.pages.forget()
    after, counted = sampled(engine, asked)
    assert counted.whole
    assert not same(before, after)
    assert same(after, one_by_one(engine_of(other), asked))


def test_weights_of_another_dtype_are_not_read_as_float32() -> None:
    """The step is left to torch."""
    model = tiny_model()
    engine = engine_of(model)
    sampled(engine, jobs(6))
    other_precision(model)
    _, counted = sampled(engine, jobs(6))
    assert counted.single
    assert not counted.whole


@pytest.mark.parametrize("asking", [torch.autocast("cpu", torch.bfloat16), torch.device("cpu")])
def test_a_step_is_made_call_by_call_where_something_asks_to_be_told_of_products(
    asking: AbstractContextManager[object],
) -> None:
    """As autocast and a default device do: prefill and training follow them."""
    engine, other, asked = engine_of(tiny_model()), engine_of(tiny_model()), jobs(9)
    assert sampled(engine, jobs(0))[1].whole
    with asking:
        within, counted = sampled(engine, asked)
        assert not counted.whole
        assert same(within, one_by_one(other, asked))
    assert sampled(engine, jobs(1))[1].whole


def test_logits_that_allow_no_sample_end_the_step_by_name() -> None:
    model = tiny_model()
    engine, asked = engine_of(model), jobs(7, min_tokens=0)
    step = Runner.step

    def spoiled(runner: Runner) -> list[Generation]:
        with torch.no_grad():
            next(iter(model.parameters())).fill_(torch.nan)
        return step(runner)

    with (
        patch.object(Runner, "step", spoiled),
        pytest.raises(WhetError, match=r"cannot sample: in \d+ row"),
    ):
        asyncio.run(asyncio.wait_for(reply(engine, *asked[0]), 60))


def test_the_self_test_samples_by_it() -> None:
    """A step that differs in one bit is noticed at start-up."""
    model, of = decoder(tiny_model(), OPS), CompiledStep.__call__
    before = self_test(model, OPS, vocab_size=VOCAB, seed=0)
    assert before.exact

    def one_bit_up(step: CompiledStep, *args: Any, cells: Cells, **options: Any) -> list[int] | None:
        done = of(step, *args, cells=cells, **options)
        torch.nextafter(cells.logp, torch.zeros(()), out=cells.logp)
        return done

    with patch.object(CompiledStep, "__call__", one_bit_up):
        report = self_test(model, OPS, vocab_size=VOCAB, seed=0)
    assert report.tokens == before.tokens
    assert 100 < report.mismatches < report.tokens / 2
    assert 0 < report.max_diff < 1e-5


@pytest.mark.parametrize(("page", "rows"), [(-1, 0), (10_000, 0), (256 * 7, 150)])
def test_a_page_that_does_not_exist_is_refused(page: int, rows: int) -> None:
    """Nor is the cache's last one, for padded rows, where activations are kept: they have no place for it."""
    engine = engine_of(tiny_model(), rows=rows)
    assert engine.runner.pages == 256 * 7
    prompt, how = jobs(8, max_tokens=30)[0]

    def damaged(runner: Runner) -> Tensor:
        table = runner.table_BP.clone()
        table[0, int(runner.live.state[LENGTH, 0]) // 16] = page
        return table

    step = Runner.step

    def with_damage(runner: Runner) -> list[Generation]:
        runner.table_BP = damaged(runner)
        return step(runner)

    with (
        patch.object(Runner, "step", with_damage),
        pytest.raises(ValueError, match="page that is not one of the cache's"),
    ):
        asyncio.run(asyncio.wait_for(reply(engine, prompt, how), 60))
