"""The experts of a reply's tokens, as servers tell them: base64 of numbers [T - 1, L, E], of the T tokens of prompt and
reply but the last, over all L layers of the model, in the order of the router.

vLLM 0.32 (--enable-return-routed-experts): `routed_experts` of a choice is a .npy file. SGLang 0.5.23 (the same option,
and `return_routed_experts` in the request): `routed_experts` of meta_info is the bare buffer, int32.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from whet.models.routing import Routes
from whet.rollout.engine import EngineInputs
from whet.types import ExpertIds, WhetError, expert_type

EXPERTS = "enable_return_routed_experts"
"""What both servers call the setting."""
OPTION = EXPERTS.replace("_", "-")
NO_EXPERTS = f"does not tell the experts of tokens (train.router_replay=sampled); start it with --{OPTION}"


def routes_of(inputs: EngineInputs) -> Routes | None:
    """What replies are to have; None: nothing."""
    return Routes.of(inputs.model) if inputs.experts else None


def of_file(told: Any, routes: Routes, tokens: int, *, name: str) -> ExpertIds:
    """vLLM's. tokens: of prompt and reply. Raises WhetError for what is not that."""
    return _read(told, _of_npy, routes, tokens, name=name)


def of_buffer(told: Any, routes: Routes, tokens: int, *, name: str) -> ExpertIds:
    """SGLang's."""
    shape = (-1, routes.layers, routes.experts)
    return _read(told, lambda data: np.frombuffer(data, "<i4").reshape(shape), routes, tokens, name=name)


def _of_npy(data: bytes) -> NDArray[Any]:
    """A .npy file of numbers. ValueError for anything else; what a header says takes no memory."""
    file = BytesIO(data)
    if (version := npy.read_magic(file)) != (1, 0):
        raise ValueError(f"a .npy file of version {version}, expected (1, 0)")
    shape, columns, dtype = npy.read_array_header_1_0(file)
    return np.frombuffer(file.read(), dtype).reshape(shape, order="F" if columns else "C")


def _read(
    told: Any, numbers: Callable[[bytes], NDArray[Any]], routes: Routes, tokens: int, *, name: str
) -> ExpertIds:
    if not isinstance(told, str):
        raise WhetError(f"{name} {NO_EXPERTS}")
    try:
        ids = numbers(base64.b64decode(told, validate=True))
    except (binascii.Error, ValueError, EOFError) as error:
        raise WhetError(f"{name} told experts that cannot be read: {error}") from error
    expected = (tokens - 1, routes.layers, routes.experts)
    if ids.shape != expected or ids.dtype.kind not in "iu":
        raise WhetError(
            f"{name} told experts of shape {ids.shape} ({ids.dtype}); expected whole numbers of shape {expected}: "
            "tokens of prompt and reply but the last, layers of the model, experts of a token"
        )
    if ids.size and not 0 <= ids.min() <= ids.max() < routes.among:
        raise WhetError(
            f"{name} told experts {ids.min()} to {ids.max()}; the model has {routes.among} in a layer"
        )
    return ids.astype(expert_type(routes.among))
