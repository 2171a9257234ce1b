"""The default documents of the releases that whet reads: all keys with their values, and what a user must give.

A package is read without its dependencies. Its YAML files are composed by Hydra; its classes are imported in a process
of their own, where a stand-in takes the place of whatever is not installed (`python -m peers.documents SYSTEM FOLDER`
prints them).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from whet.dialects.values import nested
from whet.prove.peers import Standins, prepared
from whet.types import Json


@dataclass(frozen=True, kw_only=True)
class Document:
    """A default document and what a file for it says."""

    name: str
    kind: str
    """As whet names kinds of files."""
    tree: Mapping[str, Json]
    """All keys with their defaults, references unresolved."""
    given: Mapping[str, Json]
    """By dotted key: what a user must give."""
    base: Mapping[str, Json] = field(default_factory=dict)
    """What a file without the defaults says of the document that it starts from."""


# ---------------------------------------------------------------- verl

DATA = {"data.train_files": "train.parquet", "data.val_files": "test.parquet"}
REWARD = {"custom_reward_function.path": "reward.py", "custom_reward_function.name": "score"}
MODEL = {"actor_rollout_ref.model.path": "model"}
SIZES = {
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
}
CRITIC = {"critic.model.path": "model", "critic.ppo_micro_batch_size_per_gpu": 8}
ASYNCHRONOUS = {"actor_rollout_ref.hybrid_engine": False}
OF_ENGINES: Mapping[str, dict[str, Json]] = {
    "torchtitan": {
        f"{role}.torchtitan.data_parallel_shard_size": 8 for role in ("actor_rollout_ref.actor", "critic")
    }
}
"""What an engine must be given: 1 is not the number of devices."""
OPTIMIZERS: Mapping[str, Mapping[str, Json]] = {"automodel": {"optim": {"lr": 1e-5}}}
"""What a choice of an engine's optimizer says beside the defaults (`launched.py` says the same)."""
GRPO = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.use_kl_loss": True,
}


def verl(folder: Path) -> Iterator[Document]:
    """All that its entry points compose by default."""
    config = folder / "verl" / "trainer" / "config"
    newer = (config / "reward").is_dir()  # else the reward function has only the older name
    reward = {f"reward.{key}": value for key, value in REWARD.items()} if newer else REWARD
    always = DATA | MODEL | SIZES | {"actor_rollout_ref.rollout.name": "vllm"}
    for name, tree, base, own in _of_ppo(config):
        given = {"gae": always | reward | CRITIC, "grpo": always | reward | GRPO}
        if newer:
            given["older names"] = always | REWARD | GRPO
        for variant, keys in given.items():
            yield Document(
                name=f"{name}, {variant}", kind="verl-ppo", tree=tree, base=base, given={**keys, **own}
            )
    for file in sorted((folder / "verl" / "experimental").glob("*/config/*ppo*.yaml")):
        if "vla" not in file.parts:  # for models that act, no language models
            yield _asynchronous(file, config, given=always | reward | GRPO)
    yield from _of_sft(config)
    evaluated = {"data.path": "replies.parquet"} | REWARD
    yield Document(name="evaluation", kind="verl-eval", tree=composed(config, "evaluation"), given=evaluated)
    if (config / "generation.yaml").is_file():
        yield Document(
            name="generation",
            kind="verl-generation",
            tree=composed(config, "generation"),
            given={"data.path": "a.parquet", "data.output_path": "b.parquet", "model.path": "model"},
        )


def _of_ppo(config: Path) -> Iterator[tuple[str, dict[str, Json], dict[str, Json], dict[str, Json]]]:
    """(name, document, what a file over it says, what its user must give) of each engine: composed, and as verl's own
    script has composed it."""
    over: dict[str, Json] = {"defaults": ["ppo_megatron_trainer"]}
    yield "ppo_trainer", composed(config, "ppo_trainer"), {}, {}
    yield "ppo_megatron_trainer", composed(config, "ppo_megatron_trainer"), over, {}
    for file in sorted(config.glob("_generated_*.yaml")):
        engine = file.stem.removeprefix("_generated_ppo_").removesuffix("trainer").strip("_")
        base: dict[str, Json] = {"model_engine": engine} if engine else {}
        yield file.stem, plain(file), over if engine == "megatron" else base, OF_ENGINES.get(engine, {})


def _asynchronous(file: Path, config: Path, given: Mapping[str, Json]) -> Document:
    """A document of verl's asynchronous trainers; the fully asynchronous one has no batch of prompts."""
    tree = composed(file.parent, file.stem, over=config)
    base: dict[str, Json] = {"defaults": ["ppo_megatron_trainer"]} if "megatron" in file.stem else {}
    base |= {name: tree[name] for name in plain(file) if name in ("async_training", "rollout")}
    lengths = {"data.train_batch_size": 0} if "fully_async" in file.stem else {}
    return Document(
        name=file.stem, kind="verl-ppo", tree=tree, base=base, given={**given, **ASYNCHRONOUS, **lengths}
    )


def _of_sft(config: Path) -> Iterator[Document]:
    """The older SFT trainer's, and those of the trainer over engines."""
    if (config / "sft_trainer.yaml").is_file():
        given = DATA | {"model.partial_pretrain": "model"}
        yield Document(name="sft_trainer", kind="verl-sft", tree=composed(config, "sft_trainer"), given=given)
    if not (config / "sft_trainer_engine.yaml").is_file():
        return
    for engine in sorted(each.stem for each in (config / "engine").glob("*.yaml")):
        groups = [group for group in ("engine", "optim") if (config / group / f"{engine}.yaml").is_file()]
        choices = [f"{group}={engine}" for group in groups]
        yield Document(
            name=f"sft_trainer_engine, {' '.join(choices)}",
            kind="verl-sft",
            tree=composed(config, "sft_trainer_engine", choices),
            base={"engine": {"strategy": engine}, **OPTIMIZERS.get(engine, {})},
            given=DATA | {"model.path": "model"},
        )


def plain(file: Path) -> dict[str, Json]:
    """A YAML file as it stands."""
    from omegaconf import OmegaConf

    tree: Any = OmegaConf.to_container(OmegaConf.load(file))
    return tree


def composed(
    folder: Path, name: str, choices: list[str] | None = None, *, over: Path | None = None
) -> dict[str, Json]:
    """A YAML file with those that its `defaults` names, which may lie in another folder."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    more = [f"hydra.searchpath=[file://{over}]"] if over else []
    with initialize_config_dir(str(folder.resolve()), version_base=None):
        tree: Any = OmegaConf.to_container(compose(name, [*(choices or ()), *more]))
    return tree


# ---------------------------------------------------------------- SkyRL

OF_SKYRL = {
    "data.train_data": ["train.parquet"],
    "data.val_data": ["test.parquet"],
    "trainer.policy.model.path": "model",
    "environment.env_class": "gsm8k",
}
SKYRL_VARIANTS: dict[str, Mapping[str, Json]] = {
    "grpo": {},
    "gae": {"trainer.algorithm.advantage_estimator": "gae", "trainer.critic.model.path": "model"},
    "megatron": {"trainer.strategy": "megatron"},
    "fully async": {
        "trainer.fully_async.enabled": True,
        "trainer.placement.colocate_all": False,
        "trainer.policy_mini_batch_size": 1024,
    },
}
SKYRL_SFT: Mapping[str, Json] = {
    "model.path": "model",
    "dataset_name": "talks.jsonl",
    "dataset_split": "train",
    "num_steps": 100,
}
SKYRL_SFT_VARIANTS: dict[str, Mapping[str, Json]] = {"fsdp": {}, "megatron": {"strategy": "megatron"}}


def skyrl(folder: Path) -> Iterator[Document]:
    """The YAML file of the older releases; the classes of newer ones, and what they make of what is given."""
    config = folder / "skyrl-train" / "skyrl_train" / "config"
    if config.is_dir():
        tree = composed(config, "ppo_base_config")
        for variant, more in SKYRL_VARIANTS.items():
            if variant != "fully async" or "fully_async" in tree["trainer"]:
                yield Document(
                    name=f"ppo_base_config, {variant}", kind="skyrl", tree=tree, given=OF_SKYRL | more
                )
        return
    found = imported("skyrl", folder)
    for key, tree in found.items():
        name, variant, _ = key.split(", ")
        sft = name == "SFTConfig"
        given = {**SKYRL_SFT, **SKYRL_SFT_VARIANTS[variant]} if sft else OF_SKYRL | SKYRL_VARIANTS[variant]
        yield Document(name=key, kind="skyrl-sft" if sft else "skyrl", tree=tree, given=given)


def _of_skyrl(folder: Path) -> dict[str, Json]:
    """By `class, variant, how`: the defaults of the class, or what is built of a user's keys."""
    found: dict[str, Json] = {}
    for module, name, given, variants in (
        ("skyrl.train.config.config", "SkyRLTrainConfig", OF_SKYRL, SKYRL_VARIANTS),
        ("skyrl.train.config.sft_config", "SFTConfig", SKYRL_SFT, SKYRL_SFT_VARIANTS),
    ):
        if not (folder / f"{module.replace('.', '/')}.py").is_file():
            continue
        made = getattr(alone(module, folder), name)
        build = partial(alone("skyrl.train.config.config", folder).build_nested_dataclass, made)
        for variant, more in variants.items():
            if variant == "fully async" and "enabled" not in defaults(made)["trainer"]["fully_async"]:
                continue
            keys = nested({tuple(key.split(".")): value for key, value in {**given, **more}.items()})
            found[f"{name}, {variant}, defaults"] = jsonable(defaults(made))
            found[f"{name}, {variant}, built"] = jsonable(despite(partial(build, keys)))
    return found


def defaults(made: Any) -> dict[str, Any]:
    """The defaults of a dataclass, before anything is made of them."""
    out = {}
    for each in dataclasses.fields(made):
        if each.default is not dataclasses.MISSING:
            out[each.name] = each.default
        elif each.default_factory is not dataclasses.MISSING:
            factory = each.default_factory
            out[each.name] = defaults(factory) if dataclasses.is_dataclass(factory) else factory()
    return out


# ---------------------------------------------------------------- Trinity

TRINITY_DEFAULTS = {
    "sample_strategy": "warmup",
    "policy_loss_fn": "ppo",
    "advantage_fn": "ppo",
    "kl_penalty_fn": "none",
    "kl_loss_fn": "k2",
    "entropy_loss_fn": "default",
}
"""What its validator assumes where the type of algorithm says nothing."""


TRINITY: Mapping[str, Json] = {
    "model.model_path": "model",
    "model.max_prompt_tokens": 64,
    "model.max_response_tokens": 64,
    "checkpoint_root_dir": "runs",
    "cluster.node_num": 1,
    "cluster.gpu_per_node": 2,
    "buffer.batch_size": 8,
    "buffer.train_batch_size": 32,
}
TRINITY_TASKS: Mapping[str, Json] = {
    "buffer.explorer_input.taskset.path": "tasks.jsonl",
    "buffer.explorer_input.taskset.storage_type": "file",
    "buffer.explorer_input.default_workflow_type": "math_workflow",
    "buffer.explorer_input.default_reward_fn_type": "math_reward",
    "algorithm.repeat_times": 4,
}
TRINITY_ROWS: Json = {"name": "rows", "storage_type": "file", "path": "rows.jsonl"}
TRINITY_MIXED: Mapping[str, Json] = {
    "buffer.trainer_input.auxiliary_buffers": {"sft_dataset": TRINITY_ROWS},
    "buffer.train_batch_size": 64,
}
TRINITY_TAUGHT: Mapping[str, Json] = {"explorer.auxiliary_models": [{"model_path": "teacher"}]}
TRINITY_MORE = {
    "mix": TRINITY_MIXED,
    "mix_chord": TRINITY_MIXED,
    "on_policy_distill": TRINITY_TAUGHT,
    "jsd": TRINITY_TAUGHT,
}


def trinity(folder: Path) -> Iterator[Document]:
    """Its config for each type of algorithm, with null in the place of what the type says and with that written out;
    and for each mode."""
    found = imported("trinity", folder)
    tree, algorithms = found["Config"], found["algorithms"]
    for name, about in algorithms.items():
        given = {**TRINITY, "algorithm.algorithm_type": name, **TRINITY_MORE.get(name, {})}
        if about["schema"] == "experience":
            given |= TRINITY_TASKS
        else:
            given |= {"mode": "train", "buffer.trainer_input.experience_buffer": TRINITY_ROWS}
        yield Document(name=f"Config, {name}", kind="trinity", tree=tree, given=given)
        said = {key: value for key, value in about["settings"].items() if tree["algorithm"].get(key) is None}
        whole = {**tree, "algorithm": {**tree["algorithm"], **said}}
        yield Document(name=f"Config, {name}, written out", kind="trinity", tree=whole, given=given)
    store = {"name": "rollouts", "storage_type": "sql", "path": "sqlite:///rollouts.db"}
    more: Mapping[str, Mapping[str, Json]] = {
        "explore": {"buffer.trainer_input.experience_buffer": store},
        "train": {"buffer.trainer_input.experience_buffer": store},
        "bench": {"buffer.explorer_input.eval_tasksets": [{"name": "test", "path": "test.jsonl"}]},
        "serve": {},
    }
    for mode, keys in more.items():
        given = {**TRINITY, **TRINITY_TASKS, "algorithm.algorithm_type": "grpo", "mode": mode, **keys}
        yield Document(name=f"Config, mode {mode}", kind="trinity", tree=tree, given=given)


FUNCTIONS = {
    "advantage_fn": "ADVANTAGE_FN",
    "policy_loss_fn": "POLICY_LOSS_FN",
    "kl_loss_fn": "KL_FN",
    "kl_penalty_fn": "KL_FN",
    "entropy_loss_fn": "ENTROPY_LOSS_FN",
}
"""Trinity's keys of functions, and the registries of their names."""


def _of_trinity(folder: Path) -> dict[str, Json]:
    """Its config, and by type of algorithm: its kind of data, and what it puts in the place of keys that are null."""
    config = alone("trinity.common.config", folder).Config()
    registries = despite(lambda: importlib.import_module("trinity.algorithm"))
    algorithms = {}
    for name in registries.ALGORITHM_TYPE._default_mapping:
        kind = registered(registries.ALGORITHM_TYPE, name)
        settings = TRINITY_DEFAULTS | kind.default_config()
        for key, registry in FUNCTIONS.items():
            if settings[key]:
                function = registered(getattr(registries, registry), settings[key])
                settings[f"{key}_args"] = function.default_args()
        algorithms[name] = {"schema": kind.schema, "critic": kind.use_critic, "settings": settings}
    return {"Config": jsonable(config), "algorithms": jsonable(algorithms)}


def registered(registry: Any, name: str) -> Any:
    """A class that a registry of Trinity knows by name."""
    module, _, named = registry._default_mapping[name].rpartition(".")
    return getattr(despite(lambda: importlib.import_module(module)), named)


# ---------------------------------------------------------------- Cosmos


def cosmos(folder: Path) -> Iterator[Document]:
    found = imported("cosmos", folder)
    common = {"policy.model_name_or_path": "model", "train.train_policy.dataset.name": "rows.jsonl"}
    yield Document(
        name="Config, grpo",
        kind="cosmos-grpo",
        tree=found["grpo"],
        given=common
        | {
            "train.train_policy.type": "grpo",
            "train.train_policy.reward_function": ["boxed_math"],
            "train.train_policy.prompt_column_name": "question",
            "train.train_policy.response_column_name": "answer",
        },
    )
    yield Document(
        name="Config, sft",
        kind="cosmos-sft",
        tree=found["sft"],
        given=common | {"train.train_policy.type": "sft"},
    )


def _of_cosmos(folder: Path) -> dict[str, Json]:
    made = alone("cosmos_rl.policy.config", folder)
    tree = made.Config().model_dump(mode="json")
    policies = {"grpo": made.GrpoConfig(type="grpo"), "sft": made.SFTDataConfig(type="sft")}
    return {
        name: {**tree, "train": {**tree["train"], "train_policy": policy.model_dump(mode="json")}}
        for name, policy in policies.items()
    }


# ---------------------------------------------------------------- classes

DOCUMENTS = {"verl": verl, "skyrl": skyrl, "trinity": trinity, "cosmos": cosmos}
CLASSES = {"skyrl": _of_skyrl, "trinity": _of_trinity, "cosmos": _of_cosmos}


def imported(system: str, folder: Path) -> dict[str, Any]:
    """What the classes of a package have by default."""
    around = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "peers.documents", system, str(folder)]
    done = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


EMPTY = ("skyrl", "skyrl.train", "trinity", "trinity.common", "cosmos_rl", "cosmos_rl.policy")
"""Packages whose own code is not run: it imports what no config needs."""


def alone(module: str, folder: Path) -> Any:
    """A module of a package, without running the packages around it."""
    for name in EMPTY:
        if module.startswith(f"{name}.") and name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(folder / name.replace(".", "/"))]
            sys.modules[name] = package
    return despite(lambda: importlib.import_module(module))


def despite(call: Callable[[], Any]) -> Any:
    """What a call gives, a stand-in in the place of each module that it imports and that is not there."""
    missing: dict[str, None] = {}
    while True:
        try:
            return call()
        except ImportError as e:
            if e.name is None or e.name in missing or e.name in EMPTY:
                raise
            missing[e.name] = None
            sys.modules.pop(e.name, None)
            sys.meta_path.insert(0, Standins((e.name,)))


def jsonable(value: Any) -> Any:
    """Classes as trees, enums by value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: jsonable(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return jsonable(value.value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [jsonable(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def main() -> None:
    system, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, str(folder))
    prepared(system)
    print(json.dumps(CLASSES[system](folder)))


if __name__ == "__main__":
    main()
