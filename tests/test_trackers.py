"""Trackers of other packages, held by small twins that note what they are told: no network, nothing installed."""

from __future__ import annotations

import importlib.machinery
import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import whet
from tiny import RUN
from whet import secrets
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import Config, RewardWorkersConfig, TrackConfig
from whet.guard import leftover, watch
from whet.guard.watch import Watch
from whet.track import display, remote, trackers
from whet.track.record import RunDirectory
from whet.track.sinks import Sinks
from whet.track.trackers import Tracker, naming, open_trackers
from whet.types import ConfigError

ROWS = [
    {"uid": 3, "source": "s", "prompt": "p", "reply": "r", "answer": [1], "extracted": None, "reward": 0.5}
]


ROLLOUTS = [{**ROWS[0], "index": 2, "advantage": -0.25, "finish_reason": "stop"}]


def put(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """A module of that name that can be imported and found."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def ask_for_key(error: Exception) -> None:
    """What wandb 0.31 and swanlab 0.10 do without a key: they ask for it, where they see a terminal."""
    try:
        terminal = os.isatty(sys.stdin.fileno())
    except io.UnsupportedOperation:  # swanlab takes such a stream for a terminal
        terminal = True
    if terminal:
        raise AssertionError("it waits for somebody at the keyboard")
    raise error


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Notes of a twin of wandb: what init was given, what was logged, the x-axis of every metric."""
    notes = SimpleNamespace(inits=[], logs=[], axes={}, finished=0, error=None, refusal=None)

    class Error(Exception): ...

    class Run:
        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            notes.axes[name] = step_metric

        def log(self, numbers: dict[str, Any]) -> None:
            notes.logs.append(numbers)

        def finish(self) -> None:
            notes.finished += 1

    def init(**given: Any) -> Run:
        if notes.refusal:
            raise notes.refusal
        if notes.error:
            ask_for_key(Error(notes.error))
        notes.inits.append(given)
        return Run()

    put(
        monkeypatch, "wandb", init=init, errors=SimpleNamespace(Error=Error),
        Table=lambda columns, data: (columns, data),
    )  # fmt: skip
    return notes


@pytest.fixture
def swanlab(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """runtimes: whether a run records the system, with the command line of the process (swanlab 0.10)."""
    notes = SimpleNamespace(inits=[], runtimes=[], logs=[], finished=0, error=None)

    def init(**given: Any) -> None:
        if notes.error:
            ask_for_key(notes.error)
        notes.inits.append(given)
        notes.runtimes.append(os.environ.get("SWANLAB_PROBE_RUNTIME", "true"))

    def finish() -> None:
        notes.finished += 1

    monkeypatch.delenv("SWANLAB_PROBE_RUNTIME", raising=False)
    put(
        monkeypatch, "swanlab", init=init, finish=finish, Text=lambda text: ("text", text),
        log=lambda numbers, step: notes.logs.append((step, numbers)),
    )  # fmt: skip
    return notes


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As Python ends, trackio ends the run that is current (`current`) once more."""
    notes = SimpleNamespace(inits=[], logs=[], finished=0, error=None, current=None)

    class Run:
        def log(self, numbers: dict[str, Any], step: int) -> None:
            notes.logs.append((step, numbers))

        def finish(self) -> None:
            notes.finished += 1

    def init(**given: Any) -> Run:
        if notes.error:
            raise notes.error
        notes.inits.append(given)
        notes.current = Run()
        return notes.current

    def finish() -> None:
        notes.current.finish()
        notes.current = None

    put(monkeypatch, "trackio", init=init, finish=finish, Table=lambda columns, data: (columns, data))
    return notes


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A twin of a tracking server: experiments and runs outlive the clients."""
    notes = SimpleNamespace(uris=[], experiments={}, runs={}, down=False, batches=[], asked=0)

    class MlflowException(Exception):
        def get_http_status_code(self) -> int:
            return 500 if notes.down is True else int(notes.down)

    def down() -> None:
        if notes.down:
            notes.asked += 1
            raise MlflowException("no answer")

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            notes.uris.append(tracking_uri)

        def get_experiment_by_name(self, name: str) -> Any:
            known = notes.experiments.get(name)
            return SimpleNamespace(experiment_id=known[0]) if known else None

        def create_experiment(self, name: str, artifact_location: str | None) -> str:
            notes.experiments[name] = (str(len(notes.experiments)), artifact_location)
            return notes.experiments[name][0]

        def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[Any]:
            wanted = filter_string.split("'")[1]
            assert filter_string == f"tags.whet_id = '{wanted}'"
            found = [
                r for r in notes.runs.values() if r.tags["whet_id"] == wanted and r.experiment in experiments
            ]
            return found[:max_results]

        def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
            run = SimpleNamespace(
                info=SimpleNamespace(run_id=f"r{len(notes.runs)}"), experiment=experiment, name=run_name,
                tags=tags, params={}, metrics=[], tables={}, status="RUNNING",
            )  # fmt: skip
            run.data = SimpleNamespace(tags=run.tags)
            notes.runs[run.info.run_id] = run
            return run

        def update_run(self, run_id: str, status: str) -> None:
            notes.runs[run_id].status = status

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            down()
            notes.batches.append(len(metrics) + len(params))
            notes.runs[run_id].params |= dict(params)
            notes.runs[run_id].metrics += [(key, value, step) for key, value, _, step in metrics]

        def log_dict(self, run_id: str, table: dict[str, list[Any]], name: str) -> None:
            if notes.down:
                raise ConnectionError("no answer")
            notes.runs[run_id].tables[name] = table

        def set_tag(self, run_id: str, name: str, value: str) -> None:
            notes.runs[run_id].tags[name] = value

        def set_terminated(self, run_id: str) -> None:
            down()
            notes.runs[run_id].status = "FINISHED"

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    put(
        monkeypatch, "mlflow", MlflowClient=Client,
        exceptions=SimpleNamespace(MlflowException=MlflowException),
        entities=SimpleNamespace(Metric=lambda *metric: metric, Param=lambda key, value: (key, value)),
    )  # fmt: skip
    return notes


def config(name: str, **track: Any) -> Config:
    return Config(
        name="letters",
        track=TrackConfig(trackers=(name,), project="reading", group="g", tags=("a", "b"), **track),  # type: ignore[arg-type]
        reward_workers=RewardWorkersConfig(env={"JUDGE_KEY": "sk-12345678", "PLACE": "here"}),
    )


def start(path: Path, cfg: Config, *, stages: tuple[str, ...] = ("main",), number: int = 0) -> Tracker:
    """The tracker of one start of the run in `path`; starts differ in what the manifest says of them."""
    record = RunDirectory(path, stages)
    record.write_manifest({"started_utc": f"2026-01-01T00:00:0{number}", "pid": 7 + number})
    return open_trackers(cfg, record)[1]


def test_wandb_is_told_what_the_run_is_and_every_number(wandb: SimpleNamespace, tmp_path: Path) -> None:
    tracker = start(tmp_path, config("wandb", arguments={"wandb": {"entity": "team", "mode": "offline"}}))
    tracker.log("main", 4, metrics={"reward/mean": 0.5}, timings={"time/step_s": 2.0})
    tracker.log("main", 4, metrics={"eval/accuracy": 1.0}, timings={})
    tracker.show("main", 4, ROWS)  # type: ignore[attr-defined]
    tracker.close()
    (given,) = wandb.inits
    assert given["config"]["reward_workers"]["env"] == {"JUDGE_KEY": "***", "PLACE": "here"}
    assert given["config"]["track"]["project"] == "reading"
    del given["config"]
    identity = given.pop("id")
    assert len(identity) == 21
    assert given == {
        "project": "reading", "name": "letters", "group": "g", "tags": ["a", "b"], "resume": "allow",
        "dir": str(tmp_path), "entity": "team", "mode": "offline",
    }  # fmt: skip
    assert wandb.axes == {"step": None, "*": "step"}
    assert wandb.logs[:2] == [
        {"reward/mean": 0.5, "time/step_s": 2.0, "step": 4},
        {"eval/accuracy": 1.0, "step": 4},
    ]
    columns, data = wandb.logs[2].pop("eval/samples")
    assert dict(zip(columns, data[0])) == {**ROWS[0], "answer": "[1]"}
    assert wandb.logs[2] == {"step": 4}
    tracker.show_rollouts("main", 5, ROLLOUTS)  # type: ignore[attr-defined]
    columns, data = wandb.logs[3].pop("rollout/samples")
    assert dict(zip(columns, data[0])) == {**ROLLOUTS[0], "answer": "[1]"}
    assert wandb.logs[3] == {"step": 5}
    assert wandb.finished == 1


def test_stages_have_axes_of_their_own(
    wandb: SimpleNamespace, swanlab: SimpleNamespace, tmp_path: Path
) -> None:
    for name in ("wandb", "swanlab"):
        tracker = start(tmp_path / name, config(name), stages=("sft", "rl"))
        tracker.log("sft", 9, metrics={"train/loss": 0.5}, timings={})
        tracker.log("rl", 1, metrics={"train/loss": 0.25}, timings={})
    assert wandb.axes == {"sft/step": None, "sft/*": "sft/step", "rl/step": None, "rl/*": "rl/step"}
    assert wandb.logs == [{"sft/train/loss": 0.5, "sft/step": 9}, {"rl/train/loss": 0.25, "rl/step": 1}]
    assert swanlab.logs == [(9, {"sft/train/loss": 0.5}), (1, {"rl/train/loss": 0.25})]


def test_a_run_that_goes_on_is_the_same_run_there_and_a_new_one_is_not(
    wandb: SimpleNamespace, swanlab: SimpleNamespace, mlflow: SimpleNamespace, tmp_path: Path
) -> None:
    for name in ("wandb", "swanlab", "mlflow"):
        cfg = config(name)
        start(tmp_path / name, cfg)
        start(tmp_path / name, cfg, number=1)
        start(tmp_path / f"{name}-anew", cfg, number=2)
    for notes in (wandb, swanlab):
        first, again, other = (given["id"] for given in notes.inits)
        assert first == again != other
    assert len(mlflow.runs) == 2, "one for each of the two runs"


def test_swanlab_is_told_what_the_run_is_and_every_number(swanlab: SimpleNamespace, tmp_path: Path) -> None:
    tracker = start(tmp_path, config("swanlab", arguments={"swanlab": {"mode": "offline"}}))
    tracker.log("main", 4, metrics={"reward/mean": 0.5}, timings={"time/step_s": 2.0})
    tracker.show("main", 4, ROWS)  # type: ignore[attr-defined]
    tracker.close()
    (given,) = swanlab.inits
    assert given.pop("config")["reward_workers"]["env"]["JUDGE_KEY"] == "***"
    assert len(given.pop("id")) == 21
    assert given == {
        "project": "reading", "experiment_name": "letters", "group": "g", "tags": ["a", "b"],
        "resume": "allow", "logdir": str(tmp_path / "swanlab"), "mode": "offline",
    }  # fmt: skip
    assert swanlab.logs[0] == (4, {"reward/mean": 0.5, "time/step_s": 2.0})
    assert json.loads(swanlab.logs[1][1]["eval/samples"][0][1]) == ROWS[0]
    tracker.show_rollouts("main", 5, ROLLOUTS)  # type: ignore[attr-defined]
    assert swanlab.logs[2][0] == 5
    assert json.loads(swanlab.logs[2][1]["rollout/samples"][0][1]) == ROLLOUTS[0]
    assert swanlab.finished == 1


def test_mlflow_writes_beside_the_run_where_no_server_is_given(
    mlflow: SimpleNamespace, tmp_path: Path
) -> None:
    tracker = start(tmp_path, config("mlflow"))
    metrics = {"eval/pass@8": 0.5, "reward/source/a+b (c)_mean": 0.25, "x": math.nan}
    tracker.log("main", 4, metrics=metrics, timings={"time/step_s": 2.0})
    tracker.show("main", 4, ROWS)  # type: ignore[attr-defined]
    (run,) = mlflow.runs.values()
    assert run.status == "RUNNING"
    tracker.close()
    assert run.status == "FINISHED"
    assert mlflow.uris == [f"sqlite:///{tmp_path}/mlflow.db"]
    assert mlflow.experiments == {"reading": ("0", (tmp_path / "mlflow").as_uri())}
    assert run.name == "letters"
    tags = {name: tag for name, tag in run.tags.items() if not name.startswith("mlflow.")}
    assert tags == {"whet_id": run.tags["whet_id"], "group": "g", "tags": "a, b"}
    assert run.params["reward_workers.env.JUDGE_KEY"] == "***"
    assert run.params["train.optimizer.lr"] == str(Config().train.optimizer.lr)
    assert [m for m in run.metrics if not math.isnan(m[1])] == [
        ("eval/pass_at_8", 0.5, 4),
        ("reward/source/a_b _c__mean", 0.25, 4),
        ("time/step_s", 2.0, 4),
    ]
    table = run.tables["samples/main-step-000004.json"]
    assert dict(zip(table["columns"], table["data"][0]))["answer"] == "[1]"
    tracker.show_rollouts("main", 5, ROLLOUTS)  # type: ignore[attr-defined]
    table = run.tables["rollouts/main-step-000005.json"]
    assert dict(zip(table["columns"], table["data"][0])) == {**ROLLOUTS[0], "answer": "[1]"}
    assert max(mlflow.batches) <= 100, "as many as a server takes at once"


def test_tables_of_mlflow_are_replaced_and_listed_as_far_as_a_tag_takes_them(
    mlflow: SimpleNamespace, tmp_path: Path
) -> None:
    """A resumed run repeats steps: their rows are there once. log_table of the package adds to them, and raises once
    its list is longer than a tag (some 130 tables)."""
    tracker = start(tmp_path, config("mlflow"))
    for step in range(1, 301):
        tracker.show_rollouts("main", step, ROLLOUTS)  # type: ignore[attr-defined]
    again = start(tmp_path, config("mlflow"), number=1)
    for step in (300, 301):
        again.show_rollouts("main", step, ROLLOUTS)  # type: ignore[attr-defined]
    (run,) = mlflow.runs.values()
    assert {len(table["data"]) for table in run.tables.values()} == {1}
    assert len(run.tables) == 301
    listed = run.tags["mlflow.loggedArtifacts"]
    assert len(listed) <= 5000
    names = [table["path"] for table in json.loads(listed)]
    assert names == [f"rollouts/main-step-{step:06d}.json" for step in range(302 - len(names), 302)]
    assert len(names) > 50
    run.tags["mlflow.loggedArtifacts"] = listed[:-9]
    start(tmp_path, config("mlflow"), number=2).show_rollouts("main", 302, ROLLOUTS)  # type: ignore[attr-defined]
    assert len(json.loads(run.tags["mlflow.loggedArtifacts"])) == 1


def test_a_step_does_not_send_all_that_waits_for_mlflow(
    mlflow: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = start(tmp_path, config("mlflow"))
    mlflow.down = True
    for step in range(200):
        tracker.log("main", step, metrics={"a": step}, timings={})
    mlflow.down, before = False, len(mlflow.batches)
    clock = itertools.count(time.monotonic() + 100)  # a second for each look at it
    monkeypatch.setattr(remote, "time", SimpleNamespace(time=time.time, monotonic=lambda: float(next(clock))))
    tracker.log("main", 200, metrics={"a": 200}, timings={})
    assert 0 < len(mlflow.batches) - before <= 60
    tracker.close()
    (run,) = mlflow.runs.values()
    assert [step for *_, step in run.metrics] == [*range(201)]


def test_mlflow_finds_its_server(
    mlflow: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from.env")
    start(tmp_path / "a", config("mlflow"))
    start(tmp_path / "b", config("mlflow", arguments={"mlflow": {"tracking_uri": "http://given"}}))
    assert mlflow.uris == ["http://from.env", "http://given"]
    assert mlflow.experiments == {"reading": ("0", None)}, "the server says where artifacts lie"


def test_a_server_that_goes_away_ends_no_run_and_is_told(
    mlflow: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked once a minute, so no step waits for it; when it is back it gets everything in order."""
    tracker = start(tmp_path, config("mlflow"))
    mlflow.down = True
    tracker.log("main", 4, metrics={"x": 1.0}, timings={})
    tracker.show("main", 4, ROWS)  # type: ignore[attr-defined]
    tracker.show_rollouts("main", 4, ROLLOUTS)  # type: ignore[attr-defined]
    tracker.close()
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in said[:2]] == [
        "mlflow did not accept step 4 of main (metrics.jsonl has it)"
    ] * 2
    assert said[2:] == ["mlflow lacks 6 requests, from step 4 of main (metrics.jsonl has it) on"]
    assert mlflow.asked == 2, "by the first of them, and as it is closed"
    mlflow.down = False
    tracker.close()
    (run,) = mlflow.runs.values()
    assert run.metrics == [("x", 1.0, 4)]
    assert list(run.tables) == ["samples/main-step-000004.json", "rollouts/main-step-000004.json"]
    assert run.status == "FINISHED"


def test_what_a_server_refuses_is_told_and_holds_up_nothing(
    mlflow: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = start(tmp_path, config("mlflow"))
    mlflow.down = 400
    tracker.log("main", 4, metrics={"x": 1.0}, timings={})
    mlflow.down = False
    tracker.log("main", 5, metrics={"x": 2.0}, timings={})
    (run,) = mlflow.runs.values()
    assert run.metrics == [("x", 2.0, 5)]
    assert [record.getMessage() for record in caplog.records] == [
        "mlflow did not accept step 4 of main (metrics.jsonl has it): no answer"
    ]


def test_trackio_is_told_what_the_run_is_and_every_number(trackio: SimpleNamespace, tmp_path: Path) -> None:
    cfg = config("trackio", arguments={"trackio": {"space_id": "org/board"}})
    tracker = start(tmp_path, cfg)
    tracker.log("main", 4, metrics={"reward/mean": 0.5}, timings={"time/step_s": 2.0})
    tracker.show("main", 4, ROWS)  # type: ignore[attr-defined]
    tracker.show_rollouts("main", 5, ROLLOUTS)  # type: ignore[attr-defined]
    tracker.close()
    assert (trackio.finished, trackio.current) == (1, None)
    start(tmp_path, cfg, number=1)
    start(tmp_path / "anew", cfg, number=2)
    first, again, other = (given.pop("name") for given in trackio.inits)
    assert first == again != other
    assert first.startswith("letters-")
    given = trackio.inits[0]
    assert given.pop("config")["reward_workers"]["env"]["JUDGE_KEY"] == "***"
    assert given == {
        "project": "reading", "group": "g", "resume": "allow", "embed": False, "auto_log_cpu": False,
        "space_id": "org/board",
    }  # fmt: skip
    assert trackio.logs[0] == (4, {"reward/mean": 0.5, "time/step_s": 2.0})
    columns, data = trackio.logs[1][1]["eval/samples"]
    assert dict(zip(columns, data[0]))["reply"] == ROWS[0]["reply"]
    columns, data = trackio.logs[2][1]["rollout/samples"]
    assert dict(zip(columns, data[0])) == {**ROLLOUTS[0], "answer": "[1]"}


@pytest.mark.parametrize(
    ("given", "records"), [("whet train a.yaml", "true"), ("whet token=sk-12345678", "false")]
)
def test_swanlab_does_not_record_a_command_line_with_a_secret(
    given: str, records: str, swanlab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads it from the system, where sys.argv without secrets changes nothing."""
    (tmp_path / "cmdline").write_text(given.replace(" ", "\0"))
    monkeypatch.setattr(remote, "COMMAND_LINE", tmp_path / "cmdline")
    secrets.learn("JUDGE_KEY", "sk-12345678")
    start(tmp_path / "run", config("swanlab"))
    (tmp_path / "cmdline").unlink()  # macOS has none
    monkeypatch.setattr(sys, "orig_argv", given.split())
    start(tmp_path / "again", config("swanlab"))
    assert swanlab.runtimes == [records, records]


@pytest.mark.parametrize("set_before", [None, "true"])
def test_a_later_run_of_swanlab_records_the_system_as_its_user_says(
    set_before: str | None, swanlab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is set because a command line contains a secret is set for this run alone, however it begins."""
    if set_before:
        monkeypatch.setenv("SWANLAB_PROBE_RUNTIME", set_before)
    secrets.learn("JUDGE_KEY", "sk-12345678")
    (tmp_path / "cmdline").write_text("whet train key=sk-12345678")
    monkeypatch.setattr(remote, "COMMAND_LINE", tmp_path / "cmdline")
    start(tmp_path / "run", config("swanlab"))
    swanlab.error = RefusalError("no key")
    with pytest.raises(ConfigError):
        start(tmp_path / "refused", config("swanlab"))
    assert swanlab.runtimes == ["false"]
    assert os.environ.get("SWANLAB_PROBE_RUNTIME") == set_before


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_no_tracker_asks_for_its_key_at_a_terminal(
    name: str,
    wandb: SimpleNamespace,
    swanlab: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The question would be under the live display, and the run would wait for an answer."""
    wandb.error, swanlab.error = "no key", RuntimeError("no key")
    master, slave = os.openpty()
    with open(master, "wb", buffering=0), open(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        key = {"wandb": "WANDB_API_KEY", "swanlab": "SWANLAB_API_KEY"}[name]
        with pytest.raises(ConfigError, match=rf"{name} could not start: no key; .*\({key}\)"):
            start(tmp_path, config(name))
        assert sys.stdin is terminal


def test_the_terminal_is_back_when_trackers_of_two_threads_are_made_at_once() -> None:
    """The second found the first one's empty input, and put that back, closed."""
    given, first, second = sys.stdin, ExitStack(), ExitStack()
    first.enter_context(trackers.unanswered())
    second.enter_context(trackers.unanswered())
    first.close()
    assert sys.stdin.read() == ""
    second.close()
    assert sys.stdin is given


class RefusalError(Exception):
    """As swanlab's AuthenticationError, the ConnectError of httpx in trackio, a ValidationError of wandb's settings:
    of no class that whet imports."""


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow", "trackio"])
def test_a_tracker_that_cannot_start_says_what_to_do(
    name: str, wandb: SimpleNamespace, swanlab: SimpleNamespace, mlflow: SimpleNamespace, trackio: SimpleNamespace,
    tmp_path: Path,
) -> None:  # fmt: skip
    wandb.refusal = swanlab.error = trackio.error = RefusalError("no key")
    mlflow.down = True
    with pytest.raises(
        ConfigError, match=rf"{name} could not start: no (key|answer).*track\.arguments\.{name}"
    ):
        start(tmp_path, config(name))


TAKES = """
import signal

class Takes:
    def __init__(self, sinks):
        signal.signal(signal.SIGINT, self.end)

    def end(self, number, frame):
        raise SystemExit("the run was not asked")

    def log(self, stage, step, *, metrics, timings): pass

    def close(self): pass
"""


def test_no_tracker_takes_ctrl_c(tmp_path: Path) -> None:
    """swanlab does: it ended its own run at once, and the next step failed there. The run saves, and goes on later."""
    (tmp_path / "mine.py").write_text(TAKES)

    def interrupt(row: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)

    track = {"trackers": [f"{tmp_path / 'mine.py'}:Takes"]}
    run = whet.train(**(RUN | {"track": track, "run_dir": str(tmp_path / "run"), "on_step": interrupt}))
    assert not run.finished


RECORDS = """
import sys

class Records:
    def __init__(self, sinks):
        self.said, self.before, self.path = [], sys.stdout.write, sinks.record.path / "said.txt"
        sys.stdout.write = self.write

    def write(self, text):
        self.said.append(text)
        return self.before(text)

    def log(self, stage, step, *, metrics, timings):
        print("the key is sk-12345678")

    def close(self):
        sys.stdout.write = self.before
        self.path.write_text("".join(self.said))
"""

STREAM = """
import io
import sys

class Records(io.TextIOBase):
    def __init__(self, sinks):
        self.said, self.before, self.path = [], sys.stdout, sinks.record.path / "said.txt"
        sys.stdout = self

    def write(self, text):
        self.said.append(text)
        return self.before.write(text)

    def log(self, stage, step, *, metrics, timings):
        print("the key is sk-12345678")

    def close(self):
        sys.stdout = self.before
        self.path.write_text("".join(self.said))
"""


@pytest.mark.parametrize(("how", "live"), [("a write", False), ("a write", True), ("a stream", False)])
def test_a_tracker_that_records_what_is_printed_gets_no_secret(
    how: str, live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb and swanlab put a write of their own in the place of standard output's, which at a terminal is a stream of
    the live display; others put a stream there."""
    if live:
        monkeypatch.setattr(display, "Console", partial(Console, force_terminal=True))
    (tmp_path / "mine.py").write_text(RECORDS if how == "a write" else STREAM)
    track = {"trackers": ["console", f"{tmp_path / 'mine.py'}:Records"]}
    output = sys.stdout, sys.stderr
    workers = {"env": {"JUDGE_KEY": "sk-12345678"}}
    whet.train(**(RUN | {"track": track, "run_dir": str(tmp_path / "run"), "reward_workers": workers}))
    said = (tmp_path / "run" / "said.txt").read_text()
    assert "the key is <redacted:" in said
    assert "sk-12345678" not in said
    assert (sys.stdout, sys.stderr) == output


# ---------------------------------------------------------------- the config of trackers


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plans(load("examples/first_run.yaml", overrides))
    return str(caught.value)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio", "tensorboard"])
def test_a_missing_package_is_named_before_anything_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n, p=None: None if n == name else found(n, p))
    assert f"pip install 'whet[{name}]'" in refused(f"track.trackers=[{name}]")


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_folder_of_the_name_of_a_package_is_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B leaves one in the working directory, which is in the path of `python -m whet`."""
    (tmp_path / "a_folder" / "run-1").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.util.find_spec
    assert found("a_folder") is not None
    monkeypatch.setattr("importlib.util.find_spec", lambda n, p=None: found("a_folder" if n == name else n))
    assert f"pip install 'whet[{name}]'" in refused(f"track.trackers=[{name}]")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("track.arguments.wandb.api_key=sk-123", "WANDB_API_KEY"),
        ("track.arguments.mlflow.password=x", "MLFLOW_TRACKING_PASSWORD"),
        ("track.arguments.wandb.project=x", "is set from track.project"),
        ("track.arguments.wandb.id=x", "is set from the run itself"),
        ("track.arguments.swanlab.log_dir=x", "track.arguments.swanlab.log_dir: is set from run_dir"),
        ("track.arguments.mlflow.uri=http://x", "mlflow takes only tracking_uri"),
        ("track.arguments.wnadb.mode=offline", "did you mean 'wandb'"),
    ],
)
def test_arguments_that_cannot_be_given(
    override: str, said: str, wandb: SimpleNamespace, mlflow: SimpleNamespace
) -> None:
    assert said in refused("track.trackers=[wandb,mlflow]", override)


@pytest.mark.parametrize(
    "override",
    ["track.project=x", "track.group=x", "track.tags=[x]", "track.arguments.wandb.mode=offline"],
)
def test_labels_that_nobody_reads_are_refused(override: str) -> None:
    assert "has no effect" in refused(override)


def test_labels_are_read_where_a_tracker_is_named(wandb: SimpleNamespace) -> None:
    overrides = ["track.trackers=[wandb]", "track.project=x", "track.arguments.wandb.mode=offline"]
    assert plans(load("examples/first_run.yaml", overrides))


# ---------------------------------------------------------------- a tracker of the user's


MINE = """
class Lines:
    def __init__(self, sinks, *, ends="!"):
        self.file = open(sinks.record.path / "mine.txt", "a")
        self.ends = ends

    def log(self, stage, step, *, metrics, timings):
        print(stage, step, metrics["reward/mean"], end=self.ends, file=self.file)

    def close(self):
        print("closed", file=self.file)
        self.file.close()

class Deaf:
    def __init__(self, sinks): ...
"""


def test_a_class_of_yours_is_a_tracker_by_its_name_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    name = f"{tmp_path / 'mine.py'}:Lines"
    track = {"trackers": ["jsonl", name], "arguments": {name: {"ends": ";\n"}}, "project": "read by it"}
    run = whet.train(**(RUN | {"track": track, "run_dir": str(tmp_path / "run")}))
    numbers = [
        json.loads(line)["reward/mean"] for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    want = "".join(f"main {step} {number};\n" for step, number in enumerate(numbers, 1))
    assert (run.run_dir / "mine.txt").read_text() == want + "closed\n"


LEAVES = """
class Leaves:
    def __init__(self, sinks):
        if sinks.cfg.name == "absent":
            raise ConnectionError("no such server")

    def log(self, stage, step, *, metrics, timings): pass

    def close(self):
        raise ConnectionError("the server has gone")
"""


def test_a_tracker_that_cannot_be_closed_neither_ends_the_run_nor_hides_what_did(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LEAVES)
    track = {"trackers": ["jsonl", f"{tmp_path / 'mine.py'}:Leaves"]}
    run = whet.train(**(RUN | {"track": track, "run_dir": str(tmp_path / "run")}))
    assert run.finished
    said = "Leaves (track.trackers) could not be closed (ConnectionError: the server has gone)"
    assert said in (tmp_path / "run" / "run.log").read_text()

    def fails(row: dict[str, Any]) -> None:
        raise KeyError("what ended it")

    with pytest.raises(KeyError, match="what ended it"):
        whet.train(**(RUN | {"track": track, "run_dir": str(tmp_path / "other"), "on_step": fails}))
    with pytest.raises(ConnectionError, match="no such server") as caught:
        whet.train(**(RUN | {"track": track, "run_dir": str(tmp_path / "third"), "name": "absent"}))
    assert caught.value.__notes__ == [f"raised by track.trackers {track['trackers'][1]}, as it was made"]


class Slow:
    """Waits until the watch has said so."""

    def __init__(self, said: Callable[[], str]) -> None:
        self.said = said

    def made(self, sinks: Sinks) -> Slow:
        """Also asks a server that does not answer."""
        self.wait_for("in wandb (track.trackers), as it is made\n")
        return self

    def log(self, stage: str, step: int, *, metrics: Any, timings: Any) -> None:
        self.wait_for("in Slow (track.trackers), step 3\n")

    def close(self) -> None:
        self.wait_for("in Slow (track.trackers), as it is closed\n")

    def wait_for(self, words: str) -> None:
        end = time.monotonic() + 60
        while words not in self.said():
            assert time.monotonic() < end, self.said()
            time.sleep(0.01)


def test_a_tracker_that_hangs_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = Slow(lambda: caplog.text)
    load = trackers.load_object
    monkeypatch.setattr(
        trackers, "load_object", lambda at, what: slow.made if "Wandb" in at else load(at, what=what)
    )
    with Watch(quiet_s=0.1):
        _, bounded = open_trackers(config("wandb"), RunDirectory(tmp_path, ("main",)))
        assert isinstance(bounded, trackers.Bounded)
        assert bounded.tracker is slow
        with naming(slow, "main", 3):
            slow.log("main", 3, metrics={}, timings={})
        trackers.close(slow)
    for what in ("step 3", "as it is closed"):
        assert f"in Slow (track.trackers), {what}\n" in caplog.text


class Hangs:
    """Its server does not answer; the first interruption is swallowed by a library that tries again."""

    tries = 0

    def log(self, stage: str, step: int, *, metrics: Any, timings: Any) -> None: ...

    def close(self) -> None:
        while True:
            self.tries += 1
            try:
                threading.Event().wait(60)
            except Exception:
                if self.tries == 2:
                    raise


HANGS = """
import signal

class Hangs:
    def __init__(self, sinks, at):
        self.at, self.calls = at, sinks.record.path / "calls"
        self.call("made")

    def call(self, name):
        with self.calls.open("a") as file:
            print(name, file=file)
        if name == self.at:
            assert callable(signal.getsignal(signal.SIGALRM)), "it has no limit"
            try:
                signal.raise_signal(signal.SIGALRM)  # as if its time were over
            except TimeoutError as e:
                raise ConnectionError("the library's own") from e

    def log(self, stage, step, *, metrics, timings):
        self.call(f"log {step}")

    def show_rollouts(self, stage, step, rows):
        self.call(f"rollouts {step}")

    def close(self):
        self.call("close")
"""


@pytest.mark.parametrize("at", ["log 2", "rollouts 2", "made"])
def test_a_tracker_that_hangs_does_not_hold_the_run(at: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HANGS)
    name = f"{tmp_path / 'mine.py'}:Hangs"
    track = {"trackers": [name], "arguments": {name: {"at": at}}, "log_samples": 1}
    run_dir = tmp_path / "run"
    settings = RUN | {"track": track, "train": {**RUN["train"], "steps": 3}, "run_dir": str(run_dir)}
    if at == "made":
        with pytest.raises(
            ConfigError, match=f"track.trackers {name}: it did not start within 300 s; .*leave it out"
        ):
            whet.train(**settings)
        return
    assert whet.train(**settings).finished
    said = "Hangs (track.trackers) did not return from step 2 within 300 s; the run goes on without it"
    assert (run_dir / "run.log").read_text().count(said) == 1
    calls = (run_dir / "calls").read_text().splitlines()
    assert calls == [*calls[: calls.index(at) + 1], "close"]
    rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 3


ENDS = """
import sys, threading, time
import whet.cli
from whet.guard import leftover

def command():
    with leftover.owned("Sends (track.trackers)"):
        threading.Thread(target=send, name="sender").start()
    sys.exit(130)

def send():
    time.sleep(600)

whet.cli.main = command
leftover.SAY_S, leftover.WAIT_S = 0.1, 0.2
from whet.__main__ import main
main()
"""


def test_a_thread_that_a_tracker_leaves_is_named_and_ends_with_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=False
    )
    left = "threads that do not end: sender of Sends (track.trackers) (<string>:12, send)"
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines() == [
        f"whet: the command is done; waiting 0.1 s more for {left}",
        f"whet: the command is done; ended with status 130, without {left}",
    ]


def test_the_threads_of_a_tracker_are_known() -> None:
    end = threading.Event()

    class Sends:
        def close(self) -> None:
            threading.Thread(target=end.wait, name="closing").start()

    sends: Any = Sends()
    try:
        with naming(sends, "grpo", 1):
            threading.Thread(target=end.wait, name="logging").start()
        trackers.close(sends)
        for name in ("closing", "logging"):
            assert f"{name} of Sends (track.trackers)" in leftover.left()
    finally:
        end.set()


@pytest.mark.parametrize("ended", [None, KeyboardInterrupt, ValueError])
def test_a_tracker_that_does_not_close_ends_no_later_than_its_limit(
    ended: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a second Ctrl-C, sooner; what ended the run stays what ended it."""
    monkeypatch.setattr(watch, "AGAIN_S", 0.1)
    monkeypatch.setattr(trackers, "CALL_S", 0.2)
    monkeypatch.setattr(trackers, "HURRY_S", 0.1)
    handler, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(ended) if ended else nullcontext(), ExitStack() as stack:
        stack.callback(trackers.close, Hangs())
        if ended:
            raise ended
    assert time.monotonic() - began < 10
    limit = 0.1 if ended is KeyboardInterrupt else 0.2
    assert f"Hangs (track.trackers) could not be closed (TimeoutError: not within {limit:g} s)" in caplog.text
    assert signal.getsignal(signal.SIGALRM) == handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


TABLES = """
import json

class Tables:
    def __init__(self, sinks):
        self.path, self.rows = sinks.record.path / "rows.json", []

    def log(self, stage, step, *, metrics, timings): pass

    def show_rollouts(self, stage, step, rows):
        self.rows.append((step, list(rows)))

    def close(self):
        self.path.write_text(json.dumps(self.rows))
"""


def test_rollouts_of_training_reach_a_tracker_as_rows(tmp_path: Path) -> None:
    """As many as asked for, of recorded steps, the same in equal runs; each equals its rollout in the record."""
    (tmp_path / "mine.py").write_text(TABLES)
    name = f"{tmp_path / 'mine.py'}:Tables"
    track = {"trackers": [name], "log_samples": 3, "rollouts_interval": 2}
    runs = [
        whet.train(
            **(RUN | {"track": track, "train": {**RUN["train"], "steps": 4}, "run_dir": str(tmp_path / run)})
        )
        for run in ("a", "b")
    ]
    first, again = (json.loads((run.run_dir / "rows.json").read_text()) for run in runs)
    assert first == again
    assert [step for step, _ in first] == [2, 4]
    for step, rows in first:
        recorded = whet.load_run(runs[0].run_dir).rollouts(step).to_pylist()
        by_name = {(row["uid"], row["index"]): row for row in recorded}
        assert len(rows) == 3 < len(recorded)
        for row in rows:
            found = by_name[row["uid"], row["index"]]
            assert (row["reply"], row["reward"], row["prompt"]) == (
                found["text"],
                found["reward"],
                found["prompt"],
            )
            assert row["advantage"] == found["advantage"]


@pytest.mark.parametrize(
    ("track", "algorithm", "said"),
    [
        ({"trackers": ["tensorboard"]}, "grpo", ""),
        ({"trackers": ["jsonl"]}, "grpo", "no tracker in track.trackers shows rollouts"),
        ({"trackers": ["tensorboard"], "rollouts_interval": 0}, "grpo", "no rollouts are recorded"),
        ({"trackers": ["tensorboard"]}, "sft", "no rollouts are sampled"),
    ],
)
def test_samples_that_nothing_shows_are_refused(track: dict[str, Any], algorithm: str, said: str) -> None:
    data = {"max_prompt_tokens": 8, "train": [{"rows": [{"prompt": "a", "response": "b", "answer": "b"}]}]}
    left = ("rewards", "rollout") if algorithm == "sft" else ()
    tree = {key: value for key, value in RUN.items() if key not in left} | {
        "data": data, "algorithm": {"name": algorithm}, "track": track | {"log_samples": 2}
    }  # fmt: skip
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        plans(load(None, (), tree))


@pytest.mark.parametrize(
    ("track", "said"),
    [
        ({"log_samples": 2}, "no tracker in track.trackers shows rollouts; "),
        (
            {"trackers": ["tensorboard"], "log_samples": 2, "rollouts_interval": 0},
            "no rollouts are recorded;",
        ),
        ({"dump": {"rollouts": "a"}, "rollouts_interval": 0}, "no rollouts are written;"),
    ],
)
def test_the_reason_that_all_stages_share_is_told(track: dict[str, Any], said: str) -> None:
    """Of the first stage alone, which samples nothing, the user could conclude that the second one needs no tracker."""
    tree = {key: value for key, value in RUN.items() if key != "data"} | {
        "track": {"trackers": ["jsonl"]} | track,
        "stages": [
            {"name": "sft", "algorithm": {"name": "sft"},
             "data": {"train": [{"rows": [{"prompt": "a", "response": "b"}]}]}},
            {"name": "rl", "data": RUN["data"]},
        ],
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        plans(load(None, (), tree))
    assert f"has no effect: {said}" in str(caught.value)


def test_reasons_of_single_stages_are_told_with_their_stage() -> None:
    tree = {key: value for key, value in RUN.items() if key != "data"} | {
        "buffer": {"replay": {"share": 0.5}},
        "stages": [
            {"name": "sft", "algorithm": {"name": "sft"},
             "data": {"max_prompt_tokens": 8, "train": [{"rows": [{"prompt": "a", "response": "b"}]}]}},
            {"name": "rl", "data": RUN["data"], "buffer": {"replay": {"queue": True}},
             "rollout": {"schedule": "async"}},
        ],
    }  # fmt: skip
    reasons = (
        r"stages\[0\] \('sft'\): the replies are in the data [^;]*; "
        r"stages\[1\] \('rl'\): buffer.replay.queue=true: [^;]*; leave it out$"
    )
    with pytest.raises(ConfigError, match=f"buffer.replay.share: has no effect: {reasons}"):
        plans(load(None, (), tree))


def test_what_is_no_tracker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    assert "'consol' is not known; did you mean 'console'?" in refused("track.trackers=[consol]")
    assert "track.arguments.wandv: wandv is not in track.trackers" in refused(
        "track.arguments.wandv.mode=offline"
    )
    for name, arguments, said in (
        ("Deaf", {}, "expected a class with the methods log and close"),
        ("Lines", {"begin": "x"}, r"called as Lines\(sinks, begin=...\)"),
        ("Lins", {}, "did you mean 'Lines'"),
    ):
        at = f"{tmp_path / 'mine.py'}:{name}"
        track = {"trackers": ["jsonl", at], "arguments": {at: arguments} if arguments else {}}
        with pytest.raises(ConfigError, match=said):
            whet.train(**(RUN | {"track": track, "run_dir": str(tmp_path / name)}))
