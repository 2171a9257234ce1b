"""What this machine has, or others are said to have, asked without torch: memory of the CPU's side, CUDA devices."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from whet.types import ConfigError

CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux says what a container may take: in version 2 of cgroups, and in version 1."""


def ram_bytes() -> int:
    """Memory of the machine, or of the container where that has less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [file.read_text().strip() for file in CGROUP if file.is_file()]
    return min([whole, *(int(limit) for limit in limits if limit.isdigit())])


@dataclass(frozen=True)
class Machines:
    """Machines that are not here, for which a run is planned or a file converted."""

    gpus: int
    """Of each."""
    count: int = 1
    gpu_bytes: int = 80 << 30


ENOUGH = Machines(gpus=2**16)
"""A machine for whatever layout a file has."""

_elsewhere: list[Machines] = []


@contextmanager
def as_if(machines: Machines | None) -> Iterator[None]:
    """Answer for these machines in place of this one; None: for this one."""
    if machines is None:
        yield
        return
    _elsewhere.append(machines)
    try:
        yield
    finally:
        _elsewhere.pop()


def elsewhere() -> Machines | None:
    """The machines that stand in for this one, if there are any."""
    return _elsewhere[-1] if _elsewhere else None


def machines(gpus: str | None, gigabytes: float | None) -> Machines | None:
    """`8x2`, 80 -> two machines with 8 GPUs of 80 GiB each; None: this machine. Raises ConfigError."""
    if gpus is None and gigabytes is not None:
        raise ConfigError(
            f"--mem {gigabytes} is the memory of a GPU of --gpus: give --gpus, too, or leave it out"
        )
    if gpus is None:
        return None
    said = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", gpus)
    if said is None or said[2] == "0":
        raise ConfigError(f"--gpus {gpus}: expected GPUs of a machine, and machines: 8, or 8x2")
    if gigabytes is not None and not 0 < gigabytes < 1e6:
        raise ConfigError(f"--mem {gigabytes}: expected GiB of one GPU: 80")
    return Machines(int(said[1]), int(said[2] or 1), int((gigabytes or 80) * 2**30))


def cuda_bytes() -> int | None:
    """Memory of the CUDA device that a run takes, the first visible one; None: there is none, or torch has no CUDA."""
    other = elsewhere()
    if other is not None:
        return other.gpu_bytes if other.gpus else None
    return cuda_bytes_here()


@cache
def cuda_bytes_here() -> int | None:
    """Of this machine, whatever others a run is planned for."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        return _device_bytes(nvml, os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])


def cuda_count() -> int:
    """CUDA devices that a run may use."""
    other = elsewhere()
    return other.gpus * other.count if other is not None else _cuda_count()


@cache
def _cuda_count() -> int:
    if cuda_bytes() is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    with _nvml() as nvml:
        found = ctypes.c_uint()
        return 0 if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(found)) else found.value


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """NVIDIA's management library; None: it is not here, or torch has no CUDA."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1") if _torch_has_cuda() else None
    except OSError:
        nvml = None
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _device_bytes(nvml: ctypes.CDLL, name: str) -> int | None:
    """Of the device with this number or UUID."""
    device, memory = ctypes.c_void_p(), _Memory()
    if name.isdigit():
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(device))
    else:
        failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
    if failed or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return None
    return int(memory.total)


def _torch_has_cuda() -> bool:
    """By the name of the installed build: 2.13.0+cpu has none."""
    try:
        return "+cpu" not in version("torch")
    except PackageNotFoundError:
        return False


_UNITS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16"),
}
"""Names in /proc/cpuinfo of what multiplies a dtype (bf16: of Arm's, whose float16 sums in float16)."""


def multiplies_half(dtype: str) -> bool:
    """The CPU multiplies matrices of this dtype itself, faster than float32; false where it cannot be known."""
    return bool(_cpu_flags().intersection(_UNITS.get(dtype, ())))


def has_tiles(dtype: str) -> bool:
    """The CPU multiplies this dtype by tiles (AMX), which `models/products_bf16.c` does without a library."""
    return dtype == "bfloat16" and "amx_bf16" in _cpu_flags()


@cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        return frozenset()
    found = (line for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, ":").split(":", 1)[1].split())
