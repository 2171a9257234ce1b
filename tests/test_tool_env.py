"""An environment of tools: calls in parallel, their order and limits, malformed replies, classes with a state; and
tools that misbehave, in a real host process."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.config.schema import EnvironmentConfig, SourceConfig
from whet.data.columns import parse
from whet.envs import calls as calls_module
from whet.envs.arguments import section
from whet.envs.env import EnvFault, EnvStep, World
from whet.envs.hosts import EnvHosts
from whet.envs.marks import Marks
from whet.envs.tool_env import Limits, ToolEnv, tools
from whet.envs.tools import Priced, ToolError, tool_from_function, tools_from_object
from whet.envs.verl_tools import VerlArguments
from whet.guard.traces import written
from whet.rollout.episode import play_groups
from whet.rollout.limits import EpisodeLimits
from whet.rollout.scripted import ScriptedEngine
from whet.seeds import key
from whet.types import ConfigError, Json, Message, Rollout, Sampling, Task, ToolCall, ToolSpec, WhetError


async def no_reply(*asked: Any) -> Message:
    raise NotImplementedError


def task(uid: int = 0, **columns: Any) -> Task:
    prompt = (Message("user", "q"),)
    return Task(uid=uid, source="s", prompt=prompt, token_ids=(uid,), **columns)


def says(*calls: tuple[str, dict[str, Any]], content: str = "") -> Message:
    made = tuple(ToolCall(name, arguments, f"call_{n + 1}") for n, (name, arguments) in enumerate(calls))
    return Message("assistant", content, tool_calls=made)


def env_of(*functions: Callable[..., Any], of: Task | None = None, **limits: Any) -> ToolEnv:
    made = [tool_from_function(function) for function in functions]
    return ToolEnv(of or task(), World(1, no_reply), tools=made, limits=Limits(**limits))


def steps(env: ToolEnv, *replies: Message) -> list[EnvStep]:
    """What the environment answers, one reply after the other."""

    async def story() -> list[EnvStep]:
        async with asyncio.timeout(60):
            assert await env.first() == []
            found = []
            for reply in replies:
                env.world.begin_turn()
                found.append(await env.step(reply))
            await env.close()
            return found

    return asyncio.run(story())


def told(step: EnvStep) -> list[str]:
    return [message.content for message in step.messages]


def add(a: int, b: int) -> int:
    return a + b


def fails(why: str) -> None:
    raise ValueError(f"{why}\nand more")


# ---------------------------------------------------------------- calls


def test_results_follow_the_calls() -> None:
    first, last = steps(
        env_of(add, fails),
        says(("add", {"a": 1, "b": 2}), ("fails", {"why": "no"}), ("ad", {}), ("add", {"a": 1})),
        says(content="It is 3."),
    )
    assert first.messages == [
        Message("tool", "3", tool_call_id="call_1", name="add"),
        Message("tool", "Error: ValueError: no", tool_call_id="call_2", name="fails"),
        Message(
            "tool", "Error: there is no tool 'ad'; did you mean 'add'?; there are: add, fails",
            tool_call_id="call_3", name="ad",
        ),
        Message(
            "tool", "Error: add was not called: argument 'b' is missing; expected an integer",
            tool_call_id="call_4", name="add",
        ),
    ]  # fmt: skip
    assert first.parts == {
        "calls": 4.0, "calls_failed": 3.0, "results_cut": 0.0, "malformed": 0.0, "calls/add": 2.0, "calls/fails": 1.0,
    }  # fmt: skip
    assert (first.reward, first.done, first.fault) == (None, False, None)
    assert (last.messages, last.done, last.reward) == ([], True, None)
    assert last.parts == dict.fromkeys(first.parts, 0.0)


def test_calls_of_a_reply_run_at_the_same_time_and_are_told_in_their_order() -> None:
    met = threading.Barrier(3)
    arrived = asyncio.Event()

    def plain(n: int) -> str:
        met.wait(30)  # passes only if all three are here
        time.sleep(0.05 * (3 - n))
        return f"plain {n}"

    async def waits() -> str:
        await arrived.wait()
        return "waited"

    async def wakes() -> str:
        arrived.set()
        return "woke"

    calls = [("plain", {"n": n}) for n in range(3)]
    (step,) = steps(env_of(plain, waits, wakes), says(("waits", {}), *calls, ("wakes", {})))
    assert told(step) == ["waited", "plain 0", "plain 1", "plain 2", "woke"]


def test_what_is_beyond_the_limits_is_told_and_not_called() -> None:
    ran = []

    def note(n: int) -> str:
        ran.append(n)
        return "noted"

    calls = [says(*(("note", {"n": 10 * turn + n}) for n in range(3))) for turn in range(3)]
    found = steps(env_of(note, max_parallel_calls=2, max_calls=3), *calls)
    much = "Error: not called: a reply may have 2 calls, and this is number 3"
    used = "Error: not called: all 3 calls of this episode are used up"
    assert [told(step) for step in found] == [
        ["noted", "noted", much],
        ["noted", used, much],
        [used, used, much],
    ]
    assert sorted(ran) == [0, 1, 10]
    assert [step.parts["calls_failed"] for step in found] == [1.0, 2.0, 3.0]
    assert [step.parts["calls/note"] for step in found] == [3.0] * 3
    assert not any(step.done for step in found)


def test_calls_that_were_not_made_are_not_counted_against_the_limit() -> None:
    found = steps(
        env_of(add, max_calls=1), says(("add", {}), ("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 2}))
    )
    assert told(found[0])[1:] == ["2", "Error: not called: all 1 calls of this episode are used up"]


def test_long_results_are_cut_and_counted() -> None:
    def long(n: int) -> str:
        return "ab" * n

    (step,) = steps(env_of(long, result_chars=6, cut="left"), says(("long", {"n": 3}), ("long", {"n": 4})))
    assert told(step) == ["ababab", "[... 2 characters cut ...]ababab"]
    assert (step.parts["results_cut"], step.parts["calls_failed"]) == (1.0, 0.0)


def test_what_calls_cost_is_added_up() -> None:
    def ask(cost: float) -> Priced:
        return Priced({"x": 1}, cost)

    def free() -> str:
        return "x"

    first, second, third = steps(
        env_of(ask, free),
        says(("ask", {"cost": 0.5}), ("free", {}), ("ask", {"cost": 0.25})),
        says(("free", {}), ("ask", {"cost": "1"})),
        says(content="done"),
    )
    assert told(first) == ['{"x": 1}', "x", '{"x": 1}']
    assert first.parts["cost"] == 0.75
    assert "cost" not in second.parts | third.parts


def test_a_rollout_ends_when_it_has_cost_enough(opened: Callable[..., EnvHosts], file: Path) -> None:
    file.write_text(
        FUNCTIONS
        + "\n\nfrom whet.envs.tools import Priced\n\ndef pay(a: float) -> Priced:\n    return Priced(1, a)\n"
    )
    hosts = opened(functions=[f"{file}:pay"])
    scripts = {uid: [says(("pay", {"a": uid / 4}))] * 5 + [says(content="done")] for uid in (0, 1, 2, 4)}
    _, found = play(hosts, scripts, max_cost=1.0)
    assert {uid: (len(r.strands[0].turns), r.stop_reason) for uid, r in found.items()} == {
        0: (6, "done"), 1: (4, "cost"), 2: (2, "cost"), 4: (1, "cost"),
    }  # fmt: skip
    assert [r.reward_parts["env/cost"] for r in found.values()] == [0.0, 1.0, 1.0, 1.0]
    assert all(r.error is None for r in found.values())


def test_a_late_tool_is_told_and_the_others_are_not_held_up() -> None:
    cancelled = []
    end = threading.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    def stuck() -> None:
        end.wait(100)

    env = env_of(add, slow, stuck, tool_timeout_s=0.5)
    (step,) = steps(env, says(("slow", {}), ("stuck", {}), ("add", {"a": 1, "b": 1})))
    assert told(step) == [
        "Error: timeout: slow took more than 0.5 s", "Error: timeout: stuck took more than 0.5 s", "2",
    ]  # fmt: skip
    assert (step.parts["calls_failed"], step.fault, cancelled) == (2.0, None, [True])
    assert len(env.world.call_context.left) == 1  # the thread
    end.set()


def test_too_many_late_threads_are_a_fault() -> None:
    end = threading.Event()

    def stuck() -> None:
        end.wait(100)

    (step,) = steps(env_of(stuck, tool_timeout_s=0.2), says(*[("stuck", {})] * 8))
    assert step.fault == "8 tool calls exceeded their time limit and are still running"
    end.set()


def test_more_threads_than_there_are_places_wait_without_being_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MOST_AT_ONCE", 1)

    def brief() -> str:
        time.sleep(0.4)
        return "x"

    env = env_of(brief, tool_timeout_s=1.0)
    env.world.call_context.places = asyncio.Semaphore(1)
    (step,) = steps(env, says(*[("brief", {})] * 5))
    assert told(step) == ["x"] * 5  # two seconds in all, of which each has less than half a second


def test_what_a_tool_raises_ends_no_more_than_its_call() -> None:
    async def cancels() -> None:
        raise asyncio.CancelledError

    async def leaves() -> None:
        raise SystemExit(3)

    def interrupts() -> None:
        raise KeyboardInterrupt

    def stops() -> None:
        raise StopIteration("x")

    def told_so() -> None:
        raise ToolError("closed on Mondays")

    def returns_a_coroutine() -> Any:
        async def inner() -> str:
            return "inner"

        return inner()

    functions = [cancels, leaves, interrupts, stops, told_so, returns_a_coroutine]
    (step,) = steps(env_of(*functions), says(*((f.__name__, {}) for f in functions)))
    assert told(step) == [
        "Error: CancelledError", "Error: SystemExit: 3", "Error: KeyboardInterrupt", "Error: StopIteration: x",
        "Error: closed on Mondays", "inner",
    ]  # fmt: skip


def test_a_fault_of_the_world_in_a_tool_is_a_fault_of_the_episode() -> None:
    def down() -> None:
        raise EnvFault("the database is down")

    cancelled = []

    async def waits() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(EnvFault, match="the database is down"):
        steps(env_of(down, waits), says(("waits", {}), ("down", {}), ("waits", {})))
    assert cancelled == [True, True]


# ---------------------------------------------------------------- malformed replies


def bad(why: str = "no closing bracket") -> Message:
    return Message("assistant", "{", malformed=why)


def test_a_reply_that_cannot_be_read_is_told_so_often() -> None:
    env = env_of(add, max_malformed=2, malformed_penalty=0.25)
    found = steps(env, bad(), says(("add", {"a": 1, "b": 1})), bad("x" * 1000), bad())
    assert found[0].messages == [Message("user", "Your tool call could not be read: no closing bracket")]
    assert len(found[2].messages[0].content) < 400
    assert [step.done for step in found] == [False, False, False, True]
    assert [step.parts["malformed"] for step in found] == [1.0, 0.0, 1.0, 1.0]
    assert [step.reward for step in found] == [-0.25, None, -0.25, -0.25]
    assert (found[3].messages, found[3].parts["calls"]) == ([], 0.0)


def test_it_may_end_the_episode_at_once() -> None:
    (step,) = steps(env_of(add, malformed="end"), bad())
    assert (step.done, step.messages, step.reward) == (True, [], None)


# ---------------------------------------------------------------- tools of a task, and specs


def test_a_task_may_have_some_of_the_tools() -> None:
    spec = tool_from_function(add).spec
    env = env_of(add, fails, of=task(tools=(spec, ToolSpec("elsewhere"))))
    (step,) = steps(env, says(("add", {"a": 1, "b": 1}), ("fails", {"why": ""})))
    assert told(step) == ["2", "Error: there is no tool 'fails'; there are: add"]
    assert "calls/fails" not in step.parts


def test_a_tool_that_is_not_as_the_prompt_says_is_a_fault() -> None:
    with pytest.raises(EnvFault, match="tool 'add' differs from its description in the prompt"):
        steps(env_of(add, of=task(tools=(ToolSpec("add", "another one"),))))


# ---------------------------------------------------------------- a state


class Bank:
    """As TRL's environments are written."""

    def __init__(self) -> None:
        self.reward = 0.0
        self.seen: list[str] = []

    def reset(self, answer: int, name: str = "nobody") -> str:
        self.owed = answer
        return f"{name} owes {answer}"

    def pay(self, amount: int) -> str:
        """Pay.

        Args:
            amount: how much
        """
        before = list(self.seen)
        time.sleep(0.02)
        self.seen = [*before, str(amount)]  # loses a call that runs at the same time
        self.owed -= amount
        self.reward = 1.0 if self.owed == 0 else -0.5
        return ",".join(self.seen)

    async def look(self) -> int:
        return self.owed


def bank(state: Any, of: Task, **limits: Any) -> ToolEnv:
    made = list(tools_from_object(state).values())
    return ToolEnv(of, World(1, no_reply), tools=made, limits=Limits(**limits), state=state)


def test_calls_of_one_object_run_one_after_the_other_and_its_reward_is_that_of_the_turns() -> None:
    async def story() -> None:
        env = bank(Bank(), task(answer=9, extra={"name": "Ada", "other": 1}))
        assert await env.first() == [Message("user", "Ada owes 9")]
        pays = [("pay", {"amount": n}) for n in (1, 2, 3)]
        step = await env.step(says(*pays, ("look", {})))
        assert told(step) == ["1", "1,2", "1,2,3", "3"]
        assert (step.reward, step.done) == (-0.5, False)
        assert (await env.step(says(("look", {})))).reward == 0.0
        step = await env.step(says(("pay", {"amount": 3})))
        assert step.reward == 1.5  # from -0.5 to 1.0: the sum of all turns is the reward at the end
        step = await env.step(says(content="done"))
        assert (step.reward, step.done) == (0.0, True)

    asyncio.run(story())


def test_an_object_whose_call_goes_on_takes_no_other() -> None:
    end = threading.Event()

    class Stuck:
        def wait(self) -> None:
            end.wait(100)

        def go(self) -> str:
            return "gone"

    env = bank(Stuck(), task(), tool_timeout_s=0.3)
    found = steps(env, says(("go", {}), ("wait", {}), ("go", {})), says(("go", {})))
    running = "Error: not called: an earlier call of wait took too long and goes on"
    assert [told(step) for step in found] == [
        ["gone", "Error: timeout: wait took more than 0.3 s", running],
        [running],
    ]
    end.set()


class Rewards:
    def __init__(self, value: Any) -> None:
        self.value = value

    def go(self) -> str:
        return ""

    def reward(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_a_reward_may_be_a_method() -> None:
    state = Rewards(0.5)
    env = bank(state, task())
    assert asyncio.run(env.first()) == []
    state.value = 2
    assert asyncio.run(env.step(says(content="x"))).reward == 1.5


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (ValueError("no"), "reward raised ValueError: no"),
        (float("nan"), "nan as `reward` of Rewards"),
        ("1", "the text '1' as"),
    ],
)
def test_a_reward_that_is_none_breaks_the_episode(value: Any, said: str) -> None:
    with pytest.raises((EnvFault, ValueError), match=said):
        asyncio.run(bank(Rewards(value), task()).first())


def test_the_traceback_of_a_broken_episode_has_the_line_of_the_state_that_raised() -> None:
    with pytest.raises(EnvFault) as caught:
        asyncio.run(bank(Rewards(ValueError("no")), task()).first())
    assert "in reward\n    raise self.value\n" in written(caught.value)


def test_a_reset_that_fails_breaks_the_episode() -> None:
    class Needs(Bank):
        def reset(self, column: int) -> str:  # type: ignore[override]
            return ""

    with pytest.raises(
        EnvFault, match=r"reset raised TypeError: .* missing 1 required positional argument: 'column'"
    ):
        asyncio.run(bank(Needs(), task()).first())


# ---------------------------------------------------------------- from a config

FUNCTIONS = '''
import asyncio, ctypes, os, signal, subprocess, sys, threading, time


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: other
    """
    return a + b


def act(how: str) -> object:
    """Does what it is told to do."""
    return HOW[how]()


async def act_async(how: str) -> object:
    """The same on the event loop."""
    return HOW[how]()


def nested():
    value = []
    value.append(value)
    return value


def swallows():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass


def forks():
    if os.fork() == 0:
        os._exit(3)
    return "forked"


HOW = {
    "raises": lambda: [][1],
    "exits": lambda: sys.exit(4),
    "interrupts": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "prints": lambda: print("x" * 10**8) or "printed",
    "huge": lambda: "x" * 10**8,
    "nan": lambda: float("nan"),
    "bytes": lambda: b"x",
    "generator": lambda: (x for x in "ab"),
    "nested": nested,
    "surrogate": lambda: "a\\ud800",
    "os_exit": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    "kills": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(1000),
    "swallows": swallows,
    "forks": forks,
}


class Calculator:
    """With a memory."""

    def __init__(self, world=None):
        self.total, self.reward, self.world = 0, 0.0, world

    def reset(self, answer=0):
        self.goal = answer

    def put(self, x: int) -> int:
        """Add to the total.

        Args:
            x: what
        """
        self.total += x
        self.reward = float(self.total == self.goal)
        return self.total

    def draw(self) -> int:
        """A random number."""
        return self.world.rng.randrange(1000)
'''

END = 1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


class Scripts:
    """A codec and a policy: every message is a token, and the n-th reply to a task is the n-th of its script."""

    def __init__(self, scripts: dict[int, list[Message]]) -> None:
        self.replies = {
            10_000 + 100 * uid + n: m for uid, script in scripts.items() for n, m in enumerate(script)
        }
        self.told: dict[int, Message] = {}

    def of(self, kwargs: Mapping[str, Json]) -> Scripts:
        return self

    def encode_observation(
        self,
        existing: Sequence[int],
        conversation: Sequence[Message],
        count: int,
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        return self._told(conversation[-count:])

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        return [int(messages[0].content), *self._told(messages[1:])]  # by the task's number replies are found

    def _told(self, messages: Sequence[Message]) -> list[int]:
        tokens = [100_000 + key(0, json.dumps(m.to_json())) % 1_000_000 for m in messages]
        self.told.update(zip(tokens, messages))
        return tokens

    def parse_reply(
        self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = (), begun: str = ""
    ) -> Message:
        return self.replies[token_ids[0]]

    def say(self, token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        turn = sum(10_000 <= token < 100_000 for token in token_ids)
        return [10_000 + 100 * token_ids[0] + turn, END]

    def results(self, rollout: Rollout) -> list[str]:
        """What the policy was told."""
        return [self.told[t].content for t in rollout.strands[0].token_ids.tolist() if t in self.told]


@pytest.fixture
def opened(file: Path) -> Iterator[Callable[..., EnvHosts]]:
    made: list[EnvHosts] = []

    def start(timeout_s: float = 30.0, **arguments: Any) -> EnvHosts:
        arguments = {"functions": [f"{file}:{name}" for name in ("add", "act", "act_async")], **arguments}
        cfg = EnvironmentConfig(make="whet.envs.tool_env:tools", arguments=arguments, timeout_s=timeout_s)
        made.append(EnvHosts(cfg))
        return made[-1]

    yield start
    for each in made:
        each.close()


Played = tuple[Scripts, dict[int, Rollout]]


async def playing(hosts: EnvHosts, scripts: dict[int, list[Message]], **limits: Any) -> Played:
    codec = Scripts(scripts)
    tasks = [replace(task(uid, answer=5), prompt=(Message("user", str(uid)),)) for uid in scripts]
    async with asyncio.timeout(120):
        groups = await play_groups(
            ScriptedEngine(codec.say, end_token_ids=[END]), tasks, group_size=1,
            sampling=Sampling(max_tokens=40), seed=3, purpose="train", decode=str, end_token_ids=[END],
            timeout_s=100.0, codec=codec, make_env=hosts.make,
            limits=EpisodeLimits(observation_tokens=1000, **limits),
        )  # fmt: skip
    return codec, {group.task.uid: group.rollouts[0] for group in groups}


def play(hosts: EnvHosts, scripts: dict[int, list[Message]], **limits: Any) -> Played:
    return asyncio.run(playing(hosts, scripts, **limits))


def sums(uid: int) -> list[Message]:
    return [says(("add", {"a": uid, "b": n}), ("add", {"a": uid, "b": -n})) for n in (1, 2)] + [
        says(content="done")
    ]


def test_a_config_names_functions_and_a_class(opened: Callable[..., EnvHosts], file: Path) -> None:
    arguments = {"functions": [f"{file}:add"], "tool_class": f"{file}:Calculator", "max_calls": 5}
    assert [spec.name for spec in tools(task(), World(1, no_reply), **arguments).tools] == [
        "add",
        "put",
        "draw",
    ]
    hosts = opened(**arguments)
    script = [
        says(("put", {"x": 2}), ("put", {"x": 3}), ("draw", {})), says(("put", {"x": 1}), ("add", {"a": 1, "b": 1})),
        says(content="done"),
    ]  # fmt: skip
    codec, found = play(hosts, {7: script})
    rollout = found[7]
    drawn, rest = codec.results(rollout)[2], codec.results(rollout)
    assert rest == ["2", "5", drawn, "6", "2"]
    assert [turn.reward for turn in rollout.strands[0].turns] == [1.0, -1.0, 0.0]
    assert rollout.reward == 0.0
    assert rollout.reward_parts["env/calls"] == 5.0
    assert rollout.reward_parts["env/calls/put"] == 3.0
    again, found_again = play(hosts, {7: script})
    assert found_again[7] == rollout  # the drawn number, too: it is of the rollout
    assert again.results(found_again[7]) == rest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "names no tool; expected functions, tool_class, search or mcp"),
        ({"function": ["x:y"]}, r"function: unknown key; did you mean 'functions'\?"),
        ({"functions": "x:y"}, 'functions: got "x:y", expected a list'),
        ({"functions": [3]}, r"functions: got \[3\], expected a list \(each: text\)"),
        ({"tool_class": 3}, "tool_class: got 3, expected text or null"),
        ({"functions": ["no_such_module:y"]}, "cannot load 'no_such_module'"),
        ({"functions": ["json:dumps"]}, "cannot be passed by name"),
        ({"functions": ["FILE:add", "FILE:add"]}, "same name: add"),
        (
            {"functions": ["FILE:add"], "max_calls": 0},
            "max_calls: got 0, expected a whole number >= 1 or null",
        ),
        ({"functions": ["FILE:add"], "tool_timeout_s": 0}, "tool_timeout_s: got 0, expected a number > 0"),
        (
            {"functions": ["FILE:add"], "malformed_penalty": -1},
            "malformed_penalty: got -1, expected a number >= 0",
        ),
        (
            {"functions": ["FILE:add"], "cut": "centre"},
            "cut: got \"centre\", expected 'left', 'middle' or 'right'",
        ),
        ({"functions": ["FILE:add"], "malformed": "x"}, "malformed: got \"x\", expected 'tell' or 'end'"),
        (
            {"functions": ["FILE:add"], "result_chars": 10**5},
            "expected at most 524288 characters of .*=8 results",
        ),
        ({"tool_class": "FILE:add"}, "tool_class='.*'; expected a class"),
        ({"search": {"paths": "x"}}, r"search.paths: unknown key; did you mean 'path'\?"),
        ({"search": []}, r"search: got \[\], expected a section \(keys: path, "),
        ({"search": {}}, "search.path: must be given: text"),
        ({"search": {"path": "none.jsonl"}}, "^rollout.env.arguments.search.path: cannot read none.jsonl"),
        ({"mcp": [{"command": []}]}, "mcp.command is empty"),
        ({"mcp": {"command": ["x"]}}, r"mcp: got {\"command\".*, expected a list \(each: a section"),
        (
            {"mcp": [{"command": ["x"], "env": {"A": 1}}]},
            r'mcp\[0\].env: got {"A": 1}, expected names, each with text',
        ),
        ({"mcp": [{"command": ["x"], "end": {}}]}, r"mcp\[0\].end: unknown key; did you mean 'env'\?"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: Any, said: str, file: Path) -> None:
    arguments = json.loads(json.dumps(arguments).replace("FILE", str(file)))
    with pytest.raises(WhetError, match=said):
        tools.prepare(arguments)


def test_a_host_refuses_them_before_it_plays(opened: Callable[..., EnvHosts]) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.env.arguments.cut: got \"up\", expected 'left', 'middle' or 'right'"
    ):
        opened(cut="up")


PREPARED = """
from whet.envs.env import EnvStep


class Plain:
    def __init__(self, task, note): ...

    async def first(self):
        return []

    async def step(self, reply):
        return EnvStep()

    def prepare(self, arguments):
        raise ValueError("this is a matter of its own")


class Prepared(Plain):
    @classmethod
    def prepare(cls, arguments):
        with open(arguments["note"], "a") as file:
            file.write("x")
"""


@pytest.mark.parametrize(("name", "noted"), [("Plain", None), ("Prepared", "x")])
def test_a_factory_is_prepared_once_in_a_host(tmp_path: Path, name: str, noted: str | None) -> None:
    (tmp_path / "prepared.py").write_text(PREPARED)
    note = tmp_path / "note"
    cfg = EnvironmentConfig(make=f"{tmp_path}/prepared.py:{name}", arguments={"note": str(note)})
    hosts = EnvHosts(cfg)
    try:
        _, found = play(hosts, {uid: [says(content="x")] for uid in range(3)})
    finally:
        hosts.close()
    assert [rollout.error for rollout in found.values()] == [None] * 3
    assert (note.read_text() if note.exists() else None) == noted


# ---------------------------------------------------------------- tools that misbehave, in a host


TOLD = {
    "raises": "Error: IndexError: list index out of range",
    "exits": "Error: SystemExit: 4",
    "interrupts": "Error: KeyboardInterrupt",
    "prints": "printed",
    "huge": "x" * 8 + f"[... {10**8 - 16} characters cut ...]" + "x" * 8,
    "nan": "Error: ValueError: it returned float: Out of range float values are not JSON compliant",
    "bytes": "Error: ValueError: it returned bytes: bytes is not JSON; expected",
    "generator": "Error: ValueError: it returned generator: generator is not JSON; expected",
    "nested": "Error: ValueError: it returned list: Circular reference detected; expected",
    "surrogate": "a\\ud800",
    "forks": "forked",
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Rollout]:
    """The rollouts where no tool misbehaves."""
    path = tmp_path_factory.mktemp("tools") / "functions.py"
    path.write_text(FUNCTIONS)
    names = [f"{path}:{name}" for name in ("add", "act", "act_async")]
    hosts = EnvHosts(EnvironmentConfig(make="whet.envs.tool_env:tools", arguments={"functions": names}))
    try:
        return play(hosts, {uid: sums(uid) for uid in range(1, 6)})[1]
    finally:
        hosts.close()


@pytest.mark.parametrize("name", ["act", "act_async"])
def test_a_tool_that_misbehaves_costs_its_own_call(
    opened: Callable[..., EnvHosts], clean: dict[int, Rollout], name: str
) -> None:
    script = [says((name, {"how": how}), ("add", {"a": 1, "b": 1})) for how in TOLD] + [says(content="done")]
    hosts = opened(result_chars=16)
    codec, found = play(hosts, {9: script} | {uid: sums(uid) for uid in clean}, max_turns=20)
    hostile = found.pop(9)
    assert hostile.error is None
    results = codec.results(hostile)
    assert results[1::2] == ["2"] * len(TOLD)
    for how, result in zip(TOLD, results[::2]):
        assert result.startswith(TOLD[how]), how
    assert hostile.reward_parts["env/calls_failed"] == 7.0
    assert hostile.reward_parts["env/results_cut"] == 1.0
    assert found == clean
    assert hosts.restarts == 0


@pytest.mark.parametrize("how", ["os_exit", "segfault", "kills"])
def test_a_tool_that_ends_its_host_is_a_fault_of_its_own_episode(
    opened: Callable[..., EnvHosts], clean: dict[int, Rollout], how: str
) -> None:
    hosts = opened()
    _, found = play(hosts, {9: [says(("act", {"how": how}))]} | {uid: sums(uid) for uid in clean})
    failed = found.pop(9)
    assert failed.error is not None
    assert failed.error.startswith("env crashed: its host ended")
    assert (failed.reward, failed.finish_reason) == (None, "abort")
    assert found == clean
    assert hosts.restarts == 1  # it is known at once which episode it was, as its thread is marked


@pytest.mark.parametrize("how", ["hangs", "swallows"])
def test_a_plain_tool_that_hangs_is_told_and_its_host_is_replaced(
    opened: Callable[..., EnvHosts], clean: dict[int, Rollout], how: str
) -> None:
    hosts = opened(tool_timeout_s=1.0)
    script = [says(("act", {"how": how}), ("add", {"a": 1, "b": 1})), says(content="done")]

    async def story() -> tuple[Played, Played]:
        first = await playing(hosts, {9: script} | {uid: sums(uid) for uid in clean})
        assert hosts.restarts == 0
        async with asyncio.timeout(60):
            while hosts.restarts == 0:  # the thread has a while to end
                await asyncio.sleep(0.05)
        return first, await playing(hosts, {uid: sums(uid) for uid in clean})

    (codec, found), (_, again) = asyncio.run(story())
    hung = found.pop(9)
    assert (hung.error, codec.results(hung)) == (None, ["Error: timeout: act took more than 1 s", "2"])
    assert found == again == clean
    assert hosts.restarts == 1


def test_an_async_tool_that_blocks_ends_its_own_episode(
    opened: Callable[..., EnvHosts], clean: dict[int, Rollout]
) -> None:
    hosts = opened(timeout_s=2.0, tool_timeout_s=1.0)
    _, found = play(hosts, {9: [says(("act_async", {"how": "hangs"}))]} | {uid: sums(uid) for uid in clean})
    error = found.pop(9).error
    assert error is not None
    assert error.startswith("env timeout: code in an async method held the event loop for more than 2 s")
    assert found == clean


def test_marks_count_what_runs(tmp_path: Path) -> None:
    path = str(tmp_path / "marks")
    Marks.create(path)
    marks = Marks(path)
    slot = marks.take()
    with marks.running(slot, 5):
        with marks.running(slot, 5):
            pass
        assert Marks.read(path) == {5}  # one of two has ended
        marks.give(slot)
        assert Marks.read(path) == {5}
        assert marks.take() != slot  # its code goes on
    assert Marks.read(path) == set()
    assert marks.take() == slot


# ---------------------------------------------------------------- the page


def test_the_page_says_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs" / "tools.md").read_text()
    code, config, schema, row, of_verl = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)
    source = SourceConfig(path="rows.jsonl", messages="messages")
    read = parse(json.loads(row), source, name="rows", chat=None, where="row 1")
    assert (read.response, read.tools[0].name) == ("1.5 euros", "price")
    assert read.chat_template_kwargs == {"enable_thinking": True}
    assert section(VerlArguments, yaml.safe_load(of_verl)["rollout"]["env"]["arguments"])
    monkeypatch.chdir(tmp_path)
    Path("shop.py").write_text(code)
    arguments = yaml.safe_load(config)["rollout"]["env"]["arguments"]
    (spec,) = tools(task(), World(1, no_reply), **arguments).tools
    assert spec.parameters == json.loads(schema)
    rows = re.findall(r"^\| `(\w+)\((.*)\)` \| `(.*)` \|$", page, re.MULTILINE)
    assert len(rows) == 3
    asked = [(name, dict(re.findall(r"(\w+)=([^,]+)", given))) for name, given, _ in rows]
    reply = says(*((name, {key: json.loads(value) for key, value in given.items()}) for name, given in asked))
    (step,) = steps(tools(task(), World(1, no_reply), **arguments), reply)
    assert told(step) == [answer for _, _, answer in rows]
    names = set(re.findall(r"`(\w+)`", page)) & {*Limits.model_fields}
    assert {"cut", "malformed"} | names == {*Limits.model_fields}
