"""Mathematical equality, by math-verify and sympy. Imported only where rewards run."""

from __future__ import annotations

import re
from typing import Any

from math_verify import parse, verify

from whet.rewards.builtin import Verdict, reference, verdict
from whet.types import Task


def math(response: str, task: Task, *, boxed: bool = False) -> Verdict:
    r"""1 if the reply's result equals the answer: the last \boxed{}, or else what reads as a result.

    `boxed`: only \boxed{} counts. Time is bounded by the jail alone: math-verify's own time-outs work by
    SIGALRM, which code in C does not notice.
    """
    answer = str(reference(task))
    want = parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not want:
        raise ValueError(f"the answer of task {task.uid} cannot be parsed as mathematics: {answer[:60]!r}")
    at = response.rfind("\\boxed")
    said: str | None = response[at:] if at >= 0 else response
    if boxed and (said := _last_box(response)) is None:
        return verdict(False, None)
    got = parse(said, parsing_timeout=None)
    return verdict(bool(verify(want, got, timeout_seconds=None)), _text(got))


def _last_box(response: str) -> str | None:
    r"""The last \boxed{} with what is in it, and nothing behind it; None if it has no braces, or they do not close."""
    _, found, rest = response.rpartition("\\boxed")
    rest = rest.lstrip()
    depth = 0
    for mark in re.finditer(r"\\.|[{}]", rest, re.DOTALL) if found and rest.startswith("{") else ():
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return found + rest[: mark.end()]
    return None


def _text(got: list[Any]) -> str | None:
    """The parsed result as text, for voting; as it was written if it is a number of thousands of digits."""
    if not got:
        return None
    try:
        return str(got[0])
    except ValueError:  # Python's limit on the digits of an int made text
        return str(got[-1])
