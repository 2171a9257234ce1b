"""A tool that is a function."""


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b
