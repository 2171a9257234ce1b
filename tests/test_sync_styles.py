"""When weights are exchanged: the four styles, by hand and in simulation; and what the section cannot mean."""

from __future__ import annotations

import random

import pytest

from whet.config.checks_sync import sync_problems
from whet.config.parts.sync import Sync
from whet.sync.styles import (
    Explorer,
    Schedule,
    Style,
    Take,
    explorer_takes,
    oldest,
    trainer_publishes,
    trainer_waits,
)


def test_fixed_by_hand() -> None:
    """every 2, offset 1: the explorer waits after steps 3, 5, 7 for versions 2, 4, 6."""
    schedule = Schedule("fixed", every=2, offset=1)
    taken = {e: explorer_takes(schedule, Explorer(step=e)) for e in range(1, 8)}
    assert taken == {1: None, 2: None, 3: Take(2, True), 4: None, 5: Take(4, True), 6: None, 7: Take(6, True)}
    assert explorer_takes(schedule, Explorer(step=3, synced_at=3)) is None  # once is enough
    published = [v for v in range(7) if trainer_publishes(schedule, version=v, published=v - 1)]
    assert published == [0, 2, 4, 6]
    assert not trainer_publishes(schedule, version=4, published=4)


def test_explorer_driven_by_hand() -> None:
    schedule = Schedule("explorer_driven", every=3)
    assert explorer_takes(schedule, Explorer(step=5, synced_at=3, version=2)) is None
    assert explorer_takes(schedule, Explorer(step=6, synced_at=3, version=2)) == Take(
        2, waits=True, asks=True
    )
    assert trainer_publishes(schedule, version=4, published=2, asked=True)
    assert not trainer_publishes(schedule, version=4, published=2)
    assert not trainer_publishes(
        schedule, version=4, published=4, asked=True
    )  # an answer, but nothing to send


@pytest.mark.parametrize(("style", "finish"), [("trainer_driven", True), ("fully_async", False)])
def test_who_is_driven_by_the_trainer_takes_what_there_is(style: Style, finish: bool) -> None:
    schedule = Schedule(style, every=3)
    assert explorer_takes(schedule, Explorer(step=4, synced_at=3, version=3)) == Take(4, False, finish=finish)
    assert [v for v in range(1, 8) if trainer_publishes(schedule, version=v, published=0)] == [3, 6]
    assert not trainer_waits(schedule)


@pytest.mark.parametrize("style", ["fixed", "explorer_driven", "trainer_driven", "fully_async"])
@pytest.mark.parametrize("trial", range(20))
def test_nobody_waits_for_ever_and_nothing_is_older_than_said(style: Style, trial: int) -> None:
    draw = random.Random(trial)
    offset = draw.randrange(4) if style == "fixed" else 0
    schedule = Schedule(style, every=draw.randrange(1, 5), offset=offset)
    queue: list[int] = []  # the version of each step's rollouts, oldest first
    explorer, version, published, ages, versions = Explorer(step=0), 0, 0, [], [0]
    waiting: Take | None = None
    for _ in range(4000):
        if version == 30:
            break
        if draw.random() < 0.5 and waiting is None and len(queue) < 8:
            queue.append(explorer.version)
            explorer = Explorer(explorer.step + 1, explorer.synced_at, explorer.version)
            waiting = explorer_takes(schedule, explorer)
        elif draw.random() < 0.5 and queue:
            ages.append(version - queue.pop(0))
            version += 1
        asked = waiting is not None and waiting.asks
        if trainer_publishes(schedule, version=version, published=published, asked=asked):
            published = version
        if waiting is not None and (published >= waiting.version or not waiting.waits):
            if published >= waiting.version:
                explorer = Explorer(explorer.step, explorer.step, published)
                versions.append(published)
            waiting = None
    assert version == 30, "both wait for each other"
    assert versions == sorted(versions)
    assert len(set(versions)) > 3
    bound = oldest(schedule)
    assert bound is None or max(ages) <= bound


def test_the_bound_of_fixed_is_reached() -> None:
    """An explorer as far ahead as it may be: every 3, offset 2, so its step 5 + 3 n is the first under version 3 n."""
    schedule = Schedule("fixed", every=3, offset=2)
    ages, held = [], 0
    for step in range(1, 20):
        ages.append(step - 1 - held)  # trained on after step - 1 versions
        take = explorer_takes(schedule, Explorer(step=step))
        held = take.version if take else held
    assert max(ages) == oldest(schedule) == 4


def problems(apart: bool = True, cuda: bool = False, lora: bool = False, **values: object) -> set[str]:
    sync = Sync.model_validate(values)
    return {key for key, _ in sync_problems(sync, apart=apart, cuda=cuda, lora=lora, colocated=True)}


def test_what_the_section_cannot_mean_is_told() -> None:
    assert problems(apart=False) == set()
    assert problems(method="files", keep=3, content="delta", style="trainer_driven") == set()
    assert problems() == {"sync.method"}  # memory, between processes
    assert problems(apart=False, method="files") == {"sync.method"}
    assert problems(method="ipc") == {"sync.method"}
    assert problems(method="ipc", cuda=True) == set()
    assert problems(method="ipc", cuda=True, dtype="bfloat16") == {"sync.dtype"}
    assert problems(method="files", content="lora") == {"sync.content"}
    assert problems(method="files", content="lora", lora=True) == set()
    assert problems(method="files", content="lora", lora=True, dtype="bfloat16") == {"sync.dtype"}
    assert problems(method="files", style="fully_async", offset=1) == {"sync.offset"}
    assert problems(method="collective", style="explorer_driven") == {"sync.style"}
