"""Files of rows: parquet, jsonl, json, csv, and the folders that the `datasets` package saves."""

from __future__ import annotations

import csv
import glob
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from whet.data.parts import FileRows, ListPart, Row, as_row, describe, loads
from whet.inputs import MIB, MOST_JSON_BYTES, MOST_ROW_BYTES, check_regular, read_bytes, read_json_object
from whet.tables import near
from whet.types import DataError

log = logging.getLogger(__name__)


OTHER_SPLITS = {"test", "validation", "valid", "val", "dev", "eval"}
"""Words in a file's name that mark it as other than training data."""
_ABOUT = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
"""Files without rows that lie beside the data of a dataset's folder."""


def find_files(
    path: str | tuple[str, ...] | None,
    *,
    subset: str | None = None,
    split: str | tuple[str, ...] | None = None,
) -> list[Path]:
    """The files (or Hugging Face folders) that a path, glob or list of them stands for, in a fixed order.

    With a subset or split every path is a folder, read as `datasets.load_dataset(path, subset, split=split)` reads
    it from disk.
    """
    patterns = (path,) if isinstance(path, str) else path or ()
    if not patterns:
        raise DataError(
            "The data source's path is an empty list; expected at least one file, folder or pattern."
        )
    try:
        return _found(patterns, subset, split)
    except OSError as e:  # a name that is too long, a folder that may not be listed
        raise DataError(f"{e.filename}: cannot be read: {e.strerror or e}") from e


def _found(patterns: Sequence[str], subset: str | None, split: str | tuple[str, ...] | None) -> list[Path]:
    if subset is None and split is None:
        return [file for pattern in patterns for file in _expand(pattern)]
    folders = [_folder(_at(pattern), subset) for pattern in patterns]
    if split is None:
        return [file for folder in folders for file in _expand(str(folder))]
    splits = (split,) if isinstance(split, str) else split
    return [file for folder in folders for name in splits for file in _of_split(folder, name)]


def is_here(path: str | tuple[str, ...]) -> bool:
    """Whether there are files under every path, or for every pattern."""
    patterns = [str(_at(p)) for p in ((path,) if isinstance(path, str) else path)]
    return all(os.path.exists(p) or glob.glob(p, recursive=True) for p in patterns)


def _at(pattern: str) -> Path:
    """`~` is the user's home folder; `~name` of a user that this system does not know stays as it is."""
    return Path(os.path.expanduser(pattern))


def _folder(path: Path, subset: str | None) -> Path:
    """The folder of a subset."""
    if path.is_file():
        raise DataError(f"{path} is a single file, but subset and split select in a folder; leave them out.")
    if not path.is_dir():
        raise DataError(_missing(path))
    if subset is None:
        return path
    if not (path / subset).is_dir():
        names = sorted(p.name for p in path.iterdir() if p.is_dir())
        raise DataError(
            f"{path} has no subset {subset!r}{near(subset, names)}; its folders: {', '.join(names) or 'none'}."
        )
    return path / subset


def _of_split(folder: Path, split: str) -> list[Path]:
    """A split that the `datasets` package saved, or the files that have its name as a word or lie in its folder.

    Where no file's name speaks of a split, all are `train`.
    """
    if not re.fullmatch(r"[\w.-]+", split):
        raise DataError(f"split {split!r}: expected a name; for a part of a split use the source's `limit`.")
    saved = _saved_splits(folder)
    if saved is not None:
        if split not in saved:
            raise DataError(
                f"{folder} has no split {split!r}{near(split, saved)}; it has: {', '.join(saved)}."
            )
        return [saved[split]]
    files = _readable(folder) + _readable(folder / "data")
    words = {f: set(re.split(r"[^a-z0-9]+", f.stem.lower())) for f in files}
    found = [f for f in files if split.lower() in words[f]]
    found += _readable(folder / split) + _readable(folder / "data" / split)
    if not found and split == "train" and not any(words[f] & OTHER_SPLITS for f in files):
        found = files
    if not found:
        names = ", ".join(f.name for f in files) or "no readable file"
        raise DataError(f"{folder} has no file or folder of the split {split!r}; its files: {names}.")
    log.info("%s, split %s: reading %s", folder, split, ", ".join(p.name for p in found))
    return found


def _saved_splits(folder: Path) -> dict[str, Path] | None:
    """The splits of a folder that the `datasets` package saved; None for other folders."""
    if (folder / "dataset_dict.json").exists():
        return {p.name: p for p in sorted(folder.iterdir()) if p.is_dir()}
    if not (folder / "state.json").exists():
        return None
    state = read_json_object(folder / "state.json", DataError)
    return {str(state.get("_split") or "train"): folder}


def _readable(folder: Path) -> list[Path]:
    """The files of rows in a folder."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in files if p.suffix in READERS and p.name not in _ABOUT)


def _expand(pattern: str) -> list[Path]:
    path = _at(pattern)
    if path.is_dir():
        return [path] if _is_hf(path) else _inside(path)
    if path.exists():
        return [path]
    hits = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
    if not hits:
        raise DataError(_missing(path))
    found = [file for hit in hits for file in (_expand(str(hit)) if hit.is_dir() else [hit])]
    return [*dict.fromkeys(found)]  # `**` hits a folder and what is in it


def _inside(folder: Path) -> list[Path]:
    files = _readable(folder)
    if not files:
        inside = [str(p) for p in sorted(folder.iterdir()) if _readable(p)]
        give = f"; give {' or '.join(inside)}" if inside else ""
        raise DataError(
            f"Folder {folder} has no {', '.join(READERS)} file{give}. If the `datasets` package saved it, "
            "give the folder that contains dataset_info.json."
        )
    log.info("%s: reading %s", folder, ", ".join(p.name for p in files))
    return files


def _missing(path: Path) -> str:
    given, folder = path, path.parent
    while not folder.exists():
        path, folder = folder, folder.parent
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(given)) is not None and not given.suffix
    hint = (
        f". If {str(given)!r} is a dataset of a hub: whet downloads nothing. Save it to a folder first (with the "
        "`datasets` package: load_dataset(...).save_to_disk(FOLDER)) and give that folder as path"
    )
    if not folder.is_dir():
        return f"No such data file: {path}; {folder} is a file"
    names = sorted(p.name for p in folder.iterdir())
    return f"No such data file: {path}{near(path.name, names)}{hint if hub else ''}"


def stem(path: str | tuple[str, ...] | None, files: Sequence[Path]) -> str:
    if isinstance(path, str) and _at(path).is_dir():
        return _at(path).resolve().name
    return files[0].stem


def read_files(files: Iterable[Path], limit: int | None) -> Iterator[FileRows]:
    """Parts of the files, ending once `limit` rows were read."""
    left = limit
    for file in files:
        if left == 0:
            return
        part = _read_file(file, left)
        left = None if left is None else left - len(part)
        yield part


def _read_file(file: Path, limit: int | None) -> FileRows:
    if file.is_dir():
        return _hf_folder(file, limit)
    if file.suffix not in READERS:
        raise DataError(f"{file}: unknown format {file.suffix!r}; expected one of {', '.join(READERS)}.")
    check_regular(file, DataError)
    try:
        return READERS[file.suffix](file, limit)
    except OSError as e:
        raise DataError(f"{file}: cannot be read: {e.strerror or e}") from e


def _parquet(file: Path, limit: int | None) -> FileRows:
    from whet.data.arrow import arrow_rows  # a plan of another file needs no pyarrow
    from whet.data.parquet import read_parquet

    return arrow_rows(str(file), read_parquet(file, limit=limit), None)


def _jsonl(file: Path, limit: int | None) -> FileRows:
    rows: list[Row] = []
    numbers: list[int] = []
    with file.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_ROW_BYTES + 1), b""), 1):
            if len(line) > MOST_ROW_BYTES:
                raise DataError(
                    f"{file}, line {number}: has more than {MOST_ROW_BYTES // MIB} MiB; .jsonl has one row per line"
                )
            if len(rows) == limit:
                break
            if line.strip():
                rows.append(as_row(loads(line, f"{file}, line {number}"), f"{file}, line {number}"))
                numbers.append(number)
    return ListPart(str(file), rows, "line", numbers)


_LINES = "For one object per line, name the file .jsonl."


def _json(file: Path, limit: int | None) -> FileRows:
    text = read_bytes(file, DataError, most=MOST_JSON_BYTES)
    try:
        value = loads(text, str(file))
    except DataError as e:
        if _begins_with_object(text):
            raise DataError(f"{e}. {_LINES}") from e
        raise
    if isinstance(value, dict) and "data" in value:
        value = value["data"]
    if not isinstance(value, list):
        raise DataError(
            f"{file}: expected a list of rows, or an object whose 'data' is one; found {describe(value)}. "
            f"{_LINES}"
        )
    return ListPart(str(file), [as_row(v, f"{file}, row {i}") for i, v in enumerate(value[:limit], 1)])


def _begins_with_object(text: bytes) -> bool:
    """Whether the first line is an object by itself."""
    try:
        return isinstance(loads(text.lstrip().partition(b"\n")[0], ""), dict)
    except DataError:
        return False


def _csv(file: Path, limit: int | None) -> FileRows:
    rows: list[Row] = []
    numbers: list[int] = []
    most = csv.field_size_limit(MOST_ROW_BYTES)
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, strict=True)
        try:
            names = Counter(name for name in reader.fieldnames or () if name)
            if twice := [name for name, count in names.items() if count > 1]:
                raise DataError(f"{file}: two columns have the name {twice[0]!r}; keep one, or rename it.")
            for row in itertools.islice(reader, limit):
                if None in row or None in row.values():
                    raise DataError(
                        f"{file}, line {reader.line_num}: the number of cells differs from the "
                        f"{len(reader.fieldnames or ())} columns."
                    )
                rows.append(dict(row))
                numbers.append(reader.line_num)
        except csv.Error as e:
            raise DataError(f"{file}, line {reader.reader.line_num}: malformed csv: {e}") from e
        except UnicodeDecodeError as e:
            raise DataError(f"{file}: not UTF-8 text: {e}; save it as UTF-8") from e
        finally:
            csv.field_size_limit(most)
    return ListPart(str(file), rows, "line", numbers)


READERS: dict[str, Callable[[Path, int | None], FileRows]] = {
    ".parquet": _parquet,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
}


def _is_hf(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _hf_folder(folder: Path, limit: int | None) -> FileRows:
    if (folder / "dataset_dict.json").exists():
        splits = sorted(p.name for p in folder.iterdir() if p.is_dir())
        if not splits:
            raise DataError(
                f"{folder} has dataset_dict.json, but no folder of a split; copy the dataset again."
            )
        raise DataError(f"{folder} has the splits {', '.join(splits)}; name one, e.g. `split: {splits[0]}`.")
    try:
        import datasets
    except ImportError as e:
        raise DataError(
            f"{folder} was saved by the `datasets` package, which is not installed: "
            'pip install "whet[datasets]", or save it as parquet.'
        ) from e
    from whet.data.arrow import arrow_rows
    from whet.data.ipc import check_streams

    check_streams(folder)
    try:
        dataset: Any = datasets.load_from_disk(str(folder))
        table = dataset.with_format("arrow")[:]
        table.validate(full=True)
    except Exception as e:  # foreign code reading foreign files: it can fail in any way
        raise DataError(f"{folder}: the `datasets` package cannot read it: {type(e).__name__}: {e}") from e
    return arrow_rows(str(folder), table, limit)
