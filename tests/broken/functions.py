"""Data functions and rewards that go wrong, each in its own way."""

from collections.abc import Iterator

from whet.types import Task

Row = dict[str, str]


def rows(count: int) -> Iterator[Row]:
    yield {"prompt": "ab>", "answer": "ba"}
    raise ZeroDivisionError(f"after one of {count}")


def raising(response: str, task: Task) -> float:
    raise ValueError("bad luck")


def wrong_parameters(x: str, y: str) -> float:
    return 1.0


number = 3
