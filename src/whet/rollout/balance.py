"""Which of several replicas serves a request, and what its consumer has been given of the reply."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from whet.rollout.engine import OnTokens
from whet.rollout.replica import Replica
from whet.types import Request, WhetError

SESSIONS = 1 << 16
"""Sessions whose replica is known: nobody tells when one ends, so that those that were quiet longest are forgotten."""


@dataclass
class PromptHome:
    """Where a prompt is being served, and how many requests with it are in flight."""

    replica: Replica
    count: int = 0


class ReplicaLoads:
    """The replicas that serve, by load. rows: sequences that a replica decodes at once; further requests with a prompt
    go to another replica when its replica has no free row. usable: whether one may be asked at all."""

    def __init__(self, rows: int, usable: Callable[[Replica], bool]) -> None:
        self.rows, self.usable = rows, usable
        self.homes: dict[tuple[int, ...], PromptHome] = {}
        self.sessions: dict[str, Replica] = {}
        """The replica of each session, the one that was quiet longest first."""
        self.ordered: dict[int, Replica] = {}
        """Those that serve, by order."""
        self._orders = 0
        self._least: list[tuple[int, int]] = []
        """Heap of (load, order); an entry whose load is no longer true is passed over."""

    def add(self, replica: Replica) -> None:
        """It serves from now on."""
        replica.order, replica.changed = self._orders, self._loaded
        self._orders += 1
        self.ordered[replica.order] = replica
        self._loaded(replica)

    def remove(self, replica: Replica) -> None:
        """It is asked no more."""
        self.ordered.pop(replica.order, None)

    def choose(self, request: Request) -> Replica | None:
        """That of the session, as long as it serves; else the one that serves this prompt already, unless its rows are
        taken; else the least loaded. None: there is none."""
        kept = self.sessions.pop(request.session, None)
        if kept is None or kept.state != "serving" or not self.usable(kept):
            kept = self._by_prompt(request.prompt)
        if kept is not None and request.session:
            self.sessions[request.session] = kept
            if len(self.sessions) > SESSIONS:
                del self.sessions[next(iter(self.sessions))]
        return kept

    @contextmanager
    def serving(self, prompt: tuple[int, ...], replica: Replica) -> Iterator[None]:
        """While it serves this prompt, others with the same prompt go there."""
        home = self.homes.setdefault(prompt, PromptHome(replica))
        home.replica = replica
        home.count += 1
        try:
            yield
        finally:
            home.count -= 1
            if not home.count:
                self.homes.pop(prompt, None)

    def lightest(self) -> Replica | None:
        while self.ordered:
            if not self._least:
                self._least = self._loads()
            load, order = self._least[0]
            replica = self.ordered.get(order)
            if replica is not None and replica.load == load and self.usable(replica):
                return replica
            heapq.heappop(self._least)
        return None

    def _by_prompt(self, prompt: tuple[int, ...]) -> Replica | None:
        least = self.lightest()
        home = self.homes.get(prompt)
        if home is None or home.replica.state != "serving" or least is None:
            return least
        return home.replica if home.replica.load < self.rows or home.replica.load <= least.load else least

    def _loaded(self, replica: Replica) -> None:
        """Its load has changed. Entries that are true no more are thrown away before they are many."""
        if replica.state != "serving":
            return
        heapq.heappush(self._least, (replica.load, replica.order))
        if len(self._least) > 4 * len(self.ordered) + 64:
            self._least = self._loads()  # of all: one that is left out and idle would never be asked again

    def _loads(self) -> list[tuple[int, int]]:
        return sorted((replica.load, order) for order, replica in self.ordered.items())


class Handed:
    """Gives the tokens of one reply to its consumer, each once, however many replicas it takes to sample it."""

    def __init__(self, request: Request, on_tokens: OnTokens) -> None:
        self.request, self.on_tokens = request, on_tokens
        self.token_ids: list[int] = []
        """What the consumer has."""
        self.error: Exception | None = None
        """What the consumer raised, or why there is nothing more for it: not a fault of the replica."""
        self._attempts = 0

    def begin(self, replica: Replica) -> OnTokens:
        """For one replica. Raises WhetError if the consumer has tokens that it may not sample again."""
        if self.token_ids and replica.engine.can.reproducible != "everywhere":
            raise WhetError(
                f"{self._lost}, and the engine may not sample the same tokens again (reproducible: "
                f"{replica.engine.can.reproducible}); request the reply again from its start"
            )
        self._attempts += 1
        attempt, seen = self._attempts, 0

        def take(token_ids: list[int]) -> None:
            nonlocal seen
            if attempt != self._attempts:
                return  # of a replica that was given up
            known = self.token_ids[seen : seen + len(token_ids)]
            seen += len(token_ids)
            try:
                self._give(known, token_ids)
            except Exception as error:
                self.error = error
                raise

        return take

    def end(self) -> None:
        """Nobody waits any more."""
        self._attempts += 1

    @property
    def _lost(self) -> str:
        return (
            f"request {self.request.id} was lost with its replica after {len(self.token_ids)} tokens had been "
            "delivered"
        )

    def _give(self, known: list[int], token_ids: list[int]) -> None:
        """Only what it does not have; the rest has to be equal."""
        if token_ids[: len(known)] != known:
            raise WhetError(
                f"{self._lost}; the next replica has newer weights and samples other tokens. Request the reply again "
                "from its start"
            )
        if new := token_ids[len(known) :]:
            self.token_ids += new
            self.on_tokens(new)
