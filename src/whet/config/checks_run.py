"""What cannot work in the sections about the run itself: checkpoint, track, guard, imports."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from whet.config.recipes import resolve
from whet.config.schema import Config, Profile
from whet.config.secrets import MASK, is_secret, left_out, masked_url
from whet.config.trackers import TRACKERS, Row, unknown
from whet.config.tree import leaves
from whet.config.urls import is_remote, url_problems
from whet.tables import near

TIME = "{time}"
"""In run_dir, and in folders that are named after it: the moment of the run's first start."""

_OWNERS = {
    "project": "track.project",
    "name": "name",
    "experiment_name": "name",
    "group": "track.group",
    "tags": "track.tags",
    "dir": "run_dir",
    "logdir": "run_dir",
    "id": "the run itself",
    "resume": "checkpoint.resume",
    "config": "the config itself",
}
"""Arguments of the trackers that whet gives, and what they are made of."""


def problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) in these sections of one stage's config."""
    yield from _checkpoint(cfg)
    yield from _remote_paths(cfg)
    yield from _folders(cfg)
    yield from _dumps(cfg)
    yield from _trackers(cfg)
    yield from _profile(cfg)
    yield from _apart(cfg)
    yield from _replay(cfg)
    if cfg.rollout.replicas and cfg.cluster.health_timeout_s >= cfg.rollout.timeout_s:
        yield (
            "cluster.health_timeout_s",
            f"{cfg.cluster.health_timeout_s:g} is not below rollout.timeout_s ({cfg.rollout.timeout_s:g}): what a "
            "hanging replica was asked would have failed before it is asked elsewhere",
        )
    for name, value in cfg.reward_workers.env.items():
        if value == MASK:
            yield (
                f"reward_workers.env.{name}",
                f"{MASK} stands where a run's config.yaml leaves a secret out; take the value from the environment: "
                f"reward_workers.env.{name}='${{oc.env:{name}}}'",
            )
        elif not name or "=" in name or "\0" in name + value:
            yield "reward_workers.env", f"{name!r} cannot name an environment variable with the value given"
    for key in left_out(cfg):
        yield (
            key,
            "a secret was left out here when a run's config.yaml was written; give it again, best as a reference: "
            f"{key}='${{oc.env:NAME}}'",
        )
    for given in cfg.imports:
        if given.endswith(".py") and not Path(given).is_file():
            yield "imports", f"{given!r}: no such file"
        elif not given.endswith(".py") and not all(part.isidentifier() for part in given.split(".")):
            yield "imports", f"{given!r} is neither 'package.module' nor 'path/to/file.py'"


def _replay(cfg: Config) -> Iterator[tuple[str, str]]:
    replay, free = cfg.buffer.replay, cfg.rollout.schedule == "async"
    if replay.queue:
        if not free:
            yield (
                "buffer.replay.queue",
                "with rollout.schedule=deterministic a step waits for its own tasks, so nothing can be drawn before "
                "they are there; set rollout.schedule=async, or take buffer.replay.share",
            )
        if replay.capacity < cfg.train.tasks_per_step:
            yield (
                "buffer.replay.capacity",
                f"{replay.capacity} groups are less than a step draws: train.tasks_per_step={cfg.train.tasks_per_step}",
            )
        if resolve(cfg.algorithm).refill == "copy":
            yield "algorithm.refill", "with buffer.replay.queue=true a step is always full; leave copy out"
        return
    ahead = cfg.rollout.max_staleness and not free
    if replay.share and (ahead or (free and cfg.mode != "both")):
        yield (
            "buffer.replay.share",
            "what is drawn again is known once the step before is done, so it goes with rollout.max_staleness=0, or "
            "mode=both and rollout.schedule=async",
        )
    if replay.share and replay.cooldown_steps is None:
        yield (
            "buffer.replay.cooldown_steps",
            "null: nothing is drawn again, so there is no share; set share to 0",
        )


def _checkpoint(cfg: Config) -> Iterator[tuple[str, str]]:
    c = cfg.checkpoint
    for key, parts in (("save_contents", c.save_contents), ("load_contents", c.load_contents)):
        if "model" not in parts:
            yield (
                f"checkpoint.{key}",
                f"{list(parts)} has no model, and without its weights no run goes on; add it (a run always ends with "
                "a checkpoint, checkpoint.interval=0 writes no other)",
            )
    for key in ("upload_to", "upload_exports_to"):
        for url in getattr(c, key):
            if not is_remote(url):
                yield (
                    f"checkpoint.{key}",
                    f"{url!r} is no URL; for a folder of this machine give file:///PATH",
                )
            yield from ((f"checkpoint.{key}", said) for said in url_problems(url))
    if is_remote(c.resume):
        yield from (("checkpoint.resume", said) for said in url_problems(c.resume))


def _remote_paths(cfg: Config) -> Iterator[tuple[str, str]]:
    """Paths that stand elsewhere and cannot be read from here."""
    for at, value in leaves(cfg.model_dump(mode="json", exclude={"checkpoint", "track"})):
        names = [part for part in at if isinstance(part, str)]
        if names and names[-1] == "path" and isinstance(value, str):
            yield from ((".".join(map(str, at)), said) for said in url_problems(value))


NEEDS_CUDA = "only CUDA has an allocator with a history, and ranges that nsys sees; use tools=[torch]"


def needs_cuda(cfg: Profile) -> list[str]:
    """The tools that need CUDA."""
    return [tool for tool in cfg.tools if tool in ("memory", "nsys")]


def _profile(cfg: Config) -> Iterator[tuple[str, str]]:
    tools, key = cfg.profile.tools, "profile.tools"
    if cfg.profile.steps and not tools:
        yield key, "[] records nothing; name one, or leave profile.steps out"
    if cfg.machine.device == "cpu" and (wanting := needs_cuda(cfg.profile)):
        yield key, f"{', '.join(wanting)}: {NEEDS_CUDA}; machine.device is cpu"
    if {"torch", "nsys"} <= set(tools):
        yield (
            key,
            "torch and nsys both read the GPU through CUPTI, which serves one at a time; name one of the two",
        )


def folders(cfg: Config) -> dict[str, str]:
    """The folders that the config gives, by their key."""
    c, t = cfg.checkpoint, cfg.track
    given = {
        "checkpoint.dir": c.dir,
        "checkpoint.export_dir": c.export_dir,
        "track.rollouts_dir": t.rollouts_dir,
        "track.eval_dir": t.eval_dir,
        "profile.dir": cfg.profile.dir,
    }
    return {key: folder for key, folder in given.items() if folder is not None}


def _folders(cfg: Config) -> Iterator[tuple[str, str]]:
    run, given = Path(cfg.run_dir).absolute(), folders(cfg)
    for key, text in {"run_dir": cfg.run_dir, **given}.items():
        if any(brace in text.replace(TIME, "", 1) for brace in "{}"):
            yield key, f"{text!r}: {TIME} may stand in it, once, and no other braces"
        elif TIME in text and TIME not in cfg.run_dir:
            yield key, f"{text!r}: {TIME} has a meaning only where run_dir has it, too"
    for key, text in given.items():
        if run.is_relative_to(Path(text).absolute()):
            yield key, f"{text!r} holds run_dir ({cfg.run_dir}); leave it out, or give a folder of its own"
    own = {"track.rollouts_dir": run / "rollouts", "track.eval_dir": run / "eval"}
    own |= {key: Path(given[key]).absolute() for key in own if key in given}
    if len(set(own.values())) < len(own):
        yield (
            next(k for k in own if k in given),
            "rollouts and evaluations have files of the same names; part them",
        )


def dumps(cfg: Config) -> dict[str, str]:
    """The templates of files for other programs, by their key."""
    t = cfg.track
    given = {
        "track.rollouts_dump": t.rollouts_dump,
        "track.eval_dump": t.eval_dump,
        "track.batches_dump": t.batches_dump,
    }
    return {key: template for key, template in given.items() if template is not None}


def _dumps(cfg: Config) -> Iterator[tuple[str, str]]:
    given = dumps(cfg)
    for key, text in given.items():
        marks = ["{step}", "{stage}", TIME, *(["{source}"] if key != "track.batches_dump" else [])]
        rest = text
        for mark in marks:
            rest = rest.replace(mark, "")
        if "{" in rest or "}" in rest:
            yield key, f"{text!r}: {', '.join(marks)} may stand in it, and no other braces"
        elif "{step}" not in text:
            yield key, f"{text!r}: put {{step}} into it, or each step writes over the one before"
        elif Path(text).suffix not in (".jsonl", ".parquet"):
            yield key, f"{text!r}: expected a name that ends in .jsonl or .parquet"
        elif TIME in text and TIME not in cfg.run_dir:
            yield key, f"{text!r}: {TIME} has a meaning only where run_dir has it, too"
    if len(set(given.values())) < len(given):
        yield next(iter(given)), f"the same path as that of another dump ({', '.join(given)}); part them"


def not_installed(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, which package is missing) of this machine; a rehearsal sends nothing and does without."""
    if cfg.rollout.replicas and importlib.util.find_spec("ray") is None:
        yield "rollout.replicas", "needs ray, which is not installed; pip install 'whet[ray]', or set it to 0"
    for name in cfg.track.trackers:
        package = TRACKERS[name].package if name in TRACKERS else ""
        if package and importlib.util.find_spec(package) is None:
            yield (
                "track.trackers",
                f"names {name}, which is not installed; pip install 'whet[{name}]', or go without it: "
                f"track.trackers=[{','.join(one for one in cfg.track.trackers if one != name)}]",
            )


def _trackers(cfg: Config) -> Iterator[tuple[str, str]]:
    track = cfg.track
    yield from unknown(cfg)
    for name, arguments in track.arguments.items():
        at, row = f"track.arguments.{name}", TRACKERS.get(name, Row(about="yours", takes=None))
        if name not in TRACKERS and name not in track.trackers:
            yield at, f"no tracker of track.trackers{near(name, track.trackers)}"
            continue
        for key in arguments:
            if is_secret(key):
                yield (
                    f"{at}.{key}",
                    f"secrets stay out of configs: {name} reads them from the environment"
                    + (f", e.g. {row.secret}" if row.secret else ""),
                )
            elif key in _OWNERS and row.lists_runs:
                yield f"{at}.{key}", f"is made of {_OWNERS[key]}; leave it out"
            elif row.takes is not None and key not in row.takes:
                yield f"{at}.{key}", f"{name} takes {', '.join(row.takes) or 'no arguments'} only"


def _apart(cfg: Config) -> Iterator[tuple[str, str]]:
    """What processes that explore and train apart need."""
    if cfg.mode == "both":
        return
    if TIME in cfg.run_dir:
        yield (
            "run_dir",
            f"{TIME} in it is another moment in every process; with mode={cfg.mode} give one folder to all",
        )
    if cfg.mode == "eval":
        if not cfg.data.eval:
            yield "data.eval", "mode=eval evaluates checkpoints, and there is nothing to evaluate on"
        return
    if resolve(cfg.algorithm).kind != "online":
        return
    if cfg.buffer.url == "memory":
        yield (
            "buffer.url",
            f"memory is in one process, and mode={cfg.mode} needs a place that all see: sqlite:///PATH, "
            "files:///PATH or postgresql://USER@HOST/DATABASE",
        )
    elif not re.match(r"(sqlite|files):///.|postgresql://.", cfg.buffer.url):
        yield (
            "buffer.url",
            f"{masked_url(cfg.buffer.url)!r} is not a store; give sqlite:///PATH, files:///PATH or "
            "postgresql://USER@HOST/DATABASE (four slashes before a path from the root)",
        )
    if resolve(cfg.algorithm).refill == "copy" and cfg.rollout.schedule == "async":
        yield (
            "algorithm.refill",
            "copy needs to know a step's tasks: set rollout.schedule=deterministic, or mode=both",
        )
    if not re.fullmatch(r"\w[\w.-]*", cfg.buffer.explorer_name):
        yield (
            "buffer.explorer_name",
            f"{cfg.buffer.explorer_name!r} becomes a folder's name: letters, digits, _ . and - are safe",
        )
