"""What `whet show` prints: a run's summary and its single rollouts, read from its directory alone.

The run may be in progress, or have been killed in the middle of a line: complete lines are shown.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from whet.config.code import GIVEN
from whet.config.recipes import RECIPES
from whet.config.schema import AlgorithmConfig, EvalConfig
from whet.config.tree import get, leaves
from whet.data.tokenizer_files import check_files
from whet.storage.manifests import oldest_first
from whet.track.files import is_running
from whet.track.learning import signs, trend
from whet.track.metrics import ACCURACY, FAILED, HELD_OUT, REWARD
from whet.track.report import (
    Example,
    StageReport,
    count,
    duration,
    final_report,
    printable,
    share,
    shorten,
)
from whet.track.written import list_steps, read_config, read_lines, read_manifest, read_rollouts
from whet.types import DataError, Json, Message

Lines = list[dict[str, Json]]

CHECKPOINTS = 5
"""Largest number of checkpoints that a summary lists."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a run directory holds, read once."""

    path: Path
    metrics: Lines
    timings: Lines
    config: dict[str, Json]
    manifest: dict[str, Json]
    """The last start."""
    changes: Lines
    """The changes when it was resumed."""

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(line["stage"] for line in self.metrics))

    def of(self, stage: str, *having: str) -> Lines:
        """Lines of a stage that have these numbers."""
        return [x for x in self.metrics if x["stage"] == stage and all(name in x for name in having)]


def read(run_dir: Path) -> Written:
    """Raises DataError if this is not a run directory, or a file in it was not written by a run."""
    if not any((run_dir / name).exists() for name in ("metrics.jsonl", "run.log")):
        raise DataError(f"{run_dir} is not a run directory: it has no metrics.jsonl{_runs_in(run_dir)}")
    manifest = read_manifest(run_dir)
    return Written(
        path=run_dir,
        metrics=read_lines(run_dir / "metrics.jsonl"),
        timings=read_lines(run_dir / "timings.jsonl"),
        config=read_config(run_dir),
        manifest=manifest.get("starts", [{}])[-1],
        changes=manifest.get("changes", []),
    )


def _runs_in(folder: Path) -> str:
    """A hint where a folder is not there, or holds run directories."""
    if not folder.exists():
        return "; no such folder"
    inner = sorted(str(path.parent) for path in folder.glob("*/metrics.jsonl"))
    return f"; run directories in it: {', '.join(inner[:5])}" if inner else ""


# ---------------------------------------------------------------- the summary


def summary(run_dir: Path) -> RenderableType:
    """State and config, a line a stage, evaluations, where the time went, failures, the newest numbers."""
    run = read(run_dir)
    sections = [
        ("branches: changes of results", _changes(run, "branch")),
        ("changes without an effect on results", _changes(run, "free")),
        ("stages", _stages(run)),
        ("is it learning?", _learning(run)),
        ("checkpoints to go on from", _checkpoints(run)),
        ("held-out", _evaluations(run)),
        ("seconds by phase", _phases(run)),
        ("rollouts without a reward", _failures(run)),
        ("groups that were trained on before", _replayed(run)),
        ("newest numbers", _newest(run)),
    ]
    parts: list[RenderableType] = [_head(run)]
    for title, table in sections:
        if table is not None:
            parts += ["", Text(title, "bold"), table]
    return Group(*parts)


def _head(run: Written) -> Table:
    states = {True: "running", False: "not running", None: "running on another host, or killed there"}
    state = states[is_running(run.path)]
    if not run.metrics:
        state += f"; it has no step yet{_last_word(run.path)}"
    config, manifest = run.config, run.manifest
    model = config.get("model", {})
    packages, named = manifest.get("packages", {}), ("whet", "torch", "transformers")
    named_model = str(
        model.get("path") or f"from scratch, {get(model, ('scratch', 'architecture')) or 'qwen3'}"
    )
    rows = {
        "run": f"{run.path}, {state}",
        "model": named_model if config else "?",
        "algorithm": " then ".join(map(str, _algorithms(config))) if config else "?",
        "seed": str(config.get("seed", 0)),
        "started": str(manifest.get("started_utc", "?")),
        "machine": ", ".join(str(manifest.get(name, "?")) for name in ("host", "cpu")),
        "versions": ", ".join(f"{p} {v}" for p, v in packages.items() if p in named),
    }
    table = _table("", "")
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), Text(printable(value)))
    return table


def _last_word(run_dir: Path) -> str:
    """The last message of a run that came to no step."""
    path = run_dir / "run.log"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return f". run.log ends with: {shorten(lines[-1])}" if lines else ""


def _algorithms(config: dict[str, Json]) -> list[Json]:
    """The algorithm's name in each stage."""
    common = config.get("algorithm", {}).get("name", AlgorithmConfig.model_fields["name"].default)
    return [s.get("algorithm", {}).get("name", common) for s in config.get("stages") or [{}]]


def _changes(run: Written, kind: str) -> Table | None:
    """The changes when the run was resumed from a checkpoint."""
    table = _table("stage", "after step", "key", "from", "to")
    for row in (r for r in run.changes if r["kind"] == kind):
        values = (shorten(json.dumps(row[name])) for name in ("old", "new"))
        cells = (row["stage"], str(row["step"]), printable(row["key"]), *values)
        table.add_row(*map(Text, cells))
    return table if table.row_count else None


def _stages(run: Written) -> Table:
    table = _table("stage", "steps", "time", "tokens", "tokens/s", "reward", "held-out")
    for stage in run.stages:
        seconds = seconds_of(run, stage)
        tokens = sum(x["rollout/tokens_sum"] for x in run.of(stage, "rollout/tokens_sum"))
        table.add_row(
            stage,
            str(max(x["step"] for x in run.of(stage))),
            duration(seconds),
            count(tokens),
            count(tokens / seconds) if seconds else "-",
            # of pairs they are 1 and 0, whatever is learned
            _from_to([x[REWARD] for x in run.of(stage, REWARD) if ACCURACY not in x]),
            _from_to([x[HELD_OUT] for x in run.of(stage, HELD_OUT)]),
        )
    return table


def _learning(run: Written) -> Table | None:
    """How the headline of each stage has moved, and the signs against it at its last step."""
    table = _table("", "")
    for stage in run.stages:
        rows = [
            line for line in run.of(stage) if "rollout/count" in line
        ]  # evaluations have lines of their own
        found = signs(rows)
        words = f"no: {', '.join(s.name for s in found)}" if found else trend(rows)
        table.add_row(Text(stage), Text(printable(words)))
        for sign in found:
            table.add_row("", Text(printable(str(sign)), "dim"))
    return table if table.row_count else None


def _checkpoints(run: Written) -> Table | None:
    """The newest checkpoints, and the command that goes on from each: from the newest in this run directory, from an
    earlier one in another."""
    folder = run.path / "checkpoints"
    found = oldest_first(path.name for path in folder.glob("*-*"))[::-1]
    if not found or not run.config:
        return None
    table = _table("", "")
    for name in found[:CHECKPOINTS]:
        place, _, step = name.partition("-")[2].rpartition("-")
        where = f"{place} step {int(step)}"
        other = [f"checkpoint.resume={folder / name}", f"run_dir={run.path}-from-{int(step)}"]
        table.add_row(Text(where), Text(_go_on(run, [] if name == found[0] else other), overflow="fold"))
    if len(found) > CHECKPOINTS:
        table.add_row("", Text(f"and {len(found) - CHECKPOINTS} earlier ones in {folder}", "dim"))
    more = (
        "add train.steps=N for more steps; --change (in Python change=True) and key=value for other settings"
    )
    table.add_row("", Text(more, "dim"))
    return table


def _go_on(run: Written, overrides: Sequence[str]) -> str:
    """The command, or the call where rewards were functions of a Python program."""
    file = str(run.path / "config.yaml")
    named = [value for path, value in leaves(run.config) if "rewards" in path]
    if any(isinstance(value, str) and value.startswith(GIVEN) for value in named):
        given = f", overrides={list(overrides)!r}" if overrides else ""
        return f"whet.train({file!r}, rewards=...{given})"
    return " ".join(["whet train", *(shlex.quote(part) for part in (file, *overrides))])


def seconds_of(run: Written, stage: str) -> float | None:
    """Time of a stage: all its phases, evaluation and saving too; None if none was written."""
    spent = [v for x in run.timings if x["stage"] == stage for k, v in x.items() if _is_phase(k)]
    return sum(spent) if spent else None


def _is_phase(name: str) -> bool:
    return name.startswith("time/") and name.endswith("_s") and name != "time/step_s"


def _from_to(numbers: Sequence[float]) -> Text:
    return Text(" → ").join([share(numbers[0]), share(numbers[-1])]) if numbers else Text("-", "dim")


def _evaluations(run: Written) -> Table | None:
    lines = [x for x in run.metrics if HELD_OUT in x]
    kinds = ("mean@", "pass@", "maj@")
    names = sorted(
        {k for x in lines for k in x if k.startswith("eval/") and k.rpartition("/")[2].startswith(kinds)}
    )
    if not lines:
        return None
    table = _table("stage", "step", "accuracy", *(printable(name.removeprefix("eval/")) for name in names))
    for line in lines:
        numbers = [share(line.get(name)) for name in (HELD_OUT, *names)]
        table.add_row(line["stage"], str(line["step"]), *numbers)
    return table


def _phases(run: Written) -> Table | None:
    spent: dict[str, Counter[str]] = {}
    for line in run.timings:
        for name, seconds in line.items():
            if _is_phase(name):
                spent.setdefault(name[5:-2], Counter())[line["stage"]] += seconds
    if not spent:
        return None
    totals = {stage: sum(by_stage[stage] for by_stage in spent.values()) for stage in run.stages}
    table = _table("phase", *run.stages)
    for phase, by_stage in sorted(spent.items(), key=lambda item: -item[1].total()):
        cells = [
            f"{by_stage[s]:.1f} ({by_stage[s] / totals[s]:.0%})" if totals[s] else "-" for s in run.stages
        ]
        table.add_row(Text(printable(phase)), *cells)
    return table


def _failures(run: Written) -> Table | None:
    failed: Counter[tuple[str, str]] = Counter()
    for line in run.metrics:
        for name, number in line.items():
            if name.startswith("rollout/failed/"):
                reason = name.removeprefix("rollout/failed/").removesuffix("_count")
                failed[line["stage"], reason] += int(number) if isfinite(number) else 0
    asked = {s: sum(x.get("rollout/count", 0) for x in run.of(s, FAILED)) for s in run.stages}
    if not failed:
        return None
    table = _table("stage", "reason", "rollouts", "share")
    for (stage, reason), number in failed.most_common():
        part = f"{number / asked[stage]:.2%}" if asked[stage] else "-"
        table.add_row(stage, Text(printable(reason)), str(number), part)
    return table


def _replayed(run: Written) -> Table | None:
    name = "train/replayed_groups"
    table = _table("stage", "in all", "a step", "most in a step")
    for stage in run.stages:
        if numbers := [x[name] for x in run.of(stage, name)]:
            mean = sum(numbers) / len(numbers)
            table.add_row(stage, f"{sum(numbers):.0f}", f"{mean:.2f}", f"{max(numbers):.0f}")
    return table if table.rows else None


def _newest(run: Written) -> Table | None:
    lines = [x for x in run.metrics if HELD_OUT not in x]
    if not lines:
        return None
    last = lines[-1]
    table = _table("number", f"{last['stage']} step {last['step']}")
    for name, number in last.items():
        if name not in ("stage", "step"):
            table.add_row(Text(printable(name)), f"{number:.6g}")
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0), show_header=any(titles))
    for place, title in enumerate(titles):
        table.add_column(Text(title), justify="left" if place == 0 else "right" if any(titles) else "left")
    return table


# ---------------------------------------------------------------- the final report


def report(run_dir: Path, *, curve: Path | None = None, examples: int = 3) -> RenderableType:
    """`final_report` of a run, from its directory."""
    run = read(run_dir)
    stages = [_stage_report(run, stage) for stage in run.stages]
    return final_report(stages, examples=before_and_after(run, limit=examples), curve=curve)


def _stage_report(run: Written, stage: str) -> StageReport:
    held_out, tokens = [x[HELD_OUT] for x in run.of(stage, HELD_OUT)], "rollout/tokens_sum"
    return StageReport(
        name=stage,
        steps=max(x["step"] for x in run.of(stage)),
        seconds=seconds_of(run, stage),
        tokens=int(sum(n for x in run.of(stage, tokens) if isfinite(n := x[tokens]))),
        held_out_start=held_out[0] if held_out else None,
        held_out_end=held_out[-1] if held_out else None,
    )


def before_and_after(run: Written, *, limit: int) -> list[Example]:
    """Held-out tasks at the first and last evaluation of the last stage that has two; mended ones first."""
    files = list_steps(run.path / "eval")
    for stage in reversed(run.stages):
        own = [path for name, _, path in files if name == stage]
        if len(own) > 1:
            first, last = (_first_replies(read_rollouts(path)) for path in (own[0], own[-1]))
            pairs = [_example(first[uid], last[uid], run.config) for uid in first if uid in last]
            pairs.sort(key=lambda e: (not e.passed_after, e.passed_before))
            return pairs[:limit]
    return []


def _first_replies(rows: Lines) -> dict[int, dict[str, Json]]:
    return {row["uid"]: row for row in reversed(rows)}


def _example(before: dict[str, Json], after: dict[str, Json], config: dict[str, Json]) -> Example:
    return Example(
        prompt=before["prompt"],
        answer=_answer(before["answer"]),
        before=before["text"],
        after=after["text"],
        passed_before=_passes(before, config),
        passed_after=_passes(after, config),
    )


def _passes(row: dict[str, Json], config: dict[str, Json]) -> bool:
    least = config.get("eval", {}).get("success", EvalConfig.model_fields["success"].default)
    value = row["reward"]  # of a held-out reply: by what eval.reward names
    return isinstance(least, int | float) and value is not None and value >= least


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
    path = _find(run_dir, step, stage)
    rows = [row for row in read_rollouts(path) if uid is None or row["uid"] == uid]
    if not rows:
        raise DataError(f"{path} has no task {uid}; `whet show {run_dir} --step {step}` lists them")
    tokenizer = tokenizer_of(run_dir) if tokens else None
    parts: list[RenderableType] = [Text(path.stem, "bold")]
    pairs = _are_pairs(read_config(run_dir), path.stem.rpartition("-step-")[0])
    for row in rows[:limit]:
        parts += ["", _rollout(row, pairs=pairs), *(_strands(row, tokenizer) if tokens else [])]
    if limit is not None and len(rows) > limit:
        parts += ["", Text(f"{len(rows) - limit} more rollouts; --limit {len(rows)} shows all", "dim")]
    return Group(*parts)


def _find(run_dir: Path, step: int, stage: str | None) -> Path:
    files = list_steps(run_dir / "rollouts")
    stages = read(run_dir).stages if stage is None else [stage]
    hits = [path for name in reversed(stages) for at, number, path in files if (at, number) == (name, step)]
    if not hits:
        there = {name: [n for at, n, _ in files if at == name] for name in sorted({f[0] for f in files})}
        held = "; ".join(f"{name}: {min(ns)} to {max(ns)}, {len(ns)} steps" for name, ns in there.items())
        asked = f"step {step}" + (f" of stage {stage!r}" if stage else "")
        raise DataError(
            f"{run_dir} has no rollouts of {asked}; rollouts there: {held or 'none'} (track.rollouts_interval; of "
            "given replies only the first step's are written)"
        )
    return hits[0]


def _are_pairs(config: dict[str, Json], stage: str) -> bool:
    """Whether the rollouts of a stage are chosen and rejected replies."""
    names = [s.get("name") for s in config.get("stages") or [{"name": stage}]]
    recipes = [RECIPES.get(str(name)) for name in _algorithms(config)]
    return any(r is not None and r.kind == "preferences" for n, r in zip(names, recipes) if n == stage)


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
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    for title in ("place", "token", "text", "log-prob", "sampled with", "version"):
        table.add_column(title, justify="left" if title == "text" else "right")
    columns = (row[name][span] for name in ("token_ids", "mask", "logprobs", "sample_logprobs", "versions"))
    for place, (token, mask, logprob, sample_logprob, version) in enumerate(zip(*columns)):
        text = repr(tokenizer.decode([token], skip_special_tokens=False)) if tokenizer and token >= 0 else ""
        recorded = (f"{logprob:.4f}", f"{sample_logprob:.4f}", str(version)) if mask else ("", "", "")
        table.add_row(str(place), str(token), Text(text), *recorded, style="" if mask else "dim")
    return table


def tokenizer_of(run_dir: Path) -> Tokenizer | None:
    """The tokenizer of the run's own exports or checkpoints, if it has written one yet."""
    found = sorted(run_dir.rglob("tokenizer.json"))
    if not found:
        return None
    check_files(found[-1].parent)
    try:
        return Tokenizer.from_file(str(found[-1]))
    except Exception as e:  # foreign code: it can fail in any way
        raise DataError(
            f"{found[-1]}: not a readable tokenizer: {e}; remove it, or export the run again"
        ) from e
