"""Exact resume, whatever the config says: for each key of the schema a run in which it counts, ended after its first
checkpoint and gone on with, leaves the files of an unbroken run, byte for byte; also where steps are sampled ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from native_cases import BASE, CASES, LATER
from observed import Watcher
from swept import except_for
from test_dead_native import make_models, place, tree_of
from whet.types import Json

STEPS = 4
WHERE_RESULTS_DEPEND_ON_TIME = (
    "async",
    "cluster",
    "parallel",
    "mode=",
    "replicas",
    "engine",
    "profile",
    "stages",
)
"""Words of keys, contexts and values: free schedules, other processes and machines, profiles. They have tests of their
own (test_ranks_run, test_rounds, test_cluster, test_overlap)."""
NOT_WHOLE = {
    "checkpoint.save_contents": "a part of a checkpoint is no state to go on from",
    "dirs.checkpoints": "checkpoints that lie elsewhere: test_checkpoint_options.py goes on from them",
    "train.early_stopping.metric": "the run ends before its second checkpoint",
    "train.early_stopping.goal": "the same",
}
TIMES = (
    "told",
    "timed",
    "runs/run/journal/",
    "runs/run/seconds/",
    "runs/run/stacks",
    "runs/run/tensorboard/",
)
"""Beginnings of what differs between two equal runs: seconds, processes, the order in which answers of environments
came, and what is said at the start."""


def is_steady(name: str) -> bool:
    said = " ".join((name, CASES[name][0], str(CASES[name][1])))
    return name not in ("mode", *NOT_WHOLE) and not any(word in said for word in WHERE_RESULTS_DEPEND_ON_TIME)


NAMES = sorted(name for name in CASES if is_steady(name))


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watcher]:
    made = Watcher(tmp_path_factory.mktemp("resumed"))
    make_models(made)
    yield made
    made.close()


def config_of(watcher: Watcher, name: str, staleness: int) -> dict[str, Json]:
    """The key's case with its other value: at least STEPS steps, a checkpoint after each. staleness: steps that are
    sampled ahead, where the case does not say."""
    context, value = CASES[name]
    context = f"train.steps=2; {context}" if name in LATER else context
    tree = tree_of(watcher, context, (place(name), value))
    train = tree.setdefault("train", {})
    if train.get("steps") is not None:
        train["steps"] = max(STEPS, train["steps"])
    if staleness:
        tree.setdefault("rollout", {}).setdefault("max_staleness", staleness)
    kept = {key: value for key, value in tree.get("checkpoint", {}).items() if key != "keep_best"}
    return tree | {"checkpoint": {"export": True, **kept, "interval": 1, "keep": 100}}


def lasting(record: dict[str, str]) -> dict[str, str]:
    """Without the id of a run directory."""
    return {
        name: digest
        for name, digest in record.items()
        if not name.startswith(TIMES) and not name.endswith(".whet-run")
    }


EACH = [(name, staleness) for name in NAMES for staleness in (0, 2)]


@pytest.mark.parametrize(
    "case",
    except_for(lambda case: NAMES.index(case[0]) % 32 == 8 * case[1], EACH),
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def test_a_run_that_goes_on_leaves_the_files_of_an_unbroken_one(
    watcher: Watcher, case: tuple[str, int]
) -> None:
    tree = config_of(watcher, *case)
    whole = watcher.record(tree)
    if case[1] and "refused" in whole:  # with this key nothing may be sampled ahead
        assert "max_staleness" in whole["refused"]
        return
    assert "refused" not in whole, whole
    assert len({file.partition("/checkpoints/")[2].partition("/")[0] for file in whole} - {""}) > 1
    assert lasting(watcher.resumed(tree, {})) == lasting(whole)


def test_most_keys_are_tried() -> None:
    assert len(NAMES) > 0.9 * len(CASES), "docs/guarantees.md says so"
    assert set(BASE) <= {name.partition(".")[0] for name in NAMES}
