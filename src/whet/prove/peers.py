"""The peers' own objects by dotted path, imported from their packages as they are.

A formula module of a peer may import what it needs for training alone: NVIDIA's management library, a video decoder.
Where such a package (`STUBBED`) is not installed, an empty stand-in takes its place; no formula reads it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
import typing
from functools import cache
from typing import Any

import typing_extensions

PACKAGES = {
    "verl": "verl",
    "skyrl": "skyrl",
    "trinity": "trinity-rft",
    "cosmos": "cosmos-rl",
    "trl": "trl",
}
"""Peer -> its package on the index."""

NEWEST = {
    "verl": "0.9.1",
    "skyrl": "0.3.0",
    "trinity": "0.6.0",
    "cosmos": "0.4.7",
    "trl": "1.16.0",
}
"""The releases that whet is held against (`make test-peers`)."""

STUBBED: dict[str, tuple[str, ...]] = {
    "verl": (
        *("peft", "cachetools", "uvicorn", "fastapi"),
        "veomni.ops",  # kernels; asks for a class that transformers 5 does not have
        "verl.models.transformers.qwen2_vl",  # asks for a class that transformers 5 has under another name
    ),
    "skyrl": ("aiohttp", "httpx", "peft", "flash_attn"),
    "trinity": (
        *("peft", "cachetools", "uvicorn", "fastapi", "sqlalchemy"),
        "torch.utils.tensorboard",  # asks for a version of tensorboard, which is not installed here
    ),
    "cosmos": (
        *("pynvml", "diffusers", "torchvision", "av", "liger_kernel", "peft", "redis", "zmq", "nest_asyncio"),
        *("blobfile", "modelscope", "qwen_vl_utils", "torchao", "fastapi", "uvicorn", "kernels", "strenum"),
        "cosmos_rl.patch",  # reads private names of an older torch
        "cosmos_rl.utils.pipelining",  # as the patch
    ),
}
"""Peer -> modules that a stand-in may replace. A part of a package always is replaced."""


class _Anything(type):
    """The class of stand-ins of classes and functions: every attribute of one is another."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _standin(name)


def _standin(name: str) -> Any:
    """What may be subclassed, called as a function or a decorator, indexed, and asked for any attribute."""
    methods = {
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": lambda self, *args, **kwargs: args[0],
    }
    return _Anything(name, (), methods | {"__class_getitem__": classmethod(lambda cls, item: cls)})


class _Standin(types.ModuleType):
    __path__: typing.ClassVar[list[str]] = []  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _standin(name)


class Standins(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Standin(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def standins(peer: str) -> tuple[str, ...]:
    """The modules of `STUBBED` that are parts of a package, or not installed here."""
    return tuple(
        name for name in STUBBED.get(peer, ()) if "." in name or importlib.util.find_spec(name) is None
    )


@cache
def prepared(peer: str) -> tuple[str, ...]:
    """Makes the peer importable; the packages that a stand-in replaces."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if peer == "skyrl" and sys.version_info < (3, 12):
        # its request models use typing.TypedDict, which pydantic takes from Python 3.12 on
        typing.TypedDict = typing_extensions.TypedDict
    missing = standins(peer)
    if missing:
        # transformers looks for optional packages while it is imported, and must not find stand-ins
        for name in ("AutoConfig", "AutoModelForCausalLM", "AutoProcessor", "AutoTokenizer", "Trainer"):
            getattr(importlib.import_module("transformers"), name)
        sys.meta_path.insert(0, Standins(missing))
    return missing


def version(peer: str) -> str | None:
    """Of the installed package; None if there is none."""
    try:
        return importlib.metadata.version(PACKAGES[peer])
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def theirs(peer: str, path: str) -> Any:
    """The object at `module:name.of.attribute`. Raises what importing it raises."""
    prepared(peer)
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found
