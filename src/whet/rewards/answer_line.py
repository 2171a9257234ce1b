"""Reward on replies that end with a line 'Answer: ...'."""

from __future__ import annotations

import re

from whet.rewards.builtin import Verdict
from whet.rewards.math import math
from whet.types import Task

_LAST_CHARACTERS = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n<]+)", re.IGNORECASE)


def aime(response: str, task: Task) -> Verdict:
    """1 if what follows the last 'Answer:' in the last 300 characters equals the task's answer, else -1.

    The answer ends at the end of the line or at '<'; of an equation it is the right side. Upper and lower case of
    'Answer' are alike.
    """
    found = _ANSWER.findall(response[-_LAST_CHARACTERS:])
    if not found:
        return {"score": -1.0}
    return signed(found[-1].rpartition("=")[2].strip(" $."), task)


def direct_math(response: str, task: Task) -> Verdict:
    """1 if what follows the reply's last 'Answer:', on the same line, equals the task's answer, else -1."""
    line = response.rpartition("Answer:")[2].partition("\n")[0].strip(" $.")
    if "Answer:" not in response or not line:
        return {"score": -1.0}
    return signed(line, task)


def signed(answer: str, task: Task) -> Verdict:
    """1 for an answer that equals the task's, else -1."""
    judged = math(f"\\boxed{{{answer}}}", task)
    return judged | {"score": 2.0 * float(judged["score"]) - 1.0}
