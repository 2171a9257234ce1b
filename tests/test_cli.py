"""The command line: quick, exemplary, and gone without a trace when it is told to stop."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import typer.main

from forked import Started
from whet import api, checkpoint, cli, secrets
from whet.guard import sandbox

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "train",
    "plan",
    "eval",
    "generate",
    "explain",
    "show",
    "view",
    "data gsm8k",
    "keys",
    "convert",
    "studio",
    "rehearse",
    "schema",
    "export",
    "scale",
    "replay",
    "diff",
    "doctor",
    "engine install",
}

# ---------------------------------------------------------------- what is imported

HEAVY = ("torch", "transformers", "pyarrow", "tokenizers", "matplotlib", "reasoning_gym", "tensorboard")
ASK = """
import json, sys
from whet.cli import main
for line in json.loads(sys.argv[1]):
    sys.argv = ["whet", *line]
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    print("\\n@", json.dumps([code, [name for name in json.loads('%s') if name in sys.modules]]))
"""
QUICK: dict[tuple[str, ...], int] = {
    ("--help",): 0,
    ("--version",): 0,
    ("train", "--help"): 0,
    ("train", "nothing.yaml"): 2,
    ("eval", "nothing.yaml"): 2,
    ("train", "examples/first_run.yaml", "train.setps=3"): 2,
    ("train", "examples/first_run.yaml", "stages.rl.train.minibatches=3"): 2,
    ("plan", "examples/first_run.yaml"): 0,
    ("explain", "train.optimizer.lr"): 0,
    ("explain", "train.setps"): 2,
    ("explain", "train"): 0,
    ("explain", "rollout.schedule=async"): 0,
    ("keys", "--algorithms"): 0,
    ("keys", "--dialect", "skyrl", "--status", "coming"): 0,
    ("schema",): 0,
    ("plan", "examples/from_verl.yaml"): 0,
    ("convert", "examples/from_verl.yaml"): 0,
}


def test_help_and_mistakes_are_answered_before_anything_heavy_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK % json.dumps(HEAVY), json.dumps([*QUICK])],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@ ")]
    assert answers == [[code, []] for code in QUICK.values()]
    assert "Traceback" not in done.stderr
    assert done.stderr.count("whet: ") == sum(code == 2 for code in QUICK.values())


NOBODY = (
    """
import pwd, sys
def unknown(*_): raise KeyError("getpwuid(): uid not found")
pwd.getpwuid = pwd.getpwnam = unknown
"""
    + ASK
)


def test_a_user_without_a_home_needs_none() -> None:
    """Where a container runs under a number that is no user's, Python's Path.home raises RuntimeError."""
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME")}
    plan = ["plan", "tests/resume/config.yaml"]
    lines = [
        ["--help"],
        plan,
        [*plan, 'data.train=[{path: "~/mine.jsonl"}]'],
        [*plan, "model.path=~her/model"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", NOBODY % json.dumps(HEAVY), json.dumps(lines)],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@ ")]
    assert answers == [[code, []] for code in (0, 0, 2, 2)]
    said = " ".join(done.stderr.split())
    assert 'data.train[0].path: "~/mine.jsonl": HOME is not set, and the system has no home' in said
    assert 'model.path: "~her/model": no such user; give the full path' in said


@pytest.mark.parametrize(
    ("encoding", "said"),
    [("ascii", b"0.1 \\u2192 caf\\xe9 \\udcff\n"), ("latin-1", b"0.1 \\u2192 caf\xe9 \\udcff\n")],
)
def test_what_the_output_cannot_encode_is_escaped(encoding: str, said: bytes) -> None:
    """A terminal of C or ISO-8859-1, and a file's name that is no UTF-8."""
    raw = io.BytesIO()
    stream = secrets.redacting(io.TextIOWrapper(raw, encoding=encoding))
    stream.write("0.1 \u2192 caf\u00e9 \udcff\n")
    stream.flush()
    assert raw.getvalue() == said


def test_a_full_disk_behind_the_output_is_one_message() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "whet", "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("whet: [Errno 28] No space left on device: free some of it")
    assert len(done.stderr.splitlines()) == 1


SHOW = """
import contextlib, io, os, sys
from whet import cli
asked, sys.argv = sys.argv, ["whet", "show", "absent"]
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
    cli.main()  # now: what it imports may lie where root alone reads
sys.argv = asked
if os.geteuid() == 0:
    os.seteuid(65534)
cli.main()
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shut/run", "Permission denied: .*: give another path, or fix its owner and mode"),
        ("long" * 100, "File name too long: .*: give a shorter path"),
    ],
    ids=["permission", "length"],
)
def test_a_path_that_the_system_refuses_is_one_message(name: str, said: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "shut").mkdir(mode=0)
    done = subprocess.run(
        [sys.executable, "-c", SHOW, "show", name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert re.fullmatch(rf"whet: \[Errno [0-9]+\] {said}\n", done.stderr), done.stderr


IN_NO_FOLDER = """
import os, sys
from whet import cli
os.rmdir(os.getcwd())
cli.main()
"""


def test_a_current_folder_that_is_removed_is_told_as_one_message(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "a.yaml").write_text("name: a\n")
    done = subprocess.run(
        [sys.executable, "-c", IN_NO_FOLDER, "plan", str(tmp_path / "a.yaml")],
        cwd=tmp_path / "gone",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = "the folder in which this command was given is not there any more; change to one that is"
    assert (done.returncode, done.stderr) == (1, f"whet: [Errno 2] No such file or directory: {said}\n")


def test_the_package_itself_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "whet", "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.startswith("whet ")) == (0, True)


def test_files_of_the_working_directory_take_no_place_of_pythons_modules(tmp_path: Path) -> None:
    for name in ("random", "signal", "json", "secrets"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')")
    done = subprocess.run(
        [sys.executable, "-m", "whet", "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


INTERRUPTED = """
import os, signal, sys
from whet.__main__ import main
class Importing:
    def find_spec(self, name, path=None, target=None):
        if name == "whet.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Importing())
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[1] == "ignored" else signal.default_int_handler)
sys.argv[1:] = ["--version"]
main()
"""


@pytest.mark.parametrize(("handler", "code"), [("default", -signal.SIGINT), ("ignored", 0)])
def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback(handler: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, handler],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")


BEGUN = """
import os, signal, sys
from whet.__main__ import main

def begun(number, told=int(sys.argv.pop(1)), real=signal.getsignal):
    signal.getsignal = real
    os.write(told, b"x")
    return real(number)

signal.getsignal = begun  # what the command does first
main()
"""
MOMENTS = [0.0, 0.1, *(n / 20 for n in range(3, 16)), 1.0, 1.5, 2.0, 3.0]
"""Seconds. Most lie where the command is imported and the schema of the config built."""
INTERRUPTED_COMMANDS = {
    "plan": ["plan", "tests/resume/config.yaml"],
    "train": ["train", "tests/resume/config.yaml"],
    "eval": ["eval", "tests/resume/config.yaml"],
    "convert": ["convert", "examples/from_cosmos.toml"],
    "keys": ["keys", "--dialect", "skyrl"],
    "show": ["show", "no-such-run"],
}


@functools.cache
def undisturbed(name: str) -> frozenset[str]:
    """The lines that a command which only reads has on stderr."""
    if name in ("train", "eval"):
        return frozenset()
    command = [sys.executable, "-m", "whet", *INTERRUPTED_COMMANDS[name]]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    return frozenset(done.stderr.splitlines())


def test_ctrl_c_while_pydantic_builds_a_schema_is_no_traceback() -> None:
    """It makes a SchemaError of it."""
    code = (
        "import whet.cli, whet.__main__\n"
        "from pydantic_core import SchemaError\n"
        "def command():\n    raise SchemaError('Error building `model` serializer:\\n  KeyboardInterrupt: ')\n"
        "whet.cli.main = command\n"
        "whet.__main__.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_while_a_text_is_executed_ends_by_the_documented_status(tmp_path: Path) -> None:
    """As dataclasses are made, in a library, too. Python ended by SIGINT then, which is 130 for a shell alone."""
    (tmp_path / "sitecustomize.py").write_text(
        "import whet.cli\ndef command():\n    exec('raise KeyboardInterrupt')\nwhet.cli.main = command\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "whet"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("after_s", MOMENTS)
@pytest.mark.parametrize("name", INTERRUPTED_COMMANDS)
def test_ctrl_c_at_any_moment_of_a_command_is_no_traceback(name: str, after_s: float, tmp_path: Path) -> None:
    words = INTERRUPTED_COMMANDS[name] + [f"run_dir={tmp_path / 'run'}"] * (name in ("train", "eval"))
    begun, told = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", BEGUN, str(told), *words],
        cwd=Path(__file__).parents[1],
        pass_fds=[told],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
    )
    os.close(told)
    os.read(begun, 1)
    os.close(begun)
    time.sleep(after_s)
    late = process.poll() is not None
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    done = (0, 1, 2)  # it was too late for the signal; 1: there is no such run; 2: there is no checkpoint
    assert process.returncode in (130, -signal.SIGINT, *done), err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    if process.returncode not in done and not late:
        assert len([line for line in err.splitlines() if line not in undisturbed(name)]) <= 1, err


def test_ctrl_c_before_a_command_begins_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", stopped)
    monkeypatch.setattr(sys, "argv", ["whet", "--version"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == api.INTERRUPTED


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.yaml", '"\\u001b]0;owned\\u0007": 1', 2),
        ("a.yaml", 'seed: "\\u009b31mowned"', 2),
        ("a.sh", "python3 -m verl.trainer.main_ppo 'trainer.\x1b]0;owned\x07=1'", 2),
    ],
)
def test_what_an_error_quotes_of_a_file_commands_no_terminal(
    name: str, text: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / name).write_text(text)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    monkeypatch.setattr(sys, "argv", ["whet", "convert", str(tmp_path / name)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert "owned" in said
    assert said.replace("\n", "").isprintable()


# ---------------------------------------------------------------- help and its examples


def examples() -> dict[str, list[str]]:
    """The examples in each command's help, by command."""
    root = typer.main.get_command(cli.app)
    out: dict[str, list[str]] = {}
    todo = [("", root)]
    while todo:
        name, command = todo.pop()
        if subcommands := getattr(command, "commands", None):
            todo += [(f"{name} {key}".strip(), value) for key, value in subcommands.items()]
        else:
            lines = (command.help or "").splitlines()
            out[name] = [line.partition("Example: ")[2] for line in lines if "Example: " in line]
    return out


def call(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", line.split())
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_two_rewards_of_one_name_do_not_replace_each_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = f"whet eval {tmp_path} --data d.jsonl --reward a.py:score --reward b.py:score"
    assert call(line, monkeypatch) == 2
    said = capsys.readouterr().err
    assert "--reward a.py:score and --reward b.py:score have the same name, 'score'" in said


def test_every_command_has_an_example_that_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the runs of a checkout: `view` would serve them.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    found = examples()
    assert set(found) == COMMANDS
    for name, lines in found.items():
        assert lines, name
        for line in lines:
            assert f"{line} ".startswith(f"whet {name} "), line
            line = line.partition(" --simulate")[0]  # the run to go by is the reader's
            line = line.partition(" --prove")[0]  # and so is the other system's package
            if ".sh" in line and sandbox.lacking():
                continue  # said there: no launch script can be read here
            if name in ("plan", "explain"):
                assert call(line, monkeypatch) == 0
            elif name == "train":
                line = line.replace(" --change", "", 1)
                assert call(line.replace("train", "plan", 1), monkeypatch) == 0
            elif name in (
                "eval",
                "generate",
                "rehearse",
                "export",
                "engine install",
                "studio",
            ):  # they would do what they say
                assert call(f"whet {name} --help", monkeypatch) == 0
            else:  # the folders of these are the reader's: that is all there is to be said against them
                assert call(line, monkeypatch) in (0, 1)


def test_examples_stand_on_lines_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lines in examples().items():
        call(f"whet {name} --help", monkeypatch)
        shown = " ".join(capsys.readouterr().out.split("Example: ")[1:])
        assert shown.count("\n") >= len(lines)
        for line in lines:
            assert f"{line}\n" in shown, name


# ---------------------------------------------------------------- asked to stop

START: Callable[[Path], bool] = lambda run_dir: (run_dir / "config.yaml").exists()  # noqa: E731


def lines_of(count: int) -> Callable[[Path], bool]:
    metrics = "metrics.jsonl"
    return lambda d: (d / metrics).exists() and (d / metrics).read_bytes().count(b"\n") >= count


def start(run_dir: Path, when: Callable[[Path], bool]) -> tuple[Started, list[psutil.Process]]:
    """A run in its own process group, as a shell makes it, and its descendants once `when` has come true."""
    words = ["train", "tests/resume/config.yaml", f"run_dir={run_dir}", "track.trackers=[console, jsonl]"]
    process = Started(*words, said=run_dir.with_suffix(".said"))
    deadline = time.monotonic() + 60
    while not when(run_dir):
        assert process.poll() is None, process.text()
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.005)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, "rewards run in processes of their own"
    return process, children


def assert_gone(children: list[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(children, timeout=within_s)
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    ("when", "send"),
    [
        (lines_of(3), lambda pid: os.kill(pid, signal.SIGTERM)),
        (START, lambda pid: os.killpg(pid, signal.SIGINT)),
    ],
    ids=["term-in-a-step", "ctrl-c-at-the-start"],
)
def test_told_to_stop_it_stops_in_order_and_leaves_no_process(
    tmp_path: Path, when: Callable[[Path], bool], send: Callable[[int], None]
) -> None:
    process, children = start(tmp_path / "run", when)
    send(process.pid)
    code, out = process.wait(60), process.text()
    assert code == api.INTERRUPTED, out
    assert "Traceback" not in out
    saved = checkpoint.newest(tmp_path / "run" / "checkpoints")
    if when is START:
        assert saved is None
        assert "saved" not in out, "nothing is promised that is not there"
    else:
        assert f"stopped; saved as {saved}" in out
        assert saved is not None
        last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
        assert checkpoint.read_state(saved)["step"] == json.loads(last)["step"]
    assert_gone(children, within_s=5)


def test_killed_it_leaves_no_process(tmp_path: Path) -> None:
    process, children = start(tmp_path / "run", lines_of(2))
    process.kill()
    process.wait(10)
    assert_gone(children, within_s=5)
