"""What this machine has, asked without torch: memory of the CPU's side, CUDA devices."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def ram_bytes() -> int:
    """Memory of the machine, or of the container where that has less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [file.read_text().strip() for file in _CGROUP if file.is_file()]
    return min([whole, *(int(limit) for limit in limits if limit.isdigit())])


@cache
def cuda_bytes() -> int | None:
    """Memory of the CUDA device that a run takes, the first visible one; None: there is none, or torch has no CUDA."""
    if not _torch_has_cuda():
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        return _device_bytes(nvml, os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
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
