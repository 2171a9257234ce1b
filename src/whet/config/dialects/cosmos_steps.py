"""Cosmos-RL: how many rollouts make a step, how many steps make a run, and the optimizer over them.

Cosmos counts responses on each replica (RL) or on each data-parallel worker (SFT). A step here is that of all
replicas together. Where several optimizer steps make a training step, Cosmos moves its learning rate once a
training step; here it moves with every optimizer step, over the same total.
"""

from __future__ import annotations

from whet.config.dialects.cosmos_values import MESH, POLICY, is_sft, number, whole
from whet.config.dialects.key import Values
from whet.types import ConfigError, Json

OPTIMIZER = "train.optimizer."
SCHEDULE = "train.optimizer.schedule."
RESPONSES = "train.train_batch_per_replica"


def batch(values: Values) -> dict[str, Json]:
    """Tasks of a step, its optimizer steps, and the rollouts of one forward pass. ConfigError if they do not divide."""
    return _sft_batch(values) if is_sft(values) else _rl_batch(values)


def _rl_batch(values: Values) -> dict[str, Json]:
    """One replica trains on train_batch_per_replica responses; its ranks take equal shares in mini-batches."""
    responses, group = whole(values, RESPONSES, least=1), whole(values, "rollout.n_generation", least=1)
    shards, mini_batch = _shards(values), max(whole(values, POLICY + "mini_batch"), 1)
    if values[MESH + "dp_replicate_size"] != 1:
        raise ConfigError(
            f"{MESH}dp_replicate_size must be 1 in an RL job: n_init_replicas is the number of copies."
        )
    if responses % (shards * mini_batch):
        raise ConfigError(
            f"train.train_batch_per_replica={responses} must be divisible by dp_shard_size*mini_batch="
            f"{shards}*{mini_batch}."
        )
    everyone = responses * whole(values, MESH + "n_init_replicas", least=1)
    if everyone % group:
        raise ConfigError(
            f"train.train_batch_per_replica={responses} x n_init_replicas={everyone // responses} must be a multiple "
            f"of rollout.n_generation={group}: a step here trains on whole groups. Steps over parts of a group are "
            f"coming; until then set train_batch_per_replica to {-(-responses // group) * group}."
        )
    _check_updates(values, responses // shards, tasks=everyone // group)
    return {
        "train.tasks_per_step": everyone // group,
        "train.minibatches": updates(values),
        **_micro(values),
    }


def updates(values: Values) -> int:
    """Optimizer steps of one pass: each rank cuts its responses in chunks of batch_size_per_optimize."""
    if is_sft(values):
        return 1
    chunk = whole(values, POLICY + "batch_size_per_optimize", null=0)
    responses = whole(values, RESPONSES, least=1) // _shards(values)
    return max(responses // chunk, 1) if chunk > 0 else 1


def _check_updates(values: Values, responses: int, *, tasks: int) -> None:
    """The chunks must be equal, and of whole groups."""
    chunk, count = values[POLICY + "batch_size_per_optimize"], updates(values)
    if count > 1 and (responses % chunk or tasks % count):
        raise ConfigError(
            f"{POLICY}batch_size_per_optimize={chunk} must divide the {responses} responses of a rank "
            f"(train_batch_per_replica / dp_shard_size), and the {tasks} prompts of a step must divide by the number "
            "of optimizer steps: unequal ones and parts of groups are coming."
        )


def _micro(values: Values) -> dict[str, Json]:
    """Cuts of the batch for memory: by tokens if a budget is given, else by responses (0 or less: not at all)."""
    budget = whole(values, POLICY + "max_token_len_per_mini_batch", null=0)
    if budget > 0:
        return {"train.micro_tokens": budget * whole(values, MESH + "cp_size", least=1)}
    mini_batch = whole(values, POLICY + "mini_batch")
    return {"train.micro_rollouts": mini_batch if mini_batch > 0 else values[RESPONSES]}


def _sft_batch(values: Values) -> dict[str, Json]:
    """Every data-parallel worker trains on train_batch_per_replica conversations."""
    rows, mini_batch = whole(values, RESPONSES, least=1), whole(values, POLICY + "mini_batch", least=1)
    if rows % mini_batch:
        raise ConfigError(
            f"train.train_batch_per_replica={rows} must be divisible by {POLICY}mini_batch={mini_batch}."
        )
    workers = _shards(values)
    for key in ("dp_replicate_size", "n_init_replicas"):
        workers *= whole(values, MESH + key, least=1)
    return {"train.tasks_per_step": rows * workers, "train.micro_rollouts": mini_batch}


def _shards(values: Values) -> int:
    """dp_shard_size; -1 asks for the GPUs that are left, and there is one device."""
    shards = whole(values, MESH + "dp_shard_size")
    if shards == 0 or shards < -1:
        raise ConfigError(f"{MESH}dp_shard_size={shards}: it must be at least 1, or -1.")
    return max(shards, 1)


# ---------------------------------------------------------------- length of a run


def length(values: Values) -> dict[str, Json]:
    """max_num_steps if given, else the epochs."""
    steps = total_steps(values)
    return (
        {"train.epochs": whole(values, "train.epoch", least=1)} if steps is None else {"train.steps": steps}
    )


def total_steps(values: Values) -> int | None:
    """max_num_steps; None where the epochs decide."""
    key = "train.max_num_steps"
    return None if values[key] is None else whole(values, key, least=1)


# ---------------------------------------------------------------- optimizer


def optimizer(values: Values) -> dict[str, Json]:
    """AdamW and its learning rate; a list of rates stands for parts of a model, and there is one part."""
    name, rates = values["train.optm_name"], values["train.optm_lr"]
    rates = rates if isinstance(rates, list) else [rates]
    if name not in ("AdamW", "Adam"):
        raise ConfigError(
            f"train.optm_name={name!r}: only AdamW, or Adam without weight decay; others are coming."
        )
    if name == "Adam" and values["train.optm_weight_decay"]:
        raise ConfigError(
            "train.optm_name='Adam' adds its weight decay to the gradient, which is coming: set optm_weight_decay=0 or "
            "optm_name='AdamW'."
        )
    if len(rates) != 1:
        raise ConfigError(
            f"train.optm_lr has {len(rates)} values; the model here is one part, give one value."
        )
    clip = number(values, "train.optm_grad_norm_clip")
    return {OPTIMIZER + "lr": rates[0], OPTIMIZER + "grad_clip": clip if clip > 0 else None}


def schedule(values: Values) -> dict[str, Json]:
    """Warm-up, plateau and decay over the run's steps.

    The multiplier at step k (from 0) is (k+1)/w in the warm-up of w steps: a native warm-up of w-1. A linear decay is
    a native `wsd` over the last d steps, exact where max_num_steps says how many there are.
    """
    shape, share = values["train.optm_decay_type"], values["train.optm_decay_ratio"]
    if shape in (None, "none", "None", "null") or share == 0:
        return {SCHEDULE + "kind": "constant", **_warmup(values, early=1)}
    if shape not in ("linear", "cosine"):
        raise ConfigError(f"train.optm_decay_type={shape!r}: linear, cosine or none; sqrt is coming.")
    floor = {SCHEDULE + "min_factor": values["train.optm_min_lr_factor"]}
    if shape == "cosine":
        if share is not None:
            raise ConfigError(
                "train.optm_decay_ratio with optm_decay_type='cosine' is coming: leave the ratio out."
            )
        return {SCHEDULE + "kind": "cosine", **_warmup(values, early=0), **floor}
    part = _decay_share(values)
    if part is None:
        return {SCHEDULE + "kind": "linear", **_warmup(values, early=0), **floor}
    return {SCHEDULE + "kind": "wsd", SCHEDULE + "decay_fraction": part, **_warmup(values, early=1), **floor}


def _warmup(values: Values, *, early: int) -> dict[str, Json]:
    """The warm-up in optimizer steps, `early` of them fewer; a fraction stays one if the run's length is not known."""
    length = number(values, "train.optm_warmup_steps")
    steps = warmup_steps(length, total_steps(values))
    if steps is None:
        return {SCHEDULE + "warmup_fraction": length}
    return {SCHEDULE + "warmup_steps": max(steps * _updates_per_step(values) - early, 0)}


def warmup_steps(length: int | float, total: int | None) -> int | None:
    """Training steps of the warm-up: a whole number counts steps, a float up to 1.0 is a share of all, rounded down."""
    share = isinstance(length, float) and length <= 1.0
    if total is None:
        return None if share and length > 0 else int(length)
    return min(int(length * total) if share else int(length), total)


def _decay_share(values: Values) -> float | None:
    """The decay as a fraction of all optimizer steps, half a step up so that rounding down gives it back.

    None: it follows the warm-up and the run's length is not known.
    """
    total, share = total_steps(values), values["train.optm_decay_ratio"]
    share = None if share is None else number(values, "train.optm_decay_ratio")
    if total is None:
        return share
    rest = total - (warmup_steps(number(values, "train.optm_warmup_steps"), total) or 0)
    steps = rest if share is None else min(round(share * total), rest)
    updates = _updates_per_step(values)
    return min((steps * updates + 0.5) / (total * updates), 1.0)


def _updates_per_step(values: Values) -> int:
    """Optimizer steps of one training step."""
    return updates(values) * (1 if is_sft(values) else whole(values, POLICY + "mu_iterations", least=1))
