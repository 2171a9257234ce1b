"""Problems of training steps, micro-batches and schedules in a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from whet.config.schema import Config, Schedule, Train

Said = tuple[str, str]
"""(key, what is wrong with it)."""

READS = {
    "constant": (),
    "linear": ("min_lr_ratio",),
    "cosine": ("min_lr_ratio", "num_cycles"),
    "inverse_sqrt": ("min_lr_ratio",),
    "wsd": ("min_lr_ratio", "num_cycles", "decay_steps", "decay_ratio", "decay_type"),
}
"""The keys that each type of schedule reads in addition to the warm-up and its length."""


def train_problems(cfg: Config) -> Iterator[Said]:
    """Problems of `train` and of the settings of the critic."""
    train = cfg.train
    if train.steps is None and train.epochs is None:
        yield (
            "train.steps",
            "give train.steps or train.epochs, or both (the earlier end counts); neither is given",
        )
    if train.drop_last is True and len(cfg.data.train) > 1:
        yield (
            "train.drop_last",
            f"{len(cfg.data.train)} sources are mixed by weight, so their epochs have no common end; set it to false, "
            "or give one source with a list of paths",
        )
    for one, other in (
        ("train.micro_batch_tokens", "train.micro_batch_rollouts"),
        ("train.forward_micro_batch_tokens", "train.forward_micro_batch_rollouts"),
        ("critic.micro_batch_tokens", "critic.micro_batch_rollouts"),
    ):
        if _at(cfg, one) and _at(cfg, other):
            yield one, f"give {one} or {other}, not both"
    yield from _minibatches("train.minibatches", train.minibatches, train)
    if cfg.critic.minibatches:
        yield from _minibatches("critic.minibatches", cfg.critic.minibatches, train)
    yield from _schedule(train.optimizer.schedule, "train.optimizer.schedule")
    yield from _schedule(cfg.critic.optimizer.schedule, "critic.optimizer.schedule")


def _at(cfg: Config, key: str) -> int | None:
    section, name = key.split(".")
    return getattr(getattr(cfg, section), name)  # type: ignore[no-any-return]


def _minibatches(key: str, wanted: int, train: Train) -> Iterator[Said]:
    tasks = train.tasks_per_step
    if tasks % wanted:
        parts = _nearest(wanted, lambda m: tasks % m == 0)
        sizes = _nearest(tasks, lambda n: n % wanted == 0)
        yield (
            key,
            f"{wanted} does not divide train.tasks_per_step={tasks}; nearest values that do: {key}={parts}, or "
            f"train.tasks_per_step={sizes}",
        )


def _schedule(s: Schedule, at: str) -> Iterator[Said]:
    warmup = s.warmup_steps or 0
    if s.warmup_steps is not None and s.warmup_ratio:
        yield f"{at}.warmup_steps", "give warmup_steps or warmup_ratio, not both"
    if s.total_steps and warmup >= s.total_steps:
        yield (
            f"{at}.warmup_steps",
            f"{warmup} steps of warm-up leave no step of total_steps={s.total_steps}; lower it, or raise total_steps",
        )
    elif s.total_steps and s.decay_steps and warmup + s.decay_steps > s.total_steps:
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
