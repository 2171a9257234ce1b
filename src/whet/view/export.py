"""`whet view RUN --export report.html`: the pages and their answers in one file, which needs no server."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa

from whet.notices import write
from whet.track.dumps import finite_json
from whet.track.report import printable
from whet.types import DataError, Json
from whet.view.answers import answer
from whet.view.rollouts import all_summaries, summaries
from whet.view.source import NotThere, Shown, ShownRuns

STATIC = Path(__file__).parent / "static"
MOST_SUMMARIES = 20_000
"""Rollouts of a run that are listed; of a longer one, those of the chosen steps."""
MOST_COMPARED = 4
"""Runs that are compared with each other."""
EXTREMES = 5
"""Rollouts with the highest rewards of a stage, and as many with the lowest."""


def write_report(paths: Sequence[Path], file: Path, *, most: int) -> str:
    """Write the file; at most `most` rollouts whole. Returns what is in it, for people. ConfigError if it cannot be
    written."""
    runs = ShownRuns(paths)
    answers, told = gathered(runs, most)
    text = page(answers)
    write(file, text)
    return f"{file}: {len(text.encode()) / 2**20:.1f} MiB; {told}"


# ---------------------------------------------------------------- which answers


def gathered(runs: ShownRuns, most: int) -> tuple[dict[str, Json], str]:
    """The answers by address, and what was chosen."""
    found: dict[str, Json] = {}
    said = []

    def take(*parts: str | int, **query: str | int) -> None:
        url = address(*parts, **query)
        with suppress(DataError, NotThere):  # the page says that it is not there; the run's page says why
            found[url] = finite_json(answer(runs, url))

    for run in runs.runs:
        for parts, query in _summary_pages(run):
            take(*parts, **query)
        chosen = choose(run, most // len(runs.runs))
        for stage, step, row in sorted(chosen.rows):
            take("runs", run.id, "rollouts", stage, step, row)
        for stage, step, uid in sorted(chosen.groups):
            take("runs", run.id, "groups", stage, step, uid)
        steps = None if chosen.total <= MOST_SUMMARIES else chosen.steps
        found[address("runs", run.id, "rollouts", files="all")] = finite_json(all_summaries(run, steps))
        listed = "" if steps is None else ", others of these steps in lists only"
        said.append(f"{printable(run.name)}: {chosen}{listed}")
    for one, other in combinations(runs.runs[:MOST_COMPARED], 2):
        take("compare", a=one.id, b=other.id)
        for stage, step in _last_in_both(one, other):
            take("compare", "replies", a=one.id, b=other.id, stage=stage, step=step)
    told = "\n".join(said)
    listed = answer(runs, "api/runs")
    found["api/runs"] = finite_json({**listed, "live": False, "exported": told})
    return found, told


def address(*parts: str | int, **query: str | int) -> str:
    """The URL of an answer as the page writes it."""
    path = "/".join(["api", *(quote(str(part), safe=_UNCHANGED) for part in parts)])
    pairs = "&".join(f"{name}={quote(str(value), safe=_UNCHANGED)}" for name, value in query.items())
    return f"{path}?{pairs}" if pairs else path


_UNCHANGED = "!'()*~"
"""What encodeURIComponent leaves, beside letters, digits and -_."""


def _summary_pages(run: Shown) -> Iterator[tuple[tuple[str, ...], dict[str, str | int]]]:
    at = ("runs", run.id)
    yield at, {}
    for name in ("metrics", "ledger", "timeline", "evals"):
        yield (*at, name), {}
    try:
        stages, evaluated = run.stages, run.files("eval")
    except DataError:
        return
    for stage in stages:
        yield (*at, "rewards"), {"stage": stage}
        yield (*at, "mismatch"), {"stage": stage}
        steps = [step for name, step, _ in evaluated if name == stage]
        for one, other in dict.fromkeys([*pairwise(steps), *zip(steps[:1], steps[-1:])]):
            yield (*at, "evals", "flips"), {"stage": stage, "from": one, "to": other}


def _last_in_both(one: Shown, other: Shown) -> Iterator[tuple[str, int]]:
    """The last step of each stage whose rollouts both runs have."""
    places = [{(stage, step) for stage, step, _ in run.files()} for run in (one, other)]
    shared = places[0] & places[1]
    for stage in sorted({stage for stage, _ in shared}):
        yield stage, max(step for name, step in shared if name == stage)


# ---------------------------------------------------------------- which rollouts


@dataclass
class ExportedRows:
    """The rollouts of a run that come whole."""

    rows: set[tuple[str, int, int]] = field(default_factory=set)
    """(stage, step, row)"""
    groups: set[tuple[str, int, int]] = field(default_factory=set)
    """(stage, step, uid) of those that come with all their rollouts."""
    steps: dict[str, list[int]] = field(default_factory=dict)
    total: int = 0
    """Rollouts in the record."""

    def __str__(self) -> str:
        if not self.rows:
            return f"no rollout of {self.total}" if self.total else "no rollouts are written down"
        of = "; ".join(f"{stage} steps {', '.join(map(str, steps))}" for stage, steps in self.steps.items())
        return f"{len(self.rows)} of {self.total} rollouts ({of}; and the highest and lowest rewards)"


def choose(run: Shown, most: int) -> ExportedRows:
    """Of each stage the extremes, and whole groups of the first, middle and last step; at most `most` rollouts."""
    chosen, tables = ExportedRows(), dict[str, dict[int, pa.Table]]()
    for stage, step, path in run.files():
        try:
            tables.setdefault(stage, {})[step] = run.kept(summaries, path)
        except DataError:
            continue  # the run's page says that it cannot be read
    for stage, own in tables.items():
        chosen.total += sum(table.num_rows for table in own.values())
        steps = list(own)
        chosen.steps[stage] = [steps[n] for n in sorted({0, len(steps) // 2, len(steps) - 1})]
        _choose_in(chosen, stage, own, room=most // len(tables))
    return chosen


def _choose_in(chosen: ExportedRows, stage: str, own: dict[int, pa.Table], *, room: int) -> None:
    """Of one stage."""
    rewards = [(r, step, row) for step, t in own.items() for row, r in enumerate(t["reward"].to_pylist())]
    ranked = sorted(one for one in rewards if one[0] is not None)
    ends = [*ranked[:EXTREMES], *ranked[::-1][:EXTREMES]][: room // 2]
    taken = {(stage, step, row) for _, step, row in ends}
    steps = chosen.steps[stage]
    for number, step in enumerate(steps):
        left = (room - len(taken)) // (len(steps) - number)
        for uid, rows in _groups(own[step]).items():
            new = {(stage, step, row) for row in rows} - taken
            if len(new) > left:
                break
            taken |= new
            left -= len(new)
            chosen.groups.add((stage, step, uid))
    chosen.rows |= taken


def _groups(table: pa.Table) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row, uid in enumerate(table["uid"].to_pylist()):
        found.setdefault(uid, []).append(row)
    return found


# ---------------------------------------------------------------- the file


def page(answers: dict[str, Json]) -> str:
    """The page of the server with its files and these answers inside. Only these scripts and styles may run in it."""
    text = (STATIC / "index.html").read_text(encoding="utf-8")
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    script = one_script(text)
    packed = base64.b64encode(gzip.compress(json.dumps(answers, allow_nan=False).encode("ascii"), 9, mtime=0))
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    text = re.sub(
        r'<(?:link rel="(?:modulepreload|icon|stylesheet)"|script )[^>]*>(?:</script>)?\n?', "", text
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    text = text.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{head}', 1)
    text = text.replace("</head>", f"<style>{style}</style>\n</head>", 1)
    data = f'<script type="application/octet-stream" id="answers">{packed.decode()}</script>'
    return text.replace("</body>", f'{data}\n<script type="module">{script}</script>\n</body>', 1)


def one_script(index: str) -> str:
    """The modules of the page as one: a file:// page cannot load modules. Each is written so that this is enough: an
    import is one line, names are unique over all modules, and index.html lists them in the order of their imports."""
    names = re.findall(r'<link rel="modulepreload" href="([\w.-]+)">', index)
    lines = [line for name in names for line in (STATIC / name).read_text(encoding="utf-8").splitlines()]
    kept = (line.removeprefix("export ") for line in lines if not line.startswith("import "))
    return "\n" + "\n".join(kept) + "\n"


def _digest(text: str) -> str:
    """As a Content-Security-Policy names what it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
