"""Reward on replies that end with a line 'Answer: ...'."""

from __future__ import annotations

from whet.rewards.builtin import Verdict
from whet.rewards.math import math
from whet.types import Task


def direct_math(response: str, task: Task) -> Verdict:
    """1 if what follows the reply's last 'Answer:', on the same line, equals the task's answer, else -1."""
    line = response.rpartition("Answer:")[2].partition("\n")[0].strip(" $.")
    if "Answer:" not in response or not line:
        return {"score": -1.0}
    judged = math(f"\\boxed{{{line}}}", task)
    return judged | {"score": 2.0 * float(judged["score"]) - 1.0}
