"""The command `whet studio`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def add_to(app: typer.Typer) -> None:
    """Register it."""
    app.command()(studio)


def studio(
    file: Annotated[
        Optional[Path],  # noqa: UP045  (typer reads this annotation at run time)
        typer.Argument(
            help="Config file to edit, of whet or another system. Default: a new one.", show_default=False
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8646,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Edit a config in the browser: a form with errors as you type, its YAML, the plan, and buttons to start the run.

    The studio listens on this machine alone, and the printed address has its token. It opens and writes files of the
    working directory. Ctrl-C ends it, and stops the run that it has started.

    \b
    Example: whet studio examples/first_run.yaml
    Example: whet studio examples/from_verl.yaml --port 9000 --no-open
    """
    from whet.studio.server import serve

    def ready(url: str, once: str) -> None:
        typer.echo(f"whet studio: {url} (Ctrl-C ends it)")
        if not no_open:
            import webbrowser

            webbrowser.open(once)

    serve(file, port=port, ready=ready)
