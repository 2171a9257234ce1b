"""Many engines as one: whatever dies, every request is answered once, with the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from asking import reply
from jumping import Jumping, go
from tiny import VOCAB
from whet import seeds
from whet.config.schema import ModelConfig
from whet.models import kernels
from whet.models.load import build
from whet.rollout import balance
from whet.rollout.engine import PARTS, Capabilities, Health, OnTokens, Part, RolloutEngine, WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.rollout.replica import Replica
from whet.rollout.requests import RequestError
from whet.rollout.router import Router
from whet.rollout.scripted import ScriptedEngine
from whet.types import Completion, Receipt, Request, Sampling, ScoreRequest, TokenLogprobs, WhetError

T = TypeVar("T")
HEALTH_S = 0.2
QUICK: dict[str, Any] = {"health_timeout_s": HEALTH_S, "load_s": 0.3, "start_timeout_s": 2.0}


def weights(version: int) -> WeightUpdate:
    return WeightUpdate(version=version, module="weights")


def run(work: Coroutine[Any, Any, T]) -> T:
    """On a clock of its own: no replica is late because the machine is."""

    async def bounded() -> T:
        async with asyncio.timeout(30):
            return await work

    clock = Jumping()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whet.rollout.replica.time", SimpleNamespace(monotonic=lambda: clock.now))
        return go(bounded(), clock=clock)


def tokens(prompt: list[int], sampling: Sampling, version: int) -> list[int]:
    """A pure function of prompt, key and version, as every engine's."""
    stream = seeds.key(sampling.key, version, *prompt)
    return [int(u * VOCAB) for u in seeds.uniforms(stream, 0, sampling.max_tokens)]


async def say(prompt: list[int], sampling: Sampling, version: int) -> list[int]:
    for _ in range(1 + sampling.key % 7):
        await asyncio.sleep(0.001)
    return tokens(prompt, sampling, version)


class Faulty:
    """A `RolloutEngine` that gets on until it is told how to fail."""

    def __init__(self, engine: RolloutEngine | None = None) -> None:
        self.engine = engine or ScriptedEngine(say)
        self.fault = ""
        self.after = 0
        """Requests that it still serves well."""
        self.served: list[Request] = []
        self.reproducible: Literal["everywhere", "server", "no"] = "everywhere"
        self.proof = ""
        self.closed = False

    @property
    def version(self) -> int:
        return self.engine.version + (self.fault == "version")

    @property
    def can(self) -> Capabilities:
        return replace(self.engine.can, reproducible=self.reproducible)

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        await self._fail("generate", counted=True)
        if self.fault.startswith("half-"):
            await self.engine.generate(
                request, on_tokens and (lambda tokens: on_tokens(tokens[: len(tokens) // 2]))
            )
            await self._fail("half")
        done = await self.engine.generate(request, on_tokens)
        await self._fail("generate")  # in the middle of it
        if self.fault == "stale" and self.after < 0:
            return replace(done, spans=tuple(span._replace(version=span.version - 1) for span in done.spans))
        self.served.append(request)
        return done

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        await self._fail("generate", counted=True)
        await self._fail("generate")
        return await self.engine.score(requests)

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        await self._fail("load")
        if self.fault == "keep":
            return Receipt("one", update.version)
        receipt = await self.engine.update_weights(update)
        return replace(receipt, proof=self.proof)

    async def pause(self, finish: bool) -> None:
        await self._fail("pause")
        await self.engine.pause(finish)

    async def resume(self) -> None:
        await self.engine.resume()

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part] = PARTS) -> None:
        await self._fail("place")
        await self.engine.place(device, what)

    async def health(self) -> Health:
        return await self.engine.health()

    async def close(self) -> None:
        self.closed = True
        await self.engine.close()

    async def _fail(self, where: str, *, counted: bool = False) -> None:
        self.after -= counted and bool(self.fault)
        if self.after >= 0 and where == "generate":
            return
        if self.fault in (f"raise-{where}", f"{where}-raise"):
            raise RuntimeError("killed")
        if self.fault in (f"hang-{where}", f"{where}-hang"):
            await asyncio.sleep(3600)


class Crew:
    """Replicas, those that replace them, and all engines there ever were."""

    def __init__(self, count: int, make: Callable[[], Faulty] = Faulty, **options: Any) -> None:
        self.make, self.engines = make, [make() for _ in range(count)]
        replicas = [Replica(f"engine-{n}", e) for n, e in enumerate(self.engines)]
        self.router = Router(replicas, restart=self.restart, **{**QUICK, "restarts": 2, **options})

    async def restart(self, name: str) -> Replica:
        await asyncio.sleep(0.01)
        self.engines.append(self.make())
        return Replica(name, self.engines[-1])


def jobs(count: int, prompts: int = 5) -> list[tuple[list[int], Sampling]]:
    return [([1 + n % prompts, 7], Sampling(key=n, max_tokens=6)) for n in range(count)]


async def ask(router: RolloutEngine, work: list[tuple[list[int], Sampling]]) -> list[Completion]:
    return list(await asyncio.gather(*(reply(router, p, s) for p, s in work)))


FAULTS = ["raise-generate", "hang-generate", "version", "stale"]
LATER = ["raise-load", "hang-load", "keep", "hang-pause", "raise-pause"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_lost_replica_was_asked_is_asked_elsewhere(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        crew = Crew(3)
        crew.engines[1].fault, crew.engines[1].after = fault, 2
        done = await ask(crew.router, jobs(60))
        assert [c.token_ids for c in done] == [tokens(p, s, 0) for p, s in jobs(60)]
        assert [name for name, _ in crew.router.dropped] == ["engine-1"]
        await asyncio.sleep(0.1)
        assert sorted(crew.router.replicas) == ["engine-0", "engine-1", "engine-2"]  # it was replaced
        assert crew.engines[1].closed
        assert len(crew.engines) == 4
        await crew.router.close()

    with caplog.at_level(logging.INFO):
        run(story())
    assert any("replica engine-1 dropped" in r.message for r in caplog.records)
    traced = 'raise RuntimeError("killed")' in caplog.text
    assert traced == (fault == "raise-generate"), "an engine's own error has its traceback in the log"


@pytest.mark.parametrize("fault", LATER)
@pytest.mark.parametrize("finish", [True, False])
def test_a_replica_that_cannot_take_weights_is_dropped(fault: str, finish: bool) -> None:
    async def story() -> None:
        crew = Crew(3)
        crew.engines[2].fault = fault
        flying = asyncio.create_task(ask(crew.router, jobs(30)))
        await asyncio.sleep(0.002)
        await crew.router.pause(finish)
        await crew.router.update_weights(weights(1))
        assert crew.router.version == 1
        assert [name for name, _ in crew.router.dropped] == ["engine-2"]
        for (prompt, sampling), done in zip(jobs(30), await flying):
            assert done.token_ids == tokens(prompt, sampling, done.versions[0])
            assert not finish or set(done.versions) == {0}
        again = await ask(crew.router, jobs(30))
        assert [c.token_ids for c in again] == [tokens(p, s, 1) for p, s in jobs(30)]
        await asyncio.sleep(0.1)
        assert {e.version for e in crew.engines if not e.closed} == {1}  # the new one, too
        await crew.router.close()

    run(story())


@settings(max_examples=25)
@given(
    faults=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([*FAULTS[:2], "stale"]), st.integers(0, 9)),
                    max_size=4),
    finish=st.booleans(),
    asked=st.integers(1, 40),
)  # fmt: skip
def test_every_request_is_answered_once_whatever_dies(
    faults: list[tuple[int, str, int]], finish: bool, asked: int
) -> None:
    async def story() -> None:
        crew = Crew(4, restarts=4)
        for which, fault, after in faults:
            crew.engines[which].fault, crew.engines[which].after = fault, after
        answers: Counter[int] = Counter()

        async def one(prompt: list[int], sampling: Sampling) -> None:
            done = await reply(crew.router, prompt, sampling)
            answers[sampling.key] += 1
            assert len(set(done.versions)) == 1
            assert done.token_ids == tokens(prompt, sampling, done.versions[0])

        flying = [asyncio.create_task(one(p, s)) for p, s in jobs(asked)]
        await asyncio.sleep(0.002)
        await crew.router.pause(finish)
        await crew.router.update_weights(weights(1))
        await asyncio.gather(*flying)
        assert answers == Counter(range(asked))
        assert all(r.load == 0 for r in crew.router.replicas.values())
        assert not crew.router.balance.homes
        await crew.router.close()
        assert all(e.closed for e in crew.engines)

    run(story())


def test_requests_of_a_lost_replica_finish_while_the_router_pauses() -> None:
    async def story() -> None:
        crew = Crew(2, restarts=0)
        crew.engines[0].fault = "hang-generate"
        crew.engines[0].after = 0
        flying = asyncio.create_task(ask(crew.router, jobs(10)))
        await asyncio.sleep(0.002)
        await crew.router.pause(finish=True)
        assert flying.done()
        assert {v for c in await flying for v in c.versions} == {0}
        await crew.router.close()

    run(story())


def test_equal_prompts_go_to_one_replica_until_its_rows_are_taken() -> None:
    async def places(rows: int) -> list[set[tuple[int, ...]]]:
        seen: list[list[tuple[int, ...]]] = [[] for _ in range(3)]

        def handler(n: int) -> Callable[..., Awaitable[list[int]]]:
            async def note(prompt: list[int], sampling: Sampling, version: int) -> list[int]:
                seen[n].append(tuple(prompt))
                return await say(prompt, sampling, version)

            return note

        router = Router([Replica(f"e-{n}", ScriptedEngine(handler(n))) for n in range(3)], rows=rows)
        await ask(router, [([p], Sampling(key=k, max_tokens=4)) for p in range(1, 7) for k in range(8)])
        assert sum(map(len, seen)) == 48
        assert all(len(s) == 16 for s in seen), "as many for each"
        await router.close()
        return [set(s) for s in seen]

    apart = run(places(rows=64))
    assert sorted(p for place in apart for p in place) == [(p,) for p in range(1, 7)]
    assert sum(len(place) for place in run(places(rows=4))) > 6


def test_replicas_join_and_leave_during_a_run() -> None:
    async def story() -> None:
        crew = Crew(1)
        await crew.router.update_weights(weights(3))
        flying = asyncio.create_task(ask(crew.router, jobs(20)))
        await asyncio.sleep(0.001)
        late = Faulty()
        await crew.router.join(Replica("late", late))
        assert late.version == 3
        await asyncio.gather(flying, crew.router.leave("engine-0"))
        assert len(crew.engines[0].served) == 20
        assert crew.engines[0].closed
        await ask(crew.router, jobs(5))
        assert len(late.served) == 5
        with pytest.raises(WhetError, match="no replica 'engine-0' is serving; serving replicas: late"):
            await crew.router.leave("engine-0")
        assert crew.router.dropped == []
        await crew.router.close()

    run(story())


def test_weights_that_come_while_a_replica_joins() -> None:
    async def story() -> None:
        crew = Crew(1)
        await crew.router.update_weights(weights(1))
        slow = Faulty()
        before = slow.engine.update_weights

        async def load(update: WeightUpdate) -> Receipt:
            await asyncio.sleep(0.02)
            return await before(update)

        slow.engine.update_weights = load  # type: ignore[method-assign]
        joining = asyncio.create_task(crew.router.join(Replica("slow", slow)))
        await asyncio.sleep(0.005)
        await crew.router.update_weights(weights(2))
        await joining
        assert slow.version == crew.router.version == 2
        await crew.router.close()

    run(story())


def test_a_replica_that_joins_those_that_sleep_sleeps() -> None:
    async def story() -> None:
        crew, late = Crew(1), Faulty()
        await crew.router.update_weights(weights(1))
        placed: list[tuple[str, int]] = []

        async def place(device: str, what: Any = None) -> None:
            placed.append((device, late.version))
            if len(placed) == 1:  # they wake up before it is there
                await crew.router.place("gpu")

        late.place = place  # type: ignore[method-assign]
        await crew.router.place("cpu")
        await crew.router.join(Replica("late", late))
        assert placed == [("cpu", 1), ("gpu", 1)]
        assert await ask(crew.router, jobs(4))
        await crew.router.close()

    run(story())


def test_when_none_is_left_a_restart_is_waited_for() -> None:
    async def story() -> None:
        crew = Crew(1, restarts=1)
        await crew.router.update_weights(weights(5))
        crew.engines[0].fault = "raise-generate"
        done = await ask(crew.router, jobs(4))
        assert [c.token_ids for c in done] == [tokens(p, s, 5) for p, s in jobs(4)]
        crew.engines[1].fault = "raise-generate"
        with pytest.raises(WhetError, match=r"no engine replica is left and none is starting.*killed"):
            await ask(crew.router, jobs(1))
        with pytest.raises(WhetError, match="none is starting"):
            await crew.router.update_weights(weights(6))
        await crew.router.close()

    run(story())


def test_a_restart_that_never_ends_is_not_waited_for_for_ever() -> None:
    async def never(name: str) -> Replica:
        await asyncio.sleep(3600)
        raise AssertionError

    async def story() -> None:
        engine = Faulty()
        router = Router(
            [Replica("only", engine)], restart=never, restarts=2, **{**QUICK, "start_timeout_s": 0.1}
        )
        engine.fault = "raise-generate"
        with pytest.raises(WhetError, match=r"0\.1 s for an engine replica|none is starting"):
            await ask(router, jobs(1))
        await router.close()

    run(story())


def test_a_request_that_nobody_can_serve_costs_no_replica() -> None:
    async def story() -> None:
        crew = Crew(2)
        with pytest.raises(RequestError, match="the prompt is empty"):
            await reply(crew.router, [], Sampling())
        assert len(crew.router.replicas) == 2
        assert crew.router.dropped == []
        await crew.router.close()

    run(story())


def test_a_caller_that_gives_up_frees_its_row() -> None:
    async def forever(prompt: list[int], sampling: Sampling, version: int) -> list[int]:
        await asyncio.sleep(3600)
        return []

    async def story() -> None:
        router = Router([Replica("only", ScriptedEngine(forever))])
        task = asyncio.create_task(reply(router, [1], Sampling()))
        await asyncio.sleep(0.01)
        assert router.replicas["only"].load == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert router.replicas["only"].load == 0
        await router.close()

    run(story())


def test_close_ends_every_wait_with_a_reason() -> None:
    async def story() -> None:
        crew = Crew(2)
        crew.engines[0].fault = crew.engines[1].fault = "hang-generate"
        flying = [asyncio.create_task(reply(crew.router, p, s)) for p, s in jobs(4)]
        await asyncio.sleep(0.01)
        await crew.router.close()
        for result in await asyncio.gather(*flying, return_exceptions=True):
            assert isinstance(result, WhetError)
            assert "closed" in str(result)

    run(story())


# ---------------------------------------------------------------- sessions, consumers, scores, proofs


def test_the_turns_of_a_session_go_to_one_replica_while_it_lives_and_elsewhere_when_it_dies() -> None:
    """Each turn has another prompt. Meanwhile the session's replica has other work, so all others have less to do."""

    async def slow(prompt: list[int], sampling: Sampling, version: int) -> list[int]:
        await asyncio.sleep(0.1 if prompt == [50] else 0.001)
        return tokens(prompt, sampling, version)

    async def story() -> None:
        crew = Crew(4, lambda: Faulty(ScriptedEngine(slow)), restarts=0)
        places: dict[str, list[int]] = {}
        work: list[asyncio.Task[Completion]] = []

        async def turn(session: str, n: int) -> int:
            """The number of the replica that served it."""
            before = [len(e.served) for e in crew.engines]
            await reply(crew.router, [n + 1, len(session)], Sampling(key=n, max_tokens=3), session=session)
            return next(i for i, e in enumerate(crew.engines) if len(e.served) > before[i])

        for name in ("a", "bb", "ccc"):
            places[name] = [await turn(name, 0)]
            asked = reply(crew.router, [50], Sampling(max_tokens=2), session=name)
            work.append(asyncio.create_task(asked))
            await asyncio.sleep(0)
            places[name] += [await turn(name, n) for n in range(1, 6)]
        assert not any(asked.done() for asked in work)
        assert all(len(set(seen)) == 1 for seen in places.values()), places
        assert len({seen[0] for seen in places.values()}) == 3, "each session began where there was no work"
        await asyncio.gather(*work)
        home = places["a"][0]
        crew.engines[home].fault = "raise-generate"
        after = [await turn("a", n) for n in range(6, 12)]
        assert home not in after
        assert len(set(after)) == 1, "it has a new home"
        await crew.router.close()

    run(story())


def test_sessions_that_were_quiet_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "SESSIONS", 3)

    async def story() -> None:
        crew = Crew(2)
        for session in ("a", "b", "c", "a", "d"):
            await reply(crew.router, [3], Sampling(max_tokens=2), session=session)
        assert list(crew.router.balance.sessions) == ["c", "a", "d"]
        await crew.router.close()

    run(story())


@pytest.mark.parametrize("fault", ["half-raise", "half-hang"])
def test_a_consumer_gets_each_token_once_whatever_becomes_of_the_replica(fault: str) -> None:
    """Half of a reply was given on when its replica was lost: the other half comes from another one."""

    async def story() -> None:
        crew = Crew(2)
        crew.engines[0].fault = fault
        given: list[list[int]] = []
        done = await reply(crew.router, [5], Sampling(key=1, max_tokens=6), on_tokens=given.append)
        assert given == [done.token_ids[:3], done.token_ids[3:]]
        assert [name for name, _ in crew.router.dropped] == ["engine-0"]
        await crew.router.close()

    run(story())


def test_a_lost_reply_that_cannot_be_sampled_again_is_an_error_to_its_consumer_alone() -> None:
    def make() -> Faulty:
        engine = Faulty()
        engine.reproducible = "server"
        return engine

    async def story() -> None:
        crew = Crew(2, make)
        crew.engines[0].fault = "half-raise"
        given: list[int] = []
        with pytest.raises(WhetError, match=r"after 3 tokens had been delivered.*\(reproducible: server\)"):
            await reply(crew.router, [5], Sampling(key=1, max_tokens=6), on_tokens=given.extend)
        assert given == tokens([5], Sampling(key=1, max_tokens=6), 0)[:3]
        crew.engines[1].fault = "half-raise"
        done = await reply(crew.router, [5], Sampling(key=1, max_tokens=6))  # nobody was given a part of it
        assert len(done.token_ids) == 6
        await crew.router.close()

    run(story())


def test_a_consumer_is_not_given_the_rest_of_another_reply() -> None:
    """The replica that is asked again has newer weights: what it samples does not follow what was given on."""

    async def story() -> None:
        crew = Crew(2, health_timeout_s=0.1)
        crew.engines[0].fault = "half-hang"
        given: list[int] = []
        flying = asyncio.create_task(
            reply(crew.router, [5], Sampling(key=1, max_tokens=6), on_tokens=given.extend)
        )
        while not given:
            await asyncio.sleep(0.001)
        await crew.router.update_weights(weights(1))
        with pytest.raises(
            WhetError,
            match="after 3 tokens had been delivered; the next replica has newer weights and samples other tokens",
        ):
            await flying
        assert given == tokens([5], Sampling(key=1, max_tokens=6), 0)[:3]
        await crew.router.close()

    run(story())


def test_a_consumer_that_fails_costs_no_replica() -> None:
    def fails(token_ids: list[int]) -> None:
        raise ValueError("no room")

    async def story() -> None:
        crew = Crew(2)
        with pytest.raises(ValueError, match="no room"):
            await reply(crew.router, [5], Sampling(max_tokens=6), on_tokens=fails)
        assert crew.router.dropped == []
        await crew.router.close()

    run(story())


@pytest.mark.parametrize("fault", ["raise-generate", "hang-generate"])
def test_scores_of_a_lost_replica_are_asked_elsewhere(fault: str) -> None:
    async def story() -> None:
        crew = Crew(2)
        crew.engines[0].fault, crew.engines[0].after = fault, 0
        found = await crew.router.score([ScoreRequest(token_ids=(3, 4, 5), start=1)] * 2)
        assert [one.logprobs for one in found] == [[0.0, 0.0]] * 2
        assert [name for name, _ in crew.router.dropped] == ["engine-0"]
        await crew.router.close()

    run(story())


def test_a_replica_that_confirms_other_weights_than_the_rest_is_dropped() -> None:
    async def story() -> None:
        crew = Crew(3, restarts=0)
        for engine, proof in zip(crew.engines, ("a", "a", "b")):
            engine.proof = proof
        receipt = await crew.router.update_weights(weights(1))
        assert receipt == Receipt("the router", 1, "a")
        assert [name for name, _ in crew.router.dropped] == ["engine-2"]
        assert "different weights for version 1: b, others a" in crew.router.dropped[0][1]
        late = Faulty()
        late.proof = "c"
        with pytest.raises(WhetError, match="different weights for version 1"):
            await crew.router.join(Replica("late", late))
        await crew.router.close()

    run(story())


def test_a_replica_that_can_do_less_than_the_others_is_refused() -> None:
    odd = Faulty()
    odd.reproducible = "no"
    with pytest.raises(WhetError, match=r"replica odd can .*reproducible='no'.*all others"):
        Router([Replica("one", Faulty()), Replica("odd", odd)])


# ---------------------------------------------------------------- with models


def module() -> PreTrainedModel:
    """intermediate_size is a multiple of 32, so that the PyTorch kernels are exact, too."""
    scratch = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "initializer_range": 0.3,
    }
    ids: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": 1, "pad_token_id": 0}
    return build(ModelConfig(scratch=scratch), **ids, seed=0, device="cpu", dtype=torch.float32)


def native() -> NativeEngine:
    return NativeEngine(module(), kernels.load("auto"), end_token_ids=[1], max_context=64, max_num_seqs=8)


@pytest.mark.parametrize("fault", ["raise-generate", "hang-generate"])
def test_native_engines_give_the_tokens_of_an_undisturbed_run(fault: str) -> None:
    torch.set_num_threads(1)
    work = [([3 + n % 3, 9, 4], Sampling(key=n, max_tokens=12)) for n in range(24)]

    async def alone() -> list[Completion]:
        return await ask(native(), work)

    async def disturbed() -> list[Completion]:
        crew = Crew(3, lambda: Faulty(native()), health_timeout_s=1.0, load_s=10.0, start_timeout_s=10.0)
        crew.engines[0].fault, crew.engines[0].after = fault, 3
        done = await ask(crew.router, work)
        assert len(crew.router.dropped) == 1
        await crew.router.close()
        return done

    assert run(disturbed()) == run(alone())


def test_weights_that_all_refuse_are_at_fault() -> None:
    async def story() -> None:
        crew = Crew(2, lambda: Faulty(native()), load_s=10.0)
        full = [(n, p.detach()) for n, p in module().named_parameters()]
        with pytest.raises(WhetError, match=r"1 of \d+ parameters were not received"):
            await crew.router.update_weights(WeightUpdate(version=1, tensors=iter(full[1:])))
        assert crew.router.version == 0
        assert crew.router.dropped == []
        await crew.router.update_weights(WeightUpdate(version=1, tensors=iter(full)))
        assert {e.version for e in crew.engines} == {1}
        await crew.router.close()

    run(story())


@pytest.mark.parametrize("moment", ["load", "join", "place", "pause"])
def test_a_stopped_process_is_not_waited_for_until_the_deadline_of_a_load(
    moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A load may take long, as long as its process lives: one answers and is slow, the other is stopped."""

    class Stopped(Faulty):
        async def health(self) -> Health:
            await asyncio.sleep(3600)
            raise AssertionError

    class Slow(Faulty):
        async def update_weights(self, update: WeightUpdate) -> Receipt:
            await asyncio.sleep(3 * HEALTH_S)
            return await super().update_weights(update)

    async def story() -> None:
        crew = Crew(1, Slow, load_s=3600.0, restarts=1)
        router, hung = crew.router, Stopped()
        late, hangs = Replica("late", hung), f"hang-{moment if moment in ('place', 'pause') else 'load'}"
        await router.update_weights(weights(1))
        if moment == "join":
            hung.fault = hangs
            with pytest.raises(WhetError, match="its process has not responded for"):
                await router.join(late)
        else:
            await router.join(late)
            router.restart = None
            if moment == "pause":
                await router.pause(False)
            hung.fault = hangs
            if moment == "load":
                await router.update_weights(weights(2))
            elif moment == "place":
                await router.place("cpu")
            else:
                await router.pause(True)
        assert list(router.replicas) == ["engine-0"]
        await asyncio.sleep(0.01)
        assert hung.closed
        await router.close()

    with caplog.at_level(logging.WARNING):
        run(story())
    assert moment == "join" or "has not responded" in caplog.text


def test_a_cancelled_question_is_cancelled_even_if_its_answer_is_there() -> None:
    """`_done` waits for the end of the question that it cancels: one that goes on asking would hold it for ever."""

    async def story() -> None:
        said: asyncio.Future[Health] = asyncio.get_running_loop().create_future()

        class Asked(Faulty):
            async def health(self) -> Health:
                return await said

        replica = Replica("one", Asked())
        for question in (replica.answers, replica.quiet_s):
            said = asyncio.get_running_loop().create_future()
            asked = asyncio.ensure_future(question(timeout_s=5.0))
            await asyncio.sleep(0.01)
            said.set_result(Health(since=0.0, requests=1, tokens=1))
            for _ in range(4):  # the answer is on its way to whoever asked
                if not asked.done():
                    asked.cancel()
                await asyncio.sleep(0)
            assert asked.cancelled()

    run(story())


def test_a_replica_that_gets_on_is_heard_though_no_request_ends() -> None:
    """The watchdog of the run hears what the watch of the router sees."""
    heard = asyncio.Event()

    class Slow(Faulty):
        seen = 0

        async def health(self) -> Health:
            self.seen += 1
            return Health(since=0.0, requests=0, tokens=self.seen)

    async def wait_to_be_heard(prompt: list[int], sampling: Sampling, version: int) -> list[int]:
        await heard.wait()
        return [7, 1]

    async def story() -> None:
        crew = Crew(1, lambda: Slow(ScriptedEngine(wait_to_be_heard)))
        crew.router.beat = lambda what: heard.set() if what == "sampling" else None
        assert len(await ask(crew.router, jobs(1))) == 1
        await crew.router.close()

    run(story())


def test_an_idle_replica_is_asked_again_whatever_the_others_did() -> None:
    """One has ended all it was asked while the other's load changed many times: the next requests are for both."""
    asked: Counter[int] = Counter()

    def engine(number: int) -> ScriptedEngine:
        async def reply(prompt: list[int], sampling: Sampling, version: int) -> list[int]:
            asked[number] += 1
            await asyncio.sleep(0.0002 * sampling.key if number == 0 else 0.0)
            return [7, 1]

        return ScriptedEngine(reply)

    async def main() -> None:
        router = Router([Replica(f"engine-{n}", engine(n)) for n in (0, 1)])
        for _ in range(3):
            asked.clear()
            work = [([5, 9 + n], Sampling(max_tokens=2, key=n)) for n in range(256)]
            await asyncio.gather(*(reply(router, *one) for one in work))
            assert min(asked[0], asked[1]) >= 64, asked
        await router.close()

    run(main())
