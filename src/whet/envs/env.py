"""The interface to environments. An Env is single-use: created for one rollout, then closed; no reset.

A user's environment is a callable, `make(task, **arguments)` or `make(task, world, **arguments)`, which returns an
object with these methods. Each may be `async`, or plain and then runs in a thread of the episode. `close` may be left
out.
"""

from __future__ import annotations

import inspect
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, get_args

from whet.envs.calls import CallContext, Ended, run
from whet.guard.foreign import is_number, number
from whet.guard.program import ProgramOutcome
from whet.tables import near
from whet.types import ConfigError, Json, Message, StopReason, Task, ToolCall, ToolSpec, WhetError

MOST_TEXT = 2**20
"""Characters of all messages of one call."""
MOST_PARTS = 256
"""Entries of `EnvStep.parts`."""
CHAT_KEYS = ("max_tokens", "stop")
"""Sampling settings of `World.chat`: those that leave the distribution as it is trained."""


class EnvFault(Exception):
    """The environment failed, through no fault of the policy: the rollout is retried, then it is unscored."""


class EnvRestarted(Exception):
    """The process of the environment has ended, and another episode may be the cause: this one begins anew."""

    def __init__(self, why: str, *, suspect: bool) -> None:
        """suspect: it may be the cause itself."""
        super().__init__(why)
        self.suspect = suspect


class EnvBroken(WhetError):
    """No environment can be played any more: the run ends."""


@dataclass(frozen=True)
class EnvStep:
    """The environment's answer to a reply of the policy."""

    messages: list[Message] = field(default_factory=list)
    """Messages that the policy reads before its next reply."""
    reward: float | None = None
    """For this turn; None: none. The reward of the rollout is the sum over its turns, plus that of the config's
    `rewards`."""
    parts: dict[str, float] = field(default_factory=dict)
    """Further numbers to record, by name; a rollout has their sums. `rollout.env.max_cost` limits the sum of `cost`, in
    any unit."""
    done: bool | None = None
    """Whether the episode is over. Required with `messages` or a `history`; without them it is True."""
    fault: str | None = None
    """What failed in the environment: the rollout is retried (`rollout.retries`), then unscored, never scored 0."""
    stop: StopReason | None = None
    """Why the episode is over, if not because it is done: a limit of the environment itself. Only with `done`."""
    history: list[Message] | None = None
    """Replaces the whole conversation from here on, the prompt included; `messages` follow it."""
    state: Json = None
    """State that rewards may read: a JSON value. The last one of the episode counts."""

    def __post_init__(self) -> None:
        if self.done is None and not self.messages and self.history is None:
            object.__setattr__(self, "done", True)


class Env(Protocol):
    """What the policy talks to in one rollout, made for it alone. Methods may be plain; each then runs in a thread. An
    exception fails the rollout: it is retried (`rollout.retries`), then unscored, as with `EnvStep.fault`.

    An object may also have `tools`, a list of ToolSpec: what the policy may call, read after `first`. It may also
    have `async def resume(self, turns: list[tuple[Message, EnvStep]]) -> None`, called after `first`: continue after
    these replies, which were answered by these steps, without playing them again (`envs.journaled`)."""

    async def first(self) -> list[Message]:
        """Messages that follow the prompt, before the first reply."""

    async def step(self, reply: Message) -> EnvStep:
        """The answer to one reply."""

    async def close(self) -> None:
        """The episode is over, however it ended. May be missing."""


@dataclass(frozen=True, kw_only=True)
class ScoreCall:
    """A reply that the run's rewards shall score; see `World.score`."""

    text: str
    messages: tuple[Message, ...] = ()
    reward: str | None = None
    prompt: str | tuple[Message, ...] | None = None
    answer: Json = None


@dataclass(frozen=True)
class ReplyScore:
    """What the rewards say of a reply."""

    score: float
    """The value of the reward that was asked, or the weighted sum of all."""
    parts: dict[str, float] = field(default_factory=dict)
    """The value of each reward by its name, and its further numbers as NAME/KEY."""


@dataclass(frozen=True, kw_only=True)
class ProgramCall:
    """A program that the run shall run; see `World.program`."""

    code: str
    stdin: str = ""
    limit_s: float = 10.0
    memory_mb: int = 1024


class Work(Protocol):
    """What the run does for the environment of one rollout, in processes of its own. It gets what `World.score` and
    `World.program` are given, as JSON: for `as_score_call` and `as_program_call`."""

    def score(self, given: Json) -> Awaitable[ReplyScore]: ...
    def program(self, given: Json) -> Awaitable[ProgramOutcome]: ...


MakeWork = Callable[[Task, int], Work]
"""(task, number of the rollout in its group)"""
Path = tuple[int, ...]
"""Names a fork of a rollout: (turn, number of the call in this turn)."""
Ask = Callable[[Path, list[Message], Mapping[str, Json]], Awaitable[Message]]
"""Samples a reply of the policy to a conversation."""


class World:
    """What an environment may use of the run.

    rng: random numbers of the rollout, the same in every run with this seed.
    key: the 64-bit number from which rng is seeded.
    alone: the episode gets a process of its own.
    index: number of the rollout in its group.
    attempt: how often the rollout has failed before.
    """

    def __init__(
        self,
        key: int,
        ask: Ask,
        *,
        work: Work | None = None,
        alone: bool = False,
        index: int = 0,
        attempt: int = 0,
    ) -> None:
        """ask, work: what `chat`, and `score` and `program`, call."""
        self.key, self.ask, self.alone, self.index, self.attempt = key, ask, alone, index, attempt
        self.work = work
        self.rng = random.Random(key)
        self.turn = 0
        """Number of the reply that is being answered, from 1; 0 in `first`."""
        self.calls = 0
        """Of `chat` in this turn."""
        self.call_context = CallContext(time.monotonic, nullcontext, lambda waits: waits)

    def run(self, function: Callable[[], Any], limit_s: float, *, is_async: bool = False) -> Awaitable[Ended]:
        """Run foreign code of the episode, such as a tool: an async function here, a plain one in a thread of its own.

        Returns its value, its exception, or that it took more than limit_s seconds. A late async function is cancelled.
        A thread cannot be cancelled: it keeps running, and if it still runs when the episode is over, the process gets
        no more episodes.
        """
        return run(self.call_context, function, limit_s, is_async=is_async)

    def chat(self, messages: list[Message], **sampling: Json) -> Awaitable[Message]:
        """Sample a reply of the policy to a separate conversation, which is trained with the rollout's reward.

        In an async method the result must be awaited; in a plain method `chat` blocks and returns the message. The
        random numbers depend on the turn and the order of the calls in it.

        sampling: max_tokens, stop. ValueError for another setting.
        """
        if unknown := sorted(sampling.keys() - set(CHAT_KEYS)):
            raise ValueError(f"world.chat got {', '.join(unknown)}; expected {', '.join(CHAT_KEYS)}")
        self.calls += 1
        return self.ask((self.turn, self.calls), as_messages(messages, "messages of world.chat"), sampling)

    def score(
        self,
        reply: str | Message | list[Message],
        *,
        reward: str | None = None,
        prompt: str | list[Message] | None = None,
        answer: Json = None,
    ) -> Awaitable[ReplyScore]:
        """Ask the rewards of the config for the score of a reply: a text, a message, or the messages after the prompt.

        Rewards get the row's columns, and no tokens. They run in their own processes, with the limits of
        `reward_workers`. RuntimeError if one fails or hangs, or there is none. In a plain method `score` blocks, as
        `chat` does.

        reward: the name of one reward, whatever its weight; its value is the score. None: all rewards of the task; the
        score is their weighted sum.
        prompt, answer: replace those of the task.
        """
        asked = None if prompt is None else _unlisted(prompt, "world.score prompt")
        given = {
            "reply": _unlisted(reply, "world.score"),
            "reward": reward,
            "prompt": asked,
            "answer": answer,
        }
        as_score_call(given)
        return work_of(self).score(given)

    def program(
        self, code: str, *, stdin: str = "", limit_s: float = 10.0, memory_mb: int = 1024
    ) -> Awaitable[ProgramOutcome]:
        """Run untrusted Python code, such as the policy's, in a sandbox: it computes and prints, reads no file but
        Python's own, writes none, and starts no program, process or connection.

        RuntimeError if this system has no sandbox. In a plain method `program` blocks, as `chat` does.

        limit_s: longest run, in seconds.
        memory_mb: address space, Python's own included; at most `reward_workers.memory_mb`.
        """
        given = {"code": code, "stdin": stdin, "limit_s": limit_s, "memory_mb": memory_mb}
        as_program_call(given)
        return work_of(self).program(given)

    def begin_turn(self) -> None:
        """A reply is being answered."""
        self.turn, self.calls = self.turn + 1, 0


def work_of(world: World) -> Work:
    """RuntimeError for a world without a run."""
    if world.work is None:
        raise RuntimeError("this world belongs to no run, so it has no rewards and runs no programs")
    return world.work


MakeEnv = Callable[[Task, World], Env]


class Factory(Protocol):
    """What `rollout.env.make` may have beside `__call__`: methods of a callable object, or class methods of a class. A
    plain function has none of them."""

    def prepare(self, arguments: Mapping[str, Json]) -> None:
        """Called once in each host, before its first environment is made: for what takes long."""


def prepare(make: object, arguments: Mapping[str, Json]) -> None:
    """Call the `prepare` of a `Factory`, if it has one. What a class has for its environments is none."""
    if inspect.ismethod(method := getattr(make, "prepare", None)):
        method(arguments)


def bound(
    make: Callable[..., Any], task: Task, world: World, arguments: Mapping[str, Json]
) -> Callable[[], Any]:
    """`make(task, world, **arguments)`, or without the world where it does not take one."""
    takes_world = "world" in inspect.signature(make).parameters
    return partial(make, *((task, world) if takes_world else (task,)), **arguments)


def check_arguments(make: Callable[..., Any], arguments: Mapping[str, Json]) -> None:
    """ConfigError if `make(task, world, **arguments)` cannot be called, or makes no environment for sure."""
    if inspect.isbuiltin(make):
        raise ConfigError(
            f"rollout.env.make: {make.__name__} is a built-in function of Python, which makes no environment; expected "
            "a function make(task, **arguments) or make(task, world, **arguments) that returns an Env"
        )
    parameters = inspect.signature(make).parameters
    free = [name for name in list(parameters)[1:] if name != "world"]
    variadic = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in arguments:
        if name not in free and not variadic:
            raise ConfigError(
                f"rollout.env.arguments: {name!r} is not an argument of make{near(name, free)}; it has: "
                f"{', '.join(free) or 'none'}"
            )
    try:
        world = {"world": None} if "world" in parameters else {}
        inspect.signature(make).bind(None, **world, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"rollout.env.make takes ({', '.join(parameters)}): {error}; expected make(task, **arguments) or "
            "make(task, world, **arguments), with a value in rollout.env.arguments for what has no default"
        ) from None


# ---------------------------------------------------------------- checks of what foreign code returns


def as_messages(value: object, what: str) -> list[Message]:
    """A list of messages of bounded length. ValueError says what else it was."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{what}: {type(value).__name__}; expected a list of Message")
    for message in value:
        if not isinstance(message, Message):
            raise ValueError(f"{what}: {type(message).__name__} in the list; expected Message")
        if not isinstance(message.role, str) or not isinstance(message.content, str):
            raise ValueError(f"{what}: a Message whose role or content is not a text")
        if wrong := _wrong_part(message):
            raise ValueError(f"{what}: a Message whose {wrong}")
    if (size := sum(len(m.role) + len(m.said) for m in value)) > MOST_TEXT:
        raise ValueError(f"{what}: {size} characters; at most {MOST_TEXT} are allowed")
    return list(value)


def _done(step: EnvStep) -> bool:
    if step.done is None:
        raise ValueError(
            "EnvStep with messages or a history, but without done: give done=False if the policy replies to them, "
            "done=True if the episode is over"
        )
    return step.done


def _stop(step: EnvStep) -> StopReason | None:
    if step.stop is not None and (step.stop not in get_args(StopReason) or not step.done):
        raise ValueError(
            f"EnvStep.stop: {str(step.stop)[:40]!r}; expected one of {', '.join(get_args(StopReason))}, with done=True"
        )
    return step.stop


def as_tools(value: object) -> list[ToolSpec]:
    """Tools of bounded size, each with a name of its own. ValueError says what else it was."""
    if not isinstance(value, list | tuple) or not all(isinstance(tool, ToolSpec) for tool in value):
        raise ValueError(f"tools: {type(value).__name__}; expected a list of ToolSpec")
    names = [tool.name for tool in value]
    if len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"tools: the names are {', '.join(map(str, names))[:200]}; each needs one of its own"
        )
    try:
        size = len(json.dumps([tool.to_json() for tool in value], allow_nan=False))
    except (TypeError, ValueError) as e:
        raise ValueError(f"tools: a description or schema is not JSON: {e}") from e
    if size > MOST_TEXT:
        raise ValueError(f"tools: {size} characters; at most {MOST_TEXT} are allowed")
    return list(value)


def _wrong_part(message: Message) -> str | None:
    """What is wrong beside role and content."""
    for part in ("reasoning", "tool_call_id", "name", "malformed"):
        if not isinstance(getattr(message, part), str | None):
            return f"{part} is not a text or None"
    for call in message.tool_calls:
        if not isinstance(call, ToolCall) or type(call.name) is not str or type(call.arguments) is not dict:
            return "tool_calls are not of ToolCall, with a text as name and a dict as arguments"
    try:
        json.dumps([call.to_json() for call in message.tool_calls], allow_nan=False)
    except (TypeError, ValueError) as e:
        return f"tool_calls are not JSON: {e}"
    return None


def as_step(value: object) -> EnvStep:
    """A checked step with finite numbers. ValueError says what is wrong with it."""
    if not isinstance(value, EnvStep):
        raise ValueError(f"step returned {type(value).__name__}; expected EnvStep")
    value = replace(value, done=_flag(value.done))
    if value.fault is not None and not isinstance(value.fault, str):
        raise ValueError(f"EnvStep.fault: {type(value.fault).__name__}; expected a text or None")
    history = None if value.history is None else as_messages(value.history, "EnvStep.history")
    if history == []:
        raise ValueError("EnvStep.history: an empty list; expected the new conversation, or None")
    return EnvStep(
        messages=as_messages(value.messages, "EnvStep.messages"),
        reward=None if value.reward is None else number(value.reward, " as EnvStep.reward"),
        parts=_parts(value.parts),
        state=_state(value.state),
        done=_done(value),
        stop=_stop(value),
        fault=value.fault,
        history=history,
    )


def _flag(value: Any) -> bool | None:
    """A truth value; also of numpy or torch, as comparing their numbers gives it."""
    plain = value.item() if hasattr(value, "item") and is_number(value) else value
    if not isinstance(plain, bool | None):
        raise ValueError(f"EnvStep.done: {type(value).__name__}; expected True, False or None")
    return plain


def _state(value: Json) -> Json:
    """A JSON value of bounded size, as it is read again."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"EnvStep.state: not a JSON value: {e}") from e
    if len(text) > MOST_TEXT:
        raise ValueError(f"EnvStep.state: {len(text)} characters; at most {MOST_TEXT} are allowed")
    return json.loads(text)


def _parts(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MOST_PARTS:
        given = f"{len(value)} entries" if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"EnvStep.parts: {given}; expected a dict of at most {MOST_PARTS} numbers")
    for key in value:
        if type(key) is not str or not 0 < len(key) <= 100:
            raise ValueError("EnvStep.parts: a key that is not a text of at most 100 characters")
    return {key: number(entry, f" at EnvStep.parts[{key!r}]") for key, entry in value.items()}


# ---------------------------------------------------------------- checks of what it asks of the run


def _unlisted(value: str | Message | list[Message], what: str) -> Json:
    """A text, a message or messages as JSON. ValueError says what else it was."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Message | list | tuple):
        raise ValueError(f"{what}: {type(value).__name__}; expected a text, a Message, or a list of Message")
    return pack_messages(as_messages([value] if isinstance(value, Message) else value, what))


def as_score_call(given: Json) -> ScoreCall:
    """Of JSON. ValueError says what is wrong with it."""
    reply, prompt, reward = given["reply"], given["prompt"], given["reward"]
    if reward is not None and not isinstance(reward, str):
        raise ValueError(
            f"world.score reward: {type(reward).__name__}; expected the name of a reward, or None"
        )
    try:
        size = len(json.dumps(given, allow_nan=False, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as e:  # reply and prompt are texts
        raise ValueError(f"world.score answer: it is not a JSON value: {e}") from e
    if size > 2 * MOST_TEXT:
        raise ValueError(f"world.score: {size} characters; at most {2 * MOST_TEXT} are allowed")
    said = () if isinstance(reply, str) else tuple(as_messages(unpack_messages(reply), "world.score"))
    if prompt is not None and not isinstance(prompt, str):
        prompt = tuple(as_messages(unpack_messages(prompt), "world.score prompt"))
    return ScoreCall(
        text=reply if isinstance(reply, str) else "".join(m.content for m in said if m.role == "assistant"),
        messages=said,
        reward=reward,
        prompt=prompt,
        answer=given["answer"],
    )


def as_program_call(given: Json) -> ProgramCall:
    """Of JSON. ValueError says what is wrong with it."""
    call = ProgramCall(**given)
    if not isinstance(call.code, str) or not isinstance(call.stdin, str):
        raise ValueError("world.program: code or stdin is not a text")
    if (size := len(call.code) + len(call.stdin)) > MOST_TEXT:
        raise ValueError(
            f"world.program: {size} characters of code and stdin; at most {MOST_TEXT} are allowed"
        )
    if number(call.limit_s, " as world.program limit_s") <= 0.0:
        raise ValueError(f"world.program limit_s={call.limit_s}; expected seconds above 0")
    if type(call.memory_mb) is not int or call.memory_mb < 1:
        raise ValueError(
            f"world.program memory_mb={call.memory_mb!r}; expected a whole number of MiB above 0"
        )
    return call


# ---------------------------------------------------------------- as JSON


def pack_messages(messages: list[Message]) -> list[Json]:
    return [message.to_json() for message in messages]


def unpack_messages(value: Json) -> list[Message]:
    return [Message.from_json(message) for message in value]


def pack_step(step: EnvStep) -> dict[str, Json]:
    """A checked step."""
    packed: dict[str, Any] = {**vars(step), "messages": pack_messages(step.messages)}
    return packed | {"history": None if step.history is None else pack_messages(step.history)}


def unpack_step(value: Json) -> EnvStep:
    """The checked step of another process, which is not trusted. ValueError if it is none."""
    history = value["history"]
    unpacked = {
        **value,
        "messages": unpack_messages(value["messages"]),
        "history": None if history is None else unpack_messages(history),
    }
    return as_step(EnvStep(**unpacked))
