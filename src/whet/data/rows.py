"""Rows of one source: files, a Hugging Face folder, reasoning-gym, or a function of yours.

Parquet and Hugging Face data stay in Arrow, and a row becomes Python only when it is asked for, so a file of
a million rows costs its Arrow size. Relative paths start at the working directory.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable

from whet.config.schema import ReasoningGym, Source
from whet.data.files import find_files, read_files, stem
from whet.data.parts import ListPart, Part, Rows, as_row, describe, flaw, json_copy
from whet.tables import load_object, near
from whet.types import ConfigError, DataError


def read_rows(source: Source) -> Rows:
    """Every row of a source, at most `source.limit`. Raises DataError, or ConfigError where that is wrong."""
    given = [k for k in ("path", "reasoning_gym", "function", "rows") if getattr(source, k) is not None]
    if len(given) != 1:
        raise ConfigError(
            "A data source needs exactly one of path, reasoning_gym, function, rows; given: "
            f"{', '.join(given) or 'none'}."
        )
    if source.reasoning_gym is not None:
        name, parts = source.reasoning_gym.task, iter([_reasoning_gym(source.reasoning_gym, source.limit)])
    elif source.rows is not None:
        name, parts = "rows", iter([ListPart("data.rows", list(source.rows[: source.limit]))])
    elif source.function is not None:
        name, parts = source.function.rpartition(":")[2], iter([_function(source)])
    else:
        files = find_files(source.path)
        name, parts = stem(source.path, files), read_files(files, source.limit)
    rows = Rows(source.name or name, tuple(parts))
    if not len(rows):
        where = ", ".join(p.origin for p in rows.parts)
        raise DataError(f"Data source {rows.name!r} is empty: no rows in {where}.")
    return rows


def _reasoning_gym(cfg: ReasoningGym, limit: int | None) -> Part:
    """Rows {prompt, answer, reasoning_gym: name, entry}: the entry is what the package's verifier needs."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    what = f"reasoning_gym task {cfg.task!r}"
    if cfg.task not in DATASETS:
        raise ConfigError(
            f"{what} is not known{near(cfg.task, DATASETS)}. Known: {', '.join(sorted(DATASETS))}."
        )
    if clash := sorted({"seed", "size"} & set(cfg.params)):
        raise ConfigError(f"{what}: {' and '.join(clash)} stand beside `params`, not in it.")
    try:
        made = reasoning_gym.create_dataset(cfg.task, seed=cfg.seed, size=cfg.size, **cfg.params)
    except (TypeError, ValueError, AssertionError) as e:
        raise ConfigError(f"{what} refuses params {cfg.params}: {e}") from e
    rows = []
    for i in range(min(cfg.size, limit or cfg.size)):
        entry = made[i]
        copy = json_copy(entry, f"{what}, entry {i}")
        if i == 0 and made.score_answer(entry["answer"], entry) != made.score_answer(copy["answer"], copy):
            raise ConfigError(
                f"{what}: its verifier scores an entry otherwise once it has been written as JSON; it "
                "cannot be used."
            )
        rows.append(
            {"prompt": copy["question"], "answer": copy["answer"], "reasoning_gym": cfg.task, "entry": copy}
        )
    return ListPart(f"reasoning_gym {cfg.task}", rows)


def _function(source: Source) -> Part:
    function = load_object(source.function or "", what="data source function")
    what = f"function {source.function}"
    try:
        made = function(**source.arguments)
        given = list(itertools.islice(made, source.limit)) if _has_rows(made) else []
    except Exception as e:  # foreign code: it can fail in any way
        at = traceback.extract_tb(e.__traceback__)[-1]
        place = f"{at.filename}:{at.lineno}"
        raise DataError(
            f"{what} with arguments {source.arguments} raised {type(e).__name__}: {e} ({place})."
        ) from e
    if not _has_rows(made):
        raise DataError(f"{what} returned {describe(made)}; expected an iterable of rows (dicts).")
    rows = [as_row(row, f"{what}, row {i}") for i, row in enumerate(given, 1)]
    for i, row in enumerate(rows, 1):
        if (fault := flaw(row)) is not None:
            raise DataError(f"{what}, row {i}: {fault}. Rows are dict, list, str, int, float, bool and None.")
    return ListPart(what, rows)


def _has_rows(made: object) -> bool:
    return isinstance(made, Iterable) and not isinstance(made, str | bytes | dict)
