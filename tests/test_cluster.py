"""Engines in Ray actors: the same run, bit for bit, whatever is killed; and nothing left behind.

One cluster of its own, started as a user starts one, serves the file; runs attach to it as processes of their own.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("ray")

import whet
from asking import reply
from forked import Started
from native_cases import CLUSTER
from ray_workers import interpreter
from test_lanes import picture
from whet.cluster import engines as cluster
from whet.config.load import Loaded, load
from whet.config.plan import plans
from whet.data.tasks import texts
from whet.data.tokenizer import load_tokenizer
from whet.guard.processes import process
from whet.guard.watch import Watch
from whet.job import decoder_of
from whet.models import kernels
from whet.models.load import build, end_tokens
from whet.models.lora import adapted, attach, refresh
from whet.rollout import scale
from whet.rollout.engine import RolloutEngine, WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.rollout.replica import Replica
from whet.rollout.requests import RequestError
from whet.rollout.scripted import ScriptedEngine
from whet.track.timeline import Timeline
from whet.types import Completion, ConfigError, Sampling, ScoreRequest, WhetError

BASE: dict[str, Any] = {
    "seed": 3,
    "model": {
        "scratch": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        }
    },
    "tokenizer": {"build": "chars"},
    "data": {"max_prompt_tokens": 16, "train": [{"path": str(Path("tests/data/words.jsonl").absolute())}]},
    "rewards": {"letters": {"function": "held.py:letters"}},
    "reward_workers": {"timeout_s": 300},
    "rollout": {"group_size": 4, "sampling": {"max_tokens": 24}},
    "train": {"steps": 12, "tasks_per_step": 8, "optimizer": {"lr": 1e-2}},
    "checkpoint": {"interval": 2},
    "track": {"trackers": ["jsonl"]},
    "machine": {"threads": 1},
}
HELD = """
import os, random, time

def letters(response, task):
    while os.path.exists({hold!r}):
        time.sleep(0.05)
    return sum(a == b for a, b in zip(response, task.answer)) + 0.1 * random.random()
"""
"""A reward that a test can hold back; with noise, which must come back when a step is repeated."""

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
WITHIN_S = 240.0


def until(come: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> Any:
    end = time.monotonic() + within_s
    while not (found := come()):
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.05)
    return found


HEAD = "import sys; sys.executable = sys.argv.pop(1); from ray.scripts.scripts import main; main()"
"""`ray`, told with which interpreter it starts its processes."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with interpreter(tmp_path_factory.mktemp("python")) as path:
        yield path


@pytest.fixture(scope="module")
def address(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running cluster that is not the run's own."""
    ray = [sys.executable, "-c", HEAD, str(python)]
    options = ["--num-cpus=3", "--include-dashboard=false", f"--object-store-memory={100 << 20}"]
    command = [*ray, "start", "--head", "--block", "--port=0", "--disable-usage-stats", *options]
    log = tmp_path_factory.mktemp("ray") / "said"
    with log.open("wb") as out:
        head = subprocess.Popen(command, stdout=out, stderr=out, env=ENV)

    def started() -> re.Match[str] | None:
        assert head.poll() is None, log.read_text()
        return re.search(r"ray start --address='([\d.:]+)'", log.read_text())

    try:
        yield until(started, "a cluster")[1]
    finally:
        head.terminate()
        head.wait(60)


# ---------------------------------------------------------------- a run and what it leaves


RUNS: list[Started] = []


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    """Also where a test fails on its way."""
    yield
    while RUNS:
        run = RUNS.pop()
        run.kill()
        run.wait()


def given(run_dir: Path) -> None:
    """The folder of a run, with its reward."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "held.py").write_text(HELD.format(hold=str(run_dir / "hold")))


def start(run_dir: Path, tree: dict[str, Any]) -> Started:
    given(run_dir)
    file = run_dir / "given.yaml"
    file.write_text(yaml.safe_dump({**tree, "run_dir": str(run_dir / "run")}))
    RUNS.append(Started("train", str(file), said=run_dir / "said", cwd=run_dir))
    return RUNS[-1]


def with_replicas(count: int, **settings: Any) -> dict[str, Any]:
    return {**BASE, "rollout": {**BASE["rollout"], "replicas": count}, "cluster": settings}


def finish(run: Started, run_dir: Path) -> None:
    code = run.wait(WITHIN_S)
    assert code == 0, (run_dir / "said").read_text()[-3000:]


def said_in(run_dir: Path, pattern: str) -> list[str]:
    log = run_dir / "run" / "run.log"
    return re.findall(pattern, log.read_text()) if log.exists() else []


def engines(run_dir: Path) -> list[tuple[int, int]]:
    """The processes of its engines, in the order they came."""
    return [process(int(pid)) for pid in said_in(run_dir, r"engine-\d is process (\d+)")]


def steps(run_dir: Path) -> int:
    path = run_dir / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def gone(processes: list[tuple[int, int]]) -> bool:
    return not any(process(pid) == (pid, began) for pid, began in processes if began)


def left(run_dir: Path) -> tuple[bytes, bytes]:
    run = run_dir / "run"
    return (run / "metrics.jsonl").read_bytes(), (run / "export" / "main" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """What the run leaves with its engine in its own process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(start(folder, BASE), folder)
    assert not said_in(folder, "ray|cluster")
    return left(folder)


@pytest.mark.sweep
def test_a_replica_records_the_experts_of_its_tokens(address: str, tmp_path: Path) -> None:
    """train.router_replay=sampled: the run is that of an engine in the process of the trainer."""
    moe = {
        "model": {"scratch": {**BASE["model"]["scratch"], "name": "qwen3_moe", "num_experts": 4}},
        "train": {**BASE["train"], "steps": 2, "minibatches": 2, "router_replay": "sampled"},
    }
    runs = {"away": with_replicas(1, address=address) | moe, "here": BASE | moe}
    for name, tree in runs.items():
        (tmp_path / name).mkdir()
        finish(start(tmp_path / name, tree), tmp_path / name)
    assert left(tmp_path / "away") == left(tmp_path / "here")


SHARDS = {**BASE["train"], "steps": 6, "parallel": {"dp_shard": 2}}


def scratch_of(run_dir: Path) -> list[Path]:
    """Where its ranks write weights for replicas, in the order of its processes."""
    return [Path(found) for found in said_in(run_dir, r"the ranks write them to (\S+)")]


def beside(address: str, replicas: int, **ahead: Any) -> dict[str, Any]:
    """Ranks on this machine, replicas in the cluster."""
    tree = with_replicas(replicas, address=address)
    return tree | {"train": SHARDS, "rollout": {**tree["rollout"], **ahead}}


def in_one(folder: Path, monkeypatch: pytest.MonkeyPatch, **ahead: Any) -> tuple[bytes, bytes]:
    """What is left by the run on ranks whose engine is in the driver's process, which has all weights there."""
    given(folder)
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        tree = {**BASE, "train": SHARDS, "rollout": {**BASE["rollout"], **ahead}}
        whet.train(**tree, run_dir=str(folder / "run"))
    assert not scratch_of(folder)
    return left(folder)


@pytest.mark.sweep  # the next test has the same, with one replica and kills
def test_ranks_write_what_two_replicas_sample_from(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean = tmp_path / "lean"
    finish(start(lean, beside(address, 2)), lean)
    assert len(scratch_of(lean)) == 1
    assert left(lean) == in_one(tmp_path / "expected", monkeypatch)


@pytest.mark.sweep
def test_ranks_write_what_a_replica_samples_from_whoever_is_killed(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it samples ahead, a rank is killed, and the driver. The folder of the weights goes with each process."""
    lean = tmp_path / "lean"
    tree = beside(address, 1, max_staleness=1)
    run = start(lean, tree)
    until(lambda: steps(lean) >= 3, "three steps")
    (first,) = scratch_of(lean)
    assert first.is_dir()
    (rank,) = (lean / "run/stacks").glob("*/rank-0.*")  # each process of a run has a file there
    os.kill(int(rank.name.split(".")[1]), signal.SIGKILL)
    assert run.wait(WITHIN_S) != 0
    assert re.search(r"rank \d of 2 died \(killed by SIGKILL\)", (lean / "said").read_text())
    assert not first.exists()
    run = start(lean, tree)
    until(lambda: len(scratch_of(lean)) == 2, "a folder for weights")
    run.kill()
    run.wait()
    assert scratch_of(lean)[1].exists(), "nobody was left to remove it"
    finish(start(lean, tree), lean)
    assert left(lean) == in_one(tmp_path / "expected", monkeypatch, max_staleness=1)
    assert not any(path.exists() for path in scratch_of(lean))


def test_the_same_run_whatever_is_killed(
    address: str, undisturbed: tuple[bytes, bytes], tmp_path: Path
) -> None:
    """A replica killed, one stopped, then the driver killed; the run that goes on ends as the unbroken one, though
    replicas join and leave it."""
    tree = with_replicas(2, address=address, health_timeout_s=2.0)
    run = start(tmp_path, tree)
    hold = tmp_path / "hold"
    until(lambda: steps(tmp_path) >= 2, "two steps")
    first, second = engines(tmp_path)
    os.kill(first[0], signal.SIGKILL)
    # Only who has work is looked at, so the run is not held before it was missed.
    until(lambda: said_in(tmp_path, "dropped"), "the killed one is found")
    hold.touch()  # a replica takes longer to come than the rest of this run
    until(lambda: said_in(tmp_path, "replica engine-. is serving again"), "a new replica")
    os.kill(second[0], signal.SIGSTOP)
    hold.unlink()
    until(lambda: len(said_in(tmp_path, "dropped")) == 2, "the stopped one is found")
    hold.touch()
    until(lambda: len(said_in(tmp_path, "replica engine-. is serving again")) == 2, "another one")
    dropped = said_in(tmp_path, r"replica (engine-.) dropped: (.*?);")
    assert {name for name, _ in dropped} == {"engine-0", "engine-1"}
    assert any("has ended" in why for _, why in dropped)
    until(lambda: gone([first, second]), "the end of the stopped one")
    assert steps(tmp_path) < 12, "the driver is killed in mid-run"
    there = engines(tmp_path)
    run.kill()
    run.wait()
    until(lambda: gone(there), "the end of the engines", 20.0)
    hold.unlink()
    before = steps(tmp_path)
    run = start(tmp_path, tree)
    hold.touch()
    until(lambda: len(said_in(tmp_path, "stage main")) == 2, "the run that goes on")
    scale.ask(tmp_path / "run", 3)
    until(lambda: said_in(tmp_path, "replica engine-2 joined"), "a third replica")
    scale.ask(tmp_path / "run", 4)
    full = (
        r"replica engine-3 was requested and cannot start: .* which is room for 3.*The run continues with 3"
    )
    until(lambda: said_in(tmp_path, full), "a word on the one that has no place")
    hold.unlink()
    until(lambda: steps(tmp_path) > before, "a step with three")
    scale.ask(tmp_path / "run", 1)
    hold.touch()
    until(lambda: len(said_in(tmp_path, "replica engine-[12] has left")) == 2, "two have left")
    assert steps(tmp_path) < 12, "they come and go in mid-run"
    hold.unlink()
    finish(run, tmp_path)
    assert left(tmp_path) == undisturbed
    until(lambda: gone(engines(tmp_path)), "the end of the engines", 20.0)
    assert said_in(tmp_path, "log-probs of sampling and training: exact")
    drawn = picture(tmp_path / "run" / "timeline.json")
    assert sorted(drawn) == ["replica engine-0", "replica engine-1", "replica engine-2"]
    assert {s.process for s in drawn["replica engine-0"]} == {1, 2}
    assert all("load weights" in {s.name for s in spans} for spans in drawn.values())
    assert {"prefill", "decode"} <= {s.name for s in drawn["replica engine-0"] if s.kind == "work"}


def test_a_cluster_of_its_own_goes_down_with_a_killed_driver(tmp_path: Path) -> None:
    tree = with_replicas(1)
    run = start(tmp_path, {**tree, "train": {**tree["train"], "steps": 1000}})  # it must not end by itself
    until(lambda: steps(tmp_path) >= 1, "a step")
    members = family(run.pid)
    assert any("raylet" in command for _, command in members)
    assert engines(tmp_path)[0] in [who for who, _ in members]
    os.kill(engines(tmp_path)[0][0], signal.SIGSTOP)
    run.kill()
    run.wait()
    until(lambda: gone(engines(tmp_path)), "the end of the engine", 20.0)
    AGENTS.extend(who for who, command in members if "Agent" in command)
    assert AGENTS
    until(lambda: gone([who for who, _ in members if who not in AGENTS]), "the end of everyone else", 60.0)


AGENTS: list[tuple[int, int]] = []
"""Of Ray, on that cluster. They try for a minute to tell its head that it has died; see the last test."""


def family(pid: int) -> list[tuple[tuple[int, int], str]]:
    """All processes below this one, with their commands."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
        parents[int(folder.name)] = int(stat[1])
    below, more = {pid}, {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - below
        below |= more
    return [(process(p), commands[p]) for p in below - {pid} if p in commands]


# ---------------------------------------------------------------- settings


TOLD: dict[str, tuple[Any, Callable[[dict[str, Any]], Any]]] = {
    "rollout.replicas": (2, lambda told: len(told["router"].replicas)),
    "cluster.address": ("10.0.0.1:6379", lambda told: told["address"]),
    "cluster.placement": ("spread", lambda told: told["strategy"]),
    "cluster.cpus": (2, lambda told: (told["bundle"]["CPU"], told["spec"].threads)),
    "cluster.gpus": (0.5, lambda told: told["bundle"].get("GPU")),
    "cluster.restarts": (7, lambda told: told["router"].restarts),
    "cluster.health_timeout_s": (5.0, lambda told: told["router"].health_timeout_s),
    "cluster.start_timeout_s": (11.0, lambda told: (told["router"].start_timeout_s, told["start_timeout_s"])),
}
"""For each key of CLUSTER another value, and what it changes."""


@pytest.mark.parametrize("key", CLUSTER)
def test_a_setting_has_an_effect(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray and the router are told, without a cluster."""

    def opened_with(*overrides: str) -> dict[str, Any]:
        told: dict[str, Any] = {}

        async def start(name: str, *, spec: Any, **_: Any) -> Replica:
            told["spec"] = spec
            hello = cluster.EngineHandshake(
                (1, 1), "here", (), exact=True, can=ScriptedEngine(lambda *_: [1]).can
            )
            return Replica(name, cluster.RayEngine(None, hello, version=-1))

        monkeypatch.setattr(cluster, "connect", lambda address, model: told.update(address=address))
        monkeypatch.setattr(cluster, "place", lambda bundle, count, **how: told.update(bundle=bundle, **how))
        monkeypatch.setattr(cluster, "node_id", lambda: "here")
        monkeypatch.setattr(cluster, "start_replica", start)
        told["router"] = open_replicas(load(None, overrides, with_replicas(1)))[0]
        return told

    value, seen = TOLD[key]
    assert seen(opened_with()) != seen(opened_with(f"{key}={value}"))


def open_replicas(loaded: Loaded) -> tuple[cluster.Router, NativeEngine, Any]:
    """The router of a config, an engine in this process to compare with, and a model."""
    torch.set_num_threads(1)
    cfg, planned = loaded.config, plans(loaded)
    tokenizer = load_tokenizer(cfg.tokenizer, model_path=None, texts=texts(cfg.data.train))
    model = build(cfg.model, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                  pad_token_id=tokenizer.pad_token_id, seed=7, device="cpu", dtype=torch.float32)  # fmt: skip
    if cfg.model.lora is not None:
        attach(model, cfg.model.lora, seed=7)
    ops = kernels.load("auto")
    own = NativeEngine(model, ops, end_token_ids=end_tokens(model, tokenizer), max_context=40,
                       decode=decoder_of(tokenizer), version=4)  # fmt: skip
    with Watch() as watch:
        router = cluster.open_replicas(
            planned,
            model,
            ops,
            cfg=cfg,
            tokenizer=tokenizer,
            watch=watch,
            timeline=Timeline(Path("nowhere")),  # it writes when it is told to
        )
    return router, own, model


# ---------------------------------------------------------------- the engine by itself


@pytest.fixture
def opened(address: str) -> Iterator[tuple[cluster.Router, NativeEngine, Any]]:
    """Two replicas, and an engine in this process to compare with."""
    try:
        yield open_replicas(load(None, (), with_replicas(2, address=address)))
    finally:
        cluster.disconnect()


def test_tokens_weights_and_errors_travel(opened: tuple[cluster.Router, NativeEngine, Any]) -> None:
    router, own, model = opened
    assert router.exact
    work = [([5 + n % 3, 9], Sampling(key=n, max_tokens=20, stop=("ab",))) for n in range(24)]

    async def ask(engine: RolloutEngine) -> list[Completion]:
        return list(await asyncio.gather(*(reply(engine, p, s) for p, s in work)))

    async def story() -> None:
        await router.update_weights(WeightUpdate(version=4, module=model))
        assert await ask(router) == await ask(own)
        with pytest.raises(RequestError, match="exceeds the engine's limit of 40 tokens"):
            await reply(router, [5], Sampling(max_tokens=50))
        given_up = asyncio.create_task(reply(router, [5], Sampling(max_tokens=30, ignore_eos=True)))
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        given: list[int] = []
        sampling = Sampling(key=3, max_tokens=20, ignore_eos=True)
        done = await reply(router, [5, 9], sampling, on_tokens=given.extend)
        assert given == done.token_ids
        assert done == await reply(own, [5, 9], sampling)
        begun = asyncio.Event()
        left = asyncio.create_task(reply(router, [5, 9], sampling, on_tokens=lambda _: begun.set()))
        await begun.wait()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        asked = [ScoreRequest(token_ids=(5, 9, *given), start=2, top_k=2)] * 2
        assert await router.score(asked) == await own.score(asked)
        each = [await r.engine.health() for r in router.replicas.values()]
        assert sum(health.requests for health in each) >= len(work) + 3
        named = [(n, p.detach() + 1) for n, p in model.named_parameters()]
        with pytest.raises(WhetError, match=r"1 of \d+ parameters were not received: .*norm"):
            await router.update_weights(WeightUpdate(version=5, tensors=iter(named[:-1])))
        assert router.version == 4
        await router.update_weights(WeightUpdate(version=6, tensors=iter(named)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        await own.update_weights(WeightUpdate(version=6, module=model))
        assert await ask(router) == await ask(own)
        assert router.dropped == []
        await router.close()

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.sweep  # test_sync_replicas.py has the same of replicas in this process
@pytest.mark.parametrize("method", ["object_store", "collective"])
def test_adapters_reach_replicas_that_live_die_and_come(address: str, method: str) -> None:
    """One is killed at the moment of a sync: the other one has the version, and so has the one that takes its place."""
    tree = with_replicas(2, address=address) | {"model": {**BASE["model"], "lora": {"rank": 2}}}
    router, own, model = open_replicas(load(None, (), tree | {"sync": {"method": method, "timeout_s": 60.0}}))
    work = [([5 + n % 3, 9], Sampling(key=n, max_tokens=12)) for n in range(12)]

    async def ask(engine: RolloutEngine) -> list[Completion]:
        return list(await asyncio.gather(*(reply(engine, p, s) for p, s in work)))

    async def version(number: int) -> None:
        with torch.no_grad():
            for layer in adapted(model).values():
                layer.lora_B.add_(0.05 * number)
        refresh(model)
        await own.update_weights(WeightUpdate(version=number, module=model))
        await router.update_weights(WeightUpdate(version=number, module=model))
        assert await ask(router) == await ask(own)

    async def story() -> None:
        await version(5)
        await version(6)
        sent = [r.engine.held.entries for r in router.replicas.values()]  # type: ignore[attr-defined]
        assert [sum(e.sent for e in entries) for entries in sent] == [len(adapted(model)) + 1] * 2
        victim = router.replicas["engine-0"].engine
        os.kill(victim.hello.process[0], signal.SIGKILL)  # type: ignore[attr-defined]
        await version(7)
        assert [name for name, _ in router.dropped] == ["engine-0"]
        while len(router.replicas) < 2:
            await asyncio.sleep(0.05)
        assert await ask(router) == await ask(own)
        await version(8)
        assert len(router.dropped) == 1
        await router.close()

    try:
        asyncio.run(asyncio.wait_for(story(), 120))
    finally:
        cluster.disconnect()


def test_what_does_not_fit_is_said_at_once(address: str) -> None:
    model = torch.nn.Linear(1, 1)
    cluster.connect(address, model)  # type: ignore[arg-type]
    try:
        said = r"replicas=4: each needs 1 CPU on one machine, and the 1 machine\(s\) have 3 CPU, which is room for 3"
        with pytest.raises(ConfigError, match=said):
            cluster.place({"CPU": 1.0}, 4, strategy="pack", start_timeout_s=60)
        with pytest.raises(ConfigError, match=r"0 GPU, which is room for 0\. Lower rollout.replicas"):
            cluster.place({"CPU": 1.0, "GPU": 0.5}, 1, strategy="spread", start_timeout_s=60)
        cluster.place({"CPU": 2.0}, 1, strategy="spread", start_timeout_s=60)
        with pytest.raises(
            ConfigError, match=r"within cluster.start_timeout_s=0.5 s; other jobs use the cluster"
        ):
            cluster.place({"CPU": 1.0}, 2, strategy="pack", start_timeout_s=0.5)
    finally:
        cluster.disconnect()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("127.0.0.1:1", "cluster.address=127.0.0.1:1: no cluster answers"),
        ("here", "expected host:port of a cluster's head, or auto"),
        ("ray://127.0.0.1:10001", "expected host:port of a cluster's head, or auto"),
    ],
)
def test_a_cluster_that_cannot_be_reached(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster.connect(given, torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({**BASE, "cluster": {"cpus": 2}}, "rollout.replicas is 0, and the cluster has neither ranks"),
        (
            with_replicas(1, health_timeout_s=700.0),
            r"cluster.health_timeout_s.*700 is not below rollout.timeout_s \(600\)",
        ),
        ({**BASE, "rollout": {"replicas": 1, "engine": "hf"}}, "runs only in the process of the trainer"),
    ],
)
def test_settings_that_cannot_be(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plans(load(None, (), tree))


def test_the_agents_of_the_cluster_that_went_down_have_ended() -> None:
    if not AGENTS:
        pytest.skip("no cluster of its own has been killed")
    until(lambda: gone(AGENTS), "the end of Ray's agents", 90.0)
