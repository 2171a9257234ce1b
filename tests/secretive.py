"""Foreign code that says every secret it gets to know, in every way it can."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import quote

import torch

from whet.batch import Batch, Loss, Outputs

if said := os.environ.get("SAID_AT_IMPORT_TOKEN"):
    print("imported with", said)
    print("imported with", said, file=sys.stderr)


def quoting(response: str, task: object, **arguments: object) -> float:
    """Says its arguments in its exception."""
    raise ValueError(f"refused with {arguments}")


def encoding(response: str, task: object, *, api_key: str) -> float:
    """The same encoded, at each of the three places in base64."""
    codes = [base64.b64encode(b"x" * n + api_key.encode()).decode() for n in range(3)]
    raise ValueError(f"{quote(api_key, safe='')} {codes} {api_key[::-1]} {api_key.encode().hex()}")


def cutting(response: str, task: object, *, api_key: str) -> float:
    """Where an exception's text is cut, in the midst of the secret."""
    raise ValueError("." * (400 - len(api_key) // 2) + api_key)


def telling(response: str, task: object) -> dict[str, object]:
    """Says its environment, and names parts by it."""
    print(os.environ["JUDGE_KEY"])
    print(os.environ["JUDGE_KEY"], file=sys.stderr)
    os.write(2, os.environ["PLAIN"].encode())
    subprocess.run(["env"], check=True)
    return {
        "score": 0.5 + 0.1 * len(set(response)),
        os.environ["JUDGE_KEY"]: 1.0,
        "answer": os.environ["PLAIN"],
    }


def judging(response: str, task: object) -> float:
    raise ValueError(f"{os.environ['JUDGE_KEY']} {os.environ['PLAIN']} {dict(os.environ)}")


def loss(batch: Batch, out: Outputs) -> Loss:
    raise ZeroDivisionError(f"the loss saw {os.environ['LOSS_TOKEN']}")


def rows(api_key: str) -> Iterator[dict[str, str]]:
    raise OSError(f"no rows for {api_key}")
    yield {}


def printing(batch: Batch, out: Outputs) -> Loss:
    """In a rank, to its standard error."""
    if torch.distributed.get_rank() == 0:
        print(os.environ["LOSS_TOKEN"], "sk-of-the-config-1234", file=sys.stderr, flush=True)
    raise ZeroDivisionError("sk-of-the-config-1234")
