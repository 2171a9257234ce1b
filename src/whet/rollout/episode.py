"""Turns tasks into groups of finished rollouts, whatever the engine, the environment or the clock does.

The tokens of a strand are only appended to: the prompt, the policy's tokens, the environment's answer, and so on.
Sampled tokens are never re-encoded from text: where an environment rewrites the history, another strand begins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol
from uuid import uuid4

from whet.config.evaluation import merged
from whet.config.schema import RolloutConfig, SamplingConfig
from whet.envs.env import (
    Env,
    EnvBroken,
    EnvFault,
    EnvRestarted,
    EnvStep,
    MakeEnv,
    MakeWork,
    World,
    as_messages,
    as_step,
    as_tools,
)
from whet.guard.foreign import MOST_SAID, describe, number, words
from whet.rollout.engine import RolloutEngine
from whet.rollout.growing import Growing
from whet.rollout.limits import EpisodeLimits, chat_sampling
from whet.rollout.pace import Pace
from whet.rollout.requests import Decode, check_reply, ends_of
from whet.seeds import key, rollout_key
from whet.types import (
    Completion,
    ConfigError,
    FinishReason,
    Group,
    Json,
    Message,
    ReplyRefused,
    Request,
    Rollout,
    Sampling,
    StopReason,
    Task,
    ToolSpec,
    WhetError,
)

log = logging.getLogger(__name__)

Fork = tuple[int, ...]
"""Names a strand within its rollout, see `Episode.strands`."""

MOST_CHATS = 256
"""Calls of `world.chat` in one rollout."""
MOST_LOST = 3
"""Hosts that may end under an episode before it gets one of its own."""
CLOSE_S = 10.0
"""Longest time of `Env.close`."""
ANY_TOKEN = 2**31
"""Size of a vocabulary that is not known: ids of a strand are int32."""


class Codec(Protocol):
    """Messages to tokens and back: `data.codec.MessageCodec`."""

    def of(self, kwargs: Mapping[str, Json]) -> Codec:
        """That of a task with variables of the chat template."""

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """A conversation, up to where the policy speaks."""

    def encode_observation(
        self,
        existing: Sequence[int],
        conversation: Sequence[Message],
        count: int,
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """What follows `existing`, which ends with a reply; the last `count` messages are new. None: the tokens of the
        conversation do not begin with `existing`."""

    def parse_reply(
        self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = (), begun: str = ""
    ) -> Message:
        """A reply, without its end token. begun: what the prompt has of it."""


def to_sampling(cfg: SamplingConfig) -> Sampling:
    """The config's sampling section as engines take it; the key is set for each rollout."""
    return Sampling(**{f.name: getattr(cfg, f.name) for f in fields(Sampling) if f.name != "key"})


def sampling_by_source(cfg: RolloutConfig) -> dict[str, Sampling]:
    """Sampling in training of the sources that have settings of their own."""
    return {name: to_sampling(merged(cfg.sampling, own)) for name, own in cfg.sources.items()}


@dataclass(frozen=True)
class Play:
    """How rollouts are played; the same for all of a call."""

    engine: RolloutEngine
    vocab: int
    decode: Decode
    end_token_ids: frozenset[int]
    """The model's own end tokens: not part of the text."""
    make_env: MakeEnv | None
    make_work: MakeWork | None
    codec: Codec | None
    has_env: Callable[[Task], bool]
    limits: EpisodeLimits
    pace: Pace
    alone: AbstractAsyncContextManager[None]
    """Around each attempt whose environment gets a process of its own: there are only so many at once."""


@dataclass
class Episode:
    """A rollout in the making."""

    task: Task
    index: int
    sampling: Sampling
    key_of: Callable[[Fork], int]
    """The key of the random numbers of a fork."""
    alone: bool = False
    """Its environment gets a process of its own."""
    attempt: int = 0
    """How often the rollout has failed before."""
    conversation: list[Message] = field(default_factory=list)
    """All messages so far, where there is an environment; a plain prompt is a user's."""
    said: list[Message] = field(default_factory=list)
    """Those after the prompt, in their order, whatever became of the history."""
    state: Json = None
    """What the environment told rewards last."""
    tools: tuple[ToolSpec, ...] = ()
    """What the policy may call."""
    strands: dict[Fork, Growing] = field(default_factory=dict)
    """(): the first one. (turn, 0): the conversation as it was rewritten after a turn. (turn, n): the n-th call of
    `world.chat` in a turn."""
    chats: int = 0
    """Calls of `world.chat`, those under way among them."""
    replies: list[array[int]] = field(default_factory=list)
    """The sampled tokens of each turn, without end tokens."""
    seconds: list[tuple[float, float]] = field(default_factory=list)
    """Of each turn: how long the reply was sampled, and how long the environment took."""
    session: str = field(default_factory=lambda: uuid4().hex)
    """Of its requests: one replica serves all."""
    reward: float | None = None
    """Sum of what the environment gave."""
    parts: dict[str, float] = field(default_factory=dict)
    """The same of its further numbers, by name."""

    def __post_init__(self) -> None:
        self.strand = self.begin((), self.task.token_ids)
        """The one that the conversation continues."""
        self.prompt_tokens = len(self.task.token_ids)
        """Of the task, with the descriptions of the tools."""

    def begin(self, fork: Fork, token_ids: Iterable[int]) -> Growing:
        """A strand that begins with these tokens."""
        self.strands[fork] = strand = Growing(token_ids, self.key_of(fork))
        return strand

    @property
    def sampled(self) -> int:
        """Sampled tokens of the conversation; forks of the environment have their own limit."""
        return sum(strand.sampled for fork, strand in self.strands.items() if fork[1:] in ((), (0,)))

    def add_step(self, step: EnvStep) -> None:
        """The environment's numbers for the last turn."""
        turns = self.strand.turns
        self.state = self.state if step.state is None else step.state
        if step.reward is not None:
            turns[-1] = replace(turns[-1], reward=step.reward)
            self.reward = number(
                (self.reward or 0.0) + step.reward, " as the sum of the environment's rewards"
            )
        for name, value in step.parts.items():
            self.parts[name] = number(self.parts.get(name, 0.0) + value, f" as the sum of the part {name!r}")

    @property
    def begun(self) -> str:
        """What the prompt has of the next reply."""
        last = self.conversation[-1]
        return last.content if last.role == "assistant" else ""

    def add_reply(self, reply: Message) -> None:
        """What the policy has said, as a message. Its calls get ids that are unique in the rollout, of nine letters and
        digits, as Mistral's templates demand."""
        turn = len(self.replies)
        calls = tuple(replace(c, id=c.id or f"c{turn:04}{n:04}") for n, c in enumerate(reply.tool_calls, 1))
        reply = replace(reply, tool_calls=calls)
        if self.begun:  # the reply has it
            self.conversation.pop()
        self.conversation.append(reply)
        self.said.append(reply)
        turns = self.strand.turns
        calls_made = len(calls) if self.tools else None
        turns[-1] = replace(turns[-1], calls=calls_made, malformed=reply.malformed)

    def refuse_reply(self, why: str) -> None:
        """Nothing can follow the last reply."""
        turns = self.strand.turns
        turns[-1] = replace(turns[-1], malformed=why)

    def rollout(
        self, reason: FinishReason, stop: StopReason | None, *, decode: Decode, error: str | None
    ) -> Rollout:
        scores = {"env": self.reward} if self.reward is not None else {}
        scores |= {f"env/{name}": value for name, value in self.parts.items()}
        return Rollout(
            task=self.task,
            index=self.index,
            strands=tuple(self.strands[fork].strand() for fork in sorted(self.strands)),
            finish_reason=reason,
            stop_reason=stop,
            messages=tuple(self.said),
            state=self.state,
            text=decode([token for reply in self.replies for token in reply]),
            reward=self.reward if error is None else None,
            reward_parts=scores if error is None else {},
            error=error,
            seconds=tuple(self.seconds),
        )


async def play_groups(
    engine: RolloutEngine,
    tasks: Sequence[Task],
    *,
    group_size: int,
    sampling: Sampling,
    by_source: Mapping[str, Sampling] = MappingProxyType({}),
    seed: int,
    purpose: str,
    decode: Decode,
    end_token_ids: Collection[int],
    vocab: int = ANY_TOKEN,
    timeout_s: float,
    pace: Pace | None = None,
    retries: int = 0,
    make_env: MakeEnv | None = None,
    make_work: MakeWork | None = None,
    codec: Codec | None = None,
    has_env: Callable[[Task], bool] = lambda task: True,
    limits: EpisodeLimits | None = None,
    alone: AbstractAsyncContextManager[None] | None = None,
    ended: Callable[[Task], object] = lambda task: None,
    extra: Callable[[int], object] = lambda tokens: None,
) -> list[Group]:
    """`group_size` rollouts of each task, all at once, in the order of the tasks. by_source: sampling of the tasks of
    single sources. vocab: tokens that the model knows; a reply with others is an error of its rollout.

    Without `make_env` a rollout is one reply to the task's tokens. With it, the environment's first messages follow the
    prompt, and the environment answers every reply, within the `limits`; `make_work` makes what it may ask of the run
    beside replies. has_env: whether a task has an environment at all; else its rollouts are one reply, too. A rollout
    that raises or takes longer than `timeout_s` (or than `pace` allows) is retried `retries` times; then it ends as
    `abort`, with its finished turns and the reason in `error`. It never affects other rollouts. alone: entered for each
    attempt whose environment gets a process of its own. ended: called with its task when a rollout is over. extra:
    called with the number of sampled tokens that are in no rollout that is returned: of attempts before the last, or of
    all where the call is cancelled. Raises EnvBroken if environments cannot be played any more.
    """
    if make_env is not None and codec is None:
        raise ValueError("make_env needs a codec, which encodes the environment's messages as tokens")
    play = Play(
        engine=engine,
        vocab=vocab,
        decode=decode,
        end_token_ids=frozenset(end_token_ids),
        make_env=make_env,
        make_work=make_work,
        codec=codec,
        has_env=has_env,
        limits=limits or EpisodeLimits(),
        pace=pace or Pace(timeout_s),
        alone=alone or nullcontext(),
    )

    sampled = 0

    async def one(task: Task, index: int) -> Rollout:
        nonlocal sampled
        lost, by_itself, tried = 0, False, 0

        def key_of(fork: Fork) -> int:
            return rollout_key(seed, task.uid, index, purpose=purpose, fork=fork)

        while True:
            episode = Episode(task, index, by_source.get(task.source, sampling), key_of, by_itself, tried)
            try:
                # a wait to enter is no time of the rollout
                async with play.alone if by_itself else nullcontext():
                    rollout = await _finish(episode, play)
            except EnvRestarted as error:  # of another episode, as far as is known: not a try of this one
                lost += 1
                by_itself = by_itself or error.suspect or lost == MOST_LOST
                continue
            finally:
                sampled += sum(strand.sampled for strand in episode.strands.values())
            tried += 1
            if rollout.error is None or tried > retries:
                ended(task)
                return rollout
            log.info("rollout %d of task %d is retried", index, task.uid)

    rollouts: list[Rollout] = []
    try:
        rollouts = await asyncio.gather(*(one(task, index) for task in tasks for index in range(group_size)))
    finally:
        extra(sampled - sum(r.tokens for r in rollouts))
    return [Group(task, each) for task, each in zip(tasks, zip(*[iter(rollouts)] * group_size))]


async def _finish(episode: Episode, play: Play) -> Rollout:
    """Play one episode to its end, whatever the end is."""
    reason: FinishReason = "abort"
    stop: StopReason | None = "fault"
    error: str | None = None
    limit_s, start = play.pace.limit_s, time.monotonic()
    answered = play.make_env is not None and play.has_env(episode.task)

    def begin() -> None:
        """The world is set up: from here on the time is the policy's and the world's together."""
        nonlocal start
        start = time.monotonic()
        clock.reschedule(asyncio.get_running_loop().time() + limit_s)

    try:
        async with asyncio.timeout(limit_s + (play.limits.setup_s if answered else 0.0)) as clock:
            if answered:
                reason, stop = await _turns(episode, play, begin)
            else:
                reason, stop = await _reply(episode, play), None
        play.pace.finished(time.monotonic() - start)
    except (EnvRestarted, EnvBroken):
        raise
    except Exception as caught:  # engines and environments are foreign code: one rollout, not the run
        late = isinstance(caught, TimeoutError) and clock.expired()
        stop = "time" if late else "fault"
        said = f"not finished within {play.pace.said(limit_s)}" if late else raised(caught)
        error = f"{said} (after turn {len(episode.replies)})" if episode.replies else said
        trace = None if late else play.pace.untold(caught)
        log.info("rollout %d of task %d aborted: %s", episode.index, episode.task.uid, error, exc_info=trace)
    return episode.rollout(reason, stop, decode=play.decode, error=error)


def raised(error: Exception) -> str:
    """'ValueError: text (env.py:12)'; without the place where the error is ours, and says itself what is wrong."""
    if isinstance(error, EnvFault):
        return f"env {error}"
    return f"{type(error).__name__}: {error}" if isinstance(error, WhetError) else describe(error)


# ---------------------------------------------------------------- turns


async def _turns(
    episode: Episode, play: Play, begin: Callable[[], object]
) -> tuple[FinishReason, StopReason]:
    """The policy and the environment in turn. begin: called once the environment is set up."""
    assert play.codec is not None
    play = replace(play, codec=play.codec.of(episode.task.chat_template_kwargs))
    assert play.make_env is not None
    ask, own = partial(_chat, episode, play), key(episode.key_of(()), "env")
    work = None if play.make_work is None else play.make_work(episode.task, episode.index)
    world = World(own, ask, work=work, alone=episode.alone, index=episode.index, attempt=episode.attempt)
    env = play.make_env(episode.task, world)
    try:
        ended = await _converse(episode, play, env, world, begin)
        episode.reward = episode.reward or 0.0
        return ended
    finally:
        await _close(env)


async def _converse(
    episode: Episode, play: Play, env: Env, world: World, begin: Callable[[], object]
) -> tuple[FinishReason, StopReason]:
    codec = play.codec
    assert codec is not None
    await _open(episode, play, env)
    begin()
    for turn in range(1, play.limits.max_turns + 1):
        reason = await _reply(episode, play)
        world.begin_turn()
        episode.add_reply(codec.parse_reply(episode.replies[-1].tolist(), episode.tools, episode.begun))
        with _environment_timed(episode):
            step = as_step(await env.step(episode.conversation[-1]))
        if step.fault is not None:
            raise EnvFault(f"fault: {words(step.fault, MOST_SAID)}")
        episode.add_step(step)
        # in this order: what the environment says, the limits of the reply, those of the rollout
        if step.done:  # a limit of replies is the same one, whoever counts them
            return "length" if step.stop == "turns" else reason, step.stop or "done"
        if reason == "length" and play.limits.max_tokens_per == "rollout":
            return reason, "tokens" if _left(episode, play, 0) < 1 else "context"
        if turn == play.limits.max_turns:
            return "length", "turns"
        if play.limits.max_cost is not None and episode.parts.get("cost", 0.0) >= play.limits.max_cost:
            return "length", "cost"
        try:
            stop = _observe(episode, play, step, (turn, 0))
        except ReplyRefused as error:
            episode.refuse_reply(str(error))
            return reason, "malformed"
        if stop is not None:
            return "length", stop
    return "length", "turns"


@contextmanager
def _environment_timed(episode: Episode) -> Iterator[None]:
    """The seconds inside are those of the environment in the last turn."""
    start = time.monotonic()
    try:
        yield
    finally:
        episode.seconds[-1] = episode.seconds[-1][0], time.monotonic() - start


async def _open(episode: Episode, play: Play, env: Env) -> None:
    """The prompt as the policy gets it: with the tools, and with what the environment says first."""
    assert play.codec is not None
    task = episode.task
    first = as_messages(await env.first(), "first")
    more = as_tools(getattr(env, "tools", ()))
    episode.tools = tuple(more) or task.tools
    if isinstance(task.prompt, str):
        if first or more:
            raise WhetError(
                "the environment's first messages follow a prompt of chat messages, as do its tools, and this one is "
                "plain text: set data.chat=true, or give prompts as lists of messages"
            )
        episode.conversation = [Message("user", task.prompt)]
        return
    episode.conversation, episode.said = [*task.prompt, *first], first
    try:
        if more:
            episode.prompt_tokens = len(play.codec.encode_prompt(task.prompt, episode.tools))
        if first or more:
            episode.strand = episode.begin((), play.codec.encode_prompt(episode.conversation, episode.tools))
    except ConfigError as error:  # it is so for every task
        raise EnvBroken(str(error)) from error
    if (given := _given(episode, episode.strand)) > play.limits.observation_tokens:
        raise WhetError(
            f"the environment's first messages have {given} tokens, more than "
            f"rollout.env.observation_tokens={play.limits.observation_tokens} allows"
        )
    if play.limits.tokens_after_prompt is not None and given >= play.limits.tokens_after_prompt:
        raise WhetError(
            f"the environment's first messages have {given} tokens; rollout.env.tokens_after_prompt="
            f"{play.limits.tokens_after_prompt} leaves none for a reply"
        )
    length, most = len(episode.strand.token_ids), play.limits.max_total_tokens
    if most is not None and length >= most:
        raise WhetError(
            f"the prompt has {length} tokens with the environment's tools and first messages; "
            f"data.max_total_tokens={most} leaves none for a reply; raise data.max_prompt_tokens, and max_total_tokens "
            "where it is given"
        )
    if play.limits.input_tokens is not None and length > play.limits.input_tokens:
        raise WhetError(
            f"the prompt has {length} tokens with the environment's tools and first messages, more than "
            f"rollout.env.input_tokens={play.limits.input_tokens} allows"
        )


def _observe(episode: Episode, play: Play, step: EnvStep, fork: Fork) -> StopReason | None:
    """Add the environment's messages, if the limits leave room for them and for a reply: else the limit that does not.
    A conversation that does not extend the tokens there begins a strand, named `fork`."""
    assert play.codec is not None
    if not step.messages and step.history is None:
        raise EnvFault(
            "bad value: EnvStep with done=False, but without messages or a history; expected what the policy "
            "replies to, or done=True"
        )
    strand, there = episode.strand, episode.strand.token_ids.tolist()
    before = episode.conversation if step.history is None else step.history
    conversation, whole = [*before, *step.messages], None
    if step.history is None:
        more = play.codec.encode_observation(there, conversation, len(step.messages), episode.tools)
        whole = None if more is None else [*there, *more]
    if whole is None:
        if step.history is None and isinstance(episode.task.prompt, str):
            raise WhetError(
                "the chat template rewrites earlier turns, and this prompt is plain text, which it cannot render: "
                "give prompts as lists of messages, or another template (tokenizer.chat_template)"
            )
        whole = play.codec.encode_prompt(conversation, episode.tools)
    extends = whole[: len(there)] == there
    sampled = strand.sampled if extends else 0 if step.history is not None else episode.sampled
    if len(whole) - sampled - episode.prompt_tokens > play.limits.observation_tokens:
        return "observations"
    if play.limits.input_tokens is not None and len(whole) > play.limits.input_tokens:
        return "context"
    if _left(episode, play, len(whole)) < 1:
        return "tokens" if _left(episode, play, 0) < 1 else "context"
    episode.conversation, episode.said = conversation, [*episode.said, *step.messages]
    if extends:
        strand.add_observation(whole[len(there) :])
    else:
        episode.strand = episode.begin(fork, whole)
    return None


async def _close(env: Env) -> None:
    """End an environment; how that goes is of no effect on the rollout."""
    if (close := getattr(env, "close", None)) is None:
        return
    try:
        async with asyncio.timeout(CLOSE_S):
            await close()
    except Exception as error:  # noqa: BLE001  foreign code
        log.info("environment: its close failed: %s", describe(error))


def _given(episode: Episode, strand: Growing) -> int:
    """Tokens of a strand that are neither sampled nor the task's prompt."""
    return len(strand.mask) - strand.sampled - episode.prompt_tokens


def _left(episode: Episode, play: Play, length: int) -> int:
    """Tokens that may still be sampled in the conversation, in a strand of this length."""
    most, prompt = episode.sampling.max_tokens, episode.prompt_tokens
    return play.limits.left(most, sampled=episode.sampled, prompt=prompt, length=length)


async def _reply(episode: Episode, play: Play) -> FinishReason:
    """One turn of the policy."""
    sampling = replace(episode.sampling, max_tokens=_left(episode, play, len(episode.strand.token_ids)))
    start = time.monotonic()
    completion, reply = await _sample(episode.strand, sampling, play, episode.session)
    episode.replies.append(array("i", reply))
    episode.seconds.append((time.monotonic() - start, 0.0))
    return completion.finish_reason


async def _sample(
    strand: Growing, sampling: Sampling, play: Play, session: str
) -> tuple[Completion, list[int]]:
    """A completion of a strand, added to it, and its tokens without an end token."""
    least = min(sampling.min_tokens, sampling.max_tokens)
    sampling = replace(sampling, key=strand.key, min_tokens=least)
    request = Request(id=uuid4().hex, session=session, prompt=tuple(strand.token_ids), sampling=sampling)
    completion = await play.engine.generate(request)
    promised = play.engine.can.tells_logprobs(sampling)
    check_reply(completion, most=sampling.max_tokens, vocab=play.vocab, promised=promised)
    strand.add_completion(completion)
    tokens = completion.token_ids
    ends = ends_of(sampling, play.end_token_ids)
    ended = completion.finish_reason == "stop" and bool(tokens) and tokens[-1] in ends
    return completion, tokens[:-1] if ended else tokens


async def _chat(
    episode: Episode, play: Play, fork: Fork, messages: list[Message], settings: Mapping[str, Json]
) -> Message:
    """The environment asks the policy: the conversation and the reply are another strand of the rollout."""
    assert play.codec is not None
    episode.chats += 1
    if episode.chats > MOST_CHATS:
        raise WhetError(f"more than {MOST_CHATS} calls of world.chat in one rollout")
    sampling = chat_sampling(episode.sampling, settings)
    strand = Growing(play.codec.encode_prompt(messages), episode.key_of(fork))
    if (given := _given(episode, strand)) > play.limits.observation_tokens:
        raise WhetError(
            f"a conversation of world.chat has {given} tokens beyond the length of the prompt, more than "
            f"rollout.env.observation_tokens={play.limits.observation_tokens} allows"
        )
    if play.limits.max_total_tokens is not None:
        room = play.limits.max_total_tokens - len(strand.token_ids)
        if room < 1:
            raise WhetError(
                f"a conversation of world.chat has {len(strand.token_ids)} tokens; data.max_total_tokens="
                f"{play.limits.max_total_tokens} leaves none for a reply"
            )
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
    _, reply = await _sample(strand, sampling, play, episode.session)
    episode.strands[fork] = strand
    begun = messages[-1].content if messages and messages[-1].role == "assistant" else ""
    return play.codec.parse_reply(reply, begun=begun)
