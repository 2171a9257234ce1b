"""What the built-in names of open keys stand for, one line each. The formulas are in docs/algorithms.md."""

from __future__ import annotations

ADVANTAGES = {
    "grpo": "Reward against the group's mean, in units of its standard deviation.",
    "grpo_passk": "Only the group's best rollout counts, by its lead over the second.",
    "rloo": "Reward against the mean of the other rollouts of the task.",
    "rec": "Reward against the group's mean, as REC defines it.",
    "opo": "Reward against the group's mean, weighted by length.",
    "gpg": "Reward against the group's mean, scaled up where many groups teach nothing.",
    "opmd": "Reward against the group's mean or its soft maximum.",
    "asymre": "Reward against the group's mean moved by a constant.",
    "maxrl": "Reward against the group's mean, in units of that mean.",
    "best": "1 for the best rollout of each group, 0 for the others.",
    "gae": "Generalized advantage estimation with a critic, token by token.",
    "reinforce": "Discounted reward to come, token by token.",
    "reinforce_plus_plus": "Discounted reward to come inside a turn, whitened over the batch.",
    "reinforce_plus_plus_baseline": "Reward against the group's mean, whitened over the batch.",
    "remax": "Reward to come against the reward of one greedy reply.",
    "gigpo": "GRPO of whole episodes, plus GRPO of turns that met the same state.",
    "step_wise_grpo": "GRPO of the episode, given to each of its turns.",
    "optimal_token_baseline": "Reward to come against the baseline of least variance at each place of the reply.",
    "tir_optimal_token_baseline": "The same, with places counted in sampled tokens only: for several turns.",
    "distill": "How much likelier a teacher finds the token than the policy; no rewards.",
    "reward": "The rollout's reward at every token, without a baseline.",
    "none": "Each token's reward as it is.",
}

LOSSES = {
    "ppo": "Ratio to the policy before the step, clipped.",
    "gspo": "The same with one ratio a rollout, the geometric mean of its tokens'.",
    "geo_mean": "Geometric mean of the clipped ratios of a rollout (GMPO).",
    "cispo": "The clipped ratio is a weight: every token keeps its gradient.",
    "sapo": "A smooth gate in place of the clip.",
    "clip_cov": "PPO that leaves out some tokens whose advantage and log-prob move together.",
    "kl_cov": "A KL penalty on the tokens whose advantage and log-prob move together most.",
    "dppo": "Tokens whose probability has moved too far learn nothing.",
    "aipo": "The ratio, capped from above only.",
    "sppo": "Log ratio times advantage, for tokens with a ratio near 1.",
    "importance_sampling": "The ratio, without a clip.",
    "rollout_is": "Weighted by the ratio to the engine that sampled, within bounds.",
    "reinforce": "Plain policy gradient: no ratio, one optimizer step a batch.",
    "gpg": "The same loss under verl's name.",
    "opmd": "Policy gradient divided by 1 + tau.",
    "topr": "Good rollouts count fully, others at most by their ratio.",
    "rec": "Policy gradient with REC's clips, weights and regularizers.",
    "cross_entropy": "Cross entropy of own rollouts, whatever their advantage.",
    "sft": "Cross entropy of demonstrations.",
    "sft_is": "Cross entropy weighted by the token's probability (DFT).",
    "sft_phi": "Cross entropy weighted by p (1 - p) (CHORD).",
    "dpo": "A better and a worse reply, compared against a reference.",
    "simpo": "A better and a worse reply, compared by mean log-prob, without a reference.",
    "orpo": "Cross entropy of the better reply, plus the odds against the worse one.",
    "kto": "Single replies marked as desirable or not, against a reference.",
}

REWARDS = {
    "exact": "The reply is the answer.",
    "choice": "The letter that the reply chooses is the answer.",
    "number": "The number after the reply's last #### (GSM8K) is the answer; flexible: its last number.",
    "format": "The reply has the tags, or matches the pattern, asked for.",
    "overlong": "A penalty that grows as the reply nears its limit.",
    "math": "The reply's result equals the answer, as mathematics.",
    "reasoning_gym": "The verifier that comes with a reasoning-gym task.",
}

RESUME = {
    "auto": "Go on where the run directory stands.",
    "never": "Refuse a run directory that holds a run.",
    "fresh": "Move what is there aside and begin anew.",
}
