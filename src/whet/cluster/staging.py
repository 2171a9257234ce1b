"""Where ranks write weights for replicas, and the actor of that machine that puts them into Ray's object store: this
process has references alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from whet import secrets
from whet.cluster.nodes import environment_of, first_line, node_id
from whet.guard.processes import die_with, process
from whet.guard.temporary import OwnFolder
from whet.sync.files import Files
from whet.sync.scratch import scratch
from whet.sync.transport import flatten
from whet.types import WhetError

OPEN_S = 120.0
"""Longest wait for the actor on another machine."""
CLOSE_S = 5.0


class StagingActor:
    """Reads versions on its machine. known: the driver's secrets, which nobody may print."""

    def __init__(self, driver: tuple[int, int] | None, known: Mapping[str, str]) -> None:
        secrets.learn_all(known)
        secrets.guard_output()
        die_with(driver)
        self.own: OwnFolder | None = None

    def open(self, size: int) -> Path:
        """A folder for so many bytes."""
        self.own = scratch(Path(tempfile.gettempdir()), size=size)
        return self.own.path

    def put(self, folder: Path, version: int, names: Sequence[str]) -> tuple[np.ndarray, None]:
        """Tensors of a version, as one array; and a sign that it was read."""
        pieces = Files(folder, timeout_s=0.0).receive(version)
        found = {entry.name: tensor for entry, tensor in pieces if tensor is not None and entry.name in names}
        return flatten([found[name] for name in names]).numpy(), None

    def close(self) -> None:
        if self.own is not None:
            self.own.close()


class RayStaging:
    """See `sync.replicas.Staging`. The folder of this machine is this process's, and has an actor once a replica of
    another machine needs what is in it; on another machine the actor has the folder."""

    def __init__(self, machine: str | None, size: int, *, disk: Path, timeout_s: float) -> None:
        """disk: where the folder of this machine is if its memory has no room. timeout_s: for one `put`."""
        self.machine, self.timeout_s = machine, timeout_s
        self.actor: Any = None
        """None while this process needs none."""
        self._own: OwnFolder | None = None
        if machine is None:
            self._own = scratch(disk, size=size)
            self.path = self._own.path
        else:
            self.actor = _started(machine)
            try:
                self.path = ray.get(self.actor.open.remote(size), timeout=OPEN_S)
            except RayError as error:
                raise WhetError(
                    f"no folder for weights on the machine of the ranks: {first_line(error)}"
                ) from error

    def put(self, version: int, names: Sequence[str]) -> Any:
        if self.actor is None:
            self.actor = _started(node_id(), driver=process(os.getpid()))
        put = self.actor.put.options(num_returns=2)
        reference, read = put.remote(self.path, version, tuple(names))
        try:
            ray.get(read, timeout=self.timeout_s)
        except RayTaskError as error:
            raise WhetError(f"weights version {version} could not be read: {error.cause!r}") from error
        except GetTimeoutError as error:
            raise WhetError(
                f"weights version {version} was not read within sync.timeout_s={self.timeout_s:g}"
            ) from error
        except RayError as error:
            if self._own is not None:
                self.actor = None  # another can read the same folder
            raise WhetError(
                f"weights version {version}: the process that reads it has ended: {first_line(error)}"
            ) from error
        return reference

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
        if self.actor is not None and ray.is_initialized():
            ray.wait([self.actor.close.remote()], timeout=CLOSE_S)
            ray.kill(self.actor)


def _started(machine: str, driver: tuple[int, int] | None = None) -> Any:
    """driver: this process, for an actor of this machine."""
    affinity = NodeAffinitySchedulingStrategy(machine, soft=False)
    remote: Any = ray.remote
    options = {
        "num_cpus": 0,
        "scheduling_strategy": affinity,
        "runtime_env": {"env_vars": environment_of(1)},
    }
    return remote(StagingActor).options(**options).remote(driver, secrets.known())
