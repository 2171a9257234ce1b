"""A proxy before servers, as vLLM's and SkyRL's routers: it sends each request on to the next server, with streams."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
from aiohttp import web

from on_thread import OnThread


class Proxy(OnThread):
    """Answers on a port of this machine until `stop`."""

    def __init__(self, servers: Sequence[str], *, port: int = 0) -> None:
        self.servers, self.port = list(servers), port
        self.asked: list[tuple[str, str]] = []
        """Every request: its path, and the server that got it."""
        self.url = ""
        self.begin()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._passed_on)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._up.set()

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _passed_on(self, http: web.Request) -> web.StreamResponse:
        to = self.servers[len(self.asked) % len(self.servers)]
        self.asked.append((http.path, to))
        async with self._session.request(http.method, to + http.path_qs, data=await http.read()) as said:
            answer = web.StreamResponse(status=said.status, headers={"Content-Type": said.content_type})
            await answer.prepare(http)
            async for piece in said.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
            return answer
