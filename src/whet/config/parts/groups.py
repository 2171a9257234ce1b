"""Section about which rollouts of a group are trained on, and as what."""

from __future__ import annotations

from typing import Literal

from whet.config.parts.base import NonNegative, Positive, Section


class Groups(Section):
    """What becomes of a scored group before it is trained on. In the order of the keys; by default nothing."""

    truncated: Literal["keep", "zero", "mask", "drop"] = "keep"
    """A rollout that did not end by itself (finish reason not 'stop'): keep it as it is; zero: its reward becomes 0;
    mask: its tokens give no loss, though its reward still counts in the group's mean; drop: it leaves the group."""
    min_reward: float | None = None
    """Drop rollouts with a lower reward. Default: none are."""
    keep_best: Positive | None = None
    """Keep only so many rollouts with the highest rewards (best-of-n), and those of keep_worst. Default: all."""
    keep_worst: Positive | None = None
    """Keep only so many rollouts with the lowest rewards, and those of keep_best. Default: all."""
    min_shared_prefix: Positive | None = None
    """Replies that begin with the same tokens, at least so many, but got different rewards: the shared beginning gives
    no loss. In tokens. Default: everything does."""
    min_std: NonNegative | None = None
    """Drop a group unless the standard deviation of its rewards is larger; a rollout left alone is dropped too.
    Default: no group is."""
    min_std_ddof: Literal[1, 0] = 1
    """Standard deviation of min_std: 1 divides by n - 1, 0 by n."""
    uniform_by: tuple[str, ...] = ()
    """Names of rewards whose weighted sum must differ within a group, in place of the whole reward, for
    algorithm.dynamic_sampling."""
