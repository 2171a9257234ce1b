"""Rewards on replies that mark their answer with <answer> and </answer>."""

from __future__ import annotations

from whet.rewards.builtin import Verdict, reference, verdict
from whet.types import Task


def single_choice(response: str, task: Task) -> Verdict:
    """1 if the reply's answer is the task's, upper and lower case alike.

    The answer is what stands in the first <answer>...</answer>, of the reply and of the task's answer alike; the
    whole text where there is no such element. White space at the ends does not count.
    """
    got, want = answer_in(response).casefold(), answer_in(str(reference(task))).casefold()
    return verdict(got == want, got)


def answer_in(text: str) -> str:
    """What stands in the first <answer> element, or the whole text."""
    inside, end, _ = text.partition("<answer>")[2].partition("</answer>")
    return (inside if end else text).strip()
