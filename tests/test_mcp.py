"""MCP servers: those that the package `mcp` makes, and one written here, whose lines do what no server should."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet import secrets
from whet.config.schema import EnvironmentConfig
from whet.envs import mcp as mcp_module
from whet.envs.arguments import section
from whet.envs.env import EnvFault, World
from whet.envs.hosts import EnvHosts
from whet.envs.mcp import McpServer, tools_of
from whet.envs.tool_env import Limits, ToolEnv, tools
from whet.types import ConfigError, Message, Task, ToolCall

pytest.importorskip("mcp", reason="needs the package mcp (whet[mcp])")

PACKAGE = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fails(why: str) -> str:
    raise ValueError(why)


server.run("stdio")
'''

BY_HAND = '''
"""A server of the protocol's lines: JSON-RPC, a message on each line. argv: a file that notes its starts, and modes."""
import json, os, subprocess, sys, time

note, *modes = sys.argv[1:]
with open(note, "a") as file:
    file.write(f"{os.getpid()}\\n")
starts = len(open(note).read().split())


def answer(to, **what):
    print(json.dumps({"jsonrpc": "2.0", "id": to, **what}), flush=True)


def text(*parts, **more):
    return {"content": [{"type": "text", "text": part} for part in parts], **more}


if "dies_first" in modes:
    sys.exit("no database")
if "chatty" in modes:
    print("starting up ...", flush=True)
    print("[" * 100_000, flush=True)
names = ["echo", "env", "die", "hang", "error", "refuse", "image", "huge", "block"]
if "changes" in modes and starts > 1:
    names = ["other"]
schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": []}
for line in sys.stdin:
    asked = json.loads(line)
    method, number = asked["method"], asked.get("id")
    if method == "initialize":
        if "silent" in modes:
            time.sleep(1000)
        version = asked["params"]["protocolVersion"]
        info = {"name": "by hand", "version": "1"}
        answer(number, result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
    elif method == "tools/list":
        page = int((asked.get("params") or {}).get("cursor") or 0)
        listed = [{"name": name, "description": f"does {name}", "inputSchema": schema} for name in names]
        more = {"nextCursor": str(page + 3)} if page + 3 < len(names) else {}
        answer(number, result={"tools": listed[page : page + 3], **more})
    elif method == "tools/call":
        name, given = asked["params"]["name"], asked["params"].get("arguments") or {}
        if "raw" in modes:
            sys.stdout.buffer.write(given["text"].replace("ID", str(number)).encode("latin-1") + b"\\n")
            sys.stdout.buffer.flush()
        elif name == "echo":
            if "browser" in modes:
                browser = subprocess.Popen(["sleep", "600"], start_new_session=True)
                open(note + ".browser", "w").write(str(browser.pid))
            answer(number, result=text(given.get("text", ""), str(os.getpid())))
        elif name == "env":
            answer(number, result=text(",".join(sorted(os.environ)) + " " + os.environ.get("GIVEN", "")))
        elif name == "die":
            print("swordfish-42-swordfish" + "x" * 225, file=sys.stderr, flush=True)
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(9)
        elif name == "error":
            answer(number, result=text("no such", "document", isError=True))
        elif name == "refuse":
            answer(number, error={"code": -32602, "message": "unknown document"})
        elif name == "image":
            image = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
            answer(number, result={"content": [image, {"type": "text", "text": "a cat"}]})
        elif name == "block":
            time.sleep(1000)
        elif name == "huge":
            sys.stdout.write("x" * 100_000_000)
            sys.stdout.flush()
    elif number is not None:
        answer(number, error={"code": -32601, "message": "Method not found"})
'''


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No server of another test."""
    mcp_module.listed_tools.cache_clear()
    mcp_module.sessions.clear()
    yield
    mcp_module.sessions.clear()


@pytest.fixture
def by_hand(tmp_path: Path) -> Callable[..., McpServer]:
    program = tmp_path / "server.py"
    program.write_text(BY_HAND)

    def make(*modes: str, **over: Any) -> McpServer:
        return McpServer(
            command=(sys.executable, "-u", str(program), str(tmp_path / "starts"), *modes), **over
        )

    return make


@pytest.fixture
def starts(tmp_path: Path) -> Callable[[], list[int]]:
    """The processes of the server that were started."""
    return lambda: [int(pid) for pid in (tmp_path / "starts").read_text().split()]


def story(server: McpServer, play: Callable[[ToolEnv], Awaitable[Any]], **limits: Any) -> Any:
    """What comes of an episode with the tools of a server."""

    async def played() -> Any:
        async with asyncio.timeout(60):
            task = Task(uid=0, source="s", prompt=(Message("user", "q"),))
            env = ToolEnv(task, World(1, no_reply), tools=tools_of(server), limits=Limits(**limits))
            assert await env.first() == []
            return await play(env)

    return asyncio.run(played())


async def no_reply(*asked: Any) -> Message:
    raise NotImplementedError


async def call(env: ToolEnv, name: str, **arguments: Any) -> str:
    return (await calls(env, (name, arguments)))[0]


async def calls(env: ToolEnv, *asked: tuple[str, dict[str, Any]]) -> list[str]:
    made = tuple(ToolCall(name, arguments, f"c{n}") for n, (name, arguments) in enumerate(asked))
    step = await env.step(Message("assistant", "", tool_calls=made))
    assert step.fault is None
    return [message.content for message in step.messages]


def gone(pid: int) -> bool:
    """The process has ended; a moment passes until it has."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_a_server_of_the_package(tmp_path: Path) -> None:
    program = tmp_path / "sums_server.py"
    program.write_text(PACKAGE)
    server = McpServer(command=(sys.executable, str(program)))
    specs = {tool.spec.name: tool.spec for tool in tools_of(server)}
    assert list(specs) == ["add", "fails"]
    assert specs["add"].description == "Add two numbers."
    assert specs["add"].parameters["required"] == ["a"]
    assert specs["add"].parameters["properties"]["a"]["type"] == "integer"

    async def play(env: ToolEnv) -> list[str]:
        return await calls(
            env, ("add", {"a": 2}), ("add", {"a": "x"}), ("fails", {"why": "no paper"}), ("add", {"a": 5})
        )

    found = story(server, play)
    assert found[0] == "3"
    assert found[1] == "Error: add was not called: argument 'a' is \"x\"; expected an integer"
    assert found[2].startswith("Error: Error executing tool fails")
    assert found[3] == "6"


def test_tools_are_read_page_by_page_and_once(
    by_hand: Callable[..., McpServer], starts: Callable[[], list[int]]
) -> None:
    server = by_hand("chatty")
    names = [tool.spec.name for tool in tools_of(server)]
    assert names == ["echo", "env", "die", "hang", "error", "refuse", "image", "huge", "block"]
    tools_of(server)
    (pid,) = starts()
    assert gone(pid)
    some = by_hand(tools=("env", "echo"), prefix="files_")
    assert [tool.spec.name for tool in tools_of(some)] == ["files_echo", "files_env"]
    with pytest.raises(ConfigError, match=r"has no nothing; it has: echo, env"):
        tools_of(by_hand(tools=("nothing",)))


def test_episodes_of_a_process_share_a_server(
    by_hand: Callable[..., McpServer], starts: Callable[[], list[int]]
) -> None:
    async def play(env: ToolEnv) -> list[str]:
        first = await calls(env, *[("files_echo", {"text": str(n)}) for n in range(5)])
        return [*first, await call(env, "files_env")]

    found = story(by_hand(prefix="files_", env={"GIVEN": "this"}), play)
    _, pid = starts()
    assert found[:5] == [f"{n}\n{pid}" for n in range(5)]
    names, given = found[5].split(" ")
    assert given == "this"
    assert set(names.split(",")) <= {*mcp_module.INHERITED, "GIVEN", "LC_CTYPE"}
    assert gone(pid)


def test_what_a_tool_answers_is_told(by_hand: Callable[..., McpServer]) -> None:
    async def play(env: ToolEnv) -> list[str]:
        return await calls(env, ("error", {}), ("refuse", {}), ("image", {}))

    assert story(by_hand(), play) == [
        "Error: no such\ndocument", "Error: unknown document", "[image: not shown]\na cat",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "told"),
    [("cut \\ud83d here", "cut ? here"), ("caf\xe9", "caf\ufffd"), ("\\ud83d\\ude00", "\U0001f600")],
)
def test_half_a_letter_loses_no_answer(by_hand: Callable[..., McpServer], written: str, told: str) -> None:
    """As of a text that was cut in the middle of an emoji: the call had no answer, and was late."""
    line = (
        '{"jsonrpc": "2.0", "id": ID, "result": {"content": [{"type": "text", "text": "' + written + '"}]}}'
    )
    assert story(by_hand("raw"), lambda env: call(env, "echo", text=line), tool_timeout_s=20) == told


def test_a_batch_has_several_answers(by_hand: Callable[..., McpServer]) -> None:
    """As protocol 2025-03-26 has it."""
    line = (
        '[{"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": ""}}, '
        '{"jsonrpc": "2.0", "id": ID, "result": {"content": [{"type": "text", "text": "found"}]}}]'
    )
    assert story(by_hand("raw"), lambda env: call(env, "echo", text=line), tool_timeout_s=20) == "found"


@pytest.mark.parametrize(
    "line",
    [
        '{"jsonrpc": "2.0", "id": ID, "result": "found"}',
        '{"id": ID, "result": {"content": []}}',
        '[{"jsonrpc": "2.0", "id": ID, "result": ["found"]}]',
        '{"jsonrpc": "2.0", "id": ID, "error": "no such document"}',
    ],
)
def test_an_answer_that_is_no_json_rpc_is_a_fault_at_once(
    by_hand: Callable[..., McpServer], line: str
) -> None:
    """It was dropped, and its call was late."""

    async def play(env: ToolEnv) -> str:
        with pytest.raises(EnvFault) as error:
            await call(env, "echo", text=line)
        return str(error.value)

    said = story(by_hand("raw"), play, tool_timeout_s=60)
    assert "broke in echo: " in said
    assert "its answer is no response of JSON-RPC 2.0: " + line.strip("[]").split("ID")[0] in said


@pytest.mark.parametrize(
    "line", ['{"id": 1, "level": "info"}', "7", "null", '{"result": 1}', '{"id": null, "error": 1}']
)
def test_what_a_server_prints_is_no_answer(line: str) -> None:
    assert not mcp_module.messages_of(line.encode())


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("die", "broke in die: it ended with exit status 9; its last output: [^-]*out of memory"),
        ("huge", "broke in huge: a message of it is longer than 16777216 bytes"),
    ],
)
def test_a_server_that_dies_is_a_fault_and_is_started_again(
    by_hand: Callable[..., McpServer], starts: Callable[[], list[int]], tool: str, said: str
) -> None:
    secrets.learn("TEST_TOKEN", "swordfish-42-swordfish")

    async def play(env: ToolEnv) -> str:
        with pytest.raises(EnvFault, match=said):
            await calls(env, ("echo", {}), (tool, {}))
        return await call(env, "echo", text="again")

    assert story(by_hand(), play) == f"again\n{starts()[2]}"
    assert len(starts()) == 3  # to be listed, to be played, and once more
    assert all(gone(pid) for pid in starts())


def test_a_call_without_an_answer_is_late_and_a_server_that_answers_nothing_is_ended(
    by_hand: Callable[..., McpServer], starts: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_module, "CHECK_S", 1.0)

    async def play(env: ToolEnv) -> list[str]:
        found = [await call(env, "hang"), await call(env, "echo", text="still here")]
        (session,) = mcp_module.sessions.values()
        assert session.checking is not None
        await session.checking  # it lists its tools
        assert not session.over
        found.append(await call(env, "block"))
        await session.checking
        assert session.over
        return [*found, await call(env, "echo", text="a new one")]

    found = story(by_hand(), play, tool_timeout_s=1.5)
    _, first, second = starts()
    hang, block = (f"Error: timeout: {name} took more than 1.5 s" for name in ("hang", "block"))
    assert found == [hang, f"still here\n{first}", block, f"a new one\n{second}"]


def test_a_server_that_offers_other_tools_later_is_a_fault(by_hand: Callable[..., McpServer]) -> None:
    async def play(env: ToolEnv) -> None:
        with pytest.raises(EnvFault, match="offers different tools than at the start of the run"):
            await call(env, "echo")

    story(by_hand("changes"), play)


@pytest.mark.parametrize(
    ("modes", "over", "said"),
    [
        (
            ("dies_first",),
            {},
            "could not be started: it ended with exit status 1; its last output: no database",
        ),
        (("silent",), {"start_timeout_s": 1.0}, r"did not list its tools within start_timeout_s=1"),
        ((), {"command": ("/no/such/program",)}, "'/no/such/program' could not be started: .*No such file"),
        ((), {"cwd": "/no/such/folder"}, "could not be started: .*No such file"),
    ],
)
def test_a_server_that_does_not_start_is_refused(
    by_hand: Callable[..., McpServer], modes: tuple[str, ...], over: dict[str, Any], said: str
) -> None:
    fields = {"command": by_hand(*modes).command, **over}
    with pytest.raises(ConfigError, match=said):
        tools_of(McpServer(**fields))


def test_what_cannot_be_is_refused() -> None:
    for fields, said in [
        ({"command": "npx server"}, r'command: got "npx server", expected a list \(each: text\)'),
        ({"command": ("x",), "env": {"A": 1}}, 'env: got {"A": 1}, expected names, each with text'),
        ({"command": ("x",), "start_timeout_s": 0}, "start_timeout_s: got 0, expected a number > 0"),
    ]:
        with pytest.raises(ConfigError, match=said):
            section(McpServer, fields)  # type: ignore[arg-type]


def test_without_the_package_it_is_said_what_is_missing(
    by_hand: Callable[..., McpServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"MCP servers need the package mcp .*: pip install 'whet\[mcp\]'"):
        tools_of(by_hand())


def test_a_host_plays_with_a_server_that_ends_with_it(
    by_hand: Callable[..., McpServer], starts: Callable[[], list[int]], tmp_path: Path
) -> None:
    """And what the server has started in a session of its own, as a browser."""
    arguments = {"mcp": [{"command": list(by_hand("browser").command), "tools": ["echo"]}]}
    task = Task(uid=0, source="s", prompt=(Message("user", "q"),))
    task = replace(task, tools=tuple(tools(task, World(1, no_reply), **arguments).tools))
    hosts = EnvHosts(EnvironmentConfig(make="whet.envs.tool_env:tools", arguments=arguments))

    async def play() -> str:
        async with asyncio.timeout(60):
            env = hosts.make(task, World(1, no_reply))
            assert await env.first() == []
            found = await calls(env, ("echo", {"text": "hello"}))  # type: ignore[arg-type]
            await env.close()
            return found[0]

    try:
        text, pid = asyncio.run(play()).split("\n")
        assert text == "hello"
        assert starts()[2:] == [int(pid)]  # listed here, listed in the host, played
        os.kill(hosts.processes[0].line.process.pid, signal.SIGKILL)
        assert gone(int(pid))
        assert gone(int((tmp_path / "starts.browser").read_text()))
    finally:
        hosts.close()
    assert json.dumps([spec.to_json() for spec in task.tools])
