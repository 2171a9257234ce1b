"""Trinity-RFT's global keys, its models and machines, explorer and trainer."""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.layout import Layout
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.presets import online, preset, repeat_times
from whet.dialects.trinity.replies import template
from whet.dialects.trinity.values import MODEL as VERL_MODEL
from whet.dialects.trinity.values import (
    count,
    entries,
    given,
    known_as,
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
        raise NotSupportedYet(
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
        raise NotSupportedYet(
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
