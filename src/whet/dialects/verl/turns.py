"""verl's turns, tools and interactions as native keys: the environment `whet.envs.verl_tools`."""

from __future__ import annotations

from whet.dialects.choices import choices
from whet.dialects.row import NOTHING, Native, Values
from whet.dialects.typed import choose
from whet.dialects.verl.roles import ROLLOUT, TURNS, agent_loops, has_turns, local, sources
from whet.types import ConfigError, Json

FORMATS = choices("verl", "tool format")
"""multi_turn.format -> rollout.env.tool_format."""

CUTS = {"left": "right", "middle": "middle", "right": "left"}
"""verl names the part that it keeps; whet the part that is lost."""

DEFAULT_AGENT = f"{ROLLOUT}.agent.default_agent_loop"
"""What plays a row without a column agent_name."""
AGENTS = ("single_turn_agent", "tool_agent")
WAIT_S = 330.0
"""Longest time of the environment's answer: a call has 300 s."""


def environment(v: Values) -> Native:
    """The environment of a file that names tools or an interaction; else a rollout is one reply, as in verl."""
    _check_agent(v)
    if not sources(v) or not has_turns(v):
        return NOTHING
    budget = v["data.max_response_length"]
    arguments: dict[str, Json] = {name: local(v, key) for name, key in sources(v).items()}
    return {
        "rollout.env.make": "whet.envs.verl_tools:tools",
        "rollout.env.arguments": arguments | (_agent(v) if agent_loops(v) else _sglang(v)),
        "rollout.env.max_turns": _turns(v),
        "rollout.env.observation_tokens": budget,
        "rollout.env.tokens_after_prompt": budget,
        "rollout.env.timeout_s": WAIT_S,
        "rollout.env.tool_format": choose(v, f"{TURNS}.format", FORMATS) if agent_loops(v) else "auto",
        **({"rollout.env.history": "template"} if v[f"{TURNS}.use_inference_chat_template"] else {}),
    }


def _agent(v: Values) -> dict[str, Json]:
    """How the agent loops play: a tool lives as long as a call."""
    return {
        "default_agent": v[DEFAULT_AGENT],
        "max_turns": _turns(v),
        "max_parallel_calls": v[f"{TURNS}.max_parallel_calls"],
        "result_chars": v[f"{TURNS}.max_tool_response_length"],
        "cut": choose(v, f"{TURNS}.tool_response_truncate_side", CUTS),
    }


def _check_agent(v: Values) -> None:
    """ConfigError for an agent loop of one's own."""
    name = v[DEFAULT_AGENT]
    if name not in AGENTS:
        raise ConfigError(
            f"{DEFAULT_AGENT}={name}: the class of an agent loop calls verl's engines itself, so it is not read; here: "
            f"{', '.join(AGENTS)}, or an environment of yours (docs/environments.md)"
        )


def _sglang(v: Values) -> dict[str, Json]:
    """How the SGLang rollouts of verl 0.4 to 0.6 play (rollout.mode=sync): a tool lives as long as the rollout, all
    calls of a reply run, and results are not cut."""
    return {
        "instances": "episode",
        "max_turns": _turns(v),
        "max_interactions": v[f"{TURNS}.max_user_turns"] or _by_length(v),
        "max_parallel_calls": None,
        "result_chars": None,
    }


def _turns(v: Values) -> int:
    """Replies of a rollout. The agent loops end after max_assistant_turns of them, or with the first one after
    max_user_turns answers; the SGLang rollouts count answers of an interaction alone. Without a limit each reply has at
    least one token."""
    if not agent_loops(v):
        most = v.get(f"{TURNS}.max_turns") or v[f"{TURNS}.max_assistant_turns"]
        return int(most or _by_length(v))
    user = v[f"{TURNS}.max_user_turns"]
    limits = [v[f"{TURNS}.max_assistant_turns"], user + 1 if user else None, v["data.max_response_length"]]
    return min(limit for limit in limits if limit)


def _by_length(v: Values) -> int:
    """What null stands for: a third of the longest sequence."""
    longest = v[f"{ROLLOUT}.max_model_len"] or v["data.max_prompt_length"] + v["data.max_response_length"]
    return max(int(longest // 3), 1)
