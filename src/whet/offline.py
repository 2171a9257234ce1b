"""Replies from a file, scored with the config's rewards: an evaluation without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from whet.config.evaluation import reward_weights
from whet.config.faults import listing
from whet.config.load import Loaded
from whet.config.schema import Config, SourceConfig
from whet.config.sections.eval import OfflineConfig
from whet.config.tree import leaves
from whet.data.columns import lookup, parse
from whet.data.rows import read_rows
from whet.evaluation import accuracy
from whet.rewards.combine import RewardSet, check_failures, score
from whet.types import ConfigError, DataError, Group, Json, Metrics, Rollout, Task, given_tokens

READS = (
    "name",
    "seed",
    "imports",
    "rewards",
    "reward_workers",
    "eval.offline",
    "eval.success",
    "eval.reward",
)
"""Keys that have an effect without a model."""

AT_ONCE = 1024
"""Rows scored together, which are in memory at the same time."""


class Judged(NamedTuple):
    metrics: Metrics
    """As in an evaluation, without the metrics that need tokens."""
    rows: list[dict[str, Json]]
    """One for each reply: task, reply, reward and its parts."""


def check(loaded: Loaded, *, whole: bool) -> OfflineConfig:
    """The file to score. Raises one ConfigError with all missing keys. If the config is `whole`, only for an offline
    evaluation (not a training config with another file), keys without an effect are errors too."""
    cfg = loaded.config
    problems = [*_missing(cfg), *(_idle(loaded) if whole and cfg.eval.offline is not None else ())]
    if problems:
        said = [(loaded.where(key), f"{key}: {text}") for key, text in problems]
        raise ConfigError(listing(said, str(loaded.file or "the config")))
    assert cfg.eval.offline is not None
    return cfg.eval.offline


def _missing(cfg: Config) -> Iterator[tuple[str, str]]:
    if cfg.eval.offline is None:
        yield (
            "eval.offline",
            "name the file of replies: eval.offline.path, or --offline FILE; to evaluate the checkpoints of a run, "
            f"give its run directory: whet eval {cfg.run_dir}",
        )
    if not cfg.rewards:
        yield (
            "rewards",
            "rewards score the replies, and there are none; give one, e.g. rewards.answer.function=math",
        )
    for name in reward_weights(cfg):
        if name not in cfg.rewards:
            yield (
                "eval.reward",
                f"'{name}' is not among rewards: {', '.join(cfg.rewards) or 'there are none'}",
            )
        elif cfg.rewards[name].function == "overlong":
            yield (
                f"rewards.{name}",
                "overlong counts tokens, and replies from a file have no tokens; leave it out",
            )


def _idle(loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Given keys without an effect."""
    for path, value in leaves(loaded.config.model_dump(mode="json", exclude_unset=True)):
        key = ".".join(map(str, path))
        read = any(f"{key}.".startswith(f"{known}.") for known in READS)
        if loaded.where(key) and value not in (None, {}, []) and not read:
            yield key, "has no effect: the replies come from a file; leave it out"


def judge(cfg: Config, offline: OfflineConfig, rewards: RewardSet) -> Judged:
    """Score every reply of the file. Raises DataError for a row that cannot be read, WhetError if more replies
    cannot be scored than reward_workers.max_failure_rate allows."""
    judging = replace(rewards, weights=reward_weights(cfg))
    groups = list(read(offline))
    done: list[Group] = []
    for begin in range(0, len(groups), AT_ONCE):
        done += asyncio.run(score(groups[begin : begin + AT_ONCE], judging))
    check_failures(done, rewards)
    metrics = accuracy(done, success=cfg.eval.success)
    counted = {name: value for name, value in metrics.items() if not name.endswith("/tokens_mean")}
    return Judged(counted, [_row(r) for g in done for r in g.rollouts])


def read(offline: OfflineConfig) -> Iterator[Group]:
    """The rows of the file as tasks, each with its replies."""
    source = SourceConfig(
        path=offline.path,
        prompt=offline.prompt,
        answer=offline.answer,
        label=offline.label,
        limit=offline.limit,
    )
    rows = read_rows(source)
    for number in range(len(rows)):
        row, where = rows.row(number), rows.where(number)
        texts = _replies(row, offline.response, where=where)
        row = {k: v for k, v in row.items() if k != offline.response}
        fields = parse(row, source, name=rows.name, chat=None, where=where)
        task = Task(
            uid=number, source=fields.label, prompt=fields.prompt, answer=fields.answer, extra=fields.extra
        )
        yield Group(task, tuple(_rollout(task, index, text) for index, text in enumerate(texts)))


def _replies(row: dict[str, Json], column: str, *, where: str) -> Sequence[str]:
    value = lookup(row, column)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return value
    top = column if column in row else column.partition(".")[0]
    found = (
        f"column {top!r} holds {type(row[top]).__name__} {repr(row[top])[:60]}"
        if top in row
        else f"no column {top!r}; there are: {', '.join(sorted(row)) or 'none'}"
    )
    raise DataError(
        f"{where}: {found}; expected a reply as text, or a non-empty list of them: eval.offline.response=COLUMN names "
        "their column."
    )


def _rollout(task: Task, index: int, text: str) -> Rollout:
    """A rollout with a reply as text, without tokens."""
    return Rollout.one_strand(
        task=task,
        index=index,
        **given_tokens([], []),
        finish_reason="stop",
        text=text,
    )


def _row(r: Rollout) -> dict[str, Json]:
    return {
        "row": r.task.uid,
        "index": r.index,
        "source": r.task.source,
        "answer": r.task.answer,
        "extracted": r.answer,
        "reward": r.reward,
        "reward_parts": r.reward_parts,
        "error": r.error,
    }
