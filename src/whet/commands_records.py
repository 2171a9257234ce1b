"""Commands that hold records against each other: `whet replay` and `whet diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from whet.types import ConfigError

Run = Annotated[Path, typer.Argument(help="A run directory.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def replay(
    run: Run,
    step: Annotated[Optional[int], typer.Option(help="Recompute this step.", show_default=False)] = None,  # noqa: UP045
    stage: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Stage of the step. Default: the last that has it.", show_default=False),
    ] = None,
    rollout: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=0, help="Show one rollout, by its row in the step's file, from 0.", show_default=False
        ),
    ] = None,
    task: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Show one rollout, by the uid of its task and --index.", show_default=False),
    ] = None,
    index: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="With --task: its place in the group. Default: 0.", show_default=False),
    ] = None,
    logprobs: Annotated[
        bool,
        typer.Option(
            "--logprobs",
            help="Only recompute the log-probs of the recorded tokens, from checkpoints of their versions.",
        ),
    ] = False,
    play: Annotated[
        bool,
        typer.Option(
            "--play",
            help=("Call environments and tools again. Default: use the answers in the run's journal."),
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute a recorded step of a run, and compare it with the record bit for bit.

    The run is resumed from a checkpoint in a temporary directory and stops after the step: tokens are sampled again,
    rewards are called again, and log-probs, advantages, the terms of the loss and the numbers of the step are computed
    again. The run directory is only read. Without --step: list what can be replayed. Exit code 1: something differs,
    or the record has nothing to compare with.

    \b
    Example: whet replay runs/first_run
    Example: whet replay runs/first_run --step 51
    Example: whet replay runs/first_run --step 51 --rollout 3
    Example: whet replay runs/async --step 20 --logprobs
    """
    from whet.replay import view
    from whet.replay.steps import read, stage_of

    recorded = read(run)
    if step is None:
        if (stage, rollout, task, index) != (None, None, None, None) or logprobs or play:
            raise ConfigError(
                "give --step N too; without it `whet replay` lists the steps that can be replayed"
            )
        _print(view.listing_json(recorded) if as_json else view.listing(recorded))
        return
    number = stage_of(recorded, stage, step)
    if rollout is not None and task is not None:
        raise ConfigError("--rollout and --task both name a rollout: give one of them")
    if index is not None and task is None:
        raise ConfigError("--index is the place in the group of --task: give --task UID, too")
    if logprobs:
        from whet.replay.logprobs import rescored

        if rollout is not None or task is not None or play:
            raise ConfigError(
                "--logprobs covers all rollouts of a step: leave out --rollout, --task and --play"
            )
        scored = rescored(recorded, number, step)
        _print(view.rescored_json(scored) if as_json else view.rescored_view(scored))
        raise typer.Exit(0 if scored.equal else 1)
    wanted = recorded.step(number, step, play=play)
    if wanted.start is None:
        raise ConfigError(f"--step {step} cannot be replayed: {wanted.why}")
    from whet.replay.run import replay as recompute

    found = recompute(recorded, wanted, play=play)
    if rollout is None and task is None:
        _print(view.step_json(found) if as_json else view.step_view(found))
    else:
        name = view.name_of(found, rollout, task, index or 0)
        _print(view.rollout_json(found, name) if as_json else view.rollout_view(found, name, run))
        found = found.only(name)
    raise typer.Exit(0 if found.equal else 1)


def diff(
    a: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another run directory.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Compare two runs: config, environment, data, and the first step and token at which their records differ.

    What both have recorded is compared bit for bit, and the causes found in the records are listed. Exit code 1:
    something that both have recorded differs, or no step is in both.

    \b
    Example: whet diff runs/seed1 runs/seed1-again
    Example: whet diff runs/before runs/after --json
    """
    from whet.diff import view
    from whet.diff.runs import compared

    found = compared(a, b)
    _print(view.as_json(found) if as_json else view.view(found))
    raise typer.Exit(0 if found.equal else 1)


def _print(view: Any) -> None:
    """Tables on the console; plain values as JSON."""
    from whet.config.screen import show

    if isinstance(view, dict):
        typer.echo(json.dumps(view, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        show(view)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(replay)
    app.command()(diff)
