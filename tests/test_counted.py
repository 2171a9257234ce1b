"""What `whet plan` says of the number of training rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tiny import RUN
from whet.cli import app
from whet.config.load import load
from whet.config.plan import plans
from whet.data import counted

ROWS = [{"prompt": "abc", "answer": "cba"}] * 10


def said(source: dict[str, Any], **train: Any) -> list[str]:
    steps = {} if "epochs" in train else {"steps": 3}
    tree = RUN | {
        "data": {"max_prompt_tokens": 8, "train": [source]},
        "train": {"tasks_per_step": 4, "optimizer": {"lr": 1e-2}} | steps | train,
    }
    return list(counted.told(plans(load(None, (), tree))))


@pytest.mark.parametrize(
    ("source", "train", "follows"),
    [
        ({"rows": ROWS}, {}, "10 training rows.*; 3 steps of 4 tasks pass them 1.2 times or more"),
        ({"rows": ROWS, "skip": 1, "limit": 5}, {}, "5 training rows"),
        ({"rows": ROWS}, {"epochs": 2}, "2 epochs of them have at most 5 steps of 4 tasks"),
        (
            {"rows": ROWS},
            {"epochs": 2, "drop_last": True},
            "2 epochs of them have at most 4 steps of 4 tasks",
        ),
        ({"rows": ROWS}, {"epochs": 1.5}, "1.5 epochs of them have at most 4 steps of 4 tasks"),
        ({"rows": ROWS}, {"epochs": 2, "steps": 3}, "2 epochs of them have at most 3 steps of 4 tasks"),
        (
            {"rows": ROWS},
            {"tasks_per_step": 16},
            "a step takes 16 tasks, so it has some of them several times",
        ),
        (
            {"rows": ROWS},
            {"tasks_per_step": 16, "drop_last": True},
            "with train.drop_last=true an epoch has no step, and the run ends",
        ),
        (
            {"path": "tests/data/words.jsonl"},
            {},
            r"stage \w+: \d+ training rows, before a run leaves any out",
        ),
    ],
)
def test_what_follows_from_the_number_of_rows(
    source: dict[str, Any], train: dict[str, Any], follows: str
) -> None:
    (text,) = said(source, **train)
    assert re.search(follows, text), text


def test_what_is_elsewhere_or_large_or_made_by_a_function_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    assert said({"path": str(rows)})
    assert not said({"path": "hf://datasets/nobody/nothing"})
    assert not said({"path": str(tmp_path / "absent.jsonl")})
    assert not said({"function": f"{tmp_path}/absent.py:rows"})
    monkeypatch.setattr(counted, "MOST_BYTES", 10)
    assert not said({"path": str(rows)})
    monkeypatch.setattr(counted, "MOST_BYTES", 10_000)
    rows.write_text('{"prompt": "a"}\n{')
    assert not said({"path": str(rows)}), "the run says in which line"


def test_a_plan_says_which_files_are_not_there(tmp_path: Path) -> None:
    """A run would end for them after its start; what it fetches first is not looked for."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROWS[0]))
    train = [{"path": [f"{tmp_path}/tasks.jsonl", f"{tmp_path}/taks.jsonl"]}, {"path": "hf://datasets/a/b"}]
    held_out = [{"name": "a", "path": f"{tmp_path}/none/*.jsonl"}, {"name": "b", "rows": ROWS}]
    tree = RUN | {"data": {"max_prompt_tokens": 8, "train": train, "eval": held_out}}
    first, second = counted.absent(plans(load(None, (), tree)))
    assert re.search(
        r"data\.train\[0\]\.path: No such data file: .*taks\.jsonl; did you mean 'tasks\.jsonl'", first
    )
    assert re.search(r"data\.eval\[0\]\.path: No such data file: .*/none", second)
    data = RUN["data"] | {"demonstrations": [{"path": f"{tmp_path}/none.jsonl"}]}
    mixed = load(None, (), RUN | {"algorithm": {"name": "mix"}, "data": data})
    assert [text.partition(": No such")[0] for text in counted.absent(plans(mixed))] == [
        "stage main: data.demonstrations[0].path"
    ]


def test_a_plan_says_how_many_rows_there_are(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN))
    done = CliRunner().invoke(app, ["plan", str(file)])
    assert done.exit_code == 0
    assert "training rows" in done.stderr
