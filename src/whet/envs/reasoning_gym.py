"""Tasks of reasoning-gym with several tries: `rollout.env.make: whet.envs.reasoning_gym:make`, docs/environments.md.

The reward `reasoning_gym` is the verifier, in the same kind of processes: only verifiers that the config names may
judge, and those that evaluate text do so in a sandbox (docs/decisions/018).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from whet.config.schema import RewardConfig, RewardWorkersConfig
from whet.envs.env import EnvFault, EnvStep, World
from whet.rewards.combine import RewardSet, score
from whet.types import ConfigError, Group, Json, Message, Rollout, Task

_WHERE = "rollout.env.arguments"
_NAME = "verifier"
FEEDBACK = "This is not right. Try again."


class TriesEnv:
    """Tries of one rollout, each told whether it was right."""

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        verifiers: str | list[str],
        tries: int = 3,
        decay: float = 0.5,
        feedback: str = FEEDBACK,
        exact: bool = True,
        pattern: str | None = None,
        workers: int = 1,
        timeout_s: float = 10.0,
    ) -> None:
        """verifiers: names of reasoning-gym that may judge; exact, pattern: as for the reward `reasoning_gym`.
        The episode ends with a right reply or after `tries`. Its reward is the score of the last reply, times decay for
        each try before it. feedback: what the policy is told after a wrong try, with {left} for the tries that are
        left and {score} for what the verifier gave. workers, timeout_s: of the processes of verifiers in each host.

        ConfigError for a value that is none of these.
        """
        _check(tries, decay, feedback)
        self.task, self.world = task, world
        self.tries, self.decay, self.feedback = tries, decay, feedback
        self.judge = _judge(verifiers, exact, pattern, workers, timeout_s)
        self.tried = 0

    @classmethod
    def prepare(cls, arguments: Mapping[str, Json]) -> None:
        """Start the processes of the verifiers: ConfigError for those that may not judge."""
        cls(_NO_TASK, World(0, _nobody), **arguments)

    async def first(self) -> list[Message]:
        """Nothing: the prompt has the question."""
        return []

    async def step(self, reply: Message) -> EnvStep:
        """The verdict on one try. EnvFault where the verifier gives none."""
        self.tried += 1
        given = await self._score(reply.content)
        left = self.tries - self.tried
        right = given >= 1.0
        parts = {"right": float(right), "right_at_once": float(right and self.tried == 1)}
        if right or left == 0:
            return EnvStep([], given * self.decay ** (self.tried - 1), parts)
        told = self.feedback.format(left=left, score=f"{given:g}")
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


_NO_TASK = Task(uid=0, source="", prompt="")
_judges: dict[str, RewardSet] = {}
"""Of this process, by what they were opened with."""


async def _nobody(*_: object) -> Message:
    raise RuntimeError("no policy replies before the first rollout")


def _check(tries: object, decay: object, feedback: str) -> None:
    if type(tries) is not int or tries < 1:
        raise ConfigError(f"{_WHERE}.tries={tries!r}; expected an integer of at least 1")
    if type(decay) not in (int, float) or not 0 <= decay <= 1:  # type: ignore[operator]
        raise ConfigError(f"{_WHERE}.decay={decay!r}; expected a number from 0 to 1")
    try:
        said = feedback.format(left=1, score="0")
    except (LookupError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{_WHERE}.feedback={feedback!r}: {error!r}; expected a text, with {{left}} and {{score}} at most"
        ) from error
    if not said:
        raise ConfigError(
            f"{_WHERE}.feedback is empty; expected the text that the policy reads after a wrong try"
        )


def _judge(
    verifiers: str | list[str], exact: bool, pattern: str | None, workers: int, timeout_s: float
) -> RewardSet:
    """The rewards' own way to the verifier. ConfigError where it may not judge."""
    how = {"verifiers": verifiers, "exact": exact, "pattern": pattern}
    key = json.dumps([how, workers, timeout_s])
    if key not in _judges:
        reward = RewardConfig(function="reasoning_gym", arguments=how)
        _judges[key] = RewardSet.from_config(
            {_NAME: reward}, RewardWorkersConfig(count=workers, timeout_s=timeout_s)
        )
    return _judges[key]


def close_judges() -> None:
    """End the processes of verifiers; those of a host end with it."""
    for judge in _judges.values():
        judge.close()
    _judges.clear()


make = TriesEnv
