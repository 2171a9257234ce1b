"""verl's keys on turns, tools and interactions, as the releases mean them."""

from __future__ import annotations

from typing import Any

import pytest

from test_verl_versions import FITS, R, made, told
from whet.types import Json

T = R + "multi_turn."
TOOLS: dict[str, Json] = {T + "enable": True, T + "tool_config_path": "tools.yaml"}
ASYNC: dict[str, Json] = {R + "mode": "async"}


def env(given: dict[str, Json], version: str = "0.9.1") -> dict[str, Any]:
    return dict(made({**FITS, "data.max_response_length": 100, **given}, version).tree["rollout"]["env"])


def test_a_file_that_names_tools_has_an_environment() -> None:
    assert env({**TOOLS, **ASYNC}) == {
        "make": "whet.envs.verl_tools:tools",
        "arguments": {
            "tool_config": "tools.yaml", "default_agent": "single_turn_agent", "max_turns": 100,
            "max_parallel_calls": 1, "result_chars": 256, "cut": "middle",
        },
        "max_turns": 100, "observation_tokens": 100, "tokens_after_prompt": 100, "timeout_s": 330.0,
        "tool_format": "hermes",
    }  # fmt: skip
    assert "env" not in made({**FITS, T + "enable": True}, "0.9.1").tree["rollout"], "nothing answers"


@pytest.mark.parametrize(
    ("given", "turns"),
    [
        ({"max_assistant_turns": 3}, 3), ({"max_user_turns": 3}, 4), ({"max_assistant_turns": 0}, 100),
        ({"max_assistant_turns": 3, "max_user_turns": 3}, 3), ({"max_assistant_turns": 9, "max_user_turns": 3}, 4),
    ],
)  # fmt: skip
def test_turns_are_replies(given: dict[str, Json], turns: int) -> None:
    """An agent loop ends after max_assistant_turns replies, or with the reply after max_user_turns answers."""
    limits = {T + key: value for key, value in given.items()}
    found = env({**TOOLS, **ASYNC, **limits})
    assert (found["max_turns"], found["arguments"]["max_turns"]) == (turns, turns)


def test_the_sglang_rollouts_make_a_tool_once() -> None:
    """rollout.mode=sync before 0.7.0: all calls run, results are not cut, and max_user_turns is an interaction's."""
    given: dict[str, Json] = {
        **TOOLS, T + "max_assistant_turns": 4, T + "max_user_turns": 2, T + "max_parallel_calls": 3,
        T + "interaction_config_path": "talk.yaml", T + "format": "qwen",
    }  # fmt: skip
    found = env(given, "0.6.0")
    assert found["arguments"] == {
        "tool_config": "tools.yaml", "interaction_config": "talk.yaml", "instances": "episode", "max_turns": 4,
        "max_interactions": 2, "max_parallel_calls": None, "result_chars": None,
    }  # fmt: skip
    assert found["tool_format"] == "auto"
    assert env({**TOOLS, T + "max_turns": 6}, "0.4.0")["max_turns"] == 6
    longest: dict[str, Json] = {"data.max_prompt_length": 50, R + "max_model_len": None}
    assert env({**TOOLS, **longest}, "0.6.0")["max_turns"] == 150 // 3
    assert env({**TOOLS, R + "max_model_len": 90}, "0.6.0")["max_turns"] == 30
    assert env({**given, **ASYNC}, "0.6.0")["arguments"]["max_parallel_calls"] == 3
    assert "env" not in made({**FITS, T + "tool_config_path": "tools.yaml"}, "0.6.0").tree["rollout"]


def test_agent_loops_play_whatever_enable_says() -> None:
    """There the row names its agent, and default_agent_loop is that of the others."""
    functions: dict[str, Json] = {T + "function_tool_path": "functions.py"}
    found = env({**functions, R + "agent.default_agent_loop": "tool_agent"})
    assert found["arguments"]["function_tools"] == "functions.py"
    assert found["arguments"]["default_agent"] == "tool_agent"


@pytest.mark.parametrize(("side", "cut"), [("left", "right"), ("middle", "middle"), ("right", "left")])
def test_a_side_that_is_kept(side: str, cut: str) -> None:
    assert env({**TOOLS, T + "tool_response_truncate_side": side})["arguments"]["cut"] == cut


def test_history_and_call_format() -> None:
    assert env({**TOOLS, T + "use_inference_chat_template": True})["history"] == "template"
    assert env({**TOOLS, T + "format": "gpt-oss"})["tool_format"] == "gpt_oss"
    assert env({**TOOLS, T + "format": "qwen3_coder"})["tool_format"] == "qwen3_coder"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**TOOLS, T + "format": "gemma4"}, "coming, not built yet"),
        ({**TOOLS, T + "format": "herms"}, "expected one of hermes, gpt-oss"),
        ({**TOOLS, T + "tool_response_truncate_side": "up"}, "expected one of left, middle, right"),
        ({R + "agent.default_agent_loop": "swe_agent"}, "calls verl's engines itself, so it is not read"),
        ({R + "agent.agent_loop_config_path": "loops.yaml"}, "Write it as an environment"),
        ({R + "agent.agent_loop_manager_class": "mine.Manager"}, "Write it as an environment"),
        ({**TOOLS, "data.tool_config_path": "others.yaml"}, "Must equal multi_turn.tool_config_path"),
        ({"skyrl_agent.task": "x"}, "Write an environment"),
    ],
)
def test_what_is_refused_says_what_to_do(given: dict[str, Json], said: str) -> None:
    (text,) = told({**FITS, **given}, "0.9.1")
    assert said in text


def test_keys_that_change_nothing_here() -> None:
    given: dict[str, Json] = {
        **TOOLS, T + "enable_tokenization_sanity_check": False, T + "num_repeat_rollouts": 2,
        T + "tokenization_sanity_check_mode": "ignore_strippable",
        "data.continuous_token.enable": True, "data.continuous_token.model_family": "qwen",
        "data.need_tools_kwargs": True, "data.chat_template_func": "x", "data.tool_config_path": "tools.yaml",
        T + "_target_": "x",
    }  # fmt: skip
    assert told({**FITS, **given}, "0.9.0") == []
    assert env(given, "0.9.0") == env(TOOLS, "0.9.0")
