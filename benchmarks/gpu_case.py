"""What every check of `check_gpu.py` is given, and how it says what it saw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Numbers = dict[str, Any]


class Failed(Exception):
    """The device's numbers are not those of a CPU, or something is missing."""


class Skipped(Exception):
    """Nothing to check here; why."""


@dataclass(frozen=True)
class Case:
    device: str
    """cpu or cuda."""
    small: bool
    """Sizes for a try."""

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"


def within(what: str, value: float, most: float) -> float:
    """The value. Raises Failed if it is above `most`, or no number."""
    if not value <= most:
        raise Failed(f"{what} is {value:.3g}, at most {most:.3g} is right")
    return value


def needs_gpu(case: Case, what: str) -> None:
    if not case.gpu:
        raise Skipped(f"{what} needs CUDA")
