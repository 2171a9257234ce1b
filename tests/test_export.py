"""`whet export`: a checkpoint's policy as a folder, the same that the run itself writes."""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import whet
from test_checkpoint_options import CONFIG
from whet import checkpoint, cli
from whet.export import chosen, export_checkpoint
from whet.models import lora as lora_module
from whet.types import CheckpointError, ConfigError

ROOT = Path(__file__).parents[1]
EVERY = ("checkpoint.export=true", "checkpoint.export_interval=1", "checkpoint.keep=null")


def run(run_dir: Path, *overrides: str, **more: Any) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        whet.train(overrides=[f"run_dir={run_dir}", *EVERY, *overrides], **{**CONFIG, **more})
    return run_dir


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = {**CONFIG["model"], "lora": {"rank": 2, "alpha": 4.0}}
    return run(tmp_path_factory.mktemp("lora") / "run", "checkpoint.export_as=adapter", model=model)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def assert_same(a: Path, b: Path) -> None:
    names = sorted(p.name for p in a.iterdir())
    assert names == sorted(p.name for p in b.iterdir())
    assert filecmp.cmpfiles(a, b, names, shallow=False)[1:] == ([], [])


@pytest.mark.parametrize("step", [1, 2])
def test_it_is_the_export_that_the_run_wrote(plain: Path, tmp_path: Path, step: int) -> None:
    there = export_checkpoint(str(plain), to=str(tmp_path / "out"), step=step)
    assert_same(plain / f"export/main-step-{step:06d}", Path(there))
    folder = plain / f"checkpoints/0-main-{step:06d}"
    export_checkpoint(str(folder), to=str(tmp_path / "again"))
    assert_same(tmp_path / "out", tmp_path / "again")


def test_the_newest_is_the_default_and_goes_into_the_run(plain: Path, tmp_path: Path) -> None:
    own = tmp_path / "run"
    shutil.copytree(plain, own)
    assert export_checkpoint(str(own)) == str(own / "export/main-step-000003")
    assert_same(plain / "export/main", own / "export/main-step-000003")


def test_adapters_alone_and_merged(lora: Path, tmp_path: Path) -> None:
    adapter = Path(export_checkpoint(str(lora), to=str(tmp_path / "adapter")))
    assert_same(lora / "export/main", adapter)
    merged = export_checkpoint(str(lora), to=str(tmp_path / "merged"), form="merged")
    model = AutoModelForCausalLM.from_pretrained(merged)
    held = load_file(lora / "checkpoints/0-main-000003/policy/model.safetensors")
    found = load_file(adapter / "adapter_model.safetensors")
    a = found["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    b = found["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert b.any(), "the adapter has learned"
    assert any(torch.equal(a, t) for t in held.values())
    base = export_checkpoint(str(lora), to=str(tmp_path / "first"), step=1, form="merged")
    before = AutoModelForCausalLM.from_pretrained(base).model.layers[0].self_attn.q_proj.weight
    first = load_file(lora / "checkpoints/0-main-000001/policy/model.safetensors")
    low = {k.rpartition(".")[2]: t for k, t in first.items() if "layers.0.self_attn.q_proj" in k}
    scale = 4.0 / 2
    moved = b.double() @ a.double() - low["lora_B"].double() @ low["lora_A"].double()
    now = model.model.layers[0].self_attn.q_proj.weight
    assert torch.allclose((now - before).double(), scale * moved, atol=1e-6)


def test_a_checkpoint_in_a_folder_elsewhere_is_of_its_run(lora: Path, tmp_path: Path) -> None:
    own, elsewhere = tmp_path / "run", tmp_path / "disk" / "saved"
    shutil.copytree(lora, own)
    elsewhere.parent.mkdir()
    (own / "checkpoints").rename(elsewhere)  # as dirs.checkpoints
    (own / "checkpoints").symlink_to(elsewhere)
    (elsewhere / ".whet-run").write_text(f"{own}\n")
    found = export_checkpoint(str(elsewhere / "0-main-000003"))
    assert found == str(own / "export/main-step-000003")
    assert_same(lora / "export/main", Path(found))  # an adapter, as the run's own


def test_another_dtype_rounds_every_weight(plain: Path, tmp_path: Path) -> None:
    whole, half = (
        load_file(
            Path(export_checkpoint(str(plain), to=str(tmp_path / name), dtype=dtype)) / "model.safetensors"
        )
        for name, dtype in (("whole", None), ("half", "bfloat16"))
    )
    assert {t.dtype for t in half.values()} == {torch.bfloat16}
    assert all(torch.equal(whole[name].to(torch.bfloat16), half[name]) for name in whole)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(tmp_path / "half")) > 3


def test_to_a_url(plain: Path, tmp_path: Path) -> None:
    export_checkpoint(str(plain), to=f"file://{tmp_path}/there/model")
    assert (tmp_path / "there/model/manifest.json").is_file()
    AutoModelForCausalLM.from_pretrained(tmp_path / "there/model")


def test_to_a_url_without_a_folder(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As s3://BUCKET: it is not taken for a folder of this machine called `s3:`."""
    monkeypatch.chdir(tmp_path)
    assert export_checkpoint(str(plain), to="file://out") == "file://out"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert {"config.json", "manifest.json"} <= {p.name for p in Path("out").iterdir()}


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_files_of_others_are_no_place_for_an_export(plain: Path, tmp_path: Path, scheme: str) -> None:
    folder = tmp_path / "mine"
    for name in ("notes.md", "config.json", "sub/config.json"):
        file = folder / name
        file.parent.mkdir(parents=True)
        file.write_text("mine")
        if name == "config.json":
            (folder / "thesis.tex").write_text("mine")
        before = sorted(folder.rglob("*"))
        with pytest.raises(ConfigError, match=r"mine holds other files \(.*\), which an export would remove"):
            export_checkpoint(str(plain), to=f"{scheme}{folder}")
        assert sorted(folder.rglob("*")) == before
        shutil.rmtree(folder)
    folder.mkdir()
    for step in (1, 2):  # an empty folder, and an earlier export, which is replaced
        export_checkpoint(str(plain), to=f"{scheme}{folder}", step=step)
        own = plain / f"export/main-step-{step:06d}/model.safetensors"
        assert (folder / "model.safetensors").read_bytes() == own.read_bytes()
    if not scheme:
        with pytest.raises(ConfigError, match="is a file; give a folder"):
            export_checkpoint(str(plain), to=str(folder / "config.json"))


def test_a_step_may_have_seven_digits(tmp_path: Path) -> None:
    for step in ("000001", "1000001"):
        (tmp_path / "checkpoints" / f"0-main-{step}").mkdir(parents=True)
    assert chosen(str(tmp_path), stage=None, step=1_000_001).name == "0-main-1000001"
    assert chosen(str(tmp_path), stage="main", step=1).name == "0-main-000001"


@pytest.mark.parametrize(
    ("kind", "to", "said"),
    [
        (
            "plain",
            "out",
            "cannot write .*out: the disk is full; free space there, or give another folder: -o FOLDER",
        ),
        (
            "lora",
            "out",
            "cannot write .*out: the disk is full; free space there, or give another folder: -o FOLDER",
        ),
        (
            "lora",
            None,
            "cannot write .*/export/main-step-000003: the disk is full; .*another folder: -o FOLDER",
        ),
        (
            "plain",
            "file://",
            "cannot write .*whet-export-.*: the disk is full; .*for temporary files: TMPDIR",
        ),
    ],
)
def test_on_a_full_disk_another_place_for_the_export_is_named(
    kind: str,
    to: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shutil.copytree(request.getfixturevalue(kind), tmp_path / "run")
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    monkeypatch.setattr(lora_module, "save_file", full)
    out = {"out": str(tmp_path / "out"), "file://": f"file://{tmp_path}/far"}.get(to or "")
    with pytest.raises(CheckpointError, match=said):
        export_checkpoint(str(tmp_path / "run"), to=out)
    assert not [*tmp_path.glob("*out*")]


def test_what_cannot_be_exported_is_said(plain: Path, lora: Path, tmp_path: Path) -> None:
    alone = tmp_path / "0-main-000003"
    shutil.copytree(plain / "checkpoints" / alone.name, alone)
    for wrong, error, said in (
        ({"target": str(tmp_path / "nowhere")}, CheckpointError, "has no checkpoint"),
        (
            {"target": str(plain), "step": 9},
            CheckpointError,
            "no checkpoint of --step 9; checkpoints there: 0-main-000001",
        ),
        ({"target": str(plain), "stage": "rl"}, CheckpointError, "no checkpoint of --stage rl"),
        ({"target": str(plain), "form": "adapter"}, ConfigError, "has no adapters"),
        ({"target": str(alone), "step": 3}, ConfigError, "leave out --stage and --step"),
        ({"target": str(alone)}, ConfigError, "give the output folder: -o FOLDER"),
        ({"target": str(plain), "to": "ftp://x/y"}, ConfigError, "ftp:// is not known"),
    ):
        with pytest.raises(error, match=said):
            export_checkpoint(**wrong)  # type: ignore[arg-type]
    file = alone / "policy/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        export_checkpoint(str(alone), to=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "said"), [("--as whole", "expected merged"), ("--dtype int8", "expected float32")]
)
def test_the_command(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    option: str, said: str,
) -> None:  # fmt: skip
    def call(line: str) -> int:
        monkeypatch.setattr(sys, "argv", line.split())
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0)

    assert call(f"whet export {plain} -o {tmp_path}/out --stage main --step 2") == 0
    assert capsys.readouterr().out.strip() == f"{tmp_path}/out"
    assert_same(plain / "export/main-step-000002", tmp_path / "out")
    assert call(f"whet export {plain} {option}") == 2
    assert said in capsys.readouterr().err
    assert [p.name for p in checkpoint.all_in(plain / "checkpoints")] == [
        f"0-main-00000{n}" for n in (1, 2, 3)
    ]


def test_the_output_is_the_folder_alone_whatever_a_library_logs(plain: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whet", "export", str(plain), "-o", str(tmp_path / "out")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout == f"{tmp_path / 'out'}\n"
    assert "accelerator" not in told.stderr, "of DeepSpeed, which transformers imports"
