"""Files from elsewhere in a folder of this machine, each version once.

    CACHE/NAME-xxxxxxxx/VERSION/FOLDER/...

NAME-xxxxxxxx stands for the URL, VERSION for what is there now (names, sizes, tags): another content is another folder,
and one that is there is whole, for it was moved into its place. CACHE is $WHET_CACHE, else $XDG_CACHE_HOME/whet or
~/.cache/whet; nothing in it is ever removed by whet, and all of it may be.

`python -m whet.storage.fetch` does the work in a process of its own (URLs as JSON on standard input, paths on standard
output): network libraries start threads, and a run forks its reward processes before it has any.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from whet.config.urls import scheme
from whet.environment import module_command, module_path
from whet.secrets import learn_environment, learn_urls, redact, redacting
from whet.storage import hub, stores
from whet.storage.manifests import MANIFEST, oldest_first, place_of
from whet.track.files import atomic_folder, lock, lock_opened, tidy
from whet.types import Json, WhetError

LOCK_S = 6 * 3600.0
"""Longest wait for another process that fetches into the same place."""
SAY_S = 60.0
"""Between two words on that wait."""
LOOK_S = 0.2


def cache() -> Path:
    """Where fetched files are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = os.path.expanduser(os.environ.get("WHET_CACHE") or f"{home}/whet")
    if path.startswith("~"):
        raise WhetError(
            f"fetched files are kept in {path}, and the home folder is unknown (HOME is not set); set WHET_CACHE to "
            "a folder for them"
        )
    return Path(path)


def fetched(urls: Sequence[str], *, checkpoints: Sequence[str] = ()) -> dict[str, str]:
    """Every URL's path on this machine, after downloading what is not there. Raises WhetError naming the URL.

    checkpoints: URLs of a checkpoint, or of a folder of them, which stands for the newest whole one.
    """
    if not urls and not checkpoints:
        return {}
    asked = {"urls": list(urls), "checkpoints": list(checkpoints)}
    # a hub path was asked for by name: whet's own wish to be offline (environment.py) is not meant for this process
    env = {"HF_HUB_OFFLINE": "0", **{k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}}
    env["PYTHONPATH"] = module_path()
    command = module_command("whet.storage.fetch")
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            text = process.stdout.read()  # standard input stays open: it ends when this process does
        except BaseException:
            process.kill()
            raise
    try:
        answer = json.loads(text)
    except ValueError as e:
        raise WhetError(f"fetching {', '.join([*urls, *checkpoints])} ended without an answer") from e
    if "error" in answer:
        raise WhetError(answer["error"])
    return answer["paths"]


def store_of(url: str) -> ModuleType:
    """The module that speaks a URL's scheme."""
    return hub if scheme(url) == "hf" else stores


def fetch(url: str, root: Path) -> Path:
    """The path below `root` of what a URL stands for, downloaded if it is not there."""
    store = store_of(url)
    with naming(url):
        listing = store.look(url)
        slug = re.sub(r"[^A-Za-z0-9]+", "-", listing.folder)[:40].strip("-")
        home = root / f"{slug}-{_short(url)}"
        folder = home / _short(json.dumps(sorted(listing.files.items()))) / listing.folder
        if not folder.is_dir():
            with alone(home):
                if not folder.is_dir():  # another process may have brought it meanwhile
                    _bring(url, listing, folder, store=store)
    return folder / listing.inside


def _bring(url: str, listing: stores.Listing, folder: Path, *, store: ModuleType) -> None:
    size = sum(size for size, _ in listing.files.values())
    print(f"fetching {url} ({len(listing.files)} files, {size / 1e6:.1f} MB)", file=sys.stderr, flush=True)  # noqa: T201
    folder.parent.mkdir(parents=True, exist_ok=True)
    tidy(folder.parent)
    with atomic_folder(folder, other="XDG_CACHE_HOME another folder") as new:
        store.download(url, listing, new)
        for name, (wanted, _) in listing.files.items():
            found = (new / name).stat().st_size if (new / name).is_file() else None
            if found != wanted:
                raise WhetError(f"{name} was fetched with {found} of {wanted} bytes; try again")
        if store.look(url).files != listing.files:
            raise WhetError("the source changed while it was read; try again")


def newest_checkpoint(url: str) -> str:
    """The URL of the newest whole checkpoint of a folder; of a checkpoint, the URL itself."""
    url = url.rstrip("/")
    if place_of(url.rpartition("/")[2]) is not None:
        return url
    with naming(url):
        store = store_of(url)
        found = oldest_first(store.children(url))
        damaged: list[str] = []
        for name in reversed(found):
            if not (wrong := _damage(store, url, name)):
                return f"{url}/{name}"
            damaged.append(f"{url}/{name} is not whole: {wrong}")
            sys.stderr.write(f"{damaged[-1]}; an older checkpoint is looked for\n")
        if damaged:
            raise WhetError(f"{damaged[0]}; there is no older one that is whole. Upload it again")
    raise WhetError(f"{url}: neither a checkpoint (0-main-000050) nor a folder with a complete one")


def _damage(store: ModuleType, url: str, name: str) -> str:
    """What is wrong with a checkpoint there, by its manifest and the sizes of its files; '' for nothing."""
    manifest = store.said(url, name)
    if manifest is None:
        return f"its {MANIFEST} cannot be read"
    listing = store.look(f"{url}/{name}")
    below = f"{listing.inside}/" if listing.inside else ""
    there = {file.removeprefix(below): size for file, (size, _) in listing.files.items()}
    for file, told in manifest["files"].items():
        size = told[0] if isinstance(told, list) and told else None
        if there.get(file) != size:
            return f"{file} has {there.get(file, 'no')} bytes, its {MANIFEST} says {size}"
    return ""


@contextmanager
def naming(url: str) -> Iterator[None]:
    """What goes wrong inside is a WhetError that names the URL, and holds no secret."""
    try:
        yield
    except Exception as e:  # noqa: BLE001  foreign code: each package has errors of its own
        told = str(e) if isinstance(e, WhetError | OSError) else f"{type(e).__name__}: {e}"
        raise WhetError(struck(told if url in told else f"{url}: {told or type(e).__name__}")) from None


def struck(text: str) -> str:
    """The same without secrets, those of the present environment too."""
    learn_environment()
    return redact(text)


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """One process at a time; the lock ends with its process. Who waits for it says so, and not for ever."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / ".lock"
    with lock_opened(path) as handles:
        since = said = time.monotonic()
        while not _locked(handles):
            waited_s = time.monotonic() - since
            if waited_s >= LOCK_S:
                raise WhetError(
                    f"{path} was locked by another fetching process for {waited_s:.0f} s; end it, or wait "
                    "until it is done, then retry"
                )
            if time.monotonic() - said >= SAY_S:
                said = time.monotonic()
                sys.stderr.write(f"waiting for another fetching process ({path}) since {waited_s:.0f} s\n")
            time.sleep(LOOK_S)
        yield


def _locked(handles: Sequence[int]) -> bool:
    try:
        lock(handles)
    except BlockingIOError:
        return False
    return True


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _end_with_parent() -> None:
    sys.stdin.read()  # the parent holds the other end
    os._exit(1)


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    learn_environment()
    for url in (*asked["urls"], *asked["checkpoints"]):
        learn_urls("URL", url)
    sys.stderr = redacting(sys.stderr)  # standard output is the answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        paths = {url: str(fetch(url, cache())) for url in asked["urls"]}
        paths |= {url: str(fetch(newest_checkpoint(url), cache())) for url in asked["checkpoints"]}
        answer: Json = {"paths": paths}
    except WhetError as e:
        answer = {"error": str(e)}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # the thread reads from standard input, which an orderly end would wait for


if __name__ == "__main__":
    main()
