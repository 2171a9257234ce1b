"""`whet.load_run(path)`: the record of a run, for Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from whet.arguments import PATH, expect
from whet.track.metrics import is_evaluation
from whet.track.overview import Lines, read, rollout_file
from whet.track.timeline import Span
from whet.track.timeline import read as read_timeline
from whet.track.written import list_steps, read_config, read_lines, read_table
from whet.types import DataError, Json

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Run:
    """A run directory. Each property reads its file at access; for a run in progress it has what is written so far.

    Every property raises DataError if its file was not written by a run.
    """

    path: Path
    """The run directory."""

    @property
    def config(self) -> dict[str, Json]:
        """config.yaml as plain values."""
        return read_config(self.path)

    @property
    def metrics(self) -> Lines:
        """A dict for each line of metrics.jsonl: `stage`, `step` and numbers; one that was not finite is NaN."""
        return read_lines(self.path / "metrics.jsonl")

    @property
    def timings(self) -> Lines:
        """The same of timings.jsonl: seconds, tokens per second, memory."""
        return read_lines(self.path / "timings.jsonl")

    @property
    def stages(self) -> list[str]:
        """Names of the stages that have begun, in order."""
        return list(dict.fromkeys(line["stage"] for line in self.metrics))

    @property
    def evals(self) -> Lines:
        """The lines of metrics that are evaluations."""
        return [line for line in self.metrics if is_evaluation(line)]

    @property
    def timeline(self) -> list[Span]:
        """What the processes of the run did when, in nanoseconds of wall time. Empty before the first step."""
        path = self.path / "timeline.json"
        return read_timeline(path) if path.exists() else []

    @property
    def steps(self) -> list[tuple[str, int]]:
        """(stage, step) of each step whose rollouts are written down."""
        found = [(stage, step) for stage, step, _ in list_steps(self.path / "rollouts")]
        order = self.stages
        return sorted(found, key=lambda at: (order.index(at[0]) if at[0] in order else len(order), at))

    def rollouts(self, step: int, stage: str | None = None) -> pa.Table:
        """The rollouts of a step, a row each, with the columns of `track.written.ROLLOUTS`; of the last stage that has
        this step, if none is given. `.to_pandas()` makes a data frame of it.

        Raises DataError, which names the recorded steps.
        """
        return read_table(rollout_file(self.path, step, stage))

    def eval_rollouts(self, step: int, stage: str | None = None) -> pa.Table:
        """The replies of the evaluation after a step, as `rollouts` gives them."""
        return read_table(rollout_file(self.path, step, stage, folder="eval"))


def load_run(path: str | Path) -> Run:
    """The record of a run, from its run directory.

    Raises DataError if this is not a run directory, or a file in it was not written by a run.
    """
    expect({"path": (path, PATH)}, DataError)
    run_dir = Path(path)
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a run directory: no such folder")
    read(run_dir)
    return Run(run_dir)
