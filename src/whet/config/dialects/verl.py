"""verl 0.4 (configuration pages of June 2025 in English and of April 2025 in Chinese): its kinds of keys.

Defaults are the document's; where its two languages, or the document and verl itself, differ, the row says which
counts. Sizes of machines only enter verl's own batch-size rules: gradients are taken over the whole mini batch, however
a machine would spread it, so one process gives the same run.
"""

from __future__ import annotations

from whet.config.dialects.key import Key, Translate, derived, mapped, translated
from whet.config.dialects.verl_eval import EVAL
from whet.config.dialects.verl_generation import GENERATION
from whet.config.dialects.verl_loop import actor_optimizer, critic_optimizer
from whet.config.dialects.verl_newer import NEWER
from whet.config.dialects.verl_policy import DECAY, POLICY, STEPS
from whet.config.dialects.verl_rules import ACTOR, CRITIC, at_least, is_flag, is_one_of
from whet.config.dialects.verl_run import DATA, RUN
from whet.config.dialects.verl_sft import SFT

VERL_PPO: tuple[Key, ...] = (*DATA, *POLICY, *RUN, *NEWER)
"""The 200 keys of the document, then those of verl's base file and of newer versions."""


def _megatron(role: str, optimizer: Translate, native: str) -> tuple[Key, ...]:
    """Megatron's optimizer and schedule of one role; read with strategy=megatron."""
    at, to = f"{role}.optim", f"{native}.optimizer"
    return (
        translated(
            f"{at}.optimizer",
            optimizer,
            f"{to}.kind",
            default="adam",
            reason="adam decays as AdamW, as there; sgd has Megatron's momentum of 0.9, and is read with "
            "strategy=megatron.",
        ),
        mapped(f"{at}.lr", f"{to}.lr", default=1e-6),
        translated(f"{at}.clip_grad", optimizer, f"{to}.grad_clip", default=1.0, reason="0 is off."),
        derived(
            f"{at}.total_training_steps",
            at_least(f"{at}.total_training_steps", -1),
            default=-1,
            reason="verl's trainer writes it, over any value; it follows from the run's length here, too.",
        ),
        *(
            translated(f"{at}.{name}", optimizer, f"{to}.schedule.{key}", default=default, reason=reason)
            for name, key, default, reason in (
                (
                    "lr_warmup_init",
                    "warmup_start",
                    0.0,
                    "As a share of lr natively; the warm-up starts at it.",
                ),
                ("lr_warmup_steps", "warmup_steps", -1, f"0, null and less mean the ratio. {STEPS}"),
                ("lr_warmup_steps_ratio", "warmup_fraction", 0.0, "Where lr_warmup_steps is not positive."),
                ("lr_decay_steps", "total_steps", None, f"null: all steps, warm-up included. {STEPS}"),
                (
                    "lr_decay_style",
                    "kind",
                    "linear",
                    "constant, linear, cosine, inverse_square_root (also with hyphens) or WSD; "
                    "warmup_style=cosine means cosine.",
                ),
                ("min_lr", "min_factor", 0.0, "As a share of lr natively."),
            )
        ),
        translated(f"{at}.weight_decay", optimizer, f"{to}.weight_decay", default=0.01, reason=DECAY),
        derived(
            f"{at}.weight_decay_incr_style",
            is_one_of(f"{at}.weight_decay_incr_style", "constant", "linear", "cosine"),
            default="constant",
            reason="From weight_decay to weight_decay: every shape is flat, as there.",
        ),
        translated(
            f"{at}.lr_wsd_decay_style",
            optimizer,
            f"{to}.schedule.decay_shape",
            default="exponential",
            reason="Of WSD: exponential, linear, cosine, minus_sqrt; constant: no decay.",
        ),
        translated(
            f"{at}.lr_wsd_decay_steps",
            optimizer,
            f"{to}.schedule.decay_steps",
            default=None,
            reason=f"Of WSD, which needs it. {STEPS}",
        ),
        derived(
            f"{at}.use_checkpoint_opt_param_scheduler",
            is_flag(f"{at}.use_checkpoint_opt_param_scheduler"),
            default=False,
            reason="A run goes on only with the config it was saved with, so both are equal.",
        ),
    )


VERL_MEGATRON: tuple[Key, ...] = (
    *_megatron(ACTOR, actor_optimizer, "train"),
    *_megatron(CRITIC, critic_optimizer, "critic"),
)

VERL_EVAL: tuple[Key, ...] = EVAL

VERL_SFT: tuple[Key, ...] = SFT

VERL_GENERATION: tuple[Key, ...] = GENERATION

ALIASES: dict[str, str | tuple[str, str]] = {
    f"{ACTOR}.optim.lr_scheduler_type": f"{ACTOR}.optim.warmup_style",
    "critic.optim.lr_scheduler_type": "critic.optim.warmup_style",
    "optim.lr_warmup_steps_ratio": "optim.warmup_steps_ratio",
    "optim.lr_scheduler_type": "optim.lr_scheduler",
    "critic.checkpoint.contents": "critic.checkpoint.save_contents",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    **{
        f"reward_model.reward_kwargs.overlong_buffer_cfg.{name}": f"reward_model.overlong_buffer.{name}"
        for name in ("enable", "len", "penalty_factor", "log")
    },
    "ray_kwargs.ray_init.num_cpus": "ray_init.num_cpus",
    "ray_kwargs.timeline_json_file": "ray_init.timeline_json_file",
}
"""A newer or older name -> the one in the tables, with a note where it needs one."""
