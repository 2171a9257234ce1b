"""verl's models as native keys: policy, reference, critic, their adapters and dtypes; and who is there at all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from whet.config.faults import shown
from whet.config.urls import is_remote
from whet.dialects.megatron import adapted_layers, begins, learned, router_terms
from whet.dialects.row import NOTHING, Native, NotSupportedYet, Values
from whet.dialects.typed import choices, choose
from whet.dialects.versions import since
from whet.inputs import read_json_object
from whet.tables import lines
from whet.types import ConfigError, Json

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
MODEL = "actor_rollout_ref.model"
CRITIC = "critic"
RM = "reward_model"
FSDP = f"{ACTOR}.fsdp_config"
MEGATRON = f"{ACTOR}.megatron"

# ---------------------------------------------------------------- values


def texts(v: Values, key: str) -> list[str]:
    """One text, or a list of them."""
    given = v[key] if isinstance(v[key], list) else [v[key]]
    if not given or not all(isinstance(one, str) and one for one in given):
        raise ConfigError(f"{key}: got {shown(v[key])}, expected a text or a list of texts")
    return given


def anywhere(v: Values, key: str) -> str:
    """A path that is read: on this machine, or a URL."""
    if not isinstance(v[key], str) or not v[key]:
        raise ConfigError(f"{key}: got {shown(v[key])}, expected a path")
    path: str = v[key]
    return path


def local(v: Values, key: str) -> str:
    """A path on this machine."""
    path = anywhere(v, key)
    if is_remote(path):
        raise ConfigError(f"{key}={path}: expected a path on this machine")
    return path


def code(v: Values, key: str, name_key: str, default: str | None = None) -> str:
    """An object of yours: the key of its file or module (`pkg://package.module`), and the key of its name in it."""
    name, place = v[name_key] or default, anywhere(v, key)
    if not isinstance(name, str):
        raise ConfigError(f"{key} needs {name_key}, the name in that file")
    if place.startswith("pkg://"):
        place = place.removeprefix("pkg://").replace("/", ".")
    else:
        place = local({**v, key: place.removeprefix("file://")}, key)
    if (colon := place.find(":", place.rfind("/") + 1)) >= 0:  # a folder's name may have one
        raise ConfigError(f"{key}={v[key]}: expected {place[:colon]} alone; {name_key} is for the name in it")
    return f"{place}:{name}"


# ---------------------------------------------------------------- who is there


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A training engine: its section of a role, and the names of parallel sizes in it. A line of engines.tsv."""

    name: str
    section: str
    of_critic: str
    tp: str
    pp: str
    cp: str
    ep: str
    copies: str
    shards: str
    chunks: str
    sharing: str

    @property
    def sizes(self) -> dict[str, str]:
        """By dimension: the name of its size."""
        return {dim: name for dim in ("tp", "pp", "cp", "ep") if (name := getattr(self, dim))}


ENGINES = {line["name"]: Engine(**line) for line in lines(__package__, "engines.tsv")}

FAMILIES = choices("verl", "strategy")
"""The engine of each strategy; None: not built."""

MODEL_ENGINES = {**{name: FAMILIES[name] for name in FAMILIES if not name.startswith("fsdp")}, "dp": "fsdp"}

_BASES = {
    "ppo_megatron_trainer": "megatron",
    **{f"model_engine={name}": family for name, family in MODEL_ENGINES.items()},
    **{f"actor={name}_actor": family for name, family in MODEL_ENGINES.items()},
}
"""What Hydra's list of files says about the engine."""


def engine_of(v: Values) -> str:
    """The actor's engine: by its strategy, by model_engine, by Hydra's base file or group, or by Megatron's sizes,
    which only that base file has."""
    named = (FAMILIES.get(str(v[f"{ACTOR}.strategy"])), MODEL_ENGINES.get(str(v["model_engine"])))
    sized = any(v[f"{MEGATRON}.{name}"] > 1 for name in _MEGATRON_SIZES)
    found = [*named, *(_BASES.get(name) for name in bases(v)), "megatron" if sized else None]
    return next((name for name in found if name not in (None, "fsdp")), "fsdp")


_MEGATRON_SIZES = [name for dim, name in ENGINES["megatron"].sizes.items() if dim != "ep"]


def is_megatron(v: Values) -> bool:
    return engine_of(v) == "megatron"


def section(v: Values, role: str) -> str:
    """The section of the actor's engine in a role."""
    engine = ENGINES[engine_of(v)]
    return f"{role}.{(engine.of_critic if role == CRITIC else '') or engine.section}"


def parallel_keys(v: Values, role: str) -> dict[str, str]:
    """By dimension: the key of its size. Those of the actor's section are for all roles."""
    if engine_of(v) == "fsdp":
        return {"cp": f"{role}.ulysses_sequence_parallel_size"}
    return {dim: f"{section(v, ACTOR)}.{name}" for dim, name in ENGINES[engine_of(v)].sizes.items()}


SERVERS = {"vllm": "vllm", "sglang": "sglang", "sglang_async": "sglang"}
"""Engines of rollouts that have servers, by rollout.name."""


def server_options(v: Values) -> dict[str, Json]:
    """Options of the engine that rollout.name names which nothing else here stands for."""
    name = SERVERS.get(str(v[f"{ROLLOUT}.name"]))
    options = v[f"{ROLLOUT}.engine_kwargs.{name}.*"] if name else {}
    return {option: value for option, value in (options or {}).items() if value is not None}


def check_engine(v: Values) -> None:
    """What trains must be known and built."""
    choose(v, f"{ACTOR}.strategy", FAMILIES)
    choose(v, "model_engine", MODEL_ENGINES)


def has_critic(v: Values) -> bool:
    """Only gae reads values, so only then a critic learns."""
    return bool(v["algorithm.adv_estimator"] == "gae")


def self_plays(v: Values) -> bool:
    """Whether SPPO or SPIN trains, recipes of verl with trainers of their own, which read no estimator."""
    return v["algorithm.adv_estimator"] is None


def makes_pairs(v: Values) -> bool:
    """Whether that is SPIN: DPO on pairs of the policy's own replies. SPPO has an eta."""
    return self_plays(v) and v[f"{ACTOR}.sppo_eta"] is None and v["algorithm.sppo_eta"] is None


def has_implicit_model(v: Values) -> bool:
    """Whether PRIME trains: its reward model learns beside the policy."""
    return v["algorithm.reward_dpo_coef"] is not None or v["algorithm.reward_gt_coef"] is not None


def has_reference(v: Values) -> bool:
    """Whether a KL to the reference is taken at all, or DPO."""
    return bool(v[f"{ACTOR}.use_kl_loss"] or v["algorithm.use_kl_in_reward"]) or makes_pairs(v)


def has_reward_model(v: Values) -> bool:
    """Whether a frozen model scores responses."""
    return bool(v[f"{RM}.enable"]) and not has_implicit_model(v)


def has_reward_server(v: Values) -> bool:
    """Whether the reward model is a server, which reads whole conversations in its own template: from 0.7.0 on."""
    loops = since(v, "verl", "0.7.1") or (since(v, "verl", "0.7.0") and bool(v[f"{RM}.use_reward_loop"]))
    return has_reward_model(v) and loops


def has_turns(v: Values) -> bool:
    """Whether rollouts may have several turns."""
    return bool(v[f"{TURNS}.enable"] or (sources(v) and agent_loops(v)))


def sources(v: Values) -> dict[str, str]:
    """The keys that name what answers a reply, by the argument of `whet.envs.verl_tools`."""
    known = {
        "tool_config": f"{TURNS}.tool_config_path",
        "function_tools": f"{TURNS}.function_tool_path",
        "interaction_config": f"{TURNS}.interaction_config_path",
    }
    return {name: key for name, key in known.items() if v.get(key)}


def agent_loops(v: Values) -> bool:
    """Whether verl's agent loops play; before 0.7.0 rollout.mode says so, else its SGLang rollouts do."""
    return since(v, "verl", "0.7.0") or v[f"{ROLLOUT}.mode"] == "async"


def samples(v: Values, key: str) -> bool:
    """Whether replies are sampled, by a do_sample. Agent loops do not read it: there a temperature of 0 is greedy."""
    return bool(v[key]) or agent_loops(v)


def same_family(v: Values) -> Native:
    """Actor and critic have the same engine, which Hydra's base file may name."""
    mine, other = (choose(v, f"{role}.strategy", FAMILIES) for role in (ACTOR, CRITIC))
    if has_critic(v) and other not in (mine, engine_of(v)):
        raise ConfigError(
            f"critic.strategy={v['critic.strategy']} must be of the family of {ACTOR}.strategy={v[f'{ACTOR}.strategy']}"
        )
    return NOTHING


BASES = ("ppo_trainer", "ppo_megatron_trainer", "legacy_reward_impl", "_self_")

PARTS_OF_BASES = {
    **dict.fromkeys(
        ("actor", "ref", "critic", "reward_model"),
        ("dp_", "megatron_", "veomni_", "torchtitan_", "${model_engine}_"),
    ),
    **dict.fromkeys(("engine", "optim", "model_engine"), (*ENGINES, "dp")),
    **{name: (name,) for name in ("rollout", "reward", "profiler", "npu_profile", "rollout_correction")},
    "data": ("legacy_data",),
    "model": ("hf_model",),
    "algorithm": ("rollout_correction",),
}
"""Hydra's groups of verl's own files, and how the names in them begin."""


def bases(v: Values) -> list[str]:
    """What Hydra's list names: files, and `GROUP=NAME` of parts."""
    given = v["defaults"] or []
    given = given if isinstance(given, list) else [given]
    names = []
    for one in given:
        pairs = one.items() if isinstance(one, dict) else [("", one)]
        for group, name in pairs:
            names.append(
                f"{str(group).removeprefix('override ').partition('@')[0]}={name}" if group else str(name)
            )
    return names


def hydra_defaults(v: Values) -> Native:
    """The files that this one starts from: verl's own, whose values stand in the table."""
    for name in bases(v):
        group, _, part = name.partition("=")
        if name not in BASES and not part.startswith(PARTS_OF_BASES.get(group, ())):
            raise ConfigError(
                f"defaults: {shown(name)} is not read (verl's own files and groups are what a file leaves out); give "
                "one file with everything in it"
            )
    return NOTHING


# ---------------------------------------------------------------- weights


def imports(v: Values) -> Native:
    """Modules that are imported before a model is built; the misspelling external_libs counts, too."""
    keys = [f"{MODEL}.external_lib", f"{MODEL}.external_libs"]
    keys += ["critic.model.external_lib"] if has_critic(v) else []
    keys += ["reward_model.model.external_lib"] if has_reward_model(v) else []
    names = [name for key in keys if v[key] is not None for name in texts(v, key)]
    return {"imports": list(dict.fromkeys(names))} if names else NOTHING


def policy(v: Values) -> Native:
    """Its folder, and what stands over its config: flat fields (FSDP's form) and those of model_config (Megatron's)."""
    at = f"{MODEL}.override_config"
    flat, nested = v.get(f"{at}.*") or {}, v[f"{at}.model_config"] or {}
    for key in flat.keys() & nested.keys():
        if flat[key] != nested[key]:
            raise ConfigError(f"{at}: {key} is given twice; keep one")
    frozen = v[f"{at}.moe_config.freeze_moe_router"]
    return {
        "model.path": anywhere(v, f"{MODEL}.path"),
        "model.overrides": {**nested, **flat},
        **({"train.trainable": {r"\.mlp\.gate\.": False}} if frozen else {}),
    }


MTP = f"{MODEL}.mtp"
routers = partial(router_terms, at=f"{MEGATRON}.override_transformer_config")
mtp = partial(learned, at=MTP)


def replay_key(v: Values) -> str:
    """The key by which the actor's engine replays experts; '' for an engine that does not."""
    engines_own = since(v, "verl", "0.8.0") or v.get("trainer.use_legacy_worker_impl") == "disable"
    return {
        "megatron": f"{MEGATRON if engines_own else ACTOR}.router_replay.mode",
        "veomni": f"{ACTOR}.veomni.router_replay.mode",
        "mlite": f"{ACTOR}.engine.router_replay_mode",
    }.get(engine_of(v), "")


def replay_mode(v: Values) -> Json:
    """Its value."""
    return v.get(replay_key(v))


def critic(v: Values) -> Native:
    """Where the value model's weights start, with its own overrides in both forms: empty is none."""
    config = v["critic.model.override_config"] or {}
    return {"critic.path": anywhere(v, "critic.model.path"), "critic.overrides": _without_sections(config)}


def _without_sections(config: dict[str, Json]) -> dict[str, Json]:
    """Megatron's form of overrides made flat; a moe_config that switches nothing on goes."""
    inner, moe = (config.get(name) or {} for name in ("model_config", "moe_config"))
    if not isinstance(inner, dict) or not isinstance(moe, dict):
        raise ConfigError("critic.model.override_config: model_config and moe_config are sections of keys")
    if any(moe.values()):
        raise NotSupportedYet(
            "critic.model.override_config.moe_config: a critic of which only a part learns is coming, not built yet"
        )
    rest = {key: value for key, value in config.items() if key not in ("model_config", "moe_config")}
    return {**rest, **inner}


def _lora(v: Values, *, model: str, native: str, engine: str) -> Native:
    """Rank 0 trains the whole model. engine: Megatron's section."""
    if v.get(f"{model}.lora.rank"):
        return _megatron_lora(v, model, native=native, engine=engine)
    rank, path = v[f"{model}.lora_rank"], v[f"{model}.lora_adapter_path"]
    if rank == 0 and path is None:
        return NOTHING
    if path is not None and (folder := Path(path)).is_dir():
        v = {**v, **_of_adapters(folder, model)}
        rank = v[f"{model}.lora_rank"]
    if rank == 0:
        raise ConfigError(
            f"{model}.lora_adapter_path={path} needs {model}.lora_rank, that of these adapters: there is no such "
            "folder here to read it from"
        )
    out: dict[str, Json] = {
        f"{native}.rank": rank,
        f"{native}.alpha": v[f"{model}.lora_alpha"],
        f"{native}.targets": _peft_targets(v, model),
    }
    if v.get(f"{model}.exclude_modules"):
        out[f"{native}.exclude_modules"] = _modules(v, f"{model}.exclude_modules")
    return out if path is None else out | {f"{native}.path": path}


def _of_adapters(folder: Path, model: str) -> Values:
    """What verl takes from the adapters' own file, whatever its own keys say."""
    told = read_json_object(folder / "adapter_config.json", ConfigError)
    keys = {
        "lora_rank": "r",
        "lora_alpha": "lora_alpha",
        "target_modules": "target_modules",
        "exclude_modules": "exclude_modules",
    }
    return {f"{model}.{key}": told[theirs] for key, theirs in keys.items() if told.get(theirs) is not None}


def _peft_targets(v: Values, model: str) -> Json:
    """Layers, and stacked matrices of experts beside them."""
    layers, stacks = _modules(v, f"{model}.target_modules"), f"{model}.target_parameters"
    if not v.get(stacks):
        return layers
    if isinstance(layers, str) and layers != "all-linear":
        raise NotSupportedYet(
            f"{model}.target_parameters beside an expression in {model}.target_modules is coming, not built yet; "
            "today: a list of names in both"
        )
    return [*texts(v, f"{model}.target_modules"), *texts(v, stacks)]


policy_lora = partial(_lora, model=MODEL, native="model.lora", engine=MEGATRON)
critic_lora = partial(_lora, model="critic.model", native="critic.lora", engine=MEGATRON)
sft_lora = partial(_lora, model="model", native="model.lora", engine="engine")


MEGATRON_TYPES = {"lora": True, "canonical_lora": False, "vlm_lora": None, "dora": None}
"""Whether layers that Megatron-LM fuses have one A."""


def _megatron_lora(v: Values, model: str, *, native: str, engine: str) -> Native:
    """Adapters by Megatron-Bridge."""
    at = f"{model}.lora"
    if not (is_megatron(v) if engine == MEGATRON else v["model.strategy"] == "megatron"):
        raise ConfigError(f"{at}.rank is read with Megatron alone; write {model}.lora_rank")
    if v[f"{model}.lora_rank"]:
        raise ConfigError(
            f"{at}.rank and {model}.lora_rank are both given: the first is Megatron's, keep one"
        )
    if v[f"{model}.lora_adapter_path"]:
        raise ConfigError(f"{model}.lora_adapter_path is not read with {at}.rank, Megatron's; leave it out")
    fused = choose(v, f"{at}.type", MEGATRON_TYPES)
    experts = f"{engine}.expert_model_parallel_size"
    mixture = f"{experts}={v[experts]}" if v.get(experts, 1) > 1 else ""
    apart = v.get(f"{engine}.override_transformer_config.moe_grouped_gemm") is False
    return {
        f"{native}.rank": v[f"{at}.rank"],
        f"{native}.alpha": v[f"{at}.alpha"],
        f"{native}.dropout": v[f"{at}.dropout"],
        f"{native}.init": begins(v, f"{at}.lora_A_init_method"),
        **adapted_layers(
            v[f"{at}.target_modules"],
            f"{at}.target_modules",
            native=native,
            fused=fused,
            each=v.get(f"{at}.share_expert_adapters") is False or (apart and bool(mixture)),
            mixture=mixture,
            dropout=v[f"{at}.dropout"],
        ),
    }


def _modules(v: Values, key: str) -> Json:
    """Names, or one regular expression, as peft takes them."""
    return v[key] if isinstance(v[key], str) else texts(v, key)


# ---------------------------------------------------------------- dtypes and memory


def dtype(v: Values) -> Native:
    """One dtype for engine and trainer. bfloat16 is left to the device (float32 on a CPU), with master weights unless
    the parameters themselves are to be bfloat16."""
    trained = f"{section(v, ACTOR)}.dtype"
    mine, sampled = v.get(trained, "bfloat16"), v[f"{ROLLOUT}.dtype"]
    if sampled == "float16" != mine or mine == "float16" != sampled:
        raise NotSupportedYet(
            f"{ROLLOUT}.dtype={sampled} beside {trained}={mine} is coming, not built yet: float16 is that of both"
        )
    if _narrow_weights(v):
        return {"model.dtype": "bfloat16", "train.precision.master_weights": False}
    wanted = mine if mine != "bfloat16" else sampled
    return {} if wanted == "bfloat16" else {"model.dtype": wanted}


def _narrow_weights(v: Values) -> bool:
    """Whether the optimizer updates weights in bfloat16, without a copy in float32."""
    engine = engine_of(v)
    if engine == "veomni":
        return not v[f"{ACTOR}.veomni.mixed_precision"]
    return engine == "fsdp" and v[f"{FSDP}.model_dtype"] in ("bf16", "bfloat16")


def offloaded(v: Values) -> Native:
    """What rests in the host's memory. FSDP2's offload_policy: weights, gradients and the optimizer's state."""
    mine, other, compared = (section(v, role) for role in (ACTOR, CRITIC, REF))
    names = [
        *_alike(
            v, "activations", f"{MODEL}.enable_activation_offload", "critic.model.enable_activation_offload"
        ),
        *_alike(v, "optimizer", f"{mine}.optimizer_offload", f"{other}.optimizer_offload"),
    ]
    compares = (v[f"{ACTOR}.use_kl_loss"] and v[f"{ACTOR}.kl_loss_coef"]) or (
        v["algorithm.use_kl_in_reward"] and v["algorithm.kl_ctrl.kl_coef"]
    )
    rests = {
        "critic": has_critic(v) and _rests(v, other),
        "reference": bool(compares) and _rests(v, compared),
        "policy": _rests(v, mine),
    }
    if v.get(f"{mine}.grad_offload") and not rests["policy"]:
        raise NotSupportedYet(
            f"{mine}.grad_offload=True without param_offload is coming, not built yet: gradients are where their "
            "weights are"
        )
    of_reward = v[f"{RM}.model.fsdp_config.param_offload"] if has_implicit_model(v) else False
    rests |= {"critic": True, "reference": True} if of_reward else {}
    return {"train.offload": [*names, *(name for name, there in rests.items() if there)]}


WHOLE = ("offload_policy", "enable_fsdp_offload")
"""Keys of FSDP2 and VeOmni that offload weights, gradients and the optimizer's state together."""


def _rests(v: Values, at: str) -> bool:
    """Whether a role's weights lie in the host's memory."""
    return any(v.get(f"{at}.{name}") for name in ("param_offload", *WHOLE))


def _alike(v: Values, name: str, *keys: str) -> list[str]:
    """What policy and critic do alike: their activations, or their optimizers' state."""
    too = [[f"{key.rpartition('.')[0]}.{whole}" for whole in WHOLE if name == "optimizer"] for key in keys]
    wanted = [bool(v.get(key) or any(v.get(whole) for whole in wholes)) for key, wholes in zip(keys, too)]
    if has_critic(v) and wanted[0] != wanted[1]:
        told = [
            " or ".join([key, *(whole for whole in wholes if whole in v)]) for key, wholes in zip(keys, too)
        ]
        raise NotSupportedYet(
            f"{told[1]}: {wanted[1]} beside {told[0]}: {wanted[0]} is coming, not built yet: here policy and critic do "
            "it alike; give both the same value"
        )
    return [name] if wanted[0] else []
