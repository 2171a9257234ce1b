"""verl's recipe PRIME as native keys (recipe/ of verl 0.4.0 to 0.6.1, then the repository verl-recipe): an implicit
reward model that learns beside the policy, and prompts that are sampled and not trained on."""

from __future__ import annotations

from fractions import Fraction

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.verl.roles import ACTOR, RM, ROLLOUT
from whet.dialects.verl.sizes import prompts, ranks, responses

OPTIM = f"{RM}.model.optim"


def frozen(v: Values) -> str:
    """The model that the implicit one is compared with."""
    path: str = v[f"{RM}.model.path" if v[f"{RM}.model.ref_path"] is None else f"{RM}.model.ref_path"]
    return path


def mini_batches(v: Values) -> int:
    """mini_batch_size counts responses, unlike the actor's, which counts prompts."""
    key = f"{RM}.mini_batch_size"
    size, of_step = v[key], prompts(v) * responses(v)
    size = v[f"{ACTOR}.ppo_mini_batch_size"] if size is None else size
    if of_step % size:
        raise NotSupportedYet(
            f"{key}={size} must divide data.train_batch_size * {ROLLOUT}.n = {of_step}: a smaller last mini batch is "
            "coming, not built yet"
        )
    return of_step // int(size)


def micro_batch(v: Values) -> int | None:
    """Responses of one pass on one device."""
    together, each = v[f"{RM}.micro_batch_size"], v[f"{RM}.micro_batch_size_per_gpu"]
    return each if together is None else max(int(together) // ranks(v, ACTOR), 1)


def warmup_steps(v: Values) -> int:
    """Of a share of total_training_steps nobody tells the reward model how many these are."""
    steps, total = v[f"{OPTIM}.lr_warmup_steps"], v[f"{OPTIM}.total_training_steps"]
    if steps is None or steps < 0:
        return int((v[f"{OPTIM}.lr_warmup_steps_ratio"] or 0.0) * (total or 0))
    return int(steps)


def samples_whole_prompts(v: Values) -> bool:
    """Whether a step samples a whole number of prompts, as many as it trains on at least."""
    factor = v["data.oversample_factor"]
    return bool((Fraction(str(factor)) * prompts(v)).denominator == 1 and factor >= 1)
