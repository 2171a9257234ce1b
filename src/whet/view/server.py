"""The server of `whet view`: the page's files and the answers, over HTTP. It writes nothing."""

from __future__ import annotations

import asyncio
import errno
import gzip
import hashlib
import hmac
import logging
import os
import secrets
import signal
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from whet.types import ConfigError, WhetError
from whet.view.answers import answer, concerned, encoded
from whet.view.source import BadQuestion, NotThere, ShownRuns, find_runs

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
THREADS = 4
ROOM = 64 * 2**20
"""Bytes of answers that are kept until a run changes."""
MOST_CONNECTIONS = 200
"""Open at once: few enough for the 1024 files of a process, many more than browsers open."""

log = logging.getLogger(__name__)
log.addFilter(
    lambda record: (
        not (
            record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError)
        )
    )
)
"""aiohttp's words about requests, without a traceback for each that is no HTTP: who sent it is told so."""


@dataclass
class Answers:
    """Answers as bytes, by address, while the runs that they are made from do not change."""

    runs: ShownRuns
    born: str = field(default_factory=lambda: secrets.token_hex(4))
    """Another server answers with other marks: it may show other runs."""
    kept: OrderedDict[str, tuple[str, bytes]] = field(default_factory=OrderedDict)
    """By address: its mark, and the answer. What was asked for longest ago goes first."""
    size: int = 0
    """Bytes of all that is kept."""
    _lock: Lock = field(default_factory=Lock)

    def mark(self, url: str) -> str:
        """Another text whenever the answer may be another one."""
        told = "/".join((self.born, url, *concerned(self.runs, url)))
        return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:24]

    def get(self, url: str, mark: str) -> bytes:
        """The answer as gzipped JSON."""
        before = self.kept.get(url)
        if before is not None and before[0] == mark:
            return before[1]
        made = encoded(answer(self.runs, url))
        with self._lock:
            self._keep(url, mark, made)
        return made

    def _keep(self, url: str, mark: str, made: bytes) -> None:
        if gone := self.kept.pop(url, None):
            self.size -= _size_of(url, gone)
        self.size += _size_of(url, (mark, made))
        self.kept[url] = mark, made
        while self.size > ROOM and self.kept:
            self.size -= _size_of(*self.kept.popitem(last=False))


def _size_of(url: str, kept: tuple[str, bytes]) -> int:
    """Bytes of an answer and its address, which who asks makes as long as the answer or longer."""
    return len(url) + sum(map(len, kept))


def page_of(folder: Path) -> dict[str, Path]:
    """The files of a page, by name."""
    return {path.name: path for path in folder.iterdir() if path.suffix in KINDS}


class Site:
    """Where a page is served: a port, the page's files, threads for what takes long.

    About MOST_CONNECTIONS are open at most. One more takes the place of the one that has asked for nothing for the
    longest time, so requests that never end keep nobody out.
    """

    def __init__(self, files: Mapping[str, Path], *, threads: int, name: str) -> None:
        self.files, self.port = files, 0
        self._heard: dict[web.RequestHandler, float] = {}
        """When a connection has sent its last whole request."""
        self._work: set[Future[Any]] = set()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    async def start(self, respond: Handler, host: str, port: int, *, most_bytes: int = 1024**2) -> None:
        """Listen, and answer every request by `respond`. most_bytes: of its body. ConfigError if the port is taken."""
        app = web.Application(client_max_size=most_bytes)

        async def heard(request: web.Request) -> web.StreamResponse:
            self._heard[request.protocol] = time.monotonic()
            return await respond(request)

        app.router.add_route("*", "/{path:.*}", heard)
        self._runner = web.AppRunner(app, access_log=None, logger=log, shutdown_timeout=0.1)
        await self._runner.setup()
        try:
            self._listening = await asyncio.get_running_loop().create_server(self._accepted, host, port)
        except (OSError, UnicodeError) as e:  # UnicodeError: of a name that none can be
            await self.stop()
            why = e.strerror if isinstance(e, OSError) else e
            taken = isinstance(e, OSError) and e.errno in (errno.EADDRINUSE, errno.EACCES)
            raise ConfigError(
                f"cannot listen on {host} port {port}: {why}; give another {'--port' if taken else '--host'}"
            ) from e
        self.port = self._listening.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close all connections."""
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _accepted(self) -> web.RequestHandler:
        """What a new connection is heard by."""
        server = self._runner.server if self._runner is not None else None
        assert server is not None
        live = [c for c in server.connections if c.transport is not None and not c.transport.is_closing()]
        self._heard = {c: self._heard.get(c, 0.0) for c in live}
        for _ in range(MOST_CONNECTIONS, len(live) + 1):
            quiet = min(self._heard, key=self._heard.__getitem__)  # the oldest, if some asked for nothing
            del self._heard[quiet]
            assert quiet.transport is not None
            quiet.transport.abort()  # what it has not taken of an answer is dropped, too
        return server()

    def file(self, name: str) -> web.Response | None:
        """A file of the page, by its name alone; none has a folder in it."""
        found = self.files.get(name or "index.html")
        if found is None:
            return None
        return web.Response(body=found.read_bytes(), content_type=KINDS[found.suffix], charset="utf-8")

    async def later(self, function: Callable[..., T], *arguments: object) -> T:
        """What a function returns, from a thread."""
        work = self._pool.submit(function, *arguments)
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        return await asyncio.wrap_future(work)

    @property
    def working(self) -> bool:
        """Whether a thread is at work, which the end of this process would wait for."""
        return any(work.running() for work in list(self._work))


class ViewerServer:
    """Answers GET and HEAD. Everything else, another Host, a wrong token: refused before anything is read."""

    def __init__(self, runs: ShownRuns, *, host: str = "127.0.0.1", token: str | None = None) -> None:
        """ConfigError for a host that others can reach, without a token."""
        if not _is_loopback(host) and not token:
            raise ConfigError(
                f"--host {host} can be reached from other machines: give --token TEXT (each request then needs it), or "
                "leave --host out and use a tunnel: ssh -L PORT:127.0.0.1:PORT MACHINE"
            )
        if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
            raise ConfigError("--token: expected at least 8 printable ASCII characters")
        self.answers, self.host, self.token = Answers(runs), host, token
        self.site = Site(page_of(STATIC), threads=THREADS, name="whet-view")

    @property
    def port(self) -> int:
        return self.site.port

    async def start(self, port: int = 0) -> None:
        """Listen. ConfigError if the port is taken."""
        await self.site.start(self._respond, self.host, port)

    @property
    def url(self) -> str:
        """Where the page is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/" + (f"?token={quote(self.token, safe='')}" if self.token else "")

    async def stop(self) -> None:
        """Close all connections."""
        await self.site.stop()

    # -- inside

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        response = self._refusal(request) or await self._get(request)
        response.headers.update(HEADERS)
        return response

    def _refusal(self, request: web.Request) -> web.Response | None:
        if request.method not in ("GET", "HEAD"):
            return _error(request, 405, f"method {request.method}: this server only answers GET and HEAD")
        if not self._knows(request.headers.get("Host", "")):
            return _error(request, 403, "this Host is not the address of the viewer")
        if self.token is not None and not self._has_token(request):
            return _error(request, 401, "a token is needed: open the address that `whet view` printed")
        return None

    def _knows(self, host: str) -> bool:
        """A page of another site may have its name point here, but cannot change the Host that a browser sends. With a
        token nothing is answered to a page that does not have it."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return self.token is not None or _is_loopback(name.lower())

    def _has_token(self, request: web.Request) -> bool:
        head = request.headers.get("Authorization", "")
        given = (request.query.get("token"), request.cookies.get(self._cookie), head.removeprefix("Bearer "))
        own = str(self.token).encode()
        return any(hmac.compare_digest(one.encode("utf-8", "replace"), own) for one in given if one)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        path = request.path.lstrip("/")
        if path.split("/")[0] == "api":
            return await self._api(request)
        if (
            self.token is not None and "token" in request.query
        ):  # from now on the browser sends it, out of sight
            response = web.Response(status=303, headers={"Location": f"/{quote(path)}"})
            response.set_cookie(self._cookie, self.token, httponly=True, samesite="Strict")
            return response
        return self.site.file(path) or _error(request, 404, f"nothing is at /{path[:200]}")

    @property
    def _cookie(self) -> str:
        """Cookies are those of a machine: each port has a name of its own."""
        return f"whet_token_{self.port}"

    async def _api(self, request: web.Request) -> web.Response:
        url = request.rel_url.raw_path.lstrip("/")
        if query := "&".join(
            p for p in request.rel_url.raw_query_string.split("&") if not p.startswith("token=")
        ):
            url += f"?{query}"
        try:
            mark = await self.site.later(self.answers.mark, url)
            if f'"{mark}"' in request.headers.get("If-None-Match", ""):
                return web.Response(status=304, headers={"ETag": f'"{mark}"'})
            body = await self.site.later(self.answers.get, url, mark)
        except NotThere as e:
            return _error(request, 404, str(e))
        except BadQuestion as e:
            return _error(request, 400, str(e))
        except (WhetError, OSError) as e:
            return _error(request, 422, str(e))
        response = _json(request, 200, body)
        response.headers["ETag"] = f'"{mark}"'
        return response


def _error(request: web.Request, status: int, text: str) -> web.Response:
    return _json(request, status, encoded({"error": text}))


def _json(request: web.Request, status: int, body: bytes) -> web.Response:
    """Gzipped JSON, for whom takes it so."""
    headers = {"Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        headers["Content-Encoding"] = "gzip"
    else:
        body = gzip.decompress(body)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def serve(
    given: Sequence[Path], *, host: str, port: int, token: str | None, ready: Callable[[str], object]
) -> None:
    """Serve run directories, and those in folders, until Ctrl-C or SIGTERM. ready: called with the URL once it answers.
    DataError for a path with neither."""
    server = ViewerServer(ShownRuns(find_runs(given), given), host=host, token=token)
    asyncio.run(until_ended(server, port, ready))
    leave(server.site)


def leave(*sites: Site) -> None:
    """End this process at once where a thread still makes an answer, which the end of Python would wait for."""
    if any(site.working for site in sites):
        os._exit(0)


class Listening(Protocol):
    """A server of a page: the viewer's or the studio's."""

    @property
    def url(self) -> str: ...

    async def start(self, port: int) -> None: ...

    async def stop(self) -> None: ...


async def until_ended(server: Listening, port: int, ready: Callable[[str], object]) -> None:
    """Listen until Ctrl-C or SIGTERM. ready: called with the URL once it answers."""
    await server.start(port)
    end, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    ready(server.url)
    await end.wait()
    await server.stop()
