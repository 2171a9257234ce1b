"""A process that explores for a trainer elsewhere, as `whet train FILE mode=explore` does; started over a line."""

from __future__ import annotations

import pickle
import sys
from multiprocessing.connection import Connection

from whet.api import run_training
from whet.guard.line import picked_up
from whet.types import WhetError


def serve(connection: Connection) -> None:
    """Hears its config, as it was loaded; explores; says ("done", None) or ("failed", why)."""
    try:
        loaded = pickle.loads(connection.recv_bytes())
    except EOFError:
        return
    try:
        run_training(loaded)
        said: tuple[str, str | None] = ("done", None)
    except WhetError as error:
        said = ("failed", str(error))
    try:
        connection.send_bytes(pickle.dumps(said))
        connection.poll(None)  # until it has been heard
    except (EOFError, OSError):
        pass  # nobody asks any more


if __name__ == "__main__":
    serve(picked_up(sys.argv[1:]))
