"""What the policy says of held-out replies that are given: their loss, and which of a pair it prefers."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from whet.algos.recipes import Algorithm
from whet.batch import Batch, Outputs, pack
from whet.config.functions import Kind
from whet.training.engine import TrainEngine
from whet.training.sums import Sums
from whet.types import DataError, Group, Json, Metrics, Task

log = logging.getLogger(__name__)

NEEDED: dict[Kind, tuple[str, ...]] = {
    "demonstrations": ("response",),
    "preferences": ("response", "rejected"),
    "labels": ("response", "desirable"),
}
"""What a task must hold, by what is learned from."""

Look = Callable[[Batch], Batch]
"""A batch with what the other models say of it, as a training step has it (`loop.look`)."""


def given(
    tasks: Sequence[Task], kind: Kind, *, judged: bool, fits: Callable[[Task, str], bool]
) -> list[Task]:
    """The held-out tasks that hold what a kind of learning needs. Those whose reply does not fit are left out, logged.

    Raises DataError for a task without it, if nothing else is made of that task (`judged`: replies are asked for).
    """
    fields = NEEDED[kind]
    for task in () if judged else tasks:
        if lacking := [name for name in fields if _field(task, name) is None]:
            raise DataError(
                f"held-out task {task.uid} of source {task.source!r} has no {lacking[0]}, and there are no rewards to "
                f"judge a reply by: name its column in that source's `{lacking[0]}`, give rewards, or leave data.eval "
                "out"
            )
    having = [t for t in tasks if all(_field(t, name) is not None for name in fields)]
    fitting = [t for t in having if all(fits(t, x) for x in (t.response, t.rejected) if x is not None)]
    if dropped := len(having) - len(fitting):
        log.warning("held-out replies: %d of %d are too long and not measured", dropped, len(having))
    return fitting


def _field(task: Task, name: str) -> Json:
    """A label is no field of its own: it stands among the further columns."""
    return task.extra.get(name) if name == "desirable" else getattr(task, name)


def held_out(policy: TrainEngine, groups: Sequence[Group], algorithm: Algorithm, *, look: Look) -> Metrics:
    """Per source and over all, without a gradient.

    Demonstrations: loss_nats, the mean of -log pi over the tokens to learn, and perplexity = exp(loss_nats).
    Preferences and labels: the loss as it is trained, and its statistics (accuracy: share of pairs whose better reply
    the policy prefers; margin ...).
    """
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[group.task.source].append(group)
    sets = dict(by_source) if len(by_source) == 1 else {**by_source, "all": list(groups)}
    of = _likelihood if algorithm.kind == "demonstrations" else _as_trained
    out: Metrics = {}
    for source, members in sorted(sets.items()):
        numbers = of(policy, pack(members), algorithm, look)
        out |= {f"eval/{source}/{name}": number for name, number in numbers.items()}
    return out


def _likelihood(policy: TrainEngine, batch: Batch, algorithm: Algorithm, look: Look) -> Metrics:
    logp_N = policy.forward(batch, "logprobs")[batch.mask_N]
    loss = -float(logp_N.sum(dtype=torch.float64)) / len(logp_N)
    return {
        "loss_nats": loss,
        "perplexity": math.exp(loss) if loss < 709 else math.inf,
        "loss_tokens": float(len(logp_N)),
    }


def _as_trained(policy: TrainEngine, batch: Batch, algorithm: Algorithm, look: Look) -> Metrics:
    batch = algorithm.advantage(look(batch), 0.0)
    batch = replace(batch, weight_N=algorithm.weights(batch, 1))
    out = Outputs(logp_N=policy.forward(batch, "logprobs"))
    sums = Sums()
    sums.add(batch, out, algorithm.loss(batch, out))
    return sums.means() | {"replies": float(batch.rollouts)}
