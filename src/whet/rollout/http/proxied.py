"""Servers behind a proxy of the user's (a load balancer, a router) as one engine: replies are asked of the proxy, which
decides who samples them; weights, pauses and counts of each server itself.

A request cannot be sent to a certain server then, so none is under way while weights change: an update waits for the
replies in flight, and lets nobody in until every server has proved the new version. A server that is lost cannot be
left out either, for the proxy may still lead to it: all are asked again, as often as rollout.server.restarts says.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from whet.rollout.engine import Capabilities, OnTokens, Part, WeightUpdate
from whet.rollout.http.calls import Call, CallLimits, Calls
from whet.rollout.http.published import Folder, Written
from whet.rollout.http.served import HttpEngine, ServerApi, Taking
from whet.types import (
    Completion,
    ConfigError,
    Metrics,
    Request,
    Sampling,
    ScoreRequest,
    TokenLogprobs,
    WhetError,
)

T = TypeVar("T")


class ProxyCalls(Calls):
    """Asks a proxy. What is only told, as that a request is given up, is told to every server: any may have it."""

    def __init__(
        self, url: str, servers: Sequence[Calls], *, limits: CallLimits, token: str | None = None
    ) -> None:
        super().__init__(url, limits=limits, token=token)
        self.servers = servers

    async def tell(self, call: Call, body: Mapping[str, Any]) -> None:
        for server in self.servers:
            server.ending = self.ending
        await asyncio.gather(*(server.tell(call, body) for server in self.servers))

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*(server.close() for server in self.servers))


class Proxied:
    """See `ServerApi`. front: asks the proxy. servers: all that it leads to."""

    def __init__(self, front: ServerApi, name: str, servers: Sequence[HttpEngine], folder: Folder) -> None:
        self.front, self.name, self.servers, self.folder = front, name, servers, folder
        self._apis = [server.api for server in servers]
        self.title, self.check = front.title, self._apis[0].check

    @property
    def version(self) -> str:
        return ", ".join(dict.fromkeys(api.version for api in self._apis))

    @property
    def can(self) -> Capabilities:
        return replace(self._apis[0].can, in_flight_updates=False, reproducible="no")

    @property
    def no_scores(self) -> str:
        return self._apis[0].no_scores

    @property
    def no_sleep(self) -> str:
        return next((f"has {s.name}, which {s.api.no_sleep}" for s in self.servers if s.api.no_sleep), "")

    async def open(self, weights: int) -> None:
        """See `ServerApi`."""
        await _all(server.open() for server in self.servers)
        if len({api.can for api in self._apis}) > 1:
            raise ConfigError(
                f"rollout.server.proxy: the servers behind {self.name} were started with options that change what they "
                "can do; start them alike"
            )
        await self._leads_to(weights)

    async def _leads_to(self, weights: int) -> None:
        """Ask for a token through the proxy. Raises WhetError where it has another server's weights."""
        asked = Sampling(max_tokens=1, ignore_eos=True)
        request = Request(id="proxy", session="", prompt=(0,), sampling=asked)
        reply = await self.completed(request, weights, None)
        if other := {span.version for span in reply.spans} - {weights}:
            raise WhetError(
                f"{self.name} leads to a server that samples from weights version {', '.join(map(str, other))}, where "
                f"those of rollout.server.urls have version {weights}: name every server behind it there"
            )

    async def completed(self, request: Request, weights: int, on_tokens: OnTokens | None) -> Completion:
        """See `ServerApi`. Each attempt has a name of its own: that one is given up concerns no other, whichever server
        has it."""
        attempt = replace(request, id=f"{request.id}-{uuid.uuid4().hex[:8]}")
        return await self.front.completed(attempt, weights, on_tokens)

    async def scored(self, request: ScoreRequest, weights: int) -> TokenLogprobs:
        """See `ServerApi`."""
        return await self.front.scored(request, weights)

    async def take(self, update: WeightUpdate, engine: Taking) -> Metrics:
        """See `ServerApi`. The files are written once, and each server proves for itself that it has them."""
        await engine.begin()
        shared = update if isinstance(update.tensors, Written) else self.folder.ship(update)()
        receipts = await _all(server.update_weights(shared) for server in self.servers)
        engine.arrived(update.version)
        await self._leads_to(update.version)
        names = dict.fromkeys(name for receipt in receipts for name in receipt.measured)
        return {name: max(receipt.measured[name] for receipt in receipts) for name in names}

    async def pause(self) -> None:
        """See `ServerApi`."""
        await _all(api.pause() for api in self._apis)

    async def resume(self) -> None:
        """See `ServerApi`."""
        await _all(api.resume() for api in self._apis)

    async def place(self, away: frozenset[Part], *, was: frozenset[Part]) -> None:
        """See `ServerApi`."""
        await _all(api.place(away, was=was) for api in self._apis)

    async def counts(self) -> tuple[int, int]:
        """See `ServerApi`."""
        requests, tokens = zip(*await _all(api.counts() for api in self._apis), strict=True)
        return sum(requests), sum(tokens)


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """All results, once each server has answered. Raises the first error."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [one for one in found if not isinstance(one, BaseException)]
