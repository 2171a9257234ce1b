"""The sweep of `benchmarks/kills.py`, for a few kills; and that it finds what is wrong with a run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import kills


@pytest.mark.sweep  # of one kind; test_apart.py, test_rounds.py, test_cluster.py and test_ranks_run.py kill, too
def test_a_few_kills_of_a_trainer_and_two_explorers(tmp_path: Path) -> None:
    hits, wrong = kills.sweep("apart", 4, seed=4, steps=40, folder=tmp_path)
    assert wrong == []
    assert [h.outcome for h in hits if h.outcome not in kills.GOOD] == []
    assert len(hits) == 4
    assert "| apart |" in kills.table(hits)


def site(folder: Path, lines: list[dict[str, Any]], steps: int = 2) -> kills.Site:
    made = kills.Site("ranks", folder, steps)
    (folder / "run").mkdir()
    text = "".join(
        json.dumps({"train/loss": 0.5, "ledger/pending_rollouts": 0} | line) + "\n" for line in lines
    )
    (folder / "run/metrics.jsonl").write_text(text)
    return made


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([{"step": 1}, {"step": 2}], []),
        ([{"step": 1}], ["differs", "missing or double"]),
        ([{"step": 1}, {"step": 2}, {"step": 2}], ["differs", "missing or double"]),
        ([{"step": 1}, {"step": 2, "train/loss": 0.4}], ["differs"]),
        ([{"step": 1}, {"step": 2, "ledger/pending_rollouts": 3}], ["differs", "3 rollouts pending"]),
        (
            [{"step": 1, "ledger/requested_rollouts": 9, "ledger/trained_rollouts": 8}, {"step": 2}],
            ["differs", "9 rollouts asked, 8 accounted for"],
        ),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, lines: list[dict[str, Any]], found: list[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = site(tmp_path / "a", [{"step": 1}, {"step": 2}])
    unbroken = (whole.folder / "run/metrics.jsonl").read_bytes()
    said = kills.faults(site(tmp_path / "b", lines), unbroken)
    assert len(said) == len(found)
    assert all(part in one for part, one in zip(found, said))


def test_who_is_left_behind_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "END_S", 0.1)
    made = site(tmp_path, [{"step": 1}, {"step": 2}])
    env = {"WHET_KILLS": made.mark}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env) as left:
        try:
            kills.until(lambda: made.everyone(), "the other process")
            [said] = kills.faults(made, None)
            assert said.startswith(f"left behind: ['{left.pid} ")
            made.close()
            assert left.wait(30) < 0, "and ended"
        finally:
            left.kill()
    assert kills.faults(made, None) == []


@pytest.mark.parametrize(
    ("target", "signal", "code", "said", "good"),
    [
        ("rank", "SIGKILL", 1, "whet: rank 1 of 2 died (killed by SIGKILL) while doing: update", True),
        ("rank", "SIGKILL", 1, "Traceback: something else", False),
        ("rank", "SIGKILL", 1, "whet: the disk is full", False),
        ("rank", "SIGKILL", -11, "whet: rank 1 of 2 died", False),
        (
            "rank",
            "SIGSTOP",
            1,
            "whet: rank 1 of 2 is stopped (SIGSTOP) while doing: update; rank 0 waits",
            True,
        ),
        ("rank", "SIGSTOP", 1, "whet: rank 0 of 2 hangs in all_reduce while doing: update", False),
        ("driver", "SIGKILL", 1, "whet: anything", False),
    ],
)
def test_an_end_has_to_name_the_dead(
    tmp_path: Path, target: str, signal: kills.Signal, code: int, said: str, good: bool
) -> None:
    made = site(tmp_path, [])
    (tmp_path / "driver.said").write_text(f"a line\n{said}\n")
    one = kills.Hit("ranks", target, signal, 1)
    assert (kills.judged(made, one, "driver", code) in kills.GOOD) == good


@pytest.mark.parametrize(
    ("dead", "said"),
    [
        ("reward-keeper", "the processes that guard the rewards ended"),
        ("rank", "rank 0 of 2 died (killed by SIGKILL) while doing: forward policy"),
    ],
)
def test_an_end_counts_for_the_dead_that_it_names_however_late_and_once(
    tmp_path: Path, dead: str, said: str
) -> None:
    """Others went on meanwhile, and one of them was hit next."""
    made = site(tmp_path, [])
    (tmp_path / "one.said").write_text(f"whet: {said}\n")
    first, second = (kills.Hit("ranks", who, "SIGKILL", 1) for who in (dead, "driver"))
    made.late, first.outcome, second.outcome = first, "recovered", "resumed by the same command"
    assert kills.judged(made, second, "one", 1) == second.outcome == "resumed by the same command"
    assert first.outcome == kills.NAMED
    assert kills.judged(made, second, "one", 1) not in kills.GOOD, "nobody was killed since"
    made.late = first
    assert kills.judged(made, first, "one", 1) == kills.NAMED
    assert kills.judged(made, second, "one", 1) not in kills.GOOD, "the end before named it"


def test_nobody_is_left_to_be_hit(tmp_path: Path) -> None:
    assert kills.hit(site(tmp_path, []), random.Random(0)) is None
