"""Every test runs in the environment that a run has, and leaves the loggers as it found them.

Property tests draw the same examples everywhere; `pytest --hypothesis-profile=wander` draws others every time.
"""

import gc
import logging
import multiprocessing.util
import os
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import settings
from matplotlib.figure import Figure

import pages
from remote_places import moto, own_hub, s3  # noqa: F401  fixtures
from swept import sample
from whet import secrets
from whet.environment import give_memory_back, prepare
from whet.track.log import close_logging

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("wander", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("same")

prepare(None, exact=True)
gc.disable()

# Read when ray is imported, whichever file does so first. The token is what lets code run on a cluster of the tests.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


LONG = (
    "cluster",
    "dead_native",
    "cluster_ranks",
    "ranks_run",
    "jail",
    "deepspeed",
    "replay_run",
    "journal_runs",
    "ranks_grid",
    "rounds",
)
"""The longest files begin first: no worker is left alone with one at the end. A worker has two from the beginning."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-case",
        action="store_true",
        help="also those that cases.tsv leaves to others than `make test`",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--every-case"):
        sample(items)  # before pytest leaves out what has the mark `sweep` or `long`
    place = {f"test_{name}.py": n for n, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """A million objects of modules and tests stay until the end: nobody looks through them for garbage, and in a worker
    of the whole suite no fork has to copy their pages one by one."""
    gc.freeze()
    gc.enable()
    if hasattr(session.config, "workerinput"):
        pages.enlarge()


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """A variable that a test, or the run in it, sets for its process decides nothing in a later test."""
    before = dict(os.environ)
    yield
    for name in (before.keys() | os.environ.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """For files of SkyRL and verl, whose own defaults lie there: a folder where the user of the tests has none."""
    if not os.environ.get("HOME"):
        monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(autouse=True)
def _own_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test lets this process know strikes nothing out of another one's texts."""
    for name, value in (("_known", {}), ("_forms", {}), ("_compiled", None)):
        monkeypatch.setattr(secrets, name, value)


@pytest.fixture(autouse=True)
def _own_loggers() -> Iterator[None]:
    yield
    if logging.getLogger("whet").handlers:
        close_logging()


@pytest.fixture(autouse=True, scope="module")
def _memory_given_back() -> Iterator[None]:
    """A worker of the whole suite grows by a gigabyte of freed memory, which every fork would copy the pages of."""
    yield
    give_memory_back()


@pytest.fixture(autouse=True, scope="session")
def _own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a killed process leaves among the temporary files goes when the session ends; pytest's folders stay."""
    tmp_path_factory.getbasetemp()
    multiprocessing.util.get_temp_dir()  # goes with this process, after the session
    with (
        tempfile.TemporaryDirectory(prefix="whet-tests-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)  # it is looked up again
        yield


@pytest.fixture(autouse=True, scope="session")
def _quick_runs() -> Iterator[None]:
    """Runs within this process search no garbage among the million objects of pytest, wait for no disk, prove the
    log-probs of one kind of model once, fork their ranks, and draw an empty picture. Those in processes of their own
    do it all, but for the ranks."""
    import forked  # it loads torch, which `prepare` comes before
    import proofs

    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True  # to each of sixty that do not, pytest gives handlers three times a test
    idle = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
    with pytest.MonkeyPatch.context() as patch, forked.lines_forked():
        patch.setattr("whet.api.gc", idle)
        patch.setattr("whet.track.curve.figure", lambda found: Figure(figsize=(1, 1), dpi=20))
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr("whet.job.prove_exact", proofs.once)
        patch.setattr("whet.job.self_test", proofs.tested)
        yield
