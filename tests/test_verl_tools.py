"""verl's tool classes, functions and interactions, as an environment: how each method is called, what the policy is
told, and the limits on turns, by scripted policies. The classes have the shape that verl's documents show."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from test_tool_env import END, Scripts, no_reply, says
from whet.envs import verl_tools
from whet.envs.env import EnvFault, EnvStep, World
from whet.envs.verl_tools import VerlEnv, interactions_of, tools, tools_of
from whet.rollout.episode import play_groups
from whet.rollout.limits import EpisodeLimits
from whet.rollout.scripted import ScriptedEngine
from whet.tables import load_module
from whet.types import ConfigError, Message, Rollout, Sampling, Task

CLASSES = '''
import json, os
from dataclasses import dataclass
from uuid import uuid4

SEEN = []

@dataclass
class ToolResponse:
    text: str | None = None
    image: list | None = None
    video: list | None = None


class Account:
    """An account that adds up what is paid in; it remembers within an instance alone."""

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema, self.name = config, tool_schema, tool_schema.function.name
        self.sums = {}

    async def create(self, instance_id=None, start=0, **kwargs):
        instance_id = instance_id or f"made{len(SEEN)}"
        self.sums[instance_id] = kwargs.get("create_kwargs", {}).get("start", start)
        SEEN.append(("create", instance_id, self.sums[instance_id]))
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters.get("amount") == 13:
            raise ValueError("unlucky\\nand more")
        self.sums[instance_id] += int(parameters["amount"])
        SEEN.append(("execute", parameters, sorted(kwargs)))
        if self.config.get("picture"):
            return ToolResponse(image=["x"]), 0.0, {}
        return ToolResponse(text=f"sum {self.sums[instance_id]}" + self.config["end"]), 0.5, {"m": 1}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.sums[instance_id])

    async def release(self, instance_id, **kwargs):
        SEEN.append(("release", instance_id, None))
        del self.sums[instance_id]


class GuessInteraction:
    def __init__(self, config):
        self.name, self.config, self.wanted = config["name"], config, {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.wanted[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == self.wanted[instance_id]
        SEEN.append(("asked", [m["role"] for m in messages], kwargs["ground_truth"]))
        return right, "right" if right else self.config["again"], float(right), {}

    async def finalize_interaction(self, instance_id, **kwargs):
        SEEN.append(("final", self.wanted.pop(instance_id), None))
'''

FUNCTIONS = '''
import json
from os.path import join

def _hidden(): ...

def twice(x: int) -> str:
    """Twice a number.

    Args:
        x: the number
    """
    return f"{2 * x}"

async def both(x: int, y: int = 1):
    """Both."""
    return {"sum": x + y}, 0.25
'''


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(CLASSES)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    schema = {
        "type": "function",
        "function": {
            "name": "pay", "description": "Pays in.",
            "parameters": {
                "type": "object", "properties": {"amount": {"type": "string", "description": "how much"}},
                "required": ["amount"],
            },
        },
    }  # fmt: skip
    account = {"class_name": f"{tmp_path}/tools.py:Account", "tool_schema": schema}
    plain = {"tools": [{**account, "config": {"type": "native", "end": "${oc.env:NO_SUCH,e}"}}]}
    (tmp_path / "tools.yaml").write_text(json.dumps(plain))
    picture = {"tools": [{**account, "config": {"picture": True}}]}
    (tmp_path / "picture.yaml").write_text(json.dumps(picture))
    guess = {"class_name": f"{tmp_path}/tools.py:GuessInteraction", "config": {"again": "again"}}
    (tmp_path / "talk.yaml").write_text(json.dumps({"interaction": [guess]}))
    return tmp_path


def row(**columns: Any) -> Task:
    return Task(uid=7, source="s", prompt=(Message("user", "7"),), token_ids=(7,), extra=columns)


def seen(files: Path) -> list[Any]:
    """What the methods of the classes have noted since the last call."""
    noted: list[Any] = load_module(files / "tools.py").SEEN
    found = list(noted)
    noted.clear()
    return found


def played(task: Task, *replies: Message, **arguments: Any) -> tuple[VerlEnv, list[EnvStep]]:
    """What the environment answers, one reply after the other, until it is done."""

    async def story() -> tuple[VerlEnv, list[EnvStep]]:
        async with asyncio.timeout(60):
            env = tools(task, World(1, no_reply), **arguments)
            assert await env.first() == []
            found: list[EnvStep] = []
            for reply in replies:
                assert not found or not found[-1].done
                env.world.begin_turn()
                found.append(await env.step(reply))
            await env.close()
            return env, found

    return asyncio.run(story())


PAYS = {
    "tools_kwargs": {
        "pay": {"create_kwargs": {"start": 10}, "execute_kwargs": {"fee": 1}, "release_kwargs": None}
    }
}


def test_a_class_of_verl_runs_as_it_is(files: Path) -> None:
    """Each call has an instance of its own, the arguments are those of the policy whatever the schema says."""
    env, (first, last) = played(
        row(extra_info=PAYS),
        says(("pay", {"amount": 5}), ("pay", {"amount": "6"}), ("pay", {"amount": 13}), ("pai", {})),
        says(content="done"),
        tool_config=f"{files}/tools.yaml", max_parallel_calls=None,
    )  # fmt: skip
    assert [spec.to_json()["function"]["name"] for spec in env.tools] == ["pay"]
    assert env.tools[0].parameters["properties"]["amount"]["description"] == "how much"
    assert [(m.role, m.content, m.tool_call_id) for m in first.messages] == [
        ("tool", "sum 15e", "call_1"), ("tool", "sum 16e", "call_2"), ("tool", "Error: ValueError: unlucky", "call_3"),
        ("tool", "Error: there is no tool 'pai'; did you mean 'pay'?; there are: pay", "call_4"),
    ]  # fmt: skip
    assert (first.reward, first.done, last.done, last.stop) == (None, False, True, None)
    assert first.parts == {
        "calls": 4.0, "calls_failed": 2.0, "results_cut": 0.0, "malformed": 0.0, "tool_rewards": 1.0, "calls/pay": 3.0,
    }  # fmt: skip
    noted = seen(files)
    assert sorted(x[0] for x in noted) == ["create"] * 3 + ["execute"] * 2 + ["release"] * 3
    assert [x[2] for x in noted if x[0] == "create"] == [10, 10, 10]
    assert [x[2] for x in noted if x[0] == "execute"] == [["agent_data"]] * 2
    assert env.data.tool_rewards == [0.5, 0.5, 0.0, 0.0]
    assert [m["role"] for m in env.data.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "tool",
        "tool",
        "assistant",
    ]


def test_an_instance_may_live_as_long_as_the_rollout(files: Path) -> None:
    """As the SGLang rollouts of verl 0.4 to 0.6: with the keywords of the row, and only the tools that it names."""
    arguments: dict[str, Any] = {"tool_config": f"{files}/tools.yaml", "instances": "episode"}
    calls = [says(("pay", {"amount": n})) for n in (5, 6)]
    env, found = played(row(extra_info=PAYS), *calls, says(content="done"), **arguments)
    assert [[m.content for m in step.messages] for step in found] == [["sum 15e"], ["sum 21e"], []]
    assert found[-1].parts["reward/pay"] == 21.0
    name = env.data.request_id
    assert seen(files) == [
        ("create", name, 10), ("execute", {"amount": 5}, ["fee"]), ("execute", {"amount": 6}, ["fee"]),
        ("release", name, None),
    ]  # fmt: skip
    env, _ = played(row(extra_info={"tools_kwargs": {"pay": None}}), says(content="done"), **arguments)
    assert env.tools == []
    assert seen(files) == []


def test_calls_beyond_the_parallel_ones_get_no_answer(files: Path) -> None:
    calls = (("pay", {"amount": n}) for n in (1, 2, 3))
    _, (first,) = played(row(), says(*calls), tool_config=f"{files}/tools.yaml", max_parallel_calls=2)
    assert [m.content for m in first.messages] == ["sum 1e", "sum 2e"]
    assert first.parts["calls"] == 3.0


@pytest.mark.parametrize(("cut", "kept"), [("right", "sum 1234"), ("left", "567890e"), ("middle", "sum ")])
def test_a_long_result_is_cut(files: Path, cut: str, kept: str) -> None:
    _, (first,) = played(
        row(),
        says(("pay", {"amount": 1234567890})),
        tool_config=f"{files}/tools.yaml",
        cut=cut,
        result_chars=8,
    )
    (message,) = first.messages
    assert kept in message.content
    assert "[... 7 characters cut ...]" in message.content
    assert len(message.content) == 8 + len("[... 7 characters cut ...]")
    assert first.parts["results_cut"] == 1.0


def test_functions_are_tools(files: Path) -> None:
    """Without verl there is no decorator: all public functions of the file are tools, others' are not."""
    env, (first,) = played(
        row(), says(("twice", {"x": 4}), ("both", {"x": 2}), ("twice", {"y": 1})),
        function_tools=f"{files}/functions.py", max_parallel_calls=None,
    )  # fmt: skip
    assert [spec.name for spec in env.tools] == ["twice", "both"]
    assert env.tools[0].parameters["properties"] == {"x": {"type": "integer", "description": "the number"}}
    told = [m.content for m in first.messages]
    assert told[:2] == ["8", '{"sum": 3}']
    assert told[2].startswith("Error: TypeError: ")
    assert first.parts["tool_rewards"] == 0.25


def test_an_interaction_speaks_as_the_user(files: Path) -> None:
    info = {"interaction_kwargs": {"name": "guess", "ground_truth": "4"}}
    env, found = played(
        row(extra_info=info), says(content="3"), says(content="4"), interaction_config=f"{files}/talk.yaml"
    )
    assert [step.messages for step in found] == [[Message("user", "again")], []]
    assert [(step.done, step.parts, step.reward) for step in found] == [
        (False, {"turn_scores": 0.0}, None), (True, {"turn_scores": 1.0}, None),
    ]  # fmt: skip
    assert seen(files) == [
        ("asked", ["user", "assistant"], "4"),
        ("asked", ["user", "assistant", "user", "assistant"], "4"),
        ("final", "4", None),
    ]
    assert env.data.turn_scores == [0.0, 1.0]
    assert [step.state for step in found] == [
        {"turn_scores": [0.0], "tool_rewards": []}, {"turn_scores": [0.0, 1.0], "tool_rewards": []},
    ]  # fmt: skip
    with pytest.raises(EnvFault, match="name='other' in the row; expected one of guess"):
        played(
            row(extra_info={"interaction_kwargs": {"name": "other"}}), interaction_config=f"{files}/talk.yaml"
        )


def test_tools_and_an_interaction_together(files: Path) -> None:
    """Calls are answered by tools, other replies by the interaction, at most `max_interactions` times."""
    info = {"interaction_kwargs": {"name": "guess", "ground_truth": "4"}}
    _, found = played(
        row(extra_info=info), says(content="1"), says(("pay", {"amount": 2})), says(content="3"),
        tool_config=f"{files}/tools.yaml", interaction_config=f"{files}/talk.yaml", max_interactions=1,
    )  # fmt: skip
    assert [[m.content for m in step.messages] for step in found] == [["again"], ["sum 2e"], []]
    assert (found[-1].done, found[-1].stop) == (True, "turns")


def test_the_row_says_which_agent_plays_it(files: Path) -> None:
    path = f"{files}/tools.yaml"
    for columns, default in (({"agent_name": "single_turn_agent"}, "tool_agent"), ({}, "single_turn_agent")):
        env, (only,) = played(
            row(**columns), says(("pay", {"amount": 1})), tool_config=path, default_agent=default
        )
        assert (env.tools, only.done, only.messages, only.parts) == ([], True, [], {})
    env, _ = played(row(agent_name="tool_agent"), tool_config=path, default_agent="single_turn_agent")
    assert [spec.name for spec in env.tools] == ["pay"]
    with pytest.raises(EnvFault, match="agent_name='swe_agent' in the row; expected one of tool_agent"):
        played(row(agent_name="swe_agent"), tool_config=path)
    env, _ = played(row(extra_info={"tool_selection": ["other"]}), tool_config=path)
    assert env.tools == []


def test_rows_that_name_no_agent_are_told_of_once(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    verl_tools.tell_of_rows.cache_clear()
    arguments: dict[str, Any] = {"tool_config": f"{files}/tools.yaml", "default_agent": "single_turn_agent"}
    played(row(agent_name="single_turn_agent"), says(content="x"), **arguments)
    assert not caplog.records
    for _ in range(2):
        played(row(), says(content="x"), **arguments)
    (told,) = caplog.records
    assert "rows without a column agent_name are played in one turn" in told.getMessage()


def test_a_class_is_named_by_its_module_as_in_verl(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a file below the working directory, where `python -m verl...` would find it."""
    monkeypatch.chdir(files)
    (files / "mine").mkdir()
    (files / "mine" / "own_tools.py").write_text(CLASSES)
    text = (files / "tools.yaml").read_text().replace(f"{files}/tools.py:Account", "mine.own_tools.Account")
    (files / "named.yaml").write_text(text)
    _, (first,) = played(row(), says(("pay", {"amount": 1})), tool_config=f"{files}/named.yaml")
    assert [m.content for m in first.messages] == ["sum 1e"]


WAITS = '''
import asyncio

async def wait(note: str):
    """Waits."""
    try:
        await asyncio.sleep(100)
    except asyncio.CancelledError:
        open(note, "w").close()
        raise
'''


def test_a_fault_of_one_call_ends_the_others(files: Path, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    asked = says(("wait", {"note": f"{tmp_path}/note"}), ("pay", {"amount": 1}))
    sources = {"tool_config": f"{files}/picture.yaml", "function_tools": f"{tmp_path}/waits.py"}

    async def play() -> bool:
        env = tools(row(), World(1, no_reply), **sources, max_parallel_calls=None)
        await env.first()
        with pytest.raises(EnvFault, match="a tool returned an image or a video"):
            await env.step(asked)
        for _ in range(10):
            await asyncio.sleep(0)
        return (tmp_path / "note").exists()

    assert asyncio.run(play())


def test_what_is_broken_is_a_fault_and_no_result(files: Path) -> None:
    with pytest.raises(EnvFault, match="a tool returned an image or a video"):
        played(row(), says(("pay", {"amount": 1})), tool_config=f"{files}/picture.yaml")
    info = {"tools_kwargs": {"pay": {"create_kwargs": {"start": "x"}, "calc_reward_kwargs": {}}}}
    with pytest.raises(EnvFault, match="a method of verl's classes raised ValueError: could not convert"):
        played(
            row(extra_info=info), says(content="x"), tool_config=f"{files}/tools.yaml", instances="episode"
        )


def test_a_reply_that_cannot_be_read_ends_the_episode(files: Path) -> None:
    broken = Message("assistant", "<tool_call>{", malformed="no end")
    _, (only,) = played(row(), broken, tool_config=f"{files}/tools.yaml")
    assert (only.done, only.stop, only.parts["malformed"]) == (True, "malformed", 1.0)


def rollout(files: Path, script: list[Message], **limits: Any) -> tuple[Scripts, Rollout]:
    """A scripted policy against the episode's own limits."""
    codec = Scripts({7: script})
    arguments = {"tool_config": f"{files}/tools.yaml", **limits.pop("arguments", {})}
    work = play_groups(
        ScriptedEngine(codec.say, end_token_ids=[END]), [row()], group_size=1, sampling=Sampling(max_tokens=40),
        seed=3, purpose="train", decode=str, end_token_ids=[END], timeout_s=60.0, codec=codec,
        make_env=lambda task, world: tools(task, world, **arguments),
        limits=EpisodeLimits(observation_tokens=40, **limits),
    )  # fmt: skip
    ((r,),) = [group.rollouts for group in asyncio.run(work)]
    assert r.error is None, r.error
    return codec, r


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_the_calls_of_the_last_reply_do_not_run(files: Path, turns: int) -> None:
    """max_assistant_turns=k of verl's tool agent: k replies, and k - 1 of them are answered."""
    script = [says(("pay", {"amount": 1})) for _ in range(turns + 1)]
    codec, r = rollout(files, script, max_turns=turns, arguments={"max_turns": turns})
    assert (len(r.strand.turns), len(codec.results(r)), r.stop_reason) == (turns, turns - 1, "turns")
    assert sum(x[0] == "execute" for x in seen(files)) == turns - 1
    assert r.reward_parts["env/calls"] == turns


def test_what_is_sampled_and_told_shares_a_budget(files: Path) -> None:
    """max_response_length=10 of verl: replies of 2 tokens, results of 1: the third result makes 9, and one token is
    left; with 9 none is."""
    script = [says(("pay", {"amount": 1})) for _ in range(9)]
    _, r = rollout(files, script, max_turns=9, tokens_after_prompt=10)
    assert ([turn.end - turn.start for turn in r.strand.turns], r.stop_reason) == ([2, 2, 2, 1], "context")
    _, r = rollout(files, script, max_turns=9, tokens_after_prompt=9)
    assert ([turn.end - turn.start for turn in r.strand.turns], r.stop_reason) == ([2, 2, 2], "context")


def test_files_that_are_none(files: Path) -> None:
    (files / "mcp.yaml").write_text(
        json.dumps({"tools": [{"class_name": "a.B", "config": {"type": "mcp"}}], "interaction": {}})
    )
    with pytest.raises(ConfigError, match=r"config\.type=mcp; expected native"):
        tools_of(f"{files}/mcp.yaml", None)
    with pytest.raises(ConfigError, match="expected a list 'interaction' of sections"):
        interactions_of(f"{files}/mcp.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        tools.prepare({"tool_config": f"{files}/none.yaml"})
    (files / "away.yaml").write_text(json.dumps({"tools": [{"class_name": "no_such_module.Tool"}]}))
    with pytest.raises(ConfigError, match="cannot load 'no_such_module'"):
        tools.prepare({"tool_config": f"{files}/away.yaml"})
    (files / "wrong.py").write_text(
        "class Few:\n    def __init__(self): pass\n"
        "class Bare:\n    def __init__(self, config, tool_schema): pass\n"
        "class NoSchema(Bare):\n    def create(self): pass\n    execute = release = create\n"
    )
    for name, said in (
        ("Few", r"with config, tool_schema raised TypeError: .*__init__\(\) got an unexpected keyword"),
        ("Bare", "has no create, execute, release; expected the methods of verl's BaseTool"),
        ("NoSchema", "has no tool_schema; give it in the file"),
    ):
        wrong = {"tools": [{"class_name": f"{files}/wrong.py:{name}"}]}
        (files / f"{name}.yaml").write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=f"{name}.yaml: .*wrong.py:{name} {said}"):
            tools.prepare({"tool_config": f"{files}/{name}.yaml"})
    for arguments, said in (
        ({}, "names no tool"),
        ({"tool_confg": "x"}, "did you mean 'tool_config'"),
        ({"tool_config": ["x"]}, r'tool_config: got \["x"\], expected text or null'),
        ({"tool_config": "x", "max_turns": 0}, "max_turns: got 0, expected a whole number >= 1 or null"),
        ({"tool_config": "x", "cut": "both"}, "cut: got \"both\", expected 'left', 'middle' or 'right'"),
    ):
        with pytest.raises(ConfigError, match=said):
            tools.prepare(arguments)
