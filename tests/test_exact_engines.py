"""The rollout engine and the train engine on the same weights: log-probs equal bit for bit, 1,002 sequences in all.

This is the promise itself, through the two engines as a run uses them: prompts shared in generation, groups that
leave the batch at different times, several micro-batches, shared and unshared prompts in training.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import torch

import whet
from tiny import FAMILIES, RUN, VOCAB, tiny_model
from whet.batch import pack
from whet.models import kernels
from whet.rollout.episode import play_groups
from whet.rollout.native.engine import NativeEngine
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import Group, Sampling, Task

GROUPS, SIZE = 21, 8
"""Six families of 168 sequences: 1,008."""


def play(model: object, *, temperature: float) -> list[Group]:
    """Prompts of 1 to 70 tokens (several pages of the cache), replies of 1 to 24, a cache for 40 rows only."""
    engine = NativeEngine(
        model,  # type: ignore[arg-type]
        kernels.load("auto"),
        end_token_ids={1},
        max_context=96,
        max_num_seqs=40,
    )
    gen = torch.Generator().manual_seed(0)
    tasks = []
    for uid in range(GROUPS):
        length = int(torch.randint(1, 71, (1,), generator=gen))
        prompt = torch.randint(2, VOCAB, (length,), generator=gen).tolist()
        tasks.append(Task(uid=uid, source="s", prompt="", token_ids=tuple(prompt)))
    return asyncio.run(
        play_groups(
            engine, tasks, group_size=SIZE, sampling=Sampling(max_tokens=24, temperature=temperature), seed=0,
            purpose="train", decode=str, end_token_ids={1}, timeout_s=120,
        )
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_and_trained_log_probs_are_equal_bit_for_bit(family: str) -> None:
    model = tiny_model(family)
    temperature = 0.8
    groups = play(model, temperature=temperature)
    assert {r.finish_reason for g in groups for r in g.rollouts} == {"stop", "length"}
    batch = pack(groups)
    for share in (True, False):
        cut = MicroBatchPolicy(max_tokens=700, share_prompts=share, temperature=temperature)
        trained = TorchEngine(model, kernels.load("auto"), cut=cut).forward(batch, "logprobs")
        different = int((trained != batch.logp_sample_N).sum())
        assert different == 0, f"{different} of {int(batch.mask_N.sum())} tokens, share_prompts={share}"


def test_what_is_sampled_does_not_depend_on_who_else_is_in_the_batch() -> None:
    model = tiny_model()
    whole = play(model, temperature=1.0)
    engine = NativeEngine(model, kernels.load("auto"), end_token_ids={1}, max_context=96, max_num_seqs=3)
    for group in whole[::7]:
        alone = asyncio.run(
            play_groups(
                engine, [group.task], group_size=SIZE, sampling=Sampling(max_tokens=24), seed=0, purpose="train",
                decode=str, end_token_ids={1}, timeout_s=120,
            )
        )  # fmt: skip
        assert alone[0].rollouts == group.rollouts


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("rollout.engine=native", "exact"),
        ("train.precision.compute=bfloat16", "close"),
        pytest.param("train.parallel.dp_replicate=2", "close", marks=pytest.mark.sweep),
    ],
)
def test_a_run_says_whether_its_log_probs_are_equal_and_every_step_measures_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], setting: str, word: str
) -> None:
    done = whet.train(**(RUN | {"run_dir": str(tmp_path)}), overrides=["track.trackers=[console]", setting])
    shown = capfd.readouterr()
    found = set(re.findall(r"log-prob match: (\w+)", shown.out + shown.err))
    assert found == {word}
    differing = [line["train/mismatch_frac"] for line in done.metrics if "train/loss" in line]
    assert len(differing) == 3
    assert not any(differing) or word == "close"
    assert any(differing) or setting != "train.precision.compute=bfloat16"
