"""Rows of one source: files, a Hugging Face folder, reasoning-gym, or a user-defined function.

Parquet and Hugging Face data stay in Arrow, and a row becomes Python only when it is read, so a file of
a million rows costs its Arrow size. Relative paths start at the working directory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from whet import seeds
from whet.config.schema import SourceConfig
from whet.config.sections.data import (
    RANDOM_TOKENS,
    REASONING_GYM,
    RandomTokensArguments,
    ReasoningGymArguments,
)
from whet.data.files import find_files, read_files, stem
from whet.data.parts import FileRows, ListPart, SourceRows, as_row, describe, flaw, json_copy
from whet.inputs import too_deep
from whet.tables import at_line, load_object, near
from whet.types import ConfigError, DataError, Json


def read_rows(source: SourceConfig, *, vocabulary: int = 1) -> SourceRows:
    """The rows of a source: without `skip`, at most `limit`. Raises DataError, or ConfigError where that is wrong.

    vocabulary: how many tokens there are, for rows of random tokens.
    """
    given = [k for k in ("path", "function", "rows") if getattr(source, k) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"A data source needs exactly one of path, function, rows; given: {', '.join(given) or 'none'}."
        )
    most = _most(source)
    if source.function == REASONING_GYM:
        asked = ReasoningGymArguments(**source.arguments)
        name, parts = asked.task, iter([_reasoning_gym(asked, most)])
    elif source.function == RANDOM_TOKENS:
        made_up = RandomTokensArguments(**source.arguments)
        name, parts = RANDOM_TOKENS, iter([_random_tokens(made_up, vocabulary)])
    elif source.rows is not None:
        for i, row in enumerate(source.rows[:most], 1):
            _check_row(row, f"data.rows, row {i}")
        name, parts = "rows", iter([ListPart("data.rows", list(source.rows[:most]))])
    elif source.function is not None:
        name, parts = source.function.rpartition(":")[2], iter([_function(source, most)])
    else:
        files = find_files(source.path, subset=source.subset, split=source.split)
        name, parts = stem(source.path, files), read_files(files, most)
    every = SourceRows(source.name or name, tuple(parts))
    begin = _place(source.skip, len(every))
    end = _end(source, begin, len(every))
    rows = every if begin == 0 and end >= len(every) else every.cut(begin, end)
    if not len(rows):
        where = ", ".join(p.origin for p in every.parts)
        left = f"skip={source.skip}" + ("" if source.limit is None else f", limit={source.limit}")
        skipped = f" but the {len(every)} that {left} leaves out" if len(every) else ""
        raise DataError(f"Data source {rows.name!r} is empty: no rows in {where}{skipped}.")
    return rows


def _most(source: SourceConfig) -> int | None:
    """Rows that have to be read; None: all, for a share is of all, and a negative number counts from the end."""
    skip, limit = source.skip, source.limit
    if not isinstance(skip, int) or not isinstance(limit, int) or min(skip, limit) < 0:
        return None
    return skip + limit


def _place(skip: float | str, rows: int) -> int:
    """The first row that is used."""
    if isinstance(skip, str):
        return _boundary(_percent(skip), rows)
    return max(rows + int(skip), 0) if skip < 0 else _count(skip, rows)


def _percent(text: str) -> int:
    return int(text.removesuffix("%"))


def _boundary(percent: int, rows: int) -> int:
    """The row of a boundary in percent, as `datasets.ReadInstruction` with its rounding 'closest' has it: what is less
    than half a row from the end is row 0 there."""
    row = round(percent * rows / 100)
    return row if row >= 0 else rows + row


def _end(source: SourceConfig, begin: int, rows: int) -> int:
    """The row after the last one that is used."""
    limit = source.limit
    if isinstance(limit, str):
        first, last = _percent(source.skip) if isinstance(source.skip, str) else 0, _percent(limit)
        return max(_boundary(last if last < 0 else first % 100 + last, rows), begin)
    if limit is None or limit < 0:
        return max(rows + int(limit or 0), begin)
    return begin + _count(limit, rows)


def _count(amount: float, rows: int) -> int:
    """A number of rows, or a share of them: rounded down, but at least one and not all. 0.29 of 100 rows are 29."""
    return amount if isinstance(amount, int) else max(1, min(rows - 1, int(Fraction(str(amount)) * rows)))


def _reasoning_gym(cfg: ReasoningGymArguments, limit: int | None) -> FileRows:
    """Rows {prompt, answer, reasoning_gym: name, entry}: the entry is what the package's verifier needs."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    what = f"reasoning_gym task {cfg.task!r}"
    if cfg.task not in DATASETS:
        raise ConfigError(
            f"{what} is not known{near(cfg.task, DATASETS)}. Known: {', '.join(sorted(DATASETS))}."
        )
    further = cfg.model_extra or {}
    try:
        made = reasoning_gym.create_dataset(cfg.task, seed=cfg.seed, size=cfg.size, **further)
    except (TypeError, ValueError, AssertionError) as e:
        raise ConfigError(f"{what} refuses the arguments {further}: {e}") from e
    rows = []
    for i in range(min(cfg.size, limit or cfg.size)):
        entry = made[i]
        copy = json_copy(entry, f"{what}, entry {i}")
        if i == 0 and made.score_answer(entry["answer"], entry) != made.score_answer(copy["answer"], copy):
            raise ConfigError(
                f"{what}: its verifier scores an entry differently after the entry was written as JSON; "
                "this dataset cannot be used."
            )
        rows.append(
            {"prompt": copy["question"], "answer": copy["answer"], "reasoning_gym": cfg.task, "entry": copy}
        )
    return ListPart(f"reasoning_gym {cfg.task}", rows)


def _random_tokens(cfg: RandomTokensArguments, vocabulary: int) -> FileRows:
    """Rows {prompt, response}: tokens that are drawn evenly from the vocabulary, by row and column alone."""
    lengths = {name: count for name, count in (("prompt", cfg.prompt), ("response", cfg.response)) if count}

    def drawn(row: int, column: str, count: int) -> list[int]:
        stream = seeds.key(cfg.seed, RANDOM_TOKENS, column, row)
        tokens: list[int] = (seeds.uniforms(stream, 0, count) * vocabulary).astype(int).tolist()
        return tokens

    rows = [{name: drawn(row, name, count) for name, count in lengths.items()} for row in range(cfg.rows)]
    return ListPart(RANDOM_TOKENS, rows)


def _function(source: SourceConfig, limit: int | None) -> FileRows:
    function = load_object(source.function or "", what="data source function")
    kind = "class" if isinstance(function, type) else "function"
    what = f"{kind} {source.function}"
    try:
        made = function(**source.arguments)
        given = list(itertools.islice(_rows_of(made), limit)) if _has_rows(made) else []
    except (Exception, SystemExit) as e:  # foreign code: it can fail in any way, or end the program
        raise DataError(
            f"{what} with arguments {source.arguments} raised {type(e).__name__}: {e}{at_line(e)}. The function gets "
            "only `arguments`, by name; rows are tokenised afterwards."
        ) from e
    if not _has_rows(made):
        expected = "an iterable of rows (dicts), or an object with __len__ and __getitem__ that returns them"
        raise DataError(f"{what} returned {describe(made)}; expected {expected}.")
    for i, row in enumerate(given, 1):
        _check_row(row, f"{what}, row {i}")
    return ListPart(what, given)


def _has_rows(made: object) -> bool:
    indexed = hasattr(made, "__len__") and hasattr(made, "__getitem__")
    return (isinstance(made, Iterable) or indexed) and not isinstance(made, str | bytes | dict)


def _rows_of(made: Any) -> Iterator[Json]:
    """The rows of an iterable, or of a dataset that has a length and is indexed by number."""
    return iter(made) if isinstance(made, Iterable) else (made[i] for i in range(len(made)))


def _check_row(row: Json, where: str) -> None:
    """Check that a row has named JSON values. The error for a row of tokens says what to give instead."""
    if isinstance(row, dict) and "input_ids" in row:
        raise DataError(
            f"{where}: the row holds tokens (input_ids), but whet tokenises rows with the policy's own tokenizer: give "
            "the text, as `prompt` (and `response`) or as messages."
        )
    try:
        fault = flaw(as_row(row, where))
    except RecursionError as e:
        raise DataError(f"{where}: {too_deep()}") from e
    if fault is not None:
        raise DataError(f"{where}: {fault}. Rows are dict, list, str, int, float, bool and None.")
