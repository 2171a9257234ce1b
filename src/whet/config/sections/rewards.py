"""Sections about rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from whet.config.sections.base import Positive, Section


class RewardModelConfig(Section):
    """A classification model with one label: the score is its logit at the last token, unchanged. With function judge
    or ruler, a chat model: it writes its judgement."""

    path: str
    """Folder or URL, as in model.path, of a sequence-classification model with one label; with function judge or ruler,
    of a chat model."""
    input: Literal["text", "tokens"] = "text"
    """Input of the model. text: the prompt and the reply, formatted with the chat template and tokenizer of the reward
    model; a plain-text prompt is put before the reply unchanged. tokens: the tokens of the rollout, of all turns, if
    the reward model has the tokenizer and template of the policy."""
    tokenizer: str | None = None
    """Folder of its tokenizer. Default: `path`."""
    chat_template: str | None = None
    """Jinja chat template: text, or the path of a file. Default: the template of its tokenizer."""
    max_tokens: Positive | None = None
    """Longest input, in tokens; of a judge, with its answer. Default: the number of positions of the model."""
    overlong: Literal["unscored", "truncate_left", "truncate_right"] = "unscored"
    """Treatment of a longer input. unscored: the rollout has no score, because a truncated conversation has another
    meaning; truncate_*: the input is truncated on that side and counted in the metric part NAME/truncated."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of its weights. Default: float32 on CPU, bfloat16 on CUDA."""


class RewardConfig(Section):
    """A function or a model that scores replies. The reward of a rollout is the weighted sum of all rewards, plus what
    its environment gives (rollout.env)."""

    function: str | None = None
    """Name of a reward function (docs/rewards.md); give this or `model`. Built in: exact, choice, number, math, code,
    format, overlong, reasoning_gym, sandbox_fusion, judge, ruler, rlcr. Your own: 'package.module:name' or
    'path/to/file.py:name', called as f(response, task, **arguments)."""
    weight: float = 1.0
    """Factor in the sum. 0: the reward is only measured, and costs as much as any other."""
    model: RewardModelConfig | None = None
    """A reward model, instead of a function. It runs in the main process, one rollout at a time. Beside the functions
    judge and ruler: the chat model that they ask, in place of a server."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, passed on every call. A secret is never written to any file; whet recognizes
    secrets by their key (api_key, token, password ...) and in URLs. Best give a secret as `api_key:
    "${oc.env:JUDGE_KEY}"`."""
