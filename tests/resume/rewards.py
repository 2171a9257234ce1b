"""A reward with noise: the noise must come back too when a step is repeated."""

import random

from whet.types import Task


def shared_letters(response: str, task: Task) -> float:
    hits = sum(a == b for a, b in zip(response, task.answer))
    return hits + 0.1 * random.random()
