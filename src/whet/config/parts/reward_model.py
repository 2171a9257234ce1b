"""Section about a model that judges replies."""

from __future__ import annotations

from typing import Literal

from whet.config.parts.base import Positive, Section


class RewardModel(Section):
    """A classification model with one label: its logit at the last token is the score, as it comes."""

    path: str
    """A local Hugging Face folder of a sequence-classification model with one label (config.json, safetensors)."""
    input: Literal["text", "tokens"] = "text"
    """What it is given. text: the prompt and the reply, written in its own chat template and tokenizer; a plain-text
    prompt is put before the reply as it stands. tokens: the rollout's own, of all turns, where it has the policy's
    tokenizer and template."""
    tokenizer: str | None = None
    """Folder of its tokenizer. Default: `path`."""
    chat_template: str | None = None
    """Jinja chat template: text, or the path of a file. Default: its tokenizer's own."""
    max_tokens: Positive | None = None
    """Longest input, in tokens. Default: as many as the model has positions."""
    overlong: Literal["unscored", "truncate_left", "truncate_right"] = "unscored"
    """What becomes of a longer one: its rollout is not scored, or it is cut there and counted in the part
    NAME/truncated. `unscored`, because a cut conversation is judged as another one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of its weights. Default: float32 on CPU, bfloat16 on CUDA."""
