"""One source prepared for drawing: prompts are tokenised once, unusable rows are left out and counted."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from whet.config.schema import DataConfig, SourceConfig
from whet.config.source_faults import of_source
from whet.data.chat import (
    Prompt,
    encode_history,
    encode_prompts,
    encode_texts,
    encode_whole,
    reply_text,
    with_kwargs,
)
from whet.data.columns import PER_ROW, Fields, further, has_no_prompts, is_asked_by_env, named, parse, used
from whet.data.parts import Row
from whet.data.rows import SourceRows, read_rows
from whet.guard import pulse
from whet.types import ConfigError, DataError, Json, Reply, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

Turns = Literal["all", "last"]
"""Which replies of a conversation are trained on."""

Learned = Literal["demonstrations", "preferences", "labels"]
"""What rows are read for, where their replies are trained on: each has a response, for preferences a rejected reply,
too, for labels whether it is desirable."""
REPLIES = {"response": "response", "rejected": "rejected reply"}

BATCH_ROWS = 4096
"""Rows that are turned into Python and tokenised at once."""


@dataclass(frozen=True)
class Prepared:
    """K rows of one source that may be drawn, with the tokens of their prompts."""

    source: SourceConfig
    rows: SourceRows
    chat: bool | None
    row_K: np.ndarray
    """[K] int64: number of each row in `rows`."""
    end_K: np.ndarray
    """[K] int64: where each prompt ends in `token_ids`."""
    token_ids: np.ndarray
    """[sum of lengths] int32."""
    difficulty_KD: np.ndarray | None
    """[K, D] float64, of a source that names D columns of them."""
    digest: str
    """Digest of the tokens, difficulties, answers and training texts: a resumed run checks with it that its data is the
    same. Where rewards and environments use rows, a slash and the digest of their labels and other columns follow."""
    widest: tuple[Task, ...]
    """For each label, a task with every column that some row of the source has: what rewards may ask for by name."""

    def __len__(self) -> int:
        return len(self.row_K)

    def task(self, k: int, uid: int) -> Task:
        i = int(self.row_K[k])
        row, where = self.rows.row(i), self.rows.where(i)
        f = parse(row, self.source, name=self.rows.name, chat=self.chat, where=where)
        begin = int(self.end_K[k - 1]) if k else 0
        return Task(
            uid=uid,
            source=f.label,
            prompt=f.prompt,
            answer=f.answer,
            response=f.response,
            rejected=f.rejected,
            tools=f.tools,
            chat_template_kwargs=f.chat_template_kwargs,
            extra=f.extra,
            token_ids=tuple(self.token_ids[begin : int(self.end_K[k])].tolist()),
        )


def prepare(
    sources: Sequence[SourceConfig],
    data: DataConfig,
    *,
    tokenizer: Tokenizer,
    exclude: Collection[str],
    max_response_tokens: int | None,
    counts: Counter[str],
    turns: Turns = "last",
    learned: Learned | None = None,
    ends: Collection[int] = (),
) -> list[Prepared]:
    """Read, filter and tokenise every source, adding to `counts` the rows left out or truncated, by reason.

    turns="all": the prompts of conversations are tokenised so that their replies can be trained on too
    (`encode_history`). learned: what each row has to have. ends: tokens that end the model's own replies.
    Raises DataError if a source is left empty.
    """
    out = []
    for source in sources:
        work = _Work(source, data, tokenizer, exclude, max_response_tokens, turns, learned, ends, Counter())
        with of_source(source):
            out.append(_prepare(work))
        counts.update(work.counts)
    if twice := sorted(n for n, c in Counter(p.rows.name for p in out).items() if c > 1):
        raise ConfigError(
            f"Two data sources have the name {twice[0]!r}; give each a different `name` (metrics and the "
            "order of rows depend on it)."
        )
    return out


def prompt_key(prompt: Prompt, response: Reply | None, extra: Mapping[str, Json]) -> str:
    """Equal for equal prompts; of rows without a prompt, for equal responses, or for equal other columns where an
    environment asks. System messages and the beginning of a reply do not count; a text equals the user message with
    that text.
    """
    if not prompt:
        return repr(response)
    if isinstance(prompt, str):
        return repr([("user", prompt)])
    if all(message.role == "system" for message in prompt):
        return _others(extra)
    asked = prompt[:-1] if prompt[-1].role == "assistant" else prompt
    return repr([(m.role, m.said) for m in asked if m.role != "system"])


def _others(extra: Mapping[str, Json]) -> str:
    """Equal for equal columns, in any order."""
    return repr(sorted(extra.items()))


def fit(token_ids: list[int], limit: int, rule: str) -> list[int]:
    """Cut to `limit` tokens: truncate_left drops the beginning, _right the end, _middle the middle."""
    if rule == "truncate_left":
        return token_ids[len(token_ids) - limit :]
    if rule == "truncate_right":
        return token_ids[:limit]
    head = limit // 2
    return token_ids[:head] + token_ids[len(token_ids) - (limit - head) :]


@dataclass(frozen=True)
class _Work:
    source: SourceConfig
    data: DataConfig
    tokenizer: Tokenizer
    exclude: Collection[str]
    max_response_tokens: int | None
    turns: Turns
    learned: Learned | None
    ends: Collection[int]
    counts: Counter[str]


def _prepare(work: _Work) -> Prepared:
    rows = read_rows(work.source, vocabulary=work.tokenizer.vocab_size)
    digest, others = (hashlib.blake2b(rows.name.encode(), digest_size=16) for _ in range(2))
    asked = is_asked_by_env(work.source)
    numbers: list[int] = []
    lengths: list[int] = []
    pieces: list[np.ndarray] = []
    difficulties: list[tuple[float, ...]] = []
    found: set[str] = set()
    labels: dict[str, None] = {}
    answered = False
    for begin, end in pairwise([*range(0, len(rows), BATCH_ROWS), len(rows)]):
        batch = _batch(work, rows, begin, end, found=found)
        pulse.beat(f"reading {rows.name}")
        numbers += [i for i, _, _ in batch]
        lengths += [len(ids) for _, _, ids in batch]
        pieces.append(np.fromiter(chain.from_iterable(ids for _, _, ids in batch), dtype=np.int32))
        for _, f, _ in batch:
            difficulties.append(f.difficulties)
            labels[f.label] = None
            answered |= f.answer is not None
            extra = _others(f.extra) if asked or work.learned is None else ""
            if asked:
                digest.update(extra.encode(errors="surrogatepass"))
            if work.learned is None:
                others.update(repr((f.label, extra)).encode(errors="surrogatepass"))
            digest.update(
                repr((f.answer, f.response, f.rejected, f.extra.get("desirable"))).encode(
                    errors="surrogatepass"
                )
            )
        if end < len(rows):
            log.info("data source %s: %d of %d rows tokenised", rows.name, end, len(rows))
    _check_found(work.source, rows, found)
    work.counts.update(rows=len(rows), kept=len(numbers))
    if not numbers:
        told = ", ".join(f"{n} {what}" for what, n in sorted(work.counts.items()))
        raise DataError(
            f"Data source {rows.name!r} is empty after filtering: {told}.{_remedy(work, len(rows))}"
        )
    token_ids = np.concatenate(pieces)
    row_K = np.array(numbers, dtype=np.int64)
    end_K = np.cumsum(lengths, dtype=np.int64)
    difficulty_KD = np.array(difficulties, dtype=np.float64) if work.source.difficulty else None
    work.counts["unknown_tokens"] += _unknown(work.tokenizer, token_ids)
    for array in (row_K, end_K, token_ids, difficulty_KD):
        if array is not None:
            digest.update(array.tobytes())
    left_out = {k: n for k, n in sorted(work.counts.items()) if n and k not in ("rows", "kept")}
    if left_out:
        told = ", ".join(f"{n} {what}" for what, n in left_out.items())
        log.warning("data source %s: %d rows, %d kept; %s", rows.name, len(rows), len(row_K), told)
    return Prepared(
        source=work.source,
        rows=rows,
        chat=work.data.chat,
        row_K=row_K,
        end_K=end_K,
        token_ids=token_ids,
        difficulty_KD=difficulty_KD,
        digest=digest.hexdigest() + (f"/{others.hexdigest()}" if work.learned is None else ""),
        widest=tuple(_widest(work.source, rows, label, answered=answered) for label in labels),
    )


def _widest(source: SourceConfig, rows: SourceRows, label: str, *, answered: bool) -> Task:
    extra = dict.fromkeys(further(source, rows.columns()))
    return Task(uid=0, source=label, prompt="", answer="" if answered else None, extra=extra)


def _check_found(source: SourceConfig, rows: SourceRows, found: Collection[str]) -> None:
    """A column that some rows may lack must occur in others; otherwise its name is wrong."""
    for field, column in named(source).items():
        if field in PER_ROW and field not in found:
            raise DataError(
                f"Data source {rows.name!r}: no row has a text in column {column!r} ({field}); the first has the "
                f"columns: {', '.join(sorted(rows.row(0)))}."
            )


def _batch(
    work: _Work, rows: SourceRows, begin: int, end: int, *, found: set[str]
) -> list[tuple[int, Fields, list[int]]]:
    """(row number, fields, prompt tokens) of the rows begin .. end-1 that may be drawn. Adds to `found`."""
    kept: list[tuple[int, Fields]] = []
    columns = None if work.learned is None else used(work.source)
    for i, row in enumerate(rows.slice(begin, end, columns), begin):
        try:
            fields, held_out = _read(work, rows, i, row)
        except DataError:  # told of the row with all its columns; this one may have those alone that are read
            fields, held_out = _read(work, rows, i, rows.row(i))
        found |= fields.found
        if held_out:
            work.counts["held_out"] += 1
        else:
            kept.append((i, fields))
    all_ids = _prompt_tokens(work, rows, kept)
    out = []
    for (i, fields), ids, replies in zip(kept, all_ids, _reply_lengths(work, rows, kept)):
        if not ids:
            raise DataError(f"{rows.where(i)}: the prompt has no tokens.")
        drawn = _fitted(work, ids, replies, where=rows.where(i))
        if drawn is not None:
            out.append((i, fields, drawn))
    return out


def _read(work: _Work, rows: SourceRows, i: int, row: Row) -> tuple[Fields, bool]:
    """The fields of row i, and whether it is held out. DataError for a row that cannot be learned from."""
    fields = parse(row, work.source, name=rows.name, chat=work.data.chat, where=rows.where(i))
    held_out = prompt_key(fields.prompt, fields.response, fields.extra) in work.exclude
    if not held_out:
        _check_replies(work, fields, where=rows.where(i))
    return fields, held_out


def _check_replies(work: _Work, f: Fields, *, where: str) -> None:
    """DataError for a row without what is to be learned: at the start, not at the step that draws it."""
    if work.learned is None:
        return
    for field in ("response", *(("rejected",) if work.learned == "preferences" else ())):
        if getattr(f, field) is None:
            raise DataError(f"{where}: {no_reply(field, work.source, f.extra)}")
    if work.learned == "labels" and (fault := no_label(f.extra)):
        raise DataError(f"{where}: {fault}")


def no_reply(field: str, source: SourceConfig | None, extra: Mapping[str, Json]) -> str:
    """What to say of a row that lacks a reply."""
    column = "" if source is None else f" (column {getattr(source, field)!r} is absent or null)"
    return (
        f"it has no {REPLIES[field]} to train on{column}: name its column in the source: `{field}: COLUMN`, or leave "
        f"the row out. Columns that nothing reads: {', '.join(sorted(extra)) or 'none'}."
    )


def no_label(extra: Mapping[str, Json]) -> str:
    """What to say of a row without a label; '' if it has one."""
    label = extra.get("desirable")
    if isinstance(label, bool | int | float) and label in (0, 1):
        return ""
    given = "it has no label" if label is None else f"its label is {label!r}"
    return f"{given}, expected true or false: name the label's column in the source: `desirable: COLUMN`."


def _prompt_tokens(work: _Work, rows: SourceRows, kept: Sequence[tuple[int, Fields]]) -> list[list[int]]:
    """The tokens of each row's prompt; of a row without one, the first token of its response, which nothing predicts.
    DataError that names the row whose messages the chat template refuses."""
    for i, f in kept:
        _check_tokens(work.tokenizer, f, where=rows.where(i))
    if has_no_prompts(work.source):
        whole = encode_whole(work.tokenizer, _wholes(kept))
        return [_first(ids, where=rows.where(i)) for (i, _), ids in zip(kept, whole)]
    if any(f.token_ids for _, f in kept):
        written = iter(_prompt_tokens(work, rows, [(i, f) for i, f in kept if not f.token_ids]))
        return [list(f.token_ids) or next(written) for _, f in kept]
    if work.turns == "all":
        return [_at(rows.where(i), partial(_history, work.tokenizer, f)) for i, f in kept]

    def together(fields: Sequence[Fields]) -> list[list[int]]:
        tools, kwargs = [f.tools for f in fields], [f.chat_template_kwargs for f in fields]
        return encode_prompts(work.tokenizer, [f.prompt for f in fields], tools=tools, kwargs=kwargs)

    try:
        return together([f for _, f in kept])
    except DataError:  # together is faster, one by one says which
        return [_at(rows.where(i), partial(together, [f]))[0] for i, f in kept]


def _first(ids: list[int], *, where: str) -> list[int]:
    """The first token of a whole text. DataError for one of a single token: nothing would be learned from it."""
    if len(ids) < 2:
        raise DataError(
            f"{where}: the response is a single token, which nothing predicts, so there is nothing to learn; leave the "
            "row out."
        )
    return ids[:1]


def _wholes(kept: Sequence[tuple[int, Fields]]) -> list[Reply]:
    return [f.response or "" for _, f in kept]


def _check_tokens(tokenizer: Tokenizer, f: Fields, *, where: str) -> None:
    """DataError for given tokens that the tokenizer does not have."""
    for tokens in (f.token_ids, f.response, f.rejected):
        if isinstance(tokens, tuple) and tokens and not 0 <= min(tokens) <= max(tokens) < len(tokenizer):
            raise DataError(
                f"{where}: it has token ids from {min(tokens)} to {max(tokens)}, but the tokenizer has "
                f"{len(tokenizer)} tokens"
            )


def _history(tokenizer: Tokenizer, f: Fields) -> list[int]:
    tokenizer = with_kwargs(tokenizer, f.chat_template_kwargs)
    return (
        encode_prompts(tokenizer, [f.prompt])[0]
        if isinstance(f.prompt, str)
        else encode_history(tokenizer, f.prompt, f.tools)[0]
    )


def _at(where: str, encode: Callable[[], T]) -> T:
    try:
        return encode()
    except DataError as e:
        raise DataError(f"{where}: {e}") from e


def _reply_lengths(work: _Work, rows: SourceRows, kept: Sequence[tuple[int, Fields]]) -> list[dict[str, int]]:
    """Tokens of each row's response and rejected reply, end token included, where replies are used."""
    lengths: list[dict[str, int]] = [{} for _ in kept]
    if work.max_response_tokens is None:
        return lengths
    if has_no_prompts(work.source):
        whole = [ids[1:] for ids in encode_whole(work.tokenizer, _wholes(kept))]
        work.counts["unknown_tokens"] += sum(_unknown(work.tokenizer, np.array(ids)) for ids in whole)
        return [{"response": len(ids)} for ids in whole]
    for name in ("response", "rejected"):
        replies = [(k, getattr(f, name)) for k, (_, f) in enumerate(kept)]
        having = [k for k, reply in replies if reply is not None and not isinstance(reply, tuple)]
        for k, reply in replies:
            if isinstance(reply, tuple):
                lengths[k][name] = len(reply)
                endless = reply[-1] not in (work.tokenizer.eos_token_id, *work.ends)
                work.counts["replies_without_end_token"] += endless
        texts = encode_texts(work.tokenizer, [_said(work, rows, *kept[k], name) for k in having])
        for k, ids in zip(having, texts):
            work.counts["unknown_tokens"] += _unknown(work.tokenizer, np.array(ids))
            lengths[k][name] = len(ids) + 1
    return lengths


def _said(work: _Work, rows: SourceRows, row: int, f: Fields, name: str) -> str:
    """A reply as text. DataError that names the row."""

    def text() -> str:
        tokenizer = with_kwargs(work.tokenizer, f.chat_template_kwargs)
        return reply_text(tokenizer, f.prompt, getattr(f, name), f.tools)

    return _at(rows.where(row), text)


def _fitted(work: _Work, ids: list[int], replies: Mapping[str, int], *, where: str) -> list[int] | None:
    """The prompt's tokens as they are drawn; None for a row that is left out."""
    for name, tokens in replies.items():
        limit = work.max_response_tokens
        if limit is None or tokens <= limit:
            continue
        if _overlong(work, name, tokens, limit=limit, where=where) == "filter":
            return None
    if len(ids) > (limit := work.data.max_prompt_tokens):
        rule = _overlong(work, "prompt", len(ids), limit=limit, where=where)
        if rule == "filter":
            return None
        ids = fit(ids, limit, rule)
    return _fitted_together(work, ids, replies, where=where)


def _fitted_together(
    work: _Work, ids: list[int], replies: Mapping[str, int], *, where: str
) -> list[int] | None:
    """`_fitted` for the prompt and its longest reply together."""
    limit = work.data.max_total_tokens
    if limit is None or work.max_response_tokens is None:
        return ids
    longest = min(max(replies.values(), default=0), work.max_response_tokens)
    if len(ids) + longest <= limit:
        return ids
    # truncate_right cuts replies where they are read: none of them would be left
    lost = work.data.overlong == "truncate_right" and len(ids) >= limit
    rule = _overlong(work, "total", len(ids) + longest, limit=limit, where=where, lost=lost)
    if rule == "filter":
        return None
    return ids if rule == "truncate_right" else fit(ids, max(1, limit - longest), rule)


def _remedy(work: _Work, rows: int) -> str:
    """What to do about a source of which no row is left."""
    if work.counts["held_out"] == rows:
        return (
            " Every training row has the same prompt as a held-out task, and such rows are excluded: use other "
            "tasks in data.eval."
        )
    if work.counts["overlong_prompt_dropped"]:
        return (
            f" Prompts of more than {work.data.max_prompt_tokens} tokens, with chat template and system prompt, are "
            "dropped: raise data.max_prompt_tokens, or set data.overlong to one of the ways to truncate."
        )
    return ""


_LIMITS = {"prompt": "data.max_prompt_tokens", "total": "data.max_total_tokens"}


def _overlong(work: _Work, what: str, tokens: int, *, limit: int, where: str, lost: bool = False) -> str:
    """Count an overlong prompt, response or rejected reply, and say the rule: `filter` if nothing to learn would be
    left (`lost`). DataError if the rule is 'error'.
    """
    rule = work.data.overlong
    if rule == "error":
        key = _LIMITS.get(what, "rollout.sampling.max_tokens")
        which = "its prompt and reply together have" if what == "total" else f"its {what} has"
        raise DataError(
            f"{where}: {which} {tokens} tokens, the limit is {limit}. Raise {key}, or set data.overlong "
            "(filter, truncate_left, ...) for such rows."
        )
    rule = "filter" if lost else rule
    work.counts[f"overlong_{what}_{'dropped' if rule == 'filter' else 'cut'}"] += 1
    return rule


def _unknown(tokenizer: Tokenizer, token_ids: np.ndarray) -> int:
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown == tokenizer.eos_token_id:
        return 0
    return int(np.count_nonzero(token_ids == unknown))
