"""Paths that stand elsewhere: `s3://bucket/key`, `hdfs://host/path`, `hf://org/name@revision` ..."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from whet.tables import is_installed

PACKAGES: dict[str, tuple[str, str]] = {
    "s3": ("s3fs", "pip install 'whet[s3]'"),
    "gs": ("gcsfs", "pip install gcsfs"),
    "hdfs": ("pyarrow", "pip install pyarrow"),
    "webhdfs": ("requests", "pip install requests"),
    "hf": ("huggingface_hub", "pip install huggingface_hub"),
    "file": ("fsspec", "pip install fsspec"),
}
"""By scheme: the package that speaks it, and where that comes from."""


def scheme(path: str) -> str | None:
    """The scheme of a URL; None for a path of this machine."""
    found = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*)://", path)
    return found[1].lower() if found else None


def is_remote(path: str) -> bool:
    """Whether a path stands elsewhere."""
    return scheme(path) is not None


def hub_hint(path: str) -> str:
    """How to download what looks like a model's id on the Hugging Face hub and is no path here; '' for other text."""
    owner, _, name = path.partition("/")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) or Path(owner).is_dir():
        return ""
    return (
        f". {path!r} looks like an id on the Hugging Face hub: download it with `hf download {path} --local-dir "
        f"models/{name}` and give models/{name}"
    )


def address_problems(url: str, *, token: bool) -> Iterator[str]:
    """What cannot work of the address of a server. token: it is asked with one."""
    try:
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").encode("idna"), parts.port
    except ValueError as error:
        yield f"{url!r} is no address: {error}"
        return
    if parts.scheme not in ("http", "https") or not host:
        yield f"{url!r}: expected an address such as http://host:8000"
    elif token and parts.username is not None:
        yield "an address has a user name, and there is a token, too; a request is sent with one of them: leave one out"


def url_problems(path: str) -> Iterator[str]:
    """What cannot work of a URL, on this machine; nothing for a path of this machine."""
    kind = scheme(path)
    if kind is None:
        return
    if kind not in PACKAGES:
        yield f"{kind}:// is not known; known: {', '.join(f'{name}://' for name in PACKAGES)}"
        return
    package, how = PACKAGES[kind]
    if not is_installed(package):
        yield f"{kind}:// needs {package}, which is not installed; {how}"
    if re.match(r"[^:]+://[^/@]*:[^/@]*@", path):
        yield "holds a password; credentials come from the environment alone, and stay out of configs"
    if kind == "hf" and len([part for part in path[5:].split("/") if part]) < 2:
        yield f"{path}: expected hf://ORG/NAME, or hf://datasets/ORG/NAME"
