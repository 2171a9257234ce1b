"""Who may sample now: waiting requests, rows, and the pages of the KV cache. Plain bookkeeping, no tensors.

A request is let in with all the pages it can ever need, so a row never waits for memory once it runs and nothing can
deadlock. Requests with equal tokens are let in together: their full prompt pages are shared, counted by reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from whet.types import Completion, Sampling, WhetError


@dataclass(eq=False)
class Request:
    """One call of `generate`."""

    prompt: tuple[int, ...]
    sampling: Sampling
    ends: frozenset[int]
    """Tokens that end it."""
    result: asyncio.Future[Completion]
    token_ids: list[int] = field(default_factory=list)
    """Sampled before an interruption; the rest lies with the runner."""
    logprobs: list[float] = field(default_factory=list)
    sample_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_text: StopText | None = None

    @property
    def history(self) -> tuple[int, ...]:
        """What has to be in the cache before the next token."""
        return (*self.prompt, *self.token_ids)

    @property
    def cached(self) -> int:
        """Tokens it has in the cache at most: the last one it samples is never fed."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    def completion(self) -> Completion:
        """Everything sampled, with the reason for the end."""
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            sample_logprobs=self.sample_logprobs,
            versions=self.versions,
            finish_reason="stop" if self.stopped else "length",
        )

    @property
    def stopped(self) -> bool:
        """An end token or a stop string was met."""
        return self.token_ids[-1] in self.ends or (self.stop_text is not None and self.stop_text.found)


@dataclass(eq=False)
class StopText:
    """Looks for stop strings in the text of tokens that come one by one.

    Only a window of the newest tokens is decoded. It is long enough for every stop string, with a margin for what
    a tokenizer may do to the first characters of a text that begins in the middle of a word or a letter.
    """

    stops: tuple[str, ...]
    decode: Callable[[list[int]], str]
    found: bool = False
    window: list[int] = field(default_factory=list)

    MARGIN = 8

    def push(self, token: int) -> bool:
        """Take the next token in; whether the text now contains a stop string."""
        self.window.append(token)
        text = self.decode(self.window)
        self.found = self.found or any(stop in text for stop in self.stops)
        half = self.window[len(self.window) // 2 :]
        needed = max(map(len, self.stops)) + self.MARGIN
        if len(text) > 2 * needed and len(self.decode(half)) > needed:
            self.window = half
        return self.found


@dataclass(frozen=True)
class Admission:
    """Requests with equal history that share one prefill, and the pages of each."""

    token_ids: tuple[int, ...]
    requests: list[Request]
    pages: list[list[int]]
    """The full pages of the history come first in each and are the same; the next one is each row's own."""


class Pages:
    """Free cache pages, and how many rows use the others."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.free = list(range(count - 1, -1, -1))
        self.uses = [0] * count

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens fill or begin."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.uses[page] = 1
        return taken

    def share(self, pages: list[int]) -> list[int]:
        for page in pages:
            self.uses[page] += 1
        return pages

    def give(self, pages: list[int]) -> None:
        for page in pages:
            self.uses[page] -= 1
            if self.uses[page] == 0:
                self.free.append(page)


class Scheduler:
    """First come, first served, by prompt: the oldest waiting prompt goes next, with all who wait with equal tokens."""

    def __init__(self, pages: Pages, *, max_batch: int, prefill_tokens: int) -> None:
        self.pages, self.max_batch, self.prefill_tokens = pages, max_batch, prefill_tokens
        self.waiting: dict[tuple[int, ...], list[Request]] = {}
        self.running: dict[Request, list[int]] = {}

    def refuse(self, request: Request) -> None:
        """Raise WhetError if the request can never run."""
        needed = self.pages.needed(request.cached)
        if needed > self.pages.count:
            raise WhetError(
                f"a prompt of {len(request.prompt)} tokens with max_tokens={request.sampling.max_tokens} needs {needed} "
                f"pages of {self.pages.size} tokens, the KV cache has {self.pages.count}; lower "
                "rollout.sampling.max_tokens or raise machine.kv_cache_mb"
            )

    def add(self, request: Request) -> None:
        self.waiting.setdefault(request.history, []).append(request)

    def admit(self) -> list[Admission]:
        """The next prefill: at most `prefill_tokens`, or one longer prompt. Empty: nobody waits or nothing is free."""
        admitted: list[Admission] = []
        tokens = 0
        while self.waiting:
            history = next(iter(self.waiting))
            if admitted and tokens + len(history) > self.prefill_tokens:
                break
            admission = self._admit(history)
            if admission is None:
                break
            admitted.append(admission)
            tokens += len(history)
        return admitted

    def _admit(self, history: tuple[int, ...]) -> Admission | None:
        """All who wait with this history. More than fit at all are cut, once nothing else runs."""
        group = self.waiting[history]
        fit = self._fitting(history, group)
        if fit < len(group) and (self.running or fit == 0):
            return None
        del self.waiting[history]
        if fit < len(group):
            self.waiting = {history: group[fit:], **self.waiting}
        full = len(history) // self.pages.size
        tables: list[list[int]] = []
        for request in group[:fit]:
            count = self.pages.needed(max(request.cached, len(history)))
            shared = self.pages.share(tables[0][:full]) if tables else self.pages.take(full)
            tables.append(shared + self.pages.take(count - full))
            self.running[request] = tables[-1]
        return Admission(history, group[:fit], tables)

    def _fitting(self, history: tuple[int, ...], group: list[Request]) -> int:
        """How many of the group there are rows and pages for."""
        full = len(history) // self.pages.size
        free = len(self.pages.free) - full
        fit = 0
        for request in group[: self.max_batch - len(self.running)]:
            free -= self.pages.needed(max(request.cached, len(history))) - full
            if free < 0:
                break
            fit += 1
        return fit

    def release(self, request: Request) -> None:
        """The request's row has ended: its pages are free, unless others share them."""
        self.pages.give(self.running.pop(request))

    def forget(self, request: Request) -> None:
        """Take a waiting request out."""
        group = self.waiting[request.history]
        group.remove(request)
        if not group:
            del self.waiting[request.history]

    def requests(self) -> Iterator[Request]:
        """Everyone, running or waiting."""
        yield from self.running
        for group in self.waiting.values():
            yield from group
