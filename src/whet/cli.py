"""The command line. Answers `--help` and config errors before torch is imported."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from whet import (
    commands_engines,
    commands_generate,
    commands_records,
    commands_runs,
    commands_studio,
    secrets,
)
from whet.guard.foreign import plain
from whet.notices import check_output, say, say_code, say_columns, say_missing, say_rows, write
from whet.options import (
    SETTINGS,
    Arithmetic,
    Change,
    Dialect,
    File,
    Gpus,
    LikeRun,
    Mem,
    Overrides,
    Prove,
    Status,
    TableName,
    TrustScript,
    UnusedChoice,
    UnusedKeys,
)
from whet.types import ConfigError, WhetError

if TYPE_CHECKING:
    from whet.config.load import Loaded
    from whet.config.schema import Config

app = typer.Typer(
    name="whet",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(no_args_is_help=True, help="Make training files from published data.")
app.add_typer(data_app, name="data")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"whet {version_of('whet')}")
        raise typer.Exit


@app.callback()
def whet(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """RL post-training for language models.

    Start with: whet train examples/first_run.yaml
    """


@app.command(context_settings=SETTINGS)
def train(
    file: File,
    overrides: Overrides = None,
    dialect: Dialect = None,
    change: Change = False,
    unused: UnusedKeys = UnusedChoice.refuse,
    trust_script: TrustScript = False,
) -> None:
    """Train a config, or resume the run of its run directory.

    A run may resume with changed limits, micro-batches, layouts, records, evaluations and more steps. With --change,
    learning rates, losses, data and rewards may change too: manifest.json and `whet show` record the step.

    \b
    Example: whet train examples/first_run.yaml seed=1 run_dir=runs/seed1
    Example: whet train examples/first_run.yaml --unused warn algorithm.kl.estimator=k1
    Example: whet train examples/from_verl.sh trainer.total_epochs=5
    Example: whet train examples/first_run.yaml --change stages.rl.train.optimizer.lr=1e-4
    """
    from whet.api import run_training
    from whet.config.load import load

    loaded = load(file, overrides or (), dialect=dialect, trust_script=trust_script, unused=unused.value)
    say(loaded)
    raise typer.Exit(run_training(loaded, change=change))


@app.command(context_settings=SETTINGS)
def plan(
    file: File,
    overrides: Overrides = None,
    dialect: Dialect = None,
    like: LikeRun = None,
    arithmetic: Arithmetic = False,
    gpus: Gpus = None,
    mem: Mem = None,
    unused: UnusedKeys = UnusedChoice.refuse,
    trust_script: TrustScript = False,
) -> None:
    """Print everything that follows from a config, without loading a model.

    \b
    Example: whet plan examples/first_run.yaml stages.rl.train.tasks_per_step=32
    Example: whet plan examples/first_run.yaml --arithmetic
    Example: whet plan examples/from_verl.yaml --gpus 8 --mem 80 trainer.n_gpus_per_node=2
    Example: whet plan examples/from_verl.sh trainer.total_epochs=5
    Example: whet plan examples/gsm8k.yaml rollout.max_staleness=2 rollout.schedule=async --simulate runs/gsm8k
    """
    from whet.config.evaluation import trains
    from whet.config.hardware import as_if, machines
    from whet.config.load import load
    from whet.config.memory_estimate import check_memory
    from whet.config.plan import describe, plans
    from whet.config.screen import show

    with as_if(machines(gpus, mem)):
        loaded = load(
            file,
            overrides or (),
            dialect=dialect,
            trust_script=trust_script,
            here=gpus is None,
            unused=unused.value,
        )
        say(loaded)
        planned = plans(loaded, here=False, trains=any(map(trains, loaded.stages)))
        say_missing(loaded)
        say_code(loaded)
        say_columns(loaded)
        say_rows(planned)
        show(describe(planned))
        if arithmetic:
            _say_arithmetic(planned[0].cfg, {plan.dtype for plan in planned if plan.device == "cpu"})
        check_memory(planned)
    if like is not None:
        from whet.config.engines import engines_of
        from whet.track.costs import measured, predictions, schedule_of

        for stage, planned_stage in zip(loaded.stages, planned):
            if planned_stage.algorithm.kind == "online":
                slots = planned_stage.cfg.rollout.max_num_seqs * engines_of(planned_stage.cfg)
                costs = measured(like, planned_stage.name, slots=slots)
                schedule = schedule_of(planned_stage, stage.rollout)
                show(predictions(costs, schedule, stage=planned_stage.name))


def _say_arithmetic(cfg: Config, dtypes: Collection[str]) -> None:
    """Print the bits of float32 here, and of the dtypes of half precision among these; the test needs torch."""
    from whet import environment

    environment.prepare(None, cfg.machine.logprob_parity != "off")

    from whet.models import arithmetic, kernels

    typer.echo(arithmetic.told(kernels.load(cfg.machine.kernels), dtypes))


@app.command(context_settings=SETTINGS)
def rehearse(
    file: File,
    overrides: Overrides = None,
    dialect: Dialect = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--output", help="JSON file for the findings.", show_default=False),
    ] = None,
    trust_script: TrustScript = False,
) -> None:
    """Try a run at small size on this machine, also a run for other machines. It takes one or two minutes.

    The rehearsal uses the same architecture at tiny size with random weights, and the real data, chat template, rewards
    and batch arithmetic. It trains a few steps, kills the run and resumes it. Exit code 1: some part failed.

    \b
    Example: whet rehearse examples/from_verl.yaml
    Example: whet rehearse examples/from_verl.sh
    Example: whet rehearse big_run.yaml trainer.nnodes=8 -o found.json
    """
    check_output(output, file)
    from whet.config.screen import show
    from whet.rehearsal.rehearse import rehearse as try_small

    def say(what: str) -> None:
        typer.echo(f"{what} ...", err=True)

    found = try_small(file, overrides or (), dialect, say=say, trust_script=trust_script)
    show(found)
    if output:
        write(output, found.to_json() + "\n")
    raise typer.Exit(0 if found.passed else 1)


@app.command("eval", context_settings=SETTINGS)
def evaluate(
    target: Annotated[
        Path, typer.Argument(help="A run directory, a model's folder, or a config file.", show_default=False)
    ],
    overrides: Overrides = None,
    data: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="File of held-out tasks, in place of the run's data.eval.", show_default=False),
    ] = None,
    reward: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="Reward in place of the run's: math, rewards.py:f ...; give it several times for a sum.",
            show_default=False,
        ),
    ] = None,
    stage: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Evaluate only the checkpoints of this stage.", show_default=False),
    ] = None,
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Evaluate only the checkpoint of this step.", show_default=False),
    ] = None,
    offline: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="File of replies to score (parquet, jsonl); no model is run.", show_default=False),
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--output", help="JSON file for all numbers.", show_default=False),
    ] = None,
    dialect: Dialect = None,
) -> None:
    """Score the kept checkpoints of a run, a model, or replies from a file, with rewards.

    Checkpoints are evaluated on data.eval, or --data, oldest first; results go to RUN/bench. Of a config file, the
    model that it begins with is evaluated. A model's folder needs --data and --reward; results go to
    runs/eval-MODEL/bench. Replies come from --offline, or from data.eval (eval.offline).

    \b
    Example: whet eval runs/first_run eval.samples=4 eval.sampling.temperature=1.0
    Example: whet eval runs/first_run --step 300 --data other.jsonl
    Example: whet eval models/mine --data test.jsonl --reward math rollout.sampling.max_tokens=512
    Example: whet eval examples/first_run.yaml
    Example: whet eval judge.yaml --offline replies.parquet -o judged.json
    """
    if offline is not None and target.is_dir():
        raise ConfigError(
            f"--offline: expected a config file, got a run directory; use {target / 'config.yaml'}"
        )
    check_output(output, target, offline)
    from whet.config.load import load

    if not target.is_dir() and (offline or load(target, overrides or (), None, dialect).config.eval.offline):
        if data or reward or stage or step is not None:
            raise ConfigError(
                f"{target} scores given replies, without a model: --data, --reward, --stage and --step are for a "
                "model; write data and rewards into the file"
            )
        written = _judge_file(target, overrides or (), offline, dialect=dialect)
    else:
        chosen = {"stage": stage, "step": step, "dialect": dialect}
        rewards = _by_name(reward or ())
        written = _judge_run(target, overrides or (), data=data, rewards=rewards or None, **chosen)
    if output:
        write(output, written + "\n")


@app.command()
def export(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="A run directory, a checkpoint's folder, or a URL of one (s3:// ...).",
            show_default=False,
        ),
    ],
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "-o",
            "--output",
            help="Folder or URL to write. Default: RUN/export/STAGE-step-N.",
            show_default=False,
        ),
    ] = None,
    stage: Annotated[Optional[str], typer.Option(help="Stage of the checkpoint. Default: the last.")] = None,  # noqa: UP045
    step: Annotated[Optional[int], typer.Option(help="Step of the checkpoint. Default: the last.")] = None,  # noqa: UP045
    form: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--as",
            help="merged: a full model. adapter: the adapters, in peft's format. Default: the run's export_as.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="float32, bfloat16 or float16. Default: as trained.", show_default=False),
    ] = None,
) -> None:
    """Write a Hugging Face folder from a checkpoint of a run.

    \b
    Example: whet export runs/first_run --step 50
    Example: whet export runs/lora -o adapters --as adapter
    Example: whet export s3://bucket/run -o model --dtype bfloat16
    """
    from whet.export import export_checkpoint

    if form not in (None, "merged", "adapter"):
        raise ConfigError(f"--as {form}: expected merged or adapter")
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype {dtype}: expected float32, bfloat16 or float16")
    typer.echo(export_checkpoint(target, to=output, stage=stage, step=step, form=form, dtype=dtype))  # type: ignore[arg-type]


def _by_name(specs: Sequence[str]) -> dict[str, str]:
    """Rewards by the name of what they call: f for rewards.py:f. ConfigError where two have the same name."""
    named: dict[str, str] = {}
    for spec in specs:
        name = spec.rpartition(":")[2]
        if name in named:
            raise ConfigError(
                f"--reward {named[name]} and --reward {spec} have the same name, {name!r}, so one would replace the "
                "other; rename a function, or name them in a config file: rewards.NAME.function"
            )
        named[name] = spec
    return named


def _judge_run(target: Path, overrides: Sequence[str], **chosen: Any) -> str:
    """Print the metrics of every checkpoint. Returns all of them as JSON."""
    from whet.bench import evaluate
    from whet.config.screen import show
    from whet.track.accuracy import by_source
    from whet.track.dumps import finite_json

    found = evaluate(target, overrides=overrides, **chosen)
    for line in found:
        numbers = {k: v for k, v in line.items() if k.startswith("eval/")}
        show(by_source(numbers, title=f"{line['stage']} step {line['step']}"))
    return json.dumps(finite_json(found), indent=1)


def _judge_file(file: Path, overrides: Sequence[str], replies: Path | None, *, dialect: str | None) -> str:
    """Print the metrics of replies from a file. Returns them and the numbers of every reply as JSON."""
    from whet.config.load import load

    loaded = load(file, () if replies else overrides, None, dialect)
    from whet.bench import judge_file, replies_in

    if replies:
        loaded = load(file, overrides, replies_in(replies, loaded.config), dialect)
    say(loaded)
    from whet.config.screen import show
    from whet.track.accuracy import by_source
    from whet.track.dumps import finite_json

    judged = judge_file(loaded, whole=replies is None)
    show(by_source(judged.metrics))
    whole = finite_json({"metrics": judged.metrics, "replies": judged.rows})
    return json.dumps(whole, indent=1, ensure_ascii=False)


@app.command(context_settings=SETTINGS)
def convert(
    file: File,
    overrides: Overrides = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "-o", "--output", help="Native file to write. Default: standard output.", show_default=False
        ),
    ] = None,
    report: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Markdown file with the translation of every key.", show_default=False),
    ] = None,
    dialect: Dialect = None,
    gpus: Gpus = None,
    mem: Mem = None,
    trust_script: TrustScript = False,
    proves: Prove = False,
) -> None:
    """Write a config of another system as a native config, with the origin of each line.

    The layout is taken from the file, or fits the machines of --gpus.

    --prove imports the package of that system and calls its code with the settings of the file: batch sizes, steps,
    learning rates, optimizer, sampling, KL, and advantages and losses of random batches, for RL and SFT, stage by
    stage. The file is read as the installed release, unless --dialect names another. Exit code 1: a row differs without
    a note, or cannot be compared.

    \b
    Example: whet convert examples/from_skyrl.yaml
    Example: whet convert examples/from_verl.yaml --prove
    Example: whet convert examples/from_verl.sh trainer.total_epochs=5
    Example: whet convert examples/from_skyrl.yaml -o native.yaml --report report.md
    Example: whet convert examples/from_skyrl.yaml --gpus 8x2 --mem 80
    """
    from whet.config.evaluation import scores_alone, trains
    from whet.config.hardware import ENOUGH, as_if, machines
    from whet.config.load import load
    from whet.config.plan import plans
    from whet.dialects.convert import native_yaml
    from whet.dialects.report import markdown

    def read(dialect: str | None) -> Loaded:
        return load(file, overrides or (), dialect=dialect, trust_script=trust_script, here=False)

    check_output(output, file)
    check_output(report, file, output)
    given = machines(gpus, mem)
    with as_if(given):
        loaded = read(dialect)
        if report and not loaded.translation:
            raise ConfigError(
                f"--report: {file} is a native config, so no key of it is translated; leave it out"
            )
        if proves and "@" not in (dialect or ""):
            from whet.prove.proof import release

            loaded = read(release(loaded))
    if not scores_alone(loaded.config, loaded.stages):
        with as_if(given or (ENOUGH if loaded.translation else None)):
            plans(loaded, here=False, trains=any(map(trains, loaded.stages)))
    say(loaded)
    say_missing(loaded)
    if output:
        write(output, native_yaml(loaded))
    elif not proves:
        typer.echo(native_yaml(loaded), nl=False)
    if report and loaded.translation:
        write(report, markdown(loaded.translation, f"Translation of {file}"))
    if proves:
        from whet.prove.proof import printed

        with as_if(given or ENOUGH):
            raise typer.Exit(0 if printed(loaded) else 1)


@app.command()
def keys(
    dialect: TableName = None,
    status: Status = None,
    algorithms: Annotated[
        bool, typer.Option("--algorithms", help="List recipes and their parts instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """List the documented keys of other systems and their meaning here, or all algorithms.

    \b
    Example: whet keys --dialect skyrl --status coming
    Example: whet keys --algorithms
    Example: whet keys --json
    """
    if algorithms:
        _list_algorithms(as_json, alone=dialect is None and status is None)
        return
    from whet.dialects.listing import as_text, listed

    found = listed(dialect, status)
    typer.echo(json.dumps(found, indent=1, ensure_ascii=False) if as_json else as_text(found))


def _list_algorithms(as_json: bool, *, alone: bool) -> None:
    from whet.config.algorithms_listing import as_tables, listed

    if not alone:
        raise ConfigError(
            "--algorithms lists whet's own names; --dialect and --status select keys of other systems: leave them out"
        )
    if as_json:
        typer.echo(json.dumps(listed(), indent=1, ensure_ascii=False))
    else:
        as_tables(listed())


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A config key, or key=value for one of its values.")],
) -> None:
    """Print the meaning, type, default and source of a config key.

    \b
    Example: whet explain train.optimizer.lr
    Example: whet explain algorithm.name=dapo
    """
    from whet.config.explain import explain as look_up
    from whet.config.screen import show

    show(look_up(key))


@app.command()
def schema(
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--output", help="File to write. Default: standard output.", show_default=False),
    ] = None,
) -> None:
    """Print the JSON schema of a config, for editors and forms.

    Example: whet schema -o whet.schema.json
    """
    from whet.config.forms import schema as made

    text = json.dumps(made(), indent=1, ensure_ascii=False)
    if output:
        write(output, text + "\n")
    else:
        typer.echo(text)


@data_app.command()
def gsm8k(
    source: Annotated[
        Path, typer.Option("--from", help="Folder with the published train.jsonl and test.jsonl.")
    ],
    to: Annotated[Path, typer.Option(help="Folder for train.parquet and test.parquet.")] = Path("data/gsm8k"),
) -> None:
    """Convert GSM8K to parquet in verl's column layout.

    Example: whet data gsm8k --from downloads/gsm8k --to data/gsm8k
    """
    from whet.data.gsm8k import convert

    for name, count in convert(source, to).items():
        typer.echo(f"{to / name}.parquet: {count} tasks")


commands_generate.add_to(app)
commands_runs.add_to(app)
commands_records.add_to(app)
commands_engines.add_to(app)
commands_studio.add_to(app)


_ADVICE = {
    errno.ENOSPC: "free some of it, and give the command again",
    errno.EDQUOT: "free some of it, and give the command again",
    errno.EACCES: "give another path, or fix its owner and mode",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ENOMEM: "free memory, or raise the limit of this process (ulimit -v)",
}
"""What a user can do about an error of the system, whichever part of a command met it."""


_LOST = "the folder in which this command was given is not there any more; change to one that is"


def _folder_is_gone() -> bool:
    """Whether the current folder was removed: no path, not even a whole one, can be made absolute then."""
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def main() -> None:
    """Entry point: a user error is one message, not a traceback. Exit code 2: nothing was run."""
    arguments = sys.argv[1:]
    secrets.learn_overrides(arguments)
    sys.argv[1:] = map(secrets.redact, arguments)  # trackers write it down
    secrets.guard_output()
    try:
        app(arguments)
    except KeyboardInterrupt:  # before a command began, or after it ended: click answers the others
        sys.exit(130)
    except WhetError as e:  # it may quote a file or a script that is someone else's
        typer.echo(f"whet: {plain(str(e))}", err=True)
        sys.exit(2 if isinstance(e, ConfigError) else 1)
    except OSError as e:
        advice = _LOST if e.errno == errno.ENOENT and _folder_is_gone() else _ADVICE.get(e.errno or 0)
        if advice is None:
            raise
        typer.echo(f"whet: {plain(str(e))}: {advice}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
