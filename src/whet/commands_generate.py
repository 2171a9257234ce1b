"""The command that samples without training or rewards: whet generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from whet.notices import say
from whet.options import SETTINGS, Dialect, Overrides, TrustScript


def add_to(app: typer.Typer) -> None:
    """Register it."""
    app.command(context_settings=SETTINGS)(generate)


def generate(
    target: Annotated[
        Path,
        typer.Argument(
            help="A config file, a launch script (.sh), a run directory, or a model's folder.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "-o",
            "--output",
            help="File to write (.parquet, .jsonl). Default: track.dump.replies of the config.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="File of prompts, in place of data.eval.", show_default=False),
    ] = None,
    stage: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Of a run: take the checkpoint of this stage. Default: the last.", show_default=False
        ),
    ] = None,
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            help="Of a run: take the checkpoint of this step. Default: the last.", show_default=False
        ),
    ] = None,
    dialect: Dialect = None,
    trust_script: TrustScript = False,
) -> None:
    """Write replies to a file of prompts, without rewards or training.

    The file has every row of data.eval, or --data, with all its columns and one more: `responses`, a list of
    eval.samples texts, sampled as eval.sampling says (greedy by default). The model is that of the config, or the
    newest checkpoint of a run. A prompt that is too long is handled as data.overlong says. The same command goes on
    where it was stopped or killed; `whet eval FILE --offline` scores the replies.

    \b
    Example: whet generate models/mine --data prompts.jsonl -o replies.jsonl eval.samples=4 eval.sampling.temperature=1
    Example: whet generate runs/first_run --step 50 -o replies.parquet
    Example: whet generate examples/generate.yaml
    Example: whet generate run_generation.sh -o replies.parquet
    """
    from whet.api import INTERRUPTED
    from whet.generation import generate as write

    try:
        written = write(
            target,
            output=output,
            data=data,
            stage=stage,
            step=step,
            overrides=overrides or (),
            dialect=dialect,
            trust_script=trust_script,
            say=say,
        )
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on where it was", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(written)
