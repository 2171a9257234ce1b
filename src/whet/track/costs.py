"""The times of sampling and training in a run, for the simulator; and its predictions as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from statistics import mean, median

from rich.table import Table

from whet.config.plan import Plan
from whet.config.schema import RolloutConfig
from whet.simulate import Costs, Simulated, SimulatedSchedule, bound_s, simulate, ways
from whet.track.overview import check_is_run
from whet.track.written import list_steps, read_config, read_lines, read_rollouts
from whet.types import DataError

TRAINING = ("time/logprobs_s", "time/update_s")
READ = (*TRAINING, "time/generate_s", "time/reward_s")


def measured(run_dir: Path, stage: str, *, slots: int) -> Costs:
    """Costs of a stage from the records of its run; DataError if they are not enough.

    A rollout's seconds are its tokens times the seconds of one decode step: for each step, the seconds of generating
    divided by the tokens of its longest rollout. Slots: rollouts that are decoded at once.
    """
    check_is_run(run_dir)
    if read_config(run_dir).get("rollout", {}).get("schedule") == "async":
        raise DataError(
            f"{run_dir}: it was run with rollout.schedule=async, so the seconds of a step's rollouts are not known; "
            "--simulate needs the times of a run with rollout.schedule=deterministic"
        )
    lines = [line for line in read_lines(run_dir / "timings.jsonl") if line["stage"] == stage]
    timings = {n["step"]: n for n in lines if "time/update_s" in n and "time/generate_s" in n}
    lengths = dict(_lengths(run_dir / "rollouts", stage))
    both = sorted(timings.keys() & lengths.keys())[1:] or sorted(timings.keys() & lengths.keys())
    if not both:
        raise DataError(
            f"{run_dir}: no step of stage {stage!r} has both timings and rollouts. --simulate needs a run of "
            "a few steps with track.rollouts_interval=1"
        )
    if odd := [n for n in both if not all(0 <= timings[n].get(name, 0) < inf for name in READ)]:
        raise DataError(
            f"{run_dir}/timings.jsonl: seconds of step {odd[0]} of stage {stage!r} are not numbers >= 0"
        )
    per_token = median(timings[n]["time/generate_s"] / max(lengths[n]) for n in both)
    train_s = median(sum(timings[n].get(name, 0.0) for name in TRAINING) for n in both)
    score_s = mean(timings[n].get("time/reward_s", 0.0) / len(lengths[n]) for n in both)
    if per_token == train_s == score_s == 0:
        raise DataError(
            f"{run_dir}/timings.jsonl: the seconds of stage {stage!r} are 0, so no speed follows from them; "
            "--simulate needs a run whose steps took time"
        )
    return Costs(
        rollout_s=[per_token * tokens for n in both for tokens in lengths[n]],
        train_s=train_s,
        score_s=score_s,
        slots=slots,
    )


def _lengths(folder: Path, stage: str) -> Iterator[tuple[int, list[int]]]:
    for name, step, path in list_steps(folder):
        tokens = [sum(row["mask"]) for row in read_rollouts(path)] if name == stage else []
        if any(tokens):
            yield step, tokens


def schedule_of(plan: Plan, rollout: RolloutConfig) -> SimulatedSchedule:
    """The schedule of a stage."""
    return SimulatedSchedule(
        mode="asynchronous" if plan.mode == "train" else plan.mode,
        groups_per_step=plan.sampled_tasks_per_step,
        group_size=plan.group_size,
        max_staleness=rollout.max_staleness,
        spare=rollout.spare_tasks,
    )


def predictions(costs: Costs, schedule: SimulatedSchedule, *, stage: str) -> Table:
    """The schedule of the config first, alternatives below it. Numbers in names are rollout.max_staleness; trainer and
    engines: the share of the time in which they are busy."""
    table = Table(title=f"stage {stage}: {schedule.steps} simulated steps", title_justify="left")
    table.add_column("schedule", no_wrap=True)
    for name in ("s/step", "rollouts/s", "of bound", "trainer", "engines", "dropped"):
        table.add_column(name, justify="right", no_wrap=True)
    for n, way in enumerate(ways(schedule)):
        found = simulate(costs, way)
        table.add_row(*_cells(way, found, bound=bound_s(costs, way)), style="bold" if n == 0 else "")
    return table


def _cells(way: SimulatedSchedule, found: Simulated, *, bound: float) -> Sequence[str]:
    name = way.mode
    return (
        " ".join([name, *([str(way.max_staleness)] if way.max_staleness else []), *_spare(way)]),
        f"{found.step_s:.3g}",
        f"{found.rollouts_per_s:.3g}",
        f"{bound / found.step_s:.0%}",
        f"{found.trainer_busy:.0%}",
        f"{found.engines_busy:.0%}",
        f"{found.given_up / (found.given_up + found.rollouts):.1%}",
    )


def _spare(way: SimulatedSchedule) -> list[str]:
    return [f"+{way.spare}"] if way.spare else []
