"""An environment whose answers stand in the journal before a rollout has them.

A rollout that is played again (the run was killed, or the host of its environment) is told what it was told before, as
long as it asks the same: no environment runs for that. Where the journal ends, the environment is made, and goes on if
it has `resume`. Else the rollout begins anew, since another environment does not remember what this one was asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from whet.config.code import ENVIRONMENT, digests
from whet.config.schema import Config
from whet.envs.env import (
    Env,
    EnvFault,
    EnvRestarted,
    EnvStep,
    MakeEnv,
    Path,
    World,
    as_messages,
    as_step,
    as_tools,
    pack_messages,
    pack_step,
    unpack_messages,
    unpack_step,
)
from whet.envs.journal import Journal
from whet.rewards.bind import pack_task
from whet.types import Json, Message, Task, ToolSpec

log = logging.getLogger(__name__)

Counts = Counter[str]
"""Of `replayed` answers, and of those that were `asked_anew` because the journal has the answer to another question."""

CHANGED = {
    "code": "the code or the arguments of the environment have changed",
    "task": "the data has changed",
    "reply": "the policy's reply has changed",
}


def about(cfg: Config, code: Mapping[str, str] = MappingProxyType({})) -> str:
    """Digest of what an environment is: its name, its arguments, and the user's code that these name. code: digests by
    file that stand for those of the files as they are now."""
    assert cfg.rollout.env is not None
    now = digests([cfg], {}, ENVIRONMENT)
    then = {file: code.get(file, known) for file, known in now.items()}
    return digest(cfg.rollout.env.make, cfg.rollout.env.arguments, then)


def digest(*values: Json) -> str:
    """Of JSON values; of what is none, its text."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def promise(cfg: Config) -> str:
    """In words, for the log: what of a run with an environment a resume repeats."""
    if cfg.mode == "explore":
        which = (
            "an explorer that restarts under its name gets the same answers. A rollout that another explorer takes "
            "over asks its environment again"
        )
    elif cfg.rollout.schedule == "async":
        which = (
            "with rollout.schedule=async, a rollout is repeated as long as the policy's replies are the same"
        )
    else:
        which = (
            "where the log-prob match is exact, every finished rollout is repeated bit for bit, whatever its "
            "environment would answer now"
        )
    return (
        f"each answer of the environment is written to the journal before the rollout uses it. After a kill {which}; "
        "an unfinished rollout continues if the environment has `resume`, as tools without state do, else it "
        "restarts. Not repeated: side effects of an environment or a tool (a call may run more than once), and "
        "rollouts that failed by a fault or a time limit"
    )


def journaled(
    make: MakeEnv, journal: Journal, what: str, *, counts: Counts, repeated: bool = False
) -> MakeEnv:
    """The same environments, with their answers in the journal. what: `about` them. repeated: the same tasks are played
    again after later steps, such as those of an evaluation."""

    def made(task: Task, world: World) -> JournaledEnv:
        when = "@{}-{}".format(*journal.place) if repeated else ""
        return JournaledEnv(make, task, world, journal, what, counts, when)

    return made


@dataclass(eq=False)
class JournaledEnv:
    """An `Env`: the journal, then the environment itself."""

    make: MakeEnv
    task: Task
    world: World
    journal: Journal
    about: str
    counts: Counts
    when: str
    """Tells equal rollouts of several evaluations apart."""
    env: Env | None = None
    """None: all answers so far are the journal's."""
    tools: list[ToolSpec] = field(default_factory=list)
    turns: list[tuple[Message, EnvStep]] = field(default_factory=list)
    """Replies, and the journal's answers to them."""
    opening: Json = None
    """What `first` told."""
    asked: str = ""
    """Digest of all that led to the question at hand: the task, and all replies and answers."""
    answer: Json = None
    chats: list[Json] = field(default_factory=list)
    """What the environment has asked the policy for the answer under way: path, messages, settings, digest of the
    reply."""

    def __post_init__(self) -> None:
        self.ask, self.world.ask = self.world.ask, self._ask

    @property
    def turn(self) -> int:
        return self.world.turn

    def episode(self, later: int = 0) -> str:
        """The name of this rollout, or of a later attempt at it."""
        return f"{self.world.key:016x}-{self.world.attempt + later}{self.when}"

    # -- an Env

    async def first(self) -> list[Message]:
        self.asked = digest(self.about, pack_task(self.task))
        self.opening = await self._found() or await self._live(self._open)
        self.answer = self.opening
        self.tools = as_tools([ToolSpec.from_json(tool) for tool in self.opening["tools"]])
        return unpack_messages(self.opening["messages"])

    async def step(self, reply: Message) -> EnvStep:
        self.asked = digest(self.asked, self.answer, reply.to_json())
        found = await self._found() if self.env is None else None
        if found is None:
            await self._wake()
            self.answer = await self._live(lambda env: self._step(env, reply))
        else:
            self.answer = found
            self.turns.append((reply, unpack_step(found)))
        return unpack_step(self.answer)

    async def close(self) -> None:
        if (close := getattr(self.env, "close", None)) is not None:
            await close()

    # -- from the journal

    async def _found(self) -> Json | None:
        """The journal's answer to the question at hand. EnvFault if the world broke there, and the rollout was tried
        again: a fault that nothing followed is no answer, for the world may be mended."""
        entry = self.journal.find(self.episode(), self.turn, self.asked)
        if entry is None:
            self._tell_other()
            return None
        if (fault := _fault(entry)) and self.journal.other(self.episode(1), 0) is None:
            return None
        if not all(await asyncio.gather(*(self._chat_again(*chat) for chat in entry["chats"]))):
            self.counts["asked_anew"] += 1
            self._begin_anew("the policy's answers to the environment have changed")
        self.counts["replayed"] += 1
        if fault and entry["value"] is None:
            raise EnvFault(fault)
        return entry["value"]

    def _tell_other(self) -> None:
        """The journal may have the answer to another question."""
        if (other := self.journal.other(self.episode(), self.turn)) is None:
            return
        self.counts["asked_anew"] += 1
        kind = "code" if other["about"] != self.about else "reply" if self.turn else "task"
        if (told := f"told {kind}") not in self.counts:
            self.counts[told] += 1
            log.warning(
                "journal: rollout %d of task %d, turn %d: %s since the recorded answer, so the environment is asked "
                "again; further cases are counted in timings.jsonl (env/asked_anew_count)",
                self.world.index, self.task.uid, self.turn, CHANGED[kind],
            )  # fmt: skip

    async def _chat_again(self, path: list[int], messages: Json, settings: Json, expected: str) -> bool:
        """Ask the policy what the environment has asked: its reply is a part of the rollout."""
        reply: Message | None = None
        with suppress(Exception):  # the environment was told of it, too
            reply = await self.ask(tuple(path), unpack_messages(messages), settings)
        return _digest_of(reply) == expected

    def _begin_anew(self, why: str) -> None:
        self.journal.forget(self.episode())
        raise EnvRestarted(f"the journal's answers cannot be continued: {why}", suspect=False)

    # -- from the environment

    async def _live(self, call: Callable[[Env], Awaitable[Json]]) -> Json:
        """What the environment answers, once that is on the disk."""
        if self.env is None:
            self.env = self.make(self.task, self.world)
        self.chats.clear()
        try:
            value, fault = await call(self.env), None
        except EnvFault as error:
            await self._write(None, str(error))
            raise
        except EnvRestarted:
            if getattr(self.env, "resume", None) is None:
                self.journal.forget(self.episode())
            raise
        await self._write(value, fault)
        return value

    async def _write(self, value: Json, fault: str | None) -> None:
        entry = {"about": self.about, "value": value, "fault": fault, "chats": list(self.chats)}
        await self.journal.write(self.episode(), self.turn, self.asked, entry)

    async def _open(self, env: Env) -> Json:
        messages = as_messages(await env.first(), "first")
        tools = as_tools(getattr(env, "tools", ()))
        return {"messages": pack_messages(messages), "tools": [tool.to_json() for tool in tools]}

    async def _step(self, env: Env, reply: Message) -> Json:
        return pack_step(as_step(await env.step(reply)))

    async def _wake(self) -> None:
        """Make the environment after answers of the journal, and have it go on after them."""
        if self.env is not None:
            return
        self.env = self.make(self.task, self.world)
        opening = await self._open(self.env)
        resume: Any = getattr(self.env, "resume", None)
        if resume is None:
            self._begin_anew("the environment has no `resume`")
        if digest(opening) != digest(self.opening):
            self._begin_anew("its first messages or its tools have changed")
        await resume(self.turns)

    async def _ask(self, path: Path, messages: list[Message], settings: Mapping[str, Json]) -> Message:
        """Ask the policy, as `World.ask`."""
        reply: Message | None = None
        try:
            reply = await self.ask(path, messages, settings)
            return reply
        finally:
            self.chats.append([list(path), pack_messages(messages), dict(settings), _digest_of(reply)])


def _fault(entry: Any) -> str | None:
    """Why the world broke, by an error or in the environment's own words."""
    return entry["fault"] or (entry["value"] or {}).get("fault")


def _digest_of(reply: Message | None) -> str:
    return digest(None if reply is None else reply.to_json())
