"""The data of all stages is read once, before any weights are: what is wrong with it is told first."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
import whet.job
import whet.track.monitor
from tiny import RUN, tiny_model
from whet.config.schema import ModelConfig
from whet.config.tree import merge
from whet.data.tokenizer import build
from whet.models.load import build as build_model
from whet.models.load import end_tokens, end_tokens_ahead, export
from whet.types import CheckpointError, ConfigError, DataError

ROOT = Path(__file__).parents[1]
ROWS: list[dict[str, Any]] = [{"prompt": "ab", "answer": "b"}, {"prompt": "ba", "answer": "a"}]
NO_PROMPT = {"train": [{"rows": [*ROWS, {"prompt": "", "answer": "a"}]}]}
TOO_LONG = {"train": [{"rows": [*ROWS, {"prompt": "abababababab", "answer": "a"}]}]}
NO_TEXT = {"train": [{"rows": [*ROWS, {"prompt": 7, "answer": "a"}]}]}
NO_COLUMN = {
    "data": {"train": [{"rows": ROWS}]},
    "rewards": {"right": {"function": "{folder}/right.py:right"}},
}
SFT = {"algorithm": {"name": "sft"}, "data": {"train": [{"rows": ROWS, "response": "reply"}]}}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def _no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*given: object, **more: object) -> None:
        raise AssertionError("models were opened")

    monkeypatch.setattr(whet.job, "open_models", opened)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"data": {"train": [{"path": "tests/data/words.jsonl", "prompt": "nothing"}]}},
            "no column 'nothing'",
        ),
        ({"data": NO_PROMPT}, "row 3: "),
        ({"data": TOO_LONG}, "row 3: its prompt has 12 tokens, the limit is 8"),
        ({"data": NO_TEXT}, "row 3: "),
        (NO_COLUMN, "right' needs a value for solution"),
        (SFT, "no column 'reply'"),
        ({"algorithm": {"loss": "nowhere.py:f"}}, "loss 'nowhere.py:f': cannot load"),
        ({"rollout": {"sampling": {"stop": ["<eos>"]}}}, "has the control token"),
    ],
)
@pytest.mark.usefixtures("_no_models")
def test_rows_are_wrong_before_weights_are_read(
    tmp_path: Path, wrong: dict[str, Any], said: str, stages: int
) -> None:
    (tmp_path / "right.py").write_text(
        "def right(completions, solution):\n    return [0.0 for _ in completions]\n"
    )
    wrong = json.loads(json.dumps(wrong).replace("{folder}", str(tmp_path)))
    del (sections := merge(RUN, {}))["rewards"]
    wrong = {"rewards": RUN["rewards"]} | wrong
    if stages > 1:
        sections["rewards"], sections["stages"] = RUN["rewards"], [{"name": "a"}, {"name": "b", **wrong}]
    else:
        sections = merge(sections, wrong)
    with pytest.raises((ConfigError, DataError)) as caught:
        whet.train(run_dir=str(tmp_path / "run"), unused="warn", **sections)
    assert said in str(caught.value)


@pytest.mark.usefixtures("_no_models")
def test_held_out_rows_are_wrong_before_weights_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export(tiny_model(layers=1), build("chars", 61, ["ab"]), folder)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("\n".join(json.dumps(row) for row in TOO_LONG["train"][0]["rows"]))
    long = ["data.max_prompt_tokens=8", "rollout.sampling.max_tokens=4", "data.overlong=error"]
    with pytest.raises(DataError, match=r"line 3: its prompt has 12 tokens"):
        whet.generate(str(folder), data=str(rows), output=str(out), overrides=long)
    with pytest.raises(DataError, match=r"line 3: its prompt has 12 tokens"):
        whet.evaluate(str(folder), data=str(rows), rewards=len_of, overrides=long)


def test_the_data_of_a_stage_is_read_once(tmp_path: Path) -> None:
    """Of stages that begin later, too, and of demonstrations."""
    folder, calls = tmp_path / "model", tmp_path / "calls"
    export(tiny_model(layers=1), build("chars", 61, ["ab"]), folder)
    (tmp_path / "rows.py").write_text(
        "def rows(name):\n"
        f"    with open({str(calls)!r}, 'a') as file:\n"
        "        file.write(f'{name}\\n')\n"
        "    return [{'prompt': p, 'response': p, 'answer': p} for p in ('ab', 'ba')]\n"
    )

    def source(name: str, **columns: str) -> list[dict[str, Any]]:
        return [
            {"function": f"{tmp_path}/rows.py:rows", "arguments": {"name": name}, "name": name, **columns}
        ]

    shown = source("shown", prompt="prompt", response="response")
    mix = {"algorithm": {"name": "mix", "mix": {"demonstration_ratio": 0.5}}}
    sections = merge(RUN, {"train": {"steps": 1, "tasks_per_step": 2}})
    sections |= {
        "model": {"path": str(folder)},
        "tokenizer": {},
        "data": {"max_prompt_tokens": 8},
        "stages": [
            {"name": "a", "data": {"train": source("first")}},
            {"name": "b", "data": {"train": source("second"), "demonstrations": shown}, **mix},
        ],
    }
    assert whet.train(run_dir=str(tmp_path / "run"), **sections).finished
    found = Counter(calls.read_text().split())
    named = 1  # where columns are not, the first row says them
    assert found == {"first": named + 1, "second": named + 1, "shown": 1}


def test_rewards_that_stages_share_and_that_cannot_be_loaded_are_loaded_once(tmp_path: Path) -> None:
    loads, file = tmp_path / "loads", tmp_path / "wrong.py"
    file.write_text(f"with open({str(loads)!r}, 'a') as file:\n    file.write('x')\nraise ValueError('no')\n")
    sections = merge(RUN, {}) | {"stages": [{"name": "a"}, {"name": "b"}]}
    sections["rewards"] = {"right": {"function": f"{file}:right"}}
    with pytest.raises(ConfigError, match=r"^reward 'right'.*ValueError: no"):
        whet.train(run_dir=str(tmp_path / "run"), **sections)
    assert loads.read_text() == "x"


def test_what_passes_before_a_stage_begins_is_in_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data is read before the models are, which take 1000 s here, and before the stages that come first."""
    passed, open_models = [0.0], whet.job.open_models

    def slowly(*given: Any, **more: Any) -> Any:
        passed[0] += 1000
        return open_models(*given, **more)

    monkeypatch.setattr(whet.job, "open_models", slowly)
    monkeypatch.setattr(whet.track.monitor, "clock", lambda: time.perf_counter() + passed[0])
    sections = merge(RUN, {"train": {"steps": 1}}) | {"stages": [{"name": "a"}, {"name": "b"}]}
    assert whet.train(run_dir=str(tmp_path), **sections).finished
    lines = map(json.loads, (tmp_path / "timings.jsonl").read_text().splitlines())
    seconds = {line["stage"]: line["time/step_s"] for line in lines}
    assert seconds.keys() == {"a", "b"}
    assert max(seconds.values()) < 1000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_before_the_stages_begin_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """While the models are made, on ranks or here."""
    monkeypatch.setattr(whet.job, "open_models", lambda *given, **more: signal.raise_signal(number))
    with pytest.raises(KeyboardInterrupt):
        whet.train(run_dir=str(tmp_path), **merge(RUN, {"track": {"trackers": ["console", "jsonl"]}}))
    printed = capfd.readouterr()
    assert "stopped; nothing to save yet" in printed.out + printed.err


def len_of(response: str, task: Any) -> float:
    return float(len(response))


def _no_file(folder: Path) -> None:
    (folder / "generation_config.json").unlink()


def _several(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))


def _of_config(folder: Path) -> None:
    _no_file(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 9}))


@pytest.mark.parametrize("change", [lambda folder: None, _no_file, _several, _of_config])
@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_end_tokens_are_those_of_the_model_that_is_read(
    tmp_path: Path, family: str, change: Callable[[Path], None]
) -> None:
    tokenizer = build("chars", 61, ["ab"])
    export(tiny_model(family, layers=1), tokenizer, tmp_path)
    change(tmp_path)
    given = ModelConfig(path=str(tmp_path))
    how: dict[str, Any] = {"eos_token_id": 1, "pad_token_id": 0, "seed": 0, "device": "cpu"}
    model = build_model(given, vocab_size=len(tokenizer), dtype=torch.float32, **how)
    assert end_tokens_ahead(given, tokenizer) == end_tokens(model, tokenizer)


def test_end_tokens_of_the_text_part_of_a_config(tmp_path: Path) -> None:
    """Where there is no generation_config.json, as transformers has them of a model of text and images."""
    tokenizer = build("chars", 61, ["ab"])
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": {"eos_token_id": 9}})
    )
    assert end_tokens_ahead(ModelConfig(path=str(tmp_path)), tokenizer) == {tokenizer.eos_token_id, 9}


def test_a_generation_config_that_is_none_names_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export(tiny_model(layers=1), build("chars", 61, ["ab"]), folder)
    (folder / "generation_config.json").write_text("[3]")
    sections = merge(RUN, {}) | {"model": {"path": str(folder)}, "tokenizer": {}}
    with pytest.raises(
        CheckpointError, match=f"^model.path={re.escape(str(folder))}: transformers cannot load it"
    ):
        whet.train(run_dir=str(tmp_path / "run"), **sections)
