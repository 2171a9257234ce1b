"""A search over documents of a file, by words: an index of SQLite (FTS5), ranked by BM25.

The index is built once and is then only read: its name is the digest of what it was built from, so a changed file gets
another index, and whoever opens one finds all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import tempfile
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from urllib.parse import quote

from pydantic import model_validator

from whet.config.environments import AT
from whet.config.sections.base import Positive, Section
from whet.data.files import read_files
from whet.data.parts import FileRows
from whet.envs.schemas import check_name
from whet.envs.tools import Tool
from whet.guard.temporary import OwnFolder
from whet.inputs import check_regular
from whet.track.files import sync_path
from whet.types import ConfigError, DataError, ToolSpec

FORM = "1"
"""Of an index: part of its digest."""
MOST_TERMS = 64
"""Words of a query that are looked for."""
_BATCH = 4096
"""Documents that are turned into Python at once."""
_WORD = re.compile(r"\w+")


class Documents(Section):
    """What is searched."""

    path: str
    """A .jsonl or .parquet file with a document in each row."""
    text: str = "text"
    """The column with the text, which is searched and shown."""
    title: str = "title"
    """A column with a title, which is searched and shown, too; it may be missing."""
    id: str = "id"
    """A column with a text or number that names the document; where it is missing, the number of the row, from 0."""
    folder: str | None = None
    """Where the index is kept. Default: whet-search in the system's folder for temporary files."""
    name: str = "search"
    """Of the tool."""
    description: str = "Search documents by words. Returns the best matches, best first."
    results: Positive = 3
    """Documents that a search returns where the policy does not say how many."""
    most_results: Positive = 10
    """That it may ask for."""
    document_chars: Positive = 1000
    """Of each document that are shown."""

    @model_validator(mode="after")
    def _can_be(self) -> Documents:
        check_name(self.name)
        if self.results > self.most_results:
            raise ConfigError(
                f"{AT}.search.results={self.results} is more than most_results={self.most_results}"
            )
        if Path(self.path).suffix not in (".jsonl", ".parquet"):
            raise ConfigError(
                f"{AT}.search.path={self.path!r}; expected a file that ends in .jsonl or .parquet"
            )
        return self


def search_tool(documents: Documents) -> Tool:
    """The tool `search(query, k)`."""
    number = {"type": "integer", "minimum": 1, "maximum": documents.most_results}
    k = number | {"description": f"How many documents to return; {documents.results} if not given"}
    query = {"type": "string", "description": "Words to look for"}
    parameters = {"type": "object", "properties": {"query": query, "k": k}, "required": ["query"]}
    return Tool(ToolSpec(documents.name, documents.description, parameters), partial(search_texts, documents))


def search_texts(documents: Documents, query: str, k: int | None = None) -> list[str]:
    """The best documents as the policy is told of them."""
    hits = search(build(documents), query, documents.results if k is None else k)
    if not hits:
        return ["No document has any of these words."]
    most = documents.document_chars
    return [f"[{name}] {title}{': ' if title else ''}{text[:most]}" for name, title, text in hits]


def search(index: Path, query: str, k: int) -> list[tuple[str, str, str]]:
    """(id, title, text) of the k best documents by BM25 that have any of the words; of equal ones, smaller ids first.

    The query is words and nothing else: operators of FTS5 in it are looked for as words.
    """
    terms = dict.fromkeys(word.lower() for word in _WORD.findall(query))
    asked = " OR ".join(f'"{word}"' for word in list(terms)[:MOST_TERMS])
    if not asked:
        return []
    with closing(connect(index)) as connection:
        found = connection.execute(
            "SELECT id, title, text FROM documents WHERE documents MATCH ? ORDER BY bm25(documents), rowid LIMIT ?",
            (asked, k),
        )
        return found.fetchall()


def connect(index: Path) -> sqlite3.Connection:
    """A connection that writes nothing and locks nothing."""
    return sqlite3.connect(f"file:{quote(str(index))}?mode=ro&immutable=1", uri=True)


# ---------------------------------------------------------------- building


@cache
def build(documents: Documents) -> Path:
    """The index of the documents, which is built if it is not there yet. One process looks once.

    DataError for a row without a text, an id that occurs twice, or a file that cannot be read.
    """
    folder = Path(documents.folder or Path(tempfile.gettempdir()) / f"whet-search-{os.getuid()}")
    digest = _digest(documents)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if documents.folder is None and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
            raise DataError(f"{folder} belongs to another user; set rollout.env.arguments.search.folder")
        index = folder / f"{digest}.sqlite"
        return index if index.exists() else _built(index, documents)
    except (OSError, sqlite3.OperationalError) as error:  # sqlite's for a disk that is full, too
        raise DataError(
            f"the index of {documents.path} cannot be written to {folder}: {error}; set "
            "rollout.env.arguments.search.folder to another folder"
        ) from error


def _built(index: Path, documents: Documents) -> Path:
    """Write an index beside its place; then it is renamed."""
    with OwnFolder("index", index.parent) as folder:
        new = folder / index.name
        _write(new, documents)
        sync_path(new)
        os.replace(new, index)
    return index


def _digest(documents: Documents) -> str:
    """Of everything that decides what is in the index."""
    sha = hashlib.sha256(json.dumps([FORM, documents.text, documents.title, documents.id]).encode())
    sha.update(Path(documents.path).suffix.encode())
    path = Path(documents.path)
    try:
        if path.exists():
            check_regular(path, DataError)
        with path.open("rb") as file:
            while block := file.read(2**20):
                sha.update(block)
    except OSError as error:
        raise DataError(f"rollout.env.arguments.search.path: cannot read {documents.path}: {error}") from None
    return sha.hexdigest()[:32]


def _write(path: Path, documents: Documents) -> None:
    """All documents, in the order of their ids: numbers by size, then texts."""
    rows: dict[tuple[int, int | float, str], tuple[str, str, str]] = {}
    found = _rows(documents)
    each = (row for n in range(0, len(found), _BATCH) for row in found.slice(n, n + _BATCH, None))
    for n, row in enumerate(each):
        where = found.where(n)
        name, text, title = (row.get(key) for key in (documents.id, documents.text, documents.title))
        name = n if name is None else name
        if not isinstance(text, str) or not isinstance(title, str | None):
            raise DataError(
                f"{where}: column {documents.text!r} is {type(text).__name__} and {documents.title!r} is "
                f"{type(title).__name__}; expected texts (the second may be missing)"
            )
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise DataError(f"{where}: id is {type(name).__name__}; expected a text or an integer")
        key = (1, 0, name) if isinstance(name, str) else (0, name, "")
        if key in rows:
            raise DataError(f"{where}: the id {name!r} occurs twice")
        rows[key] = (str(name), title or "", text)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE VIRTUAL TABLE documents USING fts5(id UNINDEXED, title, text)")
        connection.executemany(
            "INSERT INTO documents (id, title, text) VALUES (?, ?, ?)", (rows[key] for key in sorted(rows))
        )
        connection.execute("INSERT INTO documents (documents) VALUES ('optimize')")
        connection.commit()


def _rows(documents: Documents) -> FileRows:
    """The file's rows, read within the limits of any data; of parquet no other column is read."""
    path = Path(documents.path)
    if path.suffix == ".jsonl":
        return next(read_files([path], None))
    from whet.data.arrow import arrow_rows  # a search in .jsonl needs no pyarrow
    from whet.data.parquet import read_parquet

    columns = {documents.id, documents.text, documents.title}
    return arrow_rows(str(path), read_parquet(path, columns), None)
