"""The train engine: the same gradient however the work is cut, equal to plain autograd on unpacked rollouts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny import FAMILIES, VOCAB, tiny_model
from whet.batch import Batch, Loss, LossFn, Outputs, pack
from whet.config.schema import OptimizerConfig, ScheduleConfig, TrainConfig
from whet.models import kernels
from whet.models.load import value_head
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import TOKEN_TYPES, CheckpointError, Group, Rollout, Strand, Task, WhetError, given_tokens


def random_groups(*, count: int = 4, size: int = 3, seed: int = 0, strands: bool = False) -> list[Group]:
    """Groups of rollouts; with `strands`, the third of every second group has strands with other prompts."""
    gen = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, n: int = 1) -> list[int]:
        return torch.randint(low, high, (n,), generator=gen).tolist()

    out = []
    for uid in range(count):
        prompt = draw(2, VOCAB, draw(1, 12)[0])
        task = Task(uid=uid, source="s", prompt="", token_ids=tuple(prompt))
        rows = []
        for index in range(size):
            reply = draw(2, VOCAB, draw(1, 9)[0])
            mask = [0] * len(prompt) + [1] * len(reply)
            if index == 1 and len(reply) > 3:
                mask[-2] = 0  # a token from the environment in the middle
            rows.append(
                Rollout.one_strand(
                    task=task, index=index, token_ids=prompt + reply, mask=mask,
                    logprobs=[0.0] * len(mask), sample_logprobs=[0.0] * len(mask),
                    versions=[0 if m else -1 for m in mask], finish_reason="stop", reward=float(index),
                )
            )  # fmt: skip
        if strands and uid % 2:
            rows[2] = replace(rows[2], strands=(*rows[2].strands, rows[0].strand, rows[1].strand))
            rows[2] = replace(rows[2], strands=tuple(_told(s, n) for n, s in enumerate(rows[2].strands)))
        out.append(Group(task, tuple(rows)))
    return out


def _told(s: Strand, before: int) -> Strand:
    """After so many more tokens, which the policy is given."""
    more = given_tokens([VOCAB - 1] * before, [0] * before)
    return Strand(**{name: np.concatenate([more[name], getattr(s, name)]) for name in TOKEN_TYPES})


def weighted(seed: int = 0, *, strands: bool = False) -> Batch:
    batch = pack(random_groups(seed=seed, strands=strands))
    gen = torch.Generator().manual_seed(seed)
    adv_N = torch.randn(batch.tokens, generator=gen)
    return replace(batch, adv_N=adv_N, weight_N=batch.mask_N / batch.mask_N.sum())


def pg_loss(batch: Batch, out: Outputs) -> Loss:
    assert out.logp_N is not None
    assert out.entropy_N is not None
    assert batch.adv_N is not None
    return Loss(-out.logp_N * batch.adv_N - 0.1 * out.entropy_N, {"adv": batch.adv_N})


def engine(cut: MicroBatchPolicy, *, family: str = "qwen3", lr: float = 0.0) -> TorchEngine:
    return TorchEngine(
        tiny_model(family), kernels.load("auto"), cut=cut, optimizer=OptimizerConfig(lr=lr), total_steps=4
    )


def gradients(
    cut: MicroBatchPolicy, batch: Batch, family: str = "qwen3", *, loss: LossFn = pg_loss
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Taken where the optimizer would clip them, without letting it step."""
    made = engine(cut, family=family)
    seen: dict[str, torch.Tensor] = {}
    assert made.optimizer is not None
    clip = made.optimizer.clip

    def look() -> float:
        seen.update({n: p.grad.clone() for n, p in made.module.named_parameters() if p.grad is not None})
        return clip()

    made.optimizer.clip = look  # type: ignore[method-assign]
    return seen, made.update(batch, loss)


def oracle(batch: Batch, family: str) -> dict[str, torch.Tensor]:
    """One strand at a time through transformers' own eager forward, plain autograd."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    total = torch.zeros(())
    for s in range(batch.segments):
        rows = batch.segment_N == s
        ids, mask = batch.token_ids_N[rows], batch.mask_N[rows]
        logits = model(input_ids=ids[None]).logits[0]
        logp = torch.log_softmax(logits.float(), -1)
        entropy = -(logp.exp() * logp).sum(-1)
        for t in range(1, len(ids)):
            if mask[t]:
                loss = -logp[t - 1, ids[t]] * batch.adv_N[rows][t] - 0.1 * entropy[t - 1]  # type: ignore[index]
                total = total + loss * batch.weight_N[rows][t]  # type: ignore[index]
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


CUT = MicroBatchPolicy(entropy_grad=True)


def assert_near(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        scale = float(b[name].abs().max()) + 1e-9
        assert float((a[name] - b[name]).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_equals_plain_autograd(family: str) -> None:
    for strands in (False, True):
        batch = weighted(strands=strands)
        assert_near(gradients(CUT, batch, family)[0], oracle(batch, family), 2e-4)


@pytest.mark.parametrize(
    "cut",
    [
        replace(CUT, share_prompts=False),
        replace(CUT, max_tokens=1),
        replace(CUT, max_tokens=25),
        replace(CUT, max_tokens=None, max_rollouts=5),
        replace(CUT, checkpoint=True),
        replace(CUT, whole_groups=True, max_tokens=30),
    ],
    ids=["unshared", "one-by-one", "tokens", "rollouts", "checkpointing", "whole-groups"],
)
def test_gradient_does_not_depend_on_the_cut(cut: MicroBatchPolicy) -> None:
    batch = weighted()
    whole, numbers = gradients(CUT, batch)
    other, others = gradients(cut, batch)
    assert_near(other, whole, 2e-5)
    assert others == pytest.approx(numbers, rel=1e-4, abs=1e-6)


def test_gradient_does_not_depend_on_the_order_of_groups() -> None:
    groups = random_groups()

    def ordered(groups: list[Group]) -> Batch:
        batch = pack(groups)
        return replace(
            batch, adv_N=batch.reward_R[batch.rollout_N] - 1.0, weight_N=batch.mask_N / batch.mask_N.sum()
        )

    assert_near(gradients(CUT, ordered(groups))[0], gradients(CUT, ordered(groups[::-1]))[0], 2e-5)


def test_forward_is_the_log_prob_at_the_temperature() -> None:
    batch = weighted(strands=True)
    made = engine(replace(CUT, temperature=0.7))
    got = made.forward(batch, "logprobs")
    model = tiny_model()
    model.set_attn_implementation("eager")
    for s in range(batch.segments):
        rows = batch.segment_N == s
        ids = batch.token_ids_N[rows]
        logp = torch.log_softmax(model(input_ids=ids[None]).logits[0] / 0.7, -1)
        wanted = torch.zeros(len(ids))
        wanted[1:] = logp[:-1].gather(1, ids[1:, None]).squeeze(1)
        assert torch.allclose(got[rows], wanted * batch.mask_N[rows], atol=2e-5)


def test_forward_is_bitwise_the_same_in_any_micro_batch() -> None:
    batch = weighted()
    whole = engine(CUT).forward(batch, "logprobs")
    for cut in (replace(CUT, max_tokens=1), replace(CUT, share_prompts=False)):
        assert torch.equal(engine(cut).forward(batch, "logprobs"), whole)


@pytest.mark.parametrize(
    "limit",
    [
        MicroBatchPolicy(forward_tokens=9),
        MicroBatchPolicy(forward_rollouts=2),
        MicroBatchPolicy(forward_rollouts=1),
    ],
)
def test_a_forward_has_its_own_cut_and_the_same_numbers(limit: MicroBatchPolicy) -> None:
    batch = weighted()
    whole, cut = engine(CUT), engine(replace(limit, entropy_grad=True))
    seen: list[str] = []
    cut.beat = seen.append
    assert torch.equal(whole.forward(batch, "logprobs"), cut.forward(batch, "logprobs"))
    assert len(seen) > 4
    seen.clear()
    loss = cut.update(batch, pg_loss)["loss"]
    assert len(seen) == 1, "the update is cut as it was"
    assert loss == whole.update(batch, pg_loss)["loss"]


def test_without_a_cut_of_its_own_a_forward_is_cut_as_the_update() -> None:
    made, seen = engine(MicroBatchPolicy(max_rollouts=3, max_tokens=None, entropy_grad=True)), []
    made.beat = seen.append
    made.forward(weighted(), "logprobs")
    made.update(weighted(), pg_loss)
    assert len(seen) == 2 * 4, "twelve rollouts, three at a time, twice"


def test_the_learning_rate_of_a_training_step() -> None:
    schedule = ScheduleConfig(type="linear", unit="train_step")
    made = TorchEngine(
        tiny_model(), kernels.load("auto"), cut=CUT, optimizer=OptimizerConfig(lr=1e-3, schedule=schedule),
        total_steps=8, updates_per_step=2,
    )  # fmt: skip
    rates = [made.update(weighted(), pg_loss)["lr"] for _ in range(6)]
    assert rates == pytest.approx([1e-3, 1e-3, 7.5e-4, 7.5e-4, 5e-4, 5e-4])


def test_a_cut_of_the_config() -> None:
    train = TrainConfig(micro_batch_tokens=100, forward_micro_batch_rollouts=3, gradient_checkpointing=True)
    cut = MicroBatchPolicy.of(train, tiny_model(), whole_groups=True, entropy_grad=False, temperature=0.5)
    assert (cut.max_tokens, cut.max_rollouts, cut.forward_tokens, cut.forward_rollouts) == (
        100,
        None,
        None,
        3,
    )
    assert (cut.checkpoint, cut.whole_groups, cut.temperature) == (True, True, 0.5)


def test_critic_learns_values() -> None:
    batch = weighted()
    target_N = torch.where(batch.mask_N, batch.group_R[batch.rollout_N].float(), 0.0)
    critic = TorchEngine(
        tiny_model(), kernels.load("auto"), cut=MicroBatchPolicy(), value_head=value_head(32, 0),
        optimizer=OptimizerConfig(lr=3e-3, max_grad_norm=None), total_steps=200,
    )  # fmt: skip

    goal_R = torch.arange(4.0)

    def squared(micro: Batch, out: Outputs) -> Loss:
        assert out.value_N is not None
        return Loss((out.value_N - goal_R[micro.group_R][micro.rollout_N]) ** 2)

    first = critic.update(batch, squared)["loss"]
    for _ in range(150):
        last = critic.update(batch, squared)["loss"]
    assert last < 0.05 * first
    assert torch.allclose(critic.forward(batch, "values"), target_N, atol=0.5)
    with pytest.raises(WhetError, match="critic"):
        critic.forward(batch, "logprobs")


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted() -> None:
    batch = weighted()
    made = TorchEngine(
        tiny_model(),
        kernels.load("auto"),
        cut=CUT,
        optimizer=OptimizerConfig(lr=0.1),
        total_steps=9,
        max_skipped=2,
    )

    def poisoned(micro: Batch, out: Outputs) -> Loss:
        assert out.logp_N is not None
        return Loss(out.logp_N * float("nan"))

    before = {n: p.detach().clone() for n, p in made.module.named_parameters()}
    for _ in range(2):
        assert made.update(batch, poisoned)["skipped_steps"] == 1.0
    assert all(torch.equal(p, before[n]) for n, p in made.module.named_parameters())
    with pytest.raises(
        WhetError,
        match=r"step 3: the norm of the gradient is nan. It was not finite in 3 .*max_skipped_steps is 2.* of your own",
    ):
        made.update(batch, poisoned)
    made = engine(CUT, lr=0.1)
    assert made.update(batch, pg_loss)["skipped_steps"] == 0.0


def test_save_and_load_go_on_to_the_bit(tmp_path: Path) -> None:
    batch = weighted()
    a, b = engine(CUT, lr=1e-2), engine(CUT, lr=1e-2)
    a.update(batch, pg_loss)
    a.save(tmp_path)
    b.load(tmp_path)
    for made in (a, b):
        made.update(batch, pg_loss)
    assert all(torch.equal(p, q) for p, q in zip(a.module.parameters(), b.module.parameters()))


def test_a_save_holds_the_whole_tensors_of_one_file_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is gathered is a copy, as where ranks have parts: of weights it is gone when moments are gathered."""
    made = engine(CUT, lr=1e-2)
    made.update(weighted(), pg_loss)
    copies: list[list[weakref.ref[torch.Tensor]]] = []
    alive: list[int] = []

    def gathered(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        alive.append(sum(ref() is not None for of_file in copies for ref in of_file))
        copies.append([])
        for name, tensor in named:
            copy = tensor.clone()
            copies[-1].append(weakref.ref(copy))
            yield name, copy

    monkeypatch.setattr(made.across, "gathered", gathered)
    made.save(tmp_path)
    assert [len(of_file) > 3 for of_file in copies] == [True, True]
    assert alive == [0, 0]


def test_weights_of_another_model_or_damaged_are_refused(tmp_path: Path) -> None:
    made = engine(CUT)
    made.save(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        engine(CUT, family="llama").load(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        engine(CUT).load(tmp_path)


def test_mismatch_is_measured_against_what_was_sampled() -> None:
    batch = weighted()
    made = engine(CUT)
    right = made.forward(batch, "logprobs")
    same = made.update(replace(batch, logp_sample_N=right), pg_loss)
    assert (same["mismatch_max_nats"], same["mismatch_frac"]) == (0.0, 0.0)
    off = right.clone()
    off[torch.nonzero(batch.mask_N)[0]] += 0.5
    other = made.update(replace(batch, logp_sample_N=off), pg_loss)
    assert other["mismatch_max_nats"] == pytest.approx(0.5, abs=1e-5)
    assert other["mismatch_frac"] == pytest.approx(1 / int(batch.mask_N.sum()))
