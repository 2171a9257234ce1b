"""`whet.train(...)`: the same as `whet train`, from Python. torch is imported only after the config is valid."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from whet import checkpoint, environment
from whet.arguments import FILE, FLAG, ArgumentKind, expect
from whet.config.checks_run import TIME
from whet.config.code import digests
from whet.config.deadlines import silence
from whet.config.faults import EachStage
from whet.config.load import Loaded, learn_secrets, load
from whet.config.memory_estimate import check_memory
from whet.config.plan import Plan, plans
from whet.config.schema import Config
from whet.config.sources import rewards_by_source, verifiers
from whet.config.urls import scheme
from whet.data.given import Given, taken
from whet.guard import stacks
from whet.guard.imports import import_all
from whet.guard.jail import Jail
from whet.guard.ledger import Ledger
from whet.guard.watch import Watch
from whet.judges import judges_of
from whet.rewards.bind import RewardFunction
from whet.rewards.combine import RewardSet
from whet.rewards.given import Rewards, named_functions, only_rewards
from whet.secrets import guarded_output
from whet.start import (
    RunStart,
    began,
    check_place,
    check_record,
    find_checkpoint,
    is_finished,
    may_go_on,
    note_start,
    written,
)
from whet.storage.paths import brought_here, with_rows
from whet.storage.uploads import DEADLINE_S
from whet.track import run_paths
from whet.track.callbacks import Callback, Callbacks
from whet.track.files import RunLock, reading
from whet.track.log import close_logging, setup_logging
from whet.types import ConfigError, Json, Metrics, WhetError

if TYPE_CHECKING:
    import pyarrow as pa

    from whet.job import Job
    from whet.track.display import Display
    from whet.track.record import RunDirectory
    from whet.track.run import Run

log = logging.getLogger(__name__)

T = TypeVar("T")

OK, INTERRUPTED = 0, 130
CALLBACK = ArgumentKind(
    lambda v: v is None or callable(v), "a function that takes the row of a step (a dict), or None"
)

Calls = tuple[Callback | None, Callback | None]
"""on_step and on_eval."""


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    run_dir: Path
    """Folder of everything that the run has written."""
    finished: bool
    """False: stopped by Ctrl-C; the same call resumes the run."""

    @property
    def metrics(self) -> list[dict[str, Json]]:
        """Every line of metrics.jsonl."""
        from whet.track.written import read_lines

        return read_lines(self.run_dir / "metrics.jsonl")

    @property
    def accuracy(self) -> float | None:
        """The last held-out accuracy, if there was an evaluation."""
        found = [line["eval/accuracy"] for line in self.metrics if "eval/accuracy" in line]
        return found[-1] if found else None

    @property
    def run(self) -> Run:
        """The record of the run, as `whet.load_run(result.run_dir)`."""
        from whet.track.run import load_run

        return load_run(self.run_dir)

    def rollouts(self, step: int, stage: str | None = None) -> pa.Table:
        """The rollouts of a step, a row each (`Run.rollouts`). Raises DataError, which names the recorded steps."""
        return self.run.rollouts(step, stage)


def train(
    config: str | Path | None = None,
    *,
    rewards: Rewards = None,
    overrides: Sequence[str] = (),
    change: bool = False,
    unused: Literal["refuse", "warn"] = "refuse",
    on_step: Callback | None = None,
    on_eval: Callback | None = None,
    **sections: Any,
) -> Result:
    """Train a config file, overridden by `sections` (`train={"steps": 50}`, `seed=1` ...) and then by `overrides`.

    `data` may hold rows in place of sources: a list of dicts, a pandas or Arrow table, or a dataset, as `data=rows` or
    `data={"train": rows, "eval": more}`. They are written to the run directory once, so that a resume reads the same.

    rewards: one function, or several by name; they replace the file's rewards. Each is called as `f(response, task)`
    in a worker process.
    change: a resumed run may have changed settings that change its results (`whet train --change`).
    unused: keys that nothing reads are refused, or ignored with a note for each (`whet train --unused warn`).
    on_step, on_eval: called in this process with the row of numbers of every step, of every evaluation: a dict with
    `stage`, `step` and the names of metrics.jsonl. If one returns True, the run stops after this step, as with Ctrl-C;
    an exception ends the run and is raised here.
    Raises ConfigError before anything is run, also while another run, evaluation, generation or replay is in progress
    in this process; WhetError if the run cannot continue.
    """
    if isinstance(config, Mapping):
        raise ConfigError(
            "config: expected a file, got a mapping; give sections by keyword: whet.train(**config)"
        )
    expect(
        {
            "config": (config, FILE),
            "change": (change, FLAG),
            "on_step": (on_step, CALLBACK),
            "on_eval": (on_eval, CALLBACK),
        }
    )
    functions, named = named_functions(rewards)
    if named is not None:
        sections["rewards"] = named
    sections, rows = taken(sections)
    loaded = load(config, overrides, sections, unused=unused)
    if named is not None:
        loaded = only_rewards(loaded, named)
    loaded = with_rows(resolve_run_dir(loaded), rows)
    finished = run_training(loaded, functions, change=change, rows=rows, calls=(on_step, on_eval)) == OK
    return Result(Path(loaded.config.run_dir), finished)


def run_training(
    loaded: Loaded,
    functions: Mapping[str, RewardFunction] | None = None,
    *,
    change: bool = False,
    rows: Sequence[Given] = (),
    calls: Calls = (None, None),
    watched: Callable[[Watch], object] = lambda watch: None,
) -> int:
    """Run all stages. Returns the exit code: 0, or 130 after Ctrl-C (the run is saved and can be resumed).

    calls: on_step and on_eval of `train`.
    rows: what is written to the run directory before data is read (`with_rows`).
    change: with a checkpoint, settings that change results may differ; a branch of the run.
    watched: called with the watchdog of the run, once the run has started.
    """
    with guarded_output():
        learn_secrets(loaded)
        return _run_training(loaded, functions or {}, watched, change=change, rows=rows, calls=calls)


def _run_training(
    loaded: Loaded,
    functions: Mapping[str, RewardFunction],
    watched: Callable[[Watch], object],
    *,
    change: bool,
    rows: Sequence[Given],
    calls: Calls,
) -> int:
    planned = plans(loaded)  # refuses what cannot work, before anything is written
    loaded = resolve_run_dir(loaded)
    check_place(loaded)
    check_memory(planned, going_on=may_go_on(loaded.config))
    loaded = brought_here(loaded)
    home = Path(loaded.config.run_dir)
    loaded = worker_config(loaded)
    loaded = replace(loaded, code=digests(loaded.stages, functions))
    cfg = loaded.config
    if any(scheme(url) == "hf" for url in (*cfg.checkpoint.upload_to, *cfg.checkpoint.upload_exports_to)):
        os.environ.setdefault("HF_HUB_OFFLINE", "0")  # the one thing that a run asks the hub for by name
    environment.prepare(planned[0].threads, cfg.machine.logprob_parity != "off")
    environment.keep_memory()
    run_dir = Path(cfg.run_dir)
    with environment.one_run(), ExitStack() as stack:
        aside = enter(cfg, stack)
        setup_logging(run_dir, level=cfg.track.log_level)
        stack.callback(close_logging)
        try:  # from here on run.log says why a start has failed
            run_paths.attach(cfg)
            for given in rows:
                given.write(home)
            stack.enter_context(stacks.kept(home, who_is(cfg)))
            rewards = reward_sets(loaded, functions, stack)  # forks: before torch and its threads are there
            import_all(cfg.imports)
            return _run(
                loaded,
                planned,
                rewards=rewards,
                stack=stack,
                aside=aside,
                home=home,
                change=change,
                calls=calls,
                watched=watched,
            )
        except Exception as e:
            # to run.log alone: the caller shows it to people
            setup_logging(run_dir, level=cfg.track.log_level)
            log.error("the run ended: %s", e, exc_info=None if isinstance(e, WhetError) else e)
            raise


def resolve_run_dir(loaded: Loaded) -> Loaded:
    """The config with {time} in run_dir replaced: by the time of the newest run if that run resumes, else by now."""
    cfg = loaded.config
    if TIME not in cfg.run_dir:
        return loaded
    earlier = run_paths.stamps(cfg.run_dir)
    stamp = run_paths.stamp_after(earlier)
    if earlier and cfg.checkpoint.resume == "auto":
        last = run_paths.stamped(cfg, earlier[-1])
        state = checkpoint.glance(run_paths.checkpoints(last))
        stamp = stamp if is_finished(loaded, Path(last.run_dir), state) else earlier[-1]
    return replace(
        loaded,
        config=run_paths.stamped(cfg, stamp),
        stages=tuple(run_paths.stamped(stage, stamp) for stage in loaded.stages),
    )


def worker_config(loaded: Loaded) -> Loaded:
    """The config with a separate folder, if this process explores or evaluates beside a trainer."""
    place = {"run_dir": str(run_paths.own(loaded.config))}
    return replace(
        loaded,
        config=loaded.config.model_copy(update=place),
        stages=tuple(stage.model_copy(update=place) for stage in loaded.stages),
    )


def enter(cfg: Config, stack: ExitStack) -> Path | None:
    """Lock the run directory. Returns the new place of the run that checkpoint.resume=fresh has moved aside, if there
    was one."""
    run_paths.check_way(Path(cfg.run_dir), run_paths.trainers(cfg))
    lock = stack.enter_context(RunLock(Path(cfg.run_dir)))
    aside = None
    if cfg.checkpoint.resume == "fresh" and run_paths.holds_run(cfg):
        aside = run_paths.move_aside(cfg)
        lock.release()
        stack.enter_context(RunLock(Path(cfg.run_dir)))
    return aside


def who_is(cfg: Config) -> str:
    """Name of this process within its run."""
    return {"explore": f"explorer-{cfg.buffer.explorer_name}", "eval": "bench"}.get(cfg.mode, "trainer")


def _run(
    loaded: Loaded,
    planned: Sequence[Plan],
    *,
    rewards: Sequence[RewardSet],
    stack: ExitStack,
    aside: Path | None,
    home: Path,
    change: bool,
    calls: Calls,
    watched: Callable[[Watch], object],
) -> int:
    """aside: where an earlier run of this directory was moved. home: the run directory of the trainer, if this process
    runs beside one."""
    with environment.importing():
        from whet.track.display import Display
        from whet.track.record import RunDirectory
    from whet.data.recognise import with_columns

    loaded, columns = with_columns(loaded)
    for said in columns:
        log.info("%s", said)
    cfg = loaded.config
    directory = RunDirectory(
        Path(cfg.run_dir), loaded.names, dumps={str(kind): path for kind, path in cfg.track.dump.items()}
    )
    stack.callback(directory.close)
    stages = [(p.name, p.total_steps or 0) for p in planned]
    display = Display(stages, quiet="console" not in cfg.track.trackers)
    stack.callback(display.close)
    setup_logging(directory.path, level=cfg.track.log_level, show=display.message)
    start = find_checkpoint(loaded, directory.path, change=change)
    if is_finished(loaded, directory.path, start.state):
        display.close()
        _show_finished(cfg, directory, display, start.state)
        return OK
    check_record(directory, start)
    tokenizer = (
        checkpoint.tokenizer_in(start.checkpoint)
        if directory.path == home
        else checkpoint.own_tokenizer(home / "checkpoints", directory.path)
    )
    loaded = replace(loaded, day=began(home, start.checkpoint), tokenizer=tokenizer)
    openers = join_cluster(loaded, planned, rewards, stack)
    stop = stack.enter_context(stop_on_ctrl_c(display.message))
    note_start(loaded, directory, start, beside=directory.path != home)
    if aside:
        display.message(f"the previous run was moved to {aside}")
    if start.checkpoint:
        display.message(f"resuming from {start.checkpoint}")
    watched(watch := stack.enter_context(Watch(limit_s=watchdog_timeout_s(loaded))))
    outside = Outside(directory, display, stop, watch, calls)
    try:
        job = _open(loaded, planned, rewards, outside, start, change=change, openers=openers, stack=stack)
    except KeyboardInterrupt:  # of `stop_on_ctrl_c`: the stages have not begun
        display.message(_stopped(directory.path))
        raise
    stop.begun = True
    return _train(job, start, stack) if directory.path == home else _work_beside(job, home)


class Outside(NamedTuple):
    """What a run is opened with."""

    directory: RunDirectory
    display: Display
    stop: Stop
    watch: Watch
    calls: Calls


def _open(
    loaded: Loaded,
    planned: Sequence[Plan],
    rewards: Sequence[RewardSet],
    outside: Outside,
    start: RunStart,
    *,
    change: bool,
    openers: Mapping[str, Any],
    stack: ExitStack,
) -> Job:
    """The records, the data and the models of a run; the records are closed with the stack."""
    with environment.importing():
        from whet.job import open_job
        from whet.stages import read_ahead
    directory, display, stop, watch, calls = outside
    wanted: Sequence[int] = range(start.state["stage"], len(planned))
    if loaded.config.mode == "explore":
        wanted = [n for n, plan in enumerate(planned) if plan.algorithm.kind == "online"]
    elif loaded.config.mode == "eval":
        wanted = [n for n, cfg in enumerate(loaded.stages) if cfg.data.eval]
    job = open_job(
        loaded,
        planned,
        rewards,
        directory=directory,
        display=display,
        stop=stop,
        watch=watch,
        stack=stack,
        resumed=start.at,
        change=change,
        read=lambda opening: run_loop(read_ahead(opening, wanted)),
        **openers,
    )
    records = job.records
    if any(calls):
        records = replace(records, trackers=[*records.trackers, Callbacks(*calls, stop=stop)])
    gc.collect()
    gc.freeze()  # what lives as long as the run is not looked through again at every collection
    stack.callback(gc.unfreeze)
    if start.checkpoint:
        directory.once_resumed(lambda: records.uploads.missing(*written(directory.path, start.state)))
    return replace(job, records=records)


def _work_beside(job: Job, home: Path) -> int:
    """Explore or evaluate for the trainer whose run directory is `home`."""
    from whet.disaggregated import run_beside

    run_loop(run_beside(job, home))
    job.records.display.close()
    return INTERRUPTED if job.records.stop.requested else OK


def _train(job: Job, start: RunStart, stack: ExitStack) -> int:
    """Run all stages, and show what came of it."""
    with environment.importing():
        from whet.stages import run_all
        from whet.track.curve import plot
        from whet.track.show import report
    records, main = job.records, partial(run_all, job, start.checkpoint, start.state)
    directory, display = records.directory, records.display
    run_loop(with_explorers(job.loaded, job.plans, main, stack))
    records.saver.wait()
    display.phase("upload")
    records.uploads.finish()
    records.saver.tidy()
    display.close()
    if records.stop.requested:
        display.message(_stopped(directory.path))
        return INTERRUPTED
    display.show(report(directory.path, curve=plot(directory.path)))
    return OK


def _stopped(run_dir: Path) -> str:
    """What is said at the end of a run that was stopped."""
    saved = checkpoint.newest(run_dir / "checkpoints")
    return f"stopped; {f'saved as {saved}; the same command resumes the run' if saved else 'nothing to save yet'}"


def _show_finished(cfg: Config, directory: RunDirectory, display: Display, state: Json) -> None:
    """Report that the run is finished, show its summary, and finish uploads."""
    from whet.job import open_saver
    from whet.track.show import report

    with reading(directory.path / checkpoint.STATE):
        ledger = Ledger.from_state(state["ledger"])
    ledger.check_learned()
    more = "increase train.steps"
    if state.get("stopped_early") is not None:
        more = "its evaluations stopped improving; drop train.early_stopping, or give it more patience,"
    display.message(
        f"{directory.path} holds a finished run; {more} to continue it, or give "
        "another run_dir or checkpoint.resume=fresh to start a new run"
    )
    display.show(report(directory.path, curve=directory.path / "curve.png"))
    uploads = open_saver(cfg, directory.path)[1]
    uploads.missing(*written(directory.path, state))
    uploads.finish()


def watchdog_timeout_s(loaded: Loaded) -> float:
    """How long this process may make no progress (`deadlines.silence`)."""
    c = loaded.config.checkpoint
    copies_s = DEADLINE_S if c.upload_to or c.upload_exports_to else 0.0
    return silence(loaded.config, loaded.stages, least_s=copies_s)


def join_cluster(
    loaded: Loaded, planned: Sequence[Plan], rewards: Sequence[RewardSet], stack: ExitStack
) -> dict[str, Any]:
    """How `open_models` opens the parts of the run that are in a cluster, if the config has any; only then Ray is
    used. ConfigError if the parts do not all fit."""
    cfg = loaded.config
    replicas, c = cfg.rollout.replicas, cfg.cluster
    if not (replicas or c.ranks or c.reward_hosts or c.explorers):
        return {}
    from whet.cluster import engines, nodes, parts
    from whet.cluster.rewards import RewardHosts

    stack.callback(nodes.disconnect)
    parts.enter(loaded, planned)
    for made in rewards:
        if isinstance(made.jail, RewardHosts):
            stack.callback(made.jail.close)  # before the cluster is left
            made.jail.open()
    found: dict[str, Any] = {}
    if replicas:
        found["opener"] = engines.open_replicas
    if c.ranks:
        found["rank_lines"] = parts.rank_lines
    return found


def with_explorers(
    loaded: Loaded, planned: Sequence[Plan], main: Callable[[], Coroutine[Any, Any, None]], stack: ExitStack
) -> Coroutine[Any, Any, None]:
    """`main`, with the explorers of cluster.explorers; they are started here."""
    if not loaded.config.cluster.explorers:
        return main()
    from whet.cluster import explorers

    crew = explorers.open_crew(loaded, cuda=planned[0].device == "cuda")
    stack.callback(crew.close)
    return explorers.beside(crew, main())


def jail_of(cfg: Config) -> Callable[..., Any]:
    """Where reward functions run: in processes of this machine, or in the cluster once it is up."""
    if not cfg.cluster.reward_hosts:
        return Jail
    from whet.cluster.rewards import hosts_of

    return hosts_of(cfg)


def reward_sets(loaded: Loaded, functions: Mapping[str, RewardFunction], stack: ExitStack) -> list[RewardSet]:
    """One set for each stage; stages with equal rewards and limits share one, and its processes."""
    if strangers := sorted(functions.keys() - {name for cfg in loaded.stages for name in cfg.rewards}):
        raise ConfigError(f"reward functions {strangers} are not in any stage's `rewards`")
    for name, reward in ((n, r) for cfg in loaded.stages for n, r in cfg.rewards.items()):
        if (reward.function or "").startswith("object:") and name not in functions:
            raise ConfigError(
                f"rewards.{name}: this was a function passed from Python, which cannot be loaded here; pass it again "
                f"(rewards={{'{name}': ...}}), or give a function by name: rewards.{name}=rewards.py:FUNCTION"
            )
    made: list[tuple[Any, RewardSet | ConfigError]] = []
    out = []
    with EachStage(loaded.names) as stage:
        for n, cfg in enumerate(loaded.stages):
            with stage(n):
                wanted = (cfg.rewards, cfg.reward_workers)
                found = next((made_set for key, made_set in made if key == wanted), None)
                if found is None:
                    try:
                        found = RewardSet.from_config(
                            cfg.rewards,
                            cfg.reward_workers,
                            functions,
                            seed=cfg.seed,
                            imports=cfg.imports,
                            verifiers=verifiers(loaded.stages),
                            device=cfg.machine.device,
                            open_jail=jail_of(loaded.config),
                            open_judge=judges_of(cfg),
                        )
                        stack.callback(found.close)
                    except ConfigError as error:
                        found = error
                    made.append((wanted, found))
                if isinstance(found, ConfigError):
                    raise found
                out.append(replace(found, by_source=rewards_by_source(cfg.data)))
    return out


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`; in a separate thread if this thread already has an event loop (a notebook)."""
    if asyncio._get_running_loop() is None:  # the public one raises: a traceback would begin with that
        return asyncio.run(main)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, main).result()


@dataclass
class Stop:
    requested: bool = False
    begun: bool = False
    """The stages have begun."""


@contextmanager
def stop_on_ctrl_c(say: Callable[[str], None]) -> Iterator[Stop]:
    """The first Ctrl-C (or SIGTERM) ends the run after the current step and saves it; a second one, or one before the
    stages have begun, ends it at once."""
    stop = Stop()
    main = threading.current_thread() is threading.main_thread()

    def ask(number: int, frame: object) -> None:
        if stop.requested or not stop.begun:
            raise KeyboardInterrupt
        stop.requested = True
        say("stopping after this step; press Ctrl-C again to stop at once (the last checkpoint is kept)")

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM) if main}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["Metrics", "Result", "run_training", "train"]
