"""Calls of an inference server over HTTP: each has a name, a deadline, and may be repeated or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from whet.rollout.replica import Late
from whet.rollout.requests import RequestError
from whet.types import WhetError

PAUSES_S = (0.1, 0.5)
"""Before each repetition of a call whose connection was lost."""
DEAD = "EngineCore encountered an issue"
"""What vLLM answers when the process that computes has died."""
KEPT_S = 2.0
"""An idle connection is closed here before vLLM closes it (after 5 s): a call over one that is being closed is lost."""
MOST_TOLD = 500
"""Characters of a server's error that are passed on."""
TOLD_S = 5.0
"""A server that does not answer in time what it is only told (`Calls.tell`) keeps nobody waiting."""


@dataclass(frozen=True)
class Call:
    """One thing that a server can be asked."""

    path: str
    what: str
    """In words, for errors: 'to pause'."""
    method: Literal["GET", "POST"] = "POST"
    limit: Literal["answer", "load", "reply"] = "answer"
    """Which deadline it has."""
    repeats: bool = True
    """Asked twice, it does what it does asked once: it is repeated if the connection is lost."""


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Seconds, and the keys that set them."""

    answer: float
    load: float
    reply: float

    def said(self, kind: Literal["answer", "load", "reply"]) -> str:
        """The key of a deadline with its value."""
        key = {"answer": "server.timeout_s", "load": "server.load_timeout_s", "reply": "timeout_s"}[kind]
        return f"rollout.{key}={getattr(self, kind):g}"


class Unreachable(Late):
    """The server does not answer, or not in time, or says that it is dead: what it was asked for is not at fault."""


class Calls:
    """Asks one server. token: sent as `Authorization: Bearer`."""

    def __init__(self, url: str, *, limits: CallLimits, token: str | None = None) -> None:
        self.url, self.limits = url.rstrip("/"), limits
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.ending = False
        """Nobody waits any more for what servers answer when they are told something."""
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(
        self, call: Call, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> Any:
        """The answer: a JSON value, or text.

        Raises RequestError for a request that the server refuses (400, 422), `Unreachable` without an answer in time,
        WhetError for any other error of the server.
        """
        for pause_s in (*PAUSES_S[: len(PAUSES_S) * call.repeats], None):
            try:
                async with self._asked(call, body, query) as said:
                    return await (said.json() if said.content_type == "application/json" else said.text())
            except Unreachable as error:
                if pause_s is None or isinstance(error.__cause__, TimeoutError):
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("the last repetition raises")

    async def tell(self, call: Call, body: Mapping[str, Any]) -> None:
        """Ask without need of an answer, which is waited for a little: what is asked next comes after it. The server
        may be gone."""
        telling = asyncio.ensure_future(self.ask(call, body))
        telling.add_done_callback(lambda done: done.cancelled() or done.exception())
        if not self.ending:
            await asyncio.shield(asyncio.wait({telling}, timeout=TOLD_S))

    async def events(self, call: Call, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Every server-sent event of the answer, to its end. Raises as `ask` does; never repeated."""
        async with self._asked(call, body, None) as said:
            ended = False
            async for line in said.content:
                if line.startswith(b"data: "):
                    if ended := line.strip() == b"data: [DONE]":
                        break
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise WhetError(f"{self.url} failed {call.what}: {_message(event)}")
                    yield event
            if not ended:
                raise Unreachable(f"{self.url} broke off its answer when asked {call.what}")

    @asynccontextmanager
    async def _asked(
        self, call: Call, body: Mapping[str, Any] | None, query: Mapping[str, str] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with (
                asyncio.timeout(getattr(self.limits, call.limit)),
                self._opened().request(call.method, self.url + call.path, json=body, params=query) as said,
            ):
                if said.status != 200:
                    raise await self._refused(call, said)
                yield said
        except TimeoutError as error:
            raise Unreachable(
                f"{self.url} has not answered within {self.limits.said(call.limit)} s when asked {call.what}"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(
                f"{self.url} does not answer when asked {call.what}: {type(error).__name__}: {error}"
            ) from error
        except json.JSONDecodeError as error:
            raise WhetError(f"{self.url} did not answer with JSON when asked {call.what}: {error}") from error

    async def _refused(self, call: Call, said: aiohttp.ClientResponse) -> WhetError:
        text = await said.text()
        try:
            message = _message(json.loads(text))
        except json.JSONDecodeError:
            message = text
        told = f"{self.url} refused {call.what} with status {said.status}: {message[:MOST_TOLD]}"
        if said.status in (401, 403):
            told += "; give its token as rollout.server.token"
        if said.status == 503 or DEAD in message:
            return Unreachable(told)
        return (RequestError if said.status in (400, 422) else WhetError)(told)

    def _opened(self) -> aiohttp.ClientSession:
        """The session of this event loop."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            self._drop()
            no_limit = aiohttp.ClientTimeout(total=None, sock_connect=10.0)  # each call has its own
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
            self._session = aiohttp.ClientSession(
                headers=self._headers, timeout=no_limit, connector=connector
            )
            self._loop = loop
        return self._session

    def _drop(self) -> None:
        """Of a loop that has ended: its connections ended with it."""
        if self._session is not None:
            self._session.detach()
            self._session = None

    async def close(self) -> None:
        """End all connections. Safe to call twice."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            with suppress(aiohttp.ClientError, OSError):
                await self._session.close()
        self._drop()


def _message(said: Any) -> str:
    """What an error of vLLM or of its framework says."""
    if isinstance(said, dict):
        inner = said.get("error", said.get("detail", said))
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return str(said)
