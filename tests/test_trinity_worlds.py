"""The worlds of Trinity-RFT's workflows of several turns: lakes, sudokus, text worlds behind doubles of their packages,
rows of tool calls, and how files name them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import whet
from adapted import answers, played, reply, task, world
from whet.config.load import load
from whet.config.schema import DataConfig, SourceConfig, TokenizerConfig
from whet.data.rows import read_rows
from whet.data.tasks import TaskStream
from whet.data.tokenizer import load_tokenizer
from whet.dialects.tables import dialect
from whet.dialects.translate import Translation, translate
from whet.dialects.trinity.worlds import WORLDS
from whet.envs import frozen_lake, sudoku, text_worlds
from whet.envs.env import EnvFault, EnvStep
from whet.envs.frozen_lake import FrozenLake, drawn, move_of
from whet.envs.text_worlds import elements_of
from whet.rewards.trinity import toolcall_reward
from whet.types import ConfigError, DataError, Json, Message, Task

LAKES = [
    # (size, p, seed, way): drawn by Trinity-RFT 0.6.0's own function with gymnasium 1.4.0
    ((4, 0.8, 3, 8), ["FFHF", "FFGF", "FFFF", "FSFH"]),
    ((5, 0.7, 11, 8), ["FFFFF", "HFFHF", "FFFFF", "HGFHF", "HFSFF"]),
    ((2, 0.6, 42, 8), ["SF", "HG"]),
    ((6, 0.65, 99999, 5), ["HFHFFH", "FFFFFH", "GHFFSF", "HFHHHF", "FHFFFH", "HFHHFF"]),
    ((3, 0.75, 7, 8), ["FSH", "FFH", "GHH"]),
]


def said(steps: list[EnvStep]) -> list[str]:
    return ["".join(message.content for message in step.messages) for step in steps]


# ---------------------------------------------------------------- lakes


@pytest.mark.parametrize(("asked", "board"), LAKES)
def test_a_lake_is_drawn_as_trinity_draws_it(asked: tuple[int, float, int, int], board: list[str]) -> None:
    size, p, seed, way = asked
    assert drawn(size, p, seed, way) == board


def played_one(env: Any, text: str) -> EnvStep:
    try:
        env.step(reply(text)).send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits for something")


def test_the_lake_is_told_and_a_reply_is_read() -> None:
    """By hand: the lake of 2 x 2, S at the left above, G below it at the right, a hole below S."""
    codec, found = played(
        "whet.envs.frozen_lake:make",
        {"steps": 3},
        {0: ["I go ```Right```", "no move", "```left``` or ```DOWN```"], 1: ["```2```"], 2: ["```Up```"] * 3},
        {uid: {"seed": 42, "size": 2, "p": 0.6} for uid in range(3)},
        max_turns=3,
    )
    (won,), (lost,), (stays,) = found[0], found[1], found[2]
    assert codec.results(won) == [
        "The lake after 0 moves:\nP _\nO G\nP is not at G. Give the next move.\nMoves left: 3.",
        "The lake after 1 moves:\n_ P\nO G\nP is not at G. Give the next move.\nMoves left: 2.",
        "The lake after 2 moves:\n_ P\nO G\nP is not at G. Give the next move.\nYour last reply did not change the "
        "place of P: give one move in ``` ```, such as ```Up```.\nMoves left: 1.",
    ]
    assert [turn.reward for turn in won.turns] == [0.0, 0.0, 1.0]
    assert (won.reward, won.stop_reason, won.reward_parts["env/invalid"]) == (1.0, "done", 1.0)
    assert (lost.reward, lost.stop_reason, len(lost.turns)) == (0.0, "done", 1)
    assert (stays.reward, stays.stop_reason, stays.reward_parts["env/stayed"]) == (0.0, "turns", 3.0)


@pytest.mark.parametrize(
    ("text", "move"),
    [("```Up```", 3), ("``` left ```", 0), ("a ```Up``` b ```2```", 1), ("Up", None), ("```0```", None),
     ("```5```", None), ("```up now```", None), ("```\nRIGHT\n```", 2), ("``` ```", None)],
)  # fmt: skip
def test_the_last_marked_word_is_the_move(text: str, move: int | None) -> None:
    assert move_of(text) == move


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"seed": 1, "p": 0.5}, "the column 'size' of task 0 is 'None'; expected an integer from 2 to 64"),
        ({"seed": "1", "size": 4}, "the column 'seed'"),
        ({"seed": 1, "size": 4, "p": 0}, "the column 'p' of task 0 is '0'"),
    ],
)
def test_a_row_that_gives_no_lake_is_a_fault_that_says_so(columns: dict[str, Json], why: str) -> None:
    with pytest.raises(EnvFault, match=why):
        FrozenLake(task(**columns), world())


def test_drawing_ends_where_no_lake_has_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_lake, "MOST_DRAWN", 3)
    with pytest.raises(
        EnvFault, match="of 3 lakes with size 8 and p 1e-09 none has a way of 8 steps to the goal"
    ):
        FrozenLake(task(seed=1, size=8, p=1e-9), world())


@pytest.mark.parametrize(
    "board", [["SF", "F"], ["SF", "FF"], ["SS", "FG"], ["SX", "FG"], [], "SFG", ["S", 3]]
)
def test_a_board_that_is_none_is_refused(board: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.env\.arguments\.board.*expected (rows|a list|text)"):
        FrozenLake.prepare({"board": board})


def test_a_lake_has_as_many_moves_as_its_steps_whatever_the_run_allows() -> None:
    env = FrozenLake(task(seed=42, size=2, p=0.6), world(), steps=2)
    first, last = (played_one(env, "```Up```") for _ in range(2))
    assert (first.done, last.done, last.stop, last.messages) == (False, True, "turns", [])


# ---------------------------------------------------------------- sudoku

PUZZLE = [[1, 0, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 0, 1]]
SOLUTION = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]


@pytest.mark.parametrize(
    ("replies", "rewards", "stop"),
    [
        (["0 1 2\n3 2 2"], [1.0], "done"),
        (["0 1 2", "\n 3 2 2 \n"], [0.0, 1.0], "done"),
        (["0 1 3"], [-1.0], "done"),  # 3 stands in the row
        (["0 0 2"], [-1.0], "done"),  # the cell is not empty
        (["0 1 2", "0 1 2"], [0.0, -1.0], "done"),
        (["fill 0 1 2"], [-1.0], "malformed"),
        (["0 1 5"], [-1.0], "malformed"),
        (["0 -1 2"], [-1.0], "malformed"),
        (["0 1 2\n" * 6], [-1.0], "malformed"),
        ([""], [-1.0], "malformed"),
    ],
)
def test_moves_of_a_sudoku(replies: list[str], rewards: list[float], stop: str) -> None:
    env = sudoku.Sudoku(task(puzzle=PUZZLE, solution=SOLUTION), world())
    steps = [played_one(env, text) for text in replies]
    assert [step.reward for step in steps] == rewards
    assert steps[-1].done
    assert (steps[-1].stop or "done") == stop


def test_each_turn_of_a_sudoku_sees_the_board_alone() -> None:
    """The history is the system message; the last turn's reward is the rollout's."""
    asked = Task(
        uid=0,
        source="s",
        prompt=(Message("system", "Solve."),),
        extra={"puzzle": PUZZLE, "solution": SOLUTION},
    )
    step = played_one(sudoku.Sudoku(asked, world(), steps=4), "3 2 2")
    assert step.history == [Message("system", "Solve.")]
    assert said([step]) == [
        "The board, 0 for an empty cell:\n1 0 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1\n"
        "Replies left: 3. A reply fills 1 to 5 cells."
    ]


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"steps": "20"}, {"moves": 0}, {"move": 5}])
def test_arguments_of_no_sudoku_are_refused(arguments: dict[str, Json]) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.env\.arguments.*(expected a whole number >= 1|unknown key)"
    ):
        sudoku.make.prepare(arguments)


def test_a_sudoku_has_as_many_replies_as_its_steps_whatever_the_run_allows() -> None:
    env = sudoku.Sudoku(task(puzzle=PUZZLE, solution=SOLUTION), world(), steps=1)
    last = played_one(env, "0 1 2")
    assert (last.done, last.stop, last.reward, last.history, last.messages) == (True, "turns", 0.0, None, [])


@pytest.mark.parametrize(
    "solution",
    [
        [[2, 1, 3, 4], *SOLUTION[1:]],
        PUZZLE,
        [[1, 3, 3, 4], *SOLUTION[1:]],
        [[0] * 9 for _ in range(9)],
    ],
)
def test_a_solution_that_no_reply_can_reach_is_a_fault(solution: list[list[int]]) -> None:
    with pytest.raises(EnvFault, match="the column 'solution' of task 0 does not solve its 'puzzle'"):
        sudoku.Sudoku(task(puzzle=PUZZLE, solution=solution), world())


def test_a_drawn_sudoku_is_one_and_the_same_for_a_task() -> None:
    one, other, next_task = (sudoku.Sudoku(task(uid), world(key)) for uid, key in ((3, 1), (3, 2), (4, 1)))
    assert (one.board, one.solution) == (other.board, other.solution)
    assert one.board != next_task.board
    assert all(sorted(unit) == list(range(1, 10)) for unit in sudoku.units(one.solution))
    assert sum(cell == 0 for row in one.board for cell in row) == 40
    assert all(b in (0, s) for row, full in zip(one.board, one.solution) for b, s in zip(row, full))


@pytest.mark.parametrize(
    "puzzle", [[[1]], [[1, 2], [2, 1]], [[0] * 4] * 3, [[0] * 4] * 3 + [[0, 0, 0, 5]], "1234"]
)
def test_a_puzzle_that_is_no_board_is_a_fault(puzzle: Any) -> None:
    with pytest.raises(EnvFault, match="the column 'puzzle' of task 0"):
        sudoku.Sudoku(task(puzzle=puzzle, solution=SOLUTION), world())


# ---------------------------------------------------------------- text worlds, behind doubles of their packages


class House:
    """TextWorld's environment of a game, as alfworld's are: four values a step, done by the right action."""

    def __init__(self, file: str) -> None:
        self.file, self.closed = file, False

    def reset(self) -> tuple[str, dict[str, Json]]:
        return f"You are in {self.file}. Your task is to: find a cup.", {}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Json]]:
        won = action == "take cup 1"
        return ("You won!" if won else "Nothing happens.", float(won), won, {})

    def close(self) -> None:
        self.closed = True


class Lab:
    """ScienceWorldEnv of the package scienceworld 1.2: rewards are changes of a score of 100."""

    def __init__(self, name: str, jar: str | None, envStepLimit: int) -> None:
        assert (name, jar, envStepLimit) == ("", "w.jar", 100)

    def load(self, name: str, variation: int, simplification: str) -> None:
        self.asked = (name, variation, simplification)

    def reset(self) -> tuple[str, dict[str, Json]]:
        return "A kitchen.", {}

    def get_task_description(self) -> str:
        return f"Do {self.asked}."

    def step(self, action: str) -> tuple[str, int, bool, dict[str, Json]]:
        change = {"open": 30, "close": -50, "focus": 70}.get(action, 0)
        return f"You {action}.", change, action == "focus", {}

    def close(self) -> None:
        pass


class Shop:
    """WebAgentTextEnv of web_agent_site: sessions live in a server that many environments share."""

    def __init__(
        self, observation_mode: str, server: Any = None, session_prefix: str = "", **how: Any
    ) -> None:
        self.server = server or SimpleNamespace(user_sessions={}, made=how)
        self.prefix = session_prefix

    def reset(self, session: int) -> None:
        self.session = f"{self.prefix}{session}"
        self.server.user_sessions[self.session] = self.observation = (
            f"Buy number {session}. [button] Search [button_]"
        )
        self.bought = False

    def get_available_actions(self) -> dict[str, Any]:
        return {"has_search_bar": "Search" in self.observation, "clickables": ["buy now", "back to search"]}

    def step(self, action: str) -> tuple[str, float, bool, None]:
        self.observation = f"After {action}."
        done = action.lower() == "click[buy now]"
        return self.observation, 0.75 if done else 0.0, done, None


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []

    def register_game(file: str, infos: Any, wrappers: list[Any]) -> str:
        registered.append(file)
        return f"tw-v{len(registered) - 1}"

    modules = {
        "textworld": {"EnvInfos": lambda **asked: asked},
        "textworld.gym": {
            "register_game": register_game,
            "make": lambda name: House(registered[int(name[4:])]),
        },
        "alfworld": {},
        "alfworld.agents": {},
        "alfworld.agents.environment": {},
        "alfworld.agents.environment.alfred_tw_env": {"AlfredDemangler": object},
        "scienceworld": {"ScienceWorldEnv": Lab},
        "web_agent_site": {},
        "web_agent_site.envs": {},
        "web_agent_site.envs.web_agent_text_env": {"WebAgentTextEnv": Shop},
    }
    for name, inside in modules.items():
        module = ModuleType(name)
        vars(module).update(inside)
        monkeypatch.setitem(sys.modules, name, module)
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)
    text_worlds.registered_game.cache_clear()
    text_worlds.opened_shop.cache_clear()


def act(action: str) -> str:
    return f"<think>so</think><action>{action}</action>"


def test_alfworld_pays_at_the_end_and_takes_a_tenth_for_none(packages: None) -> None:
    text_worlds.alfworld.prepare({"column": "game_file"})
    one = text_worlds.alfworld(task(game_file="a.tw"), world(), column="game_file", steps=2)
    assert said([EnvStep(one.first())]) == ["Observation: You are in a.tw. Your task is to: find a cup."]
    steps = answers(one, act("look"), act("take cup 1"))
    assert said(steps)[0].startswith("Observation: Nothing happens. Is the action one of the list")
    assert [(s.reward, s.done, s.stop) for s in steps] == [(0.0, False, None), (1.0, True, None)]
    one.close()
    assert one.game.env.closed
    other = text_worlds.alfworld(task(game_file="a.tw"), world(), column="game_file", steps=2)
    steps = answers(other, "no action at all", act("look"))
    assert [(s.reward, s.done, s.stop) for s in steps] == [(0.0, False, None), (-0.1, True, "turns")]
    assert [s.parts["invalid"] for s in steps] == [1.0, 0.0]


ELEMENTS = ["experience", "think", "action"]


def raft(action: str) -> str:
    return f"<experience>e</experience> so <think>t</think><action> {action} </action>"


def test_elements_of_a_reply() -> None:
    assert elements_of("x<a> 1 </a>y<b>2</b><a>3</a>", ["a", "b"]) == ["1", "2"]
    assert elements_of("<b>2</b><a>1</a>", ["a", "b"]) == ["", ""]
    assert elements_of("<a>1<b>2</b>", ["a", "b"]) == ["", ""]
    assert elements_of("<a>1</a><a>2</a><b>3</b>", ["a", "b"]) == ["1", "3"]
    # A pattern of three pairs does not come to an end with this in any useful time: there is no <c>.
    assert elements_of("<a></a><b></b>" * 3000, ["a", "b", "c"]) == ["", "", ""]


@pytest.mark.parametrize(
    ("replies", "ends"),
    [
        ([raft("look"), raft("take cup 1")], (1.0, True, None)),
        ([act("look"), raft("take cup 1")], (0.0, True, None)),  # a reply without an experience
        ([raft("look"), act("take cup 1")], (0.0, False, None)),  # no action is read of it
        ([raft("look"), raft("look"), raft("look")], (0.0, True, None)),
        ([raft("look"), raft("look"), raft("inventory"), raft("look"), raft("look")], (0.0, True, "turns")),
        ([act("a"), act("b"), act("c")], (0.0, True, None)),  # three empty actions
    ],
)
def test_alfworld_pays_replies_with_all_elements(
    packages: None, replies: list[str], ends: tuple[float, bool, str | None]
) -> None:
    """As RAFT_alfworld_workflow of Trinity-RFT 0.6.0: three equal actions in a row are the end."""
    how: dict[str, Any] = {"elements": ELEMENTS, "repeats": 3, "unfinished": 0.0}
    text_worlds.alfworld.prepare({"column": "game_file", **how})
    env = text_worlds.alfworld(task(game_file="a.tw"), world(), column="game_file", steps=5, **how)
    *before, last = answers(env, *replies)
    assert not any(step.done for step in before)
    assert (last.reward, last.done, last.stop) == ends


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"elements": ["think"]}, "with action among them"),
        ({"elements": "action"}, "expected a list"),
        ({"repeats": 1}, "repeats: got 1, expected a whole number >= 2 or null"),
    ],
)
def test_elements_and_repeats_that_are_none(packages: None, given: dict[str, Json], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        text_worlds.alfworld.prepare({"column": "game_file", **given})


def test_scienceworld_pays_the_highest_score_so_far(packages: None) -> None:
    """Scores 30, -20, 50: the highest is 50 of 100, so the rewards are .3, 0 and .2."""
    asked = json.dumps({"task_name": "boil", "var_num": 7, "jar_path": "w.jar"})
    env = text_worlds.scienceworld(task(task_desc=asked), world(), column="task_desc")
    assert said([EnvStep(env.first())]) == ["Observation: The task: Do ('boil', 7, 'easy').\nA kitchen."]
    steps = answers(env, act("open"), act("close"), act("focus"))
    assert [s.reward for s in steps] == pytest.approx([0.3, 0.0, 0.2])
    assert [s.done for s in steps] == [False, False, True]


def test_webshop_shares_one_shop_and_no_session(packages: None) -> None:
    one, other = (
        text_worlds.webshop(task(task_id=n), world(), column="task_id", num_products=5) for n in (3, "3")
    )
    one.first(), other.first()
    server = one.game.env.server
    assert server is other.game.env.server
    assert server.made == {"num_products": 5, "human_goals": True}
    assert len(server.user_sessions) == 2, "two episodes of one task have sessions of their own"
    steps = answers(
        one, act("search[]"), act("click[red]"), act("dance"), act("search[hat]"), act("search[hat]")
    )
    assert said(steps) == [
        "Observation: The search is empty: write search[what to look for].",
        "Observation: This page has no such button. It has: buy now, back to search.",
        "Observation: This is no action: write <action>search[words]</action> or <action>click[button]</action>.",
        "Observation: After search[hat].",
        "Observation: This page has no search: click[back to search] first.",
    ]
    (bought,) = answers(one, act("click[Buy Now]"))
    assert (bought.reward, bought.done) == (0.75, True)
    one.close(), other.close()
    assert server.user_sessions == {}


@pytest.mark.parametrize(
    ("factory", "row", "why"),
    [
        ("alfworld", {}, r"has no column 'game' \(rollout\.env\.arguments\.column\); columns: none"),
        ("alfworld", {"game": 3}, "expected the path of a game file"),
        ("scienceworld", {"game": "[]"}, "expected a map with task_name and var_num"),
        ("webshop", {"game": "x"}, "the session is 'x'; expected a number"),
    ],
)
def test_a_row_that_names_no_game_is_a_fault(
    packages: None, factory: str, row: dict[str, Json], why: str
) -> None:
    with pytest.raises(EnvFault, match=why):
        getattr(text_worlds, factory)(task(**row), world(), column="game")


@pytest.mark.parametrize(
    ("factory", "install"),
    [
        ("alfworld", "pip install alfworld"),
        ("scienceworld", "pip install scienceworld"),
        ("webshop", "setup.sh"),
    ],
)
def test_a_world_without_its_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, factory: str, install: str
) -> None:
    for name in ("alfworld", "textworld", "scienceworld", "web_agent_site"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=install):
        getattr(text_worlds, factory).prepare({"column": "game"})
    with pytest.raises(ConfigError, match="colum: unknown key; did you mean 'column'"):
        getattr(text_worlds, factory).prepare({"colum": "game"})
    with pytest.raises(ConfigError, match=r"steps: got 0, expected a whole number >= 1"):
        getattr(text_worlds, factory).prepare({"column": "game", "steps": 0})


# ---------------------------------------------------------------- calls of tools

CALLS = [{"name": "mail", "arguments": {"to": "Bob", "n": 1}}, {"name": "shop", "arguments": {}}]


@pytest.mark.parametrize(
    ("reply_text", "reward"),
    [
        # beside compute_toolcall_reward of Trinity-RFT 0.6.0, which gives the same
        (f"<think>a</think><tool_call>{json.dumps(CALLS)}</tool_call>", 1.0),
        (f"<think>a</think> <tool_call>\n{json.dumps(CALLS[::-1])}\n</tool_call> bye", 1.0),
        (f"<think>a</think><tool_call>{json.dumps(json.dumps(CALLS))}</tool_call>", 1.0),
        (f"<think>a</think><tool_call>[]</tool_call><tool_call>{json.dumps(CALLS)}</tool_call>", 1.0),
        (f"<tool_call>{json.dumps(CALLS)}</tool_call>", 0.0),
        (f"<think>a</think><think>b</think><tool_call>{json.dumps(CALLS)}</tool_call>", 0.0),
        (f"<tool_call>{json.dumps(CALLS)}</tool_call><think>a</think>", 0.0),
        (f"<think>a</think><tool_call>{json.dumps(CALLS[:1])}</tool_call>", 0.0),
        (f"<think>a</think><tool_call>{json.dumps(CALLS[0])}</tool_call>", 0.0),
        (f"<think>a</think><tool_call>{json.dumps([*CALLS, CALLS[0]])}</tool_call>", 0.0),
        ("<think>a</think><tool_call>[1, 2]</tool_call>", 0.0),
        ('<think>a</think><tool_call>[{"name": "mail"}]</tool_call>', 0.0),
        ("<think>a</think><tool_call>{</tool_call>", 0.0),
        ("<think>a</think>", 0.0),
    ],
)
def test_the_reward_of_calls(reply_text: str, reward: float) -> None:
    for answer in (json.dumps(CALLS), CALLS):
        assert toolcall_reward(reply_text, Task(uid=0, source="s", prompt="p", answer=answer)) == reward


def test_one_call_of_one_is_right_as_a_map_too() -> None:
    answer = json.dumps(CALLS[:1])
    said = f"<think>a</think><tool_call>{json.dumps(CALLS[0])}</tool_call>"
    assert toolcall_reward(said, Task(uid=0, source="s", prompt="p", answer=answer)) == 1.0


def test_rows_of_tool_calls_become_prompts(tmp_path: Path) -> None:
    row = {
        "raw_system": "You call functions.",
        "tools": json.dumps([{"name": "mail"}, {"name": "shop"}]),
        "conversations": [
            {"from": "user", "value": "Write to Bob."},
            {"from": "function_call", "value": "[1]"},
            {"from": "tool", "value": "sent"},
            {"from": "human", "value": "Buy."},
        ],
        "answer": json.dumps(CALLS),
    }
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps(row) + "\n")
    source = SourceConfig(function="whet.data.tool_n1:rows", arguments={"path": str(file)})
    (read,) = read_rows(source).slice(0, 1)
    assert read["answer"] == row["answer"]
    assert [m["role"] for m in read["prompt"]] == ["system", "user", "assistant", "tool", "user"]
    assert read["prompt"][2]["content"] == '"[1]"'
    system = read["prompt"][0]["content"]
    assert system.startswith("You call functions.")
    assert '<tools>\n{"type": "function", "function": {"name": "mail"}}\n{"type": "function", "function": {"name": "shop"}}\n</tools>' in system  # fmt: skip  # noqa: E501
    file.write_text(json.dumps({"prompt": "p"}) + "\n")
    with pytest.raises(DataError, match=r"line 1: KeyError\('tools'\); expected the columns raw_system"):
        read_rows(source)


# ---------------------------------------------------------------- prompts that an environment asks

ASKED = {"prompt": None, "system_prompt": "Play."}


def stream(rows: list[dict[str, Json]], exclude: list[Task] | None = None) -> TaskStream:
    letters = "".join(map(chr, range(32, 127))) + "\n"
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=[letters])
    source = SourceConfig(rows=tuple(rows), name="s", **ASKED)
    data = DataConfig(train=(source,), chat=True, order="sequential")
    return TaskStream((source,), data, tokenizer=tokenizer, seed=0, exclude=exclude or ())


def test_a_row_without_a_prompt_is_the_system_message_and_its_columns() -> None:
    tasks = stream([{"seed": 1, "size": 2}, {"seed": 2, "size": 2}]).next(2)
    assert [t.prompt for t in tasks] == [(Message("system", "Play."),)] * 2
    assert [t.extra for t in tasks] == [{"seed": 1, "size": 2}, {"seed": 2, "size": 2}]


def test_held_out_rows_without_prompts_are_found_by_their_columns(tmp_path: Path) -> None:
    rows = [{"seed": n, "size": 2} for n in range(4)]
    (held_out,) = stream(rows[2:3]).next(1)
    left = stream(rows, [held_out])
    assert (left.counts["held_out"], [t.extra["seed"] for t in left.next(3)]) == (1, [0, 1, 3])
    before, after = (
        stream(given).state()["digests"] for given in (rows, [*rows[:3], {"seed": 9, "size": 2}])
    )
    assert before != after, "a resumed run sees that a game is another one"


@pytest.mark.parametrize(
    ("source", "more", "why"),
    [
        ({"prompt": None}, {}, "so the environment asks; give system_prompt"),
        ({**ASKED, "template": "{prompt}"}, {}, "leave template out"),
        ({**ASKED, "reply_prefix": "a"}, {}, "leave reply_prefix out"),
        (ASKED, {"rollout": {}}, "needs prompts; name the column"),
    ],
)
def test_what_a_row_without_a_prompt_cannot_have(source: Any, more: Any, why: str) -> None:
    from whet.config.plan import plans

    env = {"env": {"make": "whet.envs.frozen_lake:make"}}
    config = {
        "model": {"scratch": {}}, "tokenizer": {"build": "chars"}, "train": {"steps": 1}, "algorithm": "grpo",
        "data": {"chat": True, "train": [{"rows": [{"seed": 1, "size": 2}], "name": "t", **source}]},
        "rollout": env, **more,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=why):
        plans(load(None, (), config))


def test_a_stage_that_imitates_may_be_evaluated_in_the_environment() -> None:
    """Its own rows have prompts; the held-out ones are asked by the environment."""
    from whet.config.plan import plans

    held = {"rows": [{"seed": 1, "size": 2}], "name": "e", **ASKED}
    config = {
        "model": {"scratch": {}}, "tokenizer": {"build": "chars"}, "train": {"steps": 1}, "algorithm": "sft",
        "data": {"chat": True, "train": [{"rows": [{"prompt": "a", "response": "b"}], "name": "t"}], "eval": [held]},
        "rollout": {"env": {"make": "whet.envs.frozen_lake:make"}},
    }  # fmt: skip
    assert len(plans(load(None, (), config))) == 1


def test_a_lake_is_trained_on(tmp_path: Path) -> None:
    """The whole way: rows without prompts, the environment in its host, strands, an evaluation."""
    letters = "".join(map(chr, range(32, 127))) + "\n"
    rows = [{"seed": n, "size": 2, "p": 0.8} for n in range(4)]
    config = {
        "model": {"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
                              "intermediate_size": 32, "max_position_embeddings": 512}},
        "tokenizer": {"build": "chars"},
        "data": {"chat": True, "max_prompt_tokens": 200,
                 "train": [{"rows": rows, "name": "t", "prompt": None, "system_prompt": letters}],
                 "eval": [{"rows": [{"seed": 9, "size": 2}], "name": "e", "prompt": None, "system_prompt": letters}]},
        "algorithm": "grpo",
        "rollout": {"group_size": 2, "sampling": {"max_tokens": 8},
                    "env": {"make": "whet.envs.frozen_lake:make", "arguments": {"steps": 2}, "max_turns": 2,
                            "observation_tokens": 250}},
        "train": {"steps": 1, "tasks_per_step": 2},
        "track": {"trackers": ["jsonl"]},
    }  # fmt: skip
    result = whet.train(**config, run_dir=str(tmp_path / "run"))
    table = result.rollouts(1).to_pylist()
    assert len(table) == 4
    for rollout in table:
        assert json.loads(rollout["messages"])[0]["content"].startswith("The lake after 0 moves:")
        assert rollout["stop_reason"] in ("turns", "tokens", "done")
    assert any("eval/e/reward_mean" in line for line in result.metrics)


# ---------------------------------------------------------------- files

BASE: dict[str, Json] = {
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
    "model": {"model_path": "m", "max_model_len": 100, "max_response_tokens": 20},
    "buffer": {"batch_size": 8},
}


def read(
    workflow: str, *, version: str = "0.6.0", evals: Any = (), sections: Any = None, **taskset: Any
) -> Translation:
    own = {"path": "games.jsonl", "default_workflow_type": workflow, **taskset}
    explorer = {"taskset": own, "eval_tasksets": list(evals)}
    tree = {**BASE, "buffer": {**BASE["buffer"], "explorer_input": explorer}, **(sections or {})}
    return translate(tree, dialect("trinity", version), origins={})


@pytest.mark.parametrize("name", list(WORLDS))
def test_a_workflow_is_an_environment_with_its_prompt(name: str) -> None:
    raft = {"algorithm": {"algorithm_type": "raft", "repeat_times": 4}} if WORLDS[name].winners else {}
    made = read(name, format={"prompt_key": "game"}, sections=raft)
    assert not made.problems, made.problems
    assert not made.unbuilt, made.unbuilt
    (source,), env = made.tree["data"]["train"], made.tree["rollout"]["env"]
    assert (source["prompt"], source["system_prompt"]) == (None, WORLDS[name].system)
    assert env["make"] == WORLDS[name].make
    assert env["arguments"]["steps"] == env["max_turns"] == WORLDS[name].steps
    assert env["arguments"].get("column") == ("game" if WORLDS[name].names_game else None)
    assert made.tree["data"]["max_total_tokens"] == 100
    assert "rewards" not in made.tree


def test_raft_trains_on_winning_episodes() -> None:
    """Which Trinity gives no reward, so no other algorithm can learn from them. It samples as the taskset says."""
    raft = {"algorithm": {"algorithm_type": "raft"}}
    made = read("RAFT_alfworld_workflow", sections=raft, rollout_args={"temperature": 0.85, "top_k": 25})
    assert made.tree["algorithm"]["groups"] == {"min_reward": 1.0}
    assert (
        made.tree["rollout"]["sampling"] | {"temperature": 0.85, "top_k": 25}
        == made.tree["rollout"]["sampling"]
    )
    assert made.tree["rollout"]["env"]["arguments"] == {
        "column": "prompt", "steps": 50, "elements": ELEMENTS, "repeats": 3, "unfinished": 0.0,
    }  # fmt: skip
    (wrong,) = read("RAFT_alfworld_workflow").problems
    assert "only algorithm_type: raft learns from them" in wrong[1]
    house = [{"path": "h.jsonl", "default_workflow_type": "alfworld_workflow"}]
    assert "groups" not in read("alfworld_workflow", sections=raft).tree["algorithm"]
    held = read("alfworld_workflow", evals=[{**house[0], "default_workflow_type": "RAFT_alfworld_workflow"}])
    assert "groups" not in held.tree["algorithm"], "what only evaluates says nothing of training"


def test_lengths_of_several_turns() -> None:
    """max_response_tokens is for each reply, what a reply follows is the rest; a lake has 10240 after the prompt."""
    house, lake = (read(n).tree["rollout"] for n in ("alfworld_workflow", "frozen_lake_workflow"))
    assert (house["sampling"]["max_tokens"], house["env"]["max_tokens_per"]) == (20, "turn")
    assert house["env"]["input_tokens"] == 80
    assert (lake["sampling"]["max_tokens"], lake["env"]["tokens_after_prompt"]) == (10240, 10240)
    assert "input_tokens" not in lake["env"]


def test_arguments_of_a_workflow_reach_the_environment() -> None:
    given = {"env_max_steps": 5, "agent_max_steps": 7, "is_slippery": True, "desc": ["SF", "FG"]}
    env = read("frozen_lake_workflow", workflow_args=given).tree["rollout"]["env"]
    assert env["arguments"] == {"way": 5, "steps": 7, "slippery": True, "board": ["SF", "FG"]}
    assert env["max_turns"] == 7
    (wrong,) = read("frozen_lake_workflow", workflow_args={"max_steps": 1}).problems
    assert "workflow_args.max_steps: the workflow has no such argument; it has: env_max_steps" in wrong[1]
    (wrong,) = read("sciworld_workflow", default_reward_fn_type="math_reward").problems
    assert "math_reward has no effect: sciworld_workflow has a reward of its own" in wrong[1]


def test_only_the_lake_samples_as_its_taskset_says() -> None:
    """Trinity's other worlds do not hand their rollout_args on."""
    args = {"rollout_args": {"temperature": 0.5}}
    assert read("frozen_lake_workflow", **args).tree["rollout"]["sampling"]["temperature"] == 0.5
    assert read("webshop_workflow", **args).tree["rollout"]["sampling"]["temperature"] == 1.0


def test_only_worlds_that_do_not_read_their_tasksets_sample_with_the_models_top_k() -> None:
    """A taskset of Trinity's has top_k -1 where it gives none."""
    model = {"model": {**BASE["model"], "top_k": 20}}
    assert read("webshop_workflow", sections=model).tree["rollout"]["sampling"]["top_k"] == 20
    for name in ("frozen_lake_workflow", "math_workflow"):
        (wrong,) = read(name, sections=model).problems
        assert "model.top_k: 20 has no effect in Trinity-RFT" in wrong[1]
        own = read(name, rollout_args={"top_k": 20})
        assert (own.problems, own.tree["rollout"]["sampling"]["top_k"]) == ((), 20)
    other = {"path": "b.jsonl", "name": "e", "default_workflow_type": "math_workflow"}
    made = read(
        "webshop_workflow",
        sections=model,
        evals=[other, {**other, "name": "f", "rollout_args": {"top_k": 5}}],
    )
    assert not made.problems, made.problems
    assert made.tree["eval"]["sampling"]["top_k"] == 0
    assert made.tree["eval"]["sources"]["f"]["sampling"]["top_k"] == 5


def test_tasksets_of_other_worlds_are_played_by_environments_of_their_own() -> None:
    """Each by the name of its source, with its own limit of turns where that is below the largest; tasksets that a
    world rewards have no rewards of the run."""
    house, sudoku, sums = (
        {"default_workflow_type": f"{name}_workflow", "path": "b.jsonl"}
        for name in ("alfworld", "sudoku", "math")
    )
    made = read("alfworld_workflow", evals=[{**sudoku, "name": "s"}, sums, {**house, "name": "h"}])
    assert (made.problems, made.unbuilt) == ((), ())
    env = made.tree["rollout"]["env"]
    house_env = {"make": "whet.envs.text_worlds:alfworld", "arguments": {"column": "prompt", "steps": 30}}
    assert (env["make"], env["max_turns"]) == ("whet.envs.several:make", 30)
    assert env["arguments"]["envs"] == {
        "taskset_0": house_env,
        "s": {"make": "whet.envs.sudoku:make", "arguments": {"steps": 20}, "max_turns": 20},
        "eval_taskset_1": {},
        "h": house_env,
    }
    sources = [*made.tree["data"]["train"], *made.tree["data"]["eval"]]
    assert [source["rewards"] for source in sources] == [[], [], ["math_reward"], []]
    assert [source["prompt"] for source in sources] == [None, None, "prompt", None]
    assert env["max_tokens_per"] == "turn"
    assert made.tree["rollout"]["sampling"]["max_tokens"] == 20


def test_lakes_of_other_sizes_share_their_way_to_count() -> None:
    own = {"name": "e", "path": "b.jsonl", "default_workflow_type": "frozen_lake_workflow"}
    made = read("frozen_lake_workflow", evals=[{**own, "workflow_args": {"agent_max_steps": 4}}])
    assert (made.problems, made.unbuilt) == ((), ())
    env = made.tree["rollout"]["env"]
    assert env["arguments"]["envs"]["e"]["max_turns"] == 4
    assert env["tokens_after_prompt"] == 10240
    same = read("frozen_lake_workflow", evals=[own])
    assert same.tree["rollout"]["env"]["make"] == "whet.envs.frozen_lake:make"


def test_worlds_that_cannot_be_in_one_run_are_refused() -> None:
    own = {"name": "e", "path": "b.jsonl"}
    for other in ("sudoku_workflow", "math_workflow"):
        (missing,) = read("frozen_lake_workflow", evals=[{**own, "default_workflow_type": other}]).unbuilt
        assert "taskset.default_workflow_type: its limit of 10240 tokens counts all replies" in missing[1]
    (wrong,) = read(
        "alfworld_workflow",
        name="e",
        evals=[{**own, "default_workflow_type": "sudoku_workflow"}],
    ).problems
    assert (
        "eval_tasksets[0].name: e is also the name of another taskset, which is played otherwise" in wrong[1]
    )
    sets = [{"path": "a", "default_workflow_type": f"{name}_workflow"} for name in ("alfworld", "sudoku")]
    tree = {**BASE, "buffer": {**BASE["buffer"], "explorer_input": {"tasksets": sets}}}
    (missing,) = translate(tree, dialect("trinity", "0.6.0"), origins={}).unbuilt
    assert "tasksets[1].default_workflow_type: one workflow gives an experience for each turn" in missing[1]


def test_an_evaluation_has_the_length_of_its_own_replies() -> None:
    """A taskset of evaluation without max_tokens has the model's, whatever the taskset of training says."""
    made = read(
        "math_workflow", rollout_args={"max_tokens": 7}, evals=[{"name": "e", "path": "b.jsonl"}],
        default_reward_fn_type="math_reward", default_eval_workflow_type="math_workflow",
    )  # fmt: skip
    assert made.tree["rollout"]["sampling"]["max_tokens"] == 7
    assert made.tree["eval"]["sampling"]["max_tokens"] == 20


def test_calls_of_tools_translate() -> None:
    made = read("toolcall_workflow", path="toolace", split="train")
    assert (made.problems, made.unbuilt) == ((), ())
    (source,) = made.tree["data"]["train"]
    assert source["function"] == "whet.data.tool_n1:rows"
    assert source["arguments"] == {"path": "toolace", "split": "train"}
    assert made.tree["rewards"] == {"toolcall_reward": {"function": "whet.rewards.trinity:toolcall_reward"}}
    assert "env" not in made.tree["rollout"]


def test_gigpo_translates() -> None:
    tree: dict[str, Any] = {
        **BASE,
        "algorithm": {
            "algorithm_type": "gigpo",
            "advantage_fn_args": {"omega": 0.5, "gamma": 0.9, "fnorm": "std"},
        },
    }
    explorer = {"taskset": {"path": "g", "default_workflow_type": "step_wise_alfworld_workflow"}}
    tree["buffer"] = {"batch_size": 8, "train_batch_size": 960, "explorer_input": explorer}
    made = translate(tree, dialect("trinity", "0.6.0"), origins={})
    assert (made.problems, made.unbuilt) == ((), ())
    assert made.tree["algorithm"]["advantage"] == {
        "name": "gigpo", "std_epsilon": 1e-6, "turn_weight": 0.5, "gamma": 0.9, "normalize_std": True,
    }  # fmt: skip
    assert made.tree["train"]["tasks_per_step"] == 8
    tree["algorithm"]["advantage_fn_args"] = {"env_state_hash_key": "mine"}
    (wrong,) = translate(tree, dialect("trinity", "0.6.0"), origins={}).problems
    assert "env_state_hash_key: mine is a name in a workflow of yours" in wrong[1]
