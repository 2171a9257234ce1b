"""Arguments of the public functions. One of a wrong type is refused by its name, before anything is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import NamedTuple

from whet.types import ConfigError, WhetError


class ArgumentKind(NamedTuple):
    """What an argument has to be."""

    fits: Callable[[object], bool]
    words: str


def _whole(value: object) -> bool:
    """numpy's numbers are whole, too: the step of a line of a table."""
    return value is None or (isinstance(value, Integral) and not isinstance(value, bool))


PATH = ArgumentKind(lambda v: isinstance(v, str | os.PathLike), "a path (str or pathlib.Path)")
FILE = ArgumentKind(lambda v: v is None or PATH.fits(v), f"{PATH.words}, or None")
TEXT = ArgumentKind(lambda v: v is None or isinstance(v, str), "a text (str), or None")
WHOLE = ArgumentKind(_whole, "a whole number (int), or None")
FLAG = ArgumentKind(lambda v: isinstance(v, bool), "True or False")
FUNCTION = ArgumentKind(callable, "a function")
TEXTS = ArgumentKind(
    lambda v: (
        isinstance(v, Sequence) and not isinstance(v, str | bytes) and all(isinstance(t, str) for t in v)
    ),
    "a list of texts: ['train.steps=5']",
)


def expect_overrides(given: object) -> None:
    """`overrides` of the public functions."""
    if isinstance(given, str):
        raise ConfigError(f"overrides: got the text {given!r}; expected a list of such texts: [{given!r}]")
    expect({"overrides": (given, TEXTS)})


def expect(given: Mapping[str, tuple[object, ArgumentKind]], error: type[WhetError] = ConfigError) -> None:
    """given: value and kind of each argument, by its name."""
    for name, (value, kind) in given.items():
        if not kind.fits(value):
            raise error(f"{name}: got {_shown(value)}, expected {kind.words}")


def _shown(value: object) -> str:
    """A value of the caller's, whose own words may fail."""
    try:
        return f"{value!r:.100}"
    except Exception:  # noqa: BLE001  foreign code
        return f"a {type(value).__name__}"
