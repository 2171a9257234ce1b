"""Samplers that were written for verl, SkyRL and torch, as orders of rows. Their classes run as they are.

    data:
      order: {name: "whet.data.samplers:verl", class_path: "curriculum.py:MySampler", config: {...}}
      order: {name: "whet.data.samplers:sampler", class_path: "package.module:MySampler", arguments: {...}}

A sampler is iterated again when it ends. torch's random numbers are those of the draw, whatever else draws them, so a
run draws the same rows each time. A sampler with `state_dict` and `load_state_dict` resumes by them; another one is
iterated anew up to where it was. One that also has `update` (verl's AbstractCurriculumSampler) and no state cannot be
resumed exactly, which is said at the start and refused on resume.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from whet.data.orders import KEY, Played, Rows
from whet.tables import load_object
from whet.types import CheckpointError, ConfigError, Json

log = logging.getLogger(__name__)


def verl(rows: Rows, *, class_path: str, config: Mapping[str, Any]) -> SamplerOrder:
    """A class of verl's AbstractSampler, made as verl 0.9.1 makes it: `data_source`, `data_config`. config: the section
    `data` of verl's file."""
    from omegaconf import OmegaConf

    given = {"data_source": rows, "data_config": OmegaConf.create(dict(config))}
    return SamplerOrder(rows, class_path, (), given)


def sampler(rows: Rows, *, class_path: str, arguments: Mapping[str, Any] | None = None) -> SamplerOrder:
    """A class of torch's Sampler, made as SkyRL makes it: the rows, then its arguments by name."""
    return SamplerOrder(rows, class_path, (rows,), arguments or {})


class SamplerOrder:
    """A sampler as an order."""

    def __init__(
        self, rows: Rows, class_path: str, positional: Sequence[object], named: Mapping[str, object]
    ) -> None:
        self._rows, self._class_path = rows, class_path
        make = load_object(class_path, what=f"{KEY}.class_path")
        with self._random(0):
            self.sampler = make(*positional, **named)
        if not hasattr(self.sampler, "__iter__"):
            raise ConfigError(
                f"{KEY}.class_path={class_path!r} made {type(self.sampler).__name__}, which has no __iter__"
            )
        self._drawn = 0
        self._iterator: Iterator[Any] | None = None
        self._has_state = all(hasattr(self.sampler, name) for name in ("state_dict", "load_state_dict"))
        if hasattr(self.sampler, "update") and not self._has_state:
            log.warning(
                "%s.class_path=%s has `update`, but neither state_dict nor load_state_dict: this run cannot be resumed "
                "exactly; add both methods",
                KEY,
                class_path,
            )

    def row(self, draw: int, out: Collection[int]) -> int:
        with self._random(draw):
            found = self._next()
        self._drawn = draw + 1
        row: int = int(found) if isinstance(found, torch.Tensor) else found
        return row

    def update(self, played: Played) -> None:
        if hasattr(self.sampler, "update"):
            self.sampler.update(batch=PlayedBatch.of(self._rows, played))

    def state(self) -> Json:
        return {
            "drawn": self._drawn,
            "state": _plain(self.sampler.state_dict()) if self._has_state else None,
        }

    def restore(self, state: Json) -> None:
        if self._has_state:
            self.sampler.load_state_dict(_from_plain(state["state"]))
            self._drawn = state["drawn"]
            return
        if hasattr(self.sampler, "update"):
            raise CheckpointError(
                f"{KEY}.class_path={self._class_path!r} has `update`, but neither state_dict nor load_state_dict, so "
                "what it had learned is lost: add both methods and start a new run, or resume as a branch in which it "
                "begins anew: `whet train --change`."
            )
        for draw in range(state["drawn"]):
            self.row(draw, ())

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.sampler)
            found = next(self._iterator, None)
            if found is not None:
                return found
            self._iterator = None
        raise ConfigError(f"{KEY}.class_path={self._class_path!r} gives no row: its iterator is empty")

    @contextmanager
    def _random(self, draw: int) -> Iterator[None]:
        """torch's own random numbers are those of a draw, and stay as they were outside."""
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(self._rows.stream("sampler", draw) >> 1)
        try:
            yield
        finally:
            generator.set_state(before)


@dataclass(frozen=True)
class PlayedBatch:
    """What `update` of verl's samplers is given, in the shape of its DataProto: one entry for each rollout that has a
    reward, of all tasks of a step."""

    batch: Mapping[str, torch.Tensor]
    """[R, T] token_level_scores (also as token_level_rewards and rm_scores): the reward stands at the last token.
    response_mask, responses: the tokens from the first sampled one on, filled with 0 at their end."""
    non_tensor_batch: Mapping[str, np.ndarray]
    """[R] uid, index (extra_info.index of the row, else its number), data_source, and the columns of the rows."""

    def __len__(self) -> int:
        return len(self.non_tensor_batch["uid"])

    @staticmethod
    def of(rows: Rows, played: Played) -> PlayedBatch:
        given = [(k, r) for k, group in played for r in group.rollouts if r.reward is not None]
        ends = [rollout.strands[-1] for _, rollout in given]
        replies = [torch.tensor(end.token_ids[end.prompt_tokens :], dtype=torch.long) for end in ends]
        masks = [torch.tensor(end.mask[end.prompt_tokens :], dtype=torch.long) for end in ends]
        scores = torch.zeros(len(given), max((len(reply) for reply in replies), default=0) or 1)
        for r, (reply, (_, rollout)) in enumerate(zip(replies, given)):
            scores[r, max(len(reply) - 1, 0)] = rollout.reward or 0.0
        whole = {k: rows[k] for k in {k for k, _ in given}}
        columns = {name: [whole[k].get(name) for k, _ in given] for row in whole.values() for name in row}
        columns |= {
            "uid": [str(rollout.task.uid) for _, rollout in given],
            "index": [_index(whole[k], k) for k, _ in given],
            "data_source": [rollout.task.source for _, rollout in given],
        }
        return PlayedBatch(
            {
                **dict.fromkeys(("token_level_scores", "token_level_rewards", "rm_scores"), scores),
                "responses": _filled(replies, scores.shape[1]),
                "response_mask": _filled(masks, scores.shape[1]),
            },
            {name: _objects(values) for name, values in columns.items()},
        )


_TENSOR = "torch.Tensor"
"""Marks a tensor in a state, such as that of a generator."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64, torch.bool)
}


def _plain(value: Any) -> Any:
    """A state with its tensors as lists."""
    if isinstance(value, torch.Tensor) and (name := str(value.dtype).removeprefix("torch.")) in _DTYPES:
        return {_TENSOR: value.tolist(), "dtype": name}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_TENSOR, "dtype"}:
        return torch.tensor(value[_TENSOR], dtype=_DTYPES[value["dtype"]])
    if isinstance(value, dict):
        return {key: _from_plain(each) for key, each in value.items()}
    return [_from_plain(each) for each in value] if isinstance(value, list) else value


def _index(row: Mapping[str, Json], k: int) -> Json:
    info = row.get("extra_info")
    return info["index"] if isinstance(info, dict) and "index" in info else k


def _filled(rows: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    out = torch.zeros(len(rows), width, dtype=torch.long)
    for filled, row in zip(out, rows):
        filled[: len(row)] = row
    return out


def _objects(values: Sequence[Json]) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out
