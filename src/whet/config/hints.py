"""What a form needs to know about a key beyond its type: a short title, the unit, and whether beginners see it."""

from __future__ import annotations

WORDS = {
    "ddof": "degrees of freedom",
    "dir": "folder",
    "dppo": "DPPO",
    "aipo": "AIPO",
    "coef": "weight",
    "eps": "epsilon",
    "eos": "end token",
    "ffn": "feed-forward",
    "gspo": "GSPO",
    "ids": "ids",
    "init": "initial",
    "kl": "KL",
    "kv": "KV",
    "lam": "lambda",
    "lb": "lower bound",
    "lora": "LoRA",
    "lr": "learning rate",
    "mu": "mu",
    "nll": "NLL",
    "opmd": "OPMD",
    "p": "p",
    "pissa": "PiSSA",
    "ppo": "PPO",
    "cov": "covariance",
    "cispo": "CISPO",
    "phi": "phi",
    "rec": "REC",
    "rslora": "rsLoRA",
    "rope": "RoPE",
    "sapo": "SAPO",
    "std": "standard deviation",
    "topr": "TOPR",
    "ub": "upper bound",
}
"""Parts of a key's name, written out."""

SUFFIXES = {
    "_tokens": "tokens",
    "_rollouts": "rollouts",
    "_steps": "steps",
    "_interval": "steps",
    "_s": "s",
    "_mb": "MiB",
    "_bytes": "bytes",
    "_ratio": "fraction",
    "_rate": "fraction",
}
"""Units by the end of a key's name."""

SHOWN = ("_s", "_mb", "_bytes")
"""Suffixes that the title leaves out: the form shows the unit next to the value."""

UNITS = {
    "train.steps": "steps",
    "train.epochs": "epochs",
    "train.tasks_per_step": "tasks",
    "train.minibatches": "optimizer steps",
    "critic.minibatches": "optimizer steps",
    "train.update_epochs": "epochs",
    "critic.update_epochs": "epochs",
    "train.optimizer.schedule.total_steps": "steps of unit",
    "eval.interval": "steps",
    "eval.interval_epochs": "epochs",
    "eval.samples": "replies",
    "eval.sources.*.samples": "replies",
    "eval.log_samples": "tasks",
    "track.log_samples": "rollouts",
    "eval.offline.limit": "rows",
    "eval.success": "reward",
    "checkpoint.interval": "steps",
    "checkpoint.keep": "checkpoints",
    "rollout.group_size": "rollouts",
    "rollout.max_num_seqs": "rollouts",
    "model.scratch.max_position_embeddings": "tokens",
    "model.scratch.sliding_window": "tokens",
    "tokenizer.vocab_size": "tokens",
    "machine.threads": "threads",
    "reward_workers.count": "processes",
    "algorithm.reward_kl.target": "nats",
    "algorithm.reward_kl.horizon": "rollouts",
    "algorithm.loss.sequence_mask_delta": "nats",
    "algorithm.advantage.tau": "reward",
    "algorithm.advantage.baseline_shift": "reward",
    "algorithm.advantage.std_floor": "reward",
    "algorithm.groups.min_reward": "reward",
    "algorithm.groups.min_std": "reward",
    "algorithm.groups.keep_best": "rollouts",
    "algorithm.groups.keep_worst": "rollouts",
    "algorithm.groups.min_shared_prefix": "tokens",
    "algorithm.max_refills": "times tasks_per_step",
    "algorithm.mix.mu": "fraction",
    "algorithm.loss.label_smoothing": "fraction",
    "train.max_skipped_steps": "optimizer steps",
    **{
        f"data.{part}.*.{key}": "rows"
        for part in ("train", "demonstrations", "eval")
        for key in ("skip", "limit")
    },
    **{f"data.{part}.*.reasoning_gym.size": "tasks" for part in ("train", "demonstrations", "eval")},
}
"""Units that the name of the key does not show."""

BEGINNER = frozenset({
    "name", "seed", "run_dir", "model.path", "model.scratch.architecture", "model.scratch.hidden_size",
    "model.scratch.num_hidden_layers", "model.scratch.num_attention_heads", "tokenizer.path", "tokenizer.build",
    "data.train.*.name", "data.train.*.path", "data.train.*.split", "data.train.*.prompt", "data.train.*.answer",
    "data.train.*.response", "data.train.*.rejected", "data.train.*.messages", "data.train.*.weight",
    "data.train.*.limit", "data.train.*.reasoning_gym.task", "data.train.*.reasoning_gym.size",
    "data.train.*.reasoning_gym.seed", "data.eval.*.name", "data.eval.*.path", "data.eval.*.split",
    "data.eval.*.prompt", "data.eval.*.answer", "data.eval.*.limit", "data.eval.*.reasoning_gym.task",
    "data.eval.*.reasoning_gym.size", "data.eval.*.reasoning_gym.seed", "data.order",
    "data.max_prompt_tokens", "data.overlong", "algorithm.name", "algorithm.kl.coef",
    "algorithm.entropy_coef", "algorithm.loss.beta", "algorithm.loss.clip_low", "algorithm.loss.clip_high",
    "rewards.*.function", "rewards.*.weight", "rewards.*.arguments", "rollout.engine", "rollout.group_size",
    "rollout.sampling.temperature", "rollout.sampling.max_tokens", "train.steps", "train.epochs",
    "train.tasks_per_step", "train.minibatches", "train.update_epochs", "train.optimizer.lr",
    "train.optimizer.weight_decay", "train.optimizer.max_grad_norm", "train.optimizer.schedule.type",
    "train.optimizer.schedule.warmup_steps", "train.gradient_checkpointing", "critic.optimizer.lr",
    "reference.path", "eval.interval", "eval.samples", "checkpoint.interval", "checkpoint.keep",
    "checkpoint.resume", "track.trackers", "track.project", "machine.device", "stages.*.name",
})  # fmt: skip
"""Keys of the beginner's form; all other keys are for experts."""


def title(name: str) -> str:
    """A key's name as a short title: 'max_prompt_tokens' is 'Max prompt tokens', 'timeout_s' is 'Timeout'."""
    for suffix in SHOWN:
        name = name.removesuffix(suffix)
    text = " ".join(WORDS.get(word, word) for word in name.split("_"))
    return text[:1].upper() + text[1:]


def unit(key: str) -> str | None:
    """The unit of a key's value; None where it has none, or where only the description gives it."""
    ends = (unit for suffix, unit in SUFFIXES.items() if key.endswith(suffix))
    return UNITS.get(key) or next(ends, None)


def level(key: str) -> str:
    return "beginner" if key in BEGINNER else "expert"
