"""Sections about steps, batches and optimizers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.config.parts.base import Above0, BelowOne, Count, Fraction, NonNegative, Positive, Section
from whet.config.parts.parallel import Parallel
from whet.config.parts.precision import Precision


class Schedule(Section):
    """Learning rate and weight decay over the steps of a stage. Numbers of steps are in `unit`, counted from 0."""

    type: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """Shape after the warm-up. linear, cosine: down to min_lr_ratio at the end; inverse_sqrt: sqrt(warm-up / step);
    wsd: warm-up, stable, decay."""
    unit: Literal["optimizer_step", "train_step"] = "optimizer_step"
    """What a step of the schedule is: every optimizer step (SkyRL), or a training step with all its minibatches and
    passes (verl, Cosmos)."""
    warmup_steps: Count | None = None
    """Linear warm-up from warmup_start_ratio to 1. Give this or warmup_ratio."""
    warmup_ratio: Fraction = 0.0
    """Warm-up as a fraction of all steps, rounded down."""
    warmup_start_ratio: Fraction = 0.0
    """Factor at which the warm-up starts."""
    warmup_ends: Literal["neither", "start", "peak", "both"] = "neither"
    """Which ends of the ramp are warm-up steps themselves. Way done in step s of W: neither (s+1)/(W+1), start s/W
    (with warmup_start_ratio=0 the first step moves nothing), peak (s+1)/W, both s/(W-1)."""
    min_lr_ratio: Fraction = 0.0
    """Where linear, cosine and wsd end; inverse_sqrt does not go below."""
    total_steps: Positive | None = None
    """Step at which the shape has ended, warm-up included; min_lr_ratio from there on. Default: all steps of the
    stage."""
    num_cycles: Above0 = 0.5
    """cosine: waves over the decay; 0.5 goes down once."""
    decay_steps: Positive | None = None
    """wsd: the last steps, in which it decays. Give this or decay_ratio."""
    decay_ratio: Fraction = 0.1
    """wsd: the same as a fraction of all steps, rounded down; at most what the warm-up leaves."""
    decay_type: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """wsd, q of the decay done: 1-q; (1+cos(2 pi cycles q))/2; 2*0.5^q-1; 1-sqrt(q)."""
    weight_decay_end: NonNegative | None = None
    """Weight decay at the end of the stage, where optimizer.weight_decay is at the start. Default: the same."""
    weight_decay_type: Literal["linear", "cosine"] = "linear"
    """How weight decay gets there, x of all steps done: x; (1-cos(pi x))/2."""


class OptimizerGroup(Section):
    """Parameters with terms of their own."""

    lr_factor: NonNegative = 1.0
    """Times the learning rate of all."""
    weight_decay: NonNegative | None = None
    """Their weight decay, in all steps, whatever their dimension. Default: that of all."""


class Optimizer(Section):
    """How weights follow their gradients."""

    lr: NonNegative = 1e-6
    """Peak learning rate."""
    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """adam: weight decay is added to the gradient, as in sgd; muon: momentum made orthogonal for the matrices inside
    the model, adamw for embeddings, output layer, value head, norms and biases."""
    param_groups: dict[str, OptimizerGroup] = Field(default_factory=dict)
    """Parameters with another learning rate or weight decay, by a regular expression found in their names, such as
    `embed_tokens`; the first that fits counts."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay of the two moments of Adam."""
    eps: Above0 = 1e-8
    """Added to the square root of Adam's second moment."""
    state_dtype: Literal["float32", "int8"] = "float32"
    """How Adam's moments are kept. int8: a byte an entry and a scale a block of 256, a quarter of the memory; rounded
    by chance, the same chance in every run."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How torch computes a step; equal up to rounding. fused: one pass over the numbers, the fastest; foreach: an
    operation at a time over all tensors; loop: tensor by tensor."""
    momentum: BelowOne | None = None
    """Decay of the running mean of sgd (default 0: none) and muon (default 0.95)."""
    weight_decay: NonNegative = 0.0
    """Weight decay; decoupled from the gradient in adamw and muon."""
    decay_all: bool = False
    """Decay parameters of one dimension (norms, biases) too, as torch does by itself. Default: they are spared."""
    max_grad_norm: Above0 | None = 1.0
    """Largest gradient norm. None: the norm is measured only."""
    schedule: Schedule = Field(default_factory=Schedule)
    """Learning rate and weight decay over the steps."""


class CriticOptimizer(Optimizer):
    """The critic's: it starts from nothing, so its steps are larger."""

    lr: NonNegative = 1e-5
    """Peak learning rate."""


class Train(Section):
    """One stage of training."""

    steps: Positive | None = None
    """Training steps. Give this, `epochs`, or both: then whichever ends first."""
    epochs: Above0 | None = None
    """Passes over the training data."""
    drop_last: bool = False
    """End every epoch with its last full step: the rows left over are not asked in that epoch. Default:
    steps go on over the end of an epoch."""
    tasks_per_step: Positive = 16
    """Tasks of one step (times rollout.group_size: rollouts of one step)."""
    minibatches: Positive = 1
    """Optimizer steps a pass over the batch; must divide tasks_per_step."""
    update_epochs: Positive = 1
    """Passes over each batch (PPO epochs)."""
    shuffle_minibatches: bool = False
    """Deal the groups out to the minibatches anew in every pass, by the seed. Default: in the order they came."""
    micro_batch_tokens: Positive | None = None
    """Most tokens in one forward and backward. Changes memory and speed, never the gradient. Default: 2^19 /
    hidden size on a CPU, 16384 on CUDA."""
    micro_batch_rollouts: Positive | None = None
    """Cut micro-batches by number of rollouts instead."""
    forward_micro_batch_tokens: Positive | None = None
    """Most tokens in one forward without gradient (old and reference log-probs, values), of every model. Default: as
    in training."""
    forward_micro_batch_rollouts: Positive | None = None
    """Cut those by number of rollouts instead."""
    share_prompts: bool = True
    """Compute a group's prompt once instead of once a rollout; equal gradients."""
    skip_zero_weight: bool = True
    """Leave rollouts out of log-probs and update whose weight in the gradient is 0, as in a group with equal rewards;
    equal gradients. Statistics of the update are then over the others; of the policy's own at least one an optimizer
    step is computed. What loss, KL, entropy or router could read is computed, and run.log says why."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    offload: tuple[Literal["optimizer", "activations", "critic", "reference", "policy"], ...] = ()
    """What lies in the host's memory while a GPU does not need it: moments and master weights but for the optimizer
    step, what layers keep for the backward pass, the weights of the critic or the reference while they rest. Slower,
    more room on the GPU. policy: its weights on the ranks of `parallel`; in one process they stay, for rollouts are
    sampled from them. Weights that dp_shard cuts, their gradients and moments are on the host always, and fetched layer
    by layer."""
    compile: bool = False
    """Compile every layer of the trained models with torch.compile, between the attentions: about a minute at the
    start; faster on a GPU. Needs a C++ compiler (CPU) or Triton (GPU)."""
    precision: Precision = Field(default_factory=Precision)
    """Dtypes of training beside model.dtype."""
    parallel: Parallel = Field(default_factory=Parallel)
    """Processes that train together."""
    trainable: dict[str, bool] = Field(default_factory=dict)
    """Which parameters of the policy learn (true) or stay as they are (false), by regular expressions found in their
    names; the first that fits counts, others learn. `{lm_head: true, ".*": false}` trains the output layer alone,
    `{mlp.gate: false}` keeps the routers of a mixture of experts. With model.lora: among what it leaves to learn."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """The policy's optimizer."""
    router_aux_loss_coef: NonNegative = 0.0
    """Mixtures of experts: coefficient of the load-balancing term (Switch Transformer, as transformers computes it from
    `router_aux_loss_coef`), which pays for routers that prefer few experts; 0.001 is usual. It is one term for all
    tokens of a minibatch, and takes one more forward pass. Default: none, as in transformers' own models."""
    temperature: Above0 | None = None
    """What the trainer divides logits by. Default: rollout.sampling.temperature, so that what is trained is what was
    sampled."""
    max_skipped_steps: Count = 5
    """Non-finite gradients skip their optimizer step and are counted, and rollouts that only such steps had are booked
    as not trained on; more than this many in a row end the run. With float16, from when its loss scale is down to 1."""
