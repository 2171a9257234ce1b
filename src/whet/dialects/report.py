"""What became of a foreign file's keys: a few lines before a run, or the whole list as markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from whet.config.faults import shown
from whet.dialects.row import Status
from whet.dialects.translate import ReportLine, Translation

MATTERS = ("stands in", "trust_remote_code", "loopback")
"""Words of a reason that a user should read before the run: an engine replaced, a default made safe."""

_MOST_KEYS = 8


def counts(lines: Sequence[ReportLine]) -> dict[Status, int]:
    """How many keys have each status, in the order of the statuses; those that do not occur are left out."""
    found = Counter(line.status for line in lines)
    return {status: found[status] for status in get_args(Status) if found[status]}


def summary(made: Translation) -> str:
    """The report before a run: counts, and what a user should know."""
    given = [line for line in made.lines if line.given]
    numbers = ", ".join(f"{count} {status}" for status, count in counts(given).items()) or "none"
    unset = len(made.lines) - len(given)
    as_what = f", read as {made.version}" if made.version else ""
    head = f"{made.dialect} file{as_what}: {len(given)} keys given ({numbers}), {unset} defaults of its document apply"
    return "\n".join([head, *(f"  {text}" for text in (*_release(made), *notes(made)))])


def _release(made: Translation) -> Iterator[str]:
    """Which numbers depend on the release where the file's keys do not tell it."""
    other, keys = made.otherwise
    if keys:
        more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
        yield (
            f"its keys do not determine the release; read as {other} it would differ in "
            f"{', '.join(keys[:_MOST_KEYS])}{more}. To choose the release: --dialect {made.dialect}@{other}"
        )


def notes(made: Translation) -> Iterator[str]:
    """Other names, texts read as numbers, keys that nothing reads here, engines that another one stands in for, and
    what is knowingly not as in the other system."""
    for line in made.lines:
        if line.note:
            yield f"{line.key}: {line.note}"
        if any(word in line.reason for word in MATTERS):
            yield f"{line.key}={shown(line.value)}: {line.reason}"
        if line.differs:
            yield f"differs: {line.key}={shown(line.value)}: {line.differs}"


def markdown(made: Translation, title: str) -> str:
    """Every key given, then every default that counts."""
    parts = [f"# {title}\n", summary(made).replace("\n  ", "\n- ") + "\n"]
    for head, given in (("Given", True), ("Defaults of the document that apply", False)):
        lines = [line for line in made.lines if line.given == given]
        if lines:
            titles = ("key", "value", "status", "native", "what happens")
            parts += [f"## {head}\n", table(titles, map(_row, lines))]
    return "\n".join(parts)


def _row(line: ReportLine) -> tuple[str, ...]:
    native = ", ".join(f"`{name}`" for name in line.native)
    differs = f"Differs: {line.differs}" if line.differs else ""
    said = "; ".join(text for text in (line.note, line.reason, differs) if text)
    return f"`{line.key}`", f"`{cell(shown(line.value))}`", line.status, native, cell(said)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown, of cells."""
    head = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows), ""])


def cell(text: str) -> str:
    """One line that a table cell can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
