"""Processes on any machine of the cluster that work for this one: ranks, reward workers, explorers. An actor starts the
same process as `guard.line.LocalLine`, on the machine that Ray has chosen, and carries messages between that process
and the driver."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from whet import secrets
from whet.cluster.nodes import answered, end_actor, environment_of, first_line, node_id
from whet.guard import stacks
from whet.guard.hangs import UNSEEN
from whet.guard.line import LOOPBACK, LocalLine
from whet.guard.processes import LOOK_S, die_with, process, state, until
from whet.guard.temporary import OwnFolder
from whet.types import ConfigError, WhetError

AT_ONCE_BYTES = 64 << 20
"""Messages that have come are carried together up to so much."""
CHUNK_BYTES = 16 << 20
"""Of a file on its way to another machine."""
CARRY_S = 300.0
"""Longest time of one such piece to all machines."""
ASK_S = 10.0
"""Longest wait for an answer that only names what went wrong."""
END_S = 1.0
"""What an idle process has to end by itself."""


@dataclass(frozen=True)
class Where:
    """A process, and the one of the actor that has started it."""

    node: str
    folder: str
    """Of the actor's own, on its machine."""
    address: str
    actor: tuple[int, int]
    process: tuple[int, int]


class RemoteEnd:
    """The far end of a `RayLine`, beside the process."""

    def __init__(
        self,
        module: str,
        number: int,
        *,
        threads: int,
        folder: str | None,
        paths: Sequence[str],
        node: str,
        driver: tuple[int, int],
        stacks_at: str | None,
        known: Mapping[str, str],
    ) -> None:
        """folder: where files of the user's are found. paths: where modules are. node, driver: the driver's. stacks_at:
        where processes on its machine write their stacks. known: the driver's secrets, which nobody may print."""
        secrets.learn_all(known)
        secrets.guard_output()
        die_with(None)
        sys.path += [path for path in paths if path not in sys.path]
        if folder is not None:
            os.chdir(folder)
        self._own = OwnFolder("processes")
        self.folder = self._own.path
        if node != node_id():
            stacks_at = str(self.folder / "stacks")
            os.mkdir(stacks_at)
        if stacks_at is not None:
            stacks.listen(f"beside-{module.rpartition('.')[2]}-{number}", stacks_at)
        self.line = LocalLine(module, number, folder=self.folder, threads=threads)
        if node == node_id():
            threading.Thread(target=self._follow, args=(driver,), daemon=True).start()

    def _follow(self, driver: tuple[int, int]) -> None:
        """Ray would tell the actor to end; here nobody has to listen for it."""
        while process(driver[0]) == driver:
            time.sleep(LOOK_S)
        self.line.kill()
        os._exit(1)

    def where(self) -> Where:
        address = ray.util.get_node_ip_address()
        return Where(
            node_id(), str(self.folder), address, process(os.getpid()), process(self.line.process.pid)
        )

    def tell(self, message: bytes) -> None:
        with suppress(OSError):  # it has gone: `hear` says so
            self.line.connection.send_bytes(message)

    @ray.method(concurrency_group="hear")
    def hear(self) -> tuple[list[bytes], bool, str | None]:
        """What it has said since; whether that was all; and how it ended, as `Line.died` has it."""
        messages: list[bytes] = []
        connection = self.line.connection
        try:
            messages.append(connection.recv_bytes())
            while sum(map(len, messages)) < AT_ONCE_BYTES and connection.poll(0):
                messages.append(connection.recv_bytes())
            return messages, False, None
        except (EOFError, OSError):
            with suppress(Exception):
                self.line.process.wait(ASK_S)
            return messages, True, self.line.died()

    @ray.method(concurrency_group="watch")
    def state(self) -> str:
        return self.line.state()

    @ray.method(concurrency_group="watch")
    def dump(self) -> None:
        self.line.dump()

    @ray.method(concurrency_group="watch")
    def stack(self) -> str:
        return self.line.stack()

    @ray.method(concurrency_group="watch")
    def stacks(self) -> str:
        """Of the process and all that it has started; for one that is not on the driver's machine."""
        return stacks.others()

    @ray.method(concurrency_group="watch")
    def put(self, name: str, chunk: bytes | None) -> None:
        """Write more of a file into the folder of its own; None: begin with it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb" if chunk is None else "ab") as file:
            file.write(chunk or b"")

    @ray.method(concurrency_group="watch")
    def files(self, name: str) -> list[str]:
        """Those of a folder in the folder of its own, by their paths in it."""
        folder = self.folder / name
        return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]

    @ray.method(concurrency_group="watch")
    def read(self, name: str, start: int) -> bytes:
        """A file from there on, up to `CHUNK_BYTES` of it."""
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            return file.read(CHUNK_BYTES)

    @ray.method(concurrency_group="watch")
    def drop(self, name: str) -> None:
        path = self.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    @ray.method(concurrency_group="watch")
    def end(self) -> None:
        """End the process; an idle one has heard that it is over."""
        with suppress(OSError):
            socket.socket(fileno=os.dup(self.line.connection.fileno())).shutdown(socket.SHUT_RDWR)
        until(self.line.gone, END_S)
        self.line.kill()
        self._own.close()


class RayLine:
    """A process in the cluster, as seen by its driver: two threads carry messages between a local socket pair and the
    actor."""

    gpu = 0
    """Ray shows it no other."""

    def __init__(self, actor: Any, where: Where) -> None:
        self.actor, self.where, self.address = actor, where, where.address
        self.machine = None if where.node == node_id() else where.node
        ours, self._theirs = socket.socketpair()
        self.connection, self._far = Connection(ours.detach()), Connection(os.dup(self._theirs.fileno()))
        self._died: str | None = None
        self._ending: Any = None
        self._carriers = [
            threading.Thread(target=f, name="whet-line", daemon=True) for f in (self._out, self._in)
        ]
        for carrier in self._carriers:
            carrier.start()
        self.who = f"process {where.process[0]} at {where.address}"
        if self.machine is not None:
            stacks.reach(self.who, lambda: answered(actor.stacks.remote()))

    def _out(self) -> None:
        with suppress(EOFError, OSError, RayError):
            while True:
                self.actor.tell.remote(self._far.recv_bytes())

    def _in(self) -> None:
        try:
            over = False
            while not over:
                messages, over, self._died = ray.get(self.actor.hear.remote())
                for message in messages:
                    self._far.send_bytes(message)
        except RayError as error:
            self._died = f"lost with its machine or its actor: {first_line(error)}"
        except OSError:
            pass  # the driver has hung up
        finally:
            self._theirs.shutdown(socket.SHUT_RDWR)

    def died(self) -> str | None:
        return self._died

    def state(self) -> str:
        if self.machine is None:
            return state(self.where.process[0])
        try:
            return str(ray.get(self.actor.state.remote(), timeout=ASK_S))
        except RayError:
            return UNSEEN

    def dump(self) -> None:
        self.actor.dump.remote()

    def stack(self) -> str:
        try:
            return str(ray.get(self.actor.stack.remote(), timeout=ASK_S))
        except RayError as error:
            return f"(no stack: {first_line(error)})"

    def hang_up(self) -> None:
        stacks.lose(self.who)
        self.connection.close()
        if self._ending is None and ray.is_initialized():  # else all have ended with the cluster
            self._ending = self.actor.end.remote()

    def gone(self) -> bool:
        return self._ending is None or bool(ray.wait([self._ending], timeout=0)[0])

    def kill(self) -> None:
        if self._ending is None:
            return
        ray.wait([self._ending], timeout=2 * END_S)  # the actor itself kills one that does not listen
        end_actor(self.actor, self.where.node, (self.where.actor, self.where.process))
        self._carriers[1].join(END_S)


class Far:
    """Processes in the cluster: a bundle of the placement group each."""

    def __init__(
        self,
        count: int,
        threads: int,
        *,
        module: str,
        group: PlacementGroup,
        folder: str | None,
        start_timeout_s: float,
    ) -> None:
        """Raises ConfigError if they are not up in time."""
        self.module, self.group, self.own = module, group, node_id()
        self.threads, self.folder, self.start_timeout_s = threads, folder, start_timeout_s
        self.lines: list[RayLine] = []
        actors = [self._actor(number) for number in range(count)]
        places = self._up(actors)
        self.near = all(place.node == self.own for place in places)
        self.host = LOOPBACK if self.near else ray.util.get_node_ip_address()
        self.lines = [RayLine(actor, place) for actor, place in zip(actors, places)]
        if self.near:
            for line in self.lines:
                line.address = LOOPBACK

    def again(self, number: int) -> RayLine:
        """Another process in the place of one that has ended."""
        self.lines[number].hang_up()
        self.lines[number].kill()
        actor = self._actor(number)
        self.lines[number] = RayLine(actor, *self._up([actor]))
        return self.lines[number]

    def _up(self, actors: Sequence[Any]) -> list[Where]:
        try:
            return list(ray.get([a.where.remote() for a in actors], timeout=self.start_timeout_s))
        except RayError as error:
            for actor in actors:
                ray.kill(actor)
            raise ConfigError(
                f"{len(actors)} processes of {self.module} did not start within "
                f"cluster.start_timeout_s={self.start_timeout_s:g} s: {first_line(error)}. Raise "
                "cluster.start_timeout_s if they only load slowly"
            ) from None

    def _actor(self, number: int) -> Any:
        needs = self.group.bundle_specs[number]
        options: dict[str, Any] = {
            "num_cpus": needs.get("CPU", 0),
            "num_gpus": needs.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=number
            ),
            "runtime_env": {"env_vars": environment_of(self.threads)},
        }
        driver = process(os.getpid())
        remote: Any = ray.remote
        host = remote(max_restarts=0, concurrency_groups={"hear": 1, "watch": 1})(RemoteEnd)
        return host.options(**options).remote(
            self.module,
            number,
            threads=self.threads,
            folder=self.folder,
            paths=[path for path in sys.path if path],
            node=self.own,
            driver=driver,
            stacks_at=stacks.folder(),
            known=secrets.known(),
        )

    @contextmanager
    def carried(self, path: Path) -> Iterator[list[str]]:
        """Machines other than this one get a copy of their own."""
        far = {line.machine: line for line in self.lines if line.machine is not None}

        def drop() -> None:
            for line in far.values():
                line.actor.drop.remote(path.name)

        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        try:
            for file in files if far else ():
                name = str(file.relative_to(path.parent))
                ray.get([line.actor.put.remote(name, None) for line in far.values()], timeout=CARRY_S)
                with file.open("rb") as content:
                    while chunk := content.read(CHUNK_BYTES):
                        one = ray.put(chunk)
                        ray.get([line.actor.put.remote(name, one) for line in far.values()], timeout=CARRY_S)
        except RayError as error:
            drop()
            raise WhetError(
                f"{path} could not be copied to the machines of {self.module}: {first_line(error)}"
            ) from error
        try:
            folders = [path.parent if x.machine is None else far[x.machine].where.folder for x in self.lines]
            yield [str(Path(folder) / path.name) for folder in folders]
        finally:
            drop()

    @contextmanager
    def brought(self, path: Path) -> Iterator[Path]:
        """In pieces: this process has little of it at a time."""
        line = self.lines[0]
        if line.machine is None:
            yield path
            return
        there, ask = f"brought/{path.name}", line.actor
        try:
            yield Path(line.where.folder) / there
            for name in ray.get(ask.files.remote(there), timeout=CARRY_S):
                own = path / name
                own.parent.mkdir(parents=True, exist_ok=True)
                with own.open("wb") as file:
                    while chunk := ray.get(ask.read.remote(f"{there}/{name}", file.tell()), timeout=CARRY_S):
                        file.write(chunk)
        except (RayError, OSError) as error:
            raise WhetError(
                f"{path} could not be brought from the machine of {self.module}: {first_line(error)}"
            ) from error
        finally:
            ask.drop.remote(there)

    def close(self) -> None:
        remove_placement_group(self.group)
