"""Functions of the user's that get every row of numbers and may stop the run (on_step and on_eval of `whet.train`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from whet.track.metrics import is_evaluation
from whet.types import Json, Metrics, WhetError

Callback = Callable[[dict[str, Json]], object]
"""Gets a row: `stage`, `step`, and the numbers of metrics.jsonl and timings.jsonl by name. True stops the run after
this step, as Ctrl-C does: it is saved, and the same call resumes it. None and False let it go on."""


class Stoppable(Protocol):
    requested: bool


@dataclass(frozen=True)
class Callbacks:
    """A tracker (`trackers.Tracker`) that hands each row to the user's functions. What they raise ends the run."""

    on_step: Callback | None
    on_eval: Callback | None
    stop: Stoppable

    def log(self, stage: str, step: int, *, metrics: Metrics, timings: Metrics) -> None:
        name, call = ("on_eval", self.on_eval) if is_evaluation(metrics) else ("on_step", self.on_step)
        if call is None:
            return
        try:
            answer = call({"stage": stage, "step": step, **metrics, **timings})
        except Exception as error:
            error.add_note(f"raised by {name}, after step {step} of stage {stage!r}; the run ends here")
            raise
        if answer is not None and not isinstance(answer, bool | np.bool_):
            raise WhetError(f"{name} returned {answer!r:.60}; expected True, which stops the run, or None")
        if answer:
            self.stop.requested = True

    def close(self) -> None:
        """Nothing is open."""
