"""Section about which rollouts of a group are trained on, and with what reward or mask."""

from __future__ import annotations

from typing import Literal

from whet.config.sections.base import NonNegative, Positive, Section


class GroupsConfig(Section):
    """Filters of a scored group before training. They apply in the order of the keys; by default there is none."""

    truncated: Literal["keep", "zero", "mask", "drop"] = "keep"
    """Treatment of a truncated rollout (finish reason not 'stop'). keep: no change; zero: its reward becomes 0; mask:
    its tokens have no loss, but its reward still counts in the mean of the group; drop: it is removed from the
    group."""
    min_reward: float | None = None
    """Drop rollouts with a lower reward. Default: no rollout is dropped."""
    keep_best: Positive | None = None
    """Keep only this number of rollouts with the highest rewards (best-of-n), plus those of keep_worst. Default:
    all."""
    keep_worst: Positive | None = None
    """Keep only this number of rollouts with the lowest rewards, plus those of keep_best. Default: all."""
    min_shared_prefix: Positive | None = None
    """Mask shared prefixes of at least this many tokens: where replies begin with the same tokens but have different
    rewards, the tokens of the shared prefix have no loss. Default: no prefix is masked."""
    min_std: NonNegative | None = None
    """Drop a group unless the standard deviation of its rewards is larger; a group with one remaining rollout is
    dropped too. Default: no group is dropped."""
    min_std_ddof: Literal[1, 0] = 1
    """Denominator of the standard deviation of min_std: 1 divides by n - 1, 0 by n."""
    uniform_by: tuple[str, ...] = ()
    """Names of rewards for algorithm.dynamic_sampling: their weighted sum, instead of the whole reward, must differ
    within a group."""
