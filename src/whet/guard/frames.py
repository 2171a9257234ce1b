"""Messages of the jail on a byte stream: number, length, body. No body is ever a pickle."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_HEAD = struct.Struct("!QI")
HEAD_BYTES = _HEAD.size
MAX_CALL_BYTES = 64 * 2**20
"""Longest arguments of one call."""
MAX_REPLY_BYTES = 2**20
"""Longest reply of a worker, without what it printed."""
READ_BYTES = 2**16
"""Longest read of a channel. malloc asks the system for a larger buffer each time: 20 us more a read (Zen 3)."""


def pack(number: int, body: bytes) -> bytes:
    """One message."""
    return _HEAD.pack(number, len(body)) + body


def unpack(buffer: bytearray, limit: int) -> Iterator[tuple[int, bytes]]:
    """Take all whole messages off the front of `buffer`. ValueError on one longer than `limit` bytes, after those
    before it."""
    at = 0
    try:
        while len(buffer) - at >= HEAD_BYTES:
            number, length = _HEAD.unpack_from(buffer, at)
            if length > limit:
                raise ValueError(f"a message of {length} bytes, at most {limit} are allowed")
            end = at + HEAD_BYTES + length
            if len(buffer) < end:
                break
            body = bytes(buffer[at + HEAD_BYTES : end])
            at = end
            yield number, body
    finally:
        del buffer[:at]


def receive(channel: socket.socket) -> tuple[int, bytes]:
    """Wait for one message, and read no byte more. EOFError when the other side is gone."""
    number, length = _HEAD.unpack(_exactly(channel, HEAD_BYTES))
    return number, _exactly(channel, length)


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = channel.recv(min(count - len(data), READ_BYTES))
        if not piece:
            raise EOFError("the other side of the channel was closed")
        data += piece
    return bytes(data)
