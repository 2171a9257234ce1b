"""Explorers, a trainer and a bench as processes of their own: they find each other, survive kills, and add up."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import psutil
import pytest
import torch
import yaml

import whet
import whet.weights
from forked import Started
from whet import checkpoint, disaggregated
from whet.api import Stop, run_training
from whet.buffer.queue import ExplorerQueue
from whet.buffer.stores import Scored, Store, open_store
from whet.config.derived import content_of, has_adapters
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import Config, EarlyStoppingConfig
from whet.disaggregated import Evaluation, Followed, check_as_trainer, check_code, evaluate_all
from whet.early_stopping import early_stopping_of
from whet.explorer import open_buffer
from whet.models import kernels
from whet.models.load import build
from whet.models.lora import adapted, attach, refresh
from whet.rollout.native.engine import NativeEngine
from whet.sync.manifest import Manifest, describe
from whet.sync.weights import publish, sync
from whet.track.record import RunDirectory
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import CheckpointError, ConfigError, DataError, Group, Rollout, Task, WhetError
from whet.weights import open_publisher

STEPS = 32
ROWS = [{"prompt": f"copy {n}", "answer": "ab"[n % 2]} for n in range(8)]


def tree(folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run_dir": str(folder / "run"),
        "name": "apart",
        "model": {
            "scratch": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
        },
        "tokenizer": {"build": "chars"},
        "data": {
            "train": [{"rows": ROWS}],
            "eval": [{"rows": ROWS[:2], "name": "held"}],
            "exclude_eval": False,
        },
        "rewards": {"a": {"function": "format", "arguments": {"pattern": "a"}}},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 8}, "max_staleness": 2, "schedule": "async"},
        "buffer": {"url": f"sqlite:///{folder}/groups.db", "lease_s": 5.0},
        "sync": {"timeout_s": 60.0},
        "train": {"steps": STEPS, "tasks_per_step": 2, "optimizer": {"lr": 1e-3}},
        "eval": {"at_start": False},
        "machine": {"threads": 1},
        "checkpoint": {"interval": 5, "export": False},
        "track": {"trackers": ["jsonl"]},
    } | sections


class Processes:
    """The processes of one run, by name."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.folder, self.config = folder, folder / "run.yaml"
        self.config.write_text(yaml.safe_dump(tree(folder, **sections)))
        self.running: dict[str, Started] = {}
        self.seen: set[psutil.Process] = set()
        """What they started, as far as it was met."""

    def start(self, name: str) -> None:
        mode = (
            [f"mode={name}"]
            if name in ("train", "eval")
            else ["mode=explore", f"buffer.explorer_name={name}"]
        )
        log = self.folder / f"{name}.log"
        self.running[name] = Started("train", str(self.config), *mode, said=log)

    def kill(self, name: str) -> None:
        self.look()
        self.running[name].send_signal(signal.SIGKILL)
        self.running.pop(name).wait(30)

    def ends(self, name: str, *, within: float = 180.0) -> int:
        return self.running.pop(name).wait(within)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name)

    def look(self) -> None:
        """At who is there."""
        for process in self.running.values():
            with suppress(psutil.NoSuchProcess):
                self.seen.update(psutil.Process(process.pid).children(recursive=True))

    @property
    def steps(self) -> int:
        path = self.folder / "run/metrics.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def until(self, reached: Callable[[], bool], *, within: float = 120.0) -> None:
        end = time.monotonic() + within
        while not reached():
            assert time.monotonic() < end, "not reached in time"
            self.look()
            for name, process in self.running.items():
                assert process.poll() in (None, 0), self.said(name)
            time.sleep(0.05)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def test_who_evaluates_reads_the_held_out_rows_before_it_waits_for_checkpoints(tmp_path: Path) -> None:
    given = tree(tmp_path, mode="eval", sync={"timeout_s": 1.0})
    given["data"]["max_prompt_tokens"] = 2
    with pytest.raises(DataError, match="its prompt has 6 tokens, the limit is 2"):
        whet.train(**given)


def test_everybody_may_be_killed(processes: Processes) -> None:
    """Each of an explorer, the other one and the trainer is killed and started again; a bench follows the checkpoints.

    No step is lost or done twice, the account balances over all processes, and none is left behind.
    """
    rng = random.Random(5)
    for name in ("train", "one", "two", "eval"):
        processes.start(name)
    for n, name in enumerate(("one", "train", "two"), start=1):
        processes.until(lambda n=n: processes.steps >= 8 * n + rng.randrange(3))  # type: ignore[misc]
        processes.kill(name)
        processes.start(name)
    assert [processes.ends(name) for name in ("train", "one", "two", "eval")] == [0, 0, 0, 0]
    lines = [json.loads(line) for line in (processes.folder / "run/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["train/staleness_mean"] <= 2 for line in lines)
    assert any(line["train/version"] > 2 and line["train/staleness_mean"] < 2 for line in lines), (
        "weights are followed"
    )
    store = open_store(f"sqlite:///{processes.folder}/groups.db", queue="apart/main", order="arrival")
    store.check()
    assert store.ledger()["trained"] == STEPS * 2 * 4
    store.close()
    benched = (processes.folder / "run/bench/metrics.jsonl").read_text().splitlines()
    seen = [json.loads(line)["step"] for line in benched]
    assert seen == sorted(set(seen))
    assert seen[-1] == STEPS
    assert len(processes.seen) >= 6, "each has processes for its rewards"
    assert psutil.wait_procs(processes.seen, timeout=10)[1] == [], "nobody is left behind"


def test_a_trainer_that_waits_for_explorers_ends_at_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for a step's groups that may never come, and what it saved can go on."""
    taken = Store.take

    def interrupted(store: Store, *args: Any, **given: Any) -> list[Group]:
        if given["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return taken(store, *args, **given)

    monkeypatch.setattr(Store, "take", interrupted)
    assert run_training(load(None, (), tree(tmp_path, mode="train"))) == 130
    assert [p.name for p in sorted((tmp_path / "run/checkpoints").iterdir())] == ["0-main-000000"]
    assert run_training(load(None, (), tree(tmp_path, mode="train"))) == 130, "it goes on, and waits again"


def test_a_trainer_that_goes_on_with_a_finished_stage_takes_back_that_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with more train.steps: explorers would end at once, and the trainer wait for them."""
    store = open_store(f"sqlite:///{tmp_path}/groups.db", queue="apart/main", order="arrival")
    store.note("finished", 3)
    taken, noted = Store.take, []

    def interrupted(store: Store, *args: Any, **given: Any) -> list[Group]:
        noted.append(store.noted("finished"))
        os.kill(os.getpid(), signal.SIGINT)
        return taken(store, *args, **given)

    monkeypatch.setattr(Store, "take", interrupted)
    assert run_training(load(None, (), tree(tmp_path, mode="train"))) == 130
    assert noted[0] is None
    store.close()


@pytest.mark.parametrize(
    ("steps", "before", "patience", "waits"),
    [(6, None, None, True), (3, None, None, False), (3, 2, 2, False), (3, 2, 4, True), (3, 2, None, True)],
)
def test_an_explorer_that_is_there_before_the_trainer_of_more_steps_waits_for_it(
    tmp_path: Path, steps: int, before: int | None, patience: int | None, waits: bool
) -> None:
    """The store still says that the stage is finished: of 3 steps, or earlier for its patience."""

    def settings(patience: int | None) -> EarlyStoppingConfig | None:
        return None if patience is None else EarlyStoppingConfig(patience=patience)

    store = open_store(f"sqlite:///{tmp_path}/groups.db", queue="apart/main", order="arrival")
    store.note("began", 0)
    store.note("finished", 3)
    ended = SimpleNamespace(train=SimpleNamespace(early_stopping=settings(before)))
    store.note("stopped_early", early_stopping_of(cast(Config, ended)))
    looks: list[str] = []

    def look(what: str) -> None:
        looks.append(what)
        if len(looks) == 3:  # the trainer comes
            store.note("finished", None)
            store.note("began", 3)

    async def take() -> bool:
        return bool(store.noted("finished") is None)

    context = SimpleNamespace(
        cfg=SimpleNamespace(
            sync=SimpleNamespace(timeout_s=60),
            buffer=SimpleNamespace(explorer_name="one"),
            train=SimpleNamespace(early_stopping=settings(patience)),
        ),
        monitor=SimpleNamespace(display=MagicMock(), watch=SimpleNamespace(beat=look)),
        plan=SimpleNamespace(steps=steps),
        stopping=False,
        name="main",
    )
    transport = SimpleNamespace(newest=lambda: 3, root=tmp_path)
    weights = SimpleNamespace(
        context=context, transport=transport, take=take, reached=lambda version: version == 3
    )
    assert asyncio.run(disaggregated.begun_by_trainer(cast(Followed, weights), store)) is waits
    assert len(looks) == (3 if waits else 1)
    store.close()


class Bench:
    """Policy and recorder of an evaluation process whose trainer saves on; it looks at `meanwhile` with each step."""

    version = 0
    apart = False
    module: Any = None
    directory: RunDirectory

    def __init__(self, meanwhile: Callable[[int], object]) -> None:
        self.meanwhile, self.steps, self.display = meanwhile, list[int](), MagicMock()

    def load(self, path: Path) -> None:
        if not (path / "model").exists():
            raise FileNotFoundError(path)

    async def evaluate(self, step: int) -> None:
        self.steps.append(step)
        self.directory.log("main", step, metrics={"eval/accuracy": 0.5}, timings={"time/evaluate_s": 1.0})
        self.meanwhile(step)


def benched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[int, Any], object], *, steps: int = 4
) -> list[int]:
    """Evaluate the checkpoints of steps 1, 2 ... Returns the steps that were evaluated."""
    for step in range(1, steps + 1):
        state = {"stage": 0, "stage_name": "main", "step": step, "version": step, "done": step == steps}
        checkpoint.write(folder / "checkpoints", {"policy": written}, state)
    stop, context = (
        SimpleNamespace(requested=False),
        SimpleNamespace(index=0, monitor=SimpleNamespace(step=0)),
    )
    bench: Any = Bench(lambda step: meanwhile(step, stop))
    evaluation = Evaluation(context, bench, bench, None)  # type: ignore[arg-type]
    monkeypatch.setattr(disaggregated, "open_evaluation", lambda job, index: evaluation)
    job: Any = MagicMock(plans=[None])
    job.loaded.config.sync.timeout_s, job.records.stop = 20.0, stop
    job.records.directory = bench.directory = RunDirectory(folder / "bench", ["main"])
    with closing(bench.directory):
        asyncio.run(evaluate_all(job, folder))
    return cast("list[int]", bench.steps)


def written(path: Path) -> None:
    path.mkdir()
    (path / "model").touch()


def test_a_bench_leaves_out_what_the_trainer_deletes_before_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer keeps the newest of its checkpoints, and an evaluation may take longer than the steps between two."""

    def meanwhile(step: int, stop: Any) -> None:
        if step == 1:
            shutil.rmtree(tmp_path / "checkpoints/0-main-000002")
            (tmp_path / "checkpoints/0-main-000003").rename(tmp_path / "checkpoints/.0-main-000003.new-drop")

    assert benched(tmp_path, monkeypatch, meanwhile) == [1, 4]


@pytest.mark.parametrize("recorded", [1, 2])
def test_a_bench_that_was_killed_while_it_recorded_an_evaluation_records_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: int
) -> None:
    """recorded: whole lines of metrics.jsonl. One more was begun, and one checkpoint is noted as evaluated."""
    with closing(RunDirectory(tmp_path / "bench", ["main"])) as before:
        for step in range(1, recorded + 1):
            before.log("main", step, metrics={"eval/accuracy": 0.5}, timings={})
    with open(tmp_path / "bench/metrics.jsonl", "a") as file:
        file.write('{"eval/accur')
    (tmp_path / "bench/benched.txt").write_text("0-main-000001\n")
    assert benched(tmp_path, monkeypatch, lambda step, stop: None) == [2, 3, 4]
    lines = (tmp_path / "bench/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_a_bench_that_finds_a_damaged_checkpoint_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(step: int, stop: Any) -> None:
        (tmp_path / "checkpoints/0-main-000002/policy/model").write_text("other")

    with pytest.raises(CheckpointError, match=r"0-main-000002: policy/model has 5 bytes"):
        benched(tmp_path, monkeypatch, meanwhile)


def test_a_bench_that_is_stopped_begins_no_other_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(step: int, stop: Any) -> None:
        stop.requested = step == 2

    assert benched(tmp_path, monkeypatch, meanwhile) == [1, 2]


def test_an_explorer_without_a_trainer_says_whom_it_waited_for(tmp_path: Path) -> None:
    with pytest.raises(
        WhetError, match=r"explorer 'three' waited 0\.3 s for the trainer to begin stage 'main'"
    ):
        whet.train(
            **tree(
                tmp_path,
                mode="explore",
                buffer={"url": f"files:///{tmp_path}/queue", "explorer_name": "three"},
                sync={"timeout_s": 0.3},
            )
        )
    assert (tmp_path / "run/explorers/three/config.yaml").exists(), "it writes in a place of its own"


def test_an_explorer_with_other_code_than_its_trainer_is_refused(tmp_path: Path) -> None:
    """The file of the reward is edited after the trainer has read it: the explorer reads another one."""
    reward = tmp_path / "rewards.py"
    reward.write_text("def f(response, task):\n    return float('a' in response)\n")
    processes = Processes(tmp_path, rewards={"f": {"function": f"{reward}:f"}})
    try:
        processes.start("train")
        processes.until((tmp_path / "run" / "manifest.json").exists)
        reward.write_text(reward.read_text().replace("'a'", "'b'"))
        processes.start("x")
        assert processes.ends("x") == 1
        said = processes.said("x")
        assert f"explorer 'x' has different code from the trainer: code of '{reward}'" in said
        assert "Traceback" not in said
        assert processes.steps == 0
    finally:
        processes.close()


def test_only_code_that_both_have_is_compared() -> None:
    check_code("x", {"a.py": "1", "b.py": "2"}, {"a.py": "1", "loss.py": "3"})
    check_code("x", {"a.py": "1"}, None)
    with pytest.raises(WhetError, match=r"explorer 'x' .*: code of 'a.py'. One run would"):
        check_code("x", {"a.py": "1", "b.py": "2"}, {"a.py": "2", "b.py": "2"})


def test_an_explorer_with_another_lease_than_its_trainer_is_refused(tmp_path: Path) -> None:
    """By the shorter one the longer ends so late that the clock must have been set back: its tasks went to others."""
    store = open_store(f"sqlite:///{tmp_path}/groups.db", queue="q", order="arrival")
    sizes = {"groups_per_step": 2, "group_size": 1, "max_staleness": 0, "spare": 0}
    queue = ExplorerQueue(store, owner="x", lease_s=60.0, reject=cast(Any, None), **sizes)
    check_as_trainer(queue, {})  # a trainer of an earlier release says none
    store.note("lease_s", 60)
    check_as_trainer(queue, {})
    store.note("lease_s", 300.0)
    with pytest.raises(WhetError, match=r"explorer 'x' has buffer\.lease_s=60, the trainer 300; give all"):
        check_as_trainer(queue, {})


def test_a_bench_without_a_trainer_says_what_it_waited_for(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"no new checkpoint in .*run/checkpoints for 0\.3 s"):
        whet.train(**tree(tmp_path, mode="eval", sync={"timeout_s": 0.3}))


SCRATCH = {"scratch": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}}


def apart(**sections: Any) -> dict[str, Any]:
    return {"mode": "train", "buffer": {"url": "files:///q"}} | sections


def replicas(**sync: Any) -> dict[str, Any]:
    machine = {"threads": 1, "device": "cpu", "logprob_parity": "on"}
    return {"mode": "both", "buffer": {}, "rollout": {"replicas": 2}, "sync": sync, "machine": machine}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "train", "buffer": {}}, r"buffer\.url: memory is inside one process"),
        ({"mode": "explore", "run_dir": "runs/{time}"}, r"run_dir: \{time\} differs between processes"),
        (
            {"mode": "train", "rollout": {}, "buffer": {"url": "files:///q", "order": "newest"}},
            r"buffer\.order: has no effect: rollout\.schedule=deterministic: groups are trained on in",
        ),
        (
            {"mode": "train", "rollout": {}, "buffer": {"url": "files:///q", "replay": {"queue": True}}},
            r"buffer\.replay\.queue: with rollout\.schedule=deterministic a step waits for its own tasks",
        ),
        (
            {"mode": "explore", "buffer": {"url": "files:///q", "explorer_name": "a/b"}},
            "used as the name of a folder",
        ),
        ({"mode": "both"}, r"buffer\.url.* with mode=both one process explores and trains"),
        (
            {"mode": "train", "buffer": {"url": "files:///q", "explorer_name": "x"}},
            "mode=train is not an explorer",
        ),
        ({"mode": "train", "buffer": {"url": "mysql://x"}}, "is not a store"),
        (
            {"mode": "both", "buffer": {}},
            r"sync\.timeout_s.* with mode=both, rollout\.replicas=0 and rollout\.engine=native one process",
        ),
        (
            apart(sync={"method": "collective"}),
            r"collective is for engine replicas .* with mode=train use files",
        ),
        (apart(sync={"method": "object_store"}), r"sync\.method: object_store is for engine replicas"),
        (
            replicas(method="files"),
            r"files is for processes of mode=train .* use object_store or collective, or auto",
        ),
        (
            apart(sync={"content": "adapters"}),
            r"sync\.content: adapters: model\.lora is not given; use delta",
        ),
        (
            apart(sync={"content": "adapters", "dtype": "bfloat16"}, model={**SCRATCH, "lora": {"rank": 2}}),
            r"sync\.dtype: bfloat16: adapters are sent unchanged",
        ),
        (
            replicas(dtype="bfloat16"),
            r"sync\.dtype: bfloat16: machine\.logprob_parity=on requires rollouts from exactly the trained weights",
        ),
        (
            {"mode": "both", "buffer": {}, "rollout": {}, "sync": {"driven_by": "explorer"}},
            r"sync\.driven_by.*rollout\.schedule=deterministic: the step determines",
        ),
    ],
)
def test_bad_input(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plans(load(None, (), tree(tmp_path, **given)))


def test_every_key_of_the_sections_reaches_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which groups are taken, the dtype and the number of versions that are published, the lease."""
    buffer = {"url": f"files:///{tmp_path}/queue", "order": "newest"}
    loaded = load(
        None, (), tree(tmp_path, mode="train", buffer=buffer, sync={"dtype": "bfloat16", "keep": 3})
    )
    cfg = loaded.stages[0]
    queue: Any = open_buffer(cfg, plans(loaded)[0], Stop())
    uids = queue.store.reserve("x", 2, capacity=4, rollouts=1, lease_s=60)
    task = {"source": "s", "prompt": ""}
    groups = [one_rollout(Task(uid=uid, **task)) for uid in uids]  # type: ignore[arg-type]
    queue.store.put([Scored(group.task.uid, group) for group in groups])
    assert [g.task.uid for g in queue.store.take(1, step=1)] == [1], "the newest first"
    publisher = open_publisher(cfg, tmp_path, cast(Any, SimpleNamespace(machine=None)))
    for version in range(5):
        publisher.send(version, [("w", torch.ones(2))])
    assert len([p for p in (tmp_path / "weights").iterdir() if p.name.isdigit()]) == 3
    (_, tensor), *_ = publisher.transport.receive(4)
    assert tensor.dtype == torch.bfloat16
    leases = []
    renewed = ExplorerQueue.__init__

    def noted(queue: ExplorerQueue, *args: Any, **given: Any) -> None:
        leases.append(given["lease_s"])
        renewed(queue, *args, **given)

    monkeypatch.setattr(ExplorerQueue, "__init__", noted)
    apart = {"url": buffer["url"], "lease_s": 7.0, "explorer_name": "y"}
    with pytest.raises(WhetError, match="waited"):
        whet.train(**tree(tmp_path, name="other", mode="explore", buffer=apart, sync={"timeout_s": 0.2}))
    assert leases == [7.0]


@pytest.mark.parametrize(
    ("content", "lora", "sent"),
    [
        ("auto", False, [13, 13, 13]),
        ("delta", False, [13, 1, 1]),
        ("auto", True, [22, 5, 5]),  # with four layers' A and B and the proof; A does not change here
        ("full", True, [13, 13, 13]),
        ("delta", True, [13, 4, 4]),
    ],
)
def test_an_explorer_samples_from_the_trainer_s_weights(
    tmp_path: Path, content: str, lora: bool, sent: list[int]
) -> None:
    """Whatever travels; one that comes late reads what it lacks from the last version that was whole."""
    adapters = {"lora": {"rank": 2, "targets": ["o_proj", "up_proj", "down_proj", "q_proj"]}}
    model = SCRATCH | (adapters if lora else {})
    loaded = load(None, (), tree(tmp_path, **apart(sync={"content": content}, model=model)))
    cfg = loaded.stages[0]
    policy = TorchEngine(a_model(cfg, seed=1), kernels.load("torch"), cut=MicroBatchPolicy())
    publisher = open_publisher(cfg, tmp_path, policy)

    def explorer(name: str) -> Any:
        there = cfg.model_copy(
            update={"mode": "explore", "buffer": cfg.buffer.model_copy(update={"explorer": name})}
        )
        engine = TorchEngine(a_model(there, seed=1), kernels.load("torch"), cut=MicroBatchPolicy())
        samples = NativeEngine(
            engine.module, kernels.load("torch"), end_token_ids=[1], max_context=32, version=-1
        )
        context: Any = SimpleNamespace(cfg=there, monitor=MagicMock())
        module = engine.module if content_of(there) == "adapters" else None
        return Followed(context, samples, tmp_path / "weights", module=module), engine

    async def story() -> None:
        first, travelled = explorer("one"), []
        for policy.version in range(3):
            await sync(policy, None, out=publisher)
            (folder,) = (tmp_path / "weights").glob(f"{policy.version:08d}*")
            manifest = Manifest.from_json(json.loads((folder / "manifest.json").read_text()))
            travelled.append(sum(e.sent for e in manifest.entries))
            for weights, sampled in (first, explorer(f"late{policy.version}")):
                assert await weights.take()
                assert weights.engine.version == policy.version
                assert digest(sampled) == digest(policy)
            publisher.look()
            with torch.no_grad():
                learned = [m.lora_B for m in adapted(policy.module).values()] or [
                    policy.module.model.norm.weight
                ]
                for parameter in learned:
                    parameter.add_(0.5)
            refresh(policy.module)
        assert travelled == sent

    asyncio.run(story())


@pytest.mark.parametrize("content", ["full", "delta"])
def test_an_explorer_takes_a_version_that_the_trainer_has_learned_again(tmp_path: Path, content: str) -> None:
    """A trainer that has gone back to version 1 with another config reaches version 2 with other weights; one that goes
    back without a change reaches the same, which nobody loads twice."""
    cfg = load(None, (), tree(tmp_path, **apart(sync={"content": content}, model=SCRATCH))).stages[0]
    policy = TorchEngine(a_model(cfg, seed=1), kernels.load("torch"), cut=MicroBatchPolicy())
    context: Any = SimpleNamespace(cfg=cfg, monitor=MagicMock())
    sampled = TorchEngine(a_model(cfg, seed=1), kernels.load("torch"), cut=MicroBatchPolicy())
    samples = NativeEngine(
        sampled.module, kernels.load("torch"), end_token_ids=[1], max_context=32, version=-1
    )
    weights = Followed(context, samples, tmp_path / "weights", module=None)

    async def trained(version: int, scale: float, taken: bool) -> None:
        policy.version = version
        with torch.no_grad():
            policy.module.model.norm.weight.fill_(scale)
        await sync(policy, None, out=publisher)
        assert [await weights.take() for _ in range(2)] == [taken, False]
        publisher.look()

    async def story() -> None:
        nonlocal publisher
        await trained(1, 1.0, True)
        await trained(2, 2.0, True)
        for scale, taken in ((2.0, False), (3.0, True)):
            publisher = open_publisher(cfg, tmp_path, policy)
            await trained(1, 1.0, False)
            await trained(2, scale, taken)
            assert digest(sampled) == digest(policy)
        await trained(3, 4.0, True)

    publisher = open_publisher(cfg, tmp_path, policy)
    asyncio.run(story())


def a_model(cfg: Config, *, seed: int) -> Any:
    made = build(
        cfg.model, vocab_size=11, eos_token_id=1, pad_token_id=0, seed=seed, device="cpu", dtype=torch.float32
    )
    if cfg.model.lora is not None and has_adapters(cfg):
        attach(made, cfg.model.lora, seed=seed)
    return made


def digest(engine: TorchEngine) -> str:
    return describe(0, engine.weights()).digest


@pytest.mark.parametrize(("driven_by", "due"), [("trainer", [0, 0, 1, 0]), ("explorer", [1, 0, 0, 1])])
def test_whose_steps_say_when_weights_go_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driven_by: str, due: list[int]
) -> None:
    """There is room for five steps' worth of groups, which explorers take at once: they are far ahead at the end of
    the trainer's first step, and go at its pace from then on."""
    told = []

    async def noted(*args: Any, due: bool, **given: Any) -> Any:
        told.append(due)
        return await publish(*args, due=due, **given)

    monkeypatch.setattr(whet.weights, "publish", noted)
    rollout = {
        "group_size": 2,
        "sampling": {"max_tokens": 4},
        "max_staleness": 2,
        "schedule": "async",
        "sync_interval": 3,
    }
    train = {"steps": 8, "tasks_per_step": 2, "optimizer": {"lr": 1e-3}}
    given = {
        "mode": "both",
        "buffer": {},
        "sync": {"driven_by": driven_by},
        "rollout": rollout,
        "train": train,
    }
    assert whet.train(**tree(tmp_path, **given, checkpoint={"export": False})).finished
    assert told[:4] == due


def one_rollout(task: Task) -> Group:
    rollout = Rollout.one_strand(
        task=task, index=0, token_ids=[1, 2], mask=[0, 1], logprobs=[0.0, -1.0], sample_logprobs=[0.0, -1.0],
        versions=[-1, 0], finish_reason="stop", reward=1.0,
    )  # fmt: skip
    return Group(task, (rollout,))


def test_queues_of_two_runs_do_not_meet(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/both.db"
    a, b = (open_store(url, queue=name, order="arrival") for name in ("a/main", "b/main"))
    assert a.reserve("x", 2, capacity=4, rollouts=1, lease_s=60) == [0, 1]
    assert b.reserve("x", 2, capacity=4, rollouts=1, lease_s=60) == [0, 1]
    a.close(), b.close()
