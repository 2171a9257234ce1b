"""What `--prove` compares of the optimizer and of sampling: whet's side, the same for every system."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from whet.config.schema import SamplingConfig
from whet.prove.checks import Check, File, scalars
from whet.prove.numbers import Numbers


def of_optimizer(made: Iterable[torch.optim.Optimizer], largest_norm: float | None) -> Numbers:
    """Of a peer's Adam, or several, over a matrix and a vector, with the norm that it clips gradients to; None or 0:
    it does not."""
    groups = [group for each in made for group in each.param_groups]
    by_size = {each.dim(): group for group in groups for each in group["params"]}
    matrix, vector = by_size[2], by_size[1]
    return adam(
        lr=matrix.get("initial_lr", matrix["lr"]),  # the peak, where a schedule has set the first step's
        betas=matrix["betas"],
        eps=matrix["eps"],
        decay=matrix["weight_decay"],
        decay_of_vectors=vector["weight_decay"],
        largest_norm=largest_norm,
    )


def adam(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decay_of_vectors: float,
    largest_norm: float | None,
) -> Numbers:
    """The numbers of Adam."""
    return scalars(
        learning_rate=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=decay,
        weight_decay_of_vectors=decay_of_vectors,
        largest_gradient_norm=largest_norm or 0.0,
    )


def of_megatron(made: Any) -> Numbers:
    """Of Megatron-LM's options, which itself has no weight decay of vectors."""
    return adam(
        lr=made.lr,
        betas=(made.adam_beta1, made.adam_beta2),
        eps=made.adam_eps,
        decay=made.weight_decay,
        decay_of_vectors=0.0,
        largest_norm=made.clip_grad,
    )


def our_adam(file: File) -> Numbers:
    """The same of whet."""
    made = file.plan.optimizer
    assert made.lr is not None
    return adam(
        lr=made.lr,
        betas=made.betas,
        eps=made.eps,
        decay=made.weight_decay,
        decay_of_vectors=made.weight_decay if made.decay_all else 0.0,
        largest_norm=made.max_grad_norm,
    )


def optimizer(file: File, *, theirs: Callable[[], Numbers], called: str, keys: tuple[str, ...] = ()) -> Check:
    """The row of the optimizer. Its tolerance is that of numbers far below 1."""
    return Check(
        what="optimizer",
        called=called,
        theirs=lambda _: theirs(),
        ours=lambda _: our_adam(file),
        keys=keys,
        tolerance=1e-15,
    )


def drawn(
    *, temperature: float, top_p: float, top_k: int, replies: int, tokens: int, min_p: float = 0.0
) -> Numbers:
    """How replies are sampled. top_k below 1 is none; with a temperature of 0 the rest has no effect, and as many
    replies as there may be are one."""
    if temperature == 0:
        top_p, top_k, min_p, replies = 1.0, 0, 0.0, 1
    return scalars(
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        replies=replies,
        tokens=tokens,
    )


def our_drawn(made: SamplingConfig, replies: int) -> Numbers:
    """The same of whet."""
    return drawn(
        temperature=made.temperature,
        top_p=made.top_p,
        top_k=made.top_k,
        min_p=made.min_p,
        replies=replies,
        tokens=made.max_tokens,
    )


def sampling(
    file: File,
    *,
    theirs: Callable[[], Numbers],
    called: str,
    prompt: float | None,
    keys: tuple[str, ...] = (),
) -> Check:
    """The row of how replies for training are sampled. prompt: the peer's limit of a prompt, in tokens; None: it has
    none of its own."""
    limit = scalars(tokens_of_a_prompt=prompt) if prompt is not None else {}
    ours = scalars(tokens_of_a_prompt=file.config.data.max_prompt_tokens) if prompt is not None else {}
    return Check(
        what="sampling",
        called=called,
        theirs=lambda _: theirs() | limit,
        ours=lambda _: our_drawn(file.config.rollout.sampling, file.plan.group_size) | ours,
        keys=keys,
    )


def evaluation(
    file: File, *, theirs: Callable[[], Numbers], called: str, keys: tuple[str, ...] = ()
) -> Check:
    """The row of how replies are sampled for an evaluation."""
    return Check(
        what="sampling of evaluations",
        called=called,
        theirs=lambda _: theirs(),
        ours=lambda _: our_drawn(file.plan.eval_sampling, file.config.eval.samples),
        keys=keys,
    )
