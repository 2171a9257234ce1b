"""Rewards that need nothing but the reply, and the table of all that are built in."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from whet.types import ConfigError, Json, Task

BUILTIN = {
    "exact": "whet.rewards.builtin:exact",
    "choice": "whet.rewards.builtin:choice",
    "number": "whet.rewards.builtin:number",
    "format": "whet.rewards.builtin:format",
    "overlong": "whet.rewards.builtin:overlong",
    "code": "whet.rewards.code:code",
    "math": "whet.rewards.math:math",
    "reasoning_gym": "whet.rewards.gym:reasoning_gym",
    "sandbox_fusion": "whet.rewards.sandbox_fusion:sandbox_fusion",
    "judge": "whet.rewards.judge:judge",
    "ruler": "whet.rewards.judge:ruler",
    "rlcr": "whet.rewards.calibration:rlcr",
}
"""Module of each reward, as text: imported only in reward processes, so the run itself never imports sympy."""

CHECKS = {
    BUILTIN["format"]: "whet.rewards.builtin:check_format",
    BUILTIN["overlong"]: "whet.rewards.builtin:check_overlong",
    BUILTIN["reasoning_gym"]: "whet.rewards.gym:check_pattern",
    BUILTIN["judge"]: "whet.rewards.judge:check_judge",
    BUILTIN["ruler"]: "whet.rewards.judge:check_ruler",
    BUILTIN["rlcr"]: "whet.rewards.calibration:check_weights",
}
"""For rewards whose arguments their types do not describe: a function of them that raises ConfigError."""

EXECUTES = {BUILTIN["reasoning_gym"]: "whet.rewards.gym:unread"}
"""For rewards that may run code found in a reply or a row: a function of the arguments that names the part, or ''."""


@dataclass(frozen=True)
class Unconfined:
    """A reward that no sandbox can hold. It runs nothing of a reply in its own process, and reads it with no library
    but Python's own."""

    does: str
    """What a sandbox forbids."""
    needs_s: str
    """A function of the arguments: the longest time that it may take, in seconds."""
    shared: bool = False
    """Whether it is told how many `processes` there are of it."""
    sandboxes: bool = False
    """Whether it puts the code of replies into a sandbox itself, so the system must have one."""


UNCONFINED = {
    BUILTIN["sandbox_fusion"]: Unconfined(
        "asks a server", "whet.rewards.sandbox_fusion:needs_s", shared=True
    ),
    **dict.fromkeys(
        (BUILTIN["judge"], BUILTIN["ruler"]),
        Unconfined("asks a server", "whet.rewards.judge:needs_s"),
    ),
    BUILTIN["code"]: Unconfined(
        "starts processes with a sandbox of their own", "whet.rewards.code:needs_s", sandboxes=True
    ),
}

_COMMA = r"(?:[,\u2009\u202f]|\{,\}|\\,)"
_NUMBER = (
    r"(?<!\d)(?<!\d[./])(?:\\?\$\s?)?(?P<sign>(?<![\w)\]}])[-+\u2212])?(?:\\?\$\s?)?"
    rf"(?P<digits>(?>\d+(?:{_COMMA}\d+)*(?:\.\d+)?|\.\d+))"
    r"(?P<power>(?>[eE][-+]?\d{1,3}(?!\d))?)(?:/(?P<under>(?>\d+)))?(?![./]\d|\^|[eE][-+]?\d)"
)
"""What else looks like one is none: a date, a version, a power; a '-' after a word or number is no sign."""
_AFTER_HASHES, _ANYWHERE = re.compile(rf"####\s*{_NUMBER}"), re.compile(_NUMBER)
_THOUSANDS = re.compile(rf"\d+(?:\.\d+)?|\.\d+|\d{{1,3}}(?:{_COMMA}\d{{2,3}})*{_COMMA}\d{{3}}(?:\.\d+)?")
_LONGEST_FRACTION = 18
"""Digits of a fraction's two numbers."""
_LETTER = r"(?:\(\s*+)?([A-Za-z])(?![A-Za-z0-9'\u2019])"
_CHOICE = r"(?i:\b(?:answer|choice|option)\b)"
_MARKS = r"\s*+(?:\*\*\s*+)?"
_TOLD = re.compile(rf"{_CHOICE}(?i:\s++is\b(?:\s*+:)?|\s*+:){_MARKS}(?![ai]\s+\w){_LETTER}")
"""'a' and 'i' before another word are words of the sentence ('the answer is a number'), no letters of a choice. White
space is taken whole (`*+`): a search that tries its parts takes hours for a reply of blanks."""
_NAMED = re.compile(rf"{_CHOICE}{_MARKS}(?![aiI]\s+\w){_LETTER}")


Verdict = dict[str, float | str]
"""{"score": 0 or 1, "answer": the answer found in the reply, in a form that is equal for equal answers}."""


def verdict(right: bool, answer: str | None) -> Verdict:
    score = float(right)
    return {"score": score} if answer is None else {"score": score, "answer": answer}


def reference(task: Task) -> Json:
    """The task's answer. ValueError if the task has none: a reward of 0 would penalise the reply."""
    if task.answer is None:
        raise ValueError(
            f"task {task.uid} of {task.source!r} has no answer; check `answer` of its data source"
        )
    return task.answer


def exact(response: str, task: Task, *, ignore_case: bool = False) -> Verdict:
    """1 if the reply is the answer, white space at the ends aside."""
    got, want = response.strip(), str(reference(task)).strip()
    if ignore_case:
        got, want = got.casefold(), want.casefold()
    return verdict(got == want, got)


def choice(response: str, task: Task) -> Verdict:
    r"""1 if the reply chooses the right letter. The answer is a letter, or the number of the choice from 0.

    The letter is, in this order: the last in \boxed{}; the last after 'answer is' or 'answer:'; the last after 'answer'
    alone (in both, 'choice' and 'option' are read as 'answer'); the one the reply starts with, if a mark like '.', ')'
    or its end follows.
    """
    want = reference(task)
    numbered = want in range(26) and not isinstance(want, bool)
    letter = chr(ord("A") + int(want)) if numbered else str(want).strip().strip("()").upper()
    if not re.fullmatch("[A-Z]", letter):
        raise ValueError(
            f"the answer of task {task.uid} is no choice: {str(want)[:60]!r}; expected a letter, or a number from 0"
        )
    found = re.findall(r"\\boxed\{\s*+(?:\\[a-z]{1,10}\{\s*+)?" + _LETTER, response)
    found = found or _TOLD.findall(response) or _NAMED.findall(response)
    found = found or re.findall(r"^\s*\(?([A-Za-z])(?:\s*[).:,]|\s*$)", response)
    got = found[-1].upper() if found else None
    return verdict(got == letter, got)


def number(response: str, task: Task, *, flexible: bool = False) -> Verdict:
    r"""1 if the reply's number, after the last '####' (GSM8K), equals the answer's; `flexible`: the last one.

    5 equals 5.0, 1/2 equals 0.5. Thousands' commas (also `{,}` and `\,`), '$' and trailing dots do not count. The
    answer may itself be a solution with '####' in it. ValueError if it has no number.
    """
    want = str(reference(task))
    expected = _last_number(want, flexible="####" not in want)
    if expected is None:
        raise ValueError(f"the answer of task {task.uid} has no number: {want[:60]!r}")
    got = _last_number(response, flexible=flexible)
    return verdict(got == expected, None if got is None else _plain(got))


def _last_number(text: str, *, flexible: bool) -> Decimal | Fraction | None:
    found = deque((_ANYWHERE if flexible else _AFTER_HASHES).finditer(text), maxlen=1)
    return _value(found[0], flexible=flexible) if found else None


def _value(found: re.Match[str], *, flexible: bool) -> Decimal | Fraction | None:
    """The number; of numbers with commas between them (1,2) the last one, or none. None of a fraction of nothing."""
    digits, under = found["digits"], found["under"]
    if not _THOUSANDS.fullmatch(digits):
        if not flexible:
            return None
        digits = re.split(_COMMA, digits)[-1]
    value = Decimal(
        ("-" if found["sign"] in ("-", "\u2212") else "") + re.sub(_COMMA, "", digits) + found["power"]
    )
    if under is None:
        return value
    if len(digits) > _LONGEST_FRACTION or len(under) > _LONGEST_FRACTION or not int(under):
        return None
    fraction = Fraction(value) / int(under)
    exact = Context(prec=8 * _LONGEST_FRACTION).divide(
        Decimal(fraction.numerator), Decimal(fraction.denominator)
    )
    return exact if exact == fraction else fraction


def _plain(value: Decimal | Fraction) -> str:
    """Digits that are equal for equal numbers: 5.0, +5 and 5 are '5'. (`normalize` rounds to 28 digits.)"""
    if isinstance(value, Fraction):
        return str(value)
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if value == 0 else text


def format(response: str, task: Task, *, tags: list[str] | None = None, pattern: str | None = None) -> float:
    """1 if the reply has the given format. Give one of two:

    `tags`: exactly these elements, once each and in this order, with nothing but white space between them, as
    [think, answer] for <think>...</think><answer>...</answer>. `pattern`: a regular expression of the whole
    reply, in which '.' matches line ends.
    """
    if tags is None:
        return float(re.fullmatch(pattern or "", response, re.DOTALL) is not None)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if any(response.count(mark) != 1 for mark in marks):
        return 0.0
    whole = r"\s*".join(f"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags)
    return float(re.fullmatch(rf"\s*{whole}\s*", response, re.DOTALL) is not None)


def check_format(arguments: Mapping[str, Any]) -> None:
    """ConfigError unless the arguments of `format` say one format."""
    tags, pattern = arguments.get("tags"), arguments.get("pattern")
    if (tags is None) == (pattern is None) or tags == []:
        raise ConfigError("format needs either `tags`, at least one, or `pattern`")
    compiled("pattern", pattern or "")


def compiled(key: str, pattern: str) -> re.Pattern[str]:
    """A regular expression among the arguments. ConfigError says what is wrong with it."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{key}={pattern!r} is not a regular expression: {error}") from None


def overlong(response: str, task: Task, rollout: dict[str, Any], *, max_tokens: int, buffer: int) -> float:
    """Soft penalty for long replies (DAPO, arXiv:2503.14476 eq. 13), both arguments in tokens: 0 up to
    max_tokens - buffer, from there in a line to -1 at max_tokens, -1 beyond.
    """
    over = rollout["tokens"] - (max_tokens - buffer)
    return max(-1.0, min(0.0, -over / buffer))


def check_overlong(arguments: Mapping[str, Any]) -> None:
    """ConfigError unless the limits of `overlong` are limits."""
    buffer, most = arguments["buffer"], arguments["max_tokens"]
    if not 0 < buffer <= most:
        raise ConfigError(f"overlong needs 0 < buffer <= max_tokens; got buffer {buffer}, max_tokens {most}")
