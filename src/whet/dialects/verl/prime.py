"""verl's recipe PRIME as native keys (recipe/ of verl 0.4.0 to 0.6.1, then the repository verl-recipe): an implicit
reward model that learns beside the policy, and prompts that are sampled and not trained on."""

from __future__ import annotations

from fractions import Fraction

from whet.config.faults import shown
from whet.dialects.row import NOTHING, Native, NotSupportedYet, Values
from whet.dialects.typed import choose
from whet.dialects.verl.roles import ACTOR, MODEL, RM, ROLLOUT, anywhere
from whet.dialects.verl.sizes import prompts, ranks, responses
from whet.types import ConfigError, Json

OPTIM = f"{RM}.model.optim"

UPDATES = {"before": "before", "after": "after", "reverse": "after", "none": None}
"""When the model learns: before it gives rewards, or after. reverse also gives rewards first; what it returns are those
of the update itself, as after."""

LOSSES = {"ce": "ce", "dpo": "dpo", "bon_acc": None, "bon_rm": None}
"""bon_*: sums over a micro-batch, so that its size is a factor of the gradient."""


def algorithm(v: Values) -> dict[str, Json]:
    """RLOO of two rewards: of the implicit model's, and of the outcome."""
    if v["algorithm.adv_estimator"] != "rloo":
        raise ConfigError(
            f"algorithm.adv_estimator={shown(v['algorithm.adv_estimator'])}: PRIME has rloo alone; set it to rloo"
        )
    update, loss = choose(v, f"{RM}.model.update", UPDATES), choose(v, f"{RM}.model.loss_type", LOSSES)
    if loss == "dpo" and v[f"{RM}.model.update"] != "reverse":
        raise ConfigError(
            f"{RM}.model.loss_type=dpo compares a response with the others of its prompt as they were before the "
            f"update; set {RM}.model.update=reverse"
        )
    if v[f"{RM}.prime_granularity"] not in (None, "token"):
        raise ConfigError(
            f"{RM}.prime_granularity={shown(v[f'{RM}.prime_granularity'])}: verl's own code fails with any but token; "
            "natively algorithm.advantage.implicit_granularity=whole"
        )
    at = "algorithm.advantage"
    return {
        "algorithm.name": "prime",
        f"{at}.process_coef": v["algorithm.reward_dpo_coef"],
        f"{at}.outcome_coef": v["algorithm.reward_gt_coef"],
        f"{at}.implicit_beta": v[f"{RM}.model.beta_train"],
        f"{at}.implicit_loss": loss,
        f"{at}.implicit_update": update,
        f"{at}.implicit_normalize": v[f"{RM}.prime_norm"] == "batch_norm",
    }


def model(v: Values) -> Native:
    """The implicit model as the critic, and the frozen one beside it as the reference."""
    path, frozen = anywhere(v, f"{RM}.model.path"), v[f"{RM}.model.ref_path"]
    frozen = path if frozen is None else frozen
    if v[f"{ACTOR}.use_kl_loss"] and frozen != v[f"{MODEL}.path"]:
        raise NotSupportedYet(
            f"{RM}.model.ref_path={shown(frozen)} beside {ACTOR}.use_kl_loss is coming, not built yet: a KL to another "
            "reference than the one that rewards are measured against"
        )
    checkpointed = v[f"{RM}.model.enable_gradient_checkpointing"]
    micro = _micro_batch(v)
    return {
        "critic.path": path,
        "reference.path": frozen,
        "critic.minibatches": _mini_batches(v),
        "critic.update_epochs": 1,
        **({} if micro is None else {"critic.micro_batch_rollouts": micro}),
        **({} if checkpointed is None else {"critic.gradient_checkpointing": checkpointed}),
        **_optimizer(v),
    }


def _mini_batches(v: Values) -> int:
    """mini_batch_size counts responses, unlike the actor's, which counts prompts."""
    key = f"{RM}.mini_batch_size"
    size, of_step = v[key], prompts(v) * responses(v)
    size = v[f"{ACTOR}.ppo_mini_batch_size"] if size is None else size
    if of_step % size:
        raise NotSupportedYet(
            f"{key}={size} must divide data.train_batch_size * {ROLLOUT}.n = {of_step}: a smaller last mini batch is "
            "coming, not built yet"
        )
    return of_step // int(size)


def _micro_batch(v: Values) -> int | None:
    """Responses of one pass on one device."""
    if v[f"{RM}.use_dynamic_bsz"]:
        raise ConfigError(
            f"{RM}.use_dynamic_bsz=True: PRIME's reward model has no keys for it, and verl fails; set it to False"
        )
    together, each = v[f"{RM}.micro_batch_size"], v[f"{RM}.micro_batch_size_per_gpu"]
    return each if together is None else max(int(together) // ranks(v, ACTOR), 1)


def _optimizer(v: Values) -> dict[str, Json]:
    """AdamW at a constant rate after its warm-up, whatever the schedule is called. Of a share of total_training_steps
    nobody tells the reward model how many these are."""
    native, decay = "critic.optimizer", v[f"{OPTIM}.weight_decay"]
    steps, total = v[f"{OPTIM}.lr_warmup_steps"], v[f"{OPTIM}.total_training_steps"]
    if steps is None or steps < 0:
        steps = int((v[f"{OPTIM}.lr_warmup_steps_ratio"] or 0.0) * (total or 0))
    return {
        f"{native}.lr": v[f"{OPTIM}.lr"],
        f"{native}.weight_decay": decay,
        **({f"{native}.decay_all": True} if decay else {}),
        f"{native}.max_grad_norm": v[f"{OPTIM}.grad_clip"],
        **(
            {f"{native}.schedule.unit": "train_step", f"{native}.schedule.warmup_steps": steps}
            if steps > 0
            else {}
        ),
    }


def oversampling(v: Values) -> Native:
    """oversample_factor times as many prompts are sampled; those that pass the filters are trained on first."""
    factor = v["data.oversample_factor"]
    if factor == 1:
        return NOTHING
    if (Fraction(str(factor)) * prompts(v)).denominator != 1 or factor < 1:
        raise ConfigError(
            f"data.oversample_factor={factor}: times data.train_batch_size={prompts(v)} it must be a whole number of "
            "prompts, at least as many"
        )
    bounded, at = v["data.filter_accuracy"], "algorithm.oversample"
    return {
        f"{at}.factor": factor,
        f"{at}.low": v["data.accuracy_lower_bound"] if bounded else None,
        f"{at}.high": v["data.accuracy_upper_bound"] if bounded else None,
        f"{at}.finished": v["data.filter_truncate"],
    }
