"""Metrics of the policy on given held-out replies: their loss, and its preference within pairs."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from whet.algos.recipes import Algorithm
from whet.batch import Batch, pack
from whet.config.functions import Kind
from whet.training.engine import TrainEngine
from whet.training.sums import Sums
from whet.training.unreduced import evaluated
from whet.types import DataError, Group, Json, Metrics, Reply, Task

log = logging.getLogger(__name__)

NEEDED: dict[Kind, tuple[str, ...]] = {
    "demonstrations": ("response",),
    "preferences": ("response", "rejected"),
    "labels": ("response", "desirable"),
}
"""Fields that a task must have, by kind of learning."""

LIKELIHOOD = ("loss_nats", "perplexity", "loss_tokens")
"""Metrics of demonstrations."""

Look = Callable[[Batch], Batch]
"""A batch with the log-probs and values of the other models: `Learner.compute_logprobs_and_values`."""


def given(
    tasks: Sequence[Task], kind: Kind, *, judged: bool, fits: Callable[[Task, Reply], bool]
) -> list[Task]:
    """The held-out tasks with the fields that a kind of learning needs. Tasks whose reply is too long are left out and
    logged.

    Raises DataError for a task without these fields, unless the task is used otherwise (`judged`: replies are sampled).
    """
    fields = NEEDED[kind]
    for task in () if judged else tasks:
        if lacking := [name for name in fields if _field(task, name) is None]:
            raise DataError(
                f"held-out task {task.uid} of source {task.source!r} has no {lacking[0]}, and there are no rewards to "
                f"score a reply: name the column in that source's `{lacking[0]}`, give rewards, or leave out data.eval"
            )
    having = [t for t in tasks if all(_field(t, name) is not None for name in fields)]
    fitting = [t for t in having if all(fits(t, x) for x in (t.response, t.rejected) if x is not None)]
    if dropped := len(having) - len(fitting):
        log.warning("held-out replies: %d of %d are too long and are left out", dropped, len(having))
    return fitting


def _field(task: Task, name: str) -> Json:
    """The label is among the further columns of a task, not a field."""
    return task.extra.get(name) if name == "desirable" else getattr(task, name)


def eval_loss(policy: TrainEngine, groups: Sequence[Group], algorithm: Algorithm, *, look: Look) -> Metrics:
    """Per source and over all, without a gradient.

    Demonstrations: loss_nats, the mean of -log pi over the trained tokens, and perplexity = exp(loss_nats).
    Preferences and labels: the training loss and its statistics (accuracy: share of pairs whose better reply the policy
    prefers; margin ...). Labels of a source with a single reply have none, as kto compares replies of different tasks.
    """
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[group.task.source].append(group)
    sets = dict(by_source) if len(by_source) == 1 else {**by_source, "all": list(groups)}
    of = _likelihood if algorithm.kind == "demonstrations" else _as_trained
    out: Metrics = {}
    for source, members in sorted(sets.items()):
        if "kl_zero" in algorithm.needs and len(members) < 2:
            log.warning(
                "held-out replies: %s has a single one, which kto has no other to compare with", source
            )
            continue
        batch = pack(members)
        if not batch.mask_N.any():
            log.warning("held-out replies: of %s, data.overlong has left no token of a reply", source)
            continue
        numbers = of(policy, batch, algorithm, look)
        out |= {f"eval/{source}/{name}": number for name, number in numbers.items()}
    return out


def _likelihood(policy: TrainEngine, batch: Batch, algorithm: Algorithm, look: Look) -> Metrics:
    logp_N = policy.forward(batch, "logprobs")[batch.mask_N]
    loss = -float(logp_N.sum(dtype=torch.float64)) / len(logp_N)
    values = loss, math.exp(loss) if loss < 709 else math.inf, float(len(logp_N))
    return dict(zip(LIKELIHOOD, values, strict=True))


def _as_trained(policy: TrainEngine, batch: Batch, algorithm: Algorithm, look: Look) -> Metrics:
    batch = algorithm.advantage(look(batch), 0.0)
    batch = replace(batch, weight_N=algorithm.weights(batch, 1))
    sums = Sums()
    sums.add(batch, *evaluated(policy, batch, algorithm.loss, entropy=algorithm.entropy.is_on))
    return sums.means() | {"replies": float(batch.rollouts)}
