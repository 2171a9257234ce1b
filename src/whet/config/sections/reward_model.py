"""Section about a model that scores replies."""

from __future__ import annotations

from typing import Literal

from whet.config.sections.base import Positive, Section


class RewardModelConfig(Section):
    """A classification model with one label: the score is its logit at the last token, unchanged."""

    path: str
    """A local Hugging Face folder of a sequence-classification model with one label (config.json, safetensors)."""
    input: Literal["text", "tokens"] = "text"
    """Input of the model. text: the prompt and the reply, formatted with the chat template and tokenizer of the reward
    model; a plain-text prompt is put before the reply unchanged. tokens: the tokens of the rollout, of all turns, if
    the reward model has the tokenizer and template of the policy."""
    tokenizer: str | None = None
    """Folder of its tokenizer. Default: `path`."""
    chat_template: str | None = None
    """Jinja chat template: text, or the path of a file. Default: the template of its tokenizer."""
    max_tokens: Positive | None = None
    """Longest input, in tokens. Default: the number of positions of the model."""
    overlong: Literal["unscored", "truncate_left", "truncate_right"] = "unscored"
    """Treatment of a longer input. unscored: the rollout has no score, because a truncated conversation has another
    meaning; truncate_*: the input is truncated on that side and counted in the metric part NAME/truncated."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of its weights. Default: float32 on CPU, bfloat16 on CUDA."""
