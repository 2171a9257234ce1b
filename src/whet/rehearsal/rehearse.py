"""`whet rehearse FILE`: every part of a run, tried at small size on this machine before GPUs are rented for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from whet.config.load import Loaded, load
from whet.config.plan import Plan, plans
from whet.guard.temporary import OwnFolder
from whet.rehearsal.findings import Finding, fails, left_open, works
from whet.rehearsal.size import predict
from whet.types import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADS = {
    "works": "Rehearsed",
    "fails": "Would have failed",
    "open": "Could not be rehearsed here",
    "needs": "Needs of the real run",
}


@dataclass(frozen=True)
class Rehearsal:
    """The findings, in the order of the checks."""

    file: Path
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return not any(f.kind == "fails" for f in self.findings)

    def to_json(self) -> str:
        whole = {
            "file": str(self.file),
            "passed": self.passed,
            "findings": [asdict(f) for f in self.findings],
        }
        return json.dumps(whole, indent=1, ensure_ascii=False)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[RenderableType] = []
        for kind, head in HEADS.items():
            found = [f for f in self.findings if f.kind == kind]
            if found:
                table = Table(title=head, title_justify="left", show_header=False, pad_edge=False, box=None)
                table.add_column(overflow="fold", max_width=40, style="bold")
                table.add_column(overflow="fold")
                for f in found:
                    table.add_row(Text(f.what), Text(f.said))
                parts += [table, Text("")]
        failed = sum(f.kind == "fails" for f in self.findings)
        parts.append(Text(f"{failed} problems" if failed else "nothing failed", style="bold"))
        return Group(*parts)


def rehearse(
    file: Path,
    overrides: Sequence[str] = (),
    dialect: str | None = None,
    *,
    say: Callable[[str], None],
    trust_script: bool = False,
) -> Rehearsal:
    """Read the config, probe data and rewards, train the small run, kill it, resume it. `say`: progress, a line each.

    trust_script: see `load`.
    Raises ConfigError for a config that no machine could run, with all problems at once, like `whet train`.
    """
    say("reading the config")
    loaded = load(file, overrides, dialect=dialect, rehearsal=True, trust_script=trust_script)
    planned = plans(loaded, rehearsal=True)
    findings = [*_open(loaded), works("config", f"read; the batch arithmetic of {_stages(loaded)} holds")]
    findings += _tried(loaded, planned, say)
    return Rehearsal(file, (*findings, *predict(loaded, planned)))


def _tried(loaded: Loaded, planned: Sequence[Plan], say: Callable[[str], None]) -> Iterator[Finding]:
    # torch and transformers from here on
    from whet.rehearsal.probe import probe
    from whet.rehearsal.shrink import shrink, what_changed
    from whet.rehearsal.teacher import write_teacher
    from whet.rehearsal.trial import trial

    say("reading data, trying rewards")
    probed = probe(loaded)
    yield from probed.findings
    yield from dict.fromkeys(f for cfg in loaded.stages for f in what_changed(cfg))
    unrewarded = [
        name
        for name, cfg, plan in zip(loaded.names, loaded.stages, planned)
        if plan.algorithm.kind == "online"
        and plan.algorithm.judged
        and (name in probed.worldless or not (cfg.rollout.env or cfg.rewards.keys() - probed.broken))
    ]
    if unrewarded:
        yield left_open(
            "training",
            f"no reward or environment of stage {unrewarded[0]} can be called, so the stage cannot learn",
        )
        return
    say(f"training {_stages(loaded)} at small size, with a kill -9 and a resume")
    with OwnFolder("rehearsal") as folder:
        try:
            without = probed.broken | probed.untried
            tree = shrink(loaded, run_dir=folder, lost=probed.lost, broken=without)
            write_teacher(tree, folder)
            yield from trial(tree, folder)
        except ConfigError as e:
            yield fails("the small run", str(e))


def _stages(loaded: Loaded) -> str:
    return "one stage" if len(loaded.stages) == 1 else f"{len(loaded.stages)} stages"


def _open(loaded: Loaded) -> Iterator[Finding]:
    """Engines and features of the file that are not built yet; parts that a launch script left open."""
    yield from (left_open("the launch script", note) for note in loaded.notes)
    for place, text in loaded.translation.unbuilt if loaded.translation else ():
        key, _, said = text.partition(": ")
        yield left_open(key, f"{said} ({place})" if place else said)
