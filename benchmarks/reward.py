"""The reward of the speed cases, the same on both sides: with random weights it still differs in a group."""

from __future__ import annotations


def digits(response: str, task: object = None) -> float:
    """Share of digits among the reply's characters; 0 for an empty reply."""
    return sum(c.isdigit() for c in response) / max(len(response), 1)
