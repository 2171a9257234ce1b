"""The recorder alone: what it writes, when and in which order, and what stays undone where a part of it fails.

The run directory is real and notes what it is asked. Models, trackers, checkpoints, uploads and environments are
doubles.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from test_train_torch import random_groups
from whet.batch import pack
from whet.config.schema import Config
from whet.context import Context
from whet.learner import Learned
from whet.recorder import HeldOut, Recorder
from whet.rewards.combine import RewardSet
from whet.track.metrics import summarise
from whet.track.monitor import Monitor
from whet.track.record import RunDirectory
from whet.track.sinks import Sinks
from whet.track.trackers import Jsonl
from whet.track.written import read_lines
from whet.types import CheckpointError, Group, Json, Metrics, Task, WhetError

Notes = list[str]


def noting(notes: Notes, name: str, target: Any, *methods: str) -> Any:
    """The same object, of which these calls are noted."""

    def noted(what: str, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        notes.append(what)
        return method(*given, **named)

    for method in methods:
        setattr(target, method, partial(noted, f"{name}.{method}", getattr(target, method)))
    return target


class Shown:
    """A display."""

    def __init__(self) -> None:
        self.steps: list[tuple[Metrics, Metrics]] = []
        self.evaluations: list[tuple[int, Metrics]] = []
        self.messages: list[str] = []

    def phase(self, name: str) -> None: ...

    def phase_over(self, doing: object) -> None: ...

    def step(self, metrics: Metrics, timings: Metrics) -> None:
        self.steps.append((metrics, timings))

    def evaluated(self, step: int, metrics: Metrics) -> None:
        self.evaluations.append((step, metrics))

    def message(self, text: str) -> None:
        self.messages.append(text)


class Lines:
    """A tracker of numbers alone."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, Metrics, Metrics]] = []

    def log(self, stage: str, step: int, *, metrics: Metrics, timings: Metrics) -> None:
        self.lines.append((stage, step, metrics, timings))

    def close(self) -> None: ...


class Shows(Lines):
    """A tracker that also takes text."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int, list[Mapping[str, Json]]]] = []

    def show(self, stage: str, step: int, rows: Sequence[Mapping[str, Json]]) -> None:
        self.rows.append(("eval", step, list(rows)))

    def show_rollouts(self, stage: str, step: int, rows: Sequence[Mapping[str, Json]]) -> None:
        self.rows.append(("rollouts", step, list(rows)))


class Breaks(Shows):
    """A tracker whose server has gone, for one of its calls."""

    def __init__(self, at: str) -> None:
        super().__init__()

        def gone(*_: Any, **named: Any) -> None:
            raise ConnectionError("the server has gone")

        setattr(self, at, gone)


class Saves:
    """A saver."""

    def __init__(self) -> None:
        self.saved: list[tuple[Mapping[str, Any], Json]] = []
        self.best: list[tuple[float | None, tuple[int, int]]] = []

    def wait(self) -> None: ...

    def save(self, engines: Mapping[str, Any], state: Json) -> None:
        self.saved.append((engines, state))

    def is_best(self, score: float | None, *, at: tuple[int, int]) -> bool:
        self.best.append((score, at))
        return score is not None and score > 0.5

    def oldest(self) -> tuple[int, int]:
        return 0, 1


class Worlds:
    """Environments."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int, int]] = []
        self.oldest: list[tuple[Any, int]] = []

    def at(self, stage: int, step: int, *, ahead: int) -> None:
        self.places.append((stage, step, ahead))

    def saved(self, oldest: Callable[[], Any], *, ahead: int) -> None:
        self.oldest.append((oldest(), ahead))

    def timings(self) -> Metrics:
        return {"env/host_restarts_count": 2.0}


@dataclass
class Stand:
    """A recorder, and what stands around it."""

    recorder: Recorder
    notes: Notes
    display: Shown
    tracker: Lines
    saver: Saves
    worlds: Worlds

    @property
    def path(self) -> Path:
        return self.recorder.directory.path

    def order(self) -> Notes:
        """Without what the directory's own sync does to the timeline."""
        return [note for note in self.notes if note != "timeline.flush"]

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Json]]:
        return read_lines(self.path / name)

    def files(self, folder: str) -> list[str]:
        return sorted(file.name for file in (self.path / folder).glob("*"))

    def record(self, done: int, groups: Sequence[Group] | None = None) -> Metrics:
        played = GROUPS if groups is None else groups
        return self.recorder.record(done, played, learned(), {"ledger/balance": 3.0})

    def evaluate(self, done: int) -> None:
        asyncio.run(self.recorder.evaluate(done))


GROUPS = random_groups(count=3, size=3)


def learned(groups: Sequence[Group] = GROUPS[:2]) -> Learned:
    """From the first groups, with the advantage 0.5 for each token of the first rollout, 1.5 for the second ..."""
    batch = pack(list(groups))
    adv_N = (batch.rollout_N + 0.5).float() * batch.mask_N
    return Learned(replace(batch, adv_N=adv_N), list(groups), {"train/loss": 0.25}, (), 6.0)


def stand(
    folder: Path,
    tracker: Lines | None = None,
    *,
    kind: str = "online",
    steps: int = 6,
    judges: bool = False,
    loss: Metrics | None = None,
    **sections: Any,
) -> Stand:
    """A recorder of stage 0 of one. loss: what held-out replies measure."""
    cfg = Config.model_validate({"eval": {"at_start": False, "interval": 0, "at_end": False}} | sections)
    notes: Notes = []
    display, saver, worlds, tracker = Shown(), Saves(), Worlds(), tracker or Lines()
    directory = RunDirectory(folder / "run", ["main"])
    writes = ("write_batch", "write_rollouts", "write_seconds", "write_eval", "write_samples", "sync", "held")
    noting(notes, "directory", directory, *writes)
    noting(notes, "timeline", directory.timeline, "flush")
    noting(notes, "saver", saver, "wait", "save")
    noting(notes, "worlds", worlds, "at", "saved")
    noting(notes, "display", display, "step", "evaluated")
    noting(
        notes, "tracker", tracker, "log", *(["show", "show_rollouts"] if isinstance(tracker, Shows) else [])
    )
    jsonl = noting(notes, "jsonl", Jsonl(Sinks(cfg, directory, None)), "log")
    watch: Any = SimpleNamespace(beat=lambda what: None, last=lambda: ("", 0.0))
    shown: Any = display
    monitor = Monitor("main", shown, watch, directory.timeline)
    plan: Any = SimpleNamespace(steps=steps, judges=judges, rows=None, mode="synchronous")
    context = Context(
        cfg, plan, "main", 0, SimpleNamespace(kind=kind), monitor, SimpleNamespace(requested=False)  # type: ignore[arg-type]
    )  # fmt: skip

    async def ask(tasks: list[Task], how: Any) -> list[Group]:
        notes.append("ask")
        return GROUPS

    def gather() -> None:
        notes.append("gather")

    def export(path: Path) -> None:
        notes.append(f"export {path.relative_to(directory.path)}")
        path.mkdir(parents=True)

    held = HeldOut(
        [g.task for g in GROUPS], ask, RewardSet({}, None), None if loss is None else lambda: dict(loss)
    )
    recorder = Recorder(
        context, directory, [jsonl, tracker], shown, held, saver,  # type: ignore[arg-type]
        uploads=SimpleNamespace(export=lambda path: notes.append(f"upload {path.relative_to(directory.path)}")),  # type: ignore[arg-type]
        gather=gather, write_export=export, fingerprint={"seed": 7}, code={"a.py": "d1"},
        environments=worlds,  # type: ignore[arg-type]
        metrics_so_far=partial(read_lines, directory.path / "metrics.jsonl"),
    )  # fmt: skip
    return Stand(recorder, notes, display, tracker, saver, worlds)


# ---------------------------------------------------------------- a step


def test_a_step_is_a_line_of_all_its_numbers_and_a_line_of_seconds(tmp_path: Path) -> None:
    at = stand(tmp_path)
    numbers = at.record(1)
    assert numbers == summarise(GROUPS) | {"train/loss": 0.25, "ledger/balance": 3.0}
    assert at.lines() == [numbers | {"stage": "main", "step": 1}]
    (timings,) = at.lines("timings.jsonl")
    assert timings["env/host_restarts_count"] == 2.0
    assert timings["speed/tokens_per_s"] == numbers["rollout/tokens_sum"] / timings["time/step_s"]
    ((*place, metrics, seconds),) = at.tracker.lines
    assert (place, metrics) == (["main", 1], numbers)
    assert seconds | {"stage": "main", "step": 1} == timings
    assert at.display.steps == [(numbers, seconds)]


def test_files_are_written_where_they_are_due_and_before_the_line_that_says_so(tmp_path: Path) -> None:
    """A record whose line of a step is there has the files of the step, too."""
    at = stand(tmp_path, track={"rollouts_interval": 2, "batches_interval": 3})
    for done in range(1, 7):
        at.notes.clear()
        at.record(done)
    assert at.files("rollouts") == [f"main-step-{step:06d}.parquet" for step in (2, 4, 6)]
    assert at.files("batches") == [f"main-step-{step:06d}.parquet" for step in (3, 6)]
    assert not (at.path / "seconds").exists(), "there is no environment"
    assert at.notes == [
        "directory.write_batch", "directory.write_rollouts", "jsonl.log", "tracker.log", "display.step",
        "timeline.flush", "worlds.at",
    ]  # fmt: skip
    assert at.worlds.places == [(0, done, 0) for done in range(1, 7)]


def test_every_rollout_that_was_played_is_written_and_those_of_the_batch_have_their_advantage(
    tmp_path: Path,
) -> None:
    """In the order in which they have left; a group that was not trained on has none."""
    at = stand(tmp_path, track={"rollouts_interval": 1, "batches_interval": 1})
    at.record(1, [GROUPS[2], *GROUPS[:2]])
    rows = pq.read_table(at.path / "rollouts/main-step-000001.parquet").to_pylist()
    assert [(r["uid"], r["index"]) for r in rows] == [(uid, n) for uid in (2, 0, 1) for n in range(3)]
    assert [r["advantage"] for r in rows] == [None] * 3 + [pytest.approx(n + 0.5) for n in range(6)]
    trained = pq.read_table(at.path / "batches/main-step-000001.parquet").to_pylist()
    assert [(r["uid"], r["index"]) for r in trained] == [(uid, n) for uid in (0, 1) for n in range(3)]


def test_with_an_environment_the_seconds_of_the_turns_are_written_beside_the_rollouts(tmp_path: Path) -> None:
    env = {"make": "games.py:Game"}
    at = stand(tmp_path, rollout={"env": env}, track={"rollouts_interval": 2})
    timed = [Group(g.task, tuple(replace(r, seconds=((1.5, 0.25),)) for r in g.rollouts)) for g in GROUPS]
    for done in (1, 2):
        at.record(done, timed)
    assert at.files("seconds") == at.files("rollouts") == ["main-step-000002.parquet"]
    rows = pq.read_table(at.path / "seconds/main-step-000002.parquet").to_pylist()
    assert [(r["sampling_s"], r["environment_s"]) for r in rows] == [([1.5], [0.25])] * 9


def test_where_rollouts_are_those_of_the_data_one_step_of_them_is_an_example(tmp_path: Path) -> None:
    at = stand(tmp_path, kind="demonstrations", track={"rollouts_interval": 1})
    for done in range(1, 4):
        at.record(done)
    assert at.files("rollouts") == ["main-step-000001.parquet"]
    assert len(at.lines()) == 3


def test_rollouts_are_shown_to_trackers_that_take_them_in_steps_that_are_recorded(tmp_path: Path) -> None:
    at = stand(tmp_path, tracker := Shows(), track={"rollouts_interval": 2, "log_samples": 4})
    for done in range(1, 5):
        at.record(done)
    assert [(what, step, len(rows)) for what, step, rows in tracker.rows] == [
        ("rollouts", 2, 4),
        ("rollouts", 4, 4),
    ]
    for _, _, rows in tracker.rows:
        for row in rows:
            trained = row["uid"] in (0, 1)
            assert row["advantage"] == (row["uid"] * 3 + row["index"] + 0.5 if trained else None)


@pytest.mark.parametrize("log_samples", [0, 2])
def test_a_tracker_of_numbers_alone_is_shown_nothing(tmp_path: Path, log_samples: int) -> None:
    at = stand(tmp_path, track={"rollouts_interval": 1, "log_samples": log_samples})
    at.record(1)
    assert len(at.tracker.lines) == 1


def test_the_record_has_a_step_whose_tracker_fails_and_the_step_ends_with_its_error(tmp_path: Path) -> None:
    """The run directory is told first. Nobody else hears of the step: a resumed run does it again."""
    at = stand(tmp_path, Breaks("log"), track={"rollouts_interval": 1})
    with pytest.raises(ConnectionError, match="the server has gone") as caught:
        at.record(1)
    assert caught.value.__notes__ == ["raised by Breaks (track.trackers), step 1 of stage 'main'"]
    assert [line["step"] for line in at.lines()] == [1]
    assert at.files("rollouts") == ["main-step-000001.parquet"]
    assert at.display.steps == []
    assert at.worlds.places == []


def test_rollouts_that_a_tracker_refuses_are_in_the_record(tmp_path: Path) -> None:
    at = stand(tmp_path, Breaks("show_rollouts"), track={"rollouts_interval": 1, "log_samples": 1})
    with pytest.raises(ConnectionError, match="the server has gone") as caught:
        at.record(1)
    assert caught.value.__notes__ == ["raised by Breaks (track.trackers), step 1 of stage 'main'"]
    assert at.files("rollouts") == ["main-step-000001.parquet"]
    assert at.lines() == [], "the step was not recorded"


# ---------------------------------------------------------------- evaluations


def test_an_evaluation_is_written_before_it_is_shown_and_has_all_its_numbers(tmp_path: Path) -> None:
    at = stand(tmp_path, tracker := Shows(), judges=True, loss={"eval/loss": 0.75}, eval={"log_samples": 2})
    at.evaluate(3)
    (line,) = at.lines()
    assert (line["stage"], line["step"], line["eval/loss"]) == ("main", 3, 0.75)
    assert line["eval/s/tasks"] == 3.0
    assert at.lines("timings.jsonl")[0]["time/evaluate_s"] > 0
    assert at.notes == [
        "ask", "directory.write_eval", "directory.write_samples", "tracker.show", "jsonl.log", "tracker.log",
        "display.evaluated",
    ]  # fmt: skip
    assert at.files("eval") == ["main-step-000003.jsonl", "main-step-000003.parquet"]
    rows = pq.read_table(at.path / "eval/main-step-000003.parquet").to_pylist()
    assert [(r["uid"], r["index"]) for r in rows] == [(uid, n) for uid in range(3) for n in range(3)]
    told = [json.loads(text) for text in (at.path / "eval/main-step-000003.jsonl").read_text().splitlines()]
    ((what, step, shown),) = tracker.rows
    assert (what, step) == ("eval", 3)
    assert [row["uid"] for row in told] == [row["uid"] for row in shown]
    assert len(told) == 2
    assert at.display.evaluations == [(3, {k: v for k, v in line.items() if k not in ("stage", "step")})]


def test_what_measures_nothing_is_not_asked_and_writes_nothing(tmp_path: Path) -> None:
    at = stand(tmp_path, eval={"log_samples": 2})
    at.evaluate(1)
    assert at.notes == []
    assert at.lines() == []


def test_a_loss_alone_is_a_line_without_replies(tmp_path: Path) -> None:
    at = stand(tmp_path, loss={"eval/loss": 0.5})
    at.evaluate(1)
    assert at.lines() == [{"eval/loss": 0.5, "stage": "main", "step": 1}]
    assert at.files("eval") == []


@pytest.mark.parametrize(("section", "key"), [("checkpoint", "keep_best"), ("train", "early_stopping")])
def test_a_metric_that_no_evaluation_has_is_named_with_those_that_it_has(
    tmp_path: Path, section: str, key: str
) -> None:
    at = stand(tmp_path, loss={"eval/loss": 0.5}, **{section: {key: {"metric": "eval/none"}}})
    with pytest.raises(
        WhetError, match=rf"{section}\.{key}\.metric=eval/none: the evaluation has only eval/loss"
    ):
        at.evaluate(1)


def test_evaluations_that_do_not_improve_end_the_stage_and_say_so(tmp_path: Path) -> None:
    loss = {"eval/loss": 0.5}
    stopping = {"metric": "eval/loss", "goal": "min", "patience": 2}
    at = stand(tmp_path, loss=loss, train={"early_stopping": stopping})
    for done, value in enumerate([0.5, 0.4, 0.6, 0.6]):
        loss["eval/loss"] = value
        assert not at.recorder.stopped_early
        at.evaluate(done)
    assert at.recorder.stopped_early
    assert at.display.messages == [
        "eval/loss has not improved in 2 evaluations: the stage ends after step 3 (train.early_stopping)"
    ]
    assert at.recorder.ended(3)
    assert at.recorder.checkpoint_due(3)
    again = stand(tmp_path / "again", loss=loss, train={"early_stopping": stopping})
    again.recorder.restore(at.recorder.state(3))
    assert again.recorder.stopped_early
    patient = stand(tmp_path / "patient", loss=loss, train={"early_stopping": stopping | {"patience": 3}})
    patient.recorder.restore(at.recorder.state(3))
    assert not patient.recorder.stopped_early, "another patience goes on"


def test_early_stopping_reads_the_record_once_a_start_however_long_it_is(tmp_path: Path) -> None:
    loss, reads = {"eval/loss": 0.4}, list[int]()
    stopping = {"metric": "eval/loss", "goal": "min", "patience": 3}

    def begun() -> Stand:
        at = stand(tmp_path, loss=loss, train={"early_stopping": stopping})
        read = at.recorder.metrics_so_far

        def noted() -> Sequence[Json]:
            reads.append(len(read()))
            return read()

        at.recorder.metrics_so_far = noted
        return at

    first = begun()
    for done, value in enumerate([0.4, 0.5, float("inf")]):
        loss["eval/loss"] = value
        first.evaluate(done)
    assert reads == [1]
    assert not first.recorder.stopped_early
    later = begun()  # a resumed run, whose earlier evaluations count
    loss["eval/loss"] = 0.5
    later.evaluate(3)
    assert reads == [1, 4]
    assert later.recorder.stopped_early


# ---------------------------------------------------------------- checkpoints


def test_the_record_is_on_the_disk_before_the_checkpoint_that_relies_on_it(tmp_path: Path) -> None:
    """And the checkpoint before this one is, too, before the journal drops what only that one needed. The state of the
    other parts is taken after the record was synced, and the record's own is of that moment."""
    at = stand(tmp_path, rollout={"max_staleness": 2, "sync_interval": 3})
    at.record(1)
    at.notes.clear()

    def state() -> dict[str, Json]:
        at.notes.append("state")
        return {"version": 4}

    engines: Any = {"policy": object()}
    at.recorder.save(1, engines, state)
    assert at.order() == [
        "directory.sync", "saver.wait", "directory.held", "state", "saver.save", "worlds.saved",
    ]  # fmt: skip
    ((given, saved),) = at.saver.saved
    assert given is engines
    assert saved == {
        "stage": 0, "stage_name": "main", "step": 1, "steps": 6, "done": False, "stopped_early": None, "score": None,
        "config": {"seed": 7}, "code": {"a.py": "d1"}, "record": at.recorder.directory.held(), "version": 4,
    }  # fmt: skip
    assert saved["record"]["metrics.jsonl"]["lines"] == 1
    assert at.worlds.oldest == [((0, 1), 2 + 3 - 1)]


@pytest.mark.parametrize(
    ("fails", "done"),
    [
        ("directory.sync", ["directory.sync"]),
        ("saver.wait", ["directory.sync", "saver.wait"]),
        ("saver.save", ["directory.sync", "saver.wait", "directory.held", "saver.save"]),
    ],
)
def test_where_saving_fails_nothing_that_comes_after_it_is_done(
    tmp_path: Path, fails: str, done: list[str]
) -> None:
    """No checkpoint without its record, and the journal keeps what the older checkpoints need."""
    at = stand(tmp_path)
    part = {"directory": at.recorder.directory, "saver": at.saver}[fails.partition(".")[0]]

    def full(*_: Any) -> None:
        at.notes.append(fails)
        raise CheckpointError("the disk is full")

    setattr(part, fails.partition(".")[2], full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        at.recorder.save(1, {}, dict)
    assert at.order() == done
    assert at.saver.saved == []
    assert at.worlds.oldest == []


def test_when_a_checkpoint_is_due(tmp_path: Path) -> None:
    """Every so many steps, with the last one, before a stop, and with a score that is among the best."""
    loss = {"eval/accuracy": 0.4}
    best = {"metric": "eval/accuracy"}
    at = stand(tmp_path, loss=loss, checkpoint={"interval": 4, "keep_best": best})

    def due() -> list[int]:
        return [done for done in range(1, 7) if at.recorder.checkpoint_due(done)]

    assert due() == [4, 6]
    at.evaluate(2)
    assert due() == [4, 6]
    loss["eval/accuracy"] = 0.6
    at.evaluate(3)
    assert due() == [3, 4, 6]
    assert (0.6, (0, 3)) in at.saver.best
    at.recorder.save(3, {}, dict)
    assert at.saver.saved[-1][1]["score"] == 0.6
    at.recorder.save(4, {}, dict)
    assert at.saver.saved[-1][1]["score"] is None, "of another step"
    at.recorder.context.stop.requested = True
    assert due() == [1, 2, 3, 4, 5, 6]


def test_a_score_is_that_of_the_checkpoint_which_the_run_goes_on_from(tmp_path: Path) -> None:
    at = stand(tmp_path)
    at.recorder.restore({"step": 3, "score": 0.9})
    assert at.recorder.checkpoint_due(3)
    assert not at.recorder.checkpoint_due(2)


def test_when_evaluations_are_due(tmp_path: Path) -> None:
    for n, (at_end, due) in enumerate([(True, [2, 4, 5]), (False, [2, 4])]):
        at = stand(tmp_path / str(n), steps=5, eval={"interval": 2, "at_end": at_end})
        assert [done for done in range(1, 6) if at.recorder.evaluation_due(done)] == due


# ---------------------------------------------------------------- exports


def test_what_ranks_have_learned_is_gathered_before_it_is_exported_and_what_is_whole_is_copied(
    tmp_path: Path,
) -> None:
    at = stand(tmp_path)
    at.recorder.export(2)
    assert at.notes == ["gather", "export export/main-step-000002", "upload export/main-step-000002"]
    at.notes.clear()
    at.recorder.export(6, final=True)
    assert at.notes == ["export export/main", "upload export/main"], "the ranks have ended"


def test_an_export_that_fails_is_copied_nowhere(tmp_path: Path) -> None:
    at = stand(tmp_path)
    (at.path / "export/main").mkdir(parents=True)
    with pytest.raises(FileExistsError):
        at.recorder.export(6, final=True)
    assert at.notes == ["export export/main"]


@pytest.mark.parametrize(("export", "due"), [(True, [2, 4]), (False, [2, 4, 6])])
def test_the_last_step_s_export_is_the_stage_s_own(tmp_path: Path, export: bool, due: list[int]) -> None:
    at = stand(tmp_path, checkpoint={"export": export, "export_interval": 2})
    assert [done for done in range(1, 7) if at.recorder.export_due(done)] == due


def test_exports_may_follow_epochs(tmp_path: Path) -> None:
    at = stand(tmp_path, checkpoint={"export": True, "export_interval": (4, "1 epoch")})
    plan: Any = at.recorder.context.plan
    plan.rows, plan.sampled_tasks_per_step = 6, 2
    assert [done for done in range(1, 7) if at.recorder.export_due(done)] == [3, 4], "of 6 steps in 2 epochs"
