"""Files of rows: parquet, jsonl, json, csv, and the folders that the `datasets` package saves."""

from __future__ import annotations

import csv
import glob
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from whet.data.parts import ArrowPart, ListPart, Part, Row, as_row, describe, loads
from whet.tables import near
from whet.types import DataError

log = logging.getLogger(__name__)


def find_files(path: str | tuple[str, ...] | None) -> list[Path]:
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
            f"Folder {folder} holds no {', '.join(READERS)} file. If it was saved by the `datasets` "
            "package, name the folder that holds its dataset_info.json."
        )
    log.info("%s: reading %s", folder, ", ".join(p.name for p in files))
    return files


def _missing(path: Path) -> str:
    folder = path.parent
    while not folder.exists():
        path, folder = folder, folder.parent
    return f"No such data file: {path}{near(path.name, sorted(p.name for p in folder.iterdir()))}"


def stem(path: str | tuple[str, ...] | None, files: Sequence[Path]) -> str:
    if isinstance(path, str) and Path(path).expanduser().is_dir():
        return Path(path).expanduser().resolve().name
    return files[0].stem


def read_files(files: Iterable[Path], limit: int | None) -> Iterator[Part]:
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
                rows.append(as_row(loads(line, f"{file}, line {number}"), f"{file}, line {number}"))
                numbers.append(number)
    return ListPart(str(file), rows, "line", numbers)


def _json(file: Path, limit: int | None) -> Part:
    value = loads(file.read_bytes(), str(file))
    if isinstance(value, dict) and "data" in value:
        value = value["data"]
    if not isinstance(value, list):
        raise DataError(
            f"{file}: expected a list of rows, or an object whose 'data' is one; found {describe(value)}. "
            "For one object a line, name the file .jsonl."
        )
    return ListPart(str(file), [as_row(v, f"{file}, row {i}") for i, v in enumerate(value[:limit], 1)])


def _csv(file: Path, limit: int | None) -> Part:
    rows: list[Row] = []
    numbers: list[int] = []
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, strict=True)
        try:
            for row in itertools.islice(reader, limit):
                if None in row or None in row.values():
                    raise DataError(
                        f"{file}, line {reader.line_num}: not as many cells as the "
                        f"{len(reader.fieldnames or ())} columns."
                    )
                rows.append(dict(row))
                numbers.append(reader.line_num)
        except csv.Error as e:
            raise DataError(f"{file}, line {reader.reader.line_num}: malformed csv: {e}") from e
        except UnicodeDecodeError as e:
            raise DataError(f"{file}: not UTF-8 text: {e}") from e
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
                f"{origin}: column {column.name!r} holds {kind}, which is no JSON value. Drop or convert "
                "it, or give the rows through a `function`."
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
