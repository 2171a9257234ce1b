"""The Hugging Face hub, and any server with the same API at HF_ENDPOINT: `hf://[datasets/]ORG/NAME[@REVISION][/PATH]`.

The token is read from HF_TOKEN only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.guard.temporary import OwnFolder
from whet.storage.manifests import MANIFEST, parsed
from whet.storage.stores import MAGIC, Listing
from whet.types import Json, WhetError

_NOT_OPENED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", ".gitattributes")
"""Files of model repositories that are left there: pickles and other frameworks' weights, which whet never opens."""


@dataclass(frozen=True)
class Repo:
    kind: str
    """model or dataset."""
    name: str
    revision: str | None
    path: str
    """Below the repository's root, or a pattern; '' for the root."""


def parse(url: str) -> Repo:
    """The parts of a URL. WhetError if it names no repository."""
    parts = [part for part in url.removeprefix("hf://").split("/") if part]
    kind = "model"
    if parts and parts[0] in ("datasets", "models"):
        kind = parts.pop(0).removesuffix("s")
    if len(parts) < 2:
        raise WhetError(f"{url}: expected hf://ORG/NAME, or hf://datasets/ORG/NAME")
    name, _, revision = parts[1].partition("@")
    return Repo(kind, f"{parts[0]}/{name}", revision or None, "/".join(parts[2:]))


def _api() -> Any:
    from huggingface_hub import HfApi, is_offline_mode

    if is_offline_mode():
        raise WhetError("hf:// needs the hub, but HF_HUB_OFFLINE=1 disables access; set HF_HUB_OFFLINE=0")
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN") or False)


def look(url: str) -> Listing:
    """List the files of a URL: one file, a pattern, or a folder with all below it."""
    from fnmatch import fnmatch

    from fsspec.utils import glob_translate

    repo = parse(url)
    info = _api().repo_info(repo.name, repo_type=repo.kind, revision=repo.revision, files_metadata=True)
    files = {
        file.rfilename: (file.size or 0, str(file.blob_id or info.sha))
        for file in info.siblings
        if repo.kind != "model" or not any(fnmatch(file.rfilename, odd) for odd in _NOT_OPENED)
    }
    if repo.path in files:
        files = {repo.path: files[repo.path]}
    elif any(sign in repo.path for sign in MAGIC):
        asked = re.compile(glob_translate(repo.path))
        files = {name: said for name, said in files.items() if asked.match(name)}
    elif repo.path:
        files = {name: said for name, said in files.items() if name.startswith(f"{repo.path}/")}
    if not files:
        raise WhetError(f"{url}: does not exist")
    return Listing(files=files, folder=repo.name.rpartition("/")[2], inside=repo.path)


def download(url: str, listing: Listing, to: Path) -> None:
    """Bring the files of a listing into a folder."""
    repo = parse(url)
    _api().snapshot_download(
        repo.name,
        repo_type=repo.kind,
        revision=repo.revision,
        allow_patterns=list(listing.files),
        local_dir=to,
        cache_dir=to / ".cache",  # the package's own is in the home folder, which a user may not have
    )
    shutil.rmtree(to / ".cache", ignore_errors=True)


def children(url: str) -> list[str]:
    """Names of the folders directly below a URL that hold a manifest."""
    below = parse(url).path
    names = (name.removeprefix(f"{below}/" if below else "") for name in look(url).files)
    return sorted(parts[0] for name in names if len(parts := name.split("/")) == 2 and parts[1] == MANIFEST)


# ---------------------------------------------------------------- there


def said(url: str, name: str) -> Json:
    """The manifest of a folder there; None if there is none."""
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    repo = parse(url)
    with OwnFolder("hub") as folder:
        try:
            file = _api().hf_hub_download(
                repo.name,
                _below(repo, f"{name}/{MANIFEST}"),
                repo_type=repo.kind,
                revision=repo.revision,
                local_dir=folder,
                cache_dir=folder,
            )
        except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
            return None
        return parsed(Path(file).read_bytes(), f"{url}/{name}/{MANIFEST}")


def send(folder: Path, url: str, name: str, manifest: Json) -> None:
    """Copy a folder to URL/NAME in one commit, so it is there whole or not at all. A new repository is private."""
    from huggingface_hub import CommitOperationAdd

    repo, api = parse(url), _api()
    api.create_repo(repo.name, repo_type=repo.kind, private=True, exist_ok=True)
    content = json.dumps(manifest, indent=2).encode() + b"\n"
    added = [
        CommitOperationAdd(_below(repo, f"{name}/{file}"), str(folder / file)) for file in manifest["files"]
    ]
    added.append(CommitOperationAdd(_below(repo, f"{name}/{MANIFEST}"), content))
    api.create_commit(
        repo.name, added, commit_message=f"whet: {name}", repo_type=repo.kind, revision=repo.revision
    )


def settle(url: str, name: str) -> None:
    """Nothing: a commit leaves no listing of a copy that was being made."""


def remove(url: str, name: str) -> None:
    """Remove a folder there, in one commit."""
    repo = parse(url)
    _api().delete_folder(_below(repo, name), repo.name, repo_type=repo.kind, revision=repo.revision)


def _below(repo: Repo, name: str) -> str:
    return "/".join(part for part in f"{repo.path}/{name}".split("/") if part)
