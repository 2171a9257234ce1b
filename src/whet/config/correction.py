"""Problems of the section about off-policy correction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whet.config.schema import CorrectionConfig
from whet.types import Json

KEY = "algorithm.correction"


def compares(c: CorrectionConfig) -> bool:
    """Whether the log-probs of the policy before the step are compared with the engine's."""
    tests = c.reject if c.reject_policy == "old" else ()
    return bool(c.weight or tests) or c.second_moment is not None


def problems(
    c: CorrectionConfig, weight: Mapping[str, Json], *, old_logprobs: str
) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it). weight: the settings of the importance weight."""
    if old_logprobs == "sampled" and compares(c):
        yield (
            "algorithm.old_logprobs",
            "'sampled' uses the log-probs of the engine as those of the trainer, so every ratio of "
            f"{KEY} would be 1: set it to recompute, or leave it out",
        )
    bounds = [(f"{KEY}.weight", weight.get("low"), weight.get("high"))]
    bounds += [(f"{KEY}.reject[{n}]", test.low, test.high) for n, test in enumerate(c.reject)]
    for at, low, high in bounds:
        if low is not None and high is not None and low > high:
            yield f"{at}.low", f"{low} is above high={high}: lower it, or raise high"
    for n, test in enumerate(c.reject):
        if test.low is None and test.high is None:
            yield f"{KEY}.reject[{n}]", "has no bound, so every value passes: give low, high or both"
