"""Sections about held-out evaluation."""

from __future__ import annotations

from pydantic import Field

from whet.config.parts.base import Count, Positive, Section
from whet.config.parts.rollout import SamplingConfig


class EvalSource(Section):
    """How one source of held-out tasks is asked, where that differs from the others."""

    samples: Positive | None = None
    """Replies a task. Default: eval.samples."""
    sampling: SamplingConfig | None = None
    """Sampling of this source, put key by key over that of all sources."""


class Offline(Section):
    """Replies that were written elsewhere, to be judged as they are: `whet eval FILE` reads them and needs no model."""

    path: str | tuple[str, ...]
    """File, folder, glob or list of them: parquet, jsonl, json or csv; a row holds a task and the replies to it."""
    prompt: str = "prompt"
    """Column of the prompt: text, or a list of {role, content} messages."""
    response: str = "responses"
    """Column of the replies: a list of texts (one reply may be a plain text)."""
    answer: str = "answer"
    """Column of the reference answer; dots go into nested columns (verl: reward_model.ground_truth). May be absent."""
    label: str | None = None
    """Column of each row's source (verl: data_source). Default: the file's stem for all rows."""
    limit: Positive | None = None
    """Judge only the first so many rows."""


class Eval(Section):
    """Held-out evaluation."""

    interval: Count = 0
    """Evaluate every so many steps. 0: only at start and end."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    samples: Positive = 1
    """Replies a task: mean@k and maj@k are given for this k, pass@n, best@n and worst@n for n = 2, 4, 8 .. k."""
    sampling: SamplingConfig | None = None
    """Sampling in evaluation, put key by key over greedy with the training limits."""
    sources: dict[str, EvalSource] = Field(default_factory=dict)
    """Samples and sampling of single sources, by their label in metrics; all others are asked as said above."""
    success: float = 1.0
    """A reply passes when its reward is at least this (exact, no tolerance)."""
    reward: str | dict[str, float] | None = None
    """Judge by this one reward of `rewards`, or by a weighted sum of some ({name: weight}); only these are called.
    Default: the sum that training uses."""
    log_samples: Count = 0
    """So many held-out tasks with the first reply to each, the same ones every time, go to
    eval/STAGE-step-N.jsonl and to trackers that show text. 0: none (every reply is in eval/*.parquet anyway)."""
    offline: Offline | None = None
    """Judge replies from a file, in `whet eval`."""
