"""`make test-files`: every file of the peers that a user can start a run from, read as `whet convert` does, against
tests/peers/files.tsv (`files_of_peers.py` explains its columns).

    python -m peers.table_of_files [SYSTEM...] [--write]

Exit status 1 if a verdict or a text differs, if a file is not in the table, or if a file has a key that whet does not
know. --write brings the table up to date: what is refused without a line of FEATURES has the feature `?`. Repositories
come from `repositories.py`. Files lie in a temporary folder, the working folder of the launches, since a script may
read others. A user would set what scripts ask for: all of them get the variables and arguments of `files_words.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from peers import repositories
from peers.files_of_peers import HEADING, NO_RUN, PLANNED, REFUSED, TABLE, Listed, listed, summary, written
from peers.files_words import ARGUMENTS, FEATURES, FILES, NO_RUNS, VARIABLES
from whet.config.evaluation import scores_alone, trains
from whet.config.faults import Refused
from whet.config.hardware import ENOUGH, as_if
from whet.config.load import load
from whet.config.plan import plans
from whet.types import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "peers.md"
OWN = "may define keys of its own"
"""What a refusal says of a program that is no part of the system: the keys that it defines are not counted."""
LIES_IN = {"recipe": "recipe"}
"""A repository that is a folder of another one's, from whose root its files are started."""
SUFFIXES = (".sh", ".yaml", ".yml", ".toml")
FOLDERS: Mapping[str, tuple[str, ...]] = {
    "verl": ("examples", "tests", "verl/experimental"),
    "skyrl": ("examples", "integrations", "skyrl-agent", "tests"),
    "cosmos": ("configs", "cosmos_rl", "reward_service", "tests"),
    "trinity": ("benchmark", "examples", "scripts", "tests"),
    "recipe": (".",),
}
"""Where files are that a user starts. Not in: workflows of the repository's own machines, images, documentation, and
the defaults of the packages, all of whose keys `make test-peers` looks for."""


class Read(NamedTuple):
    """What came of a file."""

    verdict: str
    said: str = ""
    """All of the refusal."""
    unknown: tuple[str, ...] = ()
    """Keys that whet does not know."""


def read(path: str, arguments: tuple[str, ...] = ()) -> Read:
    """A file below the working folder, as `whet convert` reads it."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            loaded = load(path, arguments, here=False)
            if not scores_alone(loaded.config, loaded.stages):
                with as_if(ENOUGH if loaded.translation else None):
                    plans(loaded, here=False, trains=any(map(trains, loaded.stages)))
    except ConfigError as e:
        problems = [text for _, text in e.problems] if isinstance(e, Refused) else [str(e)]
        said = "\n".join(problems)
        unknown = [text.partition(":")[0] for text in problems if ": unknown key" in text]
        return Read(REFUSED, said, () if OWN in said else tuple(unknown))
    return Read(PLANNED)


def arguments_of(path: str) -> tuple[str, ...]:
    """What a script is given: the arguments that it asks for."""
    if not path.endswith(".sh"):
        return ()
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    return next((words for usage, words in ARGUMENTS.items() if usage in text), ())


def kind_of_no_run(system: str, path: str) -> str:
    """What a file is that no run starts from; '' if one may."""
    place = f"{system}/{path}"
    return next((kind for where, kind in NO_RUNS.items() if re.search(where, place)), "")


def line(system: str, commit: str, path: str, came: Read, before: Listed | None) -> Listed:
    """The line of the table for what came of a file: that which is there, as long as it holds."""
    if before is not None and before.feature != "?" and not differs(before, came):
        return before
    no_run = kind_of_no_run(system, path)
    if came.verdict == PLANNED:
        return Listed(system, commit, path, PLANNED)
    if no_run:
        return Listed(system, commit, path, NO_RUN, no_run)
    found = next(((says, feature) for says, feature in FEATURES.items() if says in came.said), None)
    says, feature = found or (came.said.replace("\t", " ").split("\n")[0][:60], "?")
    return Listed(system, commit, path, REFUSED, feature, says)


def differs(row: Listed, came: Read) -> str:
    """How what came of a file differs from its line; '' if it does not."""
    if (came.verdict == PLANNED) != (row.verdict == PLANNED):
        return f"{row.verdict} in the table; it is {came.verdict}: {came.said[:300]}"
    if row.says not in came.said:
        return f"the refusal does not say {row.says!r}: {came.said[:300]}"
    return ""


@contextlib.contextmanager
def checked_out(system: str, commit: str) -> Iterator[list[str]]:
    """The paths of a commit's files in the repository, which lies in the working folder, or in `LIES_IN`."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        paths = repositories.files(system, commit)
        tops = {
            part for part in FOLDERS[system] if part == "." or any(p.startswith(f"{part}/") for p in paths)
        }
        for top in sorted(tops):
            repositories.checkout(system, top, Path(folder, LIES_IN.get(system, ".")), commit)
        for name, text in FILES.items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text(text, encoding="utf-8")
        os.chdir(folder)
        try:
            yield [p for p in paths if Path(p).suffix in SUFFIXES and within(system, p)]
        finally:
            os.chdir(before)


def within(system: str, path: str) -> bool:
    """Whether a file is in a folder that users start runs from."""
    name = path.rpartition("/")[2]
    inside = any(part == "." or path.startswith(f"{part}/") for part in FOLDERS[system])
    return inside and not path.startswith(".") and name not in ("pyproject.toml", "ruff.toml")


def compare(system: str, commit: str, table: list[Listed]) -> tuple[list[Listed], list[str], list[str]]:
    """(lines that hold, what differs, unknown keys) of a commit."""
    rows = {row.path: row for row in table if row.system == system and row.commit == commit}
    lines, problems, unknown = [], [], []
    with checked_out(system, commit) as paths:
        for path in paths:
            file = str(Path(LIES_IN.get(system, "."), path))
            came, row = read(file, arguments_of(file)), rows.pop(path, None)
            lines.append(line(system, commit, path, came, row))
            if told := "not in the table" if row is None else differs(row, came):
                problems.append(f"{system} {path}: {told}")
            if lines[-1].verdict != NO_RUN:
                unknown += [f"{system} {path}: {key}" for key in came.unknown]
    problems += [f"{system} {path}: in the table, and not at {commit[:9]}" for path in rows]
    return lines, problems, unknown


def counted(rows: list[Listed]) -> Iterator[str]:
    """Counts by system and verdict, and by feature."""
    for system in dict.fromkeys(row.system for row in rows):
        mine = [row for row in rows if row.system == system]
        verdicts = Counter(row.verdict for row in mine)
        yield f"{system}: {len(mine)} files, " + ", ".join(f"{n} {name}" for name, n in verdicts.items())
        features = Counter((row.verdict, row.feature) for row in mine if row.verdict != PLANNED)
        yield from (f"  {verdict:8} {n:3} {feature}" for (verdict, feature), n in features.most_common())


def given(variables: Mapping[str, str]) -> None:
    """The environment of the launches: these variables, and of this process's what Python itself needs."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    places = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, places))
    os.environ.clear()
    os.environ.update(kept | {"HOME": "/home/user", "USER": "user"} | variables)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("systems", nargs="*", help=f"{', '.join(FOLDERS)}; all if none is given")
    parser.add_argument("--write", action="store_true", help="write tests/peers/files.tsv and docs/peers.md")
    told = parser.parse_args()
    table = listed() if TABLE.exists() else []
    systems = told.systems or list(FOLDERS)
    for system in systems:
        repositories.directory(system)  # git clones with the user's own settings
    given(VARIABLES)
    lines, problems, unknown = [], [], []
    for system in systems:
        commits = [repositories.REPOSITORIES[system].commit]
        commits += [row.commit for row in table if row.system == system]
        commits += repositories.loose(system)
        for commit in dict.fromkeys(commits):
            if not repositories.has(system, commit):
                rest = [row for row in table if row.system == system and row.commit == commit]
                missing = f"{system}: commit {commit} is not here; {len(rest)} files are not read"
                print(missing)
                problems += [missing] if commit == repositories.REPOSITORIES[system].commit else []
                lines += rest
                continue
            for all_of_them, some in zip((lines, problems, unknown), compare(system, commit, table)):
                all_of_them += some
    print(*counted(lines), *problems, *unknown, f"unknown keys: {len(unknown)}", sep="\n")
    if told.write:
        read_now = {row.system for row in lines}
        rows = sorted(
            [*lines, *(row for row in table if row.system not in read_now)], key=lambda row: row.place
        )
        TABLE.write_text(written(rows), encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip("\n")
        PAGE.write_text(f"{page}\n\n{summary(rows)}", encoding="utf-8")
    return int(bool(unknown) or (bool(problems) and not told.write))


if __name__ == "__main__":
    sys.exit(main())
