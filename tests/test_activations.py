"""What sampling has computed is not computed again in training, and no bit of the gradient changes.

An engine samples on the trainer's own module, as in a run. A trainer that reuses the activations and one that computes
all of them give the same metrics and the same weights."""

from __future__ import annotations

import asyncio
import copy
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import whet
from asking import reply
from tiny import FAMILIES, RUN, SPARSE, VOCAB, tiny_model
from whet import environment, stages
from whet.batch import Batch, Loss, Outputs, pack
from whet.config.load import load
from whet.config.memory_estimate import REUSED, reused_bytes, reused_tokens
from whet.config.plan import plans
from whet.config.schema import ModelConfig, OptimizerConfig
from whet.config.sizes import PAGE_TOKENS, Shape, config_sizes, new_shape
from whet.context import Context
from whet.job import Models
from whet.learner import Learner
from whet.models import kernels
from whet.models.activations import Activations, LayerOutput, PackedActivations
from whet.models.packing import PackedLayout, layout
from whet.rollout.native.engine import NativeEngine
from whet.rollout.native.runner import Runner
from whet.rollout.native.scheduler import Generation
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.reuse import Reuse
from whet.training.torch import TorchEngine
from whet.types import ConfigError, Group, Rollout, Sampling, Strand, Task, WhetError

environment.prepare(threads=None, exact=True)

try:
    OPS = kernels.load("compiled")
except ConfigError:
    pytest.skip("without compiled kernels nothing is reused", allow_module_level=True)

DENSE = [
    each if each == "qwen3" else pytest.param(each, marks=pytest.mark.sweep)
    for each in FAMILIES
    if each not in SPARSE
]
Tokens = tuple[int, ...]
ON_CPU = {"threads": 1, "device": "cpu"}


def engine_on(model: PreTrainedModel, *, rows: int = 4096, **options: Any) -> NativeEngine:
    shape = Shape(**config_sizes(model.config.to_dict()))
    kept = Activations(shape.layer_outputs, layers=shape.layers, rows=rows)
    return NativeEngine(model, OPS, end_token_ids=[1], max_context=160, kept=kept, **options)


def prompts(count: int, seed: int = 0) -> list[Tokens]:
    """Of 3 to 40 tokens; all begin with the same 17, so that they share a page."""
    rng = np.random.default_rng(seed)
    start = rng.integers(2, VOCAB, 17).tolist()
    return [(*start, *rng.integers(2, VOCAB, int(rng.integers(1, 24))).tolist()) for _ in range(count)]


async def conversation(engine: NativeEngine, prompt: Tokens, turns: int, key: int) -> Strand:
    """A reply, or several with tokens of an environment between them."""
    tokens, mask, logp = list(prompt), [False] * len(prompt), [0.0] * len(prompt)
    for turn in range(turns):
        if turn:
            said = [7 + turn, 9, 11 + key % 5]
            tokens, mask, logp = tokens + said, mask + [False] * 3, logp + [0.0] * 3
        done = await reply(engine, tuple(tokens), Sampling(key=100 * key + turn, max_tokens=4 + key % 9))
        tokens, mask = tokens + list(done.token_ids), mask + [True] * len(done.token_ids)
        logp += list(done.logprobs or ())
    return Strand(
        token_ids=np.array(tokens, np.int32),
        mask=np.array(mask),
        logprobs=np.array(logp, np.float32),
        sample_logprobs=np.array(logp, np.float32),
        versions=np.array(mask, np.int32) - 1,
    )


async def sampled(
    engine: NativeEngine, given: Sequence[Tokens], *, group: int = 4, turns: int = 1
) -> list[Group]:
    with engine.keeping():
        strands = await asyncio.gather(
            *(
                conversation(engine, prompt, turns, n * group + i)
                for n, prompt in enumerate(given)
                for i in range(group)
            )
        )
    out = []
    for n in range(len(given)):
        task = Task(uid=n, source="test", prompt="")
        own = strands[n * group : (n + 1) * group]
        rollouts = (
            Rollout(task=task, index=i, strands=(strand,), finish_reason="stop", reward=float(i))
            for i, strand in enumerate(own)
        )
        out.append(Group(task, tuple(rollouts)))
    return out


def batch_of(groups: list[Group]) -> Batch:
    batch = pack(groups)
    weight = torch.linspace(-1, 1, batch.tokens) * batch.mask_N
    return replace(batch, weight_N=weight)


def loss(batch: Batch, out: Outputs) -> Loss:
    assert out.logp_N is not None
    return Loss(-out.logp_N, {"logp": out.logp_N.detach()})


def trainer(model: PreTrainedModel, **cut: Any) -> TorchEngine:
    policy = MicroBatchPolicy(**{"max_tokens": 200, **cut})
    return TorchEngine(model, OPS, cut=policy, optimizer=OptimizerConfig(lr=1e-2), total_steps=9)


def reusing(engine: NativeEngine, **cut: Any) -> TorchEngine:
    out = trainer(engine.module, **cut)
    assert engine.kept is not None
    out.reuse = Reuse(engine.kept, out.decoder, OPS)
    return out


def same_update(engine: NativeEngine, groups: list[Group], **cut: Any) -> tuple[int, int]:
    """An update that reuses, held against one that computes everything. Returns how many micro-batches were known, and
    how many there were."""
    batch = batch_of(groups)
    other, own = trainer(copy.deepcopy(engine.module), **cut), reusing(engine, **cut)
    assert own.reuse is not None
    asked: list[bool] = []
    of = own.reuse.of

    def counted(packed: PackedLayout) -> PackedActivations | None:
        found = of(packed)
        asked.append(found is not None)
        return found

    own.reuse.of = counted  # type: ignore[method-assign]
    assert own.update(batch, loss) == other.update(batch, loss)
    for (name, mine), (_, theirs) in zip(
        own.module.named_parameters(), other.module.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    assert own.reuse.differs is None
    return sum(asked), len(asked)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", DENSE)
def test_an_update_from_kept_activations_is_the_same_update(family: str, share: bool) -> None:
    engine = engine_on(tiny_model(family))
    groups = asyncio.run(sampled(engine, prompts(6)))
    known, micros = same_update(engine, groups, share_prompts=share)
    assert known == micros > 1


def test_of_several_turns() -> None:
    engine = engine_on(tiny_model())
    groups = asyncio.run(sampled(engine, prompts(5), turns=3))
    known, micros = same_update(engine, groups)
    assert known == micros > 1


def test_rows_that_wait_for_pages_and_begin_again() -> None:
    """Rows go back to the queue where pages run out, and their histories are computed again, in other rows."""
    engine = engine_on(tiny_model(), prefill_tokens=32)
    pages = engine.scheduler.pages
    pages.free, pages.count = pages.free[-22:], 22
    groups = asyncio.run(sampled(engine, prompts(6)))
    assert engine.counts.preemptions > 0
    known, micros = same_update(engine, groups)
    assert known == micros > 1


def test_where_there_is_no_room_for_all_tokens_the_others_are_computed() -> None:
    engine = engine_on(tiny_model(), rows=240, max_num_seqs=8)
    groups = asyncio.run(sampled(engine, prompts(8)))
    known, micros = same_update(engine, groups, max_tokens=60)
    assert 0 < known < micros


def test_a_batch_with_tokens_of_others_is_computed() -> None:
    engine = engine_on(tiny_model())
    groups = asyncio.run(sampled(engine, prompts(3)))
    rollout = groups[1].rollouts[2]
    strand = rollout.strands[0]
    other = replace(strand, token_ids=np.where(np.arange(len(strand.mask)) == 5, 0, strand.token_ids))
    rollouts = tuple(replace(r, strands=(other,)) if r is rollout else r for r in groups[1].rollouts)
    groups[1] = replace(groups[1], rollouts=rollouts)
    assert same_update(engine, groups, max_tokens=4096) == (0, 1)


def test_a_batch_of_which_nothing_is_computed_is_not_known() -> None:
    engine = engine_on(tiny_model())
    batch = batch_of(asyncio.run(sampled(engine, prompts(2))))
    none = layout(replace(batch, mask_N=torch.zeros_like(batch.mask_N)), share_prompts=True)
    own = reusing(engine)
    assert own.reuse is not None
    assert own.reuse.of(none) is None
    assert own.reuse.of(layout(batch, share_prompts=True)) is not None


def test_only_the_first_minibatch_is_of_the_weights_that_sampled() -> None:
    engine = engine_on(tiny_model())
    batch = batch_of(asyncio.run(sampled(engine, prompts(4))))
    packed = layout(batch, share_prompts=True)
    own = reusing(engine, max_tokens=4096)
    assert own.reuse is not None
    assert own.reuse.of(packed) is not None
    own.update(batch, loss)
    assert own.reuse.of(packed) is None


def test_what_was_in_the_cache_before_has_no_activations() -> None:
    """An evaluation reads the same prompts, by the same weights: their pages are in the cache, but not kept."""
    engine = engine_on(tiny_model())
    assert engine.kept is not None
    asyncio.run(evaluated(engine, prompts(4)))
    assert engine.kept.next == 0
    groups = asyncio.run(sampled(engine, prompts(4)))
    known, micros = same_update(engine, groups)
    assert known == micros


async def evaluated(engine: NativeEngine, given: Sequence[Tokens]) -> None:
    await asyncio.gather(*(reply(engine, prompt, Sampling(max_tokens=9, temperature=0)) for prompt in given))


def test_numbers_of_rows_from_before_are_never_those_of_new_ones() -> None:
    """Pages remember rows by number; after the weights have changed the same rows have others."""
    kept = Activations([2], layers=1, rows=4)
    kept.on = True
    start = kept.take(3)
    assert start == 0
    old = np.array([0, 1, 2])
    kept.note([5, 6, 7], old)
    assert len(kept.known) == 1
    kept.forget()
    assert kept.take(4) == 3
    kept.note([5, 6, 7], old)
    kept.note([5, 6], np.array([2, 3]))
    assert kept.known == {}
    kept.note([5, 6, 8], np.array([4, 5, 6]))
    assert [rows.tolist() for rows in kept.known.values()] == [[1, 2, 3]]
    assert kept.take(1) is None, "full"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it reads what the process has taken")
def test_memory_is_taken_as_tokens_come_and_given_back() -> None:
    environment.keep_memory()  # as a run does: malloc keeps what is freed

    def taken() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE >> 20

    before = taken()
    kept = Activations([1 << 10] * 2, layers=2, rows=16 << 10)
    assert taken() < before + 64, "of 256 MiB"
    assert all(kind.fill_(1.0).is_contiguous() for kind in kept.kinds)
    assert taken() > before + 192
    kept.resize(0)
    assert taken() < before + 64
    kept.resize(16 << 10)
    assert taken() < before + 64
    assert not any(bool(kind[:, ::999].any()) for kind in kept.kinds)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", list(LayerOutput))
def test_a_number_that_is_not_the_trainer_s_is_found(kind: LayerOutput, layer: int) -> None:
    """One strand of an update is compared; here every rollout has the wrong number."""
    engine = engine_on(tiny_model())
    groups = asyncio.run(sampled(engine, prompts(3)))
    own, batch = reusing(engine), batch_of(groups)
    assert own.reuse is not None
    own.reuse.kept.kinds[kind][layer] += 1e-4
    reference = trainer(copy.deepcopy(engine.module))
    assert own.update(batch, loss) == reference.update(batch, loss), "they were not used"
    assert own.reuse.differs is not None
    assert 0 < own.reuse.differs < 1e-2
    later = batch_of(asyncio.run(sampled(engine, prompts(3))))
    assert own.reuse.of(layout(later, share_prompts=True)) is None, "nor are later ones"


@pytest.mark.parametrize("updates", [0, 1, 2])
def test_another_strand_is_compared_in_each_step(updates: int) -> None:
    """Of two prompts and their eight replies, the last one is wrong: found in the tenth step, not before. A step has
    one update of the policy, several, or, while a critic warms up, a forward alone."""
    engine = engine_on(tiny_model())
    own = reusing(engine, max_tokens=4096)
    assert own.reuse is not None
    for step in range(10):
        assert own.reuse.differs is None
        groups = asyncio.run(sampled(engine, prompts(2)))
        batch = batch_of(groups)
        packed = layout(batch, share_prompts=True)
        found = own.reuse.kept.find(packed.segments, packed.token_ids_U)
        assert found is not None
        last = int(found.row_U[-1])
        own.reuse.kept.kinds[LayerOutput.DOWN][1, last] += 1.0
        if not updates:
            own.forward(batch, "logprobs")
        for _ in range(updates):
            own.update(batch, lambda b, out: Loss(0 * loss(b, out).loss_N))  # the weights stay
        assert (own.reuse.differs is not None) == (step == 9)


# ---------------------------------------------------------------- whole runs


def values(folder: Path, **train: Any) -> dict[str, Any]:
    out = {**RUN, "run_dir": str(folder), "train": {**RUN["train"], **train}}
    out["data"] = {**RUN["data"], "eval": RUN["data"]["train"], "exclude_eval": False}
    return out | {"eval": {"interval": 1}, "checkpoint": {"export": False}, "machine": ON_CPU}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each micro-batch for which a run asks, whether it was known."""
    out: list[bool] = []
    of = Reuse.of

    def counted(self: Reuse, packed: PackedLayout) -> PackedActivations | None:
        known = of(self, packed)
        out.append(known is not None)
        return known

    monkeypatch.setattr(Reuse, "of", counted)
    return out


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_run_that_reuses_writes_what_one_writes_that_computes_everything(
    minibatches: int, tmp_path: Path, found: list[bool]
) -> None:
    """With gradient checkpointing nothing is kept; it changes no bit either. An evaluation comes before each step."""
    same_runs(tmp_path, {"minibatches": minibatches})
    assert found == [True, False][:minibatches] * 3


def same_runs(folder: Path, train: dict[str, Any] | None = None, **sections: Any) -> None:
    """A run that reuses and one that computes everything: metrics, every rollout and the weights are the same bytes."""
    runs = []
    for computes in (False, True):
        given = values(folder / str(computes), gradient_checkpointing=computes, **(train or {}))
        run = whet.train(**given | copy.deepcopy(sections)).run_dir
        weights = sorted((run / "checkpoints").glob("*/policy/model.safetensors"))[-1]
        files = [run / "metrics.jsonl", *sorted((run / "rollouts").glob("*.parquet")), weights]
        runs.append([(path.name, path.read_bytes()) for path in files])
    assert runs[0] == runs[1]


SPEAKS = """
import asyncio

from whet.envs.env import EnvStep
from whet.types import Message


class Speaks:
    def __init__(self, task, world):
        self.world, self.turn = world, 0

    async def first(self):
        return []

    async def step(self, reply):
        self.turn += 1
        asked = [self.world.chat([Message("user", x)], max_tokens=2) for x in "ab"]
        said = await asyncio.gather(*asked)
        history = [Message("user", "b" + said[0].content)] if self.turn == 2 else None
        reward = float(len(said[1].content) + len(reply.content))
        return EnvStep([Message("user", "a")], reward, done=self.turn == 3, history=history)
"""


def test_of_episodes_that_fork_and_rewrite_their_history(tmp_path: Path, found: list[bool]) -> None:
    """Each episode has several strands, which begin alike; few rows are live at once."""
    (tmp_path / "speaks.py").write_text(SPEAKS)
    rollout = {
        **RUN["rollout"],
        "sampling": {"max_tokens": 12},
        "max_num_seqs": 3,
        "env": {"make": f"{tmp_path}/speaks.py:Speaks", "observation_tokens": 16},
    }
    rows = [{"prompt": x} for x in "abcd"]
    data = {
        "max_prompt_tokens": 400,
        "train": [{"rows": rows}],
        "chat": True,
    }  # so there is room for all strands
    model = {"scratch": {**RUN["model"]["scratch"], "max_position_embeddings": 512}}
    others: dict[str, Any] = {"rewards": {}, "eval": {}, "model": model, "data": data}
    same_runs(
        tmp_path, {"micro_batch_tokens": 40, "steps": 2, "tasks_per_step": 2}, rollout=rollout, **others
    )
    assert len(found) > 4
    assert all(found)


def test_with_demonstrations_in_the_batch(tmp_path: Path, found: list[bool]) -> None:
    """The micro-batches that have some are computed, the others are not."""
    rows = [{"prompt": f"{x}>", "response": "abb"} for x in "abcde"]
    data = {**values(tmp_path)["data"], "demonstrations": [{"rows": rows}]}
    same_runs(tmp_path, {"micro_batch_tokens": 12}, data=data, algorithm={"name": "mix"})
    assert {True, False} == set(found)


def test_in_stages(tmp_path: Path, found: list[bool]) -> None:
    stages = [{"name": name, "algorithm": {"name": name}} for name in ("grpo", "sft", "ppo")]
    same_runs(tmp_path, stages=stages, rollout={**RUN["rollout"], "sampling": {"max_tokens": 8}})
    assert found == [True] * 6


def test_of_a_stage_after_one_that_samples_ahead(tmp_path: Path, found: list[bool]) -> None:
    """The copy of the policy that the first and the last one sample from is not that of the second."""
    ahead = {"rollout": {"max_staleness": 1}}
    three = [{"name": "ahead", **ahead}, {"name": "in-turn"}, {"name": "again", **ahead}]
    same_runs(tmp_path, stages=three)
    assert found == [True] * 3


@contextmanager
def changed() -> Iterator[None]:
    """Inside it, what sampling has kept is wrong."""
    find = Activations.find

    def wrong(self: Activations, *what: Any) -> PackedActivations | None:
        if self.kinds:
            self.kinds[LayerOutput.LSE][:] += 1.0
        return find(self, *what)

    with patch.object(Activations, "find", wrong):
        yield


@pytest.mark.parametrize("train", [{}, {"temperature": 0.7}], ids=["one temperature", "two temperatures"])
def test_a_difference_is_told_and_ends_the_reuse(
    train: dict[str, Any], tmp_path: Path, found: list[bool]
) -> None:
    """Also where log-probs are not compared, as the trainer's are of another temperature."""
    with changed():
        result = whet.train(**values(tmp_path / "auto", **train))
        log = (result.run_dir / "run.log").read_text()
        assert "step 1: the activations of a rollout differ from the trainer's, by at most 1.00e+00" in log
        assert "continues as 'close'" in log
        assert not any(found)
        strict = values(tmp_path / "on", **train) | {"machine": {**ON_CPU, "logprob_parity": "on"}}
        with pytest.raises(WhetError, match="logprob_parity=on does not allow this"):
            whet.train(**strict)


def test_a_run_that_has_found_a_difference_reuses_nothing_after_it_was_resumed(
    tmp_path: Path, found: list[bool]
) -> None:
    with changed():
        whet.train(**values(tmp_path / "run", steps=1))
    whet.train(**values(tmp_path / "run"))
    assert "continues as 'close'" in (tmp_path / "run/run.log").read_text()
    assert found == [False] * 5


def test_where_log_probs_differ_nothing_is_reused_any_longer(
    tmp_path: Path, found: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output layer is not kept: its products may differ where all that is kept is alike. A step of a run that is
    'close' computes the log-probs before the update, too."""
    step = Runner.step

    def other(self: Runner) -> list[Generation]:
        if self.kept is not None:  # not in the self-test
            self.logp += 1e-3
        return step(self)

    monkeypatch.setattr(Runner, "step", other)
    result = whet.train(**values(tmp_path / "run"))
    assert "of the sampled log-probs differ from the trainer's" in (result.run_dir / "run.log").read_text()
    assert found == [True, False, False, False, False]


def test_each_stage_has_the_room_of_its_own_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stage has kept is freed at its end: the plan of the next one does not count it."""
    rows: list[int] = []
    share = stages.share_activations

    def seen(context: Context, models: Models, *parts: Any) -> None:
        share(context, models, *parts)
        assert isinstance(models.engine, NativeEngine)
        assert models.engine.kept is not None
        rows.append(models.engine.kept.rows)

    monkeypatch.setattr(stages, "share_activations", seen)
    short = {"sampling": {"max_tokens": 2}}
    three = [
        {"name": "long"},
        {"name": "saving", "train": {"gradient_checkpointing": True}},
        {"name": "short", "rollout": short},
    ]
    given = values(tmp_path / "run", steps=1) | {"stages": three}
    whet.train(**copy.deepcopy(given))
    assert rows == [reused_tokens(plan) for plan in plans(load(None, values=given))]
    assert rows[0] > rows[2] > rows[1] == 0


def test_a_stage_has_the_kv_cache_of_its_own_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that samples nothing has none, and what was written to in the stage before is given back."""
    caches: list[weakref.ref[Tensor] | None] = []
    open_learner = stages.open_learner

    def seen(context: Context, models: Models, **parts: Any) -> Learner:
        assert isinstance(models.engine, NativeEngine)
        cache = models.engine.runner.cache
        caches.append(None if cache is None else weakref.ref(cache.k))
        assert (cache is not None) == bool(context.plan.kv_cache_bytes)
        assert [each() is not None for each in caches[:-1] if each] == [False] * (len(caches) > 1)
        return open_learner(context, models, **parts)

    monkeypatch.setattr(stages, "open_learner", seen)
    names = {"rl": "grpo", "sft": "sft", "again": "grpo"}
    given = {**values(tmp_path / "run", steps=1), "data": RUN["data"], "eval": {}}
    given["stages"] = [{"name": name, "algorithm": {"name": own}} for name, own in names.items()]
    whet.train(**given | {"rollout": {**RUN["rollout"], "sampling": {"max_tokens": 8}}})
    assert [each is not None for each in caches] == [True, False, True]


def test_without_addresses_for_it_the_run_computes_everything(
    tmp_path: Path, found: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    resize = Activations.resize

    def refused(self: Activations, rows: int) -> None:
        if rows:
            raise MemoryError("cannot allocate memory")
        resize(self, rows)

    monkeypatch.setattr(Activations, "resize", refused)
    result = whet.train(**values(tmp_path / "run"))
    said = "the update computes again what sampling has computed: cannot allocate memory"
    assert said in (result.run_dir / "run.log").read_text()
    assert found == []


# ---------------------------------------------------------------- what is kept, by the plan


def planned(**changed: Any) -> int:
    cfg: dict[str, Any] = {"run_dir": "run", **copy.deepcopy(RUN), "machine": dict(ON_CPU)}
    for key, value in changed.items():
        section, _, name = key.partition("__")
        cfg.setdefault(section, {})[name] = value
    (found,) = plans(load(None, values=cfg))
    return reused_tokens(found)


def test_a_step_s_tokens_are_kept_where_sampling_and_training_are_one_computation() -> None:
    assert planned() == 4 * (8 + 2 * (3 + PAGE_TOKENS)), "the last token of a reply is not fed"
    for key, value in {
        "train__gradient_checkpointing": True,
        "train__compile": True,
        "rollout__max_staleness": 1,
        "rollout__schedule": "async",
        "rollout__sync_interval": 2,
        "rollout__engine": "hf",
        "rollout__quantization": "int8",
        "model__lora": {"rank": 2},
        "model__dtype": "bfloat16",
        "machine__kernels": "torch",
        "model__scratch": {**RUN["model"]["scratch"], "name": "qwen3_moe", "num_experts": 4},
    }.items():
        assert planned(**{key: value}) == 0, key
    assert planned(model__scratch={**RUN["model"]["scratch"], "head_dim": 24}) == 0, "not by C"


def test_memory_bounds_what_is_kept() -> None:
    """A quarter of what the largest phase leaves; `whet plan` counts it in every phase."""
    shape = new_shape(ModelConfig(scratch=RUN["model"]["scratch"]), vocab_size=40)
    assert reused_bytes(shape) == 4 * (32 * 4 + 2 + 32 + 2 * 32 + 32)
    rows = [planned(machine__memory_mb=mb, train__tasks_per_step=1 << 14) for mb in (200, 400)]
    assert 0 < rows[0] < rows[1] < (1 << 14) * 14


def test_the_families_are_those_whose_layers_are_one_call() -> None:
    assert set(REUSED) == set(FAMILIES) - set(SPARSE)


def test_activations_of_another_model_are_not_written() -> None:
    """C would write behind their end."""
    engine = engine_on(tiny_model())
    engine.module.model.layers[0].mlp.gate_proj.weight = torch.nn.Parameter(torch.zeros(96, 32))
    with pytest.raises(ValueError, match="activations: room of"):
        asyncio.run(sampled(engine, prompts(2)))
