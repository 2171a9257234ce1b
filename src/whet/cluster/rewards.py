"""Reward workers on the machines of the cluster: one `Jail` in several places. Calls are spread over the hosts. The
calls of a host that died are retried on the others, with the same seeds, so the results are the same."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from whet.cluster.lines import Far
from whet.cluster.nodes import place
from whet.config.schema import Config
from whet.guard import pulse
from whet.guard.jail import CallResult, JailBroken, RewardCall
from whet.guard.line import Line, Lines, end, how_it_ended
from whet.guard.nursery import Loader
from whet.rewards import host
from whet.types import ConfigError, WhetError

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Longest silence of a host, which says every second that it lives."""


@dataclass
class _Asked:
    calls: list[RewardCall]
    future: Future[list[CallResult]] = field(default_factory=Future)


@dataclass
class RewardHost:
    """One process, and what it has been asked."""

    line: Line
    pending: dict[int, _Asked] = field(default_factory=dict)
    state: Literal["lives", "coming", "lost"] = "lives"
    """coming: another one in its place is."""
    restarts: int = 0

    @property
    def load(self) -> int:
        return sum(len(asked.calls) for asked in self.pending.values())

    def give_up(self) -> list[_Asked]:
        """What it has not answered."""
        pending, self.pending = self.pending, {}
        return list(pending.values())


class RewardHosts:
    """Takes calls as `Jail` does."""

    def __init__(
        self,
        functions: Mapping[str, Loader],
        *,
        open_lines: Callable[[], Lines],
        start_timeout_s: float,
        restarts: int,
        patience_s: float = PATIENCE_S,
        **options: Any,
    ) -> None:
        """Nothing is started before `open`. open_lines: starts the processes. restarts: how often a host is replaced.
        options: of `Jail`. ConfigError for functions that cannot be taken to another process."""
        try:
            self._wanted = pickle.dumps(host.Wanted(functions, options), protocol=5)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"cluster.reward_hosts: a reward cannot be sent to another process ({error}); give it by name, as "
                "rewards.NAME.function='package.module:function' or 'file.py:function'"
            ) from error
        self._open_lines, self._start_s, self._restarts = open_lines, start_timeout_s, restarts
        self._patience_s = patience_s
        self._lines: Lines | None = None
        self.hosts: list[RewardHost] = []
        """By their numbers; the successor of one that was lost has its number."""
        self._waiting: list[_Asked] = []
        """What has no host until another one comes."""
        self._numbers = count()
        self._lock = threading.RLock()
        self._closed = False

    def open(self) -> None:
        """Start the hosts. ConfigError for a function that cannot be loaded there."""
        if self._lines is not None:
            return
        self._lines = lines = self._open_lines()
        for line in lines.lines:
            line.connection.send_bytes(self._wanted)
        for number, line in enumerate(lines.lines):
            self._greet(line, number)
            self.hosts.append(RewardHost(line))
        for number in range(len(self.hosts)):
            self._listen(number)

    async def call_many(self, calls: Sequence[RewardCall]) -> list[CallResult]:
        """The results of all calls, in order. JailBroken if no host is left."""
        if not calls:
            return []
        with self._lock:
            shares = self._spread(len(calls))
            futures = [self._ask(_Asked([calls[at] for at in share]), to) for to, share in shares]
        answers = await asyncio.gather(*map(asyncio.wrap_future, futures))
        by_place = {
            at: result for (_, share), answer in zip(shares, answers) for at, result in zip(share, answer)
        }
        return [by_place[at] for at in range(len(calls))]

    def close(self) -> None:
        """End all hosts. Calls under way raise JailBroken."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._fail("the reward hosts were closed while calls were under way")
        if self._lines is not None:
            end(self._lines)

    # -- inside

    def _spread(self, calls: int) -> list[tuple[RewardHost | None, list[int]]]:
        """Which host gets which calls: each the one that has least to do. None: whoever comes next."""
        if self._lines is None or self._closed:
            raise WhetError("the reward hosts are not open")
        living = [h for h in self.hosts if h.state == "lives"]
        if not living:
            self._check_hope()
            return [(None, list(range(calls)))]
        load = [h.load for h in living]
        shares: list[list[int]] = [[] for _ in living]
        for at in range(calls):
            least = load.index(min(load))
            load[least] += 1
            shares[least].append(at)
        return [(h, share) for h, share in zip(living, shares) if share]

    def _ask(self, asked: _Asked, to: RewardHost | None) -> Future[list[CallResult]]:
        if to is None:
            self._waiting.append(asked)
            return asked.future
        key = next(self._numbers)
        to.pending[key] = asked
        with suppress(OSError):  # it has died: who listens to it has all asked again
            to.line.connection.send_bytes(pickle.dumps((key, asked.calls), protocol=5))
        return asked.future

    def _listen(self, number: int) -> None:
        at = self.hosts[number]
        threading.Thread(
            target=self._hear, args=(number, at), name=f"whet-reward-host-{number}", daemon=True
        ).start()

    def _hear(self, number: int, at: RewardHost) -> None:
        why = f"sent no message for {self._patience_s:g} s"
        try:
            while at.line.connection.poll(self._patience_s):
                kind, what = pickle.loads(at.line.connection.recv_bytes())
                if kind == "done":
                    self._answered(at, *what)
                elif kind == "failed":
                    self._refused(at, *what)
                elif kind == "scored":
                    pulse.beat("scoring")
        except (EOFError, OSError):
            why = how_it_ended(at.line)
        self._lost(number, at, why)

    def _answered(self, at: RewardHost, key: int, results: list[CallResult]) -> None:
        with self._lock:
            asked = at.pending.pop(key, None)
            if asked is not None and not asked.future.done():
                asked.future.set_result(results)

    def _refused(self, at: RewardHost, key: int, why: str, broken: bool) -> None:
        with self._lock:
            asked = at.pending.pop(key, None)
            if asked is not None and not asked.future.done():
                asked.future.set_exception(JailBroken(why) if broken else WhetError(why))

    def _lost(self, number: int, at: RewardHost, why: str) -> None:
        """What it had is asked of the others, or of who comes next."""
        with self._lock:
            if self._closed:
                return
            log.warning("reward host %d lost (%s); %d calls are retried", number, why, at.load)
            at.state = "coming" if at.restarts < self._restarts else "lost"
            self._again(at.give_up())
        if at.state == "coming" and not self._replaced(number, at):
            with self._lock:
                at.state = "lost"
                self._again([])

    def _again(self, given_up: list[_Asked]) -> None:
        """Hand out anew what has no host."""
        todo, self._waiting = [*self._waiting, *given_up], []
        living = [h for h in self.hosts if h.state == "lives"]
        for turn, asked in enumerate(todo):
            self._ask(asked, living[turn % len(living)] if living else None)
        try:
            self._check_hope()
        except WhetError as error:
            self._fail(str(error))

    def _check_hope(self) -> None:
        """Raise JailBroken where no host lives and none will."""
        if all(h.state == "lost" for h in self.hosts):
            raise JailBroken(
                f"no reward host is left: each of the {len(self.hosts)} hosts died and was replaced at most "
                f"cluster.restarts={self._restarts} times; see run.log for the causes"
            )

    def _replaced(self, number: int, at: RewardHost) -> bool:
        assert self._lines is not None
        try:
            line = self._lines.again(number)
            line.connection.send_bytes(self._wanted)
            self._greet(line, number)
        except (WhetError, OSError) as error:
            log.warning("reward host %d could not be replaced: %s", number, error)
            return False
        with self._lock:
            self.hosts[number] = RewardHost(line, restarts=at.restarts + 1)
            self._listen(number)
            self._again([])
        log.info("reward host %d is serving again", number)
        return True

    def _greet(self, line: Line, number: int) -> None:
        try:
            kind, what = (
                pickle.loads(line.connection.recv_bytes())
                if line.connection.poll(self._start_s)
                else ("", "")
            )
        except (EOFError, OSError):
            kind, what = "ended", ""
        if kind != "ready":
            silent = f"it did not answer within cluster.start_timeout_s={self._start_s:g} s"
            said = what or (how_it_ended(line) if kind == "ended" else silent)
            raise ConfigError(f"reward host {number} did not start: {said}")

    def _fail(self, why: str) -> None:
        for asked in [*self._waiting, *(a for h in self.hosts for a in h.give_up())]:
            if not asked.future.done():
                asked.future.set_exception(JailBroken(why))
        self._waiting = []


def hosts_of(cfg: Config) -> Callable[..., RewardHosts]:
    """What takes the place of `Jail` where rewards are judged in the cluster."""
    c = cfg.cluster

    def open_lines() -> Far:
        bundle = {"CPU": float(cfg.reward_workers.count)}
        asked = f"cluster.reward_hosts={c.reward_hosts}"
        group = place(
            bundle, c.reward_hosts, strategy=c.placement, start_timeout_s=c.start_timeout_s, asked=asked
        )
        return Far(
            c.reward_hosts,
            1,
            module=host.MODULE,
            group=group,
            folder=os.getcwd(),
            start_timeout_s=c.start_timeout_s,
        )

    def made(functions: Mapping[str, Loader], **options: Any) -> RewardHosts:
        return RewardHosts(
            functions,
            open_lines=open_lines,
            start_timeout_s=c.start_timeout_s,
            restarts=c.restarts,
            **options,
        )

    return made
