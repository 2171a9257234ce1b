"""What cannot work, or would have no effect, in the section about off-policy correction."""

from __future__ import annotations

from whet.config.schema import Correction, Reject
from whet.types import ConfigError

KEY = "algorithm.correction"


def check_correction(c: Correction, *, samples: bool, old_logprobs: str) -> None:
    """Raise ConfigError. `samples`: the policy's own rollouts are what is learned from."""
    if c == Correction():
        return
    if not samples:
        raise ConfigError(f"{KEY} has no effect: the replies were given, not sampled; leave it out.")
    bounds = c.low is not None or c.high is not None
    if c.weight is None and (bounds or c.normalize or c.outside == "mask"):
        raise ConfigError(
            f"{KEY}.weight is not given, so there is nothing to bound or normalize: set it to token."
        )
    if c.outside == "mask" and not bounds:
        raise ConfigError(f"{KEY}.outside='mask' has no effect without a bound: set {KEY}.low or {KEY}.high.")
    if c.denominator == "all" and not (c.reject or c.outside == "mask"):
        raise ConfigError(
            f"{KEY}.denominator='all' has no effect: nothing is masked or rejected; leave it out."
        )
    if old_logprobs == "sampled" and (c.weight or c.reject):
        raise ConfigError(
            "algorithm.old_logprobs='sampled' takes the engine's log-probs for the trainer's, so every ratio that "
            f"{KEY} looks at would be 1: set it to recompute, or leave it out."
        )
    _check_bounds(c)


def _check_bounds(c: Correction) -> None:
    parts: list[tuple[str, Correction | Reject]] = [(KEY, c)]
    parts += [(f"{KEY}.reject[{n}]", test) for n, test in enumerate(c.reject)]
    for at, part in parts:
        if part.low is not None and part.high is not None and part.low > part.high:
            raise ConfigError(f"{at}.low={part.low} is above high={part.high}: nothing can lie between them.")
    for n, test in enumerate(c.reject):
        if test.low is None and test.high is None:
            raise ConfigError(
                f"{KEY}.reject[{n}] has no bound, so everything passes: give low, high or both."
            )
