"""Sudoku as Trinity-RFT's sudoku_workflow plays it (0.5 and 0.6): `rollout.env.make: whet.envs.sudoku:make`.

Each turn the policy sees the board as it is, without what was said before, and fills cells. A row gives `puzzle` and
`solution`, lists of rows with 0 for an empty cell; else a board of 9 x 9 is drawn, the same for all rollouts of a task.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import isqrt

from whet.config.sections.base import Positive, Section
from whet.envs.arguments import section
from whet.envs.env import EnvFault, EnvStep, World
from whet.types import Json, Message, Task

SIZE = 9
Board = list[list[int]]


class SudokuArguments(Section):
    """`rollout.env.arguments`."""

    steps: Positive = 20
    """Replies of an episode; the policy is told how many are left."""
    moves: Positive = 5
    """Cells that a reply may fill."""


class Sudoku:
    """The board of one rollout."""

    def __init__(self, task: Task, world: World, **arguments: Json) -> None:
        """arguments: those of `SudokuArguments`."""
        self.task, self.asked, self.turn = task, section(SudokuArguments, arguments), 0
        if "puzzle" in task.extra:
            self.board, self.solution = (_board(task, name) for name in ("puzzle", "solution"))
            _check_solution(task, self.board, self.solution)
        else:
            self.board, self.solution = drawn(random.Random(task.uid))

    @classmethod
    def prepare(cls, arguments: dict[str, Json]) -> None:
        """ConfigError for arguments that no game can have."""
        section(SudokuArguments, arguments)

    async def first(self) -> list[Message]:
        return [self._told()]

    async def step(self, reply: Message) -> EnvStep:
        """-1 and the end for a reply that is no list of moves, or breaks a rule; 1 and the end for the solution."""
        self.turn += 1
        moves = moves_of(reply.content, len(self.board), self.asked.moves)
        if moves is None:
            return EnvStep(reward=-1.0, parts={"filled": 0.0, "solved": 0.0}, stop="malformed")
        for row, column, value in moves:
            if self.board[row][column] != 0:
                return EnvStep(reward=-1.0, parts={"filled": 0.0, "solved": 0.0})
            self.board[row][column] = value
        solved = self.board == self.solution
        parts = {"filled": float(len(moves)), "solved": float(solved)}
        if not solved and not is_valid(self.board):
            return EnvStep(reward=-1.0, parts=parts)
        if solved or self.turn == self.asked.steps:
            return EnvStep(reward=float(solved), parts=parts, stop=None if solved else "turns")
        prompt = list(self.task.prompt) if isinstance(self.task.prompt, tuple) else None
        return EnvStep([self._told()], 0.0, parts, done=False, history=prompt)

    def _told(self) -> Message:
        rows = [" ".join(map(str, row)) for row in self.board]
        left = f"Replies left: {self.asked.steps - self.turn}. A reply fills 1 to {self.asked.moves} cells."
        return Message("user", "\n".join(["The board, 0 for an empty cell:", *rows, left]))


def moves_of(text: str, size: int, most: int) -> list[tuple[int, int, int]] | None:
    """(row, column, value) of each line of a reply, rows and columns from 0; None if a line is something else."""
    found = []
    for line in text.split("\n"):
        if not (words := line.split()):
            continue
        if len(words) != 3 or not all(word.isdecimal() and len(word) < 4 for word in words):
            return None
        row, column, value = map(int, words)
        if not (row < size and column < size and 1 <= value <= size):
            return None
        found.append((row, column, value))
    return found if 1 <= len(found) <= most else None


def is_valid(board: Sequence[Sequence[int]]) -> bool:
    """Whether no number stands twice in a row, a column or a block."""
    return all(
        len(there) == len(set(there))
        for unit in units(board)
        if (there := [value for value in unit if value])
    )


def units(board: Sequence[Sequence[int]]) -> list[list[int]]:
    """The rows, the columns and the blocks."""
    size, block = len(board), isqrt(len(board))
    blocks = [
        [board[r + i][c + j] for i in range(block) for j in range(block)]
        for r in range(0, size, block)
        for c in range(0, size, block)
    ]
    return [list(row) for row in board] + [list(column) for column in zip(*board)] + blocks


def drawn(rng: random.Random) -> tuple[Board, Board]:
    """A board of which half is empty, and the full one it comes from."""
    solution = [[0] * SIZE for _ in range(SIZE)]
    _fill(solution, rng)
    board = [list(row) for row in solution]
    for place in rng.sample(range(SIZE * SIZE), SIZE * SIZE // 2):
        board[place // SIZE][place % SIZE] = 0
    return board, solution


def _fill(board: Board, rng: random.Random) -> bool:
    """Fill the empty cells; whether that can be."""
    place = next(((r, c) for r in range(SIZE) for c in range(SIZE) if not board[r][c]), None)
    if place is None:
        return True
    row, column = place
    for value in rng.sample(range(1, SIZE + 1), SIZE):
        board[row][column] = value
        if is_valid(board) and _fill(board, rng):
            return True
    board[row][column] = 0
    return False


def _board(task: Task, name: str) -> Board:
    """EnvFault for a column that is no board."""
    value = task.extra.get(name)
    size = len(value) if isinstance(value, list) else 0
    if (
        not isinstance(value, list)
        or not 4 <= size <= 25
        or isqrt(size) ** 2 != size
        or any(not isinstance(row, list) or len(row) != size for row in value)
        or any(type(cell) is not int or not 0 <= cell <= size for row in value for cell in row)
    ):
        raise EnvFault(
            f"the column {name!r} of task {task.uid} is {str(value)[:60]!r}; expected 4, 9, 16 or 25 rows of as many "
            "numbers, 0 for an empty cell"
        )
    return [list(row) for row in value]


def _check_solution(task: Task, puzzle: Board, solution: Board) -> None:
    """EnvFault for a solution that no reply can reach."""
    fits = len(puzzle) == len(solution) and all(
        cell in (0, full) for row, filled in zip(puzzle, solution) for cell, full in zip(row, filled)
    )
    if not fits or not is_valid(solution) or any(0 in row for row in solution):
        raise EnvFault(
            f"the column 'solution' of task {task.uid} does not solve its 'puzzle'; expected the same numbers, with "
            "all empty cells filled by the rules"
        )


make = Sudoku
