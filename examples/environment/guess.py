"""A game of several turns: guess a hidden digit; after a wrong guess the environment says whether it is higher."""

from __future__ import annotations

from typing import Any

from whet.envs.env import EnvStep, World
from whet.types import Message, Task

DIGITS = "0123456789"


def tasks(count: int = 64) -> list[dict[str, Any]]:
    """Rows with equal prompts; they only name the characters that there are."""
    return [{"prompt": f"ud{DIGITS}", "answer": n % 10} for n in range(count)]


class Guess:
    """A digit of the rollout's own; `turns` guesses. Reward: 1 for a hit, a little for a digit that fits the hints."""

    def __init__(self, task: Task, world: World, turns: int = 3) -> None:
        self.goal = world.rng.randrange(10)
        self.turns, self.low, self.high = turns, 0, 9

    async def first(self) -> list[Message]:
        return []

    async def step(self, reply: Message) -> EnvStep:
        self.turns -= 1
        said = reply.content.strip()
        if len(said) != 1 or said not in DIGITS:
            return EnvStep(reward=-0.5, parts={"hit": 0.0}, done=True)
        guess = int(said)
        if guess == self.goal:
            return EnvStep(reward=1.0, parts={"hit": 1.0}, done=True)
        fits = 0.2 if self.low <= guess <= self.high else -0.2
        if guess < self.goal:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        hint = "u" if guess < self.goal else "d"
        return EnvStep([Message("user", hint)], fits, {"hit": 0.0}, done=self.turns == 0)
