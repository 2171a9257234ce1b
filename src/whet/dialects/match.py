"""Which row of a dialect's table each value of a file belongs to, and what an unknown key was meant to be."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from whet.config.keys import Path, distance, lookup
from whet.dialects.kinds import holds_one
from whet.dialects.row import Row
from whet.dialects.tables import FILES, OPEN, Dialect, Parts, dialect, joined, parts
from whet.types import Json

FARTHEST = 2
"""Letters that a typo changes."""


@dataclass(frozen=True, kw_only=True)
class GivenValue:
    """One value of a file."""

    at: Path
    """Where it stands in the file."""
    path: Path
    """The same under present names."""
    cut: Parts
    """The same in the spelling of the rows' names."""
    value: Json
    row: Row | None
    """None: no row knows it, or it is a section that has no row of its own."""
    is_section: bool = False
    """It is a section or a list of sections; what is in it is found by itself."""
    note: str = ""
    """For people: that the file uses another name."""
    alias: str = ""
    """That name."""


def read(tree: Json, of: Dialect) -> list[GivenValue]:
    """Every value of a file with its row. Sections are gone through; what an open dict holds is taken whole."""
    return [found for found in _walk(tree, of, at=(), path=(), cut=()) if found.at]


def _walk(
    value: Json, of: Dialect, *, at: Path, path: Path, cut: Parts, note: str = "", name: str = ""
) -> Iterator[GivenValue]:
    row, below = of.by_parts.get(cut), of.below.get(cut)
    here = GivenValue(
        at=at, path=path, cut=cut, value=value, row=row, is_section=below is not None, note=note, alias=name
    )
    alias = of.aliases.get(joined(cut)) if row is None and below is None else None
    if alias:
        new = parts(alias[0])
        note = f"{joined(cut)} is read as {alias[0]}" + (f": {alias[1]}" if alias[1] else "")
        yield from _walk(value, of, at=at, path=_placed(new, path, cut), cut=new, note=note, name=joined(cut))
        return
    unknown = below is None and (row is None or (_holds_one(row) and isinstance(value, dict)))
    inside = list(_entries(value, below, names=of.aliases, at=cut)) if unknown or below is not None else []
    if not (unknown and inside):
        yield here
    for key, part, inner in inside:
        yield from _walk(inner, of, at=(*at, key), path=(*path, key), cut=(*cut, part), note=note, name=name)


def _placed(new: Parts, path: Path, cut: Parts) -> Path:
    """A present name with the numbers and names that stand in the other one's path."""
    own = [name for name, part in zip(path, cut) if part in ("[]", "<name>")]
    return tuple(own.pop(0) if part in ("[]", "<name>") and own else part for part in new)


def _holds_one(row: Row) -> bool:
    """Whether nothing but one value can be given for its key; what a reference stands for is not known yet."""
    return holds_one(row, row.default) and "${" not in str(row.default)


def _entries(
    value: Json, below: Iterable[str] | None, *, names: Container[str], at: Parts
) -> Iterator[tuple[str | int, str, Json]]:
    """What a section holds: (key, its part in the rows' names, value). `below` is None for an unknown one; names: the
    other names of keys."""
    if isinstance(value, list) and ("[]" in below if below is not None else any(map(_is_section, value))):
        yield from ((n, "[]", inner) for n, inner in enumerate(value))
    elif isinstance(value, dict) and "[]" not in (below or ()):
        for key, inner in value.items():
            yield key, key if joined((*at, key)) in names else _part(key, below or ()), inner


def _is_section(value: Json) -> bool:
    return isinstance(value, dict)


def _part(key: str, below: Iterable[str]) -> str:
    """The part that a key of a section matches; a typo of a known name does not count as a name of the user's."""
    if key in below or not {"<name>", "*"} & set(below):
        return key
    typo = any(len(name) > 3 and distance(key, name) <= (1 if len(name) < 8 else FARTHEST) for name in below)
    return key if typo else "<name>" if "<name>" in below else "*"


def given_keys(tree: Json, of: Dialect) -> list[str]:
    """The keys of the rows that a file gives, by the names that it uses."""
    return [found.alias or found.row.key for found in read(tree, of) if found.row is not None]


# ---------------------------------------------------------------- near misses


def meant(cut: Parts, of: Dialect) -> str:
    """What an unknown key was meant to be, as the end of a sentence: '; did you mean ...?'."""
    near = suggest(cut, of)
    if near:
        return f"; did you mean {' or '.join(near)}?" + elsewhere(cut, of)
    known = [name for name in of.below.get(_known(cut, of), ()) if name not in OPEN]
    return elsewhere(cut, of) or (f"; known here: {', '.join(known)}" if known else "")


def suggest(cut: Parts, of: Dialect) -> list[str]:
    """At most two keys of the dialect, the nearest first; empty if none is near.

    A typo anywhere in the key first, then the same name in another section, then nearly the same name. A name alone
    that a key of some section has is no typo.
    """
    is_name = len(cut) == 1 and any(name[-1] == cut[0] for name in of.by_parts)
    for n in range(len(cut), len(cut) if is_name else len(_known(cut, of)), -1):
        near = [
            (letters, order, name)
            for order, name in enumerate(of.by_parts)
            if (letters := _letters(cut[:n], name)) <= FARTHEST
        ]
        near = [entry for entry in near if not {"*", "<name>"} & set(entry[2])] or near
        if near:
            best = min(near)[0]
            return [joined(name).removesuffix(".*") for letters, _, name in near if letters == best][:2]
    for most in (0, 1, FARTHEST):
        ends = [
            name
            for name in of.by_parts
            if distance(cut[-1], name[-1]) <= (most if len(name[-1]) > 2 * most + 1 else 0)
        ]
        if ends:
            alike = sorted(ends, key=lambda name: (-_shared(cut, name), name[0] != cut[0]))
            return [joined(name) for name in alike][:2]
    return []


def _known(cut: Parts, of: Dialect) -> Parts:
    """The longest beginning that is a section of the dialect."""
    return next(cut[:n] for n in range(len(cut) - 1, -1, -1) if cut[:n] in of.below)


def _letters(cut: Parts, name: Parts) -> int:
    """Letters to change to make a key of it, part by part; more than `FARTHEST` is far."""
    if len(cut) != len(name):
        return FARTHEST + 1
    total = 0
    for mine, other in zip(cut, name):
        if mine != other and other not in ("<name>", "*"):
            total += distance(mine, other)
        if total > FARTHEST:
            break
    return total


def _shared(cut: Parts, name: Parts) -> int:
    """Parts that two keys have in common."""
    return len(set(cut) & set(name))


def elsewhere(cut: Parts, of: Dialect) -> str:
    """Who else knows a key by this name: other dialects, or whet itself."""
    owners = [name for name in FILES if name != of.name and cut in dialect(name).by_parts]
    if lookup(cut):
        owners.append("whet (a native key: write it below `whet:` in the file, or whet.KEY=VALUE)")
    return f"; it is a key of {', '.join(owners)}" if owners else ""
