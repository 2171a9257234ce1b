"""The contract of environments, over every way to play one: here in the process, in a host, with plain methods; and
what a host does about code that hangs, dies or returns nonsense."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from codecs_numbers import Numbers
from jumping import go
from swept import in_turn
from whet.config.schema import EnvironmentConfig
from whet.envs import hosts as hosts_module
from whet.envs.env import (
    EnvBroken,
    EnvRestarted,
    EnvStep,
    MakeEnv,
    World,
    as_messages,
    as_step,
)
from whet.envs.host import misfit, watch_loop
from whet.envs.hosts import EnvHosts, HostProcess
from whet.guard.line import LocalLine
from whet.guard.processes import until
from whet.rollout.episode import MOST_CHATS, play_groups
from whet.rollout.limits import EpisodeLimits
from whet.rollout.scripted import ScriptedEngine
from whet.seeds import key, rollout_key
from whet.types import Group, Json, Message, Rollout, Sampling, Task, WhetError

ZOO = '''
import asyncio
import os
import struct
import signal
import socket
import subprocess
import sys
import time

from whet.envs.env import EnvStep
from whet.types import Message


class Sums:
    """Adds up the replies; asks the policy for a number in every turn but the last; is done after three."""

    def __init__(self, task, world, note=None):
        self.task, self.world, self.note = task, world, note
        self.total = self.turn = 0
        self.drawn = world.rng.randrange(1000)

    async def first(self):
        return [Message("user", f"{self.drawn}")]

    async def step(self, reply):
        self.turn += 1
        self.total += sum(map(int, reply.content.split()))
        if self.turn < 3:
            asked = await self.world.chat([Message("user", f"{self.turn}")])
            self.total += int(asked.content.split()[0])
        return EnvStep([Message("user", "7")], float(self.total), {"turn": 1.0}, done=self.turn == 3)

    async def close(self):
        if self.note:
            with open(self.note, "a") as file:
                file.write("closed\\n")


class PlainSums:
    """The same without async: it runs in a thread, where `world.chat` waits by itself."""

    def __init__(self, task, world, note=None):
        self.other = Sums(task, world, note)
        self.other.world = self
        self.chat_of = world.chat

    def chat(self, messages):
        async def said():
            return reply

        reply = self.chat_of(messages)
        return said()

    def first(self):
        return run(self.other.first())

    def step(self, reply):
        return run(self.other.step(reply))

    def close(self):
        return run(self.other.close())


def run(work):
    """A coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


class Numbered:
    """Fails in its first two attempts; its message is which rollout of its group it is, and which attempt."""

    def __init__(self, task, world):
        self.world = world

    async def first(self):
        if self.world.attempt < 2:
            raise RuntimeError(f"attempt {self.world.attempt}")
        return [Message("user", f"{100 + self.world.index} {self.world.attempt}")]

    async def step(self, reply):
        return EnvStep([], 1.0, {}, done=True)


class Hostile:
    """Ends well, but for one task, where it does what it is told to do, at the given call."""

    def __init__(self, task, world, how, at="step"):
        self.uid, self.world, self.how, self.at = task.uid, world, how, at
        self.turn = 0

    async def _do(self, at):
        if self.uid == 11 and at == self.at:
            return await HOW[self.how](self)
        await asyncio.sleep(0.02)

    async def first(self):
        return await self._do("first") or [Message("user", "9")]

    async def step(self, reply):
        self.turn += 1
        done = await self._do("step")
        return done or EnvStep([Message("user", "7")], 0.5, done=self.turn == 2)

    async def close(self):
        await self._do("close")


class PlainHostile:
    def __init__(self, task, how):
        self.uid, self.how, self.turn = task.uid, how, 0

    def first(self):
        return [Message("user", "9")]

    def step(self, reply):
        self.turn += 1
        if self.uid == 11:
            time.sleep(1000)
        return EnvStep([Message("user", "7")], 0.5, done=self.turn == 2)


async def raises(env):
    raise ValueError("broken")

async def leaves(env):
    sys.exit(3)

async def dies(env):
    os._exit(0)

async def killed(env):
    os.kill(os.getpid(), signal.SIGKILL)

async def dies_later(env):
    async def later():
        await asyncio.sleep(0.05)
        os._exit(1)
    env.task = asyncio.create_task(later())
    await asyncio.sleep(1000)

async def hangs(env):
    await asyncio.sleep(1000)

async def never_ends(env):
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass

async def blocks(env):
    time.sleep(1000)

async def spins(env):
    while True:
        pass

async def nan(env):
    return EnvStep(reward=float("nan"))

async def number(env):
    return 3

async def dictionary(env):
    return {"reward": 1.0}

async def no_messages(env):
    return EnvStep(["hello"], done=False)

async def huge(env):
    return EnvStep([Message("user", "7" * 10**7)], done=False)

async def closes_its_sockets(env):
    os.closerange(3, 4096)
    await asyncio.sleep(1000)

async def writes_nonsense(env):
    for fd in range(3, 4096):
        try:
            os.write(fd, b"\\xff" * 100)
        except OSError:
            pass
    await asyncio.sleep(1000)

async def nests_deeply(env):
    deep = b"[" * 100_000
    for fd in range(3, 4096):
        try:
            os.write(fd, struct.pack("!i", len(deep)) + deep)
        except OSError:
            pass
    await asyncio.sleep(1000)

async def drips(env):
    while True:
        print("drip")
        await asyncio.sleep(0.05)

async def forgets_a_chat(env):
    env.world.chat([Message("user", "1")])
    return EnvStep(done=True)

async def chats_with_a_strange_setting(env):
    await env.world.chat([Message("user", "1")], temperature=0.1)

async def faults(env):
    return EnvStep(fault="the site is down")

async def leaves_a_process(env):
    subprocess.Popen(["sleep", "4242.25"])
    os._exit(5)

async def asks_and_hangs(env):
    await env.world.chat([Message("user", "1")])
    await asyncio.sleep(1000)

async def gives_up_a_chat(env):
    """The answer comes when nobody waits for it any more."""
    env.hold = await env.world.chat([Message("user", "1")])
    asked = asyncio.ensure_future(env.world.chat([Message("user", "2")]))
    await asyncio.sleep(0)
    asked.cancel()
    while not asked.done():
        await asyncio.sleep(0)
    await env.world.chat([Message("user", "3")])
    return EnvStep(done=True)

async def returns_after_a_chat_that_it_gave_up(env):
    try:
        await asyncio.wait_for(env.world.chat([Message("user", "2")]), 0.01)
    except TimeoutError:
        pass
    return EnvStep(done=True)

async def tells_too_much(env):
    return EnvStep([Message("user", "") for _ in range(1_000_000)], done=True)

async def tells_of_faces(env):
    """As many characters as an environment may say, of those that take most bytes."""
    faces = [Message("user", "\U0001f600" * 1_000_000)]
    return EnvStep(faces, state="\U0001f600" * 80_000, history=faces, done=True)

async def scores_faces(env):
    try:
        await env.world.score("\U0001f600" * 1_000_000, prompt="\U0001f600" * 1_000_000)
    except RuntimeError as error:
        assert "belongs to no run" in str(error), error
    return EnvStep(done=True)

async def asks_what_cannot_be_asked(env):
    try:
        await env.world.chat([Message("user", "1")], stop={"a set"})
    except RuntimeError as error:
        assert str(error).startswith("world.chat: it cannot be asked: Object of type set is not JSON"), error
    return EnvStep(done=True)

async def asks_what_cannot_be_asked_and_hangs(env):
    await asks_what_cannot_be_asked(env)
    await asyncio.sleep(1000)

async def forks(env):
    """Both processes go on from here."""
    os.fork()
    await asyncio.sleep(0)
    return EnvStep(done=True)

async def forks_a_worker(env):
    """Which prints, and has nothing to do with the line of its host."""
    import multiprocessing

    worker = multiprocessing.get_context("fork").Process(target=print, args=("from the worker",))
    worker.start()
    worker.join()
    return EnvStep(done=worker.exitcode == 0)

HOW = {name: value for name, value in list(globals().items()) if asyncio.iscoroutinefunction(value)}


# makers that never come back in the first attempt of one task

def nothing(task):
    return None


def down(task):
    raise OSError("no such world")


def late(task, world):
    if task.uid == 11 and world.attempt == 0:
        time.sleep(1000)
    return Hostile(task, world, "", at="never")

async def late_async(task, world):
    if task.uid == 11 and world.attempt == 0:
        await asyncio.sleep(1000)
    return Hostile(task, world, "", at="never")

async def late_blocking(task, world):
    return late(task, world)


class MadeLate:
    """Made by a thread, once a file is there."""

    def __init__(self, task, gate, note):
        self.note = note
        while task.uid == 10 and not os.path.exists(gate):
            time.sleep(0.01)

    def first(self):
        return []

    def step(self, reply):
        return EnvStep()

    def close(self):
        with open(self.note, "a") as file:
            file.write("closed\\n")
'''

END = 1


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    file = tmp_path / "zoo.py"
    file.write_text(ZOO)
    return file


def task(uid: int) -> Task:
    return Task(uid=uid, source="s", prompt=(Message("user", "50"),), token_ids=(50,))


def said(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
    """A number that follows from the prompt and the key."""
    return [2 + key(sampling.key, *token_ids) % 97, END]


def scripted() -> ScriptedEngine:
    return ScriptedEngine(said, end_token_ids=[END])


def play(
    make: MakeEnv, count: int = 4, engine: ScriptedEngine | None = None, **options: Any
) -> dict[int, Rollout]:
    """One rollout of each task 10, 11, ..., by uid."""
    defaults: dict[str, Any] = {
        "group_size": 1, "sampling": Sampling(max_tokens=20), "seed": 3, "purpose": "train", "decode": str,
        "end_token_ids": [END], "timeout_s": 60.0, "codec": Numbers(), "make_env": make,
    }  # fmt: skip

    async def bounded() -> dict[int, Rollout]:
        async with asyncio.timeout(90):
            groups = await play_groups(
                engine or scripted(), [task(10 + n) for n in range(count)], **{**defaults, **options}
            )
        return {group.task.uid: group.rollouts[0] for group in groups}

    return asyncio.run(bounded())


Opened = Callable[..., EnvHosts]


@pytest.fixture
def opened(zoo: Path) -> Iterator[Opened]:
    made: list[EnvHosts] = []

    def start(name: str, timeout_s: float = 20.0, hosts: int = 1, **arguments: Json) -> EnvHosts:
        cfg = EnvironmentConfig(make=f"{zoo}:{name}", arguments=arguments, timeout_s=timeout_s, hosts=hosts)
        made.append(EnvHosts(cfg))
        return made[-1]

    yield start
    for each in made:
        each.close()


class Sums:
    """The environment of the zoo, written once more and played in this process."""

    def __init__(self, task: Task, world: World) -> None:
        self.world, self.total, self.turn = world, 0, 0
        self.drawn = world.rng.randrange(1000)

    async def first(self) -> list[Message]:
        return [Message("user", f"{self.drawn}")]

    async def step(self, reply: Message) -> EnvStep:
        self.turn += 1
        self.total += sum(map(int, reply.content.split()))
        if self.turn < 3:
            asked = await self.world.chat([Message("user", f"{self.turn}")])
            self.total += int(asked.content.split()[0])
        return EnvStep([Message("user", "7")], float(self.total), {"turn": 1.0}, done=self.turn == 3)


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("name", ["Sums", "PlainSums"])
def test_an_environment_gives_the_same_rollouts_wherever_it_is_played(opened: Opened, name: str) -> None:
    here = play(Sums)
    assert all(r.error is None for r in here.values())
    for count in (1, 3):
        assert play(opened(name, hosts=count).make) == here


def test_a_call_of_the_policy_is_a_strand_with_a_key_of_its_own() -> None:
    rollout = play(Sums, 1)[10]
    trunk, *forks = rollout.strands
    drawn = World(key(rollout_key(3, 10, 0, purpose="train"), "env"), no_reply).rng.randrange(1000)
    assert trunk.token_ids[:2].tolist() == [50, drawn]
    said: list[int] = []
    for n in range(3):
        own = rollout_key(3, 10, 0, purpose="train")
        before = [50, drawn, *(t for word in said for t in (word, END, 7))]
        said.append(2 + key(own, *before) % 97)
        assert trunk.token_ids[: len(before) + 2].tolist() == [*before, said[-1], END], n
    assert trunk.mask.tolist() == [False, False, True, True, False, True, True, False, True, True]
    asked = [2 + key(rollout_key(3, 10, 0, purpose="train", fork=(n, 1)), n) % 97 for n in (1, 2)]
    assert [fork.token_ids.tolist() for fork in forks] == [[n, word, END] for n, word in zip((1, 2), asked)]
    assert [fork.mask.tolist() for fork in forks] == [[False, True, True]] * 2
    rewards = [said[0] + asked[0], sum(said[:2]) + sum(asked), sum(said) + sum(asked)]
    assert [turn.reward for turn in trunk.turns] == rewards
    assert rollout.reward == sum(rewards)
    assert rollout.reward_parts == {"env": sum(rewards), "env/turn": 3.0}


async def no_reply(*asked: Any) -> Message:
    raise NotImplementedError


@pytest.mark.parametrize("name", ["Sums", "PlainSums"])
def test_every_environment_is_closed_once_however_it_ends(opened: Opened, tmp_path: Path, name: str) -> None:
    note = tmp_path / "note"
    hosts = opened(name, note=str(note))
    play(hosts.make, 3)
    play(hosts.make, 2, limits=EpisodeLimits(max_turns=1))
    hosts.close()
    assert note.read_text() == "closed\n" * 5


def test_the_words_of_an_environment_stand_in_the_log(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "whet"):
        play(opened("Hostile", how="drips", timeout_s=1.0).make)
    assert caplog.text.count("environment: drip") >= 2


def test_the_traceback_of_an_environment_in_a_host_stands_in_the_log_once(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    make = opened("Hostile", how="raises").make
    with caplog.at_level("INFO", "whet"):
        for _ in range(2):
            play(make)
    assert caplog.text.count("aborted: env raised ValueError: broken") == 2
    assert len(re.findall(r'File ".*zoo\.py", line \d+, in step', caplog.text)) == 1
    assert caplog.text.count("environment: ValueError: broken") == 1


def test_few_hosts_of_their_own_are_played_in_at_once_and_a_wait_for_one_is_no_time_of_the_rollout() -> None:
    """A host has ended while all six episodes ran code. Each takes 5 s of 8, in a host of its own, of which there are
    two at once: the last ones wait for 10 s."""
    inside, most = 0, 0

    class Suspected(Sums):
        async def first(self) -> list[Message]:
            nonlocal inside, most
            if not self.world.alone:
                raise EnvRestarted("its host ended", suspect=True)
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(5.0)
            inside -= 1
            return await super().first()

    async def story() -> list[Group]:
        return await play_groups(
            scripted(), [task(10 + n) for n in range(6)], group_size=1, sampling=Sampling(max_tokens=20), seed=3,
            purpose="train", decode=str, end_token_ids=[END], timeout_s=8.0, codec=Numbers(), make_env=Suspected,
            alone=asyncio.Semaphore(2),
        )  # fmt: skip

    found = {group.task.uid: group.rollouts[0] for group in go(story())}
    assert most == 2
    assert found == play(Sums, 6)


class Rewrites:
    """A new history after the first turn: a summary, or what is there and more."""

    def __init__(self, extends: bool) -> None:
        self.extends, self.turn = extends, 0

    async def first(self) -> list[Message]:
        return []

    async def step(self, reply: Message) -> EnvStep:
        self.turn += 1
        there = [Message("user", "50"), Message("assistant", f"{reply.content} {END}")]
        history = there if self.extends else [Message("user", "60 61")]
        return EnvStep([Message("user", "8")], 1.0, done=self.turn == 2, history=history)


@pytest.mark.parametrize("extends", [True, False])
def test_a_rewritten_history_begins_a_strand_unless_it_extends_the_tokens(extends: bool) -> None:
    rollout = play(lambda task, world: Rewrites(extends), 1)[10]
    first = 2 + key(rollout_key(3, 10, 0, purpose="train"), 50) % 97
    if extends:
        (strand,) = rollout.strands
        assert strand.token_ids[:4].tolist() == [50, first, END, 8]
        assert len(strand.turns) == 2
        return
    before, after = rollout.strands
    assert before.token_ids.tolist() == [50, first, END]
    second = 2 + key(rollout_key(3, 10, 0, purpose="train", fork=(1, 0)), 60, 61, 8) % 97
    assert after.token_ids.tolist() == [60, 61, 8, second, END]
    assert [len(before.turns), len(after.turns)] == [1, 1]
    assert rollout.reward == 2.0


def test_what_an_environment_says_is_bounded() -> None:
    def rollout(most: int) -> Rollout:
        return play(Sums, 1, limits=EpisodeLimits(observation_tokens=most))[10]

    assert rollout(3).error is None
    cut = rollout(2)  # its first message and one answer
    assert (cut.finish_reason, len(cut.strands[0].turns), cut.error) == ("length", 2, None)
    none = play(Sums, 1, limits=EpisodeLimits(observation_tokens=0))[10]
    assert none.error is not None
    assert "first messages have 1 tokens" in none.error


class Silent(Sums):
    async def step(self, reply: Message) -> EnvStep:
        return EnvStep(reward=1.0, done=False)


def test_an_episode_that_goes_on_without_messages_is_a_fault_of_its_environment() -> None:
    error = play(Silent, 1)[10].error
    assert error is not None
    assert error.startswith(
        "env bad value: EnvStep with done=False, but without messages or a history; expected"
    )
    assert play(Silent, 1, limits=EpisodeLimits(max_turns=1))[10].stop_reason == "turns"


class Crowds(Sums):
    """Asks for as many replies as a rollout may have, and one more, all at once."""

    async def step(self, reply: Message) -> EnvStep:
        asked = (self.world.chat([Message("user", "1")]) for _ in range(MOST_CHATS + 1))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return EnvStep(parts={"refused": float(sum(isinstance(answer, WhetError) for answer in answers))})


def test_calls_of_the_policy_are_bounded_also_where_they_are_made_at_once() -> None:
    rollout = play(Crowds, 1)[10]
    assert rollout.error is None
    assert rollout.reward_parts["env/refused"] == 1.0
    assert len(rollout.strands) == 1 + MOST_CHATS


# ---------------------------------------------------------------- code that fails


class Fitting:
    async def first(self) -> list[Message]:
        return []

    def step(self, reply: Message, *, loud: bool = False) -> EnvStep:
        return EnvStep()


class TakesNothing(Fitting):
    def step(self) -> EnvStep:  # type: ignore[override]
        return EnvStep()


class AsksForMore(Fitting):
    async def first(self, task: Task) -> list[Message]:  # type: ignore[override]
        return []


class WithoutStep(Fitting):
    step = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Fitting(), ""),
        (WithoutStep(), "WithoutStep without `step`; expected an Env"),
        (TakesNothing(), "TakesNothing whose `step` takes (): too many positional arguments; expected "),
        (AsksForMore(), "AsksForMore whose `first` takes (task): missing a required argument: "),
    ],
)
def test_an_environment_whose_methods_cannot_be_called_is_told_before_its_first_turn(
    made: Any, said: str
) -> None:
    assert misfit(made).startswith(said)
    assert bool(misfit(made)) is bool(said)


FAULTS = {
    "raises": "env raised ValueError: broken (zoo.py:",
    "leaves": "env raised SystemExit: 3",
    "dies": "env crashed: its host ended",
    "killed": "env crashed: its host ended: killed by SIGKILL",
    "dies_later": "env crashed: its host ended",
    "hangs": "env timeout: step took more than 2 s",
    "never_ends": "env timeout: step took more than 2 s, and is still running",
    "blocks": "env timeout: code in an async method held the event loop for more than 2 s",
    "spins": "env timeout: code in an async method held the event loop for more than 2 s",
    "nan": "env bad value: nan as EnvStep.reward",
    "number": "env bad value: step returned int; expected EnvStep",
    "dictionary": "env bad value: step returned dict; expected EnvStep",
    "no_messages": "env bad value: EnvStep.messages: str in the list; expected Message",
    "huge": "env bad value: EnvStep.messages: 10000004 characters; at most 1048576",
    "closes_its_sockets": "env crashed: its host",
    "writes_nonsense": "env crashed: its host",
    "nests_deeply": "env crashed: its host sent no message",
    "drips": "env timeout: step took more than 2 s",
    "forgets_a_chat": "env bad value: step returned before its calls of world.chat were answered",
    "chats_with_a_strange_setting": "env raised ValueError: world.chat got temperature; expected max_tokens, stop",
    "faults": "env fault: the site is down",
    "leaves_a_process": "env crashed: its host ended: exit status 5",
    "asks_and_hangs": "env timeout: step took more than 2 s",
    "asks_what_cannot_be_asked_and_hangs": "env timeout: step took more than 2 s",
    "tells_too_much": "env bad value: EnvStep.messages: 4000000 characters; at most 1048576",
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Rollout]:
    """The rollouts where nothing fails."""
    file = tmp_path_factory.mktemp("zoo") / "zoo.py"
    file.write_text(ZOO)
    hosts = EnvHosts(EnvironmentConfig(make=f"{file}:Hostile", arguments={"how": "raises", "at": "never"}))
    try:
        return play(hosts.make)
    finally:
        hosts.close()


@pytest.mark.parametrize("how", FAULTS)
def test_an_environment_that_fails_ends_its_own_episode_and_changes_no_other(
    opened: Opened, clean: dict[int, Rollout], how: str
) -> None:
    limit_s = 2.0 if "timeout" in FAULTS[how] else 60.0
    found = play(opened("Hostile", timeout_s=limit_s, how=how).make)
    failed = found.pop(11)
    assert failed.error is not None
    assert failed.error.startswith(FAULTS[how])
    assert (failed.reward, failed.reward_parts, failed.finish_reason) == (None, {}, "abort")
    assert found == {uid: rollout for uid, rollout in clean.items() if uid != 11}
    deadline = time.monotonic() + 60
    while any(process_named(b"4242.25")):  # it is killed with its host, and takes its time to die
        assert time.monotonic() < deadline
        time.sleep(0.05)


def process_named(word: bytes) -> Iterator[bool]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield word in (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue


def folders(place: HostProcess) -> list[Path]:
    """Of all hosts of its environment."""
    return [*Path(place.marks).parent.parent.iterdir()]


def test_a_host_that_is_being_started_when_the_loop_ends_is_ended(opened: Opened) -> None:
    hosts = opened("Hostile", how="raises", at="never")

    async def leaves() -> None:
        asking = asyncio.create_task(hosts.find(alone=True))
        while not hosts.starting:
            assert not asking.done()
            await asyncio.sleep(0.001)
        starting.extend(hosts.starting)

    starting: list[Any] = []
    asyncio.run(leaves())
    (first,), (second,) = hosts.processes, starting
    assert until(second.line.gone, 60.0)
    assert not first.line.gone(), "it plays for the next loop"
    assert until(lambda: folders(first) == [Path(first.marks).parent], 60.0)


@pytest.mark.parametrize(("how", "at"), in_turn(["raises", "dies", "hangs", "blocks"], ["first", "close"]))
def test_it_may_fail_in_any_call(opened: Opened, clean: dict[int, Rollout], how: str, at: str) -> None:
    limit_s = 2.0 if how in ("hangs", "blocks") else 60.0
    found = play(opened("Hostile", timeout_s=limit_s, how=how, at=at).make)
    failed = found.pop(11)
    assert found == {uid: rollout for uid, rollout in clean.items() if uid != 11}
    if at == "close":
        assert failed == clean[11]
    else:
        assert failed.error is not None


def test_a_plain_method_that_hangs_ends_its_own_episode(opened: Opened) -> None:
    hosts = opened("PlainHostile", timeout_s=2.0, how="")
    found = play(hosts.make)
    error = found.pop(11).error
    assert error is not None
    assert error.startswith("env timeout: step took more than 2 s, and is still running")
    assert [r.error for r in found.values()] == [None] * 3
    assert play(hosts.make, 1)[10] == found[10]  # another host plays on
    assert hosts.restarts == 1


def test_hosts_may_be_closed_while_one_of_them_ends(opened: Opened) -> None:
    hosts = opened("Sums")
    (place,) = hosts.processes

    async def ending() -> None:
        place.alone = True
        place.closing.add(1)
        hosts.dismiss(place)
        (work,) = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.sleep(0)
        hosts.close()
        await work

    asyncio.run(ending())
    assert not hosts.processes
    assert place.line.gone()


LATE = {
    "late": "env timeout: rollout.env.make took more than 1 s, and is still running",
    "late_async": "env timeout: rollout.env.make took more than 1 s",
    "late_blocking": "env timeout: code in an async method held the event loop for more than 1 s",
}


@pytest.mark.parametrize("name", LATE)
def test_a_maker_that_hangs_is_a_fault_of_its_episode_and_a_retry_mends_it(
    opened: Opened, clean: dict[int, Rollout], name: str
) -> None:
    hosts = opened(name, timeout_s=1.0)
    found = play(hosts.make)
    failed = found.pop(11)
    assert failed.error == LATE[name]
    assert (failed.reward, failed.finish_reason, failed.stop_reason) == (None, "abort", "fault")
    assert found == {uid: rollout for uid, rollout in clean.items() if uid != 11}
    assert hosts.restarts == (name != "late_async"), "a host whose code goes on is replaced"
    assert play(hosts.make, retries=1) == clean


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "env bad value: rollout.env.make returned NoneType without `first`; expected an Env"),
        ("down", "env raised OSError: no such world (zoo.py:"),
    ],
)
def test_what_a_maker_does_wrong_is_told_by_its_key(opened: Opened, name: str, said: str) -> None:
    """A run in which every maker does ends with this as the main cause."""
    for rollout in play(opened(name).make).values():
        assert rollout.error is not None
        assert rollout.error.startswith(said)
        assert "rollout.env.make" in rollout.error


def test_a_failed_episode_is_retried_and_knows_its_attempt_and_its_place_in_the_group(opened: Opened) -> None:
    hosts = opened("Numbered")

    async def group(retries: int) -> list[Rollout]:
        groups = await play_groups(
            scripted(), [task(10)], group_size=3, sampling=Sampling(max_tokens=20), seed=3, purpose="train", decode=str,
            end_token_ids=[END], timeout_s=60.0, codec=Numbers(), make_env=hosts.make, retries=retries,
        )  # fmt: skip
        return list(groups[0].rollouts)

    for n, one in enumerate(asyncio.run(group(2))):
        assert one.error is None
        assert one.strands[0].token_ids[:3].tolist() == [50, 100 + n, 2]
    for one in asyncio.run(group(1)):
        assert "attempt 1" in str(one.error)


def test_a_wait_for_the_policy_is_no_time_of_the_environment(opened: Opened) -> None:
    hosts = opened("Sums", timeout_s=1.5)

    async def slow(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        await asyncio.sleep(2.5 if token_ids == [1] else 0.0)
        return [5, END]

    async def story() -> Any:
        return await play_groups(
            ScriptedEngine(slow, end_token_ids=[END]), [task(10)], group_size=1, sampling=Sampling(max_tokens=20),
            seed=3, purpose="train", decode=str, end_token_ids=[END], timeout_s=60.0, codec=Numbers(),
            make_env=hosts.make,
        )  # fmt: skip

    (group,) = asyncio.run(story())
    assert group.rollouts[0].error is None


@pytest.mark.parametrize(
    ("limit_s", "turns", "asked"),
    [(3.0, 0, 1), (7.0, 1, 2), (11.0, 1, 3), (15.0, 2, 4), (19.0, 2, 5), (21.0, 3, 5)],
)
def test_time_in_which_the_engine_is_waited_for_counts_for_the_episode(
    limit_s: float, turns: int, asked: int
) -> None:
    """It takes 4 s for each reply: to the first turn, to the environment in it, to the second turn and so on."""
    engine_of = ScriptedEngine(slow, end_token_ids=[END])
    (group,) = go(
        play_groups(
            engine_of, [task(10)], group_size=1, sampling=Sampling(max_tokens=20), seed=3, purpose="train",
            decode=str, end_token_ids=[END], timeout_s=limit_s, codec=Numbers(), make_env=Sums,
        )
    )  # fmt: skip
    (rollout,) = group.rollouts
    assert len(engine_of.calls) == asked
    if limit_s > 20.0:
        assert (rollout.error, rollout.stop_reason) == (None, "done")
        return
    after = f" (after turn {turns})" if turns else ""
    assert rollout.error == f"not finished within rollout.timeout_s={limit_s:g}{after}"
    assert (rollout.stop_reason, rollout.finish_reason, rollout.reward) == ("time", "abort", None)
    assert len(rollout.strands[0].turns) == turns


async def slow(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
    await asyncio.sleep(4.0)
    return [5, END]


WAITS = {"in a turn": (), "in a call of the environment": (1, 1)}
"""Fork of what the engine never answers: the second turn of the conversation, or `world.chat` in the first."""


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("Sums", "in a call of the environment"),
        ("PlainSums", "in a call of the environment"),
        pytest.param("Sums", "in a turn", marks=pytest.mark.sweep),
    ],
)
def test_an_engine_that_does_not_answer_ends_the_episode_by_its_time_and_not_the_step_by_the_environment_s(
    opened: Opened, name: str, where: str
) -> None:
    """A step of the environment has 1 s, the episode 5 s. Host and other episodes have no part in it."""
    hosts, undisturbed = opened(name, timeout_s=1.0), play(Sums)
    fork = WAITS[where]
    held = rollout_key(3, 11, 0, purpose="train", fork=fork)
    cancelled: list[int] = []

    async def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        if sampling.key == held and (fork or END in token_ids):
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(sampling.key)
        return said(token_ids, sampling, version)

    found = play(hosts.make, timeout_s=5.0, engine=ScriptedEngine(say, end_token_ids=[END]))
    late = found.pop(11)
    assert late.error == "not finished within rollout.timeout_s=5 (after turn 1)"
    assert (late.stop_reason, late.finish_reason, late.reward) == ("time", "abort", None)
    assert found == {uid: rollout for uid, rollout in undisturbed.items() if uid != 11}
    assert cancelled == [held], "nobody waits for the reply any more"
    assert play(hosts.make) == undisturbed
    assert hosts.restarts == 0


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("gives_up_a_chat", None),
        (
            "returns_after_a_chat_that_it_gave_up",
            "env bad value: step returned before its calls of world.chat were answered (after turn 1)",
        ),
    ],
)
def test_a_call_of_the_policy_that_an_environment_gives_up_ends_no_host(
    opened: Opened, how: str, error: str | None
) -> None:
    """The answer to the call that is given up (prompt 2) is sent before that to the next one (prompt 3), or never."""
    given_up = asyncio.Event()

    async def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        if token_ids == [2]:
            await given_up.wait()
        if token_ids == [3]:
            given_up.set()
            for _ in range(100):
                await asyncio.sleep(0)
        return said(token_ids, sampling, version)

    hosts = opened("Hostile", how=how)
    found = play(hosts.make, engine=ScriptedEngine(say, end_token_ids=[END]))
    assert found.pop(11).error == error
    assert [r.error for r in found.values()] == [None] * 3
    assert hosts.restarts == 0


@pytest.mark.parametrize(
    "how", ["tells_of_faces", "scores_faces", "asks_what_cannot_be_asked", "forks", "forks_a_worker"]
)
def test_what_an_environment_may_do_ends_no_host_and_changes_no_other_episode(
    opened: Opened, clean: dict[int, Rollout], how: str
) -> None:
    hosts = opened("Hostile", timeout_s=20.0, how=how)
    found = play(hosts.make)
    assert found.pop(11).error is None
    assert found == {uid: rollout for uid, rollout in clean.items() if uid != 11}
    assert hosts.restarts == 0


def test_an_environment_that_is_made_after_its_episode_has_ended_is_closed(
    opened: Opened, tmp_path: Path
) -> None:
    gate, note = tmp_path / "gate", tmp_path / "note"
    hosts = opened("MadeLate", gate=str(gate), note=str(note))
    found = play(hosts.make, 2, timeout_s=1.0)
    assert found[10].error == "not finished within rollout.timeout_s=1"
    assert found[11].error is None
    assert note.read_text() == "closed\n"
    gate.touch()
    assert until(lambda: note.read_text() == "closed\n" * 2, 20.0)


def test_a_host_that_nobody_waits_for_any_more_is_ended(opened: Opened) -> None:
    """It was to play one episode alone, which ended while the host was starting."""
    hosts = opened("Sums")

    async def story() -> None:
        asked = asyncio.create_task(hosts.find(alone=True))
        async with asyncio.timeout(60):
            while not hosts.starting:
                await asyncio.sleep(0.01)
            (starting,) = hosts.starting
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            while not (starting.line.gone() and starting.line.connection.closed):
                await asyncio.sleep(0.01)

    asyncio.run(story())
    (there,) = hosts.processes
    assert not there.line.gone()
    assert folders(there) == [Path(there.marks).parent]


def test_of_hosts_that_were_replaced_nothing_is_kept(opened: Opened) -> None:
    hosts = opened("Hostile", how="dies", at="first")
    (lost,) = hosts.processes
    make = _all_are(hosts)
    (first,) = play(make, 1).values()
    assert first.error is not None
    assert hosts.restarts == 1
    assert until(lambda: len(folders(lost)) == len(hosts.processes), 60.0)


def test_a_host_that_stops_is_replaced(
    opened: Opened, clean: dict[int, Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "SILENT_S", 1.0)
    hosts = opened("Hostile", timeout_s=1.0, how="raises", at="never")
    (pid,) = (place.line.process.pid for place in hosts.processes)
    os.kill(pid, signal.SIGSTOP)
    assert play(hosts.make) == clean
    assert hosts.restarts == 1


@pytest.mark.parametrize(("computes", "looks"), [(False, 3), (True, 1)])
def test_a_machine_that_stands_still_is_nobody_s_hold_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, computes: bool, looks: int
) -> None:
    """The thread that watches a loop sleeps for 5 s in place of 0.25 s, twice. Where the process computes meanwhile,
    its code holds the interpreter; else the process stood still, and only the third look tells."""
    pauses, now, used = iter([5.0, 5.0, 0.25]), 0.0, 0.0

    def sleep(asked: float) -> None:
        nonlocal now, used
        pause = next(pauses)
        now, used = now + pause, used + pause * computes

    clocks = SimpleNamespace(sleep=sleep, monotonic=lambda: now, process_time=lambda: used)
    monkeypatch.setattr("whet.envs.host.time", clocks)
    heard: list[str] = []
    guarded = SimpleNamespace(
        clock=SimpleNamespace(now=print, quiet_s=60.0),
        timeout_s=1.0,
        marks=SimpleNamespace(on_loop=7),
        say=lambda kind, *what: heard.append(kind),
    )
    watch_loop(guarded, SimpleNamespace(call_soon_threadsafe=print))  # type: ignore[arg-type]
    assert heard == ["beat"] * looks + ["hung"]


@pytest.mark.parametrize(
    "how", ["raises", "dies"]
)  # "dies": its episode is played again in a host of its own
def test_a_host_that_is_killed_as_it_starts_is_replaced(
    opened: Opened, clean: dict[int, Rollout], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    hosts = opened("Hostile", how=how, at="never" if how == "raises" else "first")
    killed: list[LocalLine] = []

    def begun(*given: Any, **options: Any) -> LocalLine:
        line = LocalLine(*given, **options)
        if len(killed) < 3:
            killed.append(line)
            line.process.kill()
        return line

    monkeypatch.setattr(hosts_module, "LocalLine", begun)
    (pid,) = (place.line.process.pid for place in hosts.processes)
    os.kill(pid, signal.SIGKILL)
    found = play(hosts.make)
    wrong = {uid for uid in clean if found[uid] != clean[uid]}
    assert wrong == (set() if how == "raises" else {11})
    assert hosts.restarts >= 1 + len(killed) == 4


def test_hosts_that_are_killed_as_they_start_count_among_those_in_a_row(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "MOST_DEATHS", 2)
    hosts = opened("Hostile", how="raises", at="never")

    def begun(*given: Any, **options: Any) -> LocalLine:
        line = LocalLine(*given, **options)
        line.process.kill()
        return line

    monkeypatch.setattr(hosts_module, "LocalLine", begun)
    (pid,) = (place.line.process.pid for place in hosts.processes)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        EnvBroken, match=r"3 hosts in a row were lost; the last one: .*did not start: killed by SIG"
    ):
        play(hosts.make)


def test_hosts_that_die_in_a_row_end_the_run(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "MOST_DEATHS", 1)
    make = _all_are(opened("Hostile", how="dies", at="first"))
    (first,) = play(make, 1).values()
    assert first.error is not None
    assert first.error.startswith("env crashed: its host ended")
    with pytest.raises(EnvBroken, match=r"2 hosts in a row were lost; the last one: crashed: its host ended"):
        play(make, 1)


def _all_are(hosts: EnvHosts) -> MakeEnv:
    """Every task is the hostile one."""
    return lambda task, world: hosts.make(Task(**{**_fields(task), "uid": 11}), world)


def _fields(task: Task) -> dict[str, Any]:
    return {name: getattr(task, name) for name in ("source", "prompt", "token_ids")}


def test_closed_hosts_leave_no_process(opened: Opened) -> None:
    hosts = opened("Hostile", hosts=2, how="never_ends")
    lines = [place.line for place in hosts.processes]
    hosts.close()
    assert all(line.gone() for line in lines)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (EnvStep(reward="1"), "the text '1' as EnvStep.reward; expected a finite number$"),  # type: ignore[arg-type]
        (EnvStep(done=1), "EnvStep.done: int"),  # type: ignore[arg-type]
        (EnvStep(fault=3), "EnvStep.fault: int"),  # type: ignore[arg-type]
        (EnvStep(parts={"a": float("inf")}), "EnvStep.parts"),
        (EnvStep(parts={1: 1.0}), "EnvStep.parts"),  # type: ignore[dict-item]
        (EnvStep(parts={str(n): 1.0 for n in range(257)}), "EnvStep.parts: 257 entries; expected a dict of"),
        (EnvStep(history=[]), "EnvStep.history: an empty list"),
        (EnvStep(messages=[Message("user", 3)]), "role or content is not a text"),  # type: ignore[arg-type]
        (EnvStep([Message("user", "go on")], 0.5), "with messages or a history, but without done"),
        (EnvStep(history=[Message("user", "go on")]), "with messages or a history, but without done"),
        (None, "step returned NoneType"),
    ],
)
def test_a_step_that_is_none_is_named(step: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        as_step(step)


@pytest.mark.parametrize(
    "done", [np.bool_(True), (np.array([1]) == 1).all(), np.array([True]), torch.tensor(1) > 0]
)
def test_an_episode_is_over_by_a_truth_value_of_any_package(done: Any) -> None:
    assert as_step(EnvStep(done=done)).done is True
    assert as_step(EnvStep([Message("user", "x")], done=~done)).done is False


def test_messages_are_a_list() -> None:
    with pytest.raises(ValueError, match="first: str; expected a list of Message"):
        as_messages("hello", "first")
