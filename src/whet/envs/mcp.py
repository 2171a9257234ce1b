"""Tools of MCP servers: programs that are started here, and speak the Model Context Protocol over their standard input
and output. Needs the package `mcp` (`whet[mcp]`).

The tools of a server are listed once in each process, and are the same ever after: a server that offers others later is
broken. All episodes of a process share one server. Its transport is ours, not the package's: a server stays in the
process group of its host, so that it ends with it, and what it says is bounded.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack, suppress
from functools import cache, partial
from threading import Thread
from typing import Any, cast

from pydantic import Field, model_validator

from whet.config.environments import AT
from whet.config.sections.base import Above0, Section
from whet.envs.env import EnvFault
from whet.envs.schemas import check_schema
from whet.envs.tools import Tool, ToolError
from whet.guard.foreign import plain, said
from whet.guard.last import MARK
from whet.secrets import redact
from whet.types import ConfigError, Json, ToolSpec

INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
"""Variables of this process that a server gets; the others may be secrets."""
MOST_LINE = 16 * 2**20
"""Bytes of one message of a server."""
MOST_STDERR = 250
"""Characters of a server's standard error that an error repeats: the last ones."""
MOST_SHOWN = 200
"""Characters of an answer that is no message, in the error that it becomes."""
KEPT_STDERR = 8 * MOST_STDERR
"""That are remembered: a cut may be in the middle of a secret, of which the rest would be told."""
MOST_PAGES = 100
"""Of its list of tools."""
CHECK_S = 10.0
"""How long a server has, after a call without an answer, to list its tools once more; one that does not is ended."""
STOP_S = 1.0
"""How long a server may take to end once its input is closed."""


class McpServer(Section):
    """A server."""

    command: tuple[str, ...]
    """The program and its arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of its environment beside those of INHERITED."""
    cwd: str | None = None
    """Its working directory. Default: that of the run."""
    tools: tuple[str, ...] = ()
    """Those of its tools that the policy is told of. Default: all."""
    prefix: str = ""
    """Stands before the names of its tools, for two servers with equal names."""
    start_timeout_s: Above0 = 60.0
    """Longest time until it has listed its tools."""

    @model_validator(mode="after")
    def _can_start(self) -> McpServer:
        if not self.command:
            raise ConfigError(f"{AT}.mcp.command is empty; expected a program and its arguments")
        return self

    @property
    def key(self) -> str:
        """Names it in this process."""
        return self.model_dump_json()


def tools_of(server: McpServer) -> list[Tool]:
    """The tools of a server. ConfigError if it cannot be started, or offers what cannot be used."""
    before = partial(_session, server)
    return [Tool(spec, partial(_call, server, spec.name), before=before) for spec in listed_tools(server.key)]


@cache
def listed_tools(key: str) -> tuple[ToolSpec, ...]:
    """The tools of a server, which is started and ended for this."""
    server = McpServer.model_validate_json(key)
    found: list[tuple[ToolSpec, ...] | BaseException] = []

    async def ask() -> tuple[ToolSpec, ...]:
        session = Session(server, None)
        try:
            return (await asyncio.shield(session.opened))[1]
        finally:
            await session.end()

    def work() -> None:
        try:
            found.append(asyncio.run(ask()))
        except BaseException as error:  # noqa: BLE001  raised below
            found.append(error)

    thread = Thread(target=work, name="whet-mcp")  # an event loop may run in this one
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, BaseException):
        raise ConfigError(f"{AT}.mcp: {said(result)}") from result
    names = [spec.name.removeprefix(server.prefix) for spec in result]
    if missing := [name for name in server.tools if name not in names]:
        raise ConfigError(
            f"{AT}.mcp.tools: the server {server.command[0]!r} has no {', '.join(missing)}; it has: "
            f"{', '.join(names) or 'none'}"
        )
    wanted = server.tools or names
    return tuple(check_schema(spec) for spec, name in zip(result, names) if name in wanted)


# ---------------------------------------------------------------- calls

sessions: dict[str, Session] = {}
"""The servers that this process has started, by their key."""


async def _session(server: McpServer) -> Session:
    """The one of this process, started if there is none. EnvFault if it cannot be."""
    session = sessions.get(server.key)
    if session is None or session.over or session.loop is not asyncio.get_running_loop():
        session = sessions[server.key] = Session(server, listed_tools(server.key))
    await asyncio.shield(session.opened)
    return session


async def _call(server: McpServer, name: str, /, **arguments: Json) -> list[str] | Json:
    """What a tool returns. ToolError if it says that it failed, EnvFault if the server is broken."""
    session = await _session(server)
    client, _ = session.opened.result()
    try:
        result = await client.call_tool(name.removeprefix(server.prefix), arguments)
    except asyncio.CancelledError:
        session.check()
        raise
    except Exception as error:  # the server's answer, or the end of it
        await asyncio.sleep(0)  # its end is known by now
        if not session.over and _is_answer(error):
            raise ToolError(said(error)) from error
        why = session.transport.how_it_ended() or said(error)
        raise EnvFault(f"the MCP server {server.command[0]!r} broke in {name}: {why}") from error
    texts = [_text(part) for part in result.content]
    if result.is_error:
        raise ToolError("\n".join(texts) or f"{name} failed and does not say why")
    return texts or result.structured_content


def _is_answer(error: Exception) -> bool:
    """The server answered, with an error of JSON-RPC."""
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED, PARSE_ERROR

    return isinstance(error, MCPError) and error.code not in (CONNECTION_CLOSED, PARSE_ERROR)


def _text(part: Any) -> str:
    """A part of a result; of one that is no text, its kind."""
    return part.text if part.type == "text" else f"[{part.type}: not shown]"


def messages_of(line: bytes) -> list[Any]:
    """The messages of a line of a server: one, or those of a batch. Half a letter, as of a text that was cut (half a
    surrogate pair, or bytes that are no UTF-8), is a mark in its place. The package refuses what is no message, and its
    call would have no answer: where it names its call, it becomes an error of it. ValueError or RecursionError for a
    line that is no JSON."""
    from mcp_types import jsonrpc_message_adapter

    with suppress(ValueError):
        return [jsonrpc_message_adapter.validate_json(line, by_name=False)]
    found, out = json.loads(line.decode("utf-8", "replace")), []
    for each in found if isinstance(found, list) else [found]:
        text = json.dumps(each, ensure_ascii=False).encode("utf-8", "replace")
        with suppress(ValueError):
            try:
                out.append(jsonrpc_message_adapter.validate_json(text, by_name=False))
            except ValueError:
                out.append(_no_answer(each, text.decode()))
    return out


def _no_answer(answer: Json, text: str) -> Any:
    """The error of a call whose answer is no message. ValueError if it is not known to be an answer."""
    from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError

    if not isinstance(answer, dict) or "method" in answer or not answer.keys() & {"result", "error"}:
        raise ValueError("no answer")
    if answer.get("id") is None:
        raise ValueError("an answer to an unknown call")
    why = f"its answer is no response of JSON-RPC 2.0: {text[:MOST_SHOWN]}"
    return JSONRPCError(jsonrpc="2.0", id=answer["id"], error=ErrorData(code=PARSE_ERROR, message=why))


class Session:
    """One server and the connection to it; `end` it. A task of its own holds both: the package wants them opened and
    closed by the same one."""

    def __init__(self, server: McpServer, expected: tuple[ToolSpec, ...] | None) -> None:
        """expected: the tools that it must offer. None: any."""
        self.server, self.expected = server, expected
        self.loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[tuple[Any, tuple[ToolSpec, ...]]] = self.loop.create_future()
        """The client, and the tools. EnvFault if it cannot be started."""
        self.stop = asyncio.Event()
        self.checking: asyncio.Task[None] | None = None
        self.transport = Stdio(server, self.stop)
        self.task = self.loop.create_task(self._serve())

    @property
    def over(self) -> bool:
        """It takes no calls any more."""
        return self.stop.is_set() or self.task.done()

    def check(self) -> None:
        """End it if it does not answer any more."""
        if self.checking is None or self.checking.done():
            self.checking = self.loop.create_task(self._check())

    async def _check(self) -> None:
        try:
            async with asyncio.timeout(CHECK_S):
                await self.opened.result()[0].list_tools()
        except Exception:  # noqa: BLE001  whatever it is, it is no list
            self.stop.set()

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait({self.task})

    async def _serve(self) -> None:
        name = self.server.command[0]
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.server.start_timeout_s):
                    client = await stack.enter_async_context(_client(self.transport))
                    found = await _list(client, self.server.prefix)
                if self.expected is not None and any(spec not in found for spec in self.expected):
                    raise EnvFault(
                        f"the MCP server {name!r} offers different tools than at the start of the run"
                    )
                self.opened.set_result((client, found))
                await self.stop.wait()
        except (Exception, asyncio.CancelledError) as error:
            if not self.opened.done():
                self.opened.set_exception(self._failed(error))
                self.opened.exception()  # where nobody waits
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self.stop.set()

    def _failed(self, error: BaseException) -> Exception:
        """What those are told who wait for a start that failed."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, EnvFault | ConfigError):
            return error
        late = f"it did not list its tools within start_timeout_s={self.server.start_timeout_s:g}"
        why = late if isinstance(error, TimeoutError) else self.transport.how_it_ended() or said(error)
        return EnvFault(f"the MCP server {self.server.command[0]!r} could not be started: {why}")


def _client(transport: Stdio) -> Any:
    """The package's client. ConfigError without the package."""
    try:
        from mcp import Client
    except ImportError as error:
        raise ConfigError(
            f"MCP servers need the package mcp ({error}): pip install 'whet[mcp]', or remove {AT}.mcp"
        ) from error
    return Client(transport, cache=None)  # type: ignore[arg-type]


async def _list(client: Any, prefix: str) -> tuple[ToolSpec, ...]:
    """All tools of a server, page by page."""
    found: list[ToolSpec] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        told = [ToolSpec(prefix + t.name, t.description or "", t.input_schema) for t in page.tools]
        found += [ToolSpec.from_json(spec.to_json()) for spec in told]  # as a task brings it to a host
        cursor = page.next_cursor
        if cursor is None:
            return tuple(found)
    raise EnvFault(f"its list of tools has more than {MOST_PAGES} pages")


class Stdio:
    """The transport of a server's standard input and output, as the package wants it: a message on each line."""

    def __init__(self, server: McpServer, stop: asyncio.Event) -> None:
        """stop: set when the server ends."""
        self.server, self.stop = server, stop
        self.ended = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self.why = ""
        self._stderr = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[Any] = []

    def how_it_ended(self) -> str:
        """Why there is no server any more; empty while there is one."""
        if self.process is None or not self.ended.is_set():
            return self.why
        code = self.process.returncode
        last = plain(redact(self._stderr.strip()))[-MOST_STDERR:]
        said = f"; its last output: {last}" if last else ""
        return (self.why or f"it ended{'' if code is None else f' with exit status {code}'}") + said

    async def __aenter__(self) -> Any:
        import anyio

        inherited = (*INHERITED, MARK)  # by which what it starts is found when this process is killed
        env = {key: os.environ[key] for key in inherited if key in os.environ} | dict(self.server.env)
        pipe = asyncio.subprocess.PIPE
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.server.command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=self.server.cwd,
                limit=MOST_LINE,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            self.why = said(error)
            raise EnvFault(
                f"the MCP server {self.server.command[0]!r} could not be started: {self.why}"
            ) from error
        heard_in, heard_out = anyio.create_memory_object_stream[Any](0)
        told_in, told_out = anyio.create_memory_object_stream[Any](0)
        self._streams = [heard_in, heard_out, told_in, told_out]
        work = (self._read(heard_in), self._write(told_out), self._errors())
        self._tasks = [asyncio.create_task(w) for w in work]
        return heard_out, told_in

    async def __aexit__(self, *error: object) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            await self._waited()
        finally:
            transport = cast(Any, self.process)._transport  # a child of the server may hold its pipes open
            transport.close()  # which kills it
            for task in self._tasks:
                task.cancel()
            for stream in self._streams:
                stream.close()
        await self._waited()

    async def _waited(self) -> None:
        """The server has ended, or the time for it."""
        assert self.process is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self.process.wait()

    async def _read(self, heard: Any) -> None:
        """Messages of the server, up to its end."""
        import anyio
        from mcp.shared.message import SessionMessage

        assert self.process is not None
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                try:
                    messages = messages_of(line)
                except (ValueError, RecursionError):
                    continue  # what a library prints there, for one
                for message in messages:
                    await heard.send(SessionMessage(message))
            await self._waited()
        except ValueError:
            self.why = f"a message of it is longer than {MOST_LINE} bytes"
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # its end of the pipe is closed: whoever waits for it sees `ended`
        finally:
            self.ended.set()
            self.stop.set()
            heard.close()

    async def _write(self, told: Any) -> None:
        """What it is told."""
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(OSError):
            async for message in told:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                self.process.stdin.write(text.encode() + b"\n")
                await self.process.stdin.drain()

    async def _errors(self) -> None:
        """The end of what it prints."""
        assert self.process is not None
        assert self.process.stderr is not None
        while block := await self.process.stderr.read(65536):
            self._stderr = (self._stderr + block.decode(errors="replace"))[-KEPT_STDERR:]
