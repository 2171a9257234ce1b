"""The whole run as a folder of safetensors and JSON: written atomically, read only if undamaged.

checkpoints/0-sft-000300/   stage 0 ('sft') after step 300
    manifest.json           size and SHA-256 of every other file
    state.json              position in data, buffer, ledger, versions, score, ...
    groups.arrow            groups of rollouts that wait in the buffer; state.json has their numbers
    tokenizer.json          of a run that has built its tokenizer: data that changes later does not change a token
    policy/ critic/ reference/      weights and moments: `models.tensor_files`
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Protocol

from whet.config.tree import STAGE
from whet.inputs import MOST_DEPTH, check_regular, depth
from whet.storage.manifests import MANIFEST, digest, manifest, oldest_first, place_of
from whet.track.files import atomic_folder, drop_folder, tidy, write_json
from whet.types import CheckpointError, Json, WhetError

log = logging.getLogger(__name__)

ALL = ("model", "optimizer")

STATE = "state.json"
MOST_LEVELS = 2 * MOST_DEPTH
"""Lists and mappings inside one another: a state has rows, which have at most MOST_DEPTH, in lists of its own."""

GROUPS = "groups.arrow"
_GROUP = "group in groups.arrow"
"""Key of an object of state.json that stands for bytes: their row in groups.arrow."""

TOKENIZER = "tokenizer.json"

SCORE = "score"
"""In state.json: the number by which the best are kept, if the step was evaluated."""

Writer = Callable[[Path], None]
"""Writes an engine's files into a folder."""


class Saved(Protocol):
    """The interface of a training engine for checkpoints."""

    def save(self, path: Path, *, moments: bool) -> None:
        """Weights and the schedule's place; with `moments` the optimizer's, too."""

    def capture(self, *, moments: bool) -> Writer:
        """The same in two parts: a copy of the state as it is now, and the function that writes it."""

    def load(self, path: Path) -> None: ...

    def forget(self) -> None:
        """Reset the optimizer's moments."""


Scores = Callable[[Sequence[str]], Mapping[str, float | None]]
"""The scores of checkpoints by name."""


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay."""

    newest: int | None = None
    """How many of the newest; None: all."""
    best: int = 0
    """How many of those with the best score, beside them."""
    smallest: bool = False
    """The best score is the smallest."""

    def best_of(self, scores: Mapping[str, float | None]) -> list[str]:
        """The best of checkpoints by name, in the run's order; of equal ones the earlier."""
        sign = 1 if self.smallest else -1
        scored = {name: s for name, s in scores.items() if s is not None and math.isfinite(s)}
        return sorted(scored, key=lambda name: sign * scored[name])[: self.best]

    def dropped(self, names: Sequence[str], scores: Scores) -> list[str]:
        """Those that go, of checkpoints by name in the run's order. The newest never does."""
        old = names[: -self.newest] if self.newest is not None else []
        best = self.best_of(scores(names)) if old and self.best else []
        return [name for name in old if name not in best]


def write(root: Path, writers: Mapping[str, Writer], state: Json) -> Path:
    """Write one checkpoint atomically."""
    path = root / f"{state['stage']}-{state['stage_name']}-{state['step']:06d}"
    try:
        with atomic_folder(path) as folder:
            for name, writer in writers.items():
                writer(folder / name)
            plain, groups = unpacked(state)
            if groups:
                from whet.buffer.groups import write  # pyarrow stays off the start of the CLI

                write(folder / GROUPS, groups)
            write_json(folder / STATE, plain, durable=False)
            write_json(folder / MANIFEST, manifest(folder), durable=False)
    except WhetError as e:
        raise CheckpointError(str(e)) from e
    return path


def prune(root: Path, path: Path, keep: Keep, scores: Scores, *, spare: Collection[Path] = ()) -> None:
    """Drop what is later than the checkpoint `path`, and what is not to be kept. Those in `spare` stay for now."""
    found = all_in(root)
    upto = found.index(path) + 1
    gone = keep.dropped([p.name for p in found[:upto]], scores)
    spared = {p.resolve() for p in spare}
    for other in (*found[upto:], *(root / name for name in gone)):
        try:
            if other.resolve() not in spared:
                drop_folder(other)  # an evaluation process may read it
        except OSError as e:
            raise CheckpointError(f"cannot remove {other}, which is no longer kept: {e}") from e


class ScoresRead:
    """Scores of the checkpoints in a folder. Each is read once, as long as it is asked for: a run may keep thousands,
    and asks with every save and every evaluation."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[str, float | None] = {}

    def __call__(self, names: Sequence[str]) -> dict[str, float | None]:
        known = self._known
        self._known = {name: known[name] if name in known else score_of(self.root / name) for name in names}
        return self._known

    def forget(self, name: str) -> None:
        """The checkpoint has been written again."""
        self._known = {other: score for other, score in self._known.items() if other != name}


def score_of(path: Path) -> float | None:
    """The score that a checkpoint was saved with; None if it has none, or cannot be read."""
    try:
        score = json.loads((path / STATE).read_text(encoding="utf-8")).get(SCORE)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return score if isinstance(score, int | float) else None


class Saver:
    """Saves a run's checkpoints; in the background one at a time, while the run continues.

    A kill in the middle leaves the older checkpoints unchanged. `after` is called for each complete one.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: Keep,
        contents: Collection[str] = ALL,
        background: bool = False,
        after: Callable[[Path], None] = lambda path: None,
        spare: Callable[[], Collection[Path]] = tuple,
        files: Mapping[str, Writer] = MappingProxyType({}),
    ) -> None:
        """spare: returns which checkpoints must stay for now, independent of `keep`. files: what every checkpoint has
        beside the engines' files and the state, by name."""
        self.root, self.keep, self.contents, self.files = root, keep, contents, files
        self.after, self.spare = after, spare
        self._scores = ScoresRead(root)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="whet-save") if background else None
        self._writing: Future[None] | None = None

    def save(self, engines: Mapping[str, Saved], state: Json) -> None:
        """One checkpoint of the run as it is now. Raises CheckpointError; in the background, for the one before."""
        self.wait()
        moments = "optimizer" in self.contents
        state = {**state, "contents": list(self.contents)}
        if self._thread is None:
            self._write({name: partial(e.save, moments=moments) for name, e in engines.items()}, state)
            return
        state = copied(state)  # the run's own lists go on changing
        captured = {name: engine.capture(moments=moments) for name, engine in engines.items()}
        self._writing = self._thread.submit(self._write, captured, state)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises CheckpointError if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def is_best(self, score: float | None, *, at: tuple[int, int]) -> bool:
        """Whether a checkpoint with this score would be among the best so far. at: number of the stage, step."""
        if score is None or not self.keep.best:
            return False
        self.wait()
        earlier = [p.name for p in all_in(self.root) if (place_of(p.name) or at) < at]
        return "new" in self.keep.best_of({**self._scores(earlier), "new": score})

    def oldest(self) -> tuple[int, int] | None:
        """Number of the stage and step of the oldest checkpoint there is."""
        found = all_in(self.root)
        return place_of(found[0].name) if found else None

    def best(self) -> list[str]:
        """Names of the best checkpoints there are."""
        return self.keep.best_of(self._scores([p.name for p in all_in(self.root)]))

    def tidy(self) -> None:
        """Drop what stayed only because it was in use."""
        if found := all_in(self.root):
            prune(self.root, found[-1], self.keep, self._scores, spare=self.spare())

    def settle(self) -> None:
        """Wait for the last checkpoint. Raises nothing: another error is being raised, or `wait` has reported this
        one."""
        try:
            self.wait()
        except CheckpointError as e:
            log.error("the last checkpoint could not be written: %s", e)

    def close(self) -> None:
        """`settle`, when the run ends, however it does."""
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()

    def _write(self, writers: Mapping[str, Writer], state: Json) -> None:
        path = write(self.root, {**self.files, **writers}, state)
        self._scores.forget(path.name)
        prune(self.root, path, self.keep, self._scores, spare=self.spare())
        self.after(path)


def tokenizer_in(path: Path | None) -> Path | None:
    """The file of a checkpoint with the tokenizer that its run has built. None: it was not built, or by a version that
    did not write it (0.2 and earlier)."""
    file = path / TOKENIZER if path is not None else None
    return file if file is not None and file.is_file() else None


def own_tokenizer(root: Path, folder: Path) -> Path | None:
    """A copy in `folder` of the newest checkpoint's tokenizer, for a process beside the run that writes into `root` and
    deletes older checkpoints at any moment. None: there is no checkpoint yet, or see `tokenizer_in`."""
    while found := all_in(root):
        file = tokenizer_in(found[-1])
        if file is None and found[-1].is_dir():
            break
        with suppress(FileNotFoundError):  # deleted meanwhile: there is a newer one
            if file is not None:
                return Path(shutil.copyfile(file, folder / TOKENIZER))
    return None


def all_in(root: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return [root / name for name in oldest_first(p.name for p in root.glob("*-*"))]


def newest(root: Path) -> Path | None:
    """The newest checkpoint, after mending what a kill left half-done. Call it holding the run's lock."""
    if not root.is_dir():
        return None
    tidy(root)
    found = all_in(root)
    return found[-1] if found else None


def newest_whole(root: Path) -> tuple[Path, Json] | None:
    """The newest checkpoint that is undamaged, and its state. Those after it that are damaged are named in the log, and
    stay until the run has saved another one. Raises CheckpointError if there are some and all are damaged."""
    first: Damaged | None = None
    found = all_in(root) if newest(root) is not None else []
    for path in reversed(found):
        try:
            state = state_of(path)
        except Damaged as e:
            log.warning("%s", e)
            first = first or e
            continue
        if first is not None:
            log.warning("resuming from %s instead: %s", path, _lost(path, found[-1]))
        return path, state
    if first is not None:
        others = f"; all {len(found)} checkpoints here are damaged" if found[1:] else ""
        raise Damaged(
            f"{first}{others}; put a copy of one back, or start a new run in another run_dir"
        ) from first
    return None


def _lost(path: Path, last: Path) -> str:
    """The loss when resuming from `path` and not from `last`."""
    (stage, step), (last_stage, last_step) = place_of(path.name) or (0, 0), place_of(last.name) or (0, 0)
    if stage == last_stage:
        return f"{last_step - step} steps are lost and trained again"
    return f"all steps after step {step} of stage {stage} are lost and trained again"


class Damaged(CheckpointError):
    """A checkpoint that has changed since it was written."""


def read_state(path: Path) -> Json:
    """The state of a checkpoint if all its files are as written. Raises Damaged, a CheckpointError, naming the first
    damaged file."""
    try:
        return state_of(path)
    except Damaged as e:
        at = place_of(path.name) or (0, 0)
        older = [p for p in all_in(path.parent) if (place_of(p.name) or at) < at]
        instead = (
            f"checkpoint.resume={older[-1]} resumes from the previous checkpoint, which export accepts too"
            if older
            else "give the folder of another checkpoint"
        )
        raise Damaged(f"{e}; {instead}; or start a new run in another run_dir") from e


def state_of(path: Path) -> Json:
    """As `read_state`, without a word of what else a run could resume from."""
    for name, (size, expected) in _listed(path).items():
        file = path / name
        if not file.is_file():
            raise Damaged(f"{path}: {name} is missing")
        if file.stat().st_size != size:
            raise Damaged(f"{path}: {name} has {file.stat().st_size} bytes, but {size} were written")
        if digest(file) != expected:
            raise Damaged(f"{path}: {name} has changed since it was written (its SHA-256 differs)")
    state = _json(path, STATE)
    kinds = {"stage": int, "stage_name": str, "step": int}
    if not isinstance(state, dict) or any(type(state.get(key)) is not kind for key, kind in kinds.items()):
        raise Damaged(f"{path}: {STATE} does not name its stage and step")
    if not STAGE.fullmatch(state["stage_name"]) or state["stage"] < 0 or state["step"] < 0:
        raise Damaged(
            f"{path}: {STATE} is of stage {state['stage_name'][:60]!r} (number {state['stage']}, step "
            f"{state['step']}), which no run has: its files would be named by it"
        )
    try:
        return repacked(state, _groups_of(path))
    except (OSError, ValueError, TypeError, IndexError) as e:
        raise Damaged(f"{path}: {GROUPS} cannot be read: {e}") from e


def _groups_of(path: Path) -> list[bytes]:
    if not (path / GROUPS).exists():
        return []
    from whet.buffer.groups import read  # pyarrow stays off the start of the CLI

    return read(path / GROUPS)


def unpacked(state: Json) -> tuple[Json, list[bytes]]:
    """A state as JSON, and the bytes that stood in it."""
    groups: list[bytes] = []

    def plain(value: Json) -> Json:
        if isinstance(value, bytes):
            groups.append(value)
            return {_GROUP: len(groups) - 1}
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    return plain(state), groups


def repacked(state: Json, groups: Sequence[bytes]) -> Json:
    """What `unpacked` was given."""
    if isinstance(state, dict):
        if state.keys() == {_GROUP}:
            return groups[state[_GROUP]]
        return {key: repacked(each, groups) for key, each in state.items()}
    return [repacked(each, groups) for each in state] if isinstance(state, list) else state


def copied(state: Json) -> Json:
    """The state as it would be read again."""
    plain, groups = unpacked(state)
    return repacked(json.loads(json.dumps(plain)), groups)


def _listed(path: Path) -> dict[str, tuple[int, str]]:
    """Size and digest by name, from the manifest: of every file in the folder, and at least of the state."""
    said = _json(path, MANIFEST)
    files = said.get("files") if isinstance(said, dict) else None
    if not isinstance(files, dict) or STATE not in files:
        raise Damaged(f"{path} is not a complete checkpoint ({MANIFEST}: it does not list {STATE})")
    for name, about in files.items():
        match about:
            case [int(), str()] if not PurePath(name).is_absolute() and ".." not in PurePath(name).parts:
                pass
            case _:
                raise Damaged(
                    f"{path} is not a complete checkpoint ({MANIFEST}: {name[:100]!r} is not [size, SHA-256])"
                )
    there = {
        str(p.relative_to(path)) for p in path.rglob("*") if p.suffix in (".json", ".safetensors", ".arrow")
    }
    if strangers := sorted(there - files.keys() - {MANIFEST}):
        raise Damaged(
            f"{path} is not a complete checkpoint ({MANIFEST}: it does not list the file {strangers[0]})"
        )
    return {name: (size, expected) for name, (size, expected) in files.items()}


def _json(path: Path, name: str) -> Json:
    try:
        check_regular(path / name, Damaged)
        text = (path / name).read_text(encoding="utf-8")
        value = json.loads(text)
    except json.JSONDecodeError as e:
        why = f"it is not JSON: {e}" if text else "it is empty"
        raise Damaged(f"{path} is not a complete checkpoint ({name}: {why})") from e
    except (Damaged, OSError, ValueError, RecursionError) as e:
        raise Damaged(f"{path} is not a complete checkpoint ({name}: {e})") from e
    if depth(value) > MOST_LEVELS:  # who reads on does so by recursion
        raise Damaged(
            f"{path} is not a complete checkpoint ({name}: it nests more than {MOST_LEVELS} levels deep)"
        )
    return value


def glance(root: Path) -> Json:
    """The position of the run from the newest checkpoint, unverified; not done if none is readable."""
    found = all_in(root)
    try:
        state = _json(found[-1], STATE) if found else None
    except Damaged:
        state = None
    return state if isinstance(state, dict) and {"stage", "done"} <= state.keys() else {"done": False}


def check_contents(path: Path, state: Json, wanted: Collection[str]) -> None:
    """Raise CheckpointError if a checkpoint lacks a part of `checkpoint.load_contents`."""
    held = state.get("contents")
    if not isinstance(held, list) or not all(isinstance(part, str) for part in held):
        raise Damaged(f"{path}: {STATE} does not list the contents of the checkpoint")
    if missing := [part for part in wanted if part not in held]:
        raise CheckpointError(
            f"{path} has no {', '.join(missing)} (checkpoint.save_contents was {', '.join(held)}), so the run cannot "
            "resume exactly; checkpoint.load_contents=[model] resumes with optimizer moments of zero"
        )


def load(path: Path, engines: Mapping[str, Saved], *, wanted: Collection[str] = ALL) -> None:
    """Fill the engines from a checkpoint that `read_state` has approved.

    wanted: without "optimizer", moments start at zero; weights and the position in the schedule are always read.
    """
    from whet.models.tensor_files import exists

    for name, engine in engines.items():
        if not (path / name).is_dir():
            raise CheckpointError(f"{path} has no {name!r}: the run that wrote it had none")
        engine.load(path / name)
        if "optimizer" not in wanted and exists(path / name / "optimizer.safetensors"):
            engine.forget()
