"""Sections about models: the policy, its tokenizer, the critic, the reference."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from whet.config.parts.aggregation import Aggregation
from whet.config.parts.base import Above0, BelowOne, Count, Positive, Section
from whet.config.parts.lora import Lora
from whet.config.parts.train import CriticOptimizer


class Scratch(Section):
    """A model made from scratch with random weights, in a Hugging Face architecture."""

    architecture: Literal["llama", "qwen2", "qwen3", "mistral", "gemma", "qwen3_moe"] = "qwen3"
    """Model family; decides the Hugging Face classes used for loading and export."""
    hidden_size: Positive = 128
    """Width of the residual stream."""
    num_hidden_layers: Positive = 3
    """Number of decoder layers."""
    num_attention_heads: Positive = 4
    """Query heads a layer."""
    num_key_value_heads: Positive | None = None
    """Key/value heads a layer (grouped-query attention); must divide `heads`. Default: `heads`."""
    head_dim: Positive | None = None
    """Width of a head. Default: hidden_size / heads."""
    intermediate_size: Positive | None = None
    """Width of the feed-forward layer (of one expert, in a mixture). Default: 3 x hidden_size."""
    max_position_embeddings: Positive = 4096
    """Longest sequence the model accepts, in tokens."""
    rope_theta: Above0 = 10000.0
    """Base of the rotary position embedding."""
    tie_word_embeddings: bool = True
    """Share the embedding with the output layer; halves the parameters of a tiny model."""
    initializer_range: Above0 = 0.02
    """Standard deviation of the initial weights."""
    num_experts: Positive = 8
    """Experts a layer (qwen3_moe only)."""
    num_experts_per_tok: Positive = 2
    """Experts used for a token (qwen3_moe only)."""
    sliding_window: Positive | None = None
    """Attention window in tokens (mistral only). Default: full attention."""


class Model(Section):
    """The policy's weights."""

    path: str | None = None
    """A local Hugging Face model folder (config.json, safetensors). Give this or `scratch`."""
    scratch: Scratch | None = None
    """Make a new model instead of loading one."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the parameters. float16 trains with a scaled loss (train.precision). Default: float32 on CPU (bfloat16
    is slower there), bfloat16 on CUDA."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Values put over the model's own config.json, by its Hugging Face names."""
    lora: Lora | None = None
    """Train low-rank adapters instead of the model itself. Default: the whole model learns."""
    trust_remote_code: Literal[False] = False
    """Code that comes with a model is never run; only False is accepted."""


class Tokenizer(Section):
    """Text to tokens and back."""

    path: str | None = None
    """Folder of a Hugging Face tokenizer. Default: the model's folder."""
    build: Literal["chars", "words", "bpe"] | None = None
    """Build one from the training data instead: one token a character, a word, or a byte-pair merge (with
    model.scratch only)."""
    vocab_size: Positive = 1024
    """Upper bound on the size of a built vocabulary."""
    chat_template: str | None = None
    """Jinja chat template: text, or the path of a file. Default: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, e.g. {enable_thinking: false}; an exported tokenizer has them as defaults."""


class Critic(Section):
    """The value model of PPO: the policy's architecture with a value head."""

    path: str | None = None
    """Where its weights start. Default: a copy of the policy's at the start of the stage."""
    head: str | None = None
    """Name of the value head among the weights at `path`: HEAD.weight, of one row, and HEAD.bias if there is one.
    Weights without it, and null, get a new head, near 0."""
    lora: Lora | None = None
    """Train low-rank adapters of the critic (its value head learns in full). Default: the whole critic learns."""
    optimizer: CriticOptimizer = Field(default_factory=CriticOptimizer)
    """The critic's own optimizer."""
    warmup_steps: Count = 0
    """Steps at the start in which only the critic learns."""
    minibatches: Positive | None = None
    """Optimizer steps of the critic a pass over the batch. Default: train.minibatches."""
    update_epochs: Positive | None = None
    """Passes of the critic over each batch. Default: train.update_epochs."""
    micro_batch_tokens: Positive | None = None
    """Most tokens in one forward and backward of the critic. Default: the policy's cut."""
    micro_batch_rollouts: Positive | None = None
    """Cut its micro-batches by number of rollouts instead."""
    gradient_checkpointing: bool | None = None
    """Recompute the critic's activations in backward. Default: train.gradient_checkpointing."""
    overrides: dict[str, Any] | None = None
    """Values put over the config.json at `path`. Default: model.overrides."""
    value_clip: Above0 | None = 0.5
    """Values may move at most this far from their old ones, in units of what the critic predicts (reward units
    without normalize_decay). None: plain squared error."""
    loss_agg_mode: Aggregation = "token-mean"
    """How its token losses become one number, by the names of algorithm.loss_agg_mode."""
    normalize_decay: BelowOne | None = None
    """Let it predict returns in units of their running mean and standard deviation, in which a step's share fades by
    this every step (0.99 is usual; 0: only the last step counts). None: off."""


class Reference(Section):
    """The frozen policy that a KL term or DPO compares with."""

    path: str | None = None
    """A Hugging Face folder. Default: the policy as it was at the start of the stage."""
    overrides: dict[str, Any] | None = None
    """Values put over the config.json at `path`. Default: model.overrides."""
    reset_interval: Count = 0
    """Copy the policy into the reference every so many steps. 0: never."""
    reset_interval_epochs: Count = 0
    """Copy it after every so many passes over the training rows too, in the step that completes one. 0: not by
    epochs."""
    reset_optimizer: bool = False
    """Forget the moments of the policy's optimizer at each reset; the schedule goes on."""
