"""Code is data: its digest is recorded, a change is told, and a finished run is the run of its code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import whet
from tiny import RUN
from whet import checkpoint
from whet.cli import app
from whet.config.code import absent, digests, module_file, named
from whet.config.load import load
from whet.tables import load_object
from whet.types import CheckpointError, ConfigError

REWARD = "def right(response, task):\n    return float(len(response) {sign} 2)\n"
WORDS = [{"prompt": word, "answer": word[0]} for word in ("ab", "ba", "aa", "bb")]
DATA = {"max_prompt_tokens": 8, "train": [{"name": "words", "rows": WORDS}]}
CONFIG = {**RUN, "data": DATA, "checkpoint": {"interval": 1, "keep": None, "export": False}, "track": {}}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(**sections: Any) -> tuple[Any, ...]:
    return load(None, (), {**CONFIG, **sections}).stages


def found(function: str) -> dict[str, str]:
    return digests(config(rewards={"r": {"function": function}}), {})


# ---------------------------------------------------------------- digests


def test_every_key_that_names_code_is_read() -> None:
    """One of each kind, and none that is whet's own or no code."""
    tools = {"functions": ["t.py:f", "t.py:g"], "tool_class": "c.py:C"}
    tools |= {"env": "game.py:G", "say": "game.py:say", "act": "game.py:act"}
    stages = config(
        imports=["setup.py", "a.package"],
        rewards={"mine": {"function": "r.py:f"}, "ours": {"function": "exact"}},
        algorithm={"name": "grpo", "advantage": "adv.py:a", "loss": "loss.py:l"},
        rollout={**CONFIG["rollout"], "engine": "e.py:E", "env": {"make": "v.py:V", "arguments": tools}},
    )
    assert {*named(stages[0])} >= {
        "setup.py",
        "a.package",
        "r.py:f",
        "adv.py:a",
        "loss.py:l",
        "e.py:E",
        "v.py:V",
        "game.py:G",
        "game.py:say",
        "game.py:act",
    }
    assert {*named(stages[0])} >= {"t.py:f", "t.py:g", "c.py:C"}
    assert "exact" not in {*named(stages[0])}


def test_a_plan_says_which_files_of_code_are_not_there(tmp_path: Path) -> None:
    """A run would end for them at its start, or at the first rollout; modules may be installed where it runs."""
    (tmp_path / "lengths.py").write_text(REWARD.format(sign="<="))
    tools = {"tool_config": "tools.yaml", "functions": ["lengths.py:right"]}
    stages = config(
        rewards={"a": {"function": "lengths.py:right"}, "b": {"function": "lenghts.py:right"}},
        data={**DATA, "train": [{"name": "words", "rows": WORDS}, {"name": "w", "function": "my/rows.py:w"}]},
        algorithm={"name": "grpo", "advantage": "elsewhere.module:a", "loss": "loss.py:l"},
        rollout={**CONFIG["rollout"], "env": {"make": "v.py:V", "arguments": tools}},
        track={"trackers": ["jsonl", "tracker.py:open"]},
    )
    no = "no such file on this machine"
    assert sorted(absent([*stages, *stages])) == [
        f"algorithm.loss.name=loss.py:l: {no}",
        f"data.train[1].function=my/rows.py:w: {no}",
        f"rewards.b.function=lenghts.py:right: {no}; did you mean 'lengths.py'?",
        f"rollout.env.arguments.tool_config=tools.yaml: {no}",
        f"rollout.env.make=v.py:V: {no}",
        f"track.trackers[1]=tracker.py:open: {no}",
    ]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**CONFIG, "rewards": {"a": {"function": "no.py:a"}}}))
    done = CliRunner().invoke(app, ["plan", "c.yaml"])
    assert done.exit_code == 0
    assert f"note: rewards.a.function=no.py:a: {no}\n" in done.stderr


def test_a_file_is_read_and_never_run() -> None:
    Path("boom.py").write_text("raise SystemExit('it ran')\n")
    before = set(sys.modules)
    assert list(found("boom.py:f")) == ["boom.py"]
    assert found("whet.rewards.builtin:exact") == {}
    assert not {m for m in set(sys.modules) - before if "boom" in m}


def test_a_file_of_tools_counts_with_the_classes_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's YAML, whose classes are named by module or by file; one of the standard library does not count."""
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own.py").write_text("import beside\n\n\nclass Tool: ...\n")
    Path("beside.py").write_text("x = 1\n")
    Path("module_of_tools.py").write_text("class Other: ...\n")
    names = ["own.py:Tool", "module_of_tools.Other", "no.such.Tool", "json.decoder.JSONDecoder"]
    Path("tools.yaml").write_text(json.dumps({"tools": [{"class_name": name} for name in names]}))
    Path("functions.py").write_text("def f(): ...\n")
    arguments = {
        "tool_config": "tools.yaml",
        "function_tools": "functions.py",
        "interaction_config": "none.yaml",
    }
    env = {"make": "whet.envs.verl_tools:tools", "arguments": arguments}
    stages = config(rollout={**CONFIG["rollout"], "env": env})
    assert set(digests(stages, {})) == {
        "tools.yaml", "own.py", "beside.py", "module_of_tools.py", "functions.py",
    }  # fmt: skip


def test_a_changed_character_changes_the_digest_and_only_that_of_its_file() -> None:
    Path("a.py").write_text("x = 1\n")
    Path("b.py").write_text("x = 1\n")
    first, other = found("a.py:x"), found("b.py:x")
    assert first["a.py"] == other["b.py"]
    Path("a.py").write_text("x = 2\n")
    assert found("a.py:x") != first
    assert found("b.py:x") == other


def test_a_file_counts_with_the_users_files_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "judges_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parse.py").write_text("import json\nfrom . import words\n")
    (package / "words.py").write_text("import judges_of_mine.parse\n")  # a circle
    (package / "score.py").write_text("import torch\nfrom judges_of_mine.parse import number\n")
    assert set(found("judges_of_mine.score:f")) == {
        "judges_of_mine/score.py",
        "judges_of_mine/parse.py",
        "judges_of_mine/words.py",
        "judges_of_mine/__init__.py",
    }
    assert not [m for m in sys.modules if m.startswith("judges_of_mine")]


def test_an_installed_package_counts_by_its_version() -> None:
    version = metadata.version("reasoning_gym")
    assert found("reasoning_gym.utils:f") == {"reasoning_gym": f"reasoning_gym {version}"}
    assert module_file("no.such.module") is None


@pytest.fixture
def by_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The script `whet`, whose path has not the working directory. Modules of the test are forgotten at its end: the
    ranks of later tests would load them, too."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(f"{tmp_path}/"):
            del sys.modules[name]


@pytest.mark.usefixtures("by_script")
def test_modules_in_the_working_directory_are_found_and_count() -> None:
    Path("helper_of_mine.py").write_text(REWARD.format(sign=">"))
    Path("judge_of_mine.py").write_text("from helper_of_mine import right\n")
    for place in ("judge_of_mine", "judge_of_mine.py"):
        assert list(found(f"{place}:right")) == ["helper_of_mine.py", "judge_of_mine.py"]
        assert load_object(f"{place}:right", what="function")("abc", None) == 1.0


@pytest.mark.usefixtures("by_script")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import beside_of_mine", r"No module named 'beside_of_mine'; it is in .*/inner: add this folder to"),
        ("from .beside_of_mine import x", r"name the file by its module \(.*\), or .* PYTHONPATH=.*/inner"),
    ],
)
def test_a_file_that_does_not_find_the_module_beside_it_is_told_how(line: str, said: str) -> None:
    Path("inner").mkdir()
    Path("inner/beside_of_mine.py").write_text("x = 1\n")
    Path("inner/judge.py").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=said):
        load_object("inner/judge.py:right", what="function")


def test_folders_without_init_may_lie_in_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own finder asks for the imported parent of a namespace package."""
    monkeypatch.chdir(tmp_path)
    for place in ("here", "there"):
        monkeypatch.syspath_prepend(place)
        inner = tmp_path / place / "spaces_of_mine" / "math" / "judges"
        inner.mkdir(parents=True)
        (inner / f"{place}.py").write_text("import json\n")
    (inner / "score.py").write_text("from spaces_of_mine.math.judges import here, there, nowhere\n")
    files = {f"{place}/spaces_of_mine/math/judges" for place in ("here", "there")}
    assert set(found("spaces_of_mine.math.judges.score:f")) == {
        "there/spaces_of_mine/math/judges/score.py",
        *(f"{folder}/{folder.partition('/')[0]}.py" for folder in files),
    }
    assert module_file("spaces_of_mine.math.judges") is None
    assert module_file("spaces_of_mine.math.judges.score.more") is None
    assert not [m for m in sys.modules if m.startswith("spaces_of_mine")]


def test_a_function_of_python_counts_by_its_file_and_that_of_a_script_by_its_own_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mine(response: str, task: Any) -> float:
        return 1.0

    stages = config(rewards={"r": {"function": "object:r"}})
    file = digests(stages, {"r": partial(mine)})
    assert [Path(name).name for name in file] == ["test_code.py", "tiny.py", "object:r"]
    monkeypatch.setattr(mine, "__module__", "__main__")
    assert list(digests(stages, {"r": mine})) == ["object:r"]
    unseen = eval("lambda response, task: 1.0")
    assert digests(stages, {"r": unseen}) == {"object:r": "no source"}


def test_functions_of_one_text_differ_in_the_values_that_they_hold() -> None:
    def longer(least: Any, *, factor: float = 1.0) -> Any:
        return lambda response, task: factor * (len(response) > least)

    def scaled(response: str, task: Any, by: Any) -> float:
        return float(by)

    stages = config(rewards={"r": {"function": "object:r"}})

    def own(function: Any) -> str:
        return digests(stages, {"r": function})["object:r"]

    assert own(longer(2)) == own(longer(2))
    assert len({own(longer(2)), own(longer(3)), own(longer("2")), own(longer(2, factor=2.0))}) == 4
    assert own(partial(scaled, by=(1, [2]))) == own(partial(scaled, by=(1, [2])))
    assert len({own(partial(scaled, by=(1, [2]))), own(partial(scaled, by=(1, [3]))), own(scaled)}) == 3
    assert own(longer(object())) == own(longer(object()))


# ---------------------------------------------------------------- runs


def train(*overrides: str, sign: str, **more: Any) -> whet.Result:
    Path("judge.py").write_text(REWARD.format(sign=sign))
    sections = {**CONFIG, "rewards": {"mine": {"function": "judge.py:right"}}}
    return whet.train(overrides=["run_dir=run", *overrides], **sections, **more)


def manifest() -> dict[str, Any]:
    return json.loads(Path("run/manifest.json").read_text())


def test_changed_code_is_told_where_the_run_goes_on_and_a_finished_run_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train("train.steps=2", sign=">")
    old = manifest()["starts"][0]["code_sha256"]["judge.py"]
    assert checkpoint.read_state(Path("run/checkpoints/0-main-000002"))["code"] == {"judge.py": old}
    before = Path("run/metrics.jsonl").read_bytes()
    train("train.steps=2", sign=">")  # the same code: the run is finished, and says so
    with pytest.raises(CheckpointError, match=r"finished run.*code of 'judge.py'.*another run_dir.*fresh"):
        train("train.steps=2", sign="<")
    with pytest.raises(CheckpointError, match=r"finished run.*code of 'judge.py'"):
        train("train.steps=2", sign="<", change=True)
    assert Path("run/metrics.jsonl").read_bytes() == before
    capsys.readouterr()
    train("train.steps=3", sign="<")
    new = manifest()["starts"][-1]["code_sha256"]["judge.py"]
    (row,) = (row for row in manifest()["changes"] if row["kind"] == "branch")
    assert row == {
        "stage": "main", "step": 2, "key": "code of 'judge.py'", "old": old, "new": new, "kind": "branch"
    }  # fmt: skip
    assert capsys.readouterr().out.count("changed code of 'judge.py'") == 1
    assert Path("run/run.log").read_text().count("resuming with changed code of 'judge.py'") == 1
    train("train.steps=4", sign="<")  # once
    assert Path("run/run.log").read_text().count("resuming with changed code of 'judge.py'") == 1


def test_a_finished_run_with_other_settings_is_refused_though_a_change_is_asked_for() -> None:
    train("train.steps=1", sign=">")
    with pytest.raises(CheckpointError, match=r"finished run.*seed: 0 -> 5.*more train.steps"):
        train("train.steps=1", "seed=5", sign=">", change=True)
    train("train.steps=2", "seed=5", sign=">", change=True)
    assert [row["key"] for row in manifest()["changes"] if row["kind"] == "branch"] == ["seed"]
