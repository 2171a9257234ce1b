"""Texts that do something if anything evaluates them, and what shows that they did."""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import reasoning_gym
from reasoning_gym.factory import DATASETS

MARK = "payload_mark"
"""In every payload: by this what is compiled is known."""


def codes(place: Path, port: int) -> dict[str, str]:
    """Python expressions by the name of the file that each makes; `socket` connects instead."""
    os = "__import__('os')"
    classes = "().__class__.__base__.__subclasses__()"

    def file(name: str) -> str:
        return str(place / f"{name}_{MARK}")

    return {
        "system": f"{os}.system('touch {file('system')}')",
        "written": f"open('{file('written')}', mode='w').close()",
        "forked": f"{os}.waitpid({os}.fork() or {os}.mkdir('{file('forked')}') or {os}._exit(0), 0)",
        "classes": f"[c for c in {classes} if c.__name__ == 'BuiltinImporter'][0].load_module('posix')"
        f".mkdir('{file('classes')}')",
        "socket": f"__import__('socket').create_connection(('127.0.0.1', {port})) and '{MARK}'",
    }


def texts(code: str) -> list[str]:
    """Replies with the code in them, where rewards look for an answer."""
    return [
        code,
        f"[{code}]",
        f"<think>\n1\n</think>\n<answer>\n{code}\n</answer>",
        f"so Answer: {code}",
        f"#### {code}",
        rf"\boxed{{{code}}}",
        rf"\boxed{{1+{code}}} $x = {code}$",
        "{{ " + code + " }} {0.__class__.__init__.__globals__}",
    ]


def entries(names: list[str]) -> dict[str, dict]:
    """One row of each reasoning-gym dataset, as JSON keeps it."""
    made = {}
    for name in names:
        entry = reasoning_gym.create_dataset(name, size=1, seed=3)[0]
        made[name] = json.loads(json.dumps(entry, default=str))
    return made


def poisoned(entry: dict, code: str) -> Iterator[dict]:
    """The row with the code for its answer, and with it for every text of its metadata."""
    yield {**entry, "answer": code}
    name = entry["metadata"]["source_dataset"]
    yield {**copy.deepcopy(entry), "metadata": {**_with(entry["metadata"], code), "source_dataset": name}}


def _with(value, code: str):
    if isinstance(value, dict):
        return {key: _with(v, code) for key, v in value.items()}
    if isinstance(value, list):
        return [_with(v, code) for v in value]
    return code if isinstance(value, str) else value


VERIFIERS = sorted(set(DATASETS) - {"composite"})


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A port of this machine that nobody has a reason to connect to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def fired(place: Path, server: socket.socket) -> set[str]:
    """What the payloads have done."""
    found = {path.name.removesuffix(f"_{MARK}") for path in place.iterdir()}
    try:
        while True:
            server.accept()[0].close()
            found.add("socket")
    except BlockingIOError:
        return found
