"""verl's keys of actor, reference and rollout (`actor_rollout_ref`), in the order of its document."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, derived, engine, inert, mapped, translated
from whet.config.dialects.verl_algorithm import kl, loss
from whet.config.dialects.verl_layout import OF_REF, WRAPPED, fsdp, fsdp_like, sized
from whet.config.dialects.verl_loop import actor_optimizer, checkpoints, imports
from whet.config.dialects.verl_parts import (
    concurrency,
    dtype,
    model_path,
    nothing,
    overrides,
    sampling,
    trainable,
    validation,
)
from whet.config.dialects.verl_parts import engine as rollout_engine
from whet.config.dialects.verl_rules import (
    ACTOR,
    MODEL,
    REF,
    ROLLOUT,
    at_least,
    batches,
    check_parallel,
    cut,
    equal,
    hybrid,
    is_flag,
    is_one_of,
    offloaded,
    share,
    shuffling,
)

# ---------------------------------------------------------------- reasons that several keys share

BATCHES = (
    "In prompts, times n sequences. verl's rules for B, n, mini and micro batches and devices must hold."
)
CUT = "It changes memory, never a number. An older size over all devices is shared out over the ranks."
FORWARD = f"For all passes without gradient: the smallest that those of this file ask for. {CUT}"
STEPS = "In training steps, as there."
RAMP = "From s/W of the peak in step s (the first step moves nothing), as there."
DECAY = "Of all parameters, norms and biases too; with Megatron those are spared, as there."
IMPORTED = "A module, or a list; before the model is built and where rewards are computed."
OFFLOAD = "keeping parts of a run in CPU memory between phases; it changes no number, so both values pass"
TP = "Must fit verl's rules; the actor's layout serves all models."
NO_CODE = (
    "Code that comes with a model or a tokenizer is never run, whatever stands here; families are built in."
)
CACHE = "Over a step's rollouts at most; the embedded engine's cache is made for that many."
SAMPLED = (
    "top_k -1 and 0 are off. Logits are divided alike in training. do_sample=False: one greedy response."
)
VALIDATED = (
    "Read where val_kwargs.do_sample is true, as there; greedy replies are all the same, so one is made."
)
PACKED = "Nothing is ever padded here; sequence parallelism needs it in verl."
GRAPHS = (
    "The embedded engine chooses by itself: on a GPU CUDA graphs where a model allows it. No number changes."
)
SIZED = "The embedded engine sizes itself by max_num_seqs and the longest sequence."


def section(name: str) -> Key:
    """A key that only holds others."""
    return translated(name, nothing, default={}, reason="A section: its keys count, each for itself.")


def unstaged(name: str) -> Key:
    """Shared memory as a place for files on the way to a device."""
    return derived(
        name,
        is_flag(name),
        default=False,
        reason="Weights are read from their files by mapping them into memory, rows once: there is nothing to stage.",
    )


def own(name: str, what: str, *, default: bool = False) -> Key:
    """What the trainer does in one way always, which changes no number beyond rounding."""
    return derived(name, is_flag(name), default=default, reason=what)


KERNELS = "Kernels of others; whet's own are used whatever it says. They agree but for rounding."
FUSED = "Log-probs come fused out of the output layer, always; at most 64 MiB of logits are kept for the backward pass."
ENTROPY = "Entropy comes with the log-probs; beyond 64 MiB of logits in chunks, computed again for the backward pass."


def offload(name: str) -> Key:
    return coming(name, OFFLOAD, default=False, harmless=(True,))


def rests(name: str, what: str) -> Key:
    """What lies in the host's memory while it is not needed."""
    return translated(
        name, offloaded, "train.offload", default=False, reason=f"{what} Left out where there is no GPU."
    )


def cuts(at: str) -> tuple[Key, ...]:
    """How the passes without gradient of one role are cut."""
    sequences, forward = f"{at}.log_prob_micro_batch_size", "train.micro_rollouts_forward"
    return (
        translated(sequences, cut, forward, default=None, reason=FORWARD),
        translated(f"{sequences}_per_gpu", cut, forward, default=16, reason=FORWARD),
        translated(
            f"{at}.log_prob_use_dynamic_bsz",
            cut,
            "train.micro_tokens_forward",
            default=f"${{{ACTOR}.use_dynamic_bsz}}",
            reason=FORWARD,
        ),
        translated(
            f"{at}.log_prob_max_token_len_per_gpu",
            cut,
            "train.micro_tokens_forward",
            default=f"${{{ACTOR}.ppo_max_token_len_per_gpu}}",
            reason=FORWARD,
        ),
    )


def parallel(name: str, default: object) -> Key:
    return derived(name, check_parallel, default=default, reason=TP)


MODEL_KEYS: tuple[Key, ...] = (
    derived(
        "actor_rollout_ref.hybrid_engine",
        hybrid,
        default=True,
        reason="Rollouts and training share their devices, the only way of verl, too.",
    ),
    translated(
        f"{MODEL}.path",
        model_path,
        "model.path",
        default="~/models/deepseek-llm-7b-chat",
        reason="A Hugging Face folder on this machine, or a URL such as hdfs://.",
    ),
    translated(f"{MODEL}.external_lib", imports, "imports", default=None, reason=IMPORTED),
    translated(
        f"{MODEL}.external_libs",
        imports,
        "imports",
        default=None,
        reason="The document's misspelling of external_lib; both count.",
    ),
    translated(
        f"{MODEL}.override_config",
        nothing,
        "model.overrides",
        default={},
        reason="Flat fields and those of model_config count alike.",
    ),
    translated(
        f"{MODEL}.override_config.model_config",
        overrides,
        "model.overrides",
        default={},
        reason="Fields of the model's config.json.",
    ),
    section(f"{MODEL}.override_config.moe_config"),
    translated(
        f"{MODEL}.override_config.moe_config.freeze_moe_router",
        trainable,
        "train.trainable",
        default=False,
        reason="The routers of a mixture of experts; on a model without any it is refused.",
    ),
    mapped(f"{MODEL}.enable_gradient_checkpointing", "train.gradient_checkpointing", default=False),
    rests(
        f"{MODEL}.enable_activation_offload", "What layers keep for the backward pass, of policy and critic."
    ),
    inert(f"{MODEL}.trust_remote_code", NO_CODE, default=False, harmless=(True,)),
    derived(f"{MODEL}.use_remove_padding", check_parallel, default=False, reason=PACKED),
)

ACTOR_KEYS: tuple[Key, ...] = (
    translated(
        f"{ACTOR}.strategy",
        actor_optimizer,
        "train.optimizer.schedule.kind",
        default="fsdp",
        reason="whet's own trainer stands in; megatron says that `optim` is Megatron's (decay to min_lr).",
    ),
    translated(f"{ACTOR}.ppo_mini_batch_size", batches, "train.minibatches", default=256, reason=BATCHES),
    translated(f"{ACTOR}.ppo_micro_batch_size", cut, "train.micro_rollouts", default=None, reason=CUT),
    translated(f"{ACTOR}.ppo_micro_batch_size_per_gpu", cut, "train.micro_rollouts", default=8, reason=CUT),
    translated(f"{ACTOR}.use_dynamic_bsz", cut, "train.micro_tokens", default=False, reason=CUT),
    translated(f"{ACTOR}.ppo_max_token_len_per_gpu", cut, "train.micro_tokens", default=16384, reason=CUT),
    translated(
        f"{ACTOR}.grad_clip",
        actor_optimizer,
        "train.optimizer.grad_clip",
        default=1.0,
        reason="Megatron's optim.clip_grad stands over it with strategy=megatron.",
    ),
    translated(
        f"{ACTOR}.clip_ratio",
        loss,
        "algorithm.clip_low",
        "algorithm.clip_high",
        default=0.2,
        reason="Both sides, unless clip_ratio_low or _high is given; verl ignores it then and now. Read by the losses "
        "with a clip; the dual clip (3.0) of vanilla is always on, as there.",
    ),
    mapped(
        f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef", default=0.0, reason="0.001 in the older document."
    ),
    translated(
        f"{ACTOR}.use_kl_loss",
        kl,
        "algorithm.kl.coef",
        default=False,
        reason="May stand beside algorithm.use_kl_in_reward, as in verl's code.",
    ),
    inert(
        f"{ACTOR}.use_torch_compile",
        "Kernels are whet's own; compiled or not, results are meant to agree.",
        default=True,
        harmless=(False,),
    ),
    translated(
        f"{ACTOR}.kl_loss_coef",
        kl,
        "algorithm.kl.coef",
        default=0.001,
        reason="Read with use_kl_loss, as there.",
    ),
    translated(
        f"{ACTOR}.kl_loss_type",
        kl,
        "algorithm.kl.estimator",
        default="low_var_kl",
        reason="kl is k1, mse k2, k3 the bounded low_var_kl; with + (newer verl) the gradient of k2; full is exact.",
    ),
    translated(f"{ACTOR}.ppo_epochs", batches, "train.passes", default=1, reason=BATCHES),
    derived(
        f"{ACTOR}.data_loader_seed",
        at_least(f"{ACTOR}.data_loader_seed", 0),
        default=None,
        reason="Must be given with shuffle, as there; every random number follows from the run's seed here.",
    ),
    translated(
        f"{ACTOR}.shuffle",
        shuffling,
        "train.shuffle_passes",
        default=False,
        reason="Of whole groups, by the run's seed, for policy and critic alike. verl's FSDP trainer ignores it.",
    ),
    sized(
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "cp",
        default=1,
        reason="Of all models, as the actor's.",
    ),
    section(f"{ACTOR}.optim"),
    mapped(f"{ACTOR}.optim.lr", "train.optimizer.lr", default=1e-6),
    translated(
        f"{ACTOR}.optim.lr_warmup_steps",
        actor_optimizer,
        "train.optimizer.schedule.warmup_steps",
        default=-1,
        reason=f"{STEPS} {RAMP}",
    ),
    translated(
        f"{ACTOR}.optim.lr_warmup_steps_ratio",
        actor_optimizer,
        "train.optimizer.schedule.warmup_fraction",
        default=0.0,
        reason=f"Where lr_warmup_steps is negative. {RAMP}",
    ),
    translated(
        f"{ACTOR}.optim.min_lr_ratio",
        actor_optimizer,
        "train.optimizer.schedule.min_factor",
        default=0.0,
        reason="Read by cosine alone, as there; null is 0. The warm-up starts at it, too.",
    ),
    translated(
        f"{ACTOR}.optim.num_cycles",
        actor_optimizer,
        "train.optimizer.schedule.cycles",
        default=0.5,
        reason="Read by cosine alone, as there.",
    ),
    translated(
        f"{ACTOR}.optim.warmup_style",
        actor_optimizer,
        "train.optimizer.schedule.kind",
        default="constant",
        reason="Of the time after the warm-up.",
    ),
    derived(
        f"{ACTOR}.optim.total_training_steps",
        at_least(f"{ACTOR}.optim.total_training_steps", -1),
        default=-1,
        reason="verl's trainer writes it, over any value; it follows from the run's length here, too.",
    ),
    section(f"{ACTOR}.fsdp_config"),
    section(f"{ACTOR}.fsdp_config.wrap_policy"),
    WRAPPED,
    fsdp("wrap_policy.min_num_params"),
    rests(f"{ACTOR}.fsdp_config.param_offload", "The policy's weights, where several devices train."),
    rests(
        f"{ACTOR}.fsdp_config.grad_offload", "With param_offload, as its gradients are where the weights are."
    ),
    rests(f"{ACTOR}.fsdp_config.optimizer_offload", "Moments and master weights, of policy and critic."),
    sized(
        f"{ACTOR}.fsdp_config.fsdp_size",
        "dp_shard",
        "dp_replicate",
        default=-1,
        reason="Devices that share one copy; -1: all.",
    ),
    section(f"{ACTOR}.checkpoint"),
    translated(
        f"{ACTOR}.checkpoint.save_contents",
        checkpoints,
        "checkpoint.contents",
        "checkpoint.export",
        "checkpoint.export_every",
        default=["model", "optimizer", "extra"],
        reason="What is not in it is not saved; extra always is. hf_model: an export beside each checkpoint.",
    ),
    translated(
        f"{ACTOR}.checkpoint.load_contents",
        checkpoints,
        "checkpoint.load",
        default=f"${{{ACTOR}.checkpoint.save_contents}}",
        reason="model, or model and optimizer; without extra is coming.",
    ),
    translated(
        f"{ACTOR}.checkpoint.contents",
        checkpoints,
        "checkpoint.contents",
        "checkpoint.load",
        default=None,
        reason="The older name of save_contents and load_contents together; it must not contradict them.",
    ),
)

REF_KEYS: tuple[Key, ...] = (
    section(REF),
    rests(f"{REF}.fsdp_config.param_offload", "Read where there is a KL to the reference."),
    *fsdp_like(OF_REF),
    *cuts(REF),
    parallel(f"{REF}.ulysses_sequence_parallel_size", f"${{{ACTOR}.ulysses_sequence_parallel_size}}"),
)

_LENGTHS = "the engine's lengths are the data's"
_FORMATS = (
    "auto",
    "megatron",
    "dtensor",
    "hf",
    "dummy",
    "dummy_hf",
    "dummy_megatron",
    "dummy_dtensor",
    "safetensors",
)

ROLLOUT_KEYS: tuple[Key, ...] = (
    translated(
        f"{ROLLOUT}.name",
        rollout_engine,
        "rollout.engine",
        default="vllm",
        reason="The embedded engine stands in for vllm, sglang and hf.",
    ),
    *(
        translated(f"{ROLLOUT}.{key}", sampling, f"rollout.sampling.{key}", default=default, reason=SAMPLED)
        for key, default in (("temperature", 1.0), ("top_k", -1), ("top_p", 1))
    ),
    derived(
        f"{ROLLOUT}.prompt_length",
        equal(f"{ROLLOUT}.prompt_length", "data.max_prompt_length", _LENGTHS),
        default="${data.max_prompt_length}",
        reason="Must equal data.max_prompt_length.",
    ),
    derived(
        f"{ROLLOUT}.response_length",
        equal(f"{ROLLOUT}.response_length", "data.max_response_length", _LENGTHS),
        default="${data.max_response_length}",
        reason="Must equal data.max_response_length.",
    ),
    translated(
        f"{ROLLOUT}.dtype",
        dtype,
        "model.dtype",
        default="bfloat16",
        reason="The engine reads the trainer's own weights. bfloat16 leaves the choice to the device.",
    ),
    derived(
        f"{ROLLOUT}.gpu_memory_utilization",
        share(f"{ROLLOUT}.gpu_memory_utilization"),
        default=0.5,
        reason=SIZED,
    ),
    mapped(
        f"{ROLLOUT}.ignore_eos",
        "rollout.sampling.ignore_eos",
        default=False,
        reason="All tokens sampled count; verl's mask ends at the first end token.",
    ),
    derived(
        f"{ROLLOUT}.enforce_eager",
        is_flag(f"{ROLLOUT}.enforce_eager"),
        default=True,
        reason=GRAPHS,
    ),
    inert(
        f"{ROLLOUT}.free_cache_engine",
        "The cache shares memory with training in one process.",
        default=True,
        harmless=(False,),
    ),
    derived(
        f"{ROLLOUT}.load_format",
        is_one_of(f"{ROLLOUT}.load_format", *_FORMATS),
        default="dummy_dtensor",
        reason="The engine reads the trainer's own weights: nothing is loaded twice, whatever the format.",
    ),
    sized(
        f"{ROLLOUT}.tensor_model_parallel_size",
        "engines",
        default=2,
        reason="All devices / it: the engines, each of them whole on one device here.",
    ),
    derived(
        f"{ROLLOUT}.max_num_batched_tokens",
        at_least(f"{ROLLOUT}.max_num_batched_tokens", 1),
        default=8192,
        reason=SIZED,
    ),
    translated(f"{ROLLOUT}.max_num_seqs", concurrency, "rollout.max_batch", default=1024, reason=CACHE),
    *cuts(ROLLOUT),
    translated(
        f"{ROLLOUT}.do_sample",
        sampling,
        "rollout.sampling.temperature",
        "rollout.group_size",
        default=True,
        reason=SAMPLED,
    ),
    section(f"{ROLLOUT}.engine_kwargs"),
    engine(
        f"{ROLLOUT}.engine_kwargs.swap_space",
        "vllm",
        default=None,
        reason="vLLM's swap space, the older spelling.",
    ),
    section(f"{ROLLOUT}.engine_kwargs.vllm"),
    engine(
        f"{ROLLOUT}.engine_kwargs.vllm.swap_space", "vllm", default=None, reason="GiB of CPU memory for vLLM."
    ),
    section(f"{ROLLOUT}.engine_kwargs.sglang"),
    engine(
        f"{ROLLOUT}.engine_kwargs.sglang.attention_backend",
        "sglang",
        default=None,
        reason="SGLang's kernels.",
    ),
    translated(
        f"{ROLLOUT}.n",
        sampling,
        "rollout.group_size",
        default=1,
        reason="A group of one has no baseline: its advantage is the score itself, as there.",
    ),
    section(f"{ROLLOUT}.val_kwargs"),
    *(
        translated(f"{ROLLOUT}.val_kwargs.{key}", validation, native, default=default, reason=VALIDATED)
        for key, native, default in (
            ("top_k", "eval.sampling.top_k", -1),
            ("top_p", "eval.sampling.top_p", 1.0),
            ("temperature", "eval.sampling.temperature", 0),
            ("n", "eval.samples", 1),
            ("do_sample", "eval.sampling.temperature", False),
        )
    ),
)

POLICY: tuple[Key, ...] = (*MODEL_KEYS, *ACTOR_KEYS, *REF_KEYS, *ROLLOUT_KEYS)
