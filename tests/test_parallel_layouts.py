"""Tensor, context, expert and pipeline parallelism: every number and gradient is the single process's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layouts import Case, Learner, batch, compare, error
from spawned import spawn
from whet.models.mesh import Dims

MOE = Case(family="qwen3_moe")
SEPARATE = Case(checkpoint=True, share_prompts=False, micro=40)
ADAPTED = Case(lora=0.3, checkpoint=True)
EACH = Case(family="qwen3_moe", lora=0.0, experts="each")
SHARED = replace(EACH, experts="shared", checkpoint=True)
OSS = Case(family="gpt_oss")
"""Sinks, biases of experts, stacks by inputs."""
TIED = Case(family="qwen2", tied=True)
TWO = {
    "tp": (Dims(tp=2), [SEPARATE, ADAPTED, replace(MOE, aux=0.1), EACH]),
    "cp": (Dims(cp=2), [SEPARATE, Case(family="mistral"), OSS]),
    "ep": (
        Dims(dp_shard=2, ep=2),
        [replace(MOE, aux=0.1, checkpoint=True, share_prompts=False), replace(OSS, aux=0.1), EACH, SHARED],
    ),
    "pp": (
        Dims(pp=2),
        [replace(OSS, micro=40, checkpoint=True), replace(SEPARATE, layers=3), replace(TIED, micro=40)],
    ),
}
MORE_TWO = {
    "tp": (Dims(tp=2), [TIED, Case(family="gemma"), SHARED]),
    "cp": (Dims(cp=2), [replace(MOE, aux=0.1)]),
    "ep": (Dims(dp_shard=2, ep=2), [replace(MOE, aux=0.1)]),
    "pp": (Dims(pp=2), [replace(ADAPTED, micro=40), replace(EACH, micro=40)]),
}
FOUR = {"tp+cp": (Dims(tp=2, cp=2), [replace(MOE, aux=0.1)])}
MORE = {
    "tp+pp": (Dims(tp=2, pp=2), [replace(TIED, micro=40)]),
    "cp+ep": (Dims(cp=2, dp_shard=2, ep=2), [replace(MOE, aux=0.1, checkpoint=True), EACH, SHARED]),
    "tp+ep": (Dims(tp=2, dp_shard=2, ep=2), [EACH, SHARED]),
    "cp4": (Dims(cp=4), [Case()]),
}
"""Of float64, where a mistake has nowhere to hide; the train engine itself: test_ranks_grid.py."""


def grid(layouts: dict[str, tuple[Dims, list[Case]]]) -> dict[str, dict[str, float]]:
    """Largest errors of all cases, as this rank sees them."""
    return {
        f"{kind} {case}": compare(case, dims) for kind, (dims, cases) in layouts.items() for case in cases
    }


DIFFERENCES = ("kl", "discriminant")
"""They are differences of log-probs, which are float32."""


def check(layouts: dict[str, tuple[Dims, list[Case]]], ranks: int) -> None:
    for rank in spawn(grid, ranks, layouts):
        for case, errors in rank.items():
            print(case, {k: f"{v:.1e}" for k, v in errors.items()})
            assert all(e < (3e-6 if what in DIFFERENCES else 1e-6) for what, e in errors.items()), (
                case,
                errors,
            )


def test_two_ranks() -> None:
    check(TWO, 2)


@pytest.mark.sweep
def test_four_ranks() -> None:
    check(FOUR, 4)


@pytest.mark.sweep
def test_more_cases_of_two_ranks() -> None:
    check(MORE_TWO, 2)


@pytest.mark.sweep
def test_more_layouts_of_four_ranks() -> None:
    check(MORE, 4)


def forgetful() -> float:
    """The error of a head norm's gradient if nobody sums it."""
    one, many = Learner(Case()), Learner(Case(), Dims(tp=2))
    many.parallel = replace(many.parallel, partial={})
    for learner in (one, many):
        learner.learn(batch())
    name = "model.layers.0.self_attn.q_norm.weight"
    found, expected = (dict(learner.named())[name].grad for learner in (many, one))
    assert found is not None
    assert expected is not None
    return error(found, expected)


def test_the_comparison_sees_a_sum_that_is_forgotten() -> None:
    assert min(spawn(forgetful, 2)) > 0.01
