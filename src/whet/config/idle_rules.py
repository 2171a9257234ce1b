"""Conditions under which each key is read. If the condition of a key does not hold, a set key is refused and a form
hides it.

A key without a rule is always read. A rule on a section applies to all keys in it. `*` stands for any entry of a list
or any name. The reason may contain values: {cfg.data.order}, {kind} and other named conditions (`idle.NAMED`).
"""

from __future__ import annotations

from whet.config.conditions import NEVER, ONLINE, STALE, Condition, Rule, under
from whet.config.learning import READS
from whet.config.ratio_rules import RATIO
from whet.config.setting_rules import SETTING_RULES
from whet.config.trackers import TRACKERS

EVALUATES: Condition = {"condition": "evaluates"}
JUDGES: Condition = {"condition": "judges"}
SAMPLES: Condition = {"condition": "samples"}
MIXES: Condition = {"condition": "mixes"}
RANKED: Condition = {
    "any": [
        *(
            {"key": f"train.parallel.{dim}", "above": 1}
            for dim in ("dp_replicate", "dp_shard", "tp", "cp", "pp")
        ),
        {"key": "train.parallel.dp_shard", "is": -1},
        {"key": "train.parallel.separate_ranks", "given": True},
    ]
}
IN_CLUSTER: dict[str, Condition] = {
    "replicas": {"key": "rollout.replicas", "above": 0},
    "ranks": {"key": "cluster.ranks", "is": True},
    "reward_hosts": {"key": "cluster.reward_hosts", "above": 0},
    "explorers": {"key": "cluster.explorers", "above": 0},
}


def in_cluster(*parts: str) -> Condition:
    """At least one of these parts of the run is in the cluster."""
    return {"any": [IN_CLUSTER[part] for part in parts]}


MODELS = (
    Rule(
        ("critic",),
        {"condition": "needs_critic"},
        "algorithm.name={cfg.algorithm.name} (advantage={advantage}) has no critic",
    ),
    Rule(
        ("reference",),
        {"condition": "needs_reference"},
        "no reference is needed: algorithm.kl.coef and algorithm.reward_kl.coef are 0, and nothing else needs one",
    ),
    Rule(
        ("reference.reset_optimizer",),
        {
            "any": [
                {"key": "reference.reset_interval", "above": 0},
                {"key": "reference.reset_interval_epochs", "above": 0},
            ]
        },
        "reference.reset_interval and reset_interval_epochs are 0, so the reference is never reset",
    ),
    Rule(
        ("critic.overrides", "critic.head"),
        {"key": "critic.path", "given": True},
        "critic.path is null, so the critic is a copy of the policy",
    ),
    Rule(
        ("reference.overrides",),
        {"key": "reference.path", "given": True},
        "reference.path is null, so the reference is a copy of the policy",
    ),
    Rule(
        ("tokenizer.vocab_size",),
        {"key": "tokenizer.build", "given": True},
        "only a tokenizer that is built (tokenizer.build) has a configurable size",
    ),
    Rule(
        under("model.scratch", "num_experts", "num_experts_per_tok"),
        {"key": "model.scratch.architecture", "is": "qwen3_moe"},
        "only architecture=qwen3_moe has experts",
    ),
    Rule(
        ("model.scratch.sliding_window",),
        {"key": "model.scratch.architecture", "is": "mistral"},
        "only architecture=mistral has a sliding window",
    ),
)

ALGORITHM = (
    Rule(("algorithm.kl.estimator",), {"key": "algorithm.kl.coef", "above": 0}, "algorithm.kl.coef is 0"),
    Rule(
        under("algorithm.reward_kl", "estimator", "horizon"),
        {"key": "algorithm.reward_kl.coef", "above": 0},
        "algorithm.reward_kl.coef is 0",
    ),
    Rule(("algorithm.groups",), ONLINE, "the replies are in the data ({kind})"),
    Rule(
        under("algorithm.advantage", "std_epsilon", "std_ddof", "std_floor", "std_scope"),
        {"not": {"condition": "advantage.normalize_std", "is": False}},
        "normalize_std is false, so nothing is divided by a deviation",
    ),
    Rule(
        ("algorithm.advantage.tau",),
        {"not": {"condition": "advantage.opmd_baseline", "is": "mean"}},
        "opmd_baseline is mean",
    ),
    Rule(
        ("algorithm.whiten",),
        {
            "not": {
                "condition": "advantage",
                "in": ["reinforce_plus_plus", "reinforce_plus_plus_baseline"],
            }
        },
        "advantage={advantage} already whitens its values",
    ),
    Rule(("algorithm.whiten_ddof",), {"condition": "whiten"}, "algorithm.whiten is false"),
    Rule(("algorithm.correction.staleness_decay",), STALE, "every rollout comes from the current weights"),
    Rule(
        ("algorithm.resample_power",),
        {"key": "algorithm.resample", "is": "pow"},
        "only resample=pow reads it",
    ),
    Rule(
        ("algorithm.groups.min_std_ddof",),
        {"key": "algorithm.groups.min_std", "given": True},
        "algorithm.groups.min_std is not given",
    ),
    Rule(
        ("algorithm.groups.uniform_by",),
        {"condition": "dynamic_sampling"},
        "algorithm.dynamic_sampling is false",
    ),
)

SAMPLING = (
    Rule(
        under("rollout", "group_size", "sync_interval", "max_staleness", "schedule"),
        ONLINE,
        "the replies are in the data ({kind})",
    ),
    Rule(
        under("rollout", "partial_rollout", "spare_tasks"),
        {"key": "rollout.schedule", "is": "async"},
        "rollout.schedule={cfg.rollout.schedule}: a step waits for all its rollouts",
    ),
    Rule(
        under("buffer", "url", "lease_s"),
        {"not": {"key": "mode", "is": "both"}},
        "with mode=both one process explores and trains",
    ),
    Rule(
        ("buffer.order",),
        {"all": [{"not": {"key": "mode", "is": "both"}}, {"key": "rollout.schedule", "is": "async"}]},
        "mode={cfg.mode}, rollout.schedule={cfg.rollout.schedule}: groups are trained on in the order of their tasks",
    ),
    Rule(
        under("sync", "method", "content", "dtype", "timeout_s"),
        {"any": [{"not": {"key": "mode", "is": "both"}}, {"key": "rollout.replicas", "above": 0}]},
        "with mode=both and rollout.replicas=0 one process explores and trains",
    ),
    Rule(
        ("sync.keep",),
        {"not": {"key": "mode", "is": "both"}},
        "with mode=both no weights are written to run_dir/weights",
    ),
    Rule(
        ("sync.driven_by",),
        {"all": [ONLINE, {"key": "rollout.schedule", "is": "async"}]},
        "rollout.schedule={cfg.rollout.schedule}: the step determines the weights that sample it",
    ),
    Rule(("buffer.replay",), ONLINE, "the replies are in the data ({kind})"),
    Rule(
        under(
            "buffer.replay",
            "capacity",
            "priority",
            "decay",
            "cooldown_steps",
            "max_staleness",
            "use_limit",
            "sigma",
        ),
        {"any": [{"key": "buffer.replay.share", "above": 0}, {"key": "buffer.replay.queue", "is": True}]},
        "buffer.replay.share is 0 and buffer.replay.queue is false",
    ),
    Rule(
        ("buffer.replay.cooldown_s",),
        {"key": "buffer.replay.queue", "is": True},
        "buffer.replay.queue is false: the step determines which groups are drawn",
    ),
    Rule(
        ("buffer.replay.share",),
        {"not": {"key": "buffer.replay.queue", "is": True}},
        "buffer.replay.queue=true: the priority determines how many groups of a step are used ones",
    ),
    Rule(
        ("buffer.replay.cooldown_steps",),
        {"not": {"key": "buffer.replay.cooldown_s", "given": True}},
        "buffer.replay.cooldown_s is given",
    ),
    Rule(
        ("buffer.order",),
        {"not": {"key": "buffer.replay.queue", "is": True}},
        "buffer.replay.queue=true: the priority determines the order of training",
    ),
    Rule(
        under("buffer.replay", "use_limit", "sigma"),
        {"not": {"key": "buffer.replay.priority", "is": "linear_decay"}},
        "buffer.replay.priority=linear_decay ignores it",
    ),
    Rule(("buffer.explorer_name",), {"key": "mode", "is": "explore"}, "mode={cfg.mode} is not an explorer"),
    Rule(
        under("rollout", "retries", "timeout_factor"),
        SAMPLES,
        "nothing is sampled: {kind}, and no evaluation",
    ),
    Rule(("track.rollouts_interval",), ONLINE, "no rollouts are sampled ({kind})"),
    Rule(
        under("rollout.sampling", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
        ONLINE,
        "nothing is sampled in training ({kind})",
    ),
    Rule(("rewards", "reward_workers"), SAMPLES, "nothing is scored: {kind}, and no evaluation"),
    Rule(
        (
            *under("rollout", "engine", "max_num_seqs"),
            *under("rollout.sampling", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
        ),
        SAMPLES,
        "nothing is sampled: {kind}, and no evaluation",
    ),
    Rule(
        under("rollout", "replicas", "quantization"), SAMPLES, "nothing is sampled: {kind}, and no evaluation"
    ),
    Rule(
        ("rollout.replicas",),
        {"key": "rollout.engine", "is": "native"},
        "rollout.engine={cfg.rollout.engine} runs only in the process of the trainer",
    ),
    Rule(
        ("rollout.quantization",),
        {"key": "rollout.engine", "is": "native"},
        "rollout.engine={cfg.rollout.engine} samples with the original weights",
    ),
    Rule(
        ("cluster",),
        in_cluster(*IN_CLUSTER),
        "rollout.replicas is 0, and the cluster has neither ranks, reward hosts nor explorers",
    ),
    Rule(
        under("cluster", "gpus"), in_cluster("replicas", "explorers"), "only replicas and explorers read it"
    ),
    Rule(
        under("cluster", "cpus"),
        in_cluster("replicas", "ranks", "explorers"),
        "reward hosts have reward_workers.count CPUs",
    ),
    Rule(
        ("cluster.restarts",),
        in_cluster("replicas", "reward_hosts", "explorers"),
        "a rank that died ends the run, which then resumes from its last checkpoint",
    ),
    Rule(
        ("cluster.health_timeout_s",),
        {"key": "rollout.replicas", "above": 0},
        "rollout.replicas is 0, so the only engine is in the process of the trainer",
    ),
    Rule(("cluster.ranks",), RANKED, "train.parallel has no ranks: all dims are 1"),
    Rule(
        ("cluster.reward_hosts",),
        SAMPLES,
        "nothing is scored: {kind}, and no evaluation",
    ),
    Rule(
        ("cluster.explorers",),
        {"key": "mode", "is": "train"},
        "mode={cfg.mode}: only a separate trainer (mode=train) starts explorers",
    ),
    Rule(("machine.kv_cache_mb",), SAMPLES, "no rollout engine is needed"),
    Rule(
        ("machine.kv_cache_mb",),
        {"key": "rollout.engine", "is": "native"},
        "rollout.engine={cfg.rollout.engine} has no cache of configurable size",
    ),
)

DATA = (
    Rule(
        ("data.train.*.rejected",),
        {"condition": "kind", "is": "preferences"},
        "only preferences (dpo, simpo, orpo) read it",
    ),
    Rule(
        ("data.train.*.response",),
        {"not": ONLINE},
        "only demonstrations (sft), preferences (dpo) and labels (kto) read it",
    ),
    Rule(
        ("data.demonstrations",),
        MIXES,
        "algorithm.name={cfg.algorithm.name} has no mix (mix and mix_chord have)",
    ),
    Rule(
        ("data.demonstrations.*.weight",),
        {"key": "data.demonstrations", "longer": 1},
        "there is only one source, so nothing is mixed",
    ),
    Rule(
        under("data.demonstrations.*", "answer", "rejected", "desirable", "label"),
        NEVER,
        "for demonstrations only prompt and response are read",
    ),
    Rule(
        ("data.train.*.desirable", "data.eval.*.desirable"),
        {"condition": "kind", "is": "labels"},
        "only kto reads it",
    ),
    Rule(
        ("data.train.*.weight",),
        {"key": "data.train", "longer": 1},
        "there is only one source, so nothing is mixed",
    ),
    Rule(
        ("data.seed",),
        {"not": {"key": "data.order", "is": "sequential"}},
        "data.order=sequential uses no random numbers",
    ),
    Rule(
        ("data.train.*.difficulty", "data.demonstrations.*.difficulty"),
        {"key": "data.order", "in": ["easy_first", "hard_first"]},
        "data.order={cfg.data.order} does not read it",
    ),
    Rule(("data.eval.*.difficulty",), NEVER, "evaluation reads held-out rows in the order of the file"),
    Rule(
        ("data.learn_turns",),
        {"any": [{"condition": "kind", "is": "demonstrations"}, {"key": "data.demonstrations", "longer": 0}]},
        "only demonstrations (sft) have several replies to train on, not {kind}",
    ),
    Rule(("data.demonstrations.*.rewards",), NEVER, "demonstrations are not scored"),
    Rule(
        ("data.train.*.rewards",),
        ONLINE,
        "the replies of training are in the data ({kind}) and are not scored",
    ),
)

EVAL = (
    Rule(("eval.offline",), NEVER, "only `whet eval` reads it, training does not"),
    Rule(("eval",), EVALUATES, "there is nothing to evaluate: data.eval is empty or evaluation is off"),
    Rule(("data.exclude_eval",), EVALUATES, "data.eval is empty or evaluation is off"),
    Rule(
        under("eval", "samples", "sampling", "sources", "success", "reward", "log_samples"),
        JUDGES,
        "there are no rewards, so only the loss of the given replies is measured",
    ),
    Rule(
        ("data.eval.*.response",),
        {"not": ONLINE},
        "evaluation samples replies to the prompt of every row; only stages that train on given replies read it",
    ),
    Rule(
        ("data.eval.*.rejected",),
        {"condition": "kind", "is": "preferences"},
        "only preferences (dpo) read it",
    ),
    Rule(("data.eval.*.weight",), NEVER, "evaluation uses every row once"),
)

TRAIN = (
    Rule(("train.skip_zero_weight",), ONLINE, "every reply in the data has a gradient ({kind})"),
    Rule(
        ("train.shuffle_minibatches",),
        {"any": [{"key": "train.minibatches", "above": 1}, {"key": "critic.minibatches", "above": 1}]},
        "every update epoch has one minibatch with all groups",
    ),
    Rule(
        under("train.precision", "loss_scale", "loss_scale_steps"),
        {
            "any": [
                {"key": "model.dtype", "is": "float16"},
                {"key": "train.precision.compute", "is": "float16"},
            ]
        },
        "nothing is float16, so the loss is not scaled",
    ),
)


def optimizer_rules(at: str) -> tuple[Rule, ...]:
    """Rules for the keys of an optimizer and of its schedule."""
    s = f"{at}.schedule"
    ends: Condition = {"key": f"{s}.weight_decay_end", "given": True}
    changes: Condition = {"not": {"key": f"{s}.type", "is": "constant"}}
    fraction: Condition = {"key": f"{s}.warmup_ratio", "above": 0}
    warms_up: Condition = {"any": [{"key": f"{s}.warmup_steps", "above": 0}, fraction]}
    by_kind = tuple(
        Rule(
            (f"{s}.{key}",),
            {"key": f"{s}.type", "in": [kind for kind, read in READS.items() if key in read]},
            f"type={{cfg.{s}.type}} does not read it",
        )
        for key in ("min_lr_ratio", "num_cycles", "decay_steps", "decay_ratio", "decay_type")
    )
    kind = f"name={{cfg.{at}.name}} does not read it"
    return (
        Rule(under(at, "betas", "eps"), {"not": {"key": f"{at}.name", "is": "sgd"}}, kind),
        Rule((f"{at}.state_dtype",), {"not": {"key": f"{at}.name", "is": "sgd"}}, kind),
        Rule(
            (f"{at}.implementation",),
            {"key": f"{at}.state_dtype", "is": "float32"},
            f"state_dtype={{cfg.{at}.state_dtype}} has a separate implementation",
        ),
        Rule((f"{at}.momentum",), {"key": f"{at}.name", "in": ["sgd", "muon"]}, kind),
        Rule(
            (f"{at}.decay_all",),
            {
                "any": [
                    {"key": f"{at}.weight_decay", "above": 0},
                    {"key": f"{s}.weight_decay_end", "above": 0},
                ]
            },
            "weight_decay is 0",
        ),
        *by_kind,
        Rule(
            (f"{s}.decay_ratio",),
            {"key": f"{s}.decay_steps", "given": False},
            "decay_steps gives the length of the decay",
        ),
        Rule(
            (f"{s}.num_cycles",),
            {"any": [{"key": f"{s}.type", "is": "cosine"}, {"key": f"{s}.decay_type", "is": "cosine"}]},
            f"decay_type={{cfg.{s}.decay_type}} has no cycles",
        ),
        Rule(
            (f"{s}.total_steps",), {"any": [changes, fraction]}, "type=constant does not depend on the length"
        ),
        Rule(under(s, "warmup_start_ratio", "warmup_ends"), warms_up, "there is no warm-up"),
        Rule((f"{s}.weight_decay_type",), ends, "weight_decay_end is null, so weight decay is constant"),
        Rule(
            (f"{s}.unit",), {"any": [changes, warms_up, ends]}, "learning rate and weight decay are constant"
        ),
    )


def lora_rules(at: str) -> tuple[Rule, ...]:
    """Rules for the keys of adapters."""
    return (
        Rule(
            under(at, "init", "pissa_iterations"),
            {"key": f"{at}.path", "given": False},
            f"the initial adapters come from {at}.path",
        ),
        Rule((f"{at}.pissa_iterations",), {"key": f"{at}.init", "is": "pissa"}, "only init=pissa reads it"),
    )


RUN = (
    Rule(
        ("checkpoint.export_as",),
        {"key": "model.lora", "given": True},
        "model.lora is null, so there are no adapters",
    ),
    Rule(
        ("checkpoint.load_contents",),
        {"not": {"key": "checkpoint.resume", "in": ["never", "fresh"]}},
        "checkpoint.resume={cfg.checkpoint.resume} reads no checkpoint",
    ),
    Rule(
        under("checkpoint", "export_dir", "export_as"),
        {"any": [{"key": "checkpoint.export"}, {"key": "checkpoint.export_interval", "above": 0}]},
        "nothing is exported",
    ),
    Rule(("checkpoint.keep_best",), EVALUATES, "nothing is evaluated"),
    Rule(
        ("checkpoint.upload_exports_to",),
        {"any": [{"key": "checkpoint.export"}, {"key": "checkpoint.export_interval", "above": 0}]},
        "nothing is exported",
    ),
    Rule(
        ("checkpoint.upload",),
        {
            "any": [
                {"key": "checkpoint.upload_to", "longer": 0},
                {"key": "checkpoint.upload_exports_to", "longer": 0},
            ]
        },
        "nothing is uploaded: checkpoint.upload_to and upload_exports_to are empty",
    ),
    Rule(
        ("checkpoint.upload_keep",),
        {"key": "checkpoint.upload_to", "longer": 0},
        "checkpoint.upload_to is empty, so no checkpoints are uploaded",
    ),
    Rule(
        under("track", "project", "group", "tags"),
        {"condition": "lists_runs"},
        "only wandb, mlflow and swanlab read it, and track.trackers has none of them",
    ),
    *(
        Rule(
            (f"track.arguments.{name}",),
            {"key": "track.trackers", "holds": [name]},
            f"track.trackers does not contain {name}",
        )
        for name in TRACKERS
    ),
    Rule(
        under("profile", "warmup", "tools", "ranks", "record_shapes", "with_stack", "profile_memory", "dir"),
        {"key": "profile.steps", "longer": 0},
        "profile.steps is empty, so nothing is recorded",
    ),
    Rule(
        ("profile",),
        {"condition": "profiles"},
        "the stage has {cfg.train.steps} steps, and every step in profile.steps is later",
    ),
    Rule(
        under("profile", "warmup", "record_shapes", "with_stack", "profile_memory"),
        {"key": "profile.tools", "holds": ["torch"]},
        "profile.tools does not contain torch",
    ),
    Rule(("track.rollouts_dir",), ONLINE, "no rollouts are sampled"),
    Rule(("track.rollouts_dir",), {"key": "track.rollouts_interval", "above": 0}, "no rollouts are written"),
    Rule(under("track", "eval_dir", "eval_dump"), JUDGES, "there is nothing to evaluate"),
    Rule(("track.rollouts_dump",), ONLINE, "no rollouts are sampled"),
    Rule(("track.rollouts_dump",), {"key": "track.rollouts_interval", "above": 0}, "no rollouts are written"),
    Rule(("track.batches_dump",), {"key": "track.batches_interval", "above": 0}, "no batches are written"),
)

PARALLEL = (
    Rule(
        under("train.parallel", "reshard_after_forward", "wrap_min_num_params", "prefetch"),
        {
            "any": [
                {"key": "train.parallel.dp_shard", "above": 1},
                {"key": "train.parallel.dp_shard", "is": -1},
            ]
        },
        "train.parallel.dp_shard is 1, so no tensor is sharded",
    ),
    Rule(
        ("train.parallel.pipeline_chunks",),
        {"key": "train.parallel.pp", "above": 1},
        "train.parallel.pp is 1, so there is no pipeline",
    ),
    Rule(
        ("train.parallel.separate_ranks",),
        {"any": [{"condition": "needs_critic"}, {"condition": "needs_reference"}]},
        "the policy is the only model",
    ),
    Rule(
        ("train.parallel.timeout_s",),
        RANKED,
        "train.parallel has no ranks: all dims are 1",
    ),
    Rule(
        ("checkpoint.sharded",),
        # false is allowed: one process may resume a run of ranks, with the same file and an override
        {"any": [RANKED, {"key": "checkpoint.sharded", "is": False}]},
        "train.parallel has no ranks, so one process writes whole files",
    ),
    Rule(
        ("profile.ranks",),
        RANKED,
        "train.parallel has no ranks: all dims are 1",
    ),
)

RULES: tuple[Rule, ...] = (
    *MODELS,
    *SETTING_RULES,
    *ALGORITHM,
    *RATIO,
    *SAMPLING,
    *DATA,
    *EVAL,
    *TRAIN,
    *optimizer_rules("train.optimizer"),
    *optimizer_rules("critic.optimizer"),
    *lora_rules("model.lora"),
    *lora_rules("critic.lora"),
    *RUN,
    *PARALLEL,
)
"""If a key has several rules, the first one that does not hold gives the reason."""
