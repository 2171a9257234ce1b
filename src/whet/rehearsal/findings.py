"""What a rehearsal has to say, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["works", "fails", "open", "needs"]
"""`works`: tried and seen; `fails`: would have ended the real run; `open`: could not be rehearsed here; `needs`: what
the real run will take."""


@dataclass(frozen=True)
class Finding:
    kind: Kind
    what: str
    said: str


def works(what: str, said: str) -> Finding:
    return Finding("works", what, said)


def fails(what: str, said: str) -> Finding:
    return Finding("fails", what, said)


def left_open(what: str, said: str) -> Finding:
    return Finding("open", what, said)


def needs(what: str, said: str) -> Finding:
    return Finding("needs", what, said)
