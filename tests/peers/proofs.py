"""The proofs of files from the peers' own repositories: `whet convert FILE --prove`, each in a process of its own.

The files of proofs.tsv were chosen at random (`chosen`) from those that whet planned then. One line a file:

    system     whose file it is
    commit     of the repository
    path       in the repository
    arguments  what a user gives with it: a script's words and variables, overrides; split by spaces
    equal      rows of the proof that are equal
    noted      rows that differ as whet says
    apart      rows that cannot be compared, by name, split by `;`
    why        why not

`python -m peers.proofs` proves them, and ends with status 1 if one is not as its line says. --choose prints the choice,
--write writes the counts of what was found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from peers import repositories
from whet.config.evaluation import trains
from whet.config.hardware import ENOUGH, as_if
from whet.config.load import load
from whet.config.plan import plans
from whet.types import WhetError

TABLE = Path(__file__).with_name("proofs.tsv")
SEED = 13

GIVEN = {
    "HOME": "/root",
    "TRINITY_TASKSET_PATH": "data/tasks",
    "TRINITY_SFT_DATASET_PATH": "data/replies",
    "TRINITY_MODEL_PATH": "models/policy",
    "TRINITY_CRITIC_MODEL_PATH": "models/critic",
    "TRINITY_CHECKPOINT_ROOT_DIR": "runs",
}
"""Variables of the environment, which files of several systems read."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where files are chosen from."""

    system: str
    under: str
    ends: str
    number: int
    """How many."""
    without: str = ""
    """A regular expression: paths of jobs for no trainer, or of another source."""
    arguments: str = ""
    """What every file of it must be given."""


COMMITS = {system: of.commit for system, of in repositories.REPOSITORIES.items()} | {
    "skyrl": "f5bc3b78dfddfb352870d5d7430cd226e5785838",
    "trinity": "9051d6374db5d4199dbe317d33eb1caa2e42a9fb",
}
"""The newest that were read; of SkyRL, whose newest has keys that the installed release lacks, the tag of 0.3.0, and of
Trinity-RFT its branch in April 2026."""

SOURCES = (
    Source(system="verl", under="examples", ends=".sh", number=12, without="/(generation|sft)/"),
    Source(system="verl", under="examples/sft", ends=".sh", number=4, arguments="8 checkpoints"),
    Source(system="verl", under="verl/experimental/fully_async_policy/shell", ends=".sh", number=4),
    Source(system="skyrl", under="examples", ends=".sh", number=9, without="/sft/"),
    Source(system="skyrl", under="examples/train/sft", ends=".sh", number=2),
    Source(system="cosmos", under="configs", ends=".toml", number=8),
    Source(system="trinity", under="examples", ends=".yaml", number=8),
)


@dataclass(frozen=True, slots=True)
class Proved:
    """A line of proofs.tsv."""

    system: str
    commit: str
    path: str
    arguments: str
    equal: int
    noted: int
    apart: str
    why: str


def table() -> list[Proved]:
    """All lines of proofs.tsv."""
    head, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    if head.split("\t") != [each.name for each in fields(Proved)]:
        raise ValueError(f"{TABLE.name}: the first line must be the names of the columns; it is {head!r}")
    out = []
    for line in lines:
        system, commit, path, arguments, equal, noted, apart, why = line.split("\t")
        out.append(Proved(system, commit, path, arguments, int(equal), int(noted), apart, why))
    return out


def written(rows: Iterable[Proved]) -> str:
    """The text of proofs.tsv."""
    head = "\t".join(each.name for each in fields(Proved))
    return "\n".join([head, *("\t".join(map(str, astuple(row))) for row in rows)]) + "\n"


NAMES = {"verl": "verl", "skyrl": "SkyRL", "cosmos": "Cosmos-RL", "trinity": "Trinity-RFT"}

PAGE = """
## Files of their own repositories

{files} files, chosen at random (`tests/peers/proofs.py`) from those of the peers' repositories that whet plans, are
each compared with the peer's own code by `whet convert FILE --prove`: {rows} rows. A row is a group of numbers: sizes
of batch, mini-batch and micro-batch, numbers of steps, the learning rate in each step, the optimizer's settings, how
replies are sampled for training and evaluation, the advantages, the KL, the entropy's coefficient, the policy's loss
with its gradient (and so its clip bounds and means), the critic's.

| system | file | equal | differs as documented | not compared |
|---|---|---|---|---|
"""


def page() -> str:
    """The section of docs/peers.md, from the counts in proofs.tsv."""
    rows = table()
    lines = []
    for row in rows:
        apart = [name for name in row.apart.split(";") if name]
        told = f"{len(apart)} ({', '.join(apart)}: {row.why})" if apart else "0"
        lines.append(f"| {NAMES[row.system]} | `{row.path}` | {row.equal} | {row.noted} | {told} |")
    compared = sum(row.equal + row.noted for row in rows)
    return PAGE.format(files=len(rows), rows=compared) + "\n".join(lines) + "\n"


def planned(file: str, arguments: Sequence[str]) -> bool:
    """Whether whet plans a file as it is."""
    try:
        with as_if(None):
            loaded = load(Path(file), arguments, here=False)
        with as_if(ENOUGH):
            plans(loaded, here=False, trains=any(map(trains, loaded.stages)))
    except (WhetError, OSError, UnicodeDecodeError):
        return False
    return loaded.translation is not None


def chosen(of: Source, place: Path) -> list[Proved]:
    """Files at random from those of a source that whet plans, as lines without counts. place: for a checkout."""
    commit = COMMITS[of.system]
    repositories.checkout(of.system, of.under, place, commit)
    os.environ.update(GIVEN)
    with contextlib.chdir(place):
        found = sorted(str(path) for path in Path(of.under).rglob(f"*{of.ends}"))
        kept = [path for path in found if not (of.without and re.search(of.without, path))]
        plan = [path for path in kept if planned(path, of.arguments.split())]
    taken = random.Random(SEED).sample(plan, of.number)
    return [Proved(of.system, commit, path, of.arguments, 0, 0, "", "") for path in taken]


def convert(row: Proved, place: Path) -> tuple[dict[str, str], str]:
    """(result by the name of each row, everything written) of the proof of one file below a checkout."""
    command = [sys.executable, "-m", "whet", "convert", row.path, "--prove", *row.arguments.split()]
    env = os.environ | GIVEN | {"COLUMNS": "2000", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
    cells = [re.split(r"\s*│\s*", line.strip("│ ")) for line in done.stdout.splitlines() if "│" in line]
    return {each[0]: each[4] for each in cells if len(each) == 5}, done.stdout + done.stderr


def counted(row: Proved, results: Mapping[str, str]) -> Proved:
    """The line with what was found."""
    apart = [name for name, said in results.items() if said.startswith("not compared")]
    noted = sum(said.startswith("differs as documented") for said in results.values())
    equal = sum(said == "equal" for said in results.values())
    return replace(row, equal=equal, noted=noted, apart=";".join(apart))


def problem(row: Proved, results: Mapping[str, str], said: str) -> str:
    """What is not as the line says; empty: nothing."""
    if not results:
        return said[-2000:]
    wrong = [f"{name}: {told}" for name, told in results.items() if told.startswith("DIFFERS")]
    now = counted(row, results)
    expected, found = ({name for name in each.apart.split(";") if name} for each in (row, now))
    wrong += [f"{name}: {results[name]}" for name in sorted(found - expected)]
    wrong += [f"{name}: can be compared, though the line says not" for name in sorted(expected - found)]
    if not wrong and (fewer := row.equal + row.noted - now.equal - now.noted) > 0:
        wrong = [f"{fewer} rows fewer than the line says"]
    return "\n".join(wrong)


def prove(rows: list[Proved]) -> tuple[list[Proved], bool]:
    """The lines with what was found, and whether all is as they say; one line a file is printed."""
    out, good = [], True
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            under = Path(row.path).parts[0]
            place = Path(folder) / row.system / row.commit
            if not place.is_dir():
                repositories.checkout(row.system, under, place, row.commit)
            results, said = convert(row, place)
            found, wrong = counted(row, results), problem(row, results, said)
            told = f"{found.equal} equal, {found.noted} differ as noted, "
            told += f"{len(list(filter(None, found.apart.split(';'))))} not compared"
            print(f"{row.system} {row.path}: {told}" + (f" ({row.why})" if row.why else ""), flush=True)
            if wrong:
                print("    " + wrong.replace("\n", "\n    "), flush=True)
            out.append(found)
            good = good and not wrong
    return out, good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("systems", nargs="*", help="verl, skyrl, cosmos, trinity; all if none is given")
    parser.add_argument(
        "--choose", action="store_true", help="print the random choice, as lines of the table"
    )
    parser.add_argument("--write", action="store_true", help="write the counts into proofs.tsv")
    parser.add_argument("--what", default="", help="only files whose path has this text")
    told = parser.parse_args()
    systems = told.systems or ["verl", "skyrl", "cosmos", "trinity"]
    if told.choose:
        found = []
        for of in SOURCES:
            with tempfile.TemporaryDirectory() as place:
                found += chosen(of, Path(place)) if of.system in systems else []
        print(written(found), end="")
        return 0
    rows = [row for row in table() if row.system in systems and told.what in row.path]
    found, good = prove(rows)
    if told.write:
        by_path = {(row.system, row.path): row for row in found}
        TABLE.write_text(
            written(by_path.get((row.system, row.path), row) for row in table()), encoding="utf-8"
        )
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
