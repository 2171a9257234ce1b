"""Sections about the run itself: checkpoints, records, limits, the machine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from whet.config.parts.base import Above0, Count, Fraction, Positive, Section


class Best(Section):
    """Which evaluations keep their checkpoint."""

    metric: str = "eval/accuracy"
    """A number that evaluations write down, by its name in metrics.jsonl. A checkpoint is then written in every step
    whose evaluation is among the best so far, and stays for as long as it is."""
    goal: Literal["max", "min"] = "max"
    """Whether the largest or the smallest is best. Of equal ones the earlier stays."""
    count: Positive = 1
    """How many of the best are kept, beside the newest."""


class Checkpoint(Section):
    """Saving and resuming: the whole run, to the bit."""

    interval: Count = 50
    """Steps between checkpoints. 0: only at the end and on Ctrl-C."""
    interval_epochs: Count = 0
    """Save after every so many passes over the training rows too, in the step that completes one. 0: not by epochs."""
    keep: Positive | None = 2
    """How many of the newest are kept. null: all."""
    keep_best: Best | None = None
    """Checkpoints of the best evaluations, kept beside the newest. null: none."""
    async_save: bool = False
    """Write checkpoints while the next steps go on: the state is copied first, so memory holds it twice meanwhile. The
    next save waits for the last one to be on the disk; what went wrong with it is raised there, or at the end."""
    sharded: bool = False
    """With train.parallel: every rank writes the parts that it holds, at once, and reads the parts that it needs, so no
    process has to hold the whole model. Without, they are gathered and one rank writes whole files. Any layout goes on
    from either."""
    dir: str | None = None
    """Folder of the checkpoints. Default: `checkpoints` in run_dir, which else is a link to it."""
    resume: str = "auto"
    """auto: go on where the run directory stands; never: refuse one that holds a run; fresh: move what is there
    aside and begin anew; or a path of a checkpoint."""
    save_contents: tuple[Literal["model", "optimizer"], ...] = ("model", "optimizer")
    """What a checkpoint holds beside the run's place (step, data, schedule, buffer), which is always in it. Without the
    optimizer it takes about a third of the space, and a run goes on from it only with load=[model]."""
    load_contents: tuple[Literal["model", "optimizer"], ...] = ("model", "optimizer")
    """What is read when a run goes on. [model]: the optimizer's moments begin at zero, its schedule where it was; the
    run is then no longer the unbroken one, bit for bit."""
    export: bool = True
    """Write a Hugging Face folder `export/STAGE` at the end of each stage."""
    export_interval: Count = 0
    """Write one after every so many steps too, `export/STAGE-step-N`; all are kept. 0: none."""
    export_as: Literal["merged", "adapter"] = "merged"
    """With model.lora: the whole model with the adapters in its weights, or the adapters alone, as peft writes them."""
    export_dir: str | None = None
    """Folder of the exports. Default: `export` in run_dir, which else is a link to it."""
    upload_to: tuple[str, ...] = ()
    """Where checkpoints are copied to, in the background, each as a folder of its own: s3://BUCKET/PATH, gs://,
    hdfs://, hf://ORG/NAME, or file:///PATH of a mounted drive. A run never waits for a copy, but at its end; what could
    not be copied is said, and tried again with the next one. Each run needs a place of its own."""
    upload_exports_to: tuple[str, ...] = ()
    """Where exports are copied to. On the hub (hf://ORG/NAME) each is a commit at the repository's root, so that
    `from_pretrained` reads the newest."""
    upload: Literal["all", "last"] = "all"
    """Copy every one as it is written, or at the end of the run the last one alone."""
    upload_keep: Positive | None = None
    """How many of the newest checkpoints stay there, beside those of the best evaluations. null: all. Only copies that
    this run has made itself (uploads.json) are ever removed, and only when a later checkpoint has been copied."""


class Track(Section):
    """What is written down."""

    trackers: tuple[str, ...] = ("console", "jsonl")
    """Where numbers go: console, jsonl, tensorboard, wandb, mlflow, swanlab, or a class of yours as
    'package.module:Class'. jsonl is always written; console is the live display. wandb, mlflow and swanlab are packages
    of their own and may send numbers and the config to a server."""
    project: str = "whet"
    """Where W&B and SwanLab (project) and MLflow (experiment) list the run, under its `name`."""
    group: str | None = None
    """Runs of one group stand together there."""
    tags: tuple[str, ...] = ()
    """Words by which runs are found there."""
    arguments: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By tracker: more arguments of wandb.init or swanlab.init (`wandb: {mode: offline}`), mlflow's tracking_uri, or
    what a class of yours takes by keyword. Never secrets: the trackers read them from the environment (WANDB_API_KEY,
    MLFLOW_TRACKING_PASSWORD ...)."""
    rollouts_interval: Count = 1
    """Write every rollout of each n-th step to rollouts/STAGE-step-N.parquet. 0: none."""
    batches_interval: Count = 0
    """Write what each n-th step trained on, token by token, to batches/STAGE-step-N.parquet; null
    is what no model was asked of a rollout that was skipped. 0: none."""
    rollouts_dir: str | None = None
    """Folder of these rollouts. Default: `rollouts` in run_dir, which else is a link to it."""
    eval_dir: str | None = None
    """Folder of the replies of evaluations. Default: `eval` in run_dir, which else is a link to it."""
    rollouts_dump: str | None = None
    """Write these rollouts once more, for other programs: the path of a .jsonl or .parquet file with {step} in it, such
    as `dump/{step}.jsonl`; {stage} is the stage's name, and {source} makes a file for each source. Rows have input,
    output, gts, score, step, and the parts of the reward by their names. A file of that name is written over; a run
    that goes on deletes its own of later steps. Default: only in run_dir."""
    eval_dump: str | None = None
    """The same of the replies of evaluations; beside {source} the evaluation's numbers have a file, too,
    aggregated_results."""
    batches_dump: str | None = None
    """The same of the batches of batches_interval, a row for each rollout; without {source}."""
    micro_batches: bool = False
    """Write every micro-batch into timeline.json too. Default: phases, waits, and what the engines do in them."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of run.log; the console shows warnings only, at debug everything."""


class RewardWorkers(Section):
    """What keeps foreign code (rewards) from hurting a run."""

    count: Positive = 1
    """Reward processes at work at once. Each has one function; idle ones of others may stand beside them."""
    sandbox: Literal["builtin", "all"] = "builtin"
    """Which rewards run in a sandbox, where they can open no file but Python's own, write none, and start no program,
    process or connection: those built in, wherever the system can (Linux with Landlock and seccomp), or yours, too."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the reward processes, over those of the run. Values of names like API_KEY or TOKEN, and
    others of 8 characters or more that are no word, number or path, are written nowhere; best taken from the run's own
    environment: `JUDGE_KEY: "${oc.env:JUDGE_KEY}"`, which stays so in config.yaml."""
    timeout_s: Above0 = 10.0
    """Longest time for one reward call; then its process is killed and the rollout marked unscored."""
    memory_mb: Positive = 2048
    """Address space a reward process may add to what it starts with."""
    max_output_bytes: Positive = 65536
    """What a reward may print before the rest is dropped."""
    max_failure_rate: Fraction = 0.5
    """End the run when more than this share of a step's rollouts could not be scored; the cause is named."""


class Machine(Section):
    """What the run may use of this machine, and when it counts as hanging."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    threads: Positive | None = None
    """CPU threads of torch. Default: OMP_NUM_THREADS, else the cores this process may use."""
    logprob_parity: Literal["auto", "on", "off"] = "auto"
    """Sampled log-probs equal the trainer's bit for bit. auto: on CPU yes, and a self-test says whether it held;
    on: refuse to run if it does not hold."""
    kernels: Literal["auto", "torch", "compiled"] = "auto"
    """What computes between the matrix products on a CPU: compiled C where a compiler is at hand, or its PyTorch twins.
    The products themselves are compiled where they can be; with CC=none in the environment nothing is."""
    memory_mb: Positive | None = None
    """Most that a stage may take by the memory plan, on the device it trains on, or nothing is run. Default: what the
    machine has."""
    kv_cache_mb: Positive | None = None
    """Memory of the rollout engine's KV cache. Default: what max_num_seqs rows of full length need."""
    watchdog_timeout_s: Above0 = 3600.0
    """Seconds without anything got done (a token, a score, a micro-batch, a tensor or file read or written) after which
    this process counts as hanging: it writes all stacks into run.log and ends, and the same command goes on. Never
    before the longest of the run's own time-outs is over; longer than the largest file takes to be written or read."""
