"""Servers behind a proxy of the user's: replies pass through it, weights do not, and none is asked for in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from proxies import Proxy
from servers import SglangServer, VllmServer
from serving import vllm_engine
from test_http_keys import inputs
from test_rollout_contract import LIMIT, PROMPT, module
from tiny import RUN
from whet.config.load import load
from whet.config.plan import plans
from whet.models import kernels
from whet.rollout.engine import RolloutEngine, WeightUpdate
from whet.rollout.http.opened import sglang, vllm
from whet.rollout.native.engine import NativeEngine
from whet.types import Completion, ConfigError, Request, Sampling, WhetError

T = TypeVar("T")
REPLY = "/inference/v1/generate"
ABORT = "/abort_requests"


def server(kind: Callable[..., Any] = VllmServer, **how: Any) -> Any:
    return kind(NativeEngine(module(), kernels.load("auto"), end_token_ids=[], max_context=LIMIT), **how)


@pytest.fixture
def two() -> Iterator[list[VllmServer]]:
    there = [server(), server()]
    yield there
    for one in there:
        one.stop()


@pytest.fixture
def proxy(two: list[VllmServer]) -> Iterator[Proxy]:
    there = Proxy([one.url for one in two])
    yield there
    there.stop()


def opened(folder: Path, two: list[VllmServer], proxy: Proxy, **more: Any) -> RolloutEngine:
    return vllm(inputs(folder, urls=tuple(one.url for one in two), proxy=proxy.url, **more))


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


def ask(engine: RolloutEngine, name: str, *, tokens: int = 4, **request: Any) -> asyncio.Task[Completion]:
    sampling = Sampling(key=7, max_tokens=tokens, ignore_eos=True)
    asked = Request(id=name, session=name, prompt=tuple(PROMPT), sampling=sampling, **request)
    return asyncio.ensure_future(engine.generate(asked))


def newer(version: int) -> WeightUpdate:
    return WeightUpdate(version=version, module=module(seed=version))


def calls(one: VllmServer, path: str) -> list[Any]:
    return [body for called, body in one.asked if called == path]


def test_replies_pass_through_the_proxy_and_all_else_goes_to_each_server(
    two: list[VllmServer], proxy: Proxy, tmp_path: Path
) -> None:
    engine = opened(tmp_path, two, proxy)

    async def story() -> None:
        receipt = await engine.update_weights(newer(3))
        assert {name.partition("/")[0] for name in receipt.measured} == {"sync"}
        replies = await asyncio.gather(*(ask(engine, f"r{n}") for n in range(6)))
        assert [r.versions for r in replies] == [[3] * 4] * 6
        assert {r.token_ids == replies[0].token_ids for r in replies} == {True}, (
            "two servers, the same weights"
        )
        assert {path for path, _ in proxy.asked} == {REPLY}
        asked = [to for path, to in proxy.asked]
        assert {asked.count(one.url) for one in two} == {len(asked) // 2}
        for one in two:
            assert len(calls(one, "/collective_rpc")) == 1, "each is given the weights itself"
        assert not engine.can.in_flight_updates
        await engine.close()

    run(story())


@pytest.mark.parametrize("left", ["paused", "asleep"])
def test_servers_that_a_killed_run_left_between_two_versions_answer_the_next_start(
    two: list[VllmServer], proxy: Proxy, tmp_path: Path, left: str
) -> None:
    """The first token is asked for before there is an update that would let them go on."""

    async def leave() -> None:
        for one in two:
            dead = vllm_engine(one.url, module(), max_context=LIMIT, end_token_ids=[])
            await dead.open()
            await (dead.pause(False) if left == "paused" else dead.place("cpu"))
            await dead.calls.close()

    run(leave())
    engine = opened(tmp_path, two, proxy, timeout_s=10.0)

    async def story() -> None:
        await engine.update_weights(newer(3))
        replies = await asyncio.gather(*(ask(engine, f"r{n}") for n in range(4)))
        assert [r.versions for r in replies] == [[3] * 4] * 4
        await engine.close()

    run(story())


def test_an_update_waits_for_replies_and_lets_none_in_before_every_server_has_it(
    two: list[VllmServer], proxy: Proxy, tmp_path: Path
) -> None:
    engine = opened(tmp_path, two, proxy)

    async def story() -> None:
        await engine.update_weights(newer(1))
        long = ask(engine, "long", tokens=60)
        while not any(one.running for one in two):
            await asyncio.sleep(0.005)
        two[1].slow_s = 0.05  # the second server is still busy with the version when the first has it
        update = asyncio.ensure_future(engine.update_weights(newer(2)))
        await asyncio.sleep(0)
        late = ask(engine, "late")
        assert (await long).versions == [1] * 60, "no token of it has other weights"
        before = len(proxy.asked)
        while not calls(two[0], "/resume")[1:]:
            ids = [body["request_id"] for one in two for body in calls(one, REPLY)]
            assert not any(name.startswith("late-") for name in ids)
            await asyncio.sleep(0.005)
        assert len(proxy.asked) == before, "while one server has the new weights, nobody asks"
        await update
        assert (await late).versions == [2] * 4
        await engine.close()

    run(story())


def test_a_server_that_did_not_take_the_weights_is_named_and_nobody_samples_from_it(
    two: list[VllmServer], proxy: Proxy, tmp_path: Path
) -> None:
    engine = opened(tmp_path, two, proxy, restarts=0)

    async def story() -> None:
        await engine.update_weights(newer(1))
        two[1].keep = lambda number, name: False
        before = len(proxy.asked)
        with pytest.raises(WhetError, match=f"{two[1].url} does not have weights version 2"):
            await engine.update_weights(newer(2))
        with pytest.raises(WhetError):
            await ask(engine, "after")
        assert len(proxy.asked) == before
        await engine.close()

    run(story())


def test_a_proxy_that_leads_to_another_server_is_found(
    two: list[VllmServer], proxy: Proxy, tmp_path: Path
) -> None:
    """Also later, when it no longer leads to the servers that were named."""
    engine = opened(tmp_path, two, proxy, restarts=0)
    other = server()

    async def story() -> None:
        await engine.update_weights(newer(1))
        proxy.servers = [other.url]
        with pytest.raises(
            WhetError, match=r"version 0, where those of .* name every server behind it there"
        ):
            await engine.update_weights(newer(2))
        await engine.close()

    try:
        run(story())
    finally:
        other.stop()


def test_a_proxy_that_dies_is_asked_again_and_its_requests_are_repeated(
    two: list[VllmServer], tmp_path: Path
) -> None:
    first = Proxy([one.url for one in two])
    engine = opened(tmp_path, two, first)

    async def story() -> None:
        await engine.update_weights(newer(1))
        for one in two:
            one.holds = True
        long = ask(engine, "long", tokens=60)
        while not any(one.running for one in two):
            await asyncio.sleep(0.005)
        await asyncio.to_thread(first.stop)
        for one in two:
            one.holds = False
        second = await asyncio.to_thread(Proxy, first.servers, port=first.port)
        try:
            assert (await long).versions == [1] * 60
            assert not any(one.running for one in two), "what the lost connection had asked for is aborted"
            assert len(calls(two[0], "/collective_rpc")) == 2, "its servers are proved anew"
        finally:
            await engine.close()
            await asyncio.to_thread(second.stop)

    run(story())


def test_a_request_that_is_given_up_is_aborted_wherever_it_is(
    two: list[VllmServer], proxy: Proxy, tmp_path: Path
) -> None:
    engine = opened(tmp_path, two, proxy)

    async def story() -> None:
        await engine.update_weights(newer(1))
        long = ask(engine, "gone", tokens=60)
        while not any(one.running for one in two):
            await asyncio.sleep(0.005)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        while not all(calls(one, ABORT) for one in two):
            await asyncio.sleep(0.005)
        first, second = ([body["request_ids"] for body in calls(one, ABORT)] for one in two)
        assert first == second
        assert first[0][0].startswith("generate-tokens-gone-")
        while any(one.running for one in two):
            await asyncio.sleep(0.005)
        await engine.close()

    run(story())


def test_servers_of_sglang_stand_behind_a_proxy_too(tmp_path: Path) -> None:
    there = [server(SglangServer), server(SglangServer)]
    front = Proxy([one.url for one in there])

    engine = sglang(inputs(tmp_path, urls=tuple(one.url for one in there), proxy=front.url))

    async def story() -> None:
        await engine.update_weights(newer(2))
        replies = await asyncio.gather(*(ask(engine, f"r{n}") for n in range(4)))
        assert [r.versions for r in replies] == [[2] * 4] * 4
        assert {path for path, _ in front.asked} == {"/generate"}
        await engine.close()

    try:
        run(story())
    finally:
        front.stop()
        for one in there:
            one.stop()


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"proxy": "http://h:1"}, "no servers are named"),
        ({"proxy": "http://h:1", "urls": ["http://h:2"], "lora": "adapter"}, "use rollout.server.lora=merge"),
    ],
)
def test_what_a_proxy_cannot_do_is_refused(server: Any, said: str) -> None:
    more = {"model": {**RUN["model"], "lora": {"rank": 2}}} if "lora" in server else {}
    with pytest.raises(ConfigError, match=said):
        plans(load(None, (), {**RUN, "rollout": {"engine": "vllm", "server": server}, **more}))
