"""What follows from a config: everything derived, computed once, before torch is imported.

`plan` looks at one stage; `plans` at a whole run, and reports every problem of all stages at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

from whet.config import checks_precision
from whet.config.checks import Problem, hard_problems, unused
from whet.config.checks_run import not_installed
from whet.config.derived import Plan, for_critic, with_lr
from whet.config.describe import describe
from whet.config.engines import ONE_FOR_ALL, never_trains
from whet.config.evaluation import (
    eval_sampling,
    evaluates,
    judges,
    longest_reply,
    scores_alone,
    tokens_after_prompt,
    total_tokens,
    writes_replies,
)
from whet.config.faults import EachStage, Refused, by_stage, named
from whet.config.groups import experts_per_step, sampled_tasks
from whet.config.hardware import cuda_bytes
from whet.config.judges import cache_bytes, is_judge
from whet.config.keys import dotted
from whet.config.learns import learns
from whet.config.load import Loaded, stage_configs, stage_names
from whet.config.recipes import resolve
from whet.config.schema import Config, TrainConfig
from whet.config.sizes import DTYPE_BYTES, parameters_in, shape
from whet.config.tree import STAGE
from whet.config.urls import hub_hint
from whet.types import ConfigError

__all__ = ["Plan", "cores", "describe", "dtype_on", "plan", "plans"]


def plan(cfg: Config, *, rows: int | None = None, name: str = "main") -> Plan:
    """The plan of one stage's config (`stages` empty). Raises one ConfigError with all that cannot work.

    rows: training rows of one epoch; needed for the number of steps where `train.epochs` is given.
    """
    if cfg.stages:
        raise ConfigError("plan: this config has stages; plan each of `stage_configs(cfg)`, or use `plans`")
    _refuse(
        [("", f"{key}: {text}") for key, text in [*hard_problems(cfg), *not_installed(cfg)]],
        f"stage '{name}'",
    )
    out = _derive(cfg, rows=rows, name=name)
    _refuse([("", f"{key}: {text}") for key, text in _misfits(out)], f"stage '{name}'")
    return out


def plans(
    run: Loaded | Config,
    *,
    rows: Mapping[str, int] | None = None,
    rehearsal: bool = False,
    here: bool = True,
    trains: bool = True,
) -> tuple[Plan, ...]:
    """The plans of all stages, or one ConfigError with every problem of every stage.

    Beside what cannot work, keys are refused that were set and can have no effect. With a `Loaded` each has
    its file and line. rows: training rows of one epoch, by stage name. rehearsal: trackers need not be installed.
    here: the run is for this machine, so its packages must be installed; `missing` names them otherwise.
    trains: the run makes new weights; an evaluation of what there is does not.
    """
    loaded = run if isinstance(run, Loaded) else None
    config = run.config if isinstance(run, Loaded) else run
    stages, names = stage_configs(config), stage_names(config)
    what = str(loaded.file) if loaded and loaded.file else "the config"

    if scores_alone(config, stages):
        raise ConfigError(
            f"{what} scores given replies (eval.offline) and has no training data (data.train), so there is "
            f"nothing to train: run `whet eval {what}`"
        )

    foreign = ""
    if loaded and loaded.translation:
        foreign = f", a {loaded.translation.dialect} file (it takes keys of whet as whet.KEY=VALUE)"

    def refuse(problems: Iterable[Problem]) -> None:
        _refuse([(loaded.where(key) if loaded else "", text) for key, text in problems], what + foreign)

    if trains and writes_replies(config):
        given = (
            "" if any(cfg.data.train for cfg in stages) else ", and there is no training data (data.train)"
        )
        text = f"track.dump.replies: only `whet generate` writes replies{given}: run `whet generate {what}`"
        refuse([("track.dump.replies", text)])
    if trains and any(cfg.train.steps == 0 for cfg in stages):
        text = f"got 0, so nothing is trained; to evaluate the model, run `whet eval {what}`"
        refuse(by_stage(names, [[("train.steps", text)] if cfg.train.steps == 0 else [] for cfg in stages]))
    refuse(_problems(config, stages, here=here and not rehearsal))
    learns_something = any(cfg.train.engine != "simulated" for cfg in stages)
    if trains and learns_something and (why := never_trains(config.rollout.engine)):
        refuse([("rollout.engine", f"rollout.engine: {why}")])
    derived = []
    with EachStage(names) as stage:
        for n, (name, cfg) in enumerate(zip(names, stages)):
            with stage(n):
                derived.append(_derive(cfg, rows=(rows or {}).get(name), name=name))
    elsewhere = config.mode in ("both", "train") and all(p.policy_on_ranks for p in derived)
    derived = [replace(p, models_elsewhere=elsewhere) for p in derived]
    refuse(by_stage(names, [list(_misfits(p, rehearsal=rehearsal)) for p in derived]))
    return tuple(derived)


def missing(run: Loaded) -> list[str]:
    """What the run needs and this machine has not installed, for a plan of a run elsewhere."""
    path = run.config.model.path
    hub = hub_hint(path) if path is not None and not Path(path).expanduser().is_dir() else ""
    model = [f"model.path={path}: no such folder on this machine{hub}"] if hub else []
    packages = (f"{key}: {text}" for cfg in run.stages for key, text in not_installed(cfg))
    return [*model, *dict.fromkeys(packages)]


def _refuse(problems: Sequence[tuple[str, str]], what: str) -> None:
    """Raise ConfigError with these (place, text), if there are any."""
    if problems:
        raise Refused(problems, what)


def _problems(config: Config, stages: Sequence[Config], *, here: bool) -> Iterator[Problem]:
    """What cannot work in each stage, what stages cannot differ in, and what has no effect."""
    missing = [list(not_installed(cfg)) if here else [] for cfg in stages]
    names = [stage.name for stage in config.stages]
    yield from by_stage(names, [[*hard_problems(cfg), *gone] for cfg, gone in zip(stages, missing)])
    for n, name in enumerate(names):
        key = f"stages[{n}].name"
        if name in names[:n]:
            yield key, f"{key}: '{name}' is taken by an earlier stage"
        if not STAGE.fullmatch(name):
            yield (
                key,
                f"{key}: '{name}' becomes a part of names of files: use letters of ASCII, digits, _ . and - only, a "
                "letter or digit first",
            )
        for shared in ONE_FOR_ALL:
            if getattr(stages[n].rollout, shared) != getattr(config.rollout, shared):
                key = f"stages[{n}].rollout.{shared}"
                yield key, f"{key}: one engine serves the whole run; set rollout.{shared} at the top level"
    tree = config.model_dump(mode="json", exclude_unset=True)
    for path, text in unused(tree, stages):
        yield dotted(path), f"{named(path, tree)}: {text}"


def _derive(cfg: Config, *, rows: int | None, name: str) -> Plan:
    cfg = with_lr(cfg)
    algorithm = resolve(cfg.algorithm)
    experts = experts_per_step(cfg, algorithm)
    size = shape(cfg.model, cfg.tokenizer)
    device = device_of(cfg)
    tensors = size.tensors if size else None
    reply, _ = longest_reply(cfg)
    return Plan(
        name=name,
        cfg=cfg,
        algorithm=algorithm,
        rows=rows,
        total_steps=total_steps(
            cfg.train, rows, tasks=sampled_tasks(cfg.train.tasks_per_step - experts, algorithm)
        ),
        tasks_per_step=cfg.train.tasks_per_step,
        group_size={"online": cfg.rollout.group_size, "demonstrations": 1, "preferences": 2, "labels": 1}[
            algorithm.kind
        ],
        experts_per_step=experts,
        minibatches=cfg.train.minibatches,
        passes=cfg.train.update_epochs,
        train=cfg.train,
        critic=for_critic(cfg) if algorithm.needs_critic else None,
        critic_warmup_steps=cfg.critic.warmup_steps if algorithm.needs_critic else 0,
        optimizer=cfg.train.optimizer,
        reply_tokens=tokens_after_prompt(cfg, reply),
        train_reply_tokens=tokens_after_prompt(cfg, cfg.rollout.sampling.max_tokens),
        total_tokens=total_tokens(cfg, reply),
        eval_sampling=eval_sampling(cfg),
        evaluates=evaluates(cfg),
        judges=judges(cfg),
        dtype=dtype_on(cfg, device),
        dtype_open=cfg.model.dtype is None and cfg.machine.device == "auto" and device == "cpu",
        device=device,
        compiled=device == "cpu" and cfg.machine.kernels != "torch",
        mode=mode_of(cfg, algorithm.kind),
        saves_parts=cfg.checkpoint.sharded or cfg.checkpoint.async_save,
        quantized=cfg.rollout.quantization,
        samples_apart=_samples_apart(cfg, mode_of(cfg, algorithm.kind)),
        threads=cfg.machine.threads or cores(),
        shape=size,
        learns=learns(tensors, cfg.model.lora, cfg.train.trainable) if tensors else None,
        critic_learns=learns(tensors, cfg.critic.lora, {}) if tensors else None,
        vocab_is_bound=cfg.tokenizer.build is not None and cfg.model.scratch is not None,
        reference_saved=algorithm.needs_reference and (not _from_folder(cfg) or _resets(cfg)),
        reference_from_folder=_from_folder(cfg),
        reference_is_base=_begins_as_base(cfg),
        reward_models=_judges(cfg, device),
        critic_whole=cfg.critic.path is None,
    )


def mode_of(cfg: Config, kind: str) -> Literal["synchronous", "overlapped", "asynchronous", "train"]:
    """How exploring and training take turns: a function of loop.MODES. kind: of the algorithm."""
    if kind != "online" or cfg.mode == "eval":
        return "synchronous"
    if cfg.mode == "explore" or cfg.rollout.schedule == "async":
        return "train" if cfg.mode == "train" else "asynchronous"
    return "overlapped" if cfg.rollout.max_staleness else "synchronous"


def _samples_apart(cfg: Config, mode: str) -> bool:
    """Whether this process keeps the weights of the last sync beside those that are trained."""
    if cfg.mode == "both":
        return cfg.rollout.sync_interval > 1 or mode != "synchronous"
    return cfg.mode == "train" and cfg.rollout.sync_interval > 1 and mode in ("synchronous", "overlapped")


def _begins_as_base(cfg: Config) -> bool:
    """Adapters that do nothing at first, and a reference that is never reset to later ones."""
    lora = cfg.model.lora
    return (
        lora is not None
        and lora.init in ("default", "gaussian", "xavier")
        and lora.path is None
        and not _resets(cfg)
    )


def _from_folder(cfg: Config) -> bool:
    return cfg.reference.path is not None or bool(cfg.reference.models)


def _resets(cfg: Config) -> bool:
    """The reference becomes the policy of a later step, so a checkpoint has to hold it."""
    return cfg.reference.reset_interval != 0


def _judges(cfg: Config, device: str) -> dict[str, int]:
    """Bytes of the reward models' weights, by the names of their rewards; without those that are not at hand."""
    found = {}
    for name, reward in cfg.rewards.items():
        folder = Path(reward.model.path).expanduser() if reward.model else None
        if reward.model and folder and folder.is_dir():
            dtype = reward.model.dtype or ("bfloat16" if device == "cuda" else "float32")
            cache = cache_bytes(reward.model, device=device, dtype=dtype) if is_judge(reward) else 0
            found[f"reward model {name}"] = parameters_in(folder) * DTYPE_BYTES[dtype] + cache
    return found


def total_steps(train: TrainConfig, rows: int | None, *, tasks: int) -> int | None:
    """Training steps: those given, or those of the epochs, whichever end first. None: the rows are not known.

    tasks: drawn from the rows in one step.
    """
    if train.epochs is None:
        return train.steps
    if rows is None:
        return None
    if train.drop_last is True:
        rows -= rows % tasks
    whole, rest = divmod(tasks_of(rows, train.epochs), tasks)
    steps = whole + (rest > 0 and train.drop_last != "end")
    if steps == 0 and train.drop_last == "end":
        raise ConfigError(
            f"train.drop_last=end: {rows} rows in {train.epochs:g} epochs fill no step of {tasks} tasks; set it to "
            "false or lower train.tasks_per_step"
        )
    return steps if train.steps is None else min(steps, train.steps)


def tasks_of(rows: int, epochs: float) -> Fraction:
    """Tasks of so many epochs over the rows. Their number is an exact decimal: 1.1 of 10 rows are 11, no more."""
    return Fraction(str(epochs)) * rows


def _misfits(plan: Plan, *, rehearsal: bool = False) -> Iterator[Problem]:
    """What is wrong with numbers that had to be derived first. A rehearsal is not on the device of the run."""
    if not rehearsal:
        yield from checks_precision.misfits(plan)
    if plan.generates and plan.cfg.machine.kv_cache_mb is not None and plan.shape is not None:
        one = plan.shape.kv_bytes(rows=1, tokens=plan.max_sequence_tokens, dtype=plan.cache_dtype)
        if one > plan.cfg.machine.kv_cache_mb * 2**20:
            yield (
                "machine.kv_cache_mb",
                f"{plan.cfg.machine.kv_cache_mb} MiB does not hold one rollout of {plan.max_sequence_tokens} tokens, "
                f"which takes {math.ceil(one / 2**20)} MiB",
            )


def dtype_on(cfg: Config, device: str) -> Literal["float32", "bfloat16", "float16"]:
    """Dtype of the parameters on 'cpu' or 'cuda': bfloat16 is faster than float32 on few CPUs."""
    return cfg.model.dtype or ("bfloat16" if device == "cuda" else "float32")


def halves(stages: Iterable[Config], device: str) -> set[str]:
    """The dtypes of half precision that these stages' parameters have on 'cpu' or 'cuda'."""
    return {name for stage in stages if (name := dtype_on(stage, device)) != "float32"}


def device_of(cfg: Config) -> Literal["cpu", "cuda"]:
    """What machine.device comes to on this machine."""
    if cfg.machine.device == "auto":
        return "cpu" if cuda_bytes() is None else "cuda"
    return cfg.machine.device


def cores() -> int:
    """CPU cores that this process may use; OMP_NUM_THREADS, where it is set, says how many it wants."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
