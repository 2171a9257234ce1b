"""`whet export`: a Hugging Face folder, or one of peft's adapters, from any checkpoint of a run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

from whet import checkpoint, environment
from whet.config.load import Loaded, load
from whet.config.plan import dtype_on
from whet.config.schema import Config
from whet.config.urls import is_remote, url_problems
from whet.guard.temporary import OwnFolder
from whet.outputs import check_place
from whet.storage import stores
from whet.storage.fetch import fetched, naming, store_of
from whet.storage.manifests import manifest, place_of
from whet.storage.paths import brought_here
from whet.track.run_paths import check_link, run_of
from whet.track.written import read_config
from whet.types import CheckpointError, ConfigError

Form = Literal["merged", "adapter"]


def export_checkpoint(
    target: str,
    *,
    to: str | None = None,
    stage: str | None = None,
    step: int | None = None,
    form: Form | None = None,
    dtype: str | None = None,
) -> str:
    """Write the policy of a checkpoint to the folder or URL `to`. Returns the folder or URL.

    target: a run directory (its newest checkpoint, or the one of `stage` and `step`), a checkpoint, or a URL of one.
    to: default RUN/export/STAGE-step-N. form: default the run's checkpoint.export_as. dtype: default the checkpoint's.
    Raises ConfigError or CheckpointError.
    """
    if to is not None and is_remote(to) and (said := list(url_problems(to))):
        raise ConfigError(f"-o {to}: {'; '.join(said)}")
    path = chosen(target, stage=stage, step=step)
    state = checkpoint.read_state(path)
    loaded = brought_here(load(None, (), state["config"]))
    cfg = with_form(loaded.config, form or _form_of(path))
    name = f"{state['stage_name']}-step-{state['step']:06d}"
    other = "another folder: -o FOLDER"
    if to is None:
        run_dir = _run_of(path, target)
        check_link(run_dir / "export", run_dir)
        to = str(run_dir / "export" / name)
    else:
        refuse_other_files(to)
    with ExitStack() as stack:
        folder = Path(to)
        if is_remote(to):
            folder = stack.enter_context(OwnFolder("export")) / name
            other = "another folder for temporary files: TMPDIR"
        _write(replace(loaded, config=cfg), path, folder, dtype=dtype, other=other)
        if is_remote(to):
            with naming(to):
                store_of(to).send(folder, to, "", manifest(folder))
    return to


_MODEL = ("config.json", "adapter_config.json")
"""An export has one of them."""
_WRITTEN = (".json", ".safetensors", ".jinja", ".model", ".txt")
"""How names in an export end."""


def refuse_other_files(to: str) -> None:
    """ConfigError if a folder or URL holds files that are not an earlier export's: an export replaces all of them.
    Also if no folder can be made there."""
    if to.startswith("hf://"):
        return  # a commit adds files, and removes none
    if is_remote(to):
        with naming(to):
            names = stores.names(to)
    else:
        folder = Path(to)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"-o {to} is a file; give a folder for the export")
        try:
            check_place(folder)
        except OSError as e:
            raise ConfigError(
                f"-o {to}: no folder can be written there ({e.strerror}); give another one"
            ) from e
        inside = folder.iterdir() if folder.exists() else ()  # not what is below: an export has no folders
        names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in inside)
    others = [name for name in names if "/" in name or not name.endswith(_WRITTEN)]
    if names and (others or not any(name in names for name in _MODEL)):
        raise ConfigError(
            f"-o {to} holds other files ({(others or names)[0]}), which an export would remove; give a new folder, or "
            "one with an earlier export, which is replaced"
        )


def chosen(target: str, *, stage: str | None, step: int | None) -> Path:
    """The selected checkpoint."""
    if is_remote(target):
        found = Path(fetched((), checkpoints=[target])[target])
    else:
        found = Path(target)
    if place_of(found.name) is not None and found.is_dir():
        if stage is not None or step is not None:
            raise ConfigError(f"{target} is a single checkpoint; leave out --stage and --step")
        return found
    root = found / "checkpoints" if (found / "checkpoints").is_dir() else found
    there = checkpoint.all_in(root) if root.is_dir() else []
    if not there:
        raise CheckpointError(f"{target} has no checkpoint; give a run directory or a checkpoint's folder")
    fitting = [
        p for p in there if stage in (None, _stage(p)) and step in (None, int(p.name.rpartition("-")[2]))
    ]
    if not fitting:
        wanted = " ".join(f"--{k} {v}" for k, v in (("stage", stage), ("step", step)) if v is not None)
        raise CheckpointError(
            f"{target}: no checkpoint of {wanted}; checkpoints there: {', '.join(p.name for p in there)}"
        )
    return fitting[-1]


def _stage(path: Path) -> str:
    return path.name.partition("-")[2].rpartition("-")[0]


def _run_of(path: Path, target: str) -> Path:
    """The run directory of a checkpoint."""
    run_dir = run_of(path)
    if is_remote(target) or not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(f"{target} is not in a run directory; give the output folder: -o FOLDER")
    return run_dir


def _form_of(path: Path) -> Form:
    """The export form of the checkpoint's run; the checkpoint does not contain it."""
    run_dir = run_of(path)
    match read_config(run_dir).get("checkpoint", {}).get("export_as", "merged"):
        case "merged" | "adapter" as form:
            return form
        case other:
            raise ConfigError(
                f"{run_dir}/config.yaml: checkpoint.export_as is {str(other)[:60]!r}, expected merged or adapter"
            )


def with_form(cfg: Config, form: Form) -> Config:
    """The config with another checkpoint.export_as."""
    if form == "adapter" and cfg.model.lora is None:
        raise ConfigError("--as adapter: the run has no adapters (model.lora); use --as merged")
    return cfg.model_copy(update={"checkpoint": cfg.checkpoint.model_copy(update={"export_as": form})})


def _write(loaded: Loaded, path: Path, folder: Path, *, dtype: str | None, other: str) -> None:
    environment.prepare(None, exact=False)

    import torch

    from whet.checkpoint import tokenizer_in
    from whet.data.tasks import all_texts
    from whet.data.tokenizer import load_tokenizer
    from whet.models import kernels
    from whet.models.exports import write_export
    from whet.models.load import build
    from whet.models.lora import attach
    from whet.training.micro_batches import MicroBatchPolicy
    from whet.training.torch import TorchEngine

    cfg = loaded.config
    tokenizer = load_tokenizer(
        cfg.tokenizer, model_path=cfg.model.path, texts=all_texts(loaded), built=tokenizer_in(path)
    )
    model = build(
        cfg.model,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=cfg.seed,
        device="cpu",
        dtype=getattr(torch, _dtype(cfg, path)),
    )
    if cfg.model.lora is not None:
        attach(model, cfg.model.lora, seed=cfg.seed)
    TorchEngine(model, kernels.table("torch"), cut=MicroBatchPolicy()).load(path / "policy")
    if dtype is not None:
        for tensor in model.parameters():
            tensor.data = tensor.data.to(getattr(torch, dtype))
        model.config.dtype = getattr(torch, dtype)
    write_export(cfg, lambda: model, tokenizer, folder, other=other)


def _dtype(cfg: Config, path: Path) -> str:
    """The dtype that the weights were trained in; for a full model the dtype of its file."""
    from whet.models.tensor_files import opened

    if cfg.model.lora is None:
        with opened(path / "policy" / "model.safetensors") as file:
            return str(file.dtype(min(file.tensors))).removeprefix("torch.")
    return dtype_on(cfg, "cpu" if cfg.machine.device == "auto" else cfg.machine.device)
