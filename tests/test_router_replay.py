"""Replay of experts: what the engine records, and what is computed with it; against transformers' own routers and a
naive mixture in float64."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import whet
from asking import reply
from grid import BIG, Layout, Way, error, learning, moved, pair, started
from servers import SglangServer, VllmServer
from serving import sglang_engine, vllm_engine
from test_checkpoint_options import stopped
from test_native import Spy, at_step, engine, group, prompts, run, shifted
from test_native_cache import converse
from test_train_torch import CUT, pg_loss, random_groups, weighted
from tiny import VOCAB, tiny_model
from whet.batch import Batch, pack, select
from whet.buffer.groups import decode, encode
from whet.config.load import load
from whet.models import kernels, router
from whet.models.lora import learned
from whet.models.mesh import Dims
from whet.models.packing import layout
from whet.models.routing import Routes
from whet.rollout.engine import WeightUpdate
from whet.rollout.growing import Growing
from whet.rollout.http.routed import of_buffer, of_file
from whet.rollout.native.pages import Pages
from whet.rollout.needs import unmet
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import Completion, ConfigError, Group, Sampling, VersionSpan, WhetError

ROOT = Path(__file__).parents[1]
REPLAYED = replace(CUT, replays=True)


def mixture(*, hooked: bool = False, seed: int = 0) -> PreTrainedModel:
    """hooked: computed by transformers' modules."""
    model = tiny_model("qwen3_moe", seed=seed)
    if hooked:
        router.hook(model)
    return model


@torch.no_grad()
def chosen(model: PreTrainedModel, token_ids: Sequence[int]) -> np.ndarray:
    """[T, L, E] by transformers' own forward."""
    plain = tiny_model("qwen3_moe")
    plain.load_state_dict(model.state_dict())
    out = plain(input_ids=torch.tensor([list(token_ids)]), output_router_logits=True)
    layers = [
        logits.softmax(-1).topk(plain.config.num_experts_per_tok).indices for logits in out.router_logits
    ]
    return torch.stack(layers, 1).numpy()


def assert_recorded(model: PreTrainedModel, prompt: Sequence[int], done: Completion) -> None:
    assert done.experts is not None
    assert done.experts.dtype == np.uint8
    np.testing.assert_array_equal(done.experts, chosen(model, [*prompt, *done.token_ids[:-1]]))


# ---------------------------------------------------------------- what the engine records


@pytest.mark.parametrize("hooked", [False, True])
def test_a_reply_has_the_experts_of_its_history(hooked: bool) -> None:
    """Groups that share prompts within pages and beyond, one of a single token, prefilled in parts."""
    model = mixture(hooked=hooked)
    jobs = [
        job
        for number, prompt in enumerate(prompts([1, 15, 16, 33, 70]))
        for job in group(prompt, 3, max_tokens=1 + 9 * number)
    ]
    e = engine(model, experts=True, prefill_tokens=32)
    assert e.runner.decoder.path == ("modules" if hooked else "functional")
    told = run(asked(e, jobs))
    for (prompt, _), done in zip(jobs, told, strict=True):
        assert_recorded(model, prompt, done)
    plain = run(asked(engine(model, prefill_tokens=32), jobs))
    assert [done.token_ids for done in plain] == [done.token_ids for done in told]
    assert [done.logprobs for done in plain] == [done.logprobs for done in told]
    assert all(done.experts is None for done in plain)


async def asked(e: Any, jobs: Sequence[tuple[list[int], Sampling]]) -> list[Completion]:
    return list(await asyncio.gather(*(reply(e, p, s) for p, s in jobs)))


def test_histories_that_are_found_in_the_cache_have_theirs() -> None:
    model = mixture()
    e = engine(model, experts=True)
    told = run(converse(e, 4, key=3))
    assert e.counts.cached_tokens > 0
    for history, done in told:
        assert_recorded(model, history, done)


def test_preempted_and_evicted_rows_have_theirs() -> None:
    model, draw = mixture(), random.Random(1)
    common = prompts([48])[0]
    jobs = [
        (common[: draw.choice([0, 17, 48])] + own, Sampling(key=number, max_tokens=50, ignore_eos=True))
        for number, own in enumerate(prompts([9, 12, 20, 25, 30, 7, 11], seed=2))
    ]
    e = engine(model, experts=True, max_context=170, prefill_tokens=32, max_num_seqs=6)
    e.scheduler.pages = Pages(11, 16)
    told = run(asked(e, jobs))
    assert e.counts.preemptions > 0
    for (prompt, _), done in zip(jobs, told, strict=True):
        assert_recorded(model, prompt, done)


def test_a_token_keeps_the_experts_that_it_was_computed_with_first() -> None:
    """Other weights come in the middle of a reply: what was computed before keeps its experts."""
    old, new = mixture(), shifted(mixture())
    e, prompt = engine(old, experts=True), prompts([20])[0]
    spy = Spy(e)

    async def story() -> Completion:
        asking = asyncio.create_task(reply(e, prompt, Sampling(key=1, max_tokens=30, ignore_eos=True)))
        await at_step(spy, 9)
        await e.pause(False)
        await e.update_weights(WeightUpdate(version=1, module=new))
        return await asking

    done = run(story())
    assert done.experts is not None
    (first, second) = done.spans
    history = [*prompt, *done.token_ids[:-1]]
    before = len(prompt) + first.end - 1  # the last token of the old weights was never fed to them
    np.testing.assert_array_equal(done.experts[:before], chosen(old, history)[:before])
    np.testing.assert_array_equal(done.experts[before:], chosen(new, history)[before:])
    assert (chosen(old, history) != chosen(new, history)).any()
    assert second.version == 1


@pytest.mark.parametrize(
    ("kind", "words"), [("phimoe", "in several rounds"), ("glm4_moe", "has no routers over num_experts")]
)
def test_routers_that_choose_otherwise_are_refused_at_the_start(kind: str, words: str) -> None:
    """One expert after the other; and groups of experts first, of which the sizes are under other names."""
    few = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
    model = other_mixture(kind, num_local_experts=4, n_routed_experts=4, first_k_dense_replace=1, **few)
    with pytest.raises(ConfigError, match=words):
        engine(model, experts=True, max_context=60)


@pytest.mark.parametrize(
    ("kind", "path"), [("mixtral", "modules"), ("granitemoe", "modules"), ("gpt_oss", "functional")]
)
def test_routers_of_other_families(kind: str, path: str) -> None:
    """Mixtral's weights are divided by their sum, Granite's and gpt-oss's are the softmax of the chosen logits."""
    model = other_mixture(kind, num_local_experts=4, num_experts_per_tok=2)
    prompt = prompts([9])[0]
    done = run(reply(engine(model, experts=True, max_context=60), prompt, Sampling(key=1, max_tokens=8)))
    batch = weighted()
    trainer = TorchEngine(model, kernels.load("auto"), cut=REPLAYED, **learning(optimizer=BIG))
    assert trainer.decoder.path == path
    assert done.experts is not None
    assert done.experts.shape == (len(prompt) + len(done.token_ids) - 1, 2, 2)
    own = replace(batch, routed_NLE=trainer.forward(batch, "routed"))
    others = replace(batch, routed_NLE=(own.routed_NLE + 1) % 4)
    plain, same, moved_ = (trainer.forward(b, "logprobs") for b in (batch, own, others))
    assert torch.equal(plain, same)
    assert error(moved_, plain) > 1e-3


def other_mixture(kind: str, **sizes: Any) -> PreTrainedModel:
    """A model of another family, of this size."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        **sizes,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


# ---------------------------------------------------------------- rollouts carry them


def told(tokens: int, *, seed: int = 0, wide: bool = False) -> np.ndarray:
    """Experts of so many tokens, of 2 layers and 2 experts of 4."""
    draw = np.random.default_rng(seed)
    ids = np.stack([[draw.permutation(4)[:2] for _ in range(2)] for _ in range(tokens)])
    return ids.astype(np.int16 if wide else np.uint8)


def test_a_strand_takes_what_is_new_of_each_turn() -> None:
    strand = Growing([5, 6, 7], key=0)

    def answered(tokens: list[int], experts: np.ndarray) -> None:
        spans = (VersionSpan(0, 0, len(tokens)),)
        nothing = [0.0] * len(tokens)
        strand.add_completion(
            Completion(
                token_ids=tokens,
                logprobs=nothing,
                sample_logprobs=nothing,
                spans=spans,
                finish_reason="stop",
                experts=experts,
            )
        )

    first, second = told(4, seed=1), told(8, seed=2)
    answered([8, 9], first)
    strand.add_observation([10, 11])
    answered([12, 13], second)
    strand.add_observation([14])
    made = strand.strand()
    expected = np.concatenate((first, second[4:], np.zeros((2, 2, 2), np.uint8)))
    np.testing.assert_array_equal(made.experts, expected)
    assert len(made.experts) == len(made.token_ids) == 10
    assert not made.experts.flags.writeable


def with_experts(groups: Sequence[Group], *, wide: bool = False, own: bool = True) -> list[Group]:
    """own: those of a prompt differ within a group."""

    def of(strand: Any, number: int) -> Any:
        ids = told(len(strand.token_ids), seed=number, wide=wide)
        if not own:
            begin = strand.prompt_tokens
            ids[:begin] = told(begin, seed=99, wide=wide)
        return replace(strand, experts=ids)

    return [
        replace(
            g,
            rollouts=tuple(
                replace(
                    r,
                    strands=tuple(
                        of(s, 100 * g.task.uid + 10 * r.index + n) for n, s in enumerate(r.strands)
                    ),
                )
                for r in g.rollouts
            ),
        )
        for g in groups
    ]


@pytest.mark.parametrize("wide", [False, True])
def test_a_group_comes_back_from_its_bytes(wide: bool) -> None:
    (made,) = with_experts(random_groups(count=1, strands=True), wide=wide)
    again = decode(encode(made))
    assert again == made
    assert again.rollouts[0].strand.experts.dtype == (np.int16 if wide else np.uint8)
    first = made.rollouts[0]
    bare = replace(first, strands=(replace(first.strand, experts=None),))
    mixed = replace(made, rollouts=(bare, *made.rollouts[1:]))
    assert decode(encode(mixed)) == mixed != made


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"x"] * 3),
        pa.array([[1], [2], [3]], pa.list_(pa.uint8())),
        pa.array([[[[1.0]]]] * 3, pa.list_(pa.list_(pa.list_(pa.float32(), 1), 1))),
        pa.array([[[[1]]]] * 3, pa.list_(pa.list_(pa.list_(pa.uint8(), 1), 1))),
    ],
    ids=("bytes", "flat", "floats", "of one token"),
)
def test_experts_that_no_group_has_are_refused(column: pa.Array) -> None:
    with pa.ipc.open_stream(encode(random_groups(count=1)[0])) as reader:
        rows = reader.read_next_batch()
    wrong = rows.append_column("experts", column).replace_schema_metadata(rows.schema.metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, wrong.schema) as writer:
        writer.write_batch(wrong)
    with pytest.raises(ValueError, match="experts"):
        decode(sink.getvalue().to_pybytes())


def test_nothing_is_added_where_nothing_is_recorded() -> None:
    (plain,) = random_groups(count=1)
    assert b"experts" not in encode(plain)
    assert pack([plain]).routed_NLE is None
    assert layout(pack([plain]), share_prompts=True).routed_ULE is None


def test_a_batch_has_those_of_all_or_of_none() -> None:
    made = with_experts(random_groups())
    batch = pack(made)
    strands = [s for g in made for r in g.rollouts for s in r.strands]
    np.testing.assert_array_equal(batch.routed_NLE, np.concatenate([s.experts for s in strands]))
    part = select(batch, torch.tensor([1, 4]))
    expected = [made[0].rollouts[1].strand.experts, made[1].rollouts[1].strand.experts]
    np.testing.assert_array_equal(part.routed_NLE, np.concatenate(expected))
    with pytest.raises(WhetError, match="others have not"):
        pack([*made, *random_groups(count=1)])


# ---------------------------------------------------------------- training


def routed(*, own: bool = True) -> Batch:
    """`weighted` with random experts."""
    return replace(weighted(), routed_NLE=pack(with_experts(random_groups(), own=own)).routed_NLE)


def made(cut: MicroBatchPolicy = REPLAYED, *, hooked: bool = False, **how: Any) -> TorchEngine:
    return TorchEngine(
        mixture(hooked=hooked), kernels.load("auto"), cut=cut, **learning(optimizer=BIG, **how)
    )


def update(e: TorchEngine, batch: Batch) -> dict[str, Tensor]:
    before = {n: p.detach().clone() for n, p in learned(e.module)}
    e.update(batch, pg_loss)
    return moved(e, before)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_with_the_weights_that_sampled_nothing_changes(hooked: bool, checkpoint: bool) -> None:
    """Bit for bit: log-probs and gradients, with the experts that this very model chooses."""
    cut, batch = replace(REPLAYED, checkpoint=checkpoint), weighted()
    found = made(cut, hooked=hooked).forward(batch, "routed")
    assert found.dtype == torch.uint8
    with_them = replace(batch, routed_NLE=found)
    plain, replayed = made(cut, hooked=hooked), made(cut, hooked=hooked)
    assert torch.equal(plain.forward(batch, "logprobs"), replayed.forward(with_them, "logprobs"))
    a, b = update(plain, batch), update(replayed, with_them)
    assert all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def naive(model: PreTrainedModel, routed_TLE: Tensor) -> Iterator[None]:
    """Routers written out: softmax over all, the weights of the given experts, divided by their sum."""
    gates, number = router.gates(model), {}

    def forward(gate: Any) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        def run_(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            expert = routed_TLE[:, number[id(gate)]].long()
            weight = logits.softmax(-1).gather(1, expert)
            return logits, weight / weight.sum(-1, keepdim=True), expert

        return run_

    for n, gate in enumerate(gates):
        number[id(gate)] = n
        gate.forward = forward(gate)
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


def oracle(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """transformers' model in float64 around naive routers, each rollout by itself."""
    model = mixture().double()
    model.config._experts_implementation = "eager"
    total, logps = torch.zeros((), dtype=torch.float64), []
    for row in range(batch.rollouts):
        at = batch.rollout_N == row
        ids, mask, adv, weight, ids_TLE = (
            x[at] for x in (batch.token_ids_N, batch.mask_N, batch.adv_N, batch.weight_N, batch.routed_NLE)
        )
        with naive(model, ids_TLE[:-1]):
            all_logp = model(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
        logp = all_logp.gather(1, ids[1:, None])[:, 0]
        entropy = -(all_logp.exp() * all_logp).sum(-1)
        total = total + ((-logp * adv[1:] - 0.1 * entropy) * weight[1:] * mask[1:]).sum()
        logps.append(torch.cat((torch.zeros(1), logp.detach() * mask[1:])))
    total.backward()
    return torch.cat(logps), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_other_experts_than_the_routers_own(hooked: bool, checkpoint: bool) -> None:
    batch = routed()
    logp, expected = oracle(batch)
    e = made(replace(REPLAYED, checkpoint=checkpoint), hooked=hooked)
    assert e.decoder.path == ("modules" if hooked else "functional")
    said = e.forward(batch, "logprobs")
    assert error(said.double(), logp) < 1e-5
    assert error(said, e.forward(weighted(), "logprobs")) > 1e-2  # their own are others
    found = update(e, batch)
    assert all(error(found[name], expected[name]) < 2e-5 for name in expected)
    assert any(g.any() for name, g in found.items() if name.endswith("mlp.gate.weight"))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "how",
    [{"share_prompts": False}, {"max_tokens": 25}, {"max_rollouts": 1, "checkpoint": True}],
    ids=str,
)
def test_no_cut_changes_it(how: dict[str, Any], own: bool) -> None:
    """A prompt is shared where its experts are alike, and else computed for each rollout."""
    batch = routed(own=own)
    whole, cut = made(), made(replace(REPLAYED, **how))
    assert torch.equal(whole.forward(batch, "logprobs"), cut.forward(batch, "logprobs"))
    a, b = update(whole, batch), update(cut, batch)
    assert max(error(b[name], a[name]) for name in a) < 2e-5


def test_prompts_with_other_experts_are_not_shared() -> None:
    shared, alone, plain = (
        len(layout(batch, share_prompts=True).token_ids_U)
        for batch in (routed(own=False), routed(own=True), weighted())
    )
    assert shared == plain < alone


def test_the_engine_of_a_reference_has_its_own() -> None:
    """A batch has them; an engine that does not replay reads none."""
    assert torch.equal(made(CUT).forward(routed(), "logprobs"), made(CUT).forward(weighted(), "logprobs"))


def test_ranks_replay_the_same() -> None:
    ranks, batch = started(2), select(routed(), torch.arange(5))
    way = Way(replace(REPLAYED, max_rollouts=1))
    try:
        for dims in (Dims(dp_shard=2), Dims(dp_shard=2, ep=2), Dims(tp=2), Dims(cp=2), Dims(pp=2)):
            model = mixture()
            before = {n: p.detach().clone() for n, p in learned(model)}
            one, many = pair(
                ranks, Layout(dims, family="qwen3_moe"), way, model=model, **learning(optimizer=BIG)
            )
            assert error(many.forward(batch, "logprobs"), one.forward(batch, "logprobs")) < 1e-5, dims
            assert torch.equal(many.forward(batch, "routed"), one.forward(batch, "routed")), dims
            for e in (one, many):
                e.update(batch, pg_loss)
            found, expected = moved(many, before), moved(one, before)
            assert max(error(found[name], expected[name]) for name in expected) < 1e-5, dims
        layout_of_4 = Layout(Dims(pp=2), chunks=2, family="qwen3_moe", layers=4)
        four = tiny_model("qwen3_moe", layers=4)
        one, many = pair(ranks, layout_of_4, way, model=four, **learning(optimizer=BIG))
        assert torch.equal(many.forward(batch, "routed"), one.forward(batch, "routed"))
    finally:
        ranks.close()


def test_balance_counts_what_routers_choose_themselves() -> None:
    """As Megatron-LM: the load-balancing term is of the routers' own choices."""
    cut = replace(REPLAYED, router_aux=0.7)
    plain, replayed = (made(cut).update(batch, pg_loss) for batch in (weighted(), routed()))
    first = made(cut)
    assert first.balance is not None
    assert replayed["router_aux"] != plain["router_aux"]  # hidden states of the second layer are others
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef.*router_replay"):
        made(cut, hooked=True)


# ---------------------------------------------------------------- servers


SERVED: dict[str, tuple[Any, Any]] = {
    "vllm": (VllmServer, vllm_engine),
    "sglang": (SglangServer, sglang_engine),
}


@pytest.mark.parametrize("kind", SERVED)
def test_a_server_tells_them(kind: str) -> None:
    model, prompt = mixture(), prompts([9])[0]
    serve, connect = SERVED[kind]
    server = serve(engine(mixture(), experts=True))
    streamed: list[int] = []

    async def story() -> list[Completion]:
        there = connect(server.url, model, max_context=300, end_token_ids=[1], routes=Routes.of(model))
        await there.open()
        few = Sampling(key=3, max_tokens=7, ignore_eos=True)
        least = Sampling(key=4, max_tokens=9, min_tokens=4)
        out = [
            await reply(there, prompt, few),
            await reply(there, prompt, few, on_tokens=streamed.extend),
            await reply(there, prompt, least),
        ]
        await there.close()
        return out

    try:
        for done in run(story()):
            assert_recorded(model, prompt, done)
        wanted = [body.get("return_routed_experts") for path, body in server.asked if path == "/generate"]
        assert wanted.count(True) >= 3 or kind == "vllm"
    finally:
        server.stop()


@pytest.mark.parametrize("kind", SERVED)
def test_a_server_that_does_not_tell_them_is_refused_at_the_start(kind: str) -> None:
    model, (serve, connect) = mixture(), SERVED[kind]
    server = serve(engine(mixture()))

    async def story() -> None:
        there = connect(server.url, model, max_context=300, end_token_ids=[1], routes=Routes.of(model))
        with pytest.raises(ConfigError, match="start it with --enable-return-routed-experts"):
            await there.open()
        await there.close()

    try:
        run(story())
    finally:
        server.stop()


def saved(ids: np.ndarray, **how: Any) -> str:
    np.save(file := BytesIO(), ids, **how)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, "does not tell"),
        ({"data": "AQ=="}, "does not tell"),
        ("%", "cannot be read"),
        (base64.b64encode(b"no file").decode(), "cannot be read"),
        (saved(np.array([print], dtype=object), allow_pickle=True), "cannot be read"),
        (saved(told(4)), "shape \\(4, 2, 2\\)"),
        (saved(told(5).astype(np.float32)), "float32"),
        (saved(told(5) + 4), "experts 4 to 7; the model has 4"),
    ],
    ids=range(8),
)
def test_what_is_no_file_of_experts_is_refused(said: Any, words: str) -> None:
    with pytest.raises(WhetError, match=words):
        of_file(said, Routes.of(mixture()), 6, name="it")


def test_buffers_and_files_are_read_alike() -> None:
    routes, ids = Routes.of(mixture()), told(5)
    buffer = base64.b64encode(ids.astype("<i4").tobytes()).decode()
    for found in (
        of_buffer(buffer, routes, 6, name="it"),
        of_file(saved(ids.astype(np.uint16)), routes, 6, name="it"),
    ):
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, ids)
    with pytest.raises(WhetError, match="cannot be read"):
        of_buffer(buffer[:8], routes, 6, name="it")


def test_a_file_that_promises_more_than_it_has_takes_no_memory() -> None:
    file = base64.b64decode(saved(told(5)))
    huge = file.replace(b"(5, 2, 2)", b"(9999999999999, 2, 2)").replace(b" " * 12 + b"\n", b"\n", 1)
    assert len(huge) == len(file)
    with pytest.raises(WhetError, match="cannot be read"):
        of_file(base64.b64encode(huge).decode(), Routes.of(mixture()), 6, name="it")


# ---------------------------------------------------------------- runs


RUN: dict[str, Any] = {
    "model": {
        "scratch": {
            "name": "qwen3_moe",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
            "num_experts": 8,
        }
    },
    "tokenizer": {"build": "chars"},
    "data": {"max_prompt_tokens": 8, "train": [{"path": "tests/data/words.jsonl"}]},
    "rewards": {"letters": {"function": "tests/resume/rewards.py:shared_letters"}},
    "rollout": {"group_size": 2, "sampling": {"max_tokens": 6}},
    "train": {"steps": 4, "tasks_per_step": 4, "optimizer": {"lr": 3e-2}},
    "machine": {"threads": 1},
    "track": {"trackers": ["jsonl"]},
    "checkpoint": {"interval": 1, "keep": None, "export": False},
}


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`train(name, "key=value" ...)`: the metrics of that run."""
    monkeypatch.chdir(ROOT)
    return lambda name, *overrides: (
        whet.train(overrides=[f"run_dir={tmp_path / name}", *overrides], **RUN).metrics
    )


def numbers(lines: list[dict[str, Any]]) -> str:
    return json.dumps(lines)


def test_one_update_by_the_policy_that_sampled_is_the_same_run(train: Any) -> None:
    plain = train("plain")
    assert numbers(train("sampled", "train.router_replay=sampled")) == numbers(plain)
    assert numbers(train("old", "train.router_replay=old")) == numbers(plain)


AHEAD = ("rollout.max_staleness=1", "train.minibatches=2")


def test_rollouts_of_an_older_policy_have_its_experts(train: Any) -> None:
    """Three runs that differ, as whose experts compute a token differs."""
    runs = [
        numbers(train(mode, f"train.router_replay={mode}", *AHEAD)) for mode in ("none", "sampled", "old")
    ]
    assert len(set(runs)) == 3


def test_a_run_that_resumes_has_the_experts_of_what_waits(train: Any, tmp_path: Path) -> None:
    """The rollouts of the next step are in the checkpoint."""
    whole = train("whole", "train.router_replay=sampled", *AHEAD)
    half = stopped(tmp_path / "whole", tmp_path / "half", 2)
    assert b"experts" in (half / "checkpoints/0-main-000002/groups.arrow").read_bytes()
    assert numbers(train("half", "train.router_replay=sampled", *AHEAD)) == numbers(whole)
    for name in ("model", "optimizer"):
        place = f"checkpoints/0-main-000004/policy/{name}.safetensors"
        assert (half / place).read_bytes() == (tmp_path / "whole" / place).read_bytes()


def test_an_engine_without_them_is_refused() -> None:
    cfg = load(None, ["train.router_replay=sampled"], RUN).config
    own = engine(mixture()).can
    assert list(unmet(own, cfg)) == []
    (said,) = unmet(replace(own, experts=False), cfg)
    assert "train.router_replay=sampled" in said
    old = load(None, ["train.router_replay=old"], RUN).config
    assert list(unmet(replace(own, experts=False), old)) == []


def test_a_dense_model_has_none(train: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.router_replay.*has no effect"):
        train("dense", "train.router_replay=old", "model.scratch={name: qwen3, num_experts: null}")
    with pytest.raises(ConfigError, match="has no routers"):
        Routes.of(tiny_model())
