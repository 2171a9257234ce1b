"""The simulator of schedules: cases worked by hand, laws, and a run's own times read back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
from typer.testing import CliRunner

from test_staleness import run
from whet.cli import app
from whet.simulate import Costs, Mode, SimulatedSchedule, bound_s, simulate, ways
from whet.track.costs import measured
from whet.types import DataError

COSTS = Costs(rollout_s=[2.0], train_s=3.0, sync_s=0.5, score_s=0.25, slots=4)
IN_TURN = SimulatedSchedule(mode="synchronous", groups_per_step=4, group_size=2, steps=10)


def test_in_turn_by_hand() -> None:
    """8 rollouts of 2 s in 4 places: 4 s; 4 groups scored: 1 s; 3 s of training, 0.5 s of moving weights."""
    found = simulate(COSTS, IN_TURN)
    assert found.step_s == pytest.approx(8.5)
    assert found.trainer_busy == pytest.approx(3 / 8.5)
    assert found.engines_busy == pytest.approx(16 / (8.5 * 4))
    assert found.rollouts == 80


def test_ahead_by_hand() -> None:
    """One round of 5 s first; then nine steps of 5 s (exploring is the slower side) and a last one of 3 s."""
    found = simulate(COSTS, replace(IN_TURN, mode="overlapped", max_staleness=1))
    assert found.seconds == pytest.approx(5 + 9 * 5 + 3 + 10 * 0.5)


def test_free_by_hand() -> None:
    """One rollout a group, one group a step, one place: a rollout ends every 2 s, training takes 1 s beside it."""
    costs = Costs(rollout_s=[2.0], train_s=1.0, slots=1)
    found = simulate(
        costs,
        SimulatedSchedule(mode="asynchronous", groups_per_step=1, group_size=1, max_staleness=1, steps=6),
    )
    assert found.seconds == pytest.approx(6 * 2 + 1)
    assert found.given_up == 0
    on_policy = simulate(
        costs, SimulatedSchedule(mode="asynchronous", groups_per_step=1, group_size=1, steps=6)
    )
    assert on_policy.seconds == pytest.approx(6 * 3)


def test_a_straggler_is_given_up() -> None:
    """A rollout that never ends holds its place until it is too old; in turn, the step waits for it."""
    costs = Costs(rollout_s=[1.0] * 29 + [1e9], train_s=1.0, slots=64)
    schedule = SimulatedSchedule(
        mode="asynchronous", groups_per_step=4, group_size=1, max_staleness=2, spare=4, steps=100
    )
    found = simulate(costs, schedule)
    assert found.step_s < 5
    assert found.given_up > 0
    assert simulate(costs, replace(schedule, mode="synchronous", spare=0)).step_s > 1e6


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("group_size", [2, 8])
def test_waiting_rollouts_of_a_dropped_group_keep_no_new_group_out(slots: int, group_size: int) -> None:
    """A group that was begun beyond the need becomes too old while most of its rollouts still wait for a slot."""
    costs = Costs(rollout_s=[1.0, 2.0], train_s=0.5, score_s=0.1, slots=slots)
    schedule = SimulatedSchedule(
        mode="asynchronous", groups_per_step=1, group_size=group_size, spare=2, steps=20
    )
    found = simulate(costs, schedule)
    assert found.given_up > 0
    assert 0.95 * bound_s(costs, schedule) <= found.step_s < math.inf
    assert 0 < found.engines_busy <= 1 + 1e-9


@pytest.mark.parametrize("mode", ["synchronous", "overlapped", "asynchronous"])
@pytest.mark.parametrize("seed", range(5))
def test_never_faster_than_the_slower_side(mode: Mode, seed: int) -> None:
    lengths = [0.1 * 1.1**n for n in range(40)]
    costs = Costs(rollout_s=lengths, train_s=0.7, sync_s=0.1, slots=16)
    schedule = SimulatedSchedule(
        mode=mode, groups_per_step=8, group_size=4, max_staleness=mode != "synchronous", steps=100
    )
    found = simulate(costs, schedule, seed=seed)
    assert found.trainer_busy <= 1
    assert found.engines_busy <= 1 + 1e-9
    if not found.given_up:
        assert found.step_s >= 0.95 * bound_s(costs, schedule)


def test_more_staleness_is_never_slower_by_much() -> None:
    lengths = [0.1 * 1.1**n for n in range(40)]
    costs = Costs(rollout_s=lengths, train_s=1.0, slots=64)
    times = [
        simulate(
            costs, SimulatedSchedule(mode="asynchronous", groups_per_step=8, group_size=4, max_staleness=k)
        ).step_s
        for k in (0, 1, 2, 4)
    ]
    assert times == sorted(times, reverse=True)
    assert {way.max_staleness for way in ways(IN_TURN) if way.mode == "asynchronous"} == {1, 2, 4}


@pytest.mark.parametrize(("sigma", "share"), [(0.5, 0.95), (1.0, 0.9)])
def test_four_versions_ahead_leave_little_of_the_bound(sigma: float, share: float) -> None:
    """Log-normal times of rollouts, whose mean is such that both sides need the same: the hardest case to overlap."""
    drawn = [math.exp(sigma * NormalDist().inv_cdf((n + 0.5) / 4000)) for n in range(4000)]
    costs = Costs(rollout_s=[x * 4000 / sum(drawn) * 16 / 32 for x in drawn], train_s=1.0, slots=16)
    found = []
    for ahead in (1, 4):
        schedule = SimulatedSchedule(
            mode="asynchronous", groups_per_step=8, group_size=4, max_staleness=ahead, steps=40
        )
        times = [simulate(costs, schedule, seed=seed).step_s for seed in range(20)]
        found.append(bound_s(costs, schedule) * len(times) / sum(times))
    assert found[0] < found[1]
    assert share <= found[1] <= 1


def test_costs_of_a_run_and_the_command(tmp_path: Path) -> None:
    result = run(tmp_path)
    costs = measured(result.run_dir, "main", slots=8)
    assert len(costs.rollout_s) == 5 * 8, "the first step, which warms up, is left out"
    assert costs.train_s > 0
    assert all(seconds > 0 for seconds in costs.rollout_s)
    config = result.run_dir / "config.yaml"
    said = CliRunner().invoke(
        app, ["plan", str(config), "rollout.max_staleness=2", "--simulate", str(result.run_dir)]
    )
    assert said.exit_code == 0, said.output
    assert "overlapped 2" in said.output
    assert "of bound" in said.output
    with pytest.raises(DataError, match="no step of stage 'other' has both"):
        measured(result.run_dir, "other", slots=8)
    with pytest.raises(DataError, match=r"nothere is not a run directory: .*; no such folder"):
        measured(tmp_path / "nothere", "main", slots=8)
