"""Cosmos-RL: the algorithm, the model, sampling, and what a run writes where."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from whet.config.dialects.cosmos_values import POLICY, is_sft, number, text, texts, weights, whole
from whet.config.dialects.key import Values
from whet.types import ConfigError, Json

ALL = 1_000_000
"""As good as no limit."""


def nothing(values: Values) -> dict[str, Json]:
    """A section: its keys count, each for itself."""
    return {}


# ---------------------------------------------------------------- algorithm


def algorithm(values: Values) -> dict[str, Json]:
    """The recipe: grpo, dapo (which drops groups of equal rewards), or sft."""
    kind, wanted = values[POLICY + "type"], "sft" if is_sft(values) else "grpo"
    if kind != wanted:
        raise ConfigError(f"{POLICY}type={kind!r}: grpo or sft (this file is read as {wanted}).")
    if kind == "sft":
        return {"algorithm.name": "sft"}
    variant = values[POLICY + "variant"]
    if variant == "gspo":
        raise ConfigError(f"{POLICY}variant='gspo': ratios of whole sequences are coming; use grpo or dapo.")
    if variant not in ("grpo", "dapo"):
        raise ConfigError(f"{POLICY}variant={variant!r}: grpo, gspo or dapo.")
    return {"algorithm.name": variant} | (_dropping(values) if variant == "dapo" else {})


def _dropping(values: Values) -> dict[str, Json]:
    """Groups whose total rewards are all equal are dropped; more prompts are asked for, up to a bound on-policy."""
    metric = weights(values, POLICY + "filter_reward_metric")
    if metric and metric.keys() != weights(values, POLICY + "reward_function").keys():
        raise ConfigError(
            f"{POLICY}filter_reward_metric: dropping groups by a part of the reward is coming; leave it out to go by "
            "the total."
        )
    most = whole(values, POLICY + "max_retry_for_on_policy")
    if not values[POLICY + "on_policy"]:
        return {}
    return {"algorithm.max_refills": most - 1 if most > 0 else ALL}


def aggregation(values: Values) -> dict[str, Json]:
    """How token losses become one number; a constant in place of the length makes it Dr. GRPO's."""
    kind, constant = values[POLICY + "loss_type"], whole(values, POLICY + "unbiased_loss_max_tokens", null=0)
    known = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    if kind not in known:
        raise ConfigError(f"{POLICY}loss_type={kind!r}: one of {', '.join(known)}.")
    if constant <= 0:
        return {"algorithm.aggregation": kind}
    if kind != "seq-mean-token-mean":
        raise ConfigError(
            f"{POLICY}unbiased_loss_max_tokens={constant} stands in the denominator of "
            f"loss_type='seq-mean-token-mean' only, and loss_type is {kind!r}."
        )
    return {"algorithm.aggregation": "seq-mean-token-sum-norm", "algorithm.norm_tokens": constant}


def normalize(values: Values) -> dict[str, Json]:
    """Unbiased advantages are not divided by the group's standard deviation (the document's text has it inverted)."""
    return {"algorithm.normalize_std": not values[POLICY + "unbiased_advantage"]}


def reference(values: Values) -> dict[str, Json]:
    """The policy becomes the reference every so many steps, where there is one."""
    every = whole(values, POLICY + "reference_reset_interval", null=0)
    if every <= 0 or values[POLICY + "kl_beta"] == 0:
        return {}
    if values[POLICY + "reset_optimizer_with_reference"]:
        raise ConfigError(
            f"{POLICY}reset_optimizer_with_reference: a new optimizer with every new reference is coming; set it to "
            "false to keep the moments."
        )
    return {"reference.reset_every": every}


# ---------------------------------------------------------------- model and lengths


def dtype(values: Values) -> dict[str, Json]:
    """Forward and backward in param_dtype; a bfloat16 model has float32 master weights, as master_dtype says."""
    compute, master = values["train.param_dtype"], values["train.master_dtype"]
    if compute not in ("bfloat16", "float32"):
        raise ConfigError(f"train.param_dtype={compute!r}: bfloat16 or float32; float16 is coming.")
    if master != "float32":
        raise ConfigError(f"train.master_dtype={master!r}: float32; optimizers in half precision are coming.")
    return {"model.dtype": compute}


def transfer(values: Values) -> dict[str, Json]:
    """Weights reach the rollouts as they are trained, in param_dtype: what null means."""
    mine, compute = values["train.transfer_dtype"], values["train.param_dtype"]
    if mine not in (None, "", compute):
        raise ConfigError(
            f"train.transfer_dtype={mine!r}: rollouts read the trained weights themselves, in param_dtype={compute!r}; "
            "another dtype there is coming. Leave it out."
        )
    return {}


def lengths(values: Values) -> dict[str, Json]:
    """model_max_length is shared by prompt and reply; longer rows are left out and counted.

    RL: what rollout.max_response_length leaves is for the prompt. SFT: half each.
    """
    total = whole(values, "policy.model_max_length", least=2)
    reply = total // 2 if is_sft(values) else whole(values, "rollout.max_response_length", least=1)
    if reply >= total:
        raise ConfigError(
            f"rollout.max_response_length={reply} leaves no token of policy.model_max_length={total} to the prompt: "
            "limiting the two together is coming; until then lower max_response_length."
        )
    return {
        "data.max_prompt_tokens": total - reply,
        "data.overlong": "filter",
        "rollout.sampling.max_tokens": reply,
    }


def seed(values: Values) -> dict[str, Json]:
    """One seed for everything: train.seed, else rollout.seed, else 42 where deterministic, else 0."""
    train, rollout = values["train.seed"], None if is_sft(values) else values["rollout.seed"]
    if train is not None and rollout not in (None, train):
        raise ConfigError(
            f"rollout.seed={rollout} beside train.seed={train}: one seed rules the whole run here; give one, or equal "
            "ones."
        )
    otherwise = 42 if values["train.deterministic"] else 0
    return {"seed": next((s for s in (train, rollout) if s is not None), otherwise)}


# ---------------------------------------------------------------- rollouts


def rollout(values: Values) -> dict[str, Json]:
    """The embedded engine stands in for vLLM and TensorRT-LLM; how they use a GPU changes no token's probability."""
    if is_sft(values):
        return {}
    backend = values["rollout.backend"]
    if backend not in ("vllm", "vllm_async", "trtllm"):
        raise ConfigError(
            f"rollout.backend={backend!r}: vllm or trtllm (the embedded engine stands in for both)."
        )
    return {
        "rollout.engine": "native",
        "rollout.group_size": values["rollout.n_generation"],
    }


def engine_options(values: Values) -> dict[str, Json]:
    """For vLLM, once it is there; the embedded engine reads none of them."""
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
    """The trainer divides the logits by what they were sampled with; up to 1e-6 by nothing."""
    mine, sampled = number(values, POLICY + "temperature"), values["rollout.sampling_config.temperature"]
    if (mine if mine > 1e-6 else 1.0) != sampled:
        raise ConfigError(
            f"{POLICY}temperature={mine} must equal rollout.sampling_config.temperature={sampled}, as the trainer "
            "divides logits by what they were sampled with; training at another temperature is coming."
        )
    return {}


# ---------------------------------------------------------------- files and trackers


def place(values: Values) -> dict[str, Json]:
    """output_dir/timestamp holds all that the run writes; its name is the tracker's project and experiment."""
    folder, experiment = PurePath(text(values, "train.output_dir")), text(values, "logging.experiment_name")
    if experiment in ("", "None"):
        experiment = folder.name
    return {
        "name": f"{text(values, 'logging.project_name')}/{experiment}",
        "run_dir": str(folder / text(values, "train.timestamp")),
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
    every, keep = whole(values, at + "save_freq"), whole(values, at + "max_keep")
    if every <= 0:
        raise ConfigError(f"{at}save_freq={every} must be greater than 0.")
    if keep == 0 or keep < -1:
        raise ConfigError(f"{at}max_keep={keep}: at least 1, or -1 for all.")
    return {
        "checkpoint.every": every,
        "checkpoint.keep": keep if keep > 0 else ALL,
        "checkpoint.export": values[at + "export_safetensors"],
    }


def trackers(values: Values) -> dict[str, Json]:
    """console and tensorboard; numbers are written to a file in any case. W&B is refused by name."""
    names = [name.lower() for name in texts(values, "logging.logger")]
    later = [name for name in names if name not in ("console", "tensorboard")]
    if later:
        raise ConfigError(f"logging.logger: {', '.join(later)} is coming; console and tensorboard are here.")
    return {"track.trackers": ["jsonl", *dict.fromkeys(names)]}


def uploads(values: Values) -> dict[str, Json]:
    """Names of places that nothing is uploaded to."""
    at = "train.ckpt."
    if values[at + "upload_s3"] is True:
        raise ConfigError(f"{at}upload_s3=true: false, 'final' or 'all' (uploads are coming).")
    wanted: list[Any] = [key for key in ("upload_hf", "upload_s3") if values[at + key]]
    if wanted:
        raise ConfigError(f"{at}{wanted[0]}: uploads are coming.")
    return {}
