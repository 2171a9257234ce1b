"""A store's log in PostgreSQL. Only this module imports psycopg."""

from __future__ import annotations

from whet.buffer.sql import BUSY_S, TABLES, Connection, Database, SqlLog
from whet.config.secrets import masked_url
from whet.types import ConfigError

_MAKING_TABLES = 0x77686574
"""Key of the lock under which tables are made: two at once fail in PostgreSQL."""

_CUT_OFF = f"""
select set_config('idle_in_transaction_session_timeout', '{BUSY_S // 2}s', false)
where current_setting('idle_in_transaction_session_timeout') = '0'
"""
"""A turn takes milliseconds. One whose process is cut off would hold the queue until the server's own TCP gives it up,
after hours; the URL's `options` may say otherwise."""

_DEFAULTS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""Of libpq: a server that is gone is noticed within half a minute. The URL may say otherwise."""


def postgres_log(url: str, *, queue: str) -> SqlLog:
    """A queue in a PostgreSQL database. libpq finds the password in PGPASSWORD or ~/.pgpass."""
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as e:
        raise ConfigError(f"buffer.url={masked_url(url)!r} needs psycopg: pip install 'whet[sql]'") from e

    def connect() -> Connection:
        db: psycopg.Connection = psycopg.connect(
            **{**_DEFAULTS, **conninfo_to_dict(url)},  # type: ignore[arg-type]
            autocommit=True,  # transactions are begun and ended by name
            prepare_threshold=None,  # a pooler in between may not know prepared statements
        )
        try:
            db.execute(f"set lock_timeout = '{BUSY_S}s'")
            db.execute(_CUT_OFF)
            db.execute("begin")
            db.execute(f"select pg_advisory_xact_lock({_MAKING_TABLES})")
            for table in TABLES:
                db.execute(table.format(blob="bytea"))
            db.execute("commit")
        except BaseException:
            db.close()
            raise
        return db  # type: ignore[return-value]

    return SqlLog(
        Database(
            where=f"the store {masked_url(url)}",
            connect=connect,
            begin="begin",
            lock=" for update",
            mark="%s",
            errors=psycopg.Error,
            advice=_advice,
        ),
        queue=queue,
    )


def _advice(error: Exception) -> str:
    text = " ".join(str(error).split())
    known = {
        "password": "the server rejects the password; set PGPASSWORD or ~/.pgpass, or correct the user in buffer.url",
        "does not exist": "the user, database or table does not exist; create it, or correct buffer.url",
        "permission denied": "the user lacks the permission; grant it, or give buffer.url another user",
        "No space left": "the server's disk is full; free space there and resume",
        "lock timeout": f"another process has held the queue's lock for {BUSY_S} s: find and end it",
        "too many clients": "all connections of the server are in use; close some, or raise its max_connections",
        "connection": "the server cannot be reached; start it, or correct host and port in buffer.url",
        "server closed": "the server closed the connection; start the server again and resume",
    }
    unknown = "the server reports an error; check buffer.url"
    advice = next((words for part, words in known.items() if part in text), unknown)
    return f"{advice} ({text})"
