"""Plain-text prompts to a model with a chat template: the run says that the template is not applied, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import whet
from tiny import RUN

SAID = "prompts of words are plain text, so the model's chat template is not applied"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer that has a chat template."""
    run_dir = tmp_path_factory.mktemp("model") / "run"
    train(run_dir)
    return run_dir / "export" / "main"


def train(run_dir: Path, *overrides: str, **sections: Any) -> str:
    """run.log of a run of one step on plain text."""
    rows = [{"prompt": word, "answer": word} for word in ("ab", "ba", "bb")]
    data = {"max_prompt_tokens": 27, "train": [{"name": "words", "rows": rows}]}
    config = {**RUN, "data": data, "rewards": {"right": {"function": "exact"}}, "track": {}, **sections}
    whet.train(overrides=[f"run_dir={run_dir}", "train.steps=1", *overrides], **config)
    return (run_dir / "run.log").read_text()


def test_the_run_says_that_no_template_is_applied(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"model": {"path": str(model)}, "tokenizer": {}}
    capsys.readouterr()
    log = train(tmp_path / "plain", **own)
    assert log.count(SAID) == 1
    assert capsys.readouterr().out.count(SAID) == 1
    assert "data.chat=true" in log
    assert SAID not in train(tmp_path / "on-purpose", "data.chat=false", **own)


def test_a_model_from_scratch_has_no_template_of_its_own_to_miss(tmp_path: Path) -> None:
    assert SAID not in train(tmp_path / "run")
