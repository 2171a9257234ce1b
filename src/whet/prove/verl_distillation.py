"""The loss of verl's distillation from a teacher, by verl's own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

from omegaconf import DictConfig

from whet.prove import numbers
from whet.prove.cases import Case
from whet.prove.checks import Check, File, NotComparable, reachable
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs

LOSSES = "verl.trainer.distillation.losses"
EPS = 1e-7
"""Tolerance where verl adds 1e-8 to a denominator."""


def enabled(config: DictConfig) -> bool:
    """Whether a file has a teacher."""
    return bool(theirs("verl", f"{LOSSES}:is_distillation_enabled")(config.get("distillation")))


def section(config: DictConfig) -> Any:
    """verl's own reading of the section; None without a teacher."""
    if not enabled(config):
        return None
    read = theirs("verl", "verl.utils.config:omega_conf_to_dataclass")
    return read(config.distillation.distillation_loss)


def checks(config: DictConfig, file: File, actor: Any, batches: list[Case]) -> Iterator[Check]:
    """The row of the loss. actor: verl's config of the actor for a case."""
    told = section(config)
    refused = ""
    if told.loss_settings.use_topk:
        refused = f"{told.loss_mode} is computed from the logits of both models"
    elif told.use_task_rewards:
        refused = "with use_task_rewards verl adds the loss of the rewards"
    yield Check(
        what=f"loss and gradient, distillation by {told.loss_mode}",
        called=f"{LOSSES}:distillation_ppo_loss",
        refused=refused,
        theirs=lambda each: loss(told, each, actor(each)),
        ours=lambda each: _ours(file, each),
        cases=reachable(batches, file),
        keys=("distillation.enabled",),
        tolerance=EPS,
    )


def loss(told: Any, case: Case, actor: Any) -> Numbers:
    """The loss of padded rows. What verl calls to pad them has nothing to do here."""
    function = theirs("verl", f"{LOSSES}:distillation_ppo_loss")
    logp = case.padded(case.logp_N).requires_grad_()
    data: Mapping[str, Any] = {
        "response_mask": case.mask,
        "teacher_logprobs": case.padded(case.batch.logp_ref_N)[..., None],
        "old_log_probs": case.padded(case.batch.logp_old_N),
        "dp_size": 1,
        "batch_num_tokens": case.mask.sum(),
        "global_batch_size": case.batch.rollouts,
    }
    own = mock.Mock(distillation_loss=told)
    with mock.patch.dict(
        function.__globals__,
        {"no_padding_2_padding": lambda x, data: x, "ppo_loss": lambda *rest: (0.0, {})},
    ):
        total, _ = function(actor, own, {"log_probs": logp}, data)
    total.backward()
    assert logp.grad is not None
    return {"loss": total.detach(), "grad": logp.grad}


def _ours(file: File, case: Case) -> Numbers:
    """With the advantage that the teacher gives, where it gives one."""
    made = numbers.built(file.config, case)
    batch = made.advantage(numbers.before(made, case.batch), 0.0)
    if batch.adv_N is None:
        raise NotComparable("whet's advantage has no numbers")
    return numbers.loss(made, replace(case, batch=replace(case.batch, adv_N=batch.adv_N)))
