"""The longest waits of a run: nothing that its own limits allow may end it."""

from __future__ import annotations

import pytest

from tiny import RUN
from whet.config import deadlines
from whet.config.load import load
from whet.rollout.limits import limits_of

ENV = {"make": "tests.envs:make", "timeout_s": 300}


@pytest.mark.parametrize("retries", [0, 2])
def test_a_group_has_the_time_that_its_environments_may_take_to_be_set_up(retries: int) -> None:
    """The clock of a rollout begins after it: with slow environments, a wait for a group ended a healthy run."""
    rollout = {**RUN["rollout"], "env": ENV, "timeout_s": 60, "retries": retries}
    cfg = load(None, [], {**RUN, "rollout": rollout}).config
    setup_s = limits_of(cfg).setup_s
    assert setup_s == 600
    within = deadlines.group(cfg, judges=0)
    assert within.seconds >= (1 + retries) * (setup_s + cfg.rollout.timeout_s)
    assert within.keys.endswith("rollout.env.timeout_s=300")
    plain = deadlines.group(load(None, [], {**RUN, "rollout": {**rollout, "env": None}}).config, judges=0)
    assert plain.seconds == within.seconds - (1 + retries) * setup_s
    assert "env" not in plain.keys
    assert deadlines.silence(cfg, [cfg]) > within.seconds, "the watchdog comes after it"
