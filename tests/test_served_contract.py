"""What holds of the client of every kind of inference server, over its double: what is asked for a reply, new weights
that are wrong in every way, and servers that are dead, hang, are slow, or are something else.

The contract of the seam (tests/test_rollout_contract.py) runs over the same clients.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import whet
from asking import reply
from servers import OpenAIServer, Server, SglangServer, VllmServer
from serving import LIMITS, digits_model, folder_of, openai_engine, sglang_engine, vllm_engine
from test_rollout_contract import END, LIMIT, PROMPT, jobs, module, run
from whet import environment
from whet.models import kernels
from whet.rollout.engine import WeightUpdate
from whet.rollout.http.calls import Unreachable
from whet.rollout.http.canary import Canary
from whet.rollout.http.published import Folder, Written
from whet.rollout.http.served import HttpEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.replica import Replica
from whet.rollout.router import Router
from whet.types import ConfigError, Request, Sampling, WhetError

environment.prepare(threads=None, exact=True)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of server. reads: the seed, the end tokens and the key of the cache of a request for a reply; None of
    another one. phases: calls of an update; none: it takes no weights. first: is asked before all else."""

    name: str
    server: Callable[[NativeEngine], Any]
    engine: Callable[..., HttpEngine]
    generate: str
    first: str
    reads: Callable[[Any], tuple[int, list[int], str] | None]
    phases: tuple[str, ...] = ()
    sleep: str = ""
    wake: str = ""


def vllm_reads(body: Any) -> tuple[int, list[int], str] | None:
    sampling = body["sampling_params"]
    if "canary" in body["request_id"] or "prompt_logprobs" in sampling:
        return None
    assert sampling["ignore_eos"]  # every end token is named
    assert sampling["n"] == 1
    return sampling["seed"], sampling["stop_token_ids"], body["cache_salt"]


def sglang_reads(body: Any) -> tuple[int, list[int], str] | None:
    sampling = body["sampling_params"]
    if "canary" in body["rid"] or not sampling["max_new_tokens"]:
        return None
    ends = [] if sampling["ignore_eos"] else sampling["stop_token_ids"]
    return sampling["sampling_seed"], ends, body["extra_key"]


def openai_reads(body: Any) -> tuple[int, list[int], str] | None:
    if not body.get("stream") or len(body["prompt"]) > 100:
        return None
    assert (body["return_token_ids"], body["logprobs"], body["n"]) == (True, 1, 1)
    return body["seed"], [] if body["ignore_eos"] else body["stop_token_ids"], ""


KINDS = {
    "vllm": Kind(
        name="vllm",
        server=VllmServer,
        engine=vllm_engine,
        generate="/inference/v1/generate",
        first="/version",
        reads=vllm_reads,
        phases=("/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"),
        sleep="/sleep",
        wake="/wake_up",
    ),
    "sglang": Kind(
        name="sglang",
        server=SglangServer,
        engine=sglang_engine,
        generate="/generate",
        first="/server_info",
        reads=sglang_reads,
        phases=("/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"),
        sleep="/release_memory_occupation",
        wake="/resume_memory_occupation",
    ),
    "openai": Kind(
        name="openai",
        server=OpenAIServer,
        engine=openai_engine,
        generate="/v1/completions",
        first="/v1/models",
        reads=openai_reads,
    ),
}
everyone = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
takers = pytest.mark.parametrize("kind", [k for k in KINDS.values() if k.phases], ids=["vllm", "sglang"])


def double(kind: Kind, model: PreTrainedModel | None = None) -> Any:
    engine = NativeEngine(model or module(), kernels.load("auto"), end_token_ids=[END], max_context=LIMIT)
    return kind.server(engine)


@pytest.fixture
def server(kind: Kind) -> Iterator[Any]:
    there = double(kind)
    yield there
    there.stop()


async def opened(kind: Kind, server: Server, model: PreTrainedModel | None = None, **how: Any) -> HttpEngine:
    engine = kind.engine(server.url, model or module(), max_context=LIMIT, end_token_ids=[END], **how)
    await engine.open()
    return engine


def replies(kind: Kind, server: Server) -> list[tuple[int, list[int], str]]:
    """What requests for replies said, without those of the canary."""
    found = [kind.reads(body) for path, body in server.asked if path == kind.generate]
    return [said for said in found if said is not None]


async def failure(work: Awaitable[Any]) -> str:
    """What it raised."""
    try:
        await work
    except WhetError as error:
        return str(error)
    return "nothing was raised"


# ---------------------------------------------------------------- what is asked


@everyone
def test_a_request_says_all_that_its_sampling_depends_on(kind: Kind, server: Server) -> None:
    async def story() -> None:
        engine = await opened(kind, server)
        for key, prompt in ((5, [5, 9]), (5, [5, 9]), (5, [5, 9, 7]), (6, [5, 9])):
            await reply(engine, prompt, Sampling(key=key, max_tokens=3, stop_token_ids=(4,)))
        await engine.update_weights(WeightUpdate(version=8, module=module()))
        await reply(engine, [5], Sampling(max_tokens=2, ignore_eos=True))
        await engine.close()

    run(story())
    first, same, longer, other, later = replies(kind, server)
    assert first == same
    assert len({seed for seed, *_ in (first, longer, other)}) == 3  # of the key and the position
    assert all(0 <= seed < 2**63 for seed, *_ in (first, longer, other))
    assert (first[1], later[1]) == ([END, 4], [])
    assert first[2] == longer[2] == other[2]
    assert first[2].removesuffix("-0") == later[2].removesuffix("-8")
    assert (first[2] != later[2]) == bool(kind.phases)


@everyone
def test_a_reply_that_nobody_waits_for_is_aborted(kind: Kind, server: Server) -> None:
    """And none whose id begins as its own does, which SGLang would end, too."""

    async def story() -> None:
        engine = await opened(kind, server)

        def asking(name: str) -> asyncio.Task[Any]:
            long = Sampling(max_tokens=100, ignore_eos=True, key=3)
            request = Request(id=name, session="", prompt=tuple(PROMPT), sampling=long)
            return asyncio.create_task(engine.generate(request))

        doomed, other = asking("task-1"), asking("task-10")
        while len(server.running) < 2:
            await asyncio.sleep(0.005)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert len((await other).token_ids) == 100
        assert len(server.aborted) == 1
        await engine.close()

    run(story())


def test_a_server_that_is_given_up_while_a_version_is_written_has_nobody_write_it_twice(
    tmp_path: Path,
) -> None:
    """Tensors can be gone through once: two writers would tear them apart between them."""
    model, begun, goes_on = module(), threading.Event(), threading.Event()
    canary = Canary(bound=1e-3, max_context=LIMIT)
    folder = Folder(tmp_path / "engine", model=module(), ops=kernels.load("auto"), canary=canary)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        begun.set()
        assert goes_on.wait(30)
        yield from ((name, p.detach() + 1) for name, p in model.named_parameters())

    async def story() -> None:
        update = folder.ship(WeightUpdate(version=1, tensors=tensors()))
        first, second = (update().tensors for _ in "12")
        assert isinstance(first, Written)
        assert isinstance(second, Written)
        given_up = asyncio.ensure_future(first.there())
        assert await asyncio.to_thread(begun.wait, 30)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert given_up.cancelled()
        waits = asyncio.ensure_future(second.there())
        for _ in range(5):
            await asyncio.sleep(0)
        goes_on.set()
        version = await waits
        there = load_file(version.path / "model.safetensors")
        assert all(torch.equal(there[name], p + 1) for name, p in model.named_parameters())
        assert [path.name for path in folder.root.iterdir()] == ["weights-00000001"]

    run(story())


def test_other_folders_beside_the_versions_stay(tmp_path: Path) -> None:
    """rollout.server.weights_dir is a folder that the user names."""
    others = {"weights-final", "weights-1", "notes"}
    for name in (*others, "weights-00000001", "weights-00000002"):
        (tmp_path / name).mkdir()
    canary = Canary(bound=1e-3, max_context=LIMIT)
    folder = Folder(tmp_path, model=module(), ops=kernels.load("auto"), canary=canary)
    for version in (3, 4, 5):
        folder.write(WeightUpdate(version=version, module=folder.model))
    assert {path.name for path in tmp_path.iterdir()} == others | {"weights-00000004", "weights-00000005"}
    folder.close()
    assert {path.name for path in tmp_path.iterdir()} == others


def test_what_a_killed_run_has_written_of_a_version_does_not_stay(tmp_path: Path) -> None:
    """It may be memory, and the run that goes on may never come to that version."""
    canary = Canary(bound=1e-3, max_context=LIMIT)
    folder = Folder(tmp_path, model=module(), ops=kernels.load("auto"), canary=canary)
    code = (
        "import os, sys; from pathlib import Path; from whet.track.files import atomic_folder\n"
        "with atomic_folder(Path(sys.argv[1])) as new: (new / 'model').touch(); os.kill(os.getpid(), 9)"
    )
    for name in ("weights-00000009", "weights-final"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=False)
    assert len([*tmp_path.iterdir()]) == 2
    folder.close()
    (other,) = tmp_path.iterdir()
    assert other.name.startswith(".weights-final.new-")


@takers
def test_weights_are_given_in_phases_and_a_version_that_was_written_is_not_written_again(
    kind: Kind, server: Server
) -> None:
    """A server that starts again gets the files of its version, whatever was learned since. A tied output layer is
    there under both its names. Old versions are removed."""
    model = module()

    async def story() -> None:
        engine = await opened(kind, server, model)
        folder = folder_of(engine)
        update = folder.ship(WeightUpdate(version=1, module=model))
        server.asked.clear()
        receipt = await engine.update_weights(update())
        assert tuple(path for path, _ in server.asked)[: len(kind.phases)] == kind.phases
        names = {f"sync/canary_{name}" for name in ("mean", "max", "decode_mean", "moved_mean")}
        assert set(receipt.measured) == names
        assert receipt.measured["sync/canary_mean"] < 1e-6
        written = next((folder.root / "weights-00000001").glob("*.safetensors"))
        before = load_file(written)
        assert torch.equal(before["lm_head.weight"], before["model.embed_tokens.weight"])
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
        await engine.update_weights(update())
        again = load_file(written)
        assert all(torch.equal(before[name], again[name]) for name in before)
        for version in range(2, 5):
            await engine.update_weights(WeightUpdate(version=version, module=model))
        assert sorted(path.name for path in folder.root.iterdir()) == ["weights-00000003", "weights-00000004"]
        await engine.close()

    run(story())


# ---------------------------------------------------------------- every way in which weights may be wrong


def moved(share: float, *, seed: int = 0) -> PreTrainedModel:
    """The first model, a small step further."""
    model, noise = module(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(share * torch.randn(p.shape, generator=noise))
    return model


LOADS: dict[str, Callable[[int, str], bool]] = {
    "nothing": lambda number, name: False,
    "half": lambda number, name: number % 2 == 0,
    "the first layer alone": lambda number, name: "layers.0" in name,
}


@takers
@pytest.mark.parametrize("step", [pytest.param(0.1, marks=pytest.mark.sweep), 3e-5])
def test_weights_that_did_not_arrive_are_found(kind: Kind, server: Server, step: float) -> None:
    """At any size of a step: one that moves log-probs by less than the bound, too."""
    whole = server.keep

    async def story() -> None:
        engine = await opened(kind, server)
        await engine.update_weights(WeightUpdate(version=1, module=module()))
        receipt = await engine.update_weights(WeightUpdate(version=2, module=moved(step, seed=2)))
        assert (receipt.measured["sync/canary_moved_mean"] < 1e-3) == (step < 0.1)
        for version, (loads, keep) in zip((3, 5, 7), LOADS.items()):
            server.keep = keep
            update = WeightUpdate(version=version, module=moved(step, seed=version))
            said = await failure(engine.update_weights(update))
            assert f"does not have weights version {version}" in said, loads
            assert engine.version == version - 1
            assert "mix of weights" in await failure(reply(engine, PROMPT, Sampling(max_tokens=3)))
            server.keep = whole
            update = WeightUpdate(version=version + 1, module=moved(step, seed=version + 1))
            await engine.update_weights(update)
        assert set((await reply(engine, PROMPT, Sampling(max_tokens=3))).versions) == {8}
        await engine.close()

    run(story())


@takers
def test_an_output_layer_that_was_lost_is_found(kind: Kind) -> None:
    """The server has packed its tied output layer for itself, and an update does not reach it."""

    def untied(seed: int) -> PreTrainedModel:
        model = module(seed=seed)
        model.config.tie_word_embeddings = False
        head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
        with torch.no_grad():
            head.weight.copy_(model.lm_head.weight)
        model.lm_head = head.requires_grad_(False)
        return model

    server = double(kind, untied(0))

    async def story() -> None:
        engine = await opened(kind, server, untied(0))
        await engine.update_weights(WeightUpdate(version=1, module=untied(0)))
        server.keep = lambda number, name: "lm_head" not in name
        with pytest.raises(WhetError, match="a tied output layer that is not updated does this"):
            await engine.update_weights(WeightUpdate(version=2, module=untied(1)))
        await engine.close()

    try:
        run(story())
    finally:
        server.stop()


@takers
def test_a_cache_that_survives_a_sync_is_found(kind: Kind, server: Server) -> None:
    """Scores are computed anew; replies come from what was cached under the weights before."""

    async def story() -> None:
        engine = await opened(kind, server)
        for version, step in ((1, 0.1), (3, 1e-3)):
            server.stale = None
            await engine.update_weights(WeightUpdate(version=version, module=module()))
            server.stale = NativeEngine(module(), kernels.load("auto"), end_token_ids=[], max_context=LIMIT)
            with pytest.raises(WhetError, match="from a cache of older weights"):
                await engine.update_weights(WeightUpdate(version=version + 1, module=moved(step)))
        await engine.close()

    run(story())


@takers
def test_a_wrong_version_is_found(kind: Kind, server: Server) -> None:
    async def story() -> None:
        engine = await opened(kind, server)
        await engine.update_weights(WeightUpdate(version=1, module=module()))
        server.names = False
        with pytest.raises(
            WhetError, match="reports that it samples from version 1, after weights version 2"
        ):
            await engine.update_weights(WeightUpdate(version=2, module=module(seed=1)))
        await engine.close()

    run(story())


# ---------------------------------------------------------------- dead, hanging, slow, or something else


@everyone
def test_a_hanging_server_is_found_within_its_deadline_and_a_slow_one_is_waited_for(
    kind: Kind, server: Server
) -> None:
    async def story() -> None:
        engine = await opened(kind, server)
        server.slow_s = 0.1
        assert (await engine.health()).requests >= 0
        server.hangs = True
        engine.calls.limits = replace(LIMITS, answer=1.0)
        with pytest.raises(Unreachable, match=r"rollout\.server\.timeout_s=1 s when asked"):
            await engine.health()
        await engine.close()

    run(story())


@everyone
def test_the_requests_of_a_dead_server_are_asked_of_another(kind: Kind) -> None:
    servers = [double(kind) for _ in range(2)]

    async def story() -> None:
        engines = [await opened(kind, server) for server in servers]
        router = Router([Replica(f"engine-{n}", e) for n, e in enumerate(engines)], exact=False)
        receipt = await router.update_weights(WeightUpdate(version=1, module=module()))
        assert receipt.measured["sync/canary_mean"] < 1e-6
        flying = asyncio.gather(*(reply(router, p, s) for p, s in jobs(12, ignore_eos=True)))
        while not replies(kind, servers[0]):
            await asyncio.sleep(0.005)
        await asyncio.to_thread(servers[0].stop)
        assert [len(c.token_ids) for c in await flying] == [12] * 12
        assert [name for name, _ in router.dropped] == ["engine-0"]
        await router.close()

    try:
        run(story())
    finally:
        servers[1].stop()


@everyone
def test_a_server_of_another_kind_is_refused(kind: Kind, server: Server) -> None:
    async def other(body: Any) -> Any:
        return {"name": "something else"}

    server.fails[kind.first] = other
    with pytest.raises(ConfigError, match=r"does not answer as .* does"):
        run(opened(kind, server))


@pytest.mark.parametrize("kind", [KINDS["sglang"], KINDS["openai"]], ids=["sglang", "openai"])
def test_an_end_that_is_none_of_the_run_s_is_refused(kind: Kind, server: Server) -> None:
    """The files of the server's model name another end token, and it ends there, too."""

    async def story() -> None:
        engine = await opened(kind, server)
        server.eos = frozenset(range(2, 60))
        with pytest.raises(WhetError, match=r"ends no reply of this run.*eos_token_id"):
            await asyncio.gather(*(reply(engine, p, s) for p, s in jobs(6)))
        await engine.close()

    run(story())


# ---------------------------------------------------------------- asleep, while a trainer has the accelerator


@everyone
def test_a_server_that_cannot_sleep_is_refused_where_it_has_to(kind: Kind, server: Server) -> None:
    if isinstance(server, VllmServer):
        server.sleeps = False
    if isinstance(server, SglangServer):
        server.info["enable_weights_cpu_backup"] = False

    async def story() -> None:
        engine = kind.engine(server.url, module(), max_context=LIMIT, end_token_ids=[END])
        with pytest.raises(
            ConfigError, match=r"rollout\.server\.sleep=true: http://127\.0\.0\.1:\d+ (keeps|has no)"
        ):
            await engine.open(sleeps=True)
        await engine.open()
        await engine.close()

    run(story())


def test_a_server_that_a_killed_run_left_asleep_is_awake_before_it_loads() -> None:
    """It outlives the run, whose next start knows nothing of it; a load into memory that was given back is refused."""
    kind = KINDS["vllm"]
    server = double(kind)

    async def story() -> None:
        dead = await opened(kind, server)
        await dead.update_weights(WeightUpdate(version=3, module=module(seed=3)))
        await dead.place("cpu")
        await dead.calls.close()
        engine = await opened(kind, server)
        await engine.update_weights(WeightUpdate(version=2, module=module(seed=2)))
        assert (await reply(engine, PROMPT, Sampling(max_tokens=3, ignore_eos=True))).versions == [2] * 3
        await engine.close()

    try:
        run(story())
    finally:
        server.stop()


@takers
def test_servers_of_a_run_sleep_while_it_trains(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last reply of a step until its weights are there. torch keeps nothing that they could have."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    digits_model(0, tmp_path / "model")
    rows = [{"prompt": p, "answer": "1"} for p in ("12", "34", "56", "78", "90", "13")]
    server = double(kind, AutoModelForCausalLM.from_pretrained(tmp_path / "model").requires_grad_(False))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: server.asked.append(("freed", {})))
    try:
        result = whet.train(
            run_dir=str(tmp_path / "run"),
            model={"path": str(tmp_path / "model")},
            data={"train": [{"rows": rows}], "max_prompt_tokens": 4},
            rewards={"digits": {"function": "format", "arguments": {"pattern": ".*[0-4].*"}}},
            algorithm={"name": "grpo"},
            rollout={
                "engine": kind.name,
                "group_size": 4,
                "sampling": {"max_tokens": 6},
                "server": {"urls": [server.url], "sleep": True},
            },
            train={"steps": 3, "tasks_per_step": 2, "optimizer": {"lr": 0.01}},
            checkpoint={"interval": 0, "export": False},
            track={"trackers": ["jsonl"]},
            machine={"device": "cpu", "logprob_parity": "off"},
        )
    finally:
        server.stop()
    assert [step["step"] for step in result.metrics] == [1, 2, 3]
    assert all(step["sync/canary_mean"] < 1e-5 for step in result.metrics)
    assert all(step["rollout/failed_count"] == 0 for step in result.metrics)
    paths = {kind.generate: "reply", kind.phases[1]: "load", kind.sleep: "sleep", kind.wake: "wake"}
    seen = [paths.get(path, path) for path, _ in server.asked if path in {*paths, "freed"}]
    order = [name for name, _ in groupby(seen)]
    begin = order.index("load")
    assert order[begin : begin + 2] == ["load", "reply"]
    assert order[begin + 2 :] == ["sleep", "freed", "wake", "load", "reply"] * 3
