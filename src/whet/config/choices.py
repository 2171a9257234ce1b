"""Meanings of the built-in names of open keys, one line each. The formulas are in docs/algorithms.md."""

from __future__ import annotations

ADVANTAGES = {
    "grpo": "Reward minus the mean of the group, divided by its standard deviation.",
    "gdpo": "The same for each part of the reward, summed and whitened over the batch.",
    "grpo_passk": "Non-zero only for the best rollout of the group: its reward minus the second best.",
    "rloo": "Reward minus the mean of the other rollouts of the task.",
    "rec": "Reward minus the mean of the group, as REC defines it.",
    "opo": "Reward minus the length-weighted mean of the group.",
    "gpg": "Reward minus the mean of the group, times the number of rollouts over those that give a gradient.",
    "opmd": "Reward minus the mean or the soft maximum of the group.",
    "asymre": "Reward minus the mean of the group plus a constant.",
    "maxrl": "Reward minus the mean of the group, divided by that mean.",
    "best": "1 for the best rollout of each group, 0 for the others.",
    "gae": "Generalized advantage estimation with a critic, token by token.",
    "turn_level_gae": "The same turn by turn: all tokens of a turn have its advantage.",
    "reinforce": "Discounted return, token by token.",
    "reinforce_plus_plus": "Discounted return, whitened over the batch.",
    "reinforce_plus_plus_baseline": "Reward minus the mean of the group, whitened over the batch.",
    "remax": "Return minus the reward of one greedy reply.",
    "gigpo": "GRPO over whole episodes, plus GRPO over turns with the same state.",
    "step_wise_grpo": "GRPO advantage of the episode, assigned to each of its turns.",
    "optimal_token_baseline": "Return minus the minimum-variance baseline at each position of the reply.",
    "tir_optimal_token_baseline": "The same, with positions counted in sampled tokens only: for multi-turn rollouts.",
    "distill": "Log-prob of the token under a teacher minus that under the policy; no rewards.",
    "reward": "The reward of the rollout at every token, without a baseline.",
    "none": "The reward of each token, unchanged.",
}

LOSSES = {
    "ppo": "Clipped ratio to the policy before the step.",
    "gspo": "The same with one ratio per rollout, the geometric mean of the ratios of its tokens.",
    "geo_mean": "Geometric mean of the clipped ratios of a rollout (GMPO).",
    "vespo": "A soft gate on the ratio of whole rollouts.",
    "cispo": "The clipped ratio is only a weight, so every token keeps its gradient.",
    "sapo": "A smooth gate instead of the clip.",
    "clip_cov": "PPO without some of the tokens whose advantage and log-prob have a high covariance.",
    "kl_cov": "A KL penalty on the tokens whose advantage and log-prob have the highest covariance.",
    "dppo": "Tokens whose probability has changed too much have no gradient.",
    "aipo": "The ratio, with only an upper bound.",
    "softmax_ppo": "Log ratio times advantage, for tokens with a ratio near 1.",
    "importance_sampling": "The ratio, without a clip.",
    "rollout_is": "Weighted by the bounded ratio to the engine that sampled.",
    "reinforce": "Plain policy gradient: no ratio, one optimizer step per batch.",
    "gpg": "The same loss under its name in verl.",
    "reinforce_is": "Weighted by the bounded ratio of the policy that learns to the engine (verl's bypass mode).",
    "dro": "Policy gradient with a squared log-ratio in place of a clip.",
    "opmd": "Policy gradient divided by 1 + tau.",
    "topr": "Good rollouts have weight 1, others at most their ratio.",
    "rec": "Policy gradient with REC's clips, weights and regularizers.",
    "cross_entropy": "Cross entropy of the policy's own rollouts, independent of the advantage.",
    "gkd": "Divergence from a teacher at the policy's own tokens; no rewards, no advantage.",
    "sft": "Cross entropy of demonstrations.",
    "sft_is": "Cross entropy weighted by the token's probability (DFT).",
    "sft_phi": "Cross entropy weighted by p (1 - p) (CHORD).",
    "dpo": "A chosen and a rejected reply, compared relative to a reference.",
    "online_dpo": "The best and the worst reply of a group, compared relative to a reference.",
    "simpo": "A chosen and a rejected reply, compared by mean log-prob, without a reference.",
    "cpo": "A chosen and a rejected reply, compared without a reference, beside the likelihood of the chosen one.",
    "orpo": "Cross entropy of the chosen reply, plus the odds ratio to the rejected one.",
    "kto": "Single replies marked as desirable or not, relative to a reference.",
}

WEIGHTS = {
    "token": "The ratio of the token.",
    "sequence": "The product of the ratios of the rollout's sampled tokens.",
    "geometric": "The geometric mean of the ratios of the rollout's sampled tokens.",
}

REWARDS = {
    "exact": "The reply equals the answer.",
    "choice": "The letter that the reply chooses equals the answer.",
    "number": "The number after the last #### of the reply (GSM8K) equals the answer; flexible: the last number.",
    "format": "The reply has the required tags, or matches the required pattern.",
    "overlong": "A penalty that grows as the reply nears its limit.",
    "math": "The result of the reply is mathematically equal to the answer.",
    "reasoning_gym": "The verifier of a reasoning-gym task.",
}

RESUME = {
    "auto": "Resume the run in the run directory, if there is one.",
    "never": "Refuse a run directory that holds a run.",
    "fresh": "Move the existing files aside and start a new run.",
}
