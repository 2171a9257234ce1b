"""A reward for trial runs on made-up rows, where no reply is right or wrong."""

from __future__ import annotations

import zlib


def coin(response: str) -> float:
    """0 or 1, by the reply's text alone: rollouts of a group differ, so a step has a gradient."""
    return float(zlib.crc32(response.encode(errors="replace")) & 1)
