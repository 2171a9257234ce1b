"""What a run asks of a cluster, and reward hosts over lines of this machine: all without Ray being started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from whet.cluster.parts import Part, check_room, parts
from whet.cluster.rewards import Hosts
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import Guard, Reward
from whet.guard.jail import Call, Result
from whet.guard.line import Local, LocalLine
from whet.rewards import host
from whet.rewards.combine import RewardSet
from whet.types import ConfigError, WhetError

CPU, GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}


# ---------------------------------------------------------------- room


def test_parts_that_fit_together() -> None:
    machines = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0}]
    check_room([Part("a", CPU, 4), Part("b", GPU, 2)], machines)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([Part("a", CPU, 5), Part("b", GPU, 2)], "a finds room for 4 of 5"),
        ([Part("b", GPU, 3)], "b finds room for 2 of 3"),
        ([Part("wide", {"CPU": 5.0}, 1)], "wide finds room for 0 of 1. Asked: wide: 1 times 5 CPU"),
    ],
)
def test_parts_that_do_not(wanted: list[Part], said: str) -> None:
    machines = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0}]
    with pytest.raises(ConfigError, match=rf"{said}.*2 machine\(s\) have .*Lower one of these"):
        check_room(wanted, machines)


TREE: dict[str, Any] = {
    "model": {"scratch": {"hidden_size": 16}},
    "tokenizer": {"build": "chars"},
    "data": {"train": [{"rows": [{"prompt": "a", "answer": "b"}]}]},
    "rewards": {"a": {"function": "format", "arguments": {"pattern": "a"}}},
}
APART = {"mode": "train", "rollout": {"schedule": "free"}, "buffer": {"url": "sqlite:///a.db"}}
RANKED = {"train": {"tasks_per_step": 4, "parallel": {"dp_replicate": 2, "tp": 2}}}


@pytest.mark.parametrize(
    ("key", "value", "given", "wanted"),
    [
        ("cluster.ranks", "true", RANKED, ({"CPU": 1.0, "GPU": 1.0}, 4)),
        ("cluster.reward_hosts", "3", {"guard": {"workers": 2}}, ({"CPU": 2.0}, 3)),
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


@pytest.mark.parametrize(
    ("override", "given", "said"),
    [
        ("cluster.ranks=true", {}, "train.parallel has no ranks"),
        ("cluster.explorers=1", {}, "only a trainer by itself .mode=train. has explorers"),
        ("cluster.health_s=2", {"cluster": {"reward_hosts": 1}}, "rollout.replicas is 0"),
        ("cluster.cpus=2", {"cluster": {"reward_hosts": 1}}, "guard.workers"),
        ("cluster.restarts=2", {**RANKED, "cluster": {"ranks": True}}, "a rank that has died ends the run"),
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
def judged(tmp_path: Path) -> Iterator[tuple[RewardSet, Hosts]]:
    """A reward in two hosts, as processes of this machine."""
    (tmp_path / "slow.py").write_text(SLOW)

    def opened(functions: Any, **options: Any) -> Hosts:
        lines = partial(Local, 2, 1, module=host.MODULE)
        return Hosts(functions, open_lines=lines, start_s=60.0, restarts=1, **options)

    rewards = {"slow": Reward(function=f"{tmp_path}/slow.py:slow")}
    with RewardSet.from_config(rewards, Guard(workers=2), open_jail=opened) as made:
        assert isinstance(made.jail, Hosts)
        made.jail.open()
        yield made, made.jail


def calls(count: int) -> list[Call]:
    task = '{"uid":"u","source":"s","prompt":"p","answer":null,"response":null,"rejected":null,"extra":{}}'
    texts = ["x" * n for n in range(count)]
    return [
        Call(
            function="slow",
            arguments=f'{{"task":{task},"rollout":{{"finish_reason":"stop","tokens":1,"text":"{text}"}}}}',
        )
        for text in texts
    ]


def scores(results: list[Result]) -> list[float]:
    assert all(r.failure is None for r in results), results
    return [r.parts["score"] for r in results]


def test_calls_are_spread_and_come_back_in_order(judged: tuple[RewardSet, Hosts]) -> None:
    _, hosts = judged
    asked: list[int] = []
    for at in hosts._hosts:
        at.line.connection.send_bytes = spy(asked, at.line.connection.send_bytes)  # type: ignore[method-assign]
    assert scores(asyncio.run(hosts.call_many(calls(7)))) == [float(n) for n in range(7)]
    assert len(asked) == 2
    with pytest.raises(WhetError, match="closed"):
        asyncio.run(closed_meanwhile(hosts))


def spy(seen: list[int], send: Any) -> Any:
    def sent(message: bytes) -> None:
        seen.append(len(message))
        send(message)

    return sent


async def closed_meanwhile(hosts: Hosts) -> None:
    asked = asyncio.ensure_future(hosts.call_many(calls(4)))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(hosts.close)
    await asked


def test_a_lost_host_is_replaced_and_its_calls_are_asked_again(judged: tuple[RewardSet, Hosts]) -> None:
    """One killed, then both: nothing is lost until no restart is left."""
    _, hosts = judged

    def pids() -> list[int]:
        return [h.line.process.pid for h in hosts._hosts if isinstance(h.line, LocalLine)]

    async def story() -> None:
        first = pids()
        asked = asyncio.ensure_future(hosts.call_many(calls(12)))
        await asyncio.sleep(0.1)
        os.kill(first[0], signal.SIGKILL)
        assert scores(await asked) == [float(n) for n in range(12)]
        while hosts._hosts[0].restarts == 0:
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
    def opened(functions: Any, **options: Any) -> Hosts:
        lines = partial(Local, 1, 1, module=host.MODULE)
        return Hosts(functions, open_lines=lines, start_s=60.0, restarts=1, **options)

    absent = RewardSet.from_config({"r": Reward(function="no_such.py:f")}, Guard(), open_jail=opened)
    with absent, pytest.raises(ConfigError, match=r"reward host 0 did not start.*no_such"):
        absent.jail.open()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="cannot be taken to another process"):
        RewardSet.from_config(
            {"r": Reward(function="object:r")}, Guard(), {"r": lambda response, task: 1.0}, open_jail=opened
        )
