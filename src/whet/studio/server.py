"""The server of `whet studio`: for this machine alone, and for the page that it gave its tokens to.

A request needs the token of the printed address (then in a cookie), a Host that is this machine, and, where it changes
anything, POST with the page's own token and no other site's Origin.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from whet.inputs import MOST_CONFIG_BYTES
from whet.studio.answers import ASKED, TOLD, BadRequest, Question, Studio, drawn_from, run_folder
from whet.studio.jobs import Jobs
from whet.studio.opened import IsThere
from whet.types import WhetError
from whet.view.answers import encoded
from whet.view.server import HEADERS, Site, ViewerServer, leave, page_of, until_ended
from whet.view.server import STATIC as OF_THE_VIEWER
from whet.view.source import ShownRuns

STATIC = Path(__file__).parent / "static"
SHARED = ("dom.js", "style.css", "icon.svg")
"""Files of the viewer's page that this page has, too."""
HOST = "127.0.0.1"
LOCAL = ("localhost", "127.0.0.1", "[::1]")
MOST_BODY_BYTES = 4 * MOST_CONFIG_BYTES
"""A text in JSON, where a character may take six bytes."""


class StudioServer:
    """Answers the page. Other Hosts, Origins, methods and tokens are refused before anything is read."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.token, self._page_token = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._once = secrets.token_urlsafe(24)
        shared = {("viewer.css" if name == "style.css" else name): OF_THE_VIEWER / name for name in SHARED}
        # one thread: a later text is checked later
        self.site = Site(page_of(STATIC) | shared, threads=1, name="whet-studio")
        self._viewer: ViewerServer | None = None

    @property
    def sites(self) -> list[Site]:
        """Its own, and that of its viewer."""
        return [self.site, *([self._viewer.site] if self._viewer is not None else [])]

    @property
    def port(self) -> int:
        return self.site.port

    async def start(self, port: int = 0) -> None:
        """Listen. ConfigError if the port is taken."""
        await self.site.start(self._respond, HOST, port, most_bytes=MOST_BODY_BYTES)

    @property
    def url(self) -> str:
        """Where the page is, with its token."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    @property
    def once(self) -> str:
        """The same for a browser's command line, which other users of the machine can read: it is good once."""
        return f"http://{HOST}:{self.port}/?token={self._once}"

    async def stop(self) -> None:
        """Close all connections, those of the viewer too."""
        if self._viewer is not None:
            await self._viewer.stop()
        await self.site.stop()

    # -- inside

    @property
    def _cookie(self) -> str:
        return f"whet_studio_{self.port}"  # a browser gives a cookie to all ports of a machine

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        response = self._refusal(request) or await self._answer(request)
        response.headers.update(HEADERS)
        if response.status < 400 and "token" in request.query:
            response.set_cookie(self._cookie, self.token, httponly=True, samesite="Strict")
        return response

    def _refusal(self, request: web.Request) -> web.Response | None:
        host = request.headers.get("Host", "").lower()
        name, _, port = host.rpartition(":")
        if name not in LOCAL or port != str(self.port):
            return _error(403, "this Host is not the address of the studio")
        if request.method not in ("GET", "HEAD", "POST"):
            return _error(405, f"method {request.method}: expected GET or POST")
        if not self._has_token(request):
            return _error(401, "a token is needed: open the address that `whet studio` printed")
        if request.method != "POST":
            return None
        if request.headers.get("Origin", f"http://{host}").lower() != f"http://{host}":
            return _error(403, "this Origin is not the page of the studio")
        if not _equal(request.headers.get("X-Whet-Page", ""), self._page_token):
            return _error(403, "the page's token is missing; reload the page")
        if request.content_type != "application/json":
            return _error(415, "expected application/json")
        return None

    def _has_token(self, request: web.Request) -> bool:
        given = request.query.get("token", "")
        if _equal(given, self._once):
            self._once = secrets.token_urlsafe(24)
            return True
        return _equal(given, self.token) or _equal(request.cookies.get(self._cookie, ""), self.token)

    async def _answer(self, request: web.Request) -> web.Response:
        section, _, name = request.path.lstrip("/").partition("/")
        if section != "api":
            return self._file(request, request.path.lstrip("/"))
        if name == "schema" and request.method != "POST":
            return _json(await self.site.later(drawn_from))
        table = TOLD if request.method == "POST" else ASKED
        if name not in table and not (name == "view" and table is TOLD):
            return _error(404, f"nothing is at /{section}/{name[:100]} for {request.method}")
        try:
            fields = await _body(request) if table is TOLD else dict(request.query)
            if name == "view":
                return _json(encoded({"url": await self._view()}))
            found = await self.site.later(table[name], self.studio, Question(fields))
        except BadRequest as e:
            return _error(400, str(e))
        except IsThere as e:
            return _json(encoded({"error": "another file is there", "digest": str(e)}), status=409)
        except (WhetError, OSError) as e:
            return _error(422, str(e))
        if name == "start":
            found |= {"page_token": self._page_token}
        return _json(await self.site.later(encoded, found))

    def _file(self, request: web.Request, name: str) -> web.Response:
        found = self.site.file(name) if request.method != "POST" else None
        return found or _error(404, f"nothing is at /{name[:100]}")

    async def _view(self) -> str:
        """The address of a viewer of the run, on a port of its own and with a token."""
        path = await self.site.later(run_folder, self.studio)
        if self._viewer is not None:
            await self._viewer.stop()
        self._viewer = ViewerServer(ShownRuns([path]), token=secrets.token_urlsafe(24))
        await self._viewer.start()
        return self._viewer.url


async def _body(request: web.Request) -> dict[str, Any]:
    """The fields of a JSON body."""
    try:
        found = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as e:
        raise BadRequest(f"more than {MOST_BODY_BYTES >> 20} MiB") from e
    except (ValueError, RecursionError, web.RequestPayloadError) as e:
        raise BadRequest("the body is not JSON") from e
    if not isinstance(found, dict):
        raise BadRequest("the body is not a JSON object")
    return found


def _equal(given: str, own: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), own.encode())


def _json(body: bytes, status: int = 200) -> web.Response:
    headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _error(status: int, text: str) -> web.Response:
    return _json(encoded({"error": text}), status=status)


def serve(file: Path | None, *, port: int, ready: Callable[[str, str], object]) -> None:
    """Serve until Ctrl-C or SIGTERM, which also stop the run. ready: called once it answers with its URL, and with the
    one that is good once."""
    with Jobs(Path.cwd()) as jobs:
        server = StudioServer(Studio.of(file, jobs))
        asyncio.run(until_ended(server, port, lambda url: ready(url, server.once)))
    leave(*server.sites)
