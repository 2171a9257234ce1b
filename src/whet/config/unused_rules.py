"""Conditions under which each key is read. If the condition of a key does not hold, a set key is refused and a form
hides it.

A key without a rule is always read. A rule on a section applies to all keys in it. `*` stands for any entry of a list
or any name. The reason may contain values: {cfg.data.order}, {kind} and other named conditions (`facts.NAMED`).
"""

from __future__ import annotations

from whet.config.conditions import NEVER, ONLINE, STALE, Condition, Rule, read_when, under
from whet.config.optimizer_rules import lora_rules, optimizer_rules
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
    read_when(
        ("critic",),
        {"condition": "needs_critic"},
        "algorithm.name={cfg.algorithm.name} (advantage={advantage}) has no critic",
    ),
    read_when(
        ("reference",),
        {"condition": "needs_reference"},
        "no reference is needed: algorithm.kl.coef and algorithm.reward_kl.coef are 0, and nothing else needs one",
    ),
    read_when(
        ("reference.reset_optimizer",),
        {
            "any": [
                {"key": "reference.reset_interval", "above": 0},
                {"key": "reference.reset_interval_epochs", "above": 0},
            ]
        },
        "reference.reset_interval and reset_interval_epochs are 0, so the reference is never reset",
    ),
    read_when(
        ("critic.overrides", "critic.head"),
        {"key": "critic.path", "given": True},
        "critic.path is null, so the critic is a copy of the policy",
    ),
    read_when(
        ("reference.overrides",),
        {"key": "reference.path", "given": True},
        "reference.path is null, so the reference is a copy of the policy",
    ),
    read_when(
        ("tokenizer.vocab_size",),
        {"key": "tokenizer.build", "given": True},
        "only a tokenizer that is built (tokenizer.build) has a configurable size",
    ),
    read_when(
        under("model.scratch", "num_experts", "num_experts_per_tok"),
        {"key": "model.scratch.architecture", "is": "qwen3_moe"},
        "only architecture=qwen3_moe has experts",
    ),
    read_when(
        ("model.scratch.sliding_window",),
        {"key": "model.scratch.architecture", "is": "mistral"},
        "only architecture=mistral has a sliding window",
    ),
)

ALGORITHM = (
    read_when(
        ("algorithm.kl.estimator",), {"key": "algorithm.kl.coef", "above": 0}, "algorithm.kl.coef is 0"
    ),
    read_when(
        under("algorithm.reward_kl", "estimator", "horizon"),
        {"key": "algorithm.reward_kl.coef", "above": 0},
        "algorithm.reward_kl.coef is 0",
    ),
    read_when(("algorithm.groups",), ONLINE, "the replies are in the data ({kind})"),
    read_when(
        under("algorithm.advantage", "std_epsilon", "std_ddof", "std_floor", "std_scope"),
        {"not": {"condition": "advantage.normalize_std", "is": False}},
        "normalize_std is false, so nothing is divided by a deviation",
    ),
    read_when(
        ("algorithm.advantage.tau",),
        {"not": {"condition": "advantage.opmd_baseline", "is": "mean"}},
        "opmd_baseline is mean",
    ),
    read_when(
        ("algorithm.whiten",),
        {
            "not": {
                "condition": "advantage",
                "in": ["reinforce_plus_plus", "reinforce_plus_plus_baseline"],
            }
        },
        "advantage={advantage} already whitens its values",
    ),
    read_when(("algorithm.whiten_ddof",), {"condition": "whiten"}, "algorithm.whiten is false"),
    read_when(
        ("algorithm.correction.staleness_decay",), STALE, "every rollout comes from the current weights"
    ),
    read_when(
        ("algorithm.resample_power",),
        {"key": "algorithm.resample", "is": "pow"},
        "only resample=pow reads it",
    ),
    read_when(
        ("algorithm.groups.min_std_ddof",),
        {"key": "algorithm.groups.min_std", "given": True},
        "algorithm.groups.min_std is not given",
    ),
    read_when(
        ("algorithm.groups.uniform_by",),
        {"condition": "dynamic_sampling"},
        "algorithm.dynamic_sampling is false",
    ),
)

SAMPLING = (
    read_when(
        under("rollout", "group_size", "sync_interval", "max_staleness", "schedule"),
        ONLINE,
        "the replies are in the data ({kind})",
    ),
    read_when(
        under("rollout", "partial_rollout", "spare_tasks"),
        {"key": "rollout.schedule", "is": "async"},
        "rollout.schedule={cfg.rollout.schedule}: a step waits for all its rollouts",
    ),
    read_when(
        under("buffer", "url", "lease_s"),
        {"not": {"key": "mode", "is": "both"}},
        "with mode=both one process explores and trains",
    ),
    read_when(
        ("buffer.order",),
        {"all": [{"not": {"key": "mode", "is": "both"}}, {"key": "rollout.schedule", "is": "async"}]},
        "mode={cfg.mode}, rollout.schedule={cfg.rollout.schedule}: groups are trained on in the order of their tasks",
    ),
    read_when(
        under("sync", "method", "content", "dtype", "timeout_s"),
        {"any": [{"not": {"key": "mode", "is": "both"}}, {"key": "rollout.replicas", "above": 0}]},
        "with mode=both and rollout.replicas=0 one process explores and trains",
    ),
    read_when(
        ("sync.keep",),
        {"not": {"key": "mode", "is": "both"}},
        "with mode=both no weights are written to run_dir/weights",
    ),
    read_when(
        ("sync.driven_by",),
        {"all": [ONLINE, {"key": "rollout.schedule", "is": "async"}]},
        "rollout.schedule={cfg.rollout.schedule}: the step determines the weights that sample it",
    ),
    read_when(("buffer.replay",), ONLINE, "the replies are in the data ({kind})"),
    read_when(
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
    read_when(
        ("buffer.replay.cooldown_s",),
        {"key": "buffer.replay.queue", "is": True},
        "buffer.replay.queue is false: the step determines which groups are drawn",
    ),
    read_when(
        ("buffer.replay.share",),
        {"not": {"key": "buffer.replay.queue", "is": True}},
        "buffer.replay.queue=true: the priority determines how many groups of a step are used ones",
    ),
    read_when(
        ("buffer.replay.cooldown_steps",),
        {"not": {"key": "buffer.replay.cooldown_s", "given": True}},
        "buffer.replay.cooldown_s is given",
    ),
    read_when(
        ("buffer.order",),
        {"not": {"key": "buffer.replay.queue", "is": True}},
        "buffer.replay.queue=true: the priority determines the order of training",
    ),
    read_when(
        under("buffer.replay", "use_limit", "sigma"),
        {"not": {"key": "buffer.replay.priority", "is": "linear_decay"}},
        "buffer.replay.priority=linear_decay ignores it",
    ),
    read_when(
        ("buffer.explorer_name",), {"key": "mode", "is": "explore"}, "mode={cfg.mode} is not an explorer"
    ),
    read_when(
        under("rollout", "env", "retries", "timeout_factor"),
        SAMPLES,
        "nothing is sampled: {kind}, and no evaluation",
    ),
    read_when(("track.rollouts_interval",), ONLINE, "no rollouts are sampled ({kind})"),
    read_when(
        under("rollout.sampling", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
        ONLINE,
        "nothing is sampled in training ({kind})",
    ),
    read_when(("rewards", "reward_workers"), SAMPLES, "nothing is scored: {kind}, and no evaluation"),
    read_when(
        (
            *under("rollout", "engine", "max_num_seqs"),
            *under("rollout.sampling", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
        ),
        SAMPLES,
        "nothing is sampled: {kind}, and no evaluation",
    ),
    read_when(
        under("rollout", "replicas", "quantization"), SAMPLES, "nothing is sampled: {kind}, and no evaluation"
    ),
    read_when(
        ("rollout.replicas",),
        {"key": "rollout.engine", "is": "native"},
        "rollout.engine={cfg.rollout.engine} runs only in the process of the trainer",
    ),
    read_when(
        ("rollout.quantization",),
        {"key": "rollout.engine", "is": "native"},
        "rollout.engine={cfg.rollout.engine} samples with the original weights",
    ),
    read_when(
        ("cluster",),
        in_cluster(*IN_CLUSTER),
        "rollout.replicas is 0, and the cluster has neither ranks, reward hosts nor explorers",
    ),
    read_when(
        under("cluster", "gpus"), in_cluster("replicas", "explorers"), "only replicas and explorers read it"
    ),
    read_when(
        under("cluster", "cpus"),
        in_cluster("replicas", "ranks", "explorers"),
        "reward hosts have reward_workers.count CPUs",
    ),
    read_when(
        ("cluster.restarts",),
        in_cluster("replicas", "reward_hosts", "explorers"),
        "a rank that died ends the run, which then resumes from its last checkpoint",
    ),
    read_when(
        ("cluster.health_timeout_s",),
        {"key": "rollout.replicas", "above": 0},
        "rollout.replicas is 0, so the only engine is in the process of the trainer",
    ),
    read_when(("cluster.ranks",), RANKED, "train.parallel has no ranks: all dims are 1"),
    read_when(
        ("cluster.reward_hosts",),
        SAMPLES,
        "nothing is scored: {kind}, and no evaluation",
    ),
    read_when(
        ("cluster.explorers",),
        {"key": "mode", "is": "train"},
        "mode={cfg.mode}: only a separate trainer (mode=train) starts explorers",
    ),
    read_when(("machine.kv_cache_mb",), SAMPLES, "no rollout engine is needed"),
    read_when(
        ("machine.kv_cache_mb",),
        {"key": "rollout.engine", "is": "native"},
        "rollout.engine={cfg.rollout.engine} has no cache of configurable size",
    ),
)

DATA = (
    read_when(
        ("data.train.*.rejected",),
        {"condition": "kind", "is": "preferences"},
        "only preferences (dpo, simpo, orpo) read it",
    ),
    read_when(
        ("data.train.*.response",),
        {"not": ONLINE},
        "only demonstrations (sft), preferences (dpo) and labels (kto) read it",
    ),
    read_when(
        ("data.demonstrations",),
        MIXES,
        "algorithm.name={cfg.algorithm.name} has no mix (mix and mix_chord have)",
    ),
    read_when(
        ("data.demonstrations.*.weight",),
        {"key": "data.demonstrations", "longer": 1},
        "there is only one source, so nothing is mixed",
    ),
    read_when(
        under("data.demonstrations.*", "answer", "rejected", "desirable", "label"),
        NEVER,
        "for demonstrations only prompt and response are read",
    ),
    read_when(
        ("data.train.*.desirable", "data.eval.*.desirable"),
        {"condition": "kind", "is": "labels"},
        "only kto reads it",
    ),
    read_when(
        ("data.train.*.weight",),
        {"key": "data.train", "longer": 1},
        "there is only one source, so nothing is mixed",
    ),
    read_when(
        ("data.seed",),
        {"not": {"key": "data.order", "is": "sequential"}},
        "data.order=sequential uses no random numbers",
    ),
    read_when(
        ("data.train.*.difficulty", "data.demonstrations.*.difficulty"),
        {"key": "data.order", "in": ["easy_first", "hard_first"]},
        "data.order={cfg.data.order} does not read it",
    ),
    read_when(("data.eval.*.difficulty",), NEVER, "evaluation reads held-out rows in the order of the file"),
    read_when(
        ("data.learn_turns",),
        {"any": [{"condition": "kind", "is": "demonstrations"}, {"key": "data.demonstrations", "longer": 0}]},
        "only demonstrations (sft) have several replies to train on, not {kind}",
    ),
    read_when(("data.demonstrations.*.rewards",), NEVER, "demonstrations are not scored"),
    read_when(
        ("data.train.*.rewards",),
        ONLINE,
        "the replies of training are in the data ({kind}) and are not scored",
    ),
)

EVAL = (
    read_when(("eval.offline",), NEVER, "only `whet eval` reads it, training does not"),
    read_when(("eval",), EVALUATES, "there is nothing to evaluate: data.eval is empty or evaluation is off"),
    read_when(("data.exclude_eval",), EVALUATES, "data.eval is empty or evaluation is off"),
    read_when(
        under("eval", "samples", "sampling", "sources", "success", "reward", "log_samples"),
        JUDGES,
        "there are no rewards, so only the loss of the given replies is measured",
    ),
    read_when(
        ("data.eval.*.response",),
        {"not": ONLINE},
        "evaluation samples replies to the prompt of every row; only stages that train on given replies read it",
    ),
    read_when(
        ("data.eval.*.rejected",),
        {"condition": "kind", "is": "preferences"},
        "only preferences (dpo) read it",
    ),
    read_when(("data.eval.*.weight",), NEVER, "evaluation uses every row once"),
)

TRAIN = (
    read_when(("train.skip_zero_weight",), ONLINE, "every reply in the data has a gradient ({kind})"),
    read_when(
        ("train.router_aux_loss_scope",),
        {"key": "train.router_aux_loss_coef", "above": 0},
        "router_aux_loss_coef is 0, so there is no load-balancing loss",
    ),
    read_when(
        ("train.shuffle_minibatches",),
        {"any": [{"key": "train.minibatches", "above": 1}, {"key": "critic.minibatches", "above": 1}]},
        "every update epoch has one minibatch with all groups",
    ),
    read_when(
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


RUN = (
    read_when(
        ("checkpoint.export_as",),
        {"key": "model.lora", "given": True},
        "model.lora is null, so there are no adapters",
    ),
    read_when(
        ("checkpoint.load_contents",),
        {"not": {"key": "checkpoint.resume", "in": ["never", "fresh"]}},
        "checkpoint.resume={cfg.checkpoint.resume} reads no checkpoint",
    ),
    read_when(
        under("checkpoint", "export_dir", "export_as"),
        {"any": [{"key": "checkpoint.export"}, {"key": "checkpoint.export_interval", "above": 0}]},
        "nothing is exported",
    ),
    read_when(("checkpoint.keep_best",), EVALUATES, "nothing is evaluated"),
    read_when(("train.early_stopping",), EVALUATES, "nothing is evaluated"),
    read_when(
        ("checkpoint.upload_exports_to",),
        {"any": [{"key": "checkpoint.export"}, {"key": "checkpoint.export_interval", "above": 0}]},
        "nothing is exported",
    ),
    read_when(
        ("checkpoint.upload",),
        {
            "any": [
                {"key": "checkpoint.upload_to", "longer": 0},
                {"key": "checkpoint.upload_exports_to", "longer": 0},
            ]
        },
        "nothing is uploaded: checkpoint.upload_to and upload_exports_to are empty",
    ),
    read_when(
        ("checkpoint.upload_keep",),
        {"key": "checkpoint.upload_to", "longer": 0},
        "checkpoint.upload_to is empty, so no checkpoints are uploaded",
    ),
    read_when(
        under("track", "project", "group", "tags"),
        {"condition": "lists_runs"},
        "only wandb, mlflow and swanlab read it, and track.trackers has none of them",
    ),
    *(
        read_when(
            (f"track.arguments.{name}",),
            {"key": "track.trackers", "holds": [name]},
            f"track.trackers does not contain {name}",
        )
        for name in TRACKERS
    ),
    read_when(
        under("profile", "warmup", "tools", "ranks", "record_shapes", "with_stack", "profile_memory", "dir"),
        {"key": "profile.steps", "longer": 0},
        "profile.steps is empty, so nothing is recorded",
    ),
    read_when(
        ("profile",),
        {"condition": "profiles"},
        "the stage has {cfg.train.steps} steps, and every step in profile.steps is later",
    ),
    read_when(
        under("profile", "warmup", "record_shapes", "with_stack", "profile_memory"),
        {"key": "profile.tools", "holds": ["torch"]},
        "profile.tools does not contain torch",
    ),
    read_when(("track.rollouts_dir",), ONLINE, "no rollouts are sampled"),
    read_when(
        ("track.rollouts_dir",), {"key": "track.rollouts_interval", "above": 0}, "no rollouts are written"
    ),
    read_when(under("track", "eval_dir", "eval_dump"), JUDGES, "there is nothing to evaluate"),
    read_when(("track.rollouts_dump",), ONLINE, "no rollouts are sampled"),
    read_when(
        ("track.rollouts_dump",), {"key": "track.rollouts_interval", "above": 0}, "no rollouts are written"
    ),
    read_when(
        ("track.batches_dump",), {"key": "track.batches_interval", "above": 0}, "no batches are written"
    ),
)

PARALLEL = (
    read_when(
        under("train.parallel", "reshard_after_forward", "wrap_min_num_params", "prefetch"),
        {
            "any": [
                {"key": "train.parallel.dp_shard", "above": 1},
                {"key": "train.parallel.dp_shard", "is": -1},
            ]
        },
        "train.parallel.dp_shard is 1, so no tensor is sharded",
    ),
    read_when(
        ("train.parallel.pipeline_chunks",),
        {"key": "train.parallel.pp", "above": 1},
        "train.parallel.pp is 1, so there is no pipeline",
    ),
    read_when(
        ("train.parallel.separate_ranks",),
        {"any": [{"condition": "needs_critic"}, {"condition": "needs_reference"}]},
        "the policy is the only model",
    ),
    read_when(
        ("train.parallel.timeout_s",),
        RANKED,
        "train.parallel has no ranks: all dims are 1",
    ),
    read_when(
        ("checkpoint.sharded",),
        # false is allowed: one process may resume a run of ranks, with the same file and an override
        {"any": [RANKED, {"key": "checkpoint.sharded", "is": False}]},
        "train.parallel has no ranks, so one process writes whole files",
    ),
    read_when(
        ("profile.ranks",),
        RANKED,
        "train.parallel has no ranks: all dims are 1",
    ),
)

UNUSED: tuple[Rule, ...] = (
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
"""If a key has several rules, the first one that holds gives the reason."""
