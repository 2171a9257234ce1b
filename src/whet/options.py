"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer


class UnusedChoice(StrEnum):
    """How a key that nothing reads is handled."""

    refuse = "refuse"
    warn = "warn"


File = Annotated[
    Path, typer.Argument(help="Config file, YAML or TOML, or launch script (.sh).", show_default=False)
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
        help="System of the file: native, verl, skyrl, cosmos, trinity. Default: detected from its keys.",
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
