"""What a fuzzer makes, and what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Case:
    """Files to be read together."""

    files: Files
    touched: str
    """The one that is damaged."""
    wrong: bool = False
    """Whether it cannot be right, so that it has to be refused."""


@dataclass(frozen=True)
class Fuzzer:
    make: Callable[[Random], Case]
    read: Callable[[Path], object]
    """Of a folder with the files of a case. WhetError: refused."""
