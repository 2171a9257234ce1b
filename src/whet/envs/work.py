"""What a run does for its environments beside sampling: its rewards score replies, where they always run, and programs
run in a sandbox, below this process. An environment's own process has no sandbox, and may have secrets."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

from whet.config.judges import is_judge
from whet.config.schema import Config, RewardConfig
from whet.envs.env import EnvBroken, ReplyScore, ScoreCall, as_program_call, as_score_call
from whet.guard.foreign import words
from whet.guard.jail import JailBroken
from whet.guard.program import ProgramOutcome, Programs, run
from whet.rewards.combine import RewardSet, score
from whet.tables import near
from whet.types import Group, Json, Rollout, Task, WhetError, given_tokens


@dataclass(eq=False)
class RunWork:
    """That of the environments of one stage. rewards None: there are none."""

    rewards: RewardSet | None
    cfg: Config
    counts: Counter[str] = field(default_factory=Counter)
    """Of `scores` and `programs` that were asked for."""
    _places: asyncio.Semaphore | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def of(self, task: Task, index: int) -> RolloutWork:
        return RolloutWork(self, task, index)

    @property
    def places(self) -> asyncio.Semaphore:
        """As many programs run at once as rewards do."""
        if self._places is None or self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._places = asyncio.Semaphore(self.cfg.reward_workers.count)
        return self._places


@dataclass(frozen=True, eq=False)
class RolloutWork:
    """`Work` for the environment of one rollout."""

    run: RunWork
    task: Task
    index: int

    async def score(self, given: Json) -> ReplyScore:
        """WhetError where a reward fails, or there is none; EnvBroken where none can be asked any more."""
        call = as_score_call(given)
        self.run.counts["scores"] += 1
        asked = chosen(self.run.rewards, self.run.cfg, self.task, call)
        answer = self.task.answer if call.answer is None else call.answer
        prompt = self.task.prompt if call.prompt is None else call.prompt
        task = replace(self.task, prompt=prompt, answer=answer)
        reply = Rollout.one_strand(
            task=task,
            index=self.index,
            **given_tokens([], []),
            finish_reason="stop",
            messages=call.messages,
            text=call.text,
        )
        try:
            ((scored,),) = (group.rollouts for group in await score([Group(task, (reply,))], asked))
        except JailBroken as error:  # no failure of this reply: an environment may not go on as if it was one
            raise EnvBroken(str(error)) from error
        if scored.error is not None:
            raise WhetError(scored.error)
        assert scored.reward is not None
        return ReplyScore(scored.reward, scored.reward_parts)

    async def program(self, given: Json) -> ProgramOutcome:
        """OSError where this system has no sandbox."""
        call = as_program_call(given)
        self.run.counts["programs"] += 1
        if call.memory_mb > (most := self.run.cfg.reward_workers.memory_mb):
            raise ValueError(
                f"memory_mb={call.memory_mb}; at most reward_workers.memory_mb={most} is allowed"
            )
        async with self.run.places:
            (ran,) = await run(
                Programs(runs=[(call.code, call.stdin)], seconds=call.limit_s, memory_mb=call.memory_mb)
            )
        return ran


def chosen(rewards: RewardSet | None, cfg: Config, task: Task, call: ScoreCall) -> RewardSet:
    """The rewards that a call asks. WhetError for a name that none has, and for one that needs the reply's tokens."""
    known = {} if rewards is None else rewards.weights
    if rewards is None or not known:
        raise WhetError("the config has no rewards; give one (rewards.NAME.function)")
    if call.reward is not None and call.reward not in known:
        raise WhetError(
            f"no reward is named {words(call.reward, 100)!r}{near(call.reward, known)}; the config has: "
            f"{', '.join(known)}"
        )
    names = rewards.of(task) if call.reward is None else [call.reward]
    if not names:
        raise WhetError(f"no reward scores tasks of source {task.source!r}; name one: reward=NAME")
    for name in names:
        if name in cfg.rewards and needs_tokens(cfg.rewards[name]):
            raise WhetError(
                f"reward {name!r} reads the tokens of a rollout, and a reply that an environment gives has none; "
                "name another one: reward=NAME"
            )
    if call.reward is None:
        return rewards
    return replace(rewards, weights={call.reward: 1.0}, by_source={})


def needs_tokens(reward: RewardConfig) -> bool:
    """Whether it says nothing of a text alone."""
    model = reward.model is not None and not is_judge(reward) and reward.model.input == "tokens"
    return model or reward.function == "overlong"
