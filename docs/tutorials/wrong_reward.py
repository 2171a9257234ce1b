"""A reward with a common mistake: it compares with a text that no reply ever has."""


def first_letter(response: str, answer: str) -> float:
    print(f"compared {response!r} with {answer + ' '!r}")  # goes to run.log
    return float(response == answer + " ")
