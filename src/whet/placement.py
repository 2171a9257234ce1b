"""Where the models of a stage are: in this process, on the policy's ranks, or on separate ranks; and calls of several
models at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from whet.config.checks_parallel import first_gpu, ranks_of, shards
from whet.config.deepspeed import engine_config
from whet.config.plan import Plan
from whet.config.schema import Config
from whet.job import Models
from whet.models.mesh import Dims
from whet.models.sharded import Sharding
from whet.rollout.router import Router
from whet.track.display import Display
from whet.training import chosen
from whet.training.engine import TrainEngine
from whet.training.ranks import RankGroup, Ranks
from whet.training.torch import TorchEngine
from whet.whole import Whole

T = TypeVar("T")

Jobs = dict[str, tuple[TrainEngine, Callable[[], T]]]
"""By the name of the result: a model, and what it is asked."""


def run_concurrently(jobs: Jobs[T]) -> dict[str, T]:
    """All results, by name. Models in different processes work at the same time, those in one place one after the other
    in the given order. A result does not depend on the other models, so the order does not change the results.

    The first error, or Ctrl-C, ends the ranks that others wait for, and is raised.
    """
    found: dict[str, T] = {}
    errors: list[BaseException] = []
    places: dict[Ranks | None, list[tuple[str, Callable[[], T]]]] = {}
    for name, (model, job) in jobs.items():
        places.setdefault(model.ranks if isinstance(model, RankGroup) else None, []).append((name, job))

    def failed(error: BaseException, place: Ranks | None) -> None:
        errors.append(error)
        for other in places:
            if other not in (None, place):
                other.give_up()  # type: ignore[union-attr]

    def work(place: Ranks | None) -> None:
        try:
            for name, job in places[place]:
                if not errors:
                    found[name] = job()
        except BaseException as error:  # noqa: BLE001  # raised below, in the thread that asked
            failed(error, place)

    # what this process computes stays in this thread
    mine, *others = sorted(places, key=lambda place: place is not None) or [None]
    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in others]
    for thread in threads:
        thread.start()
    if mine in places:
        work(mine)
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as error:
        failed(error, mine)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return {name: found[name] for name in jobs}


def trainers(ranks: Mapping[str, Ranks]) -> int:
    """Processes that train, this one among them where the policy learns here."""
    return sum(each.dims.world for each in ranks.values()) + ("policy" not in ranks)


def open_ranks(models: Models, cfg: Config, plan: Plan, display: Display) -> dict[str, Ranks]:
    """The processes of train.parallel by the model that they are named after, see `Learner.ranks`."""
    found: dict[str, Ranks] = {}
    if (users := chosen.of_user(cfg.train)) and ranks_of(cfg.train.parallel):
        # refused here, before any process starts; ranks load the files that are loaded here
        chosen.maker(*users, on_ranks=True)
    try:
        for whose in ranks_of(cfg.train.parallel):
            found[whose] = _started(models, cfg, plan, whose, display)
    except BaseException:
        for ranks in found.values():
            ranks.close()
        raise
    return found


def _started(models: Models, cfg: Config, plan: Plan, whose: str, display: Display) -> Ranks:
    """The ranks that are named after one model."""
    p = cfg.train.parallel
    dims = Dims(dp_replicate=p.dp_replicate, dp_shard=shards(p), tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep)
    processes = sum(ranks_of(p).values()) + ("policy" not in ranks_of(p))
    own = "" if whose == "policy" else whose
    display.phase(f"start {dims.world} ranks" + (f" of the {own}" if own else ""))
    return Ranks(
        dims,
        whose=own,
        first_gpu=first_gpu(p, whose),
        sharding=Sharding(
            reshard=p.reshard_after_forward, prefetch=p.prefetch, min_parameters=p.wrap_min_num_params
        ),
        device=models.model.device.type,
        threads=max(1, plan.threads // processes),
        timeout_s=p.timeout_s,
        imports=cfg.imports,
        open_lines=models.rank_lines and models.rank_lines(cfg, models.model),
    )


def engine_of(
    models: Models,
    cfg: Config,
    role: str,
    start: Whole,
    *,
    ranks: Mapping[str, Ranks],
    name: str | None = None,
    **how: Any,
) -> TrainEngine:
    """The engine of one role: on its own ranks, on the policy's, or in this process. It begins with a model. name: of
    the model among several of the role."""
    where, users = ranks.get(role, ranks.get("policy")), chosen.of_user(cfg.train)
    if where is None:
        make = TorchEngine if users is None else partial(chosen.made, *users)
        return make(start.model, models.ops, **how)
    if role == "policy" and _samples_elsewhere(models):
        how["home"] = Path(cfg.run_dir).absolute() / "policy"
    how |= {"sharded": cfg.checkpoint.sharded, "chunks": cfg.train.parallel.pipeline_chunks}
    how |= {"weights": start.weights, "kernels": cfg.machine.kernels}
    if users is not None:
        how["engine"] = users
    if cfg.train.engine == "deepspeed":
        dtype = str(next(start.model.parameters()).dtype).removeprefix("torch.")
        how["deepspeed"] = engine_config(cfg.train, how.get("optimizer"), dtype)
    return RankGroup(where, name or role, start.model, **how)


def _samples_elsewhere(models: Models) -> bool:
    """Nothing in this process samples from the policy, or from a copy that shares its memory."""
    engine = models.engine
    return models.sampler != "here" and (
        engine is None or (isinstance(engine, Router) and engine.takes_source)
    )
