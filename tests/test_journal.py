"""The journal of environments: answers are on the disk before a rollout has them, and come again when it is played
again; through files, episodes and host processes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from codecs_numbers import Numbers
from whet.config.schema import Config, EnvironmentConfig
from whet.envs import journal as journal_module
from whet.envs.env import Env, EnvBroken, EnvFault, EnvStep, MakeEnv, World
from whet.envs.hosts import EnvHosts
from whet.envs.journal import Journal
from whet.envs.journaled import Counts, about, journaled, promise
from whet.envs.opened import Environments
from whet.envs.tool_env import Limits, ToolEnv
from whet.envs.tools import tool_from_function
from whet.rollout.episode import play_groups
from whet.rollout.scripted import ScriptedEngine
from whet.seeds import key, rollout_key
from whet.types import Json, Message, Rollout, Sampling, Task, ToolCall

END = 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def run(work: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


def write(journal: Journal, *answers: tuple[str, int, str, Any]) -> None:
    async def story() -> None:
        await asyncio.gather(*(journal.write(*answer) for answer in answers))

    run(story())


# ---------------------------------------------------------------- files


def test_what_was_written_is_found_by_the_next_process(folder: Path) -> None:
    first = Journal(folder)
    write(first, ("e", 0, "q", {"x": 0.1}), ("e", 1, "q", ["\ud800", None]), ("f", 0, "q", 3))
    assert first.find("e", 0, "q") == {"x": 0.1}
    first.close()
    second = Journal(folder)
    assert second.find("e", 0, "q") == {"x": 0.1}
    assert second.find("e", 1, "q") == ["\ud800", None]
    assert (second.find("e", 1, "other"), second.other("e", 1)) == (None, ["\ud800", None])
    assert (second.find("g", 0, "q"), second.other("g", 0)) == (None, None)
    write(second, ("e", 0, "q", "newer"))
    second.close()
    third = Journal(folder)
    assert third.find("e", 0, "q") == "newer"
    assert third.other("e", 1) is None  # it followed the older one
    assert third.find("f", 0, "q") == 3
    assert len(list(folder.iterdir())) == 2  # a process writes into none of an earlier one


def test_a_run_without_an_environment_has_no_journal(folder: Path) -> None:
    Journal(folder).close()
    assert not folder.exists()


def test_an_answer_is_on_the_disk_before_it_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has waited for it finds it in what was synced, not only in what was written."""
    synced = dict[str, bytes]()
    count = Counter[str]()

    def fsync(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if path.endswith(".jsonl"):
            synced[path] = Path(path).read_bytes()
            count["syncs"] += 1

    monkeypatch.setattr(journal_module.os, "fsync", fsync)
    journal = Journal(folder)

    async def one(n: int) -> None:
        await journal.write(f"e{n}", 0, "q", n)
        there = [json.loads(line) for data in synced.values() for line in data.splitlines()]
        assert [f"e{n}", 0, "q", n] in there

    async def story() -> None:
        for begin in range(0, 200, 50):
            await asyncio.gather(*(one(n) for n in range(begin, begin + 50)))

    run(story())
    journal.close()
    assert 4 <= count["syncs"] < 200  # at least one for each wave; many share one


@pytest.mark.parametrize("kept", range(1, 21, 6))
def test_a_line_that_a_kill_has_cut_short_is_as_if_it_had_not_been(folder: Path, kept: int) -> None:
    journal = Journal(folder)
    write(journal, ("e", 0, "q", "whole"))
    write(journal, ("e", 1, "q", "cut"))
    journal.close()
    (path,) = folder.iterdir()
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:kept])
    again = Journal(folder)
    assert (again.find("e", 0, "q"), again.other("e", 1)) == ("whole", None)
    write(again, ("e", 1, "q", "anew"))
    again.close()
    assert Journal(folder).find("e", 1, "q") == "anew"


def test_a_damaged_line_is_named_and_costs_no_other(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(folder)
    write(journal, *((f"e{n}", 0, "q", n) for n in range(3)))
    journal.close()
    (path,) = folder.iterdir()
    lines = path.read_bytes().splitlines(keepends=True)
    for bad in (b"{}\n", b"\xff\xfe\n", b"[[], 0, 1, 2]\n", b"[" * 10**5 + b"\n"):
        path.write_bytes(lines[0] + bad + lines[2])
        caplog.clear()
        again = Journal(folder)
        assert [again.find(f"e{n}", 0, "q") for n in range(3)] == [0, None, 2]
        assert f"{path.name}: 1 damaged lines" in caplog.text


def test_a_disk_that_takes_nothing_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(folder)
    write(journal, ("e", 0, "q", 1))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_module.os, "fsync", full)
    for turn in (1, 2):
        with pytest.raises(
            EnvBroken, match=r"cannot write .*0-000000\.jsonl: the disk is full; free space there"
        ):
            write(journal, ("e", turn, "q", 1))
        assert journal.other("e", turn) is None
    journal.close()


def test_what_no_resume_asks_for_goes(folder: Path) -> None:
    journal = Journal(folder)
    for step in range(4):
        journal.at(0, step)
        write(journal, (f"e{step}", 0, "q", step), ("every", 0, f"q{step}", step))
    journal.at(1, 0)
    write(journal, ("next", 0, "q", 0))

    def left(journal: Journal) -> list[int]:
        return [step for step in range(4) if journal.find(f"e{step}", 0, "q") is not None]

    journal.drop(0, -1)
    assert left(journal) == [0, 1, 2, 3]
    journal.drop(0, 2)
    assert left(journal) == left(Journal(folder)) == [2, 3]
    assert [journal.find("every", 0, f"q{step}") for step in range(4)] == [None, None, None, 3]
    journal.drop(1, 0)
    assert left(journal) == left(Journal(folder)) == []
    assert journal.find("next", 0, "q") == 0
    journal.drop(9, 9)  # not what is being written
    assert journal.find("next", 0, "q") == 0
    journal.close()


def test_a_long_run_has_at_hand_what_its_rollouts_may_ask_for(folder: Path) -> None:
    """The oldest checkpoint, and with it the journal, may be as old as the run: its memory does not grow with it."""
    worlds = Environments(folder)
    worlds.journal = journal = Journal(folder)
    most = 0
    for step in range(20):
        worlds.at(0, step, ahead=2)
        write(journal, *((f"e{step}-{n}", 0, "q", step) for n in range(3)))
        worlds.saved(lambda: (0, 0), ahead=2)
        most = max(most, len(journal.lines))
        assert all(journal.find(f"e{one}-0", 0, "q") == one for one in range(max(0, step - 2), step + 1))
    assert most == 9
    worlds.close()
    whole = Journal(folder)  # of a process that resumes from the first checkpoint
    assert [whole.find(f"e{step}-2", 0, "q") for step in range(20)] == list(range(20))


# ---------------------------------------------------------------- episodes


class Draws:
    """Four turns; what it says is another number every time. It remembers all replies."""

    made: ClassVar[Counter[str]] = Counter()
    """What was asked of all environments of this kind: `make`, `first`, `step`, `resume`, `close`."""

    def __init__(self, task: Task, world: World) -> None:
        self.task, self.world, self.told = task, world, list[int]()
        self._count("make")

    def _count(self, what: str) -> None:
        self.made[what] += 1
        self.made[f"{what} of {self.task.uid}"] += 1

    def draw(self) -> int:
        return 2 + int.from_bytes(os.urandom(3), "little")

    async def first(self) -> list[Message]:
        self._count("first")
        return [Message("user", str(self.draw()))]

    async def step(self, reply: Message) -> EnvStep:
        self._count("step")
        self.told.append(self.draw())
        return EnvStep(
            [Message("user", str(self.told[-1]))], float(sum(self.told)), {"n": 1.0}, done=len(self.told) == 4
        )

    async def close(self) -> None:
        self._count("close")


class Resumes(Draws):
    """The same with a memory that can be handed over."""

    async def first(self) -> list[Message]:
        self._count("first")
        return [Message("user", "9")]

    async def resume(self, turns: list[tuple[Message, EnvStep]]) -> None:
        self._count("resume")
        assert self.world.turn == len(turns) + 1
        self.told = [int(step.messages[0].content) for _, step in turns]


class Chats(Draws):
    """It asks the policy what to say."""

    async def step(self, reply: Message) -> EnvStep:
        asked = [self.world.chat([Message("user", str(n))]) for n in (self.draw(), self.draw())]
        said = await asyncio.gather(*asked)
        step = await super().step(reply)
        return EnvStep([Message("user", said[0].content)], step.reward, done=step.done)


class Breaks(Resumes):
    """The world breaks in the second step of task 11, as often as it is told to."""

    left: ClassVar[int] = 0

    async def step(self, reply: Message) -> EnvStep:
        if self.task.uid == 11 and len(self.told) == 1 and Breaks.left:
            Breaks.left -= 1
            if Breaks.left % 2:
                return EnvStep(fault="the site is down")
            raise EnvFault("the network is down")
        return await super().step(reply)


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    Draws.made.clear()
    Breaks.left = 0


def engine(killed: asyncio.Event, stops_after: int | None = None, other: int | None = 0) -> ScriptedEngine:
    """Says a number that follows from the history, the key and `other`; without it, always the same. Policies with
    another `other` never say the same. After so many replies the process is killed."""
    count = Counter[str]()

    async def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        count["replies"] += 1
        if stops_after is not None and count["replies"] >= stops_after:
            killed.set()
            await asyncio.Event().wait()
        return [5 if other is None else 2 + 100 * other + key(sampling.key, other, *token_ids) % 97, END]

    return ScriptedEngine(say, end_token_ids=[END])


def task(uid: int) -> Task:
    return Task(uid=uid, source="s", prompt=(Message("user", "50"),), token_ids=(50,))


def play(
    folder: Path,
    make: MakeEnv,
    *,
    stops_after: int | None = None,
    other: int | None = 0,
    what: str = "x",
    place: tuple[int, int] = (0, 0),
    repeated: bool = False,
    counts: Counts | None = None,
    **options: Any,
) -> dict[int, Rollout]:
    """One rollout of each of tasks 10 to 13, by uid, in a process of its own as far as the journal goes. `stops_after`
    replies it is killed, and nothing comes back."""
    journal = Journal(folder)
    journal.at(*place)
    wrapped = journaled(make, journal, what, counts=Counts() if counts is None else counts, repeated=repeated)

    async def story() -> dict[int, Rollout]:
        killed = asyncio.Event()
        work = play_groups(
            engine(killed, stops_after, other), [task(10 + n) for n in range(4)],
            **{
                "group_size": 1, "sampling": Sampling(max_tokens=20), "seed": 3, "purpose": "train", "decode": str,
                "end_token_ids": [END], "timeout_s": 60.0, "codec": Numbers(), "make_env": wrapped, **options,
            },
        )  # fmt: skip
        playing, end = asyncio.ensure_future(work), asyncio.ensure_future(killed.wait())
        async with asyncio.timeout(60):
            await asyncio.wait({playing, end}, return_when=asyncio.FIRST_COMPLETED)
        if killed.is_set():
            playing.cancel()
            await asyncio.wait({playing})
            return {}
        end.cancel()
        return {group.task.uid: group.rollouts[0] for group in await playing}

    try:
        return asyncio.run(story())
    finally:
        journal.close()


def seen(make: type[Draws]) -> tuple[MakeEnv, list[tuple[int, list[int]]]]:
    """Environments, and what those of finished episodes have said."""
    finished: list[tuple[int, list[int]]] = []

    def made(task: Task, world: World) -> Env:
        env = make(task, world)
        step = env.step

        async def noted(reply: Message) -> EnvStep:
            answer = await step(reply)
            if answer.done:
                finished.append((task.uid, list(env.told)))
            return answer

        env.step = noted  # type: ignore[method-assign]
        return env

    return made, finished


@pytest.mark.parametrize("make", [Draws, Resumes, Chats])
def test_a_finished_rollout_comes_again_without_its_environment(folder: Path, make: type[Draws]) -> None:
    found = play(folder, make)
    assert [r.error for r in found.values()] == [None] * 4
    assert len({r.reward for r in found.values()}) == 4
    asked, counts = Draws.made.copy(), Counts()
    assert play(folder, make, counts=counts) == found
    assert Draws.made == asked  # nothing was made
    assert counts == {"replayed": 4 * 5}


def test_without_the_journal_it_would_be_another(folder: Path) -> None:
    assert play(folder, Draws) != play(folder.with_name("other"), Draws)


@pytest.mark.parametrize("stops_after", range(2, 17, 2))
@pytest.mark.parametrize("make", [Draws, Resumes, Chats])
def test_whenever_it_is_killed_no_finished_rollout_gets_another_answer(
    folder: Path, make: type[Draws], stops_after: int
) -> None:
    watched, finished = seen(make)
    play(folder, watched, stops_after=stops_after)
    before = list(finished)
    rollouts = play(folder, watched)
    again = play(folder, watched)
    assert rollouts == again
    assert [r.error for r in rollouts.values()] == [None] * 4
    uids = [uid for uid, _ in finished]
    assert sorted(uids) == [10, 11, 12, 13]  # whoever was finished before the kill was not asked again
    for uid, told in before:
        assert rollouts[uid].reward == sum(sum(told[: n + 1]) for n in range(4))


@pytest.mark.parametrize("stops_after", [6, 11])
def test_an_unfinished_rollout_goes_on_where_its_environment_can(folder: Path, stops_after: int) -> None:
    play(folder, Resumes, stops_after=stops_after)
    before = Draws.made.copy()
    rollouts = play(folder, Resumes)
    assert [r.error for r in rollouts.values()] == [None] * 4
    assert Draws.made["step"] == 4 * 4  # none is asked twice
    unfinished = [uid for uid in rollouts if 0 < before[f"step of {uid}"] < 4]
    assert unfinished
    assert [Draws.made[f"resume of {uid}"] for uid in unfinished] == [1] * len(unfinished)


def test_another_rollout_begins_anew(folder: Path) -> None:
    play(folder, Draws, stops_after=11)
    before = Draws.made.copy()
    assert 0 < before["step"] < 16
    play(folder, Draws)
    unfinished = sum(before[f"step of {uid}"] for uid in range(10, 14) if before[f"step of {uid}"] < 4)
    assert unfinished
    assert Draws.made["step"] == 16 + unfinished


def test_a_question_that_differs_is_told_and_asked_anew(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, asked = play(folder, Draws), Draws.made.copy()
    said = {
        "code": "rollout 0 of task 10, turn 0: the code or the arguments of the environment have changed",
        "reply": "rollout 0 of task 10, turn 1: the policy's reply has changed",
    }
    cases: list[tuple[str, dict[str, Any], int]] = [("reply", {"other": 1}, 4), ("code", {"what": "y"}, 0)]
    for kind, change, replayed in cases:
        caplog.clear()
        counts = Counts()
        with caplog.at_level(logging.WARNING, "whet"):
            found = play(folder, Draws, counts=counts, **change)
        assert [r.error for r in found.values()] == [None] * 4
        assert all(found[uid] != first[uid] for uid in found), kind
        assert caplog.text.count(said[kind]) == 1
        assert counts["replayed"] == replayed
        assert counts["asked_anew"] == 4  # of all, counted
    assert Draws.made["step"] == 3 * asked["step"]


def test_two_stories_of_a_rollout_are_not_mixed(folder: Path) -> None:
    """Of the second one the beginning is damaged; the policy always says the same."""

    def told(rollouts: dict[int, Rollout]) -> set[int]:
        return {token for r in rollouts.values() for token in r.strands[0].token_ids.tolist() if token > 1000}

    play(folder, Draws, other=None, stops_after=11)
    second = play(folder, Draws, other=None)
    path = max(folder.iterdir())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(b"{}\n" if json.loads(line)[1] == 0 else line for line in lines))
    begun = {json.loads(line)[0] for line in lines if json.loads(line)[1] == 0}
    assert begun
    third = play(folder, Draws, other=None)
    anew = [uid for uid in third if f"{key(rollout_key(3, uid, 0), 'env'):016x}-0" in begun]
    for uid in third:
        if uid in anew:
            assert not told({uid: third[uid]}) & told({uid: second[uid]})
        else:
            assert third[uid] == second[uid]


def test_an_evaluation_asks_anew_after_other_steps(folder: Path) -> None:
    first, second = (play(folder, Draws, place=(0, step), repeated=True) for step in (2, 4))
    assert first != second
    assert play(folder, Draws, place=(0, 4), repeated=True) == second
    assert play(folder, Draws, place=(0, 2), repeated=True) == first


def test_a_fault_that_was_retried_comes_again_and_the_last_one_is_asked_anew(folder: Path) -> None:
    Breaks.left = 2
    found = play(folder, Breaks, retries=2)
    assert found[11].error is None
    Breaks.left = 2  # it would break again
    assert play(folder, Breaks, retries=2) == found
    assert Breaks.left == 2
    other = folder.with_name("other")
    Breaks.left = 2
    failed = play(other, Breaks, retries=1)[11]
    assert failed.error == "env the network is down (after turn 2)"
    mended = play(other, Breaks, retries=1)
    assert mended[11].error is None  # the world is mended, and the run is not bound to its faults
    assert {uid: r for uid, r in mended.items() if uid != 11} == {
        uid: r for uid, r in play(other, Breaks, retries=1).items() if uid != 11
    }


def test_a_policy_that_answers_its_environment_otherwise_begins_the_rollout_anew(folder: Path) -> None:
    class Constant(Chats):
        async def first(self) -> list[Message]:
            return [Message("user", "9")]

    def replies(other: int) -> Callable[..., list[int]]:
        def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
            chat = len(token_ids) == 1  # a conversation of `world.chat`
            return [5 + (other if chat else 0), END]

        return say

    found = []
    for other in (0, 1, 1):
        journal, counts = Journal(folder), Counts()
        make = journaled(Constant, journal, "x", counts=counts)
        play_one = play_groups(
            ScriptedEngine(replies(other), end_token_ids=[END]), [task(10)], group_size=1,
            sampling=Sampling(max_tokens=20), seed=3, purpose="train", decode=str, end_token_ids=[END],
            timeout_s=60.0, codec=Numbers(), make_env=make,
        )  # fmt: skip
        (group,) = run(play_one)
        journal.close()
        found.append((group.rollouts[0], counts["asked_anew"]))
    (first, _), (second, anew), (third, again) = found
    assert (anew, again) == (1, 0)
    assert first != second == third
    forks = [s.token_ids.tolist()[1:] for s in second.strands[1:]]
    assert forks == [[6, END]] * len(forks)


# ---------------------------------------------------------------- tools, in hosts


def says(*calls: tuple[str, dict[str, Any]]) -> Message:
    made = tuple(ToolCall(name, arguments, f"c{n}") for n, (name, arguments) in enumerate(calls))
    return Message("assistant", "", tool_calls=made)


def test_tools_go_on_as_if_they_had_been_called() -> None:
    """Limits count what ran before, and nothing else."""

    def add(a: int) -> int:
        return a

    replies = [
        says(("add", {"a": 1}), ("add", {}), ("no", {})),
        Message("assistant", "", malformed="why"),
        says(("add", {"a": 2}), ("add", {"a": 3})),
        Message("assistant", "", malformed="why"),
    ]
    last = [says(("add", {"a": 4}), ("add", {"a": 5})), Message("assistant", "", malformed="why")]

    def env() -> ToolEnv:
        limits = Limits(max_calls=4, max_malformed=2)
        return ToolEnv(task(0), World(1, no_reply), tools=[tool_from_function(add)], limits=limits)

    async def story(first: ToolEnv, second: ToolEnv) -> tuple[list[EnvStep], list[EnvStep]]:
        steps = [await first.step(reply) for reply in replies]
        assert second.resume is not None
        await second.resume(list(zip(replies, steps)))
        return [await first.step(reply) for reply in last], [await second.step(reply) for reply in last]

    there, here = run(story(env(), env()))
    assert there == here
    assert [m.content for m in there[0].messages] == [
        "4",
        "Error: not called: all 4 calls of this episode are used up",
    ]


async def no_reply(*asked: Any) -> Message:
    raise NotImplementedError


def test_tools_with_a_state_cannot_go_on() -> None:
    assert ToolEnv(task(0), World(1, no_reply), tools=[], state=object()).resume is None


HOSTED = '''
import asyncio
import os
import time

from whet.envs.env import EnvStep
from whet.types import Message


class Draws:
    def __init__(self, task, world, log):
        self.uid, self.world, self.log, self.count = task.uid, world, log, 0

    def note(self, what):
        with open(self.log, "a") as file:
            file.write(f"{what} {self.uid}\\n")

    async def first(self):
        return [Message("user", "9")]

    async def step(self, reply):
        self.note("step")
        self.count += 1
        assert self.count == self.world.turn
        drawn = 2 + int.from_bytes(os.urandom(3), "little")
        return EnvStep([Message("user", str(drawn))], float(drawn), done=self.count == 4)


class Resumes(Draws):
    async def resume(self, turns):
        self.note("resume")
        self.count = len(turns)
        assert self.world.turn == self.count


class Plain(Draws):
    def resume(self, turns):
        self.note("resume")
        self.count = len(turns)


class Broken(Draws):
    async def resume(self, turns):
        raise ValueError("cannot go on")


class Late(Resumes):
    """One task cannot be taken over in its first attempt."""

    def __init__(self, task, world, log, late=None):
        super().__init__(task, world, log)
        self.late = self.uid == late and world.attempt == 0

    async def resume(self, turns):
        if self.late:
            await asyncio.sleep(1000)
        await super().resume(turns)


class LatePlain(Late):
    def resume(self, turns):
        if self.late:
            time.sleep(1000)
        self.note("resume")
        self.count = len(turns)
'''


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Callable[..., EnvHosts]]:
    (tmp_path / "hosted.py").write_text(HOSTED)
    made: list[EnvHosts] = []

    def start(name: str, timeout_s: float = 60.0, **more: Json) -> EnvHosts:
        given = {"log": str(tmp_path / "asked"), **more}
        cfg = EnvironmentConfig(make=f"{tmp_path}/hosted.py:{name}", arguments=given, timeout_s=timeout_s)
        made.append(EnvHosts(cfg))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.parametrize("name", ["Draws", "Resumes", "Plain", "Broken"])
def test_a_host_takes_over_where_another_one_has_ended(
    hosted: Callable[[str], EnvHosts], folder: Path, name: str
) -> None:
    first = hosted(name)
    play(folder, first.make, stops_after=11)
    first.close()
    asked = folder.with_name("asked")
    before = Counter(asked.read_text().splitlines())
    answered = {
        uid: turns_of(folder, uid) for uid in range(10, 14)
    }  # by a host that has ended: at least once
    unfinished = [uid for uid in range(10, 14) if 0 < answered[uid] < 4]
    assert unfinished
    found = play(folder, hosted(name).make)
    after = Counter(asked.read_text().splitlines())
    for uid in range(10, 14):
        went_on = uid in unfinished and name in ("Resumes", "Plain")
        assert after[f"resume {uid}"] == went_on
        if name == "Broken" and uid in unfinished:
            error = found[uid].error
            assert error is not None
            assert "raised ValueError: cannot go on" in error
            continue
        assert found[uid].error is None
        kept = answered[uid] if went_on or answered[uid] == 4 else 0
        assert after[f"step {uid}"] == before[f"step {uid}"] + 4 - kept


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Late", "env timeout: resume took more than 1 s (after turn "),
        ("LatePlain", "env timeout: resume took more than 1 s, and is still running (after turn "),
    ],
)
def test_a_take_over_that_hangs_is_a_fault_of_its_episode_and_a_retry_plays_it_anew(
    hosted: Callable[..., EnvHosts], folder: Path, name: str, said: str
) -> None:
    first = hosted(name)
    play(folder, first.make, stops_after=11)
    first.close()
    answered = {uid: turns_of(folder, uid) for uid in range(10, 14)}
    late, *others = [uid for uid in answered if 0 < answered[uid] < 4]
    asked = folder.with_name("asked")
    for retries in (0, 1):
        before = Counter(asked.read_text().splitlines())
        own = shutil.copytree(folder, folder.with_name(f"journal {retries}"))
        found = play(own, hosted(name, timeout_s=1.0, late=late).make, retries=retries)
        after = Counter(asked.read_text().splitlines())
        error = found.pop(late).error
        assert (error is None) if retries else str(error).startswith(said)
        assert after[f"step {late}"] - before[f"step {late}"] == 4 * retries
        assert [rollout.error for rollout in found.values()] == [None] * 3
        for uid in others:
            assert after[f"resume {uid}"] - before[f"resume {uid}"] == 1
            assert after[f"step {uid}"] - before[f"step {uid}"] == 4 - answered[uid]
    assert others


def turns_of(folder: Path, uid: int) -> int:
    """How many replies of a task the journal has answers to."""
    episode = f"{key(rollout_key(3, uid, 0), 'env'):016x}-0"
    lines = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    return len({turn for name, turn, *_ in lines if name == episode and turn})


# ---------------------------------------------------------------- from a config


def config(**rollout: Any) -> Config:
    env = {"make": "whet.envs.tool_env:tools", "arguments": {"functions": ["a.py:f"]}}
    mode = rollout.pop("mode", "both")
    return Config.model_validate(
        {
            "mode": mode,
            "model": {"path": "m"},
            "data": {"train": ({"path": "x.jsonl"},)},
            "rollout": {"env": env, **rollout},
        }
    )


def test_the_start_says_what_a_resume_repeats() -> None:
    assert "every finished rollout is repeated bit for bit" in promise(config())
    assert "as long as the policy's replies are the same" in promise(
        config(schedule="async", max_staleness=1)
    )
    assert "restarts under its name gets the same answers" in promise(config(mode="explore"))


def test_other_code_is_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("a.py").write_text("import b\ndef f(): ...\n")
    Path("b.py").write_text("")
    first = about(config())
    assert about(config(schedule="async", max_staleness=1)) == first
    Path("unrelated.py").write_text("1")
    assert about(config()) == first
    Path("b.py").write_text("1")
    assert about(config()) != first
