"""One comparison with a peer's own code, what came of it, and the table of all."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from whet.config.derived import Plan
from whet.config.schema import Config
from whet.prove.cases import Case
from whet.prove.numbers import Numbers, difference
from whet.types import Json

EQUAL, TOLD, DIFFERS, NOT_COMPARED = "equal", "differs as documented", "DIFFERS", "not compared"
GOOD = (EQUAL, TOLD)

DRAWN = "both draw at random which tokens are left out"
"""Why a loss cannot be compared."""

NOWHERE = torch.zeros(0)
"""The mask of numbers that are of no batch."""


class NotComparable(Exception):
    """Why one side has no number for this file."""


@dataclass(frozen=True, kw_only=True)
class File:
    """What whet makes of a file of another system, or of one stage of it."""

    config: Config
    """Whet's."""
    plan: Plan
    steps: Callable[[int], int]
    """Training steps, given the rows of the training data."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table."""

    what: str
    called: str
    """The peer's function or class."""
    theirs: Callable[[Any], Numbers]
    """The peer's numbers for a case."""
    ours: Callable[[Any], Numbers]
    cases: Sequence[Case | None] = (None,)
    """None: the numbers follow from the settings alone."""
    keys: tuple[str, ...] = ()
    """The peer's keys whose told differences show here. What depends on how a batch is cut does not."""
    tolerance: float = 1e-9
    """Relative to the larger of 1 and the peer's number."""
    refused: str = ""
    """Why this cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What came of a check."""

    what: str
    status: str
    called: str = ""
    theirs: str = ""
    ours: str = ""
    told: str = ""
    """Why they differ, or were not compared."""


def compared(check: Check, told: Mapping[str, str]) -> Compared:
    """Run one check. told: by key of the file, where whet says that it differs."""
    worst, where, shown = 0.0, "", ("", "")
    if check.refused:
        return Compared(what=check.what, called=check.called, status=NOT_COMPARED, told=check.refused)
    try:
        for case in check.cases:
            theirs, ours = check.theirs(case), check.ours(case)
            apart = difference(theirs, ours, (), NOWHERE if case is None else case.mask)
            if apart > worst or not any(shown):
                worst, where = apart, "" if case is None else case.name
                mask = NOWHERE if case is None else case.mask
                shown = summary(theirs, mask), summary(ours, mask)
    except NotComparable as e:
        return Compared(what=check.what, called=check.called, status=NOT_COMPARED, told=str(e))
    except Exception as e:  # noqa: BLE001  (the peer's code may raise anything)
        at = traceback.extract_tb(e.__traceback__)[-1]
        said = f"{type(e).__name__}: {e} ({Path(at.filename).name}:{at.lineno})"
        return Compared(what=check.what, called=check.called, status=NOT_COMPARED, told=said)
    row = {"what": check.what, "called": check.called, "theirs": shown[0], "ours": shown[1]}
    if worst <= check.tolerance:
        return Compared(**row, status=EQUAL)
    why = [text for key, text in told.items() if key in check.keys]
    apart_by = f"by up to {worst:.2g}" + (f" ({where})" if where else "")
    return Compared(**row, status=TOLD if why else DIFFERS, told=" ".join([apart_by, *why]))


def summary(numbers: Numbers, mask: Tensor) -> str:
    """Scalars as they are; of a list its ends, of a batch its range."""
    return ", ".join(_one(name, x.detach().double(), mask) for name, x in numbers.items())


def _one(name: str, x: Tensor, mask: Tensor) -> str:
    if x.dim() == 0:
        return f"{name} {x.item():.6g}"
    if x.shape == mask.shape:
        x = x[mask > 0]
        return f"{name} {x.min().item():.4g} to {x.max().item():.4g}"
    if len(x) > 4:
        return f"{name} {x[0].item():.4g} .. {x[len(x) // 2].item():.4g} .. {x[-1].item():.4g}"
    return f"{name} " + " ".join(f"{one:.6g}" for one in x.tolist())


def absent(tree: Json, known: Json, above: str = "") -> Iterator[str]:
    """Keys of a tree that a config with these keys does not have. An empty section, or none, holds any."""
    if not isinstance(tree, dict) or not isinstance(known, dict) or not known:
        return
    for key, value in tree.items():
        name = f"{above}.{key}" if above else key
        if key in known:
            yield from absent(value, known[key], name)
        else:
            yield name


def without(tree: Mapping[str, Json], names: Sequence[str]) -> dict[str, Json]:
    """A copy of a tree without some keys."""
    out: dict[str, Json] = {}
    for key, value in tree.items():
        inner = [name.removeprefix(f"{key}.") for name in names if name.startswith(f"{key}.")]
        if key not in names:
            out[key] = without(value, inner) if isinstance(value, dict) else value
    return out


def micro_batch(rollouts: float | None, tokens: float | None) -> Numbers:
    """What bounds a micro-batch of a device; nothing where neither is given."""
    if rollouts is not None:
        return scalars(rollouts_of_a_micro_batch=rollouts)
    return {} if tokens is None else scalars(tokens_of_a_micro_batch=tokens)


def our_micro_batch(plan: Plan) -> Numbers:
    """The same of whet."""
    return micro_batch(plan.train.micro_batch_rollouts, plan.train.micro_batch_tokens)


def our_batches(plan: Plan) -> Numbers:
    """Whet's sizes of a step."""
    mini_batch = plan.tasks_per_step * plan.group_size / plan.minibatches
    return scalars(
        tasks=plan.tasks_per_step, rollouts_of_a_mini_batch=mini_batch, passes=plan.passes
    ) | our_micro_batch(plan)


def scalars(**numbers: float) -> Numbers:
    return {
        name.replace("_", " "): torch.tensor(float(x), dtype=torch.float64) for name, x in numbers.items()
    }


def of_rows(steps: Callable[[int], int], plan: Plan) -> Numbers:
    """Training steps by the rows of the training data."""
    return {"steps": torch.tensor([steps(rows) for rows in some_rows(plan)], dtype=torch.float64)}


def reachable(cases: Sequence[Case], file: File) -> list[Case]:
    """The batches as a loss of this file sees them. With one optimizer step per batch, the policy is the one whose
    log-probs are the old ones: no clip acts, and whet drops the keys of clips."""
    plan = file.plan
    moves = plan.minibatches * plan.passes > 1 or file.config.algorithm.old_logprobs == "sampled"
    return [case if moves else replace(case, logp_N=old(case)) for case in cases]


def old(case: Case) -> Tensor:
    assert case.batch.logp_old_N is not None
    return case.batch.logp_old_N


def some_rows(plan: Plan) -> list[int]:
    """Numbers of rows: one step, one more than two, one less than seven, fifty."""
    tasks = plan.tasks_per_step
    return [tasks, 2 * tasks + 1, 7 * tasks - 1, 50 * tasks]


def of_rates(
    file: File,
    *,
    theirs: Callable[[int], Tensor],
    ours: Callable[[int], Tensor],
    called: str,
    name: str = "learning rate of each step",
    keys: tuple[str, ...] = (),
    short_keys: tuple[str, ...] = (),
) -> Iterator[Check]:
    """The learning rates of a run that goes beyond its warm-up, by the rows of its data. short_keys: those whose told
    differences show only in a run within its warm-up; such a one has a row of its own."""

    def row(rows: int, what: str, keys: tuple[str, ...]) -> Check:
        return Check(
            what=what,
            called=called,
            theirs=lambda _: {"over the peak": theirs(rows)},
            ours=lambda _: {"over the peak": ours(rows)},
            keys=keys,
        )

    schedule, short = file.plan.optimizer.schedule, some_rows(file.plan)[2]
    rows = _past_the_warmup(file, short)
    within = file.steps(rows) <= (schedule.warmup_steps or 0)
    yield row(rows, name, keys + (short_keys if within else ()))
    if short_keys and rows != short:
        yield row(short, f"{name}, a run within its warm-up", short_keys)


def _past_the_warmup(file: File, rows: int) -> int:
    """So many rows, or as many as take a run well beyond its warm-up, if any do."""
    warm = 3 * (file.plan.optimizer.schedule.warmup_steps or 0)
    while file.steps(rows) < warm and file.steps(2 * rows) > file.steps(rows):
        rows *= 2
    return rows


def table(title: str, results: Sequence[Compared]) -> Table:
    """For a terminal."""
    out = Table(title=escape(title), title_justify="left", show_lines=False, expand=False)
    for name in ("what", "called", "theirs", "whet's", "result"):
        out.add_column(name, overflow="fold")
    colour = {EQUAL: "green", TOLD: "yellow", DIFFERS: "red", NOT_COMPARED: "red"}
    for each in results:
        said = f"[{colour[each.status]}]{each.status}[/]" + (f": {escape(each.told)}" if each.told else "")
        cells = (each.what, each.called.rpartition(":")[2], each.theirs, each.ours)
        out.add_row(*map(escape, cells), said)
    return out
