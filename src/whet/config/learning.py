"""Problems of minibatches, schedules and trained parameters in a config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from whet.config.recipes import Problem, Resolved
from whet.config.schedules import warmup_steps
from whet.config.schema import Config, LoraConfig, ScheduleConfig, TrainConfig
from whet.config.urls import is_remote

READS = {
    "constant": (),
    "linear": ("min_lr_ratio",),
    "cosine": ("min_lr_ratio", "num_cycles"),
    "inverse_sqrt": ("min_lr_ratio",),
    "wsd": ("min_lr_ratio", "num_cycles", "decay_steps", "decay_type"),
}
"""The keys that each type of schedule reads in addition to the warm-up and its length."""


def train_problems(cfg: Config, algorithm: Resolved | None) -> Iterator[Problem]:
    """Problems of `train` and of the settings of the critic. algorithm: None where it is not known."""
    train = cfg.train
    rollouts = cfg.rollout.group_size if algorithm and cuts_groups(algorithm) else 1
    yield from _minibatches("train.minibatches", train.minibatches, train, rollouts)
    if cfg.critic.minibatches:
        yield from _minibatches("critic.minibatches", cfg.critic.minibatches, train, rollouts)
    yield from _schedule(train.optimizer.schedule, "train.optimizer.schedule")
    yield from _schedule(cfg.critic.optimizer.schedule, "critic.optimizer.schedule")
    yield from _parameter_problems(cfg)


def cuts_groups(algorithm: Resolved) -> bool:
    """Whether rollouts of a group may be in different minibatches. Advantages are computed before, over whole groups;
    a loss on pairs, a mean over groups and a mix with demonstrations need them whole."""
    whole = algorithm.pairs or algorithm.mix is not None or algorithm.loss_agg_mode == "prompt-mean"
    return algorithm.kind == "online" and not whole


def _minibatches(key: str, wanted: int, train: TrainConfig, rollouts: int) -> Iterator[Problem]:
    tasks = train.tasks_per_step
    if tasks * rollouts % wanted:
        parts = _nearest(wanted, lambda m: tasks % m == 0)
        sizes = _nearest(tasks, lambda n: n % wanted == 0)
        of_them = f", nor their {tasks * rollouts} rollouts" if rollouts > 1 else ""
        yield (
            key,
            f"{wanted} does not divide train.tasks_per_step={tasks}{of_them}; nearest values that do: {key}={parts}, "
            f"or train.tasks_per_step={sizes}",
        )


def _schedule(s: ScheduleConfig, at: str) -> Iterator[Problem]:
    if not s.total_steps or s.decay_steps is None or s.decay_steps < 1:
        return
    warmup = warmup_steps(s, s.total_steps)
    if warmup < s.total_steps < warmup + s.decay_steps:
        yield (
            f"{at}.decay_steps",
            f"{s.decay_steps} steps of decay after {warmup} of warm-up are more than total_steps={s.total_steps}; "
            "lower one of the two, or raise total_steps",
        )


def _nearest(wanted: int, works: Callable[[int], bool]) -> str:
    """The next number below and above that works, as 'a or b'."""
    below = next((n for n in range(wanted - 1, 0, -1) if works(n)), None)
    above = next((n for n in range(wanted + 1, 2 * wanted + 1) if works(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def _parameter_problems(cfg: Config) -> Iterator[Problem]:
    """Problems of the keys that select trained parameters: adapters, patterns of names, optimizer groups."""
    for at, lora in (("model.lora", cfg.model.lora), ("critic.lora", cfg.critic.lora)):
        if lora is not None:
            yield from _lora(at, lora)
    yield from _patterns("train.trainable", cfg.train.trainable)
    for at, optimizer in (("train", cfg.train.optimizer), ("critic", cfg.critic.optimizer)):
        yield from _patterns(f"{at}.optimizer.param_groups", optimizer.param_groups)


def _lora(at: str, lora: LoraConfig) -> Iterator[Problem]:
    if lora.targets in ("", ()):
        yield f"{at}.targets", "is empty; give all-linear, names of layers or a regular expression"
    if isinstance(lora.targets, str):
        yield from _patterns(f"{at}.targets", [lora.targets])
    if isinstance(lora.exclude_modules, str):
        yield from _patterns(f"{at}.exclude_modules", [lora.exclude_modules])
    yield from _patterns(f"{at}.rank_pattern", lora.rank_pattern)
    yield from _patterns(f"{at}.alpha_pattern", lora.alpha_pattern)
    local = lora.path is not None and not is_remote(lora.path)
    if local and not (Path(lora.path or "").expanduser() / "adapter_model.safetensors").is_file():
        yield (
            f"{at}.path",
            f"{lora.path!r} has no adapter_model.safetensors; give a folder written by peft",
        )


def _patterns(key: str, patterns: Iterable[str]) -> Iterator[Problem]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            yield key, f"{pattern!r} is not a regular expression: {error}"
