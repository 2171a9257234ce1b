"""FrozenLake as Trinity-RFT plays it (0.4 to 0.6): `rollout.env.make: whet.envs.frozen_lake:make`.

A row gives `seed`, `size` and `p`: the lake is drawn from them, number by number as Trinity does, and the ice slips as
in gymnasium's FrozenLakeEnv. It needs neither package. What the policy is told is in whet's own words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from pydantic import model_validator

from whet.config.environments import AT
from whet.config.sections.base import Positive, Section
from whet.envs.arguments import section
from whet.envs.env import EnvFault, EnvStep, World
from whet.types import ConfigError, Json, Message, Task

MOST_SIZE = 64
"""Rows and columns of a lake."""
MOST_DRAWN = 10_000
"""Lakes that are drawn until one has a way to the goal."""
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""By their names, in gymnasium's order. A reply may also give their numbers, from 1."""
THIRD = 1.0 / 3.0
"""How likely the ice lets a step go where it is aimed at."""

Place = tuple[int, int]
"""(row, column)"""


class LakeArguments(Section):
    """`rollout.env.arguments`."""

    steps: Positive = 10
    """Moves of an episode; the policy is told how many are left (Trinity: agent_max_steps)."""
    way: Positive = 8
    """Longest way to the goal of a lake that is drawn (env_max_steps)."""
    slippery: bool = False
    """Each step goes one way of three (is_slippery)."""
    board: tuple[str, ...] | None = None
    """Rows of S, F, H and G, the same lake for all tasks (desc)."""

    @model_validator(mode="after")
    def _is_lake(self) -> LakeArguments:
        if self.board is not None:
            check_board(self.board)
        return self


class FrozenLake:
    """The lake of one rollout."""

    def __init__(self, task: Task, world: World, **arguments: Json) -> None:
        """arguments: those of `LakeArguments`."""
        self.asked, self.turn = section(LakeArguments, arguments), 0
        self.seed = _whole(task, "seed", 42, 0, 2**63)
        self.board = self.asked.board or _drawn(task, self.seed, self.asked.way)
        self.place = next(p for p, field in _fields(self.board) if field == "S")
        self.rng = generator(self.seed)
        self.rng.random()  # gymnasium draws where to begin

    @classmethod
    def prepare(cls, arguments: dict[str, Json]) -> None:
        """ConfigError for arguments that no lake can have."""
        section(LakeArguments, arguments)

    async def first(self) -> list[Message]:
        return [self._told()]

    async def step(self, reply: Message) -> EnvStep:
        """One move; a reply that names none leaves P where it is."""
        self.turn += 1
        before, move = self.place, move_of(reply.content)
        if move is not None:
            self.place = self._moved(move)
        field = self.board[self.place[0]][self.place[1]]
        parts = {"invalid": float(move is None), "stayed": float(self.place == before)}
        ended = field in "GH"
        done = ended or self.turn == self.asked.steps
        told = [] if done else [self._told(stayed=self.place == before)]
        return EnvStep(told, float(field == "G"), parts, done, stop=None if ended or not done else "turns")

    def _moved(self, move: int) -> Place:
        """Where a move ends. The ice turns it to either side as often as it leaves it."""
        slips = self.asked.slippery
        ways = [(move - 1) % 4, move, (move + 1) % 4] if slips else [move]
        odds = [(1.0 - THIRD) / 2.0, THIRD, (1.0 - THIRD) / 2.0] if slips else [1.0]
        drawn = int(np.argmax(np.cumsum(odds) > self.rng.random()))
        down, right = list(MOVES.values())[ways[drawn]]
        size_down, size_right = len(self.board), len(self.board[0])
        row = min(max(self.place[0] + down, 0), size_down - 1)
        return row, min(max(self.place[1] + right, 0), size_right - 1)

    def _told(self, *, stayed: bool = False) -> Message:
        rows = [
            " ".join(
                "P" if (r, c) == self.place else {"H": "O", "G": "G"}.get(field, "_")
                for c, field in enumerate(row)
            )
            for r, row in enumerate(self.board)
        ]
        said = [f"The lake after {self.turn} moves:", *rows, "P is not at G. Give the next move."]
        if stayed:
            said.append(
                "Your last reply did not change the place of P: give one move in ``` ```, such as ```Up```."
            )
        return Message("user", "\n".join([*said, f"Moves left: {self.asked.steps - self.turn}."]))


def move_of(text: str) -> int | None:
    """The number of the move, from 0, that the last ``` ``` of a reply names."""
    found = re.findall(r"```(.*?)```", text, re.DOTALL)
    named = found[-1].strip().lower() if found else ""
    if named in MOVES:
        return list(MOVES).index(named)
    return int(named) - 1 if named in ("1", "2", "3", "4") else None


# ---------------------------------------------------------------- lakes


def generator(seed: int) -> np.random.Generator:
    """As gymnasium.utils.seeding makes it."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))


def drawn(size: int, p: float, seed: int, way: int) -> list[str]:
    """A lake of size x size fields, each frozen with probability p, whose goal a search of `way` steps finds. EnvFault
    if none of MOST_DRAWN has one."""
    rng = generator(seed)
    for _ in range(MOST_DRAWN):
        fields = rng.choice(["F", "H"], (size, size), p=[p, 1 - p]).tolist()
        while True:
            row, column, goal_row, goal_column = (int(rng.integers(0, size)) for _ in range(4))
            if (row, column) != (goal_row, goal_column):
                break
        fields[row][column], fields[goal_row][goal_column] = "S", "G"
        if _has_way(fields, (row, column), way):
            return ["".join(row) for row in fields]
    raise EnvFault(
        f"of {MOST_DRAWN} lakes with size {size} and p {p:g} none has a way of {way} steps to the goal"
    )


def check_board(board: Sequence[str]) -> None:
    """ConfigError says what is wrong with a lake that is given."""
    fields = "".join(board)
    same = len(set(map(len, board))) == 1 and len(board) <= MOST_SIZE >= len(board[0])
    if not same or set(fields) - set("SFHG") or fields.count("S") != 1 or "G" not in fields:
        raise ConfigError(
            f"{AT}.board: expected rows of equal length, of the letters S (one), F, H and G; got {list(board)!r:.200}"
        )


def _drawn(task: Task, seed: int, way: int) -> list[str]:
    p = task.extra.get("p", 0.8)
    if type(p) not in (int, float) or not 0 < p <= 1:
        raise EnvFault(
            f"the column 'p' of task {task.uid} is {str(p)[:40]!r}; expected a number above 0, at most 1"
        )
    return drawn(_whole(task, "size", None, 2, MOST_SIZE), float(p), seed, way)


def _whole(task: Task, name: str, default: int | None, low: int, high: int) -> int:
    value = task.extra.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise EnvFault(
            f"the column {name!r} of task {task.uid} is {str(value)[:40]!r}; expected an integer from {low} to {high}"
        )
    return value


def _fields(board: Sequence[Sequence[str]]) -> list[tuple[Place, str]]:
    return [((r, c), field) for r, row in enumerate(board) for c, field in enumerate(row)]


def _has_way(board: Sequence[Sequence[str]], start: Place, most: int) -> bool:
    """Trinity's search: depth first; a field counts by the way that came to it first, not by the shortest."""
    open_places, seen = [(*start, 0)], set[Place]()
    while open_places:
        row, column, taken = open_places.pop()
        if taken > most or (row, column) in seen:
            continue
        seen.add((row, column))
        for down, right in ((1, 0), (0, 1), (-1, 0), (0, -1)):
            r, c = row + down, column + right
            if not (0 <= r < len(board) and 0 <= c < len(board)):
                continue
            if board[r][c] == "G":
                return True
            if board[r][c] != "H":
                open_places.append((r, c, taken + 1))
    return False


make = FrozenLake
