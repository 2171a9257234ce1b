"""A train engine in a user's file, named in a config: through `whet.train`, in this process and on ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import whet
from whet.types import CheckpointError, ConfigError

MINE = '''
import json
from pathlib import Path

from whet.training.torch import TorchEngine


class Damped(TorchEngine):
    """Learns with a fraction of the loss, and notes what it was asked."""

    def __init__(self, model, ops, *, factor=1.0, notes=None, **how):
        super().__init__(model, ops, **how)
        self.factor, self.notes = factor, notes

    def update_sums(self, dealt, loss):
        def damped(batch, out):
            found = loss(batch, out)
            return type(found)(**{**vars(found), "loss_N": self.factor * found.loss_N})

        if self.notes is not None:
            with Path(self.notes).open("a") as file:
                file.write(json.dumps({"factor": self.factor}) + "\\n")
        return super().update_sums(dealt, damped)


class Needy(Damped):
    def __init__(self, it, kernels, needed, *more, also=1, **how):
        super().__init__(it, kernels, **how)


class Behind:
    """No subclass: whatever is asked, another engine answers."""

    def __init__(self, model, ops, **how):
        object.__setattr__(self, "engine", TorchEngine(model, ops, **how))

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def __setattr__(self, name, value):
        setattr(self.engine, name, value)


class Half:
    def __init__(self, model, ops, **how):
        self.version = 0


def bare(model):
    pass


def bare_rollouts():
    pass
'''
RANKS = "train.parallel={dp_replicate: 2}"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def early(response: str) -> float:
    """The share of letters in the first half of the alphabet."""
    return sum(letter < "n" for letter in response) / 4


def trained(run_dir: Path, *overrides: str, lr: float = 1.0) -> dict[str, Tensor]:
    """The weights that a run ends with."""
    whet.train(
        run_dir=str(run_dir),
        model={"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
        tokenizer={"build": "chars"},
        data={"train": [{"path": "tests/data/words.jsonl", "limit": 4}]},
        rewards=early,
        rollout={"group_size": 4, "sampling": {"max_tokens": 4}},
        train={
            "steps": 2,
            "tasks_per_step": 2,
            "optimizer": {"name": "sgd", "lr": lr, "max_grad_norm": None},
        },
        machine={"device": "cpu"},
        overrides=[*overrides],
    )
    (file,) = run_dir.glob("export/**/model.safetensors")
    return load_file(file)


def near(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(one[key], other[key], rtol=1e-5, atol=1e-7) for key in one)


@pytest.mark.parametrize("layout", [(), (RANKS,)], ids=["here", "ranks"])
def test_an_engine_of_a_users_own_trains_the_whole_run(
    mine: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    notes = tmp_path / "notes.jsonl"
    own = f"train.engine={mine}:Damped", f"train.engine_arguments={{factor: 0.5, notes: {notes}}}"
    damped = trained(tmp_path / "damped", *own, *layout)
    assert [json.loads(line)["factor"] for line in notes.read_text().splitlines()] == [0.5] * 2 * (
        1 + len(layout)
    )
    assert near(damped, trained(tmp_path / "half", *layout, lr=0.5))
    assert not near(damped, trained(tmp_path / "whole", *layout))
    named = f"train.engine={mine}:Needy", "train.engine_arguments={factor: 0.5, needed: 1, also: 2}"
    assert near(damped, trained(tmp_path / "named", *named, *layout))


def test_an_engine_that_is_no_subclass_trains_the_same_bits(mine: Path, tmp_path: Path) -> None:
    own = trained(tmp_path / "own", f"train.engine={mine}:Behind")
    ours = trained(tmp_path / "ours")
    assert all(torch.equal(own[key], ours[key]) for key in ours)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("train.engine=trch",),
            "'trch' is not known; did you mean 'torch'.*or your own as 'package.module:name'",
        ),
        (("train.engine={mine}:Dampd",), "did you mean 'Damped'"),
        (
            ("train.engine=builtins:dict",),
            "train.engine 'builtins:dict' does not say which parameters it takes",
        ),
        (
            ("rollout.engine=builtins:dict",),
            "rollout.engine builtins:dict: .*not iterable; expected .*RolloutEngine of a .*EngineInputs",
        ),
        (
            ("rollout.engine=builtins:len",),
            "rollout.engine builtins:len: object of type .*expected .*RolloutEngine of a .*EngineInputs",
        ),
        (
            ("rewards={}", "rollout.env.make=builtins:dict"),
            "rollout.env.make 'builtins:dict' does not say which parameters it takes",
        ),
        (
            ("rewards={}", "rollout.env.make=builtins:len"),
            "rollout.env.make: len is a built-in function of Python, which makes no environment; expected",
        ),
        (
            ("rewards={}", "rollout.env.make={mine}:bare_rollouts"),
            r"rollout.env.make takes \(\): too many .*; expected make\(task",
        ),
        (("algorithm.loss=builtins:dict",), "loss 'builtins:dict' does not say which parameters it takes"),
        (("train.engine={mine}:bare",), r"bare takes \(model\): too many positional .*TorchEngine is"),
        (("rollout.engine={mine}:bare_rollouts",), r"bare_rollouts takes \(\); expected one .*EngineInputs"),
        (("train.engine={mine}:Half",), "got a Half without apart, beat, .*expected a whet.training.engine"),
        (
            ("train.engine={mine}:Behind", RANKS),
            "with train.parallel an engine is a subclass of .*TorchEngine",
        ),
        (
            ("train.engine={mine}:Damped", "train.engine_arguments={fctor: 1}"),
            "has no such setting.*factor, notes",
        ),
        (("train.engine={mine}:Needy", "train.engine_arguments={factor: 1}"), "needed: .*needs a value"),
        (("train.engine={mine}:Damped", "train.engine_arguments={seed: 1}"), "its seed itself"),
        (
            ("train.engine={mine}:Damped", "train.engine_arguments=ds.json"),
            "expected a table with the settings",
        ),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_at_the_start(
    mine: Path, tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        trained(
            tmp_path / "run",
            *(override.format(mine=mine) if "{mine}" in override else override for override in overrides),
        )


def test_the_file_of_an_engine_is_code_of_the_run(mine: Path, tmp_path: Path) -> None:
    """A resume compares it with what the checkpoint was made with."""
    trained(tmp_path / "run", f"train.engine={mine}:Damped")
    mine.write_text(MINE + "\n# changed\n")
    with pytest.raises(CheckpointError, match=r"mine\.py"):
        trained(tmp_path / "run", f"train.engine={mine}:Damped")
