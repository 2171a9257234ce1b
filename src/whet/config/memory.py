"""Memory of a stage by phase, at full length, computed from its config alone.

The sums count the tensors that the code keeps, not measurements of runs: `benchmarks/memory.py` compares the sums
with measured peaks. Lengths are the limits (prompts and replies as long as allowed), so a run takes at most this,
with one exception: on a CPU with half-precision instructions, varying lengths add products (see `products_bytes`).

Letters: U tokens to compute, A sampled tokens, D hidden, F feed-forward width, Q and K width of all query, key heads,
V vocabulary, E experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from whet.config.learns import Learns
from whet.config.schema import TrainConfig
from whet.config.sizes import DTYPE_BYTES, PAGE_TOKENS, Shape

Parts = dict[str, int]
"""Bytes by purpose."""

KEPT_LOGITS = 1 << 24
"""Logits that the trainer keeps for the backward pass (`models.logprobs`); beyond, it computes CHUNK rows at a time."""
CHUNK = 128
CHUNK_LOGITS = 1 << 27
"""Logits at a time on a GPU."""
PREFILL_TOKENS = 4096
"""Prompt tokens that the rollout engine computes at once."""
ROLLOUT_BYTES = 200
"""Size of the Python lists per token of the rollouts of a step."""
LIBRARIES = 600 << 20
"""Python with torch, transformers and all other imports of a run, and the scratch memory of a matrix product (at most
2 MiB), on a CPU; not part of a phase."""

PRODUCT_BYTES = 290 << 10
"""Memory that oneDNN keeps per product in half precision on a CPU, for every new size of the matrices: a descriptor of
252 KiB and the compiled code. Measured (torch 2.13, AMX)."""
PRODUCTS = 1024
"""Number of products that oneDNN keeps, the latest used; see ONEDNN_PRIMITIVE_CACHE_CAPACITY."""
_TEST_ROWS = 17
"""Numbers of rows in the self-test at the start (`models.logprob_parity`)."""

_FLOAT32 = 4


@dataclass(frozen=True)
class Phase:
    """The peak memory in one phase of a step."""

    name: str
    parts: Parts

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Maximum lengths of the rollouts of a stage, in tokens."""

    prompt: int
    reply: int
    group: int
    """Rollouts that share a prompt."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model computes."""

    shape: Shape
    dtype: str
    compiled: bool
    """The C kernels, which keep less for the backward pass than torch's operations do."""
    cpu: bool = True

    @property
    def widened(self) -> bool:
        """Whether half-precision values are converted to float32 for computation: on a CPU."""
        return self.cpu and self.dtype != "float32"

    @property
    def bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """One model in memory."""

    name: str
    weights: int
    gradients: int = 0
    """0: the model is not trained."""
    state: int = 0
    """Moments and float32 master weights."""
    stepping: int = 0
    """Gradients in the optimizer step: float32 for float32 master weights."""
    setting: Setting
    cut: PeakBatch
    forward: PeakBatch
    """Its micro-batches without gradients."""
    head: bool = True
    """Whether it computes log-probs; a critic does not, and in a pipeline only the last rank has the output layer."""
    flight: int = 1
    """Micro-batches in flight in a pipeline, kept for the backward pass."""


@dataclass(frozen=True)
class PeakBatch:
    """The largest micro-batch."""

    tokens: int
    """U"""
    sampled: int
    """A"""
    second: PeakBatch | None = None
    """The next micro-batch, if there is one: the gradients of the first exist while it is computed."""
    checkpoint: bool = False


def learner(
    name: str,
    learns: Learns,
    train: TrainConfig,
    *,
    setting: Setting,
    cut: PeakBatch,
    forward: PeakBatch,
    head: bool,
) -> ModelMemory:
    """A model that is trained. train: its section, with its own optimizer."""
    optimizer, precision = train.optimizer, train.precision
    plain = learns.own * setting.bytes + learns.adapters * _FLOAT32
    gradients = learns.learned * _FLOAT32 if precision.reduce else plain
    weights = (learns.base + learns.adapted) * setting.bytes + learns.adapters * _FLOAT32
    return ModelMemory(
        name=name,
        weights=weights,
        gradients=gradients,
        state=learns.train_bytes(optimizer, setting.dtype, masters=precision.master_weights)
        - weights
        - plain,
        stepping=learns.learned * _FLOAT32 if precision.master_weights else plain,
        setting=setting,
        cut=cut,
        forward=forward,
        head=head,
    )


def phases(
    models: list[ModelMemory], *, cache: int, sampling: int, rollouts: int, rewards: Mapping[str, int]
) -> list[Phase]:
    """Sampling, a forward of every model, the update of trained models.

    cache: KV cache; sampling: further memory of prefill and decode; rollouts: bytes of the rollouts of a step;
    rewards: weights of the reward models.
    """
    held = {m.name: m.weights for m in models}
    held |= {f"optimizer of the {m.name}": m.state for m in models if m.state}
    held |= {"KV cache": cache, "rollouts": rollouts, **rewards}
    held = {name: count for name, count in held.items() if count}
    out = [Phase("sampling", {**held, "activations": sampling})] if sampling else []
    for m in models:
        out.append(Phase(f"forward of the {m.name}", {**held, "activations": forward_bytes(m)}))
        if m.gradients:
            out += [Phase(f"update of the {m.name}", {**held, **parts}) for parts in update_parts(m)]
            step = {**held, f"gradients of the {m.name}": m.stepping}
            out.append(Phase(f"optimizer step of the {m.name}", step))
    return out


# ---------------------------------------------------------------- how a batch is split


def cut(
    train: TrainConfig, lengths: Lengths, *, rollouts: int, default_tokens: int, whole_groups: bool
) -> PeakBatch:
    """The largest micro-batch of an update over `rollouts` rollouts at full length: sizes are about equal."""
    rows = _rows(
        train.micro_batch_tokens or default_tokens,
        train.micro_batch_rollouts,
        train.share_prompts,
        lengths=lengths,
        rollouts=rollouts,
    )
    whole = min(rollouts, max(1, rows // lengths.group) * lengths.group)
    kept = train.share_prompts and rows >= lengths.group
    if whole_groups or (kept and _number(rollouts, whole) <= _number(rollouts, rows)):
        groups = _number(rollouts, lengths.group)
        rows = min(rollouts, _number(groups, _number(rollouts, whole)) * lengths.group)
    elif not train.share_prompts:
        rows = _number(rollouts, _number(rollouts, rows))

    def one(rows: int, second: PeakBatch | None) -> PeakBatch:
        tokens = _computed(rows, lengths, train.share_prompts)
        return PeakBatch(tokens, rows * lengths.reply, second, checkpoint=train.gradient_checkpointing)

    left = min(rows, rollouts - rows)
    return one(rows, one(left, None) if left else None)


def _number(things: int, each: int) -> int:
    """Number of parts of size `each`, rounded up."""
    return -(-things // each)


def forward_cut(train: TrainConfig, learning: PeakBatch, lengths: Lengths, *, rollouts: int) -> PeakBatch:
    """The largest micro-batch without gradients: by its own limits, or those of the update."""
    if not (train.forward_micro_batch_tokens or train.forward_micro_batch_rollouts):
        return learning
    rows = _rows(
        train.forward_micro_batch_tokens or 0,
        train.forward_micro_batch_rollouts,
        train.share_prompts,
        lengths=lengths,
        rollouts=rollouts,
    )
    return PeakBatch(_computed(rows, lengths, train.share_prompts), rows * lengths.reply)


def _rows(
    limit_tokens: int, limit_rollouts: int | None, share: bool, *, lengths: Lengths, rollouts: int
) -> int:
    """Number of rollouts in a micro-batch, at least one."""
    if limit_rollouts:
        return min(limit_rollouts, rollouts)
    if not share:
        return max(1, min(rollouts, limit_tokens // (lengths.prompt + lengths.reply)))
    group = lengths.prompt + lengths.group * lengths.reply
    groups, left = divmod(limit_tokens, group)
    more = min(lengths.group - 1, max(0, left - lengths.prompt) // lengths.reply)
    return max(1, min(rollouts, groups * lengths.group + more))


def _computed(rows: int, lengths: Lengths, share: bool) -> int:
    """Tokens of this number of rollouts; the last token of each predicts nothing."""
    prompts = -(-rows // lengths.group) if share else rows
    return prompts * lengths.prompt + rows * (lengths.reply - 1)


# ---------------------------------------------------------------- memory of computation


def layer_bytes(s: Setting) -> int:
    """Bytes that one layer keeps per token for the backward pass."""
    shape = s.shape
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    normed = q + k if shape.head_norms else 0
    heads = shape.heads + shape.kv_heads if shape.head_norms else 0
    if s.compiled:
        plain = 4 * shape.hidden + 2 * q + 2 * k + normed
        return s.bytes * plain + _FLOAT32 * shape.heads + _feed_forward(s, each=3 * s.bytes)
    attention = s.bytes * (2 * q + 2 * k) + _FLOAT32 * shape.heads
    if s.dtype == "float32":
        norms = _FLOAT32 * (6 * shape.hidden + 2 + 2 * normed + heads)
    else:  # computed in float32: the wide input and the scaled one
        norms = 20 * shape.hidden + 8 + 8 * normed + _FLOAT32 * heads
    # gate, up and the activated gate, which torch keeps too, and their product
    each = 3 * (_FLOAT32 if s.widened else s.bytes) + s.bytes
    # where they are clamped, what was clamped and the sigmoid beside them
    each += 3 * _FLOAT32 if shape.family == "gpt_oss" else 0
    return norms + attention + _feed_forward(s, each=each)


def _feed_forward(s: Setting, *, each: int) -> int:
    """each: bytes kept per unit of its width."""
    shape = s.shape
    if not shape.experts:
        return each * shape.ffn
    routing = _FLOAT32 * shape.experts + 36 * shape.experts_per_token
    return shape.experts_per_token * (2 * s.bytes * shape.hidden + each * shape.ffn) + routing


def live_bytes(s: Setting) -> int:
    """Peak bytes per token in one layer when nothing is kept for backward."""
    shape = s.shape
    wide = shape.experts_per_token if shape.experts else 1
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widest = max(wide * (3 * shape.ffn + (shape.hidden if shape.experts else 0)), 3 * q + 3 * k)
    plain = s.bytes * (3 * shape.hidden + widest)
    if s.dtype == "float32":
        return plain
    return plain + _FLOAT32 * (widest if s.widened else 2 * shape.hidden)


def logits_bytes(s: Setting, rows: int) -> int:
    """Logits of this number of rows, float32, plus those in the dtype of the model where it differs."""
    return rows * (s.shape.vocab_size or 0) * (_FLOAT32 + (s.bytes if s.dtype != "float32" else 0))


def forward_bytes(m: ModelMemory) -> int:
    """A forward of the largest micro-batch without gradients."""
    s, c = m.setting, m.forward
    hidden = s.bytes * s.shape.hidden * (c.tokens + c.sampled)
    return max(c.tokens * live_bytes(s), hidden + _head_rows(s, c) if m.head else 0)


def _head_rows(s: Setting, c: PeakBatch) -> int:
    return logits_bytes(s, rows_of_logits(s, c))


def rows_of_logits(s: Setting, c: PeakBatch) -> int:
    """Rows that are computed at a time (`OutputHead.rows_at_once`)."""
    if _keeps(s, c):
        return c.sampled
    size = s.shape.vocab_size or 1
    return min(c.sampled, CHUNK if s.cpu else max(1, CHUNK_LOGITS // size // CHUNK) * CHUNK)


def _keeps(s: Setting, c: PeakBatch) -> bool:
    return c.sampled * (s.shape.vocab_size or 0) <= KEPT_LOGITS


def update_parts(m: ModelMemory) -> Iterator[Parts]:
    """The possible peaks of an update, in its first micro-batch and in the second, when gradients already exist."""
    yield from _moments(m, m.cut, there=0)
    if m.cut.second:
        yield from _moments(m, m.cut.second, there=m.gradients)


def _moments(m: ModelMemory, c: PeakBatch, *, there: int) -> Iterator[Parts]:
    """At the output layer, with everything still kept; in the last layer; in the first layer, with all gradients."""
    s = m.setting
    layers = s.shape.layers
    kept = c.tokens * (layer_bytes(s) if not c.checkpoint else 2 * s.bytes * s.shape.hidden) * layers
    again = c.tokens * layer_bytes(s) if c.checkpoint else 0
    ends = s.bytes * s.shape.hidden * (2 * c.tokens + c.sampled)
    head = output_bytes(s, c) if m.head else 0
    waiting = _tied_gradient(m)
    sent = (m.flight - 1) * (kept + c.tokens * s.bytes * s.shape.hidden)  # with the hidden states sent on
    behind = c.tokens * s.bytes * (2 * s.shape.hidden + 2 * s.shape.ffn * max(1, s.shape.experts_per_token))
    label = f"gradients of the {m.name}"
    yield {"activations": kept + ends + sent, "output layer": head + waiting, label: there}
    yield {"activations": kept + again + ends + behind + sent, "output layer": waiting, label: there}
    yield {
        "activations": c.tokens * (layer_bytes(s) + 2 * s.bytes * s.shape.hidden) + behind + sent,
        "output layer": waiting,
        label: m.gradients,
    }


def output_bytes(s: Setting, c: PeakBatch) -> int:
    """Logits with their gradient in place, the gradient of the hidden states."""
    rows = rows_of_logits(s, c)
    factor = 1 if s.compiled else 2  # the softmax of torch in addition
    cast = 0 if s.dtype == "float32" else rows * (s.shape.vocab_size or 0) * s.bytes
    return factor * rows * (s.shape.vocab_size or 0) * _FLOAT32 + cast + s.bytes * c.sampled * s.shape.hidden


def _tied_gradient(m: ModelMemory) -> int:
    """With a tied embedding the gradient of the output layer is kept until that of the input."""
    shape = m.setting.shape
    learns_output = m.head and m.gradients >= shape.hidden * (shape.vocab_size or 0) * m.setting.bytes
    return (shape.vocab_size or 0) * shape.hidden * _FLOAT32 if learns_output else 0


def sampling_bytes(s: Setting, *, prompt: int, rows: int) -> int:
    """Prefill of the prompts that are admitted at once, or a decode step of all rows."""
    tokens = max(prompt, min(PREFILL_TOKENS // prompt, rows) * prompt)
    return max(tokens, rows) * live_bytes(s) + 2 * logits_bytes(s, rows)


def products_bytes(s: Setting, *, samples: bool = False, cuts: Sequence[PeakBatch] = ()) -> int:
    """Memory that oneDNN keeps for products in half precision on a CPU with instructions for it: for sampling, after
    the self-test; for training on these micro-batches. oneDNN keeps an entry for every number of rows, up to `PRODUCTS`
    where lengths vary (300 MB); 0 for float32, and for half precision on other CPUs, which are computed differently."""
    if s.dtype == "float32":
        return 0
    matrices = len({size[-2:] for size in s.shape.tensors.values() if len(size) > 1})
    of_each = (_TEST_ROWS + 2) * samples  # prefill and decode
    # forward, and two gradients of each in the backward pass
    of_each += 3 * len({(c.tokens, c.sampled) for c in cuts})
    return min(of_each * matrices, PRODUCTS) * PRODUCT_BYTES


def touched_cache(shape: Shape, lengths: Lengths, *, rows: int, dtype: str) -> int:
    """Bytes of the pages that `rows` rollouts in groups write to: a group shares the full pages of its prompt."""
    full = lengths.prompt // PAGE_TOKENS
    own = -(-(lengths.prompt + lengths.reply - 1) // PAGE_TOKENS) - full
    pages = -(-rows // lengths.group) * full + rows * own
    return pages * shape.page_bytes(dtype)


# ---------------------------------------------------------------- comparison with the limit


def largest(found: list[Phase]) -> Phase:
    """The phase with the largest total."""
    return max(found, key=lambda phase: phase.total)


def advice(
    parts: Mapping[str, int], done: Collection[str] = (), may: Callable[[str], bool] | None = None
) -> list[str]:
    """Settings that reduce the three largest contributors, largest first. done: settings that are already made. may:
    whether a piece of advice can be followed; contributors without any are replaced by the next ones."""
    out: list[str] = []
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    for name, _ in ordered[:3] if may is None else ordered:
        found = next((texts for start, texts in _ADVICE.items() if name.startswith(start)), ())
        texts = [text for text in found if not text.startswith(tuple(done)) and (may is None or may(text))]
        if (left := " or ".join(texts)) and left not in out:
            out.append(left)
    return out[:3]


_ADVICE = {
    "products": ("model.dtype=float32",),
    "policy": ("a smaller model", "model.dtype=bfloat16"),
    "optimizer": ("model.lora, whose adapters need little optimizer state", "train.optimizer.name=sgd"),
    "gradients": (
        "model.lora, with which most parameters have no gradient",
        "train.trainable, which can freeze parameters",
    ),
    "reference": (
        "algorithm.kl.coef=0 where no reference is needed",
        "model.lora, with which a reference takes no memory",
    ),
    "whole tensors of one file": ("checkpoint.sharded=true",),
    "gathered layers": ("train.parallel.reshard_after_forward=true", "a larger train.parallel.tp"),
    "critic": ("an algorithm without a critic", "critic.lora"),
    "sampler": ("rollout.sync_interval=1, which samples from the policy itself",),
    "KV cache": ("a lower rollout.max_num_seqs or machine.kv_cache_mb",),
    "rollouts": ("a lower train.tasks_per_step", "a lower rollout.group_size"),
    "activations": ("a lower train.micro_batch_tokens", "train.gradient_checkpointing=true"),
    "output layer": ("a lower train.micro_batch_tokens",),
}
"""Alternative settings that reduce a part, by the start of its name."""
