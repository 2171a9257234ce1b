"""RLCR: a reply says how sure it is, and is paid for being right and for knowing it (arXiv:2507.16806)."""

from __future__ import annotations

import math as numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.rewards.builtin import Verdict, reference
from whet.rewards.math import math
from whet.tables import near
from whet.types import ConfigError, Task

WEIGHTS = {
    "format": 0.5,
    "accuracy": 0.5,
    "brier": 0.5,
    "mean_confidence": 1e-5,
    "confidence_one_or_zero": 1e-5,
}
"""Of the parts of the score, as in the paper's code."""
_ELEMENTS = ("think", "answer", "analysis", "confidence")
_SURE = 0.01
"""A confidence nearer than this to 0 or 1 is counted as one of them."""


def rlcr(response: str, task: Task, *, weights: Mapping[str, float] | None = None) -> Verdict:
    """The weighted sum of five parts, y = 1 if the result is right, else 0, and q the confidence that the reply gives.

    format: 1 if the reply ends with the elements think, answer, analysis and confidence, in this order. accuracy: y.
    brier: 1 - (y - q)^2. Both are 0 without the format. mean_confidence: q. confidence_one_or_zero: 1 if q is below
    0.01 or above 0.99. `weights`: of the parts, by name; those that are not given keep theirs (0.5 three times, 1e-5).
    """
    weight = _weights(weights or {})
    reference(task)
    sure, answer = _confidence(response), _answer(response)
    judged: Verdict = {"score": 0.0} if answer is None or sure is None else math(answer, task)
    well_formed = answer is not None and sure is not None
    right, told = float(judged["score"]), sure or 0.0
    parts = {
        "format": float(well_formed),
        "accuracy": right,
        "brier": 1.0 - (right - told) ** 2 if well_formed else 0.0,
        "mean_confidence": told,
        "confidence_one_or_zero": float(sure is not None and not _SURE <= sure <= 1 - _SURE),
    }
    return {**judged, **parts, "score": sum(weight[name] * value for name, value in parts.items())}


def _answer(response: str) -> str | None:
    """What stands in <answer>; None if the reply does not end with the four elements, each after the other."""
    found = _elements(response, _ELEMENTS)[-len(_ELEMENTS) :]
    if tuple(each.name for each in found) != _ELEMENTS:
        return None
    ends, begins = [each.end for each in found], [*(each.start for each in found[1:]), len(response)]
    if any(response[end:begin].strip() for end, begin in zip(ends, begins)):
        return None
    return found[1].text


def _confidence(response: str) -> float | None:
    """The number from 0 to 1 in the last <confidence>; None if there is none."""
    found = _elements(response, ("confidence",))
    try:
        value = float(found[-1].text) if found else numbers.nan
    except ValueError:
        return None
    return value if 0 <= value <= 1 else None


@dataclass(frozen=True)
class _Element:
    name: str
    text: str
    start: int
    end: int


def _elements(response: str, names: Sequence[str]) -> list[_Element]:
    """The elements of a text; none if a tag is not closed, or stands inside another element."""
    tags = list(re.finditer(rf"<(/?)({'|'.join(names)})>", response))
    out = []
    for opens, closes in zip(tags[::2], tags[1::2]):
        if opens[1] or not closes[1] or opens[2] != closes[2]:
            return []
        text = response[opens.end() : closes.start()]
        out.append(_Element(opens[2], text, opens.start(), closes.end()))
    return out if len(tags) % 2 == 0 else []


def check_weights(arguments: Mapping[str, Any]) -> None:
    """ConfigError for `weights` that are no numbers, or of no part."""
    _weights(arguments.get("weights") or {})


def _weights(given: Mapping[str, float]) -> dict[str, float]:
    for name, value in given.items():
        if name not in WEIGHTS:
            raise ConfigError(
                f"weights: no part {name!r}{near(name, WEIGHTS)}; there are: {', '.join(WEIGHTS)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not numbers.isfinite(value):
            raise ConfigError(f"weights.{name}={value!r}: expected a number")
    return {**WEIGHTS, **given}
