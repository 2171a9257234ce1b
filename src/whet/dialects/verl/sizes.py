"""verl's sizes as native keys: batches, the devices that share them, and how passes are cut for memory.

verl's own rules, which sizes must divide which, are answered in its words. Letters as there: B prompts of a step, n
responses of a prompt, W devices (nodes times devices of a node), sp devices that share one sequence, dp = W / sp ranks.
The rules are about the file and the machine it names, not about this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from whet.dialects.layout import PARALLEL, FileLayout, groups, resharded
from whet.dialects.megatron import learns
from whet.dialects.row import Native, NotSupportedYet, Values
from whet.dialects.verl.roles import (
    ACTOR,
    CRITIC,
    ENGINES,
    FSDP,
    MTP,
    REF,
    ROLLOUT,
    Engine,
    engine_of,
    has_critic,
    has_implicit_model,
    has_reference,
    is_megatron,
    makes_pairs,
    parallel_keys,
    samples,
    section,
    server_options,
)
from whet.dialects.versions import since
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- devices


def responses(v: Values) -> int:
    """n: responses of a prompt; greedy decoding gives one."""
    n: int = v[f"{ROLLOUT}.n"]
    return n if samples(v, f"{ROLLOUT}.do_sample") else 1


def longest(v: Values) -> int:
    """Tokens of the longest sequence, prompt and response."""
    most: int = v["data.max_prompt_length"] + v["data.max_response_length"]
    return most


def world(v: Values) -> int:
    """W: devices of the machine that the file is for."""
    W: int = v["trainer.nnodes"] * v["trainer.n_gpus_per_node"]
    return W


def ranks(v: Values, role: str) -> int:
    """dp = W / (tensor, pipeline, context or sequence parallel sizes), which must divide W."""
    sizes = {key: v[key] for dim, key in parallel_keys(v, role).items() if dim != "ep"}
    W, shared = world(v), math.prod(sizes.values())
    if W % shared:
        told = " * ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise ConfigError(f"trainer.nnodes * trainer.n_gpus_per_node = {W} must be divisible by {told}")
    return W // shared


def layout(v: Values) -> Native:
    """The actor's layout serves all models. Its W devices hold W / tp engines, which take turns with training, or
    engines have devices of their own."""
    dp, at = ranks(v, ACTOR), section(v, ACTOR)
    sizes = {dim: v[key] for dim, key in parallel_keys(v, ACTOR).items()}
    copies, shards = copies_and_shards(v, ENGINES[engine_of(v)], at, dp=dp, each=world(v) // dp)
    engines = max(engine_devices(v) // v[f"{ROLLOUT}.tensor_model_parallel_size"], 1)
    engines = 1 if server_options(v) else engines  # one server, whose options say how many devices it takes
    made = FileLayout(
        dp_replicate=copies, dp_shard=shards, engines=engines, nodes=v["trainer.nnodes"], **sizes
    )
    if is_megatron(v) and learns(v, MTP):
        return made.flat().natives()
    chunks = v.get(f"{at}.{ENGINES[engine_of(v)].chunks}") if sizes.get("pp", 1) > 1 else None
    return made.natives() | ({f"{PARALLEL}.pipeline_chunks": chunks} if chunks else {})


def copies_and_shards(v: Values, engine: Engine, at: str, *, dp: int, each: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard) of dp data-parallel ranks of `each` devices, by the sizes in an engine's section."""
    if engine.copies:
        copies = v[f"{at}.{engine.copies}"]
        shards = v[f"{at}.{engine.shards}"] if engine.shards else -1
        if dp % copies or shards not in (-1, dp // copies):
            told = f" * {at}.{engine.shards}={shards}" if engine.shards else ""
            raise ConfigError(f"{at}.{engine.copies}={copies}{told} must make the {dp} data-parallel ranks")
        return copies, dp // copies
    if not engine.shards:
        return 1, dp
    return groups(v[f"{at}.{engine.shards}"], dp, key=f"{at}.{engine.shards}", each=each)


def engine_devices(v: Values) -> int:
    """Those of the trainer, unless the engines have devices of their own (rollout.nnodes of the asynchronous trainers,
    actor_rollout_ref.rollout.nnodes since 0.7.1)."""
    if machines := v[f"{ROLLOUT}.nnodes"]:
        if (each := v[f"{ROLLOUT}.n_gpus_per_node"]) is None:
            raise ConfigError(
                f"{ROLLOUT}.n_gpus_per_node: got null, expected the number of devices of each of the "
                f"{ROLLOUT}.nnodes={machines} machines"
            )
        return int(machines * each)
    if not v["actor_rollout_ref.hybrid_engine"]:
        return int(v["rollout.nnodes"] * v["rollout.n_gpus_per_node"])
    return world(v)


def sharding(v: Values) -> Native:
    """How FSDP gathers what it has cut. Without forward_prefetch nothing is gathered ahead."""
    return {f"{PARALLEL}.reshard_after_forward": resharded(v, f"{FSDP}.reshard_after_forward")}


# ---------------------------------------------------------------- batches


def is_fully_async(v: Values) -> bool:
    """verl's fully asynchronous trainer has no batch of prompts: train_batch_size is 0."""
    return bool(v["data.train_batch_size"] == 0 and not v["actor_rollout_ref.hybrid_engine"])


def steps_of_a_version(v: Values) -> int:
    """Training steps between two syncs: the fully asynchronous trainer counts validations and checkpoints in them."""
    return int(v["async_training.trigger_parameter_sync_step"]) if is_fully_async(v) else 1


def updates_of_a_step(v: Values) -> int:
    """Mini batches of a training step that are updates of their own, each with a move of the learning rate: those
    between two syncs of the trainer separate_async."""
    alone = v["trainer.v1.trainer_mode"] == "separate_async"
    return int(v["trainer.v1.separate_async.parameter_sync_step"]) if alone else 1


def is_one_step_off(v: Values) -> bool:
    """verl's trainer that samples a step ahead, with engines of their own."""
    others = is_fully_async(v) or v["trainer.v1.trainer_mode"] != "sync"
    return not v["actor_rollout_ref.hybrid_engine"] and not others


def prompts(v: Values) -> int:
    """B: prompts of a step."""
    if is_fully_async(v):
        return int(v["async_training.require_batches"] * v[f"{ACTOR}.ppo_mini_batch_size"])
    if v["data.train_batch_size"] < 1:
        raise ConfigError("data.train_batch_size: got 0, expected a whole number >= 1")
    B: int = v[_of_a_step(v)]
    return B


def _of_a_step(v: Values) -> str:
    """The key of the prompts of a step. Without DAPO's filter verl trains on all that it generates, which is
    gen_batch_size; its newer trainer (use_v1, since 0.9.0) fetches train_batch_size in parts of that."""
    filters = v["algorithm.filter_groups.enable"] or has_implicit_model(v)
    newer = since(v, "verl", "0.9.0") and v.get("trainer.use_v1", True)
    other = v["data.gen_batch_size"] not in (None, v["data.train_batch_size"])
    return "data.gen_batch_size" if other and not filters and not newer else "data.train_batch_size"


def mini_batches(v: Values, role: str) -> int:
    """B / ppo_mini_batch_size, after verl's rules for the sizes of a step. SPIN takes one optimizer step for all."""
    key = f"{role}.ppo_mini_batch_size"
    B, mini, n, dynamic = prompts(v), v[key], responses(v), v[f"{role}.use_dynamic_bsz"]
    if mini > B and dynamic:
        return 1
    if mini > B:
        raise ConfigError(f"{_of_a_step(v)}={B} must be at least {key}={mini}")
    if B % mini:
        said = f"{key}={mini} must divide {_of_a_step(v)}={B}"
        if since(v, "verl", "0.8.0"):
            raise ConfigError(said)
        raise NotSupportedYet(f"{said}: a smaller last mini batch is coming, not built yet")
    if not dynamic:
        _check_shares(v, role, of_step=B * n, of_mini=mini * n)
    return 1 if makes_pairs(v) else B // int(mini)


def _check_shares(v: Values, role: str, *, of_step: int, of_mini: int) -> None:
    """Sequences of a step and of a mini batch, over the devices of the file's machine."""
    W, dp = world(v), ranks(v, role)
    if of_step % (dp if is_megatron(v) else W):
        raise ConfigError(
            f"{_of_a_step(v)} * {ROLLOUT}.n = {of_step} must be divisible by trainer.nnodes * "
            f"trainer.n_gpus_per_node = {W} (default of a node: 8)"
        )
    share, told = of_mini // dp, f"{role}.ppo_mini_batch_size * {ROLLOUT}.n / {dp} ranks = {of_mini}/{dp}"
    if share < 1:
        raise ConfigError(
            f"{told} leaves a rank without a sequence: raise ppo_mini_batch_size or use fewer devices"
        )
    key = f"{role}.ppo_micro_batch_size"
    micro = micro_batch(v, key, of=role)
    if v[key] and v[f"{role}.ppo_mini_batch_size"] % v[key]:
        raise ConfigError(
            f"{key}={v[key]} must divide {role}.ppo_mini_batch_size={v[f'{role}.ppo_mini_batch_size']}"
        )
    if micro and share % micro:
        raise ConfigError(f"{key}_per_gpu={micro} must divide {told}")


def batches(v: Values) -> Native:
    """A step of B prompts in B / ppo_mini_batch_size optimizer steps, ppo_epochs times over; the critic's where they
    are others."""
    minis, passes = mini_batches(v, ACTOR), 1 if makes_pairs(v) else v[f"{ACTOR}.ppo_epochs"]
    out: dict[str, Json] = {
        "train.tasks_per_step": prompts(v),
        "train.minibatches": minis,
        "train.update_epochs": passes,
    }
    if has_critic(v):
        own_minis, own_passes = mini_batches(v, CRITIC), v[f"{CRITIC}.ppo_epochs"]
        out |= {"critic.minibatches": own_minis} if own_minis != minis else {}
        out |= {"critic.update_epochs": own_passes} if own_passes != passes else {}
    return out


# ---------------------------------------------------------------- how passes are cut for memory

PER_GPU = {
    f"{ACTOR}.ppo_micro_batch_size": 8,
    f"{REF}.log_prob_micro_batch_size": 16,
    f"{ROLLOUT}.log_prob_micro_batch_size": 16,
}
"""The document's defaults of `KEY_per_gpu`: a global size that is given stands over them."""


def micro_batch(v: Values, key: str, *, of: str) -> int | None:
    """Sequences of one pass on one device: KEY_per_gpu, or the older KEY over all devices, never both."""
    together, each = v[key], v[f"{key}_per_gpu"]
    if together is None:
        return None if each is None else int(each)
    if each is not None and each != PER_GPU.get(key):
        name = PurePath(key).suffix.lstrip(".")
        raise ConfigError(
            f"[{of}] You have set both '{key}' AND '{key}_per_gpu'. Please remove '{key}', because only "
            f"'*_{name}_per_gpu' is supported"
        )
    dp = ranks(v, ACTOR if of in (REF, ROLLOUT) else of)
    if together < dp:
        raise ConfigError(
            f"{key}={together} must be at least the {dp} data-parallel ranks (one sequence each)"
        )
    return int(together) // dp


_LEARNING = ("ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")
_SCORING = ("log_prob_micro_batch_size", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu")
_VALUING = ("forward_micro_batch_size", "use_dynamic_bsz", "forward_max_token_len_per_gpu")


def _scoring(v: Values) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """(role, keys of its cut) of every kind of pass without gradient that this run makes."""
    yield ROLLOUT, _SCORING
    if has_reference(v):
        yield REF, _SCORING
    if has_critic(v):
        yield CRITIC, _VALUING


def cut(v: Values) -> Native:
    """How passes are cut: the policy's and the critic's own, and for all without gradient the smallest that any of
    them asks for. It changes memory and speed, never a number."""
    mine = _asked(v, ACTOR, *_LEARNING)
    if mine is None:
        key = f"{ACTOR}.ppo_micro_batch_size"
        raise ConfigError(f"[{ACTOR}] Please set at least one of '{key}' or '{key}_per_gpu'")
    critic = _asked(v, CRITIC, *_LEARNING) if has_critic(v) else None
    asked = [size for role, keys in _scoring(v) if (size := _asked(v, role, *keys))]
    return {
        f"train.micro_batch_{mine[0]}": mine[1],
        **({f"critic.micro_batch_{critic[0]}": critic[1]} if critic else {}),
        **(
            {f"train.forward_micro_batch_{kind}": most for kind, most in [_smallest(v, asked)]}
            if asked
            else {}
        ),
    }


def _smallest(v: Values, asked: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Where some count sequences and some tokens, a sequence is taken to be as long as can be."""
    tokens = [size for kind, size in asked if kind == "tokens"]
    rollouts = [size for kind, size in asked if kind == "rollouts"]
    if not rollouts:
        return "tokens", min(tokens)
    return "rollouts", min([*rollouts, *(size // longest(v) for size in tokens)])


def _asked(v: Values, role: str, sequences: str, dynamic: str, tokens: str) -> tuple[str, int] | None:
    """('rollouts', how many) or ('tokens', how many) in one pass of a role; None: it does not say."""
    if not v[f"{role}.{dynamic}"]:
        micro = micro_batch(v, f"{role}.{sequences}", of=role)
        return None if micro is None else ("rollouts", micro)
    shared = _sharing(v, role)
    most = v[f"{role}.{tokens}"] * shared
    if most < longest(v):
        ranks_share = f" * {shared} ranks that share a sequence" if shared > 1 else ""
        raise ConfigError(
            f"{role}.{tokens}={most // shared}{ranks_share} must be at least data.max_prompt_length + "
            f"data.max_response_length = {longest(v)}"
        )
    return "tokens", most


def _sharing(v: Values, role: str) -> int:
    """Ranks that share the tokens of a sequence, each with the role's budget, as there."""
    keys = parallel_keys(v, ACTOR if role == ROLLOUT else role)
    return int(v[keys[ENGINES[engine_of(v)].sharing]])
