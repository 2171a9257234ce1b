"""What all stages of a run share: tokenizer, model, kernels, rollout engine, records."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from whet.checkpoint import TOKENIZER, Keep, Saver
from whet.config.checks import check_stop_texts, check_stop_tokens
from whet.config.checks_parallel import world
from whet.config.derived import has_adapters
from whet.config.engines import ENGINES
from whet.config.faults import EachStage
from whet.config.learns import is_stack
from whet.config.load import Loaded
from whet.config.memory_estimate import reused_tokens
from whet.config.plan import Plan, dtype_on
from whet.config.resuming import RESUME
from whet.config.schema import Config, LoraConfig, ModelConfig
from whet.context import StopFlag
from whet.data.chat import control_tokens
from whet.data.tasks import all_texts
from whet.data.timed import decoded
from whet.data.tokenizer import load_tokenizer, write_built
from whet.envs.opened import Environments
from whet.guard.line import OpenLines
from whet.guard.watch import Watch
from whet.models import kernels
from whet.models.activations import Activations
from whet.models.forward import decoder
from whet.models.load import build as build_model
from whet.models.load import end_tokens, end_tokens_ahead
from whet.models.logprob_parity import self_test
from whet.models.lora import attach
from whet.rewards.combine import RewardSet
from whet.rollout.engine import EngineInputs, RolloutEngine, missing, takes
from whet.rollout.needs import check_engine
from whet.rollout.router import Router
from whet.storage.uploads import Uploads
from whet.tables import load_object
from whet.track.display import Display
from whet.track.record import RunDirectory
from whet.track.run_paths import trainers
from whet.track.timeline import SAMPLING, Timeline
from whet.track.trackers import Tracker, open_trackers
from whet.track.trackers import close as close_tracker
from whet.types import ConfigError
from whet.whole import Here, InFiles, Place, Whole

log = logging.getLogger(__name__)

NO_TEXT = (
    "the tokenizer has {tokens} tokens, the model {rows} ids: it may sample those from {tokens} on, which have no text "
    "and are trained like other tokens"
)
"""Of a padded vocabulary. Masked ids would be missing from the sum of every log-prob, here and in each server."""


Opener = Callable[..., RolloutEngine]
"""What stands in the place of `open_engine`, and takes what it takes."""
RankLines = Callable[[Config, PreTrainedModel], OpenLines]
"""What starts ranks elsewhere."""


@dataclass(frozen=True)
class Models:
    """What computes in every stage of a run."""

    tokenizer: PreTrainedTokenizerBase
    policy: Whole
    """With which each stage begins where the one before it ended."""
    ops: kernels.Ops
    exact: bool
    """The self-test found that sampled log-probs equal the trainer's bit for bit."""
    engine: RolloutEngine | None
    """None: no stage samples."""
    sampler: Literal["here", "on_ranks"] | None
    """Where stages that sync less often than every step have a copy of the policy to sample from: in this process, or,
    if nothing in it samples, on their ranks. None: there is no such stage."""
    environments: Environments = field(default_factory=Environments)
    """What the policy acts in, if the config names an environment."""
    rank_lines: RankLines | None = None
    """Starts the ranks of a stage; None: on this machine."""
    place: Place = field(default_factory=Here)
    """Where whole models are."""

    @property
    def model(self) -> PreTrainedModel:
        """The policy, whose values may be in files."""
        return self.policy.model

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a reply."""
        return end_tokens(self.model, self.tokenizer)


@dataclass(frozen=True)
class Records:
    """Where every stage of a run writes, and who watches it."""

    directory: RunDirectory
    trackers: Sequence[Tracker]
    display: Display
    saver: Saver
    uploads: Uploads
    stop: StopFlag
    watch: Watch


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A run before its models: its data can be read."""

    loaded: Loaded
    plans: Sequence[Plan]
    rewards: Sequence[RewardSet]
    """One for each stage."""
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    """Tokens that end a reply."""
    records: Records
    change: bool = False
    """The run resumes with changed settings that change results."""


@dataclass(frozen=True, kw_only=True)
class Job(Opening):
    """A run, open: its stages are built from it, one after the other."""

    models: Models
    begun: dict[int, Any]
    """What was read of stages before the models, by their numbers, until they begin."""

    async def close(self) -> None:
        """End environments and engine. Records are closed by who opened them."""
        self.models.place.clear()
        self.models.environments.close()
        if self.models.engine is not None:
            await self.models.engine.close()


def open_job(
    loaded: Loaded,
    plans: Sequence[Plan],
    rewards: Sequence[RewardSet],
    *,
    directory: RunDirectory,
    display: Display,
    stop: StopFlag,
    watch: Watch,
    stack: ExitStack,
    resumed: tuple[int, int] | None = None,
    change: bool = False,
    read: Callable[[Opening], Mapping[int, Any]] = lambda opening: {},
    **openers: Any,
) -> Job:
    """The records and models of a run; the records are closed with the stack. resumed: stage and step that it goes on
    from. read: reads the data of stages, before any weights are read. openers: see `open_models`."""
    tokenizer = open_tokenizer(loaded, display)
    records = open_records(
        loaded.config,
        tokenizer,
        directory=directory,
        display=display,
        stop=stop,
        watch=watch,
        stack=stack,
        resumed=resumed,
    )
    opening = Opening(
        loaded=loaded,
        plans=plans,
        rewards=rewards,
        tokenizer=tokenizer,
        ends=end_tokens_ahead(loaded.config.model, tokenizer),
        records=records,
        change=change,
    )
    begun = dict(read(opening))
    with EachStage(loaded.names) as stage:
        for n, each in enumerate(rewards):
            with stage(n):
                each.load_models(loaded.day)
    models = open_models(
        loaded,
        plans,
        tokenizer=tokenizer,
        display=display,
        timeline=directory.timeline,
        watch=watch,
        **openers,
    )
    return Job(**vars(opening), models=models, begun=begun)


def open_records(
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    directory: RunDirectory,
    display: Display,
    stop: StopFlag,
    watch: Watch,
    stack: ExitStack,
    resumed: tuple[int, int] | None,
) -> Records:
    """Trackers, checkpoints and uploads of a run, closed with the stack. resumed: stage and step that it goes on
    from."""
    saver, uploads = open_saver(cfg, directory.path, tokenizer if cfg.tokenizer.build is not None else None)
    trackers = open_trackers(cfg, directory, resumed=resumed)
    for tracker in trackers:
        stack.callback(close_tracker, tracker)
    stack.callback(uploads.finish, 0.0)
    stack.callback(saver.close)
    return Records(directory, trackers, display, saver, uploads, stop, watch)


def open_tokenizer(loaded: Loaded, display: Display) -> PreTrainedTokenizerBase:
    """The tokenizer of a run."""
    cfg = loaded.config
    display.phase("read data")
    tokenizer = load_tokenizer(
        cfg.tokenizer,
        model_path=cfg.model.path,
        texts=all_texts(loaded),
        built=loaded.tokenizer,
        day=loaded.day,
    )
    check_stop_texts(loaded.names, loaded.stages, control_tokens(tokenizer))
    return tokenizer


def open_models(
    loaded: Loaded,
    plans: Sequence[Plan],
    *,
    tokenizer: PreTrainedTokenizerBase,
    display: Display,
    timeline: Timeline,
    watch: Watch,
    opener: Opener | None = None,
    rank_lines: RankLines | None = None,
    environments: Environments | None = None,
) -> Models:
    """Model, kernels, engine. The self-test reports whether sampling and training agree to the bit.

    opener: makes the engine as `open_engine`, the default, does. rank_lines: see `Models`. environments: None: they are
    asked, and what they answer is written to the journal of a run that samples itself.
    """
    cfg = loaded.config
    device = pick_device(cfg)
    torch.set_num_threads(plans[0].threads)
    torch.use_deterministic_algorithms(device.type == "cpu")
    # or every new tensor would be written once more
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    display.phase("load model")
    place: Place = Here()
    if plans[0].models_elsewhere:
        folder = Path(cfg.run_dir).absolute() / "models"
        place = InFiles(folder, device, plans[0].threads, tuple(cfg.imports), watch.beat)
    make = partial(
        build_policy,
        cfg.model,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=cfg.seed,
        device=device,
        dtype=getattr(torch, dtype_on(cfg, device.type)),
        lora=cfg.model.lora if has_adapters(cfg) else None,
    )
    policy = place.made("policy", make)
    model = policy.model
    rows = model.get_output_embeddings().out_features
    check_stop_tokens(loaded.names, loaded.stages, rows)
    if rows > len(tokenizer):
        log.info(NO_TEXT.format(tokens=len(tokenizer), rows=rows))
    ops = kernels.load(cfg.machine.kernels)
    display.phase("self-test")
    samples = any(p.generates for p in plans)
    copied = any(p.samples_apart and p.generates for p in plans)
    exact = samples and alike(loaded) and prove_exact(loaded.stages[-1], plans, model, ops=ops)
    engine = None
    if samples:
        engine = (opener or open_engine)(
            plans,
            model,
            ops,
            cfg=cfg,
            tokenizer=tokenizer,
            watch=watch,
            timeline=timeline,
        )
        with EachStage(loaded.names) as stage:
            for n, each in enumerate(loaded.stages):
                with stage(n):
                    check_engine(engine.can, each)
        exact = exact and (not isinstance(engine, Router) or engine.exact)
        display.exactness("exact" if exact else "close")
    return Models(
        tokenizer,
        policy,
        ops,
        exact,
        engine,
        ("on_ranks" if isinstance(place, InFiles) else "here") if copied else None,
        environments=environments or Environments(Path(cfg.run_dir) / "journal"),
        rank_lines=rank_lines,
        place=place,
    )


def build_policy(cfg: ModelConfig, *, lora: LoraConfig | None, seed: int, **how: Any) -> PreTrainedModel:
    """The model with its adapters."""
    model = build_model(cfg, seed=seed, **how)
    if lora is not None:
        attach(model, lora, seed=seed)
    learns = [n for n, p in model.named_parameters() if p.requires_grad and is_stack(n)]
    if cfg.expert_grid is not None and learns:
        raise ConfigError(
            f"model.expert_grid={cfg.expert_grid}: {learns[0]} is trained in full (model.lora.modules_to_save), and "
            "the grid is for matrices that stay as they are; leave one of the two out"
        )
    return model


def alike(loaded: Loaded) -> bool:
    """Whether sampling and training run the same functions, in one process."""
    other = any(
        c.train.compile or p.compute or p.float8 or world(c.train.parallel) > 1
        for c in loaded.stages
        for p in [c.train.precision]
    )
    return not other and loaded.config.rollout.quantization is None


def open_saver(
    cfg: Config, run_dir: Path, built: PreTrainedTokenizerBase | None = None
) -> tuple[Saver, Uploads]:
    """What saves a run's checkpoints, and what copies them elsewhere. built: a tokenizer that no folder has."""
    c, root = cfg.checkpoint, run_dir / "checkpoints"
    best = c.keep_best
    keep = Keep(c.keep, best=best.count if best else 0, smallest=best is not None and best.goal == "min")
    uploads = Uploads(
        c.upload_to,
        c.upload_exports_to,
        last_only=c.upload == "last",
        keep=c.upload if isinstance(c.upload, int) else None,
        best=lambda: saver.best(),
        record=run_dir / "uploads.json",
    )
    # a checkpoint that the user goes on from stays
    named = [Path(c.resume)] if c.resume not in RESUME else []
    saver = Saver(
        root,
        keep=keep,
        contents=c.save_contents,
        background=c.async_save,
        after=uploads.checkpoint,
        spare=lambda: [*uploads.spare(), *named],
        files={TOKENIZER: lambda file: write_built(built, file)} if built is not None else {},
    )
    return saver, uploads


def pick_device(cfg: Config) -> torch.device:
    """`auto` is CUDA where there is one."""
    wanted = cfg.machine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "machine.device=cuda, but torch finds no CUDA device on this machine; use auto or cpu"
        )
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)


def prove_exact(cfg: Config, plans: Sequence[Plan], model: PreTrainedModel, *, ops: kernels.Ops) -> bool:
    """Whether sampled log-probs equal the trainer's bit for bit, tested on the model itself."""
    log.info("kernels: %s", kernels.used(ops, model.device))
    if cfg.machine.logprob_parity == "off" or cfg.rollout.engine != "native":
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
    log.info("log-probs of sampling and training: %s", report)
    if cfg.machine.logprob_parity == "on" and not report.exact:
        raise ConfigError(
            f"machine.logprob_parity=on, but the self-test reports {report}; use auto to continue"
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
    timeline: Timeline,
) -> RolloutEngine:
    """The rollout engine of `rollout.engine`, large enough for every stage, in this process.

    Raises ConfigError where an engine of the user's cannot be made, or lacks a part of the interface.
    """
    sampling = [p for p in plans if p.generates]
    name = cfg.rollout.engine
    make = load_object(ENGINES[name].at if name in ENGINES else name, what="rollout.engine")
    if not takes(make, "inputs"):
        raise ConfigError(
            f"rollout.engine {name} takes {inspect.signature(make)}; expected one parameter, a "
            "whet.rollout.engine.EngineInputs"
        )
    try:
        engine = make(
            EngineInputs(
                model=model,
                ops=ops,
                end_token_ids=end_tokens(model, tokenizer),
                decode=decoder_of(tokenizer),
                max_context=max(p.max_sequence_tokens for p in sampling),
                max_num_seqs=max(p.cfg.rollout.max_num_seqs for p in sampling),
                cache_mb=cfg.machine.kv_cache_mb,
                quantization=cfg.rollout.quantization,
                beat=watch.beat,
                span=partial(timeline.piece, lane=SAMPLING),
                server=cfg.rollout.server,
                reply_timeout_s=max(p.cfg.rollout.timeout_s for p in sampling),
                load_timeout_s=cfg.sync.timeout_s,
                run_dir=Path(cfg.run_dir).absolute(),
                home=trainers(cfg).absolute(),
                asked=cfg.mode != "train" or any(p.judges for p in plans),
                experts=any(p.cfg.train.router_replay == "sampled" for p in sampling),
                kept=activations_of(sampling),
            )
        )
    except TypeError as e:
        if e.__traceback__ and e.__traceback__.tb_next:  # raised within, by Python code of its own
            raise
        raise ConfigError(
            f"rollout.engine {name}: {e}; expected a function or class that makes a whet.rollout.engine.RolloutEngine "
            "of a whet.rollout.engine.EngineInputs"
        ) from e
    if lacks := missing(engine):
        raise ConfigError(
            f"rollout.engine {name}: got a {type(engine).__name__} without {', '.join(lacks)}; expected a "
            "whet.rollout.engine.RolloutEngine"
        )
    return cast(RolloutEngine, engine)


def activations_of(plans: Sequence[Plan]) -> Activations | None:
    """Where sampling leaves something to the updates of these stages, each of which makes room for its own; None: it
    leaves nothing."""
    shape = plans[0].shape
    if shape is None or not any(map(reused_tokens, plans)):
        return None
    return Activations(shape.layer_outputs, layers=shape.layers)


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Tokens to the text for rewards and users: special tokens are left out."""
    return lambda token_ids: decoded(tokenizer, token_ids, skip_special_tokens=True)
