"""Environments of SkyRL (BaseTextEnv of skyrl-gym 0.3 and 0.4): `rollout.env.make: whet.envs.skyrl_gym:make`,
docs/environments.md.

Names that skyrl-gym registers need the package (`whet[skyrl]`); a class of yours is named by its place. An episode may
be blocking code: all of its calls run in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from whet.config.environments import AT
from whet.envs.env import EnvFault, EnvStep, World
from whet.guard import sandbox
from whet.guard.foreign import number
from whet.tables import load_object, near
from whet.types import ConfigError, Json, Message, Task

RUN_CODE = {"lcb", "searchcode"}
"""Of skyrl-gym 0.3 and 0.4: they run what the policy writes as a program, with the rights of the run."""
RUN_SQL = {"text2sql"}
"""They run what the policy writes as SQL: `ATTACH` makes a file wherever the process may. Their threads only read."""


class SkyrlEnv:
    """An environment of SkyRL for one rollout."""

    def __init__(
        self, task: Task, world: World, env: str, *, max_turns: int | None = None, **env_config: Json
    ) -> None:
        """env: a name that skyrl-gym registers, or 'package.module:name' or 'path/to/file.py:name' of a class, made as
        C(env_config=, extras=), as SkyRL does. extras: the columns of the row but its prompt; the reference answer as
        `answer`. max_turns: stands in extras; the turns of the run are `rollout.env.max_turns`. All other arguments are
        `env_config`.
        """
        extras = {**({} if task.answer is None else {"answer": task.answer}), **task.extra}
        if max_turns is not None:
            extras["max_turns"] = max_turns
        self.task = task
        make = _maker(env)
        if env in RUN_SQL:
            sandbox.read_only()  # of the episode's thread
        self.inner = make(env_config=OmegaConf.create(env_config), extras=extras)
        self.told: Mapping[str, float] = {}
        """What `get_metrics` said last."""

    @classmethod
    def prepare(cls, arguments: Mapping[str, Json]) -> None:
        """ConfigError for an environment that is not there, or runs the policy's code."""
        _maker(arguments["env"])

    def first(self) -> list[Message]:
        """What `init` adds to the prompt. EnvFault if it writes another prompt: its tokens stand already."""
        prompt = _dicts(self.task)
        chat, _ = self.inner.init([dict(message) for message in prompt])
        if [*chat][: len(prompt)] != prompt:
            raise EnvFault(
                f"init of {type(self.inner).__name__} changed the prompt; expected the prompt as it is, and messages "
                "that follow it: prepare prompts in the data instead"
            )
        return _messages([*chat][len(prompt) :])

    def step(self, reply: Message) -> EnvStep:
        """The environment gets the reply's text; a thought before it, in the markers of the chat template, is no part
        of that. EnvFault for a `postprocessed_action`: it would replace what the policy sampled."""
        output = self.inner.step(reply.content)
        if (other := output.get("postprocessed_action")) not in (None, reply.content):
            raise EnvFault(
                f"{type(self.inner).__name__} gave a postprocessed_action that differs from the reply "
                f"({str(other)[:60]!r}): sampled tokens are trained as they are. End replies by rollout.sampling.stop "
                "instead"
            )
        return EnvStep(
            _messages(output["observations"] or []),
            number(output["reward"], " as the environment's reward"),
            self._parts(),
            bool(output["done"]),
        )

    def close(self) -> None:
        self.inner.close()

    def _parts(self) -> dict[str, float]:
        """By how much each metric has grown: their sums over the turns are what `get_metrics` says in the end."""
        metrics: Mapping[str, Any] = getattr(self.inner, "get_metrics", dict)()
        before, self.told = self.told, {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        return {name: value - before.get(name, 0.0) for name, value in self.told.items()}


def _maker(env: str) -> Any:
    """What makes the environment. ConfigError says what is there."""
    if ":" in env:
        return load_object(env, what=f"{AT}.env")
    try:
        import skyrl_gym
    except ImportError as error:
        raise ConfigError(
            f"{AT}.env={env!r} is a name of the package skyrl-gym: pip install 'whet[skyrl]', or give your class "
            f"as 'path/to/file.py:name' ({error})"
        ) from error
    if env not in skyrl_gym.registry:
        raise ConfigError(
            f"{AT}.env={env!r} is not registered{near(env, skyrl_gym.registry)}; registered: "
            f"{', '.join(sorted(skyrl_gym.registry))}; `imports` loads modules that register more"
        )
    if env in RUN_CODE:
        raise ConfigError(
            f"{AT}.env={env!r} runs the policy's text as a program, with the rights of this run; expected an "
            "environment that does so in a sandbox"
        )
    if env in RUN_SQL and (why := sandbox.lacking()):
        raise ConfigError(
            f"{AT}.env={env!r} runs the policy's text as SQL, which can make files; expected a system with a "
            f"sandbox to hold it: {why}"
        )
    return lambda **given: skyrl_gym.make(env, **given)


def _dicts(task: Task) -> list[dict[str, Json]]:
    prompt = (Message("user", task.prompt),) if isinstance(task.prompt, str) else task.prompt
    return [message.to_json() for message in prompt]


def _messages(said: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [Message.from_json(dict(message)) for message in said]


make = SkyrlEnv
