"""Problems of the sections about the run itself: checkpoint, track, reward_workers, imports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from whet.config import deepspeed
from whet.config.engines import SERVED, TRAIN_ENGINES, unknown_engine
from whet.config.recipes import resolve
from whet.config.schema import Config
from whet.config.secrets import MASK, is_secret, left_out, masked_url
from whet.config.trackers import TRACKERS, TrackerRow, lists_runs, shows_rollouts
from whet.config.tree import leaves
from whet.config.urls import address_problems, is_remote, url_problems
from whet.tables import is_installed, near, unknown

TIME = "{time}"
"""In run_dir and in folders that contain it: the time of the first start of the run."""

_OWNERS = {
    "project": "track.project",
    "name": "name",
    "experiment_name": "name",
    "group": "track.group",
    "tags": "track.tags",
    "dir": "run_dir",
    "logdir": "run_dir",
    "log_dir": "run_dir",
    "id": "the run itself",
    "resume": "checkpoint.resume",
    "config": "the config itself",
}
"""Arguments of the trackers that whet sets itself, and their origin."""

_OF_TRACKERS = {
    **dict.fromkeys(("project", "group", "tags"), lists_runs),
    "log_samples": shows_rollouts,
}
"""Keys of `track` that only some trackers read, and whether one of a config's does."""


def problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) in these sections of one stage's config."""
    yield from _checkpoint(cfg)
    yield from _remote_paths(cfg)
    yield from _folders(cfg)
    yield from _dumps(cfg)
    if problem := unknown_engine(cfg.rollout.engine):
        yield "rollout.engine", problem
    if problem := unknown(TRAIN_ENGINES, cfg.train.engine):
        yield "train.engine", problem
    elif cfg.train.engine not in TRAIN_ENGINES and isinstance(cfg.train.engine_arguments, str):
        yield (
            "train.engine_arguments",
            f"{cfg.train.engine_arguments!r}: expected a table with the settings of {cfg.train.engine}; a file is for "
            "train.engine=deepspeed",
        )
    yield from _servers(cfg)
    yield from _trackers(cfg)
    yield from _apart(cfg)
    for name, value in cfg.reward_workers.env.items():
        if value == MASK:
            yield (
                f"reward_workers.env.{name}",
                f"{MASK} is the mask of a secret in the config.yaml of a run; take the value from the environment: "
                f"reward_workers.env.{name}='${{oc.env:{name}}}'",
            )
        elif not name or "=" in name or "\0" in name + value:
            yield "reward_workers.env", f"{name!r} cannot be an environment variable with this value"
    for key in left_out(cfg):
        yield (
            key,
            "the config.yaml of a run leaves this secret out; give it again, best as a reference: "
            f"{key}='${{oc.env:NAME}}'",
        )
    for given in cfg.imports:
        if given.endswith(".py") and not Path(given).is_file():
            yield "imports", f"{given!r}: no such file"
        elif not given.endswith(".py") and not all(part.isidentifier() for part in given.split(".")):
            yield "imports", f"{given!r} is neither 'package.module' nor 'path/to/file.py'"


def _checkpoint(cfg: Config) -> Iterator[tuple[str, str]]:
    c = cfg.checkpoint
    for key in ("upload_to", "upload_exports_to"):
        for url in getattr(c, key):
            if not is_remote(url):
                yield (
                    f"checkpoint.{key}",
                    f"{url!r} is not a URL; for a folder of this machine give file:///PATH",
                )
            yield from ((f"checkpoint.{key}", said) for said in url_problems(url))
    if is_remote(c.resume):
        yield from (("checkpoint.resume", said) for said in url_problems(c.resume))


def _servers(cfg: Config) -> Iterator[tuple[str, str]]:
    server = cfg.rollout.server
    given = {"urls": server.urls, "proxy": () if server.proxy is None else (server.proxy,)}
    for key, urls in given.items():
        for url in urls:
            said = address_problems(url, token=server.token is not None)
            yield from ((f"rollout.server.{key}", each) for each in said)


def _remote_paths(cfg: Config) -> Iterator[tuple[str, str]]:
    """Remote paths that this machine cannot read."""
    for at, value in leaves(cfg.model_dump(mode="json", exclude={"checkpoint", "dirs", "track"})):
        names = [part for part in at if isinstance(part, str)]
        if names and names[-1] == "path" and isinstance(value, str):
            yield from ((".".join(map(str, at)), said) for said in url_problems(value))


def folders(cfg: Config) -> dict[str, str]:
    """The folders that lie elsewhere, by key."""
    return {f"dirs.{name}": folder for name, folder in cfg.dirs.items()}


def _folders(cfg: Config) -> Iterator[tuple[str, str]]:
    run, given = Path(cfg.run_dir).absolute(), folders(cfg)
    for key, text in {"run_dir": cfg.run_dir, **given}.items():
        if any(brace in text.replace(TIME, "", 1) for brace in "{}"):
            yield key, f"{text!r}: expected {TIME} at most once, and no other braces"
        elif TIME in text and TIME not in cfg.run_dir:
            yield key, f"{text!r}: {TIME} is allowed only if run_dir contains it too"
    for key, text in given.items():
        if run.is_relative_to(Path(text).absolute()):
            yield key, f"{text!r} contains run_dir ({cfg.run_dir}); leave it out, or give a separate folder"
    own = {"dirs.rollouts": run / "rollouts", "dirs.eval": run / "eval"}
    own |= {key: Path(given[key]).absolute() for key in own if key in given}
    if len(set(own.values())) < len(own):
        yield (
            next(k for k in own if k in given),
            "rollouts and evaluations write files of the same names; give two different folders",
        )


def dumps(cfg: Config) -> dict[str, str]:
    """The path templates of dumps for other programs, by key."""
    return {f"track.dump.{kind}": template for kind, template in cfg.track.dump.items()}


def _dumps(cfg: Config) -> Iterator[tuple[str, str]]:
    given = dumps(cfg)
    for key, text in given.items():
        marks = ["{step}", "{stage}", TIME, *(["{source}"] if key != "track.dump.batches" else [])]
        if key == "track.dump.replies":
            marks = []
        rest = text
        for mark in marks:
            rest = rest.replace(mark, "")
        if "{" in rest or "}" in rest:
            allowed = f"only {', '.join(marks)}, and no other braces" if marks else "no braces"
            yield key, f"{text!r}: expected {allowed}"
        elif is_remote(text):
            yield key, f"{text!r}: is a URL; expected a file on this machine"
        elif marks and "{step}" not in text:
            yield (
                key,
                f"{text!r}: has no {{step}}, so each step would overwrite the previous one; add {{step}}",
            )
        elif Path(text).suffix not in (".jsonl", ".parquet"):
            yield key, f"{text!r}: expected a name that ends in .jsonl or .parquet"
        elif TIME in text and TIME not in cfg.run_dir:
            yield key, f"{text!r}: {TIME} is allowed only if run_dir contains it too"
    if len(set(given.values())) < len(given):
        yield (
            next(iter(given)),
            f"has the same path as another dump ({', '.join(given)}); give different paths",
        )


def not_installed(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, which package is missing) on this machine; a rehearsal sends nothing and needs none of them."""
    if cfg.rollout.engine in SERVED and not is_installed("aiohttp"):
        yield (
            "rollout.engine",
            f"{cfg.rollout.engine} needs aiohttp, which is not installed; pip install 'whet[vllm]'",
        )
    for at, lora in (("model.lora", cfg.model.lora), ("critic.lora", cfg.critic.lora)):
        if lora is not None and not is_installed("peft"):
            yield at, "adapters need peft, which is not installed; pip install 'whet[lora]', or leave it out"
    if cfg.rollout.replicas and not is_installed("ray"):
        yield "rollout.replicas", "needs ray, which is not installed; pip install 'whet[ray]', or set it to 0"
    yield from deepspeed.not_installed(cfg)
    yield from _trackers_not_installed(cfg)


def _trackers_not_installed(cfg: Config) -> Iterator[tuple[str, str]]:
    packages = {name: TRACKERS[name].package for name in cfg.track.trackers if name in TRACKERS}
    gone = [name for name, package in packages.items() if package and not is_installed(package)]
    if not gone:
        return
    kept = [name for name in cfg.track.trackers if name not in gone]
    others = cfg.model_copy(update={"track": cfg.track.model_copy(update={"trackers": tuple(kept)})})
    given = cfg.track.model_fields_set
    more = [f"track.{key}" for key, is_read in _OF_TRACKERS.items() if key in given and not is_read(others)]
    more += [f"track.arguments.{name}" for name in gone if name in cfg.track.arguments]
    one = len(gone) == 1
    yield (
        "track.trackers",
        f"{', '.join(gone)} {'is' if one else 'are'} not installed; pip install 'whet[{','.join(gone)}]', or remove "
        f"{'it' if one else 'them'}: track.trackers=[{','.join(kept)}]"
        + (f", and what nothing else reads: {', '.join(more)}" if more else ""),
    )


def _trackers(cfg: Config) -> Iterator[tuple[str, str]]:
    track = cfg.track
    for name in track.trackers:
        if problem := unknown(TRACKERS, name):
            yield "track.trackers", problem
    for name, arguments in track.arguments.items():
        at, row = f"track.arguments.{name}", TRACKERS.get(name, TrackerRow(about="yours", takes=None))
        if name not in TRACKERS and name not in track.trackers:
            yield at, f"{name} is not in track.trackers{near(name, track.trackers)}"
            continue
        for key in arguments:
            if is_secret(key):
                yield (
                    f"{at}.{key}",
                    f"is a secret, which does not belong in a config: {name} reads it from the environment"
                    + (f", e.g. {row.secret}" if row.secret else ""),
                )
            elif key in _OWNERS and row.lists_runs:
                yield f"{at}.{key}", f"is set from {_OWNERS[key]}; leave it out"
            elif row.takes is not None and key not in row.takes:
                yield f"{at}.{key}", f"is unknown: {name} takes only {', '.join(row.takes) or 'no arguments'}"


def _apart(cfg: Config) -> Iterator[tuple[str, str]]:
    """Requirements of explorers and a trainer in separate processes."""
    if cfg.mode == "both":
        return
    if TIME in cfg.run_dir:
        yield (
            "run_dir",
            f"{TIME} differs between processes; with mode={cfg.mode} give all processes the same folder",
        )
    if cfg.mode == "eval" or resolve(cfg.algorithm).kind != "online":
        return
    if cfg.buffer.url != "memory" and not re.match(r"(sqlite|files):///.|postgresql://.", cfg.buffer.url):
        yield (
            "buffer.url",
            f"{masked_url(cfg.buffer.url)!r} is not a store; give sqlite:///PATH, files:///PATH or "
            "postgresql://USER@HOST/DATABASE (four slashes before an absolute path)",
        )
    if not re.fullmatch(r"\w[\w.-]*", cfg.buffer.explorer_name):
        yield (
            "buffer.explorer_name",
            f"{cfg.buffer.explorer_name!r} is used as the name of a folder: use letters, digits, _ . and - only",
        )
