"""A foreign file -> native keys, with a line for everything that happened and the place of everything given.

The file's references are resolved with the defaults of its document in view. Then every row of the table has its say:
rows that are mapped or translated write native keys, the others accept what changes nothing and refuse the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from whet.config.faults import shown
from whet.config.keys import TABLES, Path, dotted, lookup
from whet.config.schema import Config
from whet.config.tree import get, path_of
from whet.dialects.kinds import accepts, expected, same, understood
from whet.dialects.match import GivenValue
from whet.dialects.row import WRITES, AnotherModel, NotSupportedYet, Reference, Row, Status
from whet.dialects.rules import condition
from whet.dialects.tables import OPEN, Dialect, parts
from whet.dialects.values import Missing, Reading, nested, reading
from whet.types import ConfigError, Json


@dataclass(frozen=True)
class ReportLine:
    """What became of one key."""

    key: str
    value: Json
    given: bool
    """In the file or an override; else it is the document's default."""
    status: Status
    native: tuple[str, ...] = ()
    """Native keys that it feeds."""
    note: str = ""
    """What a user should know: another name, a text read as a number, nothing reads it here."""
    reason: str = ""
    """The table's."""
    differs: str = ""
    """What is knowingly not as in the other system, with this value."""


@dataclass(frozen=True)
class Translation:
    """A foreign file in native keys."""

    dialect: str
    version: str
    """The release that the file is read as."""
    tree: dict[str, Json]
    lines: tuple[ReportLine, ...]
    problems: tuple[tuple[str, str], ...]
    """(place, text)"""
    unbuilt: tuple[tuple[str, str], ...]
    """(place, text) of given values that ask for an engine or a feature that is not built yet: problems to a run, not
    to a rehearsal."""
    origins: Mapping[Path, str]
    """Native path -> 'file.yaml:12 foreign.key', or 'default of foreign.key'."""
    otherwise: tuple[str, tuple[str, ...]] = ("", ())
    """Another release that has as many of the file's keys, and the native keys that differ if it is read as that."""
    foreign: Mapping[str, Json] = field(default_factory=dict)
    """The file as it is, under its own names, overrides included."""


@dataclass(frozen=True, kw_only=True)
class _Write:
    """One native key that a row wants to write."""

    native: str
    value: Json
    key: str
    """The foreign key it comes from."""
    given: bool
    place: str


def translate(tree: Mapping[str, Json], dialect: Dialect, *, origins: Mapping[Path, str]) -> Translation:
    """The native keys of a foreign file. What is wrong stands in `problems`; nothing is raised."""
    file = reading(dict(tree), dialect, origins=origins)
    writes, done = list[_Write](), set[str]()
    for row in dialect.rows:
        if file.broken or (row.key in dialect.optional and row.key not in file.given):
            continue
        if row.function:
            if row.function not in done and (row.status != "derived" or row.key in file.given):
                done.add(row.function)
                writes += _called(file, row.function)
        elif row.status == "mapped":
            writes += _mapped(file, row)
        else:
            _check(file, row)
    chosen = _chosen(file, writes)
    return Translation(
        dialect=dialect.name,
        version=dialect.version,
        tree=_names_alone(nested({_path(w): _escaped(w.value) for w in chosen})),
        lines=tuple(_lines(file, chosen)),
        problems=tuple(dict.fromkeys(file.problems)),
        unbuilt=tuple(_by_feature(file.unbuilt)),
        origins={path_of(w.native, ()): _origin(w, dialect) for w in chosen},
        foreign=tree,
    )


# ---------------------------------------------------------------- rows


def _mapped(file: Reading, row: Row) -> Iterator[_Write]:
    """The value goes over as it is; an entry of a list to the entry with the same number."""
    cut = parts(row.key)
    if cut in file.of.below:
        return
    if not {"[]", "<name>"} & set(cut):
        yield _write(file, row.native[0], file.values[row.key], rows=[row])
        return
    for found in file.given.get(row.key, ()):
        native = row.native[0]
        for part, pattern in zip(found.path, cut):
            if pattern in ("[]", "<name>"):
                native = native.replace("*", str(part), 1)
        place = file.places[found.at]
        yield _Write(native=native, value=found.value, key=dotted(found.path), given=True, place=place)


def _called(file: Reading, function: str) -> Iterator[_Write]:
    """Run a function once for all its rows. Where a file has stages, each of them answers for its own sections."""
    if function in file.of.of_stages and file.values["stages"]:
        return
    rows = file.of.by_function[function]
    try:
        native = file.of.functions(function)(file.values)
    except ConfigError as e:
        place, text = _told(file, rows, str(e))
        if isinstance(e, AnotherModel):
            file.problems, file.unbuilt, file.broken = [(place, text)], [], True
        elif isinstance(e, NotSupportedYet):
            file.unbuilt.append(Missing(place, text, e.area, e.key, shown(e.value)))
        else:
            file.problems.append((place, text))
        return
    for key, value in native.items():
        nearest = sorted(rows, key=lambda row: declares(row, key), reverse=True)
        yield _write(file, key, value, rows=[row for row in nearest if declares(row, key)] or rows)


def _told(file: Reading, rows: Sequence[Row], said: str) -> tuple[str, str]:
    """A function's complaint with the place of the first given key that it names; where it names none, of the first
    that the function reads. What is not named is not blamed."""
    general = re.sub(r"\[\d+\]", "[]", said)
    names = [row.key for row in file.of.rows if _names(general, row.key) is not None]
    if not names:
        given = [row.key for row in rows if row.key in file.given]
        return file.place(given[0]) if given else "", f"{(given or [rows[0].key])[0]}: {said}"
    found = (each for name in names for each in file.given.get(name, ()))
    named = {each.at: at for each in found if (at := _names(said, dotted(each.path))) is not None}
    first = min(named, key=lambda path: (named[path], -len(path)), default=None)
    return "" if first is None else file.places[first], said


def _names(said: str, key: str) -> int | None:
    """Where a complaint names a key: a key of one word only where its value follows, else it is a word."""
    if key not in said:
        return None
    after = r"(?!\w|\.\w)" if "." in key else "(?=[:=])"
    found = re.search(rf"(?<![\w.]){re.escape(key)}{after}", said)
    return found.start() if found else None


def declares(row: Row, native: str) -> int:
    """How much of a native key a row names: the whole of it, a section that it is in, or nothing (0)."""
    return max((len(key) for key in row.native if native == key or native.startswith(f"{key}.")), default=0)


def _write(file: Reading, native: str, value: Json, *, rows: Sequence[Row]) -> _Write:
    """A native key; its source is the entry of an open section with this value, else the first of the rows that the
    file gives another value than the default."""
    if entry := _entry(file, value, rows=rows):
        place = file.places[entry.at]
        return _Write(native=native, value=value, key=dotted(entry.path), given=True, place=place)
    there = [row.key for row in rows if row.key in file.given]
    told = (name for name in there if not same(file.values.get(name), file.defaults.get(name)))
    given = next(told, there[0] if there else "")
    return _Write(
        native=native, value=value, key=given or rows[0].key, given=bool(given), place=file.place(given)
    )


def _entry(file: Reading, value: Json, *, rows: Sequence[Row]) -> GivenValue | None:
    """The one entry of an open section (`kwargs.*`) with this value; None if there is none, or several."""
    open_rows = (row for row in rows if row.key.endswith(".*"))
    found = [one for row in open_rows for one in file.given.get(row.key, ()) if same(one.value, value)]
    return found[0] if len(found) == 1 else None


def _check(file: Reading, row: Row) -> None:
    """A row that does nothing here accepts its default, harmless values, and those of its type."""
    if row.key not in file.given or not _counts(file, row.when):
        return
    accepted = row.harmless if "equal:" in row.type else (file.defaults[row.key], *row.harmless)
    plain = not OPEN & set(parts(row.key))
    for found in file.given.get(row.key, ()):
        value = file.values[row.key] if plain else found.value
        is_filled = isinstance(found.value, list) or (row.default is None and found.value)
        if found.is_section and not is_filled:
            continue  # what is in it is judged by its own rows
        if not any(same(value, ok) for ok in accepted) and not _of_its_type(file, row, value):
            text = f"{dotted(found.path)}: got {shown(found.value)}; {_refusal(row, accepted)}"
            if row.status == "coming":
                key, value = dotted(found.path), shown(found.value)
                file.unbuilt.append(
                    Missing(file.places[found.at], text, row.area, key, value, row.reason.rstrip("."))
                )
            else:
                file.problems.append((file.places[found.at], text))


def _counts(file: Reading, when: str) -> bool:
    """Whether a line's condition holds; also where it asks for what a function refuses, which is told there."""
    try:
        return condition(file.of.system, when)(file.values)
    except ConfigError:
        return True


def _by_feature(missing: Sequence[Missing]) -> Iterator[tuple[str, str]]:
    """(place, text), one for each feature that is asked for, however many keys ask for it. A reason that several keys
    have is told once."""
    asked: dict[str, list[Missing]] = {}
    for one in dict.fromkeys(missing):
        asked.setdefault(one.area or one.text, []).append(one)
    for area, all_of_it in asked.items():
        above = tuple(one.key for one in all_of_it if one.key)
        ones = [one for one in all_of_it if not any(_is_inside(key, one.key) for key in above)]
        if len(ones) == 1:
            yield ones[0].place, ones[0].text
            continue
        first, *others = ones
        asks: dict[str, list[str]] = {first.reason: []}
        for one in others:
            asked_by = f"{one.key}={one.value}" + (f" ({one.place})" if one.place else "")
            asks.setdefault(one.reason, []).append(asked_by)
        told = (
            ", ".join(keys) + (f": {reason}" if reason and reason != first.reason else "")
            for reason, keys in asks.items()
            if keys
        )
        what = f"{area}: {first.reason}" if first.reason else area
        text = f"{first.key}: got {first.value}; coming, not built yet: {what}; also asked for by {'; '.join(told)}"
        yield first.place, text


def _is_inside(key: str, section: str) -> bool:
    """Whether a section's own value need not be told, for a key in it is."""
    return key.startswith((f"{section}.", f"{section}["))


def _of_its_type(file: Reading, row: Row, value: Json) -> bool:
    """Whether a value is of the row's type, `equal:` held against the other key."""
    if not row.type:
        return False
    others = [kind.removeprefix("equal:") for kind in row.type.split("|") if kind.startswith("equal:")]
    plain = "|".join(kind for kind in row.type.split("|") if not kind.startswith("equal:"))
    return (plain != "" and accepts(plain, value)) or any(same(value, file.values[other]) for other in others)


def _refusal(row: Row, accepted: Sequence[Json]) -> str:
    """Why a value is refused, and which would not be."""
    ok = ", ".join([*dict.fromkeys(map(shown, accepted)), *([expected(row.type)] if row.type else [])])
    why = f"coming, not built yet: {row.what}" if row.status == "coming" else row.reason
    return f"{why} (accepted today: {ok})" if len(ok) < 200 else why


# ---------------------------------------------------------------- writing


def _chosen(file: Reading, writes: Iterable[_Write]) -> list[_Write]:
    """One write for each native key: what is given beats a default; two given values that differ are a problem."""
    best: dict[str, _Write] = {}
    for write in writes:
        other = best.get(write.native)
        if other is None or (write.given and not other.given):
            best[write.native] = write
        elif write.given and other.given and not same(write.value, other.value):
            text = (
                f"{write.key} asks for {write.native}={shown(write.value)}, {other.key}"
                f"{f' ({other.place})' if other.place else ''} for {shown(other.value)}; keep one of them"
            )
            file.problems.append((write.place, text))
    defaults = Config().model_dump(mode="json")
    return [w for w in best.values() if _says_something(w, _default(defaults, w))]


def _default(defaults: Mapping[str, Json], write: _Write) -> Json:
    """The native default of a key. A list has no entries by default: there a null counts against its own key's."""
    path = path_of(write.native, ())
    own = lookup(path) if write.value is None and any(isinstance(part, int) for part in path) else None
    return get(defaults, path) if own is None else own.default


def _says_something(write: _Write, default: Json) -> bool:
    """Whether a native key must be written: not for a null or a default that is also the native one."""
    return not same(write.value, default) or (write.given and write.value is not None)


def _origin(write: _Write, of: Dialect) -> str:
    if not write.given:
        return f"default of {write.key} ({of.name})"
    return (
        write.place
        if write.place.startswith("override ") or not write.place
        else f"{write.place} {write.key}"
    )


def _path(write: _Write) -> Path:
    """Where a native key is written. A function's name stands in its table, beside its settings."""
    path = path_of(write.native, ())
    return (*path, "name") if path in TABLES and isinstance(write.value, str) else path


def _names_alone(tree: dict[str, Json]) -> dict[str, Json]:
    """Tables of a name and no settings become the name."""
    for *above, last in map(list, TABLES):
        section = get(tree, tuple(above))
        if (
            isinstance(section, dict)
            and isinstance(section.get(last), dict)
            and section[last].keys() == {"name"}
        ):
            section[last] = section[last]["name"]
    return tree


def _escaped(value: Json) -> Json:
    """Text that has `${` in it stands for itself."""
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(v) for v in value]
    if isinstance(value, Reference):
        return str(value)
    return value.replace("${", "\\${") if isinstance(value, str) else value


# ---------------------------------------------------------------- report


def _lines(file: Reading, chosen: Sequence[_Write]) -> Iterator[ReportLine]:
    """One line for each key given, then one for each default that writes a native key or differs here."""
    fed: dict[str, list[str]] = {}
    for write in chosen:
        fed.setdefault(write.key, []).append(write.native)
    rows = {row.key: row for row in file.of.rows}
    for name, founds in file.given.items():
        row = rows[name]
        whole = row.native if row.status in WRITES else ()
        for found in founds:
            if not found.is_section or isinstance(found.value, list):
                native = tuple(fed.pop(dotted(found.path), fed.pop(name, whole)))
                newer = "" if found.alias else file.of.newer(row)
                told = f"{file.of.system} {file.of.version} does not have it ({newer})" if newer else ""
                note = "; ".join(filter(None, (found.note or _read_as(file, found), told)))
                other = _differs(file, row, found.value)
                yield ReportLine(
                    dotted(found.path), found.value, True, row.status, native, note, row.what, other
                )
    for name, natives in fed.items():
        row, value = rows[name], file.values[name]
        other = _differs(file, row, value)
        yield ReportLine(name, value, False, row.status, tuple(natives), "", row.what, other)
    for name in dict.fromkeys(each.key for each in file.of.differences):
        if name in rows and name not in file.given and name not in fed:
            row, value = rows[name], file.values.get(name)
            if other := _differs(file, row, value):
                yield ReportLine(name, value, False, row.status, (), "", row.what, other)


def _differs(file: Reading, row: Row, value: Json) -> str:
    """The known differences of a key that counts, with this value."""
    if not _counts(file, row.when):
        return ""
    reasons = (
        each.reason
        for each in file.of.differences
        if each.key == row.key and each.of_value(value) and _counts(file, each.when)
    )
    return " ".join(dict.fromkeys(reasons))


def _read_as(file: Reading, found: GivenValue) -> str:
    """A note where the system reads a text as something else."""
    if found.row is None or not isinstance(found.value, str):
        return ""
    value, _ = understood(
        found.value, found.row, default=file.defaults.get(found.row.key), nulls=file.of.nulls
    )
    return "" if isinstance(value, str) else f"the text {shown(found.value)} is read as {shown(value)}"
