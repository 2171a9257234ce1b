"""Trinity-RFT's keys of processes side by side: modes, styles, stores, time limits, host memory, ranks."""

from __future__ import annotations

from typing import Any

import pytest

from asked import asked
from whet.dialects.kinds import accepts
from whet.dialects.row import NotSupportedYet, Row
from whet.dialects.tables import dialect
from whet.dialects.trinity import data, run, trainer, waiting
from whet.dialects.trinity.values import ACTOR, CRITIC, EXPERIENCES, REF
from whet.types import ConfigError, Json

data, run, trainer, waiting = map(asked, (data, run, trainer, waiting))


def values(**given: Json) -> dict[str, Json]:
    """The document's defaults, with values put over them; `__` stands for a dot."""
    out = {row.key: row.default for row in dialect("trinity").rows}
    return out | {name.replace("__", "."): value for name, value in given.items()}


def grpo(**given: Json) -> dict[str, Json]:
    return values(**{"algorithm__algorithm_type": "grpo", **given})


CONTROL: dict[str, Json] = {"algorithm__sample_strategy": "staleness_control"}


def row_of(key: str) -> Row:
    row = dialect("trinity").row(key)
    assert row is not None
    return row


def test_kinds_of_the_replay_buffers_values() -> None:
    cooldown, priority = (row_of(f"{QUEUE}.{key}").type for key in ("reuse_cooldown_time", "priority_fn"))
    assert accepts(cooldown, 0)
    assert accepts(cooldown, None)
    assert not accepts(cooldown, -1)
    assert accepts(priority, "decay_limit_randomization")
    assert not accepts(priority, "linear_decai")


def bounded(most: int, **given: Json) -> dict[str, Json]:
    """staleness_control with synchronizer keys."""
    told = {f"synchronizer__{key}": value for key, value in given.items()}
    return grpo(**CONTROL, **told, **{"algorithm.sample_strategy_args.*": {"max_staleness": most}})


def test_an_explorer_runs_ahead_by_the_offset() -> None:
    assert run.ahead(grpo()) == {"rollout.max_staleness": 0}
    assert run.ahead(grpo(synchronizer__sync_offset=2)) == {"rollout.max_staleness": 2}
    assert waiting.staleness(bounded(3, sync_offset=2)) == {}, "step 3 has version 0, and 3 - 3 is the oldest"
    with pytest.raises(NotSupportedYet, match="max_staleness: 2"):
        waiting.staleness(bounded(2, sync_offset=2))


@pytest.mark.parametrize(
    ("style", "partial", "by"),
    [
        ("dynamic_by_explorer", False, "explorer"),
        ("explorer_driven", False, "explorer"),
        ("dynamic_by_trainer", False, "trainer"),
        ("trainer_driven", False, "trainer"),
        ("fully_async", True, "trainer"),
    ],
)
def test_the_other_styles_run_ahead_as_far_as_staleness_control_says(
    style: str, partial: bool, by: str
) -> None:
    """A sync every 2 steps and max_staleness 5: step s takes versions s - 5 on, which are 4 older than its own, s - 1;
    one of the 4 comes from the interval. Without a bound they run one interval ahead."""
    free = {
        "rollout.schedule": "async",
        "rollout.partial_rollout": partial,
        "rollout.max_staleness": 3,
        "sync.driven_by": by,
    }
    assert run.ahead(bounded(5, sync_style=style, sync_interval=2)) == free
    assert waiting.staleness(bounded(5, sync_style=style, sync_interval=2)) == {}
    unbound = grpo(synchronizer__sync_style=style, synchronizer__sync_interval=2)
    assert run.ahead(unbound) == free | {"rollout.max_staleness": 2}
    with pytest.raises(NotSupportedYet, match=r"sample_strategy_args\.max_staleness: 1 .*write 2 at least"):
        run.ahead(bounded(1, sync_style=style, sync_interval=2))
    with pytest.raises(ConfigError, match=r"synchronizer\.sync_offset"):
        run.ahead(bounded(5, sync_style=style, sync_offset=1))


def test_processes_of_their_own_meet_in_the_database_of_the_buffer() -> None:
    at: dict[str, Json] = {f"{EXPERIENCES}.path": "sqlite:///gsm8k.db"}
    for mode in ("explore", "train"):
        assert waiting.queue(grpo(mode=mode, **at)) == {"buffer.url": "sqlite:///gsm8k.db"}
        by_trainer = grpo(mode=mode, **at, synchronizer__sync_style="trainer_driven")
        assert waiting.queue(by_trainer)["buffer.order"] == "arrival"
        sql = waiting.queue(
            grpo(mode=mode, **{f"{EXPERIENCES}.storage_type": "sql", f"{EXPERIENCES}.path": "a.db"})
        )
        assert sql == {"buffer.url": "sqlite:///a.db", "buffer.order": "newest"}
        for elsewhere in ({}, {f"{EXPERIENCES}.path": "mysql://user@host/rows"}):
            with pytest.raises(NotSupportedYet, match=r"experience_buffer\.path"):
                waiting.queue(grpo(mode=mode, **elsewhere))
        assert run.ahead(grpo(mode=mode, synchronizer__sync_offset=1)) == {"rollout.max_staleness": 1}
        newest = {f"{EXPERIENCES}.storage_type": "sql"}
        assert run.ahead(grpo(mode=mode, synchronizer__sync_offset=1, **newest)) == {
            "rollout.schedule": "async",
            "rollout.partial_rollout": False,
            "rollout.max_staleness": 1,
        }
    assert run.who(grpo(mode="explore", explorer__name="second")) == {"buffer.explorer_name": "second"}
    assert run.who(grpo(explorer__name="second")) == {}
    assert run.patience(grpo(mode="eval", synchronizer__sync_timeout=60)) == {"sync.timeout_s": 60}
    assert run.patience(grpo(synchronizer__sync_timeout=60)) == {}


def test_failed_rollouts_are_repeated_and_limits_follow_the_mean() -> None:
    assert run.again(grpo()) == {"rollout.retries": 2}
    enabled = grpo(explorer__max_retry_times=0, **{"explorer.dynamic_timeout.enable": True})
    assert run.again(enabled) == {"rollout.retries": 0, "rollout.timeout_factor": 3.0}
    assert accepts(row_of("explorer.dynamic_timeout.ratio").type, 0.5)
    assert not accepts(row_of("explorer.dynamic_timeout.ratio").type, 0)


def test_a_step_that_ends_before_all_its_tasks() -> None:
    """ceil((1 - 0.3) * 8) = 6 tasks are waited for, 2 are asked beside them."""
    given = bounded(2, sync_style="dynamic_by_trainer") | {
        "buffer.batch_size": 8,
        "explorer.over_rollout.ratio": 0.3,
        "algorithm.repeat_times": 4,
    }
    assert data.batch(given | {"buffer.train_batch_size": 24}) == {
        "train.tasks_per_step": 6,
        "rollout.group_size": 4,
        "rollout.spare_tasks": 2,
    }
    with pytest.raises(NotSupportedYet, match="write 24"):
        data.batch(given)
    with pytest.raises(ConfigError, match="sync_style: fixed"):
        data.batch(given | {"synchronizer.sync_style": "fixed", "buffer.train_batch_size": 24})
    with pytest.raises(ConfigError, match=r"over_rollout\.ratio"):
        data.batch(given | {"explorer.over_rollout.ratio": 1.0})


def test_memory_of_the_host_and_ranks_of_a_sequence() -> None:
    """The reference and the critic rest only where the algorithm has them."""
    keys = (f"{ACTOR}.fsdp_config.optimizer_offload", f"{REF}.fsdp_config.param_offload")
    told: dict[str, Json] = dict.fromkeys(keys, True)
    assert trainer.offload(grpo()) == {"train.offload": []}
    assert trainer.offload(grpo(**told)) == {"train.offload": ["optimizer", "reference"]}
    none = grpo(algorithm__kl_loss_fn="none", **told)
    assert trainer.offload(none) == {"train.offload": ["optimizer"]}
    actors = trainer.offload(values(algorithm__algorithm_type="ppo", **told))
    assert actors == {"train.offload": ["optimizer", "reference"]}, (
        "the actor's key counts for both optimizers"
    )
    critic: dict[str, Json] = {
        f"{CRITIC}.model.fsdp_config.{name}_offload": True for name in ("param", "optimizer")
    }
    assert trainer.offload(values(algorithm__algorithm_type="ppo", **told, **critic)) == {
        "train.offload": ["optimizer", "critic", "reference"]
    }
    assert trainer.sequence_ranks(grpo(trainer__ulysses_sequence_parallel_size=2)) == 2
    both = grpo(trainer__ulysses_sequence_parallel_size=2, **{f"{ACTOR}.ulysses_sequence_parallel_size": 4})
    with pytest.raises(ConfigError, match="one setting"):
        trainer.sequence_ranks(both)


# ---------------------------------------------------------------- the replay buffer

QUEUE = f"{EXPERIENCES}.replay_buffer"


def replaying(tree: dict[str, Json], **given: Json) -> dict[str, Json]:
    args = given.pop("priority_fn_args", {})
    told = {f"{QUEUE}.{key}": value for key, value in ({"enable": True} | given).items()}
    return tree | told | {f"{QUEUE}.priority_fn_args.*": args}


def test_one_queue_of_fresh_and_used_experiences() -> None:
    """Step s takes versions from s - 7 on, and its trainer is at version s - 1: used groups are up to 6 older."""
    given = replaying(
        bounded(7, sync_style="dynamic_by_trainer"),
        reuse_cooldown_time=1.5,
        priority_fn="decay_limit_randomization",
        priority_fn_args={"use_count_limit": 0, "sigma": 0.25},
    )
    assert run.replay(given) == {
        "buffer.replay.queue": True,
        "buffer.replay.capacity": 10000,
        "buffer.replay.cooldown": "1.5 s",
        "buffer.replay.priority": run.CONTROLLED,
        "buffer.replay.priority.decay": 2.0,
        "buffer.replay.priority.sigma": 0.25,
        "buffer.replay.priority.use_limit": None,
        "buffer.replay.max_staleness": 6,
    }
    alone = replaying(grpo(mode="train"), priority_fn_args={"decay": 0.5}) | {f"{EXPERIENCES}.capacity": 40}
    assert run.replay(alone) == {
        "buffer.replay.queue": True,
        "buffer.replay.capacity": 40,
        "buffer.replay.cooldown": None,
        "buffer.replay.priority": "linear_decay",
        "buffer.replay.priority.decay": 0.5,
    }
    for interval, most in ((1, 4), (6, 6)):
        tree = grpo(synchronizer__sync_style="fully_async", synchronizer__sync_interval=interval)
        unbounded = replaying(tree, reuse_cooldown_time=2.5)
        assert run.replay(unbounded)["buffer.replay.cooldown"] == "2.5 s"
        assert "buffer.replay.max_staleness" not in run.replay(unbounded)
        assert run.ahead(unbounded)["rollout.max_staleness"] == most, (
            "so that steps of used ones need not wait"
        )
        assert run.ahead(tree)["rollout.max_staleness"] == interval
    for mode in ("explore", "bench"):
        assert run.replay(alone | {"mode": mode}) == {}
    assert run.replay(alone | {f"{QUEUE}.enable": False}) == {}
    assert run.replay(alone | {"algorithm.algorithm_type": "sft"}) == {}


def test_a_queue_by_priority_between_syncs_of_all_rollouts_is_a_plain_one() -> None:
    """Of equal versions and use counts the first in is the first out, and each is used once."""
    assert run.replay(replaying(grpo(), priority_fn_args={"decay": 0.1})) == {}
    limited = {"priority_fn": "decay_limit_randomization", "priority_fn_args": {"use_count_limit": 2}}
    assert run.replay(replaying(grpo(synchronizer__sync_interval=5), **limited)) == {}
    noisy = limited | {"priority_fn_args": {"sigma": 0.5}}
    with pytest.raises(NotSupportedYet, match="sigma"):
        run.replay(replaying(grpo(), **noisy))


@pytest.mark.parametrize(
    ("tree", "given", "error", "said"),
    [
        (grpo(), {"reuse_cooldown_time": 1.0}, NotSupportedYet, "sync_style: fixed and"),
        (grpo(synchronizer__sync_offset=1), {}, NotSupportedYet, "sync_style: fixed and"),
        (
            grpo(mode="train", **{f"{EXPERIENCES}.storage_type": "sql"}),
            {},
            NotSupportedYet,
            "storage_type: sql",
        ),
        (grpo(mode="train"), {"priority_fn_args": {"sigma": 1.0}}, ConfigError, "sigma: no such argument"),
    ],
)
def test_a_replay_buffer_that_cannot_be(
    tree: dict[str, Json], given: dict[str, Json], error: Any, said: str
) -> None:
    with pytest.raises(error, match=said):
        run.replay(replaying(tree, **given))
