"""An inference server that the run starts: a child process, which is found dead, ended and started again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from whet.guard.line import LOOPBACK, LocalLine
from whet.guard.temporary import OwnFolder
from whet.rollout.http.calls import Call, Calls
from whet.rollout.http.keeper import end_group
from whet.rollout.http.supported import VERSION, reachable
from whet.types import ConfigError, Json, WhetError

log = logging.getLogger(__name__)

KEEPER = "whet.rollout.http.keeper"
GRACE_S = 10.0
"""For a server to end by itself."""
LOOK_S = 0.2
LAST_LINES = 15
"""Of its log, that an error has."""


class ServerProcess:
    """One server. log: where it prints."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self.command, self.log = list(command), log
        self._own = OwnFolder("engine")
        self._begins = log.stat().st_size if log.exists() else 0
        self.pid: int | None = None
        self._end = ""
        """How it ended; empty: it lives."""
        self._line = LocalLine(KEEPER, 0, folder=self._own.path, threads=os.cpu_count() or 1)
        order = {"command": self.command, "env": dict(env), "log": str(log)}
        self._line.connection.send_bytes(json.dumps(order).encode())

    def ended(self) -> str:
        """How it ended; empty: it lives."""
        connection = self._line.connection
        try:
            while not self._end and connection.poll():
                self._hear(json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            self._end = (
                self._end or f"the process that keeps it ended: {self._line.died() or 'exit status 1'}"
            )
            if self.pid is not None:
                end_group(self.pid)
        return self._end

    def _hear(self, said: Json) -> None:
        if "pid" in said:
            self.pid = said["pid"]
        elif "error" in said:
            self._end = f"it could not be started: {said['error']}"
        else:
            status = said["ended"]
            self._end = f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    async def ready(
        self, calls: Calls, *, timeout_s: float, beat: Callable[[str], object], what: Call = VERSION
    ) -> None:
        """Until it answers. Raises WhetError, with the end of its log, if it ends before that or takes too long."""
        began = time.monotonic()
        while self.pid is None or not await reachable(calls, what):
            if how := self.ended():
                raise WhetError(f"{self.command[0]}: {how}\n{self.tail()}")
            if time.monotonic() - began > timeout_s:
                raise WhetError(
                    f"{self.command[0]} does not answer after rollout.server.start_timeout_s={timeout_s:g} s\n"
                    f"{self.tail()}"
                )
            beat("starting the engine server")
            await asyncio.sleep(LOOK_S)

    def tail(self) -> str:
        """The end of what it has printed."""
        if not self.log.exists():
            return f"{self.log}: nothing was printed"
        with self.log.open("rb") as file:
            file.seek(min(self._begins, self.log.stat().st_size))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join([f"the end of {self.log}:", *lines[-LAST_LINES:]])

    async def stop(self) -> None:
        """End it and all that it has started. Safe to call twice."""
        if not self._line.connection.closed:
            try:
                self._line.connection.send_bytes(json.dumps({"end": GRACE_S / 2}).encode())
            except OSError:
                log.debug("the keeper of %s has ended", self.command[0])
            until = time.monotonic() + GRACE_S
            while not self.ended() and time.monotonic() < until:
                await asyncio.sleep(LOOK_S / 4)
            self._line.hang_up()
            until = time.monotonic() + GRACE_S
            while not self._line.gone() and time.monotonic() < until:
                await asyncio.sleep(LOOK_S / 4)
            self._line.kill()
            if self.pid is not None:
                end_group(self.pid)
        self._own.close()


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        return int(one.getsockname()[1])


OWN_OPTIONS = (
    "host", "port", "model", "dtype", "max-model-len", "tokens-only", "logprobs-mode", "load-format",
    "generation-config", "api-key",
)  # fmt: skip
"""Options of vllm serve that whet sets."""
RULED_OUT = {
    "speculative-config": "the draft model of speculative decoding gets no new weights",
    "weight-transfer-config": "its ways (nccl, ipc and others) need GPUs on both sides, and none was seen running with "
    "whet: weights go through a folder (rollout.server.weights_dir; in /dev/shm it is memory)",
}
"""Options that whet cannot be used with, and why."""


def arguments(
    options: Mapping[str, Json], *, own: Collection[str] = OWN_OPTIONS, negates: bool = True
) -> list[str]:
    """`rollout.server.options` as arguments of a command. Raises ConfigError for one that whet sets (`own`), or that
    does not go with it.

    negates: the command has a --no- form of an option without a value; without one, false is as if it was left out.
    """
    found: list[str] = []
    for name, value in options.items():
        plain = name.replace("_", "-").removeprefix("--")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9.-]*", plain):
            raise ConfigError(
                f"rollout.server.options: {name!r} is not the name of an option; expected a table such as "
                "{enforce-eager: true}, with a space after each colon"
            )
        if plain in own:
            raise ConfigError(f"rollout.server.options.{name} is set by whet; leave it out")
        if plain in RULED_OUT:
            raise ConfigError(
                f"rollout.server.options.{name} cannot be used: {RULED_OUT[plain]}; leave it out"
            )
        if value is True:
            found.append(f"--{plain}")
        elif value is False:
            found += [f"--no-{plain}"] if negates else []
        elif isinstance(value, list | tuple):
            found += [f"--{plain}", *map(str, value)]
        elif isinstance(value, dict):
            found += [f"--{plain}", json.dumps(value)]
        elif value is not None:
            found += [f"--{plain}", str(value)]
    return found
