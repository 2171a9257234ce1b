"""Many engines as one: a `RolloutEngine` over replicas that may die, hang, join late and leave.

The sampled tokens depend only on the weights, the prompt and the request's key (`seeds`). A request that was lost with
its replica is therefore retried on another replica and gives the same tokens. The router is free to choose a replica
and chooses for speed: the least loaded one, but equal prompts go to the same replica, where their prefill is shared.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, Literal

from whet.guard.watch import wait
from whet.rollout.balance import Handed, ReplicaLoads
from whet.rollout.engine import PARTS, Capabilities, Health, OnTokens, Part, WeightUpdate
from whet.rollout.gate import Gate
from whet.rollout.replica import Late, Replica, Work, trace, wrong
from whet.rollout.requests import RequestError
from whet.rollout.scale import Wish, number_of
from whet.rollout.weights import Shipment, by_copy
from whet.types import Completion, Receipt, Request, ScoreRequest, TokenLogprobs, WhetError

log = logging.getLogger(__name__)

OWNER = "the router"

LOOKS = 4
"""At whether a replica lives, in the time that it may be quiet."""
LOOK_S = 1.0
"""Between two looks at how many replicas are asked for."""


class Router:
    """A `RolloutEngine` over replicas, which are given at the start; `join` adds one, `leave` removes one.

    restart: starts a replacement of a dropped replica, by name; `restarts`: how often, for each name. ship: turns new
    weights into a form that every replica can be given. rows: sequences that a replica decodes at once; further
    requests with a prompt go to another replica when its replica has no free row. health_timeout_s: a replica that
    makes no progress on its requests for this time is dropped, as is one whose process does not respond while it loads
    weights or moves between devices; also the limit for a pause. load_s: limit for loading weights while the process
    responds. start_timeout_s: limit for starting a replica, or waiting for one when none is left. exact: whether all
    replicas compute as the trainer, bit for bit. wish: how many replicas a user requests.
    """

    def __init__(
        self,
        replicas: Iterable[Replica],
        *,
        restart: Callable[[str], Awaitable[Replica]] | None = None,
        restarts: int = 0,
        ship: Callable[[WeightUpdate], Shipment] = by_copy,
        rows: int = 256,
        health_timeout_s: float = 60.0,
        load_s: float = 600.0,
        start_timeout_s: float = 300.0,
        version: int = 0,
        exact: bool = True,
        wish: Callable[[], Wish | None] | None = None,
    ) -> None:
        self.version, self.exact = version, exact
        self.takes_source = False  # whether `ship` can be given a `WeightUpdate.source`
        self.restart, self.restarts, self.ship = restart, restarts, ship
        self.health_timeout_s, self.load_s, self.start_timeout_s = health_timeout_s, load_s, start_timeout_s
        self.replicas: dict[str, Replica] = {}
        """Those that serve, by name."""
        self.dropped: list[tuple[str, str]] = []
        """(name, why), in the order it happened."""
        self.left: dict[str, int] = {}
        """Restarts that a name still has."""
        self.shipment: Shipment | None = None
        self.target = version
        """The version of `shipment`; `version` follows once the replicas have it."""
        self.beat: Callable[[str], object] = lambda what: None
        """Called when a replica gets on."""
        self._gate = Gate(lambda: self.version)
        self.balance = ReplicaLoads(rows, self._usable)
        """Which replica gets a request."""
        self._can: Capabilities | None = None
        """Of every replica; None before there was one."""
        self._proof, self._measured = "", dict[str, float]()
        """Of the version `target`: as the first replica that has a proof gave it; the worst of what all measured."""
        self._kept = False
        """Requests were stopped where they are."""
        self._unplaced: frozenset[Part] = frozenset()
        """What is not on the accelerators."""
        self._since, self._requests, self._tokens = time.time(), 0, 0
        self.coming: dict[str, asyncio.Task[None]] = {}
        """Replicas that are being made, by name."""
        self.leaving: dict[str, Replica] = {}
        """Those that end what they were asked."""
        self._ending: set[asyncio.Task[None]] = set()
        """Replicas that are being ended; never cancelled, or they would live on."""
        self._wish = wish
        self._wished: Wish | None = None
        self._refused: set[str] = set()
        """Why those that were asked for last cannot be had, each reason once."""
        self._listener: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        """Set, and made anew, whenever a replica has come or will not come."""
        self._watcher: asyncio.Task[None] | None = None
        for replica in replicas:
            if replica.engine.version != version:
                raise WhetError(
                    f"replica {replica.name} is at version {replica.engine.version}, expected {version}"
                )
            self._serve(replica)

    # -- the seam

    @property
    def can(self) -> Capabilities:
        """What every replica can. Raises WhetError before there is one."""
        if self._can is None:
            raise WhetError("no engine replica has started yet, so it is not known what they can do")
        return self._can

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """See `RolloutEngine`. Raises WhetError when no replica is left and none is starting, or if a reply of which
        tokens were given on is lost and its tokens cannot be sampled again."""
        handed = None if on_tokens is None else Handed(request, on_tokens)
        async with self._gate.passing(request.least_version):
            try:
                while True:
                    replica = self.balance.choose(request)
                    if replica is None:
                        await self._arrival()
                    elif completion := await self._ask(replica, request, handed):
                        return completion
                    await self._gate.step()
            finally:
                if handed is not None:
                    handed.end()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """See `RolloutEngine`. By the replica that has the least to do."""
        async with self._gate.passing():
            while True:
                replica = self.balance.lightest()
                if replica is None:
                    await self._arrival()
                else:
                    found = await self._result(replica, replica.engine.score(requests))
                    if found is not None and len(found) == len(requests):
                        self._count(len(found), sum(len(r.token_ids) for r in requests))
                        return list(found)
                    if found is not None:
                        self.drop(replica, f"it scored {len(found)} of {len(requests)} requests")
                await self._gate.step()

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        """A replica that fails or takes too long is dropped. When all replicas fail with the same error, the weights
        are at fault and WhetError is raised. Requests in flight continue with the new weights."""
        if self._wish is not None and self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen(self._wish))
        shipment, version = self.ship(update), update.version
        await self._gate.pause(False)  # nobody is asked while some have the new weights and others do not
        self.shipment, self.target, self._proof, self._measured = shipment, version, "", {}
        try:
            await self._load_all(shipment, version)
            while not self.replicas:
                await self._arrival()  # it comes with these weights
            self.version = version
            self._kept = False
        finally:
            self._rest()
            self._gate.resume()
        return Receipt(OWNER, version, self._proof, measured=self._measured)

    async def pause(self, finish: bool) -> None:
        """See `RolloutEngine`. While requests finish, those of a replica that is lost finish elsewhere."""
        if finish and not self._kept:
            if await self._gate.pause(True):
                await self._each("pause", lambda r: r.engine.pause(True), timeout_s=self.health_timeout_s)
            return
        self._kept = not finish
        limit_s = self.load_s if finish else self.health_timeout_s
        stopped = self._each("pause", lambda r: r.engine.pause(finish), timeout_s=limit_s)
        await asyncio.gather(self._gate.pause(finish), stopped)

    async def resume(self) -> None:
        """See `RolloutEngine`."""
        await self._each("resume", lambda r: r.engine.resume(), timeout_s=self.health_timeout_s)
        self._kept = False
        self._rest()
        self._gate.resume()

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part] = PARTS) -> None:
        """See `RolloutEngine`."""
        self._unplaced = self._unplaced - what if device == "gpu" else self._unplaced | what
        await self._each(f"move to {device}", lambda r: r.engine.place(device, what), timeout_s=self.load_s)
        self._rest()

    async def health(self) -> Health:
        """What the replicas did together, those that are gone included."""
        return Health(since=self._since, requests=self._requests, tokens=self._tokens)

    async def close(self) -> None:
        """Requests in flight fail; later ones are refused. Every replica is ended."""
        reason = "the rollout engine was closed"
        replicas = [*self.replicas.values(), *self.leaving.values()]
        self.replicas, self.leaving = {}, {}
        self.balance.ordered = {}
        self._gate.close(reason)
        self._news.set()
        for replica in replicas:
            replica.state = "gone"
            replica.fail(WhetError(reason))
        coming = list(self.coming.values())
        for task in (*coming, self._watcher, self._listener):
            if task is not None:
                task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        await asyncio.gather(*self._ending, *(self._end(r) for r in replicas), return_exceptions=True)

    # -- elastic

    async def join(self, replica: Replica) -> None:
        """When this returns, the replica serves with the current weights. Raises the replica's own error, or WhetError
        if it is late or at another version; then the replica is shut down."""
        replica.state = "joining"
        try:
            loaded: Shipment | None = None
            away: frozenset[Part] = frozenset()
            while self.shipment is not loaded or self._unplaced != away:
                if loaded is None or self._unplaced == away:
                    assert self.shipment is not None
                    loaded, version = self.shipment, self.target
                    work, what = self._load(replica, loaded, version), f"load version {version}"
                else:  # it sleeps as those that serve do
                    away = self._unplaced
                    work, what = replica.engine.place("cpu" if away else "gpu", away or PARTS), "move"
                await self._done(replica, work, what, timeout_s=self.load_s)
            if replica.engine.version != self.target:
                raise WhetError(f"it is at version {replica.engine.version}, expected {self.target}")
            if self._gate.closed is not None:
                raise WhetError(self._gate.closed)
        except BaseException:
            replica.state = "gone"
            await self._end(replica)
            raise
        self._serve(replica)

    async def leave(self, name: str) -> None:
        """Let the replica finish its requests, then shut it down. It is not replaced."""
        replica = self._leaves(name)
        if replica is None:
            raise WhetError(
                f"no replica {name!r} is serving; serving replicas: {', '.join(sorted(self.replicas)) or 'none'}"
            )
        await self._go(replica)

    def _leaves(self, name: str) -> Replica | None:
        """Give it no more requests. None: it does not serve."""
        if (replica := self._away(name)) is not None:
            replica.state, self.left[name] = "leaving", 0
            self.leaving[name] = replica
        return replica

    async def _go(self, replica: Replica) -> None:
        """End one that leaves when its requests are finished."""
        if replica.asked:
            answers = list(replica.asked.values())
            self._wake()
            await asyncio.wait(answers)  # the watcher drops it if it hangs
        if replica.state == "leaving":
            replica.state = "gone"
            await self._end(replica)
        self.leaving.pop(replica.name, None)
        log.info("replica %s has left", replica.name)

    def scale(self, wanted: int) -> None:
        """Set the number of replicas. Surplus replicas leave after they have finished their requests; new ones serve
        once they have the current weights. One that cannot start is logged, and the run continues without it."""
        coming = [name for name, task in self.coming.items() if not task.cancelling()]
        there = [*sorted(self.replicas, key=number_of), *sorted({*coming} - {*self.replicas}, key=number_of)]
        log.info("replicas requested: %d; running: %d", wanted, len(there))
        self._refused.clear()
        for name in there[wanted:]:
            if (replica := self._leaves(name)) is not None:
                self._spawn(self._go(replica))
            else:
                self.coming[name].cancel()
        taken = {*there, *self.coming, *self.leaving}
        free = (name for name in map("engine-{}".format, count()) if name not in taken)
        for name in islice(free, max(0, wanted - len(there))):
            self.left[name] = self.restarts
            self._bringing(name, self._grow(name))

    def drop(self, replica: Replica, why: str, error: BaseException | None = None) -> None:
        """Stop using a replica. Its requests are retried on other replicas; it is replaced if restarts are left."""
        if replica.state == "gone":
            return
        leaving, replica.state = replica.state == "leaving", "gone"
        if self.replicas.get(replica.name) is replica:
            self._away(replica.name)
        again = replica.let_go()
        self.dropped.append((replica.name, why))
        log.warning("replica %s dropped: %s; requests to retry: %d", replica.name, why, again)
        trace(replica.name, error)
        self._spawn(self._end(replica))
        if self.restart is not None and not leaving and self._gate.closed is None:
            self._bringing(replica.name, self._bring(replica.name))
        self._tell()

    # -- asking

    async def _ask(self, replica: Replica, request: Request, handed: Handed | None) -> Completion | None:
        """The completion, or None: the replica is lost, ask again."""
        version = self.version
        with self.balance.serving(request.prompt, replica):
            on_tokens = None if handed is None else handed.begin(replica)
            done = await self._result(replica, replica.engine.generate(request, on_tokens), handed)
        if done is None:
            return None
        if why := wrong(done, since=version, latest=max(self.version, self.target)):
            self.drop(replica, why)
            return None
        self._count(1, len(request.prompt) + len(done.token_ids))
        assert isinstance(done, Completion)
        return done

    async def _result(
        self, replica: Replica, call: Coroutine[Any, Any, Any], handed: Handed | None = None
    ) -> Any | None:
        """What the call returned; None, and the replica dropped, if it is lost or the call failed by its fault."""
        answer = replica.ask(call)
        self._wake()
        work: Work | None = await answer
        if handed is not None and handed.error is not None:
            raise handed.error
        if work is None:
            return None
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if isinstance(error, RequestError):
            raise error
        if error is not None:
            self.drop(replica, f"it raised {type(error).__name__}: {error}", error)
            return None
        return work.result()

    def _count(self, requests: int, tokens: int) -> None:
        self._requests, self._tokens = self._requests + requests, self._tokens + tokens

    def _usable(self, replica: Replica) -> bool:
        """Whether it has the weights that all have; else it is dropped."""
        if replica.engine.version == self.version:
            return True
        self.drop(replica, f"it is at version {replica.engine.version}, expected {self.version}")
        return False

    # -- coming and going

    def _serve(self, replica: Replica) -> None:
        if replica.name in self.replicas:
            raise WhetError(f"a replica {replica.name!r} already exists")
        if self._can not in (None, replica.engine.can):
            raise WhetError(f"replica {replica.name} can {replica.engine.can}, all others {self._can}")
        self._can, replica.state = replica.engine.can, "serving"
        self.replicas[replica.name] = replica
        self.left.setdefault(replica.name, self.restarts)
        self.balance.add(replica)
        self._tell()

    def _away(self, name: str) -> Replica | None:
        """Take it out of those that serve."""
        replica = self.replicas.pop(name, None)
        if replica is not None:
            self.balance.remove(replica)
        return replica

    async def _listen(self, wish: Callable[[], Wish | None]) -> None:
        """Follow what a person asks for."""
        while True:
            await asyncio.sleep(LOOK_S)
            wished = await asyncio.to_thread(wish)
            if wished is not None and wished != self._wished:
                self._wished = wished
                self.scale(wished.count)

    async def _grow(self, name: str) -> None:
        """One more replica."""
        try:
            await self.join(await self._made(name))
        except Exception as error:  # noqa: BLE001  an engine is foreign code: it does not take the run with it
            reason = f"{type(error).__name__}: {error}".replace(name, "it")
            if reason not in self._refused:
                self._refused.add(reason)
                log.warning(
                    "replica %s was requested and cannot start: %s. The run continues with %d, without this one and "
                    "all others that fail for the same reason; whet scale requests them again",
                    name, reason, len(self.replicas),
                )  # fmt: skip
                trace(name, error)
        else:
            log.info("replica %s joined and serves version %d", name, self.target)

    async def _bring(self, name: str) -> None:
        """Another replica in the place of a dropped one, as long as there are restarts left."""
        while self.left[name] > 0:
            self.left[name] -= 1
            try:
                await self.join(await self._made(name))
            except Exception as error:  # noqa: BLE001  an engine is foreign code: it does not take the run with it
                log.warning("replica %s could not be replaced: %s: %s", name, type(error).__name__, error)
                trace(name, error)
                continue
            log.warning("replica %s is serving again; restarts left: %d", name, self.left[name])
            return
        log.error("replica %s is not replaced: it has used all its %d restarts", name, self.restarts)

    def _bringing(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Make a replica beside all else."""
        task = self.coming[name] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(partial(self._brought, name))

    def _brought(self, name: str, task: asyncio.Task[None]) -> None:
        if self.coming.get(name) is task:
            del self.coming[name]
        self._tell()

    async def _made(self, name: str) -> Replica:
        """A new replica. If nobody waits for it any more when it is there, it is ended."""
        assert self.restart is not None
        making = asyncio.ensure_future(self.restart(name))
        try:
            replica: Replica = await self._wait(making, f"a new replica {name}", self.start_timeout_s)
        except BaseException:
            if making.done() and not making.cancelled() and making.exception() is None:
                await self._end(making.result())
            raise
        return replica

    async def _arrival(self) -> None:
        """Until a replica has come. Raises WhetError if there is none to wait for."""
        if self._gate.closed is not None:
            raise WhetError(self._gate.closed)
        if self.replicas:
            return
        if not self.coming:
            last = "; ".join(f"{name}: {why}" for name, why in self.dropped[-3:]) or "no replica ever joined"
            raise WhetError(
                f"no engine replica is left and none is starting ({last}). Fix the cause, or raise "
                "cluster.restarts; the run resumes from its last checkpoint"
            )
        what = "an engine replica: none is left, one is being restarted"
        limit = f"cluster.start_timeout_s={self.start_timeout_s:g}"
        await self._wait(self._news.wait(), what, self.start_timeout_s, limit=limit)

    def _tell(self) -> None:
        """Whoever waits for a replica looks again."""
        self._news.set()
        self._news = asyncio.Event()

    async def _end(self, replica: Replica) -> None:
        """End an engine that is not asked any more, dead or alive."""
        try:
            await self._wait(
                (replica.end or replica.engine.close)(), f"{replica.name} to shut down", self.start_timeout_s
            )
        except Exception as error:  # noqa: BLE001  it may be dead already
            log.info("replica %s did not shut down: %s: %s", replica.name, type(error).__name__, error)

    # -- all of them

    async def _load_all(self, shipment: Shipment, version: int) -> None:
        async def load(replica: Replica) -> Exception | None:
            loading, what = lambda r: self._load(r, shipment, version), "load the weights"
            error = await self._try(replica, loading, what, timeout_s=self.load_s)
            if isinstance(error, Late):  # its end frees those that take part in a broadcast with it
                self.drop(replica, f"version {version} could not be loaded: {error}")
            return error

        replicas = list(self.replicas.values())
        errors = await asyncio.gather(*map(load, replicas))
        refused = [e for e in errors if isinstance(e, WhetError) and not isinstance(e, Late)]
        if replicas and len(refused) == len(replicas) and len({str(e) for e in refused}) == 1:
            raise refused[0]
        for replica, error in zip(replicas, errors):
            if error is not None:
                why = f"version {version} could not be loaded: {type(error).__name__}: {error}"
                self.drop(replica, why, error)

    async def _load(self, replica: Replica, shipment: Shipment, version: int) -> None:
        """Raises WhetError if it does not have the version then, or other weights than the others."""
        receipt = await replica.engine.update_weights(shipment())
        here = replica.engine.version
        if (receipt.version, here) != (version, version):
            raise WhetError(f"it confirms version {receipt.version} and is at {here}, expected {version}")
        if version != self.target:
            return  # a newer one is on its way
        if receipt.proof != (self._proof or receipt.proof):
            raise WhetError(
                f"it has different weights for version {version}: {receipt.proof}, others {self._proof}"
            )
        self._proof = receipt.proof
        for name, value in receipt.measured.items():
            self._measured[name] = max(value, self._measured.get(name, value))

    async def _each(self, what: str, do: Callable[[Replica], Awaitable[None]], *, timeout_s: float) -> None:
        """Let every replica do something; one that cannot is dropped."""
        replicas = list(self.replicas.values())
        errors = await asyncio.gather(*(self._try(r, do, what, timeout_s=timeout_s) for r in replicas))
        for replica, error in zip(replicas, errors):
            if error is not None:
                self.drop(replica, f"it could not {what}: {type(error).__name__}: {error}", error)

    async def _try(
        self, replica: Replica, do: Callable[[Replica], Awaitable[None]], what: str, *, timeout_s: float
    ) -> Exception | None:
        try:
            await self._done(replica, do(replica), what, timeout_s=timeout_s)
        except Exception as error:  # noqa: BLE001  an engine is foreign code: it is dropped, with what it raised
            return error
        return None

    async def _done(self, replica: Replica, work: Awaitable[None], what: str, *, timeout_s: float) -> None:
        """Until the replica has done this. Raises what that raises; `Late` after the deadline, or when its process has
        given no sign of life for health_timeout_s."""
        working = asyncio.ensure_future(self._wait(work, f"{replica.name} to {what}", timeout_s))
        silent = asyncio.ensure_future(self._silent(replica, what))
        try:
            await asyncio.wait({working, silent}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise silent.result()
            await working
        finally:
            for task in (working, silent):
                task.cancel()
            await asyncio.gather(working, silent, return_exceptions=True)

    async def _silent(self, replica: Replica, what: str) -> Exception:
        """Returns the error of a replica that is stopped, or lost, in the middle of something else than sampling."""
        unanswered = 0
        while unanswered < LOOKS:  # in looks: time in which this process was stopped is not the replica's
            if not unanswered:
                await asyncio.sleep(self.health_timeout_s / LOOKS)
            try:
                answered = await replica.answers(timeout_s=self.health_timeout_s / LOOKS)
            except Exception as error:  # noqa: BLE001  what it raises is why it is dropped
                return error
            unanswered = 0 if answered else unanswered + 1
        silent = f"its process has not responded for {self.health_timeout_s:g} s (cluster.health_timeout_s)"
        return Late(f"{silent}, during: {what}")

    async def _wait(self, work: Awaitable[Any], what: str, timeout_s: float, limit: str = "") -> Any:
        """The result within the deadline, or `Late`."""
        task = asyncio.ensure_future(work)
        try:
            return await wait(task, owner=OWNER, what=what, timeout_s=timeout_s, limit=limit)
        except WhetError as error:
            if task.done() and not task.cancelled() and task.exception() is error:
                raise
            raise Late(str(error)) from None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """End a replica beside all else."""
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # -- health

    def _rest(self) -> None:
        for replica in self.replicas.values():
            replica.rest()

    def _wake(self) -> None:
        """The watcher exists only while there is work."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Look at everyone who has work."""
        watched: set[Replica] = set()
        while True:
            await asyncio.sleep(self.health_timeout_s / LOOKS)
            watched |= {*self.replicas.values(), *self.leaving.values()}
            watched = {r for r in watched if r.state in ("serving", "leaving") and r.asked}
            if not watched:
                return
            await asyncio.gather(*(self._look(r) for r in watched))

    async def _look(self, replica: Replica) -> None:
        seen = replica.seen
        try:
            quiet_s = await replica.quiet_s(timeout_s=self.health_timeout_s / LOOKS)
        except Exception as error:  # noqa: BLE001  what it raises is why it is dropped
            self.drop(replica, f"it does not answer: {type(error).__name__}: {error}", error)
            return
        if seen != replica.seen:
            self.beat("sampling")
        if self._kept or self._unplaced:
            replica.rest()
        elif replica.asked and quiet_s >= self.health_timeout_s:
            self.drop(replica, f"it has {replica.load} requests and has made no progress for {quiet_s:.1f} s")
