"""One rank: a separate process that holds its part of policy, reference and critic and runs the driver's commands.

`guard.line` starts it over a socket pair between the two; only the other ranks can connect to it. It ends with the
process that started it, however that process ends.
"""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet import seeds
from whet.config.schema import ProfileConfig
from whet.guard import pulse
from whet.guard.imports import import_all
from whet.models import kernels
from whet.models.kernels import Kind
from whet.models.lora import learned, refresh
from whet.models.mesh import Dims, expert_mesh, make_mesh
from whet.models.optim import Optimizer
from whet.models.parallel import parallelize
from whet.models.published import Adapter, Send, filled
from whet.models.sharded import DataParallel, Sharding
from whet.models.tensor_files import Piece
from whet.models.zero import Zero, ZeroOptimizer
from whet.track.lanes import Notes
from whet.track.timeline import clock
from whet.training import chosen
from whet.training.engine import FullKl
from whet.training.mixing import mix
from whet.training.parts import Held
from whet.training.profile import Profiler, memory_peaks
from whet.training.torch import MICRO_BATCH, OPTIMIZER_STEP, TorchEngine
from whet.types import Json, WhetError

NOTED = {
    "open": "load weights", "forward": "forward", "update": "update", "pull": "gather weights", "save": "save",
    "publish": "publish weights", "call": "send weights",
    "capture": "gather for a checkpoint", "hold": "copy for a checkpoint", "load": "load a checkpoint",
    "copy": "copy weights",
}  # fmt: skip
"""Commands that are work, and what they are called on the timeline."""


@dataclass(frozen=True)
class RankHandshake:
    """What a rank is told first."""

    rank: int
    dims: Dims
    device: str
    """cpu or cuda"""
    backend: str
    host: str
    port: int
    """Of the store where the ranks find one another."""
    address: str
    """Of this machine, where other ranks reach this one."""
    gpu: int
    """Which of the GPUs that it sees is its own."""
    threads: int
    timeout_s: float
    imports: tuple[str, ...]
    whose: str = ""
    """Whose ranks these are, where the policy is elsewhere."""


@dataclass(frozen=True)
class Role:
    """A model to host."""

    skeleton: PreTrainedModel
    """Its parameters have no data."""
    weights: str
    """The folder that has it, as `published.write_own` writes it."""
    value_head: nn.Linear | None
    kernels: Kind
    dims: Dims
    chunks: int
    """Parts of the layers on each rank of pp."""
    sharding: Sharding
    arguments: dict[str, Any]
    """Further ones of TorchEngine."""


@dataclass
class _Rank:
    hello: RankHandshake
    connection: Connection
    meshes: dict[Dims, tuple[Any, Any]] = field(default_factory=dict)
    engines: dict[str, TorchEngine] = field(default_factory=dict)
    parts: dict[str, Held] = field(default_factory=dict)
    """Of each engine what is to be written of it."""
    profiler: Profiler | None = None
    notes: Notes = field(default_factory=Notes)
    """What it did since its last answer."""
    parts_noted: frozenset[str] = frozenset({OPTIMIZER_STEP})

    # -- commands

    def open(self, name: str, role: Role) -> None:
        device = torch.device(self.hello.device, self.hello.gpu) if self.hello.device == "cuda" else "cpu"
        model = filled(role.skeleton, Path(role.weights), device)
        refresh(model)
        head = None if role.value_head is None else role.value_head.to(device)
        mesh, experts = self.mesh(role.dims)
        ep = None if experts is None else experts["ep"]
        arguments = dict(role.arguments)
        # what is cut rests in its parts, which are fetched layer by layer
        rests, shards = arguments.pop("rests", False), role.dims.dp_shard > 1
        sharding = replace(role.sharding, offload=role.sharding.offload or (rests and shards))
        parallel = parallelize(model, mesh, role.dims, ep=ep, chunks=role.chunks)
        config = arguments.pop("deepspeed", None)
        users: tuple[str, Mapping[str, Json]] | None = arguments.pop("engine", None)
        learns = arguments.get("optimizer") is not None
        make = TorchEngine if users is None else chosen.maker(*users, on_ranks=True)
        engine = make(
            model,
            kernels.load(role.kernels),
            value_head=head,
            across=DataParallel(mesh, sharding, parallel, experts=experts)
            if config is None
            else Zero(config, learns=learns, device=self.hello.device, gpu=self.hello.gpu),
            make_optimizer=Optimizer if config is None else ZeroOptimizer,
            parallel=parallel,
            rests=rests and not shards,
            **arguments,
            **({} if users is None else users[1]),
        )
        engine.beat = lambda what: self.say("beat", f"{name}: {what}")
        engine.span = partial(self._part, name)
        self.engines[name] = engine

    def forward(self, name: str, dealt: Any, want: Any) -> list[Tensor]:
        parts = self.engines[name].forward_parts(dealt, want)
        return [x.cpu() for x in parts[: dealt.real]]

    def update(self, name: str, dealt: Any, loss: Any, full_kl: tuple[float, str, Any] | None) -> Any:
        engine = self.engines[name]
        engine.full_kl = None if full_kl is None else FullKl(full_kl[0], self.engines[full_kl[1]], full_kl[2])
        return engine.update_sums(dealt, loss)

    def pull(self, name: str, frozen: bool) -> None:
        """Send what has learned, whole. frozen: and what does not learn now, but did before."""
        engine = self.engines[name]
        named = ((n, p.detach()) for n, p in learned(engine.module) if frozen or p.requires_grad)
        for key, tensor in engine.across.gathered(named):
            if self.hello.rank == 0:
                self.say("tensor", key, tensor.cpu())

    def publish(self, name: str, send: Send[Any], adapters: Mapping[str, Adapter]) -> Any:
        return self.engines[name].publish_parts(send, adapters)

    def call(self, name: str, function: Callable[[], object]) -> object:
        return function() if self.hello.rank == 0 else None

    def save(self, name: str, path: str, moments: bool) -> None:
        self.engines[name].save(Path(path), moments=moments)

    def capture(self, name: str, moments: bool) -> dict[str, dict[str, str] | None]:
        """Send all that `save` would write, whole: (file, tensor's name) -> tensor. Returns each file's metadata."""
        engine = self.engines[name]
        out = {}
        for file, named, metadata in engine.files(moments=moments):
            for key, tensor in engine.across.gathered(named):
                if self.hello.rank == 0:
                    self.say("tensor", (file, key), tensor.cpu())
            out[file] = metadata
        return out

    def pieces(self, name: str, moments: bool) -> Any:
        """What lies here of each file: see `training.parts`."""
        return self.engines[name].pieces(moments=moments)

    def hold(self, name: str, moments: bool, copy: bool, mine: Mapping[str, Collection[Piece]]) -> None:
        self.parts[name] = Held(self.engines[name].take(mine, moments=moments), copy=copy)

    def flush(self, name: str, path: str) -> None:
        """Begin to write what is held."""
        self.parts[name].begin(Path(path), self.hello.rank, self.hello.dims.world)

    def flushed(self, name: str) -> str | None:
        return self.parts[name].said

    def profile(self, cfg: ProfileConfig, folder: str, stage: str) -> None:
        """From now on record the steps that `profile` names, if this rank is among those it names."""
        if self.profiler is not None:
            self.profiler.close()
        here = torch.device(self.hello.device)
        chosen = cfg if self.hello.rank in cfg.ranks else ProfileConfig()
        whose = f"-{self.hello.whose}" if self.hello.whose else ""
        name = f"{stage}{whose}-rank-{self.hello.rank}"
        self.profiler = Profiler(chosen, Path(folder), stage=name, device=here)

    @contextmanager
    def _part(self, name: str, what: str) -> Iterator[None]:
        """Of a command, for the timeline and the profiler."""
        noted = self.notes.span(f"{name} {what}") if what in self.parts_noted else nullcontext()
        ranged = nullcontext() if self.profiler is None else self.profiler.range(f"{name}: {what}")
        with noted, ranged:
            yield

    def detail(self) -> None:
        """From now on every micro-batch is noted, too."""
        self.parts_noted |= {MICRO_BATCH}

    def begin(self, step: int) -> None:
        if self.profiler is not None:
            self.profiler.begin(step)

    def end(self, step: int | None) -> None:
        """After a step; None: there will be no more."""
        if self.profiler is not None and step is not None:
            self.profiler.end(step)
        elif self.profiler is not None:
            self.profiler.close()

    def peaks(self) -> dict[str, float]:
        """Most memory so far in MiB: of the process and, on CUDA, of its GPU since the last time."""
        return memory_peaks()

    @torch.no_grad()
    def load(self, name: str, path: str, share: float, version: int) -> None:
        """What is saved there, or this share of it beside the weights as they are. version: of what is saved."""
        engine = self.engines[name]
        named = list(learned(engine.module)) if share < 1 else []
        before = [engine.across.get(n, p).clone() for n, p in named]
        engine.load(Path(path))
        for own, (n, p) in zip(before, named, strict=True):
            key = seeds.key("mix", n, version)
            engine.across.put(n, p, mix(own, engine.across.get(n, p), share, key=key))
        refresh(engine.module)

    def copy(self, name: str, other: str, share: float, version: int) -> None:
        self.engines[other].version = version
        self.engines[name].copy_from(self.engines[other], share)

    def forget(self, name: str) -> None:
        self.engines[name].forget()

    def mesh(self, dims: Dims) -> tuple[Any, Any]:
        """The mesh of a layout and, with ep, the second one; each is made once, by all ranks."""
        if dims not in self.meshes:
            experts = expert_mesh(dims, self.hello.device) if dims.ep > 1 else None
            self.meshes[dims] = make_mesh(dims, self.hello.device), experts
        return self.meshes[dims]

    # -- talk

    def heard(self, what: str) -> None:
        """A sign of life to the driver, from the thread that answers it: another's would come between its words."""
        if threading.current_thread() is threading.main_thread():
            self.say("beat", what)

    def say(self, *message: object) -> None:
        self.connection.send_bytes(pickle.dumps(message, protocol=5))

    def run(self) -> None:
        commands: dict[str, Callable[..., object]] = {
            f.__name__: f
            for f in (
                self.open,
                self.forward,
                self.update,
                self.pull,
                self.publish,
                self.call,
                self.save,
                self.capture,
                self.pieces,
                self.hold,
                self.flush,
                self.flushed,
                self.profile,
                self.detail,
                self.begin,
                self.end,
                self.peaks,
            )
        } | {"load": self.load, "copy": self.copy, "forget": self.forget}
        while True:
            message = self.connection.recv_bytes()
            heard_ns = clock()
            name, *arguments = pickle.loads(message)
            if name == "close":
                return
            with self.notes.span(said_of(name, arguments)) if name in NOTED else nullcontext():
                answer = commands[name](*arguments)
            self.say("done", answer, self.notes.told(heard_ns))


def said_of(command: str, arguments: Sequence[Any]) -> str:
    """What a command is called on the timeline: with its model and, of a forward, what is wanted."""
    return " ".join((arguments[0], NOTED[command], *(arguments[2:] if command == "forward" else ())))


def serve(connection: Connection) -> None:
    """The life of a rank."""
    try:
        hello: RankHandshake = pickle.loads(connection.recv_bytes())
    except EOFError:
        return
    rank = _Rank(hello, connection)
    with _joined(rank), pulse.heard_by(rank.heard):
        rank.say("done", None, rank.notes.told(clock()))
        rank.run()


@contextmanager
def _joined(rank: _Rank) -> Iterator[None]:
    """Environment, process group and mesh; what goes wrong inside is told to the driver."""
    import torch.distributed as dist

    hello = rank.hello
    try:
        torch.set_num_threads(hello.threads)
        torch.use_deterministic_algorithms(hello.device == "cpu")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        import_all(hello.imports)
        if hello.device == "cuda":
            torch.cuda.set_device(hello.gpu)
        # later than the driver's own deadline, which can say who hangs
        patience = timedelta(seconds=2 * hello.timeout_s)
        os.environ["GLOO_SOCKET_IFNAME"] = _interface(hello.address)
        store = dist.TCPStore(hello.host, hello.port, is_master=False, timeout=patience)
        dist.init_process_group(
            hello.backend, store=store, rank=hello.rank, world_size=hello.dims.world, timeout=patience
        )
        rank.mesh(hello.dims)
        yield
    except EOFError:
        pass  # the driver has gone
    except Exception as error:  # noqa: BLE001  # whatever it was, the driver has to hear of it
        kind = type(error).__name__ if isinstance(error, WhetError) else ""
        try:
            rank.say("failed", kind, str(error), traceback.format_exc())
            rank.connection.poll(10.0)  # until the driver has read it
        except (OSError, EOFError):
            pass  # the driver has gone: nobody is left to hear of it
        os._exit(1)
    # the others may have gone already: no farewell that waits for them
    os._exit(0)


def _interface(address: str) -> str:
    """The name of the network interface that has this address."""
    of = {a.address: name for name, found in psutil.net_if_addrs().items() for a in found}
    if address not in of:
        raise WhetError(
            f"this machine has no network interface with the address {address}; it has {sorted(of)}"
        )
    return of[address]
