"""A SandboxFusion service in a thread: it runs what tests send it, as Python, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Json = Any
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Sandbox:
    """`answers` are given in their order before programs are run: a JSON value, or a handler of aiohttp."""

    path = "/run_code"

    def __init__(self, *answers: Json | Handler) -> None:
        self.answers = list(answers)
        self.asked: list[Json] = []
        """The body of every request."""
        self.most = 0
        """Requests at once."""
        self.url = ""
        self._now = 0
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(30)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post(self.path, self._run)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}{self.path}"
        self._up.set()

    async def _run(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            if not self.answers:
                await asyncio.sleep(0.02)  # long enough for others to come
                return web.json_response(await asyncio.to_thread(self.answer, body))
            answer = self.answers.pop(0)
            return await answer(request) if callable(answer) else web.json_response(answer)
        finally:
            self._now -= 1

    def answer(self, body: Json) -> Json:
        return executed(body)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@contextmanager
def sandbox(*answers: Json | Handler) -> Iterator[Sandbox]:
    service = Sandbox(*answers)
    try:
        yield service
    finally:
        service.stop()


def executed(body: Json) -> Json:
    """What SandboxFusion answers for a program of Python."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", body["code"]],
        input=body["stdin"] or "",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    ran = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    status = "Failed" if done.returncode else "Success"
    return {"status": status, "message": "", "compile_result": None, "run_result": ran}


def ended(status: str, *, run: Json = None, compile_: Json = None) -> Json:
    """An answer of these parts."""
    return {"status": status, "message": "why", "run_result": run, "compile_result": compile_}
