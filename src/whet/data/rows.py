"""Rows of one source: parquet, jsonl, json, csv, a Hugging Face folder, reasoning-gym, or a function of yours.

Parquet and Hugging Face data stay in Arrow, and a row becomes Python only when it is asked for, so a file of a
million rows costs its Arrow size. Relative paths start at the working directory.
"""

from __future__ import annotations

import csv
import glob
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from whet.config.schema import ReasoningGym, Source
from whet.tables import load_object, near
from whet.types import ConfigError, DataError, Json

log = logging.getLogger(__name__)

Row = dict[str, Json]


class Part(Protocol):
    """The rows of one file (or generator), in order."""

    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Row]: ...

    def where(self, i: int) -> str: ...


@dataclass(frozen=True)
class ListPart:
    """Rows that are Python already. `numbers[i]` is the line, or the number of the row, for messages."""

    origin: str
    rows: Sequence[Row]
    unit: str = "row"
    numbers: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Row]:
        return list(self.rows[start:stop])

    def where(self, i: int) -> str:
        return f"{self.origin}, {self.unit} {self.numbers[i] if self.numbers else i + 1}"


@dataclass(frozen=True)
class ArrowPart:
    """Rows in an Arrow table."""

    origin: str
    table: pa.Table

    def __len__(self) -> int:
        return self.table.num_rows

    def slice(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Row]:
        names = self.table.column_names
        table = self.table if columns is None else self.table.select([n for n in names if n in columns])
        if not table.column_names:
            return [{} for _ in range(min(stop, len(self)) - start)]
        return table.slice(start, stop - start).to_pylist()

    def where(self, i: int) -> str:
        return f"{self.origin}, row {i + 1}"


@dataclass(frozen=True)
class Rows:
    """All rows of one source, numbered from 0."""

    name: str
    """Label of the source: `Source.name`, or the file's stem, the task's or the function's name."""
    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(len(p) for p in self.parts)

    def row(self, i: int) -> Row:
        part, at = self._find(i)
        return part.slice(at, at + 1, None)[0]

    def where(self, i: int) -> str:
        """The file and the line or row number of row i, for messages."""
        part, at = self._find(i)
        return part.where(at)

    def slice(self, start: int, stop: int, columns: Sequence[str] | None = None) -> list[Row]:
        """Rows start .. stop-1; from Arrow only the named columns, other rows may hold more."""
        out: list[Row] = []
        first = 0
        for part in self.parts:
            begin, end = max(start - first, 0), min(stop - first, len(part))
            if begin < end:
                out += part.slice(begin, end, columns)
            first += len(part)
        return out

    def _find(self, i: int) -> tuple[Part, int]:
        for part in self.parts:
            if i < len(part):
                return part, i
            i -= len(part)
        raise IndexError(i)


def read_rows(source: Source) -> Rows:
    """Every row of a source, at most `source.limit`. Raises DataError (ConfigError where the config is at fault)."""
    given = [k for k in ("path", "reasoning_gym", "function") if getattr(source, k) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"A data source needs exactly one of path, reasoning_gym, function; given: {', '.join(given) or 'none'}."
        )
    if source.reasoning_gym is not None:
        name, parts = source.reasoning_gym.task, iter([_reasoning_gym(source.reasoning_gym, source.limit)])
    elif source.function is not None:
        name, parts = source.function.rpartition(":")[2], iter([_function(source)])
    else:
        files = _files(source.path)
        name, parts = _stem(source.path, files), _read_files(files, source.limit)
    rows = Rows(source.name or name, tuple(parts))
    if not len(rows):
        raise DataError(f"Data source {rows.name!r} is empty: {_origins(rows)} hold no rows.")
    return rows


def _origins(rows: Rows) -> str:
    return ", ".join(getattr(p, "origin", "?") for p in rows.parts)


# ---------------------------------------------------------------- files


def _files(path: str | tuple[str, ...] | None) -> list[Path]:
    """The files (or Hugging Face folders) that a path, glob or list of them stands for, in a fixed order."""
    patterns = (path,) if isinstance(path, str) else path or ()
    return [file for pattern in patterns for file in _expand(pattern)]


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        return [path] if _is_hf(path) else _inside(path)
    if path.exists():
        return [path]
    hits = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
    if not hits:
        raise DataError(_missing(path))
    return [file for hit in hits for file in (_expand(str(hit)) if hit.is_dir() else [hit])]


def _inside(folder: Path) -> list[Path]:
    files = sorted(p for p in folder.iterdir() if p.suffix in READERS)
    if not files:
        raise DataError(
            f"Folder {folder} holds no {', '.join(READERS)} file. If it was saved by the `datasets` package, "
            "name the folder that holds its dataset_info.json."
        )
    log.info("%s: reading %s", folder, ", ".join(p.name for p in files))
    return files


def _missing(path: Path) -> str:
    folder = path.parent
    while not folder.exists():
        path, folder = folder, folder.parent
    return f"No such data file: {path}{near(path.name, sorted(p.name for p in folder.iterdir()))}"


def _stem(path: str | tuple[str, ...] | None, files: Sequence[Path]) -> str:
    if isinstance(path, str) and Path(path).expanduser().is_dir():
        return Path(path).expanduser().resolve().name
    return files[0].stem


def _read_files(files: Iterable[Path], limit: int | None) -> Iterator[Part]:
    """Parts of the files, ending once `limit` rows were read."""
    left = limit
    for file in files:
        if left == 0:
            return
        part = _read_file(file, left)
        left = None if left is None else left - len(part)
        yield part


def _read_file(file: Path, limit: int | None) -> Part:
    if file.is_dir():
        return _hf_folder(file, limit)
    if file.suffix not in READERS:
        raise DataError(f"{file}: cannot tell its format from {file.suffix!r}; known: {', '.join(READERS)}.")
    return READERS[file.suffix](file, limit)


def _parquet(file: Path, limit: int | None) -> Part:
    try:
        table = pq.ParquetFile(file, memory_map=True).read()
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{file}: not a readable parquet file: {e}") from e
    return _arrow(str(file), table, limit)


def _jsonl(file: Path, limit: int | None) -> Part:
    rows: list[Row] = []
    numbers: list[int] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if len(rows) == limit:
                break
            if line.strip():
                rows.append(_object(_loads(line, f"{file}, line {number}"), f"{file}, line {number}"))
                numbers.append(number)
    return ListPart(str(file), rows, "line", numbers)


def _json(file: Path, limit: int | None) -> Part:
    value = _loads(file.read_bytes(), str(file))
    if isinstance(value, dict) and "data" in value:
        value = value["data"]
    if not isinstance(value, list):
        raise DataError(
            f"{file}: expected a list of rows, or an object whose 'data' is one; found {_kind(value)}."
            " For one object a line, name the file .jsonl."
        )
    return ListPart(str(file), [_object(v, f"{file}, row {i}") for i, v in enumerate(value[:limit], 1)])


def _csv(file: Path, limit: int | None) -> Part:
    rows: list[Row] = []
    numbers: list[int] = []
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, strict=True)
        try:
            for row in itertools.islice(reader, limit):
                if None in row or None in row.values():
                    raise DataError(
                        f"{file}, line {reader.line_num}: not as many cells as the {len(reader.fieldnames or ())} columns."
                    )
                rows.append(dict(row))
                numbers.append(reader.line_num)
        except (csv.Error, UnicodeDecodeError) as e:
            raise DataError(f"{file}, line {reader.line_num}: malformed csv: {e}") from e
    return ListPart(str(file), rows, "line", numbers)


READERS: dict[str, Callable[[Path, int | None], Part]] = {
    ".parquet": _parquet,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
}


def _is_hf(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _hf_folder(folder: Path, limit: int | None) -> Part:
    if (folder / "dataset_dict.json").exists():
        splits = sorted(p.name for p in folder.iterdir() if p.is_dir())
        raise DataError(
            f"{folder} holds the splits {', '.join(splits)}: name one, e.g. {folder / splits[0]}."
        )
    try:
        import datasets
    except ImportError as e:
        raise DataError(
            f"{folder} was saved by the `datasets` package, which is not installed: "
            'pip install "whet[datasets]", or save it as parquet.'
        ) from e
    dataset: Any = datasets.load_from_disk(str(folder))
    return _arrow(str(folder), dataset.with_format("arrow")[:], limit)


def _arrow(origin: str, table: pa.Table, limit: int | None) -> Part:
    for column in table.schema:
        kind = _not_json(column.type)
        if kind is not None:
            raise DataError(
                f"{origin}: column {column.name!r} holds {kind}, which is no JSON value. "
                "Drop or convert it, or give the rows through a `function`."
            )
    return ArrowPart(origin, table.slice(0, limit))


def _not_json(kind: pa.DataType) -> str | None:
    """The first type inside `kind` that Python does not read as dict, list, str, int, float, bool or None."""
    t = pa.types
    if t.is_dictionary(kind) or t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        return _not_json(kind.value_type)
    if t.is_struct(kind):
        return next(filter(None, (_not_json(kind.field(i).type) for i in range(kind.num_fields))), None)
    plain = (
        t.is_null,
        t.is_boolean,
        t.is_integer,
        t.is_floating,
        t.is_string,
        t.is_large_string,
        t.is_string_view,
    )
    return None if any(test(kind) for test in plain) else str(kind)


# ---------------------------------------------------------------- generators


def _reasoning_gym(cfg: ReasoningGym, limit: int | None) -> Part:
    """Rows {prompt, answer, reasoning_gym: name, entry}: what the package's verifier needs goes along as JSON."""
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
        copy = _json_copy(entry, f"{what}, entry {i}")
        if i == 0 and made.score_answer(entry["answer"], entry) != made.score_answer(copy["answer"], copy):
            raise ConfigError(
                f"{what}: its verifier scores an entry otherwise once it has been written as JSON; it cannot be used."
            )
        rows.append(
            {"prompt": copy["question"], "answer": copy["answer"], "reasoning_gym": cfg.task, "entry": copy}
        )
    return ListPart(f"reasoning_gym {cfg.task}", rows)


def _function(source: Source) -> Part:
    made = load_object(source.function or "", what="data source function")(**source.arguments)
    what = f"function {source.function}"
    if isinstance(made, str | bytes | dict) or not isinstance(made, Iterable):
        raise DataError(f"{what} returned {_kind(made)}; expected an iterable of rows (dicts).")
    rows = [_object(row, f"{what}, row {i}") for i, row in enumerate(itertools.islice(made, source.limit), 1)]
    for i, row in enumerate(rows, 1):
        if (flaw := _flaw(row, "")) is not None:
            raise DataError(
                f"{what}, row {i}: {flaw}, which is no JSON value (dict, list, str, int, float, bool, None)."
            )
    return ListPart(what, rows)


# ---------------------------------------------------------------- values


def _loads(text: bytes, where: str) -> Json:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where}: not JSON: {e}") from e


def _json_copy(value: Json, where: str) -> Json:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as e:
        raise DataError(f"{where} cannot be written as JSON: {e}") from e


def _object(value: Json, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be an object with named columns; found {_kind(value)}.")
    return value


def _flaw(value: object, path: str) -> str | None:
    """'column x.0 holds a set' for the first value inside that is not JSON, else None."""
    if value is None or type(value) in (str, int, float, bool):
        return None
    if type(value) is list:
        return next(filter(None, (_flaw(v, f"{path}.{i}") for i, v in enumerate(value))), None)
    if type(value) is dict:
        if odd := [k for k in value if type(k) is not str]:
            return f"column {path.lstrip('.') or 'names'} has the key {odd[0]!r}"
        return next(filter(None, (_flaw(v, f"{path}.{k}") for k, v in value.items())), None)
    return f"column {path.lstrip('.')} holds {_kind(value)}"


def _kind(value: object) -> str:
    return f"a {type(value).__name__} ({repr(value)[:60]})"
