"""The stages of a run, one after the other: each is built from its config, resumed, run, exported."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from whet.algos.recipes import Algorithm
from whet.algos.recipes import build as build_algorithm
from whet.buffer.buffer import Buffer
from whet.config.checks import GROUP_BASELINES
from whet.config.load import Loaded
from whet.config.plan import Plan, dtype_on
from whet.config.plan import plan as make_plan
from whet.config.recipes import Resolved
from whet.config.schema import Config
from whet.data.tasks import TaskStream, demonstration, eval_tasks, preference_pair, texts
from whet.data.tokenizer import load_tokenizer
from whet.guard.ledger import Ledger
from whet.guard.watch import Watch
from whet.loop import steps
from whet.models import kernels
from whet.models.exact import self_test
from whet.models.forward import decoder
from whet.models.load import build as build_model
from whet.models.load import export, value_head
from whet.rewards.combine import RewardSet
from whet.rollout.engine import RolloutEngine
from whet.rollout.episode import play_groups, to_sampling
from whet.rollout.hf import HfEngine
from whet.rollout.native.engine import NativeEngine
from whet.run import Run, StopFlag
from whet.sync.weights import sync
from whet.track.display import Display
from whet.track.record import RunDirectory
from whet.track.trackers import Tracker, open_trackers
from whet.training.torch import Cut, TorchEngine
from whet.types import CheckpointError, ConfigError, Group, Json, Sampling, Task

log = logging.getLogger(__name__)

FREE_KEYS: Any = {"run_dir": True, "name": True, "checkpoint": True, "track": True, "guard": {"workers"}}
"""Keys that may change between a checkpoint and the run that goes on from it; they touch no number."""


@dataclass
class Shared:
    """What lives through all stages of a run."""

    loaded: Loaded
    plans: Sequence[Plan]
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    ops: kernels.Ops
    exact: bool
    engine: RolloutEngine | None
    """None: no stage ever samples."""
    rewards: Sequence[RewardSet]
    """One for each stage."""
    directory: RunDirectory
    trackers: Sequence[Tracker]
    display: Display
    stop: StopFlag
    watch: Watch
    version: int = 0


async def run_all(shared: Shared, start: Path | None, state: Json) -> None:
    """Every stage from the checkpoint `start` (None: from the beginning) to the end, or until asked to stop.

    state: what `checkpoint.read_state` found in `start`.
    """
    try:
        for index in range(state["stage"] if start else 0, len(shared.loaded.stages)):
            await run_stage(shared, index, start=start, state=state)
            start = None
            if shared.stop.requested:
                return
    finally:
        if shared.engine is not None:
            await shared.engine.close()


async def run_stage(shared: Shared, index: int, *, start: Path | None, state: Json) -> None:
    """One stage, from its beginning or from a checkpoint; its models and optimizers end with it."""
    run = open_stage(shared, index)
    if start is not None:
        run.restore(start, state)
    shared.display.stage(index, done=run.step, steps=run.plan.steps)
    await run.wait(sync(run.policy, run.engine), "the first weight sync")
    async for _ in steps(run):
        pass
    shared.version, shared.exact = run.policy.version, run.exact
    if run.cfg.checkpoint.export and not shared.stop.requested:
        with run.phase("export"):
            export(shared.model, shared.tokenizer, shared.directory.path / "export" / run.name)


# ---------------------------------------------------------------- what all stages share


def open_shared(
    loaded: Loaded,
    plans: Sequence[Plan],
    *,
    rewards: Sequence[RewardSet],
    directory: RunDirectory,
    display: Display,
    stop: StopFlag,
    watch: Watch,
    resumed: tuple[int, int] | None,
) -> Shared:
    """Tokenizer, model, kernels, engine. The self-test says whether sampling and training agree to the bit."""
    cfg = loaded.config
    device = pick_device(cfg)
    torch.set_num_threads(plans[0].threads)
    torch.use_deterministic_algorithms(device.type == "cpu")
    # or every new tensor would be written once more
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    display.phase("read data")
    sources = [s for c in loaded.stages for s in (*c.data.train, *c.data.eval)]
    tokenizer = load_tokenizer(cfg.tokenizer, model_path=cfg.model.path, texts=texts(sources))
    display.phase("load model")
    model = build_model(
        cfg.model,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=cfg.seed,
        device=device,
        dtype=getattr(torch, dtype_on(cfg, device.type)),
    )
    ops = kernels.load(cfg.machine.kernels)
    display.phase("self-test")
    samples = any(p.generates for p in plans)
    exact = samples and prove_exact(loaded.stages[-1], plans, model, ops=ops)
    if samples:
        display.exactness("exact" if exact else "close")
    return Shared(
        loaded=loaded,
        plans=plans,
        tokenizer=tokenizer,
        model=model,
        ops=ops,
        exact=exact,
        engine=open_engine(plans, model, ops, cfg=cfg, tokenizer=tokenizer, watch=watch) if samples else None,
        rewards=rewards,
        directory=directory,
        trackers=open_trackers(cfg.track.trackers, directory, resumed=resumed),
        display=display,
        stop=stop,
        watch=watch,
    )


def pick_device(cfg: Config) -> torch.device:
    """`auto` is CUDA where there is one."""
    wanted = cfg.machine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("machine.device=cuda, but torch finds no CUDA device here; use auto or cpu")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)


def prove_exact(cfg: Config, plans: Sequence[Plan], model: PreTrainedModel, *, ops: kernels.Ops) -> bool:
    """Whether sampled log-probs equal the trainer's bit for bit, tried on the model itself."""
    log.info("kernels: %s (%s)", ops.name, ops.reason)
    if cfg.machine.exact == "off" or cfg.rollout.engine != "native":
        return False
    longest = max(p.max_sequence_tokens for p in plans if p.generates)
    report = self_test(
        decoder(model, ops),
        ops,
        vocab_size=model.config.get_text_config().vocab_size,
        seed=cfg.seed,
        temperature=cfg.rollout.sampling.temperature or 1.0,
        max_prompt=max(1, min(40, longest - 24)),
        long_prompt=max(1, min(270, longest - 24)),
    )
    log.info("sampling against training: %s", report)
    if cfg.machine.exact == "on" and not report.exact:
        raise ConfigError(
            f"machine.exact=on, but the self-test says {report}; set machine.exact=auto to go on"
        )
    return report.exact


def open_engine(
    plans: Sequence[Plan],
    model: PreTrainedModel,
    ops: kernels.Ops,
    *,
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    watch: Watch,
) -> RolloutEngine:
    """The rollout engine, large enough for every stage; it samples from the trainer's own module."""
    ends = end_tokens(model, tokenizer)
    sampling = [p for p in plans if p.generates]
    max_context = max(p.max_sequence_tokens for p in sampling)
    if cfg.rollout.engine == "hf":
        return HfEngine(model, end_token_ids=ends, decode=decoder_of(tokenizer), max_context=max_context)
    engine = NativeEngine(
        model,
        ops,
        end_token_ids=ends,
        decode=decoder_of(tokenizer),
        max_batch=max(p.max_batch for p in sampling),
        max_context=max_context,
        cache_mb=cfg.machine.kv_cache_mb,
    )
    engine.beat = watch.beat
    return engine


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Tokens to the text that rewards and people see: special tokens left out."""
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a reply: the tokenizer's, and all that the model's own generation config names."""
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    several = named if isinstance(named, list) else [named]
    return frozenset(t for t in (*several, tokenizer.eos_token_id) if t is not None)


# ---------------------------------------------------------------- one stage


def open_stage(shared: Shared, index: int) -> Run:
    """The live parts of one stage. The policy starts from what the stage before left in the shared module."""
    cfg, name = shared.loaded.stages[index], shared.loaded.names[index]
    tokenizer = shared.tokenizer
    algorithm = build_algorithm(cfg.algorithm, critic=cfg.critic, max_tokens=cfg.rollout.sampling.max_tokens)
    shared.display.phase("read data")
    held_out = eval_tasks(cfg.data.eval, cfg.data, tokenizer=tokenizer) if cfg.data.eval else []
    stream = TaskStream(
        cfg.data.train,
        cfg.data,
        tokenizer=tokenizer,
        seed=cfg.seed,
        exclude=held_out if cfg.data.exclude_eval else (),
        max_response_tokens=None if algorithm.kind == "online" else cfg.rollout.sampling.max_tokens,
    )
    log.info("stage %s: %s", name, ", ".join(f"{k} {v}" for k, v in stream.counts.items()))
    plan = make_plan(cfg, rows=stream.rows_per_epoch, name=name)
    ledger = Ledger()
    policy = _policy(shared, cfg, plan, algorithm)
    run = Run(
        cfg=cfg,
        plan=plan,
        name=name,
        index=index,
        tasks=stream,
        eval_tasks=held_out,
        play=_player(
            shared,
            cfg,
            to_sampling(cfg.rollout.sampling),
            size=cfg.rollout.group_size,
            purpose=f"train/{name}",
        ),
        play_eval=_player(
            shared, cfg, to_sampling(plan.eval_sampling), size=cfg.eval.samples, purpose="eval"
        ),
        read=reader(cfg, algorithm, tokenizer),
        rewards=shared.rewards[index],
        buffer=Buffer(
            groups_per_step=plan.tasks_per_step,
            group_size=plan.group_size,
            max_staleness=0,
            reject=partial(rejection, algorithm=plan.algorithm),
            ledger=ledger,
        ),
        ledger=ledger,
        algorithm=algorithm,
        policy=policy,
        reference=_reference(shared, cfg, policy) if algorithm.needs_reference else None,
        critic=_critic(shared, cfg, plan) if algorithm.needs_critic else None,
        engine=shared.engine,
        exact=shared.exact,
        directory=shared.directory,
        trackers=shared.trackers,
        display=shared.display,
        stop=shared.stop,
        watch=shared.watch,
        fingerprint=fingerprint(shared.loaded.config),
        kl_coef=algorithm.kl_coef,
    )
    policy.version = shared.version
    for trained in (run.policy, run.reference, run.critic):
        if trained is not None:
            trained.beat = shared.watch.beat
    return run


def _policy(shared: Shared, cfg: Config, plan: Plan, algorithm: Algorithm) -> TorchEngine:
    cut = Cut.of(
        cfg.train,
        shared.model,
        whole_groups=algorithm.whole_groups,
        entropy_grad=algorithm.entropy_grad,
        temperature=trained_temperature(cfg, algorithm),
    )
    return TorchEngine(
        shared.model,
        shared.ops,
        cut=cut,
        optimizer=cfg.train.optimizer,
        total_steps=plan.optimizer_steps,
        max_skipped=cfg.train.max_skipped_steps,
    )


def _reference(shared: Shared, cfg: Config, policy: TorchEngine) -> TorchEngine:
    """Frozen: from its folder, or a copy of the policy as it is now."""
    return TorchEngine(_frozen(_model_at(shared, cfg, cfg.reference.path)), shared.ops, cut=policy.cut)


def _critic(shared: Shared, cfg: Config, plan: Plan) -> TorchEngine:
    model = _model_at(shared, cfg, cfg.critic.path)
    head = value_head(model.config.hidden_size, cfg.seed).to(model.device, model.dtype)
    cut = Cut.of(cfg.train, shared.model, whole_groups=False, entropy_grad=False, temperature=1.0)
    return TorchEngine(
        model,
        shared.ops,
        cut=cut,
        value_head=head,
        optimizer=cfg.critic.optimizer,
        total_steps=plan.steps * plan.updates_per_step,
        max_skipped=cfg.train.max_skipped_steps,
    )


def _model_at(shared: Shared, cfg: Config, path: str | None) -> PreTrainedModel:
    if path is None:
        return copy.deepcopy(shared.model)
    return build_model(
        cfg.model.model_copy(update={"path": path, "scratch": None}),
        vocab_size=len(shared.tokenizer),
        eos_token_id=shared.tokenizer.eos_token_id,
        pad_token_id=shared.tokenizer.pad_token_id,
        seed=cfg.seed,
        device=shared.model.device,
        dtype=shared.model.dtype,
    )


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    return model.requires_grad_(False)


def _player(shared: Shared, cfg: Config, sampling: Sampling, *, size: int, purpose: str) -> Callable:  # type: ignore[type-arg]
    return partial(
        play_groups,
        shared.engine,  # type: ignore[arg-type]  # None: nothing is ever sampled, nor played
        group_size=size,
        sampling=sampling,
        seed=cfg.seed,
        purpose=purpose,
        decode=decoder_of(shared.tokenizer),
        end_token_ids=end_tokens(shared.model, shared.tokenizer),
        timeout_s=cfg.rollout.timeout_s,
    )


def trained_temperature(cfg: Config, algorithm: Algorithm) -> float:
    """What the trainer divides logits by: the sampling temperature; 1 where nothing was sampled (or greedily)."""
    return (cfg.rollout.sampling.temperature or 1.0) if algorithm.kind == "online" else 1.0


def reader(
    cfg: Config, algorithm: Algorithm, tokenizer: PreTrainedTokenizerBase
) -> Callable[[list[Task]], list[Group]]:
    """Tasks that hold their replies, as groups: one demonstration, or a chosen and a rejected reply."""
    limit = cfg.rollout.sampling.max_tokens
    overlong = cfg.data.overlong

    def read(tasks: list[Task]) -> list[Group]:
        if algorithm.kind == "preferences":
            return [Group(t, preference_pair(t, tokenizer, limit, overlong=overlong)) for t in tasks]
        return [Group(t, (demonstration(t, tokenizer, limit, overlong=overlong),)) for t in tasks]

    return read


def rejection(group: Group, *, algorithm: Resolved) -> str | None:
    """Why a group teaches nothing: rewards all equal, under dynamic sampling; or, after failures, a rollout left alone
    where rollouts of a group are compared."""
    if len(group.rollouts) == 1 and (
        algorithm.advantage in GROUP_BASELINES or algorithm.kind == "preferences"
    ):
        return "alone"
    rewards = {r.reward for r in group.rollouts}
    return "uniform" if algorithm.drop_uniform_groups and len(rewards) == 1 else None


# ---------------------------------------------------------------- going on


def fingerprint(cfg: Config) -> Json:
    """What a checkpoint must agree with."""
    return cfg.model_dump(mode="json", exclude=FREE_KEYS)


def check_config(path: Path, saved: Json, now: Json) -> None:
    """Raise CheckpointError naming the keys in which this run's config differs from the checkpoint's."""
    if keys := sorted(differences(saved, now)):
        raise CheckpointError(
            f"{path} was written by a run with another config; it differs in {', '.join(keys[:8])}. Go on with the "
            "config of that run (config.yaml beside it), or start a new one in another run_dir"
        )


def differences(a: Json, b: Json, prefix: str = "") -> list[str]:
    """Dotted keys at which two trees differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in {*a, *b} for d in differences(a.get(k), b.get(k), f"{prefix}{k}.")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b)) for d in differences(x, y, f"{prefix}{i}.")]
    return [] if a == b else [prefix.rstrip(".")]
