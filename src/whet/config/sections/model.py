"""Sections about models: adapters, the policy, its tokenizer, the critic, the reference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from whet.config.sections.algorithm import Aggregation
from whet.config.sections.base import Above0, BelowOne, Count, Interval, Positive, Section
from whet.config.sections.train import CriticOptimizerConfig

FastPissa = Annotated[str, Field(pattern=r"^pissa_niter_[1-9][0-9]*$", examples=["pissa_niter_16"])]


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685): W + scale B A replaces W, and only A and B are trained. The keys mean
    what they mean in peft; where its name differs, it is given. A learning rate about ten times that of full
    fine-tuning is usual."""

    rank: Positive = 16
    """Number of rows of A and of columns of B. Adapters, their gradients and their optimizer state grow in proportion.
    (peft: r; verl: lora_rank)"""
    alpha: Above0 = 32.0
    """Numerator of the scale: alpha / rank. At a fixed alpha the best learning rate hardly depends on the rank. (peft:
    lora_alpha)"""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv:2312.03732), so that the effect of adapters of high rank does not
    shrink. (peft: use_rslora)"""
    dropout: BelowOne = 0.0
    """Dropout on the input features of an adapter, in training. Sampling has no dropout, so sampled and trained
    log-probs differ. (peft: lora_dropout)"""
    targets: str | tuple[str, ...] = "all-linear"
    """Layers with adapters: all-linear (every linear layer except the output layer), a list of names (`q_proj` matches
    this layer in every block), or a regular expression for the whole name. (peft: target_modules) Experts of a mixture
    have their matrices in stacks, which are no linear layers; their names are `gate_up_proj` and `down_proj` (in a
    list, beside all-linear, too). `gate_proj` and `up_proj` together name the first stack; its adapter then has twice
    the rank, as in peft, or, with `fused`, one rank."""
    exclude_modules: str | tuple[str, ...] = ()
    """Layers without adapters, even if `targets` matches them: a list of names, or a regular expression for the whole
    name. Such an expression may match nothing."""
    fused: bool = False
    """One A for the layers that Megatron-LM computes as one (queries, keys and values; gate and up), each with its own
    B, as LoRA of Megatron-Bridge. Exports for peft repeat A for each layer."""
    experts: Literal["each", "shared"] | None = None
    """A and B of the matrices of experts. each: every expert has its own, as in peft; shared: all experts of a layer
    have one, as in Megatron-Bridge (share_expert_adapters); an export for peft repeats it for each expert. Default:
    shared with `fused`, else each."""
    rank_pattern: dict[str, Positive] = Field(default_factory=dict)
    """Ranks of single layers, by a regular expression for the end of the name; the first match counts."""
    alpha_pattern: dict[str, Above0] = Field(default_factory=dict)
    """Values of alpha for single layers, by the same patterns."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained in full, without adapters, by the end of their name, e.g. `lm_head` or `norm`."""
    init: Literal["default", "random", "gaussian", "orthogonal", "olora", "pissa", "xavier"] | FastPissa = (
        "default"
    )
    """Initial values of A and B. (peft: init_lora_weights) default: A uniform (Kaiming), B 0, so that the model is
    unchanged; gaussian, xavier: A normal with deviation 1 / rank, or sqrt(2 / (rank + inputs)), and B 0; random: B
    random too; orthogonal: both random with B A = 0; olora (arXiv:2406.01775), pissa (arXiv:2404.02948): from a
    decomposition of the weights; pissa_niter_16: pissa with singular vectors from 16 iterations of subspace
    iteration."""
    path: str | None = None
    """Folder with adapters to start from, in the format of peft (adapter_model.safetensors). Default: new adapters, by
    `init`."""


class ModelConfig(Section):
    """The policy: its weights, their dtype, and adapters."""

    path: str | None = None
    """Folder of a Hugging Face model (config.json, safetensors), or a URL that is fetched once (hf://ORG/NAME, s3://,
    gs://, hdfs://). (verl: model.path; TRL: model_name_or_path) A plain ORG/NAME is a folder here. Give either this or
    `scratch`."""
    scratch: str | dict[str, Any] | None = None
    """Create a new model with random weights instead of loading one: the name of its family, or a table of the name and
    entries of its config.json: {name: qwen3, hidden_size: 256}. Without a name it is qwen3; `whet explain
    model.scratch` lists the families; further entries of config.json may be given in `overrides`."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the parameters. Default: float32 on CPU, bfloat16 on CUDA. float16 trains with loss scaling
    (train.precision). On a CPU that multiplies bfloat16 itself (AMX, AVX512_BF16) bfloat16 is faster for models that
    are not small: `whet plan` says so."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Values that override entries of the model's config.json, by their Hugging Face names. Sections such as
    rope_parameters are joined."""
    lora: LoraConfig | None = None
    """Train low-rank adapters, so that only these need gradients and optimizer state. Default: all weights are
    trained."""
    mtp: str | dict[str, Any] | None = None
    """Layers of multi-token prediction (arXiv:2412.19437, section 2.2), which learn beside the policy: the name of what
    they learn, or a table of the name and its settings: {name: cross_entropy, coef: 0.1}. Without a name it is
    cross_entropy. The policy's log-probs and samples do not depend on them. Default: the policy has none; an export
    keeps those that the folder of model.path has."""
    expert_grid: Literal["int4_rtn", "int4_kimi"] | None = None
    """Round the frozen matrices of experts to the numbers that a checkpoint in INT4 has, where such a checkpoint is
    served with the adapters: 16 numbers for each group of 32 inputs. int4_rtn: as llm-compressor rounds; int4_kimi: as
    Kimi K2. The engine samples with these weights. Default: the weights as they are."""


class TokenizerConfig(Section):
    """Text to tokens and back."""

    path: str | None = None
    """Folder of a Hugging Face tokenizer. Default: the model's folder."""
    build: Literal["chars", "words", "bpe"] | None = None
    """Build a tokenizer from the training data instead of loading one: one token per character (chars), per word
    (words), or byte-pair encoding (bpe). Only with model.scratch."""
    vocab_size: Positive = 1024
    """With `build`: largest number of tokens of the vocabulary."""
    chat_template: str | None = None
    """Jinja chat template: text, or the path of a file. Default: the template of the tokenizer."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, e.g. {enable_thinking: false}; an exported tokenizer has them as defaults."""
    date: str | None = None
    """Current date for the chat template (its strftime_now), such as 2026-01-31; the time is 0:00. Default: the date
    (UTC) on which the run began; a resumed run keeps it."""


class CriticConfig(Section):
    """The model that learns beside the policy and judges its tokens: PPO's value model, the policy's architecture with
    a value head, or PRIME's implicit reward model, a language model."""

    path: str | None = None
    """Folder of the initial weights. (verl: critic.model.path) Default: a copy of the policy's weights at the start of
    the stage."""
    head: str | None = None
    """Name of the value head among the weights at `path`: HEAD.weight, with one row, and HEAD.bias if there is one.
    With null, or if the weights do not have this name, the value head is new, with values near 0."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of the critic (its value head is trained in full). Default: the whole critic is
    trained."""
    optimizer: CriticOptimizerConfig = Field(default_factory=CriticOptimizerConfig)
    """The optimizer of the critic."""
    warmup_steps: Count = 0
    """Training steps at the start of the stage in which only the critic is trained; train.steps includes them. (verl:
    critic_warmup)"""
    minibatches: Positive | None = None
    """Optimizer steps of the critic per update epoch. Default: train.minibatches."""
    update_epochs: Positive | None = None
    """Update epochs of the critic on each batch. Default: train.update_epochs."""
    micro_batch_tokens: Positive | None = None
    """Maximum tokens in one forward and backward of the critic. Default: the micro-batches of the policy."""
    micro_batch_rollouts: Positive | None = None
    """Maximum rollouts in one forward and backward of the critic, in place of a maximum of tokens: give one of the two.
    Default: the micro-batches of the policy."""
    gradient_checkpointing: bool | None = None
    """Recompute the activations of the critic in backward: less memory, more time. Default:
    train.gradient_checkpointing."""
    overrides: dict[str, Any] | None = None
    """Values that override entries of the config.json at `path`. Default: model.overrides."""
    value_clip: Above0 | None = 0.5
    """Clip range of the value loss: the larger of the squared errors of the value, and of the value clipped to at most
    this far from its old value. (verl: cliprange_value) The unit is that of the predictions of the critic (reward units
    without normalize_decay). null: plain squared error."""
    loss_agg_mode: Aggregation = "token-mean"
    """How losses of tokens become the loss of a minibatch; the modes are those of algorithm.loss_agg_mode."""
    normalize_decay: BelowOne | None = None
    """Decay per step of the running mean and standard deviation of the returns; the critic then predicts returns
    normalized by them (0.99 is usual; 0: only the last step counts). null: no normalization."""


class ReferenceModelConfig(Section):
    """One of several references."""

    path: str
    """A Hugging Face folder or its URL, as in model.path. The model must have the tokenizer of the policy."""
    values: tuple[str, ...]
    """Labels of the tasks whose rollouts it scores: values of reference.column."""


class ReferenceConfig(Section):
    """The frozen model that a KL term or DPO compares the policy with, or the teacher of distillation."""

    path: str | None = None
    """A Hugging Face folder or its URL, as in model.path. Default: the policy at the start of the stage; with
    model.lora that shares the weights under the adapters with the policy, and a folder takes memory of its own."""
    models: tuple[ReferenceModelConfig, ...] = ()
    """Several references instead of one: each rollout is scored by the model that has the label of its task among its
    `values`, and by no other. A rollout whose label no model has stops the run. (verl: distillation.teacher_models)"""
    column: str | None = None
    """With `models`: the column of the row that has the label. (verl: distillation.teacher_key) Default: the source of
    the task, see data.train.label."""
    overrides: dict[str, Any] | None = None
    """Values that override entries of the config.json at `path`, and of those of `models`. Default:
    model.overrides."""
    reset_interval: Interval = 0
    """Steps between copies of the policy into the reference (TRL: ref_model_sync_steps), `4 steps from 3` (the first
    copy after step 3), `1 epoch` of the training data (the copy is made in the step that completes it), or a list of
    these. 0: never."""
    mixup_alpha: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Weight of the policy in such a copy: the reference becomes alpha * policy + (1 - alpha) * reference, weight by
    weight (TR-DPO's soft update, arXiv:2404.09656; TRL: ref_model_mixup_alpha). 1: the policy itself."""
    reset_optimizer: bool = False
    """Reset the moments of the policy's optimizer at each such copy; its schedule continues."""
