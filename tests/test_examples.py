"""What the README and the examples show is true: commands exist, configs are right, the Python runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from whet import cli
from whet.config import explain
from whet.config.load import load
from whet.config.plan import plans

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_the_readmes_commands_are_there() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    lines = [line for _, block in BLOCKS for line in block.splitlines() if line.startswith("whet ")]
    assert len(lines) >= 4
    for line in lines:
        name, first = line.split()[1:3]
        assert name in commands, line
        if name == "explain":
            assert explain.explain(first)
        if first.endswith(".yaml"):
            assert (ROOT / first).is_file(), line
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"^make (\w+)", "".join(block for _, block in BLOCKS), flags=re.MULTILINE):
        assert target in targets


def test_the_readmes_configs_are_right(tmp_path: Path) -> None:
    configs = [block for language, block in BLOCKS if language == "yaml"]
    assert configs
    for text in configs:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        assert plans(load(path))


def test_the_readmes_python_runs_as_it_stands(tmp_path: Path) -> None:
    """As a script without a `__main__` guard, in a folder that has the examples; only the steps are fewer."""
    (code,) = [block for language, block in BLOCKS if language == "python"]
    few = 'overrides=["stages.sft.train.steps=20", "stages.rl.train.steps=5", "machine.threads=1"],\n    run_dir='
    assert code.count("run_dir=") == 1
    (tmp_path / "script.py").write_text(code.replace("run_dir=", few))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    accuracy, run_dir = done.stdout.strip().splitlines()[-1].split()
    assert 0.0 <= float(accuracy) <= 1.0
    assert (tmp_path / run_dir / "metrics.jsonl").is_file()


EXAMPLES = sorted(p for p in (ROOT / "examples").rglob("*") if p.suffix in (".yaml", ".toml", ".sh"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_every_example_shows_what_it_does(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign file may name no console, and then a run prints nothing."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MODEL", "models/some")  # gsm8k.yaml asks for it
    assert "console" in load(path).config.track.trackers


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_every_example_says_what_it_needs_and_how_long_it_takes(path: Path) -> None:
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if re.match("#(?!!)", line)]
    assert head[0].startswith("# Needs: ")
    assert any("Takes: " in line for line in head)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_every_example_reads_data_of_the_examples_or_what_it_says_it_needs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it runs where the folder of examples alone was copied to."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MODEL", "models/some")
    (needs,) = re.findall(r"^# Needs: (.*)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for stage in load(path).stages:
        for source in (*stage.data.train, *stage.data.demonstrations, *stage.data.eval):
            paths = source.path or (source.function or "").partition(":")[0]
            for read in [paths] if isinstance(paths, str) else paths:
                known = "/" not in read or str(Path(read).parent) in needs
                assert known or (read.startswith("examples/") and Path(read).is_file()), read
