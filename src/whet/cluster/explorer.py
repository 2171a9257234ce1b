"""An explorer process for a trainer in another process, with the work of `whet train FILE mode=explore`; started over a
line."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from whet.api import run_training
from whet.guard.watch import START, Watch
from whet.types import WhetError

BEAT_S = 2.0
"""Between two signs of life."""


def serve(connection: Connection, explore: Callable[..., object] = run_training) -> None:
    """Hears its config, as it was loaded; explores; says ("done", None) or ("failed", why). Meanwhile ("beat", (what it
    does, for how many seconds by now)), from a thread of its own: that comes as long as the process is there."""
    try:
        loaded = pickle.loads(connection.recv_bytes())
    except EOFError:
        return
    watches: list[Watch] = []
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(connection, watches, over), name="whet-pulse", daemon=True)
    beating.start()
    try:
        explore(loaded, watched=watches.append)
        said: tuple[str, str | None] = ("done", None)
    except WhetError as error:
        said = ("failed", str(error))
    over.set()
    beating.join()
    with suppress(EOFError, OSError):  # nobody asks any more
        connection.send_bytes(pickle.dumps(said))
        connection.poll(None)  # until it has been heard


def _beat(connection: Connection, watches: list[Watch], over: threading.Event) -> None:
    with suppress(OSError):  # nobody asks any more
        while not over.wait(BEAT_S):
            now = watches[0].last() if watches else (START, 0.0)
            connection.send_bytes(pickle.dumps(("beat", now)))
