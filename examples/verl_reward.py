"""A reward with verl's signature."""

from __future__ import annotations


def spelled(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """1 if the reply is the word spelled backwards."""
    return float(solution_str.strip() == ground_truth)
