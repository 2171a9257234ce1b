"""A recorded step, computed again: the run is resumed from a checkpoint in a temporary directory, with its own config,
and stops after the step.

Everything is as in training (`stages.run_all`), but nothing is saved, evaluated or exported, and the run's own
directory is only read. The rollouts, the batch and the numbers of the step are then compared with those of the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import environment
from whet.api import Stop, join_cluster, reward_sets, run_loop, watchdog_timeout_s
from whet.checkpoint import Damaged, Saver, all_in, state_of, tokenizer_in
from whet.config.code import digests
from whet.config.load import Loaded, learn_secrets
from whet.config.plan import Plan
from whet.config.resuming import other_code
from whet.config.schema import CheckpointConfig, Config, TrackConfig
from whet.config.sections.run import ProfileConfig
from whet.guard.imports import import_all
from whet.guard.temporary import OwnFolder
from whet.guard.watch import Watch
from whet.replay.steps import Recorded, ReplayStart, Step, is_step
from whet.rewards.bind import RewardFunction
from whet.rewards.combine import RewardSet
from whet.secrets import guarded_output
from whet.start import began, data_files
from whet.storage.paths import brought_here
from whet.track import compare
from whet.track.callbacks import Callbacks
from whet.track.compare import ComparedColumn, Name
from whet.track.log import close_logging, setup_logging
from whet.track.written import read_lines, read_rollouts
from whet.types import CheckpointError, Json

if TYPE_CHECKING:
    from whet.envs.opened import Environments
    from whet.job import Job

Rows = Sequence[Mapping[str, Json]]

NEVER = 2**40
"""Steps between evaluations, so that none is due. With 0 the config would be refused: its held-out data had no use."""


@dataclass(frozen=True)
class Replayed:
    """A step, recorded and computed again."""

    stage: str
    step: Step
    notes: Sequence[str]
    """What is not as it was when the step was recorded, and what could not be compared."""
    recorded: Rows
    """Rows of the rollout file; none where none was written."""
    recorded_batch: Rows
    """Rows of the batch file; none where none was written."""
    again: Rows
    """Rows of the recomputed rollout file; none of given replies in most steps."""
    batch: Rows
    """Rows of the recomputed batch, with the terms of the loss (`track.batches.to_table`)."""
    numbers: Mapping[str, Json]
    """The recorded numbers of the step."""
    numbers_again: Mapping[str, Json]

    @cached_property
    def compared(self) -> list[ComparedColumn]:
        """Columns of rollouts and of the batch, as far as they were recorded, by their file (`rollouts/reward`), and
        the numbers of the step."""
        out = []
        if self.recorded and self.again:
            out += _named("rollouts", compare.rollouts(self.recorded, self.again))
        if self.recorded_batch:
            out += _named("batches", compare.batches(self.recorded_batch, self.batch))
        if self.numbers:
            odd = compare.metrics(self.numbers, self.numbers_again)
            either = {*self.numbers, *self.numbers_again} - {"stage", "step"}
            out.append(ComparedColumn("metrics", len(either), len(odd), odd[0] if odd else None))
        return out

    @property
    def equal(self) -> bool:
        """Every value that was recorded is equal in every bit. False where none was: nothing is proved then."""
        return bool(self.compared) and all(each.differing == 0 for each in self.compared)

    @property
    def names(self) -> list[Name]:
        """The rollouts, in the order of the step's file."""
        return list(compare.by_name(self.again or self.batch))

    def only(self, name: Name) -> Replayed:
        """One rollout of it."""

        def kept(rows: Rows) -> Rows:
            return [row for row in rows if (row["uid"], row["index"]) == name]

        return replace(
            self,
            recorded=kept(self.recorded),
            recorded_batch=kept(self.recorded_batch),
            again=kept(self.again),
            batch=kept(self.batch),
            numbers={},
            numbers_again={},
        )


class Unsaved(Saver):
    """In the place of what saves checkpoints: nothing is written."""

    def __init__(self) -> None:
        """There is no folder."""

    def save(self, *what: Any) -> None: ...

    def wait(self) -> None: ...

    def is_best(self, score: float | None, *, at: tuple[int, int]) -> bool:
        return False

    def oldest(self) -> None:
        return None

    def tidy(self) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


def replay(
    recorded: Recorded,
    step: Step,
    *,
    play: bool = False,
    functions: Mapping[str, RewardFunction] | None = None,
) -> Replayed:
    """A step that can be replayed (`Recorded.step`), from its start, or from the one before where that checkpoint is
    damaged. play: environments are asked; else they answer what the journal of the run has. functions: rewards that
    were given from Python, by name.

    Raises WhetError where the run cannot be resumed: its data has changed, a file is missing, an answer is not in the
    journal.
    """
    step, start, state, damaged = _whole_start(recorded, step, play=play)
    with aside(recorded, step.step) as (home, loaded), ExitStack() as stack:
        loaded = replace(loaded, code=digests(loaded.stages, functions or {}))
        setup_logging(home, level=loaded.config.track.log_level)
        stack.callback(close_logging)
        rewards = reward_sets(loaded, functions or {}, stack)  # forks: before torch and its threads are there
        import_all(loaded.config.imports)
        with environment.importing():
            from whet.envs.opened import Environments
            from whet.stages import run_all
        journal = recorded.path / "journal"
        worlds = Environments() if play else Environments(journal, told_by=recorded.code)
        stop = Stop()
        wanted = recorded.names[step.stage], step.step
        ends = Callbacks(lambda row: (row["stage"], row["step"]) == wanted, None, stop=stop)
        job = opened(loaded, recorded.plans, rewards, worlds, stop, stack)
        records = replace(job.records, saver=Unsaved(), trackers=[*job.records.trackers, ends])
        branches = any(recorded.place(change) == start.at for change in recorded.branches)
        job = replace(job, records=records, change=branches)
        run_loop(run_all(job, start.checkpoint, state, ahead=False))  # what later stages read may be gone
        notes = [*damaged, *_notes(recorded, loaded, step.stage, state)]
        return _found(recorded, step, home, notes, state)


def _whole_start(recorded: Recorded, step: Step, *, play: bool) -> tuple[Step, ReplayStart, Json, list[str]]:
    """The step with the latest start whose files are as they were written, this start, the state there, and a note
    for each checkpoint that was passed over. Raises CheckpointError where none is left."""
    notes: list[str] = []
    while (start := step.start) is not None:
        if start.checkpoint is None:
            return step, start, {"stage": 0, "step": -1}, notes
        try:
            return step, start, state_of(start.checkpoint), notes
        except Damaged as e:
            notes.append(f"{e}: the replay starts before this checkpoint")
            recorded = replace(recorded, starts=[s for s in recorded.starts if s != start])
            step = recorded.step(step.stage, step.step, play=play)
    raise CheckpointError(
        f"{'; '.join(notes)}, but there is no such start: {step.why}. Put the checkpoint back from a copy "
        "(checkpoint.upload_to), or replay a step that starts elsewhere: `whet replay RUN` lists them"
    )


@contextmanager
def aside(recorded: Recorded, step: int) -> Iterator[tuple[Path, Loaded]]:
    """A temporary run directory, and the config of a run in it that records this step: with other records, and without
    checkpoints, exports, evaluations and trackers. None of these keys changes a number (config/resuming.py)."""
    with guarded_output(), environment.one_run(), OwnFolder("replay") as folder:
        home = folder / "run"
        home.mkdir()
        learn_secrets(recorded.loaded)
        loaded = recorded.loaded
        here = partial(_quiet, home=home, step=step)
        loaded = replace(loaded, config=here(loaded.config), stages=tuple(map(here, loaded.stages)))
        environment.prepare(recorded.plans[0].threads, loaded.config.machine.logprob_parity != "off")
        last = next(reversed(all_in(recorded.path / "checkpoints")), None)
        yield home, replace(brought_here(loaded), day=began(recorded.path), tokenizer=tokenizer_in(last))


def _quiet(cfg: Config, home: Path, step: int) -> Config:
    evaluations: dict[str, object] = {"at_start": False, "at_end": False}
    if cfg.rollout.sync_interval == 1 or not cfg.eval.interval:
        # else evaluations decide when the engine gets new weights
        evaluations |= {"interval": NEVER}
    contents = cfg.checkpoint.save_contents
    return cfg.model_copy(
        update={
            "run_dir": str(home),
            "dirs": {},
            "checkpoint": CheckpointConfig(interval=0, export=False, load_contents=contents),
            "track": TrackConfig(
                trackers=("jsonl",),
                rollouts_interval=step,
                batches_interval=step,
                log_level=cfg.track.log_level,
            ),
            "profile": ProfileConfig(),
            "eval": cfg.eval.model_copy(update=evaluations),
            "train": cfg.train.model_copy(update={"early_stopping": None}),
        }
    )


def opened(
    loaded: Loaded,
    planned: Sequence[Plan],
    rewards: Sequence[RewardSet],
    environments: Environments,
    stop: Stop,
    stack: ExitStack,
) -> Job:
    """A run of which nothing is shown; what it has opened is closed with the stack."""
    from whet.data.recognise import with_columns
    from whet.job import open_job
    from whet.track.display import Display
    from whet.track.record import RunDirectory

    loaded, _ = with_columns(loaded)
    directory = RunDirectory(Path(loaded.config.run_dir), loaded.names)
    stack.callback(directory.close)
    display = Display([(p.name, p.total_steps or 0) for p in planned], quiet=True)
    stack.callback(display.close)
    openers = join_cluster(loaded, planned, rewards, stack)
    watch = stack.enter_context(Watch(limit_s=watchdog_timeout_s(loaded)))
    return open_job(
        loaded,
        planned,
        rewards,
        directory=directory,
        display=display,
        stop=stop,
        watch=watch,
        stack=stack,
        environments=environments,
        **openers,
    )


# ---------------------------------------------------------------- what is compared with the record


def _notes(recorded: Recorded, loaded: Loaded, stage: int, state: Json) -> list[str]:
    """What is not as it was in the run, and what the terms of the loss lack."""
    from whet.start import arithmetic_of
    from whet.track.manifest import file_sha256, other_arithmetic, other_data

    changed = other_code(state.get("code") or recorded.code, loaded.code)
    notes = [f"{change.at[0]} has changed since the run: {change.old} -> {change.new}" for change in changed]
    if recorded.elsewhere:
        notes.append(
            "separate explorers sampled the rollouts; here one process samples them, which gives the same"
        )
    now = {"data_sha256": {str(file): file_sha256(file) for file in data_files(loaded)}}
    notes += [f"data {file} has changed since the run" for file in other_data(recorded.manifest, now)]
    told = other_arithmetic(recorded.manifest, {"arithmetic": arithmetic_of(loaded)})
    notes += [f"this machine computes differently: {told.partition(': ')[2]}"] if told else []
    r, lora = recorded.plans[stage].algorithm, loaded.stages[stage].model.lora
    if r.loss == "gkd" or (r.kl.coef > 0 and r.kl.estimator == "full"):
        notes.append(
            "the divergence over many tokens is added where the loss is summed: it is not among the terms"
        )
    if lora is not None and lora.dropout > 0:
        notes.append("the terms of the loss are those without dropout (model.lora.dropout)")
    return notes


def _waiting(state: Json) -> set[int]:
    """Tasks whose rollouts a checkpoint has: they are not sampled again."""
    from whet.buffer.groups import restored

    return {restored(group).task.uid for group in (state.get("buffer") or {}).get("waiting", ())}


def _found(recorded: Recorded, step: Step, home: Path, notes: list[str], state: Json) -> Replayed:
    name = recorded.names[step.stage]
    file = f"{name}-step-{step.step:06d}.parquet"
    rollouts, batches = (recorded.file(folder, step.stage, step.step) for folder in ("rollouts", "batches"))
    again = read_rollouts(home / "rollouts" / file) if (home / "rollouts" / file).exists() else []
    lines = [x for x in read_lines(home / "metrics.jsonl") if (x["stage"], x["step"]) == (name, step.step)]
    (numbers,) = filter(is_step, lines)
    there = _waiting(state)
    if waited := [row for row in again if row["uid"] in there]:
        notes.append(
            f"{len(waited)} of {len(again)} rollouts waited in the checkpoint: they were not sampled again"
        )
    if not rollouts:
        notes.append(
            "its rollouts were not recorded (track.rollouts_interval; of given replies only the first step's are)"
        )
    if not batches:
        notes.append(
            "its batch was not recorded (track.batches_interval): the trainer's log-probs and the terms of the loss "
            "are compared by the numbers of the step alone"
        )
    return Replayed(
        stage=name,
        step=step,
        notes=notes,
        recorded=read_rollouts(rollouts) if rollouts else [],
        recorded_batch=compare.read_batch(batches) if batches else [],
        again=again,
        batch=compare.read_batch(home / "batches" / file),
        numbers=recorded.numbers(step.stage, step.step) or {},
        numbers_again=numbers,
    )


def _named(folder: str, found: Sequence[ComparedColumn]) -> list[ComparedColumn]:
    return [replace(each, field=f"{folder}/{each.field}") for each in found]
