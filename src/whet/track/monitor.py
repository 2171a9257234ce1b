"""How far a stage is: the phases of its steps, their seconds, and its waits, each with an owner and a deadline."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from whet.config.deadlines import Deadline
from whet.guard.watch import Watch, wait
from whet.track.display import Display
from whet.track.timeline import EXPLORING, STEPS, WAITS, Timeline, Together
from whet.types import Group, Metrics

T = TypeVar("T")

clock = time.perf_counter
"""The clock for phases; a benchmark on shared cores sets time.process_time here."""

OUTSIDE = ("evaluate", "save", "export")
"""Phases that are not part of a step's own seconds."""


def _unprofiled(name: str) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class Monitor:
    """One for each stage: every part of the stage tells it what it does."""

    stage: str
    display: Display
    watch: Watch
    timeline: Timeline
    profiled: Callable[[str], AbstractContextManager[object]] = _unprofiled
    """Around each phase."""
    step: int = 0
    """Number of steps that are done."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, since the last step was recorded."""
    beside: dict[str, float] = field(default_factory=dict)
    """The same of what is sampled while the trainer trains."""
    extra_tokens: int = 0
    """Tokens that were sampled for training and are in none of its rollouts, since the last step was recorded."""
    extra_eval_tokens: int = 0
    """Tokens that were sampled for an evaluation and are in none of its replies, since the last was recorded."""
    together: Together = field(default_factory=Together)
    """Concurrent work of several explorers, timed once."""
    since: float = field(default_factory=lambda: clock())
    """When the last step was recorded, or the stage began."""

    def begin(self) -> None:
        """The stage begins: what passed since its data was read belongs to no step of it."""
        self.since = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step and show its name."""
        self.display.phase(name)
        self.watch.beat(name)
        self.timeline.at = self.stage, self.step + (name not in OUTSIDE)
        start = clock()
        try:
            with self.timeline.span(name, STEPS), self.profiled(name):
                yield
        finally:
            self.display.phase_over(self.watch.last)
            self.seconds[name] = self.seconds.get(name, 0.0) + clock() - start

    def phase_beside(self, name: str) -> AbstractContextManager[None]:
        """The same for work that runs beside the phases of the step."""
        self.watch.beat(name)
        return self.together.span(name, self._ended_beside)

    def _ended_beside(self, name: str, start_ns: int) -> None:
        self.beside[name] = self.beside.get(name, 0.0) + self.timeline.since(start_ns, name, EXPLORING)

    def sampled_beside(self, tokens: int) -> None:
        """So many tokens were sampled for training and are in none of its rollouts."""
        self.extra_tokens += tokens

    def sampled_beside_replies(self, tokens: int) -> None:
        """So many tokens were sampled for an evaluation and are in none of its replies."""
        self.extra_eval_tokens += tokens

    @contextmanager
    def unless_given_up(self, groups: Sequence[Group]) -> Iterator[None]:
        """Groups that become too old to be trained on meanwhile are in no step: their tokens are extra."""
        try:
            yield
        except asyncio.CancelledError:
            self.sampled_beside(sum(g.tokens for g in groups))
            raise

    async def wait(
        self,
        awaitable: Awaitable[T],
        what: str,
        *,
        within: Deadline,
        progress: Callable[[], object] = lambda: None,
    ) -> T:
        """Wait with an owner and a deadline: a stall is logged with stacks, then ends the run. progress: as
        `guard.watch.wait` has it."""
        owner = f"stage {self.stage!r}, step {self.step + 1}"
        self.timeline.at = self.stage, self.step + 1
        with self.timeline.span(what, WAITS):
            limits: dict[str, Any] = {"timeout_s": within.seconds, "limit": within.keys}
            return await wait(awaitable, owner=owner, what=what, progress=progress, **limits)

    def evaluation_timings(self) -> Metrics:
        """Seconds of the evaluation that has ended, and its extra tokens if there are any."""
        out: Metrics = {"time/evaluate_s": self.seconds["evaluate"]}
        if extra := self.extra_eval_tokens:
            out["eval/extra_tokens_sum"], self.extra_eval_tokens = float(extra), 0
        return out

    def timings(self) -> tuple[Metrics, dict[str, float]]:
        """(seconds of the step, whole and by phase, the process's peak memory, and extra tokens if there are any;
        seconds by phase alone), since the last call. `other` is what no phase claims."""
        seconds, self.seconds = self.seconds, {}
        beside, self.beside = self.beside, {}
        now = clock()
        step = now - self.since - sum(seconds.pop(name, 0.0) for name in OUTSIDE)
        self.since = now
        out = {f"time/{name}_s": s for name, s in (seconds | beside).items()}
        out |= {"time/other_s": step - sum(seconds.values()), "time/step_s": step}
        unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, kilobytes elsewhere
        out["memory/peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        if extra := self.extra_tokens:
            out["rollout/extra_tokens_sum"], self.extra_tokens = float(extra), 0
        return out, seconds | beside
