"""Replicas come and go while a run goes on, asked for by a person; what is sampled stays the same."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whet
from test_router import Crew, Faulty, ask, jobs, run, tokens, weights
from whet import bench
from whet.config.load import Loaded
from whet.job import open_engine
from whet.rollout import router as module
from whet.rollout import scale
from whet.rollout.replica import Replica
from whet.rollout.router import Router
from whet.rollout.scale import Wish, wish
from whet.track.files import RunLock
from whet.types import ConfigError, WhetError


async def until(reached: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not reached():
            await asyncio.sleep(0.002)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32))
def test_every_request_gives_its_tokens_whoever_comes_and_goes(seed: int) -> None:
    """Any numbers of replicas asked for at any moment, new weights in between, and one that dies on the way."""
    rng = random.Random(seed)

    async def story() -> None:
        crew = Crew(rng.randint(1, 3), restarts=5)
        await crew.router.update_weights(weights(1))
        for version in (1, 2, 3):
            flying = asyncio.create_task(ask(crew.router, jobs(40)))
            for _ in range(rng.randint(0, 4)):
                await asyncio.sleep(rng.random() * 0.004)
                crew.router.scale(wanted := rng.randint(1, 5))
                rng.choice(crew.engines).fault = rng.choice(["", "", "raise-generate"])
            assert [c.token_ids for c in await flying] == [tokens(p, s, version) for p, s in jobs(40)]
            for engine in crew.engines:
                engine.fault = ""
            crew.router.scale(wanted := rng.randint(1, 5))
            await until(lambda: len(crew.router.replicas) == wanted)
            await crew.router.pause(True)
            await crew.router.update_weights(weights(version + 1))
            assert {r.engine.version for r in crew.router.replicas.values()} == {version + 1}
        serving = {r.engine for r in crew.router.replicas.values()}
        await crew.router.close()
        assert all(e.closed for e in crew.engines), "nobody is left behind"
        assert len(serving) == wanted

    run(story())


def test_the_last_ones_leave_and_the_first_free_numbers_come() -> None:
    async def story() -> None:
        crew = Crew(3)
        await crew.router.update_weights(weights(7))
        crew.router.scale(1)
        await until(lambda: not crew.router.leaving and len(crew.router.replicas) == 1)
        assert sorted(crew.router.replicas) == ["engine-0"]
        assert [e.closed for e in crew.engines] == [False, True, True]
        crew.router.scale(3)
        await until(lambda: len(crew.router.replicas) == 3)
        assert sorted(crew.router.replicas) == ["engine-0", "engine-1", "engine-2"]
        assert [r.engine.version for r in crew.router.replicas.values()] == [7, 7, 7]
        await crew.router.close()

    run(story())


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_asked_for_right_after_fewer_were_is_there(begun: bool) -> None:
    """Replicas that are leaving, or whose start is cancelled, are none of those that serve."""

    async def story() -> None:
        crew = Crew(1 if begun else 3)
        if begun:  # two are on their way
            crew.router.scale(3)
            await asyncio.sleep(0.001)
        crew.router.scale(1)
        crew.router.scale(3)
        await until(lambda: len(crew.router.replicas) == 3 and not crew.router.leaving)
        assert "engine-0" in crew.router.replicas
        await crew.router.close()
        assert all(e.closed for e in crew.engines)

    run(story())


def test_a_replica_that_is_not_wanted_any_more_before_it_has_come() -> None:
    async def story() -> None:
        crew = Crew(1)
        made: list[str] = []

        async def slow(name: str) -> Replica:
            made.append(name)
            try:
                await asyncio.sleep(3600)
            finally:
                made.append(f"no {name}")
            raise AssertionError

        crew.router.restart = slow
        crew.router.scale(2)
        await until(lambda: made)
        crew.router.scale(1)
        await until(lambda: made == ["engine-1", "no engine-1"])
        assert [c.token_ids for c in await ask(crew.router, jobs(5))] == [tokens(p, s, 0) for p, s in jobs(5)]
        await crew.router.close()

    run(story())


def test_one_that_cannot_be_had_is_told_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        crew = Crew(1)

        async def nowhere(name: str) -> Replica:
            raise ConfigError("no room was free")

        crew.router.restart = nowhere
        crew.router.scale(3)
        await until(lambda: len(caplog.records) >= 2 and not crew.router.coming)
        await ask(crew.router, jobs(5))
        assert sorted(crew.router.replicas) == ["engine-0"]
        await crew.router.close()

    with caplog.at_level(logging.INFO):
        run(story())
    assert "replica engine-1 was requested and cannot start: ConfigError: no room was free" in caplog.text
    assert caplog.text.count("The run continues with 1") == 1, "two for one reason"


def test_a_router_that_is_closed_ends_those_that_leave_and_those_that_come() -> None:
    async def story() -> None:
        crew = Crew(2, health_timeout_s=30.0)
        crew.engines[1].fault, crew.engines[0].fault = "hang-generate", "hang-generate"
        flying = asyncio.create_task(ask(crew.router, jobs(6)))
        await until(lambda: all(r.asked for r in crew.router.replicas.values()))
        crew.router.scale(1)
        await until(lambda: crew.router.leaving)
        await crew.router.close()
        with pytest.raises(WhetError, match="closed"):
            await flying
        assert all(e.closed for e in crew.engines)

    run(story())


def test_the_router_follows_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.005)
    wished: list[Wish] = []

    async def story() -> None:
        crew = Crew(1, wish=lambda: wished[-1] if wished else None)
        await crew.router.update_weights(weights(1))
        wished.append(Wish(3, at_ns=1))
        await until(lambda: len(crew.router.replicas) == 3)
        crew.engines[0].fault = "raise-generate"
        crew.router.restarts = crew.router.left["engine-0"] = 0
        await ask(crew.router, jobs(20))
        await until(lambda: len(crew.router.replicas) == 2)
        wished.append(Wish(3, at_ns=2))  # the same again: the one that is lost for good is made up for
        await until(lambda: len(crew.router.replicas) == 3)
        await crew.router.close()
        assert all(e.closed for e in crew.engines)

    run(story())


# ---------------------------------------------------------------- what is asked, by a file


def config(run_dir: Path, replicas: int) -> None:
    tree = {
        "run_dir": str(run_dir),
        "model": {"scratch": {}},
        "tokenizer": {"build": "chars"},
        "data": {"train": [{"rows": [{"prompt": "a", "answer": "b"}]}]},
        "rewards": {"a": {"function": "exact"}},
        "rollout": {"replicas": replicas},
    }
    (run_dir / "config.yaml").write_text(json.dumps(tree))


def test_a_wish_reaches_the_process_that_runs_there(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="no run is active here"):
        scale.ask(tmp_path, 2)
    with RunLock(tmp_path):
        config(tmp_path, 0)
        with pytest.raises(WhetError, match=r"samples in its own process \(rollout.replicas=0\)"):
            scale.ask(tmp_path, 2)
        config(tmp_path, 1)
        assert wish(tmp_path) is None
        scale.ask(tmp_path, 2)
        first = wish(tmp_path)
        assert first is not None
        assert first.count == 2
        scale.ask(tmp_path, 2)
        assert wish(tmp_path) != first, "asked again is another wish"


@pytest.mark.parametrize(
    "said",
    [
        "", "{", "[]", '{"replicas": 2}',
        json.dumps(
            {"replicas": 0, "at_ns": 1, "process": os.getpid(), "began": 0, "host": socket.gethostname()}
        ),
        json.dumps({"replicas": 2, "at_ns": 1, "process": os.getpid() + 1, "host": socket.gethostname()}),
        json.dumps({"replicas": 2, "at_ns": 1, "process": os.getpid(), "host": "another"}),
        json.dumps(
            {"replicas": 2, "at_ns": 1, "process": os.getpid(), "began": 1, "host": socket.gethostname()}
        ),
    ],
    ids=["nothing", "torn", "a list", "half", "none", "another process", "another host", "an earlier process"],
)  # fmt: skip
def test_what_is_no_wish_for_this_process(tmp_path: Path, said: str) -> None:
    (tmp_path / scale.FILE).write_text(said)
    assert wish(tmp_path) is None


def test_a_stuck_replica_that_leaves_gives_its_requests_back() -> None:
    async def story() -> None:
        crew = Crew(2)
        crew.engines[1].fault = "hang-generate"
        flying = asyncio.create_task(ask(crew.router, jobs(30)))
        await until(lambda: all(r.asked for r in crew.router.replicas.values()))
        crew.router.scale(1)
        assert [c.token_ids for c in await flying] == [tokens(p, s, 0) for p, s in jobs(30)]
        await until(lambda: isinstance(e := crew.engines[1], Faulty) and e.closed)
        assert sorted(crew.router.replicas) == ["engine-0"]
        await crew.router.close()

    run(story())


def test_checkpoints_are_evaluated_on_replicas_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rollout.replicas opens them, and the numbers are those of one engine."""
    rows = [{"prompt": f"copy {n}", "answer": "ab"[n % 2]} for n in range(6)]
    whet.train(
        run_dir=str(tmp_path),
        model={
            "scratch": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
        },
        tokenizer={"build": "chars"},
        data={"train": [{"rows": rows}], "eval": [{"rows": rows, "name": "held"}], "exclude_eval": False},
        rewards={"a": {"function": "format", "arguments": {"pattern": "a"}}},
        rollout={"group_size": 4, "sampling": {"max_tokens": 6}},
        train={"steps": 2, "tasks_per_step": 2, "optimizer": {"lr": 1e-2}},
        eval={"at_start": False, "samples": 3, "sampling": {"temperature": 1.0}},
        checkpoint={"interval": 1, "keep": 2, "export": False},
        machine={"threads": 1},
        track={"trackers": ["jsonl"]},
    )
    opened: list[Router] = []

    def join_cluster(loaded: Loaded, *_: object) -> dict[str, Callable[..., Router]]:
        cfg = loaded.config

        def open_replicas(*given: object, **how: object) -> Router:
            engines = [open_engine(*given, **how) for _ in range(cfg.rollout.replicas)]  # type: ignore[arg-type]
            opened.append(Router(Replica(f"engine-{n}", engine) for n, engine in enumerate(engines)))
            return opened[-1]

        return {"opener": open_replicas} if cfg.rollout.replicas else {}

    monkeypatch.setattr(bench, "join_cluster", join_cluster)
    alone = bench.judge_checkpoints(bench.config_of(tmp_path, []))
    several = bench.judge_checkpoints(bench.config_of(tmp_path, ["rollout.replicas=2"]))
    assert several == alone
    assert len(alone) == 2
    [router] = opened
    assert sorted(router.left) == ["engine-0", "engine-1"]
