"""Copies of checkpoints and exports in remote storage, made in the background after they were written locally.

A run waits for copies only at its end. A failed copy is retried: a few times at once, then with the next copy, and at
the next start of the run, which checks what each place already holds. A copy's manifest is written last, so a partial
copy is never taken for a complete one.

whet replaces there only checkpoints that this run copied itself. It removes only folders that this run copied, by name,
when a later checkpoint has been copied and `keep` excludes them. `record` (RUN/uploads.json) lists what was copied
where, by name and SHA-256 of its manifest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.storage.fetch import naming, store_of
from whet.storage.manifests import MANIFEST, manifest, oldest_first, place_of
from whet.track.files import write_json
from whet.types import Json, WhetError

log = logging.getLogger(__name__)

PAUSES_S = (1.0, 4.0, 16.0)
"""Between attempts; after the last one a copy waits for the next."""

MOST_WAITING = 4
"""New checkpoints that may wait for one place; of more, the oldest is left out. Exports are never left out, nor is what
an earlier start has left: it does not become more."""

DEADLINE_S = 1800.0
"""How long a finished run waits for its copies."""


@dataclass(frozen=True)
class Copy:
    """One folder and where it goes."""

    folder: Path
    url: str
    export: bool = False
    new: bool = True
    """It has just been made: older ones may go. A copy of what an earlier start has left removes nothing."""

    @property
    def name(self) -> str:
        """Name of the folder there; on the hub an export is the repository itself."""
        return "" if self.export and self.url.startswith("hf://") else self.folder.name

    def __str__(self) -> str:
        return f"{self.folder.name} to {self.url}"


class Uploads:
    """Makes the copies of one run, one after the other, in a separate thread."""

    def __init__(
        self,
        checkpoints_to: Sequence[str] = (),
        exports_to: Sequence[str] = (),
        *,
        last_only: bool = False,
        keep: int | None = None,
        best: Callable[[], Collection[str]] = tuple,
        record: Path | None = None,
    ) -> None:
        """keep: how many of the newest checkpoints stay there (None: all), beside those whose names `best` says.
        record: file that remembers what was copied where; None: it is forgotten when the run ends."""
        self.checkpoints_to, self.exports_to = tuple(checkpoints_to), tuple(exports_to)
        self.last_only, self.keep, self.best = last_only, keep, best
        self.copied = Copied(record)
        self._left: list[Copy] = []
        """What is not there yet, in the order in which it was offered and is tried."""
        self._failed: set[Copy] = set()
        """Those of `_left` that wait for the next copy."""
        self._now: Copy | None = None
        """The one of `_left` that is being made."""
        self._held: dict[tuple[str, bool], Copy] = {}
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    # -- offered

    def checkpoint(self, path: Path) -> None:
        """A checkpoint is whole. Returns at once."""
        self._offer([Copy(path, url) for url in self.checkpoints_to])

    def export(self, path: Path) -> None:
        """An export is whole. Returns at once."""
        self._offer([Copy(path, url, export=True) for url in self.exports_to])

    def missing(self, checkpoints: Sequence[Path], exports: Sequence[Path]) -> None:
        """What an earlier start of the run has left here, oldest first: what a place has already is not sent again, nor
        what it no longer keeps.

        Of exports the hub holds one alone, so the newest is offered to it.
        """
        newest, best = checkpoints if self.keep is None else checkpoints[-self.keep :], self.best()
        for path in checkpoints:
            if path in newest or path.name in best:
                self._offer([Copy(path, url, new=False) for url in self.checkpoints_to])
        for path in exports:
            urls = [u for u in self.exports_to if path == exports[-1] or not u.startswith("hf://")]
            self._offer([Copy(path, url, export=True) for url in urls])

    def spare(self) -> list[Path]:
        """Checkpoints that wait to be copied, and must stay until they are."""
        with self._changed:
            copies = [*(c for c in self._left if c not in self._failed), *self._held.values()]
            return [c.folder for c in copies if not c.export]

    def _offer(self, copies: Sequence[Copy]) -> None:
        if not copies:
            return
        with self._changed:
            if self.last_only:
                self._held |= {(c.url, c.export): c for c in copies}
                return
            self._queue(copies)
            for url in self.checkpoints_to:
                waiting = [
                    c for c in self._left if c.url == url and c.new and not c.export and c != self._now
                ]
                for left in waiting[:-MOST_WAITING]:
                    log.warning("uploads fall behind: %s is skipped because newer checkpoints wait", left)
                    self._left.remove(left)

    def _queue(self, copies: Iterable[Copy]) -> None:
        """These are to be made, after all that failed before them. One that is being made is made once more: its folder
        may have been replaced since it was read."""
        for copy in copies:
            if self._left.count(copy) <= (copy == self._now):
                self._left.append(copy)
        self._failed.clear()
        if self._left and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="whet-uploads", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def finish(self, timeout_s: float = DEADLINE_S) -> list[str]:
        """Wait for all copies; failed ones are tried once more. Copies that are missing after `timeout_s` are returned
        as text and logged; the same command copies them when it is run again."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._queue(self._held.values())
            self._held = {}
            self._changed.wait_for(lambda: not self._next() and not self._now, until - time.monotonic())
            said = list(dict.fromkeys(map(str, self._left)))
            self._left, self._closing = [], True
            self._changed.notify_all()
        if said:
            log.error(
                "NOT UPLOADED: %s. All files are on this machine; run the same command to retry",
                "; ".join(said),
            )
        return said

    # -- copied

    def _next(self) -> Copy | None:
        return next((c for c in self._left if c not in self._failed), None)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next() or self._closing)
                copy = self._now = self._next()
                if copy is None:
                    return
            done = self._tried(copy)
            with self._changed:
                self._now = None
                if done and copy in self._left:
                    self._left.remove(copy)
                elif not done:
                    self._failed.add(copy)
                self._changed.notify_all()

    def _tried(self, copy: Copy) -> bool:
        """Whether a folder is there now, or need not be."""
        for pause_s in (*PAUSES_S, None):
            if not copy.folder.is_dir():
                log.warning("%s: the folder no longer exists, so it is not uploaded", copy)
                return True
            try:
                with naming(copy.url):
                    self._send(copy)
                return True
            except WhetError as e:
                again = (
                    "retrying"
                    if pause_s is not None
                    else "the run continues and retries with the next upload"
                )
                log.warning("uploading %s failed (%s); %s", copy, e, again)
            if pause_s is not None and self._closed_within(pause_s):
                return False
        return False

    def _closed_within(self, pause_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closing, pause_s)

    def _send(self, copy: Copy) -> None:
        store, found = store_of(copy.url), _identity(copy.folder)
        own, there = _manifest_of(copy.folder), store.said(copy.url, copy.name)
        if there != own:
            if there is not None and not copy.export and not self.copied.is_own(copy.url, copy.name, there):
                raise WhetError(
                    f"{copy.name} is there already, from another run, and is not replaced; give each run a URL of its "
                    "own (checkpoint.upload_to), or remove it there"
                )
            start = time.monotonic()
            store.send(copy.folder, copy.url, copy.name, own)
            if not copy.folder.is_dir() or _identity(copy.folder) != found:
                if copy.name:  # it may have files of both, and nothing would ever remove it
                    store.remove(copy.url, copy.name)
                raise WhetError(f"{copy.folder} was removed or replaced while it was uploaded")
            size = sum(size for size, _ in own["files"].values())
            log.info("uploaded %s: %.1f MB in %.1f s", copy, size / 1e6, time.monotonic() - start)
        else:
            store.settle(copy.url, copy.name)
        if not copy.export:
            self.copied.add(copy, own)
            if copy.new:
                self._thin(copy)

    def _thin(self, copy: Copy) -> None:
        """Remove there, of this run's own copies up to this one, what is neither of the newest nor of the best."""
        own = oldest_first(self.copied.names(copy.url))
        later = [name for name in own if _at(name) > _at(copy.name)]
        if later:
            log.warning(
                "%s holds %s, from before this run resumed from an older checkpoint; they stay until the run reaches "
                "these steps again, or you remove them",
                copy.url,
                ", ".join(later),
            )
        if self.keep is None:
            return
        best, store = set(self.best()), store_of(copy.url)
        upto = [name for name in own if name not in later]
        for name in upto[: -self.keep]:
            if name in best:
                continue
            found = store.said(copy.url, name)
            if found is not None and self.copied.is_own(copy.url, name, found):
                store.remove(copy.url, name)
                log.info("removed %s/%s, which upload=%d no longer keeps", copy.url, name, self.keep)
            elif found is not None:
                log.warning("%s/%s is not what this run uploaded; it is kept", copy.url, name)
            self.copied.drop(copy.url, name)


class Copied:
    """What a run has copied where, kept in a file: nothing else there may be removed."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._there: dict[str, dict[str, str]] = {}
        """URL: digest of the manifest by name."""
        if path is None or not path.exists():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self._there = {url: {str(n): str(d) for n, d in own.items()} for url, own in found.items()}
        except (ValueError, AttributeError, RecursionError) as e:
            log.warning("%s cannot be read (%s); earlier uploads are kept", path, e)

    def names(self, url: str) -> list[str]:
        return list(self._there.get(url, ()))

    def is_own(self, url: str, name: str, manifest: Json) -> bool:
        """Whether the manifest that is there is the one that was copied."""
        return self._there.get(url, {}).get(name) == _fingerprint(manifest)

    def add(self, copy: Copy, manifest: Json) -> None:
        """A copy is there."""
        digest = _fingerprint(manifest)
        if self._there.setdefault(copy.url, {}).get(copy.name) != digest:
            self._there[copy.url][copy.name] = digest
            self._write()

    def drop(self, url: str, name: str) -> None:
        """It is there no longer, or no longer the run's."""
        del self._there[url][name]
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            write_json(self.path, self._there)


def _manifest_of(folder: Path) -> Json:
    """A checkpoint's own manifest; one is made for an export, which has none."""
    own = folder / MANIFEST
    return json.loads(own.read_text(encoding="utf-8")) if own.exists() else manifest(folder)


def _identity(folder: Path) -> tuple[int, int, int]:
    """Differs for a folder that takes the place of another."""
    about = folder.stat()
    return about.st_dev, about.st_ino, about.st_mtime_ns


def _fingerprint(manifest: Json) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _at(name: str) -> tuple[int, int]:
    return place_of(name) or (0, 0)
