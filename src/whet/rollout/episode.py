"""Turns tasks into groups of finished rollouts, whatever the engine, the environment or the clock does.

The tokens of a rollout are only appended to: the prompt, the policy's tokens, the environment's answer, and so on.
Tokens are never re-encoded from text.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from uuid import uuid4

import numpy as np

from whet.config.schema import SamplingConfig
from whet.envs.env import Env
from whet.guard.foreign import number
from whet.guard.worker import describe
from whet.rollout.engine import RolloutEngine
from whet.rollout.requests import Decode, ends_of
from whet.seeds import rollout_key
from whet.types import (
    Completion,
    FinishReason,
    Group,
    Message,
    Request,
    Rollout,
    Sampling,
    Task,
    Turn,
    WhetError,
)

log = logging.getLogger(__name__)

MakeEnv = Callable[[Task], Env]
EncodeMessages = Callable[[list[Message]], list[int]]
"""Messages that follow the policy's last token, as tokens, up to where the policy speaks again."""


def to_sampling(cfg: SamplingConfig) -> Sampling:
    """The config's sampling section as engines take it; the key is set for each rollout."""
    return Sampling(**{f.name: getattr(cfg, f.name) for f in fields(Sampling) if f.name != "key"})


@dataclass(frozen=True)
class Play:
    """How rollouts are played; the same for all of a call."""

    engine: RolloutEngine
    decode: Decode
    end_token_ids: frozenset[int]
    """The model's own end tokens: not part of the text."""
    make_env: MakeEnv | None
    encode_messages: EncodeMessages | None
    max_turns: int
    max_total_tokens: int | None
    pace: Pace


LEAST_FINISHED = 8
"""Finished rollouts that make a mean."""


@dataclass
class Pace:
    """How long a rollout may take: `timeout_s`, and no longer than `factor` times the mean of those finished so far."""

    timeout_s: float
    factor: float | None = None
    count: int = field(default=0, repr=False)
    seconds: float = field(default=0.0, repr=False)
    told: set[tuple[str, ...]] = field(default_factory=set, repr=False)
    """Kinds of errors, with their places, whose traceback stands in the log."""

    @property
    def limit_s(self) -> float:
        if self.factor is None or self.count < LEAST_FINISHED:
            return self.timeout_s
        return min(self.timeout_s, self.factor * self.seconds / self.count)

    def said(self, limit_s: float) -> str:
        """The limit and where it comes from."""
        if limit_s == self.timeout_s:
            return f"rollout.timeout_s={limit_s:g}"
        return f"{limit_s:.3g} s, rollout.timeout_factor={self.factor:g} times the mean"

    def untold(self, error: Exception) -> Exception | None:
        """The error if its traceback is still to be written down: once for each place that it comes from."""
        frames = traceback.extract_tb(error.__traceback__)
        place = (type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in frames[-1:]))
        if isinstance(error, WhetError) or place in self.told:
            return None
        self.told.add(place)
        return error

    def finished(self, seconds: float) -> None:
        """One more rollout came to its end."""
        self.count += 1
        self.seconds += seconds


@dataclass
class Episode:
    """A rollout in the making."""

    task: Task
    index: int
    sampling: Sampling
    token_ids: list[int]
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sample_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    """The sampled tokens of each turn, without end tokens."""
    turns: list[Turn] = field(default_factory=list)
    session: str = field(default_factory=lambda: uuid4().hex)
    """Of its requests."""
    reward: float | None = None
    """Sum of what the environment gave."""

    def __post_init__(self) -> None:
        self._fill(len(self.token_ids))

    def told(self, token_ids: list[int]) -> None:
        """Tokens that the policy did not sample."""
        self.token_ids += token_ids
        self._fill(len(token_ids))

    def said(self, completion: Completion, reply: list[int]) -> None:
        """Tokens that it did."""
        self.token_ids += completion.token_ids
        self.mask += [1] * len(completion.token_ids)
        unknown = [math.nan] * len(completion.token_ids)
        self.logprobs += unknown if completion.logprobs is None else completion.logprobs
        self.sample_logprobs += unknown if completion.sample_logprobs is None else completion.sample_logprobs
        self.versions += completion.versions
        self.replies.append(reply)
        end = len(self.token_ids)
        self.turns.append(Turn(end - len(completion.token_ids), end, completion.finish_reason))

    def rewarded(self, reward: float) -> None:
        """The environment's reward for the last turn."""
        self.turns[-1] = replace(self.turns[-1], reward=reward)
        self.reward = number((self.reward or 0.0) + reward, " as the sum of the environment's rewards")

    def _fill(self, count: int) -> None:
        self.mask += [0] * count
        self.logprobs += [0.0] * count
        self.sample_logprobs += [0.0] * count
        self.versions += [-1] * count

    def rollout(self, reason: FinishReason, *, decode: Decode, error: str | None) -> Rollout:
        return Rollout.one_strand(
            task=self.task,
            index=self.index,
            token_ids=np.array(self.token_ids, np.int32),
            mask=np.array(self.mask, np.bool_),
            logprobs=np.array(self.logprobs, np.float32),
            sample_logprobs=np.array(self.sample_logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            finish_reason=reason,
            text=decode([token for reply in self.replies for token in reply]),
            reward=self.reward,
            reward_parts={} if self.reward is None else {"env": self.reward},
            turns=tuple(self.turns),
            error=error,
        )


async def play_groups(
    engine: RolloutEngine,
    tasks: Sequence[Task],
    *,
    group_size: int,
    sampling: Sampling,
    seed: int,
    purpose: str,
    decode: Decode,
    end_token_ids: Collection[int],
    timeout_s: float,
    pace: Pace | None = None,
    retries: int = 0,
    make_env: MakeEnv | None = None,
    encode_messages: EncodeMessages | None = None,
    max_turns: int = 8,
    max_total_tokens: int | None = None,
) -> list[Group]:
    """`group_size` rollouts of each task, all at once, in the order of the tasks.

    Without `make_env` a rollout is one reply to the task's tokens. With it, the environment's first messages follow the
    prompt, and the environment answers every reply, for at most `max_turns` turns; `sampling.max_tokens` bounds the
    sampled tokens of all turns together, `max_total_tokens` the full rollout, prompt included. A rollout that raises or
    takes longer than `timeout_s` (or than `pace` allows) is retried `retries` times; then it ends as `abort`, with its
    finished turns and the reason in `error`. It never affects other rollouts.
    """
    if make_env is not None and encode_messages is None:
        raise ValueError("make_env needs encode_messages, which encodes the environment's messages as tokens")
    play = Play(
        engine=engine,
        decode=decode,
        end_token_ids=frozenset(end_token_ids),
        make_env=make_env,
        encode_messages=encode_messages,
        max_turns=max_turns,
        max_total_tokens=max_total_tokens,
        pace=pace or Pace(timeout_s),
    )

    def start(task: Task, index: int) -> Episode:
        key = rollout_key(seed, task.uid, index, purpose=purpose)
        return Episode(task, index, replace(sampling, key=key), list(task.token_ids))

    async def one(task: Task, index: int) -> Rollout:
        for attempt in range(retries + 1):
            rollout = await _finish(start(task, index), play)
            if rollout.error is None or attempt == retries:
                break
            log.info("rollout %d of task %d is retried", index, task.uid)
        return rollout

    rollouts = await asyncio.gather(*(one(task, index) for task in tasks for index in range(group_size)))
    return [
        Group(task, tuple(rollouts[i * group_size : (i + 1) * group_size])) for i, task in enumerate(tasks)
    ]


async def _finish(episode: Episode, play: Play) -> Rollout:
    """Play one episode to its end, whatever the end is."""
    reason: FinishReason = "abort"
    error: str | None = None
    limit_s, start = play.pace.limit_s, time.monotonic()
    try:
        async with asyncio.timeout(limit_s) as clock:
            reason = await _turns(episode, play)
        play.pace.finished(time.monotonic() - start)
    except Exception as caught:  # engines and environments are foreign code: one rollout, not the run
        late = isinstance(caught, TimeoutError) and clock.expired()
        said = f"not finished within {play.pace.said(limit_s)}" if late else raised(caught)
        error = f"after turn {len(episode.replies)}: {said}" if episode.replies else said
        trace = None if late else play.pace.untold(caught)
        log.info("rollout %d of task %d aborted: %s", episode.index, episode.task.uid, error, exc_info=trace)
    return episode.rollout(reason, decode=play.decode, error=error)


def raised(error: Exception) -> str:
    """'ValueError: text (env.py:12)'; without the place where the error is ours, and says itself what is wrong."""
    return f"{type(error).__name__}: {error}" if isinstance(error, WhetError) else describe(error)


async def _turns(episode: Episode, play: Play) -> FinishReason:
    """The policy and the environment in turn."""
    if play.make_env is None:
        return await _reply(episode, play)
    assert play.encode_messages is not None
    env = play.make_env(episode.task)
    episode.told(play.encode_messages(await env.first()))
    for _ in range(play.max_turns):
        reason = await _reply(episode, play)
        step = await env.step(Message("assistant", play.decode(episode.replies[-1])))
        if step.reward is not None:
            episode.rewarded(number(step.reward, " from the environment"))
        if step.done or reason == "length":
            return reason
        answer = play.encode_messages(step.messages)
        if _left(episode, play, told=len(answer)) < 1:
            return "length"
        episode.told(answer)
    return "length"


def _left(episode: Episode, play: Play, *, told: int = 0) -> int:
    """Tokens that may still be sampled, after so many more that the policy is told."""
    left = episode.sampling.max_tokens - sum(episode.mask)
    if play.max_total_tokens is None:
        return left
    return min(left, play.max_total_tokens - len(episode.token_ids) - told)


async def _reply(episode: Episode, play: Play) -> FinishReason:
    """One turn of the policy."""
    left = _left(episode, play)
    sampling = replace(episode.sampling, max_tokens=left, min_tokens=min(episode.sampling.min_tokens, left))
    request = Request(
        id=uuid4().hex, session=episode.session, prompt=tuple(episode.token_ids), sampling=sampling
    )
    completion = await play.engine.generate(request)
    _check_logprobs(completion, promised=play.engine.can.tells_logprobs(sampling))
    ends = ends_of(sampling, play.end_token_ids)
    tokens = completion.token_ids
    ended = completion.finish_reason == "stop" and bool(tokens) and tokens[-1] in ends
    episode.said(completion, tokens[:-1] if ended else tokens)
    return completion.finish_reason


def _check_logprobs(completion: Completion, *, promised: bool) -> None:
    """Raises WhetError where the engine left out or could not compute what it promises to tell."""
    logprobs = completion.logprobs
    if logprobs is None and not promised:
        return
    if logprobs is None or np.isnan(logprobs).any():
        told = "no log-probs" if logprobs is None else "NaN as a log-prob"
        raise WhetError(
            f"the rollout engine gave {told} of sampled tokens; its weights or its `can` are wrong"
        )
