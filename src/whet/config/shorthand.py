"""Short forms of a config: a text in the place of a section that says all that is needed.

`model: PATH`, `algorithm: grpo`, `data.train: tasks.jsonl`, `rewards.right: rewards.py:f`. The long form is what is
validated and written down.
"""

from __future__ import annotations

from whet.config.keys import Path
from whet.types import Json

SOURCES: tuple[Path, ...] = (("data", "train"), ("data", "eval"), ("data", "demonstrations"))
"""Lists of sources. One source needs no list."""
SECTIONS: dict[Path, str] = {
    ("model",): "path",
    ("tokenizer",): "path",
    ("reference",): "path",
    ("critic",): "path",
    ("algorithm",): "name",
    ("rewards", "*"): "function",
    ("data",): "train",
    **{(*source, "*"): "path" for source in SOURCES},
}
"""Sections that a text may stand for, and the key whose value it is. A star stands for any name or place."""


def short_for(at: Path) -> str | None:
    """The key below this path whose value a text in its place is, or None."""
    return SECTIONS.get(at) or SECTIONS.get((*at[:-1], "*") if at else ())


def expanded(value: Json, at: Path = ()) -> Json:
    """The long form of a value that stands at this path of a config, also of a stage."""
    if at == ("stages",) and isinstance(value, list):
        return [expanded(stage) if isinstance(stage, dict) else stage for stage in value]
    if at in SOURCES:
        return _sources(value)
    named = short_for(at)
    if isinstance(value, str) and named is not None and not _may_be_a_section(value):
        value = {named: value}
    if not isinstance(value, dict) or len(at) > 1:
        return value
    return {key: expanded(inner, (*at, key)) for key, inner in value.items()}


def _may_be_a_section(text: str) -> bool:
    """Whether a text refers to another key, which may be a section, and not to the environment alone."""
    return "${" in text.replace("${oc.env:", "")


def _sources(value: Json) -> Json:
    """The list of sources that a text, a source or a list of them stands for."""
    if isinstance(value, str | dict):
        value = [value]
    if not isinstance(value, list):
        return value
    return [{"path": source} if isinstance(source, str) else source for source in value]
