"""What a run asks of its engine: refused at the start, or computed by the trainer instead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import whet
from whet.config.schema import Config
from whet.rollout.engine import Capabilities
from whet.rollout.needs import check_engine
from whet.types import ConfigError, WhetError

ALL = Capabilities(
    logprobs="always",
    stop_texts=True,
    penalties=True,
    in_flight_updates=True,
    reproducible="everywhere",
)


@pytest.mark.parametrize(
    ("lacks", "tree", "said"),
    [
        ({"stop_texts": False}, {"rollout": {"sampling": {"stop": ("a",)}}}, r"rollout\.sampling\.stop\b"),
        ({"stop_texts": False}, {"eval": {"sampling": {"stop": ("a",)}}}, r"eval\.sampling\.stop\b"),
        (
            {"stop_texts": False},
            {"rollout": {"sources": {"s": {"stop": ("a",)}}}},
            r"rollout\.sources\.s\.stop",
        ),
        (
            {"stop_texts": False},
            {"eval": {"sources": {"s": {"sampling": {"stop": ("a",)}}}}},
            r"eval\.sources\.s\.sampling\.stop",
        ),
        ({"penalties": False}, {"rollout": {"sampling": {"repetition_penalty": 1.2}}}, "repetition_penalty"),
        ({"in_flight_updates": False}, {"rollout": {"schedule": "async"}}, "partial_rollout=false"),
        (
            {"logprobs": "unfiltered"},
            {"rollout": {"sampling": {"top_p": 0.9}}, "algorithm": {"correction": {"weight": "token"}}},
            r"log-probs.*needed by algorithm\.correction; sample without filters",
        ),
        ({"logprobs": "never"}, {"algorithm": {"loss": "dppo"}}, r"needed by algorithm\.loss=dppo"),
        (
            {"logprobs": "never"},
            {"algorithm": {"old_logprobs": "sampled"}},
            r"algorithm\.old_logprobs=sampled",
        ),
        (
            {"logprobs": "never"},
            {"algorithm": {"advantage": {"name": "grpo", "rank_penalty": 0.1}}},
            r"algorithm\.advantage\.rank_penalty",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused(lacks: dict[str, Any], tree: dict[str, Any], said: str) -> None:
    cfg = Config.model_validate(tree)
    check_engine(ALL, cfg)
    check_engine(replace(ALL, **lacks), Config())  # nobody asks for it
    with pytest.raises(ConfigError, match=said):
        check_engine(replace(ALL, **lacks), cfg)


def test_log_probs_that_are_told_without_filters_serve_a_run_without_filters() -> None:
    cfg = Config.model_validate({"algorithm": {"correction": {"weight": "token"}}})
    check_engine(replace(ALL, logprobs="unfiltered"), cfg)


MINE = '''
from dataclasses import replace
from whet.rollout.native.engine import opened

def letters(response, *, letter):
    return float(response.count(letter) > 0)

def plain(inputs):
    return opened(inputs)

class Silent:
    """The native engine, but it does not tell its log-probs."""
    def __init__(self, inputs):
        self.engine = opened(inputs)
    def __getattr__(self, name):
        return getattr(self.engine, name)
    @property
    def can(self):
        return replace(self.engine.can, logprobs="never")
    async def generate(self, request, on_tokens=None):
        done = await self.engine.generate(request, on_tokens)
        return replace(done, logprobs=None, sample_logprobs=None)

class Lying(Silent):
    @property
    def can(self):
        return self.engine.can
'''


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(MINE)
    return {
        "model": {"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
        "tokenizer": {"build": "chars"},
        "data": {"train": [{"path": "tests/data/words.jsonl", "limit": 4}]},
        "rewards": {"a": {"function": f"{tmp_path}/mine.py:letters", "arguments": {"letter": "a"}}},
        "algorithm": {"dynamic_sampling": False},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 4}},
        "train": {"steps": 3, "tasks_per_step": 2},
        "machine": {"device": "cpu"},
        "track": {"trackers": ["jsonl"]},
    }


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_trainer_computes_what_the_engine_cannot_tell(tree: dict[str, Any], tmp_path: Path) -> None:
    """The same run as with an engine that tells, whose old log-probs are recomputed; only nothing is said of how far
    engine and trainer are apart."""
    for name in ("plain", "Silent"):
        whet.train(
            **tree, overrides=[f"run_dir={tmp_path / name}", f"rollout.engine={tmp_path}/mine.py:{name}"]
        )
    told, untold = metrics(tmp_path / "plain"), metrics(tmp_path / "Silent")
    assert any("train/mismatch_max_nats" in line for line in told)
    assert [{k: v for k, v in line.items() if "mismatch" not in k} for line in told] == untold
    tables = [pq.read_table(path) for path in (tmp_path / "Silent" / "rollouts").glob("*.parquet")]
    for row in (row for table in tables for row in table.to_pylist()):
        assert [x != x for x in row["logprobs"]] == [bool(m) for m in row["mask"]]


def test_an_engine_that_promises_log_probs_and_gives_none_is_found_out(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(WhetError):
        whet.train(
            **tree, overrides=[f"run_dir={tmp_path / 'run'}", f"rollout.engine={tmp_path}/mine.py:Lying"]
        )
    assert "returned no log-probs of sampled tokens" in (tmp_path / "run" / "run.log").read_text()


def test_a_run_that_reads_them_does_not_start(tree: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not return the log-probs.*algorithm\.correction"):
        whet.train(
            **tree,
            overrides=[
                f"run_dir={tmp_path / 'run'}",
                f"rollout.engine={tmp_path}/mine.py:Silent",
                "algorithm.correction.weight=token",
            ],
        )
