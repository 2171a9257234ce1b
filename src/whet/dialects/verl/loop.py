"""verl's trainer as native keys: its length, who goes ahead of whom, checkpoints, records and profiles."""

from __future__ import annotations

import math
from pathlib import PurePath

from whet.config.faults import shown
from whet.dialects.row import NOTHING, Native, NotSupportedYet, Values
from whet.dialects.typed import choices, choose, place
from whet.dialects.verl.optimizer import constant_rates
from whet.dialects.verl.roles import ACTOR, CRITIC, REF, anywhere, has_critic, local, texts
from whet.dialects.verl.sizes import (
    is_fully_async,
    mini_batches,
    prompts,
    steps_of_a_version,
    updates_of_a_step,
)
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- length and order


def schedule(v: Values) -> Native:
    """Who is ahead of whom: in turn; a step ahead with engines of their own (one step off); or asynchronously."""
    if is_fully_async(v):
        return _fully_async(v)
    mode, apart = v["trainer.v1.trainer_mode"], not v["actor_rollout_ref.hybrid_engine"]
    if mode == "separate_async":
        each = v["trainer.v1.separate_async.parameter_sync_step"] * v[f"{ACTOR}.ppo_mini_batch_size"]
        if prompts(v) != each:
            raise ConfigError(
                f"data.train_batch_size={prompts(v)} must be trainer.v1.separate_async.parameter_sync_step * "
                f"{ACTOR}.ppo_mini_batch_size = {each}"
            )
        _check_single_updates(v)
    if mode != "sync":
        most = max(v["trainer.v1.sampler.max_off_policy_threshold"], 1)
        return {"rollout.schedule": "async", "rollout.max_staleness": most}
    return {"rollout.max_staleness": 1} if apart else NOTHING


def _check_single_updates(v: Values) -> None:
    """What separate_async has of a mini batch before the next begins must be one optimizer step of each model."""
    for role in (ACTOR, CRITIC) if has_critic(v) else (ACTOR,):
        several = {f"{role}.ppo_epochs": 1, f"{role}.ppo_mini_batch_size": v[f"{ACTOR}.ppo_mini_batch_size"]}
        for key, one in several.items():
            if v[key] != one and updates_of_a_step(v) > 1:
                raise NotSupportedYet(
                    f"{key}={v[key]} with trainer.v1.trainer_mode=separate_async: several optimizer steps for one mini "
                    f"batch before the next begins are coming, not built yet; set it to {one}"
                )


def _fully_async(v: Values) -> Native:
    """Weights go over every trigger_parameter_sync_step steps, for which (1 + staleness_threshold) times as many tasks
    may be asked: steps that begin with the next weights take what is more. Where there are none, nothing is ahead of
    anything. total_rollout_steps counts tasks."""
    every, B, tasks = steps_of_a_version(v), prompts(v), v["rollout.total_rollout_steps"]
    asked = int(B * (v["async_training.staleness_threshold"] + 1) * every)
    ahead = math.ceil(asked / B) - every
    out: dict[str, Json] = {}
    if ahead or every > 1:
        out = {
            "rollout.schedule": "async",
            "rollout.max_staleness": ahead,
            "rollout.sync_interval": every,
            "rollout.partial_rollout": v["async_training.partial_rollout"],
        }
    if tasks is None:
        return out
    if tasks < B:
        raise ConfigError(
            f"rollout.total_rollout_steps={tasks} fills no step of async_training.require_batches * "
            f"{ACTOR}.ppo_mini_batch_size = {B} tasks, so verl trains nothing; raise it"
        )
    return out | {"train.steps": tasks // B}


def run_directory(v: Values) -> Native:
    """Where verl puts checkpoints stands everything that a run writes. An empty text is the current folder there; a run
    has a folder of its own here, the one that verl's default names."""
    if v["trainer.default_local_dir"] == "":
        return {"run_dir": f"checkpoints/{v['trainer.project_name']}/{v['trainer.experiment_name']}"}
    return {"run_dir": local(v, "trainer.default_local_dir")}


PARTS = ("model", "optimizer")
"""What a checkpoint may be without; the run's place (extra) is always in it."""

CONTENTS = (*PARTS, "extra", "hf_model")


def checkpoints(v: Values) -> Native:
    """Every save_freq steps, and always at the end. hf_model asks for an export beside each; with hf_model alone there
    are exports only, and a checkpoint at the end."""
    every = max(v["trainer.save_freq"], 0) * steps_of_a_version(v)
    saved = _of_actor(v, f"{ACTOR}.checkpoint.save_contents")
    loaded = _of_actor(v, f"{ACTOR}.checkpoint.load_contents")
    if "model" not in saved:
        return {**exports_only(every), "checkpoint.keep": _kept(v)}
    if "extra" not in loaded and not constant_rates(v):
        raise NotSupportedYet(
            f"{ACTOR}.checkpoint.load_contents={shown(loaded)}: without extra, verl restarts the learning-rate "
            "schedule on resume, warm-up included; coming, not built yet: add extra, or use a constant rate without "
            "warm-up"
        )
    check_loaded(f"{ACTOR}.checkpoint.load_contents", loaded)
    if has_critic(v):
        _check_critic(v, saved, loaded)
    return {
        "checkpoint.interval": every,
        "checkpoint.keep": _kept(v),
        "checkpoint.save_contents": [part for part in PARTS if part in saved],
        "checkpoint.load_contents": [part for part in PARTS if part in loaded],
        "checkpoint.export": "hf_model" in saved,
        "checkpoint.export_interval": every if "hf_model" in saved else 0,
        **({"checkpoint.async_save": True} if v[f"{ACTOR}.checkpoint.async_save"] else {}),
    }


def _kept(v: Values) -> int | None:
    keep: int | None = v["trainer.max_actor_ckpt_to_keep"]
    return 1 if v["trainer.remove_previous_ckpt_in_save"] else keep


def _of_actor(v: Values, key: str) -> list[str]:
    """The parts named by a key, or by the older `contents` of the actor, which must not contradict it."""
    given = contents(v, key)
    old = f"{ACTOR}.checkpoint.contents"
    if not key.startswith(ACTOR) or v[old] is None:
        return given
    older = contents(v, old)
    if set(given) not in (set(CONTENTS) - {"hf_model"}, set(older)):
        raise ConfigError(f"{old}={shown(older)} and {key}={shown(given)} differ; keep one")
    return older


def contents(v: Values, key: str) -> list[str]:
    """The parts of a checkpoint that a key names. ConfigError for unknown ones, and without any model."""
    given = texts(v, key)
    if unknown := sorted(set(given) - set(CONTENTS)):
        raise ConfigError(f"{key}: {', '.join(unknown)} is not one of {', '.join(CONTENTS)}")
    if not {"model", "hf_model"} & set(given):
        raise ConfigError(f"{key}={shown(given)} has no model, and a run cannot resume without its weights")
    return given


def check_loaded(key: str, loaded: list[str]) -> None:
    """ConfigError where a checkpoint is read without its weights."""
    if "model" not in loaded:
        raise ConfigError(f"{key}={shown(loaded)} has no model, and a run cannot resume without its weights")


def exports_only(every: Json) -> Native:
    return {"checkpoint.interval": 0, "checkpoint.export": True, "checkpoint.export_interval": every}


def _check_critic(v: Values, saved: list[str], loaded: list[str]) -> None:
    """Policy and critic lie in one checkpoint, so what is said of the critic's must be the same."""
    for key, parts in (("save_contents", saved), ("load_contents", loaded)):
        mine = _of_actor(v, f"{CRITIC}.checkpoint.{key}")
        if set(mine) - {"hf_model"} != set(parts) - {"hf_model"}:
            raise NotSupportedYet(
                f"{CRITIC}.checkpoint.{key}={shown(mine)}: other parts than the policy's, {shown(parts)}, are coming, "
                "not built yet"
            )
    keep = v["trainer.max_critic_ckpt_to_keep"]
    if keep is not None and keep != _kept(v):
        raise NotSupportedYet(
            f"trainer.max_critic_ckpt_to_keep={shown(keep)}: policy and critic lie in one checkpoint; another number "
            "than max_actor_ckpt_to_keep is coming, not built yet"
        )


def trackers(v: Values) -> Native:
    """By the same names; metrics.jsonl is written always."""
    names = [
        choose({"trainer.logger": one}, "trainer.logger", choices("verl", "tracker"))
        for one in texts(v, "trainer.logger")
    ]
    return {"track.trackers": list(dict.fromkeys(names))}


def dumps(v: Values) -> Native:
    """STEP.jsonl in each of the two folders that is given."""
    keys = (("rollout_data_dir", "rollouts"), ("validation_data_dir", "eval"))
    return {
        f"track.dump.{native}": str(PurePath(local(v, f"trainer.{key}")) / "{step}.jsonl")
        for key, native in keys
        if v[f"trainer.{key}"] is not None
    }


DOCUMENTED = "~/experiments/gsm8k/ppo/${trainer.experiment_name}"
"""What verl's document has for default_hdfs_dir."""


def copies(v: Values) -> Native:
    """Another place for checkpoints."""
    given = v["trainer.default_hdfs_dir"]
    if given in (None, DOCUMENTED.replace("${trainer.experiment_name}", str(v["trainer.experiment_name"]))):
        return NOTHING
    return {"checkpoint.upload_to": [place(anywhere(v, "trainer.default_hdfs_dir"))]}


# ---------------------------------------------------------------- profiles

TOOLS = {"nsys": "nsys", "torch": "torch", "npu": "torch", "torch_memory": "memory"}


def profile(v: Values) -> Native:
    """The training steps that are recorded: those of global_profiler, which counts weight syncs in the fully
    asynchronous trainer, or those that hold the optimizer steps which the actor's or the reference's profiler would
    record."""
    each, folders = steps_of_a_version(v), dict[str, Json]()
    if wrong := [one for one in v["global_profiler.steps"] or [] if type(one) is not int]:
        raise ConfigError(f"global_profiler.steps: got {shown(wrong[0])}, expected numbers of steps, from 1")
    steps = {(one - 1) * each + n for one in v["global_profiler.steps"] or [] for n in range(1, each + 1)}
    tool = v["global_profiler.tool"]
    if steps and tool in TOOLS:
        return {
            "profile.steps": sorted(steps),
            "profile.tools": [TOOLS[tool]],
            "dirs.profile": v["global_profiler.save_path"],
        }
    steps = set()
    for role in (ACTOR, REF):
        at = f"{role}.profile"
        if v[f"{at}.use_profile"]:
            steps |= _training_steps(v, at)
            folders |= {f"{at}.save_path": path for path in [v[f"{at}.save_path"]] if path}
    if not steps:
        return NOTHING
    if len(set(folders.values())) > 1:
        raise ConfigError(f"{', '.join(folders)}: all traces of a run are in one folder; give the same one")
    return {
        "profile.steps": sorted(steps),
        "profile.torch": ["record_shapes", "with_stack"],
        "dirs.profile": next(iter(folders.values()), None),
    }


def _training_steps(v: Values, at: str) -> set[int]:
    """The training steps of a role's optimizer steps, which verl counts from 0."""
    first, end = v[f"{at}.step_start"], v[f"{at}.step_end"]
    if not 0 <= first < end <= first + 1000:
        raise ConfigError(
            f"{at}: step_start={first} must be at least 0, and step_end={end} larger, by at most 1000"
        )
    ranks = v[f"{at}.profile_ranks"]
    if ranks is not None and 0 not in (ranks if isinstance(ranks, list) else [ranks]):
        raise ConfigError(f"{at}.profile_ranks={ranks}: rank 0 is recorded; write [0]")
    each = mini_batches(v, ACTOR) * v[f"{ACTOR}.ppo_epochs"]
    return {step // each + 1 for step in range(first, end)}
