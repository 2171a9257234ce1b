"""Explorers, a trainer and a bench as processes of their own: they find each other, survive kills, and add up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

import whet
from whet import stages
from whet.api import Stop, run_training
from whet.buffer.queue import ExplorerQueue
from whet.buffer.stores import Scored, Store, open_store
from whet.config.load import load
from whet.config.plan import plans
from whet.guard.ledger import Ledger
from whet.types import ConfigError, Group, Rollout, Task, WhetError

STEPS = 32
ROWS = [{"prompt": f"copy {n}", "answer": "ab"[n % 2]} for n in range(8)]


def tree(folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run_dir": str(folder / "run"),
        "name": "apart",
        "model": {"scratch": {"hidden_size": 32, "layers": 1, "heads": 2, "head_dim": 16}},
        "tokenizer": {"build": "chars"},
        "data": {
            "train": [{"rows": ROWS}],
            "eval": [{"rows": ROWS[:2], "name": "held"}],
            "exclude_eval": False,
        },
        "rewards": {"a": {"function": "format", "arguments": {"pattern": "a"}}},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 8}, "max_staleness": 2, "schedule": "free"},
        "buffer": {"url": f"sqlite:///{folder}/groups.db", "lease_s": 5.0},
        "sync": {"timeout_s": 60.0},
        "train": {"steps": STEPS, "tasks_per_step": 2, "optimizer": {"lr": 1e-3}},
        "eval": {"at_start": False},
        "machine": {"threads": 1},
        "checkpoint": {"every": 5, "export": False},
        "track": {"trackers": ["jsonl"]},
    } | sections


class Processes:
    """The processes of one run, by name."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.folder, self.config = folder, folder / "run.yaml"
        self.config.write_text(yaml.safe_dump(tree(folder, **sections)))
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        mode = [f"mode={name}"] if name in ("train", "bench") else ["mode=explore", f"buffer.explorer={name}"]
        command = [sys.executable, "-m", "whet.cli", "train", str(self.config), *mode]
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115  as long as the process
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def kill(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGKILL)
        self.running.pop(name).wait(30)

    def ends(self, name: str, *, within: float = 180.0) -> int:
        return self.running.pop(name).wait(within)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name)

    @property
    def steps(self) -> int:
        path = self.folder / "run/metrics.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def until(self, reached: Callable[[], bool], *, within: float = 120.0) -> None:
        end = time.monotonic() + within
        while not reached():
            assert time.monotonic() < end, "not reached in time"
            for name, process in self.running.items():
                assert process.poll() in (None, 0), self.said(name)
            time.sleep(0.05)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def test_everybody_may_be_killed(processes: Processes) -> None:
    """Each of an explorer, the other one and the trainer is killed and started again; a bench follows the checkpoints.

    No step is lost or done twice, the account balances over all processes, and none is left behind.
    """
    rng = random.Random(5)
    for name in ("train", "one", "two", "bench"):
        processes.start(name)
    for n, name in enumerate(("one", "train", "two"), start=1):
        processes.until(lambda n=n: processes.steps >= 8 * n + rng.randrange(3))  # type: ignore[misc]
        processes.kill(name)
        processes.start(name)
    assert [processes.ends(name) for name in ("train", "one", "two", "bench")] == [0, 0, 0, 0]
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
    left = [p for p in psutil.process_iter(["cmdline"]) if str(processes.config) in (p.info["cmdline"] or [])]
    assert not left


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


def test_an_explorer_without_a_trainer_says_whom_it_waited_for(tmp_path: Path) -> None:
    with pytest.raises(
        WhetError, match=r"explorer 'three' waited 0\.3 s for the trainer to begin stage 'main'"
    ):
        whet.train(
            **tree(
                tmp_path,
                mode="explore",
                buffer={"url": f"files:///{tmp_path}/queue", "explorer": "three"},
                sync={"timeout_s": 0.3},
            )
        )
    assert (tmp_path / "run/explorers/three/config.yaml").exists(), "it writes in a place of its own"


def test_a_bench_without_a_trainer_says_what_it_waited_for(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"no new checkpoint in .*run/checkpoints for 0\.3 s"):
        whet.train(**tree(tmp_path, mode="bench", sync={"timeout_s": 0.3}))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "train", "buffer": {}}, r"buffer\.url: memory is in one process"),
        ({"mode": "explore", "run_dir": "runs/{time}"}, r"run_dir: \{time\} in it is another moment"),
        ({"mode": "train", "rollout": {"group_size": 4}}, r"rollout\.schedule: with mode=train"),
        ({"mode": "explore", "buffer": {"url": "files:///q", "explorer": "a/b"}}, "becomes a folder's name"),
        ({"mode": "both"}, r"buffer\.url.* with mode=both one process explores and trains"),
        ({"mode": "train", "buffer": {"url": "files:///q", "explorer": "x"}}, "mode=train is no explorer"),
        ({"mode": "train", "buffer": {"url": "mysql://x"}}, "is not a store"),
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
    queue: Any = stages._buffer(cfg, plans(loaded)[0], Ledger(), Stop())
    uids = queue.store.reserve("x", 2, capacity=4, rollouts=1, lease_s=60)
    task = {"source": "s", "prompt": ""}
    groups = [one_rollout(Task(uid=uid, **task)) for uid in uids]  # type: ignore[arg-type]
    queue.store.put([Scored(group.task.uid, group) for group in groups])
    assert [g.task.uid for g in queue.store.take(1, step=1)] == [1], "the newest first"
    publisher = stages._publisher(cfg, tmp_path)
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
    apart = {"url": buffer["url"], "lease_s": 7.0, "explorer": "y"}
    with pytest.raises(WhetError, match="waited"):
        whet.train(**tree(tmp_path, name="other", mode="explore", buffer=apart, sync={"timeout_s": 0.2}))
    assert leases == [7.0]


def one_rollout(task: Task) -> Group:
    rollout = Rollout(
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
