"""A look-up tool: a note holds a digit that only the tool can read. Data, tool and reward of look_up.yaml."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from whet.types import Task

NAMES = ["".join(letters) for letters in itertools.product("abcdefghij", repeat=3)]
HELD_OUT = set(random.Random(0).sample(NAMES, 100))


class Notes:
    """The tool of one rollout: `reset` gets the columns of its task, public methods are tools."""

    def reset(self, value: str) -> None:
        self._value = value

    def look_up(self, note: str) -> str:
        """Reads a note.

        Args:
            note: its name
        """
        return self._value


def tasks(split: str = "train") -> Iterator[dict[str, Any]]:
    """Questions with the hidden digit in a column of its own."""
    rng = random.Random(f"tasks {split}")
    for name in NAMES:
        if (name in HELD_OUT) == (split == "held_out"):
            yield {"prompt": f"{name}?", "value": str(rng.randrange(10))}


def demonstrations(
    count: int = 4000, call_share: float = 0.2, told_share: float = 0.75
) -> Iterator[dict[str, Any]]:
    """A teacher that mostly guesses: `call_share` of its first replies call the tool. After a result it repeats it, in
    `told_share` of the rows."""
    rng = random.Random("demonstrations")
    names = [name for name in NAMES if name not in HELD_OUT]
    for _ in range(count):
        name, value = rng.choice(names), str(rng.randrange(10))
        asked = {"role": "user", "content": f"{name}?"}
        call = json.dumps({"name": "look_up", "arguments": {"note": name}})
        if rng.random() < told_share:
            told = [{"role": "assistant", "content": call}, {"role": "tool", "content": value}]
            yield {"prompt": [asked, *told], "response": value}
        else:
            yield {"prompt": [asked], "response": call if rng.random() < call_share else value}


def right(response: str, task: Task) -> float:
    """1 if the last reply is the digit."""
    return float(response.endswith(task.extra["value"]))
