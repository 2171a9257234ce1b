"""What a run asks of a cluster, and reward hosts over lines of this machine: all without Ray being started."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from whet import bench
from whet.cluster import head, nodes
from whet.cluster.parts import ClusterPart, check_room, gpus_left, parts
from whet.cluster.rewards import RewardHosts
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import RewardConfig, RewardWorkersConfig
from whet.guard import pulse
from whet.guard.jail import CallResult, RewardCall
from whet.guard.line import Local, LocalLine
from whet.guard.processes import process, until
from whet.rewards import host
from whet.rewards.combine import RewardSet
from whet.types import ConfigError, WhetError

CPU, GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}


# ---------------------------------------------------------------- room


def test_parts_that_fit_together() -> None:
    machines = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0}]
    check_room([ClusterPart("a", CPU, 4), ClusterPart("b", GPU, 2)], machines)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([ClusterPart("a", CPU, 5), ClusterPart("b", GPU, 2)], "only 4 of 5 fit for a"),
        ([ClusterPart("b", GPU, 3)], "only 2 of 3 fit for b"),
        ([ClusterPart("wide", {"CPU": 5.0}, 1)], "only 0 of 1 fit for wide. Requested: wide: 1 times 5 CPU"),
    ],
)
def test_parts_that_do_not(wanted: list[ClusterPart], said: str) -> None:
    machines = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0}]
    with pytest.raises(ConfigError, match=rf"{said}.*2 machine\(s\) have .*Lower one of these"):
        check_room(wanted, machines)


TREE: dict[str, Any] = {
    "model": {"scratch": {"hidden_size": 16}},
    "tokenizer": {"build": "chars"},
    "data": {"train": [{"rows": [{"prompt": "a", "answer": "b"}]}]},
    "rewards": {"a": {"function": "format", "arguments": {"pattern": "a"}}},
}
APART = {"mode": "train", "rollout": {"schedule": "async"}, "buffer": {"url": "sqlite:///a.db"}}
RANKED = {"train": {"tasks_per_step": 4, "parallel": {"dp_replicate": 2, "tp": 2}}}


@pytest.mark.parametrize(
    ("key", "value", "given", "wanted"),
    [
        ("cluster.ranks", "true", RANKED, ({"CPU": 1.0, "GPU": 1.0}, 4)),
        ("cluster.reward_hosts", "3", {"reward_workers": {"count": 2}}, ({"CPU": 2.0}, 3)),
        ("cluster.explorers", "2", APART, ({"CPU": 1.0, "GPU": 1.0}, 2)),
    ],
)
def test_each_key_asks_for_its_part(
    key: str, value: str, given: dict[str, Any], wanted: tuple[dict[str, float], int]
) -> None:
    tree = {**TREE, **given}
    assert parts(load(None, (), tree), cuda=True) == []
    (part,) = parts(load(None, (f"{key}={value}",), tree), cuda=True)
    assert (part.bundle, part.count) == wanted
    assert part.asked.startswith(key)


def test_an_evaluation_asks_for_what_it_starts() -> None:
    given = ("cluster.ranks=true", "train.parallel.dp_shard=2", "rollout.replicas=2", "cluster.explorers=1")
    loaded = load(None, given, TREE)
    assert [part.count for part in parts(loaded, cuda=True)] == [2, 1, 2]
    assert [part.asked for part in parts(bench.alone(loaded), cuda=True)] == ["rollout.replicas=2"]


def test_ranks_of_models_apart_need_room_too() -> None:
    tree = {**TREE, "algorithm": {"name": "ppo"}, "cluster": {"ranks": True}}
    loaded = load(None, ("train.parallel.dp_shard=2", "train.parallel.separate_ranks=[critic]"), tree)
    found = parts(loaded, cuda=True)
    assert [(part.asked, part.count) for part in found] == [
        ("cluster.ranks: 2 ranks of the policy", 2),
        ("cluster.ranks: 2 ranks of the critic", 2),
    ]
    with pytest.raises(ConfigError, match=r"only 1 of 2 fit for cluster\.ranks: 2 ranks of the critic"):
        check_room(found, [{"CPU": 8.0, "GPU": 3.0}])


def test_a_cluster_started_here_has_the_gpus_that_are_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run's process and its ranks have the first of them."""
    monkeypatch.setenv(nodes.GPUS, "3,4,5,6,7")
    tree = {**TREE, "algorithm": {"name": "ppo"}, "rollout": {"replicas": 1}}
    apart = "train.parallel.separate_ranks=[critic]"

    def left(*overrides: str) -> list[str] | None:
        loaded = load(None, overrides, tree)
        return gpus_left(loaded, parts(loaded, cuda=True))

    assert left() == ["4", "5", "6", "7"]
    assert left(apart) == ["5", "6", "7"]
    assert left(apart, "train.parallel.dp_shard=2") == ["7"]
    assert not caplog.records
    assert left(apart, "train.parallel.dp_shard=2", "rollout.replicas=2") is None
    assert "need 2 GPUs, this process and its ranks 4; this machine has 5: they share them" in caplog.text
    for gpus, seen in ((["5", "6"], "5,6"), (None, "3,4,5,6,7")):
        with nodes.visible(gpus):
            assert os.environ[nodes.GPUS] == seen
        assert os.environ[nodes.GPUS] == "3,4,5,6,7"


@pytest.mark.parametrize(
    ("override", "given", "said"),
    [
        ("cluster.ranks=true", {}, "train.parallel has no ranks"),
        ("cluster.explorers=1", {}, "only a separate trainer .mode=train. starts explorers"),
        ("cluster.health_timeout_s=2", {"cluster": {"reward_hosts": 1}}, "rollout.replicas is 0"),
        ("cluster.cpus=2", {"cluster": {"reward_hosts": 1}}, "reward_workers.count"),
        ("cluster.restarts=2", {**RANKED, "cluster": {"ranks": True}}, "a rank that died ends the run"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(override: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plans(load(None, (override,), {**TREE, **given}))


# ---------------------------------------------------------------- reward hosts


SLOW = """
import time

def slow(response, task):
    time.sleep(0.2)
    return float(len(response))
"""


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[tuple[RewardSet, RewardHosts]]:
    """A reward in two hosts, as processes of this machine."""
    (tmp_path / "slow.py").write_text(SLOW)

    def opened(functions: Any, **options: Any) -> RewardHosts:
        lines = partial(Local, 2, 1, module=host.MODULE)
        return RewardHosts(functions, open_lines=lines, start_timeout_s=60.0, restarts=1, **options)

    rewards = {"slow": RewardConfig(function=f"{tmp_path}/slow.py:slow")}
    with RewardSet.from_config(rewards, RewardWorkersConfig(count=2), open_jail=opened) as made:
        assert isinstance(made.jail, RewardHosts)
        made.jail.open()
        yield made, made.jail


def calls(count: int) -> list[RewardCall]:
    task = '{"uid":"u","source":"s","prompt":"p","answer":null,"response":null,"rejected":null,"extra":{}}'
    texts = ["x" * n for n in range(count)]
    return [
        RewardCall(
            function="slow",
            arguments=f'{{"task":{task},"rollout":{{"finish_reason":"stop","tokens":1,"text":"{text}"}}}}',
        )
        for text in texts
    ]


def scores(results: list[CallResult]) -> list[float]:
    assert all(r.failure is None for r in results), results
    return [r.parts["score"] for r in results]


def test_calls_are_spread_and_come_back_in_order(judged: tuple[RewardSet, RewardHosts]) -> None:
    _, hosts = judged
    asked: list[int] = []
    for at in hosts.hosts:
        at.line.connection.send_bytes = spy(asked, at.line.connection.send_bytes)  # type: ignore[method-assign]
    heard = Counter[str]()
    with pulse.heard_by(lambda what: heard.update([what])):
        assert scores(asyncio.run(hosts.call_many(calls(7)))) == [float(n) for n in range(7)]
    assert heard == {"scoring": 7}, "each score is progress of the run"
    assert len(asked) == 2
    with pytest.raises(WhetError, match="closed"):
        asyncio.run(closed_meanwhile(hosts))


def spy(seen: list[int], send: Any) -> Any:
    def sent(message: bytes) -> None:
        seen.append(len(message))
        send(message)

    return sent


async def closed_meanwhile(hosts: RewardHosts) -> None:
    asked = asyncio.ensure_future(hosts.call_many(calls(4)))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(hosts.close)
    await asked


def test_a_lost_host_is_replaced_and_its_calls_are_asked_again(judged: tuple[RewardSet, RewardHosts]) -> None:
    """One killed, then both: nothing is lost until no restart is left."""
    _, hosts = judged

    def pids() -> list[int]:
        return [h.line.process.pid for h in hosts.hosts if isinstance(h.line, LocalLine)]

    async def story() -> None:
        first = pids()
        asked = asyncio.ensure_future(hosts.call_many(calls(12)))
        await asyncio.sleep(0.1)
        os.kill(first[0], signal.SIGKILL)
        assert scores(await asked) == [float(n) for n in range(12)]
        while hosts.hosts[0].restarts == 0:
            await asyncio.sleep(0.05)
        asked = asyncio.ensure_future(hosts.call_many(calls(12)))
        await asyncio.sleep(0.1)
        for pid in pids():
            os.kill(pid, signal.SIGKILL)
        assert scores(await asked) == [float(n) for n in range(12)]  # by the second one's successor
        os.kill(pids()[1], signal.SIGKILL)
        with pytest.raises(WhetError, match=r"no reward host is left.*cluster.restarts=1"):
            await hosts.call_many(calls(12))

    asyncio.run(asyncio.wait_for(story(), 120))


def test_a_reward_that_cannot_be_loaded_or_travel_is_said() -> None:
    def opened(functions: Any, **options: Any) -> RewardHosts:
        lines = partial(Local, 1, 1, module=host.MODULE)
        return RewardHosts(functions, open_lines=lines, start_timeout_s=60.0, restarts=1, **options)

    absent = RewardSet.from_config(
        {"r": RewardConfig(function="no_such.py:f")}, RewardWorkersConfig(), open_jail=opened
    )
    with absent, pytest.raises(ConfigError, match=r"reward host 0 did not start.*no_such"):
        absent.jail.open()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        RewardSet.from_config(
            {"r": RewardConfig(function="object:r")},
            RewardWorkersConfig(),
            {"r": lambda response, task: 1.0},
            open_jail=opened,
        )


class Poor:
    """A jail on a machine without memory."""

    def __init__(self, functions: Any, *, at_once: bool) -> None:
        if at_once:
            raise OSError(12, "Cannot allocate memory")

    def __enter__(self) -> Poor:
        return self

    def __exit__(self, *what: object) -> None: ...

    async def call_many(self, calls: list[RewardCall]) -> list[CallResult]:
        raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_host_without_memory_tells_the_run_why(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "Jail", Poor)
    ours, theirs = Pipe()
    living = threading.Thread(target=host.serve, args=(theirs,), daemon=True)
    living.start()
    ours.send_bytes(pickle.dumps(host.Wanted({}, {"at_once": at_once})))
    said = [pickle.loads(ours.recv_bytes())]
    if not at_once:
        ours.send_bytes(pickle.dumps((7, [])))
        while said[-1][0] in ("ready", "beat"):
            said.append(pickle.loads(ours.recv_bytes()))
    why = "[Errno 12] Cannot allocate memory"
    assert said[-1] == (("refused", why) if at_once else ("failed", (7, why, False)))
    ours.close()
    living.join(20)
    assert not living.is_alive()


# ---------------------------------------------------------------- the head of a cluster of its own


def test_a_head_that_ends_is_told_unless_it_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOOK_S", 0.01)
    said: list[str] = []
    sleeping = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    heads = [head.HeadNode(process(one.pid), said.append) for one in sleeping]
    heads[0].leave()
    for one in sleeping:
        one.kill()
        one.wait(30)
    assert until(lambda: bool(said), 20.0)
    assert len(said) == 1
    assert f"process {sleeping[1].pid}) has ended" in said[0]


def test_without_its_head_a_run_says_so_and_leaves_nobody() -> None:
    code = (
        "import subprocess, sys; from whet.cluster import head;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, flush=True); head.give_up('its head is gone')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "whet: its head is gone"
    end = time.monotonic() + 60
    while process(int(done.stdout))[1] and time.monotonic() < end:
        time.sleep(0.01)
    assert process(int(done.stdout))[1] == 0
