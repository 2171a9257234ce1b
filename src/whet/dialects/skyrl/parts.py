"""SkyRL's values of data, batches, sampling and records as native ones.

Each function takes all values of a file and gives the native keys of one matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from whet.config.faults import shown
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.skyrl.rules import check_batches, evaluates, has_critic
from whet.dialects.typed import choose, flag, whole
from whet.types import ConfigError, Json

Native = Mapping[str, Json]

# ---------------------------------------------------------------- data and rewards


def training_data(v: Values) -> Native:
    """All files one after the other, as one source: every row counts the same."""
    return {"data.train.0.path": _files(v, "data.train_data")} | dict(_columns(v, "data.train.0"))


def prompt_limit(v: Values) -> Native:
    """The last tokens of a longer prompt are kept, so that what asks for the reply survives."""
    return {
        "data.max_prompt_tokens": whole(v, "trainer.max_prompt_length"),
        "data.overlong": "truncate_left",
    }


def evaluation(v: Values) -> Native:
    """Each file is a source of its own; nothing at all where eval_interval or val_data switch it off."""
    if not evaluates(v):
        return {}
    files = _files(v, "data.val_data")
    stems = [PurePath(f).stem for f in files]
    out: dict[str, Json] = {}
    for n, (file, stem) in enumerate(zip(files, stems)):
        name = stem if stems.count(stem) == 1 else file
        out |= {f"data.eval.{n}.name": name, f"data.eval.{n}.path": file} | dict(
            _columns(v, f"data.eval.{n}")
        )
    return out | {
        "data.exclude_eval": False,
        "eval.every": v["trainer.eval_interval"],
        "eval.at_start": flag(v, "trainer.eval_before_train"),
        "eval.at_end": True,
        "eval.samples": v["generator.eval_n_samples_per_prompt"],
        **sampling(v, "generator.eval_sampling_params", "eval.sampling"),
    }


def environment(v: Values) -> Native:
    """gsm8k only judges the reply's number; other environments are coming, or a function of yours judges."""
    name = v["environment.env_class"]
    if name == "gsm8k":
        return {"rewards.gsm8k.function": "number"}
    if isinstance(name, str) and ":" in name:
        return {"rewards.score.function": name}
    raise NotSupportedYet(
        f"environment.env_class={shown(name)}: only gsm8k is built in today, other environments are coming. One "
        "that judges a single reply can be a reward function: environment.env_class=path/to/file.py:name"
    )


def _columns(v: Values, source: str) -> Native:
    """gsm8k reads its answer from reward_spec; a function of yours is given all columns."""
    return {f"{source}.answer": "reward_spec.ground_truth"} if v["environment.env_class"] == "gsm8k" else {}


def _files(v: Values, key: str) -> list[str]:
    value = v[key]
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, Sequence) or not files or not all(isinstance(f, str) for f in files):
        raise ConfigError(f"{key}: got {shown(value)}, expected a list of files")
    return list(files)


# ---------------------------------------------------------------- model


def policy_overrides(v: Values) -> Native:
    """What is put over the policy's config.json."""
    given = v["trainer.policy.model_config_kwargs"] or {}
    return {"model.overrides": given} if given else {}


# ---------------------------------------------------------------- steps and batches


def epochs(v: Values) -> Native:
    """Passes over the rows, each without the last, short batch."""
    return {"train.epochs": whole(v, "trainer.epochs"), "train.drop_last": True}


def batches(v: Values) -> Native:
    """B prompts a step in B / mini optimizer steps; micro-batches as large as those of one of SkyRL's GPUs."""
    check_batches(v)
    B = whole(v, "trainer.train_batch_size")
    out = {
        "train.tasks_per_step": B,
        "train.minibatches": B // whole(v, "trainer.policy_mini_batch_size"),
        "train.micro_rollouts": whole(v, "trainer.micro_train_batch_size_per_gpu"),
        "train.micro_rollouts_forward": whole(v, "trainer.micro_forward_batch_size_per_gpu"),
    }
    if has_critic(v):
        out["critic.minibatches"] = B // whole(v, "trainer.critic_mini_batch_size")
    return out


# ---------------------------------------------------------------- sampling


def training_sampling(v: Values) -> Native:
    """Sampling of training rollouts."""
    return sampling(v, "generator.sampling_params", "rollout.sampling")


PASSED = ("repetition_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
"""Parameters of vLLM that are the same here, name and meaning."""


def sampling(v: Values, given: str, native: str) -> Native:
    """One section of sampling parameters; top_k -1 is off, which is 0 here."""
    top_k, more = whole(v, f"{given}.top_k", least=-1), v[f"{given}.*"]
    if top_k == 0:
        raise ConfigError(f"{given}.top_k=0 keeps no token; write -1 for no limit")
    if strange := sorted(more.keys() - set(PASSED) - {"logprobs"}):
        raise NotSupportedYet(
            f"{given}: {strange[0]} is handed on to vLLM, which is coming; of such parameters these work today: "
            f"{', '.join(PASSED)}"
        )
    return {
        f"{native}.max_tokens": v[f"{given}.max_generate_length"],
        f"{native}.temperature": v[f"{given}.temperature"],
        f"{native}.top_p": v[f"{given}.top_p"],
        f"{native}.min_p": v[f"{given}.min_p"],
        f"{native}.top_k": max(top_k, 0),
        **{f"{native}.{name}": value for name, value in more.items() if name in PASSED and value is not None},
    }


def rollout_engine(v: Values) -> Native:
    """The embedded engine stands in for one that the trainer would start; SkyRL's rules for engines hold."""
    backend = choose(v, "generator.backend", {"vllm": "vllm", "sglang": "sglang"})
    if not flag(v, "generator.run_engines_locally"):
        raise NotSupportedYet(
            "generator.run_engines_locally=false: inference servers are not built yet (coming); today the engine "
            "runs in the trainer's process: leave the key out"
        )
    if backend == "sglang":
        raise ConfigError(
            "generator.backend=sglang is for remote engines only (generator.run_engines_locally=false)"
        )
    return {"rollout.engine": "native"}


def dtype(v: Values) -> Native:
    """bfloat16 where the device is fast at it (CUDA), which is what whet derives; float32 if asked for."""
    wanted = choose(
        v, "generator.model_dtype", {"bfloat16": "bfloat16", "float32": "float32", "float16": None}
    )
    return {} if wanted == "bfloat16" and flag(v, "trainer.bf16") else {"model.dtype": "float32"}


# ---------------------------------------------------------------- checkpoints and tracking


def resume(v: Values) -> Native:
    """latest goes on where the directory stands; from_path at resume_path; null and none begin anew."""
    mode, path = v["trainer.resume_mode"], v["trainer.resume_path"]
    if mode == "from_path":
        if not isinstance(path, str):
            raise ConfigError(
                "trainer.resume_mode=from_path needs trainer.resume_path, a checkpoint's folder"
            )
        return {"checkpoint.resume": path}
    if path is not None:
        raise ConfigError(
            f"trainer.resume_path is read only with trainer.resume_mode=from_path, not {shown(mode)}"
        )
    if mode is None:
        return {"checkpoint.resume": "fresh"}
    known = {"none": "fresh", "latest": "auto", "from_path": ""}
    return {"checkpoint.resume": choose(v, "trainer.resume_mode", known)}


def checkpoints(v: Values) -> Native:
    """How often, and how many of the newest stay; an interval of 0 or less: only the last."""
    keep = whole(v, "trainer.max_ckpts_to_keep", least=None)
    if keep == 0:
        raise ConfigError("trainer.max_ckpts_to_keep must not be 0: -1 keeps all, N the newest N")
    every = whole(v, "trainer.ckpt_interval", least=None)
    return {"checkpoint.every": max(every, 0), "checkpoint.keep": keep if keep > 0 else None}


def export(v: Values) -> Native:
    """Every so many steps and at the end, below export_path/project/run; 0 and below: never."""
    every = whole(v, "trainer.hf_save_interval", least=None)
    if every <= 0:
        return {"checkpoint.export": False}
    root = PurePath(str(v["trainer.export_path"]))
    own = root / str(v["trainer.project_name"]) / str(v["trainer.run_name"])
    return {"checkpoint.export": True, "checkpoint.export_every": every, "checkpoint.export_dir": str(own)}


TRACKERS = {
    **{name: name for name in ("console", "wandb", "tensorboard", "mlflow", "swanlab")},
    "vemlp_wandb": None,
}


def trackers(v: Values) -> Native:
    """Those that are named, and jsonl always."""
    given = v["trainer.logger"]
    names = given if isinstance(given, list) else [given]
    chosen = [choose({"trainer.logger": name}, "trainer.logger", TRACKERS) for name in names]
    return {"track.trackers": [*dict.fromkeys(chosen), "jsonl"]}


def dump(v: Values) -> Native:
    """Every step's batch, token by token, and every evaluation, at their places below export_path."""
    root, out = PurePath(str(v["trainer.export_path"])), dict[str, Json]()
    if flag(v, "trainer.dump_data_batch"):
        name = "global_step_{step}_training_input.parquet"
        out |= {"track.batches_every": 1, "track.batches_dump": str(root / "dumped_data" / name)}
    if flag(v, "trainer.dump_eval_results"):
        folder = root / "dumped_eval" / "global_step_{step}_eval_results"
        out["track.eval_dump"] = str(folder / "{source}.jsonl")
    return out
