"""Which addresses processes listen on."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable

import psutil

Listening = tuple[str, str, int]
"""(process, address, port)"""


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


def listening(processes: Iterable[psutil.Process]) -> list[Listening]:
    """Every TCP socket that waits for connections, and every UDP one, of these processes."""
    found = []
    for process in processes:
        for c in process.net_connections("inet"):
            if c.status == psutil.CONN_LISTEN or (c.type.name == "SOCK_DGRAM" and not c.raddr):
                found.append((f"{process.name()} {process.pid}", c.laddr.ip, c.laddr.port))
    return found


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def own() -> list[Listening]:
    return listening(family(os.getpid()))
