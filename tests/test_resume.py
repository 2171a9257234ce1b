"""A run that was killed and started again is the run that was never killed: every number, rollout and weight."""

from __future__ import annotations

import filecmp
import json
import signal
import time
from pathlib import Path

import pytest

from forked import Started, whet

DRIVER = Path(__file__).parent / "resume/driver.py"
SAME = ("metrics.jsonl", "rollouts", "eval", "batches", "checkpoints", "export")
"""What two equal runs write byte for byte."""


def drive(run_dir: Path, *, kills: int, seed: int) -> dict[str, object]:
    said = run_dir.with_suffix(".said")
    driver = Started(str(run_dir), str(kills), str(seed), code=DRIVER.read_text(), said=said)
    try:
        assert driver.wait(300) == 0, driver.text()[-3000:]
    finally:
        driver.kill()
    return json.loads(driver.text().splitlines()[-1])


def files(run_dir: Path) -> list[str]:
    found = [p for name in SAME for p in [run_dir / name, *(run_dir / name).rglob("*")] if p.is_file()]
    return sorted(str(p.relative_to(run_dir)) for p in found)


def assert_equal(a: Path, b: Path) -> None:
    assert files(a) == files(b)
    _, different, errors = filecmp.cmpfiles(a, b, files(a), shallow=False)
    assert not errors
    assert not different, f"{different} differ"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unbroken") / "run"
    drive(path, kills=0, seed=0)
    assert (
        len((path / "metrics.jsonl").read_text().splitlines()) == 5 + 7 + 6 + 5 + 5 + 5 + 3 + 4 + 18
    )  # steps, and evaluations
    return path


@pytest.mark.sweep  # killed and the same says it, too
def test_twice_the_same(unbroken: Path, tmp_path: Path) -> None:
    drive(tmp_path / "run", kills=0, seed=0)
    assert_equal(unbroken, tmp_path / "run")


@pytest.mark.parametrize(
    ("seed", "kills"), [(1, 4), *(pytest.param(seed, 8, marks=pytest.mark.sweep) for seed in (1, 2, 3))]
)
def test_killed_at_random_moments(unbroken: Path, tmp_path: Path, seed: int, kills: int) -> None:
    report = drive(tmp_path / "run", kills=kills, seed=seed)
    assert report["kills"], "the run ended before the first kill"
    assert_equal(unbroken, tmp_path / "run")


def test_ctrl_c_saves_and_the_same_command_goes_on(unbroken: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = ["train", "tests/resume/config.yaml", f"run_dir={run_dir}", "track.trackers=[console]"]
    process = Started(*command, said=tmp_path / "first")
    wait_for(run_dir / "metrics.jsonl", lines=3, process=process)
    process.send_signal(signal.SIGINT)
    code, out = process.wait(60), process.text()
    assert code == 130, out
    assert "saved" in out
    assert list((run_dir / "checkpoints").iterdir())
    assert "resuming from" in whet(*command)
    for name in ("metrics.jsonl", "rollouts", "eval", "batches", "export"):
        assert [f for f in files(run_dir) if f.startswith(name)] == [
            f for f in files(unbroken) if f.startswith(name)
        ]
    equal = [f for f in files(unbroken) if not f.startswith("checkpoints")]
    assert filecmp.cmpfiles(unbroken, run_dir, equal, shallow=False)[1:] == ([], [])
    assert "finished run" in whet(*command)


def wait_for(path: Path, *, lines: int, process: Started) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.text()
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.01)
