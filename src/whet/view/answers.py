"""Every address below `api/` and the function that answers it; no server is needed to ask."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from whet.track.dumps import finite_json
from whet.types import Json
from whet.view import compare, mismatch, records, rewards, rollouts, runs
from whet.view.source import LISTS, Ask, NotThere, ShownRuns

ROUTES: tuple[tuple[str, Callable[[Ask], Json]], ...] = (
    ("api/runs", runs.runs),
    ("api/runs/{run}", runs.run),
    ("api/runs/{run}/metrics", runs.metrics),
    ("api/runs/{run}/rollouts", rollouts.listed),
    ("api/runs/{run}/rollouts/{stage}/{step}/{row}", rollouts.rollout),
    ("api/runs/{run}/groups/{stage}/{step}/{uid}", rollouts.group),
    ("api/runs/{run}/search", rollouts.search),
    ("api/runs/{run}/rewards", rewards.rewards),
    ("api/runs/{run}/ledger", records.ledger),
    ("api/runs/{run}/timeline", records.timeline),
    ("api/runs/{run}/mismatch", mismatch.mismatch),
    ("api/runs/{run}/evals", records.evals),
    ("api/runs/{run}/evals/flips", records.flips),
    ("api/compare", compare.compare),
    ("api/compare/replies", compare.replies),
)


def answer(known: ShownRuns, url: str) -> Json:
    """What is at an address. Raises NotThere, BadQuestion, or DataError for a file that cannot be read."""
    function, params = find(url)
    return function(Ask(known, params))


def find(url: str) -> tuple[Callable[[Ask], Json], dict[str, str]]:
    """The function of an address, and its parameters: those of the path are not changed by the query."""
    at = urlsplit(url)
    parts = at.path.strip("/").split("/")
    for pattern, function in ROUTES:
        names = pattern.split("/")
        if len(names) == len(parts) and all(n == p or n[0] == "{" for n, p in zip(names, parts)):
            path = {n[1:-1]: unquote(p) for n, p in zip(names, parts) if n[0] == "{"}
            return function, {**_query(at.query), **path}
    raise NotThere(f"nothing is at {url[:200]}")


def _query(text: str) -> dict[str, str]:
    """Parameters by name. A list stays as it is: its commas are those of before it is decoded."""
    pairs = (part.partition("=") for part in text.split("&") if part)
    return {unquote(name): value if name in LISTS else unquote(value) for name, _, value in pairs}


def concerned(known: ShownRuns, url: str) -> list[str]:
    """The marks of the runs that an answer is made from: one about all runs is about those that came since, too."""
    _, params = find(url)
    named = {params[name] for name in ("run", "a", "b") if name in params}
    if not named:
        known.look()
    return [run.stamp() for run in known.runs if run.id in named or not named]


def encoded(value: Json) -> bytes:
    """An answer as JSON in ASCII, gzipped."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite_json(value), allow_nan=False, separators=(",", ":"))
    return gzip.compress(text.encode("ascii"), 3, mtime=0)
