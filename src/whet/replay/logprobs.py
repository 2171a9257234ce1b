"""The log-probs of recorded tokens, recomputed from checkpoints of the versions that sampled them.

It needs no step to be run again, so it holds for every schedule; but it tells nothing of how the tokens were drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from whet import environment
from whet.api import Stop, run_loop
from whet.bench import alone
from whet.checkpoint import Damaged, state_of
from whet.config.load import Loaded
from whet.config.schema import Config
from whet.replay.run import aside, opened
from whet.replay.steps import Recorded, ReplayStart
from whet.track.compare import ComparedColumn, ValueDifference, by_name, same, token_place
from whet.track.log import close_logging, setup_logging
from whet.track.written import read_rollouts
from whet.types import CheckpointError, ConfigError, Group, Json, Rollout, Strand, Task

if TYPE_CHECKING:
    from torch import Tensor

Rows = Sequence[Mapping[str, Json]]


@dataclass(frozen=True)
class Rescored:
    """The recorded tokens of a step, by the checkpoints of their versions."""

    stage: str
    step: int
    compared: Sequence[ComparedColumn]
    """Of each checkpoint: its version's tokens."""
    unknown: Mapping[int, int]
    """Number of tokens by version, of versions without a checkpoint, or with a damaged one."""
    close: bool = False
    """The engine that sampled them does not compute as the trainer does, to the bit."""

    @property
    def equal(self) -> bool:
        return all(each.differing == 0 for each in self.compared)


def versions(recorded: Recorded) -> dict[int, ReplayStart]:
    """Where the weights of each version are, as far as they are there."""
    return {start.version: start for start in recorded.starts}


def rescored(recorded: Recorded, stage: int, step: int) -> Rescored:
    """Raises ConfigError where the rollouts were not recorded, or none of their versions has a checkpoint."""
    name, file = recorded.names[stage], recorded.file("rollouts", stage, step)
    if file is None:
        raise ConfigError(
            f"--logprobs: {recorded.path} has no rollouts of step {step} of stage {name!r} "
            "(track.rollouts_interval)"
        )
    rows = read_rollouts(file)
    counts: dict[int, int] = {}
    for version in (v for row in rows for v in row["versions"] if v >= 0):
        counts[version] = counts.get(version, 0) + 1
    if not counts:
        raise ConfigError(
            f"--logprobs: the policy has sampled no token of step {step} of stage {name!r}; its replies were given"
        )
    here = {v: start for v, start in versions(recorded).items() if v in counts}
    known, damaged = _whole(here)
    if damaged and not known:
        raise CheckpointError(
            f"--logprobs: {'; '.join(damaged)}; put it back from a copy, or give another step"
        )
    if not known:
        has = ", ".join(f"{s.name} has version {v}" for v, s in versions(recorded).items())
        raise ConfigError(
            f"--logprobs: the tokens of step {step} of stage {name!r} are of the versions "
            f"{', '.join(map(str, sorted(counts))) or 'none'}, and none of these has a checkpoint: {has}"
        )
    found, close = _by_policy(recorded, stage, step, rows, known)
    unknown = {v: n for v, n in counts.items() if v not in known}
    return Rescored(name, step, found, unknown, close)


def _whole(starts: Mapping[int, ReplayStart]) -> tuple[dict[int, ReplayStart], list[str]]:
    """Those whose files are as they were written, and what the others lack."""
    whole, damaged = {}, []
    for version, start in starts.items():
        try:
            if start.checkpoint is not None:
                state_of(start.checkpoint)
        except Damaged as e:
            damaged.append(str(e))
        else:
            whole[version] = start
    return whole, damaged


def _by_policy(
    recorded: Recorded, stage: int, step: int, rows: Rows, known: Mapping[int, ReplayStart]
) -> tuple[list[ComparedColumn], bool]:
    """What is compared, and `Rescored.close`."""
    bare = replace(recorded, loaded=_without_data(recorded.loaded))
    with aside(bare, step) as (home, loaded), ExitStack() as stack:
        setup_logging(home, level=loaded.config.track.log_level)
        stack.callback(close_logging)
        with environment.importing():
            from whet.batch import pack
            from whet.envs.opened import Environments
            from whet.job import alike
            from whet.learner import untrained
            from whet.stages import begin_evaluation
        planned = [replace(plan, models_elsewhere=False) for plan in recorded.plans]
        job = opened(alone(loaded), planned, [], Environments(), Stop(), stack)
        stack.callback(lambda: run_loop(job.close()))
        context, _ = begin_evaluation(job, stage)
        # as sampled, not as trained
        train = context.cfg.train.model_copy(update={"temperature": None})
        policy = untrained(
            replace(context, cfg=context.cfg.model_copy(update={"train": train})), job.models
        ).policy
        batch, out = pack(groups(rows)), []
        for version, start in sorted(known.items(), key=lambda item: item[1].at):
            if start.checkpoint is not None:
                policy.load(start.checkpoint / "policy")
            out.append(_compared(rows, policy.forward(batch, "logprobs"), version, start.name))
        cfg = recorded.loaded.config
        native = cfg.rollout.engine == "native" and cfg.sync.dtype == "auto"
        return out, not (native and alike(recorded.loaded))


def _without_data(loaded: Loaded) -> Loaded:
    """The config without sources: the record has the tokens, and the data may be gone."""

    def one(cfg: Config) -> Config:
        data = cfg.data.model_copy(update={"train": (), "eval": (), "demonstrations": ()})
        return cfg.model_copy(update={"data": data, "eval": cfg.eval.model_copy(update={"sources": {}})})

    return replace(loaded, config=one(loaded.config), stages=tuple(map(one, loaded.stages)))


def _compared(rows: Rows, logp_N: Tensor, version: int, name: str) -> ComparedColumn:
    """Of the tokens of one version."""
    count, odd, first, begin = 0, 0, None, 0
    numbers = logp_N.tolist()
    for who, row in by_name(rows).items():
        size = len(row["token_ids"])
        for at in (n for n, v in enumerate(row["versions"]) if v == version):
            was, now = row["logprobs"][at], numbers[begin + at]
            count += 1
            if not same(was, now):
                odd += 1
                first = first or ValueDifference("logprobs", was, now, who, *token_place(row, at))
        begin += size
    return ComparedColumn(f"logprobs by {name} (version {version})", count, odd, first)


def groups(rows: Rows) -> list[Group]:
    """Rollouts of a record with their tokens, a group each."""
    return [Group(rollout.task, (rollout,)) for rollout in map(_rollout, rows)]


def _rollout(row: Mapping[str, Json]) -> Rollout:
    strands, start = [], 0
    for size in row["strand_tokens"]:
        names = ("token_ids", "mask", "logprobs", "sample_logprobs", "versions")
        strands.append(Strand(**{name: row[name][start : start + size] for name in names}))
        start += size
    task = Task(uid=row["uid"], source=row["source"], prompt=row["prompt"])
    return Rollout(
        task=task,
        index=row["index"],
        strands=tuple(strands),
        finish_reason=row["finish_reason"],
        reward=row["reward"],
    )
