"""A foreign file -> native keys, with a line for everything that happened and the place of everything given.

The file's references are resolved with the defaults of its document in view. Then every row of the table has its say:
rows that are mapped or translated write native keys, the others accept what changes nothing and refuse the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from whet.config.dialects.key import Key, Status
from whet.config.dialects.kinds import same, understood
from whet.config.dialects.match import Found, meant, read
from whet.config.dialects.tables import Dialect, joined, parts
from whet.config.faults import shown
from whet.config.interpolate import interpolate
from whet.config.keys import Path, dotted
from whet.config.schema import Config
from whet.config.tree import get, leaves, merge, origin, path_of
from whet.types import ConfigError, Json

WRITES: tuple[Status, ...] = ("mapped", "translated")


@dataclass(frozen=True)
class Line:
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


@dataclass(frozen=True)
class Translation:
    """A foreign file in native keys."""

    dialect: str
    tree: dict[str, Json]
    lines: tuple[Line, ...]
    problems: tuple[tuple[str, str], ...]
    """(place, text)"""
    origins: Mapping[Path, str]
    """Native path -> 'file.yaml:12 foreign.key', or 'default of foreign.key'."""


@dataclass(frozen=True, kw_only=True)
class _Write:
    """One native key that a row wants to write."""

    native: str
    value: Json
    key: str
    """The foreign key it comes from."""
    given: bool
    place: str


@dataclass
class _Job:
    """A translation on its way."""

    of: Dialect
    defaults: dict[str, Json] = field(default_factory=dict)
    values: dict[str, Json] = field(default_factory=dict)
    given: dict[str, list[Found]] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)
    writes: list[_Write] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def place(self, name: str) -> str:
        """Where a key was given; '' if it was not."""
        found = self.given.get(name)
        return self.places.get(found[0].at, "") if found else ""


def translate(tree: Mapping[str, Json], dialect: Dialect, *, origins: Mapping[Path, str]) -> Translation:
    """The native keys of a foreign file. What is wrong stands in `problems`; nothing is raised."""
    job = _Job(of=dialect)
    _read(job, dict(tree), origins)
    done: set[int] = set()
    for row in dialect.rows:
        if row.name in dialect.optional and row.name not in job.given:
            continue
        if row.translate is not None:
            if id(row.translate) not in done and (row.status != "derived" or row.name in job.given):
                done.add(id(row.translate))
                _call(job, row)
        elif row.status == "mapped":
            _map(job, row)
        else:
            _check(job, row)
    chosen = _chosen(job)
    return Translation(
        dialect=dialect.name,
        tree=_nested({path_of(w.native, ()): _escaped(w.value) for w in chosen}),
        lines=tuple(_lines(job, chosen)),
        problems=tuple(dict.fromkeys(job.problems)),
        origins={path_of(w.native, ()): _origin(w, dialect) for w in chosen},
    )


# ---------------------------------------------------------------- reading


def _read(job: _Job, tree: dict[str, Json], origins: Mapping[Path, str]) -> None:
    """Fill values, given and places; unknown keys and references that fail are problems."""
    defaults = _nested({parts(row.name): row.default for row in job.of.rows if _is_plain(row, job.of)})
    full, wrong = interpolate(_rebased(_filled(defaults, tree), job.of.inner), {})
    written = {path for path, _ in leaves(tree)}
    for path, said in wrong.items():
        row = job.of.row(dotted(path))
        if path in written:
            job.problems.append((origin(origins, path), f"{dotted(path)}: {said}"))
        elif row and row.status in (*WRITES, "derived"):
            job.problems.append(("", f"{dotted(path)}: its default, {shown(row.default)}: {said}"))
    job.defaults = _defaults(job.of, full)
    present: dict[Path, Json] = {}
    for one in read(_taken(tree, full), job.of):
        job.places[one.at] = origin(origins, one.at)
        problem = _misplaced(one, job.of) or _twice(one, present)
        if problem:
            job.problems.append((job.places[one.at], problem))
        elif one.path not in present:
            present[one.path] = _understood(job, one)
            if one.row is not None:
                job.given.setdefault(one.row.name, []).append(one)
    above = {path[:n] for path in present for n in range(1, len(path))}
    _fill(job, _nested({path: value for path, value in present.items() if path not in above}))


def _misplaced(one: Found, of: Dialect) -> str:
    """What is wrong with a key that no row knows, or with a section that is none; or ''."""
    if not one.is_section:
        return "" if one.row else f"{joined(one.cut)}: unknown key{meant(one.cut, of)}"
    many = "[]" in of.below[one.cut]
    if one.value is None or isinstance(one.value, list if many else dict):
        return ""
    wanted = "a list of sections" if many else f"a section (keys: {', '.join(of.below[one.cut])})"
    return f"{joined(one.cut)}: got {shown(one.value)}, expected {wanted}"


def _twice(one: Found, present: Mapping[Path, Json]) -> str:
    """What is wrong with a key that the file has under two names, or ''."""
    if one.path not in present or one.is_section or same(present[one.path], one.value):
        return ""
    said = f"{dotted(one.path)}: given twice, as {shown(present[one.path])} and {shown(one.value)}"
    return f"{said}; {one.note or 'keep one'}"


def _understood(job: _Job, one: Found) -> Json:
    """The value as that system reads it. What cannot be meant is a problem, and the default stands in for it."""
    if one.row is None or one.is_section:
        return one.value
    default = job.defaults.get(one.row.name)
    value, problem = understood(one.value, one.row, default=default, nulls=job.of.nulls)
    if problem:
        job.problems.append((job.places[one.at], f"{dotted(one.path)}: {problem}"))
        return default
    return value


def _is_plain(row: Key, of: Dialect) -> bool:
    """Whether it is the key of one value: no section, no entry of a list, no open name."""
    cut = parts(row.name)
    return cut not in of.below and not {"[]", "<name>", "*"} & set(cut)


def _defaults(of: Dialect, full: Json) -> dict[str, Json]:
    """Every row's default, references resolved with the file's values in view."""
    texts = {row.name: row.default for row in of.rows if _refers(row.default)}
    tree = _rebased(_nested({parts(name): text for name, text in texts.items()}), of.inner)
    resolved, _ = interpolate({"_": tree}, full)
    return {
        row.name: get(resolved, ("_", *parts(row.name))) if row.name in texts else row.default
        for row in of.rows
    }


def _refers(value: Json) -> bool:
    return any(isinstance(text, str) and "${" in text for _, text in leaves(value))


def _fill(job: _Job, present: Json) -> None:
    """The value of every row: what is given, else the document's default."""
    for row in job.of.rows:
        cut = parts(row.name)
        if cut[-1] == "*":
            inside, known = get(present, cut[:-1]) or {}, job.of.below[cut[:-1]]
            job.values[row.name] = {k: v for k, v in inside.items() if k not in known} or row.default
        elif not {"[]", "<name>"} & set(cut):
            given = row.name in job.given
            job.values[row.name] = get(present, cut) if given else job.defaults[row.name]


def _filled(defaults: Json, tree: Json) -> Json:
    """The file over the defaults; a section that is null or empty keeps its defaults."""
    if isinstance(defaults, dict) and defaults and (tree is None or isinstance(tree, dict)):
        tree = tree or {}
        own = {k: v for k, v in tree.items() if k not in defaults}
        return {**{k: _filled(v, tree[k]) if k in tree else v for k, v in defaults.items()}, **own}
    return tree


def _taken(tree: Json, full: Json) -> Json:
    """What the file has, references resolved."""
    if isinstance(tree, dict) and isinstance(full, dict):
        return {k: _taken(v, full.get(k)) for k, v in tree.items()}
    if isinstance(tree, list) and isinstance(full, list):
        return [_taken(v, w) for v, w in zip(tree, full)]
    return full if tree is not None else None


def _rebased(tree: Json, inner: str) -> Json:
    """References inside a section that was a file of its own, made to start at the top."""
    section = get(tree, parts(inner)) if inner else None
    names = [name for name in section if name not in tree] if isinstance(section, dict) else []
    if not names:
        return tree
    start = re.compile(rf"\$\{{(?=(?:{'|'.join(map(re.escape, names))})\b)")

    def moved(value: Json) -> Json:
        if isinstance(value, dict):
            return {k: moved(v) for k, v in value.items()}
        if isinstance(value, list):
            return [moved(v) for v in value]
        return start.sub(f"${{{inner}.", value) if isinstance(value, str) else value

    return merge(tree, _nested({parts(inner): moved(section)}))


# ---------------------------------------------------------------- rows


def _map(job: _Job, row: Key) -> None:
    """The value goes over as it is; an entry of a list to the entry with the same number."""
    cut = parts(row.name)
    if cut in job.of.below:
        return
    if not {"[]", "<name>"} & set(cut):
        _write(job, row.native[0], job.values[row.name], rows=[row])
        return
    for found in job.given.get(row.name, ()):
        native = row.native[0]
        for part, pattern in zip(found.path, cut):
            if pattern in ("[]", "<name>"):
                native = native.replace("*", str(part), 1)
        place = job.places[found.at]
        job.writes.append(
            _Write(native=native, value=found.value, key=dotted(found.path), given=True, place=place)
        )


def _call(job: _Job, row: Key) -> None:
    """Run a function once for all its rows."""
    rows = [r for r in job.of.rows if r.translate is row.translate]
    assert row.translate is not None
    try:
        native = row.translate(job.values)
    except ConfigError as e:
        job.problems.append(_told(job, rows, str(e)))
        return
    for key, value in native.items():
        _write(job, key, value, rows=[r for r in rows if _declares(r, key)] or rows)


def _told(job: _Job, rows: Sequence[Key], said: str) -> tuple[str, str]:
    """A function's complaint with the place of the first given key that it names, or that the function reads."""
    names = [r.name for r in job.of.rows if re.search(rf"(?<![\w.]){re.escape(r.name)}(?![\w.]\w)", said)]
    given = [name for name in (*names, *(r.name for r in rows)) if name in job.given]
    return job.place(given[0]) if given else "", said if names else f"{(given or [rows[0].name])[0]}: {said}"


def _declares(row: Key, native: str) -> bool:
    return any(native == key or native.startswith(f"{key}.") for key in row.native)


def _write(job: _Job, native: str, value: Json, *, rows: Sequence[Key]) -> None:
    """Note a native key; its source is the first of the rows that the file gives."""
    given = next((row.name for row in rows if row.name in job.given), "")
    job.writes.append(
        _Write(
            native=native,
            value=value,
            key=given or rows[0].name,
            given=bool(given),
            place=job.place(given),
        )
    )


def _check(job: _Job, row: Key) -> None:
    """A row that does nothing here accepts its default and harmless values."""
    accepted = (job.defaults[row.name], *row.harmless)
    for found in job.given.get(row.name, ()):
        is_filled = isinstance(found.value, list) or (row.default is None and found.value)
        if found.is_section and not is_filled:
            continue  # what is in it is judged by its own rows
        if not any(same(found.value, ok) for ok in accepted):
            text = f"{dotted(found.path)}: got {shown(found.value)}; {_refusal(row, accepted)}"
            job.problems.append((job.places[found.at], text))


def _refusal(row: Key, accepted: Sequence[Json]) -> str:
    """Why a value is refused, and which would not be."""
    ok = ", ".join(dict.fromkeys(map(shown, accepted)))
    why = {
        "coming": f"coming, not built yet: {row.reason}",
        "engine": f"coming with {' and '.join(row.native)}: {row.reason}",
        "inert": f"it cannot matter here: {row.reason}",
    }.get(row.status, row.reason)
    return f"{why} (accepted today: {ok})" if len(ok) < 200 else why


# ---------------------------------------------------------------- writing


def _chosen(job: _Job) -> list[_Write]:
    """One write for each native key: what is given beats a default; two given values that differ are a problem."""
    best: dict[str, _Write] = {}
    for write in job.writes:
        other = best.get(write.native)
        if other is None or (write.given and not other.given):
            best[write.native] = write
        elif write.given and other.given and not same(write.value, other.value):
            text = (
                f"{write.key} asks for {write.native}={shown(write.value)}, {other.key}"
                f"{f' ({other.place})' if other.place else ''} for {shown(other.value)}; keep one of them"
            )
            job.problems.append((write.place, text))
    defaults = Config().model_dump(mode="json")
    return [w for w in best.values() if _says_something(w, get(defaults, path_of(w.native, ())))]


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


def _escaped(value: Json) -> Json:
    """Text that has `${` in it stands for itself."""
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(v) for v in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _nested(flat: Mapping[Path, Json]) -> dict[str, Json]:
    """Values by path as one tree; numbers in a path make lists, in their order."""
    out: dict[str | int, Json] = {}
    for path, value in flat.items():
        around = out
        for part in path[:-1]:
            inner = around.get(part)
            around[part] = dict(inner) if isinstance(inner, dict) else {}
            around = around[part]
        around[path[-1]] = merge(around.get(path[-1]), value)
    listed: dict[str, Json] = _listed(out)
    return listed


def _listed(value: Json) -> Json:
    if not isinstance(value, dict):
        return value
    inner = {k: _listed(v) for k, v in value.items()}
    return [inner[k] for k in sorted(inner)] if inner and all(isinstance(k, int) for k in inner) else inner


# ---------------------------------------------------------------- report


def _lines(job: _Job, chosen: Sequence[_Write]) -> Iterator[Line]:
    """One line for each key given, then one for each default that writes a native key."""
    fed: dict[str, list[str]] = {}
    for write in chosen:
        fed.setdefault(write.key, []).append(write.native)
    rows = {row.name: row for row in job.of.rows}
    for name, founds in job.given.items():
        row = rows[name]
        whole = row.native if row.status in WRITES else ()
        for found in founds:
            if not found.is_section or isinstance(found.value, list):
                native = tuple(fed.pop(dotted(found.path), fed.pop(name, whole)))
                note = found.note or _read_as(job, found)
                yield Line(dotted(found.path), found.value, True, row.status, native, note, row.reason)
    for name, natives in fed.items():
        row = rows[name]
        yield Line(name, job.values[name], False, row.status, tuple(natives), "", row.reason)


def _read_as(job: _Job, found: Found) -> str:
    """A note where the system reads a text as something else."""
    if found.row is None or not isinstance(found.value, str):
        return ""
    value, _ = understood(
        found.value, found.row, default=job.defaults.get(found.row.name), nulls=job.of.nulls
    )
    return "" if isinstance(value, str) else f"the text {shown(found.value)} is read as {shown(value)}"
