"""What `whet replay` prints: tables as those of `whet show`, or JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whet.data.timed import decoded
from whet.replay.logprobs import Rescored, versions
from whet.replay.run import Replayed
from whet.replay.steps import Recorded, Step
from whet.track.compare import ComparedColumn, Name, pair, same
from whet.track.dumps import finite_json
from whet.track.report import columns, printable
from whet.types import ConfigError, Json

TERMS = ("ratio", "clip_frac", "masked_frac", "kl_loss_nats", "weight", "loss")
"""What the table of tokens has of the loss; JSON has all of it."""
SIDES = "recorded", "recomputed"
CLOSE = (
    "the engine that sampled the tokens does not compute as the trainer does to the bit (log-prob match: close), so "
    "their log-probs differ without a fault; the metrics of the step have the difference that the run measured"
)
TITLES = {"clip_frac": "clipped", "masked_frac": "masked", "kl_loss_nats": "KL"}


def table(*titles: str, left: Collection[int] = (0,)) -> Table:
    """`columns` of which nothing is cut short: neither a name nor the last digits of a number."""
    made = columns(*titles, left=left, gap=2, overflow="fold")
    made.columns[0].no_wrap = True
    return made


# ---------------------------------------------------------------- what can be replayed


def listing(recorded: Recorded) -> RenderableType:
    """Ranges of steps with where their replay starts, and what cannot be replayed and why."""
    made, refused = table("stage", "steps", "starts at", "steps run", left=range(3)), dict[str, list[Step]]()
    for (stage, start), alike in groupby(recorded.steps(), lambda s: (s.stage, s.start)):
        several = list(alike)
        first, last = several[0], several[-1]
        if start is None:
            for step in several:
                refused.setdefault(step.why, []).append(step)
            continue
        forward = f"{first.forward}" if first is last else f"{first.forward} to {last.forward}"
        made.add_row(recorded.names[stage], _range(several), start.name, forward)
    parts: list[RenderableType] = [
        Text("steps that can be replayed", "bold"),
        made if made.row_count else "none",
    ]
    for why, steps in refused.items():
        names = dict.fromkeys(recorded.names[s.stage] for s in steps)
        parts += ["", Text(f"not: {', '.join(names)} {_range(steps)}", "bold"), Text(printable(why))]
    if refused:
        known = table("version", "checkpoint", left=range(2))
        for version, start in versions(recorded).items():
            known.add_row(str(version), start.name)
        parts += ["", Text("weights for --logprobs", "bold"), known]
    return Group(*parts)


def _range(steps: Sequence[Step]) -> str:
    first, last = steps[0].step, steps[-1].step
    return str(first) if first == last else f"{first} to {last}"


def listing_json(recorded: Recorded) -> Json:
    return {
        "run": str(recorded.path),
        "steps": [
            {
                "stage": recorded.names[s.stage],
                "step": s.step,
                "start": s.start.name if s.start else None,
                "steps_run": s.forward if s.start else None,
                "refused": s.why or None,
            }
            for s in recorded.steps()
        ],
        "versions": {str(v): start.name for v, start in versions(recorded).items()},
    }


# ---------------------------------------------------------------- what was compared


def compared(found: Sequence[ComparedColumn]) -> RenderableType:
    """A row for each field that has a difference, and of rollouts for each; equal columns of the batch are one row.
    The first differences are lines below it, since no terminal may cut a number."""
    made, lines = table("compared", "values", "equal"), list[Text]()
    quiet = [c for c in found if c.field.startswith("batches/") and not c.differing]
    for each in found:
        if each not in quiet:
            equal = Text(str(each.equal), "red" if each.differing else "green")
            made.add_row(Text(printable(each.field)), str(each.count), equal)
            lines += _first_difference(each)
    if quiet:
        total = sum(c.count for c in quiet)
        made.add_row(f"batches: {len(quiet)} columns", str(total), Text(str(total), "green"))
    head: list[RenderableType] = ["", Text("first differences", "bold")] if lines else []
    return Group(made, *head, *lines)


def _first_difference(each: ComparedColumn) -> Iterator[Text]:
    if each.first is not None:
        named = each.first.field if each.first.field not in each.field else ""
        place = ", ".join(filter(None, (each.field, each.first.where, named)))
        values = ", ".join(f"{value} ({side})" for value, side in zip(each.first.values, SIDES))
        yield Text.assemble(f"{printable(place)}: ", (values, "red"))


def step_view(found: Replayed) -> RenderableType:
    """The whole step, or the rollouts that `Replayed.only` has left."""
    assert found.step.start is not None
    steps = "1 step run" if found.step.forward == 1 else f"{found.step.forward} steps run"
    head = f"{found.stage} step {found.step.step}, from {found.step.start.name}, {steps}"
    notes = [Text(printable(note), "yellow") for note in found.notes]
    return Group(
        Text(head, "bold"), *notes, "", compared(found.compared), "", _verdict(found.compared, found.equal)
    )


def _verdict(found: Sequence[ComparedColumn], equal: bool) -> Text:
    if not found:
        return Text("nothing compared: the record has no value of this", "bold red")
    return Text("equal in every bit", "bold green") if equal else Text("not equal", "bold red")


def step_json(found: Replayed) -> Json:
    assert found.step.start is not None
    return {
        "stage": found.stage,
        "step": found.step.step,
        "start": found.step.start.name,
        "steps_run": found.step.forward,
        "notes": list(found.notes),
        "equal": found.equal,
        "compared": [finite_json(each.to_json(SIDES)) for each in found.compared],
    }


def rescored_view(found: Rescored) -> RenderableType:
    notes = [
        Text(f"{count} tokens of version {version} are not compared: it has no whole checkpoint", "yellow")
        for version, count in found.unknown.items()
    ]
    if found.close and not found.equal:
        notes.append(Text(CLOSE, "yellow"))
    head = Text(f"{found.stage} step {found.step}: log-probs of the recorded tokens", "bold")
    return Group(head, *notes, "", compared(found.compared), "", _verdict(found.compared, found.equal))


def rescored_json(found: Rescored) -> Json:
    return {
        "stage": found.stage,
        "step": found.step,
        "equal": found.equal,
        "compared": [finite_json(each.to_json(SIDES)) for each in found.compared],
        "tokens_without_checkpoint": {str(v): n for v, n in found.unknown.items()},
        "close": found.close,
    }


# ---------------------------------------------------------------- single rollouts


def rollout_view(found: Replayed, name: Name, tokens: Path | None) -> RenderableType:
    """One rollout, token by token. tokens: the run directory, if texts of tokens are to be looked up there."""
    one = found.only(name)
    was, now = (_first(rows) for rows in (one.recorded, one.again))
    batch = _first(one.batch)
    head = f"task {name[0]}, rollout {name[1]}"
    parts: list[RenderableType] = [step_view(one), "", Text(head, "bold")]
    if now:
        parts.append(_values(was, now))
    parts += ["", Text("log-probs", "bold"), _tokens(was, now, batch, tokens), *_losses(now, batch)]
    if not batch:
        parts.append(Text("it was not trained on, so it has no terms of the loss", "dim"))
    return Group(*parts)


def _first(rows: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
    return rows[0] if rows else {}


def _values(was: Mapping[str, Json], now: Mapping[str, Json]) -> Table:
    """What is recorded of the whole rollout."""
    made = table("", *SIDES, left=range(3))
    parts = {name: None for row in (was, now) for name in row.get("reward_parts", {})}
    rows = [(f, was.get(f), now.get(f)) for f in ("text", "finish_reason", "reward", "advantage", "error")]
    rows += [
        (f"part {name}", was.get("reward_parts", {}).get(name), now["reward_parts"].get(name))
        for name in parts
    ]
    for field, a, b in rows:
        if a is not None or b is not None:
            shown = pair(a, b)
            style = "" if not was or same(a, b) else "red"
            made.add_row(Text(printable(field), "dim"), *(Text(value, style) for value in shown))
    return made


def _tokens(
    was: Mapping[str, Json], now: Mapping[str, Json], batch: Mapping[str, Json], run_dir: Path | None
) -> Table:
    """A row for each sampled token: its log-prob as recorded, as sampled again, and by the trainer before the step."""
    from whet.track.overview import tokenizer_of

    tokenizer = tokenizer_of(run_dir) if run_dir else None
    ids, places = (now or batch)[_column(now, "token_ids")], _trained(now, batch)
    titles = ("place", "token", *["text"] * bool(tokenizer), "recorded", "sampled again", "trainer")
    made = table(*titles, left=(2,) if tokenizer else ())
    for at in places:
        text = [Text(repr(decoded(tokenizer, [ids[at]], skip_special_tokens=False)))] if tokenizer else []
        before, again = _sampled(was, at), _sampled(now, at)
        other = bool(was) and (not same(before, again) or not same(_nth(was["token_ids"], at), ids[at]))
        shown = pair(before, again) if other else (_cell(before), _cell(again))
        trainer = _cell(_nth(batch.get("logp_N"), at))
        made.add_row(str(at), str(ids[at]), *text, *shown, trainer, style="red" if other else "")
    return made


def _trained(now: Mapping[str, Json], batch: Mapping[str, Json]) -> list[int]:
    """Places of the tokens that are trained."""
    return [n for n, on in enumerate((now or batch)[_column(now, "mask")]) if on]


def _sampled(row: Mapping[str, Json], at: int) -> Json:
    """The log-prob of a token that a policy has sampled."""
    return _nth(row.get("logprobs"), at) if _nth(row.get("versions"), at) != -1 else None


def _column(now: Mapping[str, Json], name: str) -> str:
    return name if now else f"{name}_N"


def _losses(now: Mapping[str, Json], batch: Mapping[str, Json]) -> Iterator[RenderableType]:
    """A table of the advantage and of the terms of the loss for each update epoch."""
    epochs = {name.partition("/")[0]: None for name in batch if name.startswith("update_")}
    for epoch in epochs:
        named = {"advantage": batch.get("adv_N")}
        named |= {TITLES.get(term, term): batch.get(f"{epoch}/{term}_N") for term in TERMS}
        terms = {title: values for title, values in named.items() if values is not None}
        if "loss" not in terms:
            continue  # it was skipped
        number = f"{epoch.replace('_', ' epoch ')}, optimizer step {batch[f'{epoch}/optimizer_step_R']}"
        made = table("place", *terms, left=())
        for at in _trained(now, batch):
            made.add_row(str(at), *(_cell(_nth(values, at)) for values in terms.values()))
        yield from ("", Text(f"terms of the loss, {number}", "bold"), made)


def _nth(values: Json, at: int) -> Json:
    return values[at] if values is not None and at < len(values) else None


def _cell(value: Json) -> str:
    return "-" if value is None else f"{value:.5g}"


def rollout_json(found: Replayed, name: Name) -> Json:
    """With every column of the record, of the replay and of its batch."""
    one = found.only(name)
    rows = {"recorded": one.recorded, "recomputed": one.again, "batch": one.batch}
    return {
        **step_json(one),
        "rollout": list(name),
        **{kind: finite_json(dict(_first(each))) or None for kind, each in rows.items()},
    }


def name_of(found: Replayed, rollout: int | None, task: int | None, index: int) -> Name:
    """The rollout that is asked for: by its row in the step's file, from 0, or by its task and index. ConfigError if
    there is none."""
    names = found.names
    if rollout is not None and rollout < len(names):
        return names[rollout]
    if rollout is None and (named := [name for name in names if name == (task, index)]):
        return named[0]
    asked = f"--rollout {rollout}" if rollout is not None else f"--task {task} --index {index}"
    tasks = ", ".join(map(str, dict.fromkeys(uid for uid, _ in names)))
    raise ConfigError(f"{asked}: step {found.step.step} has {len(names)} rollouts, of the tasks {tasks}")
