"""The studio's answers and its server: what a form needs, round trips of files, runs, and who is refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from swept import one_each
from tiny import RUN
from whet.config.load import load
from whet.config.parse import parse
from whet.config.plan import plans
from whet.config.tree import leaves
from whet.studio import answers
from whet.studio.answers import ASKED, TOLD, BadRequest, Question, Studio
from whet.studio.check import checked
from whet.studio.jobs import FoundRun, Jobs
from whet.studio.opened import IsThere, WorkingFolder, digest
from whet.studio.server import MOST_BODY_BYTES, StudioServer
from whet.track.files import RunLock, runs_here
from whet.types import ConfigError

ROOT = Path(__file__).parent.parent
FOREIGN = {"cosmos_letters.toml", "cosmos_sft.toml", "trinity_document.yaml"}
"""Files that cannot be translated alone: a launch script names the data set, or every key of a document is given."""
FILES = sorted(
    path
    for folder in ("examples/**/*", "tests/dialects/*")
    for path in ROOT.glob(folder)
    if path.suffix in (".yaml", ".toml") and path.name not in FOREIGN
)
GOOD = """\
# a run
name: tried
model: {scratch: {name: qwen3, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}}
tokenizer: {build: chars}
data:
  train: [{path: words.jsonl}]   # the words
rewards: {right: exact}
train:
  steps: ${rollout.group_size}
rollout: {group_size: 3}
"""


@pytest.fixture
def studio(tmp_path: Path) -> Iterator[Studio]:
    with Jobs(tmp_path) as jobs:
        yield Studio.of(None, jobs, root=tmp_path)


@pytest.fixture
def _variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the files of the dialects' tests take from the environment."""
    for name in re.findall(r"oc\.env:([A-Z_]+)", "".join(file.read_text() for file in FILES)):
        monkeypatch.setenv(name, "gsm8k" if name == "REWARD" else str(tmp_path))


def found(text: str) -> dict[str, Any]:
    return checked(text, "run.yaml")


def told(text: str) -> list[tuple[str, int | None]]:
    """(key, line) of every problem."""
    return [(".".join(map(str, one["path"] or ())), one["line"]) for one in found(text)["problems"]]


# ---------------------------------------------------------------- round trips


@pytest.mark.usefixtures("_variables")
@pytest.mark.parametrize(
    "file", one_each(FILES, lambda file: file.parent), ids=lambda file: str(file.relative_to(ROOT))
)
def test_a_round_trip_through_the_studio_changes_no_key(file: Path, tmp_path: Path) -> None:
    """Open, write every value again, save, open: the same text, and the same config as without the studio."""
    with Jobs(tmp_path) as jobs:
        opened = WorkingFolder(ROOT).open(str(file))
        native = opened.report is None and file.suffix == ".yaml"
        assert (opened.text == file.read_text()) == native
        work = Studio.of(None, jobs, root=tmp_path)
        tree = parse(opened.text).tree
        edits = [{"path": list(path), "value": value} for path, value in leaves(tree)]
        made = TOLD["edit"](work, Question({"text": opened.text, "name": opened.path, "edits": edits}))
        assert (made["text"], made["rewritten"]) == (opened.text, "")
        written = [{"path": list(path), "yaml": json.dumps(value)} for path, value in leaves(tree)]
        made = TOLD["edit"](work, Question({"text": opened.text, "name": opened.path, "edits": written}))
        assert made["text"] == opened.text
        saved = TOLD["save"](work, Question({"path": "saved.yaml", "text": made["text"], "known": ""}))
        assert (tmp_path / "saved.yaml").read_text() == opened.text
        again = TOLD["open"](work, Question({"path": "saved.yaml"}))
        assert again["text"] == opened.text
        assert again["digest"] == saved["digest"]
    if found(opened.text)["stages"]:
        direct, mine = load(file), load(tmp_path / "saved.yaml")
        assert mine.config == direct.config


# ---------------------------------------------------------------- what is checked


def test_the_check_is_the_loader_and_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.jsonl").write_text('{"prompt": "a", "answer": "a"}\n')
    Path("run.yaml").write_text(GOOD)
    out = found(GOOD)
    assert (out["problems"], out["foreign"]) == ([], None)
    stage = out["stages"][0]
    assert stage["resolved"]["train"]["steps"] == 3
    assert stage["resolved"]["algorithm"]["loss"] == "ppo", "what follows from the recipe is shown"
    assert stage["settings"]["algorithm.loss"]["clip_low"] == 0.2
    assert stage["given"]["rewards"] == {"right": {"function": "exact"}}
    assert dict(map(tuple, stage["unread"]))["critic"] == "algorithm.name=grpo (advantage=grpo) has no critic"
    assert [["data", "train", 0, "path"], 6] in out["lines"]
    from whet.config.describe import facts

    planned = plans(load("run.yaml"), here=False)
    assert out["plan"]["stages"][0]["facts"] == facts(planned[0])
    largest = max(one["total"] for one in out["plan"]["stages"][0]["memory"][0]["phases"])
    assert 0 < largest < out["plan"]["stages"][0]["limit"]
    assert json.loads(json.dumps(out)) == out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("hidden_size: 32", "hidden_size: many"), ("model.scratch.hidden_size", 3)),
        (("  steps:", "  stepz: 1\n  steps:"), ("train.stepz", 9)),
        (
            ("rollout: {group_size: 3}", "rollout: {group_size: 3}\ncritic: {warmup_steps: 2}"),
            ("critic.warmup_steps", 11),
        ),
        (("rollout: {group_size: 3}", "rollout: {group_size: 3"), ("", 11)),
        (("rollout: {group_size: 3}", "rollout: {group_size: 3}\nseed: 1\nseed: 2"), ("seed", 12)),
        (("${rollout.group_size}", "${no.such}"), ("train.steps", 9)),
    ],
)
def test_a_problem_is_told_with_its_key_and_line(
    change: tuple[str, str], problem: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.jsonl").write_text('{"prompt": "a", "answer": "a"}\n')
    assert told(GOOD) == []
    assert problem in told(GOOD.replace(*change))


def test_a_problem_in_a_stage_is_told_at_its_place() -> None:
    text = (ROOT / "examples/first_run.yaml").read_text().replace("interval: 25", "interval: often")
    assert ("stages.1.eval.interval", 60) in told(text)


def test_what_is_unread_is_told_by_stage() -> None:
    out = found((ROOT / "examples/first_run.yaml").read_text())
    sft, rl = (dict(map(tuple, stage["unread"])) for stage in out["stages"])
    assert "rollout.group_size" in sft
    assert "rollout.group_size" not in rl


def test_a_config_that_does_not_fit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.jsonl").write_text('{"prompt": "a", "answer": "a"}\n')
    out = found(GOOD + "machine: {memory_mb: 1}\n")
    assert "MiB" in out["problems"][0]["text"]
    assert out["plan"] is not None, "the table shows what is too large"


def test_a_text_of_another_system_is_named() -> None:
    assert found((ROOT / "examples/from_verl.yaml").read_text())["foreign"] == "verl-ppo"


def test_secrets_from_the_environment_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "hidden-3f9a7c2b")
    text = (
        GOOD
        + "reward_workers: {env: {JUDGE_API_KEY: '${oc.env:JUDGE_API_KEY}'}}\nrun_dir: runs/${oc.env:JUDGE_API_KEY}\n"
    )
    out = found(text)
    assert out["stages"], out["problems"]
    assert "hidden-3f9a7c2b" not in json.dumps(out)


# ---------------------------------------------------------------- files


def test_a_foreign_file_becomes_native_yaml_with_a_report(tmp_path: Path) -> None:
    opened = WorkingFolder(ROOT).open("examples/from_trinity.yaml")
    assert opened.path == "from_trinity.native.yaml"
    assert opened.digest == ""
    assert opened.report is not None
    assert opened.report["dialect"] == "trinity"
    assert {line["status"] for line in opened.report["lines"]} >= {"mapped", "translated"}
    assert all(
        {"key", "value", "native", "said", "differs"} <= line.keys() for line in opened.report["lines"]
    )
    assert parse(opened.text).tree == load(ROOT / "examples/from_trinity.yaml").written
    text = (ROOT / "examples/from_skyrl.yaml").read_text()
    kept = WorkingFolder(tmp_path).imported("sky.yaml", text, here=False)
    assert "offload" in kept.text
    assert "offload" not in WorkingFolder(tmp_path).imported("sky.yaml", text).text, "a CPU offloads nothing"


def test_only_files_of_the_folder_are_opened_and_written(tmp_path: Path) -> None:
    inside = tmp_path / "work"
    inside.mkdir()
    (tmp_path / "other.yaml").write_text("name: other\n")
    (inside / "link.yaml").symlink_to(tmp_path / "other.yaml")
    folder = WorkingFolder(inside)
    for path in (
        "../other.yaml",
        str(tmp_path / "other.yaml"),
        "link.yaml",
        "/etc/passwd",
        "a/../../other.yaml",
    ):
        with pytest.raises(ConfigError, match="is outside of"):
            folder.open(path)
        with pytest.raises(ConfigError, match="is outside of"):
            folder.save(path, "name: x\n", digest("name: other\n"))
    for path in ("", "a\0b.yaml", "a\nb.yaml"):
        with pytest.raises(ConfigError, match="expected the path of a file"):
            folder.open(path)
    assert (tmp_path / "other.yaml").read_text() == "name: other\n"
    given = WorkingFolder(inside, tmp_path / "other.yaml")
    assert given.open(str(tmp_path / "other.yaml")).text == "name: other\n", "the file of the command line"


@pytest.mark.parametrize("name", ["it's", "a\nb", ["x", "'"]])
def test_a_problem_of_a_stage_stands_at_its_key_whatever_the_stage_is_called(name: Any) -> None:
    text = yaml.safe_dump({"stages": [{"name": name, "train": {"steps": -1}}]})
    assert "stages.0.train.steps" in [key for key, _ in told(text)]


def test_no_page_runs_a_script_and_no_other_ending_is_written(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("touch ran\n")
    with pytest.raises(ConfigError, match="cannot run launch scripts"):
        WorkingFolder(tmp_path).open("run.sh")
    for name in ("run.sh", "run.py", "x.yaml.py", "run.toml", ".bashrc"):
        with pytest.raises(ConfigError, match=r"ends in \.yaml"):
            WorkingFolder(tmp_path).save(name, "x", "")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigError, match="there is no folder"):
        WorkingFolder(tmp_path).save("no/such.yaml", "x", "")


def test_another_file_is_not_overwritten_unless_it_is_named(tmp_path: Path) -> None:
    folder, file = WorkingFolder(tmp_path), tmp_path / "a.yaml"
    first = folder.save("a.yaml", "name: a\n", "")
    assert folder.save("a.yaml", "name: b\n", first.digest).digest == digest("name: b\n")
    file.write_text("name: changed elsewhere\n")
    with pytest.raises(IsThere, match=digest("name: changed elsewhere\n")):
        folder.save("a.yaml", "name: c\n", digest("name: b\n"))
    assert file.read_text() == "name: changed elsewhere\n"
    folder.save("a.yaml", "name: c\n", digest("name: changed elsewhere\n"))
    assert file.read_text() == "name: c\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"], "nothing half-written stays"


# ---------------------------------------------------------------- questions


def test_edits_are_made_one_after_the_other(studio: Studio) -> None:
    edits = [
        {"path": ["train", "steps"], "yaml": "3"},
        {"path": ["train", "optimizer", "lr"], "yaml": "2e-6"},
        {"path": ["name"], "value": "tom: it's"},
        {"path": ["rewards", "a"], "value": {}},
        {"path": ["rewards", "a"], "rename": "b"},
        {"path": ["data", "order"], "yaml": "[broken"},
        {"path": ["seed"]},
    ]
    made = TOLD["edit"](
        studio, Question({"text": "seed: 1\nname: x # n\n", "name": "run.yaml", "edits": edits})
    )
    assert made["text"] == (
        'name: "tom: it\'s" # n\ntrain:\n  steps: 3\n  optimizer:\n    lr: 2e-6\nrewards:\n  b: {}\n'
        'data:\n  order: "[broken"\n'
    )
    assert ["data", "order"] in [one["path"] for one in made["check"]["problems"]]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": 5, "name": "x.yaml", "edits": []},
        {"text": "a: \ud800", "name": "x.yaml", "edits": []},
        {"text": "", "name": "x.yaml", "edits": {}},
        {"text": "", "name": "x.yaml", "edits": [5]},
        {"text": "", "name": "x.yaml", "edits": [{"path": []}]},
        {"text": "", "name": "x.yaml", "edits": [{"path": [True]}]},
        {"text": "", "name": "x.yaml", "edits": [{"path": [-1]}]},
        {"text": "", "name": "x.yaml", "edits": [{"path": ["a"] * 51, "value": 1}]},
        {"text": "", "name": "x.yaml", "edits": [{"path": ["a"]}] * 1001},
    ],
)
def test_what_no_page_asks_is_refused(fields: dict[str, Any], studio: Studio) -> None:
    with pytest.raises(BadRequest):
        TOLD["edit"](studio, Question(fields))


BOMB = "a: &a [x]\n" + "".join(
    f"{key}: &{key} [{', '.join([f'*{before}'] * 9)}]\n" for before, key in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[" * 3000,
            BOMB,
            "a: !!python/object/apply:os.system [true]\n",
            "\t\n\t: x",
            "a: *none",
            "? [a]\n: b",
        ),
        *("- 1", "\x07", "5", "name: [1", "${}: ${"),
    ],
)
def test_hostile_texts_are_problems_and_nothing_else(text: str, studio: Studio) -> None:
    out = TOLD["check"](studio, Question({"text": text, "name": "run.yaml"}))
    assert out["problems"]
    assert out["plan"] is None


def test_a_huge_text_is_refused(studio: Studio) -> None:
    for ask in ("check", "edit", "save"):
        with pytest.raises(ConfigError, match="more than 4 MiB"):
            TOLD[ask](
                studio,
                Question(
                    {
                        "text": "#" * (4 * 2**20 + 1),
                        "name": "a.yaml",
                        "path": "a.yaml",
                        "edits": [],
                        "known": "",
                    }
                ),
            )


def test_a_key_is_explained_as_on_the_command_line(studio: Studio) -> None:
    assert ASKED["explain"](studio, Question({"key": "rewards.*.weight"}))["default"] == "1.0"
    with pytest.raises(ConfigError, match="is not a key"):
        ASKED["explain"](studio, Question({"key": "no.such"}))


def test_the_page_names_no_key() -> None:
    """No section and no key of the schema occurs in the page's code as a text."""
    from whet.config.schema import Config

    static = ROOT / "src/whet/studio/static"
    code = "\n".join(path.read_text() for path in static.glob("*.js"))
    texts = set(re.findall(r'"([a-z_.]+)"', code)) | set(re.findall(r"\btree\.([a-z_]+)", code))
    allowed = {"name", "track"} & texts  # an entry's own name is what people call it by
    assert texts & set(Config.model_fields) <= allowed


# ---------------------------------------------------------------- runs


def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.05)


def endless(folder: Path) -> dict[str, Any]:
    """A run that does not end by itself while a test waits, from any working directory."""
    return {
        **RUN,
        "run_dir": str(folder / "run"),
        "data": {**RUN["data"], "train": [{"path": str(ROOT / "tests/data/words.jsonl")}]},
        "rewards": {"letters": {"function": f"{ROOT}/tests/resume/rewards.py:shared_letters"}},
        "train": {**RUN["train"], "steps": 100_000},
    }


def whole_log(jobs: Jobs) -> str:
    out, at = "", 0
    while (state := jobs.state(at)) and (state["log"] or state["more"]):
        out, at = out + state["log"], state["next"]
    return out


def test_a_run_is_started_followed_and_stopped_as_by_ctrl_c(tmp_path: Path) -> None:
    config = endless(tmp_path)
    file = tmp_path / "-a run.yaml"
    file.write_text(yaml.safe_dump(config))
    with Jobs(tmp_path) as jobs:
        studio = Studio.of(None, jobs, root=tmp_path)
        ask = {"command": "train", "path": file.name, "known": digest(file.read_text())}
        with pytest.raises(ConfigError, match="has unsaved changes on the page"):
            TOLD["run"](studio, Question({**ask, "known": digest("other")}))
        with pytest.raises(ConfigError, match="expected rehearse or train"):
            TOLD["run"](studio, Question({**ask, "command": "schema"}))
        with pytest.raises(ConfigError, match="no run was started"):
            answers.run_folder(studio)
        TOLD["run"](studio, Question(ask))
        with pytest.raises(ConfigError, match="still runs"):
            TOLD["run"](studio, Question(ask))
        metrics = tmp_path / "run/metrics.jsonl"
        until(
            lambda: (
                (metrics.exists() and len(metrics.read_text().splitlines()) > 1)
                or jobs.current.exit_code is not None
            )
        )  # type: ignore[union-attr]
        assert answers.run_folder(studio) == tmp_path / "run"
        TOLD["stop"](studio, Question({}))
        until(lambda: jobs.current is not None and jobs.current.exit_code is not None)
        assert jobs.current is not None
        assert jobs.current.exit_code == 130, whole_log(jobs)
        assert list((tmp_path / "run").glob("checkpoints/*")), "a stop saves"


def test_a_config_that_cannot_run_says_so_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {stepz: 3}\n")
    with Jobs(tmp_path) as jobs:
        jobs.start("rehearse", "run.yaml")
        until(lambda: jobs.current is not None and jobs.current.exit_code is not None)
        assert jobs.current is not None
        assert jobs.current.exit_code == 2
        assert "unknown key; did you mean train.steps?" in whole_log(jobs)
        halves = [jobs.state(start) for start in (0, 10)]
        assert halves[1] is not None
        assert halves[0] is not None
        assert halves[0]["log"].encode()[10:] == halves[1]["log"].encode()


def test_the_end_of_the_studio_stops_its_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(endless(tmp_path)))
    with Jobs(tmp_path) as jobs:
        job = jobs.start("train", "run.yaml")
        assert job.exit_code is None
    assert job.exit_code is not None


def test_a_second_ctrl_c_does_not_leave_the_run_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(endless(tmp_path)))
    with Jobs(tmp_path) as jobs:
        job = jobs.start("train", "run.yaml")
        wait = job.process.wait

        def impatient(timeout: float | None = None) -> int:
            if timeout is not None:
                raise KeyboardInterrupt
            return wait()

        monkeypatch.setattr(job.process, "wait", impatient)
    assert job.exit_code is not None
    assert not job.log.parent.exists()


KILLED = """
import sys, time
from pathlib import Path
from whet.studio.jobs import FoundRun, Jobs

Jobs(Path(sys.argv[1])).start("train", "run.yaml")
print("started", flush=True)
time.sleep(600)
"""


def test_the_run_of_a_killed_studio_goes_on_and_the_next_studio_has_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(endless(tmp_path)))
    first = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert first.stdout is not None
    first.stdout.readline()
    metrics = tmp_path / "run/metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1)
    first.kill()
    first.wait()
    first.stdout.close()
    pid = runs_here(tmp_path / "run")
    assert pid is not None, "it goes on"
    try:
        with Jobs(tmp_path) as jobs:
            studio = Studio.of(None, jobs, root=tmp_path)
            state = ASKED["job"](studio, Question({}))
            assert (state["command"], state["exit_code"]) == ("train", None)
            assert "whet.stages: stage main" in whole_log(jobs)
            assert answers.run_folder(studio) == tmp_path / "run"
        assert runs_here(tmp_path / "run") == pid, "the end of a studio that did not start it leaves it"
        with Jobs(tmp_path) as jobs:
            studio = Studio.of(tmp_path / "other.yaml", jobs, root=tmp_path)
            assert jobs.state(0) is None, "the run of another file"
            ask = {"command": "train", "path": file.name, "known": digest(file.read_text())}
            with pytest.raises(ConfigError, match=r"whet train .*run\.yaml still runs; stop it first"):
                TOLD["run"](studio, Question(ask))
            TOLD["stop"](studio, Question({}))
            until(lambda: jobs.current is not None and jobs.current.exit_code is not None)
            assert list((tmp_path / "run").glob("checkpoints/*")), "a stop saves"
            assert studio.jobs.state(0)["exit_code"] == "unknown; the log has how it ended"  # type: ignore[index]
            studio.find_run(file)
            assert jobs.current.exit_code is not None, "a run that has ended is not found"  # type: ignore[union-attr]
    finally:
        if runs_here(tmp_path / "run") == pid:
            os.kill(pid, signal.SIGKILL)


def test_the_process_in_a_lock_that_nobody_holds_is_no_run(tmp_path: Path) -> None:
    """A killed run leaves its number, which another process may have by now."""
    (tmp_path / "lock").write_text(f"{os.getpid()} {socket.gethostname()}\n")
    (tmp_path / "run.log").touch()
    with Jobs(tmp_path) as jobs:
        jobs.find("run.yaml", tmp_path)
        assert jobs.current is None
        with RunLock(tmp_path):
            jobs.find("run.yaml", tmp_path)
            assert isinstance(jobs.current, FoundRun)
            assert jobs.current.exit_code is None
        assert jobs.current.exit_code is not None


# ---------------------------------------------------------------- the server


@asynccontextmanager
async def served(studio: Studio) -> AsyncIterator[tuple[StudioServer, aiohttp.ClientSession, str]]:
    """(server, a session that has the cookie, the page's token)"""
    server = StudioServer(studio)
    await server.start()
    try:
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{server.port}", cookie_jar=aiohttp.CookieJar(unsafe=True)
        ) as session:
            async with session.get(f"/?token={server.token}") as page:
                assert page.status == 200
            async with session.get("/api/start") as answer:
                token = (await answer.json())["page_token"]
            yield server, session, token
    finally:
        await server.stop()


def test_the_page_and_its_answers(studio: Studio) -> None:
    async def work() -> None:
        async with served(studio) as (_, session, token):
            head = {"X-Whet-Page": token}
            for name in ("", "main.js", "form.js", "viewer.css", "studio.css", "dom.js", "icon.svg"):
                async with session.get(f"/{name}") as answer:
                    assert answer.status == 200, name
                    assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"
                    assert "Access-Control-Allow-Origin" not in answer.headers
            async with session.get("/api/schema") as answer:
                assert (await answer.json())["title"] == "whet"
            async with session.post(
                "/api/check", json={"text": "stepz: 1", "name": "a.yaml"}, headers=head
            ) as answer:
                assert (await answer.json())["problems"][0]["path"] == ["stepz"] or answer.status == 200
            async with session.post(
                "/api/save", json={"text": "name: a\n", "path": "a.yaml", "known": ""}, headers=head
            ) as answer:
                assert (await answer.json())["digest"] == digest("name: a\n")
            async with session.post(
                "/api/save", json={"text": "name: b\n", "path": "a.yaml", "known": ""}, headers=head
            ) as answer:
                assert (answer.status, (await answer.json())["digest"]) == (409, digest("name: a\n"))
            async with session.post("/api/open", json={"path": "../x.yaml"}, headers=head) as answer:
                assert (answer.status, "outside" in (await answer.json())["error"]) == (422, True)
            async with session.post("/api/view", json={}, headers=head) as answer:
                assert answer.status == 422

    asyncio.run(work())


def test_the_address_of_a_browsers_command_line_is_good_once(studio: Studio) -> None:
    """Other users of the machine can read it there."""

    async def work() -> None:
        async with served(studio) as (server, _, _):
            once = server.once
            assert server.token not in once
            for good in (200, 401):
                async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
                    for url in (once, server.url.partition("?")[0]):  # the second by the cookie of the first
                        async with browser.get(url) as answer:
                            assert answer.status == good

    asyncio.run(work())


def test_who_has_no_token_or_is_another_site_changes_nothing(studio: Studio, tmp_path: Path) -> None:
    async def work() -> None:
        async with served(studio) as (server, session, token):
            save = {"json": {"text": "name: a\n", "path": "stolen.yaml", "known": ""}}
            own = f"http://127.0.0.1:{server.port}"
            refused: list[tuple[str, str, dict[str, str], int]] = [
                ("POST", "/api/save", {}, 403),
                ("POST", "/api/save", {"X-Whet-Page": "x" * 32}, 403),
                ("POST", "/api/save", {"X-Whet-Page": server.token}, 403),
                ("POST", "/api/save", {"X-Whet-Page": token, "Origin": "http://evil.example"}, 403),
                ("POST", "/api/save", {"X-Whet-Page": token, "Origin": "null"}, 403),
                (
                    "POST",
                    "/api/save",
                    {"X-Whet-Page": token, "Origin": f"http://localhost:{server.port}"},
                    403,
                ),
                ("POST", "/api/save", {"X-Whet-Page": token, "Host": "evil.example"}, 403),
                ("POST", "/api/save", {"X-Whet-Page": token, "Host": f"evil.example:{server.port}"}, 403),
                ("POST", "/api/save", {"X-Whet-Page": token, "Host": "127.0.0.1:1"}, 403),
                ("POST", "/api/save", {"X-Whet-Page": token, "Content-Type": "text/plain"}, 415),
                ("PUT", "/api/save", {"X-Whet-Page": token}, 405),
                ("OPTIONS", "/api/save", {"X-Whet-Page": token}, 405),
                ("DELETE", "/api/save", {"X-Whet-Page": token}, 405),
                ("GET", "/api/save", {}, 404),
                ("GET", "/api/run", {}, 404),
                ("GET", "/api/stop", {}, 404),
                ("POST", "/api/start", {"X-Whet-Page": token}, 404),
                ("POST", "/api/../main.js", {"X-Whet-Page": token}, 404),
                ("GET", "/../server.py", {}, 404),
                ("GET", "/%2e%2e/server.py", {}, 404),
                ("GET", "/", {"Host": "evil.example"}, 403),
            ]
            for method, path, head, status in refused:
                async with session.request(method, path, headers=head, **save) as answer:  # type: ignore[arg-type]
                    assert answer.status == status, (method, path, head)
            async with aiohttp.ClientSession(own) as stranger:
                for path in ("/", "/api/start", "/api/job", "/main.js", "/?token=wrong"):
                    async with stranger.get(path) as answer:
                        assert answer.status == 401, path
                        assert not answer.cookies
                        assert token not in await answer.text()
                head = {"X-Whet-Page": token}
                async with stranger.post("/api/save", headers=head, **save) as answer:  # type: ignore[arg-type]
                    assert answer.status == 401
            async with session.post(
                "/api/save", headers={"X-Whet-Page": token, "Origin": own}, **save
            ) as answer:  # type: ignore[arg-type]
                assert answer.status == 200, "the page itself may"

    asyncio.run(work())
    assert (tmp_path / "stolen.yaml").read_text() == "name: a\n"
    assert [path.name for path in tmp_path.iterdir()] == ["stolen.yaml"]


def test_bodies_that_are_no_question_are_refused(studio: Studio) -> None:
    async def work() -> None:
        async with served(studio) as (server, session, token):
            head = {"X-Whet-Page": token, "Content-Type": "application/json"}
            for body in (
                b"",
                b"{",
                b"[]",
                b"5",
                b"\xff\xfe",
                b"[" * 100_000,
                b'{"text": "\\ud800", "name": "a.yaml"}',
                b"{}",
            ):
                async with session.post("/api/check", data=body, headers=head) as answer:
                    assert answer.status == 400, body[:20]
            text = json.dumps({"text": "#" * MOST_BODY_BYTES, "name": "a.yaml"}).encode()
            async with session.post("/api/check", data=text, headers=head) as answer:
                assert answer.status == 400
            async with session.get("/api/job?from=-1") as answer:
                assert answer.status == 400
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"\x00\xff GET nonsense\r\n\r\n")
            assert b"400" in await reader.readline()
            writer.close()
            async with session.get("/api/start") as answer:
                assert answer.status == 200, "it goes on"

    asyncio.run(work())


def test_a_taken_port_is_named(studio: Studio) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
            asyncio.run(StudioServer(studio).start(port))


def test_the_schema_of_the_page_is_that_of_the_command() -> None:
    from whet.config.forms import schema

    assert json.loads(gzip.decompress(answers.drawn_from())) == json.loads(json.dumps(schema()))


def test_the_studio_opens_what_the_command_names(tmp_path: Path) -> None:
    with Jobs(tmp_path) as jobs:
        assert asdict(Studio.of(None, jobs, root=tmp_path).opened)["digest"] == ""
        new = Studio.of(tmp_path / "new.yaml", jobs, root=tmp_path)
        assert (new.opened.path, new.opened.text) == ("new.yaml", "name: run\n")
        with pytest.raises(ConfigError, match="No such file"):
            Studio.of(tmp_path / "new.toml", jobs, root=tmp_path)


def test_the_command_ends_by_ctrl_c(tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "whet", "studio", "--port", "0", "--no-open"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    assert b"whet studio: http://127.0.0.1:" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    process.stdout.close()
