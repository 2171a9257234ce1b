"""tests/peers/files.tsv: what whet makes of each file of the peers that a user can start a run from.

Columns, tab-separated, one line a file, sorted by system, path and commit:

    system   a name of `repositories.REPOSITORIES`
    commit   of its repository
    path     in it
    verdict  `planned`: it loads and plans, perhaps with notes. `refused`: an error names what whet has not, or what the
             file lacks. `no run`: no config or launch of a run, as a helper or a part of another file
    feature  of refused files: what is refused, in a few words. Of `no run`: what the file is
    says     a piece of the error, by which the verdict is checked
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from peers.repositories import REPOSITORIES

TABLE = Path(__file__).parent / "files.tsv"
HEADING = "## Their example files and launch scripts\n"
VERDICTS = ("planned", "refused", "no run")
PLANNED, REFUSED, NO_RUN = VERDICTS


class Listed(NamedTuple):
    """A line of the table. The fields are the columns."""

    system: str
    commit: str
    path: str
    verdict: str
    feature: str = ""
    says: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """By which lines are sorted and told apart."""
        return self.system, self.path, self.commit


def listed() -> list[Listed]:
    """The lines of the table."""
    head, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert head.split("\t") == list(Listed._fields), head
    return [Listed(*line.split("\t")) for line in lines]


def written(rows: Iterable[Listed]) -> str:
    """The text of the table."""
    lines = [Listed._fields, *sorted(rows, key=lambda row: row.place)]
    return "".join("\t".join(line) + "\n" for line in lines)


def summary(rows: Sequence[Listed]) -> str:
    """The last section of docs/peers.md: files by system and verdict, refused ones by feature."""
    out = [
        HEADING,
        "`make test-files` reads every file of these repositories that a user can start a run from (examples, recipes,",
        "configs, integrations, scripts of their tests) as `whet convert` does, and compares what comes of it with",
        "`tests/peers/files.tsv`, which has a line for each. Files that are newer than the commit below have one of",
        "their own there. `no run`: no config or launch of a run. whet knows every key of the others, but for those",
        "that a program of the file's own defines.",
        "",
        "| repository | commit | files | planned | refused | no run |",
        "|---|---|---|---|---|---|",
    ]
    for system, of in REPOSITORIES.items():
        mine = [row for row in rows if row.system == system]
        counts = Counter(row.verdict for row in mine)
        cells = (
            f"{of.owner}/{of.name}",
            f"`{of.commit[:9]}`",
            len(mine),
            *(counts[each] for each in VERDICTS),
        )
        out.append("| " + " | ".join(map(str, cells)) + " |")
    systems = list(REPOSITORIES)
    out += ["", f"| refused for | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    counts = Counter((row.feature, row.system) for row in rows if row.verdict == REFUSED)
    total = Counter(row.feature for row in rows if row.verdict == REFUSED)
    for feature in sorted(total, key=lambda name: (-total[name], name)):
        cells = (feature, *(counts[feature, system] or "" for system in systems))
        out.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(out) + "\n"
