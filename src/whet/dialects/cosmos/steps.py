"""Cosmos-RL: how many rollouts make a step, how many steps make a run, and the optimizer over them.

Cosmos counts responses on each replica (RL) or on each data-parallel worker (SFT). A step here is that of all
replicas together.
"""

from __future__ import annotations

from whet.dialects.cosmos.values import MESH, POLICY, is_sft, number, text, whole
from whet.dialects.layout import PARALLEL, Layout
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.typed import choose
from whet.types import ConfigError, Json

OPTIMIZER = "train.optimizer."
SCHEDULE = "train.optimizer.schedule."
RESPONSES = "train.train_batch_per_replica"
SHAPES = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}
"""Shapes of the decay."""


def batch(values: Values) -> dict[str, Json]:
    """Tasks of a step, its optimizer steps, the rollouts of one forward pass, and over which ranks they are spread.
    ConfigError if they do not divide."""
    sizes = _sft_batch(values) if is_sft(values) else _rl_batch(values)
    copies = whole(values, MESH + "n_init_replicas", least=1)
    copies *= whole(values, MESH + "dp_replicate_size", least=1)
    return sizes | Layout(dp_replicate=copies, dp_shard=_shards(values)).natives()


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
        raise NotSupportedYet(
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
        raise NotSupportedYet(
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


def layout(values: Values) -> dict[str, Json]:
    """How one copy of the policy lies on its devices; and the engines."""
    sizes = {dim: whole(values, f"{MESH}{dim}_size", least=1) for dim in ("tp", "cp", "pp", "ep")}
    engines = 1 if is_sft(values) else whole(values, "rollout.parallelism.n_init_replicas", least=1)
    return Layout(engines=engines, **sizes).natives()


def reshard(values: Values) -> dict[str, Json]:
    """default: after all layers (Cosmos: but the last), and never in pipelines."""
    known = {"always": True, "never": False, "default": values[MESH + "pp_size"] == 1}
    return {f"{PARALLEL}.reshard_after_forward": choose(values, "train.fsdp_reshard_after_forward", known)}


# ---------------------------------------------------------------- length of a run


def length(values: Values) -> dict[str, Json]:
    """The epochs, and max_num_steps if it is given: whichever ends first."""
    steps = total_steps(values)
    epochs: dict[str, Json] = {"train.epochs": whole(values, "train.epoch", least=1)}
    return epochs if steps is None else epochs | {"train.steps": steps}


def total_steps(values: Values) -> int | None:
    """max_num_steps; None where the epochs decide."""
    key = "train.max_num_steps"
    return None if values[key] is None else whole(values, key, least=1)


# ---------------------------------------------------------------- optimizer


def optimizer(values: Values) -> dict[str, Json]:
    """torch's, the decay on all parameters; a list of rates stands for parts of a model, and there is one part."""
    rates = values["train.optm_lr"]
    rates = rates if isinstance(rates, list) else [rates]
    kinds = {"AdamW": "adamw", "Adam": "adam", "AdamW8bit": "adamw", "Adam8bit": "adam"}
    ways = {"fused": "fused", "foreach": "foreach", "for-loop": "loop"}
    if len(rates) != 1:
        raise NotSupportedYet(
            f"train.optm_lr has {len(rates)} values, and the model is one part: give one value (models of several "
            "parts are coming)."
        )
    clip = number(values, "train.optm_grad_norm_clip")
    return {
        OPTIMIZER + "kind": choose(values, "train.optm_name", kinds),
        OPTIMIZER + "state": "int8" if str(values["train.optm_name"]).endswith("8bit") else "float32",
        OPTIMIZER + "implementation": choose(values, "train.optm_impl", ways),
        OPTIMIZER + "lr": rates[0],
        OPTIMIZER + "decay_all": True,
        OPTIMIZER + "grad_clip": clip if clip > 0 else None,
    }


def schedule(values: Values) -> dict[str, Json]:
    """Warm-up, plateau and decay, in training steps."""
    shape, ramp = text(values, "train.optm_decay_type"), {SCHEDULE + "unit": "train_step"} | _warmup(values)
    if shape.lower() in ("", "none", "null"):
        return {SCHEDULE + "kind": "constant"} | ramp
    if shape not in SHAPES:
        raise ConfigError(f"train.optm_decay_type={shape!r}: {', '.join(SHAPES)} or none.")
    share = _decay_share(values)
    if share == 0:
        return {SCHEDULE + "kind": "constant"} | ramp
    return ramp | {
        SCHEDULE + "kind": "wsd",
        SCHEDULE + "decay_shape": SHAPES[shape],
        SCHEDULE + "decay_fraction": share,
        SCHEDULE + "min_factor": values["train.optm_min_lr_factor"],
    }


def _warmup(values: Values) -> dict[str, Json]:
    """A whole number counts steps, a float up to 1.0 is a share of all; the last of them is at the peak.

    With optm_warmup_start_factor (newer versions) the first one is at that factor, else one step above 0.
    """
    length, total = number(values, "train.optm_warmup_steps"), total_steps(values)
    is_share = isinstance(length, float) and length <= 1.0
    steps = int(length) if total is None else min(int(length), total)
    out: dict[str, Json] = (
        {SCHEDULE + "warmup_fraction": length} if is_share else {SCHEDULE + "warmup_steps": steps}
    )
    if values["train.optm_warmup_start_factor"] is None:
        return out | {SCHEDULE + "warmup_ends": "peak"}
    start = number(values, "train.optm_warmup_start_factor")
    return out | {SCHEDULE + "warmup_ends": "both", SCHEDULE + "warmup_start": start}


def _decay_share(values: Values) -> float:
    """The decay as a share of all steps; where they are known half a step up, so that rounding down gives Cosmos's.

    Null: all that the warm-up leaves.
    """
    if values["train.optm_decay_ratio"] is None:
        return 1.0
    share, total = number(values, "train.optm_decay_ratio"), total_steps(values)
    if total is None:
        return share
    steps = round(share * total)
    return min((steps + 0.5) / total, 1.0) if steps else 0.0
