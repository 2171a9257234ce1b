"""Request checks that all engines share, and the rules by which a reply ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import ClassVar

import numpy as np

from whet.guard.foreign import shown
from whet.types import Completion, Request, Sampling, ScoreRequest, WhetError

Decode = Callable[[list[int]], str]
"""Tokens to text."""


class RequestError(WhetError):
    """A request that no engine of this kind can ever serve: an error of the caller, not of the engine."""


def check(request: Request, *, vocab: int, max_context: int, decodes: bool) -> None:
    """Raise RequestError if the request cannot be served, whatever else is running."""
    token_ids, s = request.prompt, request.sampling
    if request.adapter is not None:
        raise RequestError(
            f"the request names the adapter {request.adapter!r}, but this engine serves the policy alone; leave "
            "Request.adapter at None"
        )
    if not token_ids:
        raise RequestError("the prompt is empty; an engine needs at least one token to continue from")
    _check_tokens(token_ids, vocab)
    if not 0 <= s.min_tokens <= s.max_tokens or s.max_tokens < 1:
        raise RequestError(
            f"min_tokens={s.min_tokens}, max_tokens={s.max_tokens}: expected 0 <= min <= max, 1 <= max"
        )
    if len(token_ids) + s.max_tokens > max_context:
        raise RequestError(
            f"a prompt of {len(token_ids)} tokens with max_tokens={s.max_tokens} exceeds the engine's limit of "
            f"{max_context} tokens per rollout; shorten the prompt or lower rollout.sampling.max_tokens"
        )
    if s.stop and not decodes:
        raise RequestError(
            "stop strings need an engine with `decode`; pass `decode` to the engine, or use stop_token_ids"
        )
    if s.ignore_eos and (s.stop or s.stop_token_ids):
        raise RequestError(
            "ignore_eos always samples max_tokens tokens; it cannot be combined with stop or stop_token_ids"
        )


def check_score(request: ScoreRequest, *, vocab: int, max_context: int) -> None:
    """Raise RequestError if these tokens cannot be scored."""
    count = len(request.token_ids)
    if not 1 <= request.start < count:
        raise RequestError(
            f"tokens are to be scored from index {request.start} of {count}; expected at least 1 and below {count}"
        )
    _check_tokens(request.token_ids, vocab)
    if count > max_context:
        raise RequestError(f"{count} tokens are to be scored, the engine's limit is {max_context}")
    if not request.temperature > 0 or not 0 <= request.top_k <= vocab:
        raise RequestError(
            f"a score with temperature={request.temperature}, top_k={request.top_k}: expected a temperature above 0 "
            f"and 0 to {vocab} tokens"
        )


def _check_tokens(token_ids: Sequence[int], vocab: int) -> None:
    if not 0 <= min(token_ids) <= max(token_ids) < vocab:
        raise RequestError(
            f"the prompt has token ids {min(token_ids)} to {max(token_ids)}, the model's vocabulary is 0 to "
            f"{vocab - 1}; the tokenizer belongs to another model"
        )


# ---------------------------------------------------------------- replies


def torn(done: Completion) -> str | None:
    """Why versions or log-probs of a completion are not those of its tokens, if they are not."""
    n = len(done.token_ids)
    ends = [0, *(span.end for span in done.spans)]
    whole = all(isinstance(number, Integral) for span in done.spans for number in span)
    if [span.start for span in done.spans] != ends[:-1] or ends[-1] != n or not whole or ends != sorted(ends):
        return f"its versions are of the tokens {[(s.start, s.end) for s in done.spans]}, it sampled {n}"
    if any(values is not None and len(values) != n for values in (done.logprobs, done.sample_logprobs)):
        return "its tokens and log-probs differ in number"
    return None


def unusable(done: Completion, *, most: int, vocab: int) -> str | None:
    """Why a completion is no reply of 1 to `most` tokens of this vocabulary, if it is none."""
    tokens = done.token_ids
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= most:
        sampled = len(tokens) if isinstance(tokens, list) else f"a {type(tokens).__name__} of"
        return f"it sampled {sampled} tokens; expected a list of 1 to {most}"
    numbers = all(issubclass(kind, Integral) and kind is not bool for kind in {*map(type, tokens)})
    if not numbers or not 0 <= min(tokens) <= max(tokens) < vocab:
        wrong = next(
            t for t in tokens if isinstance(t, bool) or not isinstance(t, Integral) or not 0 <= t < vocab
        )
        return f"it sampled the token {shown(wrong, 40)}; the vocabulary is 0 to {vocab - 1}: it has another model"
    if done.finish_reason not in ("stop", "length"):
        return f"it ended with finish_reason={shown(done.finish_reason, 40)}; expected 'stop' or 'length'"
    return torn(done)


def check_reply(done: Completion, *, most: int, vocab: int, promised: bool) -> None:
    """Raises WhetError for what cannot be the reply of any engine, and where one left out or could not compute the
    log-probs that it promises to tell."""
    if why := unusable(done, most=most, vocab=vocab):
        raise WhetError(f"the rollout engine's reply is refused: {why}")
    if done.logprobs is None and not promised:
        return
    if done.logprobs is None or not np.isfinite(done.logprobs).all():
        told = "no log-probs" if done.logprobs is None else "a log-prob that is not finite"
        raise WhetError(
            f"the rollout engine returned {told} of sampled tokens; its weights or its `can` are wrong"
        )


def ends_of(sampling: Sampling, end_token_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end this request."""
    return (
        frozenset() if sampling.ignore_eos else frozenset(end_token_ids) | frozenset(sampling.stop_token_ids)
    )


@dataclass(eq=False)
class Stream:
    """Gives the tokens of one reply to its consumer, each once, however often its sampling is interrupted."""

    on_tokens: Callable[[list[int]], object]
    count: int = 0
    """Tokens that were given."""

    def upto(self, token_ids: Sequence[int]) -> None:
        """Give what is new in the reply so far."""
        if new := list(token_ids[self.count :]):
            self.count += len(new)
            self.on_tokens(new)

    def next(self, count: int, token: int) -> None:
        """The reply so far has `count` tokens, this one is the last."""
        if count > self.count:
            self.count = count
            self.on_tokens([token])


@dataclass(eq=False)
class StopText:
    """Looks for stop strings in the text of tokens that come one by one.

    Only a window of the newest tokens is decoded. It holds every text that may still become a stop string,
    and a margin for what a tokenizer does to the first characters of a text that begins inside a word or a
    letter.

    early: that many tokens are sampled whatever their text is (`Sampling.min_tokens`): a stop string that is complete
    with them counts as any other text.
    """

    MARGIN: ClassVar[int] = 8

    stops: tuple[str, ...]
    decode: Decode
    early: int = 0
    found: bool = False
    window: list[int] = field(default_factory=list)
    dropped: int = 0
    """Tokens that came before the window."""

    @classmethod
    def of(cls, sampling: Sampling, decode: Decode | None) -> StopText | None:
        """None: there is nothing to look for."""
        if not sampling.stop or decode is None:
            return None
        return cls(sampling.stop, decode, early=sampling.min_tokens)

    def push(self, token: int) -> bool:
        """Take the next token in; whether the reply's text contains a stop string by now."""
        self.window.append(token)
        text = self.decode(self.window)
        if self.dropped + len(self.window) > self.early:
            self.found = self.found or self._ends(text)
        needed = max(map(len, self.stops)) + self.MARGIN
        half = self.window[len(self.window) // 2 :]
        if len(text) > 2 * needed and len(self.decode(half)) > needed:
            self.dropped += len(self.window) - len(half)
            self.window = half
        return self.found

    def _ends(self, text: str) -> bool:
        """Whether a stop string of the window's text ends behind the early tokens."""
        early = self.window[: max(0, self.early - self.dropped)]
        passed = len(self.decode(early).rstrip("\ufffd")) if early else 0  # a letter may be in half
        return any(text.find(stop, max(0, passed - len(stop) + 1)) >= 0 for stop in self.stops)
