"""Mathematical equality, by math-verify and sympy. Imported only where rewards run."""

from __future__ import annotations

from math_verify import parse, verify

from whet.rewards.builtin import reference
from whet.types import Task


def math(response: str, task: Task, *, boxed: bool = False) -> float:
    r"""1 if the reply's result equals the answer: the last \boxed{}, or else what in the reply reads as a result.

    `boxed`: only \boxed{} counts. Time is bounded by the jail alone: math-verify's own time-outs work by
    SIGALRM, which code in C does not notice.
    """
    answer = str(reference(task))
    want = parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not want:
        raise ValueError(f"the answer of task {task.uid} cannot be read as mathematics: {answer[:60]!r}")
    at = response.rfind("\\boxed")
    if boxed and at < 0:
        return 0.0
    got = parse(response[at:] if at >= 0 else response, parsing_timeout=None)
    return float(verify(want, got, timeout_seconds=None))
