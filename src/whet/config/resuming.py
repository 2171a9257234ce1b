"""Changes of the config that are allowed between a checkpoint and the run that resumes from it (decision 019): every
key has a class.

identity: the content of the checkpoint would be unreadable or have another meaning; the change is refused.
numbers: the run would give different numbers from here on; refused unless requested, then a branch point of the run.
free: changes no number; accepted. `rounding` is accepted too: sums have another order, so bits may differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from whet.config.derived import method_lr
from whet.config.faults import shown_change
from whet.config.keys import TABLES, Key, column, dotted, is_list, keys, lookup
from whet.config.keys import Path as At
from whet.config.recipes import with_settings
from whet.config.schema import AlgorithmConfig, Config, Section
from whet.config.secrets import MASK, dump, hidden
from whet.config.tree import get, stage_names, stage_tree, without
from whet.secrets import REDACTED, may_be_masked, parts, redact_tree
from whet.types import CheckpointError, Json

Class = Literal["identity", "numbers", "rounding", "free"]
"""Strictest first. Every key of the schema has one in `keys.tsv`, itself or by its section; in a stage it has the same
as in the base config."""

_CLASSES = column("resume")

RESUME = {
    "auto": "Resume the run in the run directory, if there is one.",
    "never": "Refuse a run directory that holds a run.",
    "fresh": "Move the existing files aside and start a new run.",
}
"""What checkpoint.resume may be beside the path of a checkpoint."""

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
            and (s.get("type") in ("linear", "cosine", "wsd") or 0 < (s.get("warmup_steps") or 0) < 1)
        )
        for s in schedules
    )


def _every_step_syncs(stage: Json) -> bool:
    """Whether every step syncs weights, so that an evaluation, which needs current weights, adds no sync."""
    return (get(stage, ("rollout", "sync_interval")) or 1) == 1


FREE_WHERE: Mapping[str, Callable[[Json], bool]] = {
    **dict.fromkeys(LENGTH, _no_schedule_ends),
    "eval.interval": _every_step_syncs,
}
"""Keys of the class `numbers` that change no number in a stage for which the function returns True."""


def _end_shows(stage: Json, left: int) -> bool:
    """Whether a stage was computed otherwise because it ended `left` steps later: steps after its end were not sampled
    ahead, and the last step synced weights that were not due. (Asynchronous sampling depends on timing anyway.)"""
    rollout = stage.get("rollout") or {}
    ahead = (rollout.get("max_staleness") or 0) if rollout.get("schedule") != "async" else 0
    return left < ahead or (left == 0 and not _every_step_syncs(stage))


@cache
def class_of(path: tuple[str, ...]) -> Class:
    """The class of a key of the schema (with a star for names and indices); for a section the strictest class in it."""
    named = [".".join(path[:n]) for n in range(1, len(path) + 1)]
    if found := [_CLASSES[name] for name in named if name in _CLASSES]:
        return found[0]  # type: ignore[return-value]
    inner = {class_of(key.path) for key in keys().values() if key.path[:-1] == path}
    return next(kind for kind in get_args(Class) if kind in inner)


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
        return f"{self.key}: {shown_change(self.old, self.new)}"


# ---------------------------------------------------------------- comparing


def fingerprint(cfg: Config) -> Json:
    """The part of a config that a checkpoint stores: all keys that are not free, so equal runs write equal bytes."""
    values = dump(cfg)
    return _kept(with_settings(values), ())


def played_by(printed: Json) -> Json:
    """A fingerprint without keys that may change on resume: equal values mean equal rollouts."""
    free: list[At] = [tuple(key.split(".")) for key in FREE_WHERE]
    stages = range(len(printed.get("stages") or ()))
    return without(printed, {*free, *(("stages", n, *path) for n in stages for path in free)})


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
    was, now = _stages(redact_tree(hidden(old))), _stages(redact_tree(hidden(new)))
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
    """The whole config of each stage, by name, all settings of its names filled in."""
    names = stage_names(tree) or ["main"]
    stages = (stage_tree(tree, stage) for stage in tree.get("stages") or [{}])
    return {name: with_settings(_with_lr(stage)) for name, stage in zip(names, stages)}


def _with_lr(stage: dict[str, Json]) -> dict[str, Json]:
    """The stage with the learning rate of its method where it has none."""
    at = ("train", "optimizer", "lr")
    if get(stage, at) is not None:
        return stage
    try:
        algorithm = AlgorithmConfig.model_validate_json(json.dumps(stage.get("algorithm") or {}))
    except ValidationError:  # of another version of whet, whose methods are not known here
        return stage
    lr = method_lr(algorithm, lora=get(stage, ("model", "lora")) is not None)
    optimizer = {**(get(stage, at[:2]) or {}), "lr": lr}
    return {**stage, "train": {**(stage.get("train") or {}), "optimizer": optimizer}}


def _differences(old: Json, new: Json, at: At) -> Iterator[Change]:
    if old == new or _agree(old, new, str(at[-1]) if at else ""):
        return
    key = lookup(at)
    section = not at or (key is not None and key.section is not None)
    if section and isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*new, *old]):
            if name != "stages" and (inner := lookup((*at, name))) is not None:
                default = _default(inner)
                yield from _differences(old.get(name, default), new.get(name, default), (*at, name))
    elif (
        at in TABLES
        and isinstance(old, dict)
        and isinstance(new, dict)
        and old.get("name") == new.get("name")
    ):
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


def _agree(old: Json, new: Json, name: str) -> bool:
    """Whether two values are equal except for secrets, which one process may know and another may not, and for what
    an earlier release took for one. name: of the key that they stand at."""
    if old == new:
        return True
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_agree(old[key], new[key], key) for key in new)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_agree(a, b, name) for a, b in zip(old, new))
    if old == MASK and may_be_masked(name):
        return not isinstance(new, dict | list)
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    return _fits(_gaps(old), new) or _fits(_gaps(new, masks=False), old)


def _gaps(text: str, *, masks: bool = True) -> list[str]:
    """What a text has around the secrets that were struck from it. masks: those that a config's text names, too."""
    masked = [span for span in parts(text, words=True) if text[slice(*span)] == MASK] if masks else []
    spans = sorted([*(m.span() for m in REDACTED.finditer(text)), *masked])
    ends = [0, *(end for _, end in spans)]
    return [text[a:b] for a, b in zip(ends, [*(start for start, _ in spans), len(text)])]


def _fits(around: Sequence[str], text: str) -> bool:
    """Whether a text is this with something in each gap."""
    if len(around) < 2 or not text.startswith(around[0]):
        return False
    at = len(around[0])
    for part in around[1:-1]:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return text.endswith(around[-1]) and len(text) - len(around[-1]) >= at


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
    path: Path,
    saved: Json,
    cfg: Config,
    *,
    at: tuple[str, int],
    change: bool,
    left: int | None = None,
    over: bool = False,
) -> list[Change]:
    """The changes since the checkpoint `path` that change numbers; CheckpointError for changes that are not allowed.

    saved: the `fingerprint` in the checkpoint. at: its stage and step. left: the steps that the stage had after it.
    change: the user requested the changes. over: the run is finished, so its results would not be those of the changed
    config, whoever requests that.
    """
    now = fingerprint(cfg)
    found = [c for c in changes(saved, now) if _remembered(c)]  # an older version stored more
    _check_length(path, now, at)
    stage = _stages(now).get(at[0])
    if stage is not None and left is not None and _end_shows(stage, left):
        found = [
            replace(c, kind="numbers") if dotted(c.at) in LENGTH and c.stage in (None, at[0]) else c
            for c in found
        ]
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
