"""A text game as an environment of gymnasium: a house of nine rooms, a key in one of them, and a door in another."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import gymnasium
from gymnasium import spaces

WIDTH = 3
ROOMS = "abcdefghi"
"""Row by row, from the north-west."""
KEY, DOOR = ROOMS.index("c"), ROOMS.index("g")
MOVES = {"n": (0, -1), "e": (1, 0), "s": (0, 1), "w": (-1, 0)}
PROMPT = "go"


class House(gymnasium.Env):
    """It tells the player's room, with * once the key is carried. `n`, `e`, `s` and `w` lead into the next room; a wall
    stops the player. Where key and door are is not told: every game has the same house, and a first room of its own.

    Rewards add up to 1 for a walk that ends at the door with the key. dense: each turn has the share of the shortest
    way that it won, or lost; else the last turn has everything.
    """

    def __init__(self, dense: bool = True) -> None:
        self.dense = dense
        self.action_space = spaces.Text(min_length=1, max_length=1, charset="".join(MOVES))
        self.observation_space = spaces.Text(min_length=1, max_length=2, charset=ROOMS + "*")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.room = int(self.np_random.integers(len(ROOMS)))
        self.carried = self.room == KEY
        self.whole = self.left()
        return self.told(), {"solved": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before = self.left()
        x, y = (at + by for at, by in zip(place(self.room), MOVES[action]))
        if 0 <= x < WIDTH and 0 <= y < WIDTH:
            self.room = y * WIDTH + x
        self.carried = self.carried or self.room == KEY
        solved = self.left() == 0
        reward = (before - self.left()) / self.whole if self.dense else float(solved)
        return self.told(), reward, solved, False, {"solved": solved}

    def left(self) -> int:
        """Moves of the shortest way from here."""
        if self.carried:
            return distance(self.room, DOOR)
        return distance(self.room, KEY) + distance(KEY, DOOR)

    def way(self) -> str:
        """A move of the shortest way."""
        (x, y), (u, v) = place(self.room), place(DOOR if self.carried else KEY)
        return "e" if x < u else "w" if x > u else "s" if y < v else "n"

    def told(self) -> str:
        return ROOMS[self.room] + ("*" if self.carried else "")


def place(room: int) -> tuple[int, int]:
    return room % WIDTH, room // WIDTH


def distance(a: int, b: int) -> int:
    """Moves between two rooms."""
    return sum(abs(p - q) for p, q in zip(place(a), place(b)))


def tasks(first: int = 0, count: int = 512) -> Iterator[dict[str, Any]]:
    """Rows with the seed of a game."""
    for seed in range(first, first + count):
        yield {"prompt": PROMPT, "game": seed}


def walks(count: int = 3000, right_share: float = 0.2) -> Iterator[dict[str, Any]]:
    """A player that knows the way in `right_share` of its turns, and else goes at random."""
    rng, env = random.Random("walks"), House()
    for seed in range(count):
        said, _ = env.reset(seed=seed)
        talk = [{"role": "user", "content": PROMPT}, {"role": "user", "content": said}]
        for _ in range(rng.randrange(8)):
            move = env.way() if rng.random() < right_share else rng.choice("nesw")
            said, *_ = env.step(move)
            talk += [{"role": "assistant", "content": move}, {"role": "user", "content": said}]
        yield {"prompt": talk, "response": env.way() if rng.random() < right_share else rng.choice("nesw")}
