"""Sections about sampling from the policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from whet.config.sections.base import Above0, Count, Fraction, NonNegative, Positive, Section
from whet.config.sections.server import ServerConfig

TOOLS = "whet.envs.tool_env:tools"
"""The environment that runs tool calls."""
TOOL_TIMEOUT_S = 30.0
"""Longest time of a call of a tool, where the arguments of TOOLS give none."""

Quantization = Literal["float8", "int8", "mxfp4"]


class SamplingConfig(Section):
    """Sampling parameters."""

    temperature: NonNegative = 1.0
    """Divisor of the logits; the trainer uses the same divisor, so sampling and training have the same distribution. 0:
    greedy, in training only with group_size 1."""
    top_k: Count = 0
    """Sample from the k most likely tokens. 0: off (a filter makes rollouts off-policy). (verl, vLLM: -1 is off)"""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this total probability. 1: off."""
    min_p: Fraction = 0.0
    """Sample from tokens with at least this fraction of the probability of the most likely token. 0: off."""
    repetition_penalty: Above0 = 1.0
    """Divisor of the logits of tokens that occurred before; negative logits are multiplied (arXiv:1909.05858). 1:
    off."""
    max_tokens: Positive = 256
    """Longest reply, in tokens; with rollout.env all replies of a rollout together, unless max_tokens_per=turn. (verl:
    max_response_length; TRL: max_completion_length)"""
    min_tokens: Count = 0
    """Minimum length of a reply, in tokens: no end token is sampled before, and a stop string that is complete before
    does not end the reply."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a reply; the reply includes them. Control tokens are not in its text: name these in
    stop_token_ids."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a reply, in addition to the end tokens of the model."""
    ignore_eos: bool = False
    """Continue to max_tokens, also after an end token; not with `stop` or `stop_token_ids`. For measurements of
    speed."""


class EnvironmentConfig(Section):
    """An environment that answers the replies of the policy, so that a rollout has several turns."""

    make: str
    """'package.module:name' or 'path/to/file.py:name': called once for each rollout as make(task, **arguments) or
    make(task, world, **arguments). It returns an object with the methods of whet.envs.env.Env. It runs in host
    processes, without a sandbox."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of make, by name."""
    max_turns: Positive = 8
    """Maximum number of replies of the policy in one rollout."""
    max_cost: Above0 | None = None
    """Cost limit of a rollout: it ends after the turn in which the sum of the part `cost` of its environment's answers
    (`EnvStep.parts`, or whet.envs.tools.Priced of a tool) reaches this, in the unit of that part. null: no limit."""
    max_tokens_per: Literal["rollout", "turn"] = "rollout"
    """What sampling.max_tokens limits. rollout: the tokens of all replies of a rollout together. turn: those of each
    reply; a reply that is cut there is answered by the environment like any other. (SkyRL: max_generate_length)"""
    observation_tokens: Positive = 1024
    """Maximum number of tokens of the environment in one rollout, in addition to max_prompt_tokens and max_tokens; a
    rollout whose next messages would exceed it ends with the stop reason observations."""
    tokens_after_prompt: Positive | None = None
    """Maximum number of tokens after the prompt, sampled tokens and those of the environment together; the descriptions
    of the tools belong to the prompt. null: no further limit. (verl: max_response_length)"""
    input_tokens: Positive | None = None
    """Maximum length of the context of a reply, in tokens, prompt included; a rollout whose next reply would have a
    longer one ends with the stop reason context. null: no further limit. (SkyRL: max_input_length)"""
    history: Literal["append", "template", "inline"] = "append"
    """append: earlier tokens never change, and new messages are appended, even where the chat template would drop
    earlier thoughts. template: each reply follows the conversation as the template renders it, as a server does; where
    that changes earlier tokens, a new strand of the rollout begins. inline: the messages of the environment continue
    the reply as plain text, without the template; replies then end by sampling.stop, such as </search>. In each case
    every sampled token is trained once, with the context from which it was sampled."""
    tool_format: Literal[
        "auto", "hermes", "qwen3_coder", "seed", "llama3", "mistral", "mistral_v11", "gpt_oss", "glm", "deepseek_v3",
        "deepseek", "kimi", "minimax", "deepseek_v32", "deepseek_v4", "hunyuan", "nemotron", "granite", "functools",
        "cohere", "json",
    ] = "auto"  # fmt: skip
    """How replies call tools. auto: the format of the chat template. A reply whose calls cannot be parsed counts as
    malformed, never as text. (verl: multi_turn.format; vLLM: tool_call_parser)"""
    timeout_s: Above0 = 60.0
    """Longest time of one call of the environment, in seconds, without its waits for replies of the policy; after it
    the rollout fails. The calls that make it and ask for its first messages do not count for `rollout.timeout_s`."""
    hosts: Positive = 1
    """Number of host processes. Each plays many rollouts at once; a plain (not async) environment has a thread for each
    of them. More hosts use more cores where environments compute."""
    memory_mb: Positive | None = None
    """Address space, in MiB, that a host may use in addition to its size at the start. null: no limit."""


class RolloutConfig(Section):
    """Rollouts: how replies are sampled from the policy."""

    engine: str = "native"
    """What samples. native: embedded, continuous batching, the trainer's weights by reference. hf: transformers, slow.
    vllm, sglang: servers in processes of their own, over HTTP (`server`). openai: any server with OpenAI's interface
    that returns token ids; it takes no weights, so for `whet eval`, `whet generate` and train.engine=simulated alone.
    Or your own: 'package.module:name' or 'path/to/file.py:name', called with whet.rollout.engine.EngineInputs."""
    server: ServerConfig = Field(default_factory=ServerConfig)
    """The servers of engine=vllm, sglang and openai."""
    replicas: Count = 0
    """Number of engine replicas, each in a separate process with its own copy of the weights, by Ray (see `cluster`).
    0: one engine in the process of the trainer, on the weights of the trainer."""
    quantization: Quantization | None = None
    """Sample from a copy of the weights in 8 bits (mxfp4: 4), which is made at every weight sync; training uses the
    original weights. Each row of a matrix, and the activations of each token, are scaled by their largest absolute
    value. Embedding, norms, routers, output layer, biases, KV cache and matrices with a side that is not divisible by
    16 keep their dtype. float8 (e4m3): for GPUs of compute capability 8.9 (L4, H100 ...); on a CPU it works, but is
    many times slower. int8: for GPUs of 7.5 and for CPUs, where large matrices are faster than in float32. mxfp4: the
    matrices of experts alone, in 4 bits with a power of two for each 32 inputs; activations are not rounded.
    Evaluations also use this copy. Sampled and trained log-probs differ (train/mismatch_*), so old log-probs are
    recomputed; consider algorithm.correction."""
    group_size: Positive = 8
    """Rollouts of one task, which form a group. (verl: rollout.n; TRL: num_generations) A step has this many times
    train.tasks_per_step."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling in training. Evaluation takes its limits, but decodes greedily: eval.sampling."""
    sources: dict[str, SamplingConfig] = Field(default_factory=dict)
    """Sampling of single sources in training, by their name or label, merged key by key over `sampling`; max_tokens is
    at most that of all. The trainer divides the logits of a rollout by its own temperature, unless train.temperature is
    given. Evaluation: `eval.sources`."""
    env: EnvironmentConfig | None = None
    """The environment of all tasks. null: a rollout is one reply to its prompt."""
    max_num_seqs: Positive = 256
    """Maximum number of rollouts that an engine (each replica, each server) decodes at once; others wait. More are
    faster until the device is busy, and take more memory: the KV cache has room for as many rollouts of full length,
    unless machine.kv_cache_mb limits it. (vLLM: --max-num-seqs; SGLang: --max-running-requests)"""
    sync_interval: Positive = 1
    """Steps between weight syncs. (Trinity: sync_interval) With more than 1, rollouts come from a policy up to
    sync_interval - 1 versions old, so consider algorithm.correction. An evaluation always uses the current weights."""
    max_staleness: Count = 0
    """Number of steps that sampling may be ahead of training. (AReaL: max_head_offpolicyness) 0: synchronous, each step
    is sampled with its own weights. More: while a step is trained, the rollouts of up to this many later steps are
    sampled, by a policy up to this many versions older (plus sync_interval - 1), so consider algorithm.correction. With
    mode=both a second copy of the weights is kept."""
    schedule: Literal["deterministic", "async"] = "deterministic"
    """deterministic: the step alone determines which weights sample which task, so the run is the same on every
    machine, after every resume and with explorers in separate processes; a step waits for its slowest rollout. async:
    every task is requested as soon as a slot is free, and a step takes the groups that finish first; rollouts that
    would be older than max_staleness are dropped and counted."""
    partial_rollout: bool = True
    """schedule=async: at a weight sync, rollouts in flight continue under the new weights, each token with its version.
    false: rollouts in flight first finish under the old weights, with all their turns."""
    spare_tasks: Count = 0
    """schedule=async: number of tasks requested in addition to those of the steps, so that no step waits for the last
    rollouts. More keep engines busy, and rollouts get older."""
    retries: Count = 0
    """How often a rollout that failed (an error or a timeout) is sampled again before it counts as failed: it then has
    no reward and is not trained on."""
    timeout_s: Above0 = 600.0
    """Longest time of one rollout, in seconds, with all its turns and its wait for a place in the engine
    (max_num_seqs). A longer one is retried (`retries`) or counts as failed, and run.log gives the reason."""
    timeout_factor: Above0 | None = None
    """Second limit on the time of a rollout: this factor times the mean time of the finished rollouts, once there are
    8. null: timeout_s alone."""
