"""How a foreign file spreads its engines over devices, as options of a server that stands for them (rollout.server).

The embedded engine reads none of it, and then it is left out; a run with `whet.rollout.engine=vllm` (or sglang) has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whet.types import Json

OPTIONS = "rollout.server.options"
SLEEP = "rollout.server.sleep"

NAMES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "tp": "tensor-parallel-size",
        "pp": "pipeline-parallel-size",
        "dp": "data-parallel-size",
        "ep": "enable-expert-parallel",
        "memory": "gpu-memory-utilization",
    },
    "sglang": {
        "tp": "tp-size",
        "pp": "pp-size",
        "dp": "dp-size",
        "ep": "ep-size",
        "memory": "mem-fraction-static",
    },
}
"""Options of a server, by engine."""


def placed(
    engine: str,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    memory: float | None = None,
    more: Mapping[str, Json] | None = None,
    sleeps: bool = False,
) -> dict[str, Json]:
    """The options of one server with `dp` engines of `tp` x `pp` devices each; `more` are the file's own, which count.
    ep: devices that share the experts; vLLM takes all of an engine's. memory: the share of a device. sleeps: it takes
    turns with the trainer on the same devices."""
    names = NAMES[engine]
    sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
    options: dict[str, Json] = {names[name]: size for name, size in sizes.items() if size > 1}
    if ep > 1 and engine == "vllm":
        options[names["ep"]] = True
    if memory is not None:
        options[names["memory"]] = memory
    told = {name.replace("_", "-").removeprefix("--") for name in more or {}}
    options = {name: value for name, value in options.items() if name not in told} | dict(more or {})
    out: dict[str, Json] = {OPTIONS: options} if options else {}
    return out | ({SLEEP: True} if sleeps else {})


def fit(options: Mapping[str, Json], devices: int) -> Iterator[tuple[str, Json, str]]:
    """(option, its value here or None, why) of those that so many devices cannot have, each the largest divisor of what
    was asked that there is room for. Without a device, none is about one."""
    left = devices
    for names in NAMES.values():
        for size in ("tp", "pp", "dp"):
            asked = options.get(name := names[size])
            if not isinstance(asked, int):
                continue
            here = max((n for n in range(1, min(asked, max(left, 1)) + 1) if asked % n == 0), default=1)
            left //= here
            if here != asked:
                yield name, here if here > 1 else None, f"{name} is {here}, not {asked}: it needs GPUs"
        for size in ("ep", "memory"):
            if not devices and names[size] in options:
                yield names[size], None, f"{names[size]} is left out: it is about a GPU"
