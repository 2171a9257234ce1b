"""Memory of this process in large pages, because a fork copies the table of pages: 64 ms of CPU for a gigabyte in small
pages, 3 ms in large ones, and a jail forks four times. Linux alone has it; elsewhere forks stay slow.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_LARGE = 1 << 21
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE, MADV_COLLAPSE (since Linux 6.1)


def enlarge() -> None:
    """Put what is in memory now into large pages."""
    if not _MAPS.exists():
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in _MAPS.read_text().splitlines():
        addresses, rights, _, _, file, *_ = line.split()
        start, end = (int(text, 16) for text in addresses.split("-"))
        start, end = -(-start // _LARGE) * _LARGE, end // _LARGE * _LARGE
        if rights == "rw-p" and file == "0" and start < end:
            for advice in (_HUGEPAGE, _COLLAPSE):
                advise(start, end - start, advice)  # a kernel that refuses leaves the pages as they are
