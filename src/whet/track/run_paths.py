"""Where a run writes: its directory, and the folders that the config puts elsewhere.

A folder that lies elsewhere (`dirs`) is a link in the run directory, so all that reads a run finds it in one place. It
belongs to one run, named in its file `.whet-run`: a run deletes files later than the checkpoint that it resumes
from, and must not delete files of another run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from whet.config.checks_run import TIME
from whet.config.schema import Config
from whet.track.files import file_error, write_text
from whet.types import ConfigError

_OWNER = ".whet-run"
_STAMP = "%Y%m%d-%H%M%S"


def now() -> str:
    """The moment, UTC, as it stands in names: 20260131-235959. Later ones sort later."""
    return datetime.now(UTC).strftime(_STAMP)


def stamp_after(earlier: Sequence[str]) -> str:
    """The moment for the name of a new run: now, or the second after the last of the earlier runs where the clock has
    not come so far: the last by name is the one that resumes."""
    moment = now()
    if not earlier or earlier[-1] < moment:
        return moment
    try:
        return (datetime.strptime(earlier[-1], _STAMP) + timedelta(seconds=1)).strftime(_STAMP)
    except (ValueError, OverflowError):  # digits that are no moment
        return moment


def stamps(run_dir: str) -> list[str]:
    """The moments of the runs that are there already under a run_dir with {time}, oldest first."""
    before, _, after = Path(run_dir).as_posix().partition(TIME)
    start, _, prefix = before.rpartition("/")
    suffix, _, rest = after.partition("/")
    name = re.compile(re.escape(prefix) + r"(\d{8}-\d{6})" + re.escape(suffix))
    root = Path(start or ("/" if before.startswith("/") else "."))
    found = [(p, m[1]) for p in root.glob("*") if (m := name.fullmatch(p.name))]
    return sorted(stamp for p, stamp in found if (p / rest).is_dir())


def stamped(cfg: Config, stamp: str) -> Config:
    """The config with {time} replaced in run_dir, in all folders and dumps."""

    def filled(given: Mapping[Any, str]) -> dict[Any, str]:
        return {name: text.replace(TIME, stamp) for name, text in given.items()}

    track = cfg.track.model_copy(update={"dump": filled(cfg.track.dump)})
    changed = {"run_dir": cfg.run_dir.replace(TIME, stamp), "dirs": filled(cfg.dirs), "track": track}
    return cfg.model_copy(update=changed)


def checkpoints(cfg: Config) -> Path:
    """Where checkpoints lie, whether or not the link to them is there."""
    return Path(cfg.dirs.get("checkpoints") or Path(cfg.run_dir) / "checkpoints")


def holds_run(cfg: Config) -> bool:
    """Whether this run has written any records."""
    run_dir, saved = Path(cfg.run_dir).resolve(), checkpoints(cfg)
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size > 0:
        return True
    return _is_of(saved.resolve(), run_dir) and any(saved.glob("*/manifest.json"))


def attach(cfg: Config) -> None:
    """Make the folders that the config puts elsewhere, and link them. Call it holding the run's lock.

    ConfigError if one belongs to another run, or if this run's files lie at another place already, or if a link leads
    out of the run directory to a folder that is not marked as this run's.
    """
    run_dir = Path(cfg.run_dir).resolve()
    for name, given in cfg.dirs.items():
        link, target, key = run_dir / name, Path(given).resolve(), f"dirs.{name}"
        if link == target:
            continue
        try:
            target.mkdir(parents=True, exist_ok=True)
            _claim(target, run_dir, key)
            _link(link, target, key)
        except OSError as e:
            raise file_error(e, target, other=f"{key} another folder") from e
    check_inside(run_dir)


def check_link(path: Path, run_dir: Path) -> None:
    """ConfigError if a folder of a run is a link to one that is not the run's. The run directory may come from
    elsewhere, and the run would write and delete files there."""
    if path.is_symlink() and path.is_dir() and not _is_of(target := path.resolve(), run_dir.resolve()):
        raise ConfigError(
            f"{path} is a link to {target}, which is not marked as this run's; the run would write and delete files "
            f"there. Delete the link (`whet explain dirs` says how to put folders elsewhere), or, if they are this "
            f"run's files, write {run_dir.resolve()} into {target / _OWNER}"
        )


def check_inside(folder: Path) -> None:
    """The same for all folders in one."""
    for path in sorted(folder.glob("*")):
        check_link(path, folder)


def check_way(folder: Path, home: Path) -> None:
    """The same for a place below the run directory `home`, before anything is written there."""
    for path in (folder, *folder.parents):
        if path != home and path.is_relative_to(home):
            check_link(path, home)


def _is_of(target: Path, run_dir: Path) -> bool:
    """Whether a folder lies in the run directory, or is marked as this run's."""
    owner = target / _OWNER
    return target.is_relative_to(run_dir) or (owner.is_file() and _run_in(owner) == str(run_dir))


def _run_in(owner: Path) -> str:
    """The run that a folder is marked as of."""
    return owner.read_text(encoding="utf-8").strip()


def run_of(checkpoint: Path) -> Path:
    """The run directory of a checkpoint, by its path, or by the mark of a folder that lies elsewhere (`dirs`)."""
    by_path, owner = checkpoint.absolute().parents[1], checkpoint.parent / _OWNER
    marked = not (by_path / "manifest.json").is_file() and owner.is_file()
    return Path(_run_in(owner)) if marked else by_path


def _claim(target: Path, run_dir: Path, key: str) -> None:
    owner = target / _OWNER
    if _is_of(target, run_dir):
        return
    if owner.exists():
        raise ConfigError(
            f"{key}={target} belongs to the run in {_run_in(owner)}; give each run a separate folder (if "
            f"that run is now this one, write {run_dir} into {owner})"
        )
    if any(target.iterdir()):
        raise ConfigError(
            f"{key}={target} has files of another origin; give each run a separate folder (if they are this run's, "
            f"write {run_dir} into {owner})"
        )
    write_text(owner, f"{run_dir}\n")


def _link(link: Path, target: Path, key: str) -> None:
    if link.is_dir() and not link.is_symlink() and not any(link.iterdir()):
        link.rmdir()
    if link.is_symlink() and link.resolve() == target.resolve():
        return
    if link.is_symlink() or link.exists():
        raise ConfigError(
            f"{key}={target}, but this run has its files in {link.resolve()}; restore the key, or move the files "
            f"to the new folder and delete {link}"
        )
    link.symlink_to(target)


def move_aside(cfg: Config) -> Path:
    """Rename the run directory, and its folders elsewhere, to NAME.before-TIME. Returns where the run is now.

    The run directory comes last: after a kill in between the same call continues. No file is lost in any case.
    """
    run_dir, mark = Path(cfg.run_dir).resolve(), f".before-{now()}"
    aside = run_dir.with_name(run_dir.name + mark)
    try:
        for name, given in cfg.dirs.items():
            target, link = Path(given).resolve(), run_dir / name
            if link == target or not target.is_dir() or not _is_of(target, run_dir):
                continue
            if target.is_relative_to(run_dir):
                new = aside / target.relative_to(run_dir)
            else:
                new = target.rename(target.with_name(target.name + mark))
                write_text(new / _OWNER, f"{aside}\n")
            if link.is_symlink():
                link.unlink()
                link.symlink_to(new)
        run_dir.rename(aside)
    except OSError as e:
        raise file_error(e, run_dir) from e
    return aside


def own(cfg: Config) -> Path:
    """Where this process writes: the run directory, or a separate folder in it beside the trainer (see `apart`)."""
    home = Path(cfg.run_dir)
    return {"explore": home / "explorers" / cfg.buffer.explorer_name, "eval": home / "bench"}.get(
        cfg.mode, home
    )


def trainers(cfg: Config) -> Path:
    """The run directory of the trainer, for a process whose run directory is `own`."""
    run_dir = Path(cfg.run_dir)
    return {"explore": run_dir.parent.parent, "eval": run_dir.parent}.get(cfg.mode, run_dir)
