"""What trackers are made with."""

from __future__ import annotations

from dataclasses import dataclass

from whet.config.schema import Config
from whet.track.record import RunDirectory


@dataclass(frozen=True, slots=True)
class Sinks:
    cfg: Config
    record: RunDirectory
    resumed: tuple[int, int] | None
    """(stage index, step) of the checkpoint that the run resumes from; None: a new run."""

    def prefix(self, stage: str) -> str:
        """What goes before a number's name where all stages share one list: nothing, if there is one stage."""
        return f"{stage}/" if len(self.record.stages) > 1 else ""
