"""What each algorithm name means: a table of plain values, readable without torch.

`recipes.resolve` puts the user's keys over a recipe's. Formulas and sources stand in docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whet.config.functions import Kind


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An algorithm's parts by name, and its source. KL and entropy are no part: both are off by default."""

    kind: Kind = "online"
    advantage: str
    loss: str
    loss_agg_mode: str
    settings: Mapping[str, object] = field(default_factory=dict)
    """Keys of `algorithm` where this recipe departs from the defaults of its functions."""
    whiten: bool = False
    dynamic_sampling: bool = False
    expert_loss: str | None = None
    """Loss of the demonstrations among the own rollouts (algorithm.mix). None: there are none."""
    reprompts: bool = False
    """The reference scores rollouts after other prompts (algorithm.reprompt)."""
    source: str
    note: str


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(
        advantage="grpo",
        loss="ppo",
        loss_agg_mode="seq-mean-token-mean",
        source="arXiv:2402.03300 eq. 3",
        note=(
            "Reward minus the group's mean, divided by its standard deviation; all rollouts have the same weight. "
            "The paper adds kl.coef=0.04 with k3."
        ),
    ),
    "dr_grpo": Recipe(
        advantage="grpo",
        loss="ppo",
        loss_agg_mode="seq-mean-token-sum-norm",
        settings={"normalize_std": False},
        source="arXiv:2503.20783 section 3.2",
        note="GRPO without its two biases: no division by the deviation, a constant instead of the length.",
    ),
    "dapo": Recipe(
        advantage="grpo",
        loss="ppo",
        loss_agg_mode="token-mean",
        settings={"clip_high": 0.28},
        dynamic_sampling=True,
        source="arXiv:2503.14476 eq. 8",
        note="GRPO with clip-higher, dynamic sampling and token-level loss; add the reward 'overlong'.",
    ),
    "ppo": Recipe(
        advantage="gae",
        loss="ppo",
        loss_agg_mode="token-mean",
        whiten=True,
        source="arXiv:1707.06347 eq. 7; arXiv:1506.02438 eq. 16",
        note="A critic gives every token its own advantage.",
    ),
    "turn_ppo": Recipe(
        advantage="turn_level_gae",
        loss="ppo",
        loss_agg_mode="token-mean",
        whiten=True,
        source="arXiv:2512.17008",
        note="PPO with turns as actions: a critic gives every turn of an episode its own advantage.",
    ),
    "gspo": Recipe(
        advantage="grpo",
        loss="gspo",
        loss_agg_mode="seq-mean-token-mean",
        source="arXiv:2507.18071",
        note="GRPO with the ratio and the clip of whole rollouts: the geometric mean of their tokens' ratios.",
    ),
    "gspo_token": Recipe(
        advantage="grpo",
        loss="gspo",
        loss_agg_mode="seq-mean-token-mean",
        settings={"gspo_form": "token"},
        source="arXiv:2507.18071 section 4.3",
        note="GSPO for advantages that differ between tokens; with one advantage per rollout its gradient is GSPO's.",
    ),
    "cispo": Recipe(
        advantage="grpo",
        loss="cispo",
        loss_agg_mode="token-mean",
        source="arXiv:2506.13585 section 3.1",
        note="REINFORCE with a capped importance weight: every token keeps its gradient. The cap, 1 + clip_high, is 5.",
    ),
    "sapo": Recipe(
        advantage="grpo",
        loss="sapo",
        loss_agg_mode="seq-mean-token-mean",
        source="arXiv:2511.20347",
        note="GRPO with a soft gate in place of the clip, closing faster for negative advantages.",
    ),
    "luspo": Recipe(
        advantage="grpo",
        loss="gspo",
        loss_agg_mode="seq-mean-token-sum",
        source="arXiv:2602.05261",
        note="GSPO with each rollout's loss times its length, so that tokens of long replies do not count less.",
    ),
    "vespo": Recipe(
        advantage="grpo",
        loss="vespo",
        loss_agg_mode="token-mean",
        source="arXiv:2602.10693",
        note="REINFORCE with a soft gate on the ratio of whole rollouts, for rollouts of an older policy.",
    ),
    "gmpo": Recipe(
        advantage="grpo",
        loss="geo_mean",
        loss_agg_mode="seq-mean-token-mean",
        source="arXiv:2507.20673",
        note="GRPO with the geometric in place of the arithmetic mean of a rollout's ratios, and a wide clip.",
    ),
    "clip_cov": Recipe(
        advantage="grpo",
        loss="clip_cov",
        loss_agg_mode="token-mean",
        source="arXiv:2505.22617",
        note="GRPO that leaves out a few of the tokens that make the entropy fall.",
    ),
    "kl_cov": Recipe(
        advantage="grpo",
        loss="kl_cov",
        loss_agg_mode="token-mean",
        source="arXiv:2505.22617",
        note="GRPO without a clip that holds back the tokens that make the entropy fall most. For 7B parameters the "
        "paper has kl_cov_ratio=2e-3.",
    ),
    "dppo": Recipe(
        advantage="grpo",
        loss="dppo",
        loss_agg_mode="token-mean",
        source="arXiv:2602.04879",
        note="GRPO with a trust region in probability in place of the ratio's clip, around the engine's log-probs.",
    ),
    "aipo": Recipe(
        advantage="grpo",
        loss="aipo",
        loss_agg_mode="token-mean",
        source="arXiv:2505.24034",
        note="GRPO with the ratio capped from above only, for rollouts of an older policy.",
    ),
    "importance_sampling": Recipe(
        advantage="grpo",
        loss="importance_sampling",
        loss_agg_mode="token-mean",
        source="Sutton and Barto 2018, section 13.4 with 5.5",
        note=(
            "The policy gradient with the token's ratio and no bound: for policies that stay close to the one that "
            "sampled."
        ),
    ),
    "softmax_ppo": Recipe(
        advantage="grpo",
        loss="softmax_ppo",
        loss_agg_mode="token-mean",
        source="arXiv:2108.05828",
        note="Softmax PPO: the logarithm of the ratio, inside a region that is symmetric in it.",
    ),
    "dro": Recipe(
        advantage="grpo",
        loss="dro",
        loss_agg_mode="token-mean",
        source="arXiv:2405.19107",
        note="REINFORCE with a squared log-ratio in place of a clip.",
    ),
    "topr": Recipe(
        advantage="reinforce",
        loss="topr",
        loss_agg_mode="token-mean",
        source="arXiv:2503.14286",
        note="REINFORCE for rollouts of an older policy: good ones have full weight, bad ones at most their ratio.",
    ),
    "rec": Recipe(
        advantage="rec",
        loss="rec",
        loss_agg_mode="token-mean",
        source="arXiv:2509.24203",
        note="REINFORCE with a clip as a mask (rec_clip_mode); weights and regularizers as separate choices.",
    ),
    "rloo": Recipe(
        advantage="rloo",
        loss="reinforce",
        loss_agg_mode="seq-mean-token-sum",
        source="arXiv:2402.14740",
        note=(
            "REINFORCE with the mean of the group's other rollouts as the baseline. On-policy: set loss=ppo for more "
            "than one optimizer step per batch."
        ),
    ),
    "grpo_passk": Recipe(
        advantage="grpo_passk",
        loss="ppo",
        loss_agg_mode="token-mean",
        source="arXiv:2503.19595",
        note=(
            "Only the best reply of a group is trained on, with its lead over the second best as the advantage: for "
            "pass@k."
        ),
    ),
    "reinforce_pp": Recipe(
        advantage="reinforce_plus_plus",
        loss="ppo",
        loss_agg_mode="token-mean",
        source="arXiv:2501.03262",
        note="REINFORCE++: discounted returns on the scale of the batch, PPO's clip, no critic. The paper adds "
        "reward_kl with k1.",
    ),
    "reinforce_pp_baseline": Recipe(
        advantage="reinforce_plus_plus_baseline",
        loss="ppo",
        loss_agg_mode="token-mean",
        source="arXiv:2501.03262",
        note="REINFORCE++ with the group's mean subtracted first. The paper adds kl with k2.",
    ),
    "remax": Recipe(
        advantage="remax",
        loss="reinforce",
        loss_agg_mode="seq-mean-token-sum",
        source="arXiv:2310.10505",
        note=(
            "REINFORCE with the reward of the greedy reply to the same task as the baseline: one more rollout per "
            "task."
        ),
    ),
    "opo": Recipe(
        advantage="opo",
        loss="reinforce",
        loss_agg_mode="seq-mean-token-sum",
        source="arXiv:2505.23585",
        note="REINFORCE with the group's mean weighted by length as the baseline; strictly on-policy.",
    ),
    "gpg": Recipe(
        advantage="gpg",
        loss="reinforce",
        loss_agg_mode="token-mean",
        source="arXiv:2504.02546",
        note="REINFORCE with the group's mean as the baseline, scaled up if some groups give no gradient.",
    ),
    "opmd": Recipe(
        advantage="opmd",
        loss="opmd",
        loss_agg_mode="token-mean",
        source="arXiv:2505.17826",
        note="Online policy mirror descent: reward minus the group's mean, the loss divided by 1 + tau.",
    ),
    "asymre": Recipe(
        advantage="asymre",
        loss="reinforce",
        loss_agg_mode="token-mean",
        source="arXiv:2506.20520",
        note="REINFORCE with a baseline below the group's mean, which keeps off-policy learning stable.",
    ),
    "maxrl": Recipe(
        advantage="maxrl",
        loss="ppo",
        loss_agg_mode="token-mean",
        source="SkyRL maxrl",
        note="Reward minus the group's mean, divided by that mean: hard tasks count more. For rewards of at least 0.",
    ),
    "raft": Recipe(
        advantage="best",
        loss="reinforce",
        loss_agg_mode="seq-mean-token-mean",
        source="arXiv:2304.06767",
        note=(
            "Cross entropy of the group's best reply (best-of-n). With rewards of 0 and 1 set groups.min_reward "
            "above 0, so that nothing is learned from groups without a correct reply."
        ),
    ),
    "gigpo": Recipe(
        advantage="gigpo",
        loss="ppo",
        loss_agg_mode="token-mean",
        source="arXiv:2505.10978",
        note="GRPO over episodes and, weighted, over turns that start from the same state. The paper has gamma=0.95.",
    ),
    "step_wise_grpo": Recipe(
        advantage="step_wise_grpo",
        loss="ppo",
        loss_agg_mode="token-mean",
        source="arXiv:2505.17826",
        note="GRPO over episodes; every turn gets its episode's advantage.",
    ),
    "optimal_token_baseline": Recipe(
        advantage="optimal_token_baseline",
        loss="ppo",
        loss_agg_mode="token-mean",
        source="verl optimal_token_baseline",
        note=(
            "A baseline for every position of a reply: the group's mean return, weighted by variance. For replies of "
            "several turns advantage=tir_optimal_token_baseline."
        ),
    ),
    "distill": Recipe(
        advantage="distill",
        loss="ppo",
        loss_agg_mode="token-mean",
        source="arXiv:2306.13649",
        note=(
            "On-policy distillation: the advantage of a token is how much likelier it is under the teacher "
            "(reference.path)."
        ),
    ),
    "gkd": Recipe(
        advantage="none",
        loss="gkd",
        loss_agg_mode="token-mean",
        source="arXiv:2306.13649",
        note="Distillation on the policy's own replies by the gradient of a divergence from the teacher "
        "(reference.path), in place of a policy gradient.",
    ),
    "sdpo": Recipe(
        advantage="none",
        loss="gkd",
        loss_agg_mode="token-mean",
        settings={"divergence": "jsd_topk", "jsd_beta": 0.5, "top_k": 100, "top_k_of": "policy"},
        reprompts=True,
        source="arXiv:2601.20802",
        note="The policy is its own teacher: gkd, where the prompt of the teacher also shows a successful reply of the "
        "group (algorithm.reprompt). The paper's teacher is a running mean of the policy: reference.reset_interval=1, "
        "reference.mixup_alpha=0.05.",
    ),
    "reinforce": Recipe(
        advantage="reinforce",
        loss="reinforce",
        loss_agg_mode="seq-mean-token-sum",
        source="doi:10.1007/BF00992696 (Williams 1992)",
        note="Discounted return times the gradient of the log-probability, no baseline. REINFORCE++ "
        "(arXiv:2501.03262): whiten=true, loss=ppo, reward_kl.coef > 0.",
    ),
    "sft": Recipe(
        kind="demonstrations",
        advantage="none",
        loss="sft",
        loss_agg_mode="token-mean",
        source="maximum likelihood",
        note="Cross entropy of the tokens of given replies.",
    ),
    "dpo": Recipe(
        kind="preferences",
        advantage="none",
        loss="dpo",
        loss_agg_mode="pair-mean",
        source="arXiv:2305.18290 eq. 7",
        note="Prefer the chosen reply to the rejected one, by log-probability against the reference.",
    ),
    "online_dpo": Recipe(
        advantage="none",
        loss="online_dpo",
        loss_agg_mode="pair-mean",
        dynamic_sampling=True,
        source="arXiv:2402.04792",
        note="DPO on the best and the worst of the policy's own replies to a task, by their rewards; groups with equal "
        "rewards are replaced.",
    ),
    "sft_is": Recipe(
        kind="demonstrations",
        advantage="none",
        loss="sft_is",
        loss_agg_mode="token-mean",
        source="arXiv:2508.05629",
        note="SFT with each token weighted by its probability (DFT): unlikely tokens cannot dominate the gradient.",
    ),
    "sft_phi": Recipe(
        kind="demonstrations",
        advantage="none",
        loss="sft_phi",
        loss_agg_mode="token-mean",
        source="arXiv:2508.11408",
        note="SFT with each token weighted by p (1 - p): what the policy is sure of, or finds impossible, counts "
        "least.",
    ),
    "simpo": Recipe(
        kind="preferences",
        advantage="none",
        loss="simpo",
        loss_agg_mode="pair-mean",
        source="arXiv:2405.14734 eq. 6",
        note="Prefer the chosen reply by its mean log-probability per token; no reference model.",
    ),
    "mpo": Recipe(
        kind="preferences",
        advantage="none",
        loss="dpo",
        loss_agg_mode="pair-mean",
        settings={"pair_loss": ("sigmoid", "bco", "sft"), "pair_weights": (0.8, 0.2, 1.0)},
        source="arXiv:2411.10442 section 3.2",
        note="DPO, a loss on each reply by itself, and the likelihood of the chosen reply, weighted (mixed preference "
        "optimization).",
    ),
    "cpo": Recipe(
        kind="preferences",
        advantage="none",
        loss="cpo",
        loss_agg_mode="pair-mean",
        source="arXiv:2401.08417",
        note="DPO without a reference model, and the likelihood of the chosen reply.",
    ),
    "alphapo": Recipe(
        kind="preferences",
        advantage="none",
        loss="simpo",
        loss_agg_mode="pair-mean",
        settings={"reward_alpha": 0.25},
        source="arXiv:2501.03884",
        note="SimPO with a reward shape that limits how far likely replies are pushed.",
    ),
    "orpo": Recipe(
        kind="preferences",
        advantage="none",
        loss="orpo",
        loss_agg_mode="pair-mean",
        source="arXiv:2403.07691 eq. 6",
        note="SFT on the chosen reply with an odds-ratio term against the rejected one; no reference model.",
    ),
    "kto": Recipe(
        kind="labels",
        advantage="none",
        loss="kto",
        loss_agg_mode="seq-mean-token-sum",
        source="arXiv:2402.01306 eq. 8",
        note="Single replies, each marked as desirable or not; no pairs needed.",
    ),
    "mix": Recipe(
        advantage="grpo",
        loss="ppo",
        loss_agg_mode="token-mean",
        expert_loss="sft",
        source="Trinity-RFT's mix; arXiv:2508.11408 with a constant mu",
        note="GRPO on own rollouts and SFT on demonstrations (data.demonstrations) in one step, weights 1 - mu and mu.",
    ),
    "mix_chord": Recipe(
        advantage="grpo",
        loss="ppo",
        loss_agg_mode="token-mean",
        expert_loss="sft_phi",
        source="arXiv:2508.11408 (CHORD-phi)",
        note="mix with phi-weighted demonstrations. CHORD-mu: mix.loss=sft, mix.mu=0.9, mix.mu_decay_steps=200, "
        "mix.mu_valley=0.05.",
    ),
}
