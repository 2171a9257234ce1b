"""Sections about the run itself: checkpoints, records, limits, the machine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from whet.config.sections.base import Above0, Count, Fraction, Interval, Place, Positive, Section
from whet.config.sections.train import EvalMetricConfig


class BestConfig(EvalMetricConfig):
    """Selection of checkpoints by evaluation. A checkpoint is written in every step whose evaluation is among the best
    so far, and is kept while it is among the best. Of equal values the earlier one wins."""

    count: Positive = 1
    """Number of best checkpoints to keep, in addition to the newest ones."""


class CheckpointConfig(Section):
    """Saving and resuming of the whole run, bit for bit."""

    interval: Interval = 50
    """Steps between checkpoints (verl: save_freq; TRL: save_steps), `4 steps from 3` (the first after step 3), `1
    epoch` of the training data (a checkpoint is written in the step that completes it), or a list of these. 0: only at
    the end and on Ctrl-C. A run that is killed repeats the steps since its last checkpoint."""
    keep: Positive | None = 2
    """Number of newest checkpoints to keep. (verl: max_actor_ckpt_to_keep; TRL: save_total_limit) null: all."""
    keep_best: BestConfig | None = None
    """Also keep the checkpoints of the best evaluations. null: none."""
    async_save: bool = False
    """Write checkpoints in the background while the next steps run: the state is copied first, so memory holds it twice
    meanwhile. The next save waits until the last one is on disk; an error of a save is raised at the next save, or at
    the end."""
    sharded: bool = False
    """With train.parallel: every rank writes its own shards in parallel, and reads the shards it needs, so no process
    has to hold the whole model. false: the shards are gathered and one rank writes whole files. A run with any layout
    can resume from either form."""
    resume: Place = "auto"
    """auto: resume the run in run_dir, if there is one; never: refuse a run_dir that holds a run; fresh: move the
    existing files aside and start a new run; or the path or URL of a checkpoint."""
    save_contents: tuple[Literal["model", "optimizer"], ...] = ("model", "optimizer")
    """Contents of a checkpoint, in addition to the position of the run (step, data, schedule, buffer), which is always
    saved. model includes float32 master weights. Without the optimizer's moments a checkpoint takes about a third of
    the space (float32) to less than half (bfloat16), and a run can resume from it only with load_contents=[model]."""
    load_contents: tuple[Literal["model", "optimizer"], ...] = ("model", "optimizer")
    """Contents to read on resume. [model]: the moments of the optimizer start at zero, its schedule continues; the run
    is then not bit for bit the uninterrupted run."""
    export: bool = True
    """Write a Hugging Face folder `export/STAGE` at the end of each stage."""
    export_interval: Interval = 0
    """Steps between further exports, to `export/STAGE-step-N`, or what `interval` takes beside them; all are kept.
    0: none."""
    export_as: Literal["merged", "adapter"] = "merged"
    """With model.lora: export the whole model with the adapters merged into its weights, or only the adapters, in the
    format of peft."""
    upload_to: tuple[str, ...] = ()
    """URLs to which checkpoints are copied in the background, each as a separate folder: s3://BUCKET/PATH, gs://,
    hdfs://, hf://ORG/NAME, or file:///PATH of a mounted drive. A run waits for the copies only at its end; a failed
    copy is logged and retried with the next one. Each run needs its own URL: what another run has copied there is not
    replaced."""
    upload_exports_to: tuple[str, ...] = ()
    """URLs to which exports are copied. On the hub (hf://ORG/NAME) each export is a commit at the root of the
    repository, so that `from_pretrained` reads the newest one."""
    upload: Literal["all", "last"] | Positive = "all"
    """all: copy every checkpoint and export when it is written; last: only the last one, at the end of the run. A
    number: copy every one, and keep so many of the newest checkpoints at upload_to, in addition to those of the best
    evaluations. A run removes only copies that it made itself (uploads.json), and only after a later checkpoint has
    been copied."""


class TrackConfig(Section):
    """Metrics and records."""

    trackers: tuple[str, ...] = ("console", "jsonl")
    """Destinations of metrics: console, jsonl, tensorboard, wandb, mlflow, swanlab, trackio, or your own
    class as 'package.module:Class'. (verl: trainer.logger) jsonl is always written; console is the live display. wandb,
    mlflow, swanlab and trackio are separate packages and may send metrics and the config to a server. A call of a
    tracker has 300 seconds: the run does not start with one that takes longer, and goes on without it later."""
    project: str = "whet"
    """Project (W&B, SwanLab, trackio) or experiment (MLflow) that lists the run, under its `name`."""
    group: str | None = None
    """Group of the run in the tracker; runs of one group are listed together. null: none."""
    tags: tuple[str, ...] = ()
    """Tags of the run in the tracker."""
    arguments: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Further arguments by tracker: of wandb.init, swanlab.init or trackio.init (`wandb: {mode: offline}`), the
    tracking_uri of mlflow, or keyword arguments of your own class. Never put secrets here: the trackers read them from
    the environment (WANDB_API_KEY, MLFLOW_TRACKING_PASSWORD ...)."""
    rollouts_interval: Count = 1
    """Steps between records of rollouts: every rollout of each n-th step is written to rollouts/STAGE-step-N.parquet.
    0: none."""
    batches_interval: Count = 0
    """Steps between records of batches: the batch of each n-th step is written to batches/STAGE-step-N.parquet, token
    by token, with the trainer's log-probs before the step and the terms of the loss in each update epoch; these take
    further forward passes in such a step. A value that no model computed, because the rollout was skipped, is null. 0:
    none."""
    log_samples: Count = 0
    """Number of rollouts of each recorded step (rollouts_interval) that are logged to trackers that show text:
    tensorboard, wandb, mlflow, swanlab and trackio, or a class of yours with the method show_rollouts. The seed selects
    them. 0: none (rollouts/*.parquet has every rollout anyway)."""
    dump: dict[Literal["rollouts", "eval", "batches", "replies"], str] = Field(default_factory=dict)
    """Second copies of records for other programs: {rollouts: "dump/{step}.jsonl"}, the path of a .jsonl or .parquet
    file that contains {step}; {stage} is the name of the stage, and {source} makes one file per source. rollouts: those
    of rollouts_interval, in rows of input, output, gts, score, step, and the parts of the reward by their names. eval:
    the replies of evaluations; with {source} the metrics have a file too, aggregated_results. batches: those of
    batches_interval, one row per rollout, without {source}. An existing file of that name is overwritten; a resumed run
    deletes its own files of later steps. replies: what `whet generate` writes, the rows of data.eval with replies to
    them; one file, without {step}."""
    micro_batches: bool = False
    """Write every micro-batch into timeline.json too. Default: phases, waits, and the work of the engines in them."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of run.log; the console shows only warnings, at debug everything."""


class ProfileConfig(Section):
    """Profiles of single training steps: operators, kernels, memory. Only the profiled steps become slower; the times
    of all steps are in timeline.json."""

    steps: tuple[Positive, ...] = ()
    """Training steps of each stage to profile, counted from 1; consecutive steps share one trace. []: none."""
    warmup: Count = 1
    """Steps before a profiled window in which the profiler of torch already runs and its records are discarded, because
    its start takes time."""
    tools: tuple[Literal["torch", "memory", "nsys"], ...] = ("torch",)
    """torch: a trace for ui.perfetto.dev; memory: a snapshot of the CUDA allocator with its history, for
    pytorch.org/memory_viz; nsys: named ranges between cudaProfilerStart and cudaProfilerStop, for a run under `nsys
    profile --capture-range=cudaProfilerApi`. memory and nsys need CUDA."""
    ranks: tuple[Count, ...] = (0,)
    """With train.parallel: the ranks to profile, in addition to the process that samples; each writes its own files,
    STAGE-rank-N-step-000012."""
    torch: tuple[Literal["record_shapes", "with_stack", "profile_memory"], ...] = ()
    """Options of torch's profiler that are on. record_shapes: the shapes of every operator's inputs; with_stack: Python
    call stacks, traces become several times larger; profile_memory: every allocation."""


class RewardWorkersConfig(Section):
    """Processes that run reward code, and their limits."""

    count: Positive = 1
    """Number of reward processes that work at once. Each process serves one function; idle processes of other functions
    may exist in addition. Raise it where steps wait for rewards and there are cores left."""
    sandbox: Literal["builtin", "all"] = "builtin"
    """Rewards that run in a sandbox, where they can open no file except Python's own, write none, and start no program,
    process or connection. builtin: the built-in rewards, where the system supports it (Linux with Landlock and
    seccomp), without sandbox_fusion, judge and ruler, which only ask their servers, and code, which gives each program
    a sandbox; all: your own rewards too."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the reward processes, which override those of the run. Secrets are never written to any
    file: values of names like API_KEY or TOKEN, and other values of 8 characters or more that are not a word, number or
    path. Best take a secret from the environment of the run: `JUDGE_KEY: "${oc.env:JUDGE_KEY}"`; config.yaml keeps this
    reference. Each process computes with one thread, unless OMP_NUM_THREADS and MKL_NUM_THREADS say here otherwise; a
    torch that is imported with the function always does, since no threads survive the fork of a process."""
    timeout_s: Above0 = 10.0
    """Longest time of one call of one reward, in seconds; after it the process is killed and the rollout is marked
    unscored: it is counted and not trained on."""
    memory_mb: Positive = 2048
    """Address space, in MiB, that a reward process may use in addition to its size at the start."""
    max_failure_rate: Fraction = 0.5
    """Highest share of unscored rollouts in a step or an evaluation, those included that failed before they were
    scored; above it the run ends and names the cause. 1: no limit."""


class MachineConfig(Section):
    """Resources of this machine that the run may use, and the limit of the watchdog."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What models compute on. auto: CUDA where it is available, else the CPU."""
    threads: Positive | None = None
    """CPU threads of torch. Default: OMP_NUM_THREADS, else the number of cores that this process may use."""
    logprob_parity: Literal["auto", "on", "off"] = "auto"
    """Sampled log-probs equal the trainer's bit for bit (rollout.engine=native, in one process), so that old log-probs
    need not be computed again. auto: a self-test at the start reports whether it holds, and the run continues if not;
    on: the run refuses to start if it does not hold; off: no self-test, and matrix products on a CPU may round
    differently with the number of rows."""
    kernels: Literal["auto", "torch", "compiled"] = "auto"
    """Kernels between the matrix products on a CPU: compiled C where a compiler is available, or the PyTorch fallback.
    The matrix products themselves are compiled where possible; with CC=none in the environment nothing is compiled.
    compiled: the run does not start where they cannot be, and products in half precision are whet's own even where
    the CPU multiplies the dtype itself (AVX512_BF16): their bits are then those of every x86 CPU, in twice the time. On
    an NVIDIA GPU kernels are Triton's, with torch PyTorch's operations."""
    memory_mb: Positive | None = None
    """Memory limit of a stage on the device it trains on, in MiB: if the memory plan of a stage exceeds it, the run
    does not start. Default: the memory of the GPU, or, on a CPU, of the machine."""
    kv_cache_mb: Positive | None = None
    """Memory of the KV cache of the native rollout engine, in MiB. With less than the default fewer rollouts are
    decoded at once, where they are long. Default: the size for rollout.max_num_seqs rollouts of full length."""
    watchdog_timeout_s: Above0 = 3600.0
    """Seconds without progress (a token, a score, a micro-batch, a tensor or file read or written) after which this
    process counts as hanging: it writes all stacks into run.log and ends, and the same command resumes the run. The
    watchdog always waits for the longest timeout of the run; choose more than the time to read or write the largest
    file."""
