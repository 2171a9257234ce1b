"""The process environment that whet needs; set once, as early as possible, by every entry point.

Layer 0: imports neither torch nor transformers. Values that the user has set already are left alone.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from whet.types import ConfigError

LEAST_MIB = 1280
"""Of address space. With less, libraries that are imported fail in ways of their own, or try to get it for ever: a run
of a tiny model with torch 2.13 needed 1170."""
_ALWAYS = {
    # A run never waits for, or depends on, the model hub: everything is a local path. Read when
    # huggingface_hub is imported.
    "HF_HUB_OFFLINE": "1",
    # The tokenizers library starts its own thread pool, which a later fork (reward workers) would inherit
    # locked.
    "TOKENIZERS_PARALLELISM": "false",
    # One console, ours: no progress bars and load reports between its lines.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # Idle OpenMP threads spin only briefly, then sleep. By default they spin for milliseconds, and two
    # processes that spin on the same cores slow each other down by ten times and more; sleeping at once (0)
    # doubles the time of small operations on a quiet machine. 1000 rounds was near the best in both cases.
    # Read when the OpenMP runtime is loaded, so before torch.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    # torch keeps a description (252 KiB) of the last 1024 products in half precision on a CPU, by the sizes of
    # their matrices, beside oneDNN's own copy: up to 250 MB. Finding them in oneDNN's takes microseconds longer.
    # Read at the first such product.
    "LRU_CACHE_CAPACITY": "16",
}

_EXACT = {
    # One summation order in MKL whatever the number of rows of a product: a decode step then gives the same
    # bits as a packed batch. MKL reads it at its first call, so it also works after `import torch`. AUTO
    # keeps the widest vector instructions; without STRICT products of few rows round differently.
    "MKL_CBWR": "AUTO,STRICT",
}


def module_command(name: str) -> list[str]:
    """The command that runs a module of whet's in a process of its own. -P: a file in the working directory, such as
    random.py, does not take the place of a module of Python's."""
    return [sys.executable, "-P", "-m", name]


def module_path() -> str:
    """PYTHONPATH of a process that finds modules where this one does."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def prepare(threads: int | None, exact: bool) -> None:
    """Set the environment of this process, and of the processes it starts.

    threads: CPU threads of torch's and MKL's pools; None leaves it to them. Pools that are loaded already do
    not look again: then call `torch.set_num_threads` as well.
    exact: ask MKL for row-independent products (`models.logprob_parity` tests whether that held).
    ConfigError where this process may not have the memory that torch and transformers take.
    """
    may_have = resource.getrlimit(resource.RLIMIT_AS)[0]
    if may_have != resource.RLIM_INFINITY and may_have < LEAST_MIB << 20:
        raise ConfigError(
            f"this process may have {may_have >> 20} MiB of memory (ulimit -v), and importing torch and transformers "
            f"takes {LEAST_MIB} MiB; raise the limit"
        )
    wanted = dict(_ALWAYS)
    if exact:
        wanted |= _EXACT
    if threads is not None:
        wanted |= pools(threads)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def pools(threads: int) -> dict[str, str]:
    """The variables that bound the pools of torch and MKL. Where both are set, torch takes MKL's."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def one_thread() -> None:
    """For a process that forks others, which may compute. Threads of OpenMP are not in a fork, whose first product
    would wait for them for ever; with one thread none is started. A loaded torch does not read the variables again,
    and foreign code can ask it for no more threads from here on: `torch.set_num_threads` has no effect."""
    os.environ.update(pools(1))
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.set_num_threads = _kept  # type: ignore[attr-defined]


def _kept(threads: int) -> None:
    """In the place of `torch.set_num_threads`."""


_running: dict[int, object] = {}
"""What has each process for itself, by its pid: a fork has an entry of its own."""


@contextmanager
def one_run() -> Iterator[None]:
    """A run, an evaluation or a replay has the process for itself: log, stacks and torch's settings are those of
    the process. ConfigError where another one is in progress. Torch is as in a new process, so that a caller's
    `no_grad`, autocast, default type, default device or mode change no number; the caller gets them back."""
    process, me = os.getpid(), object()
    if _running.setdefault(process, me) is not me:
        raise ConfigError(
            "another run is in progress in this process, and a run has the process's log and torch's settings for "
            "itself; start this one when that has ended, or in a process of its own (`whet train`)"
        )
    try:
        with _new_torch():
            yield
    finally:
        del _running[process]


@contextmanager
def _new_torch() -> Iterator[None]:
    """torch's settings as in a new process. Without torch nobody has set any."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    overrides = torch.overrides
    # a default device and `with torch.device(...)` are modes, "cpu" too: they stand before every operation, and some
    # then round otherwise
    kept, dtype = torch._GLOBAL_DEVICE_CONTEXT, torch.get_default_dtype()
    given = getattr(kept, "device_context", None)
    modes = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    kept.device_context = None
    torch.set_default_dtype(torch.float32)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        torch.set_default_dtype(dtype)
        kept.device_context = given
        for mode in reversed(modes):
            overrides._push_mode(mode)


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during large imports. Imported objects stay, and scanning them repeatedly is a fifth
    of the time that torch and transformers take to import."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """DeepSpeed logs as it is imported, to the terminal, what no reader could mend: that this machine has no GPU.
    transformers imports it wherever a model is saved, if it is installed."""
    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def keep_memory() -> None:
    """Let glibc keep what is freed instead of giving it back at once and faulting it in anew.

    A step frees and takes the same hundreds of MB; measured on CPU steps, page faults were up to 20 % of the time.
    Elsewhere than on glibc nothing is done.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, 1 << 30)


def give_memory_back() -> None:
    """Return to the system what glibc has kept so far: much was freed that will not be needed again."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
