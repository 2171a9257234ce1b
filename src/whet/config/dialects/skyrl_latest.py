"""SkyRL's keys that came after its document and belong to what is learned: losses, corrections, controllers."""

from __future__ import annotations

from whet.config.dialects.key import Key, Translate, coming, translated
from whet.config.dialects.skyrl_learn import (
    correction,
    critic,
    entropy,
    groups,
    kl,
    policy_loss,
    policy_optimizer,
    reduction,
    reference,
)
from whet.config.dialects.skyrl_parts import policy_overrides
from whet.types import Json

AT = "trainer.algorithm"
OFF = f"{AT}.off_policy_correction"
LOSS = "Read where ppo_loss_type (policy_loss_type) asks for it, as there."
TIS = "Weights by the trainer's old log-probs over the engine's; averages count every token, KL and entropy have none."
ADAPTIVE = "Read with use_kl_in_reward, as there; the coefficient starts from kl_loss_coef."

CORRECTIONS: tuple[tuple[str, str, Json], ...] = (
    ("tis_ratio_type", "weight", None),
    ("token_tis_ratio_clip_high", "high", 2.0),
    ("sequence_tis_ratio_clip_high", "high", 5.0),
    ("sequence_mask_metric", "reject", None),
    ("geo_mask_low", "reject", 0.99),
    ("geo_mask_high", "reject", 1.01),
    ("product_mask_low", "reject", 0.5),
    ("product_mask_high", "reject", 2.0),
    ("outlier_token_is_threshold_low", "reject", None),
    ("outlier_token_is_threshold_high", "reject", None),
    ("token_mask_is_threshold_low", "reject", None),
    ("token_mask_is_threshold_high", "reject", None),
)

LOSSES: tuple[tuple[str, str, Json], ...] = (
    ("cispo.cispo_eps_clip_low", "clip_low", 1.0),
    ("cispo.cispo_eps_clip_high", "clip_high", 4.0),
    ("cispo.cispo_anchor", "old_logprobs", "old"),
    ("sapo.tau_pos", "tau_pos", 1.0),
    ("sapo.tau_neg", "tau_neg", 1.05),
    ("clip_cov.clip_ratio", "clip_cov_ratio", 2e-4),
    ("clip_cov.clip_cov_lb", "clip_cov_lb", 1.0),
    ("clip_cov.clip_cov_ub", "clip_cov_ub", 5.0),
    ("kl_cov.kl_cov_frac", "kl_cov_ratio", 0.2),
    ("kl_cov.ppo_kl_coef", "ppo_kl_coef", 1.0),
    ("dppo.dppo_type", "dppo_divergence", "binary_tv"),
    ("dppo.delta_low", "dppo_delta_low", 0.2),
    ("dppo.delta_high", "dppo_delta_high", 0.2),
)

OTHERS: tuple[tuple[str, Translate, str, Json, str], ...] = (
    (f"{AT}.kl_ctrl.type", kl, "algorithm.reward_kl.target", "fixed", ADAPTIVE),
    (f"{AT}.kl_ctrl.kl_target", kl, "algorithm.reward_kl.target", 0.1, ADAPTIVE),
    (f"{AT}.kl_ctrl.horizon", kl, "algorithm.reward_kl.horizon", 10000, ADAPTIVE),
    (f"{AT}.use_entropy_loss", entropy, "algorithm.entropy_coef", False, "A bonus, a mean over tokens."),
    (f"{AT}.entropy_loss_coef", entropy, "algorithm.entropy_coef", 0.01, "Read with use_entropy_loss."),
    (
        f"{AT}.temperature",
        policy_optimizer,
        "train.temperature",
        None,
        "What the trainer divides logits by; null: the sampling temperature.",
    ),
    (
        f"{AT}.use_tis",
        correction,
        "algorithm.correction.weight",
        False,
        "As tis_ratio_type=token with its own cap.",
    ),
    (f"{AT}.tis_imp_ratio_cap", correction, "algorithm.correction.high", -1.0, "Read with use_tis."),
    (
        f"{AT}.max_seq_len",
        reduction,
        "algorithm.norm_tokens",
        None,
        "Of seq_mean_token_sum_norm; null: max_input_length + max_generate_length.",
    ),
    (
        f"{AT}.dynamic_sampling.type",
        groups,
        "algorithm.drop_uniform_groups",
        None,
        "filter: groups of equal rewards are dropped and others asked for; replace is coming.",
    ),
    (
        f"{AT}.dynamic_sampling.max_sample_batches",
        groups,
        "algorithm.max_refills",
        30,
        "The first batch counts; -1, without end, is a million.",
    ),
    (
        "generator.apply_overlong_filtering",
        groups,
        "algorithm.groups.unfinished",
        False,
        "The tokens of replies that were cut give no loss; not together with zero_reward_on_non_stop.",
    ),
    (
        "trainer.ref.model.path",
        reference,
        "reference.path",
        None,
        "null: the policy as it was at the start.",
    ),
    (
        "trainer.policy.model_config_kwargs",
        policy_overrides,
        "model.overrides",
        {},
        "Put over the model's config.json.",
    ),
    (
        "trainer.critic.model_config_kwargs",
        critic,
        "critic.overrides",
        None,
        "The same for the critic; null: the policy's (SkyRL: none).",
    ),
    (
        "trainer.ref.model_config_kwargs",
        reference,
        "reference.overrides",
        None,
        "The same for a reference with a path of its own; null: the policy's (SkyRL: none).",
    ),
)

LATEST: tuple[Key, ...] = (
    *(
        translated(f"{OFF}.{name}", correction, f"algorithm.correction.{native}", default=default, reason=TIS)
        for name, native, default in CORRECTIONS
    ),
    *(
        translated(f"{AT}.{name}", policy_loss, f"algorithm.{native}", default=default, reason=LOSS)
        for name, native, default in LOSSES
    ),
    *(
        translated(name, function, native, default=default, reason=reason)
        for name, function, native, default, reason in OTHERS
    ),
    coming(f"{AT}.dynamic_sampling.min_replace_ratio", "dynamic_sampling.type=replace", default=0.3),
    coming(f"{AT}.zero_variance_filter", "groups of equal rewards that stay but give no loss", default=False),
)
