"""What a run directory says of its run, as data: `whet show` prints it, `whet view` sends it, `whet.load_run` gives it.

The run may be in progress, or have been killed in the middle of a line: complete lines are read.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from whet.config.code import GIVEN
from whet.config.recipes import RECIPES
from whet.config.schema import AlgorithmConfig, EvalConfig
from whet.config.tree import get, leaves, stage_names
from whet.data.tokenizer_files import check_files
from whet.inputs import MIB, read_end
from whet.storage.manifests import oldest_first
from whet.track.files import is_running
from whet.track.learning import Sign, signs, trend
from whet.track.metrics import FAILED, HELD_OUT, is_evaluation, reward_of_step
from whet.track.written import list_steps, read_config, read_lines, read_manifest
from whet.types import DataError, Json

Lines = list[dict[str, Json]]

State = Literal["running", "not running", "elsewhere"]
"""elsewhere: running on another host, or killed there."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run directory holds, read once."""

    path: Path
    metrics: Lines
    timings: Lines
    config: dict[str, Json]
    manifest: dict[str, Json]
    """The last start."""
    changes: Lines
    """The changes when it was resumed."""

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(line["stage"] for line in self.metrics))

    @property
    def algorithms(self) -> list[str]:
        """The algorithm's name in each stage of the config."""
        common = self.config.get("algorithm", {}).get("name", AlgorithmConfig.model_fields["name"].default)
        stages = self.config.get("stages") or [{}]
        return [str(stage.get("algorithm", {}).get("name", common)) for stage in stages]

    def algorithm(self, stage: str) -> str | None:
        """Its name in a stage; None where the config does not have this stage."""
        names = stage_names(self.config) or [stage]
        return dict(zip(names, self.algorithms)).get(stage)

    def kind(self, stage: str) -> str | None:
        """What it learns from: 'online', 'demonstrations' or 'preferences'; None of a user's own."""
        recipe = RECIPES.get(self.algorithm(stage) or "")
        return recipe.kind if recipe else None

    def of(self, stage: str, *having: str) -> Lines:
        """Lines of a stage that have these numbers."""
        return [x for x in self.metrics if x["stage"] == stage and all(name in x for name in having)]


def read(run_dir: Path) -> RunRecord:
    """Raises DataError if this is not a run directory, or a file in it was not written by a run."""
    check_is_run(run_dir)
    manifest = read_manifest(run_dir)
    return RunRecord(
        path=run_dir,
        metrics=read_lines(run_dir / "metrics.jsonl"),
        timings=read_lines(run_dir / "timings.jsonl"),
        config=read_config(run_dir),
        manifest=manifest.get("starts", [{}])[-1],
        changes=manifest.get("changes", []),
    )


def check_is_run(run_dir: Path) -> None:
    """DataError for a folder that is no run directory, or is not there."""
    if not any((run_dir / name).exists() for name in ("metrics.jsonl", "run.log")):
        raise DataError(f"{run_dir} is not a run directory: it has no metrics.jsonl{_runs_in(run_dir)}")


def _runs_in(folder: Path) -> str:
    """A hint where a folder is not there, or holds run directories."""
    if not folder.exists():
        return "; no such folder"
    inner = sorted(str(path.parent) for path in folder.glob("*/metrics.jsonl"))
    return f"; run directories in it: {', '.join(inner[:5])}" if inner else ""


def state_of(run_dir: Path) -> State:
    """Whether the run's process lives."""
    states: dict[bool | None, State] = {True: "running", False: "not running", None: "elsewhere"}
    return states[is_running(run_dir)]


_ENDED = re.compile(r"(\S+)Z ERROR whet\.api: the run ended: (.*)")
"""The line of run.log that says why a run has ended; what foreign code prints stands behind a name there."""


def ended_by(run: RunRecord) -> str:
    """The error that ended the last start; '' where the run goes on, ended without one, or was killed."""
    if state_of(run.path) != "not running":
        return ""
    told = [match for line in end_of_log(run.path) if (match := _ENDED.fullmatch(line))]
    started = str(run.manifest.get("started_utc", ""))[: len("2026-01-01T00:00:00")]
    return told[-1][2] if told and told[-1][1] >= started else ""


def end_of_log(run_dir: Path) -> list[str]:
    """The last lines of run.log."""
    path = run_dir / "run.log"
    return read_end(path, MIB)[0].splitlines() if path.is_file() else []


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """One stage so far."""

    name: str
    steps: int
    """The last one that is written down."""
    seconds: float | None
    """Of its steps and evaluations, without saving; None if none was written."""
    tokens: float
    """Sampled, or read."""
    rewards: list[float]
    """The mean of each step (`reward_of_step`)."""
    held_out: list[float]
    """The accuracy at each evaluation."""


def numbers_of(run: RunRecord, stage: str) -> StageNumbers:
    """A stage that has lines in metrics.jsonl."""
    return StageNumbers(
        name=stage,
        steps=max(line["step"] for line in run.of(stage)),
        seconds=seconds_of(run, stage),
        tokens=sum(n for line in run.of(stage, TOKENS) if isfinite(n := line[TOKENS])),
        rewards=[mean for line in run.of(stage) if (mean := reward_of_step(line)) is not None],
        held_out=[line[HELD_OUT] for line in run.of(stage, HELD_OUT)],
    )


TOKENS = "rollout/tokens_sum"


def learning_of(run: RunRecord, stage: str) -> tuple[str, list[Sign]]:
    """How the headline of a stage has moved, in words, and the signs against it at its last step."""
    rows = [line for line in run.of(stage) if not is_evaluation(line)]
    return trend(rows), signs(rows)


def seconds_of(run: RunRecord, stage: str) -> float | None:
    """Time of a stage: its steps and evaluations, without saving; None if none was written. Not the sum of its phases:
    where the trainer trains meanwhile, sampling and scoring lie beside the others."""
    spent = [x[name] for x in run.timings if x["stage"] == stage for name in WHOLE if name in x]
    return sum(spent) if spent else None


WHOLE = ("time/step_s", "time/evaluate_s")
"""Numbers of timings.jsonl that are seconds of a whole line."""


def phase_of(name: str) -> str:
    """The phase whose seconds a number of timings.jsonl is; '' of another number."""
    is_one = name.startswith("time/") and name.endswith("_s") and name != "time/step_s"
    return name[len("time/") : -len("_s")] if is_one else ""


def reward_of(name: str) -> str:
    """The reward whose seconds a number of timings.jsonl is; '' of another number."""
    before, _, reward = name.partition("reward/seconds/")
    return "" if before else reward


def failures(run: RunRecord) -> Counter[tuple[str, str]]:
    """Rollouts without a reward by stage and reason."""
    failed: Counter[tuple[str, str]] = Counter()
    for line in run.metrics:
        for name, number in line.items():
            if name.startswith("rollout/failed/"):
                reason = name.removeprefix("rollout/failed/").removesuffix("_count")
                failed[line["stage"], reason] += int(number) if isfinite(number) else 0
    return failed


def asked(run: RunRecord, stage: str) -> float:
    """Rollouts of the steps whose failures are counted."""
    return sum(line.get("rollout/count", 0) for line in run.of(stage, FAILED))


# ---------------------------------------------------------------- checkpoints


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint of the run, and what goes on from it."""

    stage: str
    step: int
    command: str
    """For a shell; a call of whet.train where rewards were functions of a Python program."""


def checkpoints(run: RunRecord) -> list[KeptCheckpoint]:
    """Newest first: the run goes on from the newest in this run directory, from an earlier one in another."""
    folder = run.path / "checkpoints"
    found = oldest_first(path.name for path in folder.glob("*-*"))[::-1]
    kept = []
    for name in found if run.config else ():
        place, _, step = name.partition("-")[2].rpartition("-")
        other = [
            f"checkpoint.resume={_as_yaml(typed(folder / name))}",
            f"run_dir={_as_yaml(f'{typed(run.path)}-from-{int(step)}')}",
        ]
        kept.append(KeptCheckpoint(place, int(step), _go_on(run, _here(run) if name == found[0] else other)))
    return kept


def _here(run: RunRecord) -> list[str]:
    """The override that lets a run go on whose folder was moved, or is seen from elsewhere."""
    written = run.config.get("run_dir")
    there = isinstance(written, str) and Path(written).resolve() != run.path.resolve()
    return [f"run_dir={_as_yaml(typed(run.path))}"] if there else []


def typed(path: Path) -> str:
    """A path as it is typed in a command: `-x` is not an option of it, and `~x` not the home of a user."""
    return f"./{path}" if str(path)[0] in "-~" else str(path)


def shell_line(*parts: str) -> str:
    """A command for a shell. Characters that a terminal would obey, or that are not seen, are written out: `$'..'`, as
    bash and zsh read it."""
    return " ".join(shlex.quote(part) if part.isprintable() else f"$'{_written_out(part)}'" for part in parts)


def _written_out(part: str) -> str:
    def bytes_of(character: str) -> str:
        return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))

    return "".join(c if c.isprintable() and c not in "\\'" else bytes_of(c) for c in part)


_PLAIN = re.compile(r"[A-Za-z_./][\w./ +-]*")
"""A path that is text in YAML without quotes; others get them, for values of overrides are read as YAML."""


def _as_yaml(path: str) -> str:
    return path if _PLAIN.fullmatch(path) else json.dumps(path, ensure_ascii=False)


def _go_on(run: RunRecord, overrides: Sequence[str]) -> str:
    """The command, or the call where rewards were functions of a Python program."""
    file = typed(run.path / "config.yaml")
    named = [value for path, value in leaves(run.config) if "rewards" in path]
    if any(isinstance(value, str) and value.startswith(GIVEN) for value in named):
        given = f", overrides={list(overrides)!r}" if overrides else ""
        return f"whet.train({file!r}, rewards=...{given})"
    return shell_line("whet", "train", file, *overrides)


# ---------------------------------------------------------------- rollouts and evaluations


def rollout_file(run_dir: Path, step: int, stage: str | None = None, *, folder: str = "rollouts") -> Path:
    """The file of a step's rollouts, or of its evaluation (folder="eval"); of the last stage that has one, if none is
    given. Raises DataError naming the steps there are."""
    check_is_run(run_dir)
    files = list_steps(run_dir / folder)
    stages = read(run_dir).stages if stage is None else [stage]
    hits = [path for name in reversed(stages) for at, number, path in files if (at, number) == (name, step)]
    if not hits:
        there = {name: [n for at, n, _ in files if at == name] for name in sorted({f[0] for f in files})}
        held = "; ".join(f"{name}: {min(ns)} to {max(ns)}, {len(ns)} steps" for name, ns in there.items())
        asked = f"step {step}" + (f" of stage {stage!r}" if stage else "")
        what = "rollouts" if folder == "rollouts" else "replies of an evaluation"
        why = "track.rollouts_interval; of given replies only the first step's are written"
        raise DataError(
            f"{run_dir} has no {what} of {asked}; {what} there: {held or 'none'}"
            + (f" ({why})" if folder == "rollouts" else "")
        )
    return hits[0]


def setting(config: Mapping[str, Json], stage: str, path: tuple[str, ...]) -> Json:
    """A value of the config in a stage: its own, else that of all stages; None where neither has one."""
    own: dict[str, Json] = next((one for one in config.get("stages") or [] if one.get("name") == stage), {})
    found = get(own, path)
    return get(config, path) if found is None else found


def passes(row: Mapping[str, Json], config: Mapping[str, Json], stage: str) -> bool:
    """Whether a held-out reply of a stage counts as right."""
    least = setting(config, stage, ("eval", "success"))
    least = EvalConfig.model_fields["success"].default if least is None else least
    value = row["reward"]  # of a held-out reply: by what eval.reward names
    return isinstance(least, int | float) and value is not None and value >= least


def tokenizer_of(run_dir: Path) -> Tokenizer | None:
    """The tokenizer of the run's own exports or checkpoints, if it has written one yet."""
    name = "tokenizer.json"
    elsewhere = [path for path in run_dir.glob("*") if path.is_symlink()]  # `dirs`
    # a run in progress removes folders meanwhile, which os.walk passes over
    found = sorted(
        Path(at, name) for root in (run_dir, *elsewhere) for at, _, names in os.walk(root) if name in names
    )
    if not found:
        return None
    check_files(found[-1].parent)
    try:
        return Tokenizer.from_file(str(found[-1]))
    except Exception as e:  # foreign code: it can fail in any way
        raise DataError(
            f"{found[-1]}: not a readable tokenizer: {e}; remove it, or export the run again"
        ) from e
