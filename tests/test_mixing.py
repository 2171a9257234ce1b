"""Sources mixed in proportion to their rows: by hand, every row once an epoch, the same again after a resume."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import whet
from test_orders import played
from whet import seeds
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import DataConfig, SourceConfig, TokenizerConfig
from whet.data import tasks as streams
from whet.data.tasks import TaskStream
from whet.data.tokenizer import load_tokenizer
from whet.types import CheckpointError, ConfigError

SIZES = {"a": 5, "b": 1, "c": 3}
N = sum(SIZES.values())


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["abcdefgh0123456789"])


def source(name, rows=None, **kw):
    n = SIZES[name] if rows is None else rows
    return SourceConfig(rows=tuple({"prompt": f"{name}{i}", "n": i} for i in range(n)), name=name, **kw)


def stream(tokenizer, *sources, seed=0, multiple_of=1, **data):
    sources = sources or tuple(map(source, SIZES))
    cfg = DataConfig(train=sources, **{"mixing": "proportional", **data})
    return TaskStream(cfg.train, cfg, tokenizer=tokenizer, seed=seed, multiple_of=multiple_of)


def prompts(tasks):
    return [t.prompt for t in tasks]


@pytest.mark.parametrize("order", ["sequential", "shuffle", "easy_first"])
def test_an_epoch_has_every_row_of_every_source_once(order, tokenizer):
    sources = [source(name, **({"difficulty": "n"} if order == "easy_first" else {})) for name in SIZES]
    tasks = stream(tokenizer, *sources, order=order)
    every = sorted(f"{name}{i}" for name, n in SIZES.items() for i in range(n))
    assert tasks.rows_per_epoch == len(every)
    for epoch in range(4):
        assert tasks.epoch == epoch
        drawn = prompts(tasks.next(N))
        assert sorted(drawn) == every
        if order != "shuffle":  # each source goes by its own order, whatever stands between
            assert [p for p in drawn if p[0] == "a"] == ["a0", "a1", "a2", "a3", "a4"]


def test_by_weight_a_small_source_is_passed_more_often(tokenizer):
    """Without the mixing the one row of b comes in every third draw."""
    counts = Counter(prompts(stream(tokenizer, mixing="weighted", order="sequential").next(N)))
    assert counts["b0"] == 3
    assert counts["a4"] == 0


def test_the_schedule_by_hand(tokenizer):
    """The sources of an epoch are aaaaabccc, shuffled by the seed and the number of the epoch."""
    drawn = [t.source for t in stream(tokenizer, seed=3).next(2 * N)]
    for epoch in range(2):
        shuffled = seeds.permutation(seeds.key(3, "mixing", epoch), N)
        assert drawn[epoch * N : (epoch + 1) * N] == ["aaaaabccc"[k] for k in shuffled]
    assert drawn[:N] != drawn[N:]
    assert [t.source for t in stream(tokenizer, seed=0).next(N)] != drawn[:N]


def test_each_place_of_an_epoch_has_the_odds_of_the_rows(tokenizer):
    """5/9 of the first and of the last places are a's; 400 seeds, 4 standard deviations of 0.025."""
    first = last = 0
    for seed in range(400):
        drawn = [t.source for t in stream(tokenizer, seed=seed).next(N)]
        first, last = first + (drawn[0] == "a"), last + (drawn[-1] == "a")
    assert abs(first / 400 - 5 / 9) < 0.1
    assert abs(last / 400 - 5 / 9) < 0.1


@pytest.mark.parametrize("order", ["shuffle", "sequential", {"name": "random", "distinct": 1}, "adaptive"])
def test_resumed_at_any_draw_the_same_tasks_follow(order, tokenizer):
    def play(tasks, n):
        drawn = []
        for _ in range(n):
            (task,) = tasks.next(1)
            tasks.update([played(task, task.uid % 2)], pending=())
            drawn.append((task.uid, task.prompt))
        return drawn

    unbroken = play(stream(tokenizer, order=order, seed=9), 3 * N)
    saved = stream(tokenizer, order=order, seed=9)
    for position in range(2 * N + 1):
        resumed = stream(tokenizer, order=order, seed=9)
        resumed.restore(json.loads(json.dumps(saved.state())))
        assert play(resumed, N) == unbroken[position : position + N]
        play(saved, 1)


WEIGHTS = [(1.0, 1.0, 1.0), (0.7, 0.3), (0.5, 0.3, 0.2), (5.0, 1.0, 0.25), (1.0,)]


@pytest.mark.parametrize("weights", [None, *WEIGHTS])
def test_tasks_are_drawn_by_number(weights, tokenizer, monkeypatch):
    """As separate explorers do: forwards, backwards, across the end of an epoch and over remembered places."""
    monkeypatch.setattr(streams, "MARK", 4)
    data = {"mixing": "weighted" if weights else "proportional"}
    sources = [source(name, weight=w) for name, w in zip(SIZES, weights or (1.0, 1.0, 1.0))]
    unbroken = stream(tokenizer, *sources, **data).next(20 * N)
    drawn = stream(tokenizer, *sources, **data)
    for uid in (0, 4, 3, 2 * N, N - 1, N, 3 * N - 1, 1, 20 * N - 1, 10 * N, 10 * N + 7, 10 * N + 2):
        assert (drawn.at(uid).uid, drawn.at(uid).prompt) == (uid, unbroken[uid].prompt)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_jump_ends_where_so_many_draws_end(weights):
    mix, drawn_S = streams.Weighted(weights), np.zeros(len(weights), dtype=np.int64)
    jumps = streams.Weighted(weights)
    for draws in range(3000):
        if draws % 7 == 0:
            assert jumps.after(draws, np.zeros_like(drawn_S)) == drawn_S.tolist()
        drawn_S[mix(drawn_S)] += 1


def test_a_jump_counts_from_the_nearest_place_that_was_passed(monkeypatch):
    monkeypatch.setattr(streams, "MARK", 16)
    here_S = np.array([700, 300])
    for jumped in (True, False):
        mix = streams.Weighted((7.0, 3.0))
        if jumped:
            mix.after(1000, np.zeros(2, dtype=np.int64))
        else:
            drawn_S = np.zeros(2, dtype=np.int64)
            for _ in range(1000):
                drawn_S[mix(drawn_S)] += 1
        mix.marks[0] = [10**6, 10**6]  # what is counted from there is wrong
        assert mix.after(500, here_S) == [350, 150]
        assert mix.after(1001, here_S) == [701, 300]
        assert mix.after(10, here_S) != [7, 3]


def test_rows_that_fill_no_step_are_left_out_of_each_source_and_counted(tokenizer, caplog):
    """train.drop_last with steps of 2: 4 of the 5 rows, and 2 of the 3."""
    tasks = stream(tokenizer, source("a"), source("c"), multiple_of=2, order="sequential")
    assert tasks.rows_per_epoch == 6
    assert tasks.counts["not_drawn_per_epoch"] == 2
    assert "train.drop_last: 2 rows make no whole step" in caplog.text
    for _ in range(3):
        assert Counter(prompts(tasks.next(6))) == Counter(["a0", "a1", "a2", "a3", "c0", "c1"])


def test_how_often_a_run_passes_through_each_source(tokenizer):
    """By weight a small source is passed again before a large one ends: which is not always all of it in an epoch."""
    sources = source("a", 9), source("b", 3)
    assert stream(tokenizer, *sources, mixing="weighted").passes(12) == {"a": pytest.approx(2 / 3), "b": 2}
    assert stream(tokenizer, *sources).passes(24) == {"a": 2, "b": 2}
    three = stream(tokenizer, source("a", 9, weight=3.0), source("b", 3), mixing="weighted")
    assert three.passes(36) == {"a": pytest.approx(3), "b": pytest.approx(3)}
    assert Counter(p[0] for p in prompts(three.next(36))) == {"a": 27, "b": 9}


def test_the_seed_is_that_of_the_data(tokenizer):
    def drawn(run, own):
        cfg = DataConfig(train=tuple(map(source, SIZES)), mixing="proportional", order="sequential", seed=own)
        return prompts(TaskStream(cfg.train, cfg, tokenizer=tokenizer, seed=run).next(N))

    assert drawn(0, 7) == drawn(1, 7) == drawn(7, None) != drawn(0, None)


def test_a_branch_goes_on_at_the_same_number_of_draws(tokenizer):
    weighted = stream(tokenizer, mixing="weighted")
    weighted.next(13)
    branch = stream(tokenizer)
    branch.restore(weighted.state(), changed=True)
    assert prompts(branch.next(5)) == prompts(stream(tokenizer).next(18)[13:])


# ---------------------------------------------------------------- the config

BASE = {
    "model": {"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
    "tokenizer": {"build": "chars"},
    "rewards": {"r": {"function": "exact"}},
    "rollout": {"group_size": 2, "sampling": {"max_tokens": 2}},
    "train": {"epochs": 2, "tasks_per_step": 4, "drop_last": "end"},
    "track": {"trackers": ["jsonl"]},
    "checkpoint": {"interval": 1, "export": False},
}
TWO = [
    {"name": name, "rows": [{"prompt": f"{name}{i}", "answer": "a"} for i in range(SIZES[name])]}
    for name in ("a", "c")
]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"train": TWO[:1], "mixing": "proportional"},
            "data.mixing: has no effect: there is only one source",
        ),
        (
            {"train": [TWO[0], TWO[1] | {"weight": 2.0}], "mixing": "proportional"},
            "weight: has no effect: data.mixing=proportional draws from each source as often as it has rows",
        ),
        (
            {"train": TWO, "mixing": "proportionate"},
            "data.mixing: got \"proportionate\", expected 'weighted' or 'proportional'",
        ),
        ({"train": TWO, "order": "sequential", "seed": 3}, "data.seed: has no effect: data.order=sequential"),
    ],
)
def test_what_has_no_effect_is_refused(data, says):
    with pytest.raises(ConfigError) as e:
        plans(load(None, (), {**BASE, "data": data}))
    assert says in str(e.value)


def test_the_seed_of_the_mixing_counts_without_a_shuffle():
    data = {"train": TWO, "order": "sequential", "seed": 3, "mixing": "proportional"}
    assert plans(load(None, (), {**BASE, "data": data}))


def drawn_by(run):
    """{uid: prompt} of a finished run."""
    files = sorted(Path(run, "rollouts").glob("*.parquet"))
    tables = [pq.read_table(file, columns=["uid", "prompt"]).to_pylist() for file in files]
    return {row["uid"]: row["prompt"] for table in tables for row in table}


def test_a_run_of_two_epochs_plays_every_task_twice_also_if_it_is_resumed(tmp_path, monkeypatch):
    """8 tasks, 2 epochs, 4 a step: 4 steps."""
    monkeypatch.chdir(tmp_path)
    config = {**BASE, "data": {"train": TWO, "mixing": "proportional"}}
    whet.train(**config, run_dir="whole")
    drawn = drawn_by("whole")
    assert "16 tasks pass through each source: a 2, c 2" in Path("whole", "run.log").read_text()
    assert len(drawn) == 16
    for epoch in range(2):
        now = [drawn[uid] for uid in range(8 * epoch, 8 * epoch + 8)]
        assert Counter(now) == Counter(row["prompt"] for one in TWO for row in one["rows"])
    whet.train(**config, run_dir="parts", on_step=lambda row: row["step"] == 3)
    with pytest.raises(CheckpointError, match=r"data.mixing"):
        whet.train(**{**config, "data": {"train": TWO}}, run_dir="parts")
    whet.train(**config, run_dir="parts")
    assert drawn_by("parts") == drawn
    assert Path("whole", "metrics.jsonl").read_bytes() == Path("parts", "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("drop_last", "said"),
    [
        (False, "1 epochs of 5 rows are 5 tasks; 2 steps of 4 are 8"),
        ("end", "1 epochs of 5 rows are 5 tasks; 1 steps of 4 are 4"),
        (True, "kept 5, not_drawn_per_epoch 1"),
    ],
)
def test_rows_that_an_epoch_leaves_over_or_trains_again_are_counted(drop_last, said, tmp_path):
    rows = [{"prompt": f"p{i}", "response": "a"} for i in range(5)]
    train = {"epochs": 1, "tasks_per_step": 4, "drop_last": drop_last}
    config = {name: BASE[name] for name in ("model", "tokenizer", "track", "checkpoint")}
    data = {"train": [{"rows": rows, "name": "p"}]}
    run = tmp_path / "run"
    whet.train(**config, algorithm="sft", data=data, train=train, run_dir=str(run))
    assert said in (run / "run.log").read_text()
