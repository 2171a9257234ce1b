"""Exact resume, whatever the config says: for each key of the schema, and for some together, a run in which they count,
ended after its first checkpoint and gone on with, leaves the files of an unbroken run, byte for byte; also where steps
are sampled ahead. And its first step has the same numbers however it is cut into micro-batches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from native_cases import BASE, CASES, LATER
from observed import Watcher
from swept import except_for
from test_dead_native import make_models, place, tree_of
from whet.config.resuming import class_of
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


def config_of(
    watcher: Watcher, names: Sequence[str], staleness: int, *, around: str | None = None
) -> dict[str, Json]:
    """The keys' cases with their other values: at least STEPS steps, a checkpoint after each. staleness: steps that are
    sampled ahead, where no case says. around: a key whose case is set up without its value."""
    said = [*names, *([around] if around else [])]
    later = ["train.steps=2"] if LATER & {*said} else []
    contexts = "; ".join([*later, *(CASES[name][0] for name in said if CASES[name][0])])
    tree = tree_of(watcher, contexts, *((place(name), CASES[name][1]) for name in names))
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
    name, staleness = case
    tree = config_of(watcher, [name], staleness)
    whole = watcher.record(tree)
    if staleness and "refused" in whole:  # with this key nothing may be sampled ahead
        assert "max_staleness" in whole["refused"]
        return
    assert "refused" not in whole, whole
    assert len({file.partition("/checkpoints/")[2].partition("/")[0] for file in whole} - {""}) > 1
    assert lasting(watcher.resumed(tree, {})) == lasting(whole)


@pytest.mark.parametrize("number", except_for(lambda number: number < 4, range(400)))
def test_keys_together_are_resumed_or_refused(watcher: Watcher, number: int) -> None:
    rng = Random(f"together {number}")
    tree = config_of(watcher, rng.sample(NAMES, rng.choice((2, 2, 3, 4))), rng.choice((0, 0, 2)))
    whole = watcher.record(tree)
    if "refused" not in whole:  # about a third contradict one another
        assert lasting(watcher.resumed(tree, {})) == lasting(whole)


PLACES = ("name", "run_dir", "dirs.")
FREE = [name for name in NAMES if class_of(tuple(name.split("."))) == "free" and not name.startswith(PLACES)]
"""Without those that say where files are: another run begins there, or files that are there must not be left."""


@pytest.mark.parametrize("name", except_for(lambda name: FREE.index(name) % 16 == 0, FREE))
def test_a_free_key_that_has_another_value_after_a_resume_changes_no_weight(
    watcher: Watcher, name: str
) -> None:
    """Weights and the state of the optimizer, in every later checkpoint that both runs have."""
    tree, whole_tree = config_of(watcher, [], 0, around=name), config_of(watcher, [name], 0)
    whole = watcher.record(tree)
    assert "refused" not in whole, whole
    changed = watcher.resumed(tree, whole_tree)
    assert "refused" not in changed, changed
    compared = [at for at in {*whole} & {*changed} if "/checkpoints/" in at and "/policy/" in at]
    assert len({at.partition("/policy/")[0] for at in compared}) > 1, "later ones, too"
    assert {at: whole[at] for at in compared} == {at: changed[at] for at in compared}


CUT = [name for name in NAMES if not any(word in name for word in ("micro", "float8", "dtype"))]
"""Without half precision, whose rounding follows the micro-batches by more than the bounds here."""


@pytest.mark.parametrize("number", except_for(lambda number: number % 100 == 0, range(len(CUT) + 200)))
def test_the_first_step_has_the_same_numbers_however_it_is_cut(watcher: Watcher, number: int) -> None:
    """Each key alone, then some together."""
    rng = Random(f"cut {number}")
    names = CUT[number : number + 1] or rng.sample(CUT, rng.choice((2, 2, 3)))
    whole, cut = (first_step(watcher, names, rollouts) for rollouts in (None, 1))
    assert (whole is None) == (cut is None)
    for name in () if whole is None or cut is None else {*whole, *cut}:
        a, b = whole.get(name), cut.get(name)
        assert a == b or math.isclose(a, b, rel_tol=2e-3, abs_tol=2e-5), (names, name)


def first_step(watcher: Watcher, names: Sequence[str], rollouts: int | None) -> dict[str, Any] | None:
    """Its metrics, where a micro-batch has so many rollouts; None: the keys contradict one another. Later steps may
    sample other tokens, once weights differ by rounding."""
    tree = config_of(watcher, names, 0)
    tree["train"]["micro_batch_rollouts"] = rollouts
    if rollouts:
        tree["train"].pop("micro_tokens", None)
    if "refused" in watcher.record(tree):
        return None
    (file,) = (watcher.folder / str(watcher.runs)).rglob("metrics.jsonl")
    return next(line for line in map(json.loads, file.read_text().splitlines()) if line["step"] == 1)


def test_most_keys_are_tried() -> None:
    assert len(NAMES) > 0.9 * len(CASES), "docs/guarantees.md says so"
    assert set(BASE) <= {name.partition(".")[0] for name in NAMES}
