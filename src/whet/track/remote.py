"""Trackers that list runs of many machines: Weights & Biases, MLflow, SwanLab, trackio.

Their packages are optional and imported here alone, when a run names them. A resumed run is the same run there:
it is found by the identity of its first start. Repeated values equal, bit for bit, the values that are already
there. Keys and passwords are read by the packages from the environment, and the config is sent without secrets.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from math import inf
from pathlib import Path

from whet.config.secrets import dump
from whet.config.trackers import TRACKERS
from whet.config.tree import leaves
from whet.secrets import redact, redact_tree
from whet.track.sinks import Sinks
from whet.types import ConfigError, Json, Metrics

log = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Json]]
EVAL, ROLLOUTS = "eval/samples", "rollout/samples"
"""Names of the tables: held-out replies, and rollouts of training."""

_AT_ONCE = 100
_LONGEST = 500
_TABLES = "mlflow.loggedArtifacts"
"""The tag by which MLflow's pages know tables among the files of a run."""
_TAG_CHARS = 5000
"""What every version of MLflow accepts in a tag; it cuts longer ones in the middle."""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""Of one request to an MLflow server, where the user has set nothing: by itself the package holds a step for minutes
when the server answers 500, and for a quarter of an hour when it does not answer."""
_RECORDS_SYSTEM = "SWANLAB_PROBE_RUNTIME"
"""SwanLab reads it when a run begins."""
COMMAND_LINE = Path("/proc/self/cmdline")
"""Of this process, as the system tells it to everybody."""
_PAUSE_S = 60.0
"""Between attempts to reach an MLflow server that is away."""
_MOST_WAITING = 10_000
"""Requests that are kept for it."""


class Wandb:
    """A run of a W&B project; its own files lie in RUN/wandb. `mode: offline` sends nothing."""

    def __init__(self, sinks: Sinks, **given: Json) -> None:
        import wandb

        cfg = sinks.cfg
        try:
            self._run = wandb.init(
                project=cfg.track.project,
                name=cfg.name,
                group=cfg.track.group,
                tags=list(cfg.track.tags),
                id=sinks.record.identity,
                resume="allow",
                config=redact_tree(dump(cfg)),
                dir=str(sinks.record.path),
                **given,
            )
        except Exception as e:  # also of pydantic, for settings that there are not
            raise _refused("wandb", "mode: offline", e) from e
        self._table = wandb.Table
        self._prefix = sinks.prefix
        for stage in sinks.record.stages:
            # W&B's own step only grows, and steps since the last checkpoint are logged twice after a crash
            step = f"{sinks.prefix(stage)}step"
            self._run.define_metric(step)
            self._run.define_metric(f"{sinks.prefix(stage)}*", step_metric=step)

    def log(self, stage: str, step: int, *, metrics: Metrics, timings: Metrics) -> None:
        before = self._prefix(stage)
        numbers = {f"{before}{name}": number for name, number in {**metrics, **timings}.items()}
        self._run.log({**numbers, f"{before}step": step})

    def show(self, stage: str, step: int, rows: Rows) -> None:
        self._log_table(EVAL, stage, step, rows)

    def show_rollouts(self, stage: str, step: int, rows: Rows) -> None:
        self._log_table(ROLLOUTS, stage, step, rows)

    def _log_table(self, name: str, stage: str, step: int, rows: Rows) -> None:
        before = self._prefix(stage)
        self._run.log({f"{before}{name}": self._table(**_columns(rows)), f"{before}step": step})

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    """An experiment of a SwanLab project; its own files lie in RUN/swanlab. `mode: offline` sends nothing."""

    def __init__(self, sinks: Sinks, **given: Json) -> None:
        import swanlab

        cfg = sinks.cfg
        labels = {"group": cfg.track.group, "tags": list(cfg.track.tags)}
        try:
            with _without_system() if _is_secret_command() else nullcontext():
                swanlab.init(
                    project=cfg.track.project,
                    experiment_name=cfg.name,
                    id=sinks.record.identity,
                    resume="allow",
                    config=redact_tree(dump(cfg)),
                    logdir=str(sinks.record.path / "swanlab"),
                    **{name: label for name, label in labels.items() if label},
                    **given,
                )
        except Exception as e:  # its own AuthenticationError among others
            raise _refused("swanlab", "mode: offline", e) from e
        self._swanlab, self._prefix = swanlab, sinks.prefix

    def log(self, stage: str, step: int, *, metrics: Metrics, timings: Metrics) -> None:
        before = self._prefix(stage)
        self._swanlab.log({f"{before}{n}": v for n, v in {**metrics, **timings}.items()}, step=step)

    def show(self, stage: str, step: int, rows: Rows) -> None:
        self._log_texts(EVAL, stage, step, rows)

    def show_rollouts(self, stage: str, step: int, rows: Rows) -> None:
        self._log_texts(ROLLOUTS, stage, step, rows)

    def _log_texts(self, name: str, stage: str, step: int, rows: Rows) -> None:
        texts = [self._swanlab.Text(json.dumps(row, ensure_ascii=False, default=str)) for row in rows]
        self._swanlab.log({f"{self._prefix(stage)}{name}": texts}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


class Trackio:
    """A run of a trackio project: on this machine (`trackio show`; TRACKIO_DIR), on a server (`server_url`) or in a
    Space (`space_id`). trackio knows a run by its name alone, so the name ends with the run's identity."""

    def __init__(self, sinks: Sinks, **given: Json) -> None:
        import trackio

        cfg = sinks.cfg
        try:
            self._run = trackio.init(
                project=cfg.track.project,
                name=f"{cfg.name}-{sinks.record.identity[:8]}",
                group=cfg.track.group,
                config=redact_tree(dump(cfg)),
                resume="allow",
                **{"embed": False, "auto_log_cpu": False, **given},
            )
        except Exception as e:  # those of httpx are no OSErrors
            raise _refused("trackio", "no space_id and no server_url", e) from e
        self._trackio, self._prefix = trackio, sinks.prefix

    def log(self, stage: str, step: int, *, metrics: Metrics, timings: Metrics) -> None:
        before = self._prefix(stage)
        self._run.log({f"{before}{n}": v for n, v in {**metrics, **timings}.items()}, step=step)

    def show(self, stage: str, step: int, rows: Rows) -> None:
        self._log_table(EVAL, stage, step, rows)

    def show_rollouts(self, stage: str, step: int, rows: Rows) -> None:
        self._log_table(ROLLOUTS, stage, step, rows)

    def _log_table(self, name: str, stage: str, step: int, rows: Rows) -> None:
        self._run.log({f"{self._prefix(stage)}{name}": self._trackio.Table(**_columns(rows))}, step=step)

    def close(self) -> None:
        self._trackio.finish()  # Run.finish would leave the run current: trackio ends such a run again as Python ends


class Mlflow:
    """A run of an MLflow experiment: on the server of tracking_uri or MLFLOW_TRACKING_URI, else in RUN/mlflow.db.

    A resumed run sends the steps after its checkpoint again: MLflow removes no value, what it has is one request for
    each name (MlflowClient.get_metric_history), and a branch has other values there than the run before it."""

    def __init__(self, sinks: Sinks, tracking_uri: str | None = None) -> None:
        import mlflow

        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self._mlflow, self._prefix = mlflow, sinks.prefix
        self._tables: list[str] = []
        self._waiting: deque[tuple[str, Callable[[], object]]] = deque()
        self._next_s = 0.0
        local = sinks.record.path.resolve()
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None if uri else (local / "mlflow").as_uri()
        uri = uri or f"sqlite:///{local}/mlflow.db"
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            self._run_id = self._find_run(sinks, artifacts)
        except self._failures as e:
            raise _refused("mlflow", "no tracking_uri", e) from e

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        """What a server that fails makes the package raise. Files go to it by requests, whose errors are OSErrors."""
        return self._mlflow.exceptions.MlflowException, OSError

    def _find_run(self, sinks: Sinks, artifacts: str | None) -> str:
        cfg, client, identity = sinks.cfg, self._client, sinks.record.identity
        project = cfg.track.project
        known = client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else client.create_experiment(project, artifacts)
        found = client.search_runs([experiment], filter_string=f"tags.whet_id = '{identity}'", max_results=1)
        if found:
            client.update_run(found[0].info.run_id, status="RUNNING")
            self._tables = _listed(found[0].data.tags.get(_TABLES, "[]"))
            return str(found[0].info.run_id)
        tags = {
            "whet_id": identity,
            "group": cfg.track.group or "",
            "tags": ", ".join(cfg.track.tags),
        }
        run = client.create_run(experiment, run_name=cfg.name, tags={k: v for k, v in tags.items() if v})
        entities = self._mlflow.entities
        params = [entities.Param(name, value) for name, value in _flat(redact_tree(dump(cfg)))]
        for start in range(0, len(params), _AT_ONCE):
            client.log_batch(run.info.run_id, params=params[start : start + _AT_ONCE])
        return str(run.info.run_id)

    def log(self, stage: str, step: int, *, metrics: Metrics, timings: Metrics) -> None:
        now_ms, before = int(time.time() * 1000), self._prefix(stage)
        numbers = [
            self._mlflow.entities.Metric(_name(before + name), float(number), now_ms, step)
            for name, number in {**metrics, **timings}.items()
        ]
        for start in range(0, len(numbers), _AT_ONCE):
            some = numbers[start : start + _AT_ONCE]
            send = partial(self._client.log_batch, self._run_id, metrics=some)
            self._waiting.append((f"step {step} of {stage} (metrics.jsonl has it)", send))
        self._send()

    def _send(self, most_s: float = _PAUSE_S) -> None:
        """Send what waits, in its order. While the server is away the rest waits on, and no step waits for the server:
        it is asked again after _PAUSE_S. What is not sent within most_s is left to the next step."""
        until_s = time.monotonic() + most_s
        while self._waiting and self._next_s <= time.monotonic() < until_s:
            what, send = self._waiting[0]
            try:
                send()
            except self._failures as e:
                if not _is_refusal(e):
                    self._next_s = time.monotonic() + _PAUSE_S
                    log.warning(
                        "mlflow did not accept %s: %s; %d requests wait for it, and the next attempt is in %.0f s",
                        what, e, len(self._waiting), _PAUSE_S,
                    )  # fmt: skip
                    break
                log.warning("mlflow did not accept %s: %s", what, e)
            self._waiting.popleft()
        if len(self._waiting) > _MOST_WAITING:
            what, _ = self._waiting.popleft()
            log.warning("mlflow is away: %d requests wait for it; %s is dropped", _MOST_WAITING, what)

    def show(self, stage: str, step: int, rows: Rows) -> None:
        self._log_table("samples", stage, step, rows, kept="eval/")

    def show_rollouts(self, stage: str, step: int, rows: Rows) -> None:
        self._log_table("rollouts", stage, step, rows, kept="rollouts/")

    def _log_table(self, folder: str, stage: str, step: int, rows: Rows, *, kept: str) -> None:
        """kept: the folder of the run that has the same. Not MlflowClient.log_table: of a step that a resumed run
        repeats, it adds the rows to those that are there, and it breaks where its list of all tables outgrows a tag."""
        path = f"{folder}/{stage}-step-{step:06d}.json"
        self._tables = _newest([*(at for at in self._tables if at != path), path])
        what, client = f"samples of step {step} of {stage} ({kept} has them)", self._client
        self._waiting += [
            (what, partial(client.log_dict, self._run_id, _columns(rows), path)),
            (f"the list of {what}", partial(client.set_tag, self._run_id, _TABLES, _listing(self._tables))),
        ]
        self._send()

    def close(self) -> None:
        """Send what waits, if the server is there again, and the end of the run."""
        self._waiting.append(("the end of the run", partial(self._client.set_terminated, self._run_id)))
        self._next_s = 0.0
        self._send(inf)
        if self._waiting:
            log.warning("mlflow lacks %d requests, from %s on", len(self._waiting), self._waiting[0][0])


def _refused(name: str, instead: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"track.trackers: {name} could not start: {error}; check its settings and its key in the environment "
        f"({TRACKERS[name].secret}), or write only on this machine (track.arguments.{name}: {instead})"
    )


def _is_secret_command() -> bool:
    """Whether the command line of this process contains a secret: the system's, which is not sys.argv of `cli.main`."""
    try:
        given = COMMAND_LINE.read_text(errors="replace").replace("\0", " ")
    except OSError:  # not Linux
        given = " ".join(sys.orig_argv)
    return redact(given) != given


@contextmanager
def _without_system() -> Iterator[None]:
    """A run of SwanLab that begins inside does not record the system, to which the command line belongs."""
    before = os.environ.get(_RECORDS_SYSTEM)
    os.environ[_RECORDS_SYSTEM] = "false"
    try:
        yield
    finally:
        os.environ.pop(_RECORDS_SYSTEM, None)
        os.environ |= {} if before is None else {_RECORDS_SYSTEM: before}


def _is_refusal(error: Exception) -> bool:
    """Whether the server was there and will not accept the same another time."""
    status = getattr(error, "get_http_status_code", lambda: None)()
    return (
        status is not None
        and status < HTTPStatus.INTERNAL_SERVER_ERROR
        and status != HTTPStatus.TOO_MANY_REQUESTS
    )


def _flat(tree: Json) -> Iterator[tuple[str, str]]:
    """Dotted keys and short texts: MLflow keeps parameters as such."""
    for path, value in leaves(tree):
        yield _name(".".join(map(str, path))), str(value)[:_LONGEST]


def _listing(tables: Sequence[str]) -> str:
    return json.dumps([{"path": path, "type": "table"} for path in tables])


def _listed(tag: str) -> list[str]:
    try:
        return [table["path"] for table in json.loads(tag)]
    except (ValueError, LookupError, TypeError):  # cut in the middle, by an earlier log_table
        return []


def _newest(tables: list[str]) -> list[str]:
    """The last tables, as many as a tag can list."""
    while len(_listing(tables)) > _TAG_CHARS:
        tables = tables[1:]
    return tables


def _name(name: str) -> str:
    """pass_at_8, and `_` for what else MLflow has not in names: with one such name it refuses a whole request."""
    return re.sub(r"[^\w./: -]", "_", name.replace("@", "_at_"))


def _columns(rows: Rows) -> dict[str, list[Json]]:
    """A table of rows that have the same keys: `columns` and `data`."""
    names = list(rows[0]) if rows else []
    return {"columns": names, "data": [[_text(row[name]) for name in names] for row in rows]}


def _text(value: Json) -> Json:
    return value if isinstance(value, str | int | float | None) else json.dumps(value, default=str)
