"""The dialects by name. Their tables are long and are imported only when a foreign file or `whet keys` asks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

from whet.config.dialects.key import Key
from whet.types import ConfigError

Parts = tuple[str, ...]
"""A key cut at its dots; `[]` (any entry of a list), `<name>` (any name) and `*` (anything below) are parts."""

NATIVE = "native"

TABLES = {
    "verl-ppo": ("verl", "VERL_PPO"),
    "verl-megatron-optim": ("verl", "VERL_MEGATRON"),
    "verl-eval": ("verl", "VERL_EVAL"),
    "verl-sft": ("verl", "VERL_SFT"),
    "verl-generation": ("verl", "VERL_GENERATION"),
    "skyrl": ("skyrl", "SKYRL"),
    "cosmos-grpo": ("cosmos", "COSMOS_GRPO"),
    "cosmos-sft": ("cosmos", "COSMOS_SFT"),
    "trinity": ("trinity", "TRINITY"),
    "trinity-verl": ("trinity", "TRINITY_VERL"),
}
"""Each table's module beside this one and its name there."""


@dataclass(frozen=True, kw_only=True)
class _File:
    """A kind of config file: the tables whose keys it may carry, the first that knows a key wins."""

    tables: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Tables whose keys mean something only where a file gives them."""
    sign: tuple[str, Parts] = ("", ())
    """A key and the values of it that this kind of file has ('' where it is left out)."""
    nulls: tuple[str, ...] = ()
    """Texts that mean null where null is the default."""
    inner: str = ""
    """A section that was a file of its own: references in it may start inside it."""


FILES = {
    "verl-ppo": _File(tables=("verl-ppo",), optional=("verl-megatron-optim",)),
    "verl-eval": _File(tables=("verl-eval",)),
    "verl-sft": _File(tables=("verl-sft",)),
    "verl-generation": _File(tables=("verl-generation",)),
    "skyrl": _File(tables=("skyrl",)),
    "cosmos-grpo": _File(tables=("cosmos-grpo",), sign=("train.train_policy.type", ("grpo", ""))),
    "cosmos-sft": _File(tables=("cosmos-sft", "cosmos-grpo"), sign=("train.train_policy.type", ("sft",))),
    "trinity": _File(
        tables=("trinity", "trinity-verl"), nulls=("None", "null"), inner="trainer.trainer_config"
    ),
}

_BORROWED = {("cosmos-sft", "cosmos-grpo"): "train.train_policy."}
"""The section of the second table that is the first one's own: nothing below it is borrowed."""


@dataclass(frozen=True, eq=False)
class Dialect:
    """The keys of one kind of file."""

    name: str
    rows: tuple[Key, ...]
    optional: frozenset[str] = frozenset()
    """Names of rows that are left alone unless the file gives them."""
    aliases: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Newer or deprecated name -> (present name, note)."""
    sign: tuple[str, Parts] = ("", ())
    nulls: tuple[str, ...] = ()
    inner: str = ""

    @functools.cached_property
    def by_parts(self) -> dict[Parts, Key]:
        """Rows by the parts of their names."""
        return {parts(row.name): row for row in self.rows}

    @functools.cached_property
    def below(self) -> dict[Parts, dict[str, None]]:
        """The parts that may follow each section's, in the table's order."""
        found: dict[Parts, dict[str, None]] = {}
        for row in self.rows:
            cut = parts(row.name)
            for n, part in enumerate(cut):
                found.setdefault(cut[:n], {})[part] = None
        return found

    def row(self, name: str) -> Key | None:
        return self.by_parts.get(parts(name))


def parts(name: str) -> Parts:
    """`stages[].algorithm.lr` -> ('stages', '[]', 'algorithm', 'lr')."""
    return tuple(name.replace("[]", ".[]").split("."))


def joined(cut: Parts) -> str:
    """The parts as one dotted name again."""
    return ".".join(cut).replace(".[]", "[]")


@functools.cache
def table(name: str) -> tuple[Key, ...]:
    """The rows of one table of `TABLES`."""
    module, attribute = TABLES[name]
    rows: tuple[Key, ...] = getattr(_module(module), attribute)
    return rows


def aliases(name: str) -> dict[str, tuple[str, str]]:
    """Other names of a table's keys: newer or deprecated name -> (present name, note)."""
    said = getattr(_module(TABLES[name][0]), "ALIASES", {})
    return {old: (new, "") if isinstance(new, str) else new for old, new in said.items()}


@functools.cache
def dialect(name: str) -> Dialect:
    """A kind of file by its name in `FILES`."""
    file = FILES[name]
    rows: dict[str, Key] = {}
    for each in (*file.tables, *file.optional):
        own = _BORROWED.get((name, each))
        for row in table(each):
            if own is None or not row.name.startswith(own):
                rows.setdefault(row.name, row)
    main = {row.name for each in file.tables for row in table(each)}
    return Dialect(
        name=name,
        rows=tuple(rows.values()),
        optional=frozenset(rows.keys() - main),
        aliases=aliases(file.tables[0]),
        sign=file.sign,
        nulls=file.nulls,
        inner=file.inner,
    )


def named(wanted: str) -> tuple[str, ...]:
    """The kinds of file that a name on the command line means: `verl` is all of verl's. Raises ConfigError."""
    found = tuple(name for name in FILES if name == wanted or name.startswith(f"{wanted}-"))
    if not found and wanted != NATIVE:
        raise ConfigError(
            f"--dialect {wanted}: expected {NATIVE}, verl, skyrl, cosmos or trinity, or one of {', '.join(FILES)}"
        )
    return found


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{name}")
