"""Values of several keys that do not go together. What needs a computation or a look at this machine is in `checks`."""

from __future__ import annotations

from whet.config.conditions import ONLINE, Condition, Rule, both, either, no, refuse

ASYNC: Condition = {"key": "rollout.schedule", "is": "async"}
ONE_PROCESS: Condition = {"key": "mode", "is": "both"}
PARITY: Condition = {"key": "machine.logprob_parity", "is": "on"}
COMPILED: Condition = {"key": "train.compile"}
ADAPTERS: Condition = either({"key": "model.lora", "given": True}, {"key": "critic.lora", "given": True})
QUEUE: Condition = {"key": "buffer.replay.queue"}
REPLAYS: Condition = both(no(QUEUE), {"key": "buffer.replay.share", "above": 0})
MIXES: Condition = {"condition": "mixes"}
DISTILLS: Condition = either({"condition": "advantage", "is": "distill"}, {"condition": "loss", "is": "gkd"})
"""The reference is a teacher."""
OVER_VOCABULARY: Condition = either(
    {"key": "algorithm.kl.estimator", "is": "full"},
    {"condition": "loss.divergence", "in": ["full", "forward_topk"]},
)
"""A divergence over many tokens is read off both models' output layers."""
ONE_ROLLOUT: Condition = {"key": "rollout.group_size", "is": 1}
GREEDY: Condition = {"key": "rollout.sampling.temperature", "is": 0.0}
MANY_UPDATES: Condition = {"condition": "optimizer_steps", "above": 1}
DRIVEN = both(ONLINE, {"key": "mode", "in": ["train", "explore"]})
"""Explorers and a trainer are separate processes."""


def given(key: str) -> Condition:
    return {"key": key, "given": True}


MODELS = (
    refuse(
        "model",
        both(given("model.path"), given("model.scratch")),
        "give either path (a Hugging Face folder) or scratch (a new model); both are given",
    ),
    refuse(
        "model",
        both(no(given("model.path")), no(given("model.scratch"))),
        "give either path (a Hugging Face folder) or scratch (a new model); neither is given",
    ),
    refuse(
        "tokenizer", both(given("tokenizer.path"), given("tokenizer.build")), "give path or build, not both"
    ),
    refuse(
        "tokenizer.build",
        both(given("tokenizer.build"), given("model.path")),
        "the model of model.path needs its own tokenizer; leave build out",
    ),
    refuse(
        "tokenizer",
        no(either(given("tokenizer.path"), given("tokenizer.build"), given("model.path"))),
        "model.scratch has no tokenizer: give tokenizer.build (chars, words, bpe) or tokenizer.path",
    ),
    refuse(
        "model.scratch.num_experts_per_tok",
        both(
            {"key": "model.scratch.architecture", "is": "qwen3_moe"},
            {"key": "model.scratch.num_experts_per_tok", "above": {"key": "model.scratch.num_experts"}},
        ),
        "{cfg.model.scratch.num_experts_per_tok} is more than num_experts={cfg.model.scratch.num_experts}; lower it, "
        "or raise num_experts",
    ),
    refuse(
        "checkpoint.export_as",
        both(
            {"key": "model.lora.init", "in": ["olora", "pissa"]},
            {"key": "checkpoint.export_as", "is": "adapter"},
        ),
        "adapter: model.lora.init={cfg.model.lora.init} changes the base weights, which the folder of the adapters "
        "does not contain; set export_as to merged, or init to default",
    ),
)

FUSED = tuple(
    refuse(
        f"{at}.fused",
        both(
            {"key": f"{at}.fused", "is": True}, {"key": f"{at}.init", "in": ["orthogonal", "olora", "pissa"]}
        ),
        f"true: init={{cfg.{at}.init}} gives each layer an A of its own; set init to default, or fused to false",
    )
    for at in ("model.lora", "critic.lora")
)

DATA = (
    refuse("data.train", no(given("data.train")), "give at least one source of training tasks"),
    refuse(
        "data.max_total_tokens",
        both(
            {"condition": "samples"},
            given("data.max_total_tokens"),
            no({"key": "data.max_total_tokens", "above": {"key": "data.max_prompt_tokens"}}),
        ),
        "{cfg.data.max_total_tokens} leaves no token for a reply after a prompt of max_prompt_tokens="
        "{cfg.data.max_prompt_tokens}; raise it, or lower max_prompt_tokens",
    ),
    refuse(
        "data.eval",
        both(given("data.eval"), no({"condition": "evaluates"})),
        "is never used: eval.interval and interval_epochs are 0 and at_start and at_end are false",
    ),
    refuse(
        "data.eval",
        both({"key": "mode", "is": "eval"}, no(given("data.eval"))),
        "is empty, but mode=eval needs sources to evaluate on; give at least one",
    ),
    refuse(
        "data.demonstrations",
        both(MIXES, no(given("data.demonstrations"))),
        "is empty, but algorithm.name={cfg.algorithm.name} mixes demonstrations with own rollouts: give their sources, "
        "with the columns prompt and response",
    ),
)

ALGORITHM = (
    refuse(
        "algorithm.dynamic_sampling",
        both(ONLINE, ONE_ROLLOUT, {"condition": "dynamic_sampling"}),
        "drops every group of one rollout: raise rollout.group_size or set it to false",
    ),
    refuse(
        "algorithm.dynamic_sampling",
        both(DISTILLS, {"condition": "dynamic_sampling"}, no(given("rewards")), no(given("rollout.env"))),
        "without rewards every group is uniform: set it to false, or give rewards",
    ),
    refuse(
        "algorithm.groups.min_std",
        both(ONLINE, ONE_ROLLOUT, given("algorithm.groups.min_std")),
        "drops every group of one rollout: raise rollout.group_size",
    ),
    refuse(
        "algorithm.loss",
        both(ONLINE, MANY_UPDATES, no({"condition": "has_ratio"})),
        "{loss} has no ratio to the policy that sampled, so it is correct only for one optimizer step per batch, but "
        "train.minibatches={cfg.train.minibatches} x train.update_epochs={cfg.train.update_epochs} are "
        "{optimizer_steps}; set algorithm.loss=ppo, or both keys to 1",
    ),
    refuse(
        "algorithm.loss.fallback_to_policy_gradient",
        both(ONLINE, MANY_UPDATES, {"condition": "loss.fallback_to_policy_gradient"}),
        "compares the policy with itself, so it is right for one optimizer step a batch, and there are "
        "{optimizer_steps} (train.minibatches x train.update_epochs): leave it out, or set both to 1",
    ),
    refuse(
        "algorithm.kl.estimator",
        both(
            {"condition": "kind", "is": "preferences"},
            {"key": "algorithm.kl.coef", "above": 0},
            {"key": "algorithm.kl.estimator", "in": ["corrected_k3", "unbiased_k3", "full"]},
        ),
        "{cfg.algorithm.kl.estimator} needs the policy that sampled each token, but pairs are given; set it to k2, or "
        "another estimator of pi and the reference alone",
    ),
    refuse(
        "algorithm.top_entropy_quantile",
        both(
            {"condition": "loss", "in": ["geo_mean", "clip_cov", "kl_cov"]},
            no({"key": "algorithm.top_entropy_quantile", "is": 1.0}),
        ),
        "{loss} joins the advantages of several tokens, so it cannot leave single tokens out: set it to 1, or take "
        "another loss",
    ),
    refuse(
        "algorithm.advantage_low",
        both(ONLINE, {"key": "algorithm.advantage_low", "above": {"key": "algorithm.advantage_high"}}),
        "{cfg.algorithm.advantage_low} is above advantage_high={cfg.algorithm.advantage_high}; lower it, or raise "
        "advantage_high",
    ),
    *(
        refuse(
            f"algorithm.{key}",
            both(ONLINE, MIXES, no({"key": f"algorithm.{key}", "is": off})),
            f"{{cfg.algorithm.{key}}} would also draw the demonstrations that algorithm.mix adds to the rollouts: set "
            f"it to {off}",
        )
        for key, off in (("resample", "none"), ("refill", "sample"))
    ),
    refuse(
        "algorithm.advantage",
        both(ONLINE, {"condition": "advantage", "is": "gdpo"}, MIXES),
        "gdpo compares parts of rewards, which the demonstrations of algorithm.mix do not have; take another one",
    ),
    refuse(
        "algorithm.advantage.parts",
        both({"condition": "advantage", "is": "gdpo"}, no({"condition": "advantage.parts", "given": True})),
        "gdpo needs the names of the parts of the reward that it compares: give them",
    ),
    refuse(
        "reference.path",
        both(DISTILLS, no(given("reference.path"))),
        "a teacher is missing: without a path the reference is the policy itself: give the folder of the "
        "teacher",
    ),
    refuse(
        "algorithm.kl.coef",
        both(ONLINE, {"condition": "loss", "is": "gkd"}, {"key": "algorithm.kl.coef", "above": 0}),
        "{cfg.algorithm.kl.coef}: with loss=gkd the reference is the teacher, and the divergence from it is the loss; "
        "set it to 0",
    ),
    *(
        refuse(
            f"reference.{key}",
            both(DISTILLS, {"key": f"reference.{key}", "above": 0}),
            "would replace the teacher by the policy: leave it out",
        )
        for key in ("reset_interval", "reset_interval_epochs")
    ),
    refuse(
        "rewards",
        both(ONLINE, {"condition": "judged"}, no(given("rewards")), no(given("rollout.env"))),
        "algorithm.name={cfg.algorithm.name} needs rewards: give one, e.g. rewards.answer.function=exact, or an "
        "environment (rollout.env)",
    ),
)

ROLLOUT = (
    refuse(
        "rollout.env",
        both(given("rollout.env"), {"key": "data.chat", "is": False}),
        "the messages of an environment need the chat template, and data.chat is false; leave out data.chat",
    ),
    refuse(
        "rollout.group_size",
        both(ONLINE, ONE_ROLLOUT, {"condition": "compares"}),
        "advantage={advantage} compares the rollouts of a group, so with 1 every advantage would be 0: set it to 2 or "
        "more (8 is usual), or use algorithm.name=reinforce or ppo",
    ),
    refuse(
        "rollout.sampling.temperature",
        both(ONLINE, GREEDY, {"key": "rollout.group_size", "above": 1}),
        "0 is greedy: all {cfg.rollout.group_size} rollouts of a task would be equal; set it above 0 (1.0 is usual)",
    ),
    refuse(
        "rollout.sampling.temperature",
        both(ONLINE, GREEDY, {"condition": "needs_greedy_reply"}),
        "0 is greedy, as is the baseline reply of advantage={advantage}: set it above 0",
    ),
    refuse(
        "buffer.replay.queue",
        both(QUEUE, no(ASYNC)),
        "with rollout.schedule=deterministic a step waits for its own tasks, so it cannot be drawn from a queue; set "
        "rollout.schedule=async, or use buffer.replay.share",
    ),
    refuse(
        "buffer.replay.capacity",
        both(QUEUE, no({"key": "buffer.replay.capacity", "at_least": {"key": "train.tasks_per_step"}})),
        "{cfg.buffer.replay.capacity} groups are fewer than one step draws (train.tasks_per_step="
        "{cfg.train.tasks_per_step}); raise it",
    ),
    refuse(
        "algorithm.refill",
        both(QUEUE, {"key": "algorithm.refill", "is": "copy"}),
        "copy has no effect with buffer.replay.queue=true, where a step is always full; leave it out",
    ),
    refuse(
        "algorithm.refill",
        both(DRIVEN, ASYNC, {"key": "algorithm.refill", "is": "copy"}),
        "copy needs the tasks of a step in advance: set rollout.schedule=deterministic, or mode=both",
    ),
    refuse(
        "buffer.replay.share",
        both(
            REPLAYS,
            either(
                both(no(ASYNC), {"key": "rollout.max_staleness", "above": 0}),
                both(ASYNC, no(ONE_PROCESS)),
            ),
        ),
        "the groups to replay are known only after the previous step; set rollout.max_staleness=0, or mode=both with "
        "rollout.schedule=async",
    ),
    refuse(
        "buffer.replay.cooldown_steps",
        both(REPLAYS, no(given("buffer.replay.cooldown_steps"))),
        "null: no group is drawn again, so buffer.replay.share has no groups; set share to 0",
    ),
    refuse(
        "buffer.url",
        both(DRIVEN, {"key": "buffer.url", "is": "memory"}),
        "memory is inside one process, but mode={cfg.mode} needs a store that all processes can access: "
        "sqlite:///PATH, files:///PATH or postgresql://USER@HOST/DATABASE",
    ),
    refuse(
        "cluster.health_timeout_s",
        both(
            {"key": "rollout.replicas", "above": 0},
            {"key": "cluster.health_timeout_s", "at_least": {"key": "rollout.timeout_s"}},
        ),
        "{cfg.cluster.health_timeout_s:g} is not below rollout.timeout_s ({cfg.rollout.timeout_s:g}): the rollouts of "
        "a hanging replica would fail before another replica retries them; lower it",
    ),
    refuse(
        "sync.content",
        both({"key": "sync.content", "is": "adapters"}, no(given("model.lora"))),
        "adapters: model.lora is not given; use delta, which sends only changed weights",
    ),
    refuse(
        "sync.content",
        both({"key": "sync.content", "is": "adapters"}, given("model.lora"), given("rollout.quantization")),
        "adapters: with rollout.quantization={cfg.rollout.quantization} engines keep no original weights to merge them "
        "into; use full, which sends merged weights",
    ),
    refuse(
        "sync.dtype",
        both(
            {"key": "sync.content", "is": "adapters"},
            given("model.lora"),
            no(given("rollout.quantization")),
            no({"key": "sync.dtype", "is": "auto"}),
        ),
        "{cfg.sync.dtype}: adapters are sent unchanged, so that receivers can verify the merged weights; leave it out, "
        "or use sync.content=full",
    ),
)

TRAIN = (
    refuse(
        "train.steps",
        both(no(given("train.steps")), no(given("train.epochs"))),
        "give train.steps or train.epochs, or both (the earlier end counts); neither is given",
    ),
    refuse(
        "train.drop_last",
        both({"key": "train.drop_last", "is": True}, {"key": "data.train", "longer": 1}),
        "several sources are mixed by weight, so their epochs have no common end; set it to false, or give one source "
        "with a list of paths",
    ),
    *(
        refuse(
            f"{at}_tokens",
            both(given(f"{at}_tokens"), given(f"{at}_rollouts")),
            f"give {at}_tokens or {at}_rollouts, not both",
        )
        for at in ("train.micro_batch", "train.forward_micro_batch", "critic.micro_batch")
    ),
    refuse(
        "train.tasks_per_step",
        both({"condition": "kind", "is": "labels"}, no({"key": "train.tasks_per_step", "above": 1})),
        "{cfg.train.tasks_per_step} reply per step: kto also needs the log-prob of each reply under another prompt of "
        "the step; give 2 or more (16 is usual)",
    ),
    refuse(
        "train.shuffle_minibatches",
        both(MIXES, {"key": "train.shuffle_minibatches"}, {"key": "train.minibatches", "above": 1}),
        "a mix spreads its demonstrations evenly over the minibatches, which shuffling would undo: set it to false",
    ),
    refuse(
        "critic.warmup_steps",
        both(
            ONLINE,
            {"condition": "needs_critic"},
            given("train.steps"),
            {"key": "critic.warmup_steps", "at_least": {"key": "train.steps"}},
        ),
        "{cfg.critic.warmup_steps} steps of the critic alone leave no step for the policy (train.steps="
        "{cfg.train.steps}); lower it, or raise train.steps",
    ),
)


def schedule_rules(at: str) -> tuple[Rule, ...]:
    """Of a schedule's lengths."""
    value = f"cfg.{at}"
    too_long: Condition = {"key": f"{at}.warmup_steps", "at_least": {"key": f"{at}.total_steps"}}
    return (
        refuse(
            f"{at}.warmup_steps",
            both(given(f"{at}.warmup_steps"), {"key": f"{at}.warmup_ratio", "above": 0}),
            "give warmup_steps or warmup_ratio, not both",
        ),
        refuse(
            f"{at}.warmup_steps",
            too_long,
            f"{{{value}.warmup_steps}} steps of warm-up leave no step of total_steps={{{value}.total_steps}}; lower "
            "it, or raise total_steps",
        ),
    )


PRECISION = (
    refuse(
        "train.precision.reduce",
        both(given("train.precision.reduce"), no({"key": "train.precision.master_weights"})),
        "sums gradients for float32 master weights, but master_weights=false keeps none; leave one of the two out",
    ),
    refuse(
        "train.precision.master_weights",
        both({"key": "model.dtype", "is": "float16"}, no({"key": "train.precision.master_weights"})),
        "false: model.dtype=float16 needs float32 master weights, because gradients are unscaled in float32; use "
        "bfloat16, or set it to true",
    ),
    refuse(
        "train.precision.compute",
        both(given("train.precision.compute"), ADAPTERS),
        "adapters compute in the dtype of the base weights; set model.dtype instead",
    ),
    refuse(
        "train.precision.float8",
        both(given("train.precision.float8"), ADAPTERS),
        "it is not faster for adapters, which are small, and it rounds them; leave it out",
    ),
    refuse(
        "train.precision.float8",
        both(given("train.precision.float8"), COMPILED),
        "torch.compile does not support it; leave one of the two out",
    ),
    *(
        refuse(
            key,
            both(PARITY, wanted),
            "makes trained log-probs differ from sampled ones, but machine.logprob_parity=on requires equal ones",
        )
        for key, wanted in (
            ("train.precision.compute", given("train.precision.compute")),
            ("train.precision.float8", given("train.precision.float8")),
            ("train.compile", COMPILED),
        )
    ),
    refuse(
        "rollout.quantization",
        both(PARITY, given("rollout.quantization")),
        "makes sampled log-probs differ from trained ones, but machine.logprob_parity=on requires equal ones",
    ),
    refuse(
        "sync.dtype",
        both(
            PARITY,
            either(
                {"key": "mode", "is": "train"}, both(ONE_PROCESS, {"key": "rollout.replicas", "above": 0})
            ),
            no({"key": "sync.dtype", "is": "auto"}),
        ),
        "{cfg.sync.dtype}: machine.logprob_parity=on requires rollouts from exactly the trained weights; use auto",
    ),
    refuse(
        "machine.logprob_parity",
        both(PARITY, no({"key": "rollout.engine", "is": "native"})),
        "on needs rollout.engine=native; {cfg.rollout.engine} computes in a different order",
    ),
    refuse(
        "machine.logprob_parity",
        both(PARITY, {"condition": "ranks", "above": 1}),
        "on: with train.parallel sampling and training are in separate processes, so their equality is only measured, "
        "not proved; use auto",
    ),
)

PARALLEL = (
    refuse(
        "train.parallel.dp_shard",
        {"key": "train.parallel.dp_shard", "is": 0},
        "0: expected at least 1, or -1 for all remaining GPUs",
    ),
    refuse(
        "train.compile",
        both(COMPILED, {"condition": "ranks", "above": 1}, {"key": "train.parallel.ep", "above": 1}),
        "true: torch.compile is not tested with expert parallelism (ep); set ep=1",
    ),
    refuse(
        "train.parallel.separate_ranks",
        both(
            {"key": "train.parallel.separate_ranks", "holds": ["reference"]},
            OVER_VOCABULARY,
        ),
        "reference: a divergence over the vocabulary reads the reference in every micro-batch of the policy, so both "
        "must share their ranks; leave it out",
    ),
    refuse(
        "train.parallel.separate_ranks",
        both(given("train.parallel.separate_ranks"), {"key": "train.parallel.dp_shard", "is": -1}),
        "dp_shard=-1 uses all GPUs for the policy; give the number of ranks of each model",
    ),
    refuse(
        "train.offload",
        both({"key": "train.offload", "holds": ["policy"]}, no({"condition": "ranks", "above": 1})),
        "policy: in one process rollouts are sampled from the same weights; leave it out, or train on ranks "
        "(train.parallel)",
    ),
    refuse(
        "train.offload",
        both(
            {"key": "train.offload", "holds": ["reference"]},
            OVER_VOCABULARY,
        ),
        "reference: a divergence over the vocabulary reads the reference in every micro-batch; leave it out",
    ),
)

RUN = (
    refuse(
        "profile.tools",
        both({"key": "profile.steps", "longer": 0}, no(given("profile.tools"))),
        "[] records nothing; add a tool, or leave profile.steps out",
    ),
    refuse(
        "profile.tools",
        both({"key": "profile.tools", "holds": ["torch"]}, {"key": "profile.tools", "holds": ["nsys"]}),
        "torch and nsys both use CUPTI, which allows one user at a time; keep one of the two",
    ),
    refuse(
        "eval.reward",
        both(no({"key": "eval.reward", "is": None}), no(given("eval.reward"))),
        "names no reward; give {{name: weight}}, or leave it out to judge by all of them",
    ),
)

REFUSED: tuple[Rule, ...] = (
    *MODELS,
    *FUSED,
    *DATA,
    *ALGORITHM,
    *ROLLOUT,
    *TRAIN,
    *schedule_rules("train.optimizer.schedule"),
    *schedule_rules("critic.optimizer.schedule"),
    *PRECISION,
    *PARALLEL,
    *RUN,
)
