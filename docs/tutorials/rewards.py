"""A reward: a function in a file. The names of its parameters tell what it is given."""


def first_letter(response: str, answer: str) -> dict[str, float]:
    """1 for a reply that begins with the answer, and half of it if more follows. `answer` is a column of the data."""
    begins = response.startswith(answer)
    return {"score": float(begins) * (1.0 if response == answer else 0.5), "begins": float(begins)}
