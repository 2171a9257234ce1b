"""A private cluster for one run on one machine: no other user can connect to it or read its files.

By default Ray listens on all interfaces, keeps its sessions in a world-writable folder, and its token in a
world-readable file.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ray._private import ray_constants

from whet.track.files import own_folder
from whet.types import ConfigError

LOOPBACK_ONLY = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
"""Ray reads it as: whether other machines may be a part. All its processes listen on loopback where it is 0."""


@contextmanager
def loopback() -> Generator[None]:
    """What Ray starts inside listens on 127.0.0.1 alone."""
    before, others = os.environ.get(LOOPBACK_ONLY), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[LOOPBACK_ONLY] = "0"  # of its processes
    ray_constants.ENABLE_RAY_CLUSTER = False  # of this one, where Ray has read it already
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = others
        os.environ.pop(LOOPBACK_ONLY)
        os.environ.update({} if before is None else {LOOPBACK_ONLY: before})


def sessions() -> Path:
    """Where this user's sessions go, in a folder that nobody else may enter. ConfigError where it is another's."""
    # short: a socket's path in it has to fit 107 bytes
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"whet-ray-{os.getuid()}"
    try:
        own_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}, the folder of Ray's sessions: {error.strerror}; or set RAY_TMPDIR to a folder of your own"
        ) from error
    return folder / "ray"  # Ray opens it to everyone: the folder above it is what keeps them out


def token() -> None:
    """See that Ray's token is there and that nobody else may read it. ConfigError where that cannot be."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return
    try:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    except RuntimeError as error:
        raise ConfigError(
            "Ray keeps the token of its clusters in the home folder, and HOME is not set: set HOME, or set "
            "RAY_AUTH_TOKEN_PATH to a file of your own"
        ) from error
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        except FileExistsError:
            path.chmod(0o600)
    except OSError as error:
        raise ConfigError(
            f"{path}, the token file of Ray's clusters, cannot be written as a private file: {error.strerror}; set "
            "RAY_AUTH_TOKEN to a token of your own, 32 characters or more"
        ) from error
