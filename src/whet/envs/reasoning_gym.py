"""Tasks of reasoning-gym with several tries: `rollout.env.make: whet.envs.reasoning_gym:make`, docs/environments.md.

The reward `reasoning_gym` is the verifier, in the same kind of processes: only verifiers that the config names may
judge, and those that evaluate text do so in a sandbox (docs/decisions/018).
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import model_validator

from whet.config.environments import AT
from whet.config.schema import RewardConfig, RewardWorkersConfig
from whet.config.sections.base import Above0, Fraction, Positive, Section
from whet.envs.arguments import section
from whet.envs.env import EnvFault, EnvStep, World
from whet.rewards.combine import RewardSet, score
from whet.types import ConfigError, Group, Json, Message, Rollout, Task

_NAME = "verifier"
FEEDBACK = "This is not right. Try again."


class TriesArguments(Section):
    """`rollout.env.arguments`."""

    verifiers: str | tuple[str, ...]
    """Names of reasoning-gym that may judge."""
    tries: Positive = 3
    """Replies of an episode, which ends with a right one."""
    decay: Fraction = 0.5
    """The reward is the score of the last reply, times this for each try before it."""
    feedback: str = FEEDBACK
    """What the policy is told after a wrong try, with {left} for the tries that are left and {score} for what the
    verifier gave."""
    exact: bool = True
    """As for the reward `reasoning_gym`."""
    pattern: str | None = None
    """As for the reward `reasoning_gym`."""
    workers: Positive = 1
    """Processes of verifiers in each host."""
    timeout_s: Above0 = 10.0
    """Longest time of a verdict."""

    @model_validator(mode="after")
    def _can_be_told(self) -> TriesArguments:
        try:
            said = self.feedback.format(left=1, score="0")
        except (LookupError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{AT}.feedback={self.feedback!r}: {error!r}; expected a text, with {{left}} and {{score}} at most"
            ) from error
        if not said:
            raise ConfigError(
                f"{AT}.feedback is empty; expected the text that the policy reads after a wrong try"
            )
        return self


class TriesEnv:
    """Tries of one rollout, each told whether it was right."""

    def __init__(self, task: Task, world: World, **arguments: Json) -> None:
        """arguments: those of `TriesArguments`. ConfigError for verifiers that may not judge."""
        self.task, self.world = task, world
        self.asked = section(TriesArguments, arguments)
        self.judge = _judge(self.asked)
        self.tried = 0

    @classmethod
    def prepare(cls, arguments: Mapping[str, Json]) -> None:
        """Start the processes of the verifiers: ConfigError for those that may not judge."""
        _judge(section(TriesArguments, arguments))

    async def first(self) -> list[Message]:
        """Nothing: the prompt has the question."""
        return []

    async def step(self, reply: Message) -> EnvStep:
        """The verdict on one try. EnvFault where the verifier gives none."""
        self.tried += 1
        given = await self._score(reply.content)
        left = self.asked.tries - self.tried
        right = given >= 1.0
        parts = {"right": float(right), "right_at_once": float(right and self.tried == 1)}
        if right or left == 0:
            return EnvStep([], given * self.asked.decay ** (self.tried - 1), parts)
        told = self.asked.feedback.format(left=left, score=f"{given:g}")
        return EnvStep([Message("user", told)], 0.0, parts, done=False)

    async def close(self) -> None:
        """The processes stay, for the next rollout."""

    async def _score(self, text: str) -> float:
        tried = Rollout.one_strand(
            task=self.task, index=0, token_ids=[0], mask=[False], logprobs=[0.0], sample_logprobs=[0.0],
            versions=[-1], finish_reason="stop", text=text,
        )  # fmt: skip
        ((judged,),) = [group.rollouts for group in await score([Group(self.task, (tried,))], self.judge)]
        if judged.reward is None:
            raise EnvFault(f"the verifier gave no score: {judged.error}")
        return judged.reward


judges: dict[str, RewardSet] = {}
"""Of this process, by what they were opened with; their processes end with it."""


def _judge(asked: TriesArguments) -> RewardSet:
    """The rewards' own way to the verifier. ConfigError where it may not judge."""
    key = asked.model_dump_json(include={"verifiers", "exact", "pattern", "workers", "timeout_s"})
    if key not in judges:
        how = asked.model_dump(mode="json", include={"verifiers", "exact", "pattern"})
        reward = RewardConfig(function="reasoning_gym", arguments=how)
        judges[key] = RewardSet.from_config(
            {_NAME: reward}, RewardWorkersConfig(count=asked.workers, timeout_s=asked.timeout_s)
        )
    return judges[key]


make = TriesEnv
