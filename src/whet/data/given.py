"""Data that is given from Python: rows, tables and datasets, written once as a file of the run.

The file's name has a digest of the rows: a resume with the same rows reads the same file, and other rows are another
file, which is a change of the config like any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.config.schema import SourceConfig
from whet.inputs import too_deep
from whet.outputs import replacing
from whet.tables import near
from whet.types import ConfigError

FOLDER = "data"
"""Where in a run directory the files are."""
_KINDS = ("path", "function", "rows")
"""Keys of a source, one of which every source has."""
_BATCH = 4096
"""Rows of a table that are turned into Python at once."""


@dataclass(frozen=True)
class Given:
    """Rows in memory that a source of the config stands for."""

    mark: str
    """The path of that source, until the run directory is known."""
    name: str
    """Of the file in the run directory."""
    rows: Callable[[], Iterator[Mapping[str, Any]]]

    def file(self, run_dir: Path) -> Path:
        return run_dir / FOLDER / self.name

    def write(self, run_dir: Path) -> None:
        """Write the file, if it is not there."""
        file = self.file(run_dir)
        if file.exists():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, durable=True) as part, part.open("wb") as out:
            out.writelines(_lines(self.rows, self.mark))


def taken(sections: Mapping[str, Any]) -> tuple[dict[str, Any], list[Given]]:
    """The sections of a config with a path in place of rows that are given, and what stands behind these paths.

    `data`, also of a stage, is a section; or rows to train on: a list of dicts, a pandas or Arrow table, or a dataset
    (with a length, whose items are dicts). The same may stand under `train`, `eval` and `demonstrations`, alone or
    in their lists of sources.
    """
    found: list[Given] = []
    out = dict(sections)
    if "data" in out:
        out["data"] = _section(out["data"], found)
    if isinstance(stages := out.get("stages"), list | tuple):
        out["stages"] = [_stage(stage, found) for stage in stages]
    return out, found


def _stage(stage: Any, found: list[Given]) -> Any:
    """A stage whose rows have been taken out."""
    if not isinstance(stage, Mapping) or "data" not in stage:
        return stage
    return {**stage, "data": _section(stage["data"], found)}


def _section(data: Any, found: list[Given]) -> Any:
    if not isinstance(data, Mapping):
        data = {"train": data}
    parts = ("train", "eval", "demonstrations")
    return {k: _sources(v, k, found) if k in parts else v for k, v in data.items()}


def _sources(value: Any, part: str, found: list[Given]) -> Any:
    """The sources of one part of the section."""
    if isinstance(value, str | Path | Mapping) or (rows := _rows(value)) is None:
        several = value if isinstance(value, list | tuple) else [value]
        _check_sources(several, part)
        return [_source(each, part, found) for each in several]
    return [_noted(rows, part, found)]


def _check_sources(values: Sequence[Any], part: str) -> None:
    """ConfigError for dicts that are taken for sources, and have what no source has: they may be meant as rows."""
    for n, value in enumerate(values, 1):
        kind = next((k for k in _KINDS if isinstance(value, Mapping) and k in value), None)
        strange = [key for key in value if key not in SourceConfig.model_fields] if kind else []
        if strange:
            raise ConfigError(
                f"data.{part}, entry {n}: a dict with {kind!r} is a source of data, which has no key {strange[0]!r}"
                f"{near(str(strange[0]), SourceConfig.model_fields) or '.'} If the entries are rows with a column "
                f"{kind!r}, give them as an Arrow table, pyarrow.Table.from_pylist(rows), or rename the column."
            )


def _source(value: Any, part: str, found: list[Given]) -> Any:
    if isinstance(value, str | Path | Mapping):
        return value
    rows = _rows(value)
    if rows is None:
        raise ConfigError(
            f"data.{part}: got a {type(value).__name__}; expected a path, a source ({', '.join(_KINDS)}), a list of "
            "rows (dicts), a pandas or Arrow table, or a dataset with a length and dicts as items"
        )
    return _noted(rows, part, found)


def _noted(rows: Callable[[], Iterator[Any]], part: str, found: list[Given]) -> dict[str, str]:
    digest = hashlib.blake2b(digest_size=6)
    count = 0
    for line in _lines(rows, f"data.{part}"):
        digest.update(line)
        count += 1
    if not count:
        raise ConfigError(f"data.{part}: has no rows; give at least one")
    mark = f"data.{part} from Python, {digest.hexdigest()}"
    found.append(Given(mark, f"{part}-{digest.hexdigest()}.jsonl", rows))
    number = sum(given.name.startswith(f"{part}-") for given in found)
    return {"name": part if number == 1 else f"{part}-{number}", "path": mark}


def _lines(rows: Callable[[], Iterator[Any]], what: str) -> Iterator[bytes]:
    for n, row in enumerate(rows(), 1):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{what}, row {n}: got a {type(row).__name__}; a row is a dict with named columns"
            )
        try:
            line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        except RecursionError as e:
            raise ConfigError(f"{what}, row {n}: {too_deep()}") from e
        except (TypeError, ValueError) as e:
            raise ConfigError(
                f"{what}, row {n}: {e}; rows hold dict, list, str, int, float, bool and None"
            ) from e
        if odd := _odd_keys(row):
            raise ConfigError(
                f"{what}, row {n}: has the key {odd[0]!r}; expected str: a file would have it as text"
            )
        yield line


def _odd_keys(row: Mapping[Any, Any]) -> list[Any]:
    """Keys at any depth that are no text."""
    found: list[Any] = []
    inside: list[Any] = [row]
    for one in inside:
        if isinstance(one, Mapping):
            found += [key for key in one if not isinstance(key, str)]
            inside += one.values()
        elif isinstance(one, list | tuple):
            inside += one
    return found


def _rows(value: Any) -> Callable[[], Iterator[Any]] | None:
    """How to go through the rows of a value; None if it has none."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        plain = all(isinstance(r, Mapping) and not any(k in r for k in _KINDS) for r in value)
        return (lambda: iter(value)) if plain and value else None
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    if kind == "pandas.DataFrame":
        import pyarrow

        try:
            return _rows(pyarrow.Table.from_pandas(value, preserve_index=False))
        except (pyarrow.ArrowException, ValueError) as e:
            raise ConfigError(
                f"data: a pandas table cannot be read: {'; '.join(map(str, e.args))}. Give each column another name "
                "and values of one type, or give a list of rows (dicts)"
            ) from e
    if kind == "pyarrow.Table":
        if len(set(value.column_names)) < len(value.column_names):
            raise ConfigError(
                f"data: an Arrow table has two columns of one name ({', '.join(value.column_names)}); keep one"
            )
        return lambda: (row for batch in value.to_batches(_BATCH) for row in batch.to_pylist())
    if kind == "datasets.Dataset":
        value = value.with_format(None)
    if hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, Mapping):
        return lambda: (value[n] for n in range(len(value)))
    return None
