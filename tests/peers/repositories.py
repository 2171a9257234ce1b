"""The peers' repositories at fixed commits: what `make test-files` and the proofs of single files read.

A repository is a git directory `owner+name` in REPOSITORIES (an environment variable; else `.peers-git`), or
is cloned there. Files of a commit that the directory has not may lie beside it under their own paths, in
`owner+name/COMMIT`. Nothing of it is ever committed here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = Path(os.environ.get("REPOSITORIES", ROOT / ".peers-git"))


@dataclass(frozen=True, kw_only=True)
class Repository:
    """Where a system is developed."""

    owner: str
    name: str
    commit: str
    """The newest that was read."""


REPOSITORIES = {
    "verl": Repository(owner="verl-project", name="verl", commit="1dda039b9c6311889a9c9a26040677e1254814f9"),
    "skyrl": Repository(owner="NovaSky-AI", name="SkyRL", commit="a9564572eb8e91076be43c1bd5e4615e3de17265"),
    "cosmos": Repository(
        owner="nvidia-cosmos", name="cosmos-rl", commit="89f2e5b5c817d99a240f1194ce37239ceb6f058a"
    ),
    "trinity": Repository(
        owner="agentscope-ai", name="Trinity-RFT", commit="7f762d71511f1bdf77195266b068bee1396114fa"
    ),
    "recipe": Repository(
        owner="verl-project", name="verl-recipe", commit="e7f889574b8301cc0f0fc1d57c6d67f31ffeb689"
    ),
}


@cache
def directory(system: str) -> Path:
    """The git directory of a system's repository; it is cloned if it is not there."""
    of = REPOSITORIES[system]
    folder = PLACE / f"{of.owner}+{of.name}"
    if (folder / "repo").is_dir():
        return folder / "repo"
    if not folder.is_dir():
        url = f"https://github.com/{of.owner}/{of.name}"
        subprocess.run(["git", "clone", "--quiet", "--bare", url, str(folder)], check=True)
    return folder


def _git(system: str, *arguments: str) -> bytes:
    command = ["git", "--git-dir", str(directory(system)), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def _loose(system: str, commit: str) -> Path | None:
    """The folder with single files of a commit, where there is one."""
    of = REPOSITORIES[system]
    folder = PLACE / f"{of.owner}+{of.name}" / (commit or of.commit)
    return folder if folder.is_dir() else None


def loose(system: str) -> list[str]:
    """Commits of which single files are there."""
    of = REPOSITORIES[system]
    folders = sorted((PLACE / f"{of.owner}+{of.name}").glob("?" * 40))
    return [folder.name for folder in folders if folder.is_dir()]


def has(system: str, commit: str) -> bool:
    """Whether a commit's files can be read: a clone has no commits of branches that are gone."""
    command = ["git", "--git-dir", str(directory(system)), "cat-file", "-e", commit]
    return (
        bool(_loose(system, commit))
        or subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0
    )


def files(system: str, commit: str = "") -> list[str]:
    """Paths of all files at a commit."""
    if folder := _loose(system, commit):
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    listed = _git(system, "ls-tree", "-r", "-z", "--name-only", commit or REPOSITORIES[system].commit)
    return [os.fsdecode(path) for path in listed.split(b"\0") if path]


def content(system: str, path: str, commit: str = "") -> bytes:
    """A file at a commit; a commit may be a tag."""
    if folder := _loose(system, commit):
        return (folder / path).read_bytes()
    return _git(system, "show", f"{commit or REPOSITORIES[system].commit}:{path}")


def checkout(system: str, under: str, to: Path, commit: str = "") -> None:
    """All files below a folder of the repository, written below `to` under their own paths."""
    to.mkdir(parents=True, exist_ok=True)
    if folder := _loose(system, commit):
        shutil.copytree(folder / under, to / under, dirs_exist_ok=True)
        return
    done = _git(system, "archive", commit or REPOSITORIES[system].commit, under)
    subprocess.run(["tar", "--extract", "--directory", str(to)], input=done, check=True)
