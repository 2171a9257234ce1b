"""The findings of a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["works", "fails", "open", "needs"]
"""`works`: tried successfully; `fails`: would have ended the real run; `open`: not rehearsed here; `needs`: the real
run's needs."""


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
