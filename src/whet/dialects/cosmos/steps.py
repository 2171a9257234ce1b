"""Cosmos-RL: how many rollouts make a step, how many steps make a run, and the optimizer over them.

Cosmos counts responses on each replica (RL) or on each data-parallel worker (SFT). A step here is that of all
replicas together.
"""

from __future__ import annotations

import math
import re

from whet.dialects.cosmos.values import MESH, POLICY, is_sft, since
from whet.dialects.layout import PARALLEL, FileLayout
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.typed import share_of_steps
from whet.types import ConfigError, Json

OPTIMIZER = "train.optimizer."
SCHEDULE = "train.optimizer.schedule."
RESPONSES = "train.train_batch_per_replica"
SHAPES = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}
"""Shapes of the decay."""

# ---------------------------------------------------------------- batches and layout


def batch(values: Values) -> dict[str, Json]:
    """Tasks of a step, its optimizer steps, the rollouts of one forward pass, and over which ranks they are spread.
    ConfigError if they do not divide."""
    sizes = _sft_batch(values) if is_sft(values) else _rl_batch(values)
    copies = values[MESH + "n_init_replicas"] * values[MESH + "dp_replicate_size"]
    return sizes | FileLayout(dp_replicate=copies, dp_shard=_shards(values)).natives()


def _rl_batch(values: Values) -> dict[str, Json]:
    """One replica trains on train_batch_per_replica responses; its ranks take equal shares in mini-batches."""
    responses, group = values[RESPONSES], values["rollout.n_generation"]
    shards, mini_batch = _shards(values), max(values[POLICY + "mini_batch"], 1)
    if responses % (shards * mini_batch):
        raise ConfigError(
            f"train.train_batch_per_replica={responses} must be divisible by dp_shard_size*mini_batch="
            f"{shards}*{mini_batch}."
        )
    together, updates = steps_together(values), _updates(values, responses // shards)
    if together > 1:
        _check_parts_of_groups(values, together, updates)
    tasks = responses * values[MESH + "n_init_replicas"] * together // group
    return {"train.tasks_per_step": tasks, "train.minibatches": updates * together, **_micro(values)}


def steps_together(values: Values) -> int:
    """How many of Cosmos's steps are one step here: as many as make whole groups, each an optimizer step over its
    responses. 1 where each of them has whole groups."""
    if is_sft(values):
        return 1
    everyone = values[RESPONSES] * values[MESH + "n_init_replicas"]
    together: int = math.lcm(everyone, values["rollout.n_generation"]) // everyone
    return together


def together_up(values: Values, steps: int) -> int:
    """A number of Cosmos's steps in steps here, rounded up."""
    return -(-steps // steps_together(values))


def _check_parts_of_groups(values: Values, together: int, updates: int) -> None:
    """What would mean something else where steps over parts of groups are one step."""
    group, total = values["rollout.n_generation"], values["train.max_num_steps"]
    said = (
        f"train.train_batch_per_replica={values[RESPONSES]} x n_init_replicas={values[MESH + 'n_init_replicas']} is "
        f"not a multiple of rollout.n_generation={group}: {together} steps over parts of groups are one step here"
    )
    if values["mode"] != "disaggregated":
        raise ConfigError(
            f"{said}, and mode={values['mode']} trains on whole groups; Cosmos refuses it, too."
        )
    beyond = {
        f"{POLICY}on_policy": values[POLICY + "on_policy"],
        f"{POLICY}mu_iterations": values[POLICY + "mu_iterations"] > 1,
        f"{POLICY}batch_size_per_optimize": updates > 1,
        f"{POLICY}reference_reset_interval": (values[POLICY + "reference_reset_interval"] or 0) % together,
        "train.max_num_steps": (total or 0) % together,
    }
    for key in (key for key, is_asked in beyond.items() if is_asked):
        raise NotSupportedYet(
            f"{said}; {key}={values[key]} with parts of groups is coming, not built yet (numbers of steps: a multiple "
            f"of {together})."
        )


def _updates(values: Values, responses: int) -> int:
    """Optimizer steps of one pass: each rank cuts its responses in chunks of batch_size_per_optimize, equal ones."""
    chunk = values[POLICY + "batch_size_per_optimize"] or 0
    count = max(responses // chunk, 1) if chunk > 0 else 1
    if count > 1 and responses % chunk:
        raise NotSupportedYet(
            f"{POLICY}batch_size_per_optimize={chunk} must divide the {responses} responses of a rank "
            "(train_batch_per_replica / dp_shard_size): unequal optimizer steps are coming."
        )
    return count


def _micro(values: Values) -> dict[str, Json]:
    """Cuts of the batch for memory: by tokens if a budget is given, else by responses (0 or less: not at all)."""
    budget = values[POLICY + "max_token_len_per_mini_batch"] or 0
    if budget > 0:
        return {"train.micro_batch_tokens": budget * values[MESH + "cp_size"]}
    mini_batch = values[POLICY + "mini_batch"]
    return {"train.micro_batch_rollouts": mini_batch if mini_batch > 0 else values[RESPONSES]}


def _sft_batch(values: Values) -> dict[str, Json]:
    """Every data-parallel worker trains on train_batch_per_replica conversations."""
    rows, mini_batch = values[RESPONSES], values[POLICY + "mini_batch"]
    workers = _shards(values) * values[MESH + "dp_replicate_size"] * values[MESH + "n_init_replicas"]
    drop = values[POLICY + "dataloader_drop_last"] or (
        since(values, "0.4.3") and values[MESH + "pp_size"] > 1
    )
    return {
        "train.tasks_per_step": rows * workers,
        "train.micro_batch_rollouts": mini_batch,
        "train.drop_last": drop and since(values, "0.3.9"),
    }


def _shards(values: Values) -> int:
    """dp_shard_size; -1 asks for the GPUs that are left, which Cosmos's launcher counts as 1."""
    return max(int(values[MESH + "dp_shard_size"]), 1)


def layout(values: Values) -> dict[str, Json]:
    """How one copy of the policy lies on its devices; and the engines.

    default of resharding: after all layers (Cosmos: but the last), and never in pipelines.
    """
    sizes = {dim: values[f"{MESH}{dim}_size"] for dim in ("tp", "cp", "pp", "ep")}
    engines = 1 if is_sft(values) else values["rollout.parallelism.n_init_replicas"]
    reshards = {"always": True, "never": False, "default": sizes["pp"] == 1}
    reshard = {f"{PARALLEL}.reshard_after_forward": reshards[values["train.fsdp_reshard_after_forward"]]}
    return FileLayout(engines=engines, dp_shard=_shards(values), **sizes).natives() | reshard


def run_length(values: Values) -> dict[str, Json]:
    """The steps of a run, where their number is given."""
    steps = values["train.max_num_steps"]
    return {} if steps is None else {"train.steps": steps // steps_together(values)}


# ---------------------------------------------------------------- optimizer and schedule


def optimizer(values: Values) -> dict[str, Json]:
    """One rate; or one for each module by its path, the deepest first, and `global` for all others."""
    given = values["train.optm_lr"]
    if isinstance(given, list) and len(given) != 1:
        raise NotSupportedYet(
            f"train.optm_lr has {len(given)} values, and the model is one part: give one value (models of several "
            "parts are coming)."
        )
    rates = given if isinstance(given, dict) else {"global": given[0] if isinstance(given, list) else given}
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and x >= 0 for x in rates.values()):
        raise ConfigError(f"train.optm_lr={given!r}: expected a number, or numbers by module, of at least 0.")
    rest = rates.get("global", 0)
    if "global" not in rates or (rest == 0 and len(rates) > 1):
        raise ConfigError(
            f"train.optm_lr={given!r}: give `global`, the rate of all other parameters, above 0."
        )
    modules = sorted((path for path in rates if path != "global"), key=lambda path: -path.count("."))
    groups = {rf"^{re.escape(path)}(\.|$)": {"lr_factor": rates[path] / rest} for path in modules}
    return {OPTIMIZER + "lr": rest} | ({OPTIMIZER + "param_groups": groups} if groups else {})


def schedule(values: Values) -> dict[str, Json]:
    """Warm-up, plateau and decay, in training steps."""
    total: int | None = values["train.max_num_steps"]
    unit = "train_step" if steps_together(values) == 1 else "optimizer_step"
    ramp = {SCHEDULE + "unit": unit} | _warmup(values, total)
    shape, decay = values["train.optm_decay_type"], _decay(values, total)
    if shape in (None, "none") or decay == 0:
        return ramp | {SCHEDULE + "type": "constant"}
    down = {
        SCHEDULE + "type": "wsd",
        SCHEDULE + "decay_type": SHAPES[shape],
        SCHEDULE + "decay_steps": decay,
        SCHEDULE + "min_lr_ratio": values["train.optm_min_lr_factor"],
    }
    return ramp | down


def _warmup(values: Values, total: int | None) -> dict[str, Json]:
    """A whole number counts steps, a float up to 1.0 is a share of all; the last of them is at the peak.

    The first is one step above 0; from 0.4.2 on, and where it is given, at optm_warmup_start_factor.
    """
    length, start = values["train.optm_warmup_steps"], values["train.optm_warmup_start_factor"]
    is_share = isinstance(length, float) and length <= 1.0
    if is_share and length == 1.0 and total is not None:
        is_share, length = False, total
    if is_share:
        steps = share_of_steps(length, "train.optm_warmup_steps")
    else:
        steps = int(length) if total is None else min(int(length), total)
    out: dict[str, Json] = {SCHEDULE + "warmup_steps": steps}
    if start or since(values, "0.4.2"):
        return out | {SCHEDULE + "warmup_ends": "both", SCHEDULE + "warmup_start_ratio": start}
    return out | {SCHEDULE + "warmup_ends": "peak"}


def may_end_before_warmup(values: Values) -> bool:
    """The warm-up counts steps, and the length of the run follows from the rows, which are not known here."""
    length = values["train.optm_warmup_steps"]
    return values["train.max_num_steps"] is None and not (isinstance(length, float) and length <= 1.0)


def _decay(values: Values, total: int | None) -> float | None:
    """The decay as a share of all steps; where they are known half a step up, so that rounding down gives Cosmos's.

    None: all that the warm-up leaves.
    """
    share = values["train.optm_decay_ratio"]
    if share is not None and total is not None:
        steps = round(share * total)
        share = (steps + 0.5) / total if steps else 0.0
    return None if share is None or share >= 1 else float(share)
