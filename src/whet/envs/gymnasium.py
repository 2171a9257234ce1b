"""Environments of gymnasium, told in words: `rollout.env.make: whet.envs.gymnasium:make`, docs/environments.md.

What an environment observes is told to the policy as a text, and a reply is read as an action. An episode may be
blocking code: all of its calls run in a thread of its own. Needs the package `gymnasium` (`whet[gymnasium]`), 1.0 or
newer.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field

from whet.config.environments import AT
from whet.config.sections.base import NonNegative, Positive, Section
from whet.envs.arguments import section
from whet.envs.env import EnvFault, EnvStep, World
from whet.guard.foreign import describe, number, said, words
from whet.tables import load_object
from whet.types import ConfigError, Json, Message, Task

try:
    import gymnasium
    from gymnasium import spaces
    from gymnasium.envs.registration import EnvSpec
except ImportError as error:
    raise ImportError(f"it needs the package gymnasium: pip install 'whet[gymnasium]' ({error})") from error

MOST_SEED = 2**31
"""Seeds are below it; older random generators take no others."""
MOST_SHOWN = 300
"""Characters that the policy is told of why its reply is no action."""


class NoAction(ValueError):
    """A reply that is no action of the environment."""


class GymnasiumArguments(Section):
    """`rollout.env.arguments`."""

    env: str
    """An id of gymnasium's registry, 'module:Id', which imports the module first, or 'package.module:name' or
    'path/to/file.py:name' of a class or function."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What it is made with, and `max_episode_steps`."""
    say: str | None = None
    """'path/to/file.py:name' of a function that tells an observation, say(observation) -> text; it may also take `env`
    and `info` by name. Default: numbers of Discrete spaces, texts of Text spaces."""
    act: str | None = None
    """The same of one that reads a reply, act(text) -> action; it raises ValueError where the text is no action."""
    seed: str | None = None
    """The column of the row with the seed of `reset`, so that all rollouts of a task begin in the same state. Default:
    a seed for each rollout, of `world.rng`."""
    invalid: Literal["tell", "end"] = "tell"
    """What follows a reply that is no action: the policy is told why, or the episode ends."""
    max_invalid: Positive = 3
    """Such replies in a row, with the last of which the episode ends."""
    invalid_penalty: NonNegative = 0.0
    """Taken from the reward for each of them."""
    parts: tuple[str, ...] = ()
    """Numbers of `info` that are recorded, with their sums over the turns; 0 for a turn without them."""


class GymnasiumEnv:
    """An environment of gymnasium for one rollout."""

    def __init__(self, task: Task, world: World, **arguments: Json) -> None:
        """arguments: those of `GymnasiumArguments`."""
        asked = section(GymnasiumArguments, arguments)
        self.task, self.world, self.asked = task, world, asked
        self.inner = _open(asked.env, asked.arguments, disable_env_checker=True)
        self.say = _function(asked.say, "say") or _teller(self.inner.observation_space)
        self.act = _function(asked.act, "act") or _reader(self.inner.action_space)
        self.info: Mapping[str, Any] = {}
        self.wrong = 0
        """Replies in a row that were no action."""

    @classmethod
    def prepare(cls, arguments: Mapping[str, Json]) -> None:
        """Make an environment, reset it and tell what it observes: ConfigError if that cannot be."""
        asked = section(GymnasiumArguments, arguments)
        try:
            _open(asked.env, asked.arguments).close()  # with gymnasium's own checks
            env = cls(_NO_TASK, World(0, _nobody), **{**arguments, "seed": None})
            env.first()
            env.close()
        except ConfigError:
            raise
        except Exception as error:  # the user's code
            raise ConfigError(f"{AT}.env={asked.env!r}: {describe(error)}") from error

    def first(self) -> list[Message]:
        """What is observed at the beginning."""
        observation, self.info = self.inner.reset(seed=self._seed())
        return self._told(observation)

    def step(self, reply: Message) -> EnvStep:
        """One action; of a reply that is none, the environment hears nothing."""
        try:
            action = self._action(reply)
        except ValueError as error:
            return self._invalid(words(said(error), MOST_SHOWN))
        self.wrong = 0
        observation, reward, terminated, truncated, self.info = self.inner.step(action)
        done, stopped = bool(terminated or truncated), bool(truncated and not terminated)
        return EnvStep(
            [] if done else self._told(observation),
            number(reward, f" as the reward of {self.inner}"),
            {
                "invalid": 0.0,
                "truncated": float(stopped),
                **{
                    name: number(self.info.get(name, 0.0), f" at info[{name!r}]") for name in self.asked.parts
                },
            },
            done,
            stop="truncated" if stopped else None,
        )

    def close(self) -> None:
        self.inner.close()

    # -- texts

    def _seed(self) -> int:
        if self.asked.seed is None:
            return self.world.rng.randrange(MOST_SEED)
        value = self.task.extra.get(self.asked.seed)
        if type(value) is not int or not 0 <= value < MOST_SEED:
            there = ", ".join(sorted(self.task.extra)) or "none"
            raise EnvFault(
                f"the column {self.asked.seed!r} ({AT}.seed) is {str(value)[:40]!r}; expected a number of at least 0 "
                f"and below {MOST_SEED}; columns: {there}"
            )
        return value

    def _told(self, observation: Any) -> list[Message]:
        text = _called(self.say, observation, self)
        if not isinstance(text, str):
            raise ValueError(f"say returned {type(text).__name__}; expected a text")
        return [Message("user", text)] if text else []

    def _action(self, reply: Message) -> Any:
        """ValueError where the reply is none."""
        if reply.malformed is not None:
            raise NoAction(reply.malformed)
        action = _called(self.act, reply.content, self)
        if not self.inner.action_space.contains(action):
            raise NoAction(f"{action!r} is not in {self.inner.action_space}")
        return action

    def _invalid(self, why: str) -> EnvStep:
        self.wrong += 1
        done = self.asked.invalid == "end" or self.wrong >= self.asked.max_invalid
        told = [] if done else [Message("user", f"This is no action: {why}")]
        penalty = -self.asked.invalid_penalty or None
        parts = {"invalid": 1.0, **dict.fromkeys(("truncated", *self.asked.parts), 0.0)}
        return EnvStep(told, penalty, parts, done, stop="malformed" if done else None)


_NO_TASK = Task(uid=0, source="", prompt="")


async def _nobody(*_: object) -> Message:
    raise RuntimeError("no policy replies before the first rollout")


def _open(env: str, arguments: Mapping[str, Json], **how: Any) -> Any:
    """One path for ids and for classes: gymnasium's, with its wrappers (order of calls, time limit)."""
    place, _, name = env.rpartition(":")
    if place.endswith(".py") or (place and hasattr(importlib.import_module(place), name)):
        made: Any = EnvSpec(id=f"{name}-v0", entry_point=load_object(env, what=f"{AT}.env"))
    else:
        made = env
    return gymnasium.make(made, **{**how, **arguments})


def _function(spec: str | None, name: str) -> Callable[..., Any] | None:
    return None if spec is None else load_object(spec, what=f"{AT}.{name}")


def _called(function: Callable[..., Any], value: Any, env: GymnasiumEnv) -> Any:
    """With `env` and `info`, if it takes them."""
    more = {"env": env.inner.unwrapped, "info": env.info}
    taken = list(inspect.signature(function).parameters)[1:]
    return function(value, **{key: more[key] for key in taken if key in more})


def _teller(space: spaces.Space[Any]) -> Callable[[Any], str]:
    """How an observation is told by default."""
    if isinstance(space, spaces.Text):
        return lambda observation: str(observation)
    if isinstance(space, spaces.Discrete):
        return lambda observation: str(int(observation))
    raise ConfigError(
        f"{AT}.say is not given, and observations of {space} have no text of their own; give a function, "
        "say(observation) -> text, as 'path/to/file.py:name'"
    )


def _reader(space: spaces.Space[Any]) -> Callable[[str], Any]:
    """How a reply is read by default."""
    if isinstance(space, spaces.Text):
        return lambda text: text
    if isinstance(space, spaces.Discrete):
        return lambda text: _number(text, int(space.start), int(space.start + space.n) - 1)
    raise ConfigError(
        f"{AT}.act is not given, and actions of {space} have no text of their own; give a function, "
        "act(text) -> action, as 'path/to/file.py:name'"
    )


def _number(text: str, low: int, high: int) -> int:
    digits = text.strip()
    if not (digits.removeprefix("-").isdecimal() and len(digits) < 20 and low <= int(digits) <= high):
        raise NoAction(f"expected a number from {low} to {high}")
    return int(digits)


make = GymnasiumEnv
