"""Changes of the config that are allowed between a checkpoint and the run that resumes from it (decision 019): every
key has a class.

identity: the content of the checkpoint would be unreadable or have another meaning; the change is refused.
numbers: the run would give different numbers from here on; refused unless requested, then a branch point of the run.
free: changes no number; accepted. `rounding` is accepted too: sums have another order, so bits may differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from whet.config.derived import method_lr
from whet.config.faults import shown
from whet.config.keys import TABLES, Key, dotted, is_list, keys, lookup
from whet.config.keys import Path as At
from whet.config.recipes import with_settings
from whet.config.renamed import renamed
from whet.config.schema import AlgorithmConfig, Config, Section
from whet.config.secrets import dump, hidden
from whet.config.tree import get, stage_names, stage_tree
from whet.secrets import REDACTED, redact_tree
from whet.types import CheckpointError, Json

Class = Literal["identity", "numbers", "rounding", "free"]

CLASSES: Mapping[Class, str] = {
    "identity": """
        mode
        model.path model.scratch model.dtype model.overrides model.trust_remote_code
        model.lora.rank model.lora.alpha model.lora.rslora model.lora.targets model.lora.exclude_modules
        model.lora.fused model.lora.rank_pattern model.lora.alpha_pattern model.lora.modules_to_save model.lora.init
        model.lora.pissa_iterations model.lora.path
        tokenizer.path tokenizer.build tokenizer.vocab_size
        critic.path critic.head critic.overrides
        critic.lora.rank critic.lora.alpha critic.lora.rslora critic.lora.targets critic.lora.exclude_modules
        critic.lora.fused critic.lora.rank_pattern critic.lora.alpha_pattern critic.lora.modules_to_save
        critic.lora.init critic.lora.pissa_iterations
        critic.lora.path critic.optimizer.name critic.optimizer.state_dtype
        train.trainable train.precision.master_weights train.optimizer.name train.optimizer.state_dtype
        stages.*.name""",
    "numbers": """
        seed imports data algorithm rewards
        model.lora.dropout tokenizer.chat_template tokenizer.chat_template_kwargs tokenizer.date
        critic.lora.dropout critic.warmup_steps critic.minibatches critic.update_epochs critic.value_clip
        critic.loss_agg_mode critic.normalize_decay
        critic.optimizer.lr critic.optimizer.param_groups critic.optimizer.betas critic.optimizer.eps
        critic.optimizer.momentum critic.optimizer.weight_decay critic.optimizer.decay_all
        critic.optimizer.max_grad_norm critic.optimizer.schedule
        reference
        rollout.engine rollout.server.options rollout.server.env rollout.server.model
        rollout.quantization rollout.group_size rollout.sampling rollout.sync_interval
        rollout.max_staleness rollout.schedule rollout.partial_rollout rollout.spare_tasks
        rollout.env.make rollout.env.arguments rollout.env.max_turns rollout.env.max_cost
        rollout.env.observation_tokens rollout.env.history rollout.env.max_tokens_per
        rollout.env.tokens_after_prompt rollout.env.input_tokens rollout.env.tool_format
        buffer.replay buffer.url buffer.order sync.driven_by sync.dtype
        train.steps train.epochs train.drop_last train.tasks_per_step train.minibatches train.update_epochs
        train.shuffle_minibatches train.router_aux_loss_coef train.router_aux_loss_scope train.router_z_loss_coef
        train.temperature
        train.precision.compute train.precision.float8 train.precision.reduce train.precision.loss_scale
        train.precision.loss_scale_steps
        train.optimizer.lr train.optimizer.param_groups train.optimizer.betas train.optimizer.eps
        train.optimizer.momentum train.optimizer.weight_decay train.optimizer.decay_all train.optimizer.max_grad_norm
        train.optimizer.schedule
        eval.interval eval.interval_epochs
        stages.*.algorithm stages.*.data stages.*.rewards stages.*.rollout stages.*.buffer stages.*.train
        stages.*.critic stages.*.reference stages.*.eval""",
    "rounding": """
        critic.micro_batch_tokens critic.micro_batch_rollouts critic.gradient_checkpointing
        critic.optimizer.implementation rollout.replicas rollout.max_num_seqs
        rollout.server.lora
        train.micro_batch_tokens train.micro_batch_rollouts train.forward_micro_batch_tokens
        train.forward_micro_batch_rollouts train.share_prompts train.skip_zero_weight train.gradient_checkpointing
        train.offload train.compile
        train.optimizer.implementation
        train.parallel.dp_replicate train.parallel.dp_shard train.parallel.tp train.parallel.cp train.parallel.pp
        train.parallel.pipeline_chunks train.parallel.ep train.parallel.separate_ranks
        train.engine train.deepspeed
        machine.device machine.threads machine.logprob_parity machine.kernels machine.kv_cache_mb""",
    "free": """
        name run_dir checkpoint track profile reward_workers cluster
        rollout.retries rollout.timeout_s rollout.timeout_factor
        rollout.server.urls rollout.server.token rollout.server.command rollout.server.weights_dir
        rollout.server.canary_bound rollout.server.timeout_s rollout.server.load_timeout_s
        rollout.server.start_timeout_s rollout.server.restarts rollout.server.sleep
        rollout.env.timeout_s rollout.env.hosts rollout.env.memory_mb
        buffer.lease_s buffer.explorer_name sync.method sync.content sync.timeout_s sync.keep
        train.parallel.reshard_after_forward train.parallel.wrap_min_num_params train.parallel.prefetch
        train.parallel.timeout_s train.max_skipped_steps train.early_stopping
        eval.at_start eval.at_end eval.samples eval.sampling eval.sources eval.success eval.reward eval.log_samples
        eval.offline
        machine.memory_mb machine.watchdog_timeout_s""",
}
"""Every key of the schema is in one row, itself or by its section. A key in a stage has the same class as in the base
config."""

LENGTH = ("train.steps", "train.epochs")
SOURCES = (("data", "train"), ("data", "demonstrations"), ("data", "eval"))
"""Data that a tokenizer of `tokenizer.build` is built from."""
MOST_TOLD = 8
"""Maximum number of changes that an error lists."""


def _no_schedule_ends(stage: Json) -> bool:
    """Whether no learning rate or weight decay of a stage depends on its length."""
    schedules = [get(stage, (whose, "optimizer", "schedule")) or {} for whose in ("train", "critic")]
    return not any(
        s.get("weight_decay_end") is not None
        or (
            s.get("total_steps") is None
            and (s.get("type") in ("linear", "cosine", "wsd") or s.get("warmup_ratio"))
        )
        for s in schedules
    )


def _every_step_syncs(stage: Json) -> bool:
    """Whether every step syncs weights, so that an evaluation, which needs current weights, adds no sync."""
    return (get(stage, ("rollout", "sync_interval")) or 1) == 1


FREE_WHERE: Mapping[str, Callable[[Json], bool]] = {
    **dict.fromkeys(LENGTH, _no_schedule_ends),
    **dict.fromkeys(("eval.interval", "eval.interval_epochs"), _every_step_syncs),
}
"""Keys of the row `numbers` that change no number in a stage for which the function returns True."""


@cache
def _rows() -> dict[str, Class]:
    return {key: kind for kind, row in CLASSES.items() for key in row.split()}


@cache
def class_of(path: tuple[str, ...]) -> Class:
    """The class of a key of the schema (with a star for names and indices); for a section the strictest class in it."""
    named = [".".join(path[:n]) for n in range(1, len(path) + 1)]
    if found := [_rows()[name] for name in named if name in _rows()]:
        return found[0]
    inner = {class_of(key.path) for key in keys().values() if key.path[:-1] == path}
    return next(kind for kind in CLASSES if kind in inner)


@dataclass(frozen=True)
class Change:
    """A changed key."""

    at: At
    """Its path, without a stage."""
    old: Json
    new: Json
    kind: Class
    stage: str | None = None
    """The stage of the change; None: all stages, or the run."""

    @property
    def key(self) -> str:
        """The key in the form of an override."""
        return dotted(self.at) if self.stage is None else f"stages.{self.stage}.{dotted(self.at)}"

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


# ---------------------------------------------------------------- comparing


def fingerprint(cfg: Config) -> Json:
    """The part of a config that a checkpoint stores: all keys that are not free, so equal runs write equal bytes."""
    values = dump(cfg)
    return _kept({**values, "algorithm": with_settings(values["algorithm"])}, ())


def played_by(printed: Json) -> Json:
    """A fingerprint without keys that may change on resume: equal values mean equal rollouts."""
    return _without(printed, {tuple(key.split(".")) for key in FREE_WHERE}, ())


def _without(tree: Json, keys: set[tuple[str, ...]], at: At) -> Json:
    if not isinstance(tree, dict):
        return [_without(each, keys, ()) for each in tree] if at == ("stages",) else tree
    return {k: _without(v, keys, (*at, k)) for k, v in tree.items() if (*at, k) not in keys}


def _kept(tree: Json, at: At) -> Json:
    if isinstance(tree, list):
        return [_kept(value, (*at, n)) for n, value in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    known = {name: lookup((*at, name)) for name in tree}
    return {
        name: _kept(value, (*at, name))
        for name, value in tree.items()
        if (key := known[name]) is None or class_of(key.path) in ("identity", "numbers")
    }


def changes(old: Json, new: Json) -> list[Change]:
    """Changes between two configs as plain values, by stage, listed once where all stages agree.

    A missing key has its default; keys that are not in the schema come from another version of whet and are ignored.
    A stage that only one config has is one change, of `stages`.
    """
    was, now = _stages(redact_tree(hidden(renamed(old)[0]))), _stages(redact_tree(hidden(new)))
    both = [name for name in now if name in was]
    found = [replace(c, stage=name) for name in both for c in _differences(was[name], now[name], ())]
    kinds = {n: _kind(c, now[c.stage]) for n, c in enumerate(found) if c.stage is not None}
    found = [replace(c, kind=kinds[n]) for n, c in enumerate(found)]
    alike: dict[str, list[Change]] = {}
    for change in found:
        alike.setdefault(repr((change.at, change.old, change.new, change.kind)), []).append(change)
    out = [
        each
        for same in alike.values()
        for each in ([replace(same[0], stage=None)] if len(same) == len(both) else same)
    ]
    if list(was) != list(now):
        out.append(Change(("stages",), list(was), list(now), "numbers"))
    return out


def _stages(tree: Json) -> dict[str, Json]:
    """The whole config of each stage, by name, its algorithm with all settings."""
    names = stage_names(tree) or ["main"]
    stages = (stage_tree(tree, stage) for stage in tree.get("stages") or [{}])
    return {
        name: {**_with_lr(stage), "algorithm": with_settings(stage.get("algorithm") or {})}
        for name, stage in zip(names, stages)
    }


def _with_lr(stage: dict[str, Json]) -> dict[str, Json]:
    """The stage with the learning rate of its method where it has none."""
    at = ("train", "optimizer", "lr")
    if get(stage, at) is not None:
        return stage
    algorithm = AlgorithmConfig.model_validate_json(json.dumps(stage.get("algorithm") or {}))
    lr = method_lr(algorithm, lora=get(stage, ("model", "lora")) is not None)
    optimizer = {**(get(stage, at[:2]) or {}), "lr": lr}
    return {**stage, "train": {**(stage.get("train") or {}), "optimizer": optimizer}}


def _differences(old: Json, new: Json, at: At) -> Iterator[Change]:
    if old == new or _agree(old, new):
        return
    key = lookup(at)
    section = not at or (key is not None and key.section is not None)
    if section and isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*new, *old]):
            if name != "stages" and (inner := lookup((*at, name))) is not None:
                default = _default(inner)
                yield from _differences(old.get(name, default), new.get(name, default), (*at, name))
    elif at in TABLES and isinstance(old, dict) and isinstance(new, dict) and old["name"] == new["name"]:
        for name in dict.fromkeys([*new, *old]):
            if old.get(name) != new.get(name):
                yield Change((*at, name), old.get(name), new.get(name), class_of((*map(str, at), name)))
    elif (
        section
        and key
        and is_list(key)
        and isinstance(old, list)
        and isinstance(new, list)
        and len(old) == len(new)
    ):
        for n, (a, b) in enumerate(zip(old, new)):
            yield from _differences(a, b, (*at, n))
    else:
        assert key is not None
        yield Change(at, old, new, class_of(key.path))


def _agree(a: Json, b: Json) -> bool:
    """Whether two texts are equal except for secrets, which one process may know and another may not."""
    if not isinstance(a, str) or not isinstance(b, str):
        return False
    return any(
        REDACTED.search(struck) is not None
        and re.fullmatch(".*".join(map(re.escape, REDACTED.split(struck))), other, re.DOTALL) is not None
        for struck, other in ((a, b), (b, a))
    )


def _default(key: Key) -> Json:
    """The default of a key as plain values; null where there is none."""

    def plain(value: Any) -> Json:
        assert isinstance(value, Section)
        return value.model_dump(mode="json")

    return json.loads(json.dumps(key.default, default=plain))


def _kind(change: Change, stage: Json) -> Class:
    """The class of a change in a stage with these present values."""
    free = FREE_WHERE.get(dotted(change.at))
    if free is not None and free(stage):
        return "free"
    return change.kind


def _rebuilds(change: Change, path: Path, now: Json) -> bool:
    """Whether a change of the data changes the tokens: the checkpoint is of a version that did not keep the tokenizer
    that was built from it."""
    built = get(now, ("tokenizer", "build")) is not None
    return built and change.at[:2] in SOURCES and not (path / "tokenizer.json").is_file()


# ---------------------------------------------------------------- resuming


def taken(
    path: Path, saved: Json, cfg: Config, *, at: tuple[str, int], change: bool, over: bool = False
) -> list[Change]:
    """The changes since the checkpoint `path` that change numbers; CheckpointError for changes that are not allowed.

    saved: the `fingerprint` in the checkpoint. at: its stage and step. change: the user requested the changes. over:
    the run is finished, so its results would not be those of the changed config, whoever requests that.
    """
    now = fingerprint(cfg)
    found = [c for c in changes(saved, now) if _remembered(c)]  # an older version stored more
    _check_length(path, now, at)
    found = [replace(c, kind="identity") if _rebuilds(c, path, now) else c for c in found]
    refused = [
        c for c in found if c.kind == "identity" or (c.kind == "numbers" and not (change and not over))
    ]
    if refused:
        held = any(c.kind == "identity" for c in refused)
        raise CheckpointError((finished_with_others if over and not held else _refusal)(path, refused))
    return found


def other_code(was: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """The files of the user's code that both starts have, and that differ: digests by file, as `code.digests` gives."""
    return [
        Change((f"code of {file!r}",), was[file], now[file], "numbers")
        for file in now
        if file in was and was[file] != now[file]
    ]


def finished_with_others(path: Path, found: Sequence[Change]) -> str:
    """The message for a finished run whose settings or code differ from those that are given now."""
    return (
        f"{path} holds a finished run with different settings or code, so its results are not those of this config: "
        f"{_listed(found)}. Give another run_dir; or checkpoint.resume=fresh, which moves that run aside; or more "
        "train.steps with `whet train --change` (in Python change=True), which continues that run as a branch"
    )


def _remembered(change: Change) -> bool:
    """Whether a fingerprint contains the key of the change."""
    return change.kind in ("identity", "numbers") or dotted(change.at) in FREE_WHERE


def _check_length(path: Path, now: Json, at: tuple[str, int]) -> None:
    stage, step = at
    steps = get(_stages(now).get(stage), ("train", "steps"))
    if steps is not None and steps < step:
        raise CheckpointError(
            f"{path} is at step {step} of stage {stage!r}, but train.steps={steps} ends before it: set at least "
            f"{step}, or resume from an older checkpoint with checkpoint.resume=PATH"
        )


def _refusal(path: Path, refused: Sequence[Change]) -> str:
    """The message with the keys that must not change, and the remedy for each class."""
    parts = [f"{path} was written by a run with a different config"]
    held = [c for c in refused if c.kind == "identity"]
    if held:
        parts.append(
            f"it could not be read, or would have a different meaning, with {_listed(held)}: give the old value, or "
            "start a new run in another run_dir"
        )
    if other := [c for c in refused if c.kind == "numbers"]:
        parts.append(
            f"the run would give different numbers from here on with {_listed(other)}: `whet train --change` (in "
            "Python change=True) resumes anyway, as a branch that manifest.json records; or give the old value, which "
            "is in config.yaml of that run"
        )
    return "; ".join(parts)


def _listed(changes: Sequence[Change]) -> str:
    more = f" and {len(changes) - MOST_TOLD} more" if len(changes) > MOST_TOLD else ""
    return ", ".join(map(str, changes[:MOST_TOLD])) + more


def free_changes(before: Json, now: Json) -> list[Change]:
    """The changes between two starts of a run, from their config.yaml, that change no number."""
    return [c for c in changes(before, now) if not _remembered(c)]


def longer(saved: Json, cfg: Config, stage: str) -> bool:
    """Whether the length of a stage changed since a checkpoint with the fingerprint `saved`."""
    found = changes(saved, fingerprint(cfg))
    return any(dotted(c.at) in LENGTH for c in found if c.stage in (None, stage))
