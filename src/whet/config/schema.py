"""The one native schema: what an experiment is, and the machine it runs on.

Strict and frozen. The docstring under each field is its documentation: meaning, unit, why that default;
`whet explain KEY` and `docs/config.md` are made from it. No behaviour here: validators may only reject.
`None` means "derived": `whet plan FILE` prints what it became.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Above0 = Annotated[float, Field(gt=0.0)]


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are frozen, no silent type changes."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


# ---------------------------------------------------------------- model


class Scratch(Section):
    """A model made from scratch with random weights, in a Hugging Face architecture."""

    architecture: Literal["llama", "qwen2", "qwen3", "mistral", "gemma", "qwen3_moe"] = "qwen3"
    """Model family; decides the Hugging Face classes used for loading and export."""
    hidden_size: Positive = 128
    """Width of the residual stream."""
    layers: Positive = 3
    """Number of decoder layers."""
    heads: Positive = 4
    """Query heads a layer."""
    kv_heads: Positive | None = None
    """Key/value heads a layer (grouped-query attention); must divide `heads`. Default: `heads`."""
    head_dim: Positive | None = None
    """Width of a head. Default: hidden_size / heads."""
    ffn_size: Positive | None = None
    """Width of the feed-forward layer (of one expert, in a mixture). Default: 3 x hidden_size."""
    max_positions: Positive = 4096
    """Longest sequence the model accepts, in tokens."""
    rope_theta: Above0 = 10000.0
    """Base of the rotary position embedding."""
    tie_embeddings: bool = True
    """Share the embedding with the output layer; halves the parameters of a tiny model."""
    init_std: Above0 = 0.02
    """Standard deviation of the initial weights."""
    experts: Positive = 8
    """Experts a layer (qwen3_moe only)."""
    experts_per_token: Positive = 2
    """Experts used for a token (qwen3_moe only)."""
    sliding_window: Positive | None = None
    """Attention window in tokens (mistral only). Default: full attention."""


class Model(Section):
    """The policy's weights."""

    path: str | None = None
    """A local Hugging Face model folder (config.json, safetensors). Give this or `scratch`."""
    scratch: Scratch | None = None
    """Make a new model instead of loading one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the parameters. Default: float32 on CPU (bfloat16 is slower there), bfloat16 on CUDA."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Values put over the model's own config.json, by its Hugging Face names."""
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


class Critic(Section):
    """The value model of PPO: the policy's architecture with a value head."""

    path: str | None = None
    """Where its weights start. Default: a copy of the policy's at the start of the stage."""
    optimizer: CriticOptimizer = Field(default_factory=lambda: CriticOptimizer())
    """The critic's own optimizer."""
    warmup_steps: Count = 0
    """Steps at the start in which only the critic learns."""
    clip_value: Above0 | None = 0.5
    """Values may move at most this far from their old ones (in reward units). None: plain squared error."""


class Reference(Section):
    """The frozen policy that a KL term or DPO compares with."""

    path: str | None = None
    """A Hugging Face folder. Default: the policy as it was at the start of the stage."""
    reset_every: Count = 0
    """Copy the policy into the reference every so many steps. 0: never."""


# ---------------------------------------------------------------- data


class ReasoningGym(Section):
    """Procedurally generated tasks with their own verifier, from the reasoning-gym package."""

    task: str
    """Name of the reasoning-gym dataset, e.g. spell_backward."""
    size: Positive = 1000
    """How many tasks to generate."""
    seed: Count = 0
    """Seed of the generator; give training and evaluation different ones."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that dataset, e.g. {min_word_len: 3}."""


class Source(Section):
    """One place that rows come from."""

    name: str | None = None
    """Label of this source in metrics. Default: the file's stem or the task's name."""
    path: str | tuple[str, ...] | None = None
    """File, folder, glob or list of them: parquet, jsonl, json, csv, or a Hugging Face dataset folder."""
    reasoning_gym: ReasoningGym | None = None
    """Generate the rows instead."""
    function: str | None = None
    """'package.module:name' or 'path/to/file.py:name' of a function that returns an iterable of rows (dicts)."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `function`."""
    rows: tuple[dict[str, Any], ...] | None = None
    """The rows themselves, for a few; they become part of the config. Large data belongs in files."""
    weight: Above0 = 1.0
    """Share of this source in the mix, relative to the others."""
    prompt: str = "prompt"
    """Column of the prompt: text, or a list of {role, content} messages."""
    answer: str = "answer"
    """Column of the reference answer; dots go into nested columns (verl: reward_model.ground_truth). May be absent."""
    response: str = "response"
    """Column of the demonstration (SFT) or the chosen reply (DPO). May be absent."""
    rejected: str = "rejected"
    """Column of the rejected reply (DPO). May be absent."""
    label: str | None = None
    """Column that holds each row's own source label (verl: data_source). Default: `name` for all rows."""
    template: str | None = None
    """Text put around a plain-text prompt, with {prompt} in it."""
    system: str | None = None
    """System message put before the prompt; makes a chat of a plain-text prompt."""
    limit: Positive | None = None
    """Use only the first so many rows."""


class Data(Section):
    """Where tasks come from, and in what order."""

    train: tuple[Source, ...] = ()
    """Sources of training tasks, mixed by weight."""
    eval: tuple[Source, ...] = ()
    """Sources of held-out tasks; every metric is given per source."""
    exclude_eval: bool = True
    """Leave out training rows whose prompt also stands in `eval`, and count them."""
    shuffle: bool = True
    """Shuffle each source anew in every epoch, by the run's seed."""
    max_prompt_tokens: Positive = 1024
    """Longest prompt, in tokens, after the chat template."""
    overlong: Literal["error", "filter", "truncate_left", "truncate_right", "truncate_middle"] = "error"
    """What to do with a longer one; `filter` counts what it drops. `error`, because a silent cut changes the task."""
    chat: bool | None = None
    """Apply the chat template. Default: to message prompts yes, to plain text no."""


# ---------------------------------------------------------------- algorithm


class Kl(Section):
    """Penalty for leaving the reference policy."""

    place: Literal["loss", "reward"] = "loss"
    """Add it to the loss, or take it off the reward of every token."""
    coef: NonNegative = 0.0
    """Weight; 0 is off, and then no reference is loaded."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Per-token estimator (Schulman 2020): k1 = d, k2 = d^2/2, k3 = exp(-d)-1+d, d = log pi - log ref."""
    target: Above0 | None = None
    """Adaptive controller (in reward only): steer the mean KL to this many nats. None: fixed weight."""
    horizon: Positive = 10000
    """Adaptive controller: rollouts over which it corrects."""


class Algorithm(Section):
    """What is learned from a batch. `name` picks a recipe; every other key replaces one part of it."""

    name: str = "grpo"
    """Recipe: grpo, dr_grpo, dapo, ppo, rloo, reinforce, sft, dpo. `whet explain algorithm.name=grpo` prints it."""
    advantage: str | None = None
    """Advantage estimator: grpo, rloo, gae, reinforce, none. Default: the recipe's."""
    loss: str | None = None
    """Policy loss: ppo, reinforce, sft, dpo. Default: the recipe's."""
    aggregation: (
        Literal[
            "token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-mean",
            "seq-mean-token-sum-norm",
            "prompt-mean",
        ]
        | None
    ) = None
    """How token losses become one number; counts are global, so it does not depend on micro-batches."""
    norm_tokens: Positive | None = None
    """Constant of seq-mean-token-sum-norm (Dr. GRPO). Default: rollout.sampling.max_tokens."""
    normalize_std: bool | None = None
    """GRPO: divide by the group's standard deviation. Default: the recipe's."""
    std_epsilon: Above0 = 1e-6
    """GRPO: added to the standard deviation."""
    clip_low: Above0 | None = None
    """Ratio clip below 1: 1 - clip_low. Default: the recipe's (0.2)."""
    clip_high: Above0 | None = None
    """Ratio clip above 1: 1 + clip_high (clip-higher of DAPO: 0.28). Default: the recipe's."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound the loss of negative advantages at this multiple (arXiv:1912.09729). Default: the recipe's (off)."""
    gamma: Fraction = 1.0
    """Discount of GAE and reinforce."""
    lam: Fraction = 1.0
    """GAE's lambda."""
    whiten: bool | None = None
    """Shift and scale advantages to mean 0 and variance 1 over the batch. Default: the recipe's."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0 is off (entropy is measured anyway where it costs nothing)."""
    kl: Kl = Field(default_factory=Kl)
    """KL to the reference."""
    old_logprobs: Literal["auto", "sampled", "recompute"] = "auto"
    """The ratio's denominator: the engine's own log-probs, or recomputed by the trainer before the update.
    auto: sampled in exact mode (they are equal bit for bit), else recompute."""
    drop_uniform_groups: bool | None = None
    """Dynamic sampling (DAPO): drop groups whose rewards are all equal and ask for more. Default: the recipe's."""
    max_refills: Count = 10
    """Groups that were dropped or failed are asked for again: at most so many times tasks_per_step more tasks for one
    step, then the run stops and names the cause."""
    beta: Above0 = 0.1
    """DPO: inverse temperature."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """DPO: assumed share of flipped labels."""


class Reward(Section):
    """One reward function; a run's reward is the weighted sum of all."""

    function: str
    """Built in (exact, choice, number, math, format, overlong, reasoning_gym) or yours:
    'package.module:name' or 'path/to/file.py:name'."""
    weight: float = 1.0
    """Factor in the sum. 0 only measures."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments given to the function on every call."""


# ---------------------------------------------------------------- rollout


class SamplingConfig(Section):
    """How tokens are sampled."""

    temperature: NonNegative = 1.0
    """Divides the logits; the trainer divides by the same, so what is trained is what was sampled. 0: greedy."""
    top_k: Count = 0
    """Keep the k likeliest tokens. 0: off (a filter makes rollouts off-policy)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keep the smallest set of tokens with this much probability."""
    min_p: Fraction = 0.0
    """Keep tokens with at least this fraction of the likeliest one's probability."""
    repetition_penalty: Above0 = 1.0
    """Divide (multiply, if negative) the logits of tokens that have occurred (arXiv:1909.05858)."""
    max_tokens: Positive = 256
    """Longest reply, in tokens."""
    min_tokens: Count = 0
    """No end token before this many."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a reply, beside the model's own."""
    ignore_eos: bool = False
    """Go on to max_tokens whatever is sampled."""


class Rollout(Section):
    """How the policy is asked."""

    engine: Literal["native", "hf"] = "native"
    """native: embedded, continuous batching, the trainer's weights by reference. hf: transformers, slow."""
    group_size: Positive = 8
    """Rollouts of one task."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling in training."""
    max_batch: Positive = 256
    """Rollouts decoded at once."""
    timeout_s: Above0 = 600.0
    """Longest wait for one rollout; then the run says what it waited for and the rollout counts as failed."""


# ---------------------------------------------------------------- training


class Schedule(Section):
    """Learning rate over the steps of a stage, as a factor of the optimizer's lr."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after the warm-up; wsd: warm-up, stable, decay."""
    warmup_steps: Count | None = None
    """Linear warm-up from 0, in optimizer steps. Give this or warmup_fraction."""
    warmup_fraction: Fraction = 0.0
    """Warm-up as a fraction of all optimizer steps."""
    min_factor: Fraction = 0.0
    """Where linear, cosine and wsd end."""
    decay_fraction: Fraction = 0.1
    """wsd: the last fraction of all steps, in which it decays."""


class Optimizer(Section):
    """AdamW."""

    lr: NonNegative = 1e-6
    """Peak learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: Above0 = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay; not applied to parameters of one dimension (norms, biases)."""
    grad_clip: Above0 | None = 1.0
    """Largest gradient norm. None: no clipping."""
    schedule: Schedule = Field(default_factory=Schedule)
    """Learning-rate schedule."""


class CriticOptimizer(Optimizer):
    """AdamW for the critic: it starts from nothing, so its steps are larger."""

    lr: NonNegative = 1e-5
    """Peak learning rate."""


class Train(Section):
    """One stage of training."""

    steps: Positive | None = None
    """Training steps. Give this or `epochs`."""
    epochs: Above0 | None = None
    """Passes over the training data."""
    tasks_per_step: Positive = 16
    """Tasks of one step (times rollout.group_size: rollouts of one step)."""
    minibatches: Positive = 1
    """Optimizer steps a pass over the batch; must divide tasks_per_step."""
    passes: Positive = 1
    """Passes over each batch (PPO epochs)."""
    micro_tokens: Positive | None = None
    """Most tokens in one forward and backward. Changes memory and speed, never the gradient. Default: 2^19 /
    hidden size on a CPU, 16384 on CUDA."""
    micro_rollouts: Positive | None = None
    """Cut micro-batches by number of rollouts instead."""
    share_prompts: bool = True
    """Compute a group's prompt once instead of once a rollout; equal gradients."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """The policy's optimizer."""
    max_skipped_steps: Count = 10
    """Non-finite gradients skip their optimizer step and are counted; more than this many in a row end the run."""


class Eval(Section):
    """Held-out evaluation."""

    every: Count = 0
    """Evaluate every so many steps. 0: only at start and end."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    samples: Positive = 1
    """Replies a task: mean@k, pass@k and maj@k are given for this k."""
    sampling: SamplingConfig | None = None
    """Sampling in evaluation, put key by key over greedy with the training limits."""
    success: float = 1.0
    """A reply passes when its reward is at least this (exact, no tolerance)."""
    reward: str | None = None
    """Judge by this one reward of `rewards` instead of the weighted sum."""


# ---------------------------------------------------------------- run


class Checkpoint(Section):
    """Saving and resuming: the whole run, to the bit."""

    every: Count = 50
    """Steps between checkpoints. 0: only at the end and on Ctrl-C."""
    keep: Positive = 2
    """How many of the newest are kept."""
    resume: str = "auto"
    """auto: go on where the run directory stands; never: refuse one that holds a run; or a path of a checkpoint."""
    export: bool = True
    """Write a Hugging Face folder `export/` at the end of each stage."""


class Track(Section):
    """What is written down."""

    trackers: tuple[Literal["console", "jsonl", "tensorboard"], ...] = ("console", "jsonl")
    """Where numbers go. jsonl is always written; console is the live display."""
    rollouts_every: Count = 1
    """Write every rollout of each n-th step to rollouts/STAGE-step-N.parquet. 0: none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of run.log; the console shows warnings only, at debug everything."""


class Guard(Section):
    """What keeps foreign code (rewards) from hurting a run."""

    workers: Positive = 1
    """Reward processes."""
    timeout_s: Above0 = 10.0
    """Longest time for one reward call; then its process is killed and the rollout marked unscored."""
    memory_mb: Positive = 2048
    """Address space a reward process may add to what it starts with."""
    max_output_bytes: Positive = 65536
    """What a reward may print before the rest is dropped."""
    max_failure_rate: Fraction = 0.5
    """End the run when more than this share of a step's rollouts could not be scored; the cause is named."""


class Machine(Section):
    """What the run may use of this machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    threads: Positive | None = None
    """CPU threads of torch. Default: OMP_NUM_THREADS, else the cores this process may use."""
    exact: Literal["auto", "on", "off"] = "auto"
    """Sampled log-probs equal the trainer's bit for bit. auto: on CPU yes, and a self-test says whether it held;
    on: refuse to run if it does not hold."""
    kernels: Literal["auto", "torch", "compiled"] = "auto"
    """CPU kernels: compiled C where a compiler is at hand, or their PyTorch twins."""
    kv_cache_mb: Positive | None = None
    """Memory of the rollout engine's KV cache. Default: what max_batch rows of full length need."""


class Stage(Section):
    """One stage of a run. It inherits the whole config; what stands here is put over it."""

    name: str
    """Label of the stage, in the display and in paths."""
    algorithm: dict[str, Any] = Field(default_factory=dict)
    """Keys put over `algorithm`."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Keys put over `data`."""
    rewards: dict[str, Any] = Field(default_factory=dict)
    """Keys put over `rewards`."""
    rollout: dict[str, Any] = Field(default_factory=dict)
    """Keys put over `rollout`."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Keys put over `train`."""
    critic: dict[str, Any] = Field(default_factory=dict)
    """Keys put over `critic`."""
    reference: dict[str, Any] = Field(default_factory=dict)
    """Keys put over `reference`."""
    eval: dict[str, Any] = Field(default_factory=dict)
    """Keys put over `eval`."""


class Config(Section):
    """A whole run."""

    name: str = "run"
    """Name of the run."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random number of the run is a function of this."""
    run_dir: str = "runs/${name}"
    """Everything the run writes lies in here."""
    model: Model = Field(default_factory=Model)
    """The policy."""
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    """The tokenizer."""
    critic: Critic = Field(default_factory=Critic)
    """The value model; used where the advantage is gae."""
    reference: Reference = Field(default_factory=Reference)
    """The reference policy; used where a KL term or DPO needs it."""
    data: Data = Field(default_factory=Data)
    """Tasks."""
    algorithm: Algorithm = Field(default_factory=Algorithm)
    """What is learned."""
    rewards: dict[str, Reward] = Field(default_factory=dict)
    """Reward functions by name."""
    rollout: Rollout = Field(default_factory=Rollout)
    """How the policy is asked."""
    train: Train = Field(default_factory=Train)
    """Steps, batches, optimizer."""
    eval: Eval = Field(default_factory=Eval)
    """Held-out evaluation."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Saving and resuming."""
    track: Track = Field(default_factory=Track)
    """Metrics and records."""
    guard: Guard = Field(default_factory=Guard)
    """Limits for reward code."""
    machine: Machine = Field(default_factory=Machine)
    """Devices, threads, memory."""
    stages: tuple[Stage, ...] = ()
    """Stages run one after the other, each from where the last one ended. Default: one stage, this config."""


Critic.model_rebuild()
