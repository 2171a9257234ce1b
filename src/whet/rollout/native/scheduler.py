"""Who may sample now: waiting requests, rows, and their pages of the KV cache. Plain bookkeeping, no tensors.

All requests stand in one order: rows as they were let in, then those who wait. A row takes a page when its tokens need
one. Where there is none, the row that was let in last goes back to the front of the queue and continues later where it
was. So the order never changes, the first row always makes progress, and every request alone fits into the cache:
nobody waits for ever. Nothing here reads a clock or a random number.

Requests with equal tokens are let in together: their full pages are shared, counted by reference, and computed once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from whet.rollout.native.pages import Pages, digests
from whet.rollout.requests import RequestError, StopText
from whet.types import Completion, ExpertIds, Sampling, spans_of

WATERMARK = 0.01
"""The share of the pages that stays free for rows when another is let in."""


@dataclass(eq=False)
class Generation:
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
    experts: list[ExpertIds] = field(default_factory=list)
    """Of the tokens in the cache, as they were there first; empty where the engine does not keep them."""
    cached: int = field(init=False)
    """Tokens it has in the cache at most: the last one it samples is never fed."""

    def __post_init__(self) -> None:
        self.cached = len(self.prompt) + self.sampling.max_tokens - 1

    @property
    def history(self) -> tuple[int, ...]:
        """What has to be in the cache before its next token."""
        return (*self.prompt, *self.token_ids)

    @property
    def routed(self) -> int:
        """Tokens whose experts are known."""
        return sum(map(len, self.experts))

    def completion(self) -> Completion:
        """Everything sampled, with the reason for the end."""
        stopped = self.token_ids[-1] in self.ends or (self.stop_text is not None and self.stop_text.found)
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            sample_logprobs=self.sample_logprobs,
            spans=spans_of(self.versions),
            finish_reason="stop" if stopped else "length",
            experts=np.concatenate(self.experts) if self.experts else None,
        )


@dataclass(eq=False)
class Waiting:
    """Requests in the queue with equal history."""

    requests: list[Generation] = field(default_factory=list)
    chain: list[bytes] | None = None
    """Digests of the history's full pages, from the first try to let it in."""


@dataclass(eq=False)
class LiveRow:
    """A request that was let in, and its pages: those of its history, then those of its reply."""

    request: Generation
    pages: list[int]
    chain: list[bytes]
    """Digests of its history's full pages."""


@dataclass(eq=False)
class Admission:
    """Rows with equal history that share one prefill. The pages that the history fills are the same in all."""

    history: tuple[int, ...]
    rows: list[LiveRow]
    end: int
    """The next prefill computes the tokens start .. end-1; it ends with a page or with the history."""
    start: int = 0
    """What is in the cache before it: whole pages."""

    @property
    def whole(self) -> bool:
        """The next prefill is its last."""
        return self.end == len(self.history)


@dataclass
class Counts:
    """Since the engine was created."""

    prefilled_tokens: int = 0
    """Tokens of histories that were computed."""
    cached_tokens: int = 0
    """Tokens of histories that were found in the cache."""
    preemptions: int = 0


class Scheduler:
    """First come, first served, by history: the oldest goes next, with all who wait with equal tokens."""

    def __init__(self, pages: Pages, *, max_num_seqs: int, prefill_tokens: int) -> None:
        self.pages, self.max_num_seqs = pages, max_num_seqs
        self.prefill_tokens = max(prefill_tokens, pages.size)
        self.waiting: dict[tuple[int, ...], Waiting] = {}
        self.running: dict[Generation, LiveRow] = {}
        """In the order in which they were let in."""
        self.unfinished: Admission | None = None
        """A history of which the last prefill computed a part. Its rows were let in last."""
        self.steps = 0
        """Decode steps so far: each adds one token to every live row."""
        self.due: dict[int, list[LiveRow]] = {}
        """The rows that need one more page before the step of this number, if they still run."""
        self.counts = Counts()

    def refuse_impossible(self, request: Generation) -> None:
        """Raise RequestError if the request does not fit into the empty cache."""
        needed = self.pages.needed(request.cached)
        if needed > self.pages.count:
            raise RequestError(
                f"a prompt of {len(request.prompt)} tokens with max_tokens={request.sampling.max_tokens} needs "
                f"{needed} pages of {self.pages.size} tokens, but the KV cache has {self.pages.count}; lower "
                "rollout.sampling.max_tokens or raise machine.kv_cache_mb"
            )

    # -- the queue

    def add(self, requests: Iterable[Generation]) -> None:
        """At the end of the queue."""
        for request in requests:
            self.waiting.setdefault(request.history, Waiting()).requests.append(request)

    def put_back(self, requests: Iterable[Generation]) -> None:
        """Interrupted rows, in their order: their pages are given back, and they go on before all who wait."""
        later, self.waiting = self.waiting, {}
        for request in requests:
            self.release(request)
            self.add([request])
        for history, group in later.items():
            self.waiting.setdefault(history, Waiting(chain=group.chain)).requests.extend(group.requests)

    def forget(self, request: Generation) -> None:
        """Take it out of the queue, if it is there."""
        group = self.waiting.get(request.history)
        if group is not None and request in group.requests:
            group.requests.remove(request)
            if not group.requests:
                del self.waiting[request.history]

    # -- prefill

    def admit(self) -> list[Admission]:
        """The next prefill: at most `prefill_tokens`. A longer history is computed in parts, at most one at a time.

        Empty: nobody waits, or nothing is free.
        """
        admitted: list[Admission] = []
        left = self.prefill_tokens
        if self.unfinished is not None:
            admitted.append(self.unfinished)
            left = self._cut(self.unfinished, left)
        while self.waiting and self.unfinished is None:
            admission = self._admit(left)
            if admission is None:
                break
            admitted.append(admission)
            left = self._cut(admission, left)
        return admitted

    def _admit(self, left: int) -> Admission | None:
        """Those who wait longest with one history, as many as there are rows and pages for."""
        size = self.pages.size
        history, group = next(iter(self.waiting.items()))
        if group.chain is None:
            group.chain = digests(history, size)
        # the last token is computed: it samples
        cached = self.pages.prefix(group.chain[: (len(history) - 1) // size])
        missing = len(history) - len(cached) * size
        if missing > left and (missing <= self.prefill_tokens or left < size):
            return None  # whole in the next prefill
        fit = self._fitting(history, group.requests, cached)
        if not fit:
            return None
        taken, group.requests = group.requests[:fit], group.requests[fit:]
        if not group.requests:
            del self.waiting[history]
        full = len(history) // size
        shared = self.pages.share(cached) + self.pages.take(full - len(cached))
        rows: list[LiveRow] = []
        for request in taken:
            pages = self.pages.share(shared) if rows else shared
            own = self.pages.take(self._first(request, len(history)) - full)
            rows.append(LiveRow(request, pages + own, group.chain))
            self.running[request] = rows[-1]
        self.counts.cached_tokens += len(cached) * size
        return Admission(history, rows, end=len(cached) * size)

    def _first(self, request: Generation, tokens: int) -> int:
        """Pages of a row at its start: those of its history and, unless it ends there, of one more token."""
        return self.pages.needed(min(tokens + 1, request.cached))

    def _fitting(self, history: tuple[int, ...], group: list[Generation], cached: list[int]) -> int:
        """How many of the group there are rows and pages for."""
        full = len(history) // self.pages.size
        unused = sum(self.pages.uses[page] == 0 for page in cached)
        free = self.pages.available - unused - (full - len(cached))
        reserve = max(1, int(WATERMARK * self.pages.count))
        fit = 0
        for request in group[: self.max_num_seqs - len(self.running)]:
            free -= self._first(request, len(history)) - full
            if free < (reserve if self.running or fit else 0):
                break
            fit += 1
        return fit

    def _cut(self, a: Admission, left: int) -> int:
        """Set what its next prefill computes. Returns the tokens left for others."""
        size = self.pages.size
        a.start, missing = a.end, len(a.history) - a.end
        a.end += missing if missing <= left else left // size * size
        # those let in after it find these pages, even in the same prefill: a layer writes all keys before it reads any
        row, full = a.rows[0], slice(a.start // size, a.end // size)
        self.pages.keep(row.pages[full], row.chain[full])
        self.counts.prefilled_tokens += a.end - a.start
        self.unfinished = None if a.whole else a
        if a.whole:
            for row in a.rows:
                self._wait_for_page(row, len(a.history))
        return left - (a.end - a.start)

    # -- decode steps

    def _wait_for_page(self, row: LiveRow, tokens: int) -> None:
        """The row has so many tokens in the cache, and gets one with every step."""
        step = self.steps + len(row.pages) * self.pages.size - tokens
        self.due.setdefault(step, []).append(row)

    def _due(self) -> list[LiveRow]:
        return [row for row in self.due.get(self.steps, ()) if self.running.get(row.request) is row]

    def excess(self) -> Generation | None:
        """The row that has to go back to the queue, as the next step needs more pages than there are."""
        if len(self._due()) <= self.pages.available:
            return None
        return next(reversed(self.running))

    def grow(self) -> list[LiveRow]:
        """The next step begins. Returns the rows that got one more page for it."""
        rows = self._due()
        self.due.pop(self.steps, None)
        for row in rows:
            row.pages += self.pages.take(1)
            self.due.setdefault(self.steps + self.pages.size, []).append(row)
        self.steps += 1
        return rows

    # -- ends

    def release(self, request: Generation) -> None:
        """Its row has ended: its pages are free, unless others share them; the full ones stay known."""
        row = self.running.pop(request)
        if self.unfinished is not None and row in self.unfinished.rows:
            self.unfinished.rows.remove(row)
            if not self.unfinished.rows:
                self.unfinished = None
        else:
            before, fed = len(row.chain), request.history[:-1]
            chain = digests(fed, self.pages.size, row.chain)
            self.pages.keep(row.pages[before : len(chain)], chain[before:])
        self.pages.give(row.pages)

    def preempt(self, request: Generation) -> None:
        """Its row goes back to the front of the queue."""
        self.counts.preemptions += 1
        self.put_back([request])

    def clear(self) -> None:
        """Forget everyone and every page; all pages are free."""
        for row in self.running.values():
            self.pages.give(row.pages)
        self.pages.forget()
        self.running, self.waiting, self.due, self.unfinished = {}, {}, {}, None

    @property
    def requests(self) -> Iterator[Generation]:
        """Everyone, running or waiting."""
        yield from self.running
        for group in self.waiting.values():
            yield from group.requests

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)
