"""Sanitises the text and the numbers of foreign code; all of them pass through here.

Afterwards every text is valid Unicode and of bounded length, and every number is small enough for the statistics of a
group: JSON, parquet, trackers and float32 tensors accept them all.
"""

from __future__ import annotations

import math
import os

from whet.secrets import redact
from whet.tables import raised_at

LARGEST = 1e12
"""Of a reward's size. Batches are float32, which ends at 3e38: squares of such numbers still add up, over all rollouts
of a step and over all parameters of a gradient."""

MOST_SAID = 400
"""Characters of an exception's text."""


def plain(text: str) -> str:
    """Text that files take and a terminal only shows: lone surrogates, and what would command a terminal, stand there
    as Python writes them, as \\ud800 and \\x1b."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def words(text: str, most: int) -> str:
    """`plain` text of at most `most` characters, without secrets; what is cut off is counted at the end."""
    safe = plain(redact(text))
    if len(safe) <= most:
        return safe
    note = f" ... ({len(safe)} characters)"
    return safe[: most - len(note)] + note


def said(error: BaseException) -> str:
    """The text of an exception, even if its own methods fail."""
    try:
        return words(str(error), MOST_SAID)
    except BaseException:  # noqa: BLE001  foreign __str__
        return "(its text cannot be read)"


def describe(error: BaseException, *, name: bool = True) -> str:
    """'ValueError: text (file.py:3)', bounded, whatever the exception's own methods do."""
    text = said(error)
    if not name:
        return text
    at = raised_at(error)
    where = f" ({os.path.basename(at[0])}:{at[1]})" if at else ""
    return f"{type(error).__name__}: {text}{where}"


def shown(value: object, most: int) -> str:
    """The beginning of a value as Python writes it, even if it cannot be written."""
    try:
        return repr(value)[:most]
    except Exception:  # noqa: BLE001  foreign __repr__, or an int of too many digits
        return f"a {type(value).__name__} that cannot be shown"


def is_number(value: object) -> bool:
    """Whether `number` is asked for it: a bool, int, float or one-element numpy or torch value, of any size. Foreign
    values may raise."""
    if isinstance(value, str | bytes):  # numpy's texts, too
        return False
    one = hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1
    return one or isinstance(value, bool | int | float)


def number(value: object, where: str = "") -> float:
    """A finite float of at most LARGEST in size, of a bool, int, float or one-element numpy or torch value. ValueError
    says what else it was. where: of which part of a value; '' for a whole one, which may be a dict of numbers."""
    one = "a finite number" if where else "a finite number or a dict of them"
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError) as error:  # an array of several entries, or none
            raise ValueError(f"{type(value).__name__}{where}: {said(error)}; expected {one}") from error
    if not isinstance(value, bool | int | float):
        raise ValueError(f"{_given(value)}{where}; expected {one}")
    try:
        out = float(value)
    except OverflowError as error:
        raise ValueError(f"an int too large for a float{where}; expected {_EXPECTED}") from error
    if not math.isfinite(out) or abs(out) > LARGEST:
        raise ValueError(f"{out}{where}; expected {_EXPECTED}")
    return out


def _given(value: object) -> str:
    """A value that is no number, for people."""
    if value is None:
        return "None (is a `return` missing?)"
    return f"the text {words(repr(value), 60)}" if isinstance(value, str) else type(value).__name__


_EXPECTED = f"a finite number between {-LARGEST:g} and {LARGEST:g}"
