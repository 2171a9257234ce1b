"""A broadcast whose bytes come from the policy's own process: the driver keeps the store and says who takes part.

Ranks have written the version into a folder of this machine. One of them maps its files and is rank 0 of the group, so
that no byte of the weights goes through the driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from whet.guard import pulse
from whet.sync.collective import Collective
from whet.sync.exchange import Policy
from whet.sync.files import Files
from whet.sync.manifest import Held, Manifest, Tensors
from whet.types import WhetError

BEAT_S = 1.0
"""A broadcast has a deadline of its own: while it runs, the process that sends is not silent."""


@dataclass(frozen=True)
class RootSeat:
    """Rank 0 of one group."""

    receivers: tuple[str, ...]
    host: str
    port: int
    device: str


@dataclass(frozen=True)
class SendOutcome:
    """What came of one send."""

    manifest: Manifest | None
    failed: str = ""
    missing: tuple[int, ...] = ()
    """Ranks that did not come, where that is why."""


class Relay:
    """The driver's end as a `Sender`: `end` has the store and never joins the group."""

    def __init__(self, end: Collective, policy: Policy, folder: Path) -> None:
        """folder: where the policy's processes write their versions, as `Files` does."""
        self.end, self.policy, self.folder = end, policy, folder

    def send(self, version: int, tensors: Tensors, *, held: Held | None = None) -> Manifest:
        """See `Sender`. tensors: those of the folder; they are not looked at here."""
        end = self.end
        place = RootSeat(tuple(end.names[1:]), end.host, end.port, end.device.type)
        sent = self.policy.call(
            partial(_sent, place, self.folder, version, timeout_s=end.timeout_s, held=held)
        )
        if sent.manifest is None:
            end.broken, end.missing = sent.failed, sent.missing
            raise WhetError(sent.failed)
        return sent.manifest


@lru_cache(maxsize=1)
def _end(place: RootSeat) -> Collective:
    """Of this process; the group of the version before serves the next one."""
    return Collective(
        place.receivers,
        rank=0,
        port=place.port,
        host=place.host,
        serves=False,
        device=place.device,
    )


def _sent(place: RootSeat, folder: Path, version: int, *, timeout_s: float, held: Held | None) -> SendOutcome:
    """Called in the policy's process. A failure is an answer: receivers that end are no fault of the ranks."""
    on = (torch.cuda.set_device, (torch.cuda.current_device(),)) if place.device == "cuda" else (None, ())
    with ThreadPoolExecutor(1, "whet-broadcast", *on) as pool:  # the current GPU is a thread's own
        sending = pool.submit(_send, place, folder, version, timeout_s=timeout_s, held=held)
        while not wait_for([sending], timeout=BEAT_S).done:
            pulse.beat(f"the broadcast of weights version {version}")
        return sending.result()


def _send(place: RootSeat, folder: Path, version: int, *, timeout_s: float, held: Held | None) -> SendOutcome:
    end: Collective | None = None
    try:
        end = _end(place)
        end.timeout_s = timeout_s
        return SendOutcome(end.send(version, _read(folder, version), held=held))
    except WhetError as error:
        _end.cache_clear()
        return SendOutcome(None, str(error), tuple(end.missing) if end is not None else ())


def _read(folder: Path, version: int) -> Iterator[tuple[str, Tensor]]:
    for entry, tensor in Files(folder).receive(version):
        assert tensor is not None, "it is read whole"
        yield entry.name, tensor
