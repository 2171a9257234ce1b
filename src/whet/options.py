"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer


class UnusedChoice(StrEnum):
    """What becomes of a key that nothing reads."""

    refuse = "refuse"
    warn = "warn"


File = Annotated[
    Path, typer.Argument(help="Config file, YAML or TOML, or launch script (.sh).", show_default=False)
]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045  (typer reads this annotation at run time)
    typer.Argument(
        help="Values put over the file: key.path=value ...; the arguments of a script.", show_default=False
    ),
]

Gpus = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--gpus", help="For machines that are not here: GPUs of each, and how many: 8x2.", show_default=False
    ),
]
Mem = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--mem", help="GiB of one of these GPUs. Default: 80.", show_default=False),
]

UnusedKeys = Annotated[
    UnusedChoice,
    typer.Option(
        "--unused", help="Keys that nothing reads: refuse them, or leave them out with a note each (sweeps)."
    ),
]

Dialect = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="What the file is written for: native, verl, skyrl, cosmos, trinity. Default: what its keys say.",
        show_default=False,
    ),
]

TrustScript = Annotated[
    bool,
    typer.Option(
        "--trust-script",
        help="Run the shell of a launch script (.sh) without a sandbox: for scripts of your own, where there is none.",
    ),
]
