"""Parquet files, read within a limit of memory: a few hundred bytes of one can stand for terabytes.

A value that is repeated is written once and counted, so neither the size of a file nor its metadata bounds
its size in memory. It is read in batches of rows, and their memory is added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from whet.data.arrow import decoded_bytes
from whet.inputs import MIB, MOST_ROW_BYTES, check_regular
from whet.types import DataError

ROOM = 2**30
"""Bytes that the rows of any file may take in memory;"""
MOST_GROWTH = 1000
"""or so many for each byte of the file, if that is more."""
MOST_ROWS = 65_536
"""Of one batch."""


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """DataError for a file that is damaged, or that cannot be read."""
    check_regular(file, DataError)
    try:
        yield
    except UnicodeEncodeError as e:
        raise DataError(
            f"{str(file)!r}: the path of a parquet file has to be UTF-8; rename its folders"
        ) from e
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
        said = str(e).rstrip(".")
        raise DataError(
            f"{file}: not a readable parquet file: {said}. If it was damaged or cut off, copy or write it again"
        ) from e


def read_schema(file: Path) -> pa.Schema:
    """The columns of a parquet file. Raises DataError for one that is damaged."""
    with _reading(file):
        return pq.read_schema(file)


def count_rows(file: Path) -> int:
    """Rows of a parquet file, from its end alone. Raises DataError for one that is damaged."""
    with _reading(file):
        return pq.read_metadata(file).num_rows


def read_parquet(file: Path, columns: Collection[str] | None = None, *, limit: int | None = None) -> pa.Table:
    """The rows of a parquet file, at most `limit`, of all columns or of those of these that it has. Raises DataError
    for one that is damaged, or too large in memory."""
    with _reading(file):
        most = max(ROOM, MOST_GROWTH * file.stat().st_size)
        opened = pq.ParquetFile(file, memory_map=True)
        schema = opened.schema_arrow
        if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
            raise DataError(f"{file}: two columns have the name {twice[0]!r}; keep one, or rename it")
        wanted = list(schema.names) if columns is None else [n for n in schema.names if n in columns]
        if columns and not wanted:
            raise DataError(
                f"{file}: has none of the columns {', '.join(columns)}; columns: {', '.join(schema.names) or 'none'}"
            )
        # in little memory; to ask a damaged group what it holds would end the process
        opened.scan_contents(wanted)
        empty = schema.empty_table().select(wanted)
        groups = _groups(opened, file, most, wanted, empty.schema, limit)
        table = pa.concat_tables([empty, *groups]).slice(0, limit)
        table.validate(full=True)
    listed = opened.metadata.num_rows
    if table.num_rows != (listed if limit is None else min(limit, listed)):
        raise DataError(
            f"{file}: has {table.num_rows} rows, but its metadata lists {listed}; copy the file again"
        )
    return table


def _groups(
    opened: pq.ParquetFile, file: Path, most: int, wanted: list[str], schema: pa.Schema, limit: int | None
) -> Iterator[pa.Table]:
    """As many as have `limit` rows."""
    taken = read = 0
    for number in range(opened.num_row_groups):
        if limit is not None and read >= limit:
            return
        group = opened.metadata.row_group(number)
        paths = [opened.schema.column(n).path for n in range(group.num_columns)]
        places = [n for n, path in enumerate(paths) if _is_in(path, wanted)]
        columns = [group.column(n) for n in places]
        _check(taken + sum(map(_least, columns, map(opened.schema.column, places))), file, most)
        rows = max(1, min(MOST_ROWS, most // (4 * max(map(_widest, columns), default=1))))
        batches: list[pa.RecordBatch] = []
        for batch in opened.iter_batches(rows, row_groups=[number], columns=wanted):
            taken += batch.nbytes
            _check(taken, file, most)
            _check_rows(batch, sum(b.num_rows for b in batches), file, number)
            batches.append(batch)
        read += sum(b.num_rows for b in batches)
        yield pa.Table.from_batches(batches, schema=schema).combine_chunks()


def _is_in(path: str, columns: Collection[str]) -> bool:
    """Whether what lies at a path may be a part of one of these columns, whose own names may have dots, too."""
    return any(path == name or path.startswith(f"{name}.") for name in columns)


def _check_rows(batch: pa.RecordBatch, before: int, file: Path, group: int) -> None:
    """In Python a row takes many times what it takes in Arrow. Halves are looked at only where there is so much."""
    if sum(map(decoded_bytes, batch.columns)) <= MOST_ROW_BYTES:
        return
    if len(batch) == 1:
        raise DataError(
            f"{file}, row {before + 1} of row group {group}: has more than {MOST_ROW_BYTES // MIB} MiB; is it a single "
            "row?"
        )
    half = len(batch) // 2
    _check_rows(batch.slice(0, half), before, file, group)
    _check_rows(batch.slice(half), before + half, file, group)


def _widest(chunk: pq.ColumnChunkMetaData) -> int:
    """Bytes that a value may have. Each is written once at least, and writers repeat none of more than a MiB; but what
    is packed so well that it must be repetition may all be one value."""
    size = max(1, chunk.total_uncompressed_size)
    return size if size > 64 * chunk.total_compressed_size else max(size // 64, min(size, MIB))


def _least(chunk: pq.ColumnChunkMetaData, column: pq.ColumnSchema) -> int:
    """Bytes that a column of a row group takes at least. Lists in a row are read with it, however many they hold."""
    return max(chunk.total_uncompressed_size, 4 * chunk.num_values if column.max_repetition_level else 0)


def _check(size: int, file: Path, most: int) -> None:
    if size > most:
        raise DataError(
            f"{file}: its rows take more than {most // MIB} MiB in memory, {most // max(1, file.stat().st_size)} times "
            "the file; it is damaged or malicious. If the file is correct, write it as several files"
        )
