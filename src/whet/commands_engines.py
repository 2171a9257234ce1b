"""Commands about engines: `whet doctor` and `whet engine install`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

engine_app = typer.Typer(no_args_is_help=True, help="Install inference engines, each in its own environment.")


def add_to(app: typer.Typer) -> None:
    """Add them to the command line."""
    app.command()(doctor)
    app.add_typer(engine_app, name="engine")


def doctor() -> None:
    """Show which engines are installed and supported, and what to do if something is missing.

    Example: whet doctor
    """
    from whet.engines import findings, supported

    for finding in findings():
        typer.echo(f"{finding.state:8} {finding.what}: {finding.says}")
    typer.echo("")
    for line in supported():
        typer.echo(line)


@engine_app.command()
def install(
    name: Annotated[str, typer.Argument(help="Engine to install: vllm, sglang.", show_default=False)],
    folder: Annotated[
        Optional[Path],  # noqa: UP045  (typer reads this annotation at run time)
        typer.Option(
            help="Folder of the environment. Default: ~/.cache/whet/engines/NAME.", show_default=False
        ),
    ] = None,
) -> None:
    """Make a Python environment with an engine, by pip. Each command is printed before it runs.

    Example: whet engine install vllm
    """
    from whet.engines import install as install_engine

    made = install_engine(name, folder, say=typer.echo)
    used = (
        f"a run with rollout.engine={name} finds it"
        if folder is None
        else f"use it with rollout.server.command={made}"
    )
    typer.echo(f"{made}: {used}")
