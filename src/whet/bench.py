"""`whet eval`: score replies from a file, or the checkpoints of a run, without training.

torch is imported only after the config is valid, and reward processes fork before torch and its threads exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from whet import environment
from whet.api import Stop, join_cluster, reward_sets, run_loop, watchdog_timeout_s
from whet.arguments import PATH, TEXT, WHOLE, expect, expect_overrides
from whet.config.faults import of_stage
from whet.config.load import Loaded, load
from whet.config.plan import Plan, plans
from whet.config.schema import Config
from whet.config.sections.parallel import ParallelConfig
from whet.config.source_faults import in_words_of
from whet.config.sources import rewards_by_source, verifiers
from whet.data.given import Given, taken
from whet.guard import stacks
from whet.guard.imports import import_all
from whet.guard.watch import Watch
from whet.judges import judges_of
from whet.offline import Judged, check, judge
from whet.rewards.bind import RewardFunction
from whet.rewards.combine import RewardSet
from whet.rewards.given import Rewards, named_functions, only_rewards
from whet.start import began
from whet.storage.paths import brought_here, with_rows
from whet.track.files import RUN_DIR, RunLock
from whet.track.log import close_logging, setup_logging
from whet.track.run_paths import check_inside, check_way
from whet.types import CheckpointError, ConfigError, Json

if TYPE_CHECKING:
    from whet.job import Job, Opening

FOLDER = "bench"
"""Where in a run directory its checkpoints' evaluations are written: a run directory itself."""
_PLACES = {"path", "subset", "split", "function", "arguments", "rows", "skip", "limit"}
"""Keys of a source that say which rows it has."""


def replies_in(file: Path, cfg: Config) -> dict[str, Json]:
    """Sections of a config that score the replies in a file: its columns are those of the config's first held-out
    source."""
    own = (
        cfg.data.eval[0].model_dump(mode="json", exclude_unset=True, exclude=_PLACES) if cfg.data.eval else {}
    )
    return {"eval": {"offline": True}, "data": {"eval": [{**own, "path": str(file)}]}}


def judge_file(loaded: Loaded, *, whole: bool) -> Judged:
    """Score the replies in data.eval. ConfigError, DataError or WhetError, see `offline`."""
    check(loaded, whole=whole)
    loaded = brought_here(loaded)
    cfg = loaded.config
    named = verifiers([cfg])
    with (
        RewardSet.from_config(
            cfg.rewards,
            cfg.reward_workers,
            seed=cfg.seed,
            imports=cfg.imports,
            verifiers=named,
            open_judge=judges_of(cfg),
        ) as rewards,
        in_words_of(loaded, 0),
    ):
        return judge(cfg, replace(rewards, by_source=rewards_by_source(cfg.data)))


def config_of(run_dir: Path, overrides: Sequence[str], sections: Mapping[str, Any] | None = None) -> Loaded:
    """The config that a run was made with, and `sections` and `overrides` put over it: held-out data of all stages."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"{run_dir} has no config.yaml; give a run directory, a config file, or a model's folder with config.json"
        )
    if "run_dir" in (sections or {}) or any(o.partition("=")[0].strip() == "run_dir" for o in overrides):
        raise ConfigError(
            f"run_dir: what is made of the run {run_dir} is written there; leave run_dir out, or export the run "
            "(`whet export RUN -o FOLDER`) and give that folder instead of it"
        )
    data = (sections or {}).get("data") or {}
    own = [
        f"stages.{stage.name}.data.eval={json.dumps(data['eval'])}"
        for stage in (load(file).config.stages if "eval" in data else ())
        if "eval" in stage.data
    ]
    place = f"run_dir={json.dumps(str(run_dir))}"  # quoted, for it is read as YAML: a folder may be called 7
    return load(file, [*own, *overrides, place], sections)


def evaluate(
    target: str | Path,
    *,
    data: Any = None,
    rewards: Rewards = None,
    stage: str | None = None,
    step: int | None = None,
    overrides: Sequence[str] = (),
    dialect: str | None = None,
    **sections: Any,
) -> list[dict[str, Json]]:
    """Evaluate the kept checkpoints of a run, oldest first, the model of a config file, or a model's folder. Returns
    their metrics, as in metrics.jsonl: one dict for each checkpoint, or one for the model.

    data: a file, or rows as for `train`, in place of the run's data.eval; a model's folder needs it.
    rewards: as for `train`, in place of the run's; a model's folder needs them.
    stage, step: only checkpoints of this stage, of this step.
    overrides, sections: as for `train`.
    dialect: the system that a config file is for, as `whet eval --dialect`.

    Metrics and replies are written to RUN/bench, for a model to run_dir/bench (runs/eval-MODEL/bench by default), which
    every call replaces.

    Raises ConfigError before anything is run, also for a config file whose run has checkpoints; CheckpointError where
    there is no such checkpoint.
    """
    expect(
        {
            "target": (target, PATH),
            "stage": (stage, TEXT),
            "step": (step, WHOLE),
            "dialect": (dialect, TEXT),
        }
    )
    expect_overrides(overrides)
    target = Path(target).expanduser()
    check_dialect(target, dialect)
    functions, named = named_functions(rewards)
    rows: list[Given] = []
    if named is not None:
        sections["rewards"] = named
    if data is not None:
        taken_data, rows = taken({"data": {"eval": data, "exclude_eval": False}})
        sections["data"] = {**sections.get("data", {}), **taken_data["data"]}
    model = is_model(target) or target.is_file()
    if model and (stage is not None or step is not None):
        what = "a model" if is_model(target) else "a config file"
        raise ConfigError(f"{target} is {what}, not a run: it has no checkpoints; leave stage and step out")
    if is_model(target):
        loaded = load(None, overrides, _for_model(target, sections))
    elif model:
        loaded = load(target, overrides, sections, dialect)
        _refuse_trained(target, Path(loaded.config.run_dir))
    else:
        loaded = config_of(target, overrides, sections)
    if named is not None:
        loaded = only_rewards(loaded, named)
    loaded = with_rows(loaded, rows)
    chosen = Selected(stage, step)
    return judge_checkpoints(loaded, functions, rows=rows, chosen=chosen, model=model)


def check_dialect(target: Path, dialect: str | None) -> None:
    """ConfigError for a dialect of what is no config file."""
    if dialect is not None and target.is_dir():
        what = "a model" if is_model(target) else "a run, whose config is whet's own"
        raise ConfigError(f"dialect: got {dialect!r}, and {target} is {what}; leave it out")


def _refuse_trained(file: Path, run_dir: Path) -> None:
    """Its model as it begins is not what somebody means who has trained it."""
    checkpoints = run_dir / "checkpoints"
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        raise ConfigError(
            f"{run_dir}, the run directory of {file}, has checkpoints: `whet eval {run_dir}` evaluates them. To "
            "evaluate the model as it was before training, give another one: run_dir=runs/before"
        )


def is_model(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face model, and no run."""
    return (folder / "config.json").is_file() and not (folder / "config.yaml").is_file()


def _for_model(folder: Path, sections: Mapping[str, Any]) -> dict[str, Any]:
    """The config of an evaluation of a model: nothing is trained, but a config names what it would train on."""
    data = sections.get("data") or {}
    lacking = [
        f"{what} ({how})"
        for what, how, there in (
            ("data", "--data FILE, in Python data=...", data.get("eval")),
            (
                "rewards",
                "--reward math or --reward rewards.py:f, in Python rewards=...",
                sections.get("rewards"),
            ),
        )
        if not there
    ]
    if lacking:
        raise ConfigError(f"{folder} is a model; to evaluate it, give {' and '.join(lacking)}")
    base = {"name": f"eval-{folder.resolve().name}", "model": {"path": str(folder)}, "train": {"steps": 0}}
    return {**base, **sections, "data": {"train": data["eval"], **data}}


class Selected(NamedTuple):
    """Which checkpoints are evaluated; None: of any stage, of any step."""

    stage: str | None = None
    step: int | None = None

    def has(self, state: Json) -> bool:
        """Whether a checkpoint with this state is one of them."""
        return self.stage in (None, state["stage_name"]) and self.step in (None, state["step"])

    def __str__(self) -> str:
        given = [("stage", self.stage), ("step", self.step)]
        return " and ".join(f"{name} {value}" for name, value in given if value is not None)


ALL = Selected()


def judge_checkpoints(
    loaded: Loaded,
    functions: Mapping[str, RewardFunction] | None = None,
    *,
    rows: Sequence[Given] = (),
    chosen: Selected = ALL,
    model: bool = False,
) -> list[dict[str, Json]]:
    """`evaluate` of a config. functions: rewards by name. rows: what is written before data is read. chosen: the
    checkpoints that are evaluated. model: the config's own model, not checkpoints.
    """
    loaded = brought_here(loaded)
    planned = [replace(plan, models_elsewhere=False) for plan in plans(loaded, trains=False)]
    loaded = alone(loaded)
    cfg = loaded.config
    if not any(plan.evaluates for plan in planned):
        raise ConfigError(
            "there is nothing to evaluate: data.eval is empty, or evaluation is off. Give held-out tasks (--data "
            "FILE, in Python data=...), or replies to score (--offline FILE)"
        )
    environment.prepare(planned[0].threads, cfg.machine.logprob_parity != "off")
    out = Path(cfg.run_dir) / FOLDER
    with environment.one_run(), ExitStack() as stack:
        set_up(cfg, out, "eval", rows=rows, stack=stack)
        rewards = reward_sets(loaded, functions or {}, stack)
        import_all(cfg.imports)
        from whet.data.recognise import with_columns

        found = [] if model else checkpoints_of(out.parent / "checkpoints", chosen)
        loaded, _ = with_columns(loaded, parts=("eval",))
        return _bench(loaded, planned, rewards, out, found=found, stack=stack)


def checkpoints_of(root: Path, chosen: Selected) -> list[Path]:
    """The checkpoints to evaluate, oldest first. CheckpointError where there is none."""
    from whet import checkpoint

    found = checkpoint.all_in(root) if root.is_dir() else []
    if not found:
        raise CheckpointError(f"{root} has no checkpoint to evaluate; the run has not saved one yet")
    kept = [p for p in found if chosen == ALL or chosen.has(checkpoint.read_state(p))]
    if not kept:
        raise CheckpointError(
            f"{root} has no checkpoint of {chosen}; there are: {', '.join(p.name for p in found)} "
            "(checkpoint.keep says how many are kept)"
        )
    return kept


def set_up(cfg: Config, folder: Path, command: str, *, rows: Sequence[Given], stack: ExitStack) -> None:
    """What a command has in its folder until the stack closes: the lock, stacks of a hang, the log. rows: what is
    written into the run directory before data is read."""
    run_dir = Path(cfg.run_dir)
    check_way(folder, run_dir)
    of_run = (run_dir / "checkpoints").is_dir()  # what is made of a run is written there
    other = "an export of the run (`whet export RUN -o FOLDER`) in place of the run" if of_run else RUN_DIR
    stack.enter_context(RunLock(folder, other=other))
    check_inside(folder)
    stack.enter_context(stacks.kept(folder, command))
    setup_logging(folder, level=cfg.track.log_level)
    stack.callback(close_logging)
    for given in rows:
        given.write(run_dir)


def alone(loaded: Loaded) -> Loaded:
    """The config without ranks and explorers, which an evaluation does not start."""

    def one(cfg: Config) -> Config:
        train = cfg.train.model_copy(update={"parallel": ParallelConfig()})
        cluster = cfg.cluster.model_copy(update={"ranks": False, "explorers": 0})
        return cfg.model_copy(update={"train": train, "cluster": cluster})

    return replace(loaded, config=one(loaded.config), stages=tuple(map(one, loaded.stages)))


def _bench(
    loaded: Loaded,
    planned: Sequence[Plan],
    rewards: Sequence[RewardSet],
    out: Path,
    *,
    found: Sequence[Path],
    stack: ExitStack,
) -> list[dict[str, Json]]:
    """found: the checkpoints to evaluate; none: the model itself."""
    from whet import checkpoint
    from whet.job import open_job
    from whet.stages import begin_evaluation
    from whet.track.display import Display
    from whet.track.record import RunDirectory
    from whet.track.written import read_lines

    directory = RunDirectory(out, loaded.names)
    stack.callback(directory.close)
    directory.truncate_to(0, -1)
    display = Display([(p.name, p.total_steps or 0) for p in planned], quiet=True)
    stack.callback(display.close)
    loaded = replace(
        loaded, day=began(out.parent), tokenizer=checkpoint.tokenizer_in(found[-1] if found else None)
    )
    openers = join_cluster(loaded, planned, rewards, stack)
    watch = stack.enter_context(Watch(limit_s=watchdog_timeout_s(loaded)))

    def read(opening: Opening) -> dict[int, Any]:
        index = _stage_of(loaded, found[0], checkpoint.read_state(found[0])) if found else 0
        with of_stage(loaded.names, index):
            return {index: begin_evaluation(opening, index)}

    job = open_job(
        loaded,
        planned,
        rewards,
        directory=directory,
        display=display,
        stop=Stop(),
        watch=watch,
        stack=stack,
        read=read,
        **openers,
    )
    run_loop(_each(job, found))
    return read_lines(out / "metrics.jsonl")


async def _each(job: Job, checkpoints: Sequence[Path]) -> None:
    """Load every checkpoint into the policy and evaluate it; without any, evaluate the policy as it is. Nothing else of
    a stage is opened."""
    from whet import checkpoint
    from whet.disaggregated import Evaluation, open_evaluation

    evaluation: Evaluation | None = None
    try:
        if not checkpoints:
            await open_evaluation(job, 0).present(0)
        for path in checkpoints:
            state = checkpoint.read_state(path)
            index = _stage_of(job.loaded, path, state)
            if evaluation is None or evaluation.context.index != index:
                evaluation = open_evaluation(job, index)
            evaluation.load(path, state)
            await evaluation.of(path, state)
    finally:
        await job.close()


def _stage_of(loaded: Loaded, path: Path, state: Json) -> int:
    """The stage of a checkpoint in this config. CheckpointError where it has none."""
    index: int = state["stage"]
    if index >= len(loaded.stages) or loaded.names[index] != state["stage_name"]:
        raise CheckpointError(
            f"{path} is of stage '{state['stage_name']}', which the config does not have at that position; "
            f"stages of the config: {', '.join(loaded.names)}"
        )
    return index
