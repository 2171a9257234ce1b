"""Problems of the section about off-policy correction."""

from __future__ import annotations

from whet.config.schema import Correction, Reject
from whet.types import ConfigError

KEY = "algorithm.correction"


def check_correction(c: Correction, *, old_logprobs: str) -> None:
    """Raise ConfigError."""
    if old_logprobs == "sampled" and (c.weight or c.reject):
        raise ConfigError(
            "algorithm.old_logprobs='sampled' uses the log-probs of the engine as those of the trainer, so every ratio "
            f"of {KEY} would be 1: set it to recompute, or leave it out."
        )
    _check_bounds(c)


def _check_bounds(c: Correction) -> None:
    parts: list[tuple[str, Correction | Reject]] = [(KEY, c)]
    parts += [(f"{KEY}.reject[{n}]", test) for n, test in enumerate(c.reject)]
    for at, part in parts:
        if part.low is not None and part.high is not None and part.low > part.high:
            raise ConfigError(f"{at}.low={part.low} is above high={part.high}: lower it, or raise high.")
    for n, test in enumerate(c.reject):
        if test.low is None and test.high is None:
            raise ConfigError(
                f"{KEY}.reject[{n}] has no bound, so every value passes: give low, high or both."
            )
