"""`whet rehearse`: what it finds in configs that would fail, what it makes small, what it says of the real run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from forked import Started
from native_cases import CASES, LATER
from observed import write_files
from test_dead_native import tree_of
from whet.cli import app
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import Config, ModelConfig
from whet.config.sources import order_of
from whet.guard.processes import kill, process
from whet.rehearsal import trial as small_runs
from whet.rehearsal.findings import works
from whet.rehearsal.probe import probe
from whet.rehearsal.rehearse import Rehearsal, rehearse
from whet.rehearsal.shrink import STEPS, check, family, shrink
from whet.rehearsal.size import devices, parameters_of_name, predict
from whet.rehearsal.teacher import write_teacher
from whet.rehearsal.trial import trial
from whet.types import WhetError

ROOT = Path(__file__).parent.parent


def small(tmp_path: Path, **over: object) -> Path:
    """A config of 64 tasks a step that asks for a model which is not here."""
    rows = [{"prompt": f"copy {n}", "answer": str(n)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, object] = {
        "run_dir": str(tmp_path / "real"),
        "model": {"path": "/models/Qwen2.5-7B-Instruct"},
        "data": {"train": [{"path": str(tmp_path / "rows.jsonl")}]},
        "rewards": {"right": {"function": "exact"}},
        "train": {"steps": 100, "tasks_per_step": 64, "minibatches": 4},
        "rollout": {"group_size": 8, "sampling": {"max_tokens": 4096}},
    }
    file = tmp_path / "big.yaml"
    file.write_text(yaml.safe_dump(tree | over))
    return file


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("Qwen/Qwen2.5-7B", "qwen2"),
        ("Qwen/Qwen2-0.5B", "qwen2"),
        ("Qwen/Qwen3-8B", "qwen3"),
        ("Qwen/Qwen3-30B-A3B", "qwen3_moe"),
        ("meta-llama/Llama-3.1-8B", "llama"),
        ("mistralai/Mistral-7B-v0.3", "mistral"),
        ("google/gemma-2b", "gemma"),
        ("XiaomiMiMo/MiMo-7B-RL", "mimo"),
        ("somebody/unheard-of", "qwen3"),
    ],
)
def test_the_family_is_read_off_the_name(name, made):
    assert family(ModelConfig(path=name)) == made


def test_layers_of_multi_token_prediction_are_tried(tmp_path):
    file = small(tmp_path, model={"path": "/models/MiMo-7B-RL", "mtp": {"name": "distill", "coef": 0.2}})
    cfg = check(shrink(load(file), run_dir=tmp_path / "out", lost={}, broken=set()))
    assert cfg.model.mtp == {"name": "distill", "coef": 0.2}
    assert cfg.model.scratch["name"] == "mimo"


def test_the_models_own_config_beats_its_name(tmp_path):
    folder = tmp_path / "my-qwen-like"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert family(ModelConfig(path=str(folder))) == "llama"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Qwen2.5-7B-Instruct", 7e9),
        ("Qwen2.5-0.5B", 5e8),
        ("Llama-3.1-70b", 7e10),
        ("gpt2", None),
        ("A3Bx", None),
    ],
)
def test_the_size_is_read_off_the_name(name, count):
    assert parameters_of_name(f"/models/{name}") == count


def test_the_small_run_keeps_what_matters_and_shrinks_the_rest(tmp_path):
    loaded = load(small(tmp_path), ["algorithm.name=dapo", "algorithm.loss.clip_high=0.4"])
    cfg = check(shrink(loaded, run_dir=tmp_path / "out", lost={}, broken=set()))
    assert (cfg.algorithm.name, cfg.algorithm.loss) == ("dapo", {"clip_high": 0.4})
    assert cfg.rewards["right"].function == "exact"
    assert cfg.data.train[0].path == str(tmp_path / "rows.jsonl")
    assert cfg.model.scratch is not None
    assert cfg.model.scratch["name"] == "qwen2"
    assert (cfg.train.steps, cfg.train.tasks_per_step, cfg.train.minibatches) == (STEPS, 4, 2)
    assert cfg.algorithm.dynamic_sampling is False, "random weights would never fill a step"
    plans(cfg)


@pytest.mark.parametrize(
    ("order", "columns"),
    [
        ("easy_first", {"difficulty": "n"}),
        ({"name": "random", "distinct": 64}, {}),
        ({"name": "adaptive", "columns": ["n", "m"]}, {}),
    ],
)
def test_an_order_of_rows_is_tried_where_its_rows_are(order, columns, tmp_path):
    """Not on held-out rows, which have none of its columns, nor on rows that are made up for missing ones."""
    file = small(tmp_path)
    rows = [{"prompt": f"copy {n}", "answer": str(n), "n": n / 8, "m": 1.0} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "copy 9", "answer": "9"}) + "\n")
    here, missing = ({"path": str(tmp_path / name), **columns} for name in ("rows.jsonl", "none.jsonl"))
    held = {"path": str(tmp_path / "held.jsonl")}
    for train, lost in (([here], set()), ([here, missing], {"main/train/1"})):
        loaded = load(file, (), {"data": {"train": train, "eval": [held], "order": order}})
        found = probe(loaded)
        assert found.lost.keys() == lost
        cfg = check(shrink(loaded, run_dir=tmp_path / "out", lost=found.lost, broken=set()))
        plans(cfg)
        assert order_of(cfg.data).name == ("shuffle" if lost else order_of(loaded.config.data).name)
        assert order_of(cfg.data).settings.get("distinct", 1) == 1


def test_stages_stay_stages(tmp_path):
    loaded = load(ROOT / "examples" / "first_run.yaml")
    cfg = check(shrink(loaded, run_dir=tmp_path, lost={}, broken=set()))
    assert [stage.name for stage in cfg.stages] == list(loaded.names)
    assert [p.algorithm.name for p in plans(cfg)] == [p.algorithm.name for p in plans(loaded)]


def test_data_and_rewards_that_cannot_work_are_told_each_by_itself(tmp_path):
    (tmp_path / "bad.py").write_text(
        "def raises(response, task):\n    raise KeyError('gold')\n\n\ndef right(response, task):\n    return 1.0\n"
    )
    sources = [{"path": str(tmp_path / "rows.jsonl")}, {"path": str(tmp_path / "missing.parquet")}]
    sources += [{"path": str(tmp_path / "rows.jsonl"), "name": "other", "prompt": "question"}]
    rewards = {n: {"function": f"{tmp_path}/bad.py:{n}"} for n in ("raises", "right", "absent")}
    found = probe(load(small(tmp_path, data={"train": sources}, rewards=rewards)))
    failed = {f.what.split(" ")[0]: f.said for f in found.findings if f.kind == "fails"}
    assert failed.keys() == {"data.train[1]", "data.train[2]", "rewards.raises", "rewards.absent"}
    assert "missing.parquet" in failed["data.train[1]"]
    assert "question" in failed["data.train[2]"]
    assert "KeyError" in failed["rewards.raises"]
    assert found.broken == {"raises", "absent"}
    assert set(found.lost) == {"main/train/1", "main/train/2"}
    said = {f.what.split(" ")[0]: f.said for f in found.findings if f.kind == "works"}
    assert "8 rows read" in said["data.train[0]"]
    assert "the reference answer as the reply gets 1" in said["rewards.right"]


def test_tools_are_opened_before_the_run_and_what_cannot_be_is_told(tmp_path):
    (tmp_path / "shop.py").write_text("def price(fruit: str) -> float:\n    return 1.0\n")
    broken_server = {"command": ["/nowhere/server"]}
    for arguments, kind, said in [
        ({"functions": [f"{tmp_path}/shop.py:price"]}, "works", "tools: price"),
        ({"functions": [f"{tmp_path}/shop.py:prise"]}, "fails", "did you mean 'price'"),
        ({"mcp": [broken_server]}, "fails", "MCP"),
        ({"search": {"path": f"{tmp_path}/none.jsonl"}}, "fails", "none.jsonl"),
    ]:
        env = {"make": "whet.envs.tool_env:tools", "arguments": arguments}
        rollout = {"group_size": 8, "sampling": {"max_tokens": 4096}, "env": env}
        file = small(tmp_path, rollout=rollout)
        found = {f.what: f for f in probe(load(file, rehearsal=True)).findings}
        finding = found["rollout.env (whet.envs.tool_env:tools)"]
        assert (finding.kind, said in finding.said) == (kind, True), finding


def test_what_the_real_run_takes_is_arithmetic(tmp_path):
    loaded = load(small(tmp_path))
    found = {f.what: f.said for f in predict(loaded, plans(loaded))}
    # 7e9 x (2 weights + 2 gradients + 8 moments + 4 master) bytes and 2 more for the engine = 126e9
    assert found["main: memory"].startswith("117 GiB before activations (taking 7B parameters from the name)")
    # 64 x 8 rollouts x (1024 + 4096) tokens
    assert "512 rollouts of at most 5120 tokens per step = 2.62e+06 tokens" in found["main: work"]


def forked(command, *, stdout, env, **_):
    """A process of a trial; test_a_run_that_ends_is_told_with_its_cause has a new interpreter."""
    return Started(*command[5:], said=stdout.name, env=env, cwd=Path.cwd())


@pytest.fixture
def forks(monkeypatch):
    """Trials start at once."""
    own = vars(subprocess) | {"Popen": forked}
    monkeypatch.setattr("whet.rehearsal.trial.subprocess", SimpleNamespace(**own))


@pytest.mark.usefixtures("forks")
def test_a_file_for_64_gpus_is_rehearsed_and_what_is_not_built_is_named(tmp_path):
    said = list[str]()
    firing = "actor_rollout_ref.rollout.use_fire_sampling=true"
    found = rehearse(ROOT / "tests" / "dialects" / "verl_64_gpus.yaml", [firing], say=said.append)
    by_kind: dict[str, dict[str, str]] = {}
    for f in found.findings:
        by_kind.setdefault(f.kind, {})[f.what] = f.said
    assert not found.passed
    assert set(by_kind["fails"]) == {
        "data.train[0] /data/dapo-math-17k.parquet",
        "data.eval[0] /data/aime-2024.parquet",
    }
    assert "kill -9 and resume" in by_kind["works"], "made-up rows stand in for the missing ones"
    assert any("use_fire_sampling" in said for said in by_kind["open"].values())
    assert "64 GPUs" in by_kind["needs"]["main: memory"]
    assert devices(load(ROOT / "tests" / "dialects" / "verl_64_gpus.yaml", rehearsal=True)) == 64
    assert json.loads(found.to_json())["passed"] is False


def test_a_run_that_ends_is_told_with_its_cause(tmp_path):
    tree = shrink(load(small(tmp_path)), run_dir=tmp_path / "out", lost={}, broken=set())
    tree["rewards"] = {"right": {"function": "nowhere:f"}}
    [found] = list(trial(tree, tmp_path))
    assert (found.kind, found.what) == ("fails", "the run")
    assert "nowhere" in found.said


def test_a_run_that_hangs_is_not_said_to_have_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(small_runs, "TIMEOUT_S", 0.1)
    tree = shrink(load(small(tmp_path)), run_dir=tmp_path / "out", lost={}, broken=set())
    [found] = list(trial(tree, tmp_path))
    assert (found.kind, found.what) == ("fails", "the run")
    assert found.said.startswith("hung (no end within 0.1 s) after 0 steps")
    waiting = subprocess.Popen(["sleep", "600"], start_new_session=True)
    assert small_runs.kill_within(waiting, tmp_path / "metrics.jsonl") == "the run hung: no step within 0.1 s"
    assert waiting.returncode == -signal.SIGKILL


def test_names_of_files_are_printed_as_they_are():
    found = Rehearsal(Path("a.yaml"), (works("data.train[0] rows/[v1]/[/a].jsonl", "4 rows read"),))
    console = Console(file=io.StringIO(), width=120)
    console.print(found)
    assert "data.train[0] rows/[v1]/[/a].jsonl" in console.file.getvalue()


@pytest.mark.usefixtures("forks")
def test_the_command_exits_with_what_it_found(tmp_path):
    out = tmp_path / "found.json"
    result = CliRunner().invoke(app, ["rehearse", str(small(tmp_path)), "-o", str(out)])
    assert result.exit_code == 0, result.output
    findings = json.loads(out.read_text())["findings"]
    assert {"kill -9 and resume", "steps", "checkpoints"} <= {
        f["what"] for f in findings if f["kind"] == "works"
    }
    assert not (tmp_path / "real").exists(), "a rehearsal writes nothing where the run will"
    assert isinstance(load(small(tmp_path)).config, Config)


STARTER = """
import sys
from pathlib import Path
from whet.rehearsal import trial
print(trial.start({}, Path(sys.argv[1]), "small").pid, flush=True)
sys.stdin.read()
"""
SLEEPER = """
import sys, types

def main():
    import pathlib, time
    pathlib.Path({began!r}).touch()
    time.sleep(600)

sys.modules["whet.cli"] = types.ModuleType("whet.cli")
sys.modules["whet.cli"].main = main
"""


def test_the_small_run_does_not_outlive_the_rehearsal(tmp_path: Path) -> None:
    began = tmp_path / "began"
    (tmp_path / "sitecustomize.py").write_text(SLEEPER.format(began=str(began)))
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        child = process(int(starter.stdout.readline()))
        try:
            eventually(began.exists)
            starter.kill()
            starter.wait()
            eventually(lambda: process(child[0]) != child)
        finally:
            kill(child)


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ---------------------------------------------------------------- every config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cases")
    write_files(made)
    return made


CONTEXTS = sorted({f"train.steps=2; {c}" if name in LATER else c for name, (c, _) in CASES.items()})


@pytest.mark.parametrize("missing", [False, True], ids=["all there", "no rows and no rewards"])
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.sweep)])
def test_a_config_that_works_is_a_small_one_that_works(
    every: int, missing: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the contexts that the schema's keys have a meaning in."""
    monkeypatch.chdir(folder)
    tried = 0
    for context in CONTEXTS[::every]:
        try:
            loaded = load(None, (), tree_of(SimpleNamespace(folder=folder), context))
            plans(loaded)
        except WhetError:  # a context for a key that is refused
            continue
        parts = ("train", "eval", "demonstrations")
        gone = {
            f"{name}/{part}/{n}": "gone"
            for name, cfg in zip(loaded.names, loaded.stages)
            for part in parts
            for n in range(len(getattr(cfg.data, part)))
        }
        broken = {name for cfg in loaded.stages for name in cfg.rewards}
        lost, without = (gone, broken) if missing else ({}, set())
        try:
            plans(check(shrink(loaded, run_dir=folder / "out", lost=lost, broken=without)))
        except WhetError as e:
            pytest.fail(f"{context}: {e}")
        tried += 1
    assert tried > 150 / every


SOURCES: dict[str, Any] = {
    "data": {
        "chat": True,
        "train": [
            {"name": "asked", "rows": [{"prompt": "a", "answer": "b"}]},
            {"name": "held", "rows": [{"prompt": "c"}], "rewards": []},
            {"path": "labelled.jsonl", "label": "kind"},
        ],
        "eval": [{"name": "held", "rows": [{"prompt": "d"}], "rewards": []}],
    },
    "rollout": {
        "sampling": {"max_tokens": 4096, "min_tokens": 30},
        "sources": {"asked": {"max_tokens": 3000, "stop": ["."]}, "other": {"max_tokens": 31}},
        "env": {
            "make": "whet.envs.several:make",
            "arguments": {
                "envs": {
                    "asked": {},
                    "held": {"make": "whet.envs.frozen_lake:make"},
                    "other": {"make": "whet.envs.frozen_lake:make"},
                }
            },
        },
    },
}
"""Sources with sampling, rewards and environments of their own; one whose rows say which they are."""


@pytest.mark.parametrize("gone", [(), (2,), (0, 1, 2)])
def test_settings_of_single_sources_are_small_and_go_with_their_rows(
    gone: tuple[int, ...], tmp_path: Path
) -> None:
    """Rows that are made up have no label, and no column that names an environment."""
    lost = {f"main/train/{n}": "gone" for n in gone}
    cfg = check(shrink(load(small(tmp_path, **SOURCES)), run_dir=tmp_path, lost=lost, broken={"right"}))
    plans(cfg)
    own = {name: source.max_tokens for name, source in cfg.rollout.sources.items()}
    assert own == {"asked": 24}, "which rows have the label `other` is not known of few rows"
    assert [source.rewards for source in cfg.data.train] == [None, (), None]


def test_a_reward_is_tried_on_the_sources_that_it_scores(tmp_path: Path) -> None:
    """The rows of the second source have no answer, which the other source's reward compares with."""
    data = {
        "train": [
            {"name": "asked", "rows": [{"prompt": "a", "answer": "b"}]},
            {"name": "free", "rows": [{"prompt": "c"}], "rewards": ["short"]},
        ]
    }
    rewards = {"right": {"function": "exact"}, "short": {"function": "whet.rewards.made_up:coin"}}
    data["train"][0]["rewards"] = ["right"]
    found = probe(load(small(tmp_path, data=data, rewards=rewards)))
    assert not found.broken, found.findings


def test_a_reward_is_tried_on_rows_that_an_earlier_stage_has_read(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def never(response, task):\n    raise ValueError('on every row')\n")
    never = {"never": {"function": f"{tmp_path}/broken.py:never"}}
    one, two = {"name": "one", "rewards": {"right": {"function": "exact"}}}, {"name": "two", "rewards": never}
    found = probe(load(small(tmp_path, stages=[one, two], rewards={})))
    assert found.broken == {"never"}, found.findings
    both = {"right": {"function": "exact"}, **never}
    rows = [{"prompt": "a", "answer": "b"}]
    stages = [
        {"name": name, "data": {"train": [{"name": name, "rows": rows, "rewards": [reward]}]}}
        for name, reward in (("one", "right"), ("two", "never"))
    ]
    found = probe(load(small(tmp_path, stages=stages, rewards=both, data={})))
    assert found.broken == {"never"}, found.findings


TEACHES = {"algorithm": {"name": "distill"}, "reference": {"path": "/models/Qwen2.5-72B"}, "rewards": {}}


def test_a_teacher_is_another_model_than_the_policy(tmp_path: Path) -> None:
    tree = shrink(load(small(tmp_path, **TEACHES)), run_dir=tmp_path, lost={}, broken=set())
    cfg = check(tree)
    assert cfg.reference.path == str(tmp_path / "teacher")
    plans(cfg)
    write_teacher(tree, tmp_path)
    teacher = load_file(tmp_path / "teacher" / "model.safetensors")
    assert teacher["model.embed_tokens.weight"].shape[1] == 64
    assert (tmp_path / "teacher" / "tokenizer.json").is_file()


@pytest.mark.sweep
def test_a_teacher_is_rehearsed(tmp_path: Path) -> None:
    found = rehearse(small(tmp_path, **TEACHES), say=lambda text: None)
    assert not [f for f in found.findings if f.kind == "fails"]
    said = {f.what: f.said for f in found.findings if f.kind == "works"}
    assert "byte for byte" in said["kill -9 and resume"]
