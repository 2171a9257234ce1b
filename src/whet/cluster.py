"""Engines in processes of their own, on this machine or many, by Ray. The only module that imports it.

The trainer stays in the process that was started. Each engine replica is a Ray actor with a model and a `NativeEngine`
of its own; `RayEngine` is its handle here, a `RolloutEngine`, and `Router` makes one engine of them. Weights travel
through Ray's object store, once a version, however many replicas there are; the replica confirms their digest.

Nothing outlives the run: a cluster that was started here goes down with this process, whatever ends it, and an actor in
a foreign cluster ends when the driver is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from whet import environment
from whet.config.plan import Plan
from whet.config.schema import Config
from whet.guard.imports import import_all
from whet.guard.processes import die_with, kill, process
from whet.guard.watch import Watch
from whet.models import kernels
from whet.models.exact import self_test
from whet.models.forward import decoder
from whet.models.load import empty
from whet.models.lora import merged
from whet.rollout.engine import WeightSource
from whet.rollout.native.engine import NativeEngine
from whet.rollout.replica import Replica
from whet.rollout.router import Router, Shipment
from whet.shared import decoder_of, end_tokens
from whet.sync.manifest import Manifest, Receipt, checked
from whet.sync.parcels import Letter, Parcels, in_store
from whet.track.timeline import Timeline
from whet.types import Completion, ConfigError, Json, Sampling, WhetError

log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Longest wait for a cluster's address to take a connection."""

END_S = 2.0
"""How long a process that Ray has told to end may take."""

# ---------------------------------------------------------------- in the actor


@dataclass(frozen=True)
class Spec:
    """What a replica is made from. Plain values: the model comes as its config, its weights by the first sync."""

    model: Json
    """config.json."""
    dtype: str
    device: Literal["cpu", "cuda"]
    tokenizer: dict[str, bytes]
    """The files of its folder; read for stop strings."""
    end_token_ids: tuple[int, ...]
    max_batch: int
    max_context: int
    cache_mb: int | None
    kernels: Literal["auto", "torch", "compiled"]
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


@dataclass(frozen=True)
class Hello:
    """What a replica says of itself."""

    process: tuple[int, int]
    node: str
    computes: tuple[str, ...]
    """Kernels, library and processor: where these differ, so may the last bits."""
    exact: bool


class EngineActor:
    """An engine, as Ray calls it. All methods run on one event loop."""

    def __init__(self, spec: Spec) -> None:
        die_with(spec.driver if spec.node == node_id() else None)
        environment.prepare(spec.threads, exact=True)
        environment.keep_memory()
        torch.set_num_threads(spec.threads)
        torch.use_deterministic_algorithms(spec.device == "cpu")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if spec.imports:
            os.chdir(spec.folder)
            import_all(spec.imports)
        model = empty(spec.model, dtype=getattr(torch, spec.dtype), device=spec.device, seed=spec.seed)
        self.spec, self.ops = spec, kernels.load(spec.kernels)
        self.exact = spec.prove and _exact(model, self.ops, seed=spec.seed)
        self.engine = NativeEngine(
            model,
            self.ops,
            end_token_ids=spec.end_token_ids,
            decode=decoder_of(_tokenizer(spec.tokenizer)),
            max_batch=spec.max_batch,
            max_context=spec.max_context,
            cache_mb=spec.cache_mb,
        )
        self.engine.beat = self._beat
        self.beats = 0
        self.held: Manifest | None = None

    def _beat(self, what: str) -> None:
        self.beats += 1

    async def hello(self) -> Hello:
        return Hello(process(os.getpid()), node_id(), computes(self.ops), self.exact)

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        return await self.engine.generate(token_ids, sampling)

    async def load(self, letter: Letter) -> Receipt:
        """Fetch one version, check it tensor by tensor, sample from it from now on."""
        version = letter.manifest.version
        references = [reference for _, reference in letter.parcels]
        fetched = dict(zip(references, await asyncio.gather(*references)))
        end = in_store(_never_put, fetched.__getitem__)
        end.accept(letter)
        manifest: Manifest | None = None
        held, self.held = self.held, None  # as long as they may be a mix

        def told() -> Generator[tuple[str, Any], None, None]:
            nonlocal manifest
            manifest = yield from checked(end.receive(version, held=held), version, held)

        await self.engine.load_weights(WeightSource(tensors=told()), version)
        assert manifest is not None
        self.held = manifest
        return Receipt(f"process {os.getpid()}", version, manifest.digest)

    async def pause(self, finish: bool) -> None:
        await self.engine.pause(finish)

    async def resume(self) -> None:
        self.engine.resume()

    async def place(self, device: Literal["gpu", "cpu"]) -> None:
        await self.engine.place(device)

    async def progress(self) -> int:
        return self.beats


def _never_put(value: object) -> object:
    raise WhetError("an engine only receives weights")


def _exact(model: PreTrainedModel, ops: kernels.Ops, *, seed: int) -> bool:
    """Whether sampling and training agree to the bit in this process, as `shared.prove_exact` asks of the driver's."""
    vocab = model.config.get_text_config().vocab_size
    report = self_test(decoder(model, ops), ops, vocab_size=vocab, seed=seed)
    return report.exact


def _tokenizer(files: dict[str, bytes]) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory(prefix="whet-tokenizer-") as folder:
        for name, content in files.items():
            (Path(folder) / Path(name).name).write_bytes(content)
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


def node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


# ---------------------------------------------------------------- the handle


class Shipped(Iterator[tuple[str, torch.Tensor]]):
    """Tensors that lie in the object store: what goes through them one by one gets them, an actor takes the letter."""

    def __init__(self, letter: Letter, store: Parcels) -> None:
        self.letter = letter
        self._tensors = ((e.name, t) for e, t in store.receive(letter.manifest.version) if t is not None)

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)


def ship(store: Parcels, source: WeightSource, version: int) -> Shipment:
    """Put one version into the object store. The one before it goes with the last replica that reads it."""
    if source.module is not None:
        tensors = ((name, p.detach()) for name, p in merged(source.module).named_parameters())
    else:
        tensors = ((name, t) for name, t in source.tensors or ())
    store.send(version, tensors)
    letter = store.letter(version)
    return lambda: WeightSource(tensors=Shipped(letter, store))


class RayEngine:
    """A `RolloutEngine` in an actor."""

    def __init__(self, actor: Any, hello: Hello, store: Parcels, *, version: int) -> None:
        self.actor, self.hello, self.store, self.version = actor, hello, store, version

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        """See `RolloutEngine`. A request that is given up is given up there, too."""
        completion = await self._call("generate", token_ids, sampling)
        assert isinstance(completion, Completion)
        return completion

    async def load_weights(self, source: WeightSource, version: int) -> None:
        """See `RolloutEngine`. Raises WhetError where the replica's digest is not the one that was sent."""
        if not isinstance(source.tensors, Shipped):
            source = ship(self.store, source, version)()
        assert isinstance(source.tensors, Shipped)
        letter = source.tensors.letter
        receipt = await self._call("load", letter)
        told, sent = (receipt.version, receipt.digest), (version, letter.manifest.digest)
        if told != sent:
            raise WhetError(
                f"weights version {version}: {receipt.receiver} has (version, digest) {told}, sent {sent}"
            )
        self.version = version

    async def pause(self, finish: bool) -> None:
        await self._call("pause", finish)

    def resume(self) -> None:
        self.actor.resume.remote()  # requests that come after it are served after it

    async def place(self, device: Literal["gpu", "cpu"]) -> None:
        await self._call("place", device)

    async def progress(self) -> int:
        return int(await self._call("progress"))

    async def close(self) -> None:
        """End the process, whatever it does."""
        await asyncio.to_thread(end_actor, self.actor, self.hello)

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Raises what the method raised if that was a WhetError, else WhetError or RayError."""
        reference = getattr(self.actor, method).remote(*arguments)
        try:
            return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayTaskError as error:
            if isinstance(error.cause, WhetError):
                raise error.cause from None
            raise WhetError(f"the engine process raised {error.cause!r}") from error
        except RayActorError as error:
            raise RuntimeError(f"the engine process has ended: {first_line(error)}") from None


def end_actor(actor: Any, hello: Hello) -> None:
    """Ray's own way needs a process that still listens; SIGKILL does not."""
    try:
        ray.kill(actor)
        if hello.node == node_id():
            kill(hello.process, END_S)
            return
        affinity = NodeAffinitySchedulingStrategy(hello.node, soft=False)
        task: Any = ray.remote(kill).options(num_cpus=0, scheduling_strategy=affinity)
        ray.get(task.remote(hello.process, END_S), timeout=CONNECT_S)
    except RayError as error:  # its machine is gone, and the process with it
        log.info("the end of an engine process could not be seen: %s", first_line(error))


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1]) or type(error).__name__


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
    """`rollout.replicas` engines in actors as one engine; stands where `shared.open_engine` does.

    Raises ConfigError for a cluster that cannot be reached, or that has no room for them.
    """
    del timeline  # what the replicas do is not in this process's timeline
    settings, count = cfg.cluster, cfg.rollout.replicas
    gpus = settings.gpus if settings.gpus is not None else float(model.device.type == "cuda")
    connect(settings.address, model)
    try:
        bundle = {"CPU": float(settings.cpus)} | ({"GPU": gpus} if gpus else {})
        group = place(bundle, count, strategy=settings.placement, start_s=settings.start_s)
        spec = spec_of(plans, model, cfg=cfg, tokenizer=tokenizer, threads=settings.cpus)
        store = in_store(ray.put, ray.get)
        start = partial(start_replica, spec=spec, group=group, store=store)
        names = [f"engine-{n}" for n in range(count)]
        replicas = _all_at_once(start, names, start_s=settings.start_s)
    except BaseException:
        disconnect()
        raise
    hellos = [r.engine.hello for r in replicas if isinstance(r.engine, RayEngine)]
    router = Router(
        replicas,
        restart=start,
        restarts=settings.restarts,
        ship=partial(ship, store),
        rows=spec.max_batch,
        health_s=settings.health_s,
        load_s=cfg.rollout.timeout_s,
        start_s=settings.start_s,
        version=UNLOADED,
        exact=agree(hellos, computes(ops)),
    )
    router.beat = watch.beat
    return router


UNLOADED = -1
"""Version of replicas that have no weights yet."""


def agree(hellos: Sequence[Hello], own: tuple[str, ...]) -> bool:
    """Whether all replicas compute as this process does: each is exact by itself, on equal kernels and processors."""
    for hello in hellos:
        if hello.computes != own:
            pid, by = hello.process[0], " / ".join(hello.computes)
            log.warning("engine process %d computes by %s, the trainer by %s", pid, by, " / ".join(own))
    return all(h.exact and h.computes == own for h in hellos)


def _all_at_once(start: Any, names: Sequence[str], *, start_s: float) -> list[Replica]:
    async def all_of_them() -> list[Replica]:
        return list(await asyncio.gather(*(start(name) for name in names)))

    async def bounded() -> list[Replica]:
        return await asyncio.wait_for(all_of_them(), start_s)

    try:
        return asyncio.run(bounded())
    except TimeoutError:
        raise ConfigError(
            f"{len(names)} engine processes were not up within cluster.start_s={start_s:g} s; their logs are in "
            "/tmp/ray/session_latest/logs. Raise cluster.start_s if they only load slowly"
        ) from None


async def start_replica(name: str, *, spec: Spec, group: PlacementGroup, store: Parcels) -> Replica:
    """One actor in its place, up and without weights."""
    bundle = int(name.rpartition("-")[2])
    placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    needs = group.bundle_specs[bundle]
    actor: Any = (
        ray.remote(EngineActor)
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
        hello = await actor.hello.remote()
    except asyncio.CancelledError:
        ray.kill(actor)
        raise
    except RayActorError as error:
        raise ConfigError(f"{name} could not start: {str(error).strip()[-2000:]}") from None
    engine = RayEngine(actor, hello, store, version=UNLOADED)
    log.info("%s is process %d on node %s", name, hello.process[0], hello.node[:8])
    return Replica(name, engine, progress=engine.progress)


def environment_of(threads: int) -> dict[str, str]:
    """The variables that have to be there before torch is imported, as they are here."""
    names = ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_VERBOSITY",
             "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_CBWR")  # fmt: skip
    own = {name: os.environ[name] for name in names if name in os.environ}
    return own | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def spec_of(
    plans: Sequence[Plan],
    model: PreTrainedModel,
    *,
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    threads: int,
) -> Spec:
    """Large enough for every stage, as `shared.open_engine` has it."""
    sampling = [p for p in plans if p.generates]
    with tempfile.TemporaryDirectory(prefix="whet-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return Spec(
        model=model.config.to_dict(),
        dtype=str(model.dtype).removeprefix("torch."),
        device="cuda" if model.device.type == "cuda" else "cpu",
        tokenizer=files,
        end_token_ids=tuple(sorted(end_tokens(model, tokenizer))),
        max_batch=max(p.max_batch for p in sampling),
        max_context=max(p.max_sequence_tokens for p in sampling),
        cache_mb=cfg.machine.kv_cache_mb,
        kernels=cfg.machine.kernels,
        threads=threads,
        prove=cfg.machine.exact != "off",
        seed=cfg.seed,
        imports=cfg.imports,
        folder=os.getcwd(),
        node=node_id(),
        driver=process(os.getpid()),
    )


# ---------------------------------------------------------------- the cluster


def connect(address: str | None, model: PreTrainedModel) -> None:
    """Attach to the cluster at `address`, or start one here that ends with this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # an actor without GPUs: leave the variable alone
    quiet: Any = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.WARNING}
    if ray.is_initialized():
        return
    logging.getLogger("ray").setLevel(logging.WARNING)
    with _own_signals():
        if address is None:
            # Its ports are open to the machine's network; Ray asks everyone for the token in ~/.ray by itself.
            ray.init(
                "local",
                include_dashboard=False,
                num_cpus=_cores(),
                object_store_memory=_store_bytes(model),
                **quiet,
            )
            return
        _reach(address)
        try:
            ray.init(address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise ConfigError(
                f"cluster.address={address}: {first_line(error)}. Start one there with `ray start --head`, give its "
                "host:port, or leave it out to start one here. A cluster that asks for a token takes it from the "
                "environment: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or ~/.ray/auth_token)"
            ) from error


def _reach(address: str) -> None:
    """Raise ConfigError at once where nobody listens; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not port.isdigit() or not host or address.startswith("ray://"):
        raise ConfigError(f"cluster.address={address}: expected host:port of a cluster's head, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cluster.address={address}: nobody answers there ({error}). Start a cluster with `ray start --head`, give "
            "its host:port, or leave it out to start one here"
        ) from error


@contextmanager
def _own_signals() -> Generator[None, None, None]:
    """Ray puts a handler of its own on SIGTERM; the run's own saves first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _store_bytes(model: PreTrainedModel) -> int:
    """Two versions of the weights, the old and the new, and some room."""
    weights = sum(p.nbytes for p in model.parameters())
    return max(128 << 20, 3 * weights + (64 << 20))


def place(
    bundle: dict[str, float], count: int, *, strategy: Literal["pack", "spread"], start_s: float
) -> PlacementGroup:
    """Room for `count` replicas. Raises ConfigError at once if there will never be, else after `start_s`."""
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    fits = sum(min(int(node.get(k, 0) // v) for k, v in bundle.items()) for node in nodes)
    needs = " and ".join(f"{v:g} {k}" for k, v in bundle.items())
    there = "; ".join(", ".join(f"{n.get(k, 0):g} {k}" for k in bundle) for n in nodes)
    asked = f"rollout.replicas={count}"
    advice = "Lower rollout.replicas, cluster.cpus or cluster.gpus, or attach to a larger cluster (cluster.address)"
    if fits < count:
        raise ConfigError(
            f"{asked}: each needs {needs} on one machine, and the {len(nodes)} machine(s) have {there}, "
            f"which is room for {fits}. {advice}"
        )
    group = placement_group([dict(bundle) for _ in range(count)], strategy=strategy.upper())
    try:
        ray.get(group.ready(), timeout=start_s)
    except GetTimeoutError:
        raise ConfigError(
            f"{asked}: no room was free for {count} times {needs} within cluster.start_s={start_s:g} s, "
            f"others use the cluster ({there} in all). {advice}"
        ) from None
    return group


def disconnect() -> None:
    """Leave the cluster; one that was started here goes down."""
    if ray.is_initialized():
        with _own_signals():
            ray.shutdown()
