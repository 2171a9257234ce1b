"""`whet explain`: every key answers, with its own meaning and place."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from whet.config import recipes, schema
from whet.config.explain import explain
from whet.config.keys import TABLES, dotted, keys, settings
from whet.types import ConfigError


def printed(key: str) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(explain(key))
    return console.export_text()


def test_a_key():
    found = explain("train.optimizer.lr")
    assert (found.key, found.type, found.default) == ("train.optimizer.lr", "a number >= 0 or null", "null")
    assert found.meaning.startswith(
        "Peak learning rate. Default, by the method: 1e-6 for reinforcement learning"
    )
    assert "single stages" in found.where
    assert explain("machine.threads").where == "the whole run"


def test_every_key_explains_itself_and_its_line_defines_it():
    for key in keys().values():
        name = dotted(key.path)
        found = explain(name.replace("[]", ".0").replace("<name>", "any"))
        if key.path[0] == "stages" and len(key.path) == 3 and key.path[-1] != "name":
            assert found.key == key.path[-1], "a stage's section is the config's"
            continue
        assert found.key == name
        file, _, number = found.source.rpartition(":")
        lines = (Path(schema.__file__).parents[2] / file).read_text().splitlines()
        wanted = key.path[-2] if key.path[-1] == "*" else key.path[-1]
        assert lines[int(number) - 1].strip().startswith(f"{wanted}:"), found.source


def test_every_setting_explains_itself_and_its_line_defines_it():
    for path in settings():
        found = explain(dotted(path))
        assert found.key == dotted(path)
        file, _, number = found.source.rpartition(":")
        line = (Path(schema.__file__).parents[2] / file).read_text().splitlines()[int(number) - 1]
        if path[-1] != "name":
            part, functions, name, *_, meaning = line.split("\t")
            assert (part, name, meaning) == (path[-2], path[-1], found.meaning)
            assert found.value[0][0] in functions.split(), "the first function that has it"


def test_equal_names_in_different_sections_have_their_own_lines():
    assert explain("critic.warmup_steps").source != explain("train.optimizer.schedule.warmup_steps").source
    assert explain("model.path").source != explain("tokenizer.path").source


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ("data.train.path", "data.train[].path"),
        ("data.train.0.path", "data.train[].path"),
        ("data.train[3].function", "data.train[].function"),
        ("rewards.weight", "rewards.<name>.weight"),
        ("rewards.acc.weight", "rewards.<name>.weight"),
        ("stages.rl.train.steps", "train.steps"),
        (" train ", "train"),
    ],
)
def test_ways_to_ask(asked, key):
    assert explain(asked).key == key


def test_a_section_lists_its_keys():
    assert [row[0] for row in explain("train").rows] == list(schema.TrainConfig.model_fields)
    assert [row[0] for row in explain("rewards").rows] == list(schema.RewardConfig.model_fields)
    assert explain("train.steps").rows == ()


def test_a_recipe_prints_what_it_sets_and_its_source():
    for name, recipe in recipes.RECIPES.items():
        said = dict(explain(f"algorithm.name={name}").value)
        assert (said["advantage"], said["loss"], said["source"]) == (
            recipe.advantage,
            recipe.loss,
            recipe.source,
        )
    assert dict(explain("algorithm.name=dapo").value)["clip_high"] == "0.28"
    settings = dict(explain("algorithm.advantage=gae").value)
    assert {name: text.partition("  ")[0] for name, text in settings.items()} == {
        "gamma": "1.0",
        "lam": "1.0",
        "bootstrap_truncated": "false",
    }


def test_a_key_that_names_a_function_says_what_each_does():
    for path, table in TABLES.items():
        said = dict(explain(dotted(path)).value)
        assert list(said) == list(table)
        assert all(said[name].startswith(row.about) and row.about for name, row in table.items()), path
    assert dict(explain("algorithm.resample").value)["pow"].endswith("(power=2.0)")


def test_names_in_a_condition_that_are_no_keys_are_explained():
    found = explain("rollout.engine")
    assert found.read_when == "samples"
    assert dict(found.facts)["samples"].startswith("Replies are sampled")
    assert "samples: Replies are sampled" in printed("rollout.engine")
    assert explain("model.path").facts == ()


def test_it_prints():
    text = printed("algorithm.name=dapo")
    assert "arXiv:2503.14476" in text
    assert "clip_high" in text
    assert "tasks_per_step" in printed("train")
    assert "[]" in printed("data.train[]"), "brackets are no markup"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("lr", "'lr' is not a key; did you mean train.optimizer.lr or critic.optimizer.lr?"),
        ("train.stesp", "did you mean train.steps?"),
        ("", "is not a key"),
        ("trainer.test_freq", "it is a key of verl, and becomes eval.interval"),
        ("actor_rollout_ref.actor.use_torch_compile", "it is a key of verl, and becomes no key"),
        ("reward.custom_reward_function.path", "it is a key of verl, and becomes rewards.score.function"),
        ("critic.fsdp.param_offload", "it is a key of verl, and becomes train.offload"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.a", "it is a key of verl, and becomes rollout.engine"),
        ("algorithm.name=dapoo", "did you mean 'dapo'"),
        ("algorithm=turn_level_gae", "(algorithm=turn_ppo), or algorithm.advantage=turn_level_gae"),
        (
            "algorithm.name=cross_entropy",
            "no recipe, but the name of a function: give algorithm.loss=cross_entropy",
        ),
        ("machine.logprob_parity=onn", "expected 'auto', 'on' or 'off'"),
        ("train.steps=-1", "got -1, expected a whole number >= 0"),
        ("train=3", "train is a section"),
        ("train.steps=[", "train.steps=[: not valid YAML"),
        ("data.order=bogus", "data.order: 'bogus' is not known"),
        ("model.scratch=mine.py:f", "model.scratch: 'mine.py:f' is not known; known: llama, "),
        ("algorithm.mix.loss=gspo", "algorithm.mix.loss: 'gspo' is not known"),
        ("algorithm.loss={name: gspo, clip_low: x}", 'algorithm.loss.clip_low: got "x", expected a number'),
        ("rollout.engine=vlm", "rollout.engine: 'vlm' is not known; did you mean 'vllm'?"),
        ("rollout.engine=trtllm", "rollout.engine: TensorRT-LLM is not supported"),
        ("track.trackers=[console, wandbb]", "'wandbb' is not known; did you mean 'wandb'"),
    ],
)
def test_what_cannot_be_explained(asked, said):
    with pytest.raises(ConfigError) as caught:
        explain(asked)
    assert said in str(caught.value)


def test_a_value_that_a_key_can_have():
    assert explain("machine.logprob_parity=off").value == (("value", "off is allowed"),)
    assert explain("train.optimizer.betas=[0.9, 0.95]").value
    assert explain("train.steps=null").value
    assert explain("train.steps=").value, "an empty value is null, as in an override"
    assert explain("algorithm.loss={name: gspo, clip_low: 1e-3}").value[0][0] == "clip_low"
    assert explain("data.order=mine.py:Order").value == (("value", "mine.py:Order is allowed"),)
    assert explain("rollout.engine=vllm").value[0][1].startswith("Servers in processes of their own")
    assert explain("checkpoint.resume=runs/a/checkpoints/1").value[0][0] == "value"
