"""The types that are sent between processes.

Frozen dataclasses of plain Python values: every one can be written as JSON and read back equal.
No torch, no Ray, no network here (layer 0).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from whet.secrets import redact

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end token or stop string; `length`: the token limit; `abort`: dropped (deadline, error)."""

Metrics = dict[str, float]
"""Numbers of one step, named `stage/what_unit`."""

Json = Any
"""A value made of dict, list, str, int, float, bool and None."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, in the form that chat templates expect."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt, with the data that a reward needs to score the reply.

    `prompt` is either chat messages (then the chat template is applied) or plain text (then it is not).
    """

    uid: int
    """Number of this draw in the stage's task stream: unique in a stage, part of the sampling seed."""
    source: str
    """Label of the data source, for metrics per source."""
    prompt: str | tuple[Message, ...]
    answer: Json = None
    """The reference answer, passed to rewards untouched."""
    response: str | None = None
    """A demonstration (SFT) or the chosen reply of a preference pair (DPO)."""
    rejected: str | None = None
    """The rejected reply of a preference pair (DPO)."""
    extra: dict[str, Json] = field(default_factory=dict)
    """All further columns of the row, passed to rewards untouched."""
    token_ids: tuple[int, ...] = ()
    """The prompt as tokens, after template and truncation. Filled by the task stream."""

    @staticmethod
    def from_json(value: dict[str, Json]) -> Task:
        prompt = value["prompt"]
        if not isinstance(prompt, str):
            prompt = tuple(Message(**m) for m in prompt)
        return Task(**{**value, "prompt": prompt, "token_ids": tuple(value["token_ids"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is sampled. Filters apply in the order of the fields, top to bottom."""

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0 is greedy: the token with the largest logit, the smallest id on a tie."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    """End tokens cannot be sampled before this many tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings: sampling ends once the reply's text contains one. Its tokens stay in the reply."""
    stop_token_ids: tuple[int, ...] = ()
    """End tokens beside the model's own end-of-text token. A sampled end token is part of the reply."""
    ignore_eos: bool = False
    key: int = 0
    """Stream of random numbers (`seeds.rollout_key`): equal key and equal prompt give equal tokens in any batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of an engine for one request: the new tokens only."""

    token_ids: list[int]
    logprobs: list[float]
    """log pi(token) under softmax(logits / temperature): the distribution that is trained. At temperature 0: of
    softmax(logits)."""
    sample_logprobs: list[float]
    """log-prob under the distribution sampled from, after penalty and filters; 0 at temperature 0."""
    versions: list[int]
    """Policy version of each token."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished episode as flat tokens: no prompt/response halves, no padding.

    Example (two turns, `p` prompt, `a` sampled, `o` from the environment):
        token_ids  p p p a a o o a
        mask       0 0 0 1 1 0 0 1
    Lists are all of the length of `token_ids`; where mask is 0, log-probs are 0.0 and the version is -1.
    """

    task: Task
    index: int
    """Place in its group, from 0."""
    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    sample_logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    text: str = ""
    """The reply as text (all sampled tokens, without end tokens): for rewards and for users."""
    reward: float | None = None
    """None: not scored (yet, or the reward failed; then `error` has the cause)."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    baseline: float | None = None
    """Reward of the greedy reply to the same task, where the advantage compares with it (ReMax)."""
    answer: str | None = None
    """The final answer a reward extracted from the reply, for majority voting."""
    error: str | None = None
    """Why the rollout has no reward: text of foreign code, without known secrets."""

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "error", redact(self.error))

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(self.mask)

    def to_json(self) -> dict[str, Json]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Json]) -> Rollout:
        return Rollout(**{**value, "task": Task.from_json(value["task"])})

    def scored(self, reward: float | None, parts: dict[str, float], error: str | None = None) -> Rollout:
        return replace(self, reward=reward, reward_parts=parts, error=error)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task."""

    task: Task
    rollouts: tuple[Rollout, ...]


class WhetError(Exception):
    """An error that the user can fix: what was given, what was expected, what to do. Exit code 2 before a run, 1 during
    it. Known secrets are removed from the message."""

    def __init__(self, *said: object) -> None:
        super().__init__(*(redact(part) if isinstance(part, str) else part for part in said))


class ConfigError(WhetError):
    """A config that cannot run."""


class Stopped(Exception):
    """A stop was requested while a step waited for other processes; nothing of that step was trained."""


class DataError(WhetError):
    """A data file or row that cannot be used."""


class CheckpointError(WhetError):
    """A checkpoint that cannot be written or read."""
