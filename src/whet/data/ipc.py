"""Arrow streams of the `datasets` package, which maps them into memory. It would write out whole what is compressed,
and what rows share: an entry of a dictionary, the bytes behind views.

So a few hundred kB can stand for gigabytes. The package itself compresses nothing and has no dictionaries.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa

from whet.inputs import check_regular, read_json_object
from whet.types import DataError

_HEADER_TYPE, _HEADER = 1, 2
"""Fields of a message."""
_RECORD_BATCH, _COMPRESSION = 3, 3
"""Type of a header, and its field that says how buffers are compressed."""


def check_streams(folder: Path) -> None:
    """DataError where an Arrow stream that a folder names is damaged, grows as it is read, or is elsewhere."""
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
                shares = any(_shares(field.type) for field in pa.ipc.open_stream(mapped).schema)
                mapped.seek(0)
                grows = shares or any(
                    _is_compressed(message.metadata.to_pybytes())
                    for message in pa.ipc.MessageReader.open_stream(mapped)
                )
        except (pa.ArrowException, OSError, struct.error) as e:
            raise DataError(f"{file}: not a readable Arrow stream: {e}") from e
        if grows:
            raise DataError(
                f"{file}: its columns are compressed, or their rows share values (dictionaries, views), so a small "
                "file could fill the memory; save it as parquet"
            )


def _shares(kind: pa.DataType) -> bool:
    """Whether values of a type may have their bytes in common."""
    t = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _shares(kind.storage_type)
    views = (t.is_string_view, t.is_binary_view, t.is_list_view, t.is_large_list_view)
    if any(test(kind) for test in (t.is_dictionary, t.is_run_end_encoded, *views)):
        return True
    return any(_shares(kind.field(n).type) for n in range(kind.num_fields))


def _is_compressed(message: bytes) -> bool:
    """Whether a message has a batch with compressed buffers. message: its metadata (Message.fbs, a flatbuffer)."""
    root = struct.unpack_from("<I", message)[0]
    if not (place := _field(message, root, _HEADER_TYPE)):
        return False
    kind, header = message[place], _table(message, root, _HEADER)
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
