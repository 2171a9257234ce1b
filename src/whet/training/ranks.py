"""Many processes as one train engine: `Ranks` starts and watches them, `RankGroup` is a `TrainEngine` on them.

The driver keeps the batch, the loop and, where an engine in its process samples, a full copy of the policy; the ranks
keep weights, gradients and optimizer state, and write what replicas and explorers load. A command goes to all ranks and
is done when all have answered. When a rank dies, fails or sends no message for too long, all ranks are ended, and the
error names the rank, its command and its stack.
"""

from __future__ import annotations

import copy
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.batch import Batch, LossFn
from whet.guard.hangs import UNSEEN, Seen, blame
from whet.guard.line import Local, OpenLines, bound, end
from whet.guard.processes import GO_ON
from whet.guard.temporary import OwnFolder
from whet.models.kernels import Kind
from whet.models.lora import adapted, learned, merged, refresh
from whet.models.mesh import Dims
from whet.models.published import (
    Send,
    adapters_of,
    bring_back,
    let_go,
    structure_of,
    weights_of,
    write_own,
)
from whet.models.sharded import Sharding
from whet.tables import loaded_files
from whet.track.files import atomic_folder
from whet.track.lanes import RANKS, Lane, Told
from whet.track.timeline import Timeline, clock
from whet.training import parts
from whet.training.balance import Dealt, deal, together
from whet.training.engine import FullKl, Want
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.rank import RankHandshake, Role
from whet.training.sums import Sums
from whet.training.torch import TorchEngine
from whet.types import CheckpointError, ConfigError, Metrics, WhetError

T = TypeVar("T")

_ERRORS = {e.__name__: e for e in (CheckpointError, ConfigError, WhetError)}
MODULE = "whet.training.rank"
"""What the processes run."""
_GRACE_S = 2.0
"""After the first failure the others have so long to say theirs: who died is told before who waited for them."""


class Ranks:
    """The rank processes. Close them at the end; they also end with the driver's process."""

    def __init__(
        self,
        dims: Dims,
        *,
        whose: str = "",
        first_gpu: int = 0,
        sharding: Sharding | None = None,
        device: str = "cpu",
        threads: int = 1,
        timeout_s: float = 600.0,
        imports: Sequence[str] = (),
        open_lines: OpenLines | None = None,
    ) -> None:
        """whose: the model that they are named after, where the policy is elsewhere. first_gpu: GPU of the first rank;
        the others' follow. threads: of each rank. timeout_s: longest time without a message from any rank. imports:
        user code that a rank needs. open_lines: starts the processes, if not on this machine. Errors: ConfigError where
        there are fewer devices than ranks."""
        if device == "cuda" and open_lines is None and torch.cuda.device_count() < first_gpu + dims.world:
            own = f" of the {whose} (train.parallel.separate_ranks)" if whose else ""
            before = f", beside {first_gpu} for other models" if first_gpu else ""
            raise ConfigError(
                f"train.parallel: {dims.world} ranks{own} need one GPU each{before}, but this machine has "
                f"{torch.cuda.device_count()}"
            )
        from torch.distributed import TCPStore

        self.whose = whose
        self.dims, self.sharding, self.timeout_s = dims, sharding or Sharding(), timeout_s
        self.beat: Callable[[str], object] = lambda what: None
        self.doing = ["starting"] * dims.world
        self.lock = threading.Lock()
        self.lanes: list[Lane] = []
        self._asked_ns = [0] * dims.world
        """When each was last told something."""
        self._stop, self._stopper = Pipe(duplex=False)
        self.lines = (open_lines or partial(Local, module=MODULE, first_gpu=first_gpu))(dims.world, threads)
        self._end = weakref.finalize(self, end, self.lines)
        listener = socket.create_server((self.lines.host, 0))
        port = listener.getsockname()[1]
        self.store = TCPStore(
            self.lines.host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        for rank, line in enumerate(self.lines.lines):
            self._tell(rank, RankHandshake(
                rank, dims, device, "nccl" if device == "cuda" else "gloo", self.lines.host,
                port, line.address, line.gpu, threads, timeout_s, (*imports, *loaded_files()), whose,
            ))  # fmt: skip
        with self.lock:
            self._answers(None)

    def ask(
        self,
        command: str,
        *arguments: object,
        each: Sequence[tuple[object, ...]] | None = None,
        tensor: Callable[[Any, Tensor], object] | None = None,
    ) -> list[Any]:
        """The answers of all ranks. each: arguments after the first, rank by rank. tensor: receives the tensors that
        the ranks send."""
        with self.lock:
            if not self._end.alive:
                raise WhetError(f"the ranks are closed and cannot run {command}")
            said = f"{command} {arguments[0] if arguments else ''}".strip()
            for rank in range(self.dims.world):
                self.doing[rank] = said
                further = () if each is None else each[rank]
                self._tell(rank, (command, *arguments, *further))
            return self._answers(tensor)

    def show_on(self, timeline: Timeline, *, micro_batches: bool) -> None:
        """From now on each rank has a lane there. micro_batches: with every one of them."""
        whose, near = f"{self.whose} " if self.whose else "", self.lines.near
        self.lanes = [
            Lane(timeline, f"{whose}rank {n}", of=f"{whose}{RANKS}", near=near, waits="wait for a command")
            for n in range(self.dims.world)
        ]
        if micro_batches:
            self.ask("detail")

    def give_up(self) -> None:
        """To call from another thread: ends the ranks; the waiting caller gets WhetError, now or at the next `ask`."""
        self._stopper.send(None)

    def close(self) -> None:
        """End the processes and wait until they have ended."""
        self._end()
        for lane in self.lanes:
            lane.end()

    # -- inside

    def _tell(self, rank: int, message: object) -> None:
        self._asked_ns[rank] = clock()
        connection = self.lines.lines[rank].connection
        try:
            bound(connection, self.timeout_s)
            connection.send_bytes(pickle.dumps(message, protocol=5))
        except BlockingIOError:
            raise self._silent([rank]) from None
        except OSError:
            raise self._failed({}) from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise WhetError(
                f"a message to the ranks ({self.doing[rank]}) cannot be pickled: {error}; losses, and what publishes "
                "weights, must be module-level functions, or functools.partial of such functions"
            ) from error

    def _answers(self, tensor: Callable[[Any, Tensor], object] | None) -> list[Any]:
        answers: dict[int, Any] = {}
        heard = time.monotonic()
        while len(answers) < self.dims.world:
            open_ = {line.connection: r for r, line in enumerate(self.lines.lines) if r not in answers}
            ready = wait([*open_, self._stop], timeout=max(0.0, heard + self.timeout_s - time.monotonic()))
            if not ready:
                raise self._silent([r for r in range(self.dims.world) if r not in answers])
            if self._stop in ready:
                self.close()
                raise WhetError(f"the ranks, {self._of_all()}, were stopped while doing: {self.doing[0]}")
            heard = time.monotonic()
            for connection in ready:
                rank = open_[connection]  # type: ignore[index]
                kind, *rest = self.hear(rank)
                if kind == "beat":
                    self.doing[rank] = f"{self.doing[rank].split(' (')[0]} ({rest[0]})"
                    self.beat(rest[0])
                elif kind == "tensor":
                    if tensor is not None:
                        tensor(rest[0], rest[1])
                elif kind == "done":
                    answers[rank] = rest[0]
                    self._note(rank, rest[1])
                else:
                    raise self._failed({rank: rest})
        return [answers[r] for r in range(self.dims.world)]

    def _note(self, rank: int, told: Told) -> None:
        if self.lanes:
            self.lanes[rank].take(told, self._asked_ns[rank])

    def hear(self, rank: int) -> tuple[Any, ...]:
        """The next message of a rank."""
        try:
            return pickle.loads(self.lines.lines[rank].connection.recv_bytes())  # type: ignore[no-any-return]
        except BlockingIOError:  # in the middle of a message
            raise self._silent([rank]) from None
        except (EOFError, OSError):
            return ("failed", "", "", "")

    def _failed(self, told: dict[int, list[str]]) -> WhetError:
        """The error of ranks that failed; a dead one is the cause of what the others say."""
        until = time.monotonic() + _GRACE_S
        rank_of = {line.connection: r for r, line in enumerate(self.lines.lines)}
        while time.monotonic() < until and not self._dead():
            for connection in wait(list(rank_of), timeout=0.1):
                rank = rank_of[connection]  # type: ignore[index]
                kind, *rest = self.hear(rank)
                if kind == "failed" and rest[2]:
                    told.setdefault(rank, rest)
        dead = self._dead()
        own = {r: t for r, t in told.items() if t[2] and r not in dead}
        try:
            if known := [t for t in own.values() if t[0]]:
                return _ERRORS.get(known[0][0], WhetError)(known[0][1])
            if dead:
                rank, how = next(iter(dead.items()))
                doing = f"{self.doing[rank]}; {GO_ON}{self._stack(rank)}"
                return WhetError(f"{self._who(rank)} died ({how}) while doing: {doing}")
            rank, (_, _, trace) = next(iter(own.items()), (0, ("", "", "no word")))
            return WhetError(f"{self._who(rank)} failed while doing: {self.doing[rank]}\n{trace}")
        finally:
            self.close()

    def _silent(self, silent: Sequence[int]) -> WhetError:
        """The error of ranks that were not heard of in time: it names the one that the others wait for."""
        for rank in silent:
            self.lines.lines[rank].dump()
        time.sleep(0.5)
        with ThreadPoolExecutor(len(silent)) as at_once:
            seen = dict(zip(silent, at_once.map(self._seen, silent)))
        self.close()
        since = f"no rank sent a message for {self.timeout_s:g} s (train.parallel.timeout_s)"
        return WhetError(blame(seen, since, kind="rank", of=self._of_all()))

    def _of_all(self) -> str:
        return f"{self.dims.world}" + (f" of the {self.whose}" if self.whose else "")

    def _who(self, rank: int) -> str:
        return f"rank {rank} of {self._of_all()}"

    def _seen(self, rank: int) -> Seen:
        line = self.lines.lines[rank]
        state = line.state()
        return Seen(self.doing[rank], state, "" if state == UNSEEN else line.stack())

    def _dead(self) -> dict[int, str]:
        """How those ended that did so before they were asked to; those that had an error to tell are none."""
        found = {r: line.died() for r, line in enumerate(self.lines.lines)}
        return {r: how for r, how in found.items() if how}

    def _stack(self, rank: int) -> str:
        """The last stack that a rank wrote."""
        text = self.lines.lines[rank].stack()
        return f"\n{text}" if text else ""


class RankGroup:
    """Policy, reference or critic on the ranks."""

    def __init__(
        self,
        ranks: Ranks,
        role: str,
        model: PreTrainedModel,
        *,
        cut: MicroBatchPolicy,
        kernels: Kind = "auto",
        value_head: nn.Linear | None = None,
        sharded: bool = False,
        dims: Dims | None = None,
        chunks: int = 1,
        sharding: Sharding | None = None,
        home: Path | None = None,
        weights: Path | None = None,
        **arguments: Any,
    ) -> None:
        """model: whole; the role `policy` keeps it up to date, of others the ranks alone have the weights afterwards.
        weights: the folder that has them (`published.write_own`), where the model is without values; with `home`.
        sharded: each rank saves the parts that it holds. dims, sharding: other than the ranks' own.
        chunks: parts of the layers on each rank of pp. home: nothing in this process needs the policy while it is
        trained: the first update frees its memory here, and `module` maps it by way of this folder. arguments: further
        ones of TorchEngine."""
        self.dims = dims or ranks.dims
        if self.dims.world != ranks.dims.world:
            raise ConfigError(
                f"{role}: its layout has {self.dims.world} ranks, but {ranks.dims.world} ranks are running"
            )
        self.ranks, self.role, self.cut, self.version = ranks, role, cut, 0
        self.sharded, self.apart, self.machine = sharded, True, ranks.lines.lines[0].machine
        self.home = home if role == "policy" else None
        self._gone = weights is not None
        if sharded and not ranks.lines.near:
            raise ConfigError(
                "checkpoint.sharded=true, but ranks on other machines do not see the checkpoint's folder; set it false"
            )
        self.device = next(model.parameters()).device
        self.drops = any(layer.dropout for layer in adapted(model).values())
        self.full_kl: FullKl | None = None
        self.beat: Callable[[str], object] = lambda what: None
        self.span: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        self._replaced = False
        """All weights on the ranks, those that do not learn among them, may differ from the module's."""
        skeleton = structure_of(model)
        self._module, self._stale = model if role == "policy" else skeleton, self._gone
        described = Role(
            skeleton,
            "",
            copy.deepcopy(value_head),
            kernels,
            self.dims,
            chunks,
            sharding or ranks.sharding,
            {"cut": cut, **arguments},
        )
        with OwnFolder("ranks") as folder:
            if weights is None:
                weights = folder / role
                write_own(weights, weights_of(model))
            with ranks.lines.carried(weights) as there:
                self._ask("open", each=[(replace(described, weights=path),) for path in there])

    @property
    def module(self) -> PreTrainedModel:
        """The policy's whole model in this process, brought up to date when asked for; of others, its structure."""
        if self._stale and self.role == "policy":
            with self.span("gather weights"), torch.no_grad():
                if self.home is None:
                    own = dict(learned(self._module))
                    self._ask("pull", self._replaced, tensor=lambda name, x: own[name].copy_(x))
                else:
                    self.write_weights(self.home)
                    bring_back(self._module, self.home, self.device)
                    self._gone = False
            refresh(self._module)
        self._stale = self._replaced = False
        return self._module

    # -- the seam

    @property
    def structure(self) -> PreTrainedModel:
        return self._module

    def forward(self, batch: Batch, want: Want) -> Tensor:
        where = batch.mask_N.device
        batch = batch.to("cpu")
        dealt = self._deal(batch, learns=False)
        with self.span(f"forward {want}"):
            answers = self._ask("forward", each=[(part, want) for part in self._by_rank(dealt)])
        said = [answers[self._speaker(number)] for number in range(len(dealt))]
        return together(batch, dealt, said).to(where)

    def update(self, batch: Batch, loss: LossFn) -> Metrics:
        kl, full_kl = self.full_kl, None
        if kl is not None:
            full_kl = kl.coef, kl.reference.role, kl.of  # type: ignore[attr-defined]
        dealt = self._deal(batch.to("cpu"), learns=True)
        with self.span("update"):
            answers = self._ask("update", each=[(part, loss, full_kl) for part in self._by_rank(dealt)])
        if self.home is not None and not self._gone:
            let_go(self._module)
            self._gone = True
        self._stale = True
        sums = Sums()
        for number in range(self.dims.dp):
            sums.join(answers[self._speaker(number)][0])
        return {**sums.means(), **answers[0][1]}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in merged(self.module).named_parameters():
            yield name, p.detach()

    def publish(self, send: Send[T], *, there: bool = False) -> T:
        if self.machine is not None and not there:
            return send(weights_of(self.module))
        with self.span("publish weights"):
            return self._publish(send)

    def _publish(self, send: Send[T]) -> T:
        return self._ask("publish", send, adapters_of(self._module))[0]  # type: ignore[no-any-return]

    def write_weights(self, folder: Path) -> None:
        with atomic_folder(folder, durable=False) as new, self.ranks.lines.brought(new) as there:
            self._publish(partial(write_own, there))

    def call(self, function: Callable[[], T]) -> T:
        with self.span("send weights"):
            return self._ask("call", function)[0]  # type: ignore[no-any-return]

    def save(self, path: Path, *, moments: bool = True) -> None:
        if self.sharded:
            parts.hold(self._ask, moments=moments, copy=False)(path)
        else:
            with self.ranks.lines.brought(path) as there:
                self._ask("save", str(there), moments)

    def capture(self, *, moments: bool = True) -> Callable[[Path], None]:
        """A copy of all that `save` writes (in this process, or sharded on the ranks), and the function that writes
        it."""
        if self.sharded:
            return parts.hold(self._ask, moments=moments, copy=True)
        copied: dict[tuple[str, str], Tensor] = {}
        about = self._ask("capture", moments, tensor=copied.__setitem__)[0]

        def write(path: Path) -> None:
            path.mkdir(parents=True, exist_ok=True)
            for file, metadata in about.items():
                tensors = {name: t for (of, name), t in copied.items() if of == file}
                save_file(tensors, path / file, metadata=metadata)

        return write

    def load(self, path: Path) -> None:
        self._load(path)

    def _load(self, path: Path, share: float = 1.0, version: int = 0) -> None:
        with self.ranks.lines.carried(path) as there:
            self._ask("load", each=[(each, share, version) for each in there])
        self._stale = self._replaced = True

    def copy_from(self, other: RankGroup | TorchEngine, share: float = 1.0) -> None:
        """Take another model's weights, or this share of them; through this process, if it is in other ones."""
        if isinstance(other, RankGroup) and other.ranks is self.ranks:
            self._ask("copy", other.role, share, other.version)
            self._stale = self._replaced = True
            return
        theirs = learned(other.module) if adapted(self._module) else other.weights()
        with OwnFolder("ranks") as folder:
            tensors = {name: x.detach().cpu().contiguous() for name, x in theirs}
            own = {name for name, _ in learned(self._module)}
            save_file({n: x for n, x in tensors.items() if n in own}, folder / "model.safetensors")
            self._load(folder, share, other.version)

    def forget(self) -> None:
        self._ask("forget")

    def place(self, device: Literal["gpu", "cpu"]) -> None:
        if (device == "gpu") != (self.device.type == "cuda"):
            raise WhetError(
                "ranks cannot move their weights to another device; leave train.parallel at 1 to share a device"
            )

    # -- inside

    def _ask(self, command: str, *arguments: object, **how: Any) -> list[Any]:
        self.ranks.beat = self.beat
        return self.ranks.ask(command, self.role, *arguments, **how)

    def _deal(self, batch: Batch, *, learns: bool) -> list[Dealt]:
        return deal(batch, self.dims.dp, self.cut.limits(learns=learns))

    def _by_rank(self, dealt: list[Dealt]) -> list[Dealt]:
        return [dealt[self.dims.part_of(rank)] for rank in range(self.dims.world)]

    def _speaker(self, part: int) -> int:
        """A rank that has this part of the batch, and the end of the layers."""
        return next(r for r in reversed(range(self.dims.world)) if self.dims.part_of(r) == part)
