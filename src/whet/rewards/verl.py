"""The rewards that verl picks by the data source of a row (its `default_compute_score`), where whet has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import PositiveInt

from whet.rewards.answer_line import signed
from whet.rewards.builtin import Verdict
from whet.rewards.gsm8k import gsm8k
from whet.rewards.math import math
from whet.types import Task

_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_LAST_CHARACTERS = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def compute_score(
    response: str,
    task: Task,
    *,
    gsm8k_found: Literal["first", "last"] = "last",
    gsm8k_characters: PositiveInt | None = 300,
    elsewhere: Sequence[str] = (),
) -> Verdict:
    r"""1 or 0 for a right or wrong reply, by `task.source`; -1 in place of 0 for math_dapo and aime.

    openai/gsm8k: the number after '#### ', see `gsm8k.gsm8k` (the defaults are verl's from 0.5.0 on). The MATH
    sets: the last \boxed{}. math_dapo, aime: what follows the last 'Answer:' in the last 300 characters, upper and
    lower case alike. `elsewhere`: sources that another reward scores, 0 here. ValueError for any other source.
    """
    source = task.source
    if source in elsewhere:
        return {"score": 0.0}
    if source == "openai/gsm8k":
        return gsm8k(response, task, found=gsm8k_found, last_characters=gsm8k_characters)
    if source in _MATH:
        return math(response, task, boxed=True)
    if source == "math_dapo" or source.startswith("aime"):
        return _after_answer(response, task)
    known = ", ".join(("openai/gsm8k", *_MATH, "math_dapo", "aime*"))
    raise ValueError(
        f"no rule for data source {source!r} (known: {known}); give a function: custom_reward_function.path; "
        "programs: reward_model.sandbox_fusion.url, or on this machine whet.rewards.code.function=code"
    )


def _after_answer(response: str, task: Task) -> Verdict:
    """DAPO's verifier: a wrong answer costs 1."""
    found = _ANSWER.findall(response[-_LAST_CHARACTERS:])
    if not found:
        return {"score": -1.0}
    return signed(found[-1].strip(" $."), task)
