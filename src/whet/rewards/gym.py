"""The verifiers of reasoning-gym. Imported only where rewards run."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import reasoning_gym as gym

from whet.rewards.builtin import Verdict, verdict
from whet.types import Task


def reasoning_gym(response: str, task: Task, *, exact: bool = True, pattern: str | None = None) -> Verdict:
    """The score that the task's own verifier gives the reply; the task's row is `task.extra["entry"]`.

    `exact`: a score of exactly 1 counts as 1, all else as 0, because some verifiers pay nearly 1 for wrong
    replies (spell_backward: the right letters with more behind them). `pattern`: a regular expression whose
    first group, at its last match, is the answer; without a match the reply holds none. Default: the whole
    reply.
    """
    entry = task.extra.get("entry")
    if not isinstance(entry, dict):
        raise ValueError(
            f"task {task.uid} of {task.source!r} is not from reasoning-gym: it has no extra['entry']"
        )
    found = [response] if pattern is None else [m.group(1) for m in re.finditer(pattern, response, re.DOTALL)]
    answer = found[-1].strip() if found else None
    score = _verifier(entry["metadata"]["source_dataset"])(answer, entry)
    return {**verdict(score == 1.0, answer), **({} if exact else {"score": float(score)})}


@cache
def _verifier(name: str) -> Callable[[str | None, dict[str, Any]], float]:
    return gym.get_score_answer_fn(name)
