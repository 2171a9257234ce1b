"""A reward of the tests: the share of the letter a in a reply."""

from __future__ import annotations

from whet.types import Task


def share_of_a(response: str, task: Task) -> float:
    return response.count("a") / max(len(response), 1)
