"""A zoo of hostile environments, beside that of test_env_contract.py: code that takes memory, processes, sockets,
output and signals. One episode of six is hostile. The run goes on, the other rollouts are bit-identical to a clean
run's, and the record says what happened."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from codecs_numbers import Numbers
from whet.config.schema import EnvironmentConfig
from whet.envs.hosts import EnvHosts
from whet.guard.line import LocalLine
from whet.rollout.episode import play_groups
from whet.rollout.scripted import ScriptedEngine
from whet.seeds import key
from whet.types import Message, Rollout, Sampling, Task

ZOO = '''
import asyncio
import ctypes
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from whet.envs.env import EnvStep
from whet.types import Message, ToolCall


class Zoo:
    """Three turns. For task 11 the second one is hostile."""

    def __init__(self, task, world, how):
        self.uid, self.world, self.how, self.turn = task.uid, world, how, 0

    async def first(self):
        return [Message("user", "9")]

    async def step(self, reply):
        self.turn += 1
        if self.uid == 11 and self.turn == 2:
            found = globals()[self.how](self)
            found = await found if inspect.iscoroutine(found) else found
            if found is not None:
                return found
        else:
            await asyncio.sleep(0.02)
        return EnvStep([Message("user", "7")], 0.5, done=self.turn == 3)


# ---- what it raises

class Mine(BaseException):
    pass

def base_exception(env):
    raise Mine("of its own kind")

def interrupts(env):
    raise KeyboardInterrupt

def unprintable(env):
    class Bad(Exception):
        def __str__(self):
            raise ValueError
    raise Bad

def recursion(env):
    return recursion(env)

# ---- how it ends its process

def segfault(env):
    ctypes.string_at(0)

def aborts(env):
    os.abort()

def ends_its_group(env):
    os.killpg(0, signal.SIGKILL)

async def exits_in_a_thread(env):
    threading.Thread(target=lambda: os._exit(3)).start()
    await asyncio.sleep(1000)

# ---- time

def blocks_signals(env):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    while True:
        pass

async def swallows_cancellation(env):
    while True:
        try:
            await asyncio.sleep(1000)
        except BaseException:
            pass

def stops_itself(env):
    os.kill(os.getpid(), signal.SIGSTOP)

# ---- memory, processes, output

def memory_at_once(env):
    return bytearray(10 * 2**30)

def memory_by_and_by(env):
    held = []
    while True:
        held.append(bytearray(2**24))

KEPT = []

def memory_for_ever(env):
    while True:
        KEPT.append(bytearray(2**24))

def forks(env):
    """Two to the sixth processes, which stay."""
    for _ in range(6):
        os.fork()
    if os.getpid() != HOST:
        time.sleep(1000)
    time.sleep(0.2)
    os._exit(4)

HOST = os.getpid()

async def a_program_prints_for_ever(env):
    env.program = await asyncio.create_subprocess_exec("sh", "-c", "while :; do echo 4243 4243 4243; done")
    await asyncio.sleep(1000)

async def prints_for_ever(env):
    while True:
        print("4243" * 1000)
        await asyncio.sleep(0)

def writes_no_utf8(env):
    os.write(1, bytes([0xff, 0xfe, 0x1b, 0x5b]) * 100 + b"\\n")

# ---- the network

async def half_open(env):
    server = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(server.getsockname()) as client:
        client.setblocking(False)
        await asyncio.get_running_loop().sock_recv(client, 1)

def half_open_and_blocking(env):
    server = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(server.getsockname()) as client:
        client.recv(1)

async def slow_drip(env):
    async def drip(reader, writer):
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.25)

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    reader, _ = await asyncio.open_connection(*server.sockets[0].getsockname())
    await reader.readexactly(10**9)

# ---- values

def nan(env):
    return EnvStep(reward=float("nan"))

def infinite(env):
    return EnvStep(reward=float("-inf"))

def huge_int(env):
    return EnvStep(reward=10**400)

def a_text_as_reward(env):
    return EnvStep(reward="0.5")

def a_reward_that_runs_code(env):
    class Number:
        def item(self):
            os._exit(9)
    return EnvStep(reward=Number())

def a_reward_that_leaves(env):
    class Number:
        def item(self):
            raise SystemExit
    return EnvStep(reward=Number())

def a_reward_that_hangs(env):
    class Number:
        def item(self):
            time.sleep(1000)
    return EnvStep(reward=Number())

def infinite_part(env):
    return EnvStep(parts={"x": float("inf")})

def generator(env):
    return (step for step in [EnvStep()])

def messages_without_end(env):
    def more():
        while True:
            yield Message("user", "7")
    return EnvStep(more())

def itself(env):
    found = []
    found.append(found)
    return EnvStep([Message("user", "7", tool_calls=(ToolCall("f", {"x": found}),))])

def deep(env):
    found = []
    for _ in range(10**5):
        found = [found]
    return EnvStep([Message("user", "7", tool_calls=(ToolCall("f", {"x": found}),))])

def bytes_as_text(env):
    return EnvStep([Message("user", b"\\xff\\xfe")])

def surrogates(env):
    return EnvStep([Message("user", "7 \\ud800")], 0.5, done=False)

def a_text_that_is_too_long(env):
    return EnvStep([Message("user", "7 " * 2**20)], done=False)

def more_than_fits(env):
    return EnvStep([Message("user", "7 " * 5000)], 0.5, done=False)

def a_message_that_runs_code(env):
    class Text(str):
        def __len__(self):
            return 1
        def encode(self, *given):
            raise SystemExit
    return EnvStep([Text("7")])
'''

END = 1


@dataclass(frozen=True)
class Case:
    """What becomes of the hostile episode."""

    error: str | None
    """How its error begins. None: it is scored."""
    restarts: int = 0
    stop: str = "fault"
    log: str = ""
    """What stands in the log."""


CASES = {
    "base_exception": Case("env raised Mine: of its own kind (zoo.py:"),
    "interrupts": Case("env raised KeyboardInterrupt"),
    "unprintable": Case("env raised Bad: (its text cannot be read)"),
    "recursion": Case("env raised RecursionError: maximum recursion depth exceeded"),
    "segfault": Case("env crashed: its host ended: killed by SIGSEGV", 1),
    "aborts": Case("env crashed: its host ended: killed by SIGABRT", 1),
    "ends_its_group": Case("env crashed: its host ended: killed by SIGKILL", 1),
    "exits_in_a_thread": Case("env crashed: its host ended: exit status 3", 1),
    "blocks_signals": Case("env timeout: code in an async method held the event loop for more than 2 s", 1),
    "swallows_cancellation": Case("env timeout: step took more than 2 s, and is still running", 1),
    "stops_itself": Case("env crashed: its host sent no heartbeat for", 1),
    "memory_at_once": Case("env raised MemoryError", 1),
    "memory_by_and_by": Case("env raised MemoryError", 1),
    "memory_for_ever": Case("env raised MemoryError", 1),
    "forks": Case("env crashed: its host", 1),
    "a_program_prints_for_ever": Case("env timeout: step took more than 2 s", log="environment: 4243"),
    "prints_for_ever": Case("env timeout: step took more than 2 s", log="environment: 4243"),
    "writes_no_utf8": Case(None, stop="done", log="environment: \ufffd\ufffd\\x1b["),
    "half_open": Case("env timeout: step took more than 2 s"),
    "half_open_and_blocking": Case(
        "env timeout: code in an async method held the event loop for more than 2 s", 1
    ),
    "slow_drip": Case("env timeout: step took more than 2 s"),
    "nan": Case("env bad value: nan as EnvStep.reward"),
    "infinite": Case("env bad value: -inf as EnvStep.reward"),
    "huge_int": Case("env bad value: an int too large for a float as EnvStep.reward"),
    "a_text_as_reward": Case("env bad value: the text '0.5' as EnvStep.reward"),
    "a_reward_that_runs_code": Case("env crashed: its host ended: exit status 9", 1),
    "a_reward_that_leaves": Case("env bad value: "),
    "a_reward_that_hangs": Case(
        "env timeout: code in an async method held the event loop for more than 2 s", 1
    ),
    "infinite_part": Case("env bad value: inf at EnvStep.parts['x']"),
    "generator": Case("env bad value: step returned generator; expected EnvStep"),
    "messages_without_end": Case("env bad value: EnvStep.messages: generator; expected a list of Message"),
    "itself": Case("env bad value: EnvStep.messages: a Message whose tool_calls are not JSON: Circular"),
    "deep": Case("env bad value: "),
    "bytes_as_text": Case("env bad value: EnvStep.messages: a Message whose role or content is not a text"),
    "surrogates": Case("ValueError: "),  # of the codec of this test, which knows numbers alone
    "a_text_that_is_too_long": Case("env bad value: EnvStep.messages: 2097156 characters; at most 1048576"),
    "more_than_fits": Case(None, stop="observations"),
    "a_message_that_runs_code": Case("env bad value: EnvStep.messages: Text in the list; expected Message"),
}


def task(uid: int) -> Task:
    return Task(uid=uid, source="s", prompt=(Message("user", "50"),), token_ids=(50,))


UIDS = (10, 11, 12, 13, 14, 15)
OTHERS = tuple(uid for uid in UIDS if uid != 11)


def play(hosts: EnvHosts, uids: tuple[int, ...] = UIDS) -> dict[int, Rollout]:
    """One rollout of each task, by uid."""

    def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        return [2 + key(sampling.key, *token_ids) % 97, END]

    async def story() -> dict[int, Rollout]:
        async with asyncio.timeout(90):
            groups = await play_groups(
                ScriptedEngine(say, end_token_ids=[END]), [task(uid) for uid in uids], group_size=1,
                sampling=Sampling(max_tokens=20), seed=3, purpose="train", decode=str, end_token_ids=[END],
                timeout_s=60.0, codec=Numbers(), make_env=hosts.make,
            )  # fmt: skip
        return {group.task.uid: group.rollouts[0] for group in groups}

    return asyncio.run(story())


Opened = Callable[[str], EnvHosts]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    (tmp_path / "zoo.py").write_text(ZOO)
    made: list[EnvHosts] = []

    def start(how: str) -> EnvHosts:
        memory_mb = 1024 if how.startswith("memory") else None
        cfg = EnvironmentConfig(
            make=f"{tmp_path}/zoo.py:Zoo", arguments={"how": how}, timeout_s=2.0, memory_mb=memory_mb
        )
        made.append(EnvHosts(cfg))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Rollout]:
    """The rollouts where nothing is hostile."""
    file = tmp_path_factory.mktemp("zoo") / "zoo.py"
    file.write_text(ZOO.replace("self.uid == 11", "False"))
    hosts = EnvHosts(EnvironmentConfig(make=f"{file}:Zoo", arguments={"how": "nan"}))
    try:
        return play(hosts)
    finally:
        hosts.close()


def processes_in(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(pgrp) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("how", CASES)
def test_a_hostile_episode_costs_itself_alone(
    opened: Opened,
    clean: dict[int, Rollout],
    how: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("whet.envs.hosts.SILENT_S", 3.0)
    started: list[LocalLine] = []

    class Recorded(LocalLine):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            started.append(self)

    monkeypatch.setattr("whet.envs.hosts.LocalLine", Recorded)
    case, hosts = CASES[how], opened(how)
    with caplog.at_level(logging.INFO, "whet"):
        found = play(hosts)
        again = play(hosts, OTHERS)  # the run goes on
        groups = [line.process.pid for line in started]
        left = [line.file for line in started if line.gone() and line.file.parent.exists()]
        hosts.close()
    hostile = found.pop(11)
    assert found == again == {uid: clean[uid] for uid in OTHERS}
    assert hostile.stop_reason == case.stop
    if case.error is None:
        assert (hostile.error, hostile.reward is None) == (None, False)
    else:
        assert hostile.error is not None
        assert hostile.error.startswith(case.error), hostile.error
        assert (hostile.reward, hostile.reward_parts) == (None, {})
    assert hosts.restarts == case.restarts
    assert not left, "the files of a host go with it, one of them of half a megabyte"
    assert case.log in caplog.text
    assert len(caplog.text) < 400_000  # whatever is printed
    deadline = time.monotonic() + 60
    while alive := [pid for group in groups for pid in processes_in(group)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)
    assert os.getpgid(0) not in groups
