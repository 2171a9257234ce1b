"""What bounds an episode. `episode` checks the limits in the order in which they stand here, after what the environment
says; each names its stop reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from whet.config.deadlines import setup_s
from whet.config.evaluation import longest_rollout
from whet.config.schema import Config
from whet.types import Json, Sampling

MaxTokensPer = Literal["rollout", "turn"]
"""What `sampling.max_tokens` limits."""


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """The same for all rollouts of a stage. None: no limit. `sampling.max_tokens` and the clock come beside them."""

    max_tokens_per: MaxTokensPer = "rollout"
    """The sampled tokens of all turns together are bounded by `sampling.max_tokens` ('tokens'), or those of each."""
    max_turns: int = 8
    """Replies ('turns')."""
    max_cost: float | None = None
    """Sum of the environment's part `cost` ('cost')."""
    observation_tokens: int = 1024
    """Tokens that a strand has beyond the prompt and the sampled ones ('observations')."""
    input_tokens: int | None = None
    """Tokens that a reply follows ('context')."""
    tokens_after_prompt: int | None = None
    """Tokens of a strand after the prompt, sampled or not ('context')."""
    max_total_tokens: int | None = None
    """Tokens of a strand, prompt included ('context'). With an environment there is always such a limit: the engine has
    one, and the tools of an environment add to a prompt."""

    setup_s: float = 0.0
    """Seconds that making the environment and its first messages may take, beside the episode's own."""

    def left(self, max_tokens: int, *, sampled: int, prompt: int, length: int) -> int:
        """Tokens that may still be sampled.

        sampled: those so far. length: of the strand, in which the first `prompt` tokens are the prompt.
        """
        left = [max_tokens - (sampled if self.max_tokens_per == "rollout" else 0)]
        if self.tokens_after_prompt is not None:
            left.append(self.tokens_after_prompt + prompt - length)
        if self.max_total_tokens is not None:
            left.append(self.max_total_tokens - length)
        return min(left)


def limits_of(cfg: Config) -> EpisodeLimits:
    """Those of a stage: rollout.env and data.max_total_tokens."""
    given = cfg.rollout.env
    own = [f.name for f in fields(EpisodeLimits) if f.name not in ("max_total_tokens", "setup_s")]
    env = {} if given is None else {name: getattr(given, name) for name in own}
    if given is not None:
        env["setup_s"] = setup_s(cfg)
    return EpisodeLimits(
        **env, max_total_tokens=cfg.data.max_total_tokens if given is None else longest_rollout(cfg)
    )


def chat_sampling(sampling: Sampling, settings: Mapping[str, Json]) -> Sampling:
    """The sampling of a `world.chat` with settings of its own. ValueError for one that is not allowed."""
    most, stop = settings.get("max_tokens", sampling.max_tokens), settings.get("stop", sampling.stop)
    if type(most) is not int or not 1 <= most <= sampling.max_tokens:
        raise ValueError(
            f"world.chat max_tokens={most!r}; expected 1 to {sampling.max_tokens}, the longest reply of the rollout's "
            "source"
        )
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"world.chat stop={stop!r}; expected a list of texts")
    return replace(sampling, max_tokens=most, stop=tuple(stop))
