"""A stage, alive: its four parts, which know as little of each other as the loop lets them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from whet import checkpoint
from whet.context import Context
from whet.explorer import Explorer
from whet.learner import SIMULATED, Learner
from whet.recorder import Recorder
from whet.track.files import reading
from whet.track.history import other_rows
from whet.training.engine import TrainEngine
from whet.types import CheckpointError, Json
from whet.weights import Weights


@dataclass(frozen=True)
class Stage:
    """One stage of a run."""

    context: Context
    explorer: Explorer
    learner: Learner
    weights: Weights
    recorder: Recorder

    def engines(self) -> dict[str, TrainEngine]:
        """The models of a checkpoint."""
        sampler = self.weights.sampler
        return self.learner.engines() | ({} if sampler is None else {"sampler": sampler})

    def state(self) -> dict[str, Json]:
        return self.learner.state() | self.weights.state() | self.explorer.state()

    def restore(self, path: Path, state: Json, *, changed: bool = False) -> int:
        """Resume from `state`; CheckpointError if it lacks a part. changed: a changed config may add fresh parts.
        Returns the number of steps that are done."""
        engines, sampler = self.engines(), self.weights.sampler
        if state.get(SIMULATED, False) != self.learner.simulated:
            was = "simulated" if SIMULATED in state else "not simulated"
            raise CheckpointError(
                f"{path}: training was {was} up to here, and train.engine={self.context.cfg.train.engine} now: a run "
                "cannot go on from the one to the other; give another run_dir, or checkpoint.resume=fresh"
            )
        copied = sampler is not None and changed and not (path / "sampler").is_dir()
        if copied:
            engines.pop("sampler")
        checkpoint.load(path, engines, wanted=self.context.cfg.checkpoint.load_contents)
        if copied and sampler is not None:
            sampler.copy_from(self.learner.policy)
        with reading(path / checkpoint.STATE):
            return self._restore(state, changed=changed)

    def _restore(self, state: Json, *, changed: bool) -> int:
        done = int(state["step"])
        self.recorder.restore(state)
        self.weights.restore(state)
        rows = self.learner.restore(state, changed=changed) + self.explorer.restore(state, changed=changed)
        self.recorder.directory.resumed()
        other_rows(self.recorder.directory, rows, self.context.name, done)
        self.context.monitor.step = done
        return done

    @property
    def ended(self) -> bool:
        """Whether the last step is done."""
        return self.recorder.ended(self.context.monitor.step)

    async def close(self) -> None:
        """End background work."""
        await self.explorer.close()
        self.learner.close()
