"""The interface of a store's log: commands in one order, and the bytes of groups. Implementations: sql.py, files.py."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from whet.types import Json


class LogTail(NamedTuple):
    """What a log holds after the number that was seen last."""

    snapshot: Json | None
    """What to begin with, where not all commands since that number are kept."""
    commands: list[Json]


class Transaction(Protocol):
    """The log while this process alone may write to it. What a turn wrote counts from its end, whole or not at all."""

    newest: int
    """Number of the last command or snapshot; 0: there is none."""

    def news(self, seen: int) -> LogTail:
        """What came after number `seen`. A new snapshot is news to everybody."""

    def append(self, command: Json) -> None: ...

    def snapshot(self, state: Json) -> None:
        """`state` is what all commands so far lead to; they need not be kept."""

    def keep(self, uid: int, data: bytes) -> None:
        """Keep a group's bytes."""

    def fetch(self, uids: list[int]) -> list[bytes | None]: ...

    def drop(self, uids: list[int]) -> None: ...


class Log(Protocol):
    """Commands in an order that all processes agree on, and the bytes of groups."""

    where: str
    """Its place, for people; no password in it."""

    def turn(self) -> AbstractContextManager[Transaction]:
        """Waits until no other process has its turn. Raises WhetError if that takes a minute, or it can't be used."""

    def close(self) -> None: ...
