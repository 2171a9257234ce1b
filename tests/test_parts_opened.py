"""Explorer, learner, weights and recorder, each opened from a config by its own function, with doubles of the rest."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from test_loop import Stream
from test_train_torch import random_groups
from tiny import RUN, tiny_model
from whet import checkpoint
from whet.algos.recipes import build as build_algorithm
from whet.batch import pack
from whet.buffer.queue import TrainerQueue
from whet.buffer.stores import open_store
from whet.config.load import Loaded, load
from whet.config.plan import plan as make_plan
from whet.config.schema import Config, RewardConfig, RewardWorkersConfig
from whet.context import Context
from whet.data.tokenizer import build as build_tokenizer
from whet.envs import opened
from whet.explorer import open_explorer, queue_name
from whet.job import Models, Records, open_saver
from whet.learner import Learned, open_learner
from whet.models import kernels
from whet.recorder import open_recorder
from whet.rewards.combine import RewardSet
from whet.rollout.engine import WeightUpdate
from whet.rollout.gate import Door
from whet.rollout.replica import Replica
from whet.rollout.router import Router
from whet.rollout.scripted import ScriptedEngine
from whet.rollout.slots import Slots, slots_of
from whet.track.monitor import Monitor
from whet.track.record import RunDirectory
from whet.track.trackers import open_trackers
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import Message, Metrics, Receipt, Task
from whet.weights import open_weights
from whet.whole import Whole

SAID = [7, 8, 1]
"""What the engine says to everything: two letters and the end."""


class Shown:
    """A display."""

    def phase(self, name: str) -> None: ...

    def phase_over(self, doing: object) -> None: ...

    def step(self, metrics: Metrics, timings: Metrics) -> None: ...

    def evaluated(self, step: int, metrics: Metrics) -> None: ...


class Worded(Stream):
    """Tasks whose state can be saved."""

    def state(self) -> dict[str, int]:
        return {"drawn": self.drawn}


@dataclass
class Given:
    """What all parts are opened from."""

    loaded: Loaded
    context: Context
    models: Models
    engine: ScriptedEngine
    directory: RunDirectory

    @property
    def run_dir(self) -> Path:
        return self.directory.path


def given(folder: Path, *, synced_apart: bool = False, **sections: Any) -> Given:
    """synced_apart: the engine samples from a copy of the policy."""
    tree = {**RUN, "run_dir": str(folder / "run"), **sections}
    loaded = load(None, (), tree)
    cfg = loaded.stages[0]
    directory = RunDirectory(folder / "run", ["main"])
    display: Any = Shown()
    monitor = Monitor(
        "main", display, SimpleNamespace(beat=lambda what: None, last=lambda: ("", 0.0)), directory.timeline
    )  # type: ignore[arg-type]
    algorithm = build_algorithm(cfg.algorithm, critic=cfg.critic, max_tokens=cfg.rollout.sampling.max_tokens)
    plan = make_plan(cfg, rows=12, name="main")
    context = Context(cfg, plan, "main", 0, algorithm, monitor, SimpleNamespace(requested=False))
    model, ops = tiny_model(), kernels.load("auto")
    engine = ScriptedEngine(lambda *_: SAID, end_token_ids=[1])
    sampler = "here" if synced_apart else None
    tokenizer = build_tokenizer("chars", 61, ["abcdefgh"])
    models = Models(tokenizer, Whole(model), ops, exact=True, engine=engine, sampler=sampler)  # type: ignore[arg-type]
    return Given(loaded, context, models, engine, directory)


def length(response: str, task: Task) -> float:
    return float(len(response)) + task.uid


@pytest.fixture
def rewards() -> Iterator[RewardSet]:
    with RewardSet.from_config(
        {"length": RewardConfig(function="object:length")}, RewardWorkersConfig(), {"length": length}
    ) as made:
        yield made


# ---------------------------------------------------------------- explorer


def test_an_explorer_fills_the_steps_of_its_config_and_knows_nothing_of_a_learner(
    tmp_path: Path, rewards: RewardSet
) -> None:
    """Tasks are drawn, played by the engine as the config samples, scored, and counted when they leave."""
    sampling = {"max_tokens": 4, "temperature": 0.7}
    at = given(
        tmp_path,
        rollout={"group_size": 2, "sampling": sampling, "max_num_seqs": 3},
        algorithm={"name": "reinforce"},
    )
    stream: Any = Worded()
    explorer = open_explorer(at.context, at.models, stream, rewards, fingerprint={})

    async def story() -> None:
        for step in range(2):
            groups = await explorer.collect(step, step)
            assert [g.task.uid for g in groups] == [4 * step + n for n in range(4)]
            for group in groups:
                assert [r.index for r in group.rollouts] == [0, 1]
                for rollout in group.rollouts:
                    assert rollout.strand.token_ids.tolist() == [5, 6, *SAID]
                    assert rollout.reward == len(rollout.text) + group.task.uid
            await explorer.barrier(step, step + 1)
            await at.engine.update_weights(WeightUpdate(version=step + 1, module=at.models.model))
            assert await explorer.trained(groups, (), step + 1) == groups
            assert explorer.balance()["ledger/trained_rollouts"] == 8
        await explorer.close()

    asyncio.run(story())
    assert len(at.engine.calls) == 2 * 4 * 2
    assert {(c.sampling.max_tokens, c.sampling.temperature) for c in at.engine.calls} == {(4, 0.7)}
    assert len({c.sampling.key for c in at.engine.calls}) == len(at.engine.calls)
    assert explorer.slots.count() == 3
    assert (explorer.explored, explorer.state()["tasks"]) == (8, {"drawn": 8})
    lost: dict[str, Any] = {"env": SimpleNamespace(restarted=2), "other": SimpleNamespace(restarted=1)}
    at.models.environments.hosts |= lost
    assert explorer.restarts() == 3, "episodes that began anew"


def test_all_that_an_explorer_plays_has_the_same_few_hosts_of_their_own(
    tmp_path: Path, rewards: RewardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "EnvHosts", lambda env, imports: SimpleNamespace(make=None, restarted=0))
    (tmp_path / "mine.py").write_text("class Mine: ...")
    env = {"make": f"{tmp_path}/mine.py:Mine", "observation_tokens": 4}
    at = given(tmp_path, rollout={"group_size": 2, "sampling": {"max_tokens": 4}, "env": env})
    stream: Any = Worded()
    explorer = open_explorer(at.context, at.models, stream, rewards, fingerprint={})
    places = [play.keywords["alone"] for play in (explorer.play, explorer.play_greedy)]  # type: ignore[attr-defined]
    assert places[0] is places[1]

    async def crowd() -> int:
        playing = [asyncio.create_task(places[0].__aenter__()) for _ in range(opened.MOST_ALONE + 3)]
        for _ in range(3):
            await asyncio.sleep(0)
        return sum(one.done() for one in playing)

    assert explorer.alone() == 0
    assert asyncio.run(crowd()) == explorer.alone() == opened.MOST_ALONE


def test_a_task_may_have_a_slot_of_every_engine_that_there_is_now() -> None:
    """Two servers sample twice as much as one, and `whet scale` changes the number of replicas."""
    engine, limit = ScriptedEngine(lambda *_: SAID, end_token_ids=[1]), {"max_num_seqs": 8}

    def slots(**rollout: Any) -> Slots:
        cfg = Config.model_validate({"rollout": limit | rollout})
        return Slots(partial(slots_of, router if cfg.rollout.replicas else engine, cfg), group_size=4)

    async def free(slots: Slots) -> int:
        return await asyncio.wait_for(slots.free(), timeout=10)

    router = Router([Replica("engine-0", engine), Replica("engine-1", engine)])
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3")
    assert asyncio.run(free(slots())) == 2
    assert asyncio.run(free(slots(engine="vllm", server={"urls": urls}))) == 6
    assert asyncio.run(free(slots(env={"make": "a.b:C"}))) == sys.maxsize
    scaled = slots(replicas=2)
    assert asyncio.run(free(scaled)) == 4
    router.replicas["engine-2"] = Replica("engine-2", engine)
    assert asyncio.run(free(scaled)) == 6


@pytest.mark.parametrize("schedule", ["deterministic", "async"])
def test_the_explorer_of_a_trainer_takes_its_groups_from_the_store_of_its_config(
    tmp_path: Path, rewards: RewardSet, schedule: str
) -> None:
    url = f"files:///{tmp_path}/queue"
    at = given(
        tmp_path,
        mode="train",
        buffer={"url": url},
        rollout={**RUN["rollout"], "schedule": schedule, "max_staleness": 1},
    )
    stream: Any = Worded()
    explorer = open_explorer(at.context, at.models, stream, rewards, fingerprint={"seed": 1})
    assert isinstance(explorer.buffer, TrainerQueue) == (schedule == "async")
    assert (explorer.rounds is None) == (schedule == "async")
    assert len(explorer.stores) == 1
    explorer.tell("code", {"a.py": "d1"})
    other = open_store(url, queue=queue_name(at.context.cfg, "main"), order="arrival")
    assert other.noted("code") == {"a.py": "d1"}
    assert at.engine.calls == []


# ---------------------------------------------------------------- learner


def test_a_learner_learns_from_groups_wherever_they_come_from(tmp_path: Path) -> None:
    """A step changes the policy and no version: that is the weights' to count. What is saved is restored."""
    at = given(tmp_path, algorithm={"name": "grpo"})
    learner = open_learner(at.context, at.models, ranks={}, demonstrations=None, exact=False, reused=None)
    assert (learner.critic, learner.references, list(learner.engines())) == (None, (), ["policy"])
    before = {name: x.clone() for name, x in learner.policy.weights()}
    groups = random_groups(count=4, size=2)

    async def story() -> Learned:
        batch, _ = await learner.prepare(0, groups)
        assert batch.adv_N is not None
        assert batch.adv_N[batch.mask_N].any()
        return await learner.learn(0, batch, groups)

    learned = asyncio.run(story())
    assert learned.groups == groups
    assert learned.metrics["train/grad_norm"] > 0
    assert learned.metrics["train/version"] == 1.0
    assert any(not torch.equal(x, before[name]) for name, x in learner.policy.weights())
    assert learner.policy.version == 0
    learner.policy.version = 5
    saved = checkpoint.copied(learner.state())
    again = given(tmp_path / "again", algorithm={"name": "grpo"})
    other = open_learner(again.context, again.models, ranks={}, demonstrations=None, exact=False, reused=None)
    assert other.restore(saved, changed=False) == []
    assert other.version == 5


def test_a_learner_has_the_models_that_its_algorithm_needs(tmp_path: Path) -> None:
    at = given(tmp_path, algorithm={"name": "ppo", "kl": {"coef": 0.1}})
    learner = open_learner(at.context, at.models, ranks={}, demonstrations=None, exact=False, reused=None)
    assert list(learner.engines()) == ["policy", "critic", "reference"]
    (reference,) = learner.references
    groups = random_groups(count=4, size=2)

    async def story() -> Learned:
        batch, _ = await learner.prepare(0, groups)
        assert batch.value_N is not None
        assert batch.logp_ref_N is not None
        return await learner.learn(0, batch, groups)

    before = {name: x.clone() for name, x in reference.weights()}
    learned = asyncio.run(story())
    assert {"train/loss", "critic/loss", "train/kl_reference_nats"} <= learned.metrics.keys()
    assert all(torch.equal(x, before[name]) for name, x in reference.weights())


# ---------------------------------------------------------------- weights


@dataclass
class Barriers:
    """An explorer."""

    engine: ScriptedEngine
    seen: list[tuple[int, int, int]] = field(default_factory=list)
    """Step, version to come, and the engine's version of each barrier."""
    explored: int = 0
    in_flight: Any = field(default_factory=lambda: SimpleNamespace(door=Door()))

    async def barrier(self, step: int, version: int) -> None:
        assert self.in_flight.door.opened is not None, "no task begins before the weights have changed"
        self.seen.append((step, version, self.engine.version))

    async def rollouts_over(self) -> None: ...


def policy_of(at: Given) -> TorchEngine:
    return TorchEngine(at.models.model, at.models.ops, cut=MicroBatchPolicy())


def changed(policy: TorchEngine) -> None:
    with torch.no_grad():
        for p in policy.module.parameters():
            p.add_(1.0)


def test_weights_give_the_engine_each_version_and_nothing_is_sampled_across_the_change(
    tmp_path: Path,
) -> None:
    at = given(tmp_path)
    policy, explorer = policy_of(at), Barriers(at.engine)
    weights = open_weights(at.context, at.models, policy, at.run_dir, ranks={})

    async def story() -> None:
        assert await weights.begin(resumed=False) == 0
        for step in range(3):
            weights.check()
            await weights.sleep()
            await weights.publish(step, explorer)  # type: ignore[arg-type]
            assert (policy.version, at.engine.version) == (step + 1, step + 1)

    asyncio.run(story())
    assert explorer.seen == [(step, step + 1, step) for step in range(3)]
    assert [update.version for update in at.engine.loaded] == [0, 1, 2, 3]
    assert not (at.run_dir / "weights").exists(), "nobody samples elsewhere"
    assert weights.state() == {"sampler_version": 3, "explored_at_sync": 0}


def test_between_two_syncs_the_engine_samples_from_the_copy_that_the_last_one_made(tmp_path: Path) -> None:
    at = given(
        tmp_path, synced_apart=True, rollout={**RUN["rollout"], "sync_interval": 2, "max_staleness": 1}
    )
    policy, explorer = policy_of(at), Barriers(at.engine)
    weights = open_weights(at.context, at.models, policy, at.run_dir, ranks={})
    sampler = weights.sampler
    assert sampler is not None

    async def story() -> list[tuple[int, int, bool]]:
        seen = []
        await weights.begin(resumed=False)
        for step in range(3):
            changed(policy)
            explorer.explored += 4
            await weights.publish(step, explorer)  # type: ignore[arg-type]
            mine, theirs = dict(policy.weights()), dict(sampler.weights())
            seen.append(
                (at.engine.version, sampler.version, all(torch.equal(mine[n], theirs[n]) for n in mine))
            )
        return seen

    # the last step ends in a sync, too
    assert asyncio.run(story()) == [(0, 0, False), (2, 2, True), (3, 3, True)]
    assert policy.version == 3
    assert weights.state() == {"sampler_version": 3, "explored_at_sync": 12}
    weights.restore({"sampler_version": 2, "explored_at_sync": 8})
    assert (sampler.version, weights.explored_at_sync) == (2, 8)


def test_an_engine_that_confirms_no_version_ends_the_step(tmp_path: Path) -> None:
    at = given(tmp_path)
    policy = policy_of(at)
    weights = open_weights(at.context, at.models, policy, at.run_dir, ranks={})

    async def deaf(update: WeightUpdate) -> Receipt:
        return Receipt("the engine", update.version)

    async def story() -> None:
        await weights.begin(resumed=False)
        at.engine.update_weights = deaf  # type: ignore[method-assign]
        await weights.publish(0, Barriers(at.engine))  # type: ignore[arg-type]

    with pytest.raises(Exception, match="the engine confirms version 1 and is at version 0"):
        asyncio.run(story())


def test_for_explorers_elsewhere_each_version_is_written_into_the_run_directory(tmp_path: Path) -> None:
    at = given(tmp_path, mode="train", buffer={"url": f"files:///{tmp_path}/queue"}, sync={"keep": 2})
    policy = policy_of(at)
    weights = open_weights(at.context, at.models, policy, at.run_dir, ranks={})
    assert weights.out is not None

    async def story() -> None:
        await weights.begin(resumed=False)
        for step in range(2):
            changed(policy)
            weights.check()
            await weights.publish(step, Barriers(at.engine))  # type: ignore[arg-type]

    asyncio.run(story())
    assert weights.out.transport.newest() == 2
    received = {entry.name: tensor for entry, tensor in weights.out.transport.receive(2)}
    for name, x in policy.weights():
        assert torch.equal(received[name], x)


# ---------------------------------------------------------------- recorder


def test_a_recorder_writes_steps_evaluations_checkpoints_and_exports_without_a_loop(
    tmp_path: Path, rewards: RewardSet
) -> None:
    """Of a learner it has the policy alone."""
    at = given(
        tmp_path,
        data={**RUN["data"], "eval": [{"rows": [{"prompt": "a"}]}]},
        rewards={"length": {"function": "tests/resume/rewards.py:shared_letters"}},
        eval={"samples": 2, "log_samples": 1, "sampling": {"max_tokens": 3, "temperature": 1.0}},
        track={"trackers": ["jsonl"], "rollouts_interval": 1, "batches_interval": 1},
    )
    cfg = at.context.cfg
    saver, uploads = open_saver(cfg, at.run_dir)
    display: Any = at.context.monitor.display
    trackers, stop, watch = open_trackers(cfg, at.directory), at.context.stop, at.context.monitor.watch
    records = Records(at.directory, trackers, display, saver, uploads, stop, watch)
    policy = policy_of(at)
    learner: Any = SimpleNamespace(policy=policy, ranks={}, meter=None, compute_logprobs_and_values=None)
    job: Any = SimpleNamespace(loaded=at.loaded, models=at.models, records=records, rewards=[rewards])
    tasks = [
        Task(uid=uid, source="held", prompt=(Message("user", "a"),), token_ids=(5, uid)) for uid in range(3)
    ]
    recorder = open_recorder(at.context, job, learner, tasks)

    groups = random_groups(count=2, size=2)
    batch = pack(groups)
    batch = replace(batch, adv_N=batch.mask_N.float())
    numbers = recorder.record(1, groups, Learned(batch, groups, {"train/loss": 0.5}, (), 0.0), {})
    asyncio.run(recorder.evaluate(1))
    recorder.save(1, {"policy": policy}, lambda: {"version": 1})
    recorder.export(1)

    step, evaluated = (json.loads(line) for line in (at.run_dir / "metrics.jsonl").read_text().splitlines())
    assert step == numbers | {"stage": "main", "step": 1}
    assert evaluated["eval/held/tasks"] == 3
    assert evaluated["eval/held/reward_mean"] == pytest.approx(sum(2 + uid for uid in range(3)) / 3)
    assert len(at.engine.calls) == 3 * 2
    assert {call.sampling.max_tokens for call in at.engine.calls} == {3}
    for folder in ("rollouts", "batches", "eval"):
        assert (at.run_dir / folder / "main-step-000001.parquet").is_file()
    path = checkpoint.newest(at.run_dir / "checkpoints")
    assert path is not None
    state = checkpoint.read_state(path)
    assert (state["step"], state["stage_name"], state["version"]) == (1, "main", 1)
    assert state["record"] == at.directory.held()
    exported = load_file(at.run_dir / "export/main-step-000001/model.safetensors")
    for name, x in policy.weights():
        if name in exported:  # tied ones are there once
            assert torch.equal(exported[name], x)
    assert len(exported) > 4
