"""Rows of token ids, and made-up ones for trial runs of full length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import whet
from tiny import RUN
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import DataConfig, SourceConfig, TokenizerConfig
from whet.data.rows import read_rows
from whet.data.tasks import TaskStream, demonstration, eval_tasks
from whet.data.tokenizer import load_tokenizer
from whet.models.load import build, export
from whet.types import ConfigError, DataError, Task

LETTERS = "abcdefghijklmnop"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=[LETTERS])


def tasks(tokenizer: Any, rows: list[dict[str, Any]], *, count: int = 1, **source: Any) -> list[Task]:
    sources = [SourceConfig(rows=tuple(rows), name="t", **source)]
    cfg = DataConfig(order="sequential", chat=False)
    return TaskStream(sources, cfg, tokenizer=tokenizer, seed=0, max_response_tokens=8).next(count)


def test_tokens_of_a_row_are_taken_as_they_are(tokenizer: Any) -> None:
    """Beside rows of text, whose tokens are the tokenizer's with an end."""
    ids = [9, 3, 3, 7]
    a, b = tokenizer("ab", add_special_tokens=False)["input_ids"]
    given = [{"prompt": ids, "response": [5, 6]}, {"prompt": "ab", "response": "b"}]
    tokens, text = tasks(tokenizer, given, count=2)
    assert (tokens.token_ids, tokens.response, text.token_ids) == (tuple(ids), (5, 6), (a, b))
    (strand,) = demonstration(tokens, tokenizer, 8).strands
    assert (list(strand.token_ids), list(strand.mask)) == ([*ids, 5, 6], [0, 0, 0, 0, 1, 1]), (
        "no end is added"
    )
    (strand,) = demonstration(text, tokenizer, 8).strands
    assert list(strand.token_ids) == [a, b, b, tokenizer.eos_token_id]
    assert Task.from_json(json.loads(json.dumps(tokens.to_json()))) == tokens
    (whole,) = tasks(tokenizer, [{"response": ids}], prompt=None)
    (strand,) = demonstration(whole, tokenizer, 8).strands
    assert (list(strand.token_ids), list(strand.mask)) == (ids, [0, 1, 1, 1])


def test_tokens_that_cannot_be_used_are_refused(tokenizer: Any) -> None:
    least = len(tokenizer)
    with pytest.raises(DataError, match=f"row 2: it has token ids from 1 to {least}, but the tokenizer has"):
        tasks(tokenizer, [{"prompt": [1]}, {"prompt": [1, least]}])
    with pytest.raises(DataError, match="it has token ids from -1 to 2"):
        tasks(tokenizer, [{"prompt": [1], "response": [2, -1]}])
    with pytest.raises(DataError, match="holds token ids, which system_prompt cannot be added to"):
        tasks(tokenizer, [{"prompt": [1]}], system_prompt="Be brief.")
    with pytest.raises(DataError, match="its response has 9 tokens, the limit is 8"):
        tasks(tokenizer, [{"prompt": [1], "response": [2] * 9}])
    for odd in ([], [1, True], [1, 2.0]):
        with pytest.raises(DataError, match=r"non-empty list of|messages whose role"):
            tasks(tokenizer, [{"prompt": odd}])


def test_replies_of_tokens_without_an_end_are_counted(tokenizer: Any, caplog: Any) -> None:
    """The ends of the model count, too; text gets an end by itself."""
    end = tokenizer.eos_token_id
    rows = [{"prompt": [4], "response": ids} for ids in ([5, end], [5, 6], [5, 7], "ab")]
    source = SourceConfig(rows=(*rows,), name="t")
    made = TaskStream([source], DataConfig(), tokenizer=tokenizer, seed=0, max_response_tokens=8, ends={7})
    assert made.counts["replies_without_end_token"] == 1
    assert "1 replies_without_end_token" in caplog.text
    asked = TaskStream([source], DataConfig(), tokenizer=tokenizer, seed=0)
    assert "replies_without_end_token" not in asked.counts, "nothing learns from these replies"


def test_held_out_tokens_are_not_trained_on(tokenizer: Any) -> None:
    held = SourceConfig(rows=({"prompt": [4, 2]},), name="held")
    cfg = DataConfig(order="sequential")
    source = SourceConfig(rows=({"prompt": [4, 2]}, {"prompt": [4, 3]}), name="t")
    exclude = eval_tasks([held], cfg, tokenizer=tokenizer)
    stream = TaskStream([source], cfg, tokenizer=tokenizer, seed=0, exclude=exclude)
    assert (stream.counts["held_out"], stream.next(1)[0].token_ids) == (1, (4, 3))


# ---------------------------------------------------------------- made-up rows


def made(**arguments: int) -> SourceConfig:
    nothing = {} if arguments.get("prompt") else {"prompt": None}
    return SourceConfig(function="random_tokens", arguments=arguments, **nothing)


def test_random_tokens_follow_from_seed_and_row_and_fill_the_vocabulary() -> None:
    rows = read_rows(made(rows=64, prompt=50, response=20), vocabulary=40)
    first = rows.row(0)
    assert (len(rows), len(first["prompt"]), len(first["response"])) == (64, 50, 20)
    drawn = np.array([rows.row(n)["prompt"] for n in range(64)])
    counts = np.bincount(drawn.ravel(), minlength=40)
    assert len(counts) == 40
    expected = drawn.size / 40
    assert ((counts - expected) ** 2 / expected).sum() < 73, "chi square of 39 degrees at 0.001"
    assert len({tuple(row) for row in drawn.tolist()}) == 64, "no two rows are alike"
    again = read_rows(made(rows=2, prompt=30), vocabulary=40)
    assert again.row(1)["prompt"] == rows.row(1)["prompt"][:30], "neither other rows nor lengths change them"
    assert read_rows(made(rows=2, prompt=30, seed=1), vocabulary=40).row(1) != again.row(1)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"arguments": {"rows": 2}}, "give the tokens of a prompt, of a response, or both"),
        ({"arguments": {"rows": 2, "response": 5}}, "set the source's prompt to null"),
        ({"arguments": {"rows": 2, "prompt": 5}, "prompt": None}, "leave the source's prompt out"),
        ({"arguments": {"rows": 0, "prompt": 5}}, "rows: got 0"),
        ({"arguments": {"prompt": 5}}, "rows: must be given"),
        ({"arguments": {"rows": 2, "promt": 5}}, "arguments.promt: unknown key; did you mean 'prompt'"),
    ],
)
def test_rows_that_cannot_be_made_up_are_refused(source: Any, said: str) -> None:
    data = {"train": [{"function": "random_tokens", **source}]}
    sft = {**RUN, "rollout": {"sampling": {"max_tokens": 8}}}
    with pytest.raises(ConfigError, match=said):
        plans(load(None, (), {**sft, "algorithm": "sft", "rewards": {}, "data": data}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A folder with a model and its tokenizer: rows of tokens have no text to build one from."""
    return exported(tmp_path_factory.mktemp("model"), tokenizer, len(tokenizer))


def exported(folder: Path, tokenizer: Any, size: int) -> Path:
    """The folder with a model of so many token ids."""
    cfg = load(None, (), RUN).config.model
    net = build(
        cfg,
        vocab_size=size,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )
    export(net, tokenizer, folder)
    return folder


def trial(model: Path, folder: Path, *, arguments: Any, **more: Any) -> Any:
    source = {
        "function": "random_tokens",
        "arguments": arguments,
        **({} if "prompt" in arguments else {"prompt": None}),
    }
    tree = {**RUN, "model": {"path": str(model)}, "data": {"max_prompt_tokens": 8, "train": [source]}, **more}
    del tree["tokenizer"]
    return whet.train(run_dir=str(folder), **tree)


def test_a_trial_of_supervised_fine_tuning_trains_on_all_tokens_but_the_first(
    model: Path, tmp_path: Path
) -> None:
    result = trial(
        model, tmp_path, arguments={"rows": 4, "response": 12}, algorithm="sft", rewards={},
        rollout={"sampling": {"max_tokens": 12}},
    )  # fmt: skip
    rows = [row for row in result.metrics if "train/loss" in row]
    assert len(rows) == 3
    assert rows[-1]["train/loss"] < rows[0]["train/loss"], "the same rows every step"
    table = result.rollouts(step=1)
    assert {len(ids) for ids in table["token_ids"].to_pylist()} == {12}
    assert {sum(mask) for mask in table["mask"].to_pylist()} == {11}


def test_a_trial_of_reinforcement_learning_has_full_prompts_and_replies(model: Path, tmp_path: Path) -> None:
    rewards = {"made_up": {"function": "whet.rewards.made_up:coin"}}
    result = trial(
        model, tmp_path, arguments={"rows": 4, "prompt": 8}, rewards=rewards,
        rollout={"group_size": 4, "sampling": {"max_tokens": 6, "ignore_eos": True}},
    )  # fmt: skip
    table = result.rollouts(step=1)
    assert {len(ids) for ids in table["token_ids"].to_pylist()} == {8 + 6}
    assert {sum(mask) for mask in table["mask"].to_pylist()} == {6}
    assert set(table["reward"].to_pylist()) == {0.0, 1.0}, "so some advantage is not 0"


def test_ids_that_the_tokenizer_lacks_are_told_and_trained_like_others(
    model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """A model of random weights samples them often: here a hundred of its ids have no token."""
    size = len(tokenizer)
    padded, rewards = exported(tmp_path / "padded", tokenizer, size + 100), {"n": "whet.rewards.made_up:coin"}
    how = {
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 6, "ignore_eos": True}},
        "rewards": rewards,
    }
    trial(model, tmp_path / "plain", arguments={"rows": 4, "prompt": 8}, **how)
    assert "ids: it may sample" not in (tmp_path / "plain" / "run.log").read_text()
    result = trial(padded, tmp_path / "run", arguments={"rows": 4, "prompt": 8}, **how)
    said = f"the tokenizer has {size} tokens, the model {size + 100} ids: it may sample those from {size} on"
    assert said in (tmp_path / "run" / "run.log").read_text()
    table = result.rollouts(step=1)
    replies = [ids[8:] for ids in table["token_ids"].to_pylist()]
    beyond = [[i for i in ids if i >= size] for ids in replies]
    assert any(beyond)
    kept = [tokenizer.decode([i for i in ids if i < size], skip_special_tokens=True) for ids in replies]
    assert table["text"].to_pylist() == kept, "they have no text"
    assert result.metrics[0]["train/mismatch_max_nats"] == 0.0, "the trainer's log-probs, over the same ids"
