"""Commands that look into runs, or change one in progress: whet show, view, scale."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from whet.options import Limit, OfTask, Timeline
from whet.types import ConfigError


def add_to(app: typer.Typer) -> None:
    """Register them."""
    for command in (show, view, scale):
        app.command()(command)


def show(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    step: Annotated[Optional[int], typer.Option(help="Show rollouts of this step.")] = None,  # noqa: UP045
    stage: Annotated[Optional[str], typer.Option(help="Stage of the step. Default: the last.")] = None,  # noqa: UP045
    task: OfTask = None,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens",
            help="List every token with its log-prob by the engine, before and after sampling filters.",
        ),
    ] = False,
    limit: Limit = None,
    timeline: Timeline = False,
) -> None:
    """Print the summary of a run, single rollouts of a step, or where the time went.

    The summary says whether the run is learning, and lists the checkpoints with the commands that continue from them.
    --timeline shows the bubble: the share of the processes' time, after start-up, in which they waited. It covers the
    driver where it samples or trains, and each trainer rank, engine replica, explorer and evaluation process.

    \b
    Example: whet show runs/first_run
    Example: whet show runs/first_run --step 10 --limit 4
    Example: whet show runs/first_run --stage sft --step 1 --tokens
    Example: whet show runs/first_run --timeline
    """
    from whet.config.screen import show as show_view
    from whet.track.show import rollouts, summary
    from whet.track.time_report import show as where_time_went

    if timeline:
        if (step, stage, task, limit) != (None, None, None, None) or tokens:
            raise ConfigError(
                "--timeline shows the whole run: leave out --step, --stage, --task, --tokens and --limit"
            )
        view = where_time_went(run)
    elif step is None:
        if (stage, task, limit) != (None, None, None) or tokens:
            raise ConfigError(
                "--stage, --task, --tokens and --limit select rollouts of a step: give --step N too"
            )
        view = summary(run)
    else:
        view = rollouts(run, step, stage=stage, uid=task, tokens=tokens, limit=limit)
    show_view(view)


def scale(
    run: Annotated[Path, typer.Argument(help="Run directory of a run in progress.")],
    replicas: Annotated[int, typer.Option(min=1, help="Number of engine replicas.")],
) -> None:
    """Add or remove engine replicas of a run in progress; the sampled tokens stay the same.

    The run must have begun with rollout.replicas of at least 1. A replica that leaves finishes its requests first; a
    replica that joins gets the weights first. The number applies to the running process: a restarted run begins with
    rollout.replicas.

    \b
    Example: whet scale runs/async_ray --replicas 4
    """
    from whet.rollout.scale import ask

    ask(run, replicas)
    typer.echo(f"requested {replicas} replicas; {run / 'run.log'} reports the result")


def view(
    context: typer.Context,
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="Run directories, or folders with run directories.", show_default=False
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8645,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines reach needs --token.")
    ] = "127.0.0.1",
    token: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Token that every request must carry; the printed address contains it.", show_default=False
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    export: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Write the pages into this HTML file instead, which opens without a server.",
            show_default=False,
        ),
    ] = None,
    rollouts: Annotated[
        int, typer.Option(min=0, help="With --export: the largest number of rollouts in the file.")
    ] = 200,
) -> None:
    """Show runs in the browser: curves, rollouts by token, rewards, faults, time, evaluations, comparisons.

    The viewer reads the run directories and writes nothing. It follows a run in progress. It listens on this machine
    alone; for a run elsewhere use a tunnel (ssh -L 8645:127.0.0.1:8645 MACHINE).

    \b
    Example: whet view runs/first_run
    Example: whet view runs --port 9000 --no-open
    Example: whet view runs/first_run --export report.html --rollouts 500
    """
    idle = ("rollouts",) if export is None else ("port", "host", "token", "no_open")
    for name in idle:
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
            with_or_without = "without" if export is None else "with"
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect {with_or_without} --export; leave it out"
            )
    if export is not None:
        from whet.view.export import write_report
        from whet.view.source import find_runs

        typer.echo(write_report(find_runs(runs), export, most=rollouts))
        return
    from whet.view.server import serve

    def ready(url: str) -> None:
        typer.echo(f"whet view: {url} (Ctrl-C ends it)")
        if not no_open:
            import webbrowser

            webbrowser.open(url)

    serve(runs, host=host, port=port, token=token, ready=ready)
