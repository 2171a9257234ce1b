"""Trinity-RFT's global keys, its models and machines, explorer and trainer."""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.dialects.key import Key, Unbuilt, Values, coming, derived, inert, translated
from whet.config.dialects.layout import FITTED, Layout
from whet.config.dialects.trinity_algorithm import optimizer
from whet.config.dialects.trinity_data import batch, evaluation, length, mode, sampling, token_limits
from whet.config.dialects.trinity_layout import GPUS, address, machines, sized, strategy
from whet.config.dialects.trinity_lora import ENGINE, LORA
from whet.config.dialects.trinity_presets import online, preset, repeat_times
from whet.config.dialects.trinity_replies import template
from whet.config.dialects.trinity_sync import again, who
from whet.config.dialects.trinity_trainer import critic, export, micro, resume
from whet.config.dialects.trinity_values import MODEL as VERL_MODEL
from whet.config.dialects.trinity_values import (
    at_any_value,
    count,
    entries,
    given,
    known_as,
    section,
    text,
    whole,
)
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- the run and its folder


def run(values: Values) -> Mapping[str, Json]:
    """<checkpoint_root_dir>/<project>/<name>, as the document says; a group, where one is given, before the name."""
    name, group = str(values["name"]), text(values, "group")
    folder = [
        text(values, "checkpoint_root_dir") or "./checkpoints",
        str(values["project"]),
        *([group] if group else []),
    ]
    return {"name": name, "run_dir": "/".join([*folder, name])}


# ---------------------------------------------------------------- model


def model(values: Values) -> Mapping[str, Json]:
    """The folder of the policy and what is put over its config.json."""
    path = text(values, "model.model_path")
    if path is None:
        raise ConfigError("model.model_path: must be given: the folder of a Hugging Face model.")
    rope = {
        key: values[f"model.{key}"]
        for key in ("rope_scaling", "rope_theta")
        if given(values[f"model.{key}"]) is not None
    }
    override = values[f"{VERL_MODEL}.override_config"]
    if not isinstance(override, dict | None):
        raise ConfigError(f"{VERL_MODEL}.override_config: got {override!r}, expected keys of config.json.")
    over = {**(override or {}), **rope}
    return {"model.path": path, **({"model.overrides": over} if over else {})}


def chat_template(values: Values) -> Mapping[str, Json]:
    """The file wins over the text; the template of a file of replies, or of the engine, stands for a missing one."""
    own = template(values) or text(values, "explorer.rollout_model.chat_template")
    whole = text(values, "model.chat_template_path") or text(values, "model.custom_chat_template")
    if own and whole and own != whole:
        raise Unbuilt(
            "model.custom_chat_template: another template for the file of replies, or the engine, is coming, not built "
            "yet; give one of them."
        )
    return {"tokenizer.chat_template": own or whole} if own or whole else {}


def libraries(values: Values) -> Mapping[str, Json]:
    """Modules to import before the models, the critic's too."""
    named = [values[f"{VERL_MODEL}.external_lib"]]
    if preset(values).recipe == "ppo":
        named.append(values["trainer.trainer_config.critic.model.external_lib"])
    every = [lib for one in named if given(one) for lib in (one if isinstance(one, list) else [one])]
    return {"imports": list(dict.fromkeys(every))} if every else {}


def teacher(values: Values) -> Mapping[str, Json]:
    """The first auxiliary model, which on_policy_distill learns from. Others are for workflows of several models."""
    key = "explorer.auxiliary_models"
    models, distills = entries(values, key), preset(values).advantage == "on_policy_distill"
    if not online(values):
        return {}
    if not models and distills:
        raise ConfigError(f"{key}: must be given: on_policy_distill learns from the model_path of the first.")
    if len(models) > distills:
        raise Unbuilt(
            f"{key}: models beside the policy are coming, not built yet; here: the teacher of on_policy_distill."
        )
    if not distills:
        return {}
    path = text(models[0], "model_path")
    if path is None:
        raise ConfigError(f"{key}[0].model_path: must be given: the folder of the teacher.")
    return {"reference.path": path}


# ---------------------------------------------------------------- explorer


def engine_type(values: Values) -> Mapping[str, Json]:
    """The embedded engine stands in for vLLM."""
    known = dict.fromkeys(("vllm", "vllm_async", "sglang"))
    name = str(values["explorer.rollout_model.engine_type"])
    known_as(name, known, key="explorer.rollout_model.engine_type", coming=("tinker", "external"))
    return {}


def at_once(values: Values) -> Mapping[str, Json]:
    """Each of engine_num * runner_per_model runners has a task in hand, with all its repeats."""
    engines = count(values, "explorer.rollout_model.engine_num")
    runners = engines * count(values, "explorer.runner_per_model")
    out: dict[str, Json] = {"rollout.max_batch": runners * repeat_times(values)}
    return out | (Layout(engines=engines).natives() if online(values) else {})


def timeout(values: Values) -> Mapping[str, Json]:
    """Seconds of one attempt."""
    return {"rollout.timeout_s": values["explorer.max_timeout"]}


def runs_of_a_runner(values: Values) -> Mapping[str, Json]:
    """How a task's repeats are shared out."""
    whole(values, "explorer.max_repeat_times_per_runner")
    return {}


def environment(values: Values) -> Mapping[str, Json]:
    """Variables of the reward processes; there are no others that run code of the user's."""
    key = "explorer.env_vars"
    found = values[key] or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{key}: got {type(found).__name__}, expected names with values.")
    return {"guard.env": {name: str(value) for name, value in found.items()}} if found else {}


# ---------------------------------------------------------------- rows


_NO_ACTORS = "names an actor, and there are none: everything is one process"


def _coming(feature: str, **defaults: Json) -> tuple[Key, ...]:
    """Rows of one feature; `__` stands for a dot, `_I_` for the `[]` of a list."""
    return tuple(
        coming(name.replace("_I_", "[]").replace("__", "."), feature, default=default)
        for name, default in defaults.items()
    )


_LIMITS = "prompt and reply share max_model_len; what is not given is what the others leave"

GLOBAL: tuple[Key, ...] = (
    translated(
        "project",
        run,
        "run_dir",
        default="Trinity-RFT",
        reason="a part of the run's folder; wandb, mlflow and swanlab list the run under it",
    ),
    translated("name", run, "name", "run_dir", default="rft", reason="the run, and a part of its folder"),
    translated(
        "mode",
        mode,
        "mode",
        default="both",
        reason="train, explore, bench: processes of their own; sft and dpo are trained with train in one. serve is "
        "coming",
    ),
    translated(
        "checkpoint_root_dir",
        run,
        "run_dir",
        default="${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}",
        reason="<checkpoint_root_dir>/<project>/<name>",
    ),
    translated(
        "continue_from_checkpoint",
        resume,
        "checkpoint.resume",
        default=True,
        reason="false: the run that is there is moved aside",
    ),
    at_any_value("ray_namespace", _NO_ACTORS, default=None),
)

MODEL: tuple[Key, ...] = (
    section("model", "model"),
    translated(
        "model.model_path", model, "model.path", default="", reason="a local folder; its code is never run"
    ),
    translated(
        "model.critic_model_path", critic, "critic.path", default=None, reason="null: as the policy starts"
    ),
    translated(
        "model.custom_chat_template",
        chat_template,
        "tokenizer.chat_template",
        default=None,
        reason="Jinja text",
    ),
    translated(
        "model.chat_template_path",
        chat_template,
        "tokenizer.chat_template",
        default=None,
        reason="wins over the text",
    ),
    translated(
        "model.max_model_len", token_limits, "rollout.sampling.max_tokens", default=None, reason=_LIMITS
    ),
    translated(
        "model.max_prompt_tokens", token_limits, "data.max_prompt_tokens", default=None, reason=_LIMITS
    ),
    translated(
        "model.max_response_tokens", token_limits, "rollout.sampling.max_tokens", default=None, reason=_LIMITS
    ),
    translated(
        "model.min_response_tokens",
        sampling,
        "rollout.sampling.min_tokens",
        default=0,
        reason="0, not the example's 1",
    ),
    translated(
        "model.enable_prompt_truncation",
        token_limits,
        "data.overlong",
        default=True,
        reason="Trinity trains on no token of a prompt that was cut; here it is left out and counted. false: an error",
    ),
    translated(
        "model.repetition_penalty",
        sampling,
        "rollout.sampling.repetition_penalty",
        default=1.0,
        reason="as in vLLM",
    ),
    *LORA,
    translated("model.rope_scaling", model, "model.overrides", default=None, reason="put over config.json"),
    translated("model.rope_theta", model, "model.overrides", default=None, reason="put over config.json"),
    section("model.tinker"),
    *_coming(
        "training by a remote service",
        model__tinker__enable=False,
        model__tinker__rank=32,
        model__tinker__seed=None,
        model__tinker__train_mlp=True,
        model__tinker__train_attn=True,
        model__tinker__train_unembed=True,
    ),
)

_GPUS = "each engine lies whole on one GPU here; the trainer's GPUs, which these leave, must divide train_batch_size"

CLUSTER: tuple[Key, ...] = (
    section("cluster", "machine"),
    translated("cluster.node_num", machines, "cluster.ranks", default=None, reason=f"{GPUS} {FITTED}"),
    sized("cluster.gpu_per_node", "dp_shard", "dp_replicate", default=None, reason=GPUS),
)

EXPLORER: tuple[Key, ...] = (
    section("explorer", "rollout"),
    translated(
        "explorer.name",
        who,
        "buffer.explorer",
        default="explorer",
        reason="with mode: explore; else nobody asks",
    ),
    translated(
        "explorer.runner_per_model",
        at_once,
        "rollout.max_batch",
        default=8,
        reason="times engine_num, times repeats",
    ),
    translated("explorer.max_timeout", timeout, "rollout.timeout_s", default=1800, reason="of one attempt"),
    translated(
        "explorer.max_retry_times", again, "rollout.retries", default=2, reason="of a rollout that failed"
    ),
    translated("explorer.env_vars", environment, "guard.env", default={}, reason="of the reward processes"),
    section("explorer.rollout_model", "rollout"),
    derived(
        "explorer.rollout_model.engine_type",
        engine_type,
        default="vllm",
        reason="the embedded engine stands in",
    ),
    translated(
        "explorer.rollout_model.engine_num",
        at_once,
        "rollout.max_batch",
        "rollout.replicas",
        default=1,
        reason=f"rollouts at once; engines, a single one is the trainer's own. {FITTED}",
    ),
    derived("explorer.rollout_model.tensor_parallel_size", batch, default=1, reason=_GPUS),
    coming("explorer.rollout_model.enable_history", "workflows of your own", default=False),
    translated("explorer.eval_interval", evaluation, "eval.every", default=100, reason="steps"),
    translated(
        "explorer.eval_on_startup",
        evaluation,
        "eval.at_start",
        default=True,
        reason="not again after a resume",
    ),
    section("explorer.over_rollout"),
    translated(
        "explorer.over_rollout.ratio",
        batch,
        "rollout.spare_tasks",
        "train.tasks_per_step",
        default=0.0,
        reason="a step is ceil((1 - ratio) * batch_size) tasks; the others are asked too and serve later steps",
    ),
    at_any_value(
        "explorer.over_rollout.wait_after_min",
        "late groups are not lost here, so a step that has enough does not wait for them",
        default=30.0,
    ),
    section("explorer.dynamic_timeout"),
    translated(
        "explorer.dynamic_timeout.enable",
        again,
        "rollout.timeout_factor",
        default=False,
        reason="times the mean of those that finished",
    ),
    translated(
        "explorer.dynamic_timeout.ratio",
        again,
        "rollout.timeout_factor",
        default=3.0,
        reason="with enable; from the 8th rollout on (Trinity: batch_size tasks)",
    ),
    coming("explorer.runner_state_report_interval", "a table of what runs at the moment", default=0),
)

TRAINER: tuple[Key, ...] = (
    section("trainer", "train"),
    at_any_value("trainer.name", _NO_ACTORS, default="trainer"),
    coming("trainer.trainer_type", "other trainers than the embedded one", default="verl"),
    derived(
        "trainer.trainer_strategy",
        strategy,
        default="fsdp",
        reason="where tensors are cut, by FSDP2; fsdp is the same but for its means. megatron is coming",
    ),
    translated(
        "trainer.total_steps",
        length,
        "train.steps",
        default=None,
        reason="the taskset starts again where Trinity would end for want of tasks",
    ),
    Key(
        name="trainer.save_interval",
        status="mapped",
        native=("checkpoint.every",),
        default=0,
        reason="0: only at the end",
    ),
    inert(
        "trainer.save_strategy",
        "one process writes, so all of them are the same",
        default="unrestricted",
        harmless=("single_thread", "single_process", "single_node"),
    ),
    translated(
        "trainer.save_hf_checkpoint",
        export,
        "checkpoint.export",
        "checkpoint.export_every",
        default="last",
        reason="always: with every checkpoint too",
    ),
    translated(
        "trainer.grad_clip",
        optimizer,
        "train.optimizer.grad_clip",
        default=1.0,
        reason="of the policy and the critic",
    ),
    translated(
        "trainer.use_dynamic_bsz",
        micro,
        "train.micro_tokens",
        default=True,
        reason="by tokens, else by rollouts",
    ),
    translated(
        "trainer.max_token_len_per_gpu",
        micro,
        "train.micro_tokens",
        default=None,
        reason="twice max_model_len at least, and where it is not given",
    ),
    sized(
        "trainer.ulysses_sequence_parallel_size",
        "cp",
        default=1,
        reason="ranks that share the tokens of a micro-batch; must divide the attention heads.",
    ),
    section("trainer.trainer_config"),
)

MORE_RUN: tuple[Key, ...] = (
    translated("group", run, "run_dir", default=None, reason="a part of the run's folder, before the name"),
    *(
        translated(f"model.{key}", owner, *natives, default=default, reason="of tasksets that give none")
        for key, default, owner, natives in (
            ("temperature", 1.0, sampling, ("rollout.sampling.temperature",)),
            ("top_p", 1.0, sampling, ("rollout.sampling.top_p",)),
            ("top_k", -1, sampling, ("rollout.sampling.top_k",)),
        )
    ),
    coming("model.logprobs", "log-probs of other tokens than the sampled", default=0),
    *ENGINE,
    translated(
        "cluster.ray_address",
        address,
        "cluster.address",
        default="auto",
        reason="host:port of a running cluster; auto: one that is started here where it is needed",
    ),
    derived(
        "explorer.max_repeat_times_per_runner",
        runs_of_a_runner,
        default=None,
        reason="every repeat is asked by itself, so none waits for another",
    ),
    coming("explorer.runner_num", "the older name of runner_per_model", default=None),
    *(
        coming(f"explorer.{key}", "a server for agents outside (serve), and bench", default=default)
        for key, default in (
            ("bench_on_latest_checkpoint", False),
            ("proxy_port", 8010),
            ("listen_address", "0.0.0.0"),
            ("service_status_check_interval", 60),
            ("min_running_model_num", 1),
            ("db_url", None),
        )
    ),
    at_any_value("trainer.enable_preview", "whet's display shows rollouts anyway", default=True),
    at_any_value(
        "trainer.fix_actor_microbatch_loss_scale",
        "micro-batches never change the gradient here",
        default=False,
    ),
    coming("trainer.trainer_config_path", "the older name of trainer_config", default=""),
    at_any_value(
        "synchronizer.wait_for_checkpoint",
        "nobody sees a version of the weights before it is whole",
        default=False,
    ),
)
"""Keys that the document leaves to the source code."""
