"""A local S3 and a local hub, as fixtures that `conftest.py` hands on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_hub import Hub, hub

KEY, SECRET = "AKIDVERYSECRETID", "veryverysecretkey"


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """One server for all tests: fsspec keeps its connections for the whole process."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file system on an empty bucket `pail`; the environment points to it."""
    for name, value in {
        "AWS_ENDPOINT_URL": moto, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1", "WHET_CACHE": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    from whet.storage import stores

    fs, _ = stores.connect("s3://pail")
    if fs.exists("pail"):
        fs.rm("pail", recursive=True)
    fs.mkdir("pail")
    return fs


@pytest.fixture
def own_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_veryverysecret")
        yield server
