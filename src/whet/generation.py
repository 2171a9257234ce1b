"""`whet generate`: replies to the prompts of data.eval, in a file with the rows that ask: no rewards, no training.

Replies are kept beside that file as they come, so a command that was killed goes on where it was; the file itself is
there when it is complete. torch is imported only after the config is valid.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import itertools
import json
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from whet import environment
from whet.api import join_cluster, run_loop, watchdog_timeout_s
from whet.arguments import FILE, FLAG, FUNCTION, PATH, TEXT, WHOLE, expect, expect_overrides
from whet.bench import ALL, Selected, alone, check_dialect, checkpoints_of, config_of, is_model, set_up
from whet.config.engines import engines_of
from whet.config.evaluation import all_asked, asked, writes_replies
from whet.config.faults import of_stage
from whet.config.load import Loaded, load
from whet.config.plan import Plan, plans
from whet.config.schema import Config
from whet.config.source_faults import in_words_of
from whet.config.tree import merge
from whet.data.given import Given, taken
from whet.guard.imports import import_all
from whet.guard.watch import Watch
from whet.outputs import replacing
from whet.start import began
from whet.storage.manifests import MANIFEST, digest
from whet.storage.paths import brought_here, with_rows
from whet.track.files import file_error
from whet.types import ConfigError, DataError, Group, Json, Task, WhetError

if TYPE_CHECKING:
    from whet.data.prepare import Prepared
    from whet.job import Models
    from whet.track.display import Display

log = logging.getLogger(__name__)

FOLDER = "generate"
"""Where in a run directory the log of this command is."""
COLUMN = "responses"
"""The column of the replies to a row, a list of texts, as verl writes it and `whet eval --offline` reads it."""
_OTHER = "another file: -o FILE"
AHEAD = 4
"""Tasks that are begun before the replies to the first of them are there, in units of what is sampled at once."""


def generate(
    target: str | Path,
    *,
    output: str | Path | None = None,
    data: Any = None,
    stage: str | None = None,
    step: int | None = None,
    overrides: Sequence[str] = (),
    dialect: str | None = None,
    trust_script: bool = False,
    say: Callable[[Loaded], object] = lambda loaded: None,
    **sections: Any,
) -> Path:
    """Write replies to the prompts of data.eval, eval.samples to each row, sampled as eval.sampling says. Returns
    the path of the file, which has every column of the rows, and `responses` with a list of texts.

    target: a config file, a run directory, whose newest checkpoint replies, or a model's folder.
    output: the file to write (.parquet, .jsonl). Default: track.dump.replies of the config.
    data: a file, or rows as for `train`, in place of data.eval.
    stage, step: of a run, the checkpoint of this stage, of this step.
    overrides, sections: as for `train`.
    dialect, trust_script: for a config file or launch script, as the options of `whet generate`.
    say: called with the config before anything is run.

    If a call was stopped or killed, the same call continues where it ended.

    Raises ConfigError before anything is run, DataError for a row that cannot be read or written, WhetError where a
    reply cannot be sampled.
    """
    expect(
        {
            "target": (target, PATH),
            "output": (output, FILE),
            "stage": (stage, TEXT),
            "step": (step, WHOLE),
            "dialect": (dialect, TEXT),
            "trust_script": (trust_script, FLAG),
            "say": (say, FUNCTION),
        }
    )
    expect_overrides(overrides)
    target, chosen = Path(target).expanduser(), Selected(stage, step)
    check_dialect(target, dialect)
    rows: list[Given] = []
    if output is not None:
        sections = merge(sections, {"track": {"dump": {"replies": str(output)}}})
    if data is not None:
        taken_data, rows = taken({"data": {"eval": data}})
        sections = merge(sections, taken_data)
    if target.is_dir() and not is_model(target):
        loaded = config_of(target, overrides, sections)
    elif chosen != ALL:
        raise ConfigError(
            f"{target} is not a run directory, so it has no checkpoints; leave stage and step out"
        )
    elif is_model(target):
        base = {"name": f"generate-{target.resolve().name}", "model": {"path": str(target)}}
        loaded = load(None, overrides, {**base, **sections})
    else:
        loaded = load(target, overrides, sections, dialect, trust_script=trust_script)
    loaded = with_rows(loaded, rows)
    say(loaded)
    run = target / "checkpoints" if target.is_dir() and not is_model(target) else None
    return write_replies(loaded, weights=None if run is None else checkpoints_of(run, chosen)[-1], rows=rows)


def write_replies(loaded: Loaded, *, weights: Path | None = None, rows: Sequence[Given] = ()) -> Path:
    """`generate` of a config. weights: the checkpoint that replies; None: the config's own model. rows: what is written
    before data is read."""
    check(loaded)
    planned = [replace(plan, models_elsewhere=False) for plan in plans(loaded, trains=False)]
    loaded = alone(brought_here(loaded))
    cfg = loaded.config
    out, home = Path(cfg.track.dump["replies"]).expanduser(), Path(cfg.run_dir) / FOLDER
    if out.exists():
        raise ConfigError(f"{out} exists; move it away, or give another file: -o FILE")
    environment.prepare(planned[0].threads, cfg.machine.logprob_parity != "off")
    with environment.one_run(), ExitStack() as stack:
        set_up(cfg, home, "generate", rows=rows, stack=stack)
        import_all(cfg.imports)
        from whet.data.recognise import with_columns

        loaded, columns = with_columns(loaded, parts=("eval",))
        for said in columns:
            log.info("%s", said)
        return _written(loaded, planned, out, home=home, weights=weights, stack=stack)


def check(loaded: Loaded) -> None:
    """ConfigError for a config without prompts, without a place for the replies, or with an environment."""
    cfg = loaded.config
    what = str(loaded.file or "the config")
    if not writes_replies(cfg):
        raise ConfigError(f"{what} names no file for the replies; give one: -o FILE (.parquet, .jsonl)")
    if not any(stage.data.eval for stage in loaded.stages):
        raise ConfigError(f"{what} has no prompts (data.eval); name them: --data FILE, in Python data=...")
    if any(stage.rollout.env for stage in loaded.stages):
        raise ConfigError(
            "rollout.env: `whet generate` samples a reply to each prompt, without an environment"
        )


def _written(
    loaded: Loaded,
    planned: Sequence[Plan],
    out: Path,
    *,
    home: Path,
    weights: Path | None,
    stack: ExitStack,
) -> Path:
    from whet import checkpoint
    from whet.data.prepare import prepare
    from whet.job import open_models, open_tokenizer
    from whet.track.display import Display
    from whet.track.timeline import Timeline

    state = None if weights is None else checkpoint.read_state(weights)
    index = (
        next(n for n, stage in enumerate(loaded.stages) if stage.data.eval)
        if state is None
        else state["stage"]
    )
    cfg = loaded.stages[index]
    if not cfg.data.eval:
        raise ConfigError(
            f"stage {loaded.names[index]!r} has no prompts (data.eval); name them: --data FILE, in Python data=..., or "
            "choose another stage: --stage NAME"
        )
    display = Display([("replies", 0)], unit="row")
    stack.callback(display.close)
    loaded = replace(loaded, day=began(home.parent), tokenizer=checkpoint.tokenizer_in(weights))
    openers = join_cluster(loaded, planned, (), stack)
    watch = stack.enter_context(Watch(limit_s=watchdog_timeout_s(loaded)))
    timeline = Timeline(home / "timeline.json")
    tokenizer = open_tokenizer(loaded, display)
    counts: Counter[str] = Counter()
    with of_stage(loaded.names, index), in_words_of(loaded, index):
        sources = prepare(
            cfg.data.eval,
            cfg.data,
            tokenizer=tokenizer,
            exclude=(),
            max_response_tokens=None,
            counts=counts,
        )
        check_columns(sources)
        write = FORMATS[out.suffix](sources)
    for said in _left_out(counts):
        display.message(said)
    total = sum(map(len, sources))
    kept = stack.enter_context(Kept(out.with_name(f"{out.name}.part"), _same(cfg, sources, weights)))
    models = open_models(
        loaded, planned, tokenizer=tokenizer, display=display, timeline=timeline, watch=watch, **openers
    )
    stack.enter_context(of_stage(loaded.names, index))
    display.stage(0, done=kept.rows, steps=total)
    if kept.rows:
        display.message(f"{kept.rows} of {total} rows have their replies already ({kept.path})")
    tasks = itertools.islice(_tasks(sources), kept.rows, None)
    run_loop(_sample(cfg, models, tasks, kept, display, weights=weights))
    display.phase("write")
    whole(out, write, kept.replies())
    kept.path.unlink()
    display.close()
    return out


def _left_out(counts: Mapping[str, int]) -> Iterator[str]:
    """What `data.overlong` has done to prompts, in words."""
    if dropped := counts.get("overlong_prompt_dropped"):
        yield f"{dropped} of {counts['rows']} rows are left out: their prompts are too long (data.overlong=filter)"
    if cut := counts.get("overlong_prompt_cut"):
        yield f"the prompts of {cut} of {counts['rows']} rows are truncated (data.overlong)"


def _tasks(sources: Sequence[Prepared]) -> Iterator[Task]:
    """Every row as a task, in the order of the files, uid from 0: those of an evaluation."""
    uids = itertools.count()
    return (source.task(k, next(uids)) for source in sources for k in range(len(source)))


def _same(cfg: Config, sources: Sequence[Prepared], weights: Path | None) -> str:
    """Equal for commands that give equal replies."""
    lora = cfg.model.lora
    said = {
        "prompts": [source.digest for source in sources],
        "asked": {
            name: [how.samples, how.sampling.model_dump(mode="json")] for name, how in all_asked(cfg).items()
        },
        "model": cfg.model.model_dump(mode="json"),
        "files": [_files(Path(path)) for path in (cfg.model.path, lora.path if lora else None) if path],
        "weights": None if weights is None else digest(weights / MANIFEST),
        "engine": [cfg.rollout.engine, cfg.rollout.quantization],
        "seed": cfg.seed,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> list[Json]:
    """Name, size and time of each file of a model: an export, or another download, takes the place of the one before.
    Their digests would take long."""
    return [
        [file.name, file.stat().st_size, file.stat().st_mtime_ns]
        for file in sorted(folder.iterdir())
        if file.is_file()
    ]


# ---------------------------------------------------------------- sampling


async def _sample(
    cfg: Config, models: Models, tasks: Iterator[Task], kept: Kept, display: Display, *, weights: Path | None
) -> None:
    """Replies to all tasks, kept in their order."""
    from whet.explorer import player
    from whet.rollout.episode import to_sampling
    from whet.sync.weights import hand_over
    from whet.training.micro_batches import MicroBatchPolicy
    from whet.training.torch import TorchEngine

    async def ask(task: Task) -> Group:
        how = asked(cfg, task.source)
        play = player(models, cfg, None, to_sampling(how.sampling), size=how.samples, purpose="eval")
        return (await play([task]))[0]

    policy = TorchEngine(models.model.requires_grad_(False), models.ops, cut=MicroBatchPolicy())
    slots = cfg.rollout.max_num_seqs * engines_of(cfg)
    at_once = max(1, slots // max(how.samples for how in all_asked(cfg).values()))
    try:
        if weights is not None:
            policy.load(weights / "policy")
        await hand_over(policy, models.engine)
        display.phase("generate")
        async with aclosing(in_order(tasks, ask, at_once=at_once)) as groups:
            async for group in groups:
                check_sampled(group, kept)
                kept.add([rollout.text for rollout in group.rollouts])
                display.step({}, {})
    finally:
        models.environments.close()
        if models.engine is not None:
            await models.engine.close()


def check_sampled(group: Group, kept: Kept) -> None:
    """WhetError for a reply that could not be sampled."""
    for rollout in group.rollouts:
        if rollout.error is not None:
            raise WhetError(
                f"reply {rollout.index + 1} to row {group.task.uid + 1} could not be sampled: {rollout.error}. "
                f"{kept.path} keeps the replies to the rows before it; the same command goes on there"
            )


async def in_order(
    tasks: Iterable[Task], ask: Callable[[Task], Awaitable[Group]], *, at_once: int
) -> AsyncGenerator[Group, None]:
    """The groups of the tasks, in their order. So many are asked at once; a slow one does not keep those behind it from
    being asked, up to AHEAD times as many."""
    room = asyncio.Semaphore(at_once)
    begun: deque[asyncio.Task[Group]] = deque()

    async def one(task: Task) -> Group:
        async with room:
            return await ask(task)

    try:
        for task in tasks:
            begun.append(asyncio.create_task(one(task)))
            if len(begun) == AHEAD * at_once:
                yield await begun.popleft()
        while begun:
            yield await begun.popleft()
    finally:
        for waiting in begun:
            waiting.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


# ---------------------------------------------------------------- files


@dataclass
class Kept:
    """The replies so far, a line for each row in the order of the rows; beside the file that they are for.

    same: what must be equal for a command that goes on with them. Raises ConfigError where it is not, or another
    process is writing them.
    """

    path: Path
    same: str
    rows: int = 0
    """Rows that have their replies."""

    def __enter__(self) -> Kept:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "a+b")
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            self.file.close()
            raise ConfigError(f"{self.path} is being written by another process") from e
        except OSError as e:
            raise file_error(e, self.path, other=_OTHER) from e
        try:
            self._find()
        except BaseException:
            self.file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.file.close()

    def _find(self) -> None:
        """Count the rows that are there, and cut off a line that was not written to its end."""
        self.file.seek(0)
        end, head = 0, _encoded({"same": self.same})
        for n, line in enumerate(self.file):
            if n == 0 and not head.startswith(line):  # a part of it: the kill came while it was written
                raise ConfigError(
                    f"{self.path} has replies of a command with other prompts, another model or other sampling, or is "
                    "no file of replies; move it away, or give another file: -o FILE"
                )
            if _line(line) is None:
                break
            self.rows, end = n, end + len(line)
        self.file.truncate(end)
        if end == 0:
            self._write(head)

    def add(self, replies: Sequence[str]) -> None:
        """Keep the replies to the next row."""
        self._write(_encoded(list(replies)))
        self.rows += 1

    def _write(self, line: bytes) -> None:
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as e:
            raise file_error(e, self.path, other=_OTHER) from e

    def replies(self) -> Iterator[list[str]]:
        """Those to each row."""
        with open(self.path, "rb") as file:
            next(file)
            yield from map(json.loads, file)


def _encoded(value: Json) -> bytes:
    """A line."""
    return json.dumps(value).encode() + b"\n"


def _line(line: bytes) -> Json:
    """What a whole line says; None for a part of one."""
    try:
        return json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None


def check_columns(sources: Sequence[Prepared]) -> None:
    """DataError if the rows have replies already: a second column of the name would hide them."""
    for source in sources:
        for begin, end in _batches(len(source.rows)):
            for i, row in enumerate(source.rows.slice(begin, end, [COLUMN]), begin):
                if COLUMN in row:
                    raise DataError(
                        f"{source.rows.where(i)}: has a column {COLUMN!r}, which the replies would take; rename it"
                    )


def _batches(rows: int) -> Iterator[tuple[int, int]]:
    from whet.data.prepare import BATCH_ROWS

    return ((begin, min(begin + BATCH_ROWS, rows)) for begin in range(0, rows, BATCH_ROWS))


Write = Callable[[Path, Iterator[list[str]]], None]
"""Writes the rows of sources, each with its replies, into a new file."""


def whole(out: Path, write: Write, replies: Iterator[list[str]]) -> None:
    """Write a file, which takes the place of the one that is there."""
    try:
        with replacing(out, durable=True) as part:
            write(part, replies)
    except OSError as e:
        raise file_error(e, out, other=_OTHER) from e


def _jsonl(sources: Sequence[Prepared]) -> Write:
    def write(path: Path, replies: Iterator[list[str]]) -> None:
        with open(path, "w", encoding="utf-8") as file:
            for source in sources:
                for number in map(int, source.row_K):
                    row = {**source.rows.row(number), COLUMN: next(replies)}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")

    return write


def _parquet(sources: Sequence[Prepared]) -> Write:
    """DataError where the rows have no types in common, or one that parquet has not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.list_(pa.string())
    try:
        found = [source.rows.arrow(*at).schema for source in sources for at in _batches(len(source.rows))]
        schema = pa.unify_schemas(found, promote_options="permissive").remove_metadata()
        schema = schema.append(pa.field(COLUMN, texts))
        pq.ParquetWriter(pa.BufferOutputStream(), schema).close()
    except (pa.ArrowException, TypeError) as e:
        raise DataError(
            f"the rows cannot be written as parquet ({e}); give a file that ends in .jsonl"
        ) from e

    def write(path: Path, replies: Iterator[list[str]]) -> None:
        with pq.ParquetWriter(path, schema) as writer:
            for source in sources:
                for begin, end in _batches(len(source)):
                    numbers = source.row_K[begin:end]
                    first = int(numbers[0])
                    table = source.rows.arrow(first, int(numbers[-1]) + 1).take(pa.array(numbers - first))
                    column = pa.array(list(itertools.islice(replies, end - begin)), texts)
                    table = table.append_column(COLUMN, column).replace_schema_metadata(None)
                    rows = pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
                    writer.write_table(rows.select(schema.names))

    return write


FORMATS: Mapping[str, Callable[[Sequence[Prepared]], Write]] = {".jsonl": _jsonl, ".parquet": _parquet}
"""By the end of a file's name."""
