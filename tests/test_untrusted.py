"""What others have written: links in a run's folder, a tokenizer whose code gives up, nonsense of a host."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models

import test_env_zoo as zoo
from tiny import RUN
from whet.api import enter
from whet.bench import set_up
from whet.config.load import load
from whet.config.schema import Config, EnvironmentConfig
from whet.data.timed import decoded
from whet.data.tokenizer_files import check_files
from whet.envs.hosts import EnvHosts
from whet.rollout.http.keeper import EngineLog
from whet.track.files import RunLock, lock_opened
from whet.track.log import close_logging, setup_logging
from whet.track.record import RunDirectory
from whet.track.run_paths import attach
from whet.types import ConfigError, WhetError
from whet.view.rollouts import pieces

# ---------------------------------------------------------------- links in a run's folder

MINE = b"export PATH=/bin\n"


def lock(folder: Path) -> None:
    RunLock(folder).release()


def lock_of_a_store(folder: Path) -> None:
    with lock_opened(folder / "lock"):
        pass


def log(folder: Path) -> None:
    setup_logging(folder, level="info")
    close_logging()


def record(folder: Path) -> None:
    directory = RunDirectory(folder, ["s"])
    try:
        directory.log("s", 1, metrics={"a/b": 1.0}, timings={"time/c_s": 1.0})
    finally:
        directory.close()


def engine_log(folder: Path) -> None:
    EngineLog(folder / "engine.log")


WRITTEN: dict[str, tuple[str, Callable[[Path], None]]] = {
    "lock": ("lock", lock),
    "lock of a store": ("lock", lock_of_a_store),
    "run.log": ("run.log", log),
    "metrics.jsonl": ("metrics.jsonl", record),
    "timings.jsonl": ("timings.jsonl", record),
    "engine.log": ("engine.log", engine_log),
}
"""The files that a run goes on writing, and what opens them."""


@pytest.mark.parametrize("what", WRITTEN)
@pytest.mark.parametrize("how", ["link", "link to nothing", "pipe"])
def test_a_run_writes_through_no_link(what: str, how: str, tmp_path: Path) -> None:
    """A folder that was unpacked may have links to files of this user; a pipe would hold the run up for ever."""
    name, opens = WRITTEN[what]
    folder, victim = tmp_path / "run", tmp_path / "victim"
    folder.mkdir()
    opens(folder)
    (folder / name).unlink()
    if how == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(victim)
        if how == "link":
            victim.write_bytes(MINE)
    with pytest.raises((WhetError, OSError)) as caught:
        opens(folder)
    if isinstance(caught.value, WhetError):
        assert str(folder) in str(caught.value)
        assert ("a FIFO" if how == "pipe" else "a symbolic link") in str(caught.value)
    assert (victim.read_bytes() if victim.exists() else MINE) == MINE
    assert victim.exists() is (how == "link")
    (folder / name).unlink()
    opens(folder)  # as the error says


FOLDERS = (
    "checkpoints",
    "export",
    "rollouts",
    "eval",
    "batches",
    "tensorboard",
    "stacks",
    "bench",
    "explorers",
)


def begin(cfg: Config, stack: ExitStack) -> None:
    enter(cfg, stack)
    attach(cfg)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("whose", ["nobody's", "another run's", "this run's", "inside"])
def test_a_run_enters_no_folder_through_a_link_that_is_not_its_own(
    name: str, whose: str, tmp_path: Path
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    if whose == "inside":
        elsewhere = run / "elsewhere"
    elsewhere.mkdir()
    if whose in ("another run's", "this run's"):
        owner = run if whose == "this run's" else tmp_path / "other"
        (elsewhere / ".whet-run").write_text(f"{owner}\n")
    before = sorted(elsewhere.iterdir())
    (run / name).symlink_to(elsewhere)
    beside = {"bench": ("eval", "bench"), "explorers": ("explore", "explorers/name")}
    mode, place = beside.get(name, ("both", ""))
    cfg = load(None, values=RUN).config.model_copy(update={"run_dir": str(run / place), "mode": mode})
    with ExitStack() as stack:
        if whose in ("this run's", "inside"):
            begin(cfg, stack)
            return
        with pytest.raises(
            ConfigError, match=f"run/{name} is a link to .*elsewhere, which is not marked as this"
        ):
            begin(cfg, stack)
        if name == "bench":
            with pytest.raises(ConfigError, match="run/bench is a link to "):
                set_up(
                    cfg.model_copy(update={"run_dir": str(run)}), run / "bench", "eval", rows=(), stack=stack
                )
    assert sorted(elsewhere.iterdir()) == before


# ---------------------------------------------------------------- a tokenizer that gives up


def tokenizer(decoder: Any) -> Tokenizer:
    made = Tokenizer(models.WordLevel({"a": 0, "c": 1, "<unk>": 2}, unk_token="<unk>"))
    made.decoder = decoder
    return made


GIVES_UP = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("(a+)+$"), "x")])
STRIPS = decoders.Strip("a", 0, 5)
"""More than a token has, which its code does not expect."""
TOKENS = [0] * 30 + [1]


@pytest.mark.parametrize("decoder", [GIVES_UP, STRIPS], ids=["expression", "strip"])
def test_a_decoder_that_gives_up_is_a_clear_error(decoder: Any) -> None:
    """Its code ends with an exception that is no Exception, which passes every handler."""
    with pytest.raises(ConfigError, match=r"The tokenizer failed: .*use the file that belongs to the model"):
        decoded(tokenizer(decoder), TOKENS)
    assert decoded(tokenizer(decoders.Fuse()), TOKENS) == "a" * 30 + "c"


def test_other_errors_of_a_tokenizer_stay_what_they_are() -> None:
    with pytest.raises(OverflowError):
        decoded(tokenizer(decoders.Fuse()), [-1])


def test_a_decoder_with_an_expression_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    plain = decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()])
    file.write_text(tokenizer(plain).to_str())
    check_files(tmp_path)
    file.write_text(tokenizer(GIVES_UP).to_str())
    with pytest.raises(ConfigError, match=r"tokenizer.json: its decoder has the expression '\(a\+\)\+\$'"):
        check_files(tmp_path)


def test_a_page_of_a_rollout_gets_that_error(tmp_path: Path) -> None:
    """As DataError and ConfigError it is an answer of the server; anything else ends the connection."""
    with pytest.raises(ConfigError, match="The tokenizer failed"):
        pieces([0, 0, 1], tokenizer(STRIPS))
    assert pieces([0, 0, 1], tokenizer(decoders.Fuse())) == ["a", "a", "c"]


# ---------------------------------------------------------------- a host that says nonsense

SAYS = '''
import gc, json
from multiprocessing.connection import Connection

def says(env):
    """Another message into the line of this host, past whet's code."""
    message = json.loads(MESSAGE)
    if isinstance(message, list) and "NUMBER" in message:
        message[message.index("NUMBER")] = env.world.number
    for line in gc.get_objects():
        if isinstance(line, Connection) and not line.closed:
            line.send_bytes(json.dumps(message).encode())
    time.sleep(0.2)
'''

NONSENSE = [
    5, None, {}, {"done": 1}, [], ["done"], ["done", "NUMBER"], ["stuck"], ["stuck", "NUMBER"], ["hung"],
    ["hung", "NUMBER"], ["closed"], ["failed", "NUMBER"], ["said"], ["said", "x"], ["chat", "NUMBER"],
    ["done", [1], None], ["stuck", "a", "b"], ["hung", True, "x"], ["closed", {}],
]  # fmt: skip


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Callable[[Any], tuple[dict[int, Any], EnvHosts, list[str]]]]:
    made: list[EnvHosts] = []

    def play(message: Any) -> tuple[dict[int, Any], EnvHosts, list[str]]:
        (tmp_path / "zoo.py").write_text(f"{zoo.ZOO}\nMESSAGE = {json.dumps(message)!r}\n{SAYS}")
        cfg = EnvironmentConfig(make=f"{tmp_path}/zoo.py:Zoo", arguments={"how": "says"}, timeout_s=20.0)
        made.append(EnvHosts(cfg))
        unexpected: list[str] = []
        handler = asyncio.BaseEventLoop.call_exception_handler

        def note(loop: Any, context: Any) -> None:
            unexpected.append(str(context.get("message")))
            handler(loop, context)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.BaseEventLoop, "call_exception_handler", note)
            return zoo.play(made[-1]), made[-1], unexpected

    yield play
    for each in made:
        each.close()


@pytest.mark.parametrize("message", NONSENSE, ids=str)
def test_a_host_that_says_nonsense_is_replaced(message: Any, played: Any) -> None:
    """Every message of a wrong form is the end of its host; the other episodes are played again."""
    found, hosts, unexpected = played(message)
    assert unexpected == []
    assert found[11].error.startswith("env crashed: its host sent an invalid message: ")
    assert {uid for uid in zoo.OTHERS if found[uid].error} == set()
    assert hosts.restarts >= 1
