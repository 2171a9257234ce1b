"""A run's folder that comes from elsewhere: what its records name outside of it is neither removed nor written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from whet import checkpoint
from whet.checkpoint import Keep, Saver
from whet.storage.manifests import manifest, place_of
from whet.storage.uploads import Uploads
from whet.track.dumps import is_named
from whet.track.record import RunDirectory
from whet.types import CheckpointError

MINE = b"a file whose content is known to everybody\n"


def line(path: Path, **over: Any) -> str:
    told = {"stage": "s", "step": 5, "path": str(path), "sha256": hashlib.sha256(MINE).hexdigest()}
    return json.dumps(told | over) + "\n"


def test_a_resumed_run_deletes_no_file_that_its_config_does_not_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, own, victim = tmp_path / "run", tmp_path / "dump", tmp_path / "victim"
    dumps = {"batches": f"{own}/{{stage}}-{{step}}.parquet"}
    directory = RunDirectory(run, ["s"], dumps=dumps)
    directory.write_batch("s", 5, pa.table({"uid": [1]}))
    directory.close()
    victim.mkdir()
    others = [victim / "diary", victim / ".diary.new-ab12cd34", own / "s-4.parquet", own / "notes"]
    for other in others:
        other.write_bytes(MINE)
    with (run / "dumps.jsonl").open("a") as ledger:
        ledger.writelines(map(line, others))
        ledger.write(line(own / "../victim/diary"))
    directory = RunDirectory(run, ["s"], dumps=dumps)
    directory.truncate_to(0, 4)
    directory.close()
    assert all(other.read_bytes() == MINE for other in others)
    assert not (own / "s-5.parquet").exists(), "its own"
    assert f"5 files of later steps that track.dump does not name ({others[0]}); they stay" in caplog.text
    assert (run / "dumps.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("template", "path", "named"),
    [
        ("/d/{stage}/{step}.jsonl", "/d/s/5.jsonl", True),
        ("/d/{stage}/{step}.jsonl", "/d/s/6.jsonl", False),
        ("/d/{stage}/{step}.jsonl", "/d/t/5.jsonl", False),
        ("/d/{source}-{step}.jsonl", "/d/gsm8k.v2-5.jsonl", True),
        ("/d/{source}/{step}.jsonl", "/d/../5.jsonl", False),
        ("/d/{source}/{step}.jsonl", "/d/a/b/5.jsonl", False),
        ("/d/{source}/{source}.jsonl", "/d/a/a.jsonl", True),
        ("/d/x.jsonl", "/d/xyjsonl", False),
    ],
)
def test_the_files_that_a_template_names(template: str, path: str, named: bool) -> None:
    assert is_named(Path(path), template, "s", 5) is named


STATES: dict[str, dict[str, Any]] = {
    "above": {"stage_name": "../../victim"},
    "absolute": {"stage_name": "/victim"},
    "of two parts": {"stage_name": "a/b"},
    "hidden": {"stage_name": ".s"},
    "empty": {"stage_name": ""},
    "negative step": {"step": -1},
    "negative stage": {"stage": -1},
}


@pytest.mark.parametrize("how", STATES)
def test_a_checkpoint_whose_stage_names_another_folder_is_refused(how: str, tmp_path: Path) -> None:
    """Exports are written to, and renamed at, RUN/export/STAGE."""
    folder = tmp_path / "0-s-000005"
    folder.mkdir()
    for over in ({}, STATES[how]):
        state = {"stage": 0, "stage_name": "s", "step": 5, **over}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "manifest.json").write_text(json.dumps(manifest(folder)))
        if not over:
            assert checkpoint.read_state(folder) == state
    with pytest.raises(CheckpointError, match="which no run has: its files would be named by it"):
        checkpoint.read_state(folder)


def test_a_record_of_uploads_removes_nothing_beside_its_place(tmp_path: Path) -> None:
    """One that names another folder there by the digest of its manifest, which is no secret."""
    place, other = tmp_path / "place", tmp_path / "other/0-s-000001"
    other.mkdir(parents=True)
    (other / "weights").write_bytes(MINE)
    (other / "manifest.json").write_text(json.dumps(told := manifest(other)))
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    name, record = "0-x/../../other/0-s-000001", tmp_path / "uploads.json"
    (place / "0-x").mkdir(parents=True)
    url = f"file://{place}"
    record.write_text(json.dumps({url: {name: digest}}))
    copies = Uploads([url], keep=1, record=record)
    saver = Saver(tmp_path / "checkpoints", keep=Keep(), after=copies.checkpoint)
    for step in (8, 9):
        saver.save({}, {"stage": 0, "stage_name": "s", "step": step})
    assert copies.finish() == []
    assert [path.name for path in place.iterdir() if "0-s" in path.name] == ["0-s-000009"], (
        "it removes its own"
    )
    assert (other / "weights").read_bytes() == MINE


@pytest.mark.parametrize("name", ["0-a/b-000001", "0-../x-000001", "0-a\n-000001", "0-.-000001"])
def test_a_name_with_a_folder_in_it_is_no_checkpoints(name: str) -> None:
    assert place_of("0-a-b.1-000001") == (0, 1)
    assert place_of(name) is None
