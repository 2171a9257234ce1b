"""The table of transports that `sync.method` can name. A new transport needs only a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from whet.sync.collective import Collective
from whet.sync.files import Files
from whet.sync.ipc import by_handle
from whet.sync.parcels import in_memory, in_store
from whet.sync.transport import Transport

TRANSPORTS: Mapping[str, Callable[..., Transport]] = {
    "memory": in_memory,
    "files": Files,
    "collective": Collective,
    "ipc": by_handle,
    "object_store": in_store,
}
"""What each needs beside `timeout_s`: files its folder, collective the receivers' names and a rank, object_store a pair
of put and get; memory, ipc and object_store go by letter (`Parcels.letter`, `Parcels.accept`) between processes."""
