"""GSM8K's reward of verl, SkyRL and Cosmos-RL: the number after '#### ', compared as text.

The reward `number` compares values, and takes the last one: 5.0 is 5 there, and not here.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import PositiveInt

from whet.rewards.builtin import Verdict, reference, verdict
from whet.types import Task

_NUMBER = re.compile(r"#### (-?[0-9.,]+)")


def gsm8k(
    response: str,
    task: Task,
    *,
    found: Literal["first", "last"] = "first",
    last_characters: PositiveInt | None = None,
) -> Verdict:
    """1 if the reply's number after '#### ' is the answer, digit by digit; thousands' commas do not count.

    found: which of several. last_characters: only these are looked at. The answer is the number, or a solution with
    '#### ' in it. As verl 0.4.0, SkyRL and Cosmos-RL 0.4.4; verl 0.4.1: `last`; from 0.5.0 on of the last 300
    characters.
    """
    want = str(reference(task))
    expected = _number(want, "first") if "####" in want else want.strip()
    if expected is None:
        raise ValueError(f"the answer of task {task.uid} has no number after '#### ': {want[:60]!r}")
    start = 0 if last_characters is None else max(len(response) - last_characters, 0)
    got = _number(response[start:], found)
    return verdict(got == expected, got)


def _number(text: str, found: Literal["first", "last"]) -> str | None:
    numbers: list[str] = _NUMBER.findall(text)
    return numbers[0 if found == "first" else -1].replace(",", "") if numbers else None
