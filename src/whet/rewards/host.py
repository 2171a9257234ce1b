"""A process that scores rollouts for another one: it has its own jail and gets calls over a line (`guard.line`).

It gets the arguments of `Jail` once, then calls, which it may answer in any order.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from whet.guard import pulse
from whet.guard.jail import Jail, JailBroken, RewardCall
from whet.guard.line import messages
from whet.guard.nursery import Loader
from whet.types import ConfigError, WhetError

MODULE = "whet.rewards.host"
BEAT_S = 1.0
"""Seconds between two heartbeats."""


@dataclass(frozen=True)
class Wanted:
    """What the jail is made with."""

    functions: Mapping[str, Loader]
    options: Mapping[str, Any]


def serve(connection: Connection) -> None:
    """Says ("ready", None), or ("refused", why); then ("beat", None) by the clock, ("scored", None) as it gets on,
    ("done", (number, results)) and ("failed", (number, why)), to what it hears: (number, calls)."""
    try:
        wanted: Wanted = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return  # nobody asks any more
    try:
        jail = Jail(wanted.functions, **wanted.options)
    except (ConfigError, OSError) as error:  # it forks, for which there may be no memory
        _say(connection, "refused", str(error))
        with suppress(OSError):
            connection.poll(None)  # until it has been heard
        return
    with jail, pulse.heard_by(lambda what: _say(connection, "scored", None)):
        _say(connection, "ready", None)
        asyncio.run(_answer(jail, connection))


async def _answer(jail: Jail, connection: Connection) -> None:
    beating = asyncio.create_task(_beat(connection))
    judging: set[asyncio.Task[None]] = set()
    try:
        async for message in messages(connection):
            number, calls = pickle.loads(message)
            task = asyncio.create_task(_judge(jail, connection, number, calls))
            judging.add(task)
            task.add_done_callback(judging.discard)
    finally:
        for running in (beating, *judging):
            running.cancel()


async def _judge(jail: Jail, connection: Connection, number: int, calls: Sequence[RewardCall]) -> None:
    try:
        _say(connection, "done", (number, await jail.call_many(calls)))
    except (WhetError, OSError) as error:
        _say(connection, "failed", (number, str(error), isinstance(error, JailBroken)))


async def _beat(connection: Connection) -> None:
    while True:
        _say(connection, "beat", None)
        await asyncio.sleep(BEAT_S)


def _say(connection: Connection, kind: str, what: object) -> None:
    with suppress(OSError):  # nobody asks any more: who hears the connection ends by that
        connection.send_bytes(pickle.dumps((kind, what), protocol=5))
