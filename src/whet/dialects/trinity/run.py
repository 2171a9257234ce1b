"""Trinity-RFT's global keys, models, explorer beside its trainer, replay buffer, monitor and log."""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.faults import shown
from whet.dialects.layout import FileLayout
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.served import placed
from whet.dialects.trinity.data import apart
from whet.dialects.trinity.judges import is_outside
from whet.dialects.trinity.rewards import is_judged
from whet.dialects.trinity.values import (
    CRITIC,
    EXPERIENCES,
    MODEL,
    Native,
    arguments,
    distills,
    entries,
    folder_of,
    given,
    online,
    preset,
    repeat_times,
    text,
)
from whet.dialects.trinity.waiting import bound
from whet.tables import near
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- the run and its models


def run(values: Values) -> Native:
    """<checkpoint_root_dir>/<project>/<name>, as the document says; a group, where one is given, before the name."""
    project, name = (_named(values, key) for key in ("project", "name"))
    root, group = text(values, "checkpoint_root_dir") or "./checkpoints", text(values, "group")
    return {"name": name, "run_dir": "/".join(filter(None, (root, project, group, name)))}


def _named(values: Values, key: str) -> str:
    """A name; a number is one, too."""
    if isinstance(values[key], bool) or not isinstance(values[key], str | int | float):
        raise ConfigError(f"{key}: got {shown(values[key])}, expected a text.")
    return str(values[key])


def model(values: Values) -> Native:
    """The folder of the policy and what is put over its config.json."""
    path = text(values, "model.model_path")
    rope = {
        key: own for key in ("rope_scaling", "rope_theta") if given(own := values[f"model.{key}"]) is not None
    }
    over = {**(values[f"{MODEL}.override_config"] or {}), **rope}
    return {"model.path": path, **({"model.overrides": over} if over else {})}


def chat_template(values: Values) -> Native:
    """The file wins over the text; the template of a file of replies, or of the engine, stands for a missing one."""
    of_replies = None if online(values) else text(values, f"{EXPERIENCES}.format.chat_template")
    own = of_replies or text(values, "explorer.rollout_model.chat_template")
    whole = text(values, "model.chat_template_path") or text(values, "model.custom_chat_template")
    if own and whole and own != whole:
        raise NotSupportedYet(
            "model.custom_chat_template: another template for the file of replies, or the engine, is coming, not built "
            "yet; give one of them."
        )
    return {"tokenizer.chat_template": own or whole} if own or whole else {}


def libraries(values: Values) -> Native:
    """Modules to import before the models, the critic's too."""
    keys = [MODEL, f"{CRITIC}.model"] if preset(values).recipe == "ppo" else [MODEL]
    named = [values[f"{key}.external_lib"] for key in keys]
    every = [lib for one in named if given(one) for lib in (one if isinstance(one, list) else [one])]
    return {"imports": list(dict.fromkeys(every))} if every else {}


def teacher(values: Values) -> Native:
    """The first auxiliary model, which on_policy_distill and jsd learn from, or which judges. Others are for workflows
    of several models."""
    key = "explorer.auxiliary_models"
    models, learns = entries(values, key), distills(values)
    if len(models) > (learns or (bool(models) and is_judged(values))):
        raise NotSupportedYet(
            f"{key}: models beside the policy are coming, not built yet; here: the teacher of on_policy_distill or "
            "jsd, and the judge of math_ruler_workflow and rubric_judge_workflow."
        )
    if not learns:
        return {}
    if is_outside(models[0]):
        raise NotSupportedYet(
            f"{key}[0].external_model_config.enable: true: a teacher is asked for the log-probs of replies that it did "
            "not write, which a server with OpenAI's interface does not give. Write the folder of its model as "
            "model_path, and enable: false."
        )
    path = text(models[0], "model_path")
    if path is None:
        raise ConfigError(f"{key}[0].model_path: must be given: the folder of the teacher.")
    return {"reference.path": path}


# ---------------------------------------------------------------- the explorer and its trainer


def at_once(values: Values) -> Native:
    """Each of engine_num * runner_per_model runners has a task in hand, with all its repeats. The embedded engine
    stands in for vLLM and SGLang, unless the file has options that only these know; then a server is started with
    them."""
    engines = values["explorer.rollout_model.engine_num"]
    runners = engines * values["explorer.runner_per_model"]
    out: Native = {"rollout.max_num_seqs": runners * repeat_times(values)}
    if not online(values):
        return out
    name = "sglang" if values["explorer.rollout_model.engine_type"] == "sglang" else "vllm"
    options = values["explorer.rollout_model.extra_engine_args.*"]
    out |= _server(values, name, options or {})
    return out | ({"rollout.engine": name} if options else FileLayout(engines=engines).natives())


def _server(values: Values, name: str, options: Mapping[str, Json]) -> dict[str, Json]:
    """The explorer's engines as one server, on devices of its own."""
    at = "explorer.rollout_model"
    tp, pp, dp = (
        int(values.get(f"{at}.{size}_parallel_size") or 1) for size in ("tensor", "pipeline", "data")
    )
    return placed(
        name,
        tp=tp,
        pp=pp,
        dp=values[f"{at}.engine_num"] * dp,
        ep=2 if values.get(f"{at}.enable_expert_parallel") else 1,
        memory=values[f"{at}.gpu_memory_utilization"],
        more=options,
    )


def environment(values: Values) -> Native:
    """Variables of the reward processes; there are no others that run code of the user's."""
    key = "explorer.env_vars"
    found = values[key] or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{key}: got {type(found).__name__}, expected names with values.")
    return {"reward_workers.env": {name: str(value) for name, value in found.items()}} if found else {}


def steps_ahead(values: Values) -> int:
    """How far exploring is ahead of training where the style is not fixed: as far as staleness_control lets it be.

    Rollouts of step s have version s - max_staleness at least, of which sync_interval steps lie between two syncs.
    Without it, as far as one more interval, and where used rollouts stand in the same queue, at least so far that steps
    of these need not wait: here exploring has a bound, there it has none but the queue.
    """
    most, interval = bound(values), int(values["synchronizer.sync_interval"])
    uses_again = values[f"{REPLAY}.enable"] and values[f"{REPLAY}.reuse_cooldown_time"] is not None
    return max(interval, _AMONG_USED if uses_again else 0) if most is None else most - interval


def who(values: Values) -> Native:
    """The name by which a store knows this explorer."""
    return {"buffer.explorer_name": str(values["explorer.name"])} if values["mode"] == "explore" else {}


# ---------------------------------------------------------------- the replay buffer

REPLAY = f"{EXPERIENCES}.replay_buffer"
_AMONG_USED = 4
"""Least rollout.max_staleness beside buffer.replay.queue (`ReplayConfig.queue`)."""
CONTROLLED = "linear_decay_use_count_control_randomization"
"""As the document has it; decay_limit_randomization in the code."""


def replay(values: Values) -> Native:
    """Fresh and used experiences in one queue, from which steps are drawn by priority. It is the trainer's: an explorer
    and a bench take no notice of it."""
    told, controlled = _priority(values), _is_controlled(values)
    oldest, seconds = bound(values), values[f"{REPLAY}.reuse_cooldown_time"]
    out: Native = {
        "priority": CONTROLLED if controlled else "linear_decay",
        "priority.decay": told["decay"],
        "cooldown": None if seconds is None else f"{seconds} s",  # null: nothing twice
    }
    if controlled:
        limit = told["use_count_limit"]
        unlimited = isinstance(limit, int | float) and limit <= 0
        out |= {"priority.sigma": told["sigma"], "priority.use_limit": None if unlimited else limit}
    if oldest is not None:  # step s takes versions from s - it on, and the trainer is at version s - 1 then
        out["max_staleness"] = oldest - 1
    return {f"buffer.replay.{key}": value for key, value in out.items()}


def _is_controlled(values: Values) -> bool:
    """Whether the priority counts how often a group was used."""
    return bool(values[f"{REPLAY}.priority_fn"] != "linear_decay")


def _priority(values: Values) -> Native:
    """The arguments of priority_fn."""
    counts: Native = {"use_count_limit": 3, "sigma": 0.0} if _is_controlled(values) else {}
    return arguments(values, f"{REPLAY}.priority_fn_args", {"decay": 2.0} | counts)


def is_a_queue(values: Values) -> bool:
    """Whether it gives what a plain queue gives. With sync_style fixed and no offset, the trainer trains on all that
    was explored since the last sync before it syncs again: what lies there has one version, and nothing returns."""
    in_step = values["synchronizer.sync_style"] == "fixed" and not values["synchronizer.sync_offset"]
    plain = values[f"{EXPERIENCES}.storage_type"] == "queue" and not apart(values)
    once = values[f"{REPLAY}.reuse_cooldown_time"] is None
    return not _priority(values).get("sigma") and in_step and plain and once


# ---------------------------------------------------------------- monitor and log

ARGS = "monitor.monitor_args"

TRACKERS: dict[str, tuple[str, ...]] = {
    "tensorboard": (),
    "wandb": ("base_url",),
    "mlflow": ("uri",),
    "swanlab": ("workspace", "mode", "description", "tags", "reinit", "settings"),
}
"""Trackers with the arguments that each takes from a file."""

_NATIVE = {"base_url": "wandb.settings.base_url", "uri": "mlflow.tracking_uri"}


def monitor(values: Values) -> Native:
    """The tracker, beside the console and metrics.jsonl, with its project, group and arguments; one that it does not
    have is refused."""
    kind, group = values["monitor.monitor_type"], text(values, "group")
    out: Native = {"track.trackers": ["console", "jsonl", kind]}
    if kind != "tensorboard":
        out |= {"track.project": str(values["project"])} | ({"track.group": group} if group else {})
    told = {"base_url": values[f"{ARGS}.base_url"]} | (values[f"{ARGS}.*"] or {})
    if kind == "mlflow" or values[f"{ARGS}.uri"] != "http://localhost:5000":
        told["uri"] = values[f"{ARGS}.uri"]
    told = {key: value for key, value in told.items() if given(value) is not None}
    for key in told:
        if key not in TRACKERS[kind]:
            known = ", ".join(TRACKERS[kind]) or "none"
            raise ConfigError(
                f"{ARGS}.{key}: {kind} takes no such argument{near(key, TRACKERS[kind])}; it takes: {known}."
            )
    tags = told.pop("tags", None)
    out |= {f"track.arguments.{_NATIVE.get(key, f'{kind}.{key}')}": value for key, value in told.items()}
    return out | ({"track.tags": tags} if tags else {})


def secrets(values: Values) -> Native:
    """Refuses keys of operators without showing them."""
    at = "data_processor.task_pipeline.operators"
    for n, own in enumerate(entries(values, at)):
        if text(own, "args.api_key") is not None:
            raise ConfigError(f"{at}[{n}].args.api_key: secrets stay out of configs: leave it out.")
    return {}


def log_level(values: Values) -> Native:
    """DEBUG is debug."""
    return {"track.log_level": str(values["log.level"]).lower()}


def record(values: Values) -> Native:
    """save_input: the record of the rollouts, and where."""
    at = "data_processor.experience_pipeline"
    path = text(values, f"{at}.input_save_path")
    folder = {"dirs.rollouts": folder_of(path, f"{at}.input_save_path")} if path else {}
    return {"track.rollouts_interval": 1 if values[f"{at}.save_input"] else 0, **folder}
