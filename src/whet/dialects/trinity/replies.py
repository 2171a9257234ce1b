"""Trinity-RFT's files of given replies: those that sft and dpo learn from, and the demonstrations of a mix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.presets import Kind, preset
from whet.dialects.trinity.values import EXPERIENCES, given, known_as, text
from whet.types import ConfigError, Json

AUXILIARY = "buffer.trainer_input.auxiliary_buffers"
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
FORMAT: dict[str, Json] = {
    "prompt_type": "messages",
    "prompt_key": "prompt",
    "response_key": "response",
    "messages_key": "message",
    "chosen_key": "chosen",
    "rejected_key": "rejected",
    "system_prompt": None,
    "system_prompt_key": None,
}
"""Columns with the document's names."""
Own = Mapping[str, Json]
"""One buffer or taskset by dotted names inside it."""


def rows_of(own: Own, what: str, *, at: str) -> dict[str, Json]:
    """Where the rows are: a file, or a split (and subset) of a dataset folder. Nothing is downloaded."""
    path, split, subset = given(own.get("path")), str(own.get("split") or "train"), text(own, "subset_name")
    if path is None:
        raise ConfigError(f"{what}.path: must be given: a dataset folder, or a file ({', '.join(SUFFIXES)}).")
    if Path(str(path)).suffix not in SUFFIXES:
        return {f"{at}.path": path, f"{at}.split": split, **({f"{at}.subset": subset} if subset else {})}
    for key, value, only in (("split", split, "train"), ("subset_name", subset, None)):
        if value != only:
            raise ConfigError(f"{what}.{key}: {path} is one file, whose only split is train, not {value!r}.")
    return {f"{at}.path": path}


def system(own: Own, *, at: str) -> dict[str, Json]:
    """The system message: of the row (system_prompt_key), else of them all."""
    column, message = text(own, "format.system_prompt_key"), text(own, "format.system_prompt")
    if column:
        return {f"{at}.system_column": column}
    return {f"{at}.system": message} if message else {}


def replies(own: Own, what: str, *, at: str, kind: Kind = "sft") -> dict[str, Json]:
    """A file of prompts with replies, or of whole conversations."""
    storage = own.get("storage_type") or "queue"
    if storage == "sql":
        raise NotSupportedYet(f"{what}.storage_type: sql is coming, not built yet; here: file.")
    known_as(str(storage), {"file": 1, "queue": 1}, key=f"{what}.storage_type")
    form = {key: default if given(own.get(f"format.{key}")) is None else own[f"format.{key}"]
            for key, default in FORMAT.items()}  # fmt: skip
    out = rows_of(own, what, at=at) | ({f"{at}.name": own["name"]} if given(own.get("name")) else {})
    if form["prompt_type"] not in ("messages", "plaintext"):
        raise ConfigError(
            f"{what}.format.prompt_type: {form['prompt_type']} is neither messages nor plaintext."
        )
    talk = form["prompt_type"] == "messages"
    if kind == "dpo":
        columns = {"prompt": form["messages_key" if talk else "prompt_key"], "response": form["chosen_key"]}
        columns["rejected"] = form["rejected_key"]
    elif talk:
        columns = {"messages": form["messages_key"]}
    else:
        columns = {"prompt": form["prompt_key"], "response": form["response_key"]}
    return (
        out | {f"{at}.{key}": value for key, value in columns.items()} | ({} if talk else system(own, at=at))
    )


def demonstrations(values: Values) -> Mapping[str, Json]:
    """trainer_input.experience_buffer: the file that sft and dpo read, in the order of the file."""
    kind = preset(values).kind
    if kind == "online":
        return {}
    own = inside(values, EXPERIENCES)
    turns = {}
    if kind == "sft":
        turns = {"data.learn_turns": "all" if own.get("format.enable_concatenated_multi_turn") else "last"}
    return {**replies(own, EXPERIENCES, at="data.train.0", kind=kind), **turns, "data.chat": True,
            "data.order": "sequential"}  # fmt: skip


def queue(values: Values) -> Mapping[str, Json]:
    """The buffer between explorer and trainer: in memory. Its backup is the record of the rollouts.

    Explorers and a trainer of their own meet in its database.
    """
    if preset(values).kind != "online":
        return {}
    storage, path = values[f"{EXPERIENCES}.storage_type"], text(values, f"{EXPERIENCES}.path")
    if values["mode"] in ("train", "explore"):
        return _store(str(values["mode"]), str(storage), path, rounds=in_rounds(values))
    if storage == "sql":
        raise NotSupportedYet(
            f"{EXPERIENCES}.storage_type: sql is coming, not built yet, with mode: both; here: queue, in "
            "memory, or mode: train and mode: explore in two processes."
        )
    known_as(str(storage), {"queue": 1, "file": 1}, key=f"{EXPERIENCES}.storage_type")
    if path is None:
        return {}
    plain = path.removeprefix("sqlite:///")
    if "://" in plain:
        raise NotSupportedYet(
            f"{EXPERIENCES}.path: {path}: a database server is coming, not built yet; here: a file."
        )
    return {"track.rollouts_dir": str(Path(plain).with_suffix(""))}


def in_rounds(values: Values) -> bool:
    """Explorers go in step with the trainer: the step says which version of the weights plays which task. Not where a
    step takes what happens to be newest, or of the highest priority."""
    used = values[f"{EXPERIENCES}.replay_buffer.enable"] or values[f"{EXPERIENCES}.storage_type"] == "sql"
    return values["synchronizer.sync_style"] == "fixed" and not used


def _store(mode: str, storage: str, path: str | None, *, rounds: bool) -> dict[str, Json]:
    """sql gives the newest rows that nobody has read, a queue the oldest."""
    orders = {"queue": "arrival", "sql": "newest"}
    known_as(storage, orders, key=f"{EXPERIENCES}.storage_type")
    if path is None:
        raise NotSupportedYet(
            f"{EXPERIENCES}.path: mode: {mode} needs a database that explorers and trainer both see: "
            "sqlite:///PATH or postgresql://USER@HOST/DATABASE; a queue in memory between processes is coming, not "
            "built yet."
        )
    scheme = path.partition("://")[0] if "://" in path else "sqlite"
    known_as(
        scheme, dict.fromkeys(("sqlite", "postgresql", "files")), key=f"{EXPERIENCES}.path", coming=("mysql",)
    )
    order: dict[str, Json] = {} if rounds else {"buffer.order": orders[storage]}
    return order | {"buffer.url": path if "://" in path else f"sqlite:///{path}"}


def template(values: Values) -> str | None:
    """The chat template of the file that sft and dpo read."""
    own = text(values, f"{EXPERIENCES}.format.chat_template")
    return own if preset(values).kind != "online" else None


def inside(values: Values, section: str) -> dict[str, Json]:
    """The values of a section, by the names inside it."""
    return {key.removeprefix(f"{section}."): v for key, v in values.items() if key.startswith(f"{section}.")}
