"""One rank: a process of its own that holds its part of policy, reference and critic, and does what the driver asks.

It is started by `ranks.Ranks` over a socket pair between the two; nothing else reaches it. It ends with its driver,
however that ends.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.guard.imports import import_all
from whet.models import kernels
from whet.models.lora import adapted, learned, refresh
from whet.models.mesh import Dims, make_mesh
from whet.models.parallel import parallelize
from whet.models.sharded import DataParallel, Sharding
from whet.training.torch import FullKl, TorchEngine
from whet.types import WhetError


@dataclass(frozen=True)
class Hello:
    """What a rank is told first."""

    rank: int
    dims: Dims
    sharding: Sharding
    device: str
    """cpu or cuda"""
    backend: str
    port: int
    """Of the store at 127.0.0.1 where the ranks find one another."""
    threads: int
    timeout_s: float
    imports: tuple[str, ...]
    stacks: str
    """File for the stack of a rank that hangs."""
    driver: int
    """Its process; it may be gone before this one has started."""


@dataclass(frozen=True)
class Role:
    """A model to host."""

    skeleton: PreTrainedModel
    """Its parameters have no data."""
    weights: str
    """The safetensors file that has them."""
    value_head: nn.Linear | None
    kernels: str
    arguments: dict[str, Any]
    """Further ones of TorchEngine."""


@dataclass
class _Rank:
    hello: Hello
    connection: Connection
    mesh: Any = None
    engines: dict[str, TorchEngine] = field(default_factory=dict)

    # -- commands

    def open(self, name: str, role: Role) -> None:
        device = torch.device(self.hello.device, self.hello.rank) if self.hello.device == "cuda" else "cpu"
        model = _filled(role, device)
        refresh(model)
        head = None if role.value_head is None else role.value_head.to(device)
        parallel = parallelize(model, self.mesh, self.hello.dims)
        engine = TorchEngine(
            model,
            kernels.load(role.kernels),
            value_head=head,
            across=DataParallel(self.mesh, self.hello.sharding, parallel),
            parallel=parallel,
            **role.arguments,
        )
        engine.beat = lambda what: self.say("beat", f"{name}: {what}")
        self.engines[name] = engine

    def forward(self, name: str, dealt: Any, want: Any) -> list[Tensor]:
        parts = self.engines[name].forward_parts(dealt, want)
        return [x.cpu() for x in parts[: dealt.real]]

    def update(self, name: str, dealt: Any, loss: Any, full_kl: tuple[float, str] | None) -> Any:
        engine = self.engines[name]
        engine.full_kl = None if full_kl is None else FullKl(full_kl[0], self.engines[full_kl[1]])
        return engine.update_sums(dealt, loss)

    def pull(self, name: str) -> None:
        """Send what has learned, whole."""
        engine = self.engines[name]
        named = ((n, p.detach()) for n, p in learned(engine.module) if p.requires_grad)
        for key, tensor in engine.across.whole(named):
            if self.hello.rank == 0:
                self.say("tensor", key, tensor.cpu())

    def save(self, name: str, path: str, moments: bool) -> None:
        self.engines[name].save(Path(path), moments=moments)

    def capture(self, name: str, moments: bool) -> dict[str, dict[str, str] | None]:
        """Send all that `save` would write, whole: (file, tensor's name) -> tensor. Returns each file's metadata."""
        engine = self.engines[name]
        out = {}
        for file, named, metadata in engine.files(moments=moments):
            for key, tensor in engine.across.whole(named):
                if self.hello.rank == 0:
                    self.say("tensor", (file, key), tensor.cpu())
            out[file] = metadata
        return out

    def load(self, name: str, path: str) -> None:
        self.engines[name].load(Path(path))

    def copy(self, name: str, other: str) -> None:
        self.engines[name].copy_from(self.engines[other])

    def forget(self, name: str) -> None:
        self.engines[name].forget()

    # -- talk

    def say(self, *message: object) -> None:
        self.connection.send_bytes(pickle.dumps(message, protocol=5))

    def run(self) -> None:
        commands: dict[str, Callable[..., object]] = {
            f.__name__: f for f in (self.open, self.forward, self.update, self.pull, self.save, self.capture)
        } | {"load": self.load, "copy": self.copy, "forget": self.forget}
        while True:
            name, *arguments = pickle.loads(self.connection.recv_bytes())
            if name == "close":
                return
            self.say("done", commands[name](*arguments))


def serve(fd: int) -> None:
    """The life of a rank. fd: its end of the socket pair."""
    connection = Connection(fd)
    hello: Hello = pickle.loads(connection.recv_bytes())
    rank = _Rank(hello, connection)
    threading.Thread(target=_end_with, args=(hello.driver,), daemon=True).start()
    with open(hello.stacks, "w") as stacks, _joined(rank):
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        rank.say("done", None)
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
            torch.cuda.set_device(hello.rank)
        # later than the driver's own deadline, which can say who hangs
        patience = timedelta(seconds=2 * hello.timeout_s)
        store = dist.TCPStore("127.0.0.1", hello.port, is_master=False, timeout=patience)
        dist.init_process_group(
            hello.backend, store=store, rank=hello.rank, world_size=hello.dims.world, timeout=patience
        )
        rank.mesh = make_mesh(hello.dims, hello.device)
        yield
    except EOFError:
        pass  # the driver has gone
    except Exception as error:  # noqa: BLE001  # whatever it was, the driver has to hear of it
        kind = type(error).__name__ if isinstance(error, WhetError) else ""
        try:
            rank.say("failed", kind, str(error), traceback.format_exc())
            rank.connection.poll(10.0)  # until the driver has read it
        except (OSError, EOFError):
            pass
        os._exit(1)
    # the others may have gone already: no farewell that waits for them
    os._exit(0)


def _end_with(driver: int) -> None:
    """A driver that was killed leaves nobody behind."""
    while os.getppid() == driver:
        time.sleep(0.5)
    os._exit(1)


def _filled(role: Role, device: torch.device | str) -> PreTrainedModel:
    """The skeleton with its weights."""
    model = role.skeleton
    with safe_open(role.weights, framework="pt") as file, torch.no_grad():
        whole = {name: p for name, p in model.named_parameters() if p.is_meta}
        made: dict[int, nn.Parameter] = {}
        for name, p in whole.items():
            made[id(p)] = nn.Parameter(
                file.get_tensor(name).to(device, copy=True), requires_grad=p.requires_grad
            )
    for module in model.modules():
        for key, own in list(module._parameters.items()):
            if own is not None and id(own) in made:
                module._parameters[key] = made[id(own)]
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
    for layer in adapted(model).values():
        layer.effective = None
    return model


if __name__ == "__main__":
    serve(int(sys.argv[1]))
