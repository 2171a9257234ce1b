"""Several environments in one run, each for rows of its own: `rollout.env.make: whet.envs.several:make`,
docs/environments.md.

The config lists them; a row has the name of one, which is its source's or stands in a column. What plays an episode is
that environment itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from whet.config.environments import AT, SEVERAL, MemberConfig, SeveralArguments
from whet.config.schema import EnvironmentConfig
from whet.envs.arguments import section
from whet.envs.env import Env, EnvFault, EnvStep, World, bound, check_arguments, prepare
from whet.tables import load_object
from whet.types import ConfigError, Json, Message, Task


class FewerTurns:
    """An environment whose episode ends after so many replies. Else it is as it was: its methods stay plain or
    async."""

    def __init__(self, env: Any, world: World, most: int) -> None:
        self._env, self._world, self._most = env, world, most
        self.step = self._later if inspect.iscoroutinefunction(env.step) else self._now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def _now(self, reply: Message) -> Any:
        step = self._env.step(reply)
        return self._awaited(step) if inspect.isawaitable(step) else self._ended(step)

    async def _later(self, reply: Message) -> Any:
        return self._ended(await self._env.step(reply))

    async def _awaited(self, step: Awaitable[Any]) -> Any:
        return self._ended(await step)

    def _ended(self, step: Any) -> Any:
        """The step, the last one if it is the limit's. What is no EnvStep, the host refuses."""
        if not isinstance(step, EnvStep) or step.done is not False or self._world.turn < self._most:
            return step
        return replace(step, messages=[], history=None, done=True, stop="turns")


class Several:
    """Makes environments by the names that rows have: a `Factory`."""

    def __call__(self, task: Task, world: World, **arguments: Json) -> Env | Awaitable[Env]:
        """The environment of one rollout. EnvFault for a row whose name is not listed."""
        asked = section(SeveralArguments, arguments)
        name = _name(task, asked)
        member = asked.envs[name]
        if member.make is None:
            raise EnvFault(
                f"row {task.uid}: {AT}.envs.{name} has no make, and the row has no prompt: nothing asks"
            )
        env = bound(_loaded(name, member), task, world, member.arguments)()
        return _later(env, world, member) if inspect.isawaitable(env) else _ending(env, world, member)

    def prepare(self, arguments: Mapping[str, Json]) -> None:
        """Load and prepare all of them. ConfigError names the one that cannot be played."""
        for name, member in section(SeveralArguments, arguments).envs.items():
            if member.make is None:
                continue
            try:
                make = _loaded(name, member)
                check_arguments(make, member.arguments)
                prepare(make, member.arguments)
            except ConfigError as error:
                raise ConfigError(f"{AT}.envs.{name}: {error}") from error


def has_env(env: EnvironmentConfig) -> Callable[[Task], bool]:
    """Whether a task is played, of those that env plays; else the first reply ends its rollouts. A row whose name is
    not listed, or whom nobody asks, counts as played: what makes its environment says what is wrong."""
    if env.make != SEVERAL:
        return lambda task: True
    asked = section(SeveralArguments, env.arguments)

    def found(task: Task) -> bool:
        try:
            return asked.envs[_name(task, asked)].make is not None or not _asks(task)
        except EnvFault:
            return True

    return found


def names(env: EnvironmentConfig) -> list[str]:
    """Of several environments, those that play rows."""
    asked = section(SeveralArguments, env.arguments).envs if env.make == SEVERAL else {}
    return [name for name, member in asked.items() if member.make is not None]


def one_of_each(env: EnvironmentConfig, tasks: Sequence[Task]) -> dict[str, Task]:
    """The first task of each environment by its name, or of the only one, which has the name ''. EnvFault for a row
    that has none."""
    asked = section(SeveralArguments, env.arguments) if env.make == SEVERAL else None
    found: dict[str, Task] = {}
    for task in filter(has_env(env), tasks):
        found.setdefault("" if asked is None else _name(task, asked), task)
    return found


def _name(task: Task, asked: SeveralArguments) -> str:
    """Of the row's environment. EnvFault for a row that has none."""
    given = task.source if asked.column is None else task.extra.get(asked.column)
    if isinstance(given, str) and given in asked.envs:
        return given
    if asked.default is not None and (asked.column is None or given is None):
        return asked.default
    of = "its source" if asked.column is None else f"column {asked.column!r}"
    raise EnvFault(
        f"row {task.uid}: {of} is {given!r}, which is no environment of {AT}.envs: {', '.join(asked.envs)}"
    )


def _asks(task: Task) -> bool:
    """Whether the row itself does; else its prompt is a system message alone, which an environment's follow."""
    return isinstance(task.prompt, str) or any(message.role != "system" for message in task.prompt)


def _loaded(name: str, member: MemberConfig) -> Any:
    return load_object(str(member.make), what=f"{AT}.envs.{name}.make", asked=True)


def _ending(env: Any, world: World, member: MemberConfig) -> Any:
    """With the member's own limit. What is no environment, the host refuses."""
    limited = member.max_turns is not None and callable(getattr(env, "step", None))
    return FewerTurns(env, world, member.max_turns or 0) if limited else env


async def _later(env: Awaitable[Any], world: World, member: MemberConfig) -> Any:
    return _ending(await env, world, member)


make = Several()
