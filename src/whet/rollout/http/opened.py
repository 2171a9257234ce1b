"""Engines that are servers (`rollout.engine: vllm`, `sglang`, `openai`): those of a config, given or started, behind
one `Router`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from whet import secrets
from whet.guard.line import LOOPBACK
from whet.rollout.engine import EngineInputs, RolloutEngine
from whet.rollout.http.calls import CallLimits, Calls
from whet.rollout.http.canary import BOUND, BOUNDS, Canary
from whet.rollout.http.installed import found
from whet.rollout.http.kinds import OPENAI, SGLANG, VLLM, Kind, Starting
from whet.rollout.http.process import ServerProcess, free_port
from whet.rollout.http.proxied import Proxied, ProxyCalls
from whet.rollout.http.published import Folder, write_weights
from whet.rollout.http.served import HttpEngine
from whet.rollout.http.supported import reachable
from whet.rollout.replica import Replica
from whet.rollout.router import Router
from whet.rollout.unasked import Unasked
from whet.track.files import RunLock, atomic_folder, holder
from whet.types import ConfigError, WhetError

log = logging.getLogger(__name__)

LOG = "engine.log"
LOOK_S = 0.5


class Opener:
    """Makes the replicas of a run, and makes them again."""

    def __init__(self, inputs: EngineInputs, kind: Kind = VLLM) -> None:
        self.inputs, self.server, self.kind = inputs, inputs.server, kind
        model = inputs.model
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        self.dtype = dtype
        bound = self.server.canary_bound or BOUNDS.get(dtype, BOUND)
        self.home = inputs.run_dir / "engine"
        given, self.adapters = self.server.weights_dir, self.server.lora == "adapter"
        self.folder = Folder(
            self.home if given is None else Path(given).absolute() / inputs.run_dir.relative_to(inputs.home),
            model=model,
            ops=inputs.ops,
            canary=Canary(bound, inputs.max_context),
            adapters=self.adapters,
        )
        self.limits = CallLimits(
            answer=self.server.timeout_s, load=inputs.load_timeout_s, reply=inputs.reply_timeout_s
        )
        self.token = self.server.token
        if self.token is not None:
            secrets.learn("rollout.server.token", self.token)
        behind = self.server.proxy is not None
        self.urls = {} if behind else {f"engine-{n}": url for n, url in enumerate(self.server.urls)}
        self.secret = self.home / "token.yaml"
        self._claims: list[RunLock] = []

    def claim(self) -> None:
        """Keep the given servers for this process, among all processes of a run. Raises ConfigError where another one
        has a server."""
        self._claims += (claimed(url, self.inputs.home) for url in self.server.urls)

    async def all(self) -> list[Replica]:
        """Those that the run begins with. They are asked next on another event loop."""
        replicas = list(await asyncio.gather(*map(self.replica, self.urls or ["engine-0"])))
        for replica in replicas:
            assert isinstance(replica.engine, HttpEngine)
            await replica.engine.calls.close()
        return replicas

    async def replica(self, name: str) -> Replica:
        """One, ready to be given weights. Raises WhetError if it does not come."""
        if self.server.proxy is not None:
            return await self._behind(name, self.server.proxy)
        if url := self.urls.get(name):
            return await self._given(name, url)
        if self.kind.command is None:
            raise ConfigError(
                f"rollout.engine={self.kind.name} starts no server; rollout.server.urls names one that runs already"
            )
        return await self._started(name)

    async def _given(self, name: str, url: str) -> Replica:
        engine = self._engine(Calls(url, limits=self.limits, token=self.token))
        try:
            await self._answers(engine.calls)
            await engine.open(sleeps=self.server.sleep)
        except BaseException:
            await engine.close()
            raise
        log.info("%s is %s, %s %s", name, url, self.kind.title, engine.program)
        return Replica(name, engine)

    async def _behind(self, name: str, proxy: str) -> Replica:
        """All given servers as one, for the proxy decides which of them a request goes to."""
        servers = [self._engine(Calls(url, limits=self.limits, token=self.token)) for url in self.server.urls]
        calls = ProxyCalls(proxy, [server.calls for server in servers], limits=self.limits, token=self.token)
        front = self._engine(calls)
        api = Proxied(front.api, calls.url, servers, self.folder)
        engine = HttpEngine(api, calls, vocab=front.vocab, max_context=front.max_context)
        try:
            await asyncio.gather(*(self._answers(server.calls) for server in servers))
            await engine.open(sleeps=self.server.sleep)
        except BaseException:
            await engine.close()
            raise
        log.info("%s is %s, a proxy before %s", name, proxy, ", ".join(self.server.urls))
        return Replica(name, engine)

    async def _answers(self, calls: Calls) -> None:
        """Wait for a server that runs already. Raises WhetError if it does not answer in time."""
        began = time.monotonic()
        while not await reachable(calls, self.kind.ready):
            if time.monotonic() - began > self.server.timeout_s:
                limit = f"rollout.server.timeout_s={self.server.timeout_s:g}"
                raise WhetError(f"{calls.url} does not answer within {limit} s; is the server running?")
            self.inputs.beat("waiting for the engine server")
            await asyncio.sleep(LOOK_S)

    async def _started(self, name: str) -> Replica:
        there, port = found(self.server.command, self.kind.name), free_port()
        path = self.inputs.run_dir / LOG
        process = ServerProcess(self.command(str(there.command), port), env=self.env(), log=path)
        engine = self._engine(Calls(f"http://{LOOPBACK}:{port}", limits=self.limits, token=self.token))

        async def end() -> None:
            await engine.close()
            await process.stop()

        try:
            await process.ready(
                engine.calls,
                timeout_s=self.server.start_timeout_s,
                beat=self.inputs.beat,
                what=self.kind.ready,
            )
            await engine.open(sleeps=self.server.sleep)
        except BaseException:
            await end()
            raise
        finally:
            self.secret.unlink(missing_ok=True)
        title = f"{self.kind.title} {engine.program}"
        log.info("%s is %s, process %s; it prints to %s", name, title, process.pid, path)
        return Replica(name, engine, end)

    def command(self, executable: str, port: int) -> list[str]:
        """What starts the server."""
        assert self.kind.command is not None
        return self.kind.command(
            Starting(
                executable=executable,
                port=port,
                model=self.model(),
                dtype=self.dtype,
                inputs=self.inputs,
                token=self.token,
                secret=self.secret,
            )
        )

    def model(self) -> Path:
        """A folder that transformers reads: the config of the model, and its weights as they are now. Other loaders
        than that of files could not take new weights later (vLLM refuses to reload with --load-format dummy)."""
        model, folder = self.inputs.model, self.home / "model"
        config = json.loads(model.config.to_json_string(use_diff=False))
        classes = [c.__name__ for c in type(model).__mro__]
        architectures = [name for name in classes if name.endswith(("ForCausalLM", "Generation"))][:1]
        config |= {"architectures": architectures, "eos_token_id": sorted(self.inputs.end_token_ids)}
        with atomic_folder(folder, durable=False) as new:
            (new / "config.json").write_text(json.dumps(config, indent=1))
            write_weights(model, new, base=self.adapters)
        return folder

    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in self.kind.env().items() if name not in os.environ}
        lora = self.kind.lora_env if self.adapters else {}
        return {**kept, **lora, **self.server.env, **self.kind.fixed(self.token)}

    def close(self) -> None:
        """Remove the weights, and let others have the given servers."""
        self.folder.close()
        for claim in self._claims:
            claim.release()

    def _engine(self, calls: Calls) -> HttpEngine:
        return self.kind.engine(self.inputs, self.folder, calls)


def claimed(url: str, home: Path) -> RunLock:
    """The lock of a given server. Two processes would load weights into it, and either would let it go on while the
    other one's are half there. Raises ConfigError where another process of the run has it."""
    folder = home / "servers" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    try:
        return RunLock(folder)
    except WhetError as error:
        if (by := holder(folder)) is None:
            raise
        raise ConfigError(
            f"rollout.server.urls: process {by[0]} on {by[1]} of this run has {url}; give each explorer, and a trainer "
            "that evaluates, servers of its own"
        ) from error


class Servers(Router):
    """A `Router` over servers, and the folder by which they get weights."""

    def __init__(self, opener: Opener, replicas: list[Replica], **how: Any) -> None:
        super().__init__(replicas, ship=opener.folder.ship, exact=False, **how)
        self.opener = opener

    async def close(self) -> None:
        await super().close()
        self.opener.close()


def opened(inputs: EngineInputs, kind: Kind) -> RolloutEngine:
    """All servers of one kind. Waits until they answer. Of a process that never samples: none."""
    if not inputs.asked:
        assert kind.can is not None, "nothing trains with it"
        return Unasked(kind.can(inputs.server.lora == "adapter"))
    opener, server = Opener(inputs, kind), inputs.server
    opener.folder.close()  # what a killed run has left
    try:
        opener.claim()
        replicas = asyncio.run(opener.all())
    except BaseException:
        opener.close()
        raise
    router = Servers(
        opener,
        replicas,
        restart=opener.replica,
        restarts=server.restarts,
        rows=inputs.max_num_seqs,
        health_timeout_s=server.timeout_s,
        load_s=inputs.load_timeout_s,
        start_timeout_s=server.start_timeout_s,
    )
    router.beat = inputs.beat
    return router


def vllm(inputs: EngineInputs) -> RolloutEngine:
    """`rollout.engine: vllm`."""
    return opened(inputs, VLLM)


def sglang(inputs: EngineInputs) -> RolloutEngine:
    """`rollout.engine: sglang`."""
    return opened(inputs, SGLANG)


def openai(inputs: EngineInputs) -> RolloutEngine:
    """`rollout.engine: openai`."""
    return opened(inputs, OPENAI)
