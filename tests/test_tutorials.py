"""The tutorials of the documentation run as they stand, and the pages show the files that run.

`python tests/test_tutorials.py` writes the files into the pages again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from programs import programs

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted((ROOT / "docs").glob("*.md"))
SHOWN = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', flags=re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
SMALL = ("machine.threads=1", "train.steps=4", "checkpoint.interval=2")


def with_files(text: str) -> str:
    """A page with the present content of every file that it shows."""

    def present(block: re.Match[str]) -> str:
        head = block[0].split("\n", 1)[0]
        return f"{head}\n{(ROOT / block[1]).read_text(encoding='utf-8')}```"

    return SHOWN.sub(present, text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_files_that_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == with_files(text), "run: python tests/test_tutorials.py"


def test_every_tutorial_is_on_a_page_and_in_a_test() -> None:
    shown = {name for page in PAGES for name, _ in SHOWN.findall(page.read_text(encoding="utf-8"))}
    files = {
        path.relative_to(ROOT).as_posix()
        for path in TUTORIALS.iterdir()
        if path.suffix in (".py", ".yaml", ".sh")
    }
    assert files == {name for name in shown if name.startswith("docs/tutorials/")}
    here = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in TUTORIALS.glob("*.sh") if f'"{path.name}"' not in here] == []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the examples and tutorials of the checkout, and a finished run of the first one, by a `whet` of an
    interpreter of its own; further ones are forked."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "whet", "train", "docs/tutorials/vowels.yaml", "machine.threads=1"]
    assert "log-prob match: exact" in start(folder, *command)
    (folder / "bin").mkdir()
    with programs(folder / "bin", whet="from whet.cli import main; main()"):
        yield folder


def start(home: Path, *command: str, status: int = 0) -> str:
    """Run a command and return what it printed; `whet` is that of the folder."""
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=home, env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


def script(home: Path, name: str, *arguments: str) -> str:
    return start(home, "bash", f"docs/tutorials/{name}", *arguments)


def rows(run: Path, name: str) -> list[float]:
    """The values of a metric in metrics.jsonl."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def test_the_first_tutorial_learns(home: Path) -> None:
    rewards = rows(home / "runs/vowels", "reward/mean")
    assert len(rewards) == 30
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5]) > 0
    assert (home / "runs/vowels/export/main/config.json").is_file()


def test_a_model_of_ones_own_and_a_reward_from_a_file(home: Path) -> None:
    start(home, "whet", "train", "docs/tutorials/own_model.yaml", *SMALL)
    assert len(rows(home / "runs/own_model", "reward/part/first/begins_mean")) == 4


@pytest.mark.sweep
def test_the_commands_for_a_trained_model(home: Path) -> None:
    """Exports, evaluation and replies of the page, on the model that the page has trained."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (commands,) = [
        block for block in COMMANDS.findall(page) if block.startswith("whet export runs/own_model")
    ]
    start(home, "whet", "train", "docs/tutorials/own_model.yaml", *SMALL)
    told = start(home, "bash", "-euc", commands)
    assert re.search(r"^tasks +8$", told, flags=re.MULTILINE)
    assert "%|" not in told, "no progress bars of libraries"
    assert (home / "replies.parquet").is_file()


@pytest.mark.sweep  # test_examples.py runs the README's Python
def test_from_python(home: Path) -> None:
    told = start(home, sys.executable, "docs/tutorials/from_python.py")
    assert len(rows(home / "runs/from_python", "reward/mean")) == 8
    accuracy = float(told.strip().splitlines()[-1].rpartition(" ")[2])
    assert 0.0 <= accuracy <= 1.0


def test_a_foreign_config(home: Path) -> None:
    told = script(home, "foreign_config.sh")
    assert "tasks_per_step: 16" in told
    assert "cannot" not in (home / "plan.txt").read_text()


@pytest.mark.sweep
def test_a_killed_run_resumes(home: Path) -> None:
    assert "the same metrics, byte for byte" in script(home, "kill_and_resume.sh", *SMALL)


@pytest.mark.sweep
def test_a_wrong_reward_is_told_and_mended(home: Path) -> None:
    told = script(home, "wrong_reward.sh", "machine.threads=1")
    assert "no: constant reward" in told
    shown = told.split("limit 64 shows all")[1].split("\n")
    assert any(line.endswith(" with 'a '") for line in shown[:3]), "the line of run.log"
    assert told.rindex("main   yes") > told.index("no: constant reward")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "run"), [("schedules.sh", "asynchronous"), ("explorers.sh", "explorers"), ("ranks.sh", "ranks")]
)
def test_schedules_explorers_and_ranks(home: Path, name: str, run: str) -> None:
    """What they show is tested at each layer, too: test_overlap, test_staleness, test_rounds, test_ranks_run."""
    script(home, name, *SMALL)
    assert len(rows(home / "runs" / run, "reward/mean")) == 4


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_files(page.read_text(encoding="utf-8")), encoding="utf-8")
