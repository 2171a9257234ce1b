"""`whet eval`: replies from a file, or the checkpoints of a run, judged without training.

Nothing heavy is imported before the config is right, and reward processes fork before torch and its threads are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from whet import environment
from whet.api import Stop, join_cluster, reward_sets, run_loop
from whet.config.load import Loaded, load
from whet.config.plan import plans
from whet.config.secrets import secrets_of
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
    from whet.run import Run
    from whet.shared import Shared

FOLDER = "bench"
"""Where in a run directory its checkpoints' evaluations are written: a run directory itself."""


def judge_file(loaded: Loaded, *, whole: bool) -> Judged:
    """Judge the replies that eval.offline names. ConfigError, DataError or WhetError, see `offline`."""
    check(loaded, whole=whole)
    loaded = brought_here(loaded)
    offline, cfg = check(loaded, whole=whole), loaded.config
    with RewardSet.from_config(cfg.rewards, cfg.guard, seed=cfg.seed, imports=cfg.imports) as rewards:
        return judge(cfg, offline, rewards)


def config_of(run_dir: Path, overrides: Sequence[str]) -> Loaded:
    """The config that a run was made with, and `overrides` put over it."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run_dir} holds no config.yaml; give a run directory, or a config file")
    return load(file, [*overrides, f"run_dir={run_dir}"])


def judge_checkpoints(loaded: Loaded) -> list[dict[str, Json]]:
    """Evaluate every kept checkpoint of a run, oldest first: their numbers, as in metrics.jsonl.

    Numbers and replies are written to RUN/bench, anew at every call; the run itself is only read.
    """
    planned = plans(loaded)
    loaded = brought_here(loaded)
    cfg = loaded.config
    if not any(plan.evaluates for plan in planned):
        raise ConfigError("there is nothing to evaluate: data.eval is empty, or evaluation is off")
    environment.prepare(planned[0].threads, cfg.machine.exact != "off")
    out = Path(cfg.run_dir) / FOLDER
    with ExitStack() as stack:
        stack.enter_context(RunLock(out))
        stack.enter_context(stacks.kept(out, "eval"))
        setup_logging(out, level=cfg.track.log_level, secrets=secrets_of(cfg))
        stack.callback(close_logging)
        rewards = reward_sets(loaded, {}, stack)
        import_all(cfg.imports)
        return _bench(loaded, rewards, out, stack=stack)


def _bench(
    loaded: Loaded, rewards: Sequence[RewardSet], out: Path, *, stack: ExitStack
) -> list[dict[str, Json]]:
    from whet import checkpoint
    from whet.shared import open_shared
    from whet.track.display import Display
    from whet.track.record import RunDirectory, read_lines

    root = out.parent / "checkpoints"
    found = checkpoint.all_in(root) if root.is_dir() else []
    if not found:
        raise CheckpointError(f"{root} holds no checkpoint to evaluate; the run has not saved one yet")
    planned = plans(loaded)
    directory = RunDirectory(out, loaded.names)
    stack.callback(directory.close)
    directory.truncate_to(0, -1)
    display = Display([(p.name, p.total_steps or 0) for p in planned], quiet=True)
    stack.callback(display.close)
    openers = join_cluster(loaded, planned, rewards, stack)
    shared = open_shared(
        loaded,
        planned,
        rewards=rewards,
        directory=directory,
        display=display,
        stop=Stop(),
        watch=stack.enter_context(Watch()),
        resumed=None,
        **openers,
    )
    for tracker in shared.trackers:
        stack.callback(tracker.close)
    run_loop(_each(shared, found))
    return read_lines(out / "metrics.jsonl")


async def _each(shared: Shared, checkpoints: Sequence[Path]) -> None:
    """Every checkpoint in the place of the policy, and evaluated."""
    from whet.loop import evaluation
    from whet.sync.weights import sync

    opened: dict[int, Run] = {}
    try:
        for path in checkpoints:
            run = _at(shared, path, opened)
            await run.wait(sync(run.policy, run.engine), "the weight sync")
            await evaluation(run)
    finally:
        if shared.engine is not None:
            await shared.engine.close()


def _at(shared: Shared, path: Path, opened: dict[int, Run]) -> Run:
    """The stage of a checkpoint with the weights that the checkpoint holds."""
    from whet import checkpoint
    from whet.stages import open_stage

    state = checkpoint.read_state(path)
    index = state["stage"]
    if index >= len(shared.loaded.stages) or shared.loaded.names[index] != state["stage_name"]:
        raise CheckpointError(
            f"{path} is of stage '{state['stage_name']}', which the config does not have in that place; "
            f"it has: {', '.join(shared.loaded.names)}"
        )
    if index not in opened:
        opened.clear()  # the models and optimizers of the stage before
        opened[index] = open_stage(shared, index)
    run = opened[index]
    needed = {name: engine for name, engine in run.engines().items() if name != "critic"}
    checkpoint.load(path, needed, wanted=("model",))
    run.step, run.policy.version = state["step"], state["version"]
    return run
