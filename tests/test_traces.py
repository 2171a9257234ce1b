"""Tracebacks of foreign code for the log: one for each place, bounded, whatever the error does."""

from __future__ import annotations

import pytest

from whet.guard.traces import MOST_TRACE, Traces, written


def raised(function: object, *given: object) -> BaseException:
    with pytest.raises(BaseException) as caught:
        function(*given)  # type: ignore[operator]
    return caught.value


def one(text: str, kind: type[Exception] = ValueError) -> None:
    raise kind(text)


def another(text: str) -> None:
    raise ValueError(text)


def test_an_error_is_new_by_its_kind_and_its_place_and_not_by_its_text() -> None:
    traces = Traces()
    assert traces.first(raised(one, "a"))
    assert not traces.first(raised(one, "b"))
    assert traces.first(raised(one, "a", KeyError))
    assert traces.first(raised(another, "a"))
    assert Traces().first(raised(one, "a"))


def deep(levels: int, text: str) -> None:
    if levels:
        return deep(levels - 1, text)
    try:
        one(text)
    except ValueError as error:
        raise RuntimeError("the end") from error


def test_a_traceback_has_its_causes_and_an_end() -> None:
    short = written(raised(deep, 3, "the cause"))
    assert short.index("ValueError: the cause") < short.index("RuntimeError: the end")
    assert 'raise RuntimeError("the end") from error' in short
    long = written(raised(deep, 500, "x" * 100_000))
    assert len(long) <= MOST_TRACE
    assert long.endswith("RuntimeError: the end\n")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise KeyboardInterrupt


def test_an_error_that_cannot_be_read_has_a_place() -> None:
    def fails() -> None:
        raise Unspeakable

    assert "(its text cannot be read) (test_traces.py:" in written(raised(fails))
