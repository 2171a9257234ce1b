"""How long a rollout may take, and which errors of rollouts are written down."""

from __future__ import annotations

from dataclasses import dataclass, field

from whet.guard.traces import Traces
from whet.types import WhetError

LEAST_FINISHED = 8
"""Finished rollouts that make a mean."""


@dataclass
class Pace:
    """How long a rollout may take: `timeout_s`, and no longer than `factor` times the mean of those finished so far."""

    timeout_s: float
    factor: float | None = None
    count: int = field(default=0, repr=False)
    seconds: float = field(default=0.0, repr=False)
    traces: Traces = field(default_factory=Traces, repr=False)
    """Of the errors whose traceback stands in the log."""

    @property
    def limit_s(self) -> float:
        if self.factor is None or self.count < LEAST_FINISHED:
            return self.timeout_s
        return min(self.timeout_s, self.factor * self.seconds / self.count)

    def said(self, limit_s: float) -> str:
        """The limit and where it comes from."""
        if limit_s == self.timeout_s:
            return f"rollout.timeout_s={limit_s:g}"
        return f"{limit_s:.3g} s, rollout.timeout_factor={self.factor:g} times the mean"

    def untold(self, error: Exception) -> Exception | None:
        """The error if its traceback is still to be written down: once for each place that it comes from."""
        return error if not isinstance(error, WhetError) and self.traces.first(error) else None

    def finished(self, seconds: float) -> None:
        """One more rollout came to its end."""
        self.count += 1
        self.seconds += seconds
