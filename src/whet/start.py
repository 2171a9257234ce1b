"""Where a run begins: at its first step, or at a checkpoint; what is checked and written down there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from whet import checkpoint
from whet.config.load import Loaded
from whet.config.parse import as_yaml
from whet.config.plan import halves
from whet.config.resuming import RESUME, Change, finished_with_others, longer, other_code, taken
from whet.config.schema import Config
from whet.config.secrets import for_people
from whet.early_stopping import early_stopping_of
from whet.storage.manifests import place_of
from whet.track import run_paths
from whet.track.files import reading
from whet.types import CheckpointError, ConfigError, DataError, Json

if TYPE_CHECKING:
    from whet.track.record import RunDirectory


@dataclass(frozen=True)
class RunStart:
    """Where a run begins."""

    checkpoint: Path | None
    """None: at its beginning."""
    state: Json
    """Of that checkpoint, as `checkpoint.read_state` gives it."""
    changes: list[Change]
    """Settings that change results and differ from the checkpoint's."""
    code: list[Change] = field(default_factory=list)
    """Files of the user's code that differ from those that the checkpoint was trained with."""

    @property
    def at(self) -> tuple[int, int] | None:
        """Stage and step."""
        return (self.state["stage"], self.state["step"]) if self.checkpoint else None


def check_place(loaded: Loaded) -> None:
    """ConfigError for the config.yaml of a run that is not in its run_dir any more: another run would begin there."""
    file, run_dir = loaded.file, Path(loaded.config.run_dir)
    if file is None or not loaded.where("run_dir").startswith(f"{file}:"):
        return
    folder = file.parent
    if (folder / "manifest.json").is_file() and folder.resolve() != run_dir.resolve():
        raise ConfigError(
            f"{file}: run_dir={run_dir} is another folder than that of this run, which was moved, or is seen from "
            f"elsewhere: run_dir={folder} goes on there; or give the folder of a new run"
        )


def find_checkpoint(loaded: Loaded, run_dir: Path, *, change: bool) -> RunStart:
    """Where the run begins. Raises CheckpointError before any file is overwritten."""
    found = find_start(loaded, run_dir)
    if found is None:
        return RunStart(None, {"stage": 0, "step": -1, "done": False}, [])
    path, state = found
    with reading(path / checkpoint.STATE):
        place = state["stage_name"], state["step"]
        over = is_finished(loaded, run_dir, state)
        changes = taken(
            path, state["config"], loaded.as_given, at=place, left=_left(state), change=change, over=over
        )
        code = other_code(state.get("code", {}), loaded.code)
        if over and code:
            raise CheckpointError(finished_with_others(path, code))
        checkpoint.check_contents(path, state, loaded.config.checkpoint.load_contents)
    return RunStart(path, state, changes, code)


def _left(state: Json) -> int | None:
    """The steps that a checkpoint's stage had after it. None: a release wrote it that did not keep their number."""
    if state["done"] and state.get("stopped_early") is None:
        return 0
    return state["steps"] - state["step"] if "steps" in state else None


def find_start(loaded: Loaded, run_dir: Path) -> tuple[Path, Json] | None:
    """The checkpoint to resume from, by checkpoint.resume, and its state. A damaged checkpoint that the user named is
    refused; without a name the newest undamaged checkpoint is taken."""
    resume, saved = loaded.config.checkpoint.resume, run_dir / "checkpoints"
    if resume == "auto":
        return checkpoint.newest_whole(saved)
    if resume in ("never", "fresh"):
        if run_paths.holds_run(loaded.config):
            raise CheckpointError(
                f"{run_dir} already holds a run and checkpoint.resume=never; give another run_dir, or "
                "checkpoint.resume=fresh, which moves that run aside"
            )
        return None
    checkpoint.newest(saved)  # mends what a kill left half-done
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint.resume={resume}: no such folder; expected auto, never, fresh or the folder of a checkpoint"
        )
    return path, checkpoint.read_state(path)


def began(home: Path, resumed: Path | None = None) -> date:
    """The day on which a run began, UTC: that of its first start in manifest.json. A run that is resumed from another
    run's checkpoint has begun with that one. Today, where nothing is written down."""
    from whet.track.written import read_manifest  # pyarrow is heavy

    other = run_paths.run_of(resumed) if resumed else home
    for run_dir in (home, other):
        if starts := read_manifest(run_dir).get("starts"):
            try:
                return datetime.fromisoformat(starts[0]["started_utc"]).date()
            except (KeyError, ValueError, TypeError) as error:
                raise DataError(
                    f"{run_dir}: its manifest.json has no date of the first start (started_utc: {error}); is the file "
                    "from another program, or damaged?"
                ) from error
    return datetime.now(UTC).date()


def may_go_on(cfg: Config) -> bool:
    """Whether there is a checkpoint to resume from."""
    resume = cfg.checkpoint.resume
    return resume not in RESUME or (resume == "auto" and bool(checkpoint.all_in(run_paths.checkpoints(cfg))))


def is_finished(loaded: Loaded, run_dir: Path, state: Json) -> bool:
    """Whether the last stage is done and exported: a kill can fall between its last checkpoint and its export."""
    export = run_dir / "export" / loaded.names[-1]
    exported = export.is_dir() or not loaded.stages[-1].checkpoint.export
    return is_done(loaded, state) and state["stage"] == len(loaded.stages) - 1 and exported


def is_done(loaded: Loaded, state: Json) -> bool:
    """Whether a checkpoint is at the end of its stage, whose length or early stopping may have changed."""
    settings = state.get("stopped_early")
    if settings is None:
        return bool(state["done"]) and not longer(state["config"], loaded.as_given, state["stage_name"])
    if state["stage_name"] not in loaded.names:
        return True
    stage = loaded.stages[loaded.names.index(state["stage_name"])]
    return bool(settings == early_stopping_of(stage))


def check_record(directory: RunDirectory, start: RunStart) -> None:
    """Check the record against the checkpoint, if the checkpoint is of this run directory."""
    path, state = start.checkpoint, start.state
    if path and "record" in state and path.resolve().parent == (directory.path / "checkpoints").resolve():
        with reading(path / checkpoint.STATE):
            directory.check(state["record"], path, at=(state["stage"], state["step"]))


def note_start(loaded: Loaded, directory: RunDirectory, start: RunStart, *, beside: bool) -> None:
    """Write config.yaml and manifest.json, and drop from the record what is later than the checkpoint; a resumed run
    records its changes. All of it once the checkpoint has been taken: a resume that is refused changes nothing. beside:
    the process explores or evaluates beside a trainer, and takes no checkpoint."""
    from whet.track import history
    from whet.track.manifest import describe

    cfg = loaded.config
    shown = for_people(loaded.as_given, loaded.written)
    text = as_yaml(shown)
    bits = arithmetic_of(loaded)
    described = describe(
        config=text, seed=cfg.seed, data_files=data_files(loaded), code=loaded.code, bits=bits
    )

    def write() -> None:
        if start.checkpoint:
            changes = [*start.changes, *history.since_last_start(directory.path, shown)]
            history.write_down(directory, changes, start.state, unasked=start.code)
            set_aside_export(loaded, directory.path, start.state)
        directory.write_config(text)
        directory.write_manifest(described)
        if not beside:
            directory.truncate_to(start.state["stage"], start.state["step"])

    if start.checkpoint:
        history.compare_starts(directory, described)
        if directory.last_start and not beside:
            directory.resume()
    directory.once_resumed(write)


def arithmetic_of(loaded: Loaded) -> dict[str, str | None]:
    """What determines the bits of a run's numbers on this machine."""
    from whet.job import pick_device
    from whet.models.arithmetic import facts

    device = pick_device(loaded.config).type
    optimizers = {
        section.optimizer.name for stage in loaded.stages for section in (stage.train, stage.critic)
    }
    return facts(
        device,
        kernels=loaded.config.machine.kernels,
        halves=halves(loaded.stages, device),
        torch_products="muon" in optimizers or any(s.train.precision.compute for s in loaded.stages),
    )


def set_aside_export(loaded: Loaded, run_dir: Path, state: Json) -> None:
    """A finished stage whose length has changed: files of its former end are renamed to its step. An export of this
    step that is there already (`whet export`) stays; the next free name is taken: STAGE-step-N-2."""
    own = run_dir / "export" / state["stage_name"]
    if own.is_dir() and state["done"] and not is_done(loaded, state):
        name = f"{own.name}-step-{state['step']:06d}"
        names = chain((name,), (f"{name}-{n}" for n in count(2)))
        os.replace(own, next(new for each in names if not (new := own.with_name(each)).exists()))


def data_files(loaded: Loaded) -> list[Path]:
    """Files named by the config, for the manifest's hashes; readers handle folders and patterns."""
    sources = [s for c in loaded.stages for s in (*c.data.train, *c.data.demonstrations, *c.data.eval)]
    named = [p for s in sources if s.path for p in ([s.path] if isinstance(s.path, str) else s.path)]
    return sorted({Path(p) for p in named if Path(p).is_file()})


def written(run_dir: Path, state: Json) -> tuple[list[Path], list[Path]]:
    """The checkpoints up to the one with this state, and the exports, oldest first."""
    saved = run_dir / "checkpoints"
    found = checkpoint.all_in(saved)
    upto = [p for p in found if (place_of(p.name) or (0, 0)) <= (state["stage"], state["step"])]
    exports = [p for p in (run_dir / "export").glob("*") if p.is_dir() and not p.name.startswith(".")]
    return upto, sorted(exports, key=lambda p: p.stat().st_mtime_ns)
