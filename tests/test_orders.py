"""Orders that follow how tasks went, orders and samplers of the user: by hand, against an oracle, resumed anywhere."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import whet
from whet.config.schema import DataConfig, SourceConfig, TokenizerConfig
from whet.data.orders import Adaptive
from whet.data.tasks import TaskStream
from whet.data.tokenizer import load_tokenizer
from whet.guard import pulse
from whet.types import CheckpointError, ConfigError, DataError, Group, Rollout, WhetError

ADAPTIVE = {"name": "adaptive", "temperature": 0}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["abcdefgh0123456789"])


def source(n=8, name="a", **columns):
    rows = tuple({"prompt": f"{name}{i}", **{k: v[i] for k, v in columns.items()}} for i in range(n))
    return SourceConfig(rows=rows, name=name)


def stream(tokenizer, *sources, seed=0, **data):
    cfg = DataConfig(train=sources or (source(),), **data)
    return TaskStream(cfg.train, cfg, tokenizer=tokenizer, seed=seed)


def places(tasks):
    return [int(t.prompt[1:]) for t in tasks]


def played(task, *rewards):
    """A group whose rollouts have these rewards; None: not scored."""
    rollouts = (
        Rollout.one_strand(
            task=task,
            index=i,
            token_ids=[1, 2, 3],
            mask=[0, 1, 1],
            logprobs=[0, 0, 0],
            sample_logprobs=[0, 0, 0],
            versions=[-1, 0, 0],
            finish_reason="stop",
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    )
    return Group(task, tuple(rollouts))


def step(tasks, n, reward):
    """A step of n tasks: drawn, played, over. Returns their rows."""
    drawn = tasks.next(n)
    tasks.update([played(t, *reward(int(t.prompt[1:]))) for t in drawn], pending=())
    return places(drawn)


# ---------------------------------------------------------------- random


def test_random_draws_know_no_epochs_but_differ_within_a_step(tokenizer):
    drawn = places(stream(tokenizer, order={"name": "random", "distinct": 4}).next(4 * 500))
    blocks = [drawn[i : i + 4] for i in range(0, len(drawn), 4)]
    assert all(len(set(block)) == 4 for block in blocks)
    assert any(set(a) & set(b) for a, b in zip(blocks[::2], blocks[1::2]))  # an epoch would not repeat a row
    counts = Counter(drawn)
    assert all(abs(counts[row] - 250) < 60 for row in range(8))
    with pytest.raises(ConfigError, match=r"data.order.distinct=9: source 'a' has only 8 rows"):
        stream(tokenizer, order={"name": "random", "distinct": 9})


# ---------------------------------------------------------------- by success


class NaiveBots:
    """BOTS' posterior, row by row with Python's numbers: the formulas of arXiv:2510.26374, section 3."""

    def __init__(self, n, decay, weight, evidence, weak=None, strong=None, adapts=False):
        self.a, self.b, self.decay, self.m = [1.0] * n, [1.0] * n, decay, evidence
        self.weak, self.strong, self.weight, self.adapts = weak, strong, weight if weak else 0.0, adapts
        self.capability = None

    def update(self, rates):
        n, prior = len(self.a), [0.0] * len(self.a)
        if self.weak:
            mean = sum(rates.values()) / len(rates)
            weak = sum(self.weak[r] for r in rates) / len(rates)
            strong = sum(self.strong[r] for r in rates) / len(rates)
            shown = (mean - weak) / (strong - weak + 1e-6)
            self.capability = shown if self.capability is None else 0.9 * self.capability + 0.1 * shown
            prior = [
                min(1.0, max(0.0, w + (s - w) * self.capability)) for w, s in zip(self.weak, self.strong)
            ]
            if self.adapts and sum(abs(prior[r] - p) for r, p in rates.items()) / len(rates) >= 0.25:
                self.weight /= 2
            for row, rate in rates.items():
                prior[row] = rate
        for row in range(n):
            shown = rates.get(row)
            good = 0.0 if shown is None else shown * self.m
            bad = 0.0 if shown is None else (1 - shown) * self.m
            w = self.weight
            self.a[row] = (
                (1 - self.decay) * self.a[row] + self.decay + (1 - w) * good + w * prior[row] * self.m
            )
            self.b[row] = (
                (1 - self.decay) * self.b[row]
                + self.decay
                + (1 - w) * bad
                + (w * (1 - prior[row]) * self.m if w else 0)
            )

    def expected(self):
        return [a / (a + b) for a, b in zip(self.a, self.b)]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 999),
    decay=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    models=st.booleans(),
    adapts=st.booleans(),
)
def test_expected_rates_are_those_of_the_paper(seed, decay, models, adapts, tokenizer):
    rng = np.random.default_rng(seed)
    weak, strong = rng.uniform(0, 0.6, 8).tolist(), rng.uniform(0.4, 1, 8).tolist()
    more = {"columns": ["weak", "strong"], "prior_weight": 0.3, "prior_adapts": adapts} if models else {}
    order = {**ADAPTIVE, "decay": decay, "evidence": 16, **more}
    tasks = stream(tokenizer, source(weak=weak, strong=strong), order=order, seed=seed)
    naive = NaiveBots(8, decay, 0.3, 16, *((weak, strong) if models else ()), adapts=adapts and models)
    (adaptive,) = tasks.order_S
    assert isinstance(adaptive, Adaptive)
    for _ in range(6):
        rates = {}

        def reward(row, rates=rates):
            given = [float(x) for x in rng.integers(0, 2, 4)]
            rates[row] = sum(given) / 4
            return given

        step(tasks, 3, reward)
        naive.update(rates)
        np.testing.assert_allclose(adaptive.expected_K, naive.expected(), rtol=1e-12)


def test_the_tasks_nearest_the_target_are_drawn(tokenizer):
    """Rows 0 to 7 succeed at 0, 1/8 ... 7/8: with no temperature, those nearest 0.75 come, by hand 6, 5, 7."""
    tasks = stream(tokenizer, order={**ADAPTIVE, "target": 0.75, "decay": 0.0})
    given = lambda row: [1.0] * row + [0.0] * (8 - row)  # noqa: E731
    first = [step(tasks, 4, given), step(tasks, 4, given)]
    for _ in range(6):  # rows that nobody played stand at 1/2, nearer than those that fail
        step(tasks, 3, given)
    assert sorted(places(tasks.next(3))) == [5, 6, 7]
    assert len(set(first[0])) == 4  # a row that is out is not drawn again


def test_a_draw_has_the_odds_of_its_distance(tokenizer):
    """After one step row 0 is expected at (1 + 4) / 6 and row 1 at 1 / 6, the target is 5 / 6, the temperature 0.5: the
    odds of the first draw are exp(2 / 3 / 0.5)."""
    hits, runs = 0, 1000
    for seed in range(runs):
        tasks = stream(
            tokenizer,
            source(2),
            seed=seed,
            order={"name": "adaptive", "temperature": 0.5, "target": 5 / 6, "decay": 0.0},
        )
        step(tasks, 2, lambda row: [1.0 - row] * 4)
        hits += places(tasks.next(1)) == [0]
    odds = np.exp(2 / 3 / 0.5)
    p = odds / (1 + odds)
    assert abs(hits / runs - p) < 4 * np.sqrt(p * (1 - p) / runs)


def test_rewards_are_success_rates_within_their_range(tokenizer):
    order = {**ADAPTIVE, "reward_min": -1.0, "reward_max": 3.0, "decay": 0.0}
    tasks = stream(tokenizer, source(4), order=order)
    rewards = {0: [-9.0, 3.0], 1: [1.0, None], 2: [None, None], 3: [99.0, 3.0]}
    step(tasks, 4, rewards.get)
    assert tasks.order_S[0].expected_K.tolist() == [2 / 4, 1.5 / 3, 1 / 2, 3 / 4]
    with pytest.raises(ConfigError, match=r"data.order.reward_min=2 is not below reward_max=1"):
        stream(tokenizer, order={**ADAPTIVE, "reward_min": 2.0})


def test_more_draws_than_rows_begin_again(tokenizer):
    tasks = stream(tokenizer, source(3), order="adaptive")
    assert sorted(places(tasks.next(3))) == [0, 1, 2]
    assert len(tasks.next(4)) == 4


def test_what_was_given_up_is_drawn_again(tokenizer):
    tasks = stream(tokenizer, order={**ADAPTIVE, "target": 1.0})
    rewards = iter([1.0, 0.0, 0.0, 0.0])
    best_row, *_ = step(tasks, 4, lambda row: [next(rewards)])  # four rows are not played
    best, another = tasks.next(2)
    assert places([best]) == [best_row]
    tasks.update([played(another, 0.0)], pending=())  # the best one was dropped without a group
    assert places(tasks.next(1)) == [best_row]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ({"columns": ["weak"]}, "data.order.columns: got 1; give two columns"),
        (
            {"columns": ["weak", "stron"]},
            "row 1: no column 'stron', which data.order reads; columns: digits, percent, prompt, strong, weak",
        ),
        (
            {"columns": ["weak", "prompt"]},
            "row 1: column 'prompt' holds str 'a0'; data.order expects success rates, numbers from 0 to 1",
        ),
        (
            {"columns": ["percent", "weak"]},
            "row 1: column 'percent' holds int 40; data.order expects success rates",
        ),
        (
            {"columns": ["weak", "digits"]},
            "row 1: column 'digits' holds int 1000.*; data.order expects success rates",
        ),
    ],
)
def test_columns_that_are_no_rates_are_named(order, says, tokenizer):
    rows = source(weak=[0.1] * 8, strong=[0.9] * 8, digits=[10**400] * 8, percent=[40] * 8)
    with pytest.raises((ConfigError, DataError), match=says):
        stream(tokenizer, rows, order={**ADAPTIVE, **order})


# ---------------------------------------------------------------- resume

COUNTS = '''
class Least:
    """The row that was seen least often; `gain` rewards count as a view."""

    def __init__(self, rows, gain=1.0):
        self.seen, self.gain = [0.0] * len(rows), gain

    def row(self, draw, out):
        row = min((k for k in range(len(self.seen)) if k not in out), key=lambda k: (self.seen[k], (k * 5 + draw) % 7))
        return row

    def update(self, played):
        for row, group in played:
            self.seen[row] += 1 + self.gain * sum(r.reward or 0 for r in group.rollouts)

    def state(self):
        return self.seen

    def restore(self, state):
        self.seen = state
'''
TORCH = '''
from torch.utils.data import RandomSampler

class Stateful:
    def __init__(self, rows, step=3):
        self.n, self.step, self.at = len(rows), step, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield (self.at - 1) * self.step % self.n
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

class Generated:
    """As torchdata's RandomSampler: the generator's state, a tensor, is its own."""

    def __init__(self, rows):
        import torch
        self.n, self.generator = len(rows), torch.Generator().manual_seed(7)

    def __iter__(self):
        import torch
        while True:
            yield torch.randint(self.n, (1,), generator=self.generator)

    def state_dict(self):
        return {"inner": [self.generator.get_state()]}

    def load_state_dict(self, state):
        self.generator.set_state(state["inner"][0])

class Curriculum:
    """Begins anew at the row that verl's batch says did worst."""

    def __init__(self, data_source, data_config):
        self.n, self.first, self.told = len(data_source), data_config.sampler.first, []

    def __iter__(self):
        for k in range(self.n):
            yield (self.first + k) % self.n

    def update(self, batch):
        scores = batch.batch["token_level_scores"].sum(-1)
        self.told.append((batch.non_tensor_batch["index"].tolist(), scores.tolist(), len(batch)))
        self.first = batch.non_tensor_batch["index"][int(scores.argmin())]

class Remembers(Curriculum):
    def state_dict(self):
        return {"first": self.first}

    def load_state_dict(self, state):
        self.first = state["first"]
'''


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(COUNTS)
    Path("samplers.py").write_text(TORCH)
    return tmp_path


SAMPLER = {"name": "whet.data.samplers:sampler"}
VERL = {"name": "whet.data.samplers:verl", "config": {"sampler": {"first": 2}}}
LEARN = {
    "adaptive": {"name": "adaptive", "temperature": 0.3},
    "thompson": {"name": "adaptive", "thompson": True},
    "models": {"name": "adaptive", "columns": ["weak", "strong"], "prior_adapts": True},
    "own": {"name": "own.py:Least", "gain": 2.0},
    "stateful": {**SAMPLER, "class_path": "samplers.py:Stateful", "arguments": {"step": 5}},
    "generated": {**SAMPLER, "class_path": "samplers.py:Generated"},
    "torch": {**SAMPLER, "class_path": "samplers.py:RandomSampler"},
}


@pytest.mark.parametrize("name", LEARN)
def test_resumed_at_any_draw_the_same_rows_follow(name, files, tokenizer):
    """Also in the middle of a step, and with steps that overlap."""

    def fresh():
        rates = {"weak": [0.1 * i for i in range(8)], "strong": [1.0] * 8}
        return stream(tokenizer, source(**rates), source(3, "b", **rates), order=LEARN[name], seed=4)

    def play(tasks, begin, end, waiting):
        """Draws begin .. end-1; each third draw the four oldest tasks are over."""
        rows = []
        for draw in range(begin, end):
            (task,) = tasks.next(1)
            rows.append(task.prompt)
            waiting.append(task)
            if draw % 3 == 2 and len(waiting) > 4:
                over, waiting[:] = waiting[:4], waiting[4:]
                groups = [played(t, t.uid % 2, (t.uid // 2) % 2) for t in over]
                tasks.update(groups, pending=[t.uid for t in waiting])
        return rows

    unbroken = play(fresh(), 0, 40, [])
    assert len(set(unbroken)) > 8
    for place in range(0, 40, 3):
        before, waiting = fresh(), []
        play(before, 0, place, waiting)
        torch.rand(3)  # other random numbers are no part of it
        resumed = fresh()
        resumed.restore(json.loads(json.dumps(before.state())))
        assert play(resumed, place, 40, waiting) == unbroken[place:]


def test_other_columns_are_other_data(tokenizer):
    order = {**ADAPTIVE, "columns": ["weak", "strong"]}
    state = stream(tokenizer, source(weak=[0.1] * 8, strong=[0.9] * 8), order=order).state()
    other = stream(tokenizer, source(weak=[0.2] * 8, strong=[0.9] * 8), order=order)
    with pytest.raises(CheckpointError, match="'a' has changed since the run was saved"):
        other.restore(state)
    other.restore(state, changed=True)  # a branch, in which the order begins anew
    assert other.state()["order"]["states"][0]["alpha"] == [1.0] * 8


def test_a_branch_with_the_same_data_keeps_what_was_learned(tokenizer, caplog):
    tasks = stream(tokenizer, order=ADAPTIVE)
    step(tasks, 4, lambda row: [1.0])
    same = stream(tokenizer, order=ADAPTIVE)
    same.restore(tasks.state(), changed=True)
    assert same.state() == tasks.state()
    shuffled = stream(tokenizer, order="shuffle")
    same.restore({**shuffled.state(), "seed": 0}, changed=True)
    assert "data.order=adaptive begins anew" in caplog.text


# ---------------------------------------------------------------- samplers


def test_verls_samplers_are_told_how_each_rollout_went(files, tokenizer):
    tasks = stream(tokenizer, order={**VERL, "class_path": "samplers.py:Remembers"})
    assert step(tasks, 3, lambda row: [1.0, None, row / 8]) == [2, 3, 4]
    told = tasks.order_S[0].sampler.told
    assert told == [([2, 2, 3, 3, 4, 4], [1.0, 2 / 8, 1.0, 3 / 8, 1.0, 4 / 8], 6)]
    assert places(tasks.next(5)) == [5, 6, 7, 0, 1]
    assert places(tasks.next(2)) == [2, 3]  # iterated again, from the row that went worst


def test_a_sampler_that_learns_without_a_state_is_not_resumed(files, tokenizer, caplog):
    order = {**VERL, "class_path": "samplers.py:Curriculum"}
    state = stream(tokenizer, order=order).state()
    assert "cannot be resumed exactly" in caplog.text
    resumed = stream(tokenizer, order=order)
    with pytest.raises(CheckpointError, match="has `update`, but neither state_dict nor load_state_dict"):
        resumed.restore(state)


# ---------------------------------------------------------------- wrong orders

WRONG = {
    "Plain": ("class Plain:\n  def __init__(self, rows): pass", "made Plain, which has no method row"),
    "Forgets": (
        "class Forgets:\n  def __init__(self, rows): pass\n  def row(self, draw, out): return 0\n"
        "  def update(self, played): pass",
        "no method state or restore; without its state a resumed run would draw other rows",
    ),
    "Raises": ("def Raises(rows): return rows['x']", "data.order 'wrong.py:Raises': TypeError"),
    "Far": (
        "class Far:\n  def __init__(self, rows): self.n = len(rows)\n  def row(self, draw, out): return self.n",
        "draw 0 of source 'a': row returned 8; expected a row from 0 to 7",
    ),
    "Text": (
        "class Text:\n  def __init__(self, rows): pass\n  def row(self, draw, out): return '1'",
        "row returned '1'; expected a row from 0 to 7",
    ),
    "Arrays": (
        "import numpy\nclass Arrays:\n  def __init__(self, rows): pass\n  def row(self, draw, out): return 0\n"
        "  def state(self): return {'seen': numpy.zeros(3)}\n  def restore(self, state): pass",
        "data.order 'wrong.py:Arrays': state.seen holds a ndarray",
    ),
    "Cyclic": (
        "class Cyclic:\n  def __init__(self, rows): pass\n  def row(self, draw, out): return 0\n"
        "  def state(self): all = []; all.append(all); return all\n  def restore(self, state): pass",
        "data.order 'wrong.py:Cyclic': state cannot be written as JSON: maximum recursion depth",
    ),
    "Digits": (
        "class Digits:\n  def __init__(self, rows): pass\n  def row(self, draw, out): return 0\n"
        "  def state(self): return 10**5000\n  def restore(self, state): pass",
        "data.order 'wrong.py:Digits': state cannot be written as JSON: Exceeds the limit",
    ),
    "Huge": (
        "class Huge:\n  def __init__(self, rows): pass\n  def row(self, draw, out): return 10**5000",
        "row returned a int that cannot be shown; expected a row from 0 to 7",
    ),
    "Unshown": (
        "class Row:\n  def __repr__(self): raise RuntimeError\n"
        "class Unshown:\n  def __init__(self, rows): pass\n  def row(self, draw, out): return Row()",
        "row returned a Row that cannot be shown; expected a row from 0 to 7",
    ),
    "Exits": (
        "import sys\nclass Exits:\n  def __init__(self, rows): pass\n  def row(self, draw, out): sys.exit(3)",
        "data.order 'wrong.py:Exits', draw 0 of source 'a': SystemExit: 3 .*wrong.py:4",
    ),
    "Awaits": (
        "class Awaits:\n  def __init__(self, rows): pass\n  def row(self, draw, out): return 0\n"
        "  async def update(self, played): pass\n  def state(self): return 0\n  def restore(self, state): pass",
        "data.order 'wrong.py:Awaits': update is async or a generator; expected a method without async and yield",
    ),
    "Needs": ("def Needs(rows, pace): pass", r"data.order.pace: 'wrong.py:Needs' needs a value"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_order_is_named(name, tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    code, says = WRONG[name]
    Path("wrong.py").write_text(code)
    with pytest.raises(WhetError, match=says) as e:
        stream(tokenizer, order=f"wrong.py:{name}").next(1)
    at_a_draw = ", draw 0 of" in str(e.value)
    assert isinstance(e.value, ConfigError) != at_a_draw, "exit code 2 says that nothing was run"


def test_the_watchdog_can_name_an_order_that_hangs(files, tokenizer):
    with pulse.heard_by((said := []).append):
        stream(tokenizer, order="own.py:Least").next(2)
    assert said[-1] == "data.order 'own.py:Least', draw 1 of source 'a'"


def test_settings_of_an_own_order_are_those_of_its_signature(files, tokenizer):
    with pytest.raises(
        ConfigError, match=r"data.order.gian: 'own.py:Least' has no such setting; it has: gain"
    ):
        stream(tokenizer, order={"name": "own.py:Least", "gian": 1})


def test_tasks_drawn_by_number_need_an_order_without_memory(files, tokenizer):
    assert stream(tokenizer, order="random").at(3).uid == 3
    with pytest.raises(ConfigError, match="learns from its earlier tasks"):
        stream(tokenizer, order="adaptive").at(3)


def test_the_order_of_the_documentation(tmp_path, monkeypatch, tokenizer):
    page = Path(__file__).parent.parent / "docs" / "curriculum.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("curriculum.py").write_text(code)
    lengths = source(4, answer=["1", "4444", "22", "333"])
    tasks = stream(tokenizer, lengths, order={"name": "curriculum.py:Longest", "column": "answer"})
    assert step(tasks, 1, lambda row: [1.0, 1.0]) == [1]  # solved
    assert {row for _ in range(6) for row in step(tasks, 1, lambda row: [1.0, 0.0])} == {0, 2, 3}
    again = stream(tokenizer, lengths, order={"name": "curriculum.py:Longest", "column": "answer"})
    again.restore(json.loads(json.dumps(tasks.state())))
    assert places(again.next(3)) == places(tasks.next(3))


# ---------------------------------------------------------------- whole runs

RUN = {
    "model": {"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
    "tokenizer": {"build": "chars"},
    "rewards": {"r": {"function": "exact"}},
    "rollout": {"group_size": 4, "sampling": {"max_tokens": 2}},
    "train": {"steps": 6, "tasks_per_step": 4, "optimizer": {"lr": 0.05}},
    "track": {"trackers": ["jsonl"]},
    "checkpoint": {"interval": 1, "export": False},
}
ROWS = [{"prompt": f"{i % 10}+{i // 10}=", "answer": str(i % 3)} for i in range(24)]


def drawn_by(run):
    """[(step's file, task, prompt)] of a finished run."""
    files = sorted(Path(run, "rollouts").glob("*.parquet"))
    rows = [
        (file.name, row)
        for file in files
        for row in pq.read_table(file, columns=["uid", "prompt"]).to_pylist()
    ]
    return sorted({(name, row["uid"], row["prompt"]) for name, row in rows})


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(
    "order", [{"name": "adaptive", "target": 0.4}, {"name": "own.py:Least", "gain": -3.0}]
)
def test_a_run_that_goes_on_draws_as_an_unbroken_one(order, staleness, files):
    config = json.loads(json.dumps(RUN)) | {"data": {"train": [{"rows": ROWS}], "order": order}}
    config["rollout"]["max_staleness"] = staleness
    whet.train(**config, run_dir="whole")
    whet.train(**config, run_dir="parts", on_step=lambda row: row["step"] == 3)
    whet.train(**config, run_dir="parts")
    whole, parts = (drawn_by(name) for name in ("whole", "parts"))
    assert whole == parts
    assert Path("whole", "metrics.jsonl").read_bytes() == Path("parts", "metrics.jsonl").read_bytes()
    drawn = Counter(prompt for _, _, prompt in whole)
    assert max(drawn.values()) > 1  # shuffled, 24 rows come once each in 6 steps of 4
