"""A store's log in a database: the same SQL for SQLite and PostgreSQL. A turn is a transaction.

whet_queues   one row a queue: number of the last command, the snapshot and the command it stands after
whet_log      the commands since the snapshot, as JSON
whet_groups   the groups, as Arrow IPC streams
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from whet.buffer.logs import LogTail, Transaction
from whet.types import Json, WhetError

BUSY_S = 60
"""Seconds to wait for another process's turn; a turn takes milliseconds."""


class Connection(Protocol):
    """What sqlite3 and psycopg have in common. It commits nothing by itself."""

    def execute(self, query: str, params: Any = ..., /) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Database:
    """What differs between two databases."""

    where: str
    connect: Callable[[], Connection]
    begin: str
    lock: str
    """Ends the query that begins a turn, where `begin` does not yet keep others out."""
    mark: str
    """Placeholder of a parameter."""
    errors: type[Exception]
    advice: Callable[[Exception], str]
    """An error in words: the cause, what to do."""


TABLES = (
    "create table if not exists whet_queues (queue text primary key, newest bigint, at bigint, state text)",
    "create table if not exists whet_log (queue text, number bigint, command text, primary key (queue, number))",
    "create table if not exists whet_groups (queue text, uid bigint, data {blob}, primary key (queue, uid))",
)


MOST_COMMANDS = 2**62
"""In a queue: what lies above is damage."""
FOREIGN = "select name from sqlite_master where type in ('trigger', 'view') or sql like 'create virtual%'"
"""What a store has none of: code in a file from elsewhere, which may compute without end."""


class SqlLog:
    """One queue in a database. After an error the connection is made anew."""

    def __init__(self, database: Database, *, queue: str) -> None:
        self.where = database.where
        self.base, self._queue = database, queue
        self.db: Connection | None = None
        """Opened with the first turn, and anew after an error."""

    @contextmanager
    def turn(self) -> Iterator[Transaction]:
        try:
            if self.db is None:
                self.db = self.base.connect()
            self.db.execute(self.base.begin)
            yield _SqlTurn(self.db, self.base, self._queue)
            self.db.execute("commit")
        except BaseException as e:
            self.close()
            if isinstance(e, self.base.errors):
                raise WhetError(f"{self.where}: {self.base.advice(e)}") from e
            raise

    def close(self) -> None:
        """Closing undoes a transaction that was not committed."""
        db, self.db = self.db, None
        if db is not None:
            db.close()


class _SqlTurn:
    def __init__(self, db: Connection, base: Database, queue: str) -> None:
        self._db, self._mark, self._queue = db, base.mark, queue
        query = f"select newest, at from whet_queues where queue = ?{base.lock}"
        row = self._sql(query, queue).fetchone()
        if row is None:
            self._sql("insert into whet_queues values (?, 0, 0, null) on conflict do nothing", queue)
            row = self._sql(query, queue).fetchone()
        if not all(isinstance(number, int) and 0 <= number < MOST_COMMANDS for number in row):
            raise WhetError(
                f"{base.where} is damaged: its queue is at {row[0]!r:.40} and {row[1]!r:.40}, expected whole numbers; "
                "restart with an empty store from the last checkpoint"
            )
        self.newest, self._at = row

    def _sql(self, query: str, *params: Any) -> Any:
        return self._db.execute(query.replace("?", self._mark), params)

    def news(self, seen: int) -> LogTail:
        snapshot = None
        if seen < self._at:
            text = self._sql("select state from whet_queues where queue = ?", self._queue).fetchone()[0]
            snapshot, seen = json.loads(text), self._at
        query = "select command from whet_log where queue = ? and number > ? order by number"
        commands = [json.loads(text) for (text,) in self._sql(query, self._queue, seen)]
        return LogTail(snapshot, commands)

    def append(self, command: Json) -> None:
        self.newest += 1
        self._sql("insert into whet_log values (?, ?, ?)", self._queue, self.newest, json.dumps(command))
        self._sql("update whet_queues set newest = ? where queue = ?", self.newest, self._queue)

    def snapshot(self, state: Json) -> None:
        self.newest += 1
        self._at = self.newest
        query = "update whet_queues set newest = ?, at = ?, state = ? where queue = ?"
        self._sql(query, self.newest, self._at, json.dumps(state), self._queue)
        self._sql("delete from whet_log where queue = ?", self._queue)

    def keep(self, uid: int, data: bytes) -> None:
        query = "insert into whet_groups values (?, ?, ?) on conflict (queue, uid) do update set data = excluded.data"
        self._sql(query, self._queue, uid, data)

    def fetch(self, uids: list[int]) -> list[bytes | None]:
        query = "select data from whet_groups where queue = ? and uid = ?"
        rows = [self._sql(query, self._queue, uid).fetchone() for uid in uids]
        return [
            (bytes(row[0]) if isinstance(row[0], bytes | memoryview) else b"") if row else None
            for row in rows
        ]

    def drop(self, uids: list[int]) -> None:
        for uid in uids:
            self._sql("delete from whet_groups where queue = ? and uid = ?", self._queue, uid)


def sqlite_log(path: Path, *, queue: str) -> SqlLog:
    """A queue in an SQLite file. For processes of one machine: WAL needs shared memory."""

    def connect() -> Connection:
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            if (row := db.execute(FOREIGN).fetchone()) is not None:
                raise WhetError(
                    f"the store sqlite:///{path} has a trigger, a view or a virtual table ({row[0]!r:.60}), which whet "
                    "does not make; give buffer.url another path"
                )
            db.execute("pragma journal_mode = wal")
            db.execute(
                "pragma synchronous = full"
            )  # a power cut must not take back what a checkpoint counts on
            for table in TABLES:
                db.execute(table.format(blob="blob"))
        except BaseException:
            db.close()
            raise
        return db

    return SqlLog(
        Database(
            where=f"the store sqlite:///{path}",
            connect=connect,
            begin="begin immediate",
            lock="",
            mark="?",
            errors=sqlite3.Error,
            advice=_sqlite_advice,
        ),
        queue=queue,
    )


def _sqlite_advice(error: Exception) -> str:
    text = str(error)
    known = {
        "unable to open": "cannot be opened; give buffer.url a path in a folder that exists and can be written",
        "readonly": "cannot be written; correct its owner and mode, or give buffer.url another path",
        "disk is full": "the disk is full; free space there and resume",
        "disk I/O": "the device reports an input/output error; check the disk",
        "locked": f"another process has held the lock for {BUSY_S} s: find and end it (a stopped one holds its lock)",
        "not a database": "is not an SQLite database; give buffer.url another path",
        "malformed": "is damaged; restart with an empty store from the last checkpoint",
        "no column": "has other columns, from another release of whet; give buffer.url another path",
    }
    advice = next((words for part, words in known.items() if part in text), "give buffer.url another path")
    return f"{advice} ({text})"
