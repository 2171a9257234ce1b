"""Settings that could have no effect are refused, with the reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tiny import tiny_model
from whet.config.checks import hard_problems, unused
from whet.config.load import load
from whet.data.tokenizer import build
from whet.models.load import export

BASE: dict[str, Any] = {
    "model": {"scratch": {"hidden_size": 32, "layers": 1, "heads": 2}},
    "tokenizer": {"build": "chars", "vocab_size": 100},
    "data": {"train": [{"path": "tests/data/words.jsonl"}]},
    "rewards": {"right": {"function": "exact"}},
    "train": {"steps": 1},
}


def problems(*overrides: str, **sections: Any) -> list[tuple[str, str]]:
    loaded = load(None, overrides, copy.deepcopy(BASE) | sections)
    idle = [(".".join(map(str, path)), why) for path, why in unused(loaded.written, loaded.stages)]
    return [*hard_problems(loaded.config), *idle]


def test_an_end_token_beyond_the_vocabulary_is_refused() -> None:
    assert problems("rollout.sampling.stop_token_ids=[3, 99]") == []
    ((key, why),) = problems("rollout.sampling.stop_token_ids=[3, 100, 7000]")
    assert key == "rollout.sampling.stop_token_ids"
    assert why.startswith("100, 7000 can never be sampled: the vocabulary has the tokens 0 to 99")


def test_an_end_token_beyond_the_vocabulary_of_a_folder_is_refused(tmp_path: Path) -> None:
    export(tiny_model(layers=1), build("chars", 61, ["abc"]), tmp_path / "m")
    model = {"model": {"path": str(tmp_path / "m")}, "tokenizer": {}}
    assert problems("rollout.sampling.stop_token_ids=[60]", **model) == []
    ((key, why),) = problems("rollout.sampling.stop_token_ids=[61]", **model)
    assert (key, "the tokens 0 to 60" in why) == ("rollout.sampling.stop_token_ids", True)


@pytest.mark.parametrize(
    "older",
    ["rollout.max_staleness=1", "rollout.sync_every=2", "rollout.schedule=free", "buffer.replay.share=0.5"],
)
def test_a_decay_with_staleness_is_refused_where_no_rollout_is_stale(older: str) -> None:
    decay = "algorithm.correction.staleness_decay=0.5"
    assert not [key for key, _ in problems(decay, older) if "staleness_decay" in key]
    ((key, why),) = [p for p in problems(decay) if "staleness_decay" in p[0]]
    assert key == "algorithm.correction.staleness_decay"
    assert "has no effect: no rollout is older than the weights that learn" in why
