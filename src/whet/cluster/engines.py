"""Engine replicas: each is a Ray actor with its own model and `NativeEngine`; `RayEngine` is its handle in this
process, a `RolloutEngine`, and `Router` combines them into one engine. `sync.replicas` transfers the weights; each
replica confirms their digest."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from whet import environment, secrets
from whet.cluster.nodes import (
    Room,
    answered,
    bundle_of,
    connect,
    disconnect,
    end_actor,
    environment_of,
    first_line,
    logs,
    node_id,
    place,
)
from whet.cluster.staging import RayStaging
from whet.config.derived import content_of
from whet.config.plan import Plan
from whet.config.schema import Config, LoraConfig
from whet.config.sections.rollout import Quantization
from whet.guard import stacks
from whet.guard.imports import import_all
from whet.guard.line import LOOPBACK
from whet.guard.processes import die_with, process
from whet.guard.temporary import OwnFolder
from whet.guard.watch import Watch
from whet.job import decoder_of
from whet.models import kernels
from whet.models.forward import decoder
from whet.models.kernels import Kind
from whet.models.load import empty, end_tokens
from whet.models.logprob_parity import self_test
from whet.models.lora import attach
from whet.rollout.engine import PARTS, Capabilities, Health, OnTokens, Part, WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.rollout.replica import Replica
from whet.rollout.router import Router
from whet.rollout.scale import wish
from whet.sync.manifest import Manifest
from whet.sync.parcels import Letter, Parcels
from whet.sync.replicas import Delivery, Inbox, Replicated, Shipped, Shipper, within_s
from whet.track.lanes import REPLICAS, Lane, Notes, Told
from whet.track.timeline import Timeline, clock
from whet.types import Completion, ConfigError, Json, Receipt, Request, ScoreRequest, TokenLogprobs, WhetError

log = logging.getLogger(__name__)

# ---------------------------------------------------------------- in the actor


@dataclass(frozen=True)
class Spec:
    """What a replica is built from. Plain values: the model is sent as its config, its weights with the first sync."""

    model: Json
    """config.json."""
    dtype: str
    device: Literal["cpu", "cuda"]
    tokenizer: dict[str, bytes]
    """The files of its folder; read for stop strings."""
    end_token_ids: tuple[int, ...]
    max_num_seqs: int
    max_context: int
    cache_mb: int | None
    quantization: Quantization | None
    kernels: Kind
    threads: int
    prove: bool
    """Whether the driver's own self-test says 'exact', so that the replica's is asked, too."""
    seed: int
    imports: tuple[str, ...]
    folder: str
    """Where `imports` are found."""
    node: str
    """Ray's name for the machine of the driver."""
    driver: tuple[int, int]
    """The driver's process: see `process`."""
    lora: LoraConfig | None
    """Its adapters, where weights come without them merged."""
    experts: bool
    """Completions have the experts of their tokens."""
    stacks: str | None
    """Where processes on the driver's machine write their stacks when one of them hangs."""
    known: Mapping[str, str] = field(repr=False)
    """The driver's secrets, which nobody may print."""


@dataclass(frozen=True)
class EngineHandshake:
    """A replica's description of itself."""

    process: tuple[int, int]
    node: str
    computes: tuple[str, ...]
    """Kernels, library and processor: where these differ, so may the last bits."""
    exact: bool
    can: Capabilities


def guarded(spec: Spec) -> None:
    """From now on nothing that this process prints holds a secret, of its environment or of the driver's config."""
    secrets.learn_all(spec.known)
    secrets.guard_output()


class EngineActor:
    """An engine, as Ray calls it. All methods run on one event loop; those of the group `watch` on one of their own, so
    that they are answered whatever the engine does."""

    def __init__(self, spec: Spec) -> None:
        guarded(spec)
        die_with(spec.driver if spec.node == node_id() else None)
        if spec.node == node_id() and spec.stacks is not None:
            stacks.listen("engine", spec.stacks)
        environment.prepare(spec.threads, exact=True)
        environment.keep_memory()
        torch.set_num_threads(spec.threads)
        torch.use_deterministic_algorithms(spec.device == "cpu")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if spec.imports:
            os.chdir(spec.folder)
            import_all(spec.imports)
        model = empty(spec.model, dtype=getattr(torch, spec.dtype), device=spec.device, seed=spec.seed)
        if spec.lora is not None:
            attach(model, spec.lora, seed=spec.seed)
        self.spec, self.ops = spec, kernels.load(spec.kernels)
        self.exact = spec.prove and _exact(model, self.ops, seed=spec.seed)
        self.engine = NativeEngine(
            model,
            self.ops,
            end_token_ids=spec.end_token_ids,
            decode=decoder_of(_tokenizer(spec.tokenizer)),
            max_num_seqs=spec.max_num_seqs,
            max_context=spec.max_context,
            cache_mb=spec.cache_mb,
            quantization=spec.quantization,
            experts=spec.experts,
        )
        self.notes = Notes()
        self.engine.span = self.notes.piece
        self.inbox = Inbox(
            self.engine.module,
            name=f"engine process {os.getpid()}",
            adapters=spec.lora is not None,
            put=ray.put,
        )

    async def hello(self) -> EngineHandshake:
        return EngineHandshake(
            process(os.getpid()), node_id(), computes(self.ops), self.exact, self.engine.can
        )

    async def generate(self, request: Request) -> tuple[Completion, Told]:
        heard_ns = clock()
        completion = await self.engine.generate(request)
        return completion, self.notes.told(heard_ns)

    async def stream(self, request: Request) -> AsyncIterator[list[int] | tuple[Completion, Told]]:
        """The tokens as they are sampled, and what `generate` returns."""
        heard_ns = clock()
        given: asyncio.Queue[list[int] | None] = asyncio.Queue()
        work = asyncio.ensure_future(self.engine.generate(request, given.put_nowait))
        work.add_done_callback(lambda _: given.put_nowait(None))
        try:
            while (token_ids := await given.get()) is not None:
                yield token_ids
            yield await work, self.notes.told(heard_ns)
        finally:
            work.cancel()

    async def score(self, requests: Sequence[ScoreRequest]) -> tuple[list[TokenLogprobs], Told]:
        heard_ns = clock()
        found = await self.engine.score(requests)
        return found, self.notes.told(heard_ns)

    async def load(self, delivery: Delivery) -> tuple[Receipt, Told]:
        """Take one version, check it tensor by tensor, sample from it from now on."""
        heard_ns = clock()
        with self.notes.span("load weights"):
            receipt = await self.inbox.take(self.engine, delivery, _fetched)
        return receipt, self.notes.told(heard_ns)

    async def give(self) -> Letter:
        """The version that is here, for another replica."""
        return self.inbox.give()

    async def pause(self, finish: bool) -> None:
        await self.engine.pause(finish)

    async def resume(self) -> None:
        await self.engine.resume()

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part]) -> None:
        await self.engine.place(device, what)

    @ray.method(concurrency_group="watch")
    async def health(self) -> Health:
        return await self.engine.health()

    @ray.method(concurrency_group="watch")
    async def stacks(self) -> str:
        """Where its threads are."""
        return stacks.own()


async def _fetched(references: Iterable[Any]) -> list[Any]:
    return list(await asyncio.gather(*references))


def _exact(model: PreTrainedModel, ops: kernels.Ops, *, seed: int) -> bool:
    """Whether sampling and training agree to the bit in this process, as `job.prove_exact` asks of the driver's."""
    vocab = model.config.get_text_config().vocab_size
    report = self_test(decoder(model, ops), ops, vocab_size=vocab, seed=seed)
    return report.exact


def _tokenizer(files: dict[str, bytes]) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    with OwnFolder("tokenizer") as folder:
        for name, content in files.items():
            (folder / Path(name).name).write_bytes(content)
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def computes(ops: kernels.Ops) -> tuple[str, ...]:
    """What the last bits of a log-prob depend on, beside the weights."""
    return (ops.name, torch.__version__, torch.backends.cpu.get_cpu_capability(), _processor())


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# ---------------------------------------------------------------- the handle


class RayEngine:
    """A `RolloutEngine` in an actor."""

    def __init__(self, actor: Any, hello: EngineHandshake, *, version: int) -> None:
        self.actor, self.hello, self.version = actor, hello, version
        self.label = f"engine process {hello.process[0]} on node {hello.node[:8]}"
        self.held: Manifest | None = None
        """The weights that it has confirmed."""
        self.lane: Lane | None = None
        """What it does, on the run's timeline."""

    @property
    def can(self) -> Capabilities:
        return self.hello.can

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """See `RolloutEngine`. A request that is given up is given up there, too."""
        if on_tokens is None:
            completion = await self._noted("generate", request)
        else:
            completion = await self._streamed(request, on_tokens)
        assert isinstance(completion, Completion)
        return completion

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        return list(await self._noted("score", requests))

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        """See `RolloutEngine`. Raises WhetError where the replica's digest is not the one that was sent."""
        assert isinstance(update.tensors, Shipped), "use a Shipper to send weights to replicas"
        receipt = await update.tensors.to(self)
        self.version = update.version
        return receipt

    async def deliver(self, delivery: Delivery) -> Receipt:
        """See `Replicated`."""
        receipt = await self._noted("load", delivery)
        assert isinstance(receipt, Receipt)
        return receipt

    async def give(self) -> Letter:
        """See `Replicated`."""
        letter = await self._call("give")
        assert isinstance(letter, Letter)
        return letter

    async def pause(self, finish: bool) -> None:
        await self._call("pause", finish)

    async def resume(self) -> None:
        await self._call("resume")

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part] = PARTS) -> None:
        await self._call("place", device, what)

    async def health(self) -> Health:
        health = await self._call("health")
        assert isinstance(health, Health)
        return health

    async def close(self) -> None:
        """End the process, whatever it does."""
        stacks.lose(self.label)
        if self.lane is not None:
            self.lane.end()
        await asyncio.to_thread(end_actor, self.actor, self.hello.node, [self.hello.process])

    async def _noted(self, method: str, *arguments: Any) -> Any:
        """An answer that comes with what the process did meanwhile."""
        asked_ns = clock()
        answer, told = await self._call(method, *arguments)
        if self.lane is not None:
            self.lane.take(told, asked_ns)
        return answer

    async def _streamed(self, request: Request, on_tokens: OnTokens) -> Completion:
        asked_ns = clock()
        given = self.actor.stream.options(num_returns="streaming").remote(request)
        with _answering(lambda: ray.cancel(given)):
            async for reference in given:
                answer = await reference
                if isinstance(answer, list):
                    on_tokens(answer)
        completion, told = answer
        if self.lane is not None:
            self.lane.take(told, asked_ns)
        assert isinstance(completion, Completion)
        return completion

    async def _call(self, method: str, *arguments: Any) -> Any:
        reference = getattr(self.actor, method).remote(*arguments)
        with _answering(lambda: ray.cancel(reference)):
            return await reference


@contextmanager
def _answering(cancel: Callable[[], object]) -> Iterator[None]:
    """While an actor's answer is awaited: raises what its method raised if that was a WhetError, else WhetError or
    RuntimeError. cancel: ends the method where nobody waits for it any more."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, WhetError):
            raise error.cause from None
        raise WhetError(f"the engine process raised {error.cause!r}") from error
    except RayActorError as error:
        raise RuntimeError(f"the engine process has ended: {first_line(error)}") from None
    except BaseException:
        cancel()
        raise


# ---------------------------------------------------------------- opening


def open_replicas(
    plans: Sequence[Plan],
    model: PreTrainedModel,
    ops: kernels.Ops,
    *,
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    watch: Watch,
    timeline: Timeline,
) -> Router:
    """`rollout.replicas` engines in actors as one engine; stands where `job.open_engine` does.

    Raises ConfigError for a cluster that cannot be reached, or that has no room for them.
    """
    settings, count = cfg.cluster, cfg.rollout.replicas
    connect(settings.address, model)
    try:
        bundle = bundle_of(settings, cuda=model.device.type == "cuda")
        group = place(bundle, count, strategy=settings.placement, start_timeout_s=settings.start_timeout_s)
        spec = spec_of(plans, model, cfg=cfg, tokenizer=tokenizer, threads=settings.cpus)
        shipper = Shipper(cfg, Parcels(ray.put, ray.get), device=spec.device)
        shipper.near = _near
        shipper.stage = partial(
            RayStaging, disk=Path(cfg.run_dir).absolute() / "weights", timeout_s=cfg.sync.timeout_s
        )
        if cfg.sync.method == "collective":
            shipper.host = _reached_at
        room = Room(group, bundle, count, settings.placement, settings.start_timeout_s)
        start = partial(start_replica, spec=spec, room=room, timeline=timeline)
        names = [f"engine-{n}" for n in range(count)]
        watch.beat(f"the start of {count} engine processes")
        replicas = _all_at_once(start, names, start_timeout_s=settings.start_timeout_s)
    except BaseException:
        disconnect()
        raise
    hellos, own = [r.engine.hello for r in replicas if isinstance(r.engine, RayEngine)], computes(ops)
    exact = agree(hellos, own) and cfg.sync.dtype in ("auto", spec.dtype)
    router = Replicas(
        replicas,
        restart=partial(start, alike=own if exact else None),
        restarts=settings.restarts,
        ship=shipper.ship,
        rows=spec.max_num_seqs,
        health_timeout_s=settings.health_timeout_s,
        load_s=within_s(cfg),
        start_timeout_s=settings.start_timeout_s,
        version=UNLOADED,
        exact=exact,
        wish=partial(wish, Path(cfg.run_dir)),
    )
    router.beat, router.takes_source, router.shipper = watch.beat, True, shipper
    shipper.members = lambda: [r.engine for r in router.replicas.values() if isinstance(r.engine, RayEngine)]
    return router


class Replicas(Router):
    """A router over actors."""

    shipper: Shipper

    async def close(self) -> None:
        await super().close()
        self.shipper.close()


def _near(member: Replicated, machine: str | None) -> bool:
    return isinstance(member, RayEngine) and member.hello.node == (machine or node_id())


def _reached_at(members: Sequence[Replicated], machine: str | None) -> str:
    """The address of this process for replicas and for the policy's machine: loopback if all are on this one."""
    local = machine is None and all(_near(member, None) for member in members)
    return LOOPBACK if local else str(ray.util.get_node_ip_address())


UNLOADED = -1
"""Version of replicas that have no weights yet."""


def agree(hellos: Sequence[EngineHandshake], own: tuple[str, ...]) -> bool:
    """Whether all replicas compute exactly as this process; they do so only with equal kernels and processors."""
    for hello in hellos:
        if hello.computes != own:
            pid, by = hello.process[0], " / ".join(hello.computes)
            log.warning("engine process %d computes with %s, the trainer with %s", pid, by, " / ".join(own))
    return all(h.exact and h.computes == own for h in hellos)


def _all_at_once(start: Any, names: Sequence[str], *, start_timeout_s: float) -> list[Replica]:
    async def all_of_them() -> list[Replica]:
        async with asyncio.timeout(start_timeout_s):
            return list(await asyncio.gather(*(start(name) for name in names)))

    try:
        return asyncio.run(all_of_them())
    except TimeoutError:
        raise ConfigError(
            f"{len(names)} engine processes did not start within cluster.start_timeout_s={start_timeout_s:g} s; their "
            f"logs are in {logs()}. Raise cluster.start_timeout_s if they only load slowly"
        ) from None


async def start_replica(
    name: str, *, spec: Spec, room: Room, timeline: Timeline, alike: tuple[str, ...] | None = None
) -> Replica:
    """One actor in its place, up and without weights. It has a lane of the timeline.

    alike: what it has to compute by, where the others are exact: one that differs would change the run's numbers.
    """
    group, bundle = await room.of(name)
    try:
        actor, hello = await _up(name, spec, group=group, bundle=bundle)
    except BaseException:
        room.leave(name, group)
        raise
    engine = RayEngine(actor, hello, version=UNLOADED)
    if hello.node != node_id():
        stacks.reach(engine.label, lambda: answered(actor.stacks.remote()))

    async def end() -> None:
        await engine.close()
        room.leave(name, group)

    if alike is not None and not (hello.exact and hello.computes == alike):
        await end()
        raise WhetError(
            f"{name} computes with {' / '.join(hello.computes)}, all others with {' / '.join(alike)}: its results "
            "would differ in the last bits, and this run has log-prob parity; use a machine of the same kind, or set "
            "machine.logprob_parity=off"
        )
    near = hello.node == node_id()
    engine.lane = Lane(timeline, f"replica {name}", of=REPLICAS, near=near, waits="wait for requests")
    log.info("%s is process %d on node %s", name, hello.process[0], hello.node[:8])
    return Replica(name, engine, end=end)


async def _up(name: str, spec: Spec, *, group: PlacementGroup, bundle: int) -> tuple[Any, EngineHandshake]:
    """The actor, and what it says of itself."""
    placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    needs = group.bundle_specs[bundle]
    remote: Any = ray.remote
    actor: Any = (
        remote(concurrency_groups={"watch": 1})(EngineActor)
        .options(
            num_cpus=needs.get("CPU", 0),
            num_gpus=needs.get("GPU", 0),
            max_restarts=0,  # the router does that: a new process has no weights
            max_concurrency=1 << 20,
            scheduling_strategy=placed,
            runtime_env={"env_vars": environment_of(spec.threads)},
        )
        .remote(spec)
    )
    try:
        return actor, await actor.hello.remote()
    except asyncio.CancelledError:
        ray.kill(actor)
        raise
    except RayActorError as error:
        raise ConfigError(f"{name} could not start: {str(error).strip()[-2000:]}") from None


def _blank(lora: LoraConfig | None) -> LoraConfig | None:
    """The same adapters, begun in the quickest way: what they hold comes with the weights."""
    return lora and lora.model_copy(update={"init": "default", "path": None})


def spec_of(
    plans: Sequence[Plan],
    model: PreTrainedModel,
    *,
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    threads: int,
) -> Spec:
    """Large enough for every stage, as `job.open_engine` has it."""
    sampling = [p for p in plans if p.generates]
    with OwnFolder("tokenizer") as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return Spec(
        model=model.config.to_dict(),
        dtype=str(model.dtype).removeprefix("torch."),
        device="cuda" if model.device.type == "cuda" else "cpu",
        tokenizer=files,
        end_token_ids=tuple(sorted(end_tokens(model, tokenizer))),
        max_num_seqs=max(p.cfg.rollout.max_num_seqs for p in sampling),
        max_context=max(p.max_sequence_tokens for p in sampling),
        cache_mb=cfg.machine.kv_cache_mb,
        quantization=cfg.rollout.quantization,
        kernels=cfg.machine.kernels,
        threads=threads,
        prove=cfg.machine.logprob_parity != "off" and cfg.rollout.quantization is None,
        seed=cfg.seed,
        imports=cfg.imports,
        folder=os.getcwd(),
        node=node_id(),
        driver=process(os.getpid()),
        lora=_blank(cfg.model.lora) if content_of(cfg) == "adapters" else None,
        experts=any(p.cfg.train.router_replay == "sampled" for p in sampling),
        stacks=stacks.folder(),
        known=secrets.known(),
    )
