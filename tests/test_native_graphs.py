"""The decode step at fixed shapes: the same bits as at variable shapes, and nothing a CUDA graph cannot hold.

Capture itself needs a CUDA device; here `Again` stands for it, and stand-ins check the order of the calls.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from asking import reply
from test_native import ask, engine, long_jobs, mixed_jobs, run, trained_logprobs
from tiny import FAMILIES, FEW, SPARSE, VOCAB, tiny_model
from whet.config.schema import ModelConfig
from whet.models import kernels
from whet.models.attention import KvCache
from whet.models.forward import decoder
from whet.models.load import build
from whet.rollout.engine import WeightUpdate
from whet.rollout.native import graphs
from whet.rollout.native.engine import NativeEngine
from whet.rollout.native.graphs import (
    CannotCapture,
    CudaGraphs,
    FixedShapeStep,
    NoHostReads,
    page_buckets,
    row_buckets,
)
from whet.types import Sampling, WhetError


class Again:
    """A recorder that replays by doing the work again; counts its recordings."""

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captures += 1
        return work


class Strict(Again):
    """Refuses what `CudaGraphs` refuses."""

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with NoHostReads():
            work()
        return super().capture(work)


def fixed(e: NativeEngine) -> FixedShapeStep:
    assert e.runner.fixed is not None
    return e.runner.fixed


# ---------------------------------------------------------------- buckets


def test_buckets_by_hand() -> None:
    assert row_buckets(1) == [1]
    assert row_buckets(6) == [1, 2, 4, 6]
    assert row_buckets(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert row_buckets(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert page_buckets(1) == [1]
    assert page_buckets(19) == [1, 2, 4, 8, 16, 19]


@given(most=st.integers(1, 700))
@settings(deadline=None)
def test_buckets_rise_hold_everyone_and_pad_little(most: int) -> None:
    for buckets, worst in ((row_buckets(most), 1.5), (page_buckets(most), 2.0)):
        assert buckets == sorted(set(buckets))
        assert buckets[0] == 1
        assert buckets[-1] == most
        for low, high in pairwise(buckets):
            assert high <= max(worst * low, 2 * min(low, 8))


# ---------------------------------------------------------------- the same bits


def exact_model(family: str) -> PreTrainedModel:
    """intermediate_size is a multiple of 32: with other widths the PyTorch twins are not row-invariant."""
    scratch = {
        "name": family,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_experts": 4,
        "initializer_range": 0.1,
        **({"sliding_window": 8} if family in ("mistral", "gpt_oss") else {}),
    }
    return build(
        ModelConfig(scratch=scratch),
        vocab_size=VOCAB,
        eos_token_id=1,
        pad_token_id=0,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )


@pytest.mark.parametrize("kind", ["torch", "auto"])
@pytest.mark.parametrize("family", FEW)
def test_fixed_and_variable_shapes_agree_bit_for_bit(family: str, kind: str) -> None:
    module, ops = exact_model(family), kernels.load(kind)  # type: ignore[arg-type]
    jobs = mixed_jobs(40)
    random.Random(family).shuffle(jobs)
    options: dict[str, Any] = {"end_token_ids": [1], "max_context": 90, "max_num_seqs": 13}
    free = NativeEngine(module, ops, **options)
    padded = NativeEngine(module, ops, **options, recorder=Again())
    short = [job for job in jobs if len(job[0]) < 8][:2]  # few rows of few pages
    for some in (jobs, short):
        assert run(ask(padded, some)) == run(ask(free, some))
    assert free.runner.fixed is None
    step = fixed(padded)
    rows, pages = ({shape[n] for shape in step.graphs} for n in (0, 1))
    assert rows <= {1, 2, 4, 8, 13}
    assert pages <= {1, 2, 4, 6}
    assert len(rows) > 1
    assert len(pages) > 1


def lone_step(
    *, max_num_seqs: int = 8, max_pages: int = 4, recorder: graphs.GraphRecorder | None = None
) -> FixedShapeStep:
    """Over a cache of random numbers with pages 0 .. 23 and the scratch page 24."""
    module, ops = exact_model("qwen3"), kernels.load("torch")
    made = decoder(module, ops)
    cache = KvCache.allocate(
        layers=made.layers, pages=25, kv_heads=made.kv_heads, head_dim=made.head_dim, ops=ops
    )
    draw = torch.Generator().manual_seed(3)
    cache.k.copy_(torch.randn(cache.k.shape, generator=draw))
    cache.v.copy_(torch.randn(cache.v.shape, generator=draw))
    return FixedShapeStep(
        module,
        made,
        cache,
        ops=ops,
        recorder=recorder or Again(),
        scratch=24,
        max_num_seqs=max_num_seqs,
        max_pages=max_pages,
    )


def fed(*rows: tuple[int, int]) -> Tensor:
    return torch.tensor(rows).T.contiguous()


@torch.no_grad()
def test_padded_rows_have_no_influence_and_write_into_the_scratch_page_only() -> None:
    step = lone_step()
    many = fed(*((3 + i, 30 + i) for i in range(8)))
    table = torch.arange(24, dtype=torch.int32).view(8, 3)
    step(many, table)  # leaves tables and lengths of rows that are gone in the buffers
    before = step.cache.k.clone()
    few, few_table = fed((9, 5), (8, 17), (7, 31)), table[4:7, :2]
    expected = step(few, few_table).clone()
    touched = (step.cache.k != before).any(-1).any(-1).any(-1).any(0).nonzero().flatten().tolist()
    assert set(touched) <= {12, 16, 19, 24}  # the pages that positions 5, 17 and 31 lie in, and the scratch
    assert {12, 16, 19} <= set(touched)
    for junk in (1e4, -3.0):
        step.cache.k[:, 24], step.cache.v[:, 24] = junk, junk
        step.fed_2B[:, 3:] = 11
        step.table_BP[3:] = 2
        assert torch.equal(step(few, few_table), expected)
    assert set(step.graphs) == {(8, 4), (4, 2)}


@torch.no_grad()
def test_a_wider_table_changes_nothing() -> None:
    step = lone_step(max_pages=16)
    few = fed((9, 5), (8, 17), (7, 31))
    table = torch.arange(6, dtype=torch.int32).view(3, 2)
    expected = step(few, table).clone()
    for width in (3, 7, 16):
        wide = torch.full((3, width), 20, dtype=torch.int32)
        wide[:, :2] = table
        assert torch.equal(step(few, wide), expected)
    assert {pages for _, pages in step.graphs} == {2, 4, 8, 16}


def test_padded_rows_write_into_no_page_of_a_full_cache() -> None:
    module = exact_model("qwen3")
    # 22 + 22 + 4 * 21 pages in the end: all 128 of a MiB; at the start the second row needs one less
    lengths, reply = (340, 335, 329, 328, 327, 326), 8
    jobs = [
        ([2 + (i + n) % 50 for i in range(n)], Sampling(max_tokens=reply, ignore_eos=True)) for n in lengths
    ]
    options: dict[str, Any] = {"max_context": 352, "max_num_seqs": 8, "cache_mb": 1}
    padded = engine(module, **options, recorder=Again())
    assert padded.scheduler.pages.count == sum(-(-(n + reply - 1) // 16) for n in lengths) == 128
    assert run(ask(padded, jobs)) == run(ask(engine(module, **options), jobs))
    assert {rows for rows, _ in fixed(padded).graphs} == {8}


def test_each_pair_of_smallest_buckets_is_recorded_once() -> None:
    recorder = Again()
    e = engine(max_num_seqs=11, max_context=100, recorder=recorder)
    step, seen = fixed(e), []
    call = FixedShapeStep.__call__

    def spied(fed_2B: Tensor, table_BP: Tensor) -> Tensor:
        rows = next(b for b in (1, 2, 4, 8, 11) if b >= fed_2B.shape[1])
        pages = next(b for b in (1, 2, 4, 7) if b * 16 > int(fed_2B[1].max()))
        seen.append((rows, pages))
        return call(step, fed_2B, table_BP)

    e.runner.fixed = spied  # type: ignore[assignment]
    run(ask(e, mixed_jobs(40)))
    assert set(step.graphs) == set(seen)
    assert recorder.captures == len(set(seen)) < len(seen)
    assert list(step.graphs)[-1] == seen[-1]  # the last used is the last to go


@torch.no_grad()
def test_the_number_of_graphs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    recorder = Again()
    step = lone_step(recorder=recorder)
    for rows in (1, 2, 1, 4, 1, 2):
        step(torch.zeros(2, rows, dtype=torch.int64), torch.zeros(rows, 1, dtype=torch.int32))
    assert list(step.graphs) == [(1, 1), (2, 1)]
    assert recorder.captures == 4  # 1, 2, 4 and, thrown out by 4, 2 again; 1 was used in between


# ---------------------------------------------------------------- addresses


@torch.no_grad()
def test_graphs_go_when_an_address_changes_and_only_then() -> None:
    recorder = Again()
    step = lone_step(recorder=recorder)
    one = fed((5, 3)), torch.zeros(1, 1, dtype=torch.int32)
    norm: Any = _owner(step, "weight")
    rotary: Any = _owner(step, "inv_freq")
    first = step(*one).clone()
    norm["weight"].mul_(2.0)  # in place, as an optimizer does
    assert not torch.equal(step(*one), first)
    assert recorder.captures == 1
    kept = []

    def moved() -> None:
        kept.append(norm["weight"].data)
        norm["weight"].data = norm["weight"].data.clone()

    def replaced() -> None:
        kept.append(norm["weight"])
        norm["weight"] = nn.Parameter(norm["weight"].clone())

    def buffer() -> None:
        kept.append(rotary["inv_freq"])
        rotary["inv_freq"] = rotary["inv_freq"].clone()

    for number, change in enumerate((moved, replaced, buffer), start=2):
        change()
        step(*one)
        step(*one)
        assert recorder.captures == number


def _owner(step: FixedShapeStep, name: str) -> dict[str, Any]:
    return next(owned for owned in step.owned if name in owned)


def test_another_module_another_cache_and_moved_weights_make_new_graphs() -> None:
    module, other = tiny_model(), tiny_model(seed=5)
    recorder = Again()
    e = engine(module, max_num_seqs=4, recorder=recorder)
    jobs = long_jobs()[:4]

    async def story() -> None:
        await ask(e, jobs)
        before = recorder.captures
        await ask(e, jobs)
        assert recorder.captures == before
        await e.update_weights(WeightUpdate(version=1, module=other))
        new = await ask(e, jobs)
        assert recorder.captures == 2 * before
        for p in other.parameters():
            p.data = p.data.clone()
        assert await ask(e, jobs) == new
        assert recorder.captures == 3 * before
        cache, step = weakref.ref(e.runner.cache), weakref.ref(fixed(e))  # type: ignore[arg-type]
        await e.place("cpu")
        gc.collect()
        assert cache() is None  # no graph holds the memory that was given away
        assert step() is None
        await e.place("gpu")
        assert await ask(e, jobs) == new
        assert recorder.captures == 4 * before
        assert new == await ask(engine(other, version=1), jobs)

    run(story())


# ---------------------------------------------------------------- what a graph cannot hold


def _forbidden() -> dict[str, Callable[[Tensor], Any]]:
    return {
        "item": lambda x: x.sum().item(),
        "bool": lambda x: bool((x > 0).all()),
        "nonzero": lambda x: x.nonzero(),
        "masked_select": lambda x: x.masked_select(x > 0),
        "mask": lambda x: x[x > 0],
        "mask_put": lambda x: x.clone().index_put_((x > 0,), torch.zeros(())),
        "bincount": lambda x: x.long().abs().bincount(),
        "unique": lambda x: x.unique(),
        "repeat": lambda x: x.repeat_interleave(x.long().abs()),
        "numbers": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        "list_index": lambda x: x[[0, 2]],
        "device": lambda x: x.to("meta"),
        "copy": lambda x: torch.empty(3, device="meta").copy_(x),
    }


@pytest.mark.parametrize("name", _forbidden())
def test_operations_that_make_the_host_wait_are_refused(name: str) -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    work = _forbidden()[name]
    work(x)
    with pytest.raises(CannotCapture, match="synchronizes the host"), NoHostReads():
        work(x)


def test_operations_of_fixed_shape_pass() -> None:
    x, at = torch.randn(4, 6), torch.tensor([1, 0])

    def work() -> torch.Tensor:
        y = x[at].softmax(-1).masked_fill(x[at] > 0, 0.0) @ x.T
        y.index_put_((at, at), x[0, :2])
        y.copy_(y.double()[:, torch.arange(4)])
        return torch.where(y > 0, y, 0.0).cumsum(-1).gather(1, at[:, None])

    with NoHostReads():
        found = work()
    assert torch.equal(found, work())


DENSE = [family for family in FAMILIES if family not in SPARSE]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_a_model_around_its_attention_asks_nothing_of_the_host(family: str, dtype: torch.dtype) -> None:
    model = decoder(tiny_model(family).to(dtype).to("meta"), kernels.load("torch"))  # type: ignore[arg-type]

    def attend(layer: int, q_NHD: Tensor, *_: Tensor, **__: Any) -> Tensor:
        return q_NHD

    fed_2B = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    with NoHostReads():
        hidden = model.hidden(*fed_2B, attend)
    assert (hidden.shape, hidden.dtype, hidden.device.type) == ((3, 32), dtype, "meta")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_the_step_asks_nothing_of_the_host(family: str, dtype: torch.dtype) -> None:
    """On the meta device, where no tensor has a value that could be read or mixed with one of the host."""
    step = meta_step(tiny_model(family).to(dtype))
    hidden = step(torch.zeros(2, 3, dtype=torch.int64, device="meta"), torch.zeros(3, 2, device="meta"))
    assert (hidden.shape, hidden.dtype, hidden.device.type) == ((3, 32), dtype, "meta")
    assert set(step.graphs) == {(4, 2)}


def meta_step(module: PreTrainedModel) -> FixedShapeStep:
    ops, moved = kernels.load("torch"), module.to("meta")  # type: ignore[arg-type]
    made = decoder(moved, ops)
    cache = KvCache.allocate(
        layers=made.layers,
        pages=9,
        kv_heads=made.kv_heads,
        head_dim=made.head_dim,
        ops=ops,
        dtype=made.head.linear.weight.dtype,
        device="meta",
    )
    return FixedShapeStep(
        moved, made, cache, ops=ops, recorder=Strict(), scratch=8, max_num_seqs=8, max_pages=4
    )


def test_a_model_that_asks_the_host_is_refused_once_and_computed_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, jobs = tiny_model("qwen3_moe"), mixed_jobs(20)
    e = engine(module, recorder=Strict())
    with caplog.at_level(logging.WARNING):
        done = run(ask(e, jobs))
        run(e.update_weights(WeightUpdate(version=1, module=tiny_model("qwen3_moe", seed=2))))
        run(ask(e, jobs))
    assert done == run(ask(engine(module), jobs))
    assert e.runner.fixed is None
    (record,) = [r for r in caplog.records if r.name.startswith("whet.rollout")]
    assert "not as CUDA graphs" in record.message
    assert "synchronizes the host" in record.message


# ---------------------------------------------------------------- the order of the calls to torch.cuda


class FakeCuda:
    """Stands for torch.cuda: writes down what is called, and on which stream work would run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fail: bool) -> None:
        self.events: list[str] = []
        self.stream_now = "main"
        self.fail = fail
        real = inspect.signature(torch.cuda.graph)
        cuda = self

        class Stream:
            def __init__(self, name: Any) -> None:
                self.name = name if isinstance(name, str) else "side"
                self.device = torch.device("cuda", 0)

            def wait_stream(self, other: Stream) -> None:
                cuda.events.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                cuda.events.append("replay")

        @contextmanager
        def stream(given: Stream) -> Iterator[None]:
            before, cuda.stream_now = cuda.stream_now, given.name
            try:
                yield
            finally:
                cuda.stream_now = before

        class Capture:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                given = real.bind(*args, **kwargs).arguments
                assert (given["pool"], given["stream"].name) == ("pool", "side")
                assert given["capture_error_mode"] == "thread_local"

            def __enter__(self) -> None:
                self.before, cuda.stream_now = cuda.stream_now, "captured side"

            def __exit__(self, *_: object) -> None:
                if cuda.fail:  # as torch does: the stream is not put back
                    raise RuntimeError("operation not permitted when stream is capturing")
                cuda.stream_now = self.before

        for name, value in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph": Capture,
            "stream": stream,
            "current_stream": lambda device: Stream(cuda.stream_now),
            "graph_pool_handle": lambda: "pool",
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def work(self) -> Tensor:
        self.events.append(f"work on {self.stream_now}")
        return torch.full((2,), float(len(self.events)))


def test_a_capture_warms_up_on_a_side_stream_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, fail=False)
    replay = CudaGraphs(torch.device("cuda", 0)).capture(cuda.work)
    assert cuda.events == [
        "side waits for main",
        "work on side",
        "work on side",
        "main waits for side",
        "work on captured side",
    ]
    assert replay() is replay()
    assert cuda.events[5:] == ["replay", "replay"]
    assert replay().tolist() == [5.0, 5.0]
    assert cuda.stream_now == "main"


def test_a_capture_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, fail=True)
    with pytest.raises(CannotCapture, match="not permitted when stream is capturing"):
        CudaGraphs(torch.device("cuda", 0)).capture(cuda.work)
    assert cuda.stream_now == "main"


# ---------------------------------------------------------------- half precision, and weights that diverged


@pytest.mark.parametrize("recorder", [None, Again()])
@pytest.mark.parametrize("family", FEW)
def test_a_bfloat16_model_end_to_end(family: str, recorder: Again | None) -> None:
    module = tiny_model(family).to(torch.bfloat16)  # type: ignore[arg-type]
    jobs = mixed_jobs(20)
    for (prompt, sampling), done in zip(jobs, run(ask(engine(module, recorder=recorder), jobs))):
        ours = torch.tensor(done.logprobs, dtype=torch.float64)
        assert torch.equal(ours, ours.float().double())
        assert bool(torch.isfinite(ours).all())
        theirs = trained_logprobs(module, prompt, done.token_ids, sampling.temperature or 1.0)
        assert theirs.dtype == torch.float32
        torch.testing.assert_close(ours.float(), theirs, atol=0.01, rtol=0)


@pytest.mark.parametrize("kind", ["torch", "auto"])
def test_weights_that_diverged_leave_nothing_in_the_cache(kind: str) -> None:
    module = tiny_model()
    good = copy.deepcopy(module)
    ops = kernels.load(kind)  # type: ignore[arg-type]
    e = NativeEngine(module, ops, end_token_ids=[1], max_context=48, max_num_seqs=1)
    with torch.no_grad():
        module.model.embed_tokens.weight.fill_(float("nan"))

    async def story() -> None:
        with pytest.raises(WhetError, match="logits"):
            await reply(e, [3] * 40, Sampling(max_tokens=8))
        await e.update_weights(WeightUpdate(version=1, module=good))
        done = await reply(e, [3], Sampling(max_tokens=30))
        assert done.token_ids == (await reply(engine(good), [3], Sampling(max_tokens=30))).token_ids

    asyncio.run(asyncio.wait_for(story(), 60))
