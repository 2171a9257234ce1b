"""Versions of the systems: which one a file is read as, and which line of a key counts in it.

A key may have several lines, each for a span of versions. A file is read as one version: the one that is said
(`--dialect verl@0.9`), else the one that has most of the file's keys, the document's version before others, then newer
ones before older. A file with half of a release's keys is its whole document: then the one counts of which it lacks the
fewest. A key that this version has not is read by its nearest line, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from whet.dialects.row import BaseDefault, Difference, Row, Values, VersionRange
from whet.types import ConfigError

VERSIONS: dict[str, tuple[str, ...]] = {
    "verl": (
        "0.4.0",
        "0.4.1",
        "0.5.0",
        "0.6.0",
        "0.6.1",
        "0.7.0",
        "0.7.1",
        "0.8.0",
        "0.9.0",
        "main",
        "0.9.1",
    ),
    "skyrl": ("doc", "train-0.1", "train-0.2", "train-0.3", "train-0.4", "0.1", "0.2", "0.3", "main"),
    "cosmos": ("0.3.6", "0.3.7", "0.3.8", "0.3.9", "0.4.0", "0.4.1", "0.4.2", "0.4.3", "0.4.4", "0.4.7"),
    "trinity": ("0.4.0", "0.4.1", "0.5.0", "0.5.1", "0.5.2", "0.6.0"),
}
"""Releases that were read, oldest first. main: verl of 22 August 2026 (1dda039), between 0.9.0 and 0.9.1; SkyRL of 21
August 2026 (a956457). doc: SkyRL of 26 June 2025 (bafdbb5), from which its document is."""

DOCUMENTS = {"verl": "0.4.0", "skyrl": "doc", "cosmos": "0.3.6", "trinity": "0.4.0"}
"""The version of each system's configuration reference."""


VERSION = "@version"
"""Beside the keys of a file its values have the version that it is read as."""

GIVEN = "@given"
"""And the keys that it gives, which a value alone does not tell from a default."""


def since(values: Values, system: str, version: str) -> bool:
    """Whether a file is read as this release or a newer one, for functions whose meaning has changed."""
    versions = VERSIONS[system]
    return versions.index(values.get(VERSION, DOCUMENTS[system])) >= versions.index(version)


def covers(row: Row | VersionRange | Difference | BaseDefault, version: str, versions: Sequence[str]) -> bool:
    """Whether a version lies in a line's span: from `since` on, before `until`."""
    at = versions.index(version)
    return (not row.since or versions.index(row.since) <= at) and (
        not row.until or at < versions.index(row.until)
    )


def meet(one: Row | VersionRange | Difference, other: Row | VersionRange | Difference, system: str) -> bool:
    """Whether the spans of two lines have a version in common."""
    return any(
        covers(one, at, VERSIONS[system]) and covers(other, at, VERSIONS[system]) for at in VERSIONS[system]
    )


def span(since: str, until: str) -> str:
    """The versions of a line in words; '' for all."""
    return " ".join(f"{word} {at}" for word, at in (("since", since), ("until", until)) if at)


def at_version(rows: Iterable[Row], version: str, versions: Sequence[str]) -> tuple[Row, ...]:
    """One line for each key: the one whose span the version lies in, else the nearest."""
    spans: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        spans.setdefault((row.file, row.key), []).append(row)
    return tuple(min(lines, key=lambda row: _distance(row, version, versions)) for lines in spans.values())


def _distance(row: Row, version: str, versions: Sequence[str]) -> int:
    """How many releases a version lies outside of a line's span."""
    at = versions.index(version)
    first = versions.index(row.since) if row.since else 0
    end = versions.index(row.until) if row.until else len(versions)
    return max(first - at, at - end + 1, 0)


def first_of(alike: Sequence[str], system: str) -> str:
    """The version that a file is read as, of those that fit its keys, oldest first."""
    return DOCUMENTS[system] if DOCUMENTS[system] in alike else alike[-1]


def fitting(given: Iterable[Sequence[VersionRange]], system: str) -> tuple[str, ...]:
    """The versions that have most of a file's keys, oldest first: more than one where its keys do not tell."""
    versions = VERSIONS[system]
    lines = [spans for spans in given if any(any(span) for span in spans)]
    known = {
        version: sum(any(covers(span, version, versions) for span in spans) for spans in lines)
        for version in versions
    }
    return tuple(version for version in versions if known[version] == max(known.values()))


def version_named(system: str, text: str) -> str:
    """`0.9` -> `0.9.0`, the newest that begins so. Raises ConfigError."""
    found = [each for each in VERSIONS[system] if each == text or each.startswith(f"{text}.")]
    if not found:
        raise ConfigError(f"--dialect {system}@{text}: expected one of {', '.join(VERSIONS[system])}")
    return found[-1]
