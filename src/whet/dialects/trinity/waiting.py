"""Where Trinity-RFT's experiences wait for the trainer, and how old they may be there."""

from __future__ import annotations

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.data import apart
from whet.dialects.trinity.loss import STRATEGY, strategy
from whet.dialects.trinity.values import EXPERIENCES, Native, at_least, folder_of, in_rounds, known_as, text
from whet.types import ConfigError


def queue(values: Values) -> Native:
    """The buffer between explorer and trainer: in memory. Its backup is the record of the rollouts.

    Explorers and a trainer of their own meet in its database.
    """
    storage, path = str(values[f"{EXPERIENCES}.storage_type"]), text(values, f"{EXPERIENCES}.path")
    if apart(values):
        return _store(values, storage, path)
    if storage == "sql":
        raise NotSupportedYet(
            f"{EXPERIENCES}.storage_type: sql is coming, not built yet, with mode: both; here: queue, in "
            "memory, or mode: train and mode: explore in two processes."
        )
    known_as(storage, {"queue": 1, "file": 1}, key=f"{EXPERIENCES}.storage_type")
    if path is None or values["data_processor.experience_pipeline.input_save_path"]:
        return {}
    plain = path.removeprefix("sqlite:///")
    if "://" in plain:
        raise NotSupportedYet(
            f"{EXPERIENCES}.path: {path}: a database server is coming, not built yet; here: a file."
        )
    return {"dirs.rollouts": folder_of(plain, f"{EXPERIENCES}.path")}


def _store(values: Values, storage: str, path: str | None) -> Native:
    """sql gives the newest rows that nobody has read, a queue the oldest."""
    orders = {"queue": "arrival", "sql": "newest"}
    known_as(storage, orders, key=f"{EXPERIENCES}.storage_type")
    if path is None:
        raise NotSupportedYet(
            f"{EXPERIENCES}.path: mode: {values['mode']} needs a database that explorers and trainer both see: "
            "sqlite:///PATH or postgresql://USER@HOST/DATABASE; a queue in memory between processes is coming, not "
            "built yet."
        )
    path = path if "://" in path else f"sqlite:///{path}"
    known_as(
        path.partition("://")[0],
        dict.fromkeys(("sqlite", "postgresql", "files")),
        key=f"{EXPERIENCES}.path",
        coming=("mysql",),
    )
    return {"buffer.url": path} | ({} if in_rounds(values) else {"buffer.order": orders[storage]})


# ---------------------------------------------------------------- staleness


def oldest(values: Values) -> int:
    """The age of the oldest rollout of a step."""
    return int(values["synchronizer.sync_interval"] + values["synchronizer.sync_offset"])


def bound(values: Values) -> int | None:
    """The age that staleness_control admits; None: any. Step s takes versions from s - it on, with 0.6.0 one more."""
    most = strategy(values)[1].get("max_staleness")
    if most is None or most in ("inf", float("inf")):
        return None
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ConfigError(f"{STRATEGY}_args.max_staleness: got {most!r}, expected a whole number >= 1.")
    return most + at_least(values, "0.6.0")
