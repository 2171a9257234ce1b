"""Object stores and file systems that fsspec speaks: s3, gs, hdfs, webhdfs, a mounted folder.

Credentials and endpoints come from the environment, as each package reads them (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL,
GOOGLE_APPLICATION_CREDENTIALS, HADOOP_HOME ...).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.config.urls import is_remote, scheme
from whet.guard import pulse
from whet.storage.manifests import FORMAT, MANIFEST, parsed
from whet.types import Json, WhetError

MAGIC = "*?["
_SENDING = "manifest.sending.json"
"""Lists the files of a copy that is being made, and of those before it."""
_TAGS = (
    "ETag",
    "etag",
    "checksum",
    "md5Hash",
    "sha256",
    "LastModified",
    "last_modified",
    "mtime",
    "modificationTime",
)
_S3 = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}}


@dataclass(frozen=True)
class Listing:
    """What a URL stands for."""

    files: Mapping[str, tuple[int, str]]
    """By name below `folder`: size in bytes, and a tag that changes with the content, or with the time of writing."""
    folder: str
    """Name of the folder that the files are in."""
    inside: str = ""
    """What of that folder is meant: a file's name, a pattern; '' for the folder itself."""


def connect(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it."""
    import fsspec

    options: dict[str, Any] = _S3 if scheme(url) == "s3" else {}
    fs, path = fsspec.core.url_to_fs(url if is_remote(url) else f"file://{Path(url).absolute()}", **options)
    fs.invalidate_cache()
    return fs, path.rstrip("/")


def look(url: str) -> Listing:
    """List the files of a URL: one file, a pattern, or a folder with all below it. WhetError if it does not exist."""
    fs, path = connect(url)
    if any(sign in path for sign in MAGIC) and not fs.exists(path):
        parts = path.split("/")
        depth = next(n for n, part in enumerate(parts) if any(sign in part for sign in MAGIC))
        base, found = "/".join(parts[:depth]), fs.glob(path, detail=True)
        inside = "/".join(parts[depth:])
    elif fs.isfile(path):
        base, _, inside = path.rpartition("/")
        found = {path: fs.info(path)}
    else:
        base, inside, found = path, "", fs.find(path, detail=True)
    files = {
        name[len(base) :].lstrip("/"): (int(info["size"]), _tag(info))
        for name, info in found.items()
        if info["type"] == "file" and not name.endswith(("/", f"/{_SENDING}"))
    }
    if not files:
        raise WhetError(f"{url}: does not exist")
    return Listing(files=files, folder=base.rpartition("/")[2] or "root", inside=inside)


def _tag(info: Mapping[str, Any]) -> str:
    return str(next((info[key] for key in _TAGS if info.get(key)), ""))


def download(url: str, listing: Listing, to: Path) -> None:
    """Bring the files of a listing into a folder."""
    fs, path = connect(url)
    base = path[: len(path) - len(listing.inside)].rstrip("/")
    for name in listing.files:
        target = to / name
        if not target.resolve().is_relative_to(to.resolve()):
            raise WhetError(f"{url}: a file is named {name!r}, which points outside its folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(f"{base}/{name}", str(target))


def children(url: str) -> list[str]:
    """Names of the folders directly below a URL that hold a manifest."""
    fs, path = connect(url)
    if not fs.exists(path):
        return []
    found = (entry.rstrip("/") for entry in fs.ls(path, detail=False))
    return sorted(entry.rpartition("/")[2] for entry in found if fs.isfile(f"{entry}/{MANIFEST}"))


def names(url: str) -> list[str]:
    """Names of the files below a URL; none if it does not exist."""
    fs, path = connect(url)
    return sorted(found[len(path) + 1 :] for found in fs.find(path))


# ---------------------------------------------------------------- there


def said(url: str, name: str) -> Json:
    """The manifest of a folder there; None if the folder is not a whole one."""
    fs, path = connect(url)
    file = f"{path}/{name}/{MANIFEST}"
    return parsed(fs.cat_file(file), f"{url}/{name}/{MANIFEST}") if fs.exists(file) else None


def send(folder: Path, url: str, name: str, manifest: Json) -> None:
    """Copy a folder to URL/NAME; without a name, to the URL itself. Its manifest goes first if one is there, and comes
    last, so at no moment is half an upload a whole folder. Files of an earlier copy go, also of one that was cut short;
    all others stay."""
    fs, path = connect(url)
    there = f"{path}/{name}".rstrip("/")
    earlier = {file for listing in (MANIFEST, _SENDING) for file in _listed(fs, f"{there}/{listing}")}
    fs.makedirs(there, exist_ok=True)
    begun = {"format": FORMAT, "files": dict.fromkeys(sorted(earlier | manifest["files"].keys()))}
    fs.pipe_file(f"{there}/{_SENDING}", json.dumps(begun).encode())
    if fs.exists(f"{there}/{MANIFEST}"):
        fs.rm_file(f"{there}/{MANIFEST}")
    for file in manifest["files"]:
        fs.makedirs(f"{there}/{file}".rpartition("/")[0], exist_ok=True)
        fs.put_file(str(folder / file), f"{there}/{file}")
        pulse.beat(f"uploading {file}")
        size = fs.info(f"{there}/{file}")["size"]
        if size != manifest["files"][file][0]:
            raise OSError(
                f"{file} has {size} bytes at the destination, but {manifest['files'][file][0]} were sent"
            )
    for file in sorted(earlier - manifest["files"].keys()):
        if fs.exists(f"{there}/{file}"):
            fs.rm_file(f"{there}/{file}")
    fs.pipe_file(f"{there}/{MANIFEST}", json.dumps(manifest, indent=2).encode() + b"\n")
    settle(url, name)


def settle(url: str, name: str) -> None:
    """Remove the listing of a copy that was being made from a folder that is whole: its process may have ended before
    it could."""
    fs, path = connect(url)
    sending = f"{path}/{name}".rstrip("/") + f"/{_SENDING}"
    if fs.exists(sending):
        fs.rm_file(sending)


def _listed(fs: Any, path: str) -> list[str]:
    """The files of a listing of ours, if it is there, as far as they are below its folder. Another program's manifest
    may have this name and such a key."""
    listing = parsed(fs.cat_file(path), path) if fs.exists(path) else None
    names = listing["files"] if listing is not None and listing.get("format") == FORMAT else []
    return [name for name in names if name and not name.startswith("/") and ".." not in name.split("/")]


def remove(url: str, name: str) -> None:
    """Remove a folder there, its manifest first: half a removal leaves no whole folder."""
    fs, path = connect(url)
    if fs.exists(f"{path}/{name}/{MANIFEST}"):
        fs.rm_file(f"{path}/{name}/{MANIFEST}")
    fs.rm(f"{path}/{name}", recursive=True)
