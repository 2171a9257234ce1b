"""Who may sample now: waiting requests, rows, and the pages of the KV cache. Plain bookkeeping, no tensors.

A request is let in with all the pages it can ever need, so a row never waits for memory once it runs and
nothing can deadlock. Requests with equal tokens are let in together: their full prompt pages are shared,
counted by reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from whet.rollout.requests import RequestError, StopText
from whet.types import Completion, Sampling, spans_of


@dataclass(eq=False)
class Request:
    """One call of `generate`. The lists hold what is sampled once its row has ended or was interrupted."""

    prompt: tuple[int, ...]
    sampling: Sampling
    ends: frozenset[int]
    """Tokens that end it."""
    plain: bool
    """Temperature is all there is to its sampling."""
    result: asyncio.Future[Completion]
    stop_text: StopText | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sample_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = field(init=False)
    """Tokens it has in the cache at most: the last one it samples is never fed."""

    def __post_init__(self) -> None:
        self.cached = len(self.prompt) + self.sampling.max_tokens - 1

    @property
    def history(self) -> tuple[int, ...]:
        """What has to be in the cache before its next token."""
        return (*self.prompt, *self.token_ids)

    def completion(self) -> Completion:
        """Everything sampled, with the reason for the end."""
        stopped = self.token_ids[-1] in self.ends or (self.stop_text is not None and self.stop_text.found)
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            sample_logprobs=self.sample_logprobs,
            spans=spans_of(self.versions),
            finish_reason="stop" if stopped else "length",
        )


@dataclass(frozen=True)
class Admission:
    """Requests with equal history that share one prefill, and the pages of each."""

    history: tuple[int, ...]
    requests: list[Request]
    pages: list[list[int]]
    """Those that the history fills come first and are the same in all; the others are each row's own."""


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
    """First come, first served, by history: the oldest goes next, with all who wait with equal tokens."""

    def __init__(self, pages: Pages, *, max_num_seqs: int, prefill_tokens: int) -> None:
        self.pages, self.max_num_seqs, self.prefill_tokens = pages, max_num_seqs, prefill_tokens
        self.waiting: dict[tuple[int, ...], list[Request]] = {}
        self.running: dict[Request, list[int]] = {}
        """The pages of each row."""

    def refuse_impossible(self, request: Request) -> None:
        """Raise RequestError if the request does not fit into the empty cache."""
        needed = self.pages.needed(request.cached)
        if needed > self.pages.count:
            raise RequestError(
                f"a prompt of {len(request.prompt)} tokens with max_tokens={request.sampling.max_tokens} needs "
                f"{needed} pages of {self.pages.size} tokens, but the KV cache has {self.pages.count}; lower "
                "rollout.sampling.max_tokens or raise machine.kv_cache_mb"
            )

    def add(self, requests: Iterable[Request]) -> None:
        """At the end of the queue."""
        for request in requests:
            self.waiting.setdefault(request.history, []).append(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Interrupted rows: their pages are given back, and they go on before all who have not begun."""
        later, self.waiting = self.waiting, {}
        for request in requests:
            self.release(request)
            self.add([request])
        for group in later.values():
            self.add(group)

    def admit(self) -> list[Admission]:
        """The next prefill: at most `prefill_tokens`, or one longer history. Empty: nobody waits or nothing
        is free."""
        admitted: list[Admission] = []
        tokens = 0
        while self.waiting:
            history = next(iter(self.waiting))
            tokens += len(history)
            if admitted and tokens > self.prefill_tokens:
                break
            admission = self._admit(history)
            if admission is None:
                break
            admitted.append(admission)
        return admitted

    def _admit(self, history: tuple[int, ...]) -> Admission | None:
        """All who wait with this history; if they can never fit together, the first of them once nothing
        runs."""
        group = self.waiting[history]
        fit = self._fitting(history, group)
        if fit < len(group) and (self.running or fit == 0):
            return None
        del self.waiting[history]
        if fit < len(group):
            self.waiting = {history: group[fit:], **self.waiting}
        full = len(history) // self.pages.size
        shared = self.pages.take(full)
        for _ in range(fit - 1):
            self.pages.share(shared)
        for request in group[:fit]:
            own = self.pages.needed(request.cached) - full
            self.running[request] = shared + self.pages.take(own)
        return Admission(history, group[:fit], [self.running[r] for r in group[:fit]])

    def _fitting(self, history: tuple[int, ...], group: list[Request]) -> int:
        """How many of the group there are rows and pages for."""
        full = len(history) // self.pages.size
        free = len(self.pages.free) - full
        fit = 0
        for request in group[: self.max_num_seqs - len(self.running)]:
            free -= self.pages.needed(request.cached) - full
            if free < 0:
                break
            fit += 1
        return fit

    def release(self, request: Request) -> None:
        """Its row has ended: its pages are free, unless others share them."""
        self.pages.give(self.running.pop(request))

    def forget(self, request: Request) -> None:
        """Take it out of the queue."""
        group = self.waiting[request.history]
        group.remove(request)
        if not group:
            del self.waiting[request.history]

    @property
    def requests(self) -> Iterator[Request]:
        """Everyone, running or waiting."""
        yield from self.running
        for group in self.waiting.values():
            yield from group

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def clear(self) -> None:
        """Forget everyone; all pages are free."""
        for pages in self.running.values():
            self.pages.give(pages)
        self.running, self.waiting = {}, {}
