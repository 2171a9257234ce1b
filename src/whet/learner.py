"""The part of a stage that learns: groups -> batch -> log-probs, values, advantages -> optimizer steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from whet import seeds
from whet.algos.bootstrap import Lengthened, lengthened
from whet.algos.critic import Scale
from whet.algos.demonstration import without_experts
from whet.algos.entropy import EntropyBonus
from whet.algos.implicit import rivals
from whet.algos.preference import kl_zero
from whet.algos.recipes import Implicit
from whet.algos.segments import sampled_logp_N
from whet.algos.skipping import Skipping, shares, skip, skipping, without_effect
from whet.batch import Batch, LossTerms, among_skipped, computed, pack, tokens_of, with_parts
from whet.config.groups import pairs_tasks
from whet.config.recipes import resolve
from whet.config.schema import TrainConfig
from whet.context import Context
from whet.data.demonstrations import Demonstrations
from whet.data.reprompt import Reprompter, open_reprompter
from whet.job import Models
from whet.placement import Jobs, run_concurrently, trainers
from whet.track.metrics import merge
from whet.track.timeline import Kind
from whet.trained_models import (
    ReferenceChoice,
    Temperatures,
    critic_of,
    cut_of,
    policy_of,
    reference_logprobs,
    references_of,
)
from whet.training.engine import FullKl, TrainEngine, Want
from whet.training.passes import minibatch, passes, untaught
from whet.training.ranks import RankGroup, Ranks
from whet.training.reuse import Reuse
from whet.training.throughput import Meter, meter_of
from whet.training.torch import MICRO_BATCH, TorchEngine
from whet.training.unreduced import evaluated
from whet.types import Group, Json, Metrics, WhetError

log = logging.getLogger(__name__)

T = TypeVar("T")

SIMULATED = "simulated"
"""In the state of a checkpoint: the steps before it were simulated."""

OF_POLICY: Mapping[Want, str] = {
    "entropy": "entropy_N",
    "collision": "collision_N",
    "discriminant": "discriminant_N",
    "centred_discriminant": "discriminant_N",
}
"""What an algorithm may need of the policy before the step, and the field of the batch that has it."""


@dataclass(frozen=True)
class Sampled:
    """How the rollouts of a stage are sampled, as far as it decides what the trainer must compute again."""

    older: bool = False
    """They may come from other weights than those before the current step: older ones, or cast."""
    same_temperature: bool = True
    """At the temperature that is trained."""

    @property
    def same_policy(self) -> bool:
        """From the distribution that is trained."""
        return not self.older and self.same_temperature


class Learned(NamedTuple):
    """What one step has learned from."""

    batch: Batch
    """As trained on, without demonstrations."""
    groups: list[Group]
    """Of the batch."""
    metrics: Metrics
    skipped: tuple[int, ...]
    """Task uids of the groups of which nothing was learned: their updates were skipped."""
    flops: float
    """Operations of the update; 0 where they are not measured."""
    terms: Sequence[LossTerms] = ()
    """Of each optimizer step of the policy, where the step's batch is recorded."""
    logp_N: Tensor | None = None
    """Log-probs by the policy before the step, where the step's batch is recorded."""


@dataclass
class Learner:
    """Of one stage."""

    context: Context
    policy: TrainEngine
    references: Sequence[TrainEngine]
    """None, one, or several, of which each rollout has its own."""
    critic: TrainEngine | None
    skipping: Skipping
    exact: bool
    """The self-test found that sampled log-probs equal the trainer's bit for bit."""
    sampled: Sampled = field(default_factory=Sampled)
    demonstrations: Demonstrations | None = None
    """Beside the policy's own rollouts in every step; None: there are none."""
    reprompt: Reprompter | None = None
    """Gives the reference other prompts; None: it sees those of the policy."""
    choose_reference: ReferenceChoice | None = None
    """None: there are not several."""
    temperatures: Temperatures | None = None
    """None: those of all sources are the same."""
    reused: Callable[[], int] | None = None
    """How many groups of the last step were trained on before; None: groups are never replayed."""
    ranks: Mapping[str, Ranks] = field(default_factory=dict)
    """The processes that train, by the model that they are named after: the policy's and, where they have others, the
    critic's and the reference's. Without the policy's it is trained in this process."""
    meter: Meter | None = None
    """None: the device's speed is not known."""
    kl_coef: float = 0.0
    entropy: EntropyBonus = field(default_factory=lambda: EntropyBonus(0.0))
    value_scale: Scale = field(default_factory=Scale)
    """Units in which the critic predicts returns; one scale for a whole step."""
    reuse: Reuse | None = None
    """What the policy's updates take from sampling; None: nothing."""
    critic_updates: list[Metrics] = field(default_factory=list)
    """Of the current step, where the critic learns before the policy's advantages are known."""
    terms: list[LossTerms] | None = None
    """Of the current step, if its batch is recorded."""
    simulated: bool = False
    """Its steps wait and learn nothing."""
    thread: ThreadPoolExecutor | None = None
    """Where it computes while rollouts are sampled."""

    @property
    def version(self) -> int:
        return self.policy.version

    # -- asked by the loop

    async def prepare(self, step: int, groups: list[Group]) -> tuple[Batch, Metrics]:
        """The groups as one batch with all that the loss reads, and the numbers of what was done to them."""
        return await self._compute(partial(self.prepared, step, groups))

    async def learn(self, step: int, batch: Batch, groups: list[Group]) -> Learned:
        """Every optimizer step of one training step."""
        return await self._compute(partial(self.learned, step, batch, groups))

    async def _compute(self, job: Callable[[], T]) -> T:
        """The result of what computes for long: here, or in a thread where rollouts are sampled meanwhile."""
        if self.context.plan.mode == "synchronous":
            return job()
        if self.thread is None:
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="whet-trainer")
        return await asyncio.get_running_loop().run_in_executor(self.thread, job)

    def close(self) -> None:
        """End the thread; a job that it is at is finished first."""
        if self.thread is not None:
            self.thread.shutdown()

    # -- before the update

    def prepared(self, step: int, groups: list[Group]) -> tuple[Batch, Metrics]:
        """See `prepare`. Where rewards alone decide which rollouts have an effect, no model computes the others."""
        algorithm, numbers = self.context.algorithm, Metrics()
        batch = pack(groups) if self.demonstrations is None else self.demonstrations.among(groups)
        if pairs_tasks(self.context.cfg, self.context.plan.algorithm):
            batch = replace(batch, group_R=batch.group_R // 2)
        if self.reprompt is not None:
            batch, numbers = self.reprompt(batch, groups)
        if self.choose_reference is not None:
            batch = replace(batch, reference_R=self.choose_reference(groups))
        if self.temperatures is not None:
            batch = self.temperatures(batch, groups)
        if algorithm.parts:
            batch = with_parts(batch, groups, algorithm.parts)
        if self.skipping.before_models:
            batch = self.judge(step, batch)
        with self.context.monitor.phase("logprobs"):
            batch = self.compute_logprobs_and_values(self.routed(batch))
            if algorithm.implicit is not None:
                batch = self.implicit_rewards(step, batch, algorithm.implicit)
        if not self.skipping.before_models:
            batch, corrected = algorithm.correct(batch, self.version)
            batch = self.judge(step, batch)
            numbers |= corrected
        return batch, numbers

    def judge(self, step: int, batch: Batch) -> Batch:
        """The batch with counts, advantages and skipped rollouts. Minibatches are partitioned as if none were
        skipped."""
        algorithm, cfg = self.context.algorithm, self.context.cfg
        stream = seeds.key(cfg.seed, "resample", self.context.name, step)
        batch = algorithm.resample(batch, stream, self.context.plan.own_tasks_per_step)
        batch = algorithm.advantage(batch, self.kl_coef)
        if self.skipping.skips == "nothing":
            return batch
        weight_N = algorithm.weights(batch, step + 1)
        without_R = without_effect(batch, weight_N, skips=self.skipping.skips)
        return skip(batch, without_R, self.minibatches(step, batch, cfg.train))

    def minibatches(self, step: int, batch: Batch, train: TrainConfig) -> list[Tensor]:
        """Numbers of the rollouts of each optimizer step."""
        stream = seeds.key(self.context.cfg.seed, "minibatches", self.context.name, step)
        return list(passes(batch, train, stream=stream, fill=self.context.plan.algorithm.refill == "copy"))

    def routed(self, batch: Batch) -> Batch:
        """The batch with the experts that train.router_replay names, for all rollouts that are not skipped."""
        replay = self.context.cfg.train.router_replay
        if replay == "sampled" and batch.routed_NLE is None:
            raise WhetError(
                "train.router_replay=sampled: the rollouts of this step have no experts; those that were sampled "
                "without it cannot be trained with it"
            )
        if replay != "old":
            return batch
        ids = self.policy.forward(computed(batch), "routed").to(batch.token_ids_N.device)
        seen_N = torch.ones_like(batch.mask_N)
        if batch.skipped_R is not None:
            seen_N = ~batch.skipped_R[batch.rollout_N]
        return replace(
            batch, routed_NLE=ids.new_zeros(batch.tokens, *ids.shape[1:]).index_put((seen_N,), ids)
        )

    def compute_logprobs_and_values(self, batch: Batch) -> Batch:
        """Old and reference log-probs and values before the step, of all rollouts that are not skipped."""
        algorithm, asked = self.context.algorithm, Jobs[Tensor]()
        seen = computed(batch)
        unknown = batch.logp_sample_N is None  # the engine cannot tell them
        if algorithm.kind == "online" and (self.recomputes_old or unknown):
            asked["logp_old_N"] = self.policy, partial(self.policy.forward, seen, "logprobs")
        if self.references:
            asked["logp_ref_N"] = self.references[0], partial(reference_logprobs, self.references, seen)
        for want, name in OF_POLICY.items():
            if want in algorithm.needs:
                asked[name] = self.policy, partial(self.policy.forward, seen, want)
        longer = lengthened(seen) if self.critic is not None and algorithm.bootstraps else None
        if self.critic is not None and algorithm.implicit is None:
            valued = seen if longer is None else longer.batch
            asked["value_N"] = self.critic, partial(self.critic.forward, valued, "values")
        done = run_concurrently(asked)
        last_R = None
        if longer is not None:
            done["value_N"], last_R = longer.parted(done["value_N"])
        found = {name: among_skipped(batch, x_N) for name, x_N in done.items()}
        if algorithm.kind == "online" and "logp_old_N" not in found:
            found["logp_old_N"] = sampled_logp_N(batch)
        if "value_N" in found:
            found["value_N"] = self.value_scale.restored(found["value_N"], batch.mask_N)
        if longer is not None and last_R is not None:
            found["last_value_R"] = self._last_values(batch, longer, last_R)
        if self.references and "kl_zero" in algorithm.needs:
            reference = self.references[0].forward
            found["kl_zero_R"] = kl_zero(batch, policy=self.policy.forward, reference=reference)
        # else the update reads logp_ref_N alone
        reprompted = batch.reprompted if algorithm.full_kl_coef else None
        return replace(batch, reprompted=reprompted, **found)

    def implicit_rewards(self, step: int, batch: Batch, how: Implicit) -> Batch:
        """The batch with the critic's log-probs, a language model that learns from it here: its rewards are read by the
        advantage, before the policy learns."""
        critic, train = self.critic, self.context.plan.critic
        assert critic is not None
        assert train is not None
        parts = self.minibatches(step, batch, train)
        if how.compares:
            before = replace(batch, implicit_N=critic.forward(batch, "logprobs"))
            batch = replace(batch, rival_R=rivals(before, how.beta))
        found, self.critic_updates = list[Tensor](), []
        once = len({id(rows) for rows in parts[: len(parts) // train.update_epochs]})  # each rollout once
        for number, rows in enumerate(parts):
            part = minibatch(batch, rows, parts)
            if not how.before and number < once:
                found.append(critic.forward(part, "logprobs"))
            self.critic_updates.append(self.update_critic(part))
        if how.before:
            return replace(batch, implicit_N=critic.forward(batch, "logprobs"))
        at = torch.cat([tokens_of(batch, rows) for rows in parts[:once]])
        logp_N = torch.cat(found)
        return replace(batch, implicit_N=torch.empty_like(logp_N).index_put((at.to(logp_N.device),), logp_N))

    def _last_values(self, batch: Batch, longer: Lengthened, last_R: Tensor) -> Tensor:
        """[R] of the whole batch; 0 for rollouts that are skipped or not truncated."""
        is_last_R = torch.zeros(len(last_R), dtype=torch.bool, device=last_R.device)
        is_last_R[longer.row_T.to(last_R.device)] = True
        last_R = self.value_scale.restored(last_R, is_last_R)
        if batch.skipped_R is None:
            return last_R
        return last_R.new_zeros(batch.rollouts).masked_scatter(~batch.skipped_R.to(last_R.device), last_R)

    @property
    def recomputes_old(self) -> bool:
        """The ratio's denominator comes from the trainer: the engine's log-probs are not exactly its own."""
        return self.context.algorithm.needs_old(self.exact and self.sampled.same_policy)

    # -- the update

    def learned(self, step: int, batch: Batch, groups: list[Group]) -> Learned:
        """See `learn`. The engine's and the trainer's log-probs are compared before the weights change: in the first
        update."""
        recorded = self.context.due(step + 1, self.context.cfg.track.batches_interval)
        self.terms, logp_N = [] if recorded else None, None
        own = without_experts(batch)
        with self.context.monitor.phase("update"):
            if recorded:
                logp_N = among_skipped(own, self.policy.forward(computed(own), "logprobs"))
            updates, lost = self.update(step, batch)
        first = {k: v for k, v in updates[0].items() if "/mismatch_" in k}
        self.check_mismatch(step, first)
        return Learned(
            batch=own,
            groups=groups,
            metrics=merge(updates) | first | self.measure(step, own),
            skipped=_uids(groups, own, lost),
            flops=self._flops(step, batch),
            terms=[each.own(batch) for each in self.terms or ()],
            logp_N=logp_N,
        )

    def update(self, step: int, batch: Batch) -> tuple[list[Metrics], Sequence[int]]:
        """Every optimizer step of the policy and of the critic: the policy's first, or both at once on separate ranks.
        While the critic warms up, the policy waits. Also the numbers of the groups whose updates were skipped."""
        jobs, plan = Jobs[list[Metrics]](), self.context.plan
        if step >= plan.critic_warmup_steps:
            parts = self.minibatches(step, batch, self.context.cfg.train)
            jobs["policy"] = (
                self.policy,
                lambda: [self.update_policy(step, rows, minibatch(batch, rows, parts)) for rows in parts],
            )
        if self.critic is not None and plan.critic is not None:
            own = without_experts(batch)
            dealt = self.minibatches(step, own, plan.critic)
            if self.context.algorithm.implicit is None:
                jobs["critic"] = (
                    self.critic,
                    lambda: [self.update_critic(minibatch(own, rows, dealt)) for rows in dealt],
                )
        done = run_concurrently(jobs)
        if self.critic_updates:  # before the policy's
            done["critic"], self.critic_updates = self.critic_updates, []
        lost, why = (
            untaught(batch, parts, done["policy"])
            if "policy" in done
            else untaught(own, dealt, done["critic"])
        )
        if why:
            log.warning("step %d: %s", step + 1, why)
        return [numbers for steps in done.values() for numbers in steps], lost

    def update_policy(self, step: int, rows: Tensor, minibatch: Batch) -> Metrics:
        """One optimizer step of the policy, on these rollouts of the step's batch. Denominators count the whole
        minibatch, skipped rollouts included."""
        algorithm = self.context.algorithm
        weighted = replace(minibatch, weight_N=algorithm.weights(minibatch, step + 1))
        coef = algorithm.entropy.weight(self.entropy)
        # sees the whole minibatch before it is split
        loss = algorithm.loss_of(weighted, self.policy.forward, coef, step=step + 1)
        seen = computed(weighted)
        if self.terms is not None:
            if minibatch.skipped_R is not None:
                rows = rows[~minibatch.skipped_R]
            out, result = evaluated(self.policy, seen, loss, entropy=algorithm.entropy.is_on)
            self.terms.append(LossTerms.of(rows, seen, out, result))
        found = self.policy.update(seen, loss)
        if algorithm.entropy.target_nats is not None:
            self.entropy = algorithm.entropy.after(self.entropy, found.get("entropy_nats"))
            found["entropy_coef"] = coef
        return {f"train/{k}": v for k, v in found.items()}

    def update_critic(self, minibatch: Batch) -> Metrics:
        """One optimizer step of the critic."""
        algorithm = self.context.algorithm
        assert self.critic is not None
        assert algorithm.value_loss is not None
        scaled = minibatch if algorithm.implicit else self.value_scale.normalized(minibatch)
        weighted = replace(scaled, weight_N=algorithm.value_weights(minibatch))
        return {f"critic/{k}": v for k, v in self.critic.update(weighted, algorithm.value_loss).items()}

    # -- after the update

    def check_mismatch(self, step: int, numbers: Metrics) -> None:
        """Compare the log-probs of engine and trainer. With log-prob parity there is no difference."""
        share, reuse = numbers.get("train/mismatch_frac", 0.0), self.reuse
        if not self.exact or self.policy.drops:
            return
        what = None
        if reuse is not None and reuse.differs is not None:
            what = f"the activations of a rollout differ from the trainer's, by at most {reuse.differs:.2e}"
        elif share > 0 and self.sampled.same_policy:
            what = (
                f"{share:.2%} of the sampled log-probs differ from the trainer's, by at most "
                f"{numbers['train/mismatch_max_nats']:.2e} nats"
            )
        if what is not None:
            message = f"step {step + 1}: {what}, although the self-test reported 'exact'"
            if self.context.cfg.machine.logprob_parity == "on":
                raise WhetError(f"{message}; machine.logprob_parity=on does not allow this: use auto")
            log.warning("%s; the run continues as 'close'", message)
            self.not_exact()
            self.context.monitor.display.exactness("close")

    def not_exact(self) -> None:
        """Sampling and training are not one computation: from here on nothing is reused."""
        self.exact = False
        if self.reuse is not None:
            self.reuse.kept.resize(0)

    def measure(self, step: int, batch: Batch) -> Metrics:
        """Numbers of the whole batch, in which the policy becomes the next version; the KL controller moves."""
        algorithm, out = self.context.algorithm, self.sampled_by(batch)
        out |= shares(batch)
        seen = computed(batch)
        if seen.logp_ref_N is not None and seen.logp_old_N is not None:
            gap = (seen.logp_old_N - seen.logp_ref_N)[seen.mask_N]
            out["train/kl_reference_nats"] = float(gap.double().mean())
        if algorithm.kl_coef:
            out["train/kl_coef"] = self.kl_coef
            self.kl_coef = algorithm.next_kl_coef(batch, self.kl_coef)
        if (decay := self.context.cfg.critic.normalize_decay) is not None and batch.return_N is not None:
            out |= {"critic/scale_mean": self.value_scale.mean, "critic/scale_std": self.value_scale.std}
            self.value_scale = self.value_scale.seen(batch.return_N, batch.mask_N, decay=decay)
        if algorithm.mu is not None:
            out["train/mu"] = algorithm.mu(step + 1)
        return out

    def sampled_by(self, batch: Batch) -> Metrics:
        """The version that the policy becomes, and how far behind it the rollouts are."""
        out: Metrics = {"train/version": float(self.version + 1)}
        behind_M = (self.version - batch.version_N)[batch.mask_N & (batch.version_N >= 0)]
        if self.sampled.older and len(behind_M):
            out["train/staleness_mean"] = float(behind_M.double().mean())
        if self.reused is not None:
            out["train/replayed_groups"] = float(self.reused())
        return out

    def _flops(self, step: int, batch: Batch) -> float:
        if self.meter is None:
            return 0.0
        return self.meter.flops(batch, policy_learns=step >= self.context.plan.critic_warmup_steps)

    def reset_reference(self, done: int) -> None:
        """Every so many steps or epochs move the reference to the policy; the optimizer may be reset."""
        cfg = self.context.cfg.reference
        due = self.context.due(done, cfg.reset_interval)
        if self.references and due:
            self.references[0].copy_from(self.policy, cfg.mixup_alpha)
            if cfg.reset_optimizer:
                self.policy.forget()

    # -- saved and resumed

    def engines(self) -> dict[str, TrainEngine]:
        """The models of a checkpoint. A reference that was loaded from a folder is read from there again."""
        held = {"policy": self.policy, "critic": self.critic}
        if self.references and self.context.plan.reference_saved:
            held["reference"] = self.references[0]
        return {name: engine for name, engine in held.items() if engine is not None}

    def state(self) -> dict[str, Json]:
        return {
            "version": self.version,
            "kl_coef": self.kl_coef,
            "entropy": asdict(self.entropy),
            "first": self._first_weights(),
            "value_scale": asdict(self.value_scale),
            "exact": self.exact,
            "experts": self.demonstrations.stream.state() if self.demonstrations else None,
        }

    def _first_weights(self) -> dict[str, float]:
        """What the weights that may move during a run begin with, as the config says."""
        return {"kl_coef": self.context.algorithm.kl_coef, "entropy": self.context.algorithm.entropy.coef}

    def restore(self, state: Json, *, changed: bool) -> list[tuple[str, str, str]]:
        """Resume from `state`; a weight that never moves, or whose first value has changed, is the config's. Returns
        the data that demonstrations come from where it has changed, as `TaskStream.restore` does."""
        first, self.value_scale = self._first_weights(), Scale(**state["value_scale"])
        was = state.get("first", first)  # checkpoints of older versions have neither this nor `entropy`
        if self.context.cfg.algorithm.reward_kl.target is not None and was["kl_coef"] == first["kl_coef"]:
            self.kl_coef = state["kl_coef"]
        if self.context.algorithm.entropy.target_nats is not None and was["entropy"] == first["entropy"]:
            self.entropy = EntropyBonus(**state.get("entropy", asdict(self.entropy)))
        if not state["exact"]:
            self.not_exact()
        self.policy.version = state["version"]
        if self.demonstrations is None or not (state["experts"] or not changed):
            return []
        return self.demonstrations.stream.restore(state["experts"], changed=changed)


# ---------------------------------------------------------------- opened from the config


def open_learner(
    context: Context,
    models: Models,
    *,
    ranks: Mapping[str, Ranks],
    demonstrations: Demonstrations | None,
    exact: bool,
    reused: Callable[[], int] | None,
) -> Learner:
    """The policy starts from what the stage before left in the model."""
    cfg, algorithm = context.cfg, context.algorithm
    policy = policy_of(context, models, ranks)
    references = (
        references_of(context, models, ranks, cut_of(context, models)) if algorithm.needs_reference else ()
    )
    critic = critic_of(context, models, ranks) if algorithm.needs_critic else None
    learner = Learner(
        context=context,
        policy=policy,
        references=references,
        critic=critic,
        skipping=skipping(context.plan.algorithm, cfg.train, mtp=cfg.model.mtp is not None),
        exact=exact,
        demonstrations=demonstrations,
        reprompt=reprompter(context, models),
        choose_reference=ReferenceChoice.of(cfg.reference) if cfg.reference.models else None,
        temperatures=Temperatures.of(context),
        reused=reused,
        ranks=ranks,
        kl_coef=algorithm.kl_coef,
        entropy=EntropyBonus(algorithm.entropy.coef),
    )
    if algorithm.full_kl_coef and references:
        policy.full_kl = FullKl(algorithm.full_kl_coef, references[0], algorithm.divergence)
    if learner.skipping.why:
        log.info(
            "stage %s: rollouts whose weight in the gradient is 0: %s", context.name, learner.skipping.why
        )
    devices = trainers(ranks)
    learner.meter = meter_of(
        policy,
        critic,
        device=models.model.device,
        train=cfg.train,
        of_critic=context.plan.critic,
        critic_is_model=algorithm.implicit is not None,
        devices=devices,
    )
    watch(learner)
    return learner


def untrained(context: Context, models: Models) -> Learner:
    """The policy alone, to be evaluated."""
    policy = TorchEngine(models.model.requires_grad_(False), models.ops, cut=cut_of(context, models))
    learner = Learner(context, policy, references=(), critic=None, skipping=Skipping(), exact=models.exact)
    watch(learner)
    return learner


def watch(learner: Learner) -> None:
    """Connect the models with the watchdog and the timeline."""
    monitor, cfg = learner.context.monitor, learner.context.cfg.track
    skip = None if cfg.micro_batches else MICRO_BATCH
    roles = [("policy", learner.policy), ("critic", learner.critic)]
    for lane, trained in [*roles, *(("reference", each) for each in learner.references)]:
        if trained is not None:
            trained.beat = monitor.watch.beat
            kind: Kind = "asked" if isinstance(trained, RankGroup) else "work"
            trained.span = monitor.timeline.spans_of(lane, skip=skip, kind=kind)
    for ranks in learner.ranks.values():
        ranks.show_on(monitor.timeline, micro_batches=cfg.micro_batches)


def _uids(groups: Sequence[Group], batch: Batch, lost: Sequence[int]) -> tuple[int, ...]:
    """Task uids of the rollouts in the batch's groups of these numbers; where tasks are paired, a group has two."""
    uids = [g.task.uid for g in groups for _ in g.rollouts]
    return tuple(dict.fromkeys(uid for uid, n in zip(uids, batch.group_R.tolist()) if n in lost))


def reprompter(context: Context, models: Models) -> Reprompter | None:
    """None where the reference sees the policy's prompts."""
    given = resolve(context.cfg.algorithm).reprompt
    if given is None:
        return None
    positions: int | None = getattr(models.model.config, "max_position_embeddings", None)
    return open_reprompter(given, models.tokenizer, positions=positions)
