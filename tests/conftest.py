"""Every test runs in the environment that a run has, and leaves the loggers as it found them."""

from collections.abc import Iterator

import pytest

from whet.environment import prepare
from whet.track.log import close_logging

prepare(None, exact=True)


@pytest.fixture(autouse=True)
def _own_loggers() -> Iterator[None]:
    yield
    close_logging()
