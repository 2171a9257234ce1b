"""Paths that stand elsewhere, against a local S3, a local hub and a mounted folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

import whet
from fake_hub import Hub
from remote_places import KEY, SECRET
from test_checkpoint_options import CONFIG
from whet import api
from whet.config.load import load
from whet.config.plan import plans
from whet.config.urls import url_problems
from whet.data.files import find_files
from whet.storage import fetch, hub, stores
from whet.storage.manifests import MANIFEST, manifest
from whet.storage.paths import brought_here
from whet.types import ConfigError, WhetError

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_where_no_home_is_known_the_cache_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WHET_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(WhetError, match=r"the home folder is unknown .* set WHET_CACHE"):
        fetch.cache()
    monkeypatch.setenv("WHET_CACHE", "/some/where")
    assert fetch.cache() == Path("/some/where")


# ---------------------------------------------------------------- fetched


def test_files_folders_and_patterns_of_s3(s3: Any) -> None:
    for name in ("data/a.jsonl", "data/b.jsonl", "data/deep/c.txt"):
        s3.pipe_file(f"pail/{name}", name.encode())
    asked = ["s3://pail/data/a.jsonl", "s3://pail/data", "s3://pail/data/*.jsonl"]
    here = fetch.fetched(asked)
    assert Path(here[asked[0]]).read_text() == "data/a.jsonl"
    folder = Path(here[asked[1]])
    assert folder.name == "data", "sources are labelled by their folder's name"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "a.jsonl", "b.jsonl", "deep/c.txt",
    ]  # fmt: skip
    pattern = Path(here[asked[2]])
    assert sorted(p.name for p in pattern.parent.glob(pattern.name)) == ["a.jsonl", "b.jsonl"]


def test_what_is_there_is_not_fetched_again_and_what_changed_is(
    s3: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    url = "s3://pail/a.jsonl"
    s3.pipe_file("pail/a.jsonl", b"one")
    first = fetch.fetched([url])[url]
    assert "fetching s3://pail/a.jsonl (1 files" in capfd.readouterr().err
    assert fetch.fetched([url])[url] == first
    assert "fetching" not in capfd.readouterr().err
    s3.pipe_file("pail/a.jsonl", b"two")
    second = fetch.fetched([url])[url]
    assert (Path(first).read_bytes(), Path(second).read_bytes()) == (b"one", b"two")


def test_several_processes_at_once_fetch_once(s3: Any, tmp_path: Path) -> None:
    s3.pipe_file("pail/a.bin", os.urandom(3_000_000))
    code = "from whet.storage.fetch import fetched; print(fetched(['s3://pail/a.bin'])['s3://pail/a.bin'])"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = [p.communicate(timeout=100) for p in started]
    assert len({out for out, _ in said}) == 1, said
    assert Path(said[0][0].strip()).read_bytes() == s3.cat_file("pail/a.bin")
    assert "".join(err for _, err in said).count("fetching") == 1


def test_a_download_that_is_cut_short_leaves_nothing(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.pipe_file("pail/m/a", b"x" * 1000)
    s3.pipe_file("pail/m/b", b"y" * 1000)
    whole = stores.download

    def cut(url: str, listing: stores.Listing, to: Path) -> None:
        whole(url, listing, to)
        (to / "b").write_bytes(b"y" * 10)

    monkeypatch.setattr(stores, "download", cut)
    with pytest.raises(WhetError, match=r"s3://pail/m: b was fetched with 10 of 1000 bytes"):
        fetch.fetch("s3://pail/m", tmp_path / "own")
    assert not [p for p in (tmp_path / "own").rglob("*") if p.is_file() and p.name != ".lock"]
    monkeypatch.setattr(stores, "download", whole)
    assert (fetch.fetch("s3://pail/m", tmp_path / "own") / "b").read_bytes() == b"y" * 1000


def test_a_file_that_changes_while_it_is_read_is_refused(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.pipe_file("pail/m/a", b"x" * 10)
    whole = stores.download

    def meanwhile(url: str, listing: stores.Listing, to: Path) -> None:
        whole(url, listing, to)
        s3.pipe_file("pail/m/a", b"z" * 10)

    monkeypatch.setattr(stores, "download", meanwhile)
    with pytest.raises(WhetError, match="changed while it was read"):
        fetch.fetch("s3://pail/m", tmp_path / "own")


def test_a_name_with_signs_of_a_pattern_is_that_of_a_file_if_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "rows [1]").mkdir()
    (tmp_path / "rows [1]" / "a?.jsonl").write_text("x")
    for url in (f"file://{tmp_path}/rows [1]", f"file://{tmp_path}/rows [1]/a?.jsonl"):
        found = fetch.fetch(url, tmp_path / "cache")
        assert found.exists()
        assert found.name == url.rpartition("/")[2]


def test_names_that_lead_out_are_refused(tmp_path: Path) -> None:
    listing = stores.Listing(files={"../evil": (1, "")}, folder="m")
    with pytest.raises(WhetError, match="points outside its folder"):
        stores.download(f"file://{tmp_path}/m", listing, tmp_path / "to")


@pytest.mark.parametrize("url", ["s3://pail/nowhere", "s3://no-such-pail/x", "file:///no/such/folder"])
def test_what_is_not_there_is_named_and_no_secret_is_told(s3: Any, url: str) -> None:
    with pytest.raises(WhetError) as caught:
        fetch.fetched([url])
    assert url in str(caught.value)
    assert not any(secret in str(caught.value) for secret in (KEY, SECRET))


def test_repositories_of_the_hub(own_hub: Hub) -> None:
    own_hub.commits["org/tiny"] = [
        {
            "config.json": b"{}",
            "model.safetensors": b"w",
            "pytorch_model.bin": b"pickle",
            "sub/data.jsonl": b"rows",
        }
    ]
    own_hub.commits["org/rows"] = [
        {
            "train.jsonl": b"rows",
            "odd.bin": b"kept",
            "en/a.jsonl": b"1",
            "en/b.jsonl": b"2",
            "en/deep/c.jsonl": b"3",
        }
    ]
    asked = [
        "hf://org/tiny",
        "hf://org/tiny@main/sub/data.jsonl",
        "hf://datasets/org/rows",
        "hf://org/tiny/sub",
        "hf://datasets/org/rows/en/*.jsonl",
        "hf://datasets/org/rows/**/c.jsonl",
    ]
    model, file, rows, sub, few, deep = (Path(fetch.fetched(asked)[url]) for url in asked)
    assert model.name == "tiny"
    assert sorted(p.name for p in model.iterdir()) == ["config.json", "model.safetensors", "sub"], (
        "no pickles"
    )
    assert (file.read_bytes(), (sub / "data.jsonl").read_bytes()) == (b"rows", b"rows")
    assert sorted(p.name for p in rows.iterdir()) == ["en", "odd.bin", "train.jsonl"]
    assert [[p.read_bytes() for p in find_files(str(pattern))] for pattern in (few, deep)] == [
        [b"1", b"2"],
        [b"3"],
    ]
    assert sorted(p.name for p in few.parent.iterdir()) == ["a.jsonl", "b.jsonl"], "nothing else is fetched"
    assert own_hub.tokens == {"Bearer hf_veryverysecret"}
    own_hub.commits["org/tiny"].append({"config.json": b"{1}"})
    assert (Path(fetch.fetched(asked[:1])[asked[0]]) / "config.json").read_bytes() == b"{1}"
    for none in ("hf://org/none", "hf://datasets/org/rows/*.parquet"):
        with pytest.raises(WhetError, match=re.escape(none)):
            fetch.fetched([none])


# ---------------------------------------------------------------- in a config


def test_every_path_of_a_config_is_replaced_and_the_given_one_stays(tmp_path: Path) -> None:
    for name in ("model", "judge", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "t.jinja").write_text("{{ x }}")
    at = f"file://{tmp_path}"
    tree = {
        **CONFIG,
        "model": {"path": f"{at}/model", "lora": {"rank": 2, "path": f"{at}/adapter"}},
        "tokenizer": {"path": f"{at}/model", "chat_template": f"{at}/t.jinja"},
        "reference": {"path": f"{at}/model"},
        "critic": {"path": f"{at}/model"},
        "rewards": {"j": {"model": {"path": f"{at}/judge"}}},
        "data": {"train": [{"path": [f"{at}/a.jsonl", "tests/data/words.jsonl"]}]},
    }  # fmt: skip
    loaded = load(None, (), tree)
    here = brought_here(loaded)
    assert here.as_given == loaded.config
    for cfg in (here.config, here.stages[0]):
        told = json.dumps(cfg.model_dump(mode="json"))
        assert "file://" not in told
        assert told.count(str(tmp_path / "cache")) == 8
        assert Path(str(cfg.data.train[0].path[0])).is_file()
        assert cfg.data.train[0].path[1] == "tests/data/words.jsonl"
    assert brought_here(load(None, (), CONFIG)).as_given == load(None, (), CONFIG).config


def test_a_run_of_remote_paths_is_the_run_of_local_ones(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    s3.put_file("tests/data/words.jsonl", "pail/data/words.jsonl")
    whet.train(overrides=[f"run_dir={tmp_path}/first", "checkpoint.export=true"], **CONFIG)
    s3.put(f"{tmp_path}/first/export/main/", "pail/model/", recursive=True)

    def again(name: str, model: str, data: str) -> Path:
        own = {
            "model": {"path": model},
            "tokenizer": {},
            "data": {"max_prompt_tokens": 8, "train": [{"path": data}]},
        }
        whet.train(overrides=[f"run_dir={tmp_path}/{name}", "checkpoint.keep=null"], **{**CONFIG, **own})
        return tmp_path / name

    local = again("local", f"{tmp_path}/first/export/main", "tests/data/words.jsonl")
    remote = again("remote", "s3://pail/model", "s3://pail/data/words.jsonl")
    assert (local / "metrics.jsonl").read_bytes() == (remote / "metrics.jsonl").read_bytes()
    assert yaml.safe_load((remote / "config.yaml").read_text())["model"]["path"] == "s3://pail/model"
    for path in remote.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    # on another machine the cache lies elsewhere: the checkpoint agrees with the path as it was given
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "elsewhere"))
    whole = (remote / "metrics.jsonl").read_bytes()
    for step in (2, 3):
        for file in sorted((remote / f"checkpoints/0-main-00000{step}").rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        (remote / f"checkpoints/0-main-00000{step}").rmdir()
    again("remote", "s3://pail/model", "s3://pail/data/words.jsonl")
    assert (remote / "metrics.jsonl").read_bytes() == whole


def test_a_remote_path_that_cannot_be_read_ends_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    data = {"max_prompt_tokens": 8, "train": [{"path": "file:///nowhere/a.jsonl"}]}
    with pytest.raises(ConfigError, match=r"a path of the config cannot be read: .*file:///nowhere/a.jsonl"):
        whet.train(overrides=[f"run_dir={tmp_path}/run"], **{**CONFIG, "data": data})
    assert not (tmp_path / "run").exists()


def test_the_plan_asks_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *a, **k: pytest.fail("connected"))
    monkeypatch.setattr(api, "brought_here", lambda loaded: pytest.fail("fetched"))
    data = {"max_prompt_tokens": 8, "train": [{"path": "s3://pail/a.jsonl"}]}
    plans(load(None, ["checkpoint.upload_to=[s3://pail/run]"], {**CONFIG, "data": data}))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/x", "ftp:// is not known"),
        ("s3://me:p4ss-w0rd@pail/x", "holds a password"),
        ("hf://org", "expected hf://ORG/NAME"),
        ("gs://pail/x", "gs:// needs gcsfs, which is not installed"),
    ],
)
def test_urls_that_cannot_be(url: str, said: str) -> None:
    assert said in " ".join(url_problems(url))
    for keys in (
        [f"checkpoint.upload_to=[{url}]"],
        [f"checkpoint.resume={url}"],
        [f"data.train.0.path={url}"],
    ):
        with pytest.raises(ConfigError, match=said):
            plans(load(None, keys, CONFIG))


# ---------------------------------------------------------------- sent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "0-main-000001"
    (made / "policy").mkdir(parents=True)
    (made / "state.json").write_text("{}")
    (made / "policy/model.safetensors").write_bytes(os.urandom(100))
    return made


class Dying:
    """A file system whose line is dead from its n-th change on."""

    def __init__(self, fs: Any, left: int) -> None:
        self.fs, self.left = fs, left

    def __getattr__(self, name: str) -> Any:
        if name in ("rm_file", "put_file", "pipe_file"):
            if self.left == 0:
                raise OSError("the line is dead")
            self.left -= 1
        return getattr(self.fs, name)


@pytest.mark.parametrize("at", range(5))
def test_an_upload_cut_short_anywhere_is_no_whole_folder(
    s3: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Over an older copy of the same name, too."""
    own = manifest(folder)
    stores.send(folder, "s3://pail/run", folder.name, own)
    assert stores.said("s3://pail/run", folder.name) == own
    monkeypatch.setattr(stores, "connect", lambda url, connect=stores.connect: (dying, connect(url)[1]))
    dying = Dying(s3, at)
    (folder / "state.json").write_text('{"new": 1}')
    with pytest.raises(OSError, match="line is dead"):
        stores.send(folder, "s3://pail/run", folder.name, manifest(folder))
    dying.left = -1
    left = stores.said("s3://pail/run", folder.name)
    assert left is None if at > 1 else left == own
    assert stores.children("s3://pail/run") == ([] if at > 1 else [folder.name])


@pytest.mark.parametrize("at", [None, *range(6)])
def test_files_that_are_not_of_a_copy_stay(
    s3: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int | None
) -> None:
    """Wherever an earlier copy of the name was cut short. What lists files elsewhere removes none of them."""
    there = f"pail/run/{folder.name}"
    kept = {f"{there}/notes.txt", "pail/run/other.txt"}
    for path in kept:
        s3.pipe_file(path, b"mine")
    stores.send(folder, "s3://pail/run", folder.name, manifest(folder))
    listed = {"format": 1, "files": {"../other.txt": [4, ""], **manifest(folder)["files"]}}
    s3.pipe_file(f"{there}/{MANIFEST}", json.dumps(listed).encode())
    (folder / "policy/model.safetensors").rename(folder / "policy/second.safetensors")
    if at is not None:
        with monkeypatch.context() as patched:
            patched.setattr(
                stores, "connect", lambda url, connect=stores.connect: (Dying(s3, at), connect(url)[1])
            )
            with pytest.raises(OSError, match="line is dead"):
                stores.send(folder, "s3://pail/run", folder.name, manifest(folder))
    (folder / "policy/second.safetensors").rename(folder / "policy/third.safetensors")
    stores.send(folder, "s3://pail/run", folder.name, manifest(folder))
    own = {f"{there}/{name}" for name in (MANIFEST, "policy/third.safetensors", "state.json")}
    assert set(s3.find("pail/run")) == own | kept


def test_files_that_another_program_lists_stay(s3: Any, folder: Path) -> None:
    there = f"pail/run/{folder.name}"
    s3.pipe_file(f"{there}/precious.bin", b"mine")
    s3.pipe_file(f"{there}/{MANIFEST}", b'{"files": {"precious.bin": 4}}')
    stores.send(folder, "s3://pail/run", folder.name, manifest(folder))
    assert s3.cat_file(f"{there}/precious.bin") == b"mine"
    assert stores.said("s3://pail/run", folder.name) == manifest(folder)


def test_files_of_an_older_copy_go(s3: Any, folder: Path) -> None:
    stores.send(folder, "s3://pail/run", folder.name, manifest(folder))
    (folder / "policy/model.safetensors").rename(folder / "policy/other.safetensors")
    stores.send(folder, "s3://pail/run", folder.name, manifest(folder))
    assert sorted(s3.find(f"pail/run/{folder.name}")) == [
        f"pail/run/{folder.name}/{name}" for name in (MANIFEST, "policy/other.safetensors", "state.json")
    ]
    stores.remove("s3://pail/run", folder.name)
    assert s3.find("pail/run") == []


def test_who_waits_for_another_that_fetches_says_so_and_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("LOCK_S", 0.2), ("SAY_S", 0.0), ("LOOK_S", 0.01)):
        monkeypatch.setattr(fetch, name, seconds)
    with fetch.alone(tmp_path), pytest.raises(WhetError, match=r"\.lock was locked by another"):  # noqa: SIM117
        with fetch.alone(tmp_path):
            pytest.fail("two at a time")
    assert "waiting for another fetching process" in capsys.readouterr().err
    with fetch.alone(tmp_path):
        pass


def test_the_hub_needs_no_home(own_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own cache is in the home folder, wherever the files go."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~nobody-of-this-name/hub")
    own_hub.commits["org/saved"] = [{f"a/{MANIFEST}": b'{"files": {}}', "a/x": b"x"}]
    assert hub.said("hf://org/saved", "a") == {"files": {}}
    hub.download("hf://org/saved", hub.look("hf://org/saved"), tmp_path / "there")
    found = (p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert sorted(found) == [f"there/a/{MANIFEST}", "there/a/x"]


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("manifest", r"its manifest.json cannot be read"),
        ("size", r"policy/model.safetensors has 3 bytes, its manifest.json says 100"),
        ("file", r"state.json has no bytes, its manifest.json says 2"),
    ],
)
@pytest.mark.parametrize("on_hub", [False, True])
def test_the_newest_checkpoint_elsewhere_is_the_newest_whole_one(
    tmp_path: Path,
    folder: Path,
    own_hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    harm: str,
    told: str,
    on_hub: bool,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    there, newest = tmp_path / "there", "0-main-000002"
    url = "hf://org/saved/runs" if on_hub else str(there)

    def found(name: str = "") -> str:
        files = {f"runs/{p.relative_to(there)}": p.read_bytes() for p in there.rglob("*") if p.is_file()}
        own_hub.commits["org/saved"] = [files]
        return fetch.newest_checkpoint(f"{url}/{name}")

    for name in (folder.name, newest):
        stores.send(folder, str(there), name, manifest(folder))
    assert found() == f"{url}/{newest}"
    path = (
        there
        / newest
        / {"manifest": MANIFEST, "size": "policy/model.safetensors", "file": "state.json"}[harm]
    )
    path.unlink() if harm == "file" else path.write_text('{"f' if harm == "manifest" else "abc")
    assert found() == f"{url}/{folder.name}"
    assert re.search(rf"{url}/{newest} is not whole: {told}; an older", capsys.readouterr().err)
    assert found(newest) == f"{url}/{newest}", "it was asked for by name"
    (there / folder.name / MANIFEST).unlink()
    with pytest.raises(WhetError, match=rf"{url}/{newest} is not whole: {told}; there is no older"):
        found()
