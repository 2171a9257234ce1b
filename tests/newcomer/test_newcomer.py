"""A first hour with whet in two tables: tasks with their visible results, and mistakes with their messages."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from newcomer import desk
from newcomer.mistakes import MISTAKES, Mistake
from newcomer.tasks import TASKS, Task


@pytest.fixture(scope="session")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("desk")
    desk.lay_out(folder)
    return folder


@pytest.fixture(autouse=True)
def _here(laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on a desk of its own."""
    shutil.copytree(laid_out, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.setenv("COLUMNS", "400")


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.name)
def test_a_task_ends_in_what_a_person_sees(task: Task) -> None:
    for name, text in task.files.items():
        Path(name).write_text(text)
    done = (
        [desk.whet_says(*shlex.split(line)) for line in task.do.splitlines()]
        if isinstance(task.do, str)
        else [desk.python_says(task.do)]
    )
    said, at = " ".join(text for _, text in done), 0
    assert [code for code, _ in done] == [0] * len(done), said
    for part in task.said:
        assert part in said[at:], f"{part!r} not in: {said[at:]}"
        at = said.index(part, at) + len(part)
    for expected in task.there:
        path, _, text = expected.partition(": ")
        assert Path(path).exists(), path
        assert not text or text in Path(path).read_text(), path


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_a_mistake_ends_in_the_message_that_a_person_needs(mistake: Mistake) -> None:
    for name, text in mistake.files.items():
        Path(name).write_text(text)
    if isinstance(mistake.do, str):
        code, said = desk.whet_says(*shlex.split(mistake.do))
    else:
        code, said = desk.python_says(mistake.do)
    assert code == mistake.code, said
    assert "Traceback" not in said.replace("reward 'right': Traceback", ""), (
        said
    )  # but of the user's function
    missing = [part for part in mistake.said if part not in said]
    assert not missing, f"{missing} not in: {said}"


def test_there_are_forty_tasks_and_sixty_mistakes_and_no_name_twice() -> None:
    for table, least in ((TASKS, 40), (MISTAKES, 60)):
        names = [row.name for row in table]
        assert len(names) == len(set(names)) >= least
