"""An environment that runs the tool calls of a reply and answers with their results. A reply without calls ends it.

`rollout.env.make: whet.envs.tool_env:tools` with the arguments of `ToolArguments`; docs/tools.md has examples.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import model_validator

from whet.config.environments import AT
from whet.config.sections.base import Above0, NonNegative, Positive, Section
from whet.config.sections.rollout import TOOL_TIMEOUT_S
from whet.envs.arguments import section
from whet.envs.calls import together
from whet.envs.env import MOST_TEXT, EnvFault, EnvStep, World
from whet.envs.mcp import McpServer, tools_of
from whet.envs.search import Documents, build, search_tool
from whet.envs.tools import (
    Priced,
    Side,
    Tool,
    by_name,
    error_text,
    fit,
    load_function,
    render,
    specs_of_class,
    tools_from_object,
)
from whet.guard.foreign import describe, number, words
from whet.tables import load_object, near
from whet.types import ConfigError, Json, Message, StopReason, Task, ToolCall

MOST_LEFT = 8
"""Calls of one episode that are late and go on, before the episode ends as a fault."""
MOST_SHOWN = 300
"""Characters of a reason, a name or a list of errors that the policy is told."""


class Limits(Section):
    """What bounds the calls of an episode."""

    max_parallel_calls: Positive = 8
    """Calls of one reply that run; the others are answered with an error."""
    max_calls: Positive | None = None
    """Calls of an episode that run; the others are answered with an error. None: no limit."""
    tool_timeout_s: Above0 = TOOL_TIMEOUT_S
    """Longest time of a call. `rollout.env.timeout_s` bounds all calls of a reply together."""
    result_chars: Positive = 4096
    """Characters of a result that the policy is told."""
    cut: Side = "middle"
    """Where a longer result is cut: left (its beginning is lost), middle or right (its end is lost)."""
    malformed: Literal["tell", "end"] = "tell"
    """What follows a reply whose calls cannot be read: the policy is told why, or the episode ends."""
    max_malformed: Positive = 3
    """Such replies in a row, with the last of which the episode ends."""
    malformed_penalty: NonNegative = 0.0
    """Taken from the reward for each of them."""

    @model_validator(mode="after")
    def _fits(self) -> Limits:
        if (told := self.result_chars * self.max_parallel_calls) > MOST_TEXT // 2:
            raise ConfigError(
                f"{AT}.result_chars={self.result_chars}; expected at most {MOST_TEXT // 2} characters of "
                f"max_parallel_calls={self.max_parallel_calls} results; these are {told}"
            )
        return self


@dataclass(frozen=True)
class Answer:
    """What the policy is told of one call."""

    text: str
    failed: bool = True
    cut: bool = False
    cost: float | None = None


def result_messages(calls: Sequence[ToolCall], answers: Sequence[Answer]) -> list[Message]:
    """The messages with the answers to these calls."""
    return [
        Message("tool", answer.text, tool_call_id=call.id or None, name=call.name)
        for call, answer in zip(calls, answers)
    ]


def not_there(name: str, named: Collection[str]) -> str:
    """What the policy is told of a call of a tool that it does not have. named: those that it has."""
    there = f"{near(name, named)}; there are: {', '.join(named) or 'none'}"
    return words(f"Error: there is no tool {name[:64]!r}{there}", MOST_SHOWN)


class ToolEnv:
    """The environment of one rollout."""

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        tools: Sequence[Tool],
        limits: Limits | None = None,
        state: object = None,
    ) -> None:
        """tools: if the task has tools, those of them that it names. state: an object with `reset(**columns)`, called
        before the first reply, or `reward`, a number or a method, read after every turn; both are optional."""
        self.task, self.world, self.limits, self.state = task, world, limits or Limits(), state
        self.named = by_name(list(tools))
        if told := {spec.name for spec in task.tools}:
            self.named = {name: tool for name, tool in self.named.items() if name in told}
        self.tools = [tool.spec for tool in self.named.values()]
        """What the policy is told of."""
        self.calls = 0
        """That have run."""
        self.malformed = 0
        """Malformed replies since the last one that was not."""
        self.reward = 0.0
        """The last one that `state` told."""
        self._locks: dict[int, asyncio.Lock] = {}
        self._broken: dict[int, str] = {}
        """Owners of tools one of whose calls goes on, with the name of the tool."""
        self.resume = self._resume if state is None else None
        """What a state remembers of calls, only the calls can bring about."""

    async def first(self) -> list[Message]:
        """What `reset` of the state tells."""
        if changed := self._changed():
            raise EnvFault(changed)
        told = None
        if (reset := getattr(self.state, "reset", None)) is not None:
            told = await self._ask("reset", partial(reset, **_accepted(reset, _row(self.task))))
        if not isinstance(told, str | None):
            raise EnvFault(f"reset returned {type(told).__name__}; expected a text or None")
        self.reward = await self._state_reward()
        return [Message("user", fit(told, self.limits.result_chars, self.limits.cut)[0])] if told else []

    async def step(self, reply: Message) -> EnvStep:
        """Results in the order of the calls."""
        if reply.malformed is not None:
            return await self._malformed(reply.malformed)
        self.malformed = 0
        answers = await together(self._answer(n, call) for n, call in enumerate(reply.tool_calls))
        if len(self.world.call_context.left) >= MOST_LEFT:
            return EnvStep(fault=f"{MOST_LEFT} tool calls exceeded their time limit and are still running")
        messages = result_messages(reply.tool_calls, answers)
        return await self._step(messages, reply.tool_calls, answers, done=not messages)

    async def _resume(self, turns: Sequence[tuple[Message, EnvStep]]) -> None:
        """Count what was called, as `step` has."""
        for reply, _ in turns:
            self.malformed = 0 if reply.malformed is None else self.malformed + 1
            for place, call in enumerate(reply.tool_calls):
                self._refused(place, call)

    async def close(self) -> None:
        """`close` of the state, which is optional."""
        if callable(close := getattr(self.state, "close", None)):
            await self._ask("close", close)

    # -- one reply

    async def _malformed(self, why: str) -> EnvStep:
        self.malformed += 1
        done = self.limits.malformed == "end" or self.malformed >= self.limits.max_malformed
        told = f"Your tool call could not be read: {words(why, MOST_SHOWN)}"
        return await self._step([] if done else [Message("user", told)], (), (), done=done, malformed=1)

    async def _step(
        self,
        messages: list[Message],
        calls: Sequence[ToolCall],
        answers: Sequence[Answer],
        *,
        done: bool,
        malformed: int = 0,
    ) -> EnvStep:
        names = [call.name for call in calls]
        parts: dict[str, float] = {
            "calls": len(calls),
            "calls_failed": sum(answer.failed for answer in answers),
            "results_cut": sum(answer.cut for answer in answers),
            "malformed": malformed,
            **{f"calls/{name}": names.count(name) for name in self.named},
        }
        if costs := [answer.cost for answer in answers if answer.cost is not None]:
            parts["cost"] = sum(costs)
        before, self.reward = self.reward, await self._state_reward()
        has_reward = getattr(self.state, "reward", None) is not None
        penalty = malformed * self.limits.malformed_penalty
        reward = self.reward - before - penalty if has_reward or penalty else None
        stop: StopReason | None = "malformed" if done and malformed else None
        return EnvStep(messages, reward, {k: float(value) for k, value in parts.items()}, done, stop=stop)

    def _refused(self, place: int, call: ToolCall) -> Answer | None:
        """Of the call at this place in its reply, from 0, if it is not to run; else it is counted."""
        tool = self.named.get(call.name)
        if place >= self.limits.max_parallel_calls:
            most = self.limits.max_parallel_calls
            return Answer(f"Error: not called: a reply may have {most} calls, and this is number {place + 1}")
        if self.limits.max_calls is not None and self.calls >= self.limits.max_calls:
            return Answer(f"Error: not called: all {self.limits.max_calls} calls of this episode are used up")
        if tool is None:
            return Answer(not_there(call.name, self.named))
        if wrong := tool.wrong(call.arguments):
            return Answer(f"Error: {call.name} was not called: {words(wrong, MOST_SHOWN)}")
        self.calls += 1
        return None

    async def _answer(self, place: int, call: ToolCall) -> Answer:
        """Of the call at this place in its reply. What stands before the first `await` happens in the order of the
        calls."""
        if (refused := self._refused(place, call)) is not None:
            return refused
        tool = self.named[call.name]
        if tool.owner is None:
            return await self._run(tool, call)
        async with self._locks.setdefault(id(tool.owner), asyncio.Lock()):  # waits in the order of the calls
            if running := self._broken.get(id(tool.owner)):
                return Answer(f"Error: not called: an earlier call of {running} took too long and goes on")
            return await self._run(tool, call)

    async def _run(self, tool: Tool, call: ToolCall) -> Answer:
        limit_s = self.limits.tool_timeout_s
        if tool.before is not None:
            await tool.before()
        outcome = await self.world.run(partial(tool.call, call.arguments), limit_s, is_async=tool.is_async)
        if outcome.late:
            if tool.owner is not None:
                self._broken[id(tool.owner)] = call.name
            return Answer(f"Error: timeout: {call.name} took more than {limit_s:g} s")
        if isinstance(outcome.error, EnvFault | MemoryError):
            raise outcome.error
        if outcome.error is not None:
            return Answer(error_text(outcome.error))
        value, cost = outcome.value, None
        try:
            if isinstance(value, Priced):
                value, cost = value.value, number(value.cost, " as Priced.cost")
            text, cut = fit(render(value), self.limits.result_chars, self.limits.cut)
        except Exception as error:  # noqa: BLE001  a value is foreign code, too: its methods
            return Answer(error_text(error))
        return Answer(text, failed=False, cut=cut, cost=cost)

    # -- the state

    def _changed(self) -> str | None:
        """How the tools differ from those that the prompt tells of."""
        for spec in self.task.tools:
            tool = self.named.get(spec.name)
            if tool is not None and tool.spec != spec:
                return f"tool {spec.name!r} differs from its description in the prompt: {tool.spec.to_json()}"
        return None

    async def _state_reward(self) -> float:
        value = getattr(self.state, "reward", None)
        if callable(value):
            value = await self._ask("reward", value)
        return 0.0 if value is None else number(value, f" as `reward` of {type(self.state).__name__}")

    async def _ask(self, name: str, method: Callable[..., Any]) -> Any:
        """What a method of the state returns. EnvFault if it fails."""
        bare = method.func if isinstance(method, partial) else method
        limit_s = self.limits.tool_timeout_s
        outcome = await self.world.run(method, limit_s, is_async=inspect.iscoroutinefunction(bare))
        if outcome.late:
            raise EnvFault(f"{name} took more than {limit_s:g} s")
        if outcome.error is not None:
            raise EnvFault(f"{name} raised {describe(outcome.error)}") from outcome.error
        return outcome.value


def _row(task: Task) -> dict[str, Json]:
    """The columns of a task."""
    prompt = task.prompt if isinstance(task.prompt, str) else [m.to_json() for m in task.prompt]
    return {"source": task.source, "prompt": prompt, "answer": task.answer, **task.extra}


def _accepted(function: Callable[..., Any], row: Mapping[str, Json]) -> dict[str, Json]:
    """Those of the columns that a function takes; all, if it has `**`."""
    parameters = inspect.signature(function).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in row.items() if every or name in parameters}


# ---------------------------------------------------------------- from a config


class ToolArguments(Limits):
    """`rollout.env.arguments` of `tools`: where tools come from, at least one of them, and the limits."""

    functions: tuple[str, ...] = ()
    """'package.module:name' or 'path/to/file.py:name'."""
    tool_class: str | None = None
    """The same of a class, whose public methods are tools. It is called without arguments for each rollout, or as
    C(world=world)."""
    search: Documents | None = None
    """A search over documents."""
    mcp: tuple[McpServer, ...] = ()
    """MCP servers."""

    @model_validator(mode="after")
    def _named(self) -> ToolArguments:
        if not self.functions and not self.mcp and self.tool_class is None and self.search is None:
            raise ConfigError(
                f"{AT} of whet.envs.tool_env:tools names no tool; expected functions, tool_class, search or mcp"
            )
        return self


class ToolEnvs:
    """Makes environments with the tools that a config names. `tools` is the one there is: a `Factory`."""

    def __call__(self, task: Task, world: World, **arguments: Json) -> ToolEnv:
        """The environment of one rollout."""
        asked = section(ToolArguments, arguments)
        found = _shared(asked)
        state = None
        if asked.tool_class is not None:
            cls = load_object(asked.tool_class, what=f"{AT}.tool_class")
            state = cls(**_accepted(cls, {"world": world}))
            found += tools_from_object(state).values()
        return ToolEnv(task, world, tools=found, limits=asked, state=state)

    def prepare(self, arguments: Mapping[str, Json]) -> None:
        """Check everything, build the index, and ask MCP servers for their tools. ConfigError for arguments that cannot
        be."""
        asked = section(ToolArguments, arguments)
        specs = [tool.spec for tool in by_name(_shared(asked)).values()]
        if asked.tool_class is not None:
            cls = load_object(asked.tool_class, what=f"{AT}.tool_class")
            if not isinstance(cls, type):
                raise ConfigError(f"{AT}.tool_class={asked.tool_class!r}; expected a class")
            specs += specs_of_class(cls)
        by_name([Tool(spec, render) for spec in specs])
        if asked.search is not None:
            build(asked.search)


def _shared(asked: ToolArguments) -> list[Tool]:
    """The tools that do not belong to one rollout."""
    found = [load_function(name) for name in asked.functions]
    if asked.search is not None:
        found.append(search_tool(asked.search))
    return found + [tool for server in asked.mcp for tool in tools_of(server)]


tools = ToolEnvs()
