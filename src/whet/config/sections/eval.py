"""Sections about held-out evaluation."""

from __future__ import annotations

from pydantic import Field

from whet.config.sections.base import Count, Interval, Positive, Section
from whet.config.sections.rollout import SamplingConfig


class EvalSourceConfig(Section):
    """Evaluation settings of one source, where they differ from the other sources."""

    samples: Positive | None = None
    """Replies per task. Default: eval.samples."""
    sampling: SamplingConfig | None = None
    """Sampling of this source, merged key by key over the sampling of all sources."""


class EvalConfig(Section):
    """Evaluation on held-out tasks (data.eval)."""

    interval: Interval = 0
    """Steps between evaluations (verl: test_freq; TRL: eval_steps), `4 steps from 3` (the first after step 3), `1
    epoch` of the training data (in the step that completes it), or a list of these. 0: only at start and end (at_start,
    at_end)."""
    at_start: bool = True
    """Evaluate before the first step. (verl: val_before_train)"""
    at_end: bool = True
    """Evaluate after the last step."""
    samples: Positive = 1
    """Replies per task, k: metrics are mean@k, and for k above 1 maj@k, std@k, and pass@n, best@n and worst@n for n =
    2, 4, 8 .. k. More than 1 needs a sampling.temperature above 0, except with rollout.env. (verl: val_kwargs.n)"""
    sampling: SamplingConfig | None = None
    """Sampling in evaluation. Keys that it leaves out: greedy decoding (temperature 0, no filters), and the limits and
    end tokens of rollout.sampling. {temperature: 0.6, top_p: 0.95} samples. (verl: val_kwargs)"""
    sources: dict[str, EvalSourceConfig] = Field(default_factory=dict)
    """Samples and sampling of single sources, by their label in metrics; all other sources use `samples` and
    `sampling`."""
    success: float = 1.0
    """Lowest reward of a reply that passes (exact comparison, no tolerance): what eval/accuracy, mean@k, pass@n and
    maj@k count."""
    reward: str | dict[str, float] | None = None
    """Reward of the evaluation: the name of one of the `rewards`, or a weighted sum of some ({name: weight}); only
    these are called. Default: the same sum as in training."""
    log_samples: Count = 0
    """Number of held-out tasks whose first reply is logged, the same tasks every time: to eval/STAGE-step-N.jsonl and
    to trackers that show text. 0: none (eval/*.parquet has every reply anyway)."""
    offline: bool = False
    """The rows of data.eval have replies from another program, in the column `response` (a text, or a list of texts):
    `whet eval FILE` scores these replies as they are and needs no model."""
