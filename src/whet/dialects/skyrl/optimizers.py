"""SkyRL's values of optimizers, critic, overrides of models and adapters as native ones."""

from __future__ import annotations

from functools import partial

from whet.config.faults import shown
from whet.dialects.megatron import adapted_layers, begins, router_terms
from whet.dialects.row import NOTHING, Native, NotSupportedYet, Values
from whet.dialects.skyrl import arctic
from whet.dialects.skyrl.devices import POLICY, A, is_deepspeed, is_megatron, since
from whet.dialects.typed import choices, choose
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- optimizers

POLYNOMIAL_END = 1e-7
"""Learning rate at which transformers' polynomial schedule ends; its power is 1."""

NEED_MORE = choices("skyrl", "schedule that needs more")
"""Schedules of transformers that need arguments which SkyRL does not pass, and what is like them natively."""


def policy_optimizer(v: Values) -> Native:
    """All of the policy's optimizer, what the trainer divides logits by, and which parameters stay as they are.

    Megatron had betas of its own until 0.3."""
    out = dict(_optimizer(v, "policy", "train.optimizer"))
    if is_megatron(v):
        if not since(v, "0.3"):
            out["train.optimizer.betas"] = [0.9, 0.999]
        if v[f"{POLICY}.megatron_config.freeze_moe_router"]:
            out["train.trainable"] = {r"mlp\.gate\.": False}
    if v[f"{A}.temperature"] is not None:
        out["train.temperature"] = v[f"{A}.temperature"]
    return out


def critic(v: Values) -> Native:
    """The optimizer and the overrides of the critic, where one learns (gae)."""
    return {**_optimizer(v, "critic", "critic.optimizer"), **own_overrides(v, "critic", "critic")}


def own_overrides(v: Values, role: str, native: str) -> Native:
    """What is put over a model's config.json beside the policy's; natively it is the policy's by default."""
    own = v[f"trainer.{role}.model_config_kwargs"]
    return {f"{native}.overrides": own} if own or (own is not None and policy_overrides(v)) else {}


def policy_overrides(v: Values) -> Native:
    """What is put over the policy's config.json; the keys of rotary embeddings are those of older versions."""
    rope = {name: v[f"trainer.{name}"] for name in ("rope_scaling", "rope_theta")}
    by_megatron = v[f"{POLICY}.megatron_config.model_config_kwargs"] if is_megatron(v) else {}
    given = {
        **{name: value for name, value in rope.items() if value},
        **(v[f"{POLICY}.model_config_kwargs"] or {}),
        **(by_megatron or {}),
    }
    return {"model.overrides": given} if given else {}


def _optimizer(v: Values, role: str, optimizer: str) -> Native:
    """A norm of 0 or less is no clipping. torch decays all parameters; DeepSpeed's and Megatron's spare norms and
    biases, and DeepSpeed has a norm of its own where none is given, and for the critic."""
    given = f"trainer.{role}.optimizer_config"
    norm = v[f"{given}.max_grad_norm"]
    if is_deepspeed(v) and (norm <= 0 or role == "critic"):
        norm = v["deepspeed_config.train.gradient_clipping"]
    out: dict[str, Json] = {
        f"{optimizer}.lr": v[f"{given}.lr"],
        f"{optimizer}.betas": v[f"{given}.adam_betas"],
        f"{optimizer}.weight_decay": v[f"{given}.weight_decay"],
        f"{optimizer}.max_grad_norm": norm if norm > 0 else None,
    }
    if v[f"{given}.weight_decay"] > 0 and not is_deepspeed(v) and not is_megatron(v):
        out[f"{optimizer}.decay_all"] = True
    return out | {f"{optimizer}.schedule.{key}": value for key, value in _schedule(v, given).items()}


def _schedule(v: Values, given: str) -> Native:
    """transformers' schedules, in optimizer steps; the first step of a warm-up moves nothing, as there."""
    warmup, name, lr = v[f"{given}.num_warmup_steps"], v[f"{given}.scheduler"], v[f"{given}.lr"]
    warmup = v["trainer.num_warmup_steps"] if warmup is None else warmup
    warmup = arctic.warmup_steps(v) if arctic.trains(v) else warmup
    if name in NEED_MORE:
        raise ConfigError(
            f"{given}.scheduler={name}: transformers needs arguments for it that SkyRL does not pass, so SkyRL stops "
            f"there, too; write another, or give the native one: whet.train.optimizer.schedule, {NEED_MORE[name]}."
        )
    kind = choose(v, f"{given}.scheduler", choices("skyrl", "schedule"))
    if is_megatron(v) and name != "constant_with_warmup":
        raise ConfigError(
            f"{given}.scheduler={name}: with trainer.strategy=megatron SkyRL has constant_with_warmup alone"
        )
    out: dict[str, Json] = {"type": kind, "warmup_steps": warmup}
    if name == "constant":
        out["warmup_steps"] = 0
    elif warmup:
        out["warmup_ends"] = "start"
    if name == "polynomial":
        if lr <= POLYNOMIAL_END:
            raise ConfigError(
                f"{given}.scheduler=polynomial ends at {POLYNOMIAL_END}, so {given}.lr must be above it"
            )
        out["min_lr_ratio"] = POLYNOMIAL_END / lr
    if name == "inverse_sqrt" and not warmup:
        raise NotSupportedYet(
            f"{given}.scheduler=inverse_sqrt without {given}.num_warmup_steps is not built yet (coming)"
        )
    return out


routers = partial(router_terms, at=f"{POLICY}.megatron_config")


# ---------------------------------------------------------------- adapters


ALL = "all-linear"


def _lora(v: Values, role: str, native: str) -> Native:
    """rank 0 trains the whole model."""
    at = f"trainer.{role}.model.lora"
    if v[f"{at}.rank"] == 0:
        return NOTHING
    key = f"{at}.init_method"
    return {
        f"{native}.rank": v[f"{at}.rank"],
        f"{native}.alpha": v[f"{at}.alpha"],
        f"{native}.dropout": v[f"{at}.dropout"],
        **_targets(v, role, f"{at}.target_modules", native),
        f"{native}.init": begins(v, key) if is_megatron(v) else choose(v, key, choices("skyrl", "lora init")),
        **_exclude(v, f"{at}.exclude_modules", native),
    }


def _exclude(v: Values, key: str, native: str) -> Native:
    given = v[key]
    if not given:
        return NOTHING
    if is_megatron(v):
        raise ConfigError(
            f"{key}={shown(given)}: Megatron-Bridge excludes modules only where target_modules is not given, and "
            "SkyRL always gives it; list the layers in target_modules"
        )
    return {f"{native}.exclude_modules": given}


def _targets(v: Values, role: str, key: str, native: str) -> Native:
    """all-linear, names, or a regular expression; with Megatron its names. The older key is the policy's."""
    own, older = v[key], v["trainer.target_modules"] if role == "policy" else ALL
    if own != ALL and older not in (ALL, own):
        raise ConfigError(
            f"trainer.target_modules={shown(older)} is the older name of {key}={shown(own)}; keep one"
        )
    given = older if own == ALL else own
    if not is_megatron(v):
        return {f"{native}.targets": given}
    megatron = f"{POLICY}.megatron_config"
    experts = f"{megatron}.expert_model_parallel_size"
    return adapted_layers(
        given,
        key,
        native=native,
        fused=v[f"{megatron}.lora_config.lora_type"] == "lora",
        each=v[experts] > 1 and v.get(f"{megatron}.moe_grouped_gemm") is False,
        mixture=f"{experts}={v[experts]}" if v[experts] > 1 else "",
        dropout=v[f"trainer.{role}.model.lora.dropout"],
    )


policy_lora = partial(_lora, role="policy", native="model.lora")
critic_lora = partial(_lora, role="critic", native="critic.lora")
