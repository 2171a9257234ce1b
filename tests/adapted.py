"""Environments of other packages, played as a run plays them: in a host process, by a policy that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from test_tool_env import END, Scripts
from whet.config.schema import EnvironmentConfig
from whet.envs.env import EnvStep, World
from whet.envs.hosts import EnvHosts
from whet.rollout.episode import play_groups
from whet.rollout.limits import EpisodeLimits
from whet.rollout.scripted import ScriptedEngine
from whet.types import Message, Rollout, Sampling, Task


async def nobody(*_: object) -> Message:
    raise NotImplementedError


def world(key: int = 1) -> World:
    return World(key, nobody)


def task(uid: int = 0, **columns: Any) -> Task:
    answer = columns.pop("answer", None)
    prompt = (Message("user", str(uid)),)
    return Task(uid=uid, source="s", prompt=prompt, token_ids=(uid,), answer=answer, extra=columns)


def reply(text: str, **more: Any) -> Message:
    return Message("assistant", text, **more)


def answers(env: Any, *replies: str | Message) -> list[EnvStep]:
    """What a plain environment answers, one reply after the other."""
    return [env.step(reply(each) if isinstance(each, str) else each) for each in replies]


def played(
    make: str,
    arguments: Mapping[str, Any],
    scripts: Mapping[int, Sequence[str]],
    columns: Mapping[int, Mapping[str, Any]] | None = None,
    max_turns: int = 8,
    **options: Any,
) -> tuple[Scripts, dict[int, list[Rollout]]]:
    """The group of each task, and the codec that knows what the policy was told. ConfigError where a host refuses."""
    codec = Scripts({uid: [reply(text) for text in script] for uid, script in scripts.items()})
    tasks = [task(uid, **(columns or {}).get(uid, {})) for uid in scripts]
    options = {"group_size": 1, "timeout_s": 100.0, **options}
    limits = EpisodeLimits(observation_tokens=1000, max_turns=max_turns)
    hosts = EnvHosts(EnvironmentConfig(make=make, arguments=dict(arguments), timeout_s=30.0))

    async def play() -> list[Any]:
        async with asyncio.timeout(120):
            return await play_groups(
                ScriptedEngine(codec.say, end_token_ids=[END]), tasks, sampling=Sampling(max_tokens=40), seed=3,
                purpose="train", decode=str, end_token_ids=[END], codec=codec, make_env=hosts.make,
                limits=limits, **options,
            )  # fmt: skip

    try:
        return codec, {group.task.uid: list(group.rollouts) for group in asyncio.run(play())}
    finally:
        hosts.close()
