"""Trinity-RFT's judges over the network, its reward for calibration, and the rules of m2po."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.config.load import load
from whet.dialects.tables import dialect
from whet.dialects.translate import Translation, translate
from whet.types import ConfigError, Json

TASKS = "buffer.explorer_input.taskset"
OUTSIDE = {"enable": True, "model_name": "big", "base_url_env": "JUDGE_URL", "api_key_env": "JUDGE_KEY"}
BY_NAME: dict[str, Json] = {
    f"{TASKS}.default_workflow_type": "rubric_judge_openai_workflow",
    f"{TASKS}.workflow_args": {"judge_model_name": "gpt"},
}
RULER: dict[str, Json] = {
    f"{TASKS}.default_workflow_type": "math_ruler_workflow",
    "explorer.auxiliary_models": [{"external_model_config": OUTSIDE, "max_response_tokens": 99}],
    "cluster.gpu_per_node": 4,
}


def file(**more: Json) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    common = {
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": "runs",
        "algorithm.algorithm_type": "grpo",
        "algorithm.repeat_times": 8,
        "model.model_path": "m",
        "model.max_response_tokens": 16,
        "model.max_model_len": 64,
        "cluster.node_num": 1,
        "cluster.gpu_per_node": 3,
        "buffer.total_steps": 1,
        "buffer.batch_size": 4,
        f"{TASKS}.path": "a.jsonl",
        f"{TASKS}.default_workflow_type": "math_workflow",
        "synchronizer.sync_interval": 1,
    }
    for key, value in {**common, **more}.items():
        section = tree
        *above, last = key.split(".")
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    return tree


def translated(given: dict[str, Json]) -> Translation:
    return translate(file(**given), dialect("trinity", "0.6.0"), origins={})


def told(given: dict[str, Json]) -> str:
    made = translated(given)
    return " ".join(text for _, text in (*made.problems, *made.unbuilt))


def test_a_workflow_that_names_its_judge() -> None:
    """Its scale: from 0.6 on a rating is worth a tenth of itself. What is a secret stays in the environment."""
    made = translated(BY_NAME)
    assert told(BY_NAME) == ""
    (judge,) = made.tree["rewards"].values()
    assert judge["function"] == "judge"
    assert {key: value for key, value in judge["arguments"].items() if key != "question"} == {
        "url": "${oc.env:OPENAI_BASE_URL}",
        "api_key": "${oc.env:OPENAI_API_KEY,null}",
        "model": "gpt",
        "temperature": 0.0,
        "unread": 0.0,
        "low": 0.0,
        "timeout_s": 600.0,
    }
    assert made.tree["reward_workers"]["timeout_s"] == 601.0


def test_an_auxiliary_model_that_others_serve() -> None:
    judge = translated(RULER).tree["rewards"]["judge"]
    assert told(RULER) == ""
    assert (judge["function"], judge.get("model")) == ("ruler", None)
    named = {key: judge["arguments"][key] for key in ("url", "api_key", "model", "max_tokens")}
    assert named == {
        "url": "${oc.env:JUDGE_URL}",
        "api_key": "${oc.env:JUDGE_KEY,null}",
        "model": "big",
        "max_tokens": 99,
    }


@pytest.mark.parametrize("key", [None, "hush-hush-hush"])
def test_the_address_and_the_key_are_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("JUDGE_KEY", key)
    path = tmp_path / "f.yaml"
    path.write_text(yaml.safe_dump(file(**RULER)))
    found = load(path, dialect="trinity@0.6", here=False).config.rewards["judge"].arguments
    assert (found["url"], found["api_key"]) == ("http://127.0.0.1:9/v1", key)
    monkeypatch.delenv("JUDGE_URL")
    with pytest.raises(Exception, match="the environment has no variable JUDGE_URL"):
        load(path, dialect="trinity@0.6", here=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**BY_NAME, f"{TASKS}.workflow_args": {}}, "judge_model_name must be given"),
        (
            {**BY_NAME, f"{TASKS}.workflow_args": {"judge_model_name": "g", "judge_api_key_env": "A},B"}},
            "expected the name of an environment variable",
        ),
        ({**BY_NAME, f"{TASKS}.workflow_args": {"judge_model_name": "g", "top_p": 1}}, "top_p is coming"),
        (
            {**RULER, "explorer.auxiliary_models": [{"external_model_config": {"enable": True}}]},
            "model_name: must be given",
        ),
        (
            {
                "algorithm.algorithm_type": "on_policy_distill",
                f"{TASKS}.default_workflow_type": "on_policy_distill_workflow",
                "explorer.auxiliary_models": [{"external_model_config": OUTSIDE}],
            },
            "a teacher is asked for the log-probs of replies that it did not write",
        ),
        (
            {"explorer.rollout_model.external_model_config.enable": True},
            "what it samples is not of the policy.*algorithm_type: sft",
        ),
    ],
)
def test_what_a_model_outside_cannot_be(given: dict[str, Json], said: str) -> None:
    assert re.search(said, told(given)), told(given)


def test_what_is_wrong_is_told_with_its_own_line(tmp_path: Path) -> None:
    """The complaint has the word `name` in it, which is a key of the file, too; and it is about the second entry."""
    path = tmp_path / "f.yaml"
    given = file(**BY_NAME)
    one = given["buffer"]["explorer_input"].pop("taskset")
    given["buffer"]["explorer_input"]["tasksets"] = [one, {**one, "workflow_args": {}}]
    path.write_text(text := yaml.safe_dump(given, sort_keys=False))
    wanted = 1 + max(n for n, line in enumerate(text.splitlines()) if "workflow_args" in line)
    with pytest.raises(
        ConfigError, match=r"tasksets\[1\].workflow_args: judge_model_name must be given"
    ) as e:
        load(path, dialect="trinity@0.6", here=False)
    assert f"f.yaml:{wanted}: buffer.explorer_input.tasksets[1]" in str(e.value)


def test_the_reward_for_calibration() -> None:
    weights = {"format": 1.0, "brier": 0.0}
    given: dict[str, Json] = {f"{TASKS}.default_reward_fn_type": "rlcr_reward"}
    assert translated(given).tree["rewards"] == {"rlcr_reward": {"function": "rlcr"}}
    made = translated({**given, f"{TASKS}.reward_fn_args": {"weights": weights}})
    assert made.tree["rewards"]["rlcr_reward"]["arguments"] == {"weights": weights}
    assert "waits is coming" in told({**given, f"{TASKS}.reward_fn_args": {"waits": {}}})


def test_m2po_is_of_the_engines_logprobs_and_of_means_over_tokens() -> None:
    m2po: dict[str, Json] = {"algorithm.algorithm_type": "m2po", "algorithm.bypass_old_logprobs": True}
    algorithm = translated(m2po).tree["algorithm"]
    assert (algorithm["name"], algorithm["old_logprobs"]) == ("m2po", "sampled")
    assert algorithm["loss"] == {"name": "m2po", "m2_threshold": 0.04}
    assert not {"kl", "entropy_coef"} & algorithm.keys()
    for key, value, said in (
        ("algorithm.bypass_old_logprobs", False, "bypass_old_logprobs: false has no meaning with m2po"),
        ("algorithm.loss_agg_mode", "seq-mean-token-mean", "does not go with m2po"),
        ("algorithm.policy_loss_fn", "ppo", "does not go with algorithm_type m2po"),
    ):
        assert said in told({**m2po, key: value})
    assert told({"algorithm.policy_loss_fn": "m2po"}) == "", "the loss alone, beside grpo"
