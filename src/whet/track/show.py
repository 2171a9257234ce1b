"""What `whet show` prints: a run's summary and its single rollouts, read from its directory alone.

The run may be in progress, or have been killed in the middle of a line: complete lines are shown.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from whet.config.tree import get
from whet.data.timed import decoded
from whet.track.metrics import HELD_OUT, is_evaluation
from whet.track.overview import (
    Lines,
    RunRecord,
    StageNumbers,
    asked,
    checkpoints,
    end_of_log,
    ended_by,
    failures,
    learning_of,
    numbers_of,
    passes,
    phase_of,
    read,
    reward_of,
    rollout_file,
    seconds_of,
    state_of,
    tokenizer_of,
)
from whet.track.report import columns, count, duration, printable, share, shorten
from whet.track.written import list_steps, read_rollouts
from whet.types import DataError, Json, Message

CHECKPOINTS = 5
"""Largest number of checkpoints that a summary lists."""


# ---------------------------------------------------------------- the summary


def summary(run_dir: Path) -> RenderableType:
    """State and config, a line a stage, evaluations, where the time went, failures, the newest numbers."""
    run = read(run_dir)
    sections = [
        ("branches: changes of results", _changes(run, "branch")),
        ("changes without an effect on results", _changes(run, "free")),
        ("stages", _stages(run)),
        ("is it learning?", _learning(run)),
        ("checkpoints to continue from", _checkpoints(run)),
        ("held-out", _evaluations(run)),
        ("seconds by phase", _seconds(run, "phase", phase_of, partial(seconds_of, run))),
        ("seconds by reward", _seconds(run, "reward", reward_of)),
        ("rollouts without a reward", _failures(run)),
        ("groups that were trained on before", _replayed(run)),
        ("newest numbers", _newest(run)),
    ]
    parts: list[RenderableType] = [_head(run)]
    for title, table in sections:
        if table is not None:
            parts += ["", Text(title, "bold"), table]
    return Group(*parts)


def _head(run: RunRecord) -> Table:
    found = state_of(run.path)
    state: str = "running on another host, or killed there" if found == "elsewhere" else found
    if not run.metrics:
        state += f"; it has no step yet{_last_word(run.path)}"
    config, manifest = run.config, run.manifest
    model = config.get("model", {})
    packages, named = manifest.get("packages", {}), ("whet", "torch", "transformers")
    named_model = str(model.get("path") or f"from scratch, {get(model, ('scratch', 'name')) or 'qwen3'}")
    rows = {
        "run": f"{run.path}, {state}",
        "model": named_model if config else "?",
        "algorithm": " then ".join(run.algorithms) if config else "?",
        "seed": str(config.get("seed", 0)),
        "started": str(manifest.get("started_utc", "?")),
        "machine": ", ".join(str(manifest.get(name, "?")) for name in ("host", "cpu")),
        "versions": ", ".join(f"{p} {v}" for p, v in packages.items() if p in named),
    }
    if error := ended_by(run):
        rows = {"run": rows.pop("run"), "ended by": error} | rows
    table = columns("", "", left=(0, 1))
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), Text(printable(value), overflow="fold"))
    return table


def _last_word(run_dir: Path) -> str:
    """The last message of a run that came to no step."""
    lines = end_of_log(run_dir)
    return f". run.log ends with: {shorten(lines[-1])}" if lines else ""


def _changes(run: RunRecord, kind: str) -> Table | None:
    """The changes when the run was resumed from a checkpoint."""
    table = columns("stage", "after step", "key", "from", "to")
    for row in (r for r in run.changes if r["kind"] == kind):
        values = (shorten(json.dumps(row[name])) for name in ("old", "new"))
        cells = (row["stage"], str(row["step"]), printable(row["key"]), *values)
        table.add_row(*map(Text, cells))
    return table if table.row_count else None


def _stages(run: RunRecord) -> Table:
    table = columns("stage", "steps", "time", "tokens", "tokens/s", "reward", "held-out")
    for stage in map(partial(numbers_of, run), run.stages):
        table.add_row(
            stage.name,
            str(stage.steps),
            duration(stage.seconds),
            count(stage.tokens),
            count(stage.tokens / stage.seconds) if stage.seconds else "-",
            _from_to(stage.rewards),
            _from_to(stage.held_out),
        )
    return table


def _learning(run: RunRecord) -> Table | None:
    table = columns("", "", left=(0, 1))
    for stage in run.stages:
        moved, found = learning_of(run, stage)
        words = f"no: {', '.join(s.name for s in found)}" if found else moved
        table.add_row(Text(stage), Text(printable(words)))
        for sign in found:
            table.add_row("", Text(printable(str(sign)), "dim"))
    return table if table.row_count else None


def _checkpoints(run: RunRecord) -> Group | None:
    """The newest checkpoints, and the command that goes on from each: on one line, however long, because a shell
    takes each line of what is pasted for a command of its own."""
    found = checkpoints(run)
    if not found:
        return None
    names = [f"{one.stage} step {one.step}" for one in found[:CHECKPOINTS]]
    width = max(map(cell_len, names))
    lines = [
        Text(f"{set_cell_size(name, width)}   {one.command}", no_wrap=True, overflow="ignore")
        for name, one in zip(names, found)
    ]
    if len(found) > CHECKPOINTS:
        lines.append(
            Text(f"and {len(found) - CHECKPOINTS} earlier ones in {run.path / 'checkpoints'}", "dim")
        )
    more = (
        "add train.steps=N for more steps; --change (in Python change=True) and key=value for other settings"
    )
    return Group(*lines, Text(more, "dim"))


def _from_to(numbers: Sequence[float]) -> Text:
    return Text(" → ").join([share(numbers[0]), share(numbers[-1])]) if numbers else Text("-", "dim")


_OF_SOURCE = re.compile(r"eval/.*/((mean|pass|maj)@\d+|loss|loss_nats|accuracy)")
"""Numbers of an evaluation that the summary lists beside the accuracy over all sources."""


def _evaluations(run: RunRecord) -> Table | None:
    lines = [x for x in run.metrics if is_evaluation(x)]
    if not lines:
        return None
    found = {name for line in lines for name in line}
    names = [*({HELD_OUT} & found), *sorted(filter(_OF_SOURCE.fullmatch, found))]
    table = columns("stage", "step", *(printable(name.removeprefix("eval/")) for name in names))
    for line in lines:
        table.add_row(line["stage"], str(line["step"]), *(share(line.get(name)) for name in names))
    return table


def _seconds(
    run: RunRecord, what: str, of: Callable[[str], str], whole: Callable[[str], float | None] | None = None
) -> Table | None:
    """of: what a number of timings.jsonl counts for; '' for nothing. whole: the seconds of a stage of which the shares
    are; the default is their sum."""
    spent: dict[str, Counter[str]] = {}
    for line in run.timings:
        for name, seconds in line.items():
            if of(name):
                spent.setdefault(of(name), Counter())[line["stage"]] += seconds
    if not spent:
        return None
    whole = whole or (lambda stage: sum(by_stage[stage] for by_stage in spent.values()))
    totals = {stage: whole(stage) for stage in run.stages}
    table = columns(what, *run.stages)
    for each, by_stage in sorted(spent.items(), key=lambda item: -item[1].total()):
        cells = [
            f"{by_stage[s]:.1f} ({by_stage[s] / total:.0%})" if (total := totals[s]) else "-"
            for s in run.stages
        ]
        table.add_row(Text(printable(each)), *cells)
    return table


def _failures(run: RunRecord) -> Table | None:
    failed = failures(run)
    if not failed:
        return None
    table = columns("stage", "reason", "rollouts", "share")
    for (stage, reason), number in failed.most_common():
        of = asked(run, stage)
        part = f"{number / of:.2%}" if of else "-"
        table.add_row(stage, Text(printable(reason)), str(number), part)
    return table


def _replayed(run: RunRecord) -> Table | None:
    name = "train/replayed_groups"
    table = columns("stage", "in all", "a step", "most in a step")
    for stage in run.stages:
        if numbers := [x[name] for x in run.of(stage, name)]:
            mean = sum(numbers) / len(numbers)
            table.add_row(stage, f"{sum(numbers):.0f}", f"{mean:.2f}", f"{max(numbers):.0f}")
    return table if table.rows else None


def _newest(run: RunRecord) -> Table | None:
    lines = [x for x in run.metrics if not is_evaluation(x)]
    if not lines:
        return None
    last = lines[-1]
    table = columns("number", f"{last['stage']} step {last['step']}")
    for name, number in last.items():
        if name not in ("stage", "step"):
            table.add_row(Text(printable(name)), f"{number:.6g}")
    return table


# ---------------------------------------------------------------- the final report


def report(run_dir: Path, *, curve: Path | None = None, examples: int = 3) -> RenderableType:
    """`final_report` of a run, from its directory."""
    run = read(run_dir)
    stages = [numbers_of(run, stage) for stage in run.stages]
    return final_report(stages, examples=before_and_after(run, limit=examples), curve=curve)


def final_report(
    stages: Sequence[StageNumbers], *, examples: Sequence[Example], curve: Path | None
) -> RenderableType:
    """The result of a run: a line per stage, replies before and after, the path of the plot."""
    table = columns("stage", "steps", "time", "tokens", "held-out start", "held-out end")
    for s in stages:
        held_out = (share(s.held_out[at] if s.held_out else None) for at in (0, -1))
        table.add_row(s.name, str(s.steps), duration(s.seconds), count(s.tokens), *held_out)
    parts: list[RenderableType] = [table]
    if examples:
        parts += ["", _examples(examples)]
    if curve is not None:
        parts += ["", Text.assemble(("curve ", "dim"), str(curve))]
    return Group(*parts)


def _examples(examples: Sequence[Example]) -> Table:
    answered = any(e.answer is not None for e in examples)
    titles = ("prompt", *["expected"] * answered, "before", "after")
    table = columns(*titles, left=range(4), overflow="fold")
    for e in examples:
        answer = Text("-", "dim") if e.answer is None else Text(shorten(e.answer))
        table.add_row(
            Text(shorten(e.prompt)),
            *[answer] * answered,
            Text(shorten(e.before), "green" if e.passed_before else "red"),
            Text(shorten(e.after), "green" if e.passed_after else "red"),
        )
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One held-out task, with replies from before and after training."""

    prompt: str
    answer: str | None
    """None: its task has no reference answer."""
    before: str
    after: str
    passed_before: bool
    passed_after: bool


def before_and_after(run: RunRecord, *, limit: int) -> list[Example]:
    """Held-out tasks at the first and last evaluation of the last stage that has two; mended ones first."""
    files = list_steps(run.path / "eval")
    for stage in reversed(run.stages):
        own = [path for name, _, path in files if name == stage]
        if len(own) > 1:
            first, last = (_first_replies(read_rollouts(path)) for path in (own[0], own[-1]))
            pairs = [_example(first[uid], last[uid], run.config, stage) for uid in first if uid in last]
            pairs.sort(key=lambda e: (not e.passed_after, e.passed_before))
            return pairs[:limit]
    return []


def _first_replies(rows: Lines) -> dict[int, dict[str, Json]]:
    return {row["uid"]: row for row in reversed(rows)}


def _example(before: dict[str, Json], after: dict[str, Json], config: dict[str, Json], stage: str) -> Example:
    return Example(
        prompt=before["prompt"],
        answer=None if before["answer"] is None else _answer(before["answer"]),
        before=before["text"],
        after=after["text"],
        passed_before=passes(before, config, stage),
        passed_after=passes(after, config, stage),
    )


def _answer(answer: Json) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


# ---------------------------------------------------------------- single rollouts


def rollouts(
    run_dir: Path,
    step: int,
    *,
    stage: str | None = None,
    uid: int | None = None,
    tokens: bool = False,
    limit: int | None = None,
) -> RenderableType:
    """The rollouts of a step: prompt, reply, expected answer, reward and parts; `tokens` lists every token, `limit` is
    the largest number of rollouts. Of given replies (SFT, DPO) the first step of a stage is written.

    Raises DataError naming the steps there are.
    """
    path = rollout_file(run_dir, step, stage)
    rows = [row for row in read_rollouts(path) if uid is None or row["uid"] == uid]
    if not rows:
        raise DataError(f"{path} has no task {uid}; `whet show {run_dir} --step {step}` lists them")
    tokenizer = tokenizer_of(run_dir) if tokens else None
    parts: list[RenderableType] = [Text(path.stem, "bold")]
    pairs = read(run_dir).kind(path.stem.rpartition("-step-")[0]) == "preferences"
    for row in rows[:limit]:
        parts += ["", _rollout(row, pairs=pairs), *(_strands(row, tokenizer) if tokens else [])]
    if limit is not None and len(rows) > limit:
        parts += ["", Text(f"{len(rows) - limit} more rollouts; --limit {len(rows)} shows all", "dim")]
    return Group(*parts)


def _rollout(row: dict[str, Json], *, pairs: bool) -> RenderableType:
    """pairs: the reply of index 0 is the chosen one, the other the rejected one."""
    reply = ("chosen", "rejected")[row["index"] > 0] if pairs else "reply"
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
    judged = row["reward"] if row["advantage"] is None else row["advantage"]
    head = Text.assemble(
        (f"task {row['uid']} · rollout {row['index']}", "bold"),
        (f" · {printable(row['source'])} · ", "dim"),
        (reward, "green" if judged is not None and judged > 0 else "red"),
        (f" · advantage {row['advantage']:+.3f}" if row["advantage"] is not None else "", "dim"),
        (f" · {sum(row['mask'])} tokens · {printable(row['finish_reason'])}", "dim"),
        (
            f" · {len(row['turns'])} turns, ended by {printable(row['stop_reason'])}"
            if row["stop_reason"]
            else "",
            "dim",
        ),
    )
    lines = [head]
    for name, style in (("prompt", ""), ("text", "cyan")):
        if name == "text" and row["messages"]:
            lines += [_message(message) for message in row["messages"]]
            continue
        label = reply if name == "text" else name
        lines.append(Text.assemble((f"{label:10}", "dim"), (printable(row[name]) or "(empty)", style)))
    if row["answer"] is not None:
        lines.append(Text.assemble(("expected  ", "dim"), shorten(_answer(row["answer"]))))
    if row["extracted"] is not None:
        lines.append(Text.assemble(("extracted ", "dim"), shorten(row["extracted"])))
    if len(row["reward_parts"]) > 1:
        parts = "  ".join(f"{name} {value:g}" for name, value in row["reward_parts"].items())
        lines.append(Text.assemble(("parts     ", "dim"), printable(parts)))
    if row["stop_reason"]:
        lines += [_turn(number, turn) for number, turn in enumerate(row["turns"], 1)]
    if row["error"]:
        lines.append(Text(f"error     {printable(row['error'])}", "red"))
    return Group(*lines)


def _message(value: dict[str, Json]) -> Text:
    """What was said in an episode: by whom, the thoughts, the text, the calls."""
    message = Message.from_json(value)
    said = Text.assemble((f"{shorten(message.role):10}", "dim"))
    if message.reasoning:
        said.append(f"{printable(message.reasoning)} ", "dim italic")
    said.append(printable(message.content), "cyan" if message.role == "assistant" else "")
    for call in message.tool_calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        said.append(f" {printable(call.name)}({printable(arguments)})", "magenta")
    return said


def _turn(number: int, turn: dict[str, Json]) -> Text:
    """A reply within an episode."""
    size = f"{turn.get('end', 0) - turn.get('start', 0)} tokens, {turn.get('finish_reason')}"
    told = [f"turn {number}", size]
    told += [
        f"{name} {turn[name]}" for name in ("reward", "calls", "malformed") if turn.get(name) is not None
    ]
    return Text(printable("  ".join(told)), "dim")


def _strands(row: dict[str, Json], tokenizer: Tokenizer | None) -> Iterator[RenderableType]:
    """A table of tokens for each strand; where there are several, under its number."""
    lengths = row["strand_tokens"]
    for number, end in enumerate(accumulate(lengths)):
        if len(lengths) > 1:
            yield Text(f"strand {number}", "bold")
        yield _tokens(row, slice(end - lengths[number], end), tokenizer)


def _tokens(row: dict[str, Json], span: slice, tokenizer: Tokenizer | None) -> Table:
    """Tokens: place, id, text if the run holds a tokenizer, and what was recorded of sampled ones."""
    table = columns("place", "token", "text", "log-prob", "sampled with", "version", left=(2,))
    values = (row[name][span] for name in ("token_ids", "mask", "logprobs", "sample_logprobs", "versions"))
    for place, (token, mask, logprob, sample_logprob, version) in enumerate(zip(*values)):
        text = (
            repr(decoded(tokenizer, [token], skip_special_tokens=False)) if tokenizer and token >= 0 else ""
        )
        recorded = (f"{logprob:.4f}", f"{sample_logprob:.4f}", str(version)) if mask else ("", "", "")
        table.add_row(str(place), str(token), Text(text), *recorded, style="" if mask else "dim")
    return table
