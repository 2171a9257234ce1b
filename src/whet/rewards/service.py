"""Services that rewards ask over HTTP: JSON there and back."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from whet.guard.foreign import words
from whet.types import Json

ATTEMPTS = 3
"""Requests of one question, with pauses of 1 s and 2 s."""
MOST_ANSWER = 16 * 2**20
"""Bytes of an answer."""
_MOST_TOLD = 300
BUSY = (429, 500, 502, 503, 504)
"""What a server of models answers that has too much to do, or is being started."""


async def post(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Json],
    *,
    what: str,
    headers: Mapping[str, str] | None = None,
    again: Collection[int] = (504,),
    within_s: float = math.inf,
) -> Json:
    """The answer; None for one of more than MOST_ANSWER bytes. what: the service, in errors. again: the statuses after
    which it is asked again, by default a gateway's time-out. within_s: the limit that the caller sets; where it would
    end before the next attempt, there is none. ConnectionError where the service does not answer, or with an error."""
    headers = {"Accept": "application/json", **(headers or {})}
    end = time.monotonic() + within_s
    for attempt in range(1, ATTEMPTS + 1):
        try:
            request = session.post(
                url, json=body, headers=headers, allow_redirects=False, proxy=_proxy_of(url)
            )
            async with request as said:
                if said.status in again and attempt < ATTEMPTS and time.monotonic() + attempt < end:
                    await asyncio.sleep(attempt)
                    continue
                text = await _bounded(said)
                if said.status >= 300:
                    told = words((text or b"").decode("utf-8", "replace"), _MOST_TOLD)
                    if where := said.headers.get("Location"):
                        told += f"; it points to {words(where, _MOST_TOLD)}, which is not followed: give that address"
                    raise ConnectionError(f"{what} at {url} answered {said.status} {said.reason}: {told}")
        except TimeoutError:
            raise ConnectionError(
                f"{what} at {url} has not answered within {session.timeout.total:g} s"
            ) from None
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: of the address
            raise ConnectionError(f"cannot reach {what} at {url}: {type(error).__name__}: {error}") from None
        try:
            return None if text is None else json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConnectionError(f"{what} at {url} did not answer with JSON: {error}") from None
    raise AssertionError("the last attempt returns or raises")


def _proxy_of(url: str) -> str | None:
    """What HTTP_PROXY, HTTPS_PROXY and NO_PROXY say. aiohttp's own `trust_env` reads ~/.netrc, too: a password that was
    not meant for the service would be sent, and a request that has a token could not be."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


async def _bounded(said: aiohttp.ClientResponse) -> bytes | None:
    """An answer of at most MOST_ANSWER bytes, uncompressed; None for a longer one."""
    pieces, size = [], 0
    async for piece in said.content.iter_any():
        size += len(piece)
        if size > MOST_ANSWER:
            return None
        pieces.append(piece)
    return b"".join(pieces)
