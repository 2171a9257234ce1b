"""Sharded saving: each rank writes the pieces that it holds, and no process ever holds the full state.

The driver collects the list of pieces of every rank, assigns each piece to one of the ranks that hold it, and writes
the index. A rank writes in a separate thread: from the tensors themselves where the driver waits, else from a copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from whet.models.tensor_files import assigned, index, index_file, part_file, write
from whet.track.files import write_json

Ask = Callable[..., list[Any]]
"""`Ranks.ask` about one role."""

LONGEST_S = 3600.0
"""What is not on the disk by then is given up."""
_LOOK_S = 0.05


class Held:
    """What a rank is to write."""

    def __init__(self, files: Mapping[str, Mapping[str, Tensor]], *, copy: bool) -> None:
        """files: tensors by file and by their name in it. copy: they will change before they are written."""
        self.files = {
            file: {key: x.to("cpu", copy=copy) for key, x in tensors.items()}
            for file, tensors in files.items()
        }
        self.said: str | None = None
        """None: at work; '': done; else what went wrong."""

    def begin(self, path: Path, rank: int, count: int) -> None:
        threading.Thread(target=self._write, args=(path, rank, count), daemon=True).start()

    def _write(self, path: Path, rank: int, count: int) -> None:
        said = ""
        try:
            for file, tensors in self.files.items():
                write(tensors, path / part_file(file.removesuffix(".safetensors"), rank, count))
        except Exception as error:  # noqa: BLE001  whatever it was, who waits for it has to hear of it
            said = str(error) or type(error).__name__
        self.files = {}
        self.said = said


def hold(ask: Ask, *, moments: bool, copy: bool) -> Callable[[Path], None]:
    """Let each rank take its share of all that `save` writes. Returns the function that has it written to a folder;
    with `copy` training may go on before and meanwhile."""
    told = ask("pieces", moments)
    shares = {file: assigned([held[file][0] for held in told]) for file in told[0]}
    mine = [({file: share[rank] for file, share in shares.items()},) for rank in range(len(told))]
    ask("hold", moments, copy, each=mine)

    def written(path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        ask("flush", str(path))
        since = time.monotonic()
        while None in (said := ask("flushed")):
            if time.monotonic() - since > LONGEST_S:
                late = [rank for rank, text in enumerate(said) if text is None]
                raise SafetensorError(
                    f"ranks {late} have not written their parts of {path} within {LONGEST_S:g} s"
                )
            time.sleep(_LOOK_S)
        if wrong := [text for text in said if text]:
            raise SafetensorError(wrong[0])
        for file, share in shares.items():
            write_json(path / index_file(file), index(file, share, told[0][file][1]), durable=False)

    return written
