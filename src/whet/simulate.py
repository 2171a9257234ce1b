"""Predicted speed of sampling and training together: the schedules of `explorer.SCHEDULES` in simulated time.

Nothing is sampled or trained: rollouts take times drawn from measured ones, on the slots of the engines; training steps
and weight syncs take their measured times. `whet plan FILE --simulate RUN` prints the prediction.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Mode = Literal["synchronous", "overlapped", "asynchronous"]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured costs, in seconds."""

    rollout_s: Sequence[float]
    """Single rollouts, as measured; drawn from with replacement."""
    train_s: float
    """One step's log-probs and update."""
    score_s: float = 0.0
    """Scoring one group."""
    sync_s: float = 0.0
    """Moving the weights once."""
    slots: int
    """Rollouts that the engines work on at once, all replicas together."""


@dataclass(frozen=True, kw_only=True)
class SimulatedSchedule:
    """How far sampling may run ahead of training; the numbers of `Plan` and of the section rollout."""

    mode: Mode
    groups_per_step: int
    group_size: int
    max_staleness: int = 0
    spare: int = 0
    steps: int = 200


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The result of a simulation."""

    seconds: float
    steps: int
    rollouts: int
    """Trained on."""
    given_up: int
    """Requested rollouts that became too old."""
    trainer_busy: float
    """Share of the time in which the trainer computed."""
    engines_busy: float
    """Mean share of the engines' slots in use."""

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def rollouts_per_s(self) -> float:
        return self.rollouts / self.seconds


def simulate(costs: Costs, schedule: SimulatedSchedule, *, seed: int = 0) -> Simulated:
    """The whole schedule, from the first requested task to the last trained step."""
    rng = random.Random(seed)
    return (_free if schedule.mode == "asynchronous" else _in_rounds)(costs, schedule, rng)


def bound_s(costs: Costs, schedule: SimulatedSchedule) -> float:
    """Lower bound of the seconds per step: those of the slower side, if it never waited for the other but for the first
    step's rollouts, or for the last step."""
    rollouts = schedule.groups_per_step * schedule.group_size
    sampled_s = rollouts * sum(costs.rollout_s) / len(costs.rollout_s) / costs.slots
    trained_s = costs.train_s + costs.sync_s
    return max(sampled_s, trained_s) + min(sampled_s, trained_s) / schedule.steps


def ways(schedule: SimulatedSchedule) -> list[SimulatedSchedule]:
    """The schedule itself and its alternatives."""
    others = [replace(schedule, mode="synchronous", max_staleness=0, spare=0)]
    others.append(replace(schedule, mode="overlapped", max_staleness=1, spare=0))
    others += [replace(schedule, mode="asynchronous", max_staleness=ahead, spare=0) for ahead in (1, 2, 4)]
    return [schedule, *(other for other in others if other != schedule)]


# ---------------------------------------------------------------- rounds


def _in_rounds(costs: Costs, schedule: SimulatedSchedule, rng: random.Random) -> Simulated:
    """Synchronous and overlapped: a step's rollouts are requested together, and the step waits for all."""
    rollouts = schedule.groups_per_step * schedule.group_size
    busy_s = 0.0

    def explored_s() -> float:
        """Seconds until the last rollout of a round has ended; each takes the slot that is free first."""
        nonlocal busy_s
        ends = [0.0] * min(costs.slots, rollouts)
        for _ in range(rollouts):
            length = rng.choice(costs.rollout_s)
            busy_s += length
            heapq.heapreplace(ends, ends[0] + length)
        return max(ends) + costs.score_s * schedule.groups_per_step

    ahead = min(schedule.max_staleness, schedule.steps) if schedule.mode == "overlapped" else 0
    seconds = sum(explored_s() for _ in range(ahead))
    for step in range(schedule.steps):
        if ahead == 0:
            seconds += explored_s() + costs.train_s
        elif step + ahead < schedule.steps:
            seconds += max(explored_s(), costs.train_s)
        else:
            seconds += costs.train_s
        seconds += costs.sync_s
    return Simulated(
        seconds=seconds,
        steps=schedule.steps,
        rollouts=rollouts * schedule.steps,
        given_up=0,
        trainer_busy=schedule.steps * costs.train_s / seconds,
        engines_busy=busy_s / (seconds * costs.slots),
    )


# ---------------------------------------------------------------- events


@dataclass
class _Group:
    """A group in flight."""

    version: int
    """Version of the policy when the group was requested."""
    left: int
    """Rollouts that have not ended."""
    running: int = 0
    begun: float = 0.0
    """Sum of the times at which its running rollouts began."""


class _Free:
    """Asynchronous: explorers and a trainer wait for each other only at the staleness bound."""

    def __init__(self, costs: Costs, schedule: SimulatedSchedule, rng: random.Random) -> None:
        self.costs, self.schedule, self.rng = costs, schedule, rng
        self.now = self.busy_s = self.trained_s = 0.0
        self.version = self.held = self.asked = self.given_up = self.running = 0
        self.training = False
        self.groups: dict[int, _Group] = {}
        self.queue: deque[int] = deque()
        self.ready: list[int] = []
        """Versions of the groups that wait."""
        self.events: list[tuple[float, int, str, int, float]] = []
        self.number = 0

    def run(self) -> Simulated:
        schedule = self.schedule
        self.ask()
        while self.version < schedule.steps:
            self.now, _, what, group, began = heapq.heappop(self.events)
            {"ended": self.ended, "scored": self.scored, "trained": self.trained}[what](group, began)
            self.train()
        return Simulated(
            seconds=self.now,
            steps=schedule.steps,
            rollouts=schedule.steps * schedule.groups_per_step * schedule.group_size,
            given_up=self.given_up,
            trainer_busy=self.trained_s / self.now,
            engines_busy=self.busy_s / (self.now * self.costs.slots),
        )

    def later(self, seconds: float, what: str, group: int = -1, began: float = 0.0) -> None:
        self.number += 1
        heapq.heappush(self.events, (self.now + seconds, self.number, what, group, began))

    def ask(self) -> None:
        """Start new groups while there is room and a free slot, and rollouts on free slots."""
        schedule = self.schedule
        bound = (schedule.max_staleness + 1) * schedule.groups_per_step
        wanted = (schedule.steps - self.version) * schedule.groups_per_step
        most = min(bound, wanted) + schedule.spare
        while self.held < most and self.running + len(self.queue) < self.costs.slots:
            self.held += 1
            self.groups[self.asked] = _Group(self.version, schedule.group_size)
            self.queue.extend([self.asked] * schedule.group_size)
            self.asked += 1
        while self.queue and self.running < self.costs.slots:
            group = self.groups[number := self.queue.popleft()]
            group.running += 1
            group.begun += self.now
            self.running += 1
            self.later(self.rng.choice(self.costs.rollout_s), "ended", number, self.now)

    def ended(self, number: int, began: float) -> None:
        """A rollout has ended; it does not count if its group was dropped."""
        group = self.groups.get(number)
        if group is None:
            return
        group.left -= 1
        group.running -= 1
        group.begun -= began
        self.running -= 1
        self.busy_s += self.now - began
        if group.left == 0:
            self.later(self.costs.score_s, "scored", number)
        self.ask()

    def scored(self, number: int, began: float) -> None:
        if (group := self.groups.pop(number, None)) is not None:
            self.ready.append(group.version)

    def train(self) -> None:
        """Begin a step, if there is one to begin."""
        if self.training or len(self.ready) < self.schedule.groups_per_step:
            return
        self.ready = sorted(self.ready)[self.schedule.groups_per_step :]
        self.training = True
        self.later(self.costs.train_s + self.costs.sync_s, "trained")

    def trained(self, number: int, began: float) -> None:
        """A new version: groups that became too old are dropped, which frees room."""
        self.training = False
        self.trained_s += self.costs.train_s
        self.version += 1
        self.held -= self.schedule.groups_per_step
        oldest = self.version - self.schedule.max_staleness
        fresh = [version for version in self.ready if version >= oldest]
        late = [n for n, group in self.groups.items() if group.version < oldest]
        self.given_up += (len(self.ready) - len(fresh) + len(late)) * self.schedule.group_size
        self.held -= len(self.ready) - len(fresh) + len(late)
        self.ready = fresh
        for n in late:
            group = self.groups.pop(n)
            self.running -= group.running
            self.busy_s += group.running * self.now - group.begun
        if late:  # their rollouts that wait for a slot would keep new groups out, in the end all of them
            self.queue = deque(number for number in self.queue if number in self.groups)
        self.ask()


def _free(costs: Costs, schedule: SimulatedSchedule, rng: random.Random) -> Simulated:
    return _Free(costs, schedule, rng).run()
