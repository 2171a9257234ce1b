"""Keys that hold a name, or a table of a name and its settings: what is chosen, and what is wrong with it.

`algorithm.loss: gspo` and `{name: gspo, clip_low: 3e-4}`; `keys.TABLES` lists these keys, `settings.tsv` the settings
of each name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.config.faults import argument_problems
from whet.config.functions import Function
from whet.tables import near, not_known, unknown

OURS_ALONE = (
    *(
        "model.scratch",
        "model.mtp",
        "algorithm.resample",
        "algorithm.groups.uniform",
        "algorithm.entropy_control",
    ),
    *("algorithm.entropy_clip", "algorithm.oversample", "algorithm.mix.mu_schedule"),
)
"""Keys that cannot name functions of the user's."""


@dataclass(frozen=True)
class Chosen:
    """A name with its settings."""

    name: str
    settings: Mapping[str, Any]
    """All of them, by the names in the table; of a function of the user's those that are given."""
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What the config says of a name of the table."""

    @property
    def is_own(self) -> bool:
        """It is a function of the user's."""
        return ":" in self.name


def chosen(
    value: str | Mapping[str, Any] | None,
    table: Mapping[str, Function],
    own: str,
    preset: Mapping[str, Any] | None = None,
) -> Chosen:
    """A name, or a table of settings with or without one. own: the name where none is given; preset: its settings."""
    rest = {"name": value} if isinstance(value, str) else dict(value or {})
    name = str(rest.pop("name", None) or own)
    if ":" in name or name not in table:
        return Chosen(name, rest)
    fields = table[name].settings.model_fields
    before = {key: said for key, said in (preset or {}).items() if name == own and key in fields}
    taken = {
        key: _listed(said, like=fields[key].default)
        for key, said in rest.items()
        if key in fields and said is not None
    }
    return Chosen(name, {key: one.default for key, one in fields.items()} | before | taken, rest)


def _listed(value: Any, *, like: object) -> Any:
    """One name where a setting holds a list is a list of one."""
    return (value,) if isinstance(value, str) and isinstance(like, tuple) else value


def setting_problems(key: str, made: Chosen, table: Mapping[str, Function]) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of a name that is unknown, of settings that no name has, and of values that the
    chosen one cannot take."""
    if not made.name:
        yield f"{key}.name", f"must be given: {', '.join(table)}"
        return
    if made.name not in table:
        if wrong := not_known(made.name, table) if key in OURS_ALONE else unknown(table, made.name):
            yield key, wrong
        return
    section = table[made.name].settings
    known = _settings_of_all(table)
    for name in (name for name in made.given if name not in known):
        has = ", ".join(section.model_fields) or "none"
        yield f"{key}.{name}", f"unknown setting{near(name, known)}; {made.name} has: {has}"
    taken = {name: value for name, value in made.given.items() if name in section.model_fields}
    yield from argument_problems(key, section, taken)


def unread_settings(key: str, made: Chosen, table: Mapping[str, Function]) -> Iterator[tuple[str, str]]:
    """(key, why nothing reads it) of settings that belong to other names than the chosen one."""
    if not made.is_own and made.name in table:
        said = f"{key.removeprefix('algorithm.')}={made.name} does not read it"
        others = _settings_of_all(table) - table[made.name].settings.model_fields.keys()
        yield from ((f"{key}.{name}", said) for name in made.given if name in others)


def _settings_of_all(table: Mapping[str, Function]) -> set[str]:
    return {name for row in table.values() for name in row.settings.model_fields}
