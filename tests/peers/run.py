"""`make test-peers`: every row of the comparison by peer, the keys of the peers' default files, and what
`whet convert --prove` says to a file of each and to files of their repositories (`proofs.py`). docs/peers.md is written
from the rows with --write.

Exit status 1 if a row differs without a documented reason, if a documented difference is none any more, if a peer does
not load, if whet does not know a key, or if a proof fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from peers import defaults, ours, proofs
from peers.files_of_peers import listed, summary
from peers.rows import ROWS
from peers.table import Row
from whet.prove import peers as loading
from whet.prove.cases import cases
from whet.prove.numbers import difference

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "peers.md"

EQUAL, DOCUMENTED, DIFFERS, STALE, BROKEN, NOT_LOADED = (
    "equal",
    "differs as documented",
    "DIFFERS",
    "EQUAL, BUT DOCUMENTED AS DIFFERENT",
    "FAILED",
    "NOT LOADED",
)
GOOD = (EQUAL, DOCUMENTED)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one row."""

    what: str
    theirs: str
    status: str
    worst: float = 0.0
    """The largest relative difference of all cases."""
    where: str = ""
    """The case that has it."""
    told: str = ""
    """Why it differs, or what went wrong."""


def compare(row: Row) -> Result:
    """The row over all its cases."""
    of = {"what": row.what, "theirs": row.theirs}
    try:
        function = loading.theirs(row.peer, row.theirs)
    except Exception as e:
        return Result(**of, status=NOT_LOADED, told=f"{type(e).__name__}: {e}")
    worst, where = 0.0, ""
    try:
        for case in cases(row.kinds):
            theirs = row.call(function, case, ours.given(row) if row.native is None else row.keys)
            apart = difference(theirs, row.ours(row, case), row.only, case.mask)
            if apart > worst:
                worst, where = apart, case.name
    except Exception as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        said = f"{type(e).__name__}: {e} ({Path(at.filename).name}:{at.lineno})"
        return Result(**of, status=BROKEN, told=said)
    if worst <= row.tolerance:
        return Result(**of, status=STALE if row.differs else EQUAL, told=row.differs, worst=worst)
    status = DOCUMENTED if row.differs else DIFFERS
    return Result(**of, status=status, worst=worst, where=where, told=row.differs or row.issue)


def quiet() -> None:
    """The peers' own warnings are not of interest here."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.suppress(ImportError):
        from loguru import logger

        logger.remove()


def measured(peer: str, what: str) -> list[Result]:
    """The rows of one peer, in this process."""
    quiet()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return [compare(row) for row in ROWS if row.peer == peer and what in row.what]


def apart(peer: str, what: str) -> list[Result]:
    """The rows of one peer, in a process of its own: what one peer changes on import must not reach another."""
    command = [sys.executable, "-m", "peers.run", peer, "--what", what, "--results"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    return [Result(**result) for result in json.loads(done.stdout.splitlines()[-1])]


FILES = {
    "verl": ("examples/from_verl.yaml", "tests/peers/files/verl_sft.yaml"),
    "skyrl": ("examples/from_skyrl.yaml", "tests/peers/files/skyrl_sft.yaml"),
    "trinity": ("examples/from_trinity.yaml", "tests/peers/files/trinity_stages.yaml"),
    "cosmos": ("examples/from_cosmos.toml", "tests/peers/files/cosmos_sft.toml"),
}
"""Files of each peer."""


def keys_known(peer: str) -> bool:
    """Whether whet knows all keys of the peer's own default files; those that it does not are printed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        lacking = defaults.unknown(peer, ours.READ_AS[peer])
    print(f"keys of the default files of {loading.PACKAGES[peer]}: {len(lacking)} not known to whet")
    print(*(f"  {each}" for each in lacking), sep="\n", end="\n" if lacking else "")
    return not lacking


def proved(file: str) -> bool:
    """Whether `whet convert --prove` holds for a file; its table is printed."""
    command = [sys.executable, "-m", "whet", "convert", file, "--prove"]
    wide = os.environ | {"COLUMNS": "180"}
    done = subprocess.run(command, cwd=ROOT, env=wide, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    return done.returncode == 0


def held(peer: str, what: str) -> bool:
    """Of one peer, in this process: its keys and its proofs."""
    quiet()
    return bool(what) or peer not in FILES or all([keys_known(peer), *map(proved, FILES[peer])])


def line(result: Result) -> str:
    text = f"{result.status:22} {result.what}"
    if result.where:
        text += f": up to {result.worst:.3g} ({result.where})"
    return text + (f"\n{'':25}{result.told}" if result.told else "")


def headline(peer: str, results: list[Result]) -> str:
    counts = Counter(result.status for result in results)
    return f"{loading.PACKAGES[peer]} {loading.version(peer) or '(not installed)'}: " + ", ".join(
        f"{number} {status}" for status, number in counts.items()
    )


INTRODUCTION = """\
# Comparison with the peers' own code

`make test-peers` installs the packages below, calls their own functions, and compares values and gradients with
whet's for the same settings: a config in the peer's keys, translated as `whet convert` does, or (TRL) a native one.
Batches are random and ragged: several turns, groups of one, a uniform group, empty replies, and log-probs so far apart
that every clamp acts. Two numbers are equal if they differ by less than the row's tolerance (1e-9; 1e-7 where the peer
adds 1e-8 to a denominator; 2e-6 where it computes in float32), relative to the larger of 1 and the peer's number.

Not compared: TRL's group advantages, which cannot be called apart from its generation loop, functions that whet does
not have, and what none of these packages has: M2PO (`m2po`, `correction.second_moment`), and verl's recipes `prime` and
`sppo`. The rows are in `tests/peers`; `make test-peers WRITE=--write` writes this page. It also reads the default files
that come with the packages (whet knows every key in them), and runs `whet convert FILE --prove`, which compares the
settings of a single file in the same way, on files of each system: RL, SFT, and one with two stages, and on files of
the peers' own repositories (below). `make test-releases` translates the default documents of all releases that whet
reads.

| peer | version | rows | equal | differs as documented | other |
|---|---|---|---|---|---|
"""


def page(by_peer: dict[str, list[Result]]) -> str:
    """docs/peers.md."""
    out = []
    for peer, results in by_peer.items():
        counts = Counter(result.status for result in results)
        numbers = (len(results), counts[EQUAL], counts[DOCUMENTED])
        cells = (loading.PACKAGES[peer], loading.version(peer), *numbers, len(results) - sum(numbers[1:]))
        out.append("| " + " | ".join(map(str, cells)) + " |")
    for peer, results in by_peer.items():
        out += ["", f"## {loading.PACKAGES[peer]} {loading.version(peer)}", ""]
        if replaced := loading.standins(peer):
            names = ", ".join(f"`{name}`" for name in replaced)
            out += [f"Stand-ins for what it imports and no formula reads: {names}.", ""]
        out += ["| settings | their function | result |", "|---|---|---|"]
        for result in results:
            said = f"{result.status}: {result.told}" if result.told else result.status
            said += f" (up to {result.worst:.2g})" if result.where else ""
            cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in (result.what, said))
            out.append(f"| {next(cells)} | `{result.theirs}` | {next(cells)} |")
    return INTRODUCTION + "\n".join(out) + "\n" + proofs.page() + "\n" + summary(listed())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("peers", nargs="*", help="verl, skyrl, trinity, cosmos, trl; all if none is given")
    parser.add_argument("--write", action="store_true", help="write docs/peers.md")
    parser.add_argument("--what", default="", help="only rows whose settings have this text")
    parser.add_argument("--results", action="store_true", help="print the results of one peer as JSON")
    parser.add_argument("--hold", action="store_true", help="only the keys and the proof of one peer")
    told = parser.parse_args()
    if told.hold:
        return int(not held(told.peers[0], told.what))
    if told.results:
        print(json.dumps([asdict(result) for result in measured(told.peers[0], told.what)]))
        return 0
    by_peer = {}
    for peer in told.peers or loading.PACKAGES:
        by_peer[peer] = apart(peer, told.what)
        print(headline(peer, by_peer[peer]))
        print(*(f"  {line(result)}" for result in by_peer[peer]), sep="\n", flush=True)
    command = [sys.executable, "-m", "peers.run", "--hold"]
    holds = [
        subprocess.run([*command, peer, "--what", told.what], check=False).returncode == 0 for peer in by_peer
    ]
    if not (told.peers or told.what):
        words = ["--write"] if told.write else []
        done = subprocess.run([sys.executable, "-m", "peers.proofs", *words], check=False)
        holds.append(done.returncode == 0)
    if told.write:
        PAGE.write_text(page(by_peer), encoding="utf-8")
    rows = [result.status in GOOD for results in by_peer.values() for result in results]
    return int(not all([*rows, *holds]))


if __name__ == "__main__":
    sys.exit(main())
