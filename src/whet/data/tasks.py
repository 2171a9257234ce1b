"""The stream of tasks: the rows of every source in their order, sources mixed, resumable at every draw.

With `data.mixing=weighted` draw k (from 0) goes to the source that is furthest behind its share of the first k+1 draws,
the first such source on a tie: shares are kept at every point, not only on average. With `proportional` an epoch is one
draw for each row of all sources, and their sources come in an order that is shuffled anew in each epoch. Within a
source its order (`orders.py`) answers each draw. So the number of draws of each source is the whole state, with what an
order that learns has learned.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from whet import seeds
from whet.config.chosen import Chosen
from whet.config.faults import EachStage
from whet.config.load import Loaded
from whet.config.schema import DataConfig, SourceConfig
from whet.config.source_faults import in_words_of, of_source
from whet.config.sources import order_of
from whet.data.chat import encode_history, encode_reply, encode_whole, reply_text, with_kwargs
from whet.data.columns import parse, used
from whet.data.orders import Rows, call, learns, open_order, row_of, state_of
from whet.data.prepare import BATCH_ROWS, Learned, Turns, fit, no_label, no_reply, prepare, prompt_key
from whet.data.rows import read_rows
from whet.guard import pulse
from whet.types import (
    CheckpointError,
    ConfigError,
    DataError,
    Group,
    Json,
    Message,
    Reply,
    Rollout,
    Task,
    given_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


log = logging.getLogger(__name__)

_CHANGED = (
    "Data source {name!r} has changed since the run was saved (rows, prompts, filters, tokenizer, answers or other "
    "columns): restore the data, start a new run, or resume with the changed data as a branch: `whet train --change`."
)


MARK = 2**14
"""Draws from one remembered place of weighted sources to the next: a jump counts no more than so many again."""


class TaskStream:
    """An endless stream of training tasks. Of no sources, nothing can be drawn.

    counts: rows, kept, held_out, overlong_{prompt,response,rejected,total}_{dropped,cut}, unknown_tokens,
    replies_without_end_token (given as token ids) and not_drawn_per_epoch (train.drop_last), over all sources.
    rows_per_epoch: rows that are drawn from, over all sources.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        data: DataConfig,
        *,
        tokenizer: Tokenizer,
        seed: int,
        exclude: Iterable[Task] = (),
        max_response_tokens: int | None = None,
        multiple_of: int = 1,
        turns: Turns = "last",
        learned: Learned | None = None,
        ends: Collection[int] = (),
        order: Chosen | None = None,
    ) -> None:
        """exclude: held-out tasks; rows with the prompt of one are left out (see `prepare.prompt_key`).

        max_response_tokens: for SFT and DPO, the longest reply with its end token; `data.overlong` holds for
        it too, except that every truncate_* cuts a reply at its end. None: replies are not used.

        multiple_of: rows at the end of an epoch that make no whole such number are not drawn (train.drop_last).

        turns: which replies of a conversation will be trained on; the same as for `demonstration`. learned: what each
        row has to have; None: a prompt. ends: tokens that end the model's own replies. seed: the run's;
        `data.seed` stands over it. order: None: data.order.
        """
        counts: Counter[str] = Counter()
        self.sources = prepare(
            sources,
            data,
            tokenizer=tokenizer,
            exclude={prompt_key(t.prompt, t.response, t.extra) for t in exclude},
            max_response_tokens=max_response_tokens,
            counts=counts,
            turns=turns,
            learned=learned,
            ends=ends,
        )
        self.counts: dict[str, int] = dict(counts)
        per_epoch_S = [len(s) - len(s) % multiple_of for s in self.sources]
        if not all(per_epoch_S):
            raise ConfigError(
                f"train.drop_last: a source has {min(len(s) for s in self.sources)} rows, but a step takes "
                f"{multiple_of} tasks, so an epoch would have no step. Set it to false, or lower train.tasks_per_step."
            )
        self.rows_per_epoch = sum(per_epoch_S)
        if left := sum(map(len, self.sources)) - self.rows_per_epoch:
            self.counts["not_drawn_per_epoch"] = left
            log.warning(
                "train.drop_last: %d rows make no whole step and are not drawn in an epoch; data.order says which "
                "(sequential: the same in every epoch)",
                left,
            )
        self._seed = seed if data.seed is None else data.seed
        self._order = order or order_of(data)
        self._view_S = [Rows(source, self._seed, n) for source, n in zip(self.sources, per_epoch_S)]
        self.order_S = [open_order(self._order, rows) for rows in self._view_S]
        """That of each source."""
        self._out_S: list[dict[int, int]] = [{} for _ in self.sources]
        """Rows by the uid of their task, of those that have not come back to an order that learns."""
        self._next_source = (
            _Proportional(per_epoch_S, self._seed)
            if data.mixing == "proportional"
            else Weighted([s.weight for s in sources])
        )
        self._drawn_S = np.zeros(len(sources), dtype=np.int64)

    @property
    def drawn(self) -> int:
        """Tasks drawn so far: the uid of the next one."""
        return int(self._drawn_S.sum())

    @property
    def epoch(self) -> int:
        """Draws so far / rows_per_epoch, rounded down. By weight, some sources have been passed more often."""
        return self.drawn // self.rows_per_epoch

    def passes(self, draws: int) -> dict[str, float]:
        """How often so many draws pass through the rows of each source, by its name."""
        shares = zip(self._view_S, self._next_source.share_S.tolist())
        return {rows.source.rows.name: draws * share / rows.per_epoch for rows, share in shares}

    def plain_text(self) -> list[str]:
        """Names of the sources whose prompts are plain text, judged by the first row of each."""
        first = [(s.rows.name, s.task(0, 0).prompt) for s in self.sources if len(s)]
        return [name for name, prompt in first if prompt and isinstance(prompt, str)]

    @property
    def has_chats(self) -> bool:
        """Whether prompts of a source are messages, judged by the first row of each."""
        return any(isinstance(s.task(0, 0).prompt, tuple) for s in self.sources)

    @property
    def widest(self) -> list[Task]:
        """For each source and label, a task with every column that some row of the source has."""
        return [task for source in self.sources for task in source.widest]

    def unknown(self, names: Collection[str]) -> list[str]:
        """Those of the names that are no row's source. Rows are looked at until each name was found."""
        left = dict.fromkeys(names)
        for s in self.sources:
            for row in range(len(s) if s.source.label else min(len(s), 1)):
                if not left:
                    return []
                left.pop(s.task(row, 0).source, None)
        return list(left)

    def each(self) -> Iterator[Task]:
        """A task of every row."""
        return (s.task(row, 0) for s in self.sources for row in range(len(s)))

    def next(self, n: int) -> list[Task]:
        """The next n tasks."""
        return [self._draw() for _ in range(n)]

    def at(self, uid: int) -> Task:
        """The task with this number, independent of earlier draws; the stream continues after it."""
        if self.learns:
            raise ConfigError(
                f"data.order={self._order.name!r} learns from its earlier tasks, so explorers in separate processes "
                "cannot draw from it one by one: set rollout.schedule=deterministic, or mode=both."
            )
        self._stand_at(uid)
        return self._draw()

    @property
    def learns(self) -> bool:
        """How tasks went, or earlier draws, decide what is drawn next."""
        return any(learns(order) for order in self.order_S)

    def update(self, left: Sequence[Group], pending: Collection[int]) -> None:
        """Tell orders that learn how tasks went. left: the groups that are over, trained on or not, in the order of
        their tasks. pending: uids of tasks that are not over; other tasks never come back."""
        for order, out in zip(self.order_S, self._out_S):
            played = [(out[g.task.uid], g) for g in left if g.task.uid in out]
            if played and hasattr(order, "update"):
                call(order, "update", played, name=self._order.name)
            for uid in [uid for uid in out if uid not in pending]:
                del out[uid]

    def _stand_at(self, uid: int) -> None:
        """After so many tasks of this data."""
        if uid != self.drawn:
            self._drawn_S = np.array(self._next_source.after(uid, self._drawn_S), dtype=np.int64)

    def state(self) -> dict[str, Json]:
        """The position of the stream as JSON: a stream of the same data, restored from it, draws the same tasks."""
        names = [s.rows.name for s in self.sources]
        digests = [s.digest for s in self.sources]
        place = {"seed": self._seed, "sources": names, "digests": digests, "drawn": self._drawn_S.tolist()}
        return place | ({"order": self._learned()} if self.learns else {})

    def _learned(self) -> Json:
        """What the orders of all sources have learned, and from which columns."""
        return {
            "name": self._order.name,
            "columns": [rows.read for rows in self._view_S],
            "states": [state_of(order, name=self._order.name) for order in self.order_S],
            "out": [[[uid, row] for uid, row in out.items()] for out in self._out_S],
        }

    def _restore_learned(self, state: Json) -> None:
        for order, learned in zip(self.order_S, state["states"], strict=True):
            call(order, "restore", learned, name=self._order.name)
        self._out_S = [dict(out) for out in state["out"]]

    def restore(self, state: dict[str, Json], *, changed: bool = False) -> list[tuple[str, str, str]]:
        """Resume from `state`. Raises CheckpointError if seed or data differ. changed: they may differ, and the stream
        continues as if it had used the new ones from the start. Returns the sources whose rows have changed: name,
        digests then and now."""
        here = self.state()
        if changed:
            self._stand_at(sum(state["drawn"]))
            if self.learns:
                self._restore_where_same(state)
            was = dict(zip(state["sources"], state["digests"]))
            both = [(n, was[n], d) for n, d in zip(here["sources"], here["digests"]) if n in was]
            return [(name, old, new) for name, old, new in both if not _same_rows(old, new)]
        if other := [k for k in ("seed", "sources") if state[k] != here[k]]:
            raise CheckpointError(
                f"The task stream was saved with {other[0]} {state[other[0]]!r}, but this one has "
                f"{here[other[0]]!r}, so it cannot resume. `whet train --change` resumes as a branch."
            )
        for name, old, new in zip(here["sources"], state["digests"], here["digests"]):
            if not _same_rows(old, new):
                raise CheckpointError(_CHANGED.format(name=name))
        self._drawn_S = np.array(state["drawn"], dtype=np.int64)
        if self.learns:
            for name, rows, before in zip(
                here["sources"], self._view_S, state["order"]["columns"], strict=True
            ):
                if rows.read != before:
                    raise CheckpointError(_CHANGED.format(name=name))
            self._restore_learned(state["order"])
        return []

    def _restore_where_same(self, state: dict[str, Json]) -> None:
        """What an order has learned stays where nothing it has learned from is another; else it begins anew."""
        here, before = self.state(), state.get("order")
        same = [state[name] == here[name] for name in ("seed", "sources")]
        same += map(_same_rows, state["digests"], here["digests"])
        if before and all(same) and all(before[name] == here["order"][name] for name in ("name", "columns")):
            self._restore_learned(before)
        else:
            log.warning("data.order=%s begins anew: the data or the order is another", self._order.name)

    def _draw(self) -> Task:
        if not self.sources:
            raise ConfigError("No training data: data.train is empty.")
        uid, s = self.drawn, self._next_source(self._drawn_S)
        order, rows, out = self.order_S[s], self._view_S[s], self._out_S[s]
        drawn = int(self._drawn_S[s])
        row = row_of(order, rows, drawn, frozenset(out.values()), name=self._order.name)
        self._drawn_S[s] += 1
        if learns(order):
            out[uid] = row
        return self.sources[s].task(row, uid)


def _same_rows(before: str, now: str) -> bool:
    """Whether two digests of a source are of the same rows. One of an earlier release has no part for other columns."""
    return before in (now, now.partition("/")[0])


class Weighted:
    """The source that is furthest behind its share."""

    def __init__(self, weight_S: Sequence[float]) -> None:
        self.share_S = np.array(weight_S) / sum(weight_S)
        self.marks = {0: [0] * len(weight_S)}
        """The draws of each source after so many draws, at places that were passed."""

    def __call__(self, drawn_S: np.ndarray) -> int:
        """The source of the next draw. drawn_S: the draws of each so far."""
        draws = int(drawn_S.sum())
        if draws % MARK == 0:
            self.marks[draws] = drawn_S.tolist()
        return int(np.argmax(self.share_S * (draws + 1) - drawn_S))

    def after(self, draws: int, drawn_S: np.ndarray) -> list[int]:
        """[S] the draws of each source after so many draws. drawn_S: where the stream stands. Where ties go depends on
        rounding, so draws are counted one by one, from the nearest place that is known."""
        if len(self.share_S) == 1:
            return [draws]
        known = self.marks | {int(drawn_S.sum()): drawn_S.tolist()}
        begin = max(place for place in known if place <= draws)
        counts_S, share_S = known[begin].copy(), self.share_S.tolist()
        for k in range(begin + 1, draws + 1):
            behind_S = [share * k - count for share, count in zip(share_S, counts_S)]
            counts_S[behind_S.index(max(behind_S))] += 1
            if k % MARK == 0:
                self.marks[k] = counts_S.copy()
        return counts_S


class _Proportional:
    """In each epoch every source as often as it has rows, in a shuffled order."""

    def __init__(self, rows_S: Sequence[int], seed: int) -> None:
        self.share_S = np.array(rows_S) / sum(rows_S)
        self._rows_S = np.array(rows_S)
        self._source_N = np.repeat(np.arange(len(rows_S)), rows_S)
        self._seed = seed
        self._known: tuple[int, np.ndarray] = (-1, self._source_N)

    def __call__(self, drawn_S: np.ndarray) -> int:
        """The source of the next draw. drawn_S: the draws of each so far."""
        epoch, place = divmod(int(drawn_S.sum()), len(self._source_N))
        return int(self._epoch(epoch)[place])

    def after(self, draws: int, drawn_S: np.ndarray) -> list[int]:
        """[S] the draws of each source after so many draws, wherever the stream stands."""
        epoch, place = divmod(draws, len(self._source_N))
        begun_S = np.bincount(self._epoch(epoch)[:place], minlength=len(self._rows_S))
        counts_S: list[int] = (epoch * self._rows_S + begun_S).tolist()
        return counts_S

    def _epoch(self, epoch: int) -> np.ndarray:
        """[N] the source of each draw of an epoch."""
        if self._known[0] != epoch:
            shuffled_N = seeds.permutation(seeds.key(self._seed, "mixing", epoch), len(self._source_N))
            self._known = (epoch, self._source_N[shuffled_N])
        return self._known[1]


def eval_tasks(
    sources: Sequence[SourceConfig],
    data: DataConfig,
    *,
    tokenizer: Tokenizer,
    turns: Turns = "last",
    max_response_tokens: int | None = None,
) -> list[Task]:
    """Every held-out task, in file order, uid from 0. What `data.overlong` drops or cuts is logged.

    turns, max_response_tokens: as for `TaskStream`, if their replies are to be measured.
    """
    counts: Counter[str] = Counter()
    prepared = prepare(
        sources,
        data,
        tokenizer=tokenizer,
        exclude=(),
        max_response_tokens=max_response_tokens,
        counts=counts,
        turns=turns,
    )
    places = [(p, k) for p in prepared for k in range(len(p))]
    return [p.task(k, uid) for uid, (p, k) in enumerate(places)]


def texts(sources: Sequence[SourceConfig]) -> Iterator[str]:
    """All text that a tokenizer built from the data must be able to write: prompts, answers, replies."""
    for source in sources:
        with of_source(source):
            yield from _texts(source)


def _texts(source: SourceConfig) -> Iterator[str]:
    rows = read_rows(source)
    for begin in range(0, len(rows), BATCH_ROWS):
        pulse.beat(f"reading {rows.name}")
        for i, row in enumerate(rows.slice(begin, begin + BATCH_ROWS, used(source)), begin):
            f = parse(row, source, name=rows.name, chat=None, where=rows.where(i))
            yield from [f.prompt] if isinstance(f.prompt, str) else [m.said for m in f.prompt]
            yield from (t for t in (f.answer, f.response, f.rejected) if isinstance(t, str))
            yield from (t.said for t in (f.response, f.rejected) if isinstance(t, Message))


def all_texts(loaded: Loaded) -> Iterator[str]:
    """The same of all sources of all stages."""
    with EachStage(loaded.names) as stage:
        for n, cfg in enumerate(loaded.stages):
            if stage.failed and cfg.data != loaded.stages[n - 1].data:
                break  # reading it may take long, and would not show the same error
            with stage(n), in_words_of(loaded, n):
                yield from texts((*cfg.data.train, *cfg.data.demonstrations, *cfg.data.eval))


# ---------------------------------------------------------------- replies to learn from


def learned_turns(data: DataConfig, kind: str) -> Turns:
    """Which replies of a conversation an algorithm of this kind learns: SFT, what `data.learn_turns` says or its
    default; the others, the last.
    """
    if kind != "demonstrations":
        return "last"
    whole = any(source.messages is not None for source in data.train)
    return data.learn_turns or ("all" if whole else "last")


def demonstration(
    task: Task,
    tokenizer: Tokenizer,
    max_tokens: int,
    *,
    overlong: str = "error",
    max_total_tokens: int | None = None,
    turns: Turns = "last",
    ends: Collection[int] = (),
) -> Rollout:
    """The task's response as a rollout, end token included: version 0, log-probs 0, no reward.

    A reply longer than max_tokens (end token included), or than the prompt leaves it of max_total_tokens, is
    refused, unless `overlong` is a truncate_* rule: then it is cut at its end and has the finish reason `length`.
    The stream has counted it (`max_response_tokens`). turns="all": the replies in the prompt are learned, too. ends:
    tokens that end the model's own replies (`chat.end_of_reply`).
    """
    limit = reply_limit(task, max_tokens, max_total_tokens)
    learned = _learned(task, tokenizer, overlong) if turns == "all" else [0] * len(task.token_ids)
    return _reply(
        task, "response", tokenizer=tokenizer, max_tokens=limit, overlong=overlong, learned=learned, ends=ends
    )


def preference_pair(
    task: Task,
    tokenizer: Tokenizer,
    max_tokens: int,
    *,
    overlong: str = "error",
    max_total_tokens: int | None = None,
    ends: Collection[int] = (),
) -> tuple[Rollout, Rollout]:
    """The chosen reply (index 0, reward 1) and the rejected one (1, reward 0); see `demonstration`."""
    limit, prompt = reply_limit(task, max_tokens, max_total_tokens), [0] * len(task.token_ids)
    one = partial(
        _reply, task, tokenizer=tokenizer, max_tokens=limit, overlong=overlong, learned=prompt, ends=ends
    )
    chosen, rejected = one("response"), one("rejected", index=1)
    return chosen.scored(1.0, {}), rejected.scored(0.0, {})


def reply_limit(task: Task, max_tokens: int, max_total_tokens: int | None) -> int:
    """The longest reply to a task, in tokens, end token included."""
    if max_total_tokens is None:
        return max_tokens
    return max(0, min(max_tokens, max_total_tokens - len(task.token_ids)))


def learned_tokens(task: Task, reply: Reply, tokenizer: Tokenizer, ends: Collection[int] = ()) -> list[int]:
    """The tokens of a reply to a task, end token included; of a whole text all but the first."""
    if not task.prompt:
        return encode_whole(tokenizer, [reply])[0][1:]
    return encode_reply(_tokenizer_of(task, tokenizer), task.prompt, reply, task.tools, ends=ends)


def _tokenizer_of(task: Task, tokenizer: Tokenizer) -> Tokenizer:
    return with_kwargs(tokenizer, task.chat_template_kwargs) if task.prompt else tokenizer


def _learned(task: Task, tokenizer: Tokenizer, overlong: str) -> list[int]:
    """Which tokens of the prompt are replies, truncated like the prompt. Nothing predicts the first one."""
    n = len(task.token_ids)
    if isinstance(task.prompt, str):
        return [0] * n
    tokenizer = with_kwargs(tokenizer, task.chat_template_kwargs)
    _, mask = encode_history(tokenizer, task.prompt, task.tools)
    return [0, *fit(mask, n, overlong)[1:]] if len(mask) > n else mask


def labelled(reply: Rollout) -> Rollout:
    """A demonstration with the label of its row as reward: 1 desirable, 0 not."""
    if fault := no_label(reply.task.extra):
        raise DataError(f"Task {reply.task.uid} of source {reply.task.source!r}: {fault}")
    return reply.scored(float(reply.task.extra["desirable"]), {})


def _reply(
    task: Task,
    field: str,
    *,
    tokenizer: Tokenizer,
    max_tokens: int,
    overlong: str,
    learned: Sequence[int],
    ends: Collection[int],
    index: int = 0,
) -> Rollout:
    given = getattr(task, field)
    if given is None:
        fault = no_reply(field, None, task.extra)
        raise DataError(f"Task {task.uid} of source {task.source!r}: {fault}")
    text = reply_text(_tokenizer_of(task, tokenizer), task.prompt, given, task.tools)
    reply = learned_tokens(task, given, tokenizer, ends)
    cut = len(reply) > max_tokens
    if cut and not overlong.startswith("truncate"):
        raise DataError(
            f"Task {task.uid} of source {task.source!r}: its {field} has {len(reply)} tokens, the limit is "
            f"{max_tokens}. Raise rollout.sampling.max_tokens (and data.max_total_tokens, if it is set), or set "
            "data.overlong."
        )
    reply = fit(reply, max_tokens, "truncate_right") if cut else reply
    mask = [*learned, *[1] * len(reply)]
    return Rollout.one_strand(
        task=task,
        index=index,
        **given_tokens([*task.token_ids, *reply], mask),
        finish_reason="length" if cut else "stop",
        text=text,
    )
