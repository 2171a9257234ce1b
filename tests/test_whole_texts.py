"""SFT on texts without prompts: their column, which tokens are learned, and the loss against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import whet
from tiny import RUN
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import DataConfig, SourceConfig, TokenizerConfig
from whet.data.chat import encode_whole
from whet.data.columns import parse
from whet.data.recognise import holds_texts, recognised, told
from whet.data.rows import read_rows
from whet.data.tasks import TaskStream, demonstration, eval_tasks
from whet.data.tokenizer import load_tokenizer
from whet.types import ConfigError, DataError

TEXTS = ["abca", "b", "cabbac"]
ROWS = tuple({"text": text} for text in TEXTS)
WHOLE: dict[str, Any] = {"prompt": None, "response": "text"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=TEXTS)


def stream(tokenizer: Any, *, exclude: Any = (), longest: int = 8, **data: Any) -> TaskStream:
    sources = [SourceConfig(rows=ROWS, name="t", **WHOLE)]
    cfg = DataConfig(order="sequential", **data)
    return TaskStream(sources, cfg, tokenizer=tokenizer, seed=0, exclude=exclude, max_response_tokens=longest)


def test_a_text_alone_is_whole_under_sft_and_a_prompt_elsewhere() -> None:
    source = SourceConfig(rows=ROWS)
    rows = read_rows(source)
    read = recognised(source, rows, texts=True)
    assert (read.prompt, read.response) == (None, "text")
    assert "no prompt, response from column 'text'" in told(source, read, rows)
    assert recognised(source, rows).prompt == "text"
    fields = parse(ROWS[0], read, name="t", chat=None, where="row 1")
    assert (fields.prompt, fields.response, fields.extra) == ("", "abca", {})


def test_only_what_sft_learns_may_be_a_text_without_a_prompt() -> None:
    def parts(**more: Any) -> dict[str, bool]:
        cfg = load(None, (), {**RUN, "rewards": {}, "algorithm": "sft", **more}).config
        return {part: holds_texts(cfg, part) for part in ("train", "eval")}

    assert parts() == {"train": True, "eval": True}
    assert parts(rewards={"r": "exact"}) == {
        "train": True,
        "eval": False,
    }  # replies to held-out prompts are scored
    assert parts(algorithm="grpo") == parts(algorithm="dpo") == {"train": False, "eval": False}


@pytest.mark.parametrize(
    ("row", "given"),
    [
        ({"text": "p", "completion": "c"}, {}),
        ({"text": "p", "response": "c"}, {}),
        ({"text": "x", "prompt": "p"}, {}),
        ({"text": "p", "answer": "a"}, {}),
        ({"text": "p", "reply": "c"}, {"response": "reply"}),
        ({"text": "x", "ask": "p"}, {"prompt": "ask"}),
    ],
)
def test_a_text_beside_a_prompt_or_a_reply_is_not_whole(row: Any, given: Any) -> None:
    source = SourceConfig(rows=(row,), **given)
    assert recognised(source, read_rows(source), texts=True).prompt is not None


def test_every_token_but_the_first_is_learned(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    for text, task in zip(TEXTS, stream(tokenizer).next(3)):
        rollout = demonstration(task, tokenizer, 8)
        (strand,) = rollout.strands
        assert list(strand.token_ids) == [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
        assert list(strand.mask) == [0] + [1] * len(text)
        assert rollout.finish_reason == "stop"


def test_a_begin_token_and_an_end_in_the_text_are_not_doubled(tokenizer: Any) -> None:
    class Begun:
        """A tokenizer that puts a begin token before a text, as Llama's."""

        bos_token_id, eos_token_id = 99, tokenizer.eos_token_id

        def __call__(self, text: Any, add_special_tokens: bool = True, **more: Any) -> Any:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": [99, *ids] if add_special_tokens else ids}

        def __len__(self) -> int:
            return len(tokenizer)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    ((a, end),) = encode_whole(tokenizer, ["a"])
    assert encode_whole(Begun(), ["a", "aa"]) == [[99, a, end], [99, a, a, end]]  # type: ignore[arg-type]
    assert encode_whole(tokenizer, [f"a{tokenizer.eos_token}"]) == [[a, end]]


def test_limits_and_held_out_texts(tokenizer: Any) -> None:
    with pytest.raises(
        DataError, match=r"row 3: its response has 6 tokens, the limit is 5. Raise rollout.samp"
    ):
        stream(tokenizer, longest=5)
    cut = stream(tokenizer, longest=5, overlong="truncate_right").next(3)[2]
    rollout = demonstration(cut, tokenizer, 5, overlong="truncate_right")
    (strand,) = rollout.strands
    assert (sum(strand.mask), len(strand.token_ids), rollout.finish_reason) == (5, 6, "length")
    held_out = stream(tokenizer).next(2)[1:]
    left = stream(tokenizer, exclude=held_out)
    assert (left.counts["held_out"], [t.response for t in left.next(2)]) == (1, ["abca", "cabbac"])


@pytest.mark.parametrize(
    "alone", [pytest.param("", id="only the end token"), pytest.param((4,), id="a given token")]
)
def test_a_row_of_which_nothing_would_be_learned_is_refused(alone: Any, tokenizer: Any) -> None:
    """Its one token stands where nothing predicts it: it was booked as trained."""
    rows = ({"text": "ab"}, {"text": list(alone) or tokenizer.eos_token})
    data = DataConfig(train=(SourceConfig(rows=rows, name="t", **WHOLE),))
    with pytest.raises(DataError, match=r"row 2: the response is a single token.*leave the row out"):
        TaskStream(data.train, data, tokenizer=tokenizer, seed=0, max_response_tokens=8)
    with pytest.raises(DataError, match="row 2: the response is a single token"):
        eval_tasks(data.train, data, tokenizer=tokenizer)


def test_unknown_characters_of_a_whole_text_are_counted(tokenizer: Any) -> None:
    rows = ({"text": "xaxx"}, {"text": "b"})
    source = SourceConfig(rows=rows, name="t", **WHOLE)
    made = TaskStream([source], DataConfig(), tokenizer=tokenizer, seed=0, max_response_tokens=8)
    assert made.counts["unknown_tokens"] == 3


@pytest.mark.parametrize(
    ("source", "more", "said"),
    [
        (WHOLE, {"algorithm": "grpo", "rewards": {"r": "exact"}}, "algorithm.name=grpo needs prompts"),
        (WHOLE, {"algorithm": "dpo"}, "algorithm.name=dpo needs prompts"),
        (
            {**WHOLE, "system_prompt": "s"},
            {},
            "system_prompt has no prompt to act on; leave system_prompt out",
        ),
        ({**WHOLE, "template": "{prompt}"}, {}, "leave template out"),
        ({"prompt": None, "messages": "text"}, {}, "leave prompt out"),
    ],
)
def test_what_needs_a_prompt_is_refused(source: Any, more: Any, said: str) -> None:
    data = {"train": [{"rows": ROWS, "name": "t", **source}]}
    config = {**RUN, "rewards": {}, "rollout": {"sampling": {"max_tokens": 8}}, "algorithm": "sft", **more}
    with pytest.raises(ConfigError, match=said):
        plans(load(None, (), {**config, "data": data}))


def test_the_loss_is_that_of_transformers_on_the_whole_text(tmp_path: Path) -> None:
    """One text a step at a learning rate of 0: the mean of -log p over all tokens but the first (TRL's labels)."""
    config = {**RUN, "rewards": {}, "rollout": {"sampling": {"max_tokens": 8}}, "track": {}}
    data = {"train": [{"rows": ROWS, "name": "t"}], "order": "sequential", "max_prompt_tokens": 8}
    train = {"steps": 3, "tasks_per_step": 1, "optimizer": {"lr": 0.0}}
    result = whet.train(
        **{**config, "data": data, "train": train}, algorithm="sft", run_dir=str(tmp_path / "run")
    )
    folder = tmp_path / "run" / "export" / "main"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, line in zip(TEXTS, result.metrics):
        ids = torch.tensor(
            [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]]
        )
        with torch.no_grad():
            expected = model(input_ids=ids, labels=ids).loss.item()
        assert line["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert "no prompt, response from column 'text'" in (tmp_path / "run" / "run.log").read_text()
