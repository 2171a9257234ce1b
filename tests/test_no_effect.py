"""Settings that could have no effect are refused, with the reason."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from batches import logp_now, ragged
from tiny import tiny_model
from whet.algos.losses import LOSSES
from whet.batch import Outputs
from whet.config import functions
from whet.config.checks import hard_problems, unused
from whet.config.load import load
from whet.config.plan import plans
from whet.config.recipes import resolve
from whet.config.rules import RULES
from whet.config.schema import AlgorithmConfig
from whet.data.tokenizer import build
from whet.models.load import export
from whet.types import ConfigError

BASE: dict[str, Any] = {
    "model": {"scratch": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}},
    "tokenizer": {"build": "chars", "vocab_size": 100},
    "data": {"train": [{"path": "tests/data/words.jsonl"}]},
    "rewards": {"right": {"function": "exact"}},
    "train": {"steps": 1},
}


def problems(*overrides: str, **sections: Any) -> list[tuple[str, str]]:
    loaded = load(None, overrides, copy.deepcopy(BASE) | sections)
    idle = [(".".join(map(str, path)), why) for path, why in unused(loaded.written, loaded.stages)]
    return [*hard_problems(loaded.config), *idle]


def test_an_end_token_beyond_the_vocabulary_is_refused() -> None:
    assert problems("rollout.sampling.stop_token_ids=[3, 99]") == []
    ((key, why),) = problems("rollout.sampling.stop_token_ids=[3, 100, 7000]")
    assert key == "rollout.sampling.stop_token_ids"
    assert why.startswith("100, 7000 can never be sampled: the token ids of the vocabulary are 0 to 99")


def test_an_end_token_beyond_the_vocabulary_of_a_folder_is_refused(tmp_path: Path) -> None:
    export(tiny_model(layers=1), build("chars", 61, ["abc"]), tmp_path / "m")
    model = {"model": {"path": str(tmp_path / "m")}, "tokenizer": {}}
    assert problems("rollout.sampling.stop_token_ids=[60]", **model) == []
    ((key, why),) = problems("rollout.sampling.stop_token_ids=[61]", **model)
    assert (key, "the token ids of the vocabulary are 0 to 60" in why) == (
        "rollout.sampling.stop_token_ids",
        True,
    )


def test_an_end_token_beyond_a_built_vocabulary_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    """What is in the data decides how many tokens there are; the plan knows only the most."""
    assert problems("rollout.sampling.stop_token_ids=[99]") == []
    small = BASE | {"rollout": {"group_size": 2, "sampling": {"max_tokens": 2, "stop_token_ids": [99]}}}
    with pytest.raises(ConfigError, match=r"stop_token_ids: 99 can never be sampled: .* are 0 to \d\d;"):
        whet.train(**copy.deepcopy(small), run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run/metrics.jsonl").read_text()


def test_a_stop_string_that_no_text_has_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    """Replies are decoded without control tokens."""
    stops = {"rollout": {"group_size": 2, "sampling": {"max_tokens": 2, "stop": ["7", "!<user>"]}}}
    number = build("chars", 100, ["a"]).convert_tokens_to_ids("<user>")
    why = rf"rollout\.sampling\.stop: '!<user>' has the control token '<user>', .*stop_token_ids=\[{number}\]"
    with pytest.raises(ConfigError, match=why) as caught:
        whet.train(**copy.deepcopy(BASE | stops), run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run/metrics.jsonl").read_text()

    assert str(caught.value).count("'!<user>' has the control token") == 1, "eval.sampling has it from there"


def test_a_fault_of_sampling_is_told_where_it_is_said() -> None:
    """Sections that take a value from another one have no fault of their own."""
    ((key, _),) = problems("rollout.sampling.min_tokens=9", "rollout.sampling.max_tokens=4")
    assert key == "rollout.sampling.min_tokens"
    held_out = {"data": {**BASE["data"], "eval": [{"path": "tests/data/words.jsonl", "name": "a"}]}}
    own = "eval.sources.a.sampling.temperature=0.5"
    for wrong in ("min_tokens=9000", "stop_token_ids=[7000]"):
        keys = [key for key, _ in problems(f"eval.sampling.{wrong}", own, "eval.interval=1", **held_out)]
        assert keys == [f"eval.sampling.{wrong.partition('=')[0]}"]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ((), "rollout.schedule=deterministic: groups are trained on in the order of their tasks"),
        (("rollout.schedule=async",), "with mode=both groups of older weights are trained on first"),
        (
            ("rollout.schedule=async", "buffer.replay.queue=true"),
            "the priority determines the order of training",
        ),
    ],
)
def test_the_reason_why_an_order_has_no_effect_is_the_order_that_there_is(
    overrides: tuple[str, ...], why: str
) -> None:
    told = dict(problems("rollout.max_staleness=1", "buffer.order=newest", *overrides))
    assert why in told["buffer.order"]


def test_an_empty_stop_string_is_refused() -> None:
    """Every text has it: all replies would be of one token."""
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop"):
        problems("rollout.sampling.stop=['']")


@pytest.mark.parametrize(
    "older",
    [
        "rollout.max_staleness=1",
        "rollout.sync_interval=2",
        "rollout.schedule=async",
        "buffer.replay.share=0.5",
    ],
)
def test_a_decay_with_staleness_is_refused_where_no_rollout_is_stale(older: str) -> None:
    decay = "algorithm.correction.staleness_decay=0.5"
    assert not [key for key, _ in problems(decay, older) if "staleness_decay" in key]
    ((key, why),) = [p for p in problems(decay) if "staleness_decay" in p[0]]
    assert key == "algorithm.correction.staleness_decay"
    assert "has no effect: every rollout comes from the current weights" in why


# ---------------------------------------------------------------- what acts on a ratio that is always 1

BY_RATIO = {key for rule in RULES if "ratio of the policy" in rule.message for key in rule.keys}
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "clip_low": (0.01, {}),
    "clip_high": (0.01, {}),
    "dual_clip": (1.01, {}),
    "sequence_mask_delta": (0.001, {}),
    "fallback_to_policy_gradient": (True, {}),
    "gspo_form": ("token", {}),
    "cispo_mask": (True, {"clip_high": 0.01}),
    "tau": (2.0, {}),
    "tau_pos": (2.0, {}),
    "tau_neg": (2.0, {}),
    "sapo_detach": (True, {}),
    "clip_cov_ratio": (0.9, {"clip_cov_lb": -5.0}),
    "clip_cov_lb": (-5.0, {"clip_cov_ratio": 0.9}),
    "clip_cov_ub": (0.0, {"clip_cov_ratio": 0.9, "clip_cov_lb": -5.0}),
    "kl_cov_ratio": (0.9, {}),
    "ppo_kl_coef": (0.1, {"kl_cov_ratio": 0.5}),
    "aipo_rho": (1.001, {}),
    "eta": (2.0, {}),
    "ratio_epsilon": (0.001, {}),
    "m2_threshold": (0.0, {}),
    "sequence_mask_anchor": ("sampled", {"sequence_mask_delta": 0.001}),
    "mask_low": (0.01, {"cispo_mask": True}),
    "mask_high": (0.01, {"cispo_mask": True}),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), (9.0, {})),
    "dro_beta": (0.9, {}),
    "topr_threshold": (0.9, {}),
    "rec_clip_mode": ("two-side", {"clip_low": 0.01, "clip_high": 0.01}),
    "rec_ring_low": (0.02, {"rec_clip_mode": "ring", "clip_low": 0.01}),
    "rec_ring_high": (0.02, {"rec_clip_mode": "ring", "clip_high": 0.01}),
    "rec_weight": ("advantage", {}),
    "rec_temperature": (0.3, {"rec_weight": "advantage"}),
    "rec_regularizer": ("forward-kl", {"rec_regularizer_coef": 0.5}),
    "rec_regularizer_coef": (0.5, {"rec_regularizer": "forward-kl"}),
}
"""Another value of each setting of a loss with a ratio, and what gives it a meaning."""

WITH_RATIO = [
    (name, key)
    for name, row in functions.LOSSES.items()
    if row.kind == "online" and row.ratio and row.anchor == "old"
    for key in sorted(row.settings.model_fields)
]


@pytest.mark.parametrize(("loss", "key"), WITH_RATIO)
def test_what_is_refused_where_the_ratio_is_1_is_what_changes_nothing_there(loss: str, key: str) -> None:
    settings = resolve(AlgorithmConfig(loss=loss)).settings["loss"].settings
    value, context = OTHER[key]
    batch = ragged(3)
    now = logp_now(batch)
    batch = replace(batch, adv_N=torch.linspace(-2, 2, len(now), dtype=now.dtype), logp_old_N=now.detach())

    def answer(given: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Loss, gradient and statistics, without those that are 0."""
        said = LOSSES[loss](batch, Outputs(logp_N=now), **{**settings, **context, **given})
        (grad,) = torch.autograd.grad(said.loss_N.sum(), now)
        return {"loss": said.loss_N, "gradient": grad} | {k: x for k, x in said.stats.items() if x.any()}

    one, two = answer({}), answer({key: value})
    same = one.keys() == two.keys() and all(torch.equal(x, two[name]) for name, x in one.items())
    assert same == (f"algorithm.loss.{key}" in BY_RATIO)


@pytest.mark.parametrize(
    "setting",
    [
        *("loss.clip_low=0.1", "loss.clip_high=0.1", "loss.dual_clip=3.0", "loss.sequence_mask_delta=0.1"),
        *("name=cispo algorithm.loss.cispo_mask=true", "name=aipo algorithm.loss.aipo_rho=2.0"),
        *("name=gspo algorithm.loss.clip_low=0.001", "name=rec algorithm.loss.rec_clip_mode=two-side"),
    ],
)
@pytest.mark.parametrize(
    "moves",
    [
        *("train.minibatches=2", "train.update_epochs=2", "algorithm.old_logprobs=sampled"),
        *(
            "model.lora.dropout=0.1",
            "train.forward_micro_batch_tokens=64",
            "train.forward_micro_batch_rollouts=4",
        ),
        "train.compile=true",
    ],
)
def test_a_bound_of_the_ratio_is_refused_where_the_ratio_is_1(setting: str, moves: str) -> None:
    given = f"algorithm.{setting}".split()
    assert problems(*given, moves) == []
    ((key, why),) = problems(*given, "rollout.max_staleness=1")
    assert key == given[-1].partition("=")[0]
    assert "has no effect: a batch has one optimizer step (train.minibatches=1, train.update_epochs=1)" in why


def test_a_bound_that_holds_at_1_or_is_of_the_engines_log_probs_is_read() -> None:
    assert problems("algorithm.name=aipo", "algorithm.loss.aipo_rho=0.5") == []
    assert problems("algorithm.loss=rollout_is", "algorithm.loss.clip_low=0.1") == []


@pytest.mark.usefixtures("home")
def test_a_recipe_or_a_document_may_have_a_clip_that_nothing_meets(tmp_path: Path) -> None:
    assert problems("algorithm.name=dapo") == []
    export(tiny_model(layers=1), build("chars", 61, ["abc"]), tmp_path)
    file = tmp_path / "verl.yaml"
    file.write_text(
        "data: {train_files: tests/data/words.jsonl, train_batch_size: 8}\n"
        "algorithm: {adv_estimator: grpo}\n"
        f"actor_rollout_ref: {{model: {{path: {tmp_path}}}, actor: {{ppo_mini_batch_size: 8}}, rollout: {{n: 2}}}}\n"
        "custom_reward_function: {path: tests/dialects/verl_reward.py, name: share_of_a}\n"
        "trainer: {total_training_steps: 1, logger: [console], n_gpus_per_node: 1}\n"
    )
    for given in ([], ["actor_rollout_ref.actor.clip_ratio_low=0.1"]):
        loaded = load(file, [*given, "whet.train.forward_micro_batch_rollouts=null"])
        assert loaded.translation is not None
        assert unused(loaded.written, loaded.stages) == []
        assert not {"clip_low", "clip_high", "dual_clip"} & loaded.written["algorithm"].keys()
        notes = " ".join(line.note for line in loaded.translation.lines)
        assert ("algorithm.loss.clip_low has no effect" in notes) == bool(given)


# ---------------------------------------------------------------- for sweeps


def test_what_nothing_reads_may_be_left_out_with_a_note() -> None:
    swept = [
        "algorithm.loss.dual_clip=3.0",
        "algorithm.loss.beta=0.3",
        "algorithm.kl.estimator=k1",
        "train.steps=2",
    ]
    loaded = load(None, swept, copy.deepcopy(BASE), unused="warn")
    assert plans(loaded)[0].steps == 2
    notes = {key: why for key, _, why in (note.partition(": ") for note in loaded.notes)}
    assert notes.keys() == {"algorithm.loss.beta", "algorithm.loss.dual_clip", "algorithm.kl.estimator"}
    assert notes["algorithm.loss.beta"] == "has no effect: loss=ppo does not read it"
    plain = load(None, ["train.steps=2"], copy.deepcopy(BASE))
    assert loaded.config == plain.config
    assert loaded.written == plain.written
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.beta: has no effect"):
        plans(load(None, swept, copy.deepcopy(BASE)))


def test_a_section_that_says_something_by_being_there_stays_when_it_is_empty() -> None:
    """What is in it is read by nothing, but without it there would be no schedule and no mix at all. One that nothing
    reads goes as a whole."""
    mix = {"name": "mix", "mix": {"mu_schedule": {"decay_steps": 5}}}
    data = {"demonstrations": [{"path": "given.jsonl"}]}
    loaded = load(None, ["critic.lora={rank: 3}"], {"algorithm": mix, "data": data}, unused="warn")
    assert loaded.config.algorithm.mix is not None
    assert loaded.config.algorithm.mix.mu_schedule == {}
    assert loaded.config.critic.lora is None
    noted = {note.partition(":")[0] for note in loaded.notes}
    assert {"critic.lora.rank", "algorithm.mix.mu_schedule.decay_steps"} <= noted
    assert "critic.lora" not in noted, "its key is told"


def test_what_nothing_reads_in_a_stage_is_left_out_there() -> None:
    stages = {
        "stages": [{"name": "a", "algorithm": {"name": "sft", "loss": {"dual_clip": 3.0}}}, {"name": "b"}]
    }
    loaded = load(None, [], copy.deepcopy(BASE) | stages, unused="warn")
    assert loaded.notes == (
        "stages[0] ('a').algorithm.loss.dual_clip: has no effect: loss=sft does not read it",
    )
    assert loaded.written["stages"][0] == {"name": "a", "algorithm": {"name": "sft"}}


def test_other_faults_are_no_notes() -> None:
    with pytest.raises(ConfigError, match=r"train\.setps"):
        load(None, ["train.setps=2"], copy.deepcopy(BASE), unused="warn")
    with pytest.raises(ConfigError, match="divi"):
        plans(load(None, ["train.minibatches=7"], copy.deepcopy(BASE), unused="warn"))


@pytest.mark.parametrize("key", ["model.scratch.hiden_size", "algorithm.loss.clip_hgh"])
def test_an_unknown_setting_is_told_once(key: str) -> None:
    ((at, why),) = problems(f"{key}=2")
    assert at == key
    assert why.startswith("unknown setting; did you mean")


@pytest.mark.parametrize("value", ["5", "-1.5", "true"])
def test_a_number_where_a_list_belongs_is_told_by_its_key(value: str) -> None:
    """Rules that count the entries of a list see none in it."""
    with pytest.raises(ConfigError, match=r"data\.order\.columns: got .*, expected"):
        plans(load(None, [f"data.order={{name: adaptive, columns: {value}}}"], copy.deepcopy(BASE)))
