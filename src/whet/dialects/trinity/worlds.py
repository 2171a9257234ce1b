"""Trinity-RFT's workflows of several turns that play a world of their own: which environment of whet plays it, and with
what prompt. The texts are whet's own; the forms that they ask for are what the environments read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whet.config.environments import SEVERAL
from whet.dialects.row import NotSupportedYet
from whet.dialects.trinity.values import EVAL_TASKSETS, Native, Own, section
from whet.types import ConfigError, Json


@dataclass(frozen=True, kw_only=True)
class TrinityWorld:
    """How a workflow plays."""

    make: str
    system: str
    steps: int
    """Replies of an episode, where the file does not say."""
    step_key: str | None = None
    """The workflow's argument that says it."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Its other arguments, and their names here."""
    names_game: bool = False
    """format.prompt_key names the column of the game."""
    by_turn: bool = False
    """It gives an experience for each turn."""
    rollout_args: bool = False
    """The taskset's sampling arguments count; else the model's alone."""
    set: Mapping[str, Json] = field(default_factory=dict)
    """Arguments of the environment that the file has no say in."""
    winners: bool = False
    """It trains on the episodes that are paid 1, and on no other."""
    tokens: int | None = None
    """Of all replies and answers together, whatever max_response_tokens says."""


_THINK_ACT = (
    "Each reply has two parts: what you think, inside <think> and </think>, then one action, inside <action> and "
    "</action>. Nobody answers questions: finish the task by yourself."
)
_HOUSE = (
    "You act in a house that is described to you, to finish the task that the first description ends with.\n"
    "Actions (one word in brackets stands for a thing or a place, with its number):\n"
    "look\ninventory\ngo to [place]\nopen [place]\nclose [place]\ntake [thing] from [place]\nmove [thing] to [place]\n"
    "examine [thing]\nuse [thing]\nheat [thing] with [place]\nclean [thing] with [place]\ncool [thing] with [place]\n"
    "slice [thing] with [thing]\nYou can carry one thing."
)
_RAFT = (
    f"{_HOUSE} Each reply has three parts, in this order: what you have learned so far that helps, inside <experience> "
    "and </experience>, what you think, inside <think> and </think>, then one action, inside <action> and </action>. "
    "Nobody answers questions: finish the task by yourself.\nFor example: <experience>The cupboards were empty."
    "</experience><think>A cup may be in the cabinet.</think><action>go to cabinet 1</action>"
)
_ALFWORLD = TrinityWorld(
    make="whet.envs.text_worlds:alfworld",
    system=f"{_HOUSE} {_THINK_ACT}\n"
    "For example: <think>A cup may be in the cabinet.</think><action>go to cabinet 1</action>",
    steps=30,
    step_key="max_env_steps",
    names_game=True,
)
WORLDS: dict[str, TrinityWorld] = {
    "frozen_lake_workflow": TrinityWorld(
        make="whet.envs.frozen_lake:make",
        system="You walk over a frozen lake. P is you, G the goal, _ ice, O a hole. Bring P to G in as few moves as "
        "you can, and into no hole: a hole ends the walk. A move is Up, Down, Left or Right; on slippery ice it may go "
        "to one side of where you aim.\nThink first, then give the next move in ``` ```, for example ```Up```.",
        steps=10,
        step_key="agent_max_steps",
        arguments={"env_max_steps": "way", "is_slippery": "slippery", "desc": "board"},
        rollout_args=True,
        tokens=10240,
    ),
    "alfworld_workflow": _ALFWORLD,
    "RAFT_alfworld_workflow": TrinityWorld(
        make=_ALFWORLD.make,
        system=_RAFT,
        steps=50,
        names_game=True,
        set={"elements": ["experience", "think", "action"], "repeats": 3, "unfinished": 0.0},
        winners=True,
        rollout_args=True,
    ),
    "step_wise_alfworld_workflow": TrinityWorld(**{**vars(_ALFWORLD), "by_turn": True}),
    "sciworld_workflow": TrinityWorld(
        make="whet.envs.text_worlds:scienceworld",
        system="You do an experiment in a world that is described to you.\nActions (OBJ is a thing, LOC a room):\n"
        "open OBJ\nclose OBJ\nactivate OBJ\ndeactivate OBJ\nconnect OBJ to OBJ\ndisconnect OBJ\nuse OBJ [on OBJ]\n"
        "look around\nexamine OBJ\nlook at OBJ\nread OBJ\nmove OBJ to OBJ\npick up OBJ\npour OBJ into OBJ\nmix OBJ\n"
        "teleport to LOC\nfocus on OBJ (a thing of the task)\nwait (ten steps)\nwait1 (one step)\n"
        f"{_THINK_ACT}\nFor example: <think>The kettle is in the kitchen.</think><action>teleport to kitchen</action>",
        steps=30,
        names_game=True,
    ),
    "webshop_workflow": TrinityWorld(
        make="whet.envs.text_worlds:webshop",
        system="You shop for someone: find the product that fits the instruction best, choose its options, and buy it "
        "within 15 replies.\nActions: search[words], where the page has a search button; click[button], for a button "
        f"of the page, which stands as [button] name [button_].\n{_THINK_ACT}\nFor example: <action>search[white "
        "shoes]</action>, and at the end <action>click[Buy Now]</action>",
        steps=15,
        names_game=True,
    ),
    "sudoku_workflow": TrinityWorld(
        make="whet.envs.sudoku:make",
        system="You solve a sudoku: each number stands once in every row, column and block; 0 is an empty cell, and "
        "only those may be filled. A reply is a list of moves and nothing else, one a line: row column value, with "
        "rows and columns from 0. For example, two moves:\n0 2 4\n1 3 5",
        steps=20,
        by_turn=True,
    ),
}


@dataclass(frozen=True)
class PlayedSet:
    """A taskset, and what plays it."""

    name: str
    """Of its source here."""
    world: TrinityWorld | None
    own: Own
    what: str


def environment(sets: Sequence[PlayedSet]) -> Native:
    """rollout.env of tasksets, those of training first: what plays all of them, or several environments by the name of
    the source. NotSupportedYet where these would need limits of their own."""
    played = [_played(each) for each in sets]
    if all(made == played[0] for made in played):
        return played[0]
    for each in sets:
        if _tokens(each) is not None and any(_tokens(other) is None for other in sets):
            raise NotSupportedYet(
                f"{each.what}.default_workflow_type: its limit of {_tokens(each)} tokens counts all replies of an "
                "episode together, that of other workflows each reply, and a run counts in one way; train on, or "
                "evaluate (`whet eval`), that taskset in a run of its own."
            )
        if not each.what.startswith(EVAL_TASKSETS) and _by_turn(each) != _by_turn(sets[0]):
            raise NotSupportedYet(
                f"{each.what}.default_workflow_type: one workflow gives an experience for each turn, another for each "
                "rollout, and buffer.train_batch_size counts experiences; train on that taskset in a run of its own."
            )
    most = max(made.get("rollout.env.max_turns", 1) for made in played)
    return {
        "rollout.env.make": SEVERAL,
        "rollout.env.arguments": {"envs": _members(sets, played, most)},
        "rollout.env.max_turns": most,
    }


def _tokens(each: PlayedSet) -> int | None:
    return None if each.world is None else each.world.tokens


def _by_turn(each: PlayedSet) -> bool:
    return each.world is not None and each.world.by_turn


def _members(sets: Sequence[PlayedSet], played: Sequence[Native], most: int) -> dict[str, Native]:
    """The environments by the names of sources. ConfigError for a name of two tasksets that are played otherwise."""
    members: dict[str, Native] = {}
    for each, made in zip(sets, played):
        member: Native = {key.removeprefix("rollout.env."): value for key, value in made.items()}
        if member.get("max_turns") == most:
            del member["max_turns"]
        if members.setdefault(each.name, member) != member:
            raise ConfigError(
                f"{each.what}.name: {each.name} is also the name of another taskset, which is played otherwise; give "
                "each a name of its own."
            )
    return members


def _played(each: PlayedSet) -> Native:
    world, own, what = each.world, each.own, each.what
    if world is None:
        return {}
    given = section(own, "workflow_args")
    for key in given:
        if key not in (*world.arguments, world.step_key):
            known = ", ".join(filter(None, (*world.arguments, world.step_key))) or "none"
            raise ConfigError(
                f"{what}.workflow_args.{key}: the workflow has no such argument; it has: {known}."
            )
    steps = world.steps if world.step_key is None else given.get(world.step_key, world.steps)
    arguments: dict[str, Json] = (
        {"column": own.get("format.prompt_key") or "prompt"} if world.names_game else {}
    )
    arguments |= {"steps": steps, **world.set}
    arguments |= {name: given[key] for key, name in world.arguments.items() if given.get(key) is not None}
    return {
        "rollout.env.make": world.make,
        "rollout.env.arguments": arguments,
        "rollout.env.max_turns": steps,
    }
