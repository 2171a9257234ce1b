"""Models that the run's own process never has: made by another one, in files, read by ranks."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from test_train_torch import CUT, pg_loss, weighted
from tiny import tiny_model
from whet.config.load import load
from whet.config.memory_estimate import MAKER, phases, places
from whet.config.plan import plans
from whet.config.schema import LoraConfig, OptimizerConfig
from whet.guard import pulse
from whet.job import build_policy
from whet.models.apart import call
from whet.models.lora import adapted, attach, merged
from whet.models.mesh import Dims
from whet.models.published import filled, structure_of, weights_of, without_values, write_own
from whet.sync.manifest import describe
from whet.trained_models import build_critic
from whet.training.ranks import RankGroup, Ranks
from whet.types import CheckpointError, ConfigError, WhetError
from whet.whole import InFiles, Whole

log = logging.getLogger("whet.test")
SGD = OptimizerConfig(name="sgd", lr=0.5)
LORA = LoraConfig(rank=2)


def model_of(*, lora: bool) -> Any:
    """With adapters that have an effect already."""
    model = tiny_model()
    if lora:
        attach(model, LORA, seed=1)
        with torch.no_grad():
            for layer in adapted(model).values():
                layer.lora_B.normal_(generator=torch.Generator().manual_seed(3))
                layer.refresh()
    return model


def place(folder: Path) -> InFiles:
    return InFiles(folder, torch.device("cpu"), threads=1, imports=(), beat=lambda what: None)


def digest(model: Any) -> str:
    return describe(0, model.named_parameters()).digest


def bytes_of(model: Any) -> int:
    return sum(p.untyped_storage().nbytes() for p in model.parameters())


# ---------------------------------------------------------------- the process that has a model


def where() -> int:
    log.warning("it is %s", "done")
    pulse.beat("half of it")
    return os.getpid()


def fail(kind: type[Exception]) -> None:
    raise kind("no such thing")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_is_done_by_another_process(caplog: pytest.LogCaptureFixture) -> None:
    """What it logs is logged here, what it does is told."""
    beats: list[str] = []
    assert call(where, what="say", beat=beats.append) != os.getpid()
    assert caplog.record_tuples == [("whet.test", logging.WARNING, "it is done")]
    assert beats[0] == "a process of its own: to say", "what a watch names if nothing else comes"
    assert "half of it" in beats


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, WhetError])
def test_its_errors_are_raised_here(kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^no such thing$"):
        call(partial(fail, kind), what="fail")


def test_other_errors_come_with_their_place() -> None:
    with pytest.raises(WhetError, match=r"in fail[\s\S]*KeyError: 'no such thing'"):
        call(partial(fail, KeyError), what="fail")


def test_its_death_is_told() -> None:
    with pytest.raises(
        WhetError, match=r"was to make the policy died \(killed by SIGKILL\).*one whole model"
    ):
        call(die, what="make the policy")


# ---------------------------------------------------------------- models in files


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_in_files_is_the_same_and_takes_no_memory(tmp_path: Path, lora: bool) -> None:
    made = place(tmp_path / "models").made("policy", partial(model_of, lora=lora))
    expected = model_of(lora=lora)
    names = {n: (p.shape, p.dtype, p.requires_grad) for n, p in expected.named_parameters()}
    assert {n: (p.shape, p.dtype, p.requires_grad) for n, p in made.model.named_parameters()} == names
    assert bytes_of(made.model) <= 4 * len(names)
    assert all(p.isnan().all() for p in made.model.parameters()), "a value that is read is no other model's"
    assert made.model.device == expected.device
    opened = made.maker()()
    assert digest(opened) == digest(expected)
    assert digest(merged(opened)) == digest(merged(expected)), "with the effect of its adapters"
    frozen = made.copied()
    assert frozen.weights == made.weights
    assert not any(p.requires_grad for p in frozen.model.parameters())
    assert bytes_of(frozen.model) <= 4 * len(names)


def test_what_is_made_from_a_model_in_files_is_what_is_made_here(tmp_path: Path) -> None:
    """A critic that begins as the policy, with adapters of its own."""
    there = place(tmp_path / "models")
    policy = there.made("policy", partial(model_of, lora=True))
    critic = there.made("critic", partial(build_critic, partial(_merged, policy.maker()), lora=LORA, seed=4))
    here = build_critic(lambda: _merged(lambda: model_of(lora=True)), lora=LORA, seed=4)
    assert digest(critic.maker()()) == digest(here)


def _merged(make: Any) -> Any:
    import copy

    return copy.deepcopy(merged(make()))


def test_its_errors_are_those_of_the_model(tmp_path: Path) -> None:
    from whet.config.schema import ModelConfig

    make = partial(
        build_policy, ModelConfig(path=str(tmp_path / "nowhere")), lora=None, seed=0, vocab_size=4, eos_token_id=1,
        pad_token_id=0, device="cpu", dtype=torch.float32,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"model.path=.*nowhere: no such folder"):
        place(tmp_path / "models").made("policy", make)


# ---------------------------------------------------------------- ranks that read them


@pytest.fixture(scope="module", params=["dp_shard", "dp_replicate", "tp", "pp"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(Dims(**{request.param: 2}), timeout_s=60.0)
    yield made
    made.close()


@pytest.mark.parametrize("lora", [False, True])
def test_ranks_train_a_model_in_files_as_one_of_the_driver(ranks: Ranks, tmp_path: Path, lora: bool) -> None:
    """To the bit; the files may go as soon as they are read, and what is learned can be taken at any time."""
    model = model_of(lora=lora)
    start = Whole(without_values(structure_of(model), torch.device("cpu")), tmp_path / "models" / "policy")
    assert start.weights is not None
    write_own(start.weights, weights_of(model))
    how: dict[str, Any] = {"cut": CUT, "optimizer": SGD, "total_steps": 8}
    home = tmp_path / "policy"
    lean = RankGroup(ranks, "policy", start.model, weights=start.weights, home=home, **how)
    for file in start.weights.iterdir():
        file.write_bytes(b"")
    whole = RankGroup(ranks, "other", model, **how)
    for seed in (1, 2):
        batch = weighted(seed=seed)
        assert torch.equal(lean.forward(batch, "logprobs"), whole.forward(batch, "logprobs"))
        assert lean.update(batch, pg_loss) == whole.update(batch, pg_loss)
        assert bytes_of(lean.structure) <= 4 * len(list(lean.structure.parameters()))
        start.keep(lean)
    whole.publish(partial(write_own, tmp_path / "other"))
    kept, expected = (digest(filled(structure_of(model), at)) for at in (start.weights, tmp_path / "other"))
    assert kept == expected
    assert kept != digest(model)


# ---------------------------------------------------------------- which runs


SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SFT = ("algorithm.name=sft", "data.train[0].response=response")
RL = ("rewards.letters.function=exact", "data.train[0].answer=answer")
RANKS, REPLICAS = "train.parallel.dp_shard=2", "rollout.replicas=1"
A, B = '{"name": "a", "train": {"parallel": {"dp_shard": 2}}}', '{"name": "b"}'


@pytest.mark.parametrize(
    ("overrides", "elsewhere"),
    [
        ((*RL, RANKS), False),  # it samples in its own process
        ((*RL, RANKS, REPLICAS), True),
        ((*RL, RANKS, REPLICAS, "cluster.ranks=true"), True),
        ((*RL, REPLICAS), False),
        ((*SFT, RANKS), True),
        ((*SFT,), False),
        ((*SFT, f"stages=[{A}]"), True),
        ((*SFT, f"stages=[{A}, {B}]"), False),
    ],
)
def test_the_driver_has_no_model_where_no_stage_needs_one_there(
    overrides: tuple[str, ...], elsewhere: bool
) -> None:
    base = {
        "model": {"scratch": SIZE},
        "tokenizer": {"build": "chars"},
        "data": {"train": [{"path": "tests/data/words.jsonl"}]},
        "train": {"steps": 1, "tasks_per_step": 8},
    }
    found = plans(load(None, overrides, base), rehearsal=True)
    assert {p.models_elsewhere for p in found} == {elsewhere}
    made = [place.name for p in found for place in places(p) if place.name == MAKER]
    assert bool(made) is elsewhere, "it is in the estimate"
    held = {part for p in found for phase in phases(p) for part in phase.parts}
    assert ("policy" in held) is not elsewhere
