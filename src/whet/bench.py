"""`whet eval`: score replies from a file, or the checkpoints of a run, without training.

torch is imported only after the config is valid, and reward processes fork before torch and its threads exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from whet import environment
from whet.api import Stop, join_cluster, reward_sets, run_loop, watchdog_timeout_s
from whet.config.load import Loaded, load
from whet.config.plan import Plan, plans
from whet.config.schema import Config
from whet.config.sections.parallel import ParallelConfig
from whet.config.sources import verifiers
from whet.guard import stacks
from whet.guard.imports import import_all
from whet.guard.watch import Watch
from whet.offline import Judged, check, judge
from whet.rewards.combine import RewardSet
from whet.storage.paths import brought_here
from whet.track.files import RunLock
from whet.track.log import close_logging, setup_logging
from whet.types import CheckpointError, ConfigError, Json

if TYPE_CHECKING:
    from whet.job import Job

FOLDER = "bench"
"""Where in a run directory its checkpoints' evaluations are written: a run directory itself."""


def judge_file(loaded: Loaded, *, whole: bool) -> Judged:
    """Score the replies of eval.offline. ConfigError, DataError or WhetError, see `offline`."""
    check(loaded, whole=whole)
    loaded = brought_here(loaded)
    offline, cfg = check(loaded, whole=whole), loaded.config
    named = verifiers([cfg])
    with RewardSet.from_config(
        cfg.rewards, cfg.reward_workers, seed=cfg.seed, imports=cfg.imports, verifiers=named
    ) as rewards:
        return judge(cfg, offline, rewards)


def config_of(run_dir: Path, overrides: Sequence[str]) -> Loaded:
    """The config that a run was made with, and `overrides` put over it."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run_dir} has no config.yaml; give a run directory or a config file")
    return load(file, [*overrides, f"run_dir={run_dir}"])


def judge_checkpoints(loaded: Loaded) -> list[dict[str, Json]]:
    """Evaluate every kept checkpoint of a run, oldest first. Returns their metrics, as in metrics.jsonl.

    Metrics and replies are written to RUN/bench, which every call replaces; the run itself is only read.
    """
    loaded = brought_here(loaded)
    planned, loaded = plans(loaded), alone(loaded)
    cfg = loaded.config
    if not any(plan.evaluates for plan in planned):
        raise ConfigError("there is nothing to evaluate: data.eval is empty, or evaluation is off")
    environment.prepare(planned[0].threads, cfg.machine.logprob_parity != "off")
    out = Path(cfg.run_dir) / FOLDER
    with ExitStack() as stack:
        stack.enter_context(RunLock(out))
        stack.enter_context(stacks.kept(out, "eval"))
        setup_logging(out, level=cfg.track.log_level)
        stack.callback(close_logging)
        rewards = reward_sets(loaded, {}, stack)
        import_all(cfg.imports)
        from whet.data.recognise import with_columns

        loaded, _ = with_columns(loaded)
        return _bench(loaded, planned, rewards, out, stack=stack)


def alone(loaded: Loaded) -> Loaded:
    """The config without ranks and explorers, which an evaluation does not start."""

    def one(cfg: Config) -> Config:
        train = cfg.train.model_copy(update={"parallel": ParallelConfig()})
        cluster = cfg.cluster.model_copy(update={"ranks": False, "explorers": 0})
        return cfg.model_copy(update={"train": train, "cluster": cluster})

    return replace(loaded, config=one(loaded.config), stages=tuple(map(one, loaded.stages)))


def _bench(
    loaded: Loaded, planned: Sequence[Plan], rewards: Sequence[RewardSet], out: Path, *, stack: ExitStack
) -> list[dict[str, Json]]:
    from whet import checkpoint
    from whet.job import Job, open_models, open_records
    from whet.track.display import Display
    from whet.track.record import RunDirectory
    from whet.track.written import read_lines

    root = out.parent / "checkpoints"
    found = checkpoint.all_in(root) if root.is_dir() else []
    if not found:
        raise CheckpointError(f"{root} has no checkpoint to evaluate; the run has not saved one yet")
    directory = RunDirectory(out, loaded.names)
    stack.callback(directory.close)
    directory.truncate_to(0, -1)
    display = Display([(p.name, p.total_steps or 0) for p in planned], quiet=True)
    stack.callback(display.close)
    openers = join_cluster(loaded, planned, rewards, stack)
    watch = stack.enter_context(Watch(limit_s=watchdog_timeout_s(loaded)))
    models = open_models(
        loaded, planned, display=display, timeline=directory.timeline, watch=watch, **openers
    )
    records = open_records(
        loaded.config, directory=directory, display=display, stop=Stop(), watch=watch, resumed=None
    )
    for tracker in records.trackers:
        stack.callback(tracker.close)
    run_loop(_each(Job(loaded, planned, rewards, models, records), found))
    return read_lines(out / "metrics.jsonl")


async def _each(job: Job, checkpoints: Sequence[Path]) -> None:
    """Load every checkpoint into the policy and evaluate it. Nothing else of a stage is opened."""
    from whet import checkpoint
    from whet.disaggregated import Evaluation, open_evaluation

    evaluation: Evaluation | None = None
    try:
        for path in checkpoints:
            state = checkpoint.read_state(path)
            _check_stage(job.loaded, path, state)
            if evaluation is None or evaluation.context.index != state["stage"]:
                evaluation = open_evaluation(job, state["stage"])
            await evaluation.of(path, state)
    finally:
        await job.close()


def _check_stage(loaded: Loaded, path: Path, state: Json) -> None:
    if state["stage"] >= len(loaded.stages) or loaded.names[state["stage"]] != state["stage_name"]:
        raise CheckpointError(
            f"{path} is of stage '{state['stage_name']}', which the config does not have at that position; "
            f"stages of the config: {', '.join(loaded.names)}"
        )
