"""Sections about how the policy is asked."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from whet.config.parts.base import Above0, Count, Fraction, NonNegative, Positive, Section


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
    replicas: Count = 0
    """Engines, each in a process of its own with its own copy of the weights, by Ray (see `cluster`). 0: one engine,
    in the trainer's process, on the trainer's weights."""
    quantization: Literal["float8", "int8"] | None = None
    """Sample from a copy of the weights in 8 bits, made anew at every weight sync; training keeps its own. Each row of
    a matrix, and each token's activations, are scaled by their largest number. Embedding, norms, routers, output
    layer, biases, KV cache and matrices with a side that 16 does not divide stay as they are. float8 (e4m3): for GPUs
    of compute capability 8.9 (L4, H100 ...); on a CPU it works, and is many times slower. int8: for GPUs of 7.5 and
    for CPUs, where large matrices are faster than in float32. Evaluations are sampled from it, too. Sampled and trained
    log-probs differ (train/mismatch_*), so old ones are computed anew; think of algorithm.correction."""
    group_size: Positive = 8
    """Rollouts of one task."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling in training."""
    max_num_seqs: Positive = 256
    """Rollouts decoded at once."""
    sync_interval: Positive = 1
    """Steps between weight syncs. More than 1: rollouts come from a policy up to sync_interval - 1 versions old, so
    think of algorithm.correction. An evaluation always has the present weights."""
    max_staleness: Count = 0
    """Steps that exploring may be ahead of training. 0: in turn, each step with its own weights. More: the rollouts of
    so many later steps are sampled while a step is trained, by a policy that is up to as many versions older (with
    sync_interval: as many more), so think of algorithm.correction. With mode=both a second copy of the weights is
    kept."""
    schedule: Literal["deterministic", "async"] = "deterministic"
    """fixed: which weights sample which task follows from the step alone, so the run is the same on every machine,
    after every resume and with explorers apart; a step waits for its slowest rollout. free: every task is asked as soon
    as there is room and a step takes the groups that are finished first; what would be older than max_staleness is
    given up and booked."""
    partial_rollout: bool = True
    """schedule=async: at a weight sync, rollouts in flight go on under the new weights, each token with its version.
    false: they are finished under the old ones first."""
    spare_tasks: Count = 0
    """schedule=async: tasks asked beyond what the steps need, so that no step waits for the last ones."""
    retries: Count = 0
    """How often a rollout that failed (an error, or no end in time) is asked again before it counts as failed."""
    timeout_s: Above0 = 600.0
    """Longest wait for one rollout; then the run says what it waited for and the rollout counts as failed."""
    timeout_factor: Above0 | None = None
    """A rollout's limit is also this many times the mean seconds of those finished so far, once there are 8. Default:
    timeout_s alone."""
