"""Errors of the rows of a data source, with the keys that say how the rows are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from whet.config.keys import lookup
from whet.config.load import Loaded
from whet.config.schema import SourceConfig
from whet.config.sources import PARTS
from whet.config.tree import get, path_of
from whet.dialects.tables import dialect
from whet.dialects.translate import Translation
from whet.types import ConfigError, DataError, Json

_FIELD = re.compile(r"[`(](\w+)(?:: |\))")
"""How a message names a field of the source: `prompt: COLUMN`, or (label)."""
_KEY = re.compile(r"\b[a-z]\w*(?:\.[a-z]\w*)+\b")


@contextmanager
def of_source(source: SourceConfig) -> Iterator[None]:
    """An error from within is one of this source."""
    try:
        yield
    except (ConfigError, DataError) as error:
        error.about = source
        raise


@contextmanager
def in_words_of(loaded: Loaded, stage: int) -> Iterator[None]:
    """An error from within that names keys, or fields of the source that it is of, also says what they are called in
    the file that was translated."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if loaded.translation is not None and (more := _more(loaded, stage, error)):
            error.args = (f"{str(error).rstrip('.')}. {more}.",)
        raise


def _more(loaded: Loaded, stage: int, error: ConfigError | DataError) -> str:
    """'In a verl-ppo file `prompt` is data.prompt_key', of each field and key that the message names; of a source's
    error that names none, what gives the rows."""
    said, cfg, made = str(error), loaded.stages[stage], loaded.translation
    assert made is not None
    at = next(
        (f"data.{p}.{n}" for p in PARTS for n, s in enumerate(getattr(cfg.data, p)) if s is error.about), None
    )
    fields = [field for field in _FIELD.findall(said) if at and field in SourceConfig.model_fields]
    named = {f"`{field}`": f"{at}.{field}" for field in fields}
    named |= {key: key for key in _KEY.findall(said) if lookup(path_of(key, ())) is not None}
    tree = cfg.model_dump(mode="json")
    values = {name: get(tree, path_of(key, ())) for name, key in named.items()}
    told = [
        f"{name} is {_foreign(made, named[name], value)}"
        for name, value in values.items()
        if not isinstance(value, list | dict)  # a section: its keys count
    ]
    if told:
        return f"In a {made.dialect} file {', '.join(told)}"
    kinds = (kind for kind in ("path", "function", "rows") if getattr(error.about, kind, None) is not None)
    within = f"stages.{loaded.names[stage]}." if loaded.config.stages else ""
    place = loaded.where(f"{within}{at}.{next(kinds)}") if at else ""
    return f"The rows come from {place}" if place else ""


def _foreign(made: Translation, native: str, value: Json) -> str:
    """The key of the translated file that has the value of a native key, or that the translation made it from; where
    none leads there, the native key as such a file takes it."""
    given = {line.key: line.value for line in made.lines}
    rows = [row for row in dialect(made.dialect, made.version).rows if native in row.native]
    found = [row.key for row in rows if given.get(row.key, row.default) == value]
    if get(made.tree, path_of(native, ())) == value:  # no override under a native name has changed it
        found += [line.key for line in made.lines if native in line.native]
        found += [row.key for row in rows]
    return next(iter(found), f"whet.{native}")
