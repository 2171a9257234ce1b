"""Names of whet 0.1 (`dialects/whet-0.tsv`): every one is read, said, and means what its present name means."""

import json
from typing import Any

import pytest

from native_cases import CASES
from whet.config.functions import LOSSES
from whet.config.keys import lookup
from whet.config.load import load
from whet.config.recipe_table import RECIPES
from whet.config.recipes import resolve
from whet.config.renamed import HOMES, RELEASE, present, renamed, table
from whet.config.resuming import changes, fingerprint
from whet.config.schema import AlgorithmConfig, Config
from whet.track.written import read_config
from whet.types import ConfigError, Json

OLD = """
name: old
run_dir: RUN
mode: bench
model: {scratch: {hidden_size: 32, layers: 2, heads: 4, kv_heads: 2, ffn_size: 48, max_positions: 64, init_std: 0.1}}
tokenizer: {build: chars}
data:
  train: [{path: tests/data/words.jsonl, system: be brief}]
rewards: {right: {function: exact}}
algorithm: {aggregation: token-sum, drop_uniform_groups: true, refill: copy, groups: {unfinished: mask}}
rollout: {max_batch: 8, sync_every: 2}
train:
  steps: 4
  passes: 2
  minibatches: 2
  micro_tokens: 64
  optimizer: {kind: sgd, grad_clip: 0.5, implementation: loop, schedule: {kind: cosine, min_factor: 0.1}}
eval: {every: "${train.passes}"}
checkpoint: {every: 3, background: true}
guard: {workers: 2, confine: all}
machine: {exact: "off", hang_s: 99}
stages:
  - {name: a, train: {passes: 3}}
  - {name: b, algorithm: {refill: ask}}
"""


def test_every_line_leads_from_no_key_to_a_key() -> None:
    for old, (name, values) in table().items():
        at = ["0" if part == "[]" else "r" if part == "<name>" else part for part in old]
        now = lookup(present(at))
        assert now is not None, old
        assert (lookup(at) is None) == (old[-1] != name), f"{old}: an old name must not be a present one"
        for was, is_now in values.items():
            names = {**RECIPES, **LOSSES}  # where any name may stand
            assert f"'{was}'" not in now.words, old
            assert was not in names, old
            assert f"'{is_now}'" in now.words or is_now in names, old
        assert values or old[-1] != name, f"{old}: nothing is renamed"


def test_an_old_file_is_the_present_one(tmp_path: Any) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(OLD)
    loaded = load(
        path, ["train.shuffle_passes=true", "train={micro_rollouts_forward: 3}", "stages.b.train.passes=4"]
    )
    config, (a, b) = loaded.config, loaded.stages
    assert config.mode == "eval"
    scratch = config.model.scratch
    assert scratch is not None
    assert (scratch.num_hidden_layers, scratch.num_attention_heads, scratch.num_key_value_heads) == (2, 4, 2)
    assert (scratch.intermediate_size, scratch.max_position_embeddings, scratch.initializer_range) == (
        48,
        64,
        0.1,
    )
    assert config.data.train[0].system_prompt == "be brief"
    assert (config.algorithm.loss_agg_mode, config.algorithm.dynamic_sampling) == ("token-sum", True)
    assert config.algorithm.groups.truncated == "mask"
    assert (config.rollout.max_num_seqs, config.rollout.sync_interval) == (8, 2)
    optimizer = config.train.optimizer
    assert (optimizer.name, optimizer.max_grad_norm, optimizer.implementation) == ("sgd", 0.5, "for-loop")
    assert (optimizer.schedule.type, optimizer.schedule.min_lr_ratio) == ("cosine", 0.1)
    assert (config.eval.interval, config.checkpoint.interval, config.checkpoint.async_save) == (2, 3, True)
    assert (config.reward_workers.count, config.reward_workers.sandbox) == (2, "all")
    assert (config.machine.logprob_parity, config.machine.watchdog_timeout_s) == ("off", 99)
    assert (a.train.update_epochs, b.train.update_epochs) == (3, 4)
    assert (a.algorithm.refill, b.algorithm.refill) == ("copy", "sample")
    assert (a.train.shuffle_minibatches, a.train.forward_micro_batch_rollouts) == (True, 3)
    (note,) = [note for note in loaded.notes if note.startswith(RELEASE)]
    for said in (
        "train.passes is train.update_epochs",
        "mode=bench is mode=eval",
        "guard is reward_workers",
        "train.shuffle_passes is train.shuffle_minibatches",
        "train.micro_rollouts_forward is train.forward_micro_batch_rollouts",
        "stages[1].train.passes is stages[1].train.update_epochs",
        "stages.1.algorithm.refill=ask is stages.1.algorithm.refill=sample",
    ):
        assert said in note
    assert loaded.where("train.update_epochs") == f"{path}:14"


@pytest.mark.parametrize(
    "old",
    [
        {"name": "sppo", "sppo_epsilon": 0.1},
        {"name": "sppo", "loss": {"sppo_epsilon": 0.1}},
        {"loss": {"name": "sppo", "sppo_epsilon": 0.1}},
        {"loss": "sppo", "sppo_epsilon": 0.1},
    ],
)
def test_softmax_ppo_is_read_under_its_old_name(old: Json) -> None:
    """`sppo` is Self-Play PO in the field: it is `pair_loss=self_play`."""
    now, notes = renamed({"algorithm": old})
    chosen = resolve(AlgorithmConfig(**now["algorithm"])).settings["loss"]
    assert (chosen.name, chosen.settings) == ("softmax_ppo", {"ratio_epsilon": 0.1})
    assert any("sppo is " in note and "softmax_ppo" in note for note in notes)


def test_settings_of_advantages_and_losses_move_into_their_tables() -> None:
    """They were keys of `algorithm`; `tau` was read by opmd's advantage and by its loss."""
    old: Json = {"name": "opmd", "tau": 0.5, "opmd_baseline": "logavgexp", "kl": {"coef": 0.1}}
    now, notes = renamed(
        {"algorithm": old, "stages": [{"name": "b", "algorithm": {"name": "ppo", "lam": 0.9}}]}
    )
    assert now["algorithm"] == {
        "name": "opmd", "kl": {"coef": 0.1}, "loss": {"tau": 0.5},
        "advantage": {"opmd_baseline": "logavgexp", "tau": 0.5},
    }  # fmt: skip
    assert now["stages"][0]["algorithm"] == {"name": "ppo", "advantage": {"lam": 0.9}}
    assert "stages.0.algorithm.lam is stages.0.algorithm.advantage.lam" in notes
    other, _ = renamed(
        {"algorithm": {"loss": "gspo", "advantage": "rloo", "clip_low": 1e-4, "std_floor": 1.0}}
    )
    assert other["algorithm"] == {
        "loss": {"name": "gspo", "clip_low": 1e-4},
        "advantage": {"name": "rloo", "std_floor": 1.0},
    }, "rloo has no std_floor: it is refused there"
    for name in HOMES:
        assert lookup(("algorithm", name)) is None, name
        assert all(lookup(("algorithm", part, name)) for part in HOMES[name]), name


def test_an_override_may_name_a_setting_as_a_key_of_the_algorithm() -> None:
    loaded = load(None, ["algorithm.clip_high=0.3"])
    assert loaded.config.algorithm.loss == {"clip_high": 0.3}
    assert any("algorithm.clip_high is algorithm.loss.clip_high" in note for note in loaded.notes)
    with pytest.raises(
        ConfigError, match=r"did you mean algorithm\.loss\.tau or algorithm\.advantage\.tau\?"
    ):
        load(None, ["algorithm.tau=0.3"])


def test_bounds_of_an_importance_weight_may_stand_beside_it() -> None:
    old = {"correction": {"weight": "token", "low": None, "high": 2.0, "outside": "mask", "normalize": False}}
    new, notes = renamed({"algorithm": old})
    table = {"name": "token", "low": None, "high": 2.0, "outside": "mask", "normalize": False}
    assert new == {"algorithm": {"correction": {"weight": table}}}
    assert "algorithm.correction.high is algorithm.correction.weight.high" in notes
    off = {
        "correction": {"weight": None, "low": None, "high": None, "outside": "truncate", "normalize": False}
    }
    assert renamed({"algorithm": off})[0] == {"algorithm": {"correction": {"weight": None}}}
    same = Config.model_validate_json(
        '{"algorithm": {"correction": {"weight": {"name": "token", "high": 2.0}}}}'
    )
    before: Json = {"algorithm": {"correction": {"weight": "token", "high": 2.0}}}
    assert changes(before, fingerprint(same)) == []
    given = ["algorithm.correction={weight: token}", "algorithm.correction.high=3.0"]
    assert load(None, given).config.algorithm.correction.weight == {"name": "token", "high": 3.0}
    for given in ("{high: 3.0}", "{weight: {name: token, high: 2.0}, high: 3.0}"):
        with pytest.raises(ConfigError, match=r"algorithm\.correction\.high: unknown key.*weight\.high"):
            load(None, [f"algorithm.correction={given}"])
    with pytest.raises(ConfigError, match=r"algorithm\.correction\.high: unknown key.*weight\.high"):
        load(None, ["algorithm.correction={high: 3.0}"])


def test_a_checkpoint_with_settings_as_keys_of_the_algorithm_compares_by_what_they_mean() -> None:
    """Version 0.1 wrote every setting, read or not, and null where the loss had a default of its own."""
    flat = {"beta": None, "clip_low": None, "clip_high": None, "tau": 1.0, "std_epsilon": 1e-6, "gamma": 1.0}
    old: Json = {"algorithm": {"name": "gspo", "advantage": None, "loss": None, **flat}}
    same = Config.model_validate_json('{"algorithm": {"name": "gspo", "loss": "gspo"}}')
    other = Config.model_validate_json('{"algorithm": {"name": "gspo", "loss": {"clip_low": 0.1}}}')
    assert changes(old, fingerprint(same)) == []
    assert [str(c) for c in changes(old, fingerprint(other))] == ["algorithm.loss.clip_low: 0.0003 -> 0.1"]
    old["algorithm"]["clip_low"] = 0.1
    assert changes(old, fingerprint(other)) == []
    ppo = Config.model_validate_json('{"algorithm": {"name": "gspo", "loss": "ppo"}}')
    (change,) = changes(old, fingerprint(ppo))
    assert (change.key, change.old["name"], change.new["name"], change.kind) == (
        "algorithm.loss", "gspo", "ppo", "numbers",
    )  # fmt: skip


def test_a_key_under_both_names_is_refused_and_a_later_source_wins(tmp_path: Any) -> None:
    path = tmp_path / "both.yaml"
    path.write_text("train: {steps: 1, passes: 2, update_epochs: 3}\n")
    with pytest.raises(
        ConfigError, match=r"both\.yaml:1: train\.passes: unknown key; did you mean train\.update_epochs"
    ):
        load(path)
    path.write_text("train: {steps: 1, update_epochs: 3}\n")
    assert load(path, ["train.passes=5"]).config.train.update_epochs == 5
    assert load(path, (), {"train": {"passes": 6}}).config.train.update_epochs == 6


def test_present_names_are_left_alone() -> None:
    tree = {
        "train": {"update_epochs": 2},
        "rewards": {"guard": {"function": "exact", "arguments": {"passes": "free"}}},
    }
    assert renamed(tree) == (tree, ())
    assert present(("stages", "sft", "guard", "workers")) == ("stages", "sft", "reward_workers", "count")


def test_keys_of_a_foreign_file_keep_their_meaning(tmp_path: Any) -> None:
    """`mode: bench` is Trinity's own value; only what stands below `whet:` is native."""
    loaded = load("examples/from_trinity.yaml", ["whet.machine.exact=off"], here=False)
    assert loaded.config.machine.logprob_parity == "off"


def test_a_run_of_before_is_shown_and_goes_on(tmp_path: Any) -> None:
    (tmp_path / "config.yaml").write_text("rollout: {schedule: free}\ncheckpoint: {every: 7}\n")
    assert read_config(tmp_path) == {
        "rollout": {"schedule": "async"},
        "checkpoint": {"interval": 7},
        "stages": [],
    }
    old = {"train": {"passes": 2, "optimizer": {"kind": "sgd"}}, "rollout": {"schedule": "free"}}
    new = {"train": {"update_epochs": 2, "optimizer": {"name": "sgd"}}, "rollout": {"schedule": "async"}}
    assert changes(old, new) == []
    assert [change.key for change in changes(old, json.loads(json.dumps(new).replace("2", "3")))] == [
        "train.update_epochs"
    ]


def test_the_cases_of_all_keys_use_present_names() -> None:
    for key, case in CASES.items():
        assert present(key.split(".")) == tuple(key.split(".")), key
        assert case is not None
