"""What follows from a config: everything derived, computed once, before torch is imported.

`plan` looks at one stage; `plans` at a whole run, and reports every problem of all stages at once.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from whet.config.checks import Problem, eval_sampling, evaluates, hard_problems, unused
from whet.config.derived import Plan
from whet.config.describe import describe
from whet.config.faults import listing, named
from whet.config.keys import dotted
from whet.config.load import Loaded, stage_configs, stage_names
from whet.config.recipes import resolve
from whet.config.schema import Config
from whet.config.sizes import shape
from whet.types import ConfigError

__all__ = ["Plan", "cores", "describe", "dtype_on", "plan", "plans"]


def plan(cfg: Config, *, rows: int | None = None, name: str = "main") -> Plan:
    """The plan of one stage's config (`stages` empty). Raises one ConfigError with all that cannot work.

    rows: training rows of one epoch; needed for the number of steps where `train.epochs` is given.
    """
    if cfg.stages:
        raise ConfigError("plan: this config has stages; plan each of `stage_configs(cfg)`, or use `plans`")
    _refuse([("", f"{key}: {text}") for key, text in hard_problems(cfg)], f"stage '{name}'")
    out = _derive(cfg, rows=rows, name=name)
    _refuse([("", f"{key}: {text}") for key, text in _misfits(out)], f"stage '{name}'")
    return out


def plans(run: Loaded | Config, *, rows: Mapping[str, int] | None = None) -> tuple[Plan, ...]:
    """The plans of all stages, or one ConfigError with every problem of every stage.

    Beside what cannot work, keys are refused that were set and can have no effect. With a `Loaded` each has
    its file and line. rows: training rows of one epoch, by stage name.
    """
    loaded = run if isinstance(run, Loaded) else None
    config = run.config if isinstance(run, Loaded) else run
    stages, names = stage_configs(config), stage_names(config)
    what = str(loaded.file) if loaded and loaded.file else "the config"

    def refuse(problems: Iterable[Problem]) -> None:
        _refuse([(loaded.where(key) if loaded else "", text) for key, text in problems], what)

    refuse(_problems(config, stages))
    derived = [_derive(cfg, rows=(rows or {}).get(name), name=name) for name, cfg in zip(names, stages)]
    refuse(_told(config, [list(_misfits(p)) for p in derived]))
    return tuple(derived)


def _refuse(problems: Sequence[tuple[str, str]], what: str) -> None:
    """Raise ConfigError with these (place, text), if there are any."""
    if problems:
        raise ConfigError(listing(problems, what))


def _problems(config: Config, stages: Sequence[Config]) -> Iterator[Problem]:
    """What cannot work in each stage, what stages cannot differ in, and what has no effect."""
    yield from _told(config, [hard_problems(cfg) for cfg in stages])
    names = [stage.name for stage in config.stages]
    for n, name in enumerate(names):
        key = f"stages[{n}].name"
        if name in names[:n]:
            yield key, f"{key}: '{name}' is taken by an earlier stage"
        if not re.fullmatch(r"\w[\w.-]*", name):
            yield key, f"{key}: '{name}' becomes a folder's name: only letters, digits, _ . and - are safe"
        if stages[n].rollout.engine != config.rollout.engine:
            key = f"stages[{n}].rollout.engine"
            yield key, f"{key}: one engine serves the whole run; set rollout.engine at the top level"
    tree = config.model_dump(mode="json", exclude_unset=True)
    for path, text in unused(tree, stages):
        yield dotted(path), f"{named(path, tree)}: {text}"


def _told(config: Config, found: Sequence[Sequence[Problem]]) -> Iterator[Problem]:
    """(key, text with the key in it): what all stages have in common once, the rest by stage."""
    for n, problems in enumerate(found):
        for problem in problems:
            key, text = problem
            if all(problem in others for others in found):
                if n == 0:
                    yield key, f"{key}: {text}"
            else:
                yield f"stages[{n}].{key}", f"stages[{n}] ('{config.stages[n].name}').{key}: {text}"


def _derive(cfg: Config, *, rows: int | None, name: str) -> Plan:
    algorithm = resolve(cfg.algorithm)
    sampling = eval_sampling(cfg)
    looks = evaluates(cfg)
    steps = cfg.train.steps
    if steps is None and rows is not None:
        steps = math.ceil(rows * (cfg.train.epochs or 0) / cfg.train.tasks_per_step)
    return Plan(
        name=name,
        algorithm=algorithm,
        rows=rows,
        total_steps=steps,
        tasks_per_step=cfg.train.tasks_per_step,
        group_size={"online": cfg.rollout.group_size, "demonstrations": 1, "preferences": 2}[algorithm.kind],
        minibatches=cfg.train.minibatches,
        passes=cfg.train.passes,
        critic_warmup_steps=cfg.critic.warmup_steps if algorithm.needs_critic else 0,
        optimizer=cfg.train.optimizer,
        prompt_tokens=cfg.data.max_prompt_tokens,
        reply_tokens=max(cfg.rollout.sampling.max_tokens, sampling.max_tokens if looks else 0),
        max_batch=cfg.rollout.max_batch,
        eval_sampling=sampling,
        evaluates=looks,
        dtype=dtype_on(cfg, "cuda" if cfg.machine.device == "cuda" else "cpu"),
        dtype_open=cfg.model.dtype is None and cfg.machine.device == "auto",
        threads=cfg.machine.threads or cores(),
        shape=shape(cfg.model, cfg.tokenizer),
        vocab_is_bound=cfg.tokenizer.build is not None and cfg.model.scratch is not None,
        keep=cfg.checkpoint.keep,
        kv_cache_mb=cfg.machine.kv_cache_mb,
        reference_saved=algorithm.needs_reference and cfg.reference.path is None,
    )


def _misfits(plan: Plan) -> Iterator[Problem]:
    """What is wrong with numbers that had to be derived first."""
    if plan.generates and plan.kv_cache_mb is not None and plan.shape is not None:
        one = plan.shape.kv_bytes(rows=1, tokens=plan.max_sequence_tokens, dtype=plan.dtype)
        if one > plan.kv_cache_mb * 2**20:
            yield (
                "machine.kv_cache_mb",
                f"{plan.kv_cache_mb} MiB does not hold one rollout of {plan.max_sequence_tokens} tokens, "
                f"which takes {math.ceil(one / 2**20)} MiB",
            )


def dtype_on(cfg: Config, device: str) -> Literal["float32", "bfloat16"]:
    """Dtype of the parameters on 'cpu' or 'cuda': bfloat16 is slower than float32 on most CPUs."""
    return cfg.model.dtype or ("bfloat16" if device == "cuda" else "float32")


def cores() -> int:
    """CPU cores that this process may use; OMP_NUM_THREADS, where it is set, says how many it wants."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
