"""Pages of the KV cache: free, used by rows, or kept because a later history may begin with their tokens.

A full page is known by the digest of its tokens and of all before them, so a history finds its longest prefix that is
in the cache. A page that no row uses stays known until its memory is needed: the one unused for longest goes first.
All pages are of one version of the weights: `forget` comes with every change of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np


def digests(tokens: Sequence[int], size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """One digest for each full page of tokens, of its tokens and all before them; `known`: the first of them."""
    chain = list(known)
    data = np.array(tokens[len(chain) * size : len(tokens) // size * size], dtype=np.int64).tobytes()
    parent = chain[-1] if chain else b""
    for start in range(0, len(data), size * 8):
        parent = blake2b(parent + data[start : start + size * 8], digest_size=16).digest()
        chain.append(parent)
    return chain


class Pages:
    """`count` pages of `size` tokens. A page is free, used by rows (counted), or idle: known and unused."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.free = list(range(count - 1, -1, -1))
        self.uses = [0] * count
        self.found: dict[bytes, int] = {}
        """Known pages, by digest."""
        self.digest: dict[int, bytes] = {}
        """The digest of each known page."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        """The one unused for longest first."""

    @property
    def available(self) -> int:
        """Pages that can be taken: none of them is used by a row."""
        return len(self.free) + len(self.idle)

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens fill or begin."""
        return -(-tokens // self.size)

    def prefix(self, chain: Sequence[bytes]) -> list[int]:
        """The known pages that a history with these digests begins with."""
        pages: list[int] = []
        for digest in chain:
            page = self.found.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def take(self, count: int) -> list[int]:
        """Pages for new tokens: free ones first, then those unused for longest, which are forgotten."""
        return [self._one() for _ in range(count)]

    def _one(self) -> int:
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.idle.popitem(last=False)
            del self.found[self.digest.pop(page)]
        self.uses[page] = 1
        return page

    def share(self, pages: list[int]) -> list[int]:
        """One more row uses these known or used pages."""
        for page in pages:
            if self.uses[page] == 0:
                del self.idle[page]
            self.uses[page] += 1
        return pages

    def keep(self, pages: Iterable[int], chain: Iterable[bytes]) -> None:
        """From now on these full pages, which a row uses, are known. Tokens that another page holds stay its own."""
        for page, digest in zip(pages, chain):
            if digest not in self.found and page not in self.digest:
                self.found[digest] = page
                self.digest[page] = digest

    def give(self, pages: list[int]) -> None:
        """A row uses them no longer. A prefix is idle after what follows it, so it is forgotten later."""
        for page in reversed(pages):
            self.uses[page] -= 1
            if self.uses[page] == 0 and page in self.digest:
                self.idle[page] = None
            elif self.uses[page] == 0:
                self.free.append(page)

    def forget(self) -> None:
        """No page is known any longer: the weights or the memory have changed."""
        self.free = sorted((*self.free, *self.idle), reverse=True)  # low numbers first: memory touched before
        self.idle.clear()
        self.found.clear()
        self.digest.clear()
