"""verl's own rules: which sizes must divide which, answered in its words; and values read with their kind.

Letters as there: B prompts of a step, n responses of a prompt, W devices (nodes times devices of a node), sp devices
that share one sequence, dp = W / sp ranks. The rules are about the file and the machine it names, not about this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath

from whet.config.faults import shown
from whet.config.urls import is_remote
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.typed import choose, flag, number, whole
from whet.types import ConfigError, Json

Native = Mapping[str, Json]

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CRITIC = "critic"

UNBOUNDED = 1_000_000
"""Refills of a step where there is no limit."""

ANY = -(10**9)
"""No lower bound: verl switches things off by any number below 1."""

NOTHING: Native = {}
"""What a check gives: no native key."""

# ---------------------------------------------------------------- values with their kind


def texts(v: Values, key: str) -> list[str]:
    """One text, or a list of them."""
    value = v[key]
    given = value if isinstance(value, list) else [value]
    if not given or not all(isinstance(one, str) and one for one in given):
        raise ConfigError(f"{key}: got {shown(value)}, expected a text or a list of texts")
    return given


def anywhere(v: Values, key: str) -> str:
    """A path that is read: on this machine, or a URL."""
    value = v[key]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: got {shown(value)}, expected a path")
    return value


def local(v: Values, key: str) -> str:
    """A path on this machine."""
    path = anywhere(v, key)
    if is_remote(path):
        raise ConfigError(f"{key}={path}: expected a path on this machine")
    return path


def share(key: str) -> Callable[[Values], Native]:
    """A check that a key is a share, above 0 and at most 1."""

    def check(v: Values) -> Native:
        if not 0 < number(v, key) <= 1:
            raise ConfigError(f"{key}={v[key]}: expected a share above 0 and at most 1")
        return NOTHING

    return check


def equal(key: str, other: str, why: str) -> Callable[[Values], Native]:
    """A check that two keys have the same value, since one native value stands for both."""

    def check(v: Values) -> Native:
        if v[key] != v[other]:
            raise ConfigError(f"{key}={shown(v[key])} must equal {other}={shown(v[other])}: {why}")
        return NOTHING

    return check


# ---------------------------------------------------------------- who is there


FAMILIES = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}

MEGATRON_SIZES = tuple(
    f"{ACTOR}.megatron.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context")
)


def is_megatron(v: Values) -> bool:
    """Whether the optimizer keys are Megatron's: by the strategy, by Hydra's base file, or by its sizes, which only
    that base file has."""
    base = v.get("defaults") or []
    return (
        choose(v, f"{ACTOR}.strategy", FAMILIES) == "megatron"
        or "ppo_megatron_trainer" in (base if isinstance(base, list) else [base])
        or any(whole(v, name) > 1 for name in MEGATRON_SIZES if name in v)
    )


def same_family(v: Values) -> Native:
    """Actor and critic are both FSDP's or both Megatron's."""
    mine, other = (choose(v, f"{role}.strategy", FAMILIES) for role in (ACTOR, CRITIC))
    if has_critic(v) and mine != other:
        raise ConfigError(
            f"critic.strategy={v['critic.strategy']} must be of the family of {ACTOR}.strategy={v[f'{ACTOR}.strategy']}"
        )
    return NOTHING


def has_reward_model(v: Values) -> bool:
    """A reward model is enabled."""
    return flag(v, "reward_model.enable")


def has_critic(v: Values) -> bool:
    """Only gae reads values, so only then a critic learns."""
    return v["algorithm.adv_estimator"] == "gae"


def has_reference(v: Values) -> bool:
    """Whether a KL to the reference is taken at all."""
    return flag(v, f"{ACTOR}.use_kl_loss") or flag(v, "algorithm.use_kl_in_reward")


def responses(v: Values) -> int:
    """n: responses of a prompt; greedy decoding gives one."""
    n = whole(v, f"{ROLLOUT}.n")
    return n if flag(v, f"{ROLLOUT}.do_sample") else 1


def validates(v: Values) -> bool:
    """Whether verl would validate at any time."""
    return whole(v, "trainer.test_freq", least=-(10**9)) > 0 or flag(v, "trainer.val_before_train")


def longest(v: Values) -> int:
    """Tokens of the longest sequence, prompt and response."""
    return whole(v, "data.max_prompt_length") + whole(v, "data.max_response_length")


def offloaded(v: Values) -> Native:
    """What rests in the host's memory. FSDP2's offload_policy: weights, gradients and the optimizer's state."""
    mine, other = (f"{at}.fsdp_config" for at in (ACTOR, "critic.model"))
    both = {
        "activations": (f"{MODEL}.enable_activation_offload", "critic.model.enable_activation_offload"),
        "optimizer": (f"{mine}.optimizer_offload", f"{other}.optimizer_offload"),
    }
    names = []
    for name, keys in both.items():
        wanted, wanted_too = (
            flag(v, key) or (name == "optimizer" and flag(v, f"{at}.offload_policy"))
            for key, at in zip(keys, (mine, other))
        )
        if has_critic(v) and wanted != wanted_too:
            either = {at: f" or {at}.offload_policy" if name == "optimizer" else "" for at in (mine, other)}
            raise NotSupportedYet(
                f"{keys[1]}{either[other]}: {wanted_too} beside {keys[0]}{either[mine]}: {wanted} is coming, not built "
                "yet: here policy and critic do it alike; give both the same value"
            )
        names += [name] if wanted else []
    compares = (flag(v, f"{ACTOR}.use_kl_loss") and number(v, f"{ACTOR}.kl_loss_coef")) or (
        flag(v, "algorithm.use_kl_in_reward") and number(v, "algorithm.kl_ctrl.kl_coef")
    )
    rests = {
        "critic": has_critic(v) and (flag(v, f"{other}.param_offload") or flag(v, f"{other}.offload_policy")),
        "reference": bool(compares) and flag(v, f"{REF}.fsdp_config.param_offload"),
        "policy": flag(v, f"{mine}.param_offload") or flag(v, f"{mine}.offload_policy"),
    }
    if flag(v, f"{mine}.grad_offload") and not rests["policy"]:
        raise NotSupportedYet(
            f"{mine}.grad_offload=True without param_offload is coming, not built yet: gradients are where their "
            "weights are"
        )
    return {"train.offload": [*names, *(name for name, there in rests.items() if there)]}


# ---------------------------------------------------------------- sizes


def world(v: Values) -> int:
    """W: devices of the machine that the file is for."""
    return whole(v, "trainer.nnodes") * whole(v, "trainer.n_gpus_per_node")


def ranks(v: Values, role: str) -> int:
    """dp = W / (tensor, pipeline, context or sequence parallel sizes), which must divide W."""
    W = world(v)
    if is_megatron(v):
        sizes = {name: whole(v, name) for name in MEGATRON_SIZES if name in v}
    else:
        sizes = {f"{role}.ulysses_sequence_parallel_size": whole(v, f"{role}.ulysses_sequence_parallel_size")}
    shared = 1
    for size in sizes.values():
        shared *= size
    if W % shared:
        told = " * ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise ConfigError(f"trainer.nnodes * trainer.n_gpus_per_node = {W} must be divisible by {told}")
    return W // shared


def hybrid(v: Values) -> Native:
    """verl asserts that rollouts and training share their devices."""
    if not flag(v, "actor_rollout_ref.hybrid_engine"):
        raise ConfigError("actor_rollout_ref.hybrid_engine=False: verl supports True alone; leave it out")
    return NOTHING


def check_parallel(v: Values) -> Native:
    """Devices must divide as verl asserts."""
    W, sides = (
        world(v),
        [(ACTOR, MODEL), (REF, MODEL), *([(CRITIC, "critic.model")] if has_critic(v) else [])],
    )
    for role, model in () if is_megatron(v) else sides:
        key, packed = f"{role}.ulysses_sequence_parallel_size", f"{model}.use_remove_padding"
        if whole(v, key) > 1 and not flag(v, packed):
            raise ConfigError(f"{key}={v[key]}: sequence parallelism needs {packed}=True")
    tp = whole(v, f"{ROLLOUT}.tensor_model_parallel_size")
    if W > 1 and W % tp:
        raise ConfigError(
            f"trainer.nnodes * trainer.n_gpus_per_node = {W} must be divisible by "
            f"{ROLLOUT}.tensor_model_parallel_size={tp}"
        )
    return NOTHING


def mini_batches(v: Values, role: str) -> int:
    """B / ppo_mini_batch_size, after verl's rules for the sizes of a step."""
    key = f"{role}.ppo_mini_batch_size"
    B, mini, n = whole(v, "data.train_batch_size"), whole(v, key), responses(v)
    dynamic = flag(v, f"{role}.use_dynamic_bsz")
    if mini > B and dynamic:
        return 1
    if mini > B:
        raise ConfigError(f"data.train_batch_size={B} must be at least {key}={mini}")
    if B % mini:
        raise ConfigError(
            f"{key}={mini} must divide data.train_batch_size={B}: a smaller last mini batch would count too much"
        )
    if not dynamic:
        _check_shares(v, role, of_step=B * n, of_mini=mini * n)
    return B // mini


def _check_shares(v: Values, role: str, *, of_step: int, of_mini: int) -> None:
    """Sequences of a step and of a mini batch, over the devices of the file's machine."""
    W, dp = world(v), ranks(v, role)
    if of_step % (dp if is_megatron(v) else W):
        raise ConfigError(
            f"data.train_batch_size * {ROLLOUT}.n = {of_step} must be divisible by trainer.nnodes * "
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


PER_GPU = {f"{ACTOR}.ppo_micro_batch_size": 8, f"{REF}.log_prob_micro_batch_size": 16}
PER_GPU[f"{ROLLOUT}.log_prob_micro_batch_size"] = 16
"""The document's defaults of `KEY_per_gpu`: a global size that is given stands over them."""


def micro_batch(v: Values, key: str, *, of: str) -> int | None:
    """Sequences of one pass on one device: KEY_per_gpu, or the older KEY over all devices, never both."""
    together, each = v[key], v[f"{key}_per_gpu"]
    if together is None:
        return None if each is None else whole(v, f"{key}_per_gpu")
    if each is not None and each != PER_GPU.get(key):
        name = PurePath(key).suffix.lstrip(".")
        raise ConfigError(
            f"[{of}] You have set both '{key}' AND '{key}_per_gpu'. Please remove '{key}', because only "
            f"'*_{name}_per_gpu' is supported"
        )
    size, dp = whole(v, key), ranks(v, ACTOR if of in (REF, ROLLOUT) else of)
    if size < dp:
        raise ConfigError(f"{key}={size} must be at least the {dp} data-parallel ranks (one sequence each)")
    return size // dp


def batches(v: Values) -> Native:
    """A step of B prompts in B / ppo_mini_batch_size optimizer steps, ppo_epochs times over; the critic's where they
    are others."""
    minis, passes = mini_batches(v, ACTOR), whole(v, f"{ACTOR}.ppo_epochs")
    out: dict[str, Json] = {
        "train.tasks_per_step": whole(v, "data.train_batch_size"),
        "train.minibatches": minis,
        "train.passes": passes,
    }
    if has_critic(v):
        own_minis, own_passes = mini_batches(v, CRITIC), whole(v, f"{CRITIC}.ppo_epochs")
        out |= {"critic.minibatches": own_minis} if own_minis != minis else {}
        out |= {"critic.passes": own_passes} if own_passes != passes else {}
    return out


def shuffling(v: Values) -> Native:
    """Another order of the rollouts in every pass, by the run's seed, in whole groups, for policy and critic alike."""
    wanted = flag(v, f"{ACTOR}.shuffle")
    if wanted and v[f"{ACTOR}.data_loader_seed"] is None:
        raise ConfigError(f"{ACTOR}.shuffle=True: data_loader_seed must be set, too, as verl asks")
    if has_critic(v) and flag(v, f"{CRITIC}.shuffle") != wanted:
        raise NotSupportedYet(
            f"{CRITIC}.shuffle={v[f'{CRITIC}.shuffle']}: another choice than {ACTOR}.shuffle={wanted} is coming, not "
            "built yet"
        )
    return {"train.shuffle_passes": wanted}


# ---------------------------------------------------------------- how passes are cut for memory


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
        f"train.micro_{mine[0]}": mine[1],
        **({f"critic.micro_{critic[0]}": critic[1]} if critic else {}),
        **({f"train.micro_{kind}_forward": most for kind, most in [_smallest(v, asked)]} if asked else {}),
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
    if not flag(v, f"{role}.{dynamic}"):
        micro = micro_batch(v, f"{role}.{sequences}", of=role)
        return None if micro is None else ("rollouts", micro)
    most = whole(v, f"{role}.{tokens}")
    if most < longest(v):
        raise ConfigError(
            f"{role}.{tokens}={most} must be at least data.max_prompt_length + data.max_response_length = {longest(v)}"
        )
    return "tokens", most
