"""Arrow streams of the `datasets` package, which maps them into memory: a compressed one it would write out whole.

A few hundred kB that are compressed can stand for gigabytes. The package itself compresses nothing.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa

from whet.inputs import check_regular, read_json_object
from whet.types import DataError

_HEADER_TYPE, _HEADER = 1, 2
"""Fields of a message."""
_DICTIONARY_BATCH, _DATA = 2, 1
"""Type of a header, and its field that holds a batch."""
_RECORD_BATCH, _COMPRESSION = 3, 3
"""Type of a header, and its field that says how buffers are compressed."""


def check_streams(folder: Path) -> None:
    """DataError where an Arrow stream that a folder names is damaged, compressed, or elsewhere."""
    named = read_json_object(folder / "state.json", DataError).get("_data_files")
    several = named if isinstance(named, list) else [named]
    names = [each.get("filename") if isinstance(each, dict) else None for each in several]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError(
                f"{folder}/state.json: _data_files has {name!r}; expected names of files in that folder"
            )
        file = folder / name
        check_regular(file, DataError)
        try:
            with pa.memory_map(str(file)) as mapped:
                compressed = any(
                    _is_compressed(message.metadata.to_pybytes())
                    for message in pa.ipc.MessageReader.open_stream(mapped)
                )
        except (pa.ArrowException, OSError, struct.error) as e:
            raise DataError(f"{file}: not a readable Arrow stream: {e}") from e
        if compressed:
            raise DataError(
                f"{file}: its columns are compressed, so a small file could fill the memory; save it again with the "
                "`datasets` package (save_to_disk), which compresses nothing, or as parquet"
            )


def _is_compressed(message: bytes) -> bool:
    """Whether a message has a batch with compressed buffers. message: its metadata (Message.fbs, a flatbuffer)."""
    root = struct.unpack_from("<I", message)[0]
    if not (place := _field(message, root, _HEADER_TYPE)):
        return False
    kind, header = message[place], _table(message, root, _HEADER)
    if kind == _DICTIONARY_BATCH and header:
        kind, header = _RECORD_BATCH, _table(message, header, _DATA)
    return kind == _RECORD_BATCH and bool(header) and bool(_field(message, header, _COMPRESSION))


def _field(message: bytes, table: int, number: int) -> int:
    """Where a field of a table lies; 0: it has none."""
    fields = table - struct.unpack_from("<i", message, table)[0]
    at = 4 + 2 * number
    if at >= struct.unpack_from("<H", message, fields)[0]:
        return 0
    offset = struct.unpack_from("<H", message, fields + at)[0]
    return table + offset if offset else 0


def _table(message: bytes, table: int, number: int) -> int:
    """Where a table lies that is a field of another; 0: there is none."""
    place = _field(message, table, number)
    return place + struct.unpack_from("<I", message, place)[0] if place else 0
