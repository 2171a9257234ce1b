"""One suite for everything that trains: what the loop asks of a `TrainEngine`, in this process and on ranks."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grid import Layout, Way, by_deepspeed, model_of
from test_deepspeed import ZERO
from test_train_torch import CUT, assert_near, pg_loss, weighted
from tiny import DEVICE, tiny_model
from whet.config.schema import OptimizerConfig
from whet.models import kernels
from whet.models.mesh import Dims
from whet.models.published import Weight, read_own
from whet.models.trainable import choose
from whet.training.engine import TrainEngine
from whet.training.ranks import RankGroup, Ranks
from whet.training.torch import TorchEngine
from whet.types import CheckpointError, Json, WhetError

ADAM = OptimizerConfig(name="adamw", lr=0.02, weight_decay=0.1)
SMALL = replace(CUT, max_tokens=30)
"""Several micro-batches, whose gradients add up to those of the oracle's single one."""
LAYOUTS = {
    "this process": None,
    "one rank": Dims(),
    "two shards": Dims(dp_shard=2),
    "two replicas": Dims(dp_replicate=2),
    **{f"DeepSpeed, {name}": Dims(dp_shard=2) for name in ZERO},
}
FEW = [
    pytest.param(name, marks=pytest.mark.sweep) if name.startswith("DeepSpeed") else name for name in LAYOUTS
]
"""`make test-backends` has those of DeepSpeed; tests/test_deepspeed.py has one start of its ranks."""


class Maker:
    """Makes engines of one kind; those on ranks have a role each."""

    def __init__(self, ranks: Ranks | None, zero: Json | None = None) -> None:
        """zero: DeepSpeed shards, in this way."""
        self.ranks, self.count, self.zero = ranks, 0, zero

    def __call__(
        self, *, seed: int = 0, learns: bool = True, lora: bool = False, frozen: str | None = None
    ) -> TrainEngine:
        """lora: with adapters that have an effect. frozen: parameters with this in their name do not learn."""
        how: dict[str, Any] = {"cut": SMALL, "optimizer": ADAM if learns else None, "total_steps": 8}
        model = model_of(Layout(Dims()), Way(lora=0.0)) if lora else tiny_model(seed=seed)
        if frozen is not None:
            choose(model, {frozen: False})
        if self.ranks is None:
            return TorchEngine(model, kernels.load("auto"), **how)
        self.count += 1
        if self.zero is not None:
            how["deepspeed"] = by_deepspeed(self.zero, how["optimizer"])
        return RankGroup(self.ranks, "policy" if self.count == 1 else f"role {self.count}", model, **how)


@pytest.fixture(params=FEW)
def make(request: pytest.FixtureRequest) -> Iterator[Maker]:
    dims = LAYOUTS[request.param]
    if dims is None:
        yield Maker(None)
        return
    zero = ZERO.get(request.param.removeprefix("DeepSpeed, "))
    if zero is not None and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    ranks = Ranks(dims, timeout_s=60.0)
    try:
        yield Maker(ranks, zero)
    finally:
        ranks.close()


def tensors(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in engine.weights()}


def oracle(steps: int = 0) -> TorchEngine:
    """The same model after so many updates, in this process."""
    engine = TorchEngine(tiny_model(), kernels.load("auto"), cut=CUT, optimizer=ADAM, total_steps=8)
    for _ in range(steps):
        engine.update(weighted(), pg_loss)
    return engine


def test_log_probs_stand_at_sampled_tokens_and_the_batch_stays(make: Maker) -> None:
    batch = weighted()
    engine = make()
    logp_N = engine.forward(batch, "logprobs")
    assert logp_N.dtype == torch.float32
    assert logp_N.device == batch.mask_N.device
    assert not logp_N[~batch.mask_N].any()
    assert (logp_N[batch.mask_N] < 0).all()
    torch.testing.assert_close(logp_N, oracle().forward(batch, "logprobs"), rtol=1e-5, atol=1e-5)
    collision_N = engine.forward(batch, "collision")
    assert ((collision_N[batch.mask_N] > 0) & (collision_N[batch.mask_N] <= 1)).all()
    entropy_N = engine.forward(batch, "entropy")
    assert not entropy_N[~batch.mask_N].any()
    torch.testing.assert_close(entropy_N, oracle().forward(batch, "entropy"), rtol=1e-5, atol=1e-5)


def test_updates_are_those_of_one_process(make: Maker) -> None:
    engine, wanted = make(), oracle()
    for _ in range(2):
        numbers, expected = engine.update(weighted(), pg_loss), wanted.update(weighted(), pg_loss)
        assert numbers.keys() == expected.keys()
        assert numbers == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert_near(tensors(engine), tensors(wanted), 1e-4)
    assert engine.version == 0, "a version is published, not trained"
    mine = dict(engine.module.named_parameters())
    assert_near({n: mine[n].detach() for n in mine}, tensors(wanted), 1e-4)


def test_an_engine_beats_and_has_spans_while_it_works(make: Maker) -> None:
    engine, beats = make(), list[str]()
    engine.beat = beats.append
    entered: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *_: object) -> None: ...

    engine.span = Noted  # type: ignore[assignment]
    engine.update(weighted(), pg_loss)
    assert beats
    assert "update" in entered


def test_what_was_saved_goes_on_as_if_nothing_had_happened(make: Maker, tmp_path: Path) -> None:
    """Saved at once, or captured and written after one more step: the third step is the same."""
    engine = make()
    engine.update(weighted(), pg_loss)
    engine.save(tmp_path / "saved", moments=True)
    write = engine.capture(moments=True)
    engine.update(weighted(seed=1), pg_loss)
    write(tmp_path / "captured")
    after = tensors(engine)
    for folder in ("saved", "captured"):
        engine.load(tmp_path / folder)
        engine.update(weighted(seed=1), pg_loss)
        for name, x in tensors(engine).items():
            assert torch.equal(x, after[name]), (folder, name)
    files = [sorted(p.name for p in (tmp_path / folder).iterdir()) for folder in ("saved", "captured")]
    assert files[0] == files[1]
    for name in files[0]:
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "captured" / name).read_bytes()


def test_another_layout_reads_what_this_one_saved(make: Maker, tmp_path: Path) -> None:
    engine, other = make(), oracle()
    engine.update(weighted(), pg_loss)
    engine.save(tmp_path / "saved", moments=True)
    other.load(tmp_path / "saved")
    assert all(torch.equal(x, tensors(engine)[name]) for name, x in tensors(other).items())
    engine.update(weighted(), pg_loss)
    other.update(weighted(), pg_loss)
    assert_near(tensors(engine), tensors(other), 1e-4)


def test_what_learned_before_and_is_frozen_now_is_loaded_with_the_rest(make: Maker, tmp_path: Path) -> None:
    """As a stage resumes that trains a part of what the stage before has trained."""
    before = oracle(1)
    before.save(tmp_path / "saved", moments=True)
    engine = make(frozen="embed_tokens")
    engine.load(tmp_path / "saved")
    wanted = tensors(before)
    for said in (tensors(engine), dict(engine.module.named_parameters())):
        assert said.keys() == wanted.keys()
        assert all(torch.equal(x, wanted[name]) for name, x in said.items())


def test_a_share_of_adapters_has_its_effect(make: Maker) -> None:
    policy, other = make(learns=False, lora=True), oracle_of_adapters()
    other.update(weighted(), pg_loss)
    wanted = oracle_of_adapters()
    wanted.copy_from(other, 0.25)
    policy.copy_from(other, 0.25)
    said = policy.forward(weighted(), "logprobs")
    torch.testing.assert_close(said, wanted.forward(weighted(), "logprobs"), rtol=1e-4, atol=1e-5)


def oracle_of_adapters() -> TorchEngine:
    """`Maker`'s model with adapters, in this process."""
    model = model_of(Layout(Dims()), Way(lora=0.0))
    return TorchEngine(model, kernels.load("auto"), cut=CUT, optimizer=ADAM, total_steps=8)


def test_a_copy_is_equal_to_the_bit_and_does_not_follow(make: Maker) -> None:
    policy, reference = make(), make(seed=5, learns=False)
    batch = weighted()
    policy.update(batch, pg_loss)
    reference.copy_from(policy)
    before = reference.forward(batch, "logprobs")
    assert torch.equal(before, policy.forward(batch, "logprobs"))
    policy.update(batch, pg_loss)
    assert torch.equal(before, reference.forward(batch, "logprobs"))
    assert not torch.equal(before, policy.forward(batch, "logprobs"))


def test_a_share_of_a_copy_lies_between(make: Maker) -> None:
    policy, reference = make(), make(seed=5, learns=False)
    policy.update(weighted(), pg_loss)
    before = policy.forward(weighted(), "logprobs")
    reference.copy_from(policy, 0.25)
    wanted = TorchEngine(tiny_model(seed=5), kernels.load("auto"), cut=CUT)
    own, theirs = tensors(wanted), tensors(oracle(1))
    for name, p in wanted.module.named_parameters():
        p.data.copy_(0.75 * own[name] + 0.25 * theirs[name])
    said = reference.forward(weighted(), "logprobs")
    torch.testing.assert_close(said, wanted.forward(weighted(), "logprobs"), rtol=1e-4, atol=1e-5)
    assert torch.equal(before, policy.forward(weighted(), "logprobs"))


def test_a_forgetful_optimizer_begins_anew(make: Maker) -> None:
    """After `forget` the moments are those of a new optimizer: an update moves the weights as its first one would."""
    engine, plain = make(), make()
    engine.update(weighted(), pg_loss)
    plain.copy_from(engine)
    engine.forget()
    for one in (engine, plain):
        one.update(weighted(seed=2), pg_loss)
    assert_near({name: x.cpu() for name, x in tensors(engine).items()}, weights_of(plain), 1e-4)


def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Of a role that does not keep its whole model in this process: as its file has them."""
    from tempfile import TemporaryDirectory

    from safetensors.torch import load_file

    with TemporaryDirectory() as folder:
        engine.save(Path(folder), moments=False)
        return load_file(Path(folder) / "model.safetensors")


Told = tuple[str, str, str | None, bool]
"""Of a weight: its name, digests of it as the model has it and with the effect of its adapter, whether it has one."""


def told(weights: Iterator[Weight]) -> tuple[int, list[Told]]:
    """What `publish` gives, and the process in which it does."""
    return os.getpid(), [
        (w.name, digest(w.own), None if w.merged is None else digest(w.merged), w.adapted) for w in weights
    ]


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def no_room(weights: Iterator[Weight]) -> None:
    next(weights)
    raise CheckpointError("no room for the weights")


def no_room_at_all() -> None:
    raise CheckpointError("no room at all")


@pytest.mark.parametrize("lora", [False, True])
def test_every_weight_is_published_once_as_the_model_has_it_and_with_its_adapter(
    make: Maker, lora: bool
) -> None:
    """After an update, in the process that has them; what `send` returns comes back. No version is counted."""
    engine = make(lora=lora)
    engine.update(weighted(), pg_loss)
    pid, found = engine.publish(told)
    assert engine.publish(told, there=True) == (pid, found)
    assert (pid == os.getpid()) == (not engine.apart)
    own = {name: digest(p) for name, p in engine.module.named_parameters()}
    assert len(found) == len(own)
    assert {name: is_own for name, is_own, *_ in found} == own
    merged = {name: is_merged for name, _, is_merged, _ in found if is_merged is not None}
    assert merged == {name: digest(x) for name, x in engine.weights()}
    adapted = {name for name, *_, has in found if has}
    assert bool(adapted) == lora
    assert {name for name in merged if merged[name] != own[name]} == adapted
    assert engine.version == 0


@pytest.mark.parametrize("lora", [False, True])
def test_a_folder_of_own_weights_has_each_as_the_model_has_it(
    make: Maker, tmp_path: Path, lora: bool
) -> None:
    engine = make(lora=lora)
    engine.update(weighted(), pg_loss)
    engine.write_weights(tmp_path / "own")
    written = dict(read_own(tmp_path / "own"))
    own = dict(engine.module.named_parameters())
    assert written.keys() == own.keys()
    for name, p in own.items():
        assert written[name].dtype == p.dtype
        assert torch.equal(written[name], p.detach().cpu()), name
    engine.update(weighted(seed=1), pg_loss)
    engine.write_weights(tmp_path / "own")
    assert any(not torch.equal(x, written[name]) for name, x in read_own(tmp_path / "own")), (
        "the present ones"
    )


def test_a_function_is_called_where_the_weights_are_published(make: Maker) -> None:
    engine = make()
    pid, _ = engine.publish(told)
    assert engine.call(os.getpid) == pid
    assert engine.call(partial(divmod, 7, 2)) == (3, 1)


def test_what_fails_where_the_weights_are_published_fails_here(make: Maker) -> None:
    with pytest.raises(CheckpointError, match=r"^no room for the weights$"):
        make().publish(no_room)


def test_what_fails_where_a_function_is_called_fails_here(make: Maker) -> None:
    with pytest.raises(CheckpointError, match=r"^no room at all$"):
        make().call(no_room_at_all)


def test_the_other_device_is_a_way_there_and_back_or_refused_and_changes_no_bit(make: Maker) -> None:
    engine, stays, batch = make(), make(), weighted()
    own, other = ("gpu", "cpu") if DEVICE == "cuda" else ("cpu", "gpu")
    if engine.apart:
        with pytest.raises(WhetError, match=r"ranks cannot move their weights.*leave train\.parallel at 1"):
            engine.place(other)  # type: ignore[arg-type]
    else:
        engine.place(other)  # type: ignore[arg-type]
        engine.place(own)  # type: ignore[arg-type]
    for one in (engine, stays):
        one.update(batch, pg_loss)
    assert torch.equal(engine.forward(batch, "logprobs"), stays.forward(batch, "logprobs"))


def test_an_error_of_the_loss_is_raised_with_its_cause(make: Maker) -> None:
    engine = make()
    with pytest.raises(Exception, match=r"loss_N|weight_N|None"):
        engine.update(replace(weighted(), weight_N=None), partial(pg_loss))


def test_the_own_device_is_no_move(make: Maker) -> None:
    engine, batch = make(), weighted()
    before = engine.forward(batch, "logprobs")
    engine.place("gpu" if DEVICE == "cuda" else "cpu")
    assert torch.equal(engine.forward(batch, "logprobs"), before)
