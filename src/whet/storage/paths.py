"""Local paths for a config: remote files are fetched, in one place, before any of them is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from whet.config.load import Loaded
from whet.config.urls import is_remote
from whet.data.given import Given
from whet.storage.fetch import fetched
from whet.types import ConfigError, WhetError

_PATHS = ("path", "chat_template")
"""Keys, in any section, whose values are paths that are read."""


def brought_here(loaded: Loaded) -> Loaded:
    """The same with every remote path replaced by that of its copy here. `loaded.as_given` keeps the config as it was:
    that is what is written down and what checkpoints agree with.

    Raises ConfigError naming the URL that cannot be read.
    """
    configs = (loaded.config, *loaded.stages)
    urls = sorted({path for cfg in configs for path in _named(cfg) if is_remote(path)})
    resume = loaded.config.checkpoint.resume
    checkpoints = [resume] if is_remote(resume) else []
    if not urls and not checkpoints:
        return loaded
    try:
        here = fetched(urls, checkpoints=checkpoints)
    except WhetError as e:
        raise ConfigError(f"a path of the config cannot be read: {e}") from e

    def put(cfg: Any) -> Any:
        cfg = with_paths(cfg, lambda path: here.get(path, path))
        at = cfg.checkpoint.model_copy(update={"resume": here.get(resume, resume)})
        return cfg.model_copy(update={"checkpoint": at})

    return replace(
        loaded,
        config=put(loaded.config),
        stages=tuple(put(stage) for stage in loaded.stages),
        given=loaded.as_given,
    )


def with_rows(loaded: Loaded, rows: Sequence[Given]) -> Loaded:
    """The config with the files of rows that were given from Python; the run writes them. The keys of a stage name them
    too, so that the config of a run can be read again."""
    files = {given.mark: str(given.file(Path(loaded.config.run_dir))) for given in rows}

    def put(cfg: Any) -> Any:
        cfg = with_paths(cfg, lambda path: files.get(path, path))
        stages = [s.model_copy(update={"data": _placed(s.data, files)}) for s in cfg.stages]
        return cfg.model_copy(update={"stages": type(cfg.stages)(stages)})

    if not rows:
        return loaded
    return replace(loaded, config=put(loaded.config), stages=tuple(map(put, loaded.stages)))


def _placed(value: Any, files: Mapping[str, str]) -> Any:
    """The same with the files of rows in place of their marks, in plain values."""
    if isinstance(value, dict):
        return {key: _placed(each, files) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(each, files) for each in value)
    return files.get(value, value) if isinstance(value, str) else value


def _named(cfg: BaseModel) -> Iterator[str]:
    found: list[str] = []

    def note(path: str) -> str:
        found.append(path)
        return path

    with_paths(cfg, note)
    yield from found


def with_paths(value: Any, new: Callable[[str], str], key: str = "") -> Any:
    """The same with every path, wherever it stands in sections, lists and dicts, given to a function."""
    if isinstance(value, BaseModel):
        old = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {name: made for name, v in old.items() if (made := with_paths(v, new, name)) is not v}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, str) and key in _PATHS:
        made = new(value)
        return value if made == value else made
    if isinstance(value, tuple | list):
        items = [with_paths(v, new, key) for v in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value)) else value
    if isinstance(value, dict):
        entries = {k: with_paths(v, new) for k, v in value.items()}
        return entries if any(entries[k] is not v for k, v in value.items()) else value
    return value
