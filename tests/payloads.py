"""Texts that do something if anything evaluates them, and what shows that they did."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import socket
import termios
from array import array
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        "forked": f"{os}.waitpid({os}.fork() or {os}.makedirs('{file('forked')}', exist_ok=True) or {os}._exit(0), 0)",
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


def entries(names: list[str]) -> dict[str, dict[str, Any]]:
    """One row of each reasoning-gym dataset, as JSON keeps it."""
    made = {}
    for name in names:
        entry = reasoning_gym.create_dataset(name, size=1, seed=3)[0]
        made[name] = json.loads(json.dumps(entry, default=str))
    return made


def poisoned(entry: dict[str, Any], code: str) -> Iterator[dict[str, Any]]:
    """The row with the code for its answer, and with it for every text of its metadata."""
    yield {**entry, "answer": code}
    name = entry["metadata"]["source_dataset"]
    yield {**copy.deepcopy(entry), "metadata": {**_with(entry["metadata"], code), "source_dataset": name}}


def _with(value: Any, code: str) -> Any:
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


SECRET = "what-only-the-file-holds"


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Payloads, and what they have done so far."""

    codes: dict[str, str]
    """Those of `codes`, and `read`, `udp` and `unix`. `read` has the file in the text of its exception; the others
    send first a mark, then the file."""
    place: Path
    server: socket.socket
    pipe: int
    held: int
    """Bytes of the pipe, if nobody has read it."""
    outlets: dict[str, socket.socket]

    def fired(self) -> set[str]:
        """Names of codes that did what they are for. `udp with the file`: the file has left by this way."""
        found = fired(self.place, self.server)
        left = array("i", [0])
        fcntl.ioctl(self.pipe, termios.FIONREAD, left)
        if left[0] < self.held:
            found.add("read")
        for name, outlet in self.outlets.items():
            for sent in _received(outlet):
                found |= {name, f"{name} with the file"} if SECRET.encode() in sent else {name}
        return found


ALL = frozenset(
    ["system", "written", "forked", "classes", "socket", "read", "udp", "unix"]
    + ["udp with the file", "unix with the file"]
)
"""What has fired where nothing confines the codes of a `Watch`."""


@contextmanager
def watching(folder: Path) -> Iterator[Watch]:
    """Payloads whose deeds are seen in this folder. The file that they read is a pipe: it tells of a
    reader."""
    place, file, address = folder / "place", folder / "pipe", folder / "unix"
    place.mkdir()
    os.mkfifo(file)
    pipe = os.open(file, os.O_RDWR | os.O_NONBLOCK)
    with (
        listening() as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unix,
    ):
        try:
            held = os.write(pipe, SECRET.encode() * 1000)
            udp.bind(("127.0.0.1", 0))
            unix.bind(str(address))
            sockets: dict[str, tuple[socket.socket, str, object]] = {
                "udp": (udp, "2, 2", udp.getsockname()),
                "unix": (unix, "1, 2", str(address)),
            }
            made = codes(place, server.getsockname()[1])
            read = f"open('{file}', 'rb', 0).read({len(SECRET)})"
            made["read"] = f"int({read})"
            for name, (outlet, kind, to) in sockets.items():
                outlet.setblocking(False)
                sends = f"__import__('socket').socket({kind}).sendto"
                to = f"{int(socket.MSG_DONTWAIT)}, {to!r}"  # a full outlet holds up nobody
                made[name] = f"[{sends}('{MARK}'.encode(), {to}), {sends}({read}, {to})]"
            outlets = {name: outlet for name, (outlet, *_) in sockets.items()}
            yield Watch(codes=made, place=place, server=server, pipe=pipe, held=held, outlets=outlets)
        finally:
            os.close(pipe)


def _received(outlet: socket.socket) -> Iterator[bytes]:
    try:
        while True:
            yield outlet.recv(1 << 16)
    except BlockingIOError:
        return


def told(texts: Collection[str | None]) -> bool:
    """Whether a text has what the file holds."""
    return any(SECRET in (text or "") for text in texts)
