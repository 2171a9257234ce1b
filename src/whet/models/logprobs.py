"""Log-probs and entropies of tokens, without keeping [A, V] logits for a large vocabulary.

Shape letters: A rows asked for (one predicted token each), D hidden, V vocabulary.
The decode step and the trainer both take their logits from `logits`, so that equal hidden states give equal
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from whet.models.elementwise import tanh_
from whet.models.kernels import Ops
from whet.models.products import column_sums, linear, product, wide_product, wide_sums
from whet.models.vocabulary import Vocabulary, VocabularyHead

KEEP = 1 << 24
"""Logits (64 MiB of float32) that are kept for the backward pass; more are recomputed chunk by chunk."""
_CHUNK = 128
"""Rows of logits at a time on a CPU: a thirty-second of 4096 rows, and enough for products to run at full speed."""
_CHUNK_LOGITS = 1 << 27
"""Logits at a time on a GPU (512 MiB of float32), where every product of a few rows reads the whole weight."""


@dataclass(frozen=True)
class OutputHead:
    """The output layer: logits = cap * tanh(scale * (W h + b) / cap); without a cap: scale * (W h + b)."""

    linear: nn.Linear | VocabularyHead
    """By reference; its parameters are read on every call. May share its weight with the embedding."""
    scale: float = 1.0
    softcap: float | None = None

    def rows_at_once(self, device: torch.device) -> int:
        """Rows of logits that are computed at a time."""
        if device.type == "cpu":
            return _CHUNK
        return max(1, _CHUNK_LOGITS // self.linear.out_features // _CHUNK) * _CHUNK

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The part of the vocabulary that this rank has; None: all of it is here. In part, what is called [A, V] is
        this part's."""
        return self.linear.vocabulary if isinstance(self.linear, VocabularyHead) else None

    @property
    def size(self) -> int:
        """Tokens of the whole vocabulary."""
        return self.linear.out_features if self.vocabulary is None else self.vocabulary.size

    @property
    def still(self) -> OutputHead:
        """The same, whose parameters get no gradient."""
        own = self.linear
        with torch.device("meta"):
            linear = nn.Linear(own.in_features, own.out_features, bias=own.bias is not None)
        linear.weight = nn.Parameter(own.weight.detach(), requires_grad=False)
        if own.bias is not None:
            linear.bias = nn.Parameter(own.bias.detach(), requires_grad=False)
        return replace(self, linear=linear)

    def log_softmax(self, z_AV: Tensor) -> Tensor:
        """[A, V] log-probs over the whole vocabulary, without gradient."""
        return (
            z_AV.log_softmax(-1)
            if self.vocabulary is None
            else z_AV - self.vocabulary.logsumexp(z_AV)[:, None]
        )

    def add(self, x: Tensor) -> Tensor:
        """The sum over the vocabulary from sums over its parts, in place."""
        return x if self.vocabulary is None else self.vocabulary.add(x)

    def local(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(row of each token in this rank's part, whether it is this rank's)."""
        if self.vocabulary is None:
            return token_ids, torch.ones_like(token_ids, dtype=torch.bool)
        return self.vocabulary.local(token_ids)

    def of_tokens(self, logp_AV: Tensor, token_AS: Tensor) -> Tensor:
        """[A, S] the log-probs of some tokens of the whole vocabulary."""
        row_AS, own_AS = self.local(token_AS)
        return self.add(torch.where(own_AS, logp_AV.gather(1, row_AS), 0.0))


Temperature: TypeAlias = float | Tensor
"""What logits are divided by, above 0: one number for all rows, or [A]."""


def temperature_of(temperature: Temperature, rows: slice) -> Temperature:
    """The temperature of some rows."""
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


@torch.no_grad()
def logits(head: OutputHead, hidden_AD: Tensor, temperature: Temperature) -> Tensor:
    """[A, V] float32 logits / temperature, without gradient."""
    return _logits(head, hidden_AD, (head.linear.weight, head.linear.bias), temperature)


def _logits(
    head: OutputHead,
    hidden_AD: Tensor,
    parameters: tuple[Tensor, Tensor | None],
    temperature: Temperature,
    room: Tensor | None = None,
) -> Tensor:
    """room: float32 [A or more, V] to write them to."""
    if room is not None:
        z_AV = _linear(hidden_AD, *parameters, room)
    elif wide_sums(hidden_AD, parameters[0]):
        z_AV = _wide_linear(hidden_AD, *parameters)
    else:
        z_AV = linear(hidden_AD, *parameters).float()
    if head.scale != 1.0:
        z_AV.mul_(head.scale)
    if head.softcap is not None:
        tanh_(z_AV.div_(head.softcap)).mul_(head.softcap)
    if isinstance(temperature, Tensor):
        return z_AV.div_(temperature[:, None])
    return z_AV if temperature == 1.0 else z_AV.div_(temperature)


def _wide_linear(hidden_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """`linear`, where `wide_sums`."""
    z_AV = wide_product(hidden_AD, weight_VD.t())
    return z_AV if bias_V is None else z_AV.add_(bias_V)


def _linear(hidden_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, room: Tensor) -> Tensor:
    """`linear`, written to the first rows of `room`."""
    out_AV = room[: len(hidden_AD)]
    product(hidden_AD, weight_VD.t(), out=out_AV)
    return out_AV if bias_V is None else out_AV.add_(bias_V)


def token_logprobs(
    hidden_AD: Tensor,
    targets_A: Tensor,
    *,
    head: OutputHead,
    ops: Ops,
    temperature: Temperature = 1.0,
    entropy_grad: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """([A] log-prob of each target, [A] entropy in nats) of softmax(logits / temperature), float32.

    Gradients flow to the hidden states and the head's parameters; through the entropy only with
    `entropy_grad`. Up to 2^24 logits are kept for the backward pass (recomputing them would cost a third
    matrix product); beyond that, `chunk` rows at a time are computed, and computed again in backward, so
    that the peak is chunk x V numbers (twice that where a dtype is not float32) instead of several times A x V. chunk:
    None: `OutputHead.rows_at_once`.
    """
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ValueError(f"temperature must be above 0 to compute log-probs, got {temperature}")
    keep = len(hidden_AD) * head.linear.out_features <= KEEP
    chunk = chunk or head.rows_at_once(hidden_AD.device)
    job = _LogprobsJob(head, ops, temperature, entropy_grad, chunk, keep=keep)
    return _TokenLogprobs.apply(hidden_AD, head.linear.weight, head.linear.bias, targets_A, job)


@torch.no_grad()
def collisions(
    hidden_AD: Tensor,
    targets_A: Tensor | None = None,
    *,
    head: OutputHead,
    temperature: Temperature = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """[A] float32: sum over the vocabulary of p^2, p = softmax(logits / temperature): the chance that two samples
    collide, whatever the targets are. No gradient; `chunk` rows of logits at a time.
    """
    out_A = torch.empty(len(hidden_AD), dtype=torch.float32, device=hidden_AD.device)
    chunk = chunk or head.rows_at_once(hidden_AD.device)
    for start in range(0, len(hidden_AD), chunk):
        at = slice(start, start + chunk)
        logp_AV = head.log_softmax(logits(head, hidden_AD[at], temperature_of(temperature, at)))
        out_A[at] = head.add(logp_AV.mul_(2).exp_().sum(-1))
    return out_A


@torch.no_grad()
def discriminants(
    hidden_AD: Tensor,
    targets_A: Tensor,
    *,
    head: OutputHead,
    temperature: Temperature = 1.0,
    centred: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """[A] float32: S = p (H + log p) of each target, p its probability, H the entropy in nats: to first order the
    entropy falls by S for each unit that the target's logit rises (arXiv:2602.03392 Theorem 3.2). centred: less the
    mean of S over tokens drawn from p. No gradient; `chunk` rows of logits at a time.
    """
    out_A = torch.empty(len(hidden_AD), dtype=torch.float32, device=hidden_AD.device)
    chunk = chunk or head.rows_at_once(hidden_AD.device)
    for start in range(0, len(hidden_AD), chunk):
        at = slice(start, start + chunk)
        logp_AV = head.log_softmax(logits(head, hidden_AD[at], temperature_of(temperature, at)))
        p_AV = logp_AV.exp()
        entropy_A = head.add(torch.special.entr(p_AV).sum(-1))
        logp_A = head.of_tokens(logp_AV, targets_A[at, None]).squeeze(1)
        out_A[at] = logp_A.exp() * (entropy_A + logp_A)
        if centred:
            out_A[at] -= head.add((p_AV.square_() * logp_AV.add_(entropy_A[:, None])).sum(-1))
    return out_A


OF_LOGITS: Mapping[str, Callable[..., Tensor]] = {
    "collision": collisions,
    "discriminant": discriminants,
    "centred_discriminant": partial(discriminants, centred=True),
}
"""What is computed of a place's logits and its token, without gradient: `TrainEngine.forward`."""


@dataclass(frozen=True)
class _LogprobsJob:
    head: OutputHead
    ops: Ops
    temperature: Temperature
    entropy_grad: bool
    chunk: int
    keep: bool

    @property
    def rows(self) -> Ops | Vocabulary:
        """What computes the rows: over all of the vocabulary, or over this rank's part and the others'."""
        return self.ops if self.head.vocabulary is None else self.head.vocabulary

    def spans(self, rows: int) -> list[slice]:
        step = rows if self.keep else self.chunk
        return [slice(start, start + step) for start in range(0, rows, max(step, 1))]

    def room(self, hidden_AD: Tensor, weight_VD: Tensor) -> Tensor | None:
        """Where the logits of one span after the other are written: of blocks that are freed and taken again the C
        library makes gaps. None: they are kept, or first come in another dtype."""
        rows = min(self.chunk, len(hidden_AD))
        plain = hidden_AD.dtype == weight_VD.dtype == torch.float32
        return None if self.keep or not plain else hidden_AD.new_empty(rows, len(weight_VD))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_A: Tensor,
        job: _LogprobsJob,
    ) -> tuple[Tensor, Tensor]:
        logp_A = torch.empty(len(hidden_AD), dtype=torch.float32, device=hidden_AD.device)
        entropy_A = torch.empty_like(logp_A)
        z_AV, room = None, job.room(hidden_AD, weight_VD)
        for at in job.spans(len(hidden_AD)):
            z_AV = None  # the last rows' logits go before the next ones come
            z_AV = _logits(
                job.head, hidden_AD[at], (weight_VD, bias_V), temperature_of(job.temperature, at), room
            )
            logp_A[at], entropy_A[at] = job.rows.logprobs(z_AV, targets_A[at])
        kept = z_AV if job.keep and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden_AD, weight_VD, bias_V, targets_A, logp_A, entropy_A, kept)
        ctx.job = job
        # the C library would find another place for the same size again, and backward comes next
        ctx.room = room if any(ctx.needs_input_grad) else None
        if not job.entropy_grad:
            ctx.mark_non_differentiable(entropy_A)
        return logp_A, entropy_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogp_A: Tensor, dentropy_A: Tensor) -> tuple[Tensor | None, ...]:
        hidden_AD, weight_VD, bias_V, targets_A, logp_A, entropy_A, kept = ctx.saved_tensors
        job: _LogprobsJob = ctx.job
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        room, ctx.room = ctx.room, None
        dhidden_AD = torch.empty_like(hidden_AD) if needs_hidden else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        dbias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for at in job.spans(len(hidden_AD)):  # without room where this is not the first backward
            z_AV = kept
            if z_AV is None:
                z_AV = _logits(
                    job.head, hidden_AD[at], (weight_VD, bias_V), temperature_of(job.temperature, at), room
                )
            slope_AV = slope(z_AV, job.head, temperature_of(job.temperature, at))
            job.rows.logprobs_backward(
                z_AV,
                targets_A[at],
                logp_A[at],
                entropy_N=entropy_A[at],
                dlogp_N=dlogp_A[at].contiguous(),
                dentropy_N=dentropy_A[at].contiguous() if job.entropy_grad else None,
            )
            dz_AV = (z_AV if slope_AV is None else z_AV.mul_(slope_AV)).to(weight_VD.dtype)
            if dhidden_AD is not None:
                product(dz_AV, weight_VD, out=dhidden_AD[at])
            if dweight_VD is not None:
                product(dz_AV.t(), hidden_AD[at], out=dweight_VD, add=True)
            if dbias_V is not None:
                dbias_V += column_sums(dz_AV)
            del z_AV, slope_AV, dz_AV  # before the next rows' logits come
        if dhidden_AD is not None:
            job.head.add(dhidden_AD)
        if kept is not None:  # it holds its own gradient now: a second backward must fail, not read it
            torch.autograd.graph.increment_version(kept)
        return dhidden_AD, cast(dweight_VD, weight_VD), cast(dbias_V, bias_V), None, None


def slope(z_AV: Tensor, head: OutputHead, temperature: Temperature) -> Tensor | float | None:
    """d(logits / temperature) / d(W h + b): scale / temperature * (1 - tanh^2). None where it is 1."""
    temperature = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    factor = head.scale / temperature
    if head.softcap is None:
        return None if isinstance(factor, float) and factor == 1.0 else factor
    tanh_AV = z_AV * (temperature / head.softcap)
    return tanh_AV.square_().neg_().add_(1.0).mul_(factor)


def cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or like is None else gradient.to(like.dtype)
