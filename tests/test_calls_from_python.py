"""What a caller from Python can get wrong is said in words, and a run leaves its process fit for the next."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack

import whet
import whet.models.exports
from tiny import RUN
from whet import environment
from whet.arguments import WHOLE, expect
from whet.config.load import load
from whet.rewards.given import only_rewards
from whet.track.files import RunLock
from whet.training.torch import TorchEngine
from whet.types import ConfigError, Task, WhetError

ROOT = Path(__file__).parents[1]
SECTIONS: dict[str, Any] = {
    "model": RUN["model"],
    "tokenizer": {"build": "chars"},
    "data": {"max_prompt_tokens": 8, "train": [{"path": str(ROOT / "tests/data/words.jsonl")}]},
    "rollout": {"group_size": 2, "sampling": {"max_tokens": 4}},
    "train": {"steps": 2, "tasks_per_step": 4},
    "checkpoint": {"interval": 0, "export": False},
    "machine": {"threads": 1},
    "reward_workers": {"count": 1},
    "track": {"trackers": ["jsonl"]},
}


def test_calls_that_make_no_sense_are_refused_in_words() -> None:
    with pytest.raises(
        ConfigError,
        match=r"expected a file, got a mapping; give sections by keyword: whet.train\(\*\*config\)",
    ):
        whet.train(SECTIONS)  # type: ignore[arg-type]
    for rewards in ("exact", [len], 3):
        with pytest.raises(
            ConfigError, match=r"rewards: got .*expected a function, or a mapping of functions"
        ):
            whet.train(rewards=rewards, **SECTIONS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"overrides: got .*'train.steps', 3.*, expected a list of texts"):
        whet.train(overrides=[("train.steps", 3)], **SECTIONS)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="rewrds: unknown key; did you mean rewards"):
        whet.train(rewrds=len)
    with pytest.raises(ConfigError, match="unused: got 'ignore'; expected one of refuse, warn"):
        whet.train(unused="ignore", **SECTIONS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: whet.train(3), r"config: got 3, expected a path \(str or pathlib.Path\), or None"),
        (lambda: whet.train(b"a.yaml"), "config: got b'a.yaml', expected a path"),
        (lambda: whet.train(change="no", **SECTIONS), "change: got 'no', expected True or False"),
        (lambda: whet.train(overrides=None, **SECTIONS), "overrides: got None, expected a list of texts"),
        (lambda: whet.train(on_eval=[], **SECTIONS), r"on_eval: got \[\], expected a function that takes"),
        (lambda: whet.evaluate(None), "target: got None, expected a path"),
        (lambda: whet.evaluate("runs/a", step=True), "step: got True, expected a whole number"),
        (lambda: whet.evaluate("runs/a", stage=1), "stage: got 1, expected a text"),
        (lambda: whet.generate(["runs/a"]), r"target: got \['runs/a'\], expected a path"),
        (lambda: whet.generate("runs/a", output=1), "output: got 1, expected a path"),
        (lambda: whet.generate("runs/a", say=None), "say: got None, expected a function"),
        (lambda: whet.load_run(None), "path: got None, expected a path"),
    ],
)
def test_an_argument_of_another_type_is_named_with_what_is_expected(
    call: Callable[[], object], said: str
) -> None:
    with pytest.raises(WhetError, match=f"^{said}"):
        call()


def test_rewards_from_python_replace_those_of_the_file_alone(tmp_path: Path) -> None:
    """A stage's own rewards that are given beside them, or by an override, stay."""
    stages = [{"name": "a"}, {"name": "b", "rewards": {"own": {"function": "exact"}}}]
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**SECTIONS, "rewards": {"written": {"function": "exact"}}, "stages": stages}))
    mine = {"rewards": {"mine": {"function": "object:mine"}}}

    def kept(*given: Any) -> list[list[str]]:
        return [list(cfg.rewards) for cfg in only_rewards(load(*given), ["mine"]).stages]

    assert kept(None, [], {**SECTIONS, **mine, "stages": stages}) == [["mine"], ["mine", "own"]]
    assert kept(file, ["rewards.more.function=exact"], mine) == [["mine", "more"], ["mine", "more"]]


def test_rewards_from_python_replace_those_that_a_foreign_file_stands_for(tmp_path: Path) -> None:
    """Defaults of its document, and those of a file that a launch script starts, are the file's, too."""
    (tmp_path / "values.yaml").write_text((ROOT / "examples/from_verl.yaml").read_text())
    silent = (
        (ROOT / "examples/from_skyrl.yaml").read_text().replace("  env_class: whet.rewards.builtin:exact", "")
    )
    (tmp_path / "silent.yaml").write_text(silent.replace("environment:", ""))
    start = "python3 -m verl.trainer.main_ppo --config-path=. --config-name=values trainer.nnodes=1\n"
    (tmp_path / "run.sh").write_text(start)
    mine = {"rewards": {"mine": {"function": "object:mine"}}}
    for name, own in ("values.yaml", "score"), ("silent.yaml", "gsm8k"), ("run.sh", "score"):
        loaded = load(tmp_path / name, [], mine)
        assert list(loaded.config.rewards) == [own, "mine"]
        assert list(only_rewards(loaded, ["mine"]).config.rewards) == ["mine"], name


def letters(factor: float) -> Callable[[str, Task], float]:
    return lambda response, task: factor * len(response)  # a closure: it cannot be pickled, and need not be


def test_from_a_notebook_from_a_thread_and_twice_in_a_process(tmp_path: Path) -> None:
    def once(name: str) -> list[dict[str, Any]]:
        result = whet.train(rewards=letters(0.5), run_dir=str(tmp_path / name), **SECTIONS)
        assert result.finished
        return result.metrics

    async def cell() -> list[dict[str, Any]]:
        return once("loop")  # a notebook's cell runs inside an event loop

    plain, found = once("plain"), []
    assert asyncio.run(cell()) == plain
    thread = threading.Thread(target=lambda: found.append(once("thread")))
    thread.start()
    thread.join()
    assert found == [plain]
    assert len(plain) == 2


def test_an_error_in_a_run_leaves_the_process_fit_for_the_next(tmp_path: Path) -> None:
    def raising(response: str, task: Task) -> float:
        raise ValueError("bad luck")

    with pytest.raises(WhetError, match="bad luck"):
        whet.train(rewards=raising, run_dir=str(tmp_path / "a"), **SECTIONS)
    assert "bad luck" in (tmp_path / "a" / "run.log").read_text()
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["starts"]
    with RunLock(tmp_path / "a"):
        pass  # the lock was given back
    assert whet.train(rewards=letters(1.0), run_dir=str(tmp_path / "b"), **SECTIONS).finished


@pytest.mark.parametrize("kind", [RuntimeError, WhetError])
def test_the_traceback_of_an_engine_that_fails_in_an_update_stands_in_the_log(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the line that raised. An error of whet's own is complete without one."""

    def failing(own: TorchEngine, *given: Any) -> Any:
        raise kind("the device has left the bus")

    monkeypatch.setattr(TorchEngine, "update_sums", failing)
    with pytest.raises(kind, match="the device has left the bus"):
        whet.train(rewards=letters(1.0), run_dir=str(tmp_path / "run"), **SECTIONS)
    _, ended, after = (tmp_path / "run/run.log").read_text().partition("the run ended: the device has left")
    assert ended
    traced = kind is RuntimeError
    assert ("Traceback (most recent call last)" in after) is traced
    assert after.count('raise kind("the device has left the bus")') == traced


@pytest.mark.parametrize(
    ("file", "what"), [("config.yaml", "a run, whose config"), ("config.json", "a model")]
)
def test_a_dialect_is_of_a_config_file(file: str, what: str, tmp_path: Path) -> None:
    """A run and a model have none, and `dialect` would change nothing."""
    (tmp_path / file).write_text("{}")
    for call in (whet.evaluate, partial(whet.generate, output=tmp_path / "replies.jsonl")):
        with pytest.raises(ConfigError, match=f"dialect: got 'verl', and .* is {what}.*; leave it out"):
            call(tmp_path, dialect="verl")


def test_whole_numbers_of_numpy_are_whole() -> None:
    """A step from a table of metrics is one of them."""
    expect({"step": (np.int64(3), WHOLE), "none": (None, WHOLE)})
    for odd in (True, np.float64(3.0), "3"):
        with pytest.raises(ConfigError, match=r"step: got .*, expected a whole number"):
            expect({"step": (odd, WHOLE)})


def test_what_the_caller_has_set_in_torch_changes_no_number_and_is_kept(tmp_path: Path) -> None:
    plain = whet.train(rewards=letters(0.5), run_dir=str(tmp_path / "plain"), **SECTIONS).metrics
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            found = whet.train(rewards=letters(0.5), run_dir=str(tmp_path / "set"), **SECTIONS).metrics
            assert torch.is_inference_mode_enabled()
            assert torch.is_autocast_enabled("cpu")
        assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.float64, "meta")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        assert (
            whet.train(rewards=letters(0.5), run_dir=str(tmp_path / "no_grad"), **SECTIONS).metrics == plain
        )
        assert not torch.is_grad_enabled()
    assert found == plain


def test_what_stands_before_every_operation_of_torch_rests_in_a_run() -> None:
    """A default device and `with torch.device` do, together, too, and modes of the caller's."""
    torch.set_default_device("cpu")
    try:
        with torch.device("meta"), BaseTorchFunctionMode() as mode:
            before = _get_current_function_mode_stack()
            with environment.one_run():
                assert (torch.zeros(1).device.type, torch.get_default_device().type) == ("cpu", "cpu")
                assert not _get_current_function_mode_stack()
            assert _get_current_function_mode_stack() == before
            assert before[-1] is mode
            assert torch.zeros(1).device.type == "meta"
        assert torch.get_default_device().type == "cpu"
    finally:
        torch.set_default_device(None)
    assert not _get_current_function_mode_stack()


def test_a_second_run_at_once_in_a_process_is_refused(tmp_path: Path) -> None:
    """They would share one log: what the first has to say after the second's end would be lost."""

    def again(row: object) -> None:
        whet.train(rewards=letters(0.5), run_dir=str(tmp_path / "second"), **SECTIONS)

    with pytest.raises(ConfigError, match="another run is in progress in this process"):
        whet.train(rewards=letters(0.5), run_dir=str(tmp_path / "first"), on_step=again, **SECTIONS)
    assert whet.train(rewards=letters(0.5), run_dir=str(tmp_path / "first"), **SECTIONS).finished
