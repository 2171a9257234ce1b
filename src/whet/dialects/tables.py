"""The systems' tables by kind of file. They are long and are read only when a foreign file or `whet keys` asks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whet.config.tree import STAGE_SECTIONS, get
from whet.dialects import row as table_rows
from whet.dialects.row import WRITES, Difference, Row, Status, VersionRange
from whet.dialects.rules import Function, function
from whet.dialects.versions import (
    DOCUMENTS,
    VERSIONS,
    at_version,
    covers,
    first_of,
    fitting,
    span,
    version_named,
)
from whet.types import ConfigError, Json

INHERITED = (
    "what a stage leaves out is the global one; with another algorithm_type only its optimizer is inherited"
)

Parts = tuple[str, ...]
"""A key cut at its dots; `[]` (any entry of a list), `<name>` (any name) and `*` (anything below) are parts."""

OPEN = {"[]", "<name>", "*"}
"""Parts that stand for any."""

NATIVE = "native"

TABLES = {
    "verl-ppo": ("verl", "ppo"),
    "verl-megatron-optim": ("verl", "megatron-optim"),
    "verl-eval": ("verl", "eval"),
    "verl-sft": ("verl", "sft"),
    "verl-generation": ("verl", "generation"),
    "verl-server": ("verl", "server"),
    "skyrl": ("skyrl", ""),
    "skyrl-sft": ("skyrl", "sft"),
    "cosmos-grpo": ("cosmos", "grpo"),
    "cosmos-sft": ("cosmos", "sft"),
    "trinity": ("trinity", ""),
    "trinity-verl": ("trinity", "verl"),
}
"""Each table's system, and the `file` of its lines there."""


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of config file: the tables whose keys it may carry, the first that knows a key wins."""

    tables: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Tables whose keys mean something only where a file gives them."""
    unread: str = ""
    """A table of another program for the same file: this one reads none of its keys, but what stands below `shared`."""
    shared: tuple[str, ...] = ()
    """Sections of that table whose keys hold here too, if they feed no native key."""
    sign: tuple[str, Parts] = ("", ())
    """A key and the values of it that this kind of file has ('' where it is left out, '*' any other)."""
    nulls: tuple[str, ...] = ()
    """Texts that mean null where null is the default."""
    inner: str = ""
    """A section that was a file of its own: references in it may start inside it."""
    bases: Mapping[str, tuple[tuple[str, Parts], ...]] = field(default_factory=dict)
    """Other documents with defaults of their own, and the signs of a file that stands over one, each as of `sign`."""
    stages: tuple[str, ...] = ()
    """Sections that an entry of `stages` may give for itself: their rows stand below `stages[]`, too."""

    @property
    def system(self) -> str:
        return TABLES[self.tables[0]][0]


FILES = {
    "verl-ppo": FileKind(
        tables=("verl-ppo",),
        optional=("verl-megatron-optim",),
        sign=("data.output_path", ("",)),
        bases={
            "ppo_megatron_trainer": (
                ("defaults", ("ppo_megatron_trainer",)),
                ("actor_rollout_ref.actor.strategy", ("megatron",)),
            )
        },
    ),
    "verl-eval": FileKind(tables=("verl-eval",)),
    "verl-sft": FileKind(tables=("verl-sft",), bases={"sft_trainer_engine": (("model.path", ("*",)),)}),
    "verl-generation": FileKind(tables=("verl-generation",)),
    "verl-server": FileKind(
        tables=("verl-server",),
        unread="verl-ppo",
        shared=("actor_rollout_ref.model.", "actor_rollout_ref.rollout."),
        sign=("data.output_path", ("*",)),
    ),
    "skyrl": FileKind(tables=("skyrl",)),
    "skyrl-sft": FileKind(tables=("skyrl-sft",)),
    "cosmos-grpo": FileKind(tables=("cosmos-grpo",), sign=("train.train_policy.type", ("grpo", ""))),
    "cosmos-sft": FileKind(tables=("cosmos-sft", "cosmos-grpo"), sign=("train.train_policy.type", ("sft",))),
    "trinity": FileKind(
        tables=("trinity", "trinity-verl"),
        nulls=("None", "null"),
        inner="trainer.trainer_config",
        stages=("algorithm", "buffer", "data_processor", "explorer", "trainer"),
    ),
}

_BORROWED = {("cosmos-sft", "cosmos-grpo"): "train.train_policy."}
"""The section of the second table that is the first one's own: nothing below it is borrowed."""


@dataclass(frozen=True, eq=False)
class Dialect:
    """The keys of one kind of file."""

    name: str
    rows: tuple[Row, ...]
    functions: Callable[[str], Function]
    """A function of the rows by its name."""
    optional: frozenset[str] = frozenset()
    """Keys of rows that are left alone unless the file gives them."""
    aliases: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Newer or deprecated name -> (present name, note)."""
    nulls: tuple[str, ...] = ()
    inner: str = ""
    has_stages: bool = False
    system: str = ""
    version: str = ""
    """The release whose lines these are."""
    differences: tuple[Difference, ...] = ()
    """Where whet knowingly differs from this release."""

    @functools.cached_property
    def by_parts(self) -> dict[Parts, Row]:
        """Rows by the parts of their keys."""
        return {parts(row.key): row for row in self.rows}

    @functools.cached_property
    def below(self) -> dict[Parts, dict[str, None]]:
        """The parts that may follow each section's, in the table's order."""
        found: dict[Parts, dict[str, None]] = {}
        for row in self.rows:
            cut = parts(row.key)
            for n, part in enumerate(cut):
                found.setdefault(cut[:n], {})[part] = None
        return found

    @functools.cached_property
    def by_function(self) -> dict[str, tuple[Row, ...]]:
        """The rows that each function serves."""
        names = dict.fromkeys(row.function for row in self.rows if row.function)
        return {name: tuple(row for row in self.rows if row.function == name) for name in names}

    @functools.cached_property
    def alias_defaults(self) -> dict[str, Json]:
        """Newer or deprecated name -> what the system's own document has under it."""
        return table_rows.alias_defaults(self.system) if self.system else {}

    @functools.cached_property
    def of_stages(self) -> frozenset[str]:
        """Functions that each stage answers for itself, where a file has stages."""
        fed = {
            name: {native.split(".")[0] for row in rows for native in row.native}
            for name, rows in self.by_function.items()
        }
        inside = {name for name, sections in fed.items() if sections <= set(STAGE_SECTIONS)}
        return frozenset(inside) if self.has_stages else frozenset()

    def newer(self, row: Row) -> str:
        """'since 0.7.0', 'until 0.6.0' for a key that this version has not; else ''."""
        if not self.version or covers(row, self.version, VERSIONS[self.system]):
            return ""
        return span(row.since, row.until)

    def row(self, key: str) -> Row | None:
        return self.by_parts.get(parts(key))


@functools.lru_cache(maxsize=1 << 14)
def parts(name: str) -> Parts:
    """`stages[].algorithm.lr` -> ('stages', '[]', 'algorithm', 'lr')."""
    return tuple(name.replace("[]", ".[]").split("."))


def joined(cut: Parts) -> str:
    """The parts as one dotted name again."""
    return ".".join(cut).replace(".[]", "[]")


@functools.cache
def table(name: str, version: str = "") -> tuple[Row, ...]:
    """The rows of one table of `TABLES`, as a version has them; '' is the document's.

    Those of keys that a stage may give follow from the lines of the file.
    """
    system = TABLES[name][0]
    return at_version(every_line(name), version or DOCUMENTS[system], VERSIONS[system])


@functools.cache
def every_line(name: str) -> tuple[Row, ...]:
    """The same of all versions: a key may have several."""
    system, file = TABLES[name]
    rows = [row for row in table_rows.rows(system) if row.file == file]
    sections, own = FILES[name].stages if name in FILES else (), {row.key for row in rows}
    inside = [row for row in table_rows.rows(system) if row.key.split(".")[0] in sections]
    return (*rows, *(_in_a_stage(row) for row in inside if f"stages[].{row.key}" not in own))


def base_of(kind: str, tree: Mapping[str, Json]) -> str:
    """The document that a file stands over, if that has defaults of its own; else ''."""
    for base, signs in FILES[kind].bases.items():
        if any(has_sign(tree, key, values) for key, values in signs):
            return base
    return ""


def has_sign(tree: Mapping[str, Json], key: str, values: Parts) -> bool:
    """Whether a key, or an entry of its list, has one of these values: '' where it is left out, '*' any other."""
    found = get(dict(tree), tuple(key.split(".")))
    texts = [str(each or "") for each in found] if isinstance(found, list) and found else [str(found or "")]
    return any(text in values or (text != "" and "*" in values) for text in texts)


@functools.cache
def dialect(name: str, version: str = "", base: str = "") -> Dialect:
    """A kind of file by its name in `FILES`, as a version has it; '' is the document's. base: the document that a file
    stands over (`base_of`)."""
    file = FILES[name]
    system, rows = file.system, dict[str, Row]()
    version = version or DOCUMENTS[system]
    for each in (*file.tables, *file.optional):
        apart = _BORROWED.get((name, each))
        for row in table(each, version):
            if apart is None or not row.key.startswith(apart):
                rows.setdefault(row.key, row)
    main = {row.key for each in file.tables for row in table(each, version)}
    for row in table(file.unread, version) if file.unread else ():
        rows.setdefault(row.key, _unread(row, shared=file.shared))
    for own in table_rows.base_defaults(system) if base else ():
        if own.file == base and covers(own, version, VERSIONS[system]):
            rows[own.key] = replace(rows[own.key], default=own.default)
    return Dialect(
        name=name,
        rows=tuple(rows.values()),
        functions=functools.partial(function, system),
        optional=frozenset(rows.keys() - main),
        aliases=_aliases(system, _known_to(name), file.stages),
        nulls=file.nulls,
        inner=file.inner,
        has_stages=bool(file.stages),
        system=system,
        version=version,
        differences=tuple(
            each
            for each in table_rows.differences(system)
            if each.file in kinds_of(name) and covers(each, version, VERSIONS[system])
        ),
    )


def _unread(row: Row, *, shared: tuple[str, ...]) -> Row:
    """The row of a key that another program reads. In a shared section it says what it says there, unless it feeds a
    native key: those that do so here have rows of their own."""
    if row.key.startswith(shared) and row.status not in WRITES:
        return row
    return Row(
        key=row.key, since=row.since, until=row.until, type="any", status="derived", default=row.default,
        reason="main_generation_server does not read it.",
    )  # fmt: skip


def _aliases(system: str, files: tuple[str, ...], stages: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Other names of keys, those that a stage gives among them."""
    told = table_rows.aliases(system, files)
    inside = {key: value for key, value in told.items() if key.split(".")[0] in stages}
    return told | {f"stages[].{key}": (f"stages[].{new}", note) for key, (new, note) in inside.items()}


def _in_a_stage(row: Row) -> Row:
    """The row of a key in a stage, which is judged as a file of its own: what does something does it by way of it."""
    key = f"stages[].{row.key}"
    if row.status == "coming":
        return replace(row, key=key, function="stages.stages")
    writes = row.status in WRITES
    reason = INHERITED if writes else row.reason
    status: Status = "translated" if writes else "derived"
    native = ("stages",) if writes else ()
    return Row(
        key=key, since=row.since, until=row.until, status=status, default=None, native=native, reason=reason,
        function="stages.stages",
    )  # fmt: skip


def version_of(kind: str, given: Iterable[str], wanted: str | None = None) -> str:
    """The version that a file with these keys (names that it uses) is read as. wanted: `verl@0.9` says it. Raises
    ConfigError."""
    system = FILES[kind].system
    if wanted and "@" in wanted:
        return version_named(system, wanted.partition("@")[2])
    return first_of(_alike(kind, list(given)), system)


def other_end(kind: str, given: Iterable[str], version: str) -> str:
    """The release farthest from the one that a file is read as, of those that fit its keys as well; '' if its keys
    tell the release."""
    alike = _alike(kind, list(given))
    if version not in alike or len(alike) == 1:
        return ""
    return alike[0] if version == alike[-1] else alike[-1]


def _alike(kind: str, given: Sequence[str]) -> tuple[str, ...]:
    """The releases that a file with these keys may be for, oldest first: those that have most of its keys, and of them,
    if it is a whole document (half of the keys or more), those of which it lacks the fewest."""
    system = FILES[kind].system
    known, of, names = table_rows.spans(system, _known_to(kind)), dialect(kind), set(given)
    alike = fitting([spans for key in dict.fromkeys(given) if (spans := _nearest(known, key))], system)
    if len(alike) == 1:
        return alike
    plain = [row.key for row in of.rows if row.key not in of.optional and not OPEN & set(parts(row.key))]
    there = {
        version: {
            key
            for key in plain
            if any(covers(span, version, VERSIONS[system]) for span in known.get(key, ()))
        }
        for version in alike
    }
    lacking = {version: len(keys - names) for version, keys in there.items()}
    least = min(lacking.values())
    first = tuple(version for version in alike if lacking[version] == least)
    return first if len(there[first[0]] & names) * 2 >= len(there[first[0]]) else alike


def _nearest(known: Mapping[str, Sequence[VersionRange]], key: str) -> Sequence[VersionRange]:
    """The versions that have a key; of one below another name of a section, those that have this name."""
    cut = parts(key)
    names = (joined(cut[:n]) for n in range(len(cut), 0, -1))
    return next((known[name] for name in names if name in known), ())


def of_another(key: str, near: Sequence[str]) -> str:
    """Of a name that is no key of whet: the system that has a key of this name and the native keys it becomes, as the
    end of a sentence; '' for a key of none, and where one of these is `near`, which is suggested then. A name without a
    section says too little of where it is from."""
    for system in DOCUMENTS if "." in key else ():
        row = _row_named(system, parts(key))
        if row is not None and not {*near} & {*row.native}:
            becomes = ", ".join(row.native) or "no key"
            return (
                f"; it is a key of {system}, and becomes {becomes}: `whet keys --dialect {system}` says how, and "
                f"`whet convert` does it for a file"
            )
    return ""


def _row_named(system: str, cut: Parts) -> Row | None:
    """The first row of a key in any kind of file, which may give it by another name, or below an open section."""
    other = table_rows.aliases(system, [file for each, file in TABLES.values() if each == system])
    for n in range(len(cut), 0, -1):
        if (name := joined(cut[:n])) in other:
            cut = (*parts(other[name][0]), *cut[n:])
            break
    names = (joined(cut), *(joined((*cut[:n], "*")) for n in range(len(cut) - 1, 1, -1)))
    rows = {row.key: row for row in reversed(table_rows.rows(system))}
    return next((rows[name] for name in names if name in rows), None)


def kinds_of(name: str) -> tuple[str, ...]:
    """The `file` column of the lines that a kind of file reads."""
    return tuple(TABLES[each][1] for each in (*FILES[name].tables, *FILES[name].optional))


def _known_to(name: str) -> tuple[str, ...]:
    """The same, with the lines of a program for the same file."""
    unread = FILES[name].unread
    return (*kinds_of(name), TABLES[unread][1]) if unread else kinds_of(name)


def named(wanted: str) -> tuple[str, ...]:
    """The kinds of file that a name on the command line means: `verl` and `verl@0.9` are all of verl's. Raises
    ConfigError."""
    system = wanted.partition("@")[0]
    found = tuple(name for name in FILES if name == system or name.startswith(f"{system}-"))
    if not found and wanted != NATIVE:
        raise ConfigError(
            f"--dialect {wanted}: expected {NATIVE}, verl, skyrl, cosmos or trinity, or one of {', '.join(FILES)}"
        )
    return found
