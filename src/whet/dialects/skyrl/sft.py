"""SkyRL's SFT file. Half of its keys are those of trainer.policy, and SkyRL itself makes an RL config of it: so do we,
and ask the RL file's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath

from whet.config.faults import shown
from whet.config.sections.data import RANDOM_TOKENS
from whet.dialects.row import Native, NotSupportedYet, Values
from whet.dialects.rules import function
from whet.dialects.skyrl import devices
from whet.dialects.tables import table
from whet.dialects.typed import choose, rows_of_split
from whet.dialects.versions import VERSION
from whet.types import ConfigError, Json

POLICY = (
    "model.",
    "optimizer_config.",
    "megatron_config.",
    "fsdp_config.",
    "torch_profiler_config.",
    "sequence_parallel_size",
    "model_config_kwargs",
    "use_torch_compile",
    "record_memory",
)
"""Beginnings of keys that stand below trainer.policy in an RL file."""


def as_rl(v: Values) -> Values:
    """The RL file that SkyRL makes of it: no reference, no engine, a step is one optimizer step."""
    rl = {row.key: row.default for row in table("skyrl", v[VERSION])}
    rl |= {f"trainer.policy.{key}": value for key, value in v.items() if key.startswith(POLICY)}
    at = "trainer.placement.policy_num"
    return rl | {
        VERSION: v[VERSION],
        "trainer.strategy": v["strategy"],
        f"{at}_nodes": v["placement.num_nodes"],
        f"{at}_gpus_per_node": v["placement.num_gpus_per_node"],
        "trainer.placement.colocate_all": False,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.train_batch_size": 1,
        "trainer.policy_mini_batch_size": 1,
    }


def _asked(name: str) -> Callable[[Values], Native]:
    """A function of the RL file; what it says names the keys of this one."""

    def of_sft(v: Values) -> Native:
        try:
            return function("skyrl", name)(as_rl(v))
        except ConfigError as e:
            said = str(e).replace("trainer.placement.policy_num", "placement.num")
            raise type(e)(said.replace("trainer.policy.", "").replace("trainer.", "")) from None

    return of_sft


optimizer = _asked("optimizers.policy_optimizer")
overrides = _asked("optimizers.policy_overrides")
weights = _asked("optimizers.policy_weights")
lora = _asked("optimizers.policy_lora")
routers = _asked("optimizers.routers")
layout = _asked("devices.layout")
sharding = _asked("devices.sharding")
profile = _asked("devices.profile")
offload = _asked("devices.offload")


def is_megatron(v: Values) -> bool:
    return devices.is_megatron(as_rl(v))


# ---------------------------------------------------------------- data

DEFAULT = (["yahma/alpaca-cleaned"], ["train[:100]"])


def training_data(v: Values) -> Native:
    """Each dataset is a source; their batches are mixed by weight, in equal parts if none is given. A trial has one
    batch of made-up rows, which every step trains on."""
    if v["dummy_run_full_ctx"]:
        return _made_up(v)
    paths, splits, at = _named(v, "train_dataset", "dataset")
    if paths is None:
        paths, splits = DEFAULT[0], splits or DEFAULT[1]
    weights = v["train_dataset_weights"] or [None] * len(paths)
    if len(weights) != len(paths):
        raise ConfigError(f"train_dataset_weights: expected one for each of the {len(paths)} train_datasets")
    out = _sources(v, "data.train", "train_datasets", paths, at, splits)
    out |= {f"data.train.{n}.weight": weight for n, weight in enumerate(weights) if weight is not None}
    turns = "all" if v["train_on_what"] == "all_assistant_messages" else "last"
    return out | {
        **_order(v, len(paths)),
        "data.learn_turns": turns,
    }


def _order(v: Values, datasets: int) -> Native:
    """The order of the rows; or a sampler of yours, which chooses among them."""
    if v["sampler"] != "custom":
        return {"data.order": choose(v, "sampler", {"random": "shuffle", "sequential": "sequential"})}
    package, _, name = str(v["sampler_class_path"] or "").rpartition(".")
    if not package:
        raise ConfigError(
            f"sampler_class_path: got {shown(v['sampler_class_path'])}, expected package.module.Class: sampler=custom "
            "needs it"
        )
    if datasets > 1:
        raise NotSupportedYet(
            f"sampler=custom over {datasets} train_datasets is coming, not built yet; here: one dataset."
        )
    return {
        "data.order": "whet.data.samplers:sampler",
        "data.order.class_path": f"{package}:{name}",
        "data.order.arguments": v["sampler_kwargs"] or {},
    }


def _made_up(v: Values) -> Native:
    """Rows of max_length random tokens, of which all but the first are trained."""
    made = {"rows": v["batch_size"], "response": v["max_length"]}
    at = "data.train.0"
    return {f"{at}.function": RANDOM_TOKENS, f"{at}.arguments": made, f"{at}.prompt": None}


def evaluates(v: Values) -> bool:
    """Whether a dataset to evaluate on is given."""
    return bool(_named(v, "eval_dataset", "eval_dataset")[0])


def evaluation(v: Values) -> Native:
    """The other datasets."""
    paths, splits, at = _named(v, "eval_dataset", "eval_dataset")
    out = _sources(v, "data.eval", "eval_datasets", paths, at, splits or ["validation"])
    names = v["eval_dataset_names"] or [path.replace("/", "_") for path in paths]
    return out | {f"data.eval.{n}.name": name for n, name in enumerate(names)}


def _named(v: Values, newer: str, older: str) -> tuple[Json, Json, str]:
    """Paths, splits and the key of these, by lists or by the older keys of one."""
    paths, splits, at = v[f"{newer}s"], v[f"{newer}_splits"], f"{newer}_splits"
    if paths is None and v[f"{older}_name"] is not None:
        paths, own = [v[f"{older}_name"]], v[f"{older}_split"]
        if not splits:
            splits, at = ([own] if own is not None else None), f"{older}_split"
    return paths, splits, at


def _sources(v: Values, native: str, key: str, paths: Json, at: str, splits: Json) -> dict[str, Json]:
    """A source for each path, with the rows of its split: `train`, `train[:100]`, `train[5%:10%]`. key, at: where they
    are given."""
    for name, texts in ((key, paths), (at, splits)):
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{name}: got {shown(texts)}, expected a list of texts")
    if len(splits) != len(paths):
        raise ConfigError(f"{at}: expected one for each of the {len(paths)} {key}")
    out: dict[str, Json] = {}
    for n, (path, split) in enumerate(zip(paths, splits)):
        columns = {"messages": v["messages_key"]}
        columns |= {"system_prompt_column": v["system_key"]} if v["system_key"] != "system" else {}
        columns |= {"tools": v["tools_key"]} if v["tools_key"] != "tools" else {}
        part = {"path": path, **columns, **rows_of_split(split, at)}
        if PurePath(path).suffix and part["split"] == "train":  # a single file is all of it train
            del part["split"]
        out |= {f"{native}.{n}.{name}": value for name, value in part.items()}
    return out


# ---------------------------------------------------------------- steps

NO_LIMIT = 131072
"""Tokens of the longest row where max_length is null, which truncates nothing; a longer one is an error here."""


def steps(v: Values) -> Native:
    """num_steps, or so many epochs; max_training_steps ends both."""
    most = [n for n in (v["num_steps"], v["max_training_steps"]) if n is not None]
    epochs = {"train.epochs": v["num_epochs"]} if v["num_steps"] is None else {}
    return epochs | ({"train.steps": min(most)} if most else {})


def lengths(v: Values) -> Native:
    """Prompt and reply together, cut at the end; each alone may be as long."""
    most = v["max_length"] or NO_LIMIT
    keys = ("data.max_total_tokens", "data.max_prompt_tokens", "rollout.sampling.max_tokens")
    return {**dict.fromkeys(keys, most), "data.overlong": "truncate_right" if v["max_length"] else "error"}


def dtype(v: Values) -> Native:
    """As the policy's of an RL file, with an engine of the same."""
    half = v["fsdp_config.mixed_precision.param_dtype"] in ("fp16", "float16") and v["strategy"] != "megatron"
    return function("skyrl", "devices.dtype")(
        {**as_rl(v), **({"generator.model_dtype": "float16"} if half else {})}
    )
