"""Cosmos-RL: rollouts, what a run writes where, and its profiler."""

from __future__ import annotations

from pathlib import PurePath

from whet.dialects.cosmos.steps import together_up
from whet.dialects.cosmos.values import POLICY, is_sft, since, texts
from whet.dialects.row import Values
from whet.types import ConfigError, Json

TIME = "{time}"
"""In run_dir: the moment of a run's first start."""

TRACKERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab")
"""Sinks of numbers that may be named; they are written to a file in any case."""


# ---------------------------------------------------------------- rollouts


def lengths(values: Values) -> dict[str, Json]:
    """A prompt leaves room for a reply."""
    return {"data.max_prompt_tokens": values["policy.model_max_length"] - 1}


def seed(values: Values) -> dict[str, Json]:
    """rollout.seed, else train.seed, else 42 where deterministic, else 0. The data have dataloader_seed; before
    0.4.0, which had no such key, train.seed orders them where both are given."""
    train, rollout = values["train.seed"], None if is_sft(values) else values["rollout.seed"]
    if train is not None and train < 0 and since(values, "0.4.0"):
        train = 42
    otherwise = 42 if values["train.deterministic"] else 0
    out = {"seed": next((each for each in (rollout, train) if each is not None), otherwise)}
    if since(values, "0.4.0"):
        return out | {"data.seed": values[POLICY + "dataloader_seed"]}
    return out | ({"data.seed": train} if train is not None and rollout is not None else {})


def steps_ahead(values: Values) -> int:
    """How old rollouts may be, in training steps: they are as new as the engines' speed allows.

    In 0.3.9 none was, whatever the key says. From 0.4.0 on it bounds the age of the weights, which the interval between
    syncs is a part of.
    """
    if values[POLICY + "on_policy"] or values["mode"] != "disaggregated":
        return 0
    ahead, every = int(values[POLICY + "allowed_outdated_steps"]), values["train.sync_weight_interval"]
    return together_up(values, max(ahead - (every - 1), 0) if since(values, "0.4.0") else ahead)


def steps_of_a_version(values: Values) -> int:
    """Training steps between weight syncs."""
    return together_up(values, values["train.sync_weight_interval"])


# ---------------------------------------------------------------- files and trackers


def place(values: Values) -> dict[str, Json]:
    """output_dir/timestamp holds all that the run writes; an empty timestamp is the moment of the first start."""
    folder, experiment = PurePath(values["train.output_dir"]), values["logging.experiment_name"]
    return {
        "name": folder.name if experiment in (None, "", "None") else experiment,
        "track.project": values["logging.project_name"] or "",
        "run_dir": str(folder / (values["train.timestamp"] or TIME)),
    }


def resume(values: Values) -> dict[str, Json]:
    """true: go on in the folder of the run; text: from that checkpoint; false: start anew."""
    mine = values["train.resume"]
    return {"checkpoint.resume": mine if isinstance(mine, str) else "auto" if mine else "never"}


def checkpoint(values: Values) -> dict[str, Json]:
    """Steps or epochs between checkpoints; an export stands beside each, or none."""
    at = "train.ckpt."
    epochs, exports = values[at + "save_freq_in_epoch"], values[at + "export_safetensors"]
    every = f"{epochs} epochs" if epochs > 0 else together_up(values, values[at + "save_freq"])
    return {"checkpoint.interval": every, "checkpoint.export_interval": every if exports else 0}


def trackers(values: Values) -> dict[str, Json]:
    """console, wandb, tensorboard ...; numbers are written to a file in any case."""
    names = [name.lower() for name in texts(values, "logging.logger")]
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"logging.logger: {name!r} is not known; known: {', '.join(TRACKERS)}.")
    return {"track.trackers": ["jsonl", *dict.fromkeys(names)]}


def uploads(values: Values) -> dict[str, Json]:
    """Checkpoints and exports to S3, exports to the hub."""
    at, out, exports = "train.ckpt.", dict[str, Json](), list[str]()
    when, bucket, name = (values[at + key] for key in ("upload_s3", "s3_bucket", "hf_repo_name"))
    if when:
        root = "/".join(filter(None, (f"s3://{bucket}", (values[at + "s3_prefix"] or "").strip("/"))))
        exports.append(f"{root}/exports")
        out["checkpoint.upload_to"] = [f"{root}/checkpoints"]
        out["checkpoint.upload"] = "last" if when == "final" else "all"
    if values[at + "upload_hf"]:
        if name.count("/") != 1:
            raise ConfigError(
                f"{at}hf_repo_name={name!r}: write ORG/NAME; whet does not ask the hub for the owner of the token."
            )
        exports.append(f"hf://{name}")
    return out | ({"checkpoint.upload_exports_to": exports} if exports else {})


def recorded(values: Values) -> list[int]:
    """The steps that the profiler records."""
    at = "profiler.sub_profiler_config"
    wait, warmup, active = (values[f"{at}.{key}_steps"] for key in ("wait", "warmup", "active"))
    return [wait + warmup + n for n in range(1, active + 1)]
