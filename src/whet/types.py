"""The types that are sent between processes.

Frozen dataclasses of plain Python values, but for the tokens of a rollout, which are read-only numpy arrays.
No torch, no Ray, no network here (layer 0).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whet.secrets import redact

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end token or stop string; `length`: the token limit; `abort`: dropped (deadline, error)."""

StopReason = Literal[
    "done", "truncated", "tokens", "context", "turns", "cost", "observations", "calls", "malformed", "time", "fault",
]  # fmt: skip
"""Why an episode of several turns ended. `done`: its environment says so. A limit: `truncated` (one of the
environment's own), `tokens` (sampled), `context` (of a full strand), `turns`, `cost` (of the environment),
`observations` (tokens of the environment), `calls` (of tools), `malformed` (replies that cannot be read), `time`.
`fault`: something broke that the policy did not cause."""

LIMITS: tuple[StopReason, ...] = ("truncated", "tokens", "context", "turns", "cost", "observations", "calls")
"""Limits that end an episode which would have gone on. A reply that cannot be read ends it by its own fault."""

Metrics = dict[str, float]
"""Numbers of one step, named `stage/what_unit`."""

Json = Any
"""A value made of dict, list, str, int, float, bool and None."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool, as it is described to the policy."""

    name: str
    """What calls name it by."""
    description: str = ""
    parameters: Json = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments, an object."""

    def to_json(self) -> dict[str, Json]:
        """In the form that chat templates and OpenAI's interface expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @staticmethod
    def from_json(value: dict[str, Json]) -> ToolSpec:
        """Of OpenAI's form, or of the function alone. TypeError or LookupError for what is neither."""
        function = value.get("function", value)
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        return ToolSpec(function["name"], function.get("description") or "", parameters)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as the policy has written it."""

    name: str
    """Of the tool; there may be none of this name."""
    arguments: dict[str, Json] = field(default_factory=dict)
    id: str = ""
    """Names the call for the message with its result."""

    def to_json(self) -> dict[str, Json]:
        """In the form that chat templates expect: OpenAI's, the arguments as a dict."""
        named = {"id": self.id} if self.id else {}
        return {"type": "function", **named, "function": {"name": self.name, "arguments": self.arguments}}

    @staticmethod
    def from_json(value: dict[str, Json]) -> ToolCall:
        """Of OpenAI's form, the arguments as a dict or as JSON text, or of the function alone. ValueError, TypeError
        or LookupError for what is neither."""
        function = value.get("function", value)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict) or not isinstance(function["name"], str):
            raise ValueError(f"a tool call needs a name and a dict of arguments, not {str(function)[:80]}")
        return ToolCall(function["name"], arguments, value.get("id") or "")


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, in the form that chat templates expect."""

    role: str
    """system, user, assistant or tool."""
    content: str
    """The text, without reasoning and calls."""
    reasoning: str | None = None
    """The reasoning of an assistant before its answer; templates call it reasoning_content."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool's result: the call that it answers."""
    name: str | None = None
    """Of a tool's result: the tool."""
    malformed: str | None = None
    """Of a reply: why its tool calls or its reasoning could not be read; `content` is then the whole text."""

    def to_json(self) -> dict[str, Json]:
        """OpenAI's form; what is absent is left out."""
        value: dict[str, Json] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            value["reasoning_content"] = self.reasoning
        if self.tool_calls:
            value["tool_calls"] = [call.to_json() for call in self.tool_calls]
        rest = {"tool_call_id": self.tool_call_id, "name": self.name, "malformed": self.malformed}
        return value | {key: entry for key, entry in rest.items() if entry is not None}

    @staticmethod
    def from_json(value: dict[str, Json]) -> Message:
        """What `to_json` made. ValueError, TypeError or LookupError for anything else."""
        calls = tuple(ToolCall.from_json(call) for call in value.get("tool_calls") or ())
        rest = {key: value.get(key) for key in ("tool_call_id", "name", "malformed")}
        return Message(value["role"], value["content"], value.get("reasoning_content"), calls, **rest)

    @property
    def said(self) -> str:
        """The whole text of the message: reasoning, content and calls."""
        calls = "".join(json.dumps({"name": c.name, "arguments": c.arguments}) for c in self.tool_calls)
        return f"{self.reasoning or ''}{self.content}{calls}"


Reply = str | Message | tuple[int, ...]
"""A given reply: its text, a message if it has calls or reasoning, or its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt, with the data that a reward needs to score the reply."""

    uid: int
    """Number of this draw in the stage's task stream: unique in a stage, part of the sampling seed."""
    source: str
    """Label of the data source, for metrics per source."""
    prompt: str | tuple[Message, ...]
    """Chat messages (then the chat template is applied) or plain text (then it is not); '' where the response is a
    whole text to learn."""
    answer: Json = None
    """The reference answer, passed to rewards untouched."""
    response: str | Message | tuple[int, ...] | None = None
    """A demonstration (SFT) or the chosen reply of a preference pair (DPO); a message if it has calls or reasoning; its
    tokens if the row has those."""
    rejected: str | Message | tuple[int, ...] | None = None
    """The rejected reply of a preference pair (DPO)."""
    extra: dict[str, Json] = field(default_factory=dict)
    """All further columns of the row, passed to rewards untouched."""
    token_ids: tuple[int, ...] = ()
    """The prompt as tokens, after template and truncation. Filled by the task stream."""
    tools: tuple[ToolSpec, ...] = ()
    """Tools that the policy may call; the chat template describes them."""
    chat_template_kwargs: dict[str, Json] = field(default_factory=dict)
    """Variables of the chat template, which override those of the run."""

    def to_json(self) -> dict[str, Json]:
        value: dict[str, Json] = {f.name: getattr(self, f.name) for f in fields(self)}
        if not isinstance(self.prompt, str):
            value["prompt"] = [message.to_json() for message in self.prompt]
        for name in ("response", "rejected"):
            if isinstance(value[name], Message):
                value[name] = value[name].to_json()
        return value | {"tools": [tool.to_json() for tool in self.tools]}

    @staticmethod
    def from_json(value: dict[str, Json]) -> Task:
        prompt = value["prompt"]
        if not isinstance(prompt, str):
            prompt = tuple(Message.from_json(m) for m in prompt)
        tools = tuple(ToolSpec.from_json(tool) for tool in value.get("tools") or ())
        replies = {n: value[n] for n in ("response", "rejected") if isinstance(value.get(n), dict | list)}
        value |= {n: Message.from_json(r) if isinstance(r, dict) else tuple(r) for n, r in replies.items()}
        return Task(
            **{**value, "prompt": prompt, "token_ids": tuple(value.get("token_ids") or ()), "tools": tools}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is sampled. Filters apply in the order of the fields, top to bottom."""

    repetition_penalty: float = 1.0
    """Divisor of positive logits, factor on negative ones, of tokens that occurred before; 1 is off."""
    temperature: float = 1.0
    """0 is greedy: the token with the largest logit, the smallest id on a tie."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability; 1 is off."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the largest probability; 0 is off."""
    max_tokens: int = 256
    """Longest reply, in tokens, its end token included."""
    min_tokens: int = 0
    """End tokens cannot be sampled before this many tokens, and a stop string complete with them ends nothing."""
    stop: tuple[str, ...] = ()
    """Stop strings: sampling ends once the reply's text contains one. Its tokens stay in the reply."""
    stop_token_ids: tuple[int, ...] = ()
    """End tokens beside the model's own end-of-text token. A sampled end token is part of the reply."""
    ignore_eos: bool = False
    """Continue to max_tokens, also after an end token. Only without stop and stop_token_ids."""
    key: int = 0
    """Stream of random numbers (`seeds.rollout_key`): equal key and equal prompt give equal tokens in any batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One reply that a rollout engine is asked for."""

    id: str
    """Unique among all requests in flight; a server aborts a request by it."""
    session: str
    """The episode that the reply is a turn of. Its turns share a history, so they are best served by one replica."""
    prompt: tuple[int, ...]
    sampling: Sampling
    adapter: str | None = None
    """Name of the adapter to sample with, for engines that serve several. None: the policy."""
    least_version: int | None = None
    """The request waits until the engine's weights are at least of this version. None: any version."""


class VersionSpan(NamedTuple):
    """The sampled tokens `start` to `end` (without the last) are of one version of the policy."""

    version: int
    start: int
    end: int


def spans_of(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Versions of single tokens as spans."""
    spans, start = [], 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append(VersionSpan(version, start, end))
        start = end
    return tuple(spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of an engine for one request: the new tokens only."""

    token_ids: list[int]
    """Of the reply alone, a sampled end token included."""
    logprobs: list[float] | None
    """log pi(token) under softmax(logits / temperature): the distribution that is trained. At temperature 0: of
    softmax(logits). None: the engine does not return them (`Capabilities.logprobs`)."""
    sample_logprobs: list[float] | None
    """log-prob under the distribution sampled from, after penalty and filters; 0 at temperature 0. None: the engine
    does not return them."""
    spans: tuple[VersionSpan, ...]
    """Policy versions of the tokens: one span after the other, from the first token to the last."""
    finish_reason: FinishReason
    experts: ExpertIds | None = field(default=None, compare=False)
    """[T - 1, L, E] of the T tokens of prompt and reply but the last, which no router has seen: see `Strand.experts`.
    None: the engine was not asked for them (`EngineInputs.experts`)."""

    @property
    def versions(self) -> list[int]:
        """Policy version of each token."""
        found: list[int] = []
        for version, start, end in self.spans:
            found += [version] * (end - start)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Tokens whose log-probs an engine is asked for."""

    token_ids: tuple[int, ...]
    start: int
    """The first token that is scored: at least 1, as a log-prob needs a token before it."""
    temperature: float = 1.0
    """Above 0."""
    top_k: int = 0
    """So many likeliest tokens of each position come with their log-probs. 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probs of given tokens under softmax(logits / temperature), without filters."""

    version: int
    """Of the weights."""
    logprobs: list[float]
    """One for each scored token."""
    top: list[list[tuple[int, float]]]
    """For each scored token the `top_k` likeliest tokens of its position with their log-probs, likeliest first; []
    where none were asked for."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a receiver of weights answers to a version."""

    receiver: str
    version: int
    proof: str = ""
    """What shows that it has the weights that were sent: the digest of their manifest, or a server's checksum. Empty
    if the version was not taken, or if the weights were given by this process itself, where nothing travels."""
    error: str = ""
    measured: dict[str, float] = field(default_factory=dict)
    """What was measured to prove it, by the name of the metric: of engines that no digest can be asked of."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the policy within a rollout, before the environment answered it or the rollout ended."""

    start: int
    """Its first token, as an index into its strand's tokens."""
    end: int
    """The token after its last one."""
    finish_reason: FinishReason
    reward: float | None = None
    """Reward of the environment for this turn. None: no reward."""
    calls: int | None = None
    """Number of tool calls. None: the policy has no tools."""
    malformed: str | None = None
    """Why its calls or its reasoning could not be read."""


ExpertIds = NDArray[Any]
"""Numbers of experts, from 0: uint8 or int16, see `expert_type`."""


def expert_type(experts: int) -> type[np.uint8] | type[np.int16]:
    """What holds the numbers of so many experts."""
    return np.uint8 if experts <= 256 else np.int16


TOKEN_TYPES: dict[str, Any] = {
    "token_ids": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "sample_logprobs": np.float32,
    "versions": np.int32,
}
"""What a strand has of each token: 17 bytes."""


def _array(values: ArrayLike, dtype: Any) -> NDArray[Any]:
    """A read-only array; one that has the type already is not copied."""
    view = np.asarray(values, dtype).view()
    view.flags.writeable = False
    return view


def _equal(a: ExpertIds | None, b: ExpertIds | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strand:
    """One token sequence of a rollout: no prompt/response halves, no padding.

    Example (two turns, `p` prompt, `a` sampled, `o` from the environment):
        token_ids  p p p a a o o a
        mask       0 0 0 1 1 0 0 1
    Arrays are all of the length of `token_ids`, and read-only; where mask is false, log-probs are 0.0 and the version
    is -1. Log-probs of sampled tokens are NaN if the engine does not return them (`Completion.logprobs`): then no batch
    has them (`Batch.logp_sample_N`). Two strands are equal if their arrays are bitwise equal.
    """

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    """Sampled by the policy, and trained in this strand."""
    logprobs: NDArray[np.float32]
    """In nats, see `Completion.logprobs`."""
    sample_logprobs: NDArray[np.float32]
    """In nats, see `Completion.sample_logprobs`."""
    versions: NDArray[np.int32]
    """Of the policy that sampled each token."""
    turns: tuple[Turn, ...] = ()
    """Replies of the policy that are trained in this strand, in their order. (): the reply is data's."""
    experts: ExpertIds | None = None
    """[T, L, E] the E experts of each of T tokens in each of L layers of the model, in the order in which the router of
    the policy that sampled chose them; 0 in layers without a router, and for tokens that no router has seen, as the
    last one. None: they were not recorded (train.router_replay)."""

    def __post_init__(self) -> None:
        for name, dtype in TOKEN_TYPES.items():
            object.__setattr__(self, name, _array(getattr(self, name), dtype))
        if self.experts is not None:
            if len(self.experts) != len(self.token_ids):
                raise ValueError(f"experts of {len(self.experts)} tokens for {len(self.token_ids)}")
            object.__setattr__(self, "experts", _array(self.experts, self.experts.dtype))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Strand):
            return NotImplemented
        return (
            self.turns == other.turns
            and _equal(self.experts, other.experts)
            and all(getattr(self, name).tobytes() == getattr(other, name).tobytes() for name in TOKEN_TYPES)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.mask.sum())

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the first sampled one; all, if none was sampled."""
        return int(self.mask.argmax()) if self.mask.any() else len(self.mask)

    @property
    def sampled_versions(self) -> set[int]:
        """Policy versions of the sampled tokens."""
        return set(self.versions.tolist()) - {-1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished episode: what is scored and counted.

    It has one strand, unless its history was rewritten (a chat template, a summary) or it forked: then what was sampled
    after a rewritten history or a fork is in a strand of its own, which begins with that history. Each sampled token is
    trained in exactly one strand; copies of it in other strands are context, with mask false. ValueError without any.
    """

    task: Task
    index: int
    """Place in its group, from 0."""
    strands: tuple[Strand, ...]
    """At least one, in the order in which they were begun."""
    finish_reason: FinishReason
    stop_reason: StopReason | None = None
    """Why its episode ended; None for a single reply."""
    messages: tuple[Message, ...] = ()
    """Messages of its episode after the prompt: replies and answers of the environment, in order. Empty for a single
    reply."""
    state: Json = None
    """The last `EnvStep.state` of its environment, which rewards may read."""
    text: str = ""
    """The reply as text (all sampled tokens, without end tokens): for rewards and for users."""
    reward: float | None = None
    """None: not scored (yet, or the reward failed; then `error` has the cause)."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The value of each reward by its name, its further numbers as NAME/KEY; an environment's are `env`, env/NAME."""
    baseline: float | None = None
    """Reward of the greedy reply to the same task, where the advantage compares with it (ReMax)."""
    answer: str | None = None
    """The final answer a reward extracted from the reply, for majority voting."""
    error: str | None = None
    """Why the rollout has no reward: text of foreign code, without known secrets."""
    seconds: tuple[tuple[float, float], ...] = field(default=(), compare=False)
    """Of each reply: how long it was sampled, and how long its environment took to answer. Equal rollouts differ in it,
    so it is no part of what is stored, sent or compared."""

    def __post_init__(self) -> None:
        if not self.strands:
            raise ValueError(
                f"rollout {self.index} of task {self.task.uid} has no strand; it needs one or more"
            )
        if self.error is not None:
            object.__setattr__(self, "error", redact(self.error))

    @property
    def is_truncated(self) -> bool:
        """Whether a limit ended it: of the episode, or of its single reply."""
        if self.stop_reason is None:
            return self.finish_reason == "length"
        return self.stop_reason in LIMITS

    @classmethod
    def one_strand(
        cls,
        *,
        token_ids: ArrayLike,
        mask: ArrayLike,
        logprobs: ArrayLike,
        sample_logprobs: ArrayLike,
        versions: ArrayLike,
        turns: tuple[Turn, ...] = (),
        **rest: Any,
    ) -> Rollout:
        """A rollout whose only strand has these tokens. rest: its other fields."""
        strand = Strand(
            token_ids=np.asarray(token_ids, np.int32),
            mask=np.asarray(mask, np.bool_),
            logprobs=np.asarray(logprobs, np.float32),
            sample_logprobs=np.asarray(sample_logprobs, np.float32),
            versions=np.asarray(versions, np.int32),
            turns=turns,
        )
        return cls(strands=(strand,), **rest)

    @property
    def strand(self) -> Strand:
        """The only strand. ValueError where there are several: no one of them is the rollout."""
        if len(self.strands) > 1:
            raise ValueError(
                f"rollout {self.index} of task {self.task.uid} has {len(self.strands)} strands, expected one: go "
                "through `strands`"
            )
        return self.strands[0]

    @property
    def tokens(self) -> int:
        """Number of sampled tokens, of all strands."""
        return sum(strand.tokens for strand in self.strands)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Replies of the policy, strand after strand; start and end count within the strand. Their rewards are a part
        of `reward`."""
        return tuple(turn for strand in self.strands for turn in strand.turns)

    @property
    def sampled_versions(self) -> set[int]:
        """Policy versions of the sampled tokens, of all strands."""
        first, *others = self.strands
        return first.sampled_versions.union(*(strand.sampled_versions for strand in others))

    def without_reward(self) -> Rollout:
        """Scored 0, parts and turns included."""
        strands = (
            replace(strand, turns=tuple(replace(turn, reward=None) for turn in strand.turns))
            for strand in self.strands
        )
        parts = dict.fromkeys(self.reward_parts, 0.0)
        return replace(self, reward=0.0, reward_parts=parts, strands=tuple(strands))

    def scored(self, reward: float | None, parts: dict[str, float], error: str | None = None) -> Rollout:
        return replace(self, reward=reward, reward_parts=parts, error=error)


def given_tokens(token_ids: Sequence[int], mask: Sequence[int]) -> dict[str, Any]:
    """What a `Strand` has of tokens that no policy of this run sampled: demonstrations, pairs."""
    zeros = np.zeros(len(mask), np.float32)
    return {
        "token_ids": np.array(token_ids, np.int32),
        "mask": np.array(mask, np.bool_),
        "logprobs": zeros,
        "sample_logprobs": zeros,
        "versions": np.full(len(mask), -1, np.int32),
    }


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task."""

    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(rollout.tokens for rollout in self.rollouts)


class WhetError(Exception):
    """An error that the user can fix: what was given, what was expected, what to do. Exit code 2 before a run, 1 during
    it. Known secrets are removed from the message."""

    about: object = None
    """What it is an error of, for who says more of that: a source of data."""

    def __init__(self, *said: object) -> None:
        super().__init__(*(redact(part) if isinstance(part, str) else part for part in said))


class ConfigError(WhetError):
    """A config that cannot run."""


class Stopped(Exception):
    """A stop was requested while a step waited for other processes; nothing of that step was trained."""


class DataError(WhetError):
    """A data file or row that cannot be used."""


class ReplyRefused(DataError):
    """A reply of the policy that the chat template does not render, so no conversation can go on after it."""


class CheckpointError(WhetError):
    """A checkpoint that cannot be written or read."""
