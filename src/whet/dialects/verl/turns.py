"""verl's turns, tools and interactions as native keys: the environment `whet.envs.verl_tools`."""

from __future__ import annotations

from whet.dialects.row import Native, Values
from whet.dialects.typed import choices, choose
from whet.dialects.verl.roles import ROLLOUT, TURNS, agent_loops, local, sources
from whet.types import Json


def environment(v: Values) -> Native:
    """What the environment is given."""
    arguments: dict[str, Json] = {name: local(v, key) for name, key in sources(v).items()}
    return {"rollout.env.arguments": arguments | (_agent(v) if agent_loops(v) else _sglang(v))}


def _agent(v: Values) -> dict[str, Json]:
    """How the agent loops play: a tool lives as long as a call."""
    return {
        "default_agent": v[f"{ROLLOUT}.agent.default_agent_loop"],
        "max_turns": replies(v),
        "max_parallel_calls": v[f"{TURNS}.max_parallel_calls"],
        "result_chars": v[f"{TURNS}.max_tool_response_length"],
        "cut": choose(v, f"{TURNS}.tool_response_truncate_side", choices("verl", "truncated side")),
    }


def _sglang(v: Values) -> dict[str, Json]:
    """How the SGLang rollouts of verl 0.4 to 0.6 play (rollout.mode=sync): a tool lives as long as the rollout, all
    calls of a reply run, and results are not cut."""
    return {
        "instances": "episode",
        "max_turns": replies(v),
        "max_interactions": v[f"{TURNS}.max_user_turns"] or _by_length(v),
        "max_parallel_calls": None,
        "result_chars": None,
    }


def replies(v: Values) -> int:
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
