"""Short forms of configs, keys that are dropped, an algorithm that is switched, and learning rates by method."""

import pytest

from whet.config.load import load
from whet.config.plan import missing, plans
from whet.config.urls import hub_hint
from whet.types import ConfigError

FILE = """
model: {scratch: {hidden_size: 32}}
tokenizer: {build: chars}
data: {train: tasks.jsonl, max_prompt_tokens: 16}
algorithm: {name: grpo, advantage: {std_epsilon: 1e-4}}
rewards: {right: math}
rollout: {group_size: 4, sampling: {max_tokens: 8}}
train: {steps: 3}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def test_short_forms_in_a_file_and_on_the_command_line(file):
    cfg = load(file).config
    assert [s.path for s in cfg.data.train] == ["tasks.jsonl"]
    assert cfg.rewards["right"].function == "math"
    given = [
        "data.train=[a.jsonl, {path: b.jsonl, weight: 2}]",
        "data.eval=c.jsonl",
        "rewards.own=rewards.py:f",
    ]
    cfg = load(file, [*given, "algorithm=dapo", "reference=base"]).config
    assert [(s.path, s.weight) for s in cfg.data.train] == [("a.jsonl", 1.0), ("b.jsonl", 2.0)]
    assert cfg.data.eval[0].path == "c.jsonl"
    assert cfg.data.max_prompt_tokens == 16
    assert cfg.rewards["own"].function == "rewards.py:f"
    assert cfg.algorithm.name == "dapo"
    assert cfg.reference.path == "base"


def test_short_forms_in_stages_and_from_python():
    stages = [{"name": "sft", "algorithm": "sft", "data": "demo.jsonl"}, {"name": "rl", "algorithm": "grpo"}]
    base = {"model": "folder", "data": {"train": "a.jsonl"}, "rewards": {"r": "math"}}
    loaded = load(None, ["stages.rl.data.train=b.jsonl"], {**base, "stages": stages})
    assert [cfg.data.train[0].path for cfg in loaded.stages] == ["demo.jsonl", "b.jsonl"]
    assert [cfg.algorithm.name for cfg in loaded.stages] == ["sft", "grpo"]
    assert loaded.config.model.path == "folder"


def test_a_key_can_be_dropped(file):
    cfg = load(file, ["rewards.right=~", "rewards.other=math", "train.steps=~", "data.train.0=~"]).config
    assert list(cfg.rewards) == ["other"]
    assert cfg.train.steps is None
    assert cfg.data.train == ()
    assert load(file, ["train.optimizer.max_grad_norm=null"]).config.train.optimizer.max_grad_norm is None
    with pytest.raises(ConfigError, match=r"train.epochs=~ drops a key that is given, and this one is not"):
        load(file, ["train.epochs=~"])
    with pytest.raises(ConfigError, match="unknown key"):
        load(file, ["train.stepss=~"])


def test_behind_a_dropped_entry_of_a_list_every_place_is_still_the_right_one(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("data:\n  train:\n    - {path: a}\n    - {path: b}\n    - {path: c}\n")
    loaded = load(file, ["data.train.0=~"])
    assert [source.path for source in loaded.config.data.train] == ["b", "c"]
    assert [loaded.where(f"data.train.{n}.path") for n in (0, 1)] == [f"{file}:4", f"{file}:5"]


def test_sections_of_the_file_rest_where_the_command_line_names_another_algorithm(file):
    loaded = load(file, ["algorithm.name=sft"])
    plans(loaded)
    noted = [note.partition(": ")[0] for note in loaded.notes]
    assert noted == ["algorithm.advantage.std_epsilon", "rewards.right.function", "rollout.group_size"]
    with pytest.raises(ConfigError, match=r"rollout.group_size: has no effect"):
        plans(load(file, ["algorithm.name=sft", "rollout.group_size=2"]))
    changed = file.with_name("sft.yaml")
    changed.write_text(FILE.replace("grpo", "sft"))
    with pytest.raises(ConfigError, match=r"rollout.group_size: has no effect"):
        plans(load(changed))


@pytest.mark.parametrize(
    ("algorithm", "full", "adapters"),
    [
        ("grpo", 1e-6, 1e-5),
        ("ppo", 1e-6, 1e-5),
        ("dpo", 1e-6, 1e-5),
        ("kto", 1e-6, 1e-5),
        ("sft", 1e-5, 2e-4),
    ],
)
def test_the_learning_rate_follows_from_the_method(file, algorithm, full, adapters):
    def lr(*overrides):
        loaded = load(
            file, [f"algorithm={algorithm}", "algorithm.advantage=~", "data.max_prompt_tokens=8", *overrides]
        )
        assert plans(loaded)[0].optimizer.lr == loaded.stages[0].train.optimizer.lr
        return loaded.stages[0].train.optimizer.lr

    assert (lr(), lr("model.lora.rank=4")) == (full, adapters)
    assert lr("train.optimizer.lr=0.5") == 0.5


def test_each_stage_has_the_learning_rate_of_its_method(file):
    stages = [
        {"name": "sft", "algorithm": "sft"},
        {"name": "rl", "train": {"optimizer": {"lr": 3e-6}}},
        {"name": "x"},
    ]
    values = {"model": "folder", "data": "a.jsonl", "rewards": {"r": "math"}, "stages": stages}
    assert [cfg.train.optimizer.lr for cfg in load(None, [], values).stages] == [1e-5, 3e-6, 1e-6]


def test_an_id_of_the_hub_says_the_command_that_downloads_it(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load(file, ["model.scratch=~", "tokenizer.build=~", "model=Qwen/Qwen3-0.6B"])
    said = "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B"
    assert [said in note for note in missing(loaded)] == [True]
    (tmp_path / "models").mkdir()
    assert hub_hint("models/mine") == hub_hint("mine") == hub_hint("/a/b") == hub_hint("a/b/c") == ""
