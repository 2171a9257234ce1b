"""The order of rows: by chance, as they stand, by difficulty; the same again after a resume."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet import seeds
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import DataConfig, SourceConfig, TokenizerConfig
from whet.data.tasks import TaskStream
from whet.data.tokenizer import load_tokenizer
from whet.types import CheckpointError, ConfigError, DataError

ORDERS = ("shuffle", "sequential", "easy_first", "hard_first")
LEVELS = [3, 1, 2, 1, 3, 0.5, 2, 1]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["abcdefgh0123456789"])


def source(levels=LEVELS, name="a", **kw):
    rows = tuple({"prompt": f"{name}{i}", "level": x, "n": {"level": x}} for i, x in enumerate(levels))
    return SourceConfig(rows=rows, name=name, **{"difficulty": "level", **kw})


def stream(tokenizer, *sources, seed=0, **data):
    cfg = DataConfig(train=sources, **data)
    return TaskStream(cfg.train, cfg, tokenizer=tokenizer, seed=seed)


def places(tasks):
    return [int(t.prompt[1:]) for t in tasks]


def test_easy_rows_first_by_hand(tokenizer):
    tasks = stream(tokenizer, source([2, 0, 1]), order="easy_first")
    assert places(tasks.next(6)) == [1, 2, 0, 1, 2, 0]
    tasks = stream(tokenizer, source([2, 0, 1]), order="hard_first")
    assert places(tasks.next(6)) == [0, 2, 1, 0, 2, 1]


@given(levels=st.lists(st.sampled_from([-1.5, 0, 1, 2]), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_every_epoch_is_a_permutation_in_order_of_difficulty(levels, seed, tokenizer):
    n = len(levels)
    for order, sign in (("easy_first", 1), ("hard_first", -1)):
        tasks = stream(tokenizer, source(levels), order=order, seed=seed)
        for _ in range(2):
            epoch = places(tasks.next(n))
            assert sorted(epoch) == list(range(n))
            assert [sign * levels[i] for i in epoch] == sorted(sign * x for x in levels)


def pairs(values, name="a", **kw):
    rows = tuple({"prompt": f"{name}{i}", "p": p, "q": q} for i, (p, q) in enumerate(values))
    return SourceConfig(rows=rows, name=name, difficulty=kw.pop("difficulty", ("p", "q")), **kw)


def test_several_columns_by_hand(tokenizer):
    """The second column decides where the first is equal: (1, 9) before (2, 0)."""
    values = [(2, 0), (1, 9), (2, -1), (1, 0.5)]
    for order, expected in (("easy_first", [3, 1, 2, 0]), ("hard_first", [0, 2, 1, 3])):
        assert places(stream(tokenizer, pairs(values), order=order).next(8)) == expected * 2
    swapped = pairs(values, difficulty=("q", "p"))
    assert places(stream(tokenizer, swapped, order="easy_first").next(4)) == [2, 0, 3, 1]
    alone = stream(tokenizer, pairs(values, difficulty=("p",)), order="easy_first", seed=5).state()
    assert alone == stream(tokenizer, pairs(values, difficulty="p"), order="easy_first", seed=5).state()


@given(
    values=st.lists(st.tuples(*[st.sampled_from([-1, 0, 1.5])] * 3), min_size=1, max_size=12),
    seed=st.integers(0, 9),
)
def test_rows_equal_in_every_column_are_shuffled(values, seed, tokenizer):
    n = len(values)
    rows = tuple({"prompt": f"a{i}", "x": v[0], "y": v[1], "z": v[2]} for i, v in enumerate(values))
    kept = {"rows": rows, "name": "a"}
    shuffled = stream(tokenizer, SourceConfig(**kept), order="shuffle", seed=seed)
    three = SourceConfig(**kept, difficulty=("x", "y", "z"))
    easy, hard = (stream(tokenizer, three, order=f"{o}_first", seed=seed) for o in ("easy", "hard"))
    for _ in range(2):
        anyhow = places(shuffled.next(n))
        assert places(easy.next(n)) == sorted(anyhow, key=lambda i: values[i])
        # tuples of negative numbers: the largest first in every column, and equal rows as they were shuffled
        assert places(hard.next(n)) == sorted(anyhow, key=lambda i: tuple(-x for x in values[i]))


def test_equally_difficult_rows_are_shuffled_as_all_rows_would_be(tokenizer):
    n = len(LEVELS)
    shuffled = stream(tokenizer, source(), order="shuffle", seed=4)
    eased = stream(tokenizer, source(), order="easy_first", seed=4)
    for _ in range(3):
        anyhow = places(shuffled.next(n))
        # Python's sort is stable, too: the oracle
        assert places(eased.next(n)) == sorted(anyhow, key=lambda i: LEVELS[i])
    first = [
        places(stream(tokenizer, source([1] * 20), order="easy_first", seed=s).next(20)) for s in range(3)
    ]
    assert first[0] != first[1] != first[2]


def test_each_source_goes_by_its_own_difficulties(tokenizer):
    sources = source([2, 1, 0], "a"), source([10, 30, 20], "b", difficulty="n.level")
    tasks = stream(tokenizer, *sources, order="easy_first").next(6)
    assert [t.prompt for t in tasks] == ["a2", "b0", "a1", "b2", "a0", "b1"]


@pytest.mark.parametrize("order", ORDERS)
def test_resuming_at_every_position_in_every_order(order, tokenizer):
    sources = source(weight=2.0), source([1, 1, 2], "b")
    unbroken = stream(tokenizer, *sources, order=order, seed=9).next(30)
    saved = stream(tokenizer, *sources, order=order, seed=9)
    for position in range(22):
        resumed = stream(tokenizer, *sources, order=order, seed=9)
        resumed.restore(json.loads(json.dumps(saved.state())))
        assert resumed.next(8) == unbroken[position : position + 8]
        saved.next(1)


def test_other_difficulties_are_other_data(tokenizer):
    state = stream(tokenizer, source([1, 2]), order="easy_first").state()
    stream(tokenizer, source([1, 2]), order="easy_first").restore(state)
    with pytest.raises(CheckpointError, match="'a' has changed since the run was saved"):
        stream(tokenizer, source([1, 3]), order="easy_first").restore(state)


def test_other_difficulties_of_the_second_column_are_other_data(tokenizer):
    state = stream(tokenizer, pairs([(1, 2), (1, 3)]), order="easy_first").state()
    stream(tokenizer, pairs([(1, 2), (1, 3)]), order="easy_first").restore(state)
    with pytest.raises(CheckpointError, match="'a' has changed since the run was saved"):
        stream(tokenizer, pairs([(1, 2), (1, 1)]), order="easy_first").restore(state)


def test_the_order_has_a_seed_of_its_own(tokenizer):
    expected = seeds.permutation(seeds.key(7, "shuffle", "a", 0), len(LEVELS)).tolist()
    for run_seed in (0, 1):
        assert places(_seeded(tokenizer, run_seed, 7).next(len(LEVELS))) == expected
    assert places(_seeded(tokenizer, 7, None).next(len(LEVELS))) == expected
    state = _seeded(tokenizer, 0, 7).state()
    with pytest.raises(CheckpointError, match="saved with seed 7, but this one has 8"):
        _seeded(tokenizer, 0, 8).restore(state)


def _seeded(tokenizer, run_seed, data_seed):
    cfg = DataConfig(train=(source(),), seed=data_seed)
    return TaskStream(cfg.train, cfg, tokenizer=tokenizer, seed=run_seed)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("hard", "row 2: column 'level' holds str 'hard'; expected a finite number"),
        (True, "row 2: column 'level' holds bool True"),
        (None, "row 2: column 'level' holds NoneType None"),
        (float("nan"), "row 2: column level holds nan, which is not a JSON value"),
    ],
)
def test_difficulties_that_are_no_numbers_are_named(value, says, tokenizer):
    with pytest.raises(DataError, match=says):
        stream(tokenizer, source([1, value]), order="easy_first")


def test_the_second_column_is_checked_like_the_first(tokenizer):
    with pytest.raises(DataError, match="row 2: column 'q' holds str 'x'; expected a finite number"):
        stream(tokenizer, pairs([(1, 1), (1, "x")]), order="easy_first")
    with pytest.raises(DataError, match="row 1: no column 'r'; columns: prompt, p, q"):
        stream(tokenizer, pairs([(1, 1)], difficulty=("p", "r")), order="easy_first")


def test_columns_of_difficulties_are_read_and_do_not_reach_the_environment(tokenizer):
    (task,) = stream(tokenizer, pairs([(1, 2)]), order="easy_first").next(1)
    assert task.extra == {}


def test_a_missing_column_of_difficulties_is_named(tokenizer):
    with pytest.raises(DataError, match="row 1: no column 'hardness'; columns: prompt, level, n"):
        stream(tokenizer, source(difficulty="hardness"), order="easy_first")
    with pytest.raises(ConfigError, match="source 'a' has no column of difficulties"):
        stream(tokenizer, source(difficulty=None), order="easy_first").next(1)


def test_rows_left_out_do_not_shift_the_difficulties(tokenizer):
    rows = tuple({"prompt": p, "level": x} for p, x in (("a00000", 0), ("a1", 3), ("a2", 1), ("a3", 2)))
    tasks = stream(
        tokenizer,
        SourceConfig(rows=rows, difficulty="level"),
        order="easy_first",
        max_prompt_tokens=3,
        overlong="filter",
    )
    assert places(tasks.next(3)) == [2, 3, 1]
    assert np.array_equal(tasks.sources[0].difficulty_KD, [[3], [1], [2]])


# ---------------------------------------------------------------- the config


BASE = {
    "model": {"scratch": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}},
    "tokenizer": {"build": "chars"},
    "rewards": {"acc": {"function": "exact"}},
    "train": {"steps": 1},
}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"train": [{"path": "a.jsonl"}], "order": "easy_first"},
            "data.train[0].difficulty: data.order=easy_first needs a column of numbers",
        ),
        (
            {"train": [{"path": "a.jsonl", "difficulty": []}], "order": "hard_first"},
            "data.train[0].difficulty: data.order=hard_first needs a column of numbers",
        ),
        (
            {"train": [{"path": "a.jsonl", "difficulty": "x"}]},
            "data.train[0].difficulty: has no effect: data.order=shuffle does not read it",
        ),
        (
            {"train": [{"path": "a.jsonl"}], "order": "sequential", "seed": 3},
            "data.seed: has no effect: data.order=sequential uses no random numbers",
        ),
        (
            {"train": [{"path": "a.jsonl"}], "eval": [{"path": "b.jsonl", "difficulty": "x"}]},
            "difficulty: has no effect: evaluation reads held-out rows in the order of the file",
        ),
    ],
)
def test_what_an_order_needs_and_does_not_read(data, says):
    with pytest.raises(ConfigError) as caught:
        plans(load(None, (), {**BASE, "data": data}))
    assert says in str(caught.value)


def test_an_order_with_all_it_needs_is_planned():
    data = {"train": [{"path": "a.jsonl", "difficulty": ["x", "y"]}], "order": "hard_first", "seed": 3}
    assert plans(load(None, (), {**BASE, "data": data}))
