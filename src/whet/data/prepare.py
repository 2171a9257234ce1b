"""One source made ready to draw from: prompts tokenised once, what must not be drawn left out and counted."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from whet.config.schema import Data, Source
from whet.data.chat import Prompt, encode_prompts, encode_texts
from whet.data.columns import Fields, parse, used
from whet.data.rows import Rows, read_rows
from whet.types import ConfigError, DataError, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

log = logging.getLogger(__name__)

BATCH_ROWS = 4096
"""Rows that are turned into Python and tokenised at once."""


@dataclass(frozen=True)
class Prepared:
    """K rows of one source that may be drawn, with the tokens of their prompts."""

    source: Source
    rows: Rows
    chat: bool | None
    row_K: np.ndarray
    """[K] int64: number of each row in `rows`."""
    end_K: np.ndarray
    """[K] int64: where each prompt ends in `token_ids`."""
    token_ids: np.ndarray
    """[sum of lengths] int32."""
    digest: str
    """Of the tokens and the texts to learn from: tells a resumed run that its data is the same."""

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
            extra=f.extra,
            token_ids=tuple(self.token_ids[begin : int(self.end_K[k])].tolist()),
        )


def prepare(
    sources: Sequence[Source],
    data: Data,
    *,
    tokenizer: Tokenizer,
    exclude: Collection[str],
    max_response_tokens: int | None,
    counts: Counter[str],
) -> list[Prepared]:
    """Read, filter and tokenise every source, adding to `counts` what was left out or cut and why.

    Raises DataError if a source is left empty.
    """
    out = []
    for source in sources:
        work = _Work(source, data, tokenizer, exclude, max_response_tokens, Counter())
        out.append(_prepare(work))
        counts.update(work.counts)
    if twice := sorted(n for n, c in Counter(p.rows.name for p in out).items() if c > 1):
        raise ConfigError(
            f"Two data sources are called {twice[0]!r}: give each a `name` of its own (metrics and the "
            "order of rows go by it)."
        )
    return out


def prompt_key(prompt: Prompt) -> str:
    """Equal for equal prompts. System messages do not count; a text equals the user message with that
    text.
    """
    if isinstance(prompt, str):
        return repr([("user", prompt)])
    return repr([(m.role, m.content) for m in prompt if m.role != "system"])


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
    source: Source
    data: Data
    tokenizer: Tokenizer
    exclude: Collection[str]
    max_response_tokens: int | None
    counts: Counter[str]


def _prepare(work: _Work) -> Prepared:
    rows = read_rows(work.source)
    digest = hashlib.blake2b(rows.name.encode(), digest_size=16)
    numbers: list[int] = []
    lengths: list[int] = []
    pieces: list[np.ndarray] = []
    for begin, end in pairwise([*range(0, len(rows), BATCH_ROWS), len(rows)]):
        batch = _batch(work, rows, begin, end)
        numbers += [i for i, _, _ in batch]
        lengths += [len(ids) for _, _, ids in batch]
        pieces.append(np.fromiter(chain.from_iterable(ids for _, _, ids in batch), dtype=np.int32))
        for _, f, _ in batch:
            digest.update(repr((f.answer, f.response, f.rejected)).encode(errors="surrogatepass"))
        if end < len(rows):
            log.info("data source %s: %d of %d rows tokenised", rows.name, end, len(rows))
    work.counts.update(rows=len(rows), kept=len(numbers))
    if not numbers:
        told = ", ".join(f"{n} {what}" for what, n in sorted(work.counts.items()))
        raise DataError(f"Data source {rows.name!r} is empty after filtering: {told}.")
    token_ids = np.concatenate(pieces)
    row_K = np.array(numbers, dtype=np.int64)
    end_K = np.cumsum(lengths, dtype=np.int64)
    work.counts["unknown_tokens"] += _unknown(work.tokenizer, token_ids)
    for array in (row_K, end_K, token_ids):
        digest.update(array.tobytes())
    left_out = {k: n for k, n in sorted(work.counts.items()) if n and k not in ("rows", "kept")}
    if left_out:
        told = ", ".join(f"{n} {what}" for what, n in left_out.items())
        log.warning("data source %s: %d rows, %d kept; %s", rows.name, len(rows), len(row_K), told)
    return Prepared(work.source, rows, work.data.chat, row_K, end_K, token_ids, digest.hexdigest())


def _batch(work: _Work, rows: Rows, begin: int, end: int) -> list[tuple[int, Fields, list[int]]]:
    """(row number, fields, prompt tokens) of the rows begin .. end-1 that may be drawn."""
    kept: list[tuple[int, Fields]] = []
    for i, row in enumerate(rows.slice(begin, end, used(work.source)), begin):
        fields = parse(row, work.source, name=rows.name, chat=work.data.chat, where=rows.where(i))
        if prompt_key(fields.prompt) in work.exclude:
            work.counts["held_out"] += 1
        else:
            kept.append((i, fields))
    all_ids = encode_prompts(work.tokenizer, [f.prompt for _, f in kept])
    fits = _responses_fit(work, rows, kept)
    out = []
    for (i, fields), ids, response_fits in zip(kept, all_ids, fits):
        if not ids:
            raise DataError(f"{rows.where(i)}: its prompt has no tokens.")
        if not response_fits:
            continue
        if len(ids) > (limit := work.data.max_prompt_tokens):
            rule = _overlong(work, "prompt", len(ids), limit=limit, where=rows.where(i))
            if rule == "filter":
                continue
            ids = fit(ids, limit, rule)
        out.append((i, fields, ids))
    return out


def _responses_fit(work: _Work, rows: Rows, kept: Sequence[tuple[int, Fields]]) -> list[bool]:
    """Whether each row may stay, by the length of its response and rejected reply, end token included."""
    fits = [True] * len(kept)
    if (limit := work.max_response_tokens) is None:
        return fits
    for name in ("response", "rejected"):
        having = [k for k, (_, f) in enumerate(kept) if fits[k] and getattr(f, name) is not None]
        texts = encode_texts(work.tokenizer, [getattr(kept[k][1], name) for k in having])
        for k, ids in zip(having, texts):
            work.counts["unknown_tokens"] += _unknown(work.tokenizer, np.array(ids))
            if len(ids) + 1 > limit:
                where = rows.where(kept[k][0])
                fits[k] = _overlong(work, name, len(ids) + 1, limit=limit, where=where) != "filter"
    return fits


def _overlong(work: _Work, what: str, tokens: int, *, limit: int, where: str) -> str:
    """Count an overlong prompt, response or rejected reply, and say the rule. DataError if that is
    'error'.
    """
    rule = work.data.overlong
    if rule == "error":
        key = "data.max_prompt_tokens" if what == "prompt" else "rollout.sampling.max_tokens"
        raise DataError(
            f"{where}: its {what} has {tokens} tokens, the limit is {limit}. Raise {key}, or choose what to "
            "do with such rows in data.overlong (filter, truncate_left, ...)."
        )
    work.counts[f"overlong_{what}_{'dropped' if rule == 'filter' else 'cut'}"] += 1
    return rule


def _unknown(tokenizer: Tokenizer, token_ids: np.ndarray) -> int:
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown == tokenizer.eos_token_id:
        return 0
    return int(np.count_nonzero(token_ids == unknown))
