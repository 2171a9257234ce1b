"""Cosmos-RL: the model, sampling, and what a run writes where."""

from __future__ import annotations

from pathlib import PurePath

from whet.dialects.cosmos.lora import adapters
from whet.dialects.cosmos.values import POLICY, at_revision, is_sft, number, text, texts, whole
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.typed import choose, flag
from whet.types import ConfigError, Json

TIME = "{time}"
"""In run_dir: the moment of a run's first start."""

TRACKERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab")
"""Sinks of numbers that may be named; they are written to a file in any case."""


def nothing(values: Values) -> dict[str, Json]:
    """A section: its keys count, each for itself."""
    return {}


# ---------------------------------------------------------------- model and lengths


def model(values: Values) -> dict[str, Json]:
    """A local folder, or a revision on the hub."""
    path = text(values, "policy.model_name_or_path")
    return {"model.path": at_revision(values, path, "policy.model_revision")}


def dtype(values: Values) -> dict[str, Json]:
    """Forward and backward in param_dtype; the optimizer moves master_dtype weights, which must be float32 or those."""
    compute, master = values["train.param_dtype"], values["train.master_dtype"]
    for key, value in (("param_dtype", compute), ("master_dtype", master)):
        if value not in ("bfloat16", "float16", "float32"):
            raise ConfigError(f"train.{key}={value!r}: bfloat16, float16 or float32.")
    if master not in ("float32", compute):
        raise NotSupportedYet(
            f"train.master_dtype={master!r} beside train.param_dtype={compute!r} is coming, not built yet: float32, or "
            "param_dtype."
        )
    return {
        "model.dtype": compute,
        "train.precision.master_weights": master == "float32" or compute == "float32",
    }


def reduced(values: Values) -> dict[str, Json]:
    """Gradients are summed in float32, over micro-batches and ranks, where the trained parameters are of another."""
    choose(values, "train.fsdp_reduce_dtype", {"float32": True})
    compute, master = values["train.param_dtype"], values["train.master_dtype"]
    if compute == "float32" or master != "float32" or adapters(values):
        return {}
    return {"train.precision.reduce": "float32"}


def offload(values: Values) -> dict[str, Json]:
    """What lies in the host's memory while a GPU does not need it."""
    names = ["activations"] if values["train.activation_offload"] else []
    return {
        "train.offload": [*names, *(["optimizer", "policy"] if flag(values, "train.fsdp_offload") else [])]
    }


def low(values: Values) -> dict[str, Json]:
    """Matrix products in 8 bits, scaled by the present tensor."""
    if not flag(values, "train.fp8.enable_fp8"):
        return {}
    choose(values, "train.fp8.fp8_recipe", {"dynamic_scaling": True, "delayed_scaling": None})
    known = {"rowwise": "rowwise", "tensorwise": "tensorwise"}
    return {"train.precision.float8": choose(values, "train.fp8.quant_recipe", known)}


def scales(values: Values) -> dict[str, Json]:
    """Of products in 4 bits: names that there are, and no more, for there are no such products."""
    choose(values, "train.fp4.fp4_recipe", {"dynamic_scaling": True, "delayed_scaling": True})
    choose(values, "train.fp4.quant_recipe", {"rowwise": True, "tensorwise": True})
    return {}


def compiled(values: Values) -> dict[str, Json]:
    """torch.compile does not see through products in 8 bits."""
    return {"train.compile": flag(values, "train.compile") and not flag(values, "train.fp8.enable_fp8")}


def transfer(values: Values) -> dict[str, Json]:
    """Weights reach the rollouts as they are trained, in param_dtype: what null means."""
    mine, compute = values["train.transfer_dtype"], values["train.param_dtype"]
    if mine not in (None, "", compute):
        raise NotSupportedYet(
            f"train.transfer_dtype={mine!r}: rollouts read the trained weights themselves, in param_dtype={compute!r}; "
            "another dtype there is coming. Leave it out."
        )
    return {}


def lengths(values: Values) -> dict[str, Json]:
    """model_max_length bounds prompt and reply together: a reply ends there, longer rows are left out and counted.

    An SFT job has no other bound, an RL job that of rollout.max_response_length, too.
    """
    total = whole(values, "policy.model_max_length", least=2)
    bounds: dict[str, Json] = {"data.max_total_tokens": total, "data.overlong": "filter"}
    if is_sft(values):
        return bounds | {"data.max_prompt_tokens": total, "rollout.sampling.max_tokens": total}
    reply = whole(values, "rollout.max_response_length", least=1)
    return bounds | {"data.max_prompt_tokens": total - 1, "rollout.sampling.max_tokens": reply}


def seed(values: Values) -> dict[str, Json]:
    """train.seed, else rollout.seed, else 42 where deterministic, else 0; with both, train.seed orders the data."""
    train, rollout = values["train.seed"], None if is_sft(values) else values["rollout.seed"]
    if train is not None and rollout is not None:
        return {"seed": rollout, "data.seed": train}
    otherwise = 42 if values["train.deterministic"] else 0
    return {"seed": next((s for s in (train, rollout) if s is not None), otherwise)}


# ---------------------------------------------------------------- rollouts


def rollout(values: Values) -> dict[str, Json]:
    """Rollouts of one prompt."""
    return {} if is_sft(values) else {"rollout.group_size": values["rollout.n_generation"]}


def quantization(values: Values) -> dict[str, Json]:
    """The numbers that an engine samples with."""
    if is_sft(values) or values["rollout.quantization"] == "none":
        return {}
    return {"rollout.quantization": choose(values, "rollout.quantization", {"none": "", "fp8": "float8"})}


def sync(values: Values) -> dict[str, Json]:
    """Training steps between weight syncs; on-policy rollouts need one after every step."""
    every = whole(values, "train.sync_weight_interval", least=1)
    if is_sft(values):
        return {}
    ahead, on_policy = whole(values, POLICY + "allowed_outdated_steps", least=0), values[POLICY + "on_policy"]
    if on_policy and every != 1:
        raise ConfigError(f"train.sync_weight_interval={every} must be 1 when {POLICY}on_policy is true.")
    modes = {"disaggregated": False, "colocated": True, "colocated_separated": True}
    in_turn = choose(values, "mode", modes) or on_policy
    return {"rollout.sync_every": every, "rollout.max_staleness": 0 if in_turn else ahead}


def throttled(values: Values) -> dict[str, Json]:
    """Prompts for each fetch beyond the bound: here none, which is what 0 says."""
    whole(values, POLICY + "outdated_rollout_fetch_batch_size", least=0)
    return {}


def chat(values: Values) -> dict[str, Json]:
    """The chat template of the rollouts, and its switch of thinking."""
    at = "rollout.multi_turn_config."
    template = text(values, at + "custom_chat_template_path")
    out: dict[str, Json] = {"tokenizer.chat_template": template} if template else {}
    if is_sft(values):
        return {}
    return out | (
        {"tokenizer.chat_arguments": {"enable_thinking": True}} if values[at + "enable_thinking"] else {}
    )


def engine_options(values: Values) -> dict[str, Json]:
    """The embedded engine stands in for vLLM and TensorRT-LLM; how they use a GPU changes no token's probability."""
    backend = values["rollout.backend"]
    if backend not in ("vllm", "vllm_async", "trtllm"):
        raise ConfigError(f"rollout.backend={backend!r}: vllm, vllm_async or trtllm.")
    memory = number(values, "rollout.gpu_memory_utilization")
    if not 0 < memory <= 1:
        raise ConfigError(f"rollout.gpu_memory_utilization={memory} must be above 0 and at most 1.")
    return {}


def sampling(values: Values) -> dict[str, Json]:
    """How training rollouts are sampled; top_k -1 keeps all tokens."""
    if is_sft(values):
        return {}
    at = "rollout.sampling_config."
    return {
        "rollout.sampling.temperature": values[at + "temperature"],
        "rollout.sampling.top_p": values[at + "top_p"],
        "rollout.sampling.top_k": max(whole(values, at + "top_k"), 0),
        "rollout.sampling.repetition_penalty": values[at + "repetition_penalty"],
    }


def trained_temperature(values: Values) -> dict[str, Json]:
    """What the trainer divides logits by; up to 1e-6 it divides by nothing."""
    mine = number(values, POLICY + "temperature")
    return {"train.temperature": mine if mine > 1e-6 else 1.0}


# ---------------------------------------------------------------- files and trackers


def place(values: Values) -> dict[str, Json]:
    """output_dir/timestamp holds all that the run writes; an empty timestamp is the moment of the first start."""
    folder, experiment = PurePath(text(values, "train.output_dir")), text(values, "logging.experiment_name")
    return {
        "name": folder.name if experiment in ("", "None") else experiment,
        "track.project": text(values, "logging.project_name"),
        "run_dir": str(folder / (text(values, "train.timestamp") or TIME)),
    }


def resume(values: Values) -> dict[str, Json]:
    """true: go on in the folder of the run; text: from that checkpoint; false: start anew."""
    mine = values["train.resume"]
    return {"checkpoint.resume": mine if isinstance(mine, str) else "auto" if mine else "never"}


def checkpoint(values: Values) -> dict[str, Json]:
    """Steps between checkpoints and how many stay; the last step is saved anyway."""
    at = "train.ckpt."
    if not values[at + "enable_checkpoint"]:
        return {"checkpoint.every": 0, "checkpoint.export": False}
    every, epochs = whole(values, at + "save_freq"), whole(values, at + "save_freq_in_epoch")
    keep, exports = whole(values, at + "max_keep"), values[at + "export_safetensors"]
    background = choose(values, at + "save_mode", {"async": True, "sync": False})
    if every <= 0 and epochs <= 0:
        raise ConfigError(f"{at}save_freq={every} must be greater than 0 (or {at}save_freq_in_epoch).")
    if keep == 0 or keep < -1:
        raise ConfigError(f"{at}max_keep={keep}: at least 1, or -1 for all.")
    kept: dict[str, Json] = {"checkpoint.keep": keep if keep > 0 else None, "checkpoint.export": exports}
    kept["checkpoint.background"] = background
    if epochs > 0:
        return kept | {"checkpoint.every": 0, "checkpoint.every_epochs": epochs}
    return kept | {"checkpoint.every": every, "checkpoint.export_every": every if exports else 0}


def trackers(values: Values) -> dict[str, Json]:
    """console, wandb, tensorboard ...; numbers are written to a file in any case."""
    names = [name.lower() for name in texts(values, "logging.logger")]
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"logging.logger: {name!r} is not known; {', '.join(TRACKERS)}.")
    return {"track.trackers": ["jsonl", *dict.fromkeys(names)]}


def uploads(values: Values) -> dict[str, Json]:
    """Checkpoints and exports to S3, exports to the hub."""
    at, out = "train.ckpt.", dict[str, Json]()
    when, bucket, to_hub = (values[at + key] for key in ("upload_s3", "s3_bucket", "upload_hf"))
    if when not in (False, "final", "all"):
        raise ConfigError(f"{at}upload_s3={when!r}: expected false, 'final' or 'all'.")
    if when:
        if not isinstance(bucket, str) or not bucket:
            raise ConfigError(f"{at}s3_bucket={bucket!r}: must be given where {at}upload_s3={when!r}.")
        root = "/".join(
            part for part in (f"s3://{bucket}", text(values, at + "s3_prefix").strip("/")) if part
        )
        out |= {
            "checkpoint.upload_to": [f"{root}/checkpoints"],
            "checkpoint.upload_exports_to": [f"{root}/exports"],
            "checkpoint.upload": {"final": "last", "all": "all"}[when],
        }
    if not isinstance(to_hub, bool):
        raise ConfigError(f"{at}upload_hf={to_hub!r}: expected true or false.")
    if to_hub:
        name = text(values, at + "hf_repo_name")
        if name.count("/") != 1:
            raise ConfigError(
                f"{at}hf_repo_name={name!r}: write ORG/NAME; nobody is asked whose the token is."
            )
        out["checkpoint.upload_exports_to"] = [*out.get("checkpoint.upload_exports_to", []), f"hf://{name}"]
    return out
