"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer

SETTINGS = {"ignore_unknown_options": True}
"""Of a command that takes settings: one that is written as an option (--train.steps=5) is named with them."""


class UnusedChoice(StrEnum):
    """How a key that nothing reads is handled."""

    refuse = "refuse"
    warn = "warn"


File = Annotated[
    Path, typer.Argument(help="Config file (YAML, JSON or TOML), or launch script (.sh).", show_default=False)
]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045  (typer reads this annotation at run time)
    typer.Argument(
        help="Overrides of the file: key.path=value ...; for a script, its arguments.", show_default=False
    ),
]

Gpus = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--gpus",
        help="Plan for other machines: GPUs per machine x number of machines, e.g. 8x2.",
        show_default=False,
    ),
]
Mem = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--mem", help="Memory of one of these GPUs in GiB. Default: 80.", show_default=False),
]

UnusedKeys = Annotated[
    UnusedChoice,
    typer.Option(
        "--unused",
        help="Keys that nothing reads: refuse them, or ignore them with a note for each (for sweeps).",
    ),
]

Dialect = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="System that the file is for: native, verl, skyrl, cosmos, trinity. Default: detected from its keys.",
        show_default=False,
    ),
]

Prove = Annotated[
    bool,
    typer.Option(
        "--prove",
        help="Compare with the installed package of that system, and print the table instead of the file.",
    ),
]

TrustScript = Annotated[
    bool,
    typer.Option(
        "--trust-script",
        help="Run a launch script (.sh) without a sandbox: for your own scripts, on systems without a sandbox.",
    ),
]

TableName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="List only the keys of this table, e.g. verl-ppo; verl means all tables of verl.",
        show_default=False,
    ),
]

Status = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="List only keys with this status: mapped, translated, derived, coming or refused.",
        show_default=False,
    ),
]

Timeline = Annotated[
    bool,
    typer.Option(
        "--timeline",
        help="Show where the time went and how busy each process was, in place of the summary.",
    ),
]

Limit = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=1, help="Show at most this many rollouts of the step."),
]

OfTask = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Show only the rollouts of the task with this uid."),
]

LikeRun = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--simulate", help="Predict the speed of the schedule from the times of this run directory."
    ),
]

Arithmetic = Annotated[
    bool,
    typer.Option(
        "--arithmetic",
        help="Also compute a digest of float32 arithmetic on this CPU, to compare machines: a few seconds.",
    ),
]

Change = Annotated[
    bool,
    typer.Option(
        "--change",
        help="Resume with changed settings, also those that change results: a branch of the run.",
    ),
]
