"""Which system a config file is written for, by the keys that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whet.config.keys import lookup
from whet.config.tree import leaves
from whet.dialects.kinds import accepts
from whet.dialects.match import read
from whet.dialects.tables import FILES, NATIVE, dialect, has_sign, named
from whet.types import ConfigError, Json


def recognise(tree: Mapping[str, Json], wanted: str | None = None) -> str:
    """The kind of a file: `native` or a name of `FILES`. `wanted` narrows it: verl means any of verl's.

    The kind is taken that knows the largest share of the file's keys; native wins a tie. Of two others that know as
    many, the one counts whose keys have values of their types. Raises ConfigError if these are as many, too. No table
    is imported for a file whose sections are all native.
    """
    names = named(wanted) if wanted else tuple(FILES)
    if wanted == NATIVE or (wanted is None and _looks_native(tree)):
        return NATIVE
    if len(names) == 1:
        return names[0]
    shares = {name: _share(tree, name) for name in names if _has_sign(tree, name)}
    best = max(shares.values(), default=0.0)
    if wanted is None and best <= _native_share(tree):
        return NATIVE
    first = [name for name, share in shares.items() if share == best]
    if len(first) > 1:
        fits = {name: _fitting(tree, name) for name in first}
        first = [name for name in first if fits[name] == max(fits.values())]
    if len(first) > 1:
        raise ConfigError(_undecided(first, best))
    return first[0]


def _looks_native(tree: Mapping[str, Json]) -> bool:
    """Whether all sections of the file, and what stands directly in them, are native."""
    return all(
        lookup((top,)) and (not isinstance(inner, dict) or all(lookup((top, name)) for name in inner))
        for top, inner in tree.items()
    )


def _share(tree: Mapping[str, Json], name: str) -> float:
    """The part of a file's keys that a dialect knows."""
    found = [one for one in read(dict(tree), dialect(name)) if not one.is_section]
    return sum(one.row is not None for one in found) / max(len(found), 1)


def _fitting(tree: Mapping[str, Json], name: str) -> int:
    """How many of the file's keys a dialect knows with values of their types; a key of any value tells nothing."""
    known = [
        (one.row, one.value) for one in read(dict(tree), dialect(name)) if one.row and not one.is_section
    ]
    return sum(row.type != "any" and (not row.type or accepts(row.type, value)) for row, value in known)


def _native_share(tree: Mapping[str, Json]) -> float:
    paths = [path for path, _ in leaves(dict(tree)) if path]
    return sum(lookup(path) is not None for path in paths) / max(len(paths), 1)


def _has_sign(tree: Mapping[str, Json], name: str) -> bool:
    """Whether the key that tells two kinds of one system apart has this one's value."""
    key, values = FILES[name].sign
    return not key or has_sign(tree, key, values)


def _undecided(names: Sequence[str], share: float) -> str:
    known = "none of its keys" if share == 0 else f"{share:.0%} of its keys"
    return (
        f"cannot tell which system this file is for: {' and '.join(names)} each know {known}, and whet knows no more "
        f"of them. Choose one: --dialect {names[0]}"
    )
