"""Calls of an inference server over HTTP: each has a name, a deadline, and may be repeated or not."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from whet.guard.foreign import said as text_of
from whet.guard.foreign import words
from whet.inputs import MIB
from whet.rollout.replica import Late
from whet.rollout.requests import RequestError
from whet.types import WhetError

PAUSES_S = (0.1, 0.5)
"""Before each repetition of a call whose connection was lost."""
TOO_MANY = 429
"""The status of a server that has done nothing of what it was asked, and is to be asked again later."""
UNAVAILABLE = 503
FULL = (
    "The engine is currently busy and cannot accept new requests",
    "The engine has reached its prefill token backlog limit",
    "The request queue is full",
)
"""What vLLM (--max-num-queued-reqs, --max-num-queued-tokens) and SGLang (--max-queued-requests) say with UNAVAILABLE
where they mean the same; any other server with this status is lost."""
PAUSED = "Generation is paused. Please retry after it resumes"
"""What vLLM says with UNAVAILABLE from 0.33 on while a weight sync lets nobody in."""
BUSY_S, MOST_BUSY_S = 0.5, 16.0
"""The first pause and the longest, where it does not say how long (`Retry-After`, in seconds); none is
shorter than the first: a server that says 0 would be asked thousands of times a second. One that is paused is asked
after the first one each time: it takes requests again as soon as its weights are loaded."""
DEAD = ("EngineCore encountered an issue", "The server had an error while processing your request")
"""What vLLM answers when the process that computes has died: until 0.32, and since 0.33."""
KEPT_S = 2.0
"""An idle connection is closed here before vLLM closes it (after 5 s): a call over one that is being closed is lost."""
MOST_VERSION = 40
"""Characters of a version."""
MOST_TOLD = 500
"""Characters of a server's error that are passed on."""
MOST_ANSWER = 256 * MIB
"""Bytes of one answer, however it was compressed; of all events of a stream together."""
UNREADABLE = (
    AssertionError, AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""What reading an answer of another form than the known one raises."""
LAST_S = 0.5
"""So long a server that is no longer asked anything may take to hear what it is told last."""
TOLD_S = 5.0
"""A server that does not answer in time what it is only told (`Calls.tell`) keeps nobody waiting."""
MOST_FILES = 65536


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
        keys = {"answer": "rollout.server.timeout_s", "load": "sync.timeout_s", "reply": "rollout.timeout_s"}
        return f"{keys[kind]}={getattr(self, kind):g}"


class Unreachable(Late):
    """The server does not answer, or not in time, or says that it is dead: what it was asked for is not at fault."""


class Calls:
    """Asks one server. token: sent as `Authorization: Bearer`."""

    def __init__(self, url: str, *, limits: CallLimits, token: str | None = None) -> None:
        self.url, self.limits = url.rstrip("/"), limits
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.ending = False
        """Nobody waits any more for what servers answer when they are told something."""
        self._over = False
        """No connection is opened any more."""
        self._telling: set[asyncio.Future[Any]] = set()
        self.session: aiohttp.ClientSession | None = None
        """The open connections; None before the first call, and after the end."""
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
                    is_json, found = said.content_type == "application/json", await self._whole(call, said)
                return self._parsed(call, found) if is_json else found.decode("utf-8", "replace")
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
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        if not self.ending:
            await asyncio.shield(asyncio.wait({telling}, timeout=TOLD_S))

    async def events(self, call: Call, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Every server-sent event of the answer, to its end. Raises as `ask` does; never repeated."""
        async with self._asked(call, body, None) as said:
            async for line in self._lines(call, said):
                if line.startswith(b"data:"):  # a space may follow: some gateways leave it out
                    told = line.removeprefix(b"data:").strip()
                    if told == b"[DONE]":
                        return
                    event = self._parsed(call, told)
                    if isinstance(event, dict) and "error" in event:
                        raise WhetError(f"{self.url} failed {call.what}: {_message(event)}")
                    yield event
            raise Unreachable(f"{self.url} broke off its answer when asked {call.what}")

    async def _pieces(self, call: Call, said: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """An answer as it comes, uncompressed. Raises WhetError beyond MOST_ANSWER."""
        size = 0
        async for piece in said.content.iter_any():
            size += len(piece)
            if size > MOST_ANSWER:
                raise WhetError(
                    f"{self.url} answered with more than {MOST_ANSWER // MIB} MiB when asked {call.what}"
                )
            yield piece

    async def _whole(self, call: Call, said: aiohttp.ClientResponse) -> bytes:
        return b"".join([piece async for piece in self._pieces(call, said)])

    async def _lines(self, call: Call, said: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The lines of an answer; aiohttp's own may have 512 KiB, and an event may have a whole reply."""
        begun: list[bytes] = []
        async for piece in self._pieces(call, said):
            first, *more = piece.split(b"\n")
            begun.append(first)
            for next_ in more:
                yield b"".join(begun)
                begun = [next_]
        yield b"".join(begun)

    def _parsed(self, call: Call, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WhetError(f"{self.url} did not answer with JSON when asked {call.what}: {error}") from error

    @asynccontextmanager
    async def _asked(
        self, call: Call, body: Mapping[str, Any] | None, query: Mapping[str, str] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        pause_s, busy = BUSY_S, ""
        try:
            async with asyncio.timeout(getattr(self.limits, call.limit)):
                while True:
                    request = self._opened().request(
                        call.method, self.url + call.path, json=body, params=query, allow_redirects=False
                    )
                    async with request as said:
                        if said.status == 200:
                            yield said
                            return
                        message = await self._message(call, said)
                        if not _busy(said.status, message):
                            raise self._refused(call, said, message)
                        wanted = said.headers.get("Retry-After", "")
                    is_paused = PAUSED in message
                    what = "is paused" if is_paused else "has too many requests"
                    busy = f", only that it {what} (status {said.status}),"
                    await asyncio.sleep(max(BUSY_S, float(wanted)) if wanted.isdecimal() else pause_s)
                    pause_s = BUSY_S if is_paused else min(2 * pause_s, MOST_BUSY_S)
        except TimeoutError as error:
            raise Unreachable(
                f"{self.url} has not answered{busy} within {self.limits.said(call.limit)} s when asked {call.what}"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(
                f"{self.url} does not answer when asked {call.what}: {type(error).__name__}: {error}"
            ) from error

    async def _message(self, call: Call, said: aiohttp.ClientResponse) -> str:
        """What an error says."""
        text = (await self._whole(call, said)).decode("utf-8", "replace")
        try:
            return _message(json.loads(text))
        except (ValueError, RecursionError):
            return words(text, MOST_TOLD)

    def _refused(self, call: Call, said: aiohttp.ClientResponse, message: str) -> WhetError:
        told = f"{self.url} refused {call.what} with status {said.status}: {message}"
        if said.status in (401, 403):
            told += "; give its token as rollout.server.token"
        if where := said.headers.get("Location"):
            told += f"; it points to {words(where, MOST_TOLD)}, which is not followed: give the server's own address"
        if said.status == UNAVAILABLE or any(text in message for text in DEAD):
            return Unreachable(told)
        return (RequestError if said.status in (400, 422) else WhetError)(told)

    def _opened(self) -> aiohttp.ClientSession:
        """The session of this event loop."""
        loop = asyncio.get_running_loop()
        if self.session is None or self._loop is not loop:
            self._drop()
            if self._over:  # nobody would close another one
                raise Unreachable(f"{self.url} is not asked any more: its engine was closed")
            allow_files()
            no_limit = aiohttp.ClientTimeout(total=None, sock_connect=10.0)  # each call has its own
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
            self.session = aiohttp.ClientSession(headers=self._headers, timeout=no_limit, connector=connector)
            self._loop = loop
        return self.session

    def _drop(self) -> None:
        """Of a loop that has ended: its connections ended with it."""
        if self.session is not None:
            self.session.detach()
            self.session = None

    async def close(self) -> None:
        """End all connections, once what is being told has been sent or LAST_S are over; for good, if `ending`. Safe to
        call twice."""
        loop = asyncio.get_running_loop()
        if telling := [told for told in self._telling if told.get_loop() is loop]:
            await asyncio.wait(telling, timeout=LAST_S)
            for late in telling:
                late.cancel()
            await asyncio.gather(*telling, return_exceptions=True)
        if self.session is not None and self._loop is loop:
            with suppress(aiohttp.ClientError, OSError):
                await self.session.close()
        self._drop()
        self._over = self.ending


def allow_files() -> None:
    """As many open files as this user may have, up to MOST_FILES. Each request has a connection, a step may ask for
    thousands of replies at once, and most systems begin with a limit of 1024."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _busy(status: int, message: str) -> bool:
    return status == TOO_MANY or (status == UNAVAILABLE and any(text in message for text in (*FULL, PAUSED)))


def _message(said: Any) -> str:
    """What an error of vLLM or of its framework says."""
    if isinstance(said, dict):
        inner = said.get("error", said.get("detail", said))
        said = inner.get("message", inner) if isinstance(inner, dict) else inner
    return words(str(said), MOST_TOLD)


@contextmanager
def reading(name: str, call: Call) -> Iterator[None]:
    """An answer is read inside. Raises WhetError for one of another form than the known one."""
    try:
        yield
    except UNREADABLE as error:
        raise WhetError(
            f"{name} answered in an unknown form when asked {call.what}: {type(error).__name__}: {text_of(error)}"
        ) from error
