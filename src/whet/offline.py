"""Replies in the rows of `data.eval`, scored with the config's rewards: an evaluation without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from whet.config.evaluation import reward_weights
from whet.config.faults import listing
from whet.config.load import Loaded
from whet.config.schema import Config, SourceConfig
from whet.config.source_faults import of_source
from whet.config.tree import leaves
from whet.data.columns import lookup, parse
from whet.data.rows import read_rows
from whet.evaluation import accuracy, check_sources
from whet.rewards.combine import RewardSet, check_columns, check_failures, score
from whet.types import ConfigError, DataError, Group, Json, Metrics, Rollout, Task, given_tokens

READS = (
    "name",
    "seed",
    "imports",
    "data.eval",
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


def check(loaded: Loaded, *, whole: bool) -> None:
    """Raises one ConfigError with all missing keys. If the config is `whole`, only for an offline evaluation (not a
    training config with another file), keys without an effect are errors too."""
    cfg = loaded.config
    problems = [*_missing(cfg), *(_idle(loaded) if whole and cfg.eval.offline else ())]
    if problems:
        said = [(loaded.where(key), f"{key}: {text}") for key, text in problems]
        raise ConfigError(listing(said, str(loaded.file or "the config")))


def _missing(cfg: Config) -> Iterator[tuple[str, str]]:
    if not (cfg.eval.offline and cfg.data.eval):
        yield (
            "eval.offline",
            "name the file of replies: --offline FILE, or data.eval with eval.offline=true; to evaluate the "
            f"checkpoints of a run, give its run directory: whet eval {cfg.run_dir}",
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


def judge(cfg: Config, rewards: RewardSet) -> Judged:
    """Score every reply of data.eval. Raises DataError for a row that cannot be read, WhetError if more replies
    cannot be scored than reward_workers.max_failure_rate allows."""
    judging = replace(rewards, weights=reward_weights(cfg))
    groups = list(read(cfg.data.eval))
    tasks = [group.task for group in groups]
    check_sources((), tasks)
    asyncio.run(check_columns(tasks, judging))
    done: list[Group] = []
    for begin in range(0, len(groups), AT_ONCE):
        done += asyncio.run(score(groups[begin : begin + AT_ONCE], judging))
    check_failures(done, rewards, of="data.eval")
    metrics = accuracy(done, success=cfg.eval.success)
    counted = {name: value for name, value in metrics.items() if not name.endswith("/tokens_mean")}
    return Judged(counted, [_row(r) for g in done for r in g.rollouts])


def read(sources: Sequence[SourceConfig]) -> Iterator[Group]:
    """The rows of the sources as tasks, each with its replies."""
    uids = count()
    for source in sources:
        with of_source(source):
            yield from _read(source, uids)


def _read(source: SourceConfig, uids: Iterator[int]) -> Iterator[Group]:
    rows = read_rows(source)
    asked = SourceConfig(**source.model_dump(exclude_unset=True, exclude={"response"}))
    for number in range(len(rows)):
        row, where = rows.row(number), rows.where(number)
        column = _column(row, source)
        texts = _replies(row, column, where=where)
        row = {k: v for k, v in row.items() if k != column}
        fields = parse(row, asked, name=rows.name, chat=None, where=where)
        task = Task(
            uid=next(uids),
            source=fields.label,
            prompt=fields.prompt,
            answer=fields.answer,
            extra=fields.extra,
        )
        yield Group(task, tuple(_rollout(task, index, text) for index, text in enumerate(texts)))


def _column(row: Mapping[str, Json], source: SourceConfig) -> str:
    """The column of the replies: the given one, else `response`, or `responses` where there is only that."""
    several = "responses" in row and source.response not in row and "response" not in source.model_fields_set
    return "responses" if several else source.response


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
        f"{where}: {found}; expected a reply as text, or a non-empty list of them: data.eval[].response names "
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
