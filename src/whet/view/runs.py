"""The runs, one run, its metrics: what `whet show` prints, as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from whet import secrets
from whet.checkpoint import glance
from whet.config.tree import get
from whet.inputs import MOST_CONFIG_BYTES, read_bytes, read_end
from whet.track.metrics import FAILED, HELD_OUT, is_evaluation, reward_of_step
from whet.track.overview import (
    Lines,
    RunRecord,
    checkpoints,
    ended_by,
    learning_of,
    numbers_of,
    shell_line,
    state_of,
    typed,
)
from whet.types import DataError, Json
from whet.view.source import Ask, Shown, finite, stamp_of, tried

LOG_LINES = 40
LOG_BYTES = 2**18
"""Of run.log, which a run of weeks makes long, the end is read."""
RECENT_S = 150.0
"""A wait is reported once a minute: an older report is of a wait that is over."""


def runs(ask: Ask) -> Json:
    """A line for each run."""
    return {"runs": [_line(run) for run in ask.runs.runs], "live": True}


def _line(run: Shown) -> Json:
    problems: list[str] = []
    written = read_run(run, problems)
    steps = [line for line in written.metrics if not is_evaluation(line)]
    last = steps[-1] if steps else None
    stage = written.metrics[-1]["stage"] if written.metrics else None
    rewards = [mean for line in steps if (mean := reward_of_step(line)) is not None]
    held_out = [line[HELD_OUT] for line in written.metrics if HELD_OUT in line]
    speed = [line[SPEED] for line in written.timings if SPEED in line]
    return {
        "id": run.id,
        "path": str(run.path),
        "name": run.name,
        "state": "damaged" if problems else _state(run, written),
        "error": problems[0] if problems else None,
        "stages": written.stages,
        "stage": stage,
        "step": last["step"] if last else 0,
        "steps_planned": planned_steps(written, stage),
        "reward": finite(rewards[-1]) if rewards else None,
        "held_out": finite(held_out[-1]) if held_out else None,
        "tokens_per_s": finite(speed[-1]) if speed else None,
        "faults": sum(n for line in steps if (n := finite(line.get(FAILED))) is not None),
        "started_utc": written.manifest.get("started_utc"),
        "algorithm": " then ".join(written.algorithms) if written.config else None,
    }


SPEED = "speed/tokens_per_s"


def _state(run: Shown, written: RunRecord) -> str:
    """Whether its process lives; of one that does not, whether its last checkpoint ends the run."""
    state = state_of(run.path)
    if state != "not running":
        return state
    last, stages = glance(run.path / "checkpoints"), len(written.config.get("stages") or [None])
    return "finished" if last["done"] and last["stage"] == stages - 1 else state


def planned_steps(run: RunRecord, stage: str | None) -> int | None:
    """Steps of a stage where the config gives a number."""
    for one in run.config.get("stages") or [{}]:
        if one.get("name", stage) == stage:
            steps = get(one, ("train", "steps")) or get(run.config, ("train", "steps"))
            return steps if isinstance(steps, int) else None
    return None


def read_run(run: Shown, problems: list[str]) -> RunRecord:
    """Everything but the rollouts; what cannot be read is empty and told in `problems`."""
    tried(problems, run.look, None)
    nothing: dict[str, Json] = {}
    no_lines: Lines = []
    config = tried(problems, lambda: run.config, nothing)
    manifest = tried(problems, lambda: run.manifest, nothing)
    metrics = tried(problems, lambda: run.lines("metrics.jsonl"), no_lines)
    timings = tried(problems, lambda: run.lines("timings.jsonl"), no_lines)
    start = manifest.get("starts", [{}])[-1]
    return RunRecord(run.path, metrics, timings, config, start, manifest.get("changes", []))


def run(ask: Ask) -> Json:
    """Everything that `whet show` prints of one run."""
    run, problems = ask.run, list[str]()
    written = read_run(run, problems)
    no_log: list[str] = []
    log = tried(problems, lambda: _log(run.path), no_log)
    tried(problems, run.read_tokenizer, None)
    state = _state(run, written)
    names = {name for line in (*written.metrics, *written.timings) for name in line}
    return {
        **{key: value for key, value in _line(run).items() if key not in ("error", "stages", "state")},
        "state": state,
        "ended_by": secrets.redact(tried(problems, lambda: ended_by(written), ""))[:MOST_LINE],
        "config_yaml": tried(problems, lambda: _config_text(run.path), None),
        "config": secrets.redact_tree(written.config),
        "manifest": {k: v for k, v in written.manifest.items() if k != "environment"},
        "changes": written.changes,
        "stages": [_stage(written, stage) for stage in written.stages],
        "checkpoints": [asdict(kept) for kept in checkpoints(written)],
        "metric_names": sorted(names - {"stage", "step"}),
        "rollout_files": tried(problems, lambda: files_of(run, "rollouts"), []),
        "eval_files": tried(problems, lambda: files_of(run, "eval"), []),
        "waits": _waits(log, datetime.now(UTC)) if state == "running" else [],
        "log_tail": log[-LOG_LINES:],
        "problems": list(dict.fromkeys(problems)),
    }


def _stage(run: RunRecord, name: str) -> Json:
    found = numbers_of(run, name)
    trend, signs = learning_of(run, name)
    ends = {"reward": found.rewards, "held_out": found.held_out}
    return {
        "name": name,
        "algorithm": run.algorithm(name),
        "kind": run.kind(name),
        "steps": found.steps,
        "steps_planned": planned_steps(run, name),
        "seconds": finite(found.seconds),
        "tokens": finite(found.tokens),
        **{f"{key}_from": finite(values[0]) if values else None for key, values in ends.items()},
        **{f"{key}_to": finite(values[-1]) if values else None for key, values in ends.items()},
        "learning": {"trend": trend, "signs": [{"name": sign.name, "text": str(sign)} for sign in signs]},
    }


def files_of(run: Shown, folder: str) -> list[Json]:
    """The files of steps with their size; rows: None of one that cannot be read."""
    found = []
    for stage, step, path in run.files(folder):
        stamp = stamp_of(path)
        try:
            rows: int | None = run.rows(path)
        except DataError:
            rows = None  # the pages of its rollouts say why
        found.append({"stage": stage, "step": step, "rows": rows, "bytes": stamp[1] if stamp else 0})
    return found


def _config_text(run_dir: Path) -> str | None:
    path = run_dir / "config.yaml"
    if not path.exists():
        return None
    return secrets.redact(read_bytes(path, DataError, most=MOST_CONFIG_BYTES).decode("utf-8", "replace"))


# ---------------------------------------------------------------- the log


def _log(run_dir: Path) -> list[str]:
    """The last lines of run.log."""
    path = run_dir / "run.log"
    if not path.is_file():
        return []
    text, is_cut = read_end(path, LOG_BYTES)
    lines = text.splitlines()[1 if is_cut else 0 :]
    return [secrets.redact(line)[:MOST_LINE] for line in lines]


MOST_LINE = 4000
"""Characters of a line of the log."""

_WAIT = re.compile(
    r"(?P<at>\S+) WARNING \S+: (?:waiting for (?P<what>.+) by (?P<process>.+) since (?P<since>[\d.]+) s"
    r"|no progress for (?P<quiet>[\d.]+) s, in (?P<in>.+))"
)


def _waits(log: Sequence[str], now: datetime) -> list[Json]:
    """What the newest reports say is waited for, with the seconds until now."""
    found: dict[tuple[str, str], Json] = {}
    for line in log:
        if (hit := _WAIT.fullmatch(line)) is None:
            continue
        try:
            ago_s = (now - datetime.fromisoformat(hit["at"])).total_seconds()
        except (ValueError, TypeError):
            continue
        what, process = hit["what"] or hit["in"], hit["process"] or "the run"
        if 0 <= ago_s < RECENT_S:
            since = float(hit["since"] or hit["quiet"]) + ago_s
            found[process, what] = {"process": process, "what": what, "since_s": round(since, 1)}
    return list(found.values())


# ---------------------------------------------------------------- metrics


def metrics(ask: Ask) -> Json:
    """Numbers of metrics.jsonl and timings.jsonl by column, joined by stage and step; from a line on."""
    run, start = ask.run, ask.number("from", 0)
    lines, seconds = run.lines("metrics.jsonl"), run.lines("timings.jsonl")
    names = ask.list("names") or sorted({n for line in (*lines, *seconds) for n in line})
    names = [name for name in dict.fromkeys(names) if name not in ("stage", "step")]
    beside: dict[tuple[str, int, bool], dict[str, Json]] = {}
    for line in seconds:
        beside[line["stage"], line["step"], EVALUATED in line] = line
    rows = []
    for line in lines[start:]:
        place = line["stage"], line["step"], is_evaluation(line)
        rows.append({**beside.get(place, {}), **line})
    columns: dict[str, list[Json]] = {"stage": [r["stage"] for r in rows], "step": [r["step"] for r in rows]}
    columns |= {name: [finite(row.get(name)) for row in rows] for name in names}
    return {"lines": len(lines), "rows": columns}


EVALUATED = "time/evaluate_s"
"""In the line of timings.jsonl that goes with an evaluation."""


def commands(run: Shown, stage: str, step: int, uid: int, index: int) -> dict[str, str]:
    """What shows a rollout in a terminal, and what computes it again."""
    place = [typed(run.path), "--stage", stage, "--step", str(step), "--task", str(uid)]
    return {
        "show": shell_line("whet", "show", *place, "--tokens"),
        "replay": shell_line("whet", "replay", *place, "--index", str(index)),
    }
