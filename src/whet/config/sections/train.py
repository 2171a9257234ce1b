"""Sections about steps, batches and optimizers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from whet.config.sections.base import Above0, BelowOne, Count, Fraction, NonNegative, Positive, Section, Share
from whet.config.sections.parallel import ParallelConfig
from whet.config.sections.precision import PrecisionConfig


class ScheduleConfig(Section):
    """Schedule of learning rate and weight decay over the steps of a stage. Numbers of steps are in `unit`, counted
    from 0."""

    type: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """Shape after the warm-up. constant; linear, cosine: decay to min_lr_ratio at the end; inverse_sqrt: sqrt(warm-up /
    step); wsd: constant, then a decay over the last `decay_steps`. (verl, transformers: lr_scheduler_type)"""
    unit: Literal["optimizer_step", "train_step"] = "optimizer_step"
    """Unit of a step of the schedule: each optimizer step (SkyRL), or a training step with all its minibatches and
    update epochs (verl, Cosmos)."""
    warmup_steps: Count | BelowOne = 0
    """Steps of linear warm-up from warmup_start_ratio to 1, or, below 1, their share of all steps, rounded down."""
    warmup_start_ratio: Fraction = 0.0
    """Factor of the learning rate at the start of the warm-up."""
    warmup_ends: Literal["neither", "start", "peak", "both"] = "neither"
    """Which ends of the ramp are warm-up steps themselves. Progress in step s of W: neither (s+1)/(W+1), start s/W
    (with warmup_start_ratio=0 the first step changes nothing), peak (s+1)/W, both s/(W-1)."""
    min_lr_ratio: Fraction = 0.0
    """Final factor of linear, cosine and wsd, and lower bound of inverse_sqrt."""
    total_steps: Positive | None = None
    """Step at which the decay ends, warm-up included; the factor is min_lr_ratio from there on. Default: all steps of
    the stage."""
    num_cycles: Above0 = 0.5
    """cosine: number of waves over the decay; with 0.5 the factor decreases once."""
    decay_steps: Positive | Share | None = 0.1
    """wsd: steps of the decay at the end, or, below 1, their share of all steps, rounded down; limited to those
    after the warm-up. null: all of these."""
    decay_type: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """wsd: shape of the decay, with q the finished share of it: 1-q; (1+cos(2 pi cycles q))/2; 2*0.5^q-1; 1-sqrt(q)."""
    weight_decay_end: NonNegative | None = None
    """Weight decay at the end of the stage; optimizer.weight_decay is the value at the start. Default: the same."""
    weight_decay_type: Literal["linear", "cosine"] = "linear"
    """Shape of the change of weight decay, with x the finished share of all steps: x; (1-cos(pi x))/2."""


class OptimizerGroupConfig(Section):
    """Settings of one group of parameters."""

    lr_factor: NonNegative = 1.0
    """Factor on the learning rate."""
    weight_decay: NonNegative | None = None
    """Weight decay of the group, constant, for parameters of any dimension. Default: the optimizer's."""


class OptimizerConfig(Section):
    """The optimizer and its settings."""

    lr: NonNegative = 1e-6
    """Peak learning rate."""
    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """Optimizer. adam: weight decay is added to the gradient, as in sgd; muon: orthogonalized momentum for the matrices
    inside the model, adamw for embeddings, output layer, value head, norms and biases."""
    param_groups: dict[str, OptimizerGroupConfig] = Field(default_factory=dict)
    """Parameters with a different learning rate or weight decay, by a regular expression that is searched in their
    names, such as `embed_tokens`; the first match counts."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the running means of gradients and of squared gradients, of adam and adamw."""
    eps: Above0 = 1e-8
    """Term added to the square root of Adam's second moment."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of Adam's moments. bfloat16: half the memory; a step is computed in float32, and its moments are rounded to
    the nearest. (verl: exp_avg_dtype) int8: one byte per entry and one scale per block of 256, a quarter of the memory;
    rounding is stochastic, with the same random numbers in every run."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How torch computes an optimizer step; the results are equal up to rounding. fused: one pass over the numbers, the
    fastest; foreach: one operation at a time over all tensors; for-loop: tensor by tensor."""
    momentum: BelowOne | None = None
    """Decay rate of the running mean of sgd (default 0: none) and muon (default 0.95)."""
    weight_decay: NonNegative = 0.0
    """Weight decay; decoupled from the gradient in adamw and muon."""
    decay_all: bool = False
    """Apply weight decay also to parameters of one dimension (norms, biases), as torch does by default. Default: these
    have no weight decay."""
    max_grad_norm: Above0 | None = 1.0
    """Largest gradient norm, over all trained parameters of the model; gradients are clipped to it. (verl: grad_clip;
    TRL: max_grad_norm) null: the norm is only measured."""
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """Learning rate and weight decay over the steps."""


class PolicyOptimizerConfig(OptimizerConfig):
    """The optimizer of the policy."""

    lr: NonNegative | None = None  # type: ignore[assignment]  # a stage's config has a number: `derived.with_lr`
    """Peak learning rate. Default, by the method: 1e-6 for reinforcement learning and preferences (DPO, KTO), 1e-5 for
    SFT; with model.lora 1e-5, and 2e-4 for SFT. `whet plan` prints it."""


class CriticOptimizerConfig(OptimizerConfig):
    """The optimizer of the critic. Its value head starts untrained, so its default learning rate is larger than the
    policy's."""

    lr: NonNegative = 1e-5
    """Peak learning rate."""


class EvalMetricConfig(Section):
    """A metric that compares the evaluations of a stage."""

    metric: str = "eval/accuracy"
    """Metric of evaluations, by its name in metrics.jsonl."""
    goal: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is best."""


class EarlyStoppingConfig(EvalMetricConfig):
    """When a stage ends before its last step."""

    patience: Positive = 3
    """Number of evaluations in a row without an improvement that end the stage. (transformers:
    early_stopping_patience)"""
    threshold: NonNegative = 0.0
    """An evaluation is an improvement if it is better than the best before it by more than this. (transformers:
    early_stopping_threshold)"""


class TrainConfig(Section):
    """One stage of training."""

    steps: Count | None = None
    """Training steps. Give this, `epochs`, or both; the earlier end counts. 0: the config is for `whet eval FILE`,
    which evaluates the model as it is."""
    epochs: Above0 | None = None
    """Epochs over the training data. The number of steps follows at the start: rows * epochs / tasks_per_step (see
    drop_last). Tasks that replace dropped or failed groups are drawn in addition, so the data may be passed more
    often."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the stage when its evaluations (`eval.interval`) stop improving; it is saved and exported as after the last
    step. The learning-rate schedule still covers all steps. To continue a run that has ended early, raise `patience` or
    remove this key."""
    drop_last: bool | Literal["end"] = False
    """true: every epoch ends with its last full step; the remaining rows are not used in that epoch. end: a step may
    continue over the end of an epoch, and only the run ends with its last full step. false: the run draws the remaining
    rows of the last epoch, too, and fills its last step with rows of a further epoch."""
    tasks_per_step: Positive = 16
    """Tasks of one step; times rollout.group_size: rollouts of one step. (verl: train_batch_size)"""
    minibatches: Positive = 1
    """Optimizer steps per update epoch. It divides tasks_per_step, and each minibatch has whole groups; or it divides
    the rollouts of a step, and groups are cut (not with pairs, prompt-mean or a mix). Advantages are those of the whole
    group in any case. (verl: train_batch_size / ppo_mini_batch_size)"""
    update_epochs: Positive = 1
    """Update epochs: how often each batch is trained on. (verl: ppo_epochs; TRL: num_iterations)"""
    shuffle_minibatches: bool = False
    """Partition the groups (or rollouts, where groups are cut) into minibatches again in every update epoch, by the
    seed. (verl: actor.shuffle) false: every update epoch has the same minibatches, in the order of arrival."""
    micro_batch_tokens: Positive | None = None
    """Maximum tokens in one forward and backward, on each data-parallel rank; a longer rollout is a micro-batch of its
    own. (verl: ppo_max_token_len_per_gpu) It changes memory and speed, never the gradient. Default: 16384 on CUDA; on a
    CPU 2^19 / hidden size, at least 512."""
    micro_batch_rollouts: Positive | None = None
    """Maximum rollouts in one forward and backward, in place of a maximum of tokens: give one of the two. (verl:
    ppo_micro_batch_size_per_gpu; TRL: per_device_train_batch_size)"""
    forward_micro_batch_tokens: Positive | None = None
    """Maximum tokens in one forward without gradient (old and reference log-probs, values), of every model. It keeps no
    activations, so it may be several times that of training. Default: as in training."""
    forward_micro_batch_rollouts: Positive | None = None
    """Maximum rollouts in one forward without gradient, in place of a maximum of tokens."""
    share_prompts: bool = True
    """Compute the prompt of a group once instead of once per rollout; equal gradients."""
    skip_zero_weight: bool = True
    """Skip rollouts whose weight in the gradient is 0, as in a group with equal rewards: they take no part in log-probs
    and update; equal gradients. Statistics of the update then cover the other rollouts; at least one own rollout per
    optimizer step is computed. Rollouts that the loss, KL, entropy or router could read are computed, and run.log gives
    the reason."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time. (verl: enable_gradient_checkpointing)
    Without it, an update on a CPU may take over activations that sampling has computed; with it, none are kept."""
    offload: tuple[Literal["optimizer", "activations", "critic", "reference", "policy"], ...] = ()
    """State that is kept in host memory while a GPU does not need it; slower, with less GPU memory. optimizer: moments
    and master weights outside the optimizer step; activations: what layers keep for the backward pass; critic,
    reference: their weights while they do not compute; policy: its weights on the ranks of `parallel` (in one process
    they stay on the GPU, because rollouts are sampled from them). Weights that dp_shard shards, their gradients and
    moments are then always on the host and fetched layer by layer."""
    compile: bool = False
    """Compile every layer of the trained models with torch.compile, except attention: it takes about a minute at the
    start and is faster on a GPU. Needs a C++ compiler (CPU) or Triton (GPU)."""
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    """Dtypes of training in addition to model.dtype."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Layout of the processes that train together."""
    engine: str = "torch"
    """What trains. torch: FSDP2, and all layouts of `parallel`; deepspeed: ZeRO, over dp_shard ranks. Both compute the
    same numbers up to rounding, and read each other's checkpoints. simulated: nothing is learned and a step waits for
    some seconds, to measure sampling, rewards and schedule alone, with no memory for gradients, optimizer, critic or
    reference; settings of the algorithm are checked and not used, and the model stays as it is. Or an engine of yours
    as 'package.module:name' or 'path/to/file.py:name', called as whet.training.torch.TorchEngine is: it gives the
    whet.training.engine.TrainEngine of policy, reference and critic. With `parallel` a subclass of TorchEngine."""
    engine_arguments: str | dict[str, Any] = Field(default_factory=dict)
    """Settings of the engine; one of yours is called with them by name. simulated: {step_s: 30, sync_s: 0}, the seconds
    of a training step, and those for which sampling pauses before each weight sync, which does take place. deepspeed: a
    deepspeed_config, as a JSON file or a table: {zero_optimization: {stage: 2}}. stage: 1 shards the state of the
    optimizer, 2 gradients too, 3 (default) parameters too; offload_optimizer: {device: cpu} keeps the state in the
    host's memory. Batches, optimizer, clipping, schedule and dtypes stay those of `train` and `model`: what whet sets
    may be left out, "auto", or equal; where it differs, or changes what is trained (fp16, schedulers, elasticity ...),
    it is refused. All else is passed on."""
    trainable: dict[str, bool] = Field(default_factory=dict)
    """Which parameters of the policy are trained (true) or frozen (false), by regular expressions that are searched in
    their names; the first match counts, parameters without a match are trained. `{lm_head: true, ".*": false}` trains
    the output layer alone, `{mlp.gate: false}` freezes the routers of a mixture of experts. With model.lora: among the
    parameters that it leaves trainable."""
    optimizer: PolicyOptimizerConfig = Field(default_factory=PolicyOptimizerConfig)
    """The policy's optimizer."""
    router_aux_loss_coef: NonNegative = 0.0
    """Mixtures of experts: coefficient of the load-balancing loss (Switch Transformer, as transformers computes it from
    `router_aux_loss_coef`), which penalizes routers that prefer few experts; 0.001 is usual. It is one term for all
    tokens of a minibatch, and takes one more forward pass. Default: none, as in transformers' own models."""
    router_aux_loss_scope: Literal["model", "layer"] = "model"
    """model: one load-balancing loss over all layers together, as in transformers. layer: one loss per layer, with the
    choices divided by the number of experts per token; the losses are summed, as in Megatron-LM (aux_loss). With
    perfectly balanced routers the loss is num_experts_per_tok (model), or 1 per layer (layer)."""
    router_z_loss_coef: NonNegative = 0.0
    """Mixtures of experts: coefficient of the z-loss (ST-MoE, arXiv:2202.08906), the mean over tokens of the squared
    logsumexp of a router's logits, added up over layers; 0.001 is usual. It keeps the logits small."""
    router_replay: Literal["none", "sampled", "old"] = "none"
    """Mixtures of experts: which experts compute a token in training. none: those that its routers choose now. sampled:
    those that sampled it (rollout routing replay, R3, arXiv:2510.11370), in the log-probs before the step and in its
    updates. old: those of the policy before the step (R2), in its updates. (verl: router_replay.mode; SkyRL:
    moe_enable_routing_replay; Trinity: enable_router_replay) Weights are those of the current scores at these experts,
    with gradient. References and critics use their own experts. `sampled` adds to a rollout a byte (two from 257
    experts on) for each token, layer and expert of a token."""
    temperature: Above0 | None = None
    """Divisor of all logits in the trainer. Default: the temperature at which a rollout was sampled, so that sampling
    and training have the same distribution."""
    max_skipped_steps: Count = 5
    """Maximum number of consecutive skipped optimizer steps; more end the run. A gradient that is not finite skips its
    optimizer step and is counted, and rollouts that had only skipped steps are counted as not trained on. With float16
    the count starts when the loss scale is down to 1."""
