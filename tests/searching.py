"""Looks for texts in files of every format that a run writes, whatever way they are encoded."""

from __future__ import annotations

import base64
import gzip
import io
import re
import sqlite3
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

import pyarrow as pa
import pyarrow.parquet as pq


def needles(secret: str) -> set[bytes]:
    """The secret, for a URL, in base64 at each of the three places where it may begin, in hex, backwards."""
    raw = secret.encode()
    found = {raw, raw[::-1], raw.hex().encode(), quote(secret, safe="").encode(), quote_plus(secret).encode()}
    for before in range(3):
        whole = base64.b64encode(b"\0" * before + raw)
        found.add(whole[(before * 4 + 2) // 3 + (before > 0) : (len(raw) + before) // 3 * 4])
    return {needle for needle in found if len(needle) >= 6}


def contents(name: str, data: bytes) -> Iterator[bytes]:
    """The bytes as they are, then what they hold as a table, a database, an archive or a picture."""
    yield data
    if data[:4] == b"PAR1":
        yield from _table(pq.read_table(io.BytesIO(data)))
        yield str(pq.read_metadata(io.BytesIO(data)).metadata).encode()
    elif data[:2] == b"\x1f\x8b":
        yield from contents(name.removesuffix(".gz"), gzip.decompress(data))
    elif data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for inner in archive.namelist():
                yield inner.encode()
                yield from contents(inner, archive.read(inner))
    elif data[:8] == b"\x89PNG\r\n\x1a\n":
        yield from _chunks(data)
    elif data[:15] == b"SQLite format 3":
        yield from _database(data)
    elif data[:4] == b"\xff\xff\xff\xff" or data[:6] == b"ARROW1":
        reader = pa.ipc.open_file if data[:6] == b"ARROW1" else pa.ipc.open_stream
        yield from _table(reader(io.BytesIO(data)).read_all())


def _table(table: pa.Table) -> Iterator[bytes]:
    yield str(table.schema).encode()
    for row in table.to_pylist():
        for value in row.values():
            yield value if isinstance(value, bytes) else str(value).encode()


def _database(data: bytes) -> Iterator[bytes]:
    db = sqlite3.connect(":memory:")
    db.deserialize(data.replace(b"\x02\x02", b"\x01\x01", 1) if data[18:20] == b"\x02\x02" else data)
    for (table,) in db.execute("select name from sqlite_master where type = 'table'").fetchall():
        for row in db.execute(f'select * from "{table}"'):
            for value in row:
                yield from contents(table, value) if isinstance(value, bytes) else [str(value).encode()]


def _chunks(data: bytes) -> Iterator[bytes]:
    at = 8
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        if kind == b"zTXt":
            yield zlib.decompress(body.split(b"\0", 1)[1][1:])
        if kind == b"iTXt" and (m := re.match(rb"[^\0]*\0\x01\0[^\0]*\0[^\0]*\0", body)):
            yield zlib.decompress(body[m.end() :])
        at += size + 12


def seen(places: Mapping[str, bytes], secrets: Mapping[str, str]) -> list[tuple[str, str]]:
    """(place, secret's name) of everything that was found."""
    wanted = {needle: name for name, secret in secrets.items() for needle in needles(secret)}
    pattern = re.compile(b"|".join(re.escape(needle) for needle in wanted))
    return sorted(
        {
            (place, wanted[m[0]])
            for place, data in places.items()
            for content in (place.encode(), *contents(place, data))
            for m in pattern.finditer(content)
        }
    )


def files(*folders: Path) -> dict[str, bytes]:
    """All files below these folders, SQLite's as they are once their journals are in them."""
    found = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in found:
        if path.read_bytes()[:15] == b"SQLite format 3":
            with sqlite3.connect(path) as db:
                db.execute("pragma wal_checkpoint(truncate)")
    return {str(path): path.read_bytes() for path in found if path.exists()}
