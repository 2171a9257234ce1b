"""Answers of inference servers that would fill the memory, hang or reach a terminal; `fuzz.servers` has wrong ones."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import resource
from collections.abc import Coroutine
from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest
from aiohttp import web

from serving import LIMITS
from whet import secrets
from whet.rollout.http import calls as module
from whet.rollout.http.calls import Call, Calls, Unreachable
from whet.types import WhetError

MOST = 1 << 20
CALL = Call("/it", "for it", repeats=False)
LOUD = "\x1b]0;owned\x07" + "\ud800" + "x" * 100_000


async def endless(http: web.Request) -> web.StreamResponse:
    said = web.StreamResponse()
    await said.prepare(http)
    while True:
        await said.write(b"data: [1]\n" * 10_000)


async def dripping(http: web.Request) -> web.StreamResponse:
    said = web.StreamResponse()
    await said.prepare(http)
    while True:
        await said.write(b"[")
        await asyncio.sleep(0.01)


def saying(body: bytes, *, status: int = 200, **headers: str) -> Any:
    async def handler(_: web.Request) -> web.Response:
        kind = {"Content-Type": "application/json"}
        return web.Response(body=body, status=status, headers=kind | headers)

    return handler


def asked(handler: Any, *, events: bool = False, answer: float = 20.0) -> Any:
    """What one call of a server that answers so comes to."""

    async def story() -> Any:
        app = web.Application()
        app.router.add_post("/it", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = Calls(f"http://127.0.0.1:{runner.addresses[0][1]}", limits=replace(LIMITS, answer=answer))
        try:
            work: Coroutine[Any, Any, Any] = told(client) if events else client.ask(CALL)
            return await asyncio.wait_for(work, 30)
        finally:
            await client.close()
            await runner.cleanup()

    async def told(client: Calls) -> list[Any]:
        return [event async for event in client.events(CALL, {})]

    return asyncio.run(story())


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (saying(b"[" * 100_000), "not answer with JSON"),
        (saying(b'"\xff\xfe"'), "not answer with JSON"),
        (saying(b""), "not answer with JSON"),
        (saying(b"9" * 5000), "not answer with JSON"),
        (saying(b"[" + b"1," * MOST + b"1]"), "more than 1 MiB"),
        (saying(gzip.compress(b" " * (64 * MOST)), **{"Content-Encoding": "gzip"}), "more than 1 MiB"),
        (endless, "more than 1 MiB"),
    ],
    ids=["deep", "bytes", "nothing", "digits", "long", "bomb", "endless"],
)
@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_that_nobody_could_hold_is_refused(
    handler: Any, says: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ANSWER", MOST)

    async def so(http: web.Request) -> web.StreamResponse:
        made: web.StreamResponse = await handler(http)
        made.set_status(status)
        return made

    with pytest.raises(WhetError, match=says if status == 200 or "MiB" in says else "refused"):
        asked(so)


def test_a_stream_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ANSWER", MOST)
    with pytest.raises(WhetError, match="more than 1 MiB"):
        asked(endless, events=True)


def test_an_answer_that_drips_has_the_deadline_of_its_call() -> None:
    with pytest.raises(Unreachable, match="has not answered within"):
        asked(dripping, answer=0.3)


def test_an_event_may_have_a_whole_reply() -> None:
    """More than the 512 KiB that aiohttp takes for one line, and cut anywhere by the network."""
    events = [{"tokens": list(range(200_000))}, {"text": "\u00e9" * 1000}]
    body = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
    assert asked(saying(f"{body}data: [DONE]\n\n".encode()), events=True) == events


@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_may_be_written_as_their_standard_allows(space: str, end: str) -> None:
    """Gateways before a server leave out the space, end lines as Windows does, and keep a connection with comments."""
    lines = [": ping", f'data:{space}{{"a": 1}}', "", "event: more", f'data:{space}{{"a": 2}}', ""]
    body = end.join([*lines, f"data:{space}[DONE]", "", ""])
    assert asked(saying(body.encode()), events=True) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("wait", [{}, {"Retry-After": "0"}, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}])
def test_a_server_with_too_many_requests_is_asked_again(
    events: bool, wait: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an endpoint with a limit of requests a minute; the engine was dropped, and with it the run."""
    monkeypatch.setattr(module, "BUSY_S", 0.01)
    busy = saying(b'{"error": "rate limit"}', status=429, **wait)
    answers = [busy, busy, saying(b'data: {"a": 1}\n\ndata: [DONE]\n\n' if events else b'{"a": 1}')]

    async def so(http: web.Request) -> web.Response:
        made: web.Response = await answers.pop(0)(http)
        return made

    assert asked(so, events=events) == ([{"a": 1}] if events else {"a": 1})
    assert not answers


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (
            {"error": {"message": "The engine is currently busy and cannot accept new requests. Please ..."}},
            True,
        ),
        ({"error": {"message": "The engine has reached its prefill token backlog limit. Please ..."}}, True),
        ({"error": {"message": "Generation is paused. Please retry after it resumes."}}, True),
        ({"object": "error", "message": "The request queue is full.", "code": 503}, True),
        ({"error": {"message": "no healthy upstream"}}, False),
    ],
    ids=["requests", "tokens", "paused", "sglang", "lost"],
)
def test_a_full_queue_is_no_lost_server(
    error: dict[str, Any], full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM and SGLang refuse with status 503 what their queue has no place for; the server was given up, and killed
    where the run had started it."""
    monkeypatch.setattr(module, "BUSY_S", 0.01)
    answers = [saying(json.dumps(error).encode(), status=503), saying(b'{"a": 1}')]

    async def so(http: web.Request) -> web.Response:
        made: web.Response = await answers.pop(0)(http)
        return made

    if full:
        assert asked(so) == {"a": 1}
        return
    with pytest.raises(Unreachable, match="no healthy upstream"):
        asked(so)


def test_a_server_with_too_many_requests_is_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that no pause is needed, and is given one all the same."""
    paused: list[float] = []

    async def pause(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", pause)
    answers = [saying(b"", status=429, **{"Retry-After": s}) for s in ("0", "7")] + [saying(b"[]")]

    async def so(http: web.Request) -> web.Response:
        made: web.Response = await answers.pop(0)(http)
        return made

    assert asked(so) == []
    assert paused[:2] == [module.BUSY_S, 7.0]


@pytest.mark.parametrize(
    ("message", "waits"),
    [
        ("Generation is paused. Please retry after it resumes.", [1, 1, 1, 1]),
        ("The request queue is full", [1, 2, 4, 8]),
    ],
)
def test_a_server_that_is_paused_is_asked_again_soon(
    message: str, waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has paused it, for as long as its weights are loaded; a queue may be full for long."""
    slept: list[float] = []

    async def pause(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", pause)
    refused = json.dumps({"error": {"message": message}}).encode()
    answers = [saying(refused, status=503)] * len(waits) + [saying(b"[]")]

    async def so(http: web.Request) -> web.Response:
        made: web.Response = await answers.pop(0)(http)
        return made

    assert asked(so) == []
    assert slept[: len(waits)] == [module.BUSY_S * n for n in waits]


def test_a_server_that_is_paused_for_too_long_is_told_so() -> None:
    said = json.dumps({"error": {"message": "Generation is paused. Please retry after it resumes."}}).encode()
    with pytest.raises(Unreachable, match=r"not answered, only that it is paused \(status 503\), within"):
        asked(saying(said, status=503), answer=1.0)


def test_a_server_that_has_too_many_requests_for_too_long_is_told_so() -> None:
    with pytest.raises(
        Unreachable, match=r"not answered, only that it has too many requests \(status 429\), within"
    ):
        asked(saying(b"{}", status=429), answer=1.0)


@pytest.mark.parametrize(
    "message",
    [
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "The server had an error while processing your request.",
    ],
    ids=["0.32", "0.33"],
)
def test_a_vllm_whose_engine_has_died_is_lost_and_what_it_was_asked_is_not_at_fault(message: str) -> None:
    """`EngineDeadError` of vLLM: it is started again. As an error of the call it ended the run in a weight sync."""
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    with pytest.raises(Unreachable, match="refused for it with status 500"):
        asked(saying(json.dumps({"error": error}).encode(), status=500))


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("status", [301, 302, 307])
def test_a_server_that_points_elsewhere_is_not_followed(status: int, events: bool) -> None:
    """A POST became a GET of another page, whose answer counted; or prompts went to another host."""
    elsewhere = "http://127.0.0.1:1/login"
    with pytest.raises(WhetError, match=rf"status {status}: .*points to {elsewhere}, which is not followed"):
        asked(saying(b"", status=status, Location=elsewhere), events=events)


def test_an_event_without_an_end_is_a_broken_answer() -> None:
    with pytest.raises(Unreachable, match="broke off"):
        asked(saying(b'data: {"a": 1}\n\n'), events=True)


ERRORS = [{"error": {"message": LOUD}}, {"error": LOUD}, {"detail": [LOUD]}, [LOUD], LOUD]


@pytest.mark.parametrize(
    ("body", "events"), [*((e, False) for e in ERRORS), *((e, True) for e in ERRORS[:2])]
)
def test_what_a_server_says_of_an_error_is_short_and_commands_no_terminal(body: Any, events: bool) -> None:
    text = json.dumps(body)
    handler = saying(f"data: {text}\n\n".encode()) if events else saying(text.encode(), status=500)
    with pytest.raises(WhetError, match="owned") as caught:
        asked(handler, events=events)
    said = str(caught.value)
    assert len(said) < 1000
    assert said.isprintable()
    said.encode()


def test_a_server_that_tells_its_token_back_is_struck_out() -> None:
    secrets.learn("rollout.server.token", "tok-9f31c2aa77")
    with pytest.raises(WhetError, match="redacted") as caught:
        asked(saying(b'{"error": "no entry for tok-9f31c2aa77"}', status=401))
    assert "tok-9f31c2aa77" not in str(caught.value)


def test_more_requests_at_once_than_a_process_may_open_files_at_first() -> None:
    """As a step with more rollouts than the usual limit of 1024; the server was said not to answer, and dropped."""
    many = 100
    came = 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal came
        came += 1
        while came < many:
            await asyncio.sleep(0.01)
        return web.json_response(1)

    async def story() -> list[Any]:
        app = web.Application()
        app.router.add_post("/it", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=many).start()
        client = Calls(f"http://127.0.0.1:{runner.addresses[0][1]}", limits=LIMITS)
        try:
            return await asyncio.gather(*(client.ask(CALL) for _ in range(many)))
        finally:
            await client.close()
            await runner.cleanup()

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = set(map(int, os.listdir("/proc/self/fd")))
    free = islice((n for n in count() if n not in there), 40)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free), limits[1]))
    try:
        assert asyncio.run(story()) == [1] * many
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("hangs", [False, True])
def test_what_is_told_last_is_sent_and_leaves_no_connection_open(hangs: bool) -> None:
    heard: list[bytes] = []
    left: list[str] = []

    async def handler(http: web.Request) -> web.Response:
        heard.append(await http.read())
        await asyncio.sleep(3600 if hangs else 0)
        return web.Response()

    async def story() -> None:
        app = web.Application()
        app.router.add_post("/it", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context["message"]))
        client = Calls(f"http://127.0.0.1:{runner.addresses[0][1]}", limits=LIMITS)
        await client.tell(CALL, {"n": 1}) if not hangs else None
        client.ending = True
        await client.tell(CALL, {"n": 2})
        await client.close()
        del client
        await asyncio.sleep(0)
        gc.collect()
        await runner.cleanup()

    asyncio.run(story())
    assert heard == ([b'{"n": 2}'] if hangs else [b'{"n": 1}', b'{"n": 2}'])
    assert left == []
