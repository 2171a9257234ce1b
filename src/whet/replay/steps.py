"""Which steps of a run can be replayed, and from where: read from its directory, without torch."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from whet.bench import config_of
from whet.checkpoint import STATE, all_in
from whet.config.load import Loaded
from whet.config.plan import Plan, plans
from whet.config.schema import BufferConfig, Config, SyncConfig
from whet.storage.manifests import place_of
from whet.track import overview
from whet.track.metrics import is_evaluation
from whet.track.written import list_steps
from whet.types import ConfigError, DataError, Json

BEGINNING = "the beginning of the run"
"""Where a replay starts that needs no checkpoint."""


@dataclass(frozen=True)
class ReplayStart:
    """Where a replay may start."""

    at: tuple[int, int]
    """Number of the stage, and its steps that are done."""
    checkpoint: Path | None = None
    """None: the beginning of the run."""
    version: int = 0
    """Of the policy."""
    moments: bool = True
    """The state of the optimizer is there, so that the steps after the next one can be replayed, too."""

    @property
    def name(self) -> str:
        return self.checkpoint.name if self.checkpoint else BEGINNING


@dataclass(frozen=True)
class Step:
    """A step of the record."""

    stage: int
    step: int
    start: ReplayStart | None
    """Where its replay starts. None: it cannot be replayed."""
    forward: int = 0
    """Steps that are run for it, itself included."""
    why: str = ""
    """Why it cannot be replayed."""


@dataclass(frozen=True)
class Recorded:
    """A run directory, as far as a replay reads it."""

    path: Path
    loaded: Loaded
    plans: Sequence[Plan]
    starts: Sequence[ReplayStart]
    """The beginning, then the checkpoints that are there, oldest first."""
    lines: Sequence[dict[str, Json]]
    """Of metrics.jsonl."""
    branches: Sequence[dict[str, Json]]
    """Changes of settings that change numbers, with which the run was resumed."""
    manifest: dict[str, Json]
    """The last start."""
    elsewhere: bool = False
    """Separate explorers have sampled its rollouts (mode=train); a replay samples them in one process."""

    @property
    def code(self) -> dict[str, str]:
        """Digests of the user's code by file."""
        return dict(self.manifest.get("code_sha256") or {})

    @property
    def names(self) -> tuple[str, ...]:
        return self.loaded.names

    def numbers(self, stage: int, step: int) -> dict[str, Json] | None:
        """The line of a training step."""
        found = (x for x in self.lines if (x["stage"], x["step"]) == (self.names[stage], step))
        return next((line for line in found if is_step(line)), None)

    def file(self, folder: str, stage: int, step: int) -> Path | None:
        """The file of a step in `rollouts` or `batches`."""
        wanted = self.names[stage], step
        return next((p for *at, p in list_steps(self.path / folder) if tuple(at) == wanted), None)

    def done(self, stage: int) -> int:
        """The last step of a stage."""
        return self._last.get(self.names[stage], 0)

    @cached_property
    def _last(self) -> dict[str, int]:
        """The last step of each stage; a resumed run has removed what came later."""
        return {line["stage"]: line["step"] for line in self.lines}

    def steps(self) -> list[Step]:
        """All recorded steps, in their order."""
        return [
            self.step(self.names.index(line["stage"]), line["step"])
            for line in self.lines
            if is_step(line) and line["stage"] in self.names
        ]

    def step(self, stage: int, step: int, *, play: bool = False) -> Step:
        """Where the replay of a step starts: the latest checkpoint before its rollouts were sampled, or, if there is
        none, before its update; or the beginning of the run. play: environments are asked again."""
        mode = self.plans[stage].mode
        ahead = self.loaded.stages[stage].rollout.max_staleness if mode == "overlapped" else 0
        sampled = stage, step - 1 - ahead
        earlier = self.starts[: bisect_left(self.starts, (stage, step), key=lambda s: s.at)]
        leading = (s for s in reversed(earlier) if self._leads(s, stage, step, play=play))
        start = next(leading, None)
        if start is None:
            return Step(stage, step, None, why=self._why_none(stage))
        if start.at > sampled:  # it has the rollouts of the step
            before = next((s for s in leading if s.at <= sampled), None)
            start = before if before is not None and before.checkpoint is not None else start
        return Step(stage, step, start, self._forward(start, stage, step))

    def _leads(self, start: ReplayStart, stage: int, step: int, *, play: bool) -> bool:
        """Whether the steps from a start to this one follow from it: the optimizer is there, the config of the last
        start of the run holds for them, the journal has what environments have answered, and no stage on the way
        depends on timing."""
        way = range(start.at[0] + (start.at[1] >= self.done(start.at[0])), stage + 1)
        whole = start.moments or start.at == (stage, step - 1)
        answers = not self.elsewhere and (start.checkpoint is not None or self._told_all)
        told = play or answers or not any(map(self._has_env, way))
        return whole and told and not self.changed_after(start.at) and not any(map(self.refused, way))

    def _has_env(self, stage: int) -> bool:
        return self.loaded.stages[stage].rollout.env is not None

    @cached_property
    def _told_all(self) -> bool:
        """Whether the journal still has its first answers: what comes before the oldest checkpoint is dropped."""
        return any((self.path / "journal").glob("*-0-000000.jsonl"))

    def changed_after(self, at: tuple[int, int]) -> list[dict[str, Json]]:
        """The branches that began later."""
        return [c for c in self.branches if self.place(c) > at]

    def place(self, line: dict[str, Json]) -> tuple[int, int]:
        """Number of the stage and step of a line; of stages that the config no longer has the first."""
        return self.names.index(line["stage"]) if line["stage"] in self.names else 0, line["step"]

    def _forward(self, start: ReplayStart, stage: int, step: int) -> int:
        between = sum(self.done(n) for n in range(start.at[0], stage))
        return between + step - start.at[1]

    def refused(self, stage: int) -> str:
        """Why the steps of a stage cannot be replayed; empty where they can."""
        cfg, mode = self.loaded.stages[stage], self.plans[stage].mode
        if mode not in ("synchronous", "overlapped"):
            by = " by separate explorers" if cfg.mode == "train" else ""
            return (
                f"stage {self.names[stage]!r} was sampled{by} with rollout.schedule=async: what a step trains on, and "
                "by which weights it was sampled, followed from timing. --logprobs recomputes the log-probs of "
                "recorded tokens from checkpoints of their versions"
            )
        return ""

    def _why_none(self, stage: int) -> str:
        if why := next(filter(None, map(self.refused, range(stage, -1, -1))), None):
            return why
        if changed := self.changed_after((0, 0)):
            last = changed[-1]
            return (
                f"the run was continued with a different config after step {last['step']} of stage {last['stage']!r} "
                f"({last['key']}), and there is no checkpoint from which the config of its last start holds"
            )
        if self._has_env(stage) and self.elsewhere:
            return (
                "what its environments have answered is in the journals of its explorers, not in that of the run. "
                "--play asks them again"
            )
        if self._has_env(stage) and not self._told_all:
            return (
                "there is no checkpoint before it, and the journal keeps answers of environments since the oldest "
                "checkpoint only. --play asks the environments again"
            )
        return "no checkpoint before it has the state of the optimizer (checkpoint.save_contents)"


def in_one_process(loaded: Loaded) -> Loaded:
    """A run whose explorers were separate processes (mode=train), as the run of one process: with
    rollout.schedule=deterministic both are equal to the bit (decision 017). Any other run as it is."""
    one = tuple(map(_in_one_process, loaded.stages))
    return replace(loaded, config=_in_one_process(loaded.config), stages=one)


def _in_one_process(cfg: Config) -> Config:
    if cfg.mode != "train" or cfg.rollout.schedule == "async":
        return cfg
    # sections without the keys that one process does not read: given ones would be refused
    given = "replay" in cfg.buffer.model_fields_set
    buffer = BufferConfig(replay=cfg.buffer.replay) if given else BufferConfig()
    return cfg.model_copy(update={"mode": "both", "buffer": buffer, "sync": SyncConfig()})


def is_step(line: dict[str, Json]) -> bool:
    """Whether a line of metrics.jsonl is of a training step, not of an evaluation."""
    return line["step"] > 0 and not is_evaluation(line)


def read(run_dir: Path) -> Recorded:
    """Raises ConfigError or DataError where this is no run directory, or a file in it was not written by a run."""
    written = overview.read(run_dir)
    if not any(map(is_step, written.metrics)):
        raise DataError(f"{run_dir}: metrics.jsonl has no training step yet, so there is nothing to replay")
    as_run = config_of(run_dir, ())
    loaded = in_one_process(as_run)
    planned, elsewhere = plans(loaded, here=False), loaded != as_run
    copies = [elsewhere and plan.samples_apart and plan.generates for plan in planned]
    found = _checkpoints(run_dir / "checkpoints")
    return Recorded(
        path=run_dir,
        loaded=loaded,
        plans=planned,
        starts=[
            ReplayStart((0, 0)),
            # a trainer that does not sample may have no copy of the weights that sampled
            *(start for start in found if not copies[start.at[0]] or _has_copy(start)),
        ],
        lines=written.metrics,
        branches=[c for c in written.changes if c["kind"] == "branch"],
        manifest=written.manifest,
        elsewhere=elsewhere,
    )


def _has_copy(start: ReplayStart) -> bool:
    return start.checkpoint is not None and (start.checkpoint / "sampler").is_dir()


def _checkpoints(root: Path) -> Iterator[ReplayStart]:
    for path in all_in(root) if root.is_dir() else ():
        place = place_of(path.name)
        try:
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            version, contents = int(state["version"]), state["contents"]
        except (OSError, ValueError, LookupError, TypeError):
            continue  # a kill has left it, or it is being removed; a replay from it would refuse it
        if place is not None:
            yield ReplayStart(place, path, version, "optimizer" in contents)


def stage_of(recorded: Recorded, stage: str | None, step: int) -> int:
    """The number of a stage by its name, or of the last one that has the step. ConfigError if there is none."""
    names = recorded.names
    if stage is not None and stage not in names:
        raise ConfigError(f"--stage {stage}: the run has the stages {', '.join(names)}")
    wanted = [names.index(stage)] if stage is not None else list(reversed(range(len(names))))
    found = [number for number in wanted if recorded.numbers(number, step) is not None]
    if not found:
        there = ", ".join(f"{name}: 1 to {recorded.done(n)}" for n, name in enumerate(names))
        raise ConfigError(f"--step {step}: the run has not recorded this step; steps there: {there}")
    return found[0]
